"""Rewards to totals to advantages (GRPO without division by the standard deviation)."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from train.records import Rollout, Stage

GroupMean = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Advantages:
    """Per sample of this rank: totals (double), and fp32 [B] advantages of text and image."""

    totals: list[float]
    text: Tensor
    image: Tensor


def total_reward(rollout: Rollout, index: int, score: float, format_weight: float) -> float:
    """The text reward of one sample, in double precision.

    Generate: `score * f + w * f` with format reward f. Refine: `w * f + gain * f` where gain is
    the score's rise over the input picture's, or 1 where a perfect input was rightly left alone.
    """
    sample = rollout.samples[index]
    f = sample.format_reward
    if rollout.stage is Stage.GENERATE:
        return score * f + format_weight * f
    previous = rollout.entry.score
    gain = 1.0 if previous == 1 and sample.declines_edit else score - previous
    return format_weight * f + gain * f


def compute_advantages(
    rollout: Rollout,
    scores: list[float],
    is_valid: list[bool],
    format_weight: float,
    group_mean: GroupMean,
) -> Advantages:
    """Advantages against the mean of the policy group.

    Args:
        rollout: the samples of this rank.
        scores: training signal of each sample; ignored where not valid.
        is_valid: false where the reward service gave nothing: advantage 0, left out of means.
        format_weight: w.
        group_mean: averages [2, 2] (rows text and image: this rank's fp32 mean, its weight) over
            the policy group and returns the two means, fp32 [2].
    """
    totals = [
        total_reward(rollout, i, score, format_weight) if ok else 0.0
        for i, (score, ok) in enumerate(zip(scores, is_valid, strict=True))
    ]
    valid = torch.tensor(is_valid)
    text = torch.tensor(totals, dtype=torch.float32)
    image = torch.tensor(
        [score if ok else 0.0 for score, ok in zip(scores, is_valid, strict=True)],
        dtype=torch.float32,
    )
    weight = torch.tensor(1.0 if bool(valid.any()) else 0.0)
    local = [v[valid].mean() if bool(valid.any()) else torch.tensor(0.0) for v in (text, image)]
    means = group_mean(torch.stack([torch.stack((mean, weight)) for mean in local]))
    edits = torch.tensor([0.0 if s.declines_edit else 1.0 for s in rollout.samples])
    keep = valid.float()
    return Advantages(
        totals=totals,
        text=(text - means[0]) * keep,
        image=(image - means[1]) * edits * keep,
    )
