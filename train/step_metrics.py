"""Figures of a finished step, gathered over ranks into one flat record, and its report cards."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from train.dist import ProcessContext, gather_from_all
from train.metrics import (
    peak_memory_gib,
    ratio_metrics,
    reward_metrics,
    reward_service_metrics,
)
from train.reports import RolloutCard
from train.trainer import StepReport

NAN = math.nan


@dataclass(frozen=True)
class RankFigures:
    """What one rank contributes; small host objects only."""

    tag: str
    scores: list[float]
    format_rewards: list[float]
    thought_lengths: list[int]
    losses: dict[str, float]
    text_log_ratio: Tensor
    image_log_ratio: Tensor
    latencies_s: list[float]
    num_retries: int
    num_failures: int
    num_packed_tokens: int
    peak_gib: float


def rank_figures(report: StepReport, device: torch.device) -> RankFigures:
    """This rank's part of the step's metrics."""
    loss, samples = report.loss, report.rollout.samples
    return RankFigures(
        tag=report.rollout.prompt.tag,
        scores=[reward.score for reward in report.rewards],
        format_rewards=[sample.format_reward for sample in samples],
        thought_lengths=[len(sample.thought.ids) for sample in samples],
        losses={
            "loss/total": loss.loss.item(),
            "loss/text_policy": loss.text_policy.item(),
            "loss/image_policy": loss.image_policy.item(),
            "loss/text_kl": loss.text_kl.item(),
            "loss/image_kl": loss.image_kl.item(),
        },
        text_log_ratio=loss.text_log_ratio.cpu(),
        image_log_ratio=loss.image_log_ratio.cpu(),
        latencies_s=[reward.latency_s for reward in report.rewards],
        num_retries=sum(reward.retries for reward in report.rewards),
        num_failures=sum(reward.error is not None for reward in report.rewards),
        num_packed_tokens=report.num_tokens,
        peak_gib=peak_memory_gib(device),
    )


def step_metrics(report: StepReport, context: ProcessContext) -> dict[str, float | str]:
    """Metrics of the step over all ranks, under their names in metrics.jsonl."""
    ranks = gather_from_all(context, rank_figures(report, context.device))
    scores = [score for rank in ranks for score in rank.scores]
    formats = [value for rank in ranks for value in rank.format_rewards]
    tags = [rank.tag for rank in ranks for _ in rank.scores]
    lengths = [length for rank in ranks for length in rank.thought_lengths]
    values: dict[str, float | str] = {"stage": report.rollout.stage.value}
    values |= reward_metrics(scores, formats, tags)
    for name in ranks[0].losses:
        values[name] = sum(rank.losses[name] for rank in ranks) / len(ranks)
    values |= ratio_metrics("text", torch.cat([rank.text_log_ratio for rank in ranks]))
    values |= ratio_metrics("image", torch.cat([rank.image_log_ratio for rank in ranks]))
    values["optim/grad_norm"] = report.grad_norm
    values["optim/lr"] = report.learning_rate
    values["time/step"] = report.seconds
    values |= report.phase_seconds
    values["tokens/packed"] = sum(rank.num_packed_tokens for rank in ranks)
    values["tokens/decoded"] = sum(lengths)
    values["tokens/thought_mean"] = sum(lengths) / len(lengths)
    values |= report.graph_counters
    values["memory/peak_gib"] = max(rank.peak_gib for rank in ranks)
    latencies = [latency for rank in ranks for latency in rank.latencies_s]
    retries = sum(rank.num_retries for rank in ranks)
    values |= reward_service_metrics(latencies, retries, sum(rank.num_failures for rank in ranks))
    return values


def report_cards(report: StepReport) -> list[RolloutCard]:
    """This rank's samples as the HTML report shows them."""
    rollout, advantages = report.rollout, report.advantages
    return [
        RolloutCard(
            prompt=rollout.prompt.prompt,
            tag=rollout.prompt.tag,
            thought=sample.text,
            operation=sample.operation,
            input_image=None if rollout.entry is None else rollout.entry.picture,
            image=sample.picture,
            score=reward.score,
            format_reward=sample.format_reward,
            total=advantages.totals[i] if reward.error is None else NAN,
            text_advantage=advantages.text[i].item(),
            image_advantage=advantages.image[i].item(),
            note=reward.error or "",
        )
        for i, (sample, reward) in enumerate(zip(rollout.samples, report.rewards, strict=True))
    ]
