"""Whole steps on the tiny checkpoint in a world of one: drift, reward failures, the buffer."""

import logging
from collections.abc import Iterator
from concurrent.futures import Future

import numpy as np
import pytest
import torch
from PIL import Image

from data.geneval import read_prompts
from modeling.bagel.bagel import EagerStack
from modeling.bagel.context import Stacks
from modeling.bagel.execution import Execution
from modeling.bagel.graph_capture import GraphCapture
from modeling.bagel.static_encoder_graph import EncoderGraphs
from modeling.bagel.static_prefix_graph import PrefixGraphs
from modeling.bagel.static_text_graph import TextGraphs
from tests.fake_graph import FakeBackend
from tests.tiny import PARITY, one_rank, tiny_config
from train.assembly import assemble
from train.dist import ProcessContext
from train.metrics import PhaseTimer
from train.records import Stage
from train.reward_results import RewardResult, failed_result
from train.trainer import StepError, StepReport, Trainer


class FakeRewards:
    """Scores by the mean of red; the calls named in `failing` fail on their last sample."""

    def __init__(self, failing: tuple[int, ...] = (), perfect: bool = False):
        self.failing = failing
        self.perfect = perfect
        self.sent: list[list[dict]] = []

    def submit(self, images: list[Image.Image], metadata: list[dict]) -> list[Future]:
        call = len(self.sent)
        self.sent.append(metadata)
        futures = []
        for i, image in enumerate(images):
            score = 1.0 if self.perfect else float(np.asarray(image)[..., 0].mean() / 255)
            result = RewardResult(score, score, score, 0.0, 0, None)
            if call in self.failing and i == len(images) - 1:
                result = failed_result("the server is gone", 0.1, 3, False)
            future: Future = Future()
            future.set_result(result)
            futures.append(future)
        return futures

    def close(self) -> None:
        """Nothing is open."""


@pytest.fixture(scope="module")
def context() -> Iterator[ProcessContext]:
    with one_rank() as alone:
        yield alone


def trainer(context: ProcessContext, rewards: FakeRewards, **flags: object) -> Trainer:
    """Three samples a step at learning rate 0, unless flags say otherwise."""
    settings = {"group_size": 3, "policy_group_size": 1, "num_shard": 1, "lr": 0.0}
    config = tiny_config("trace_consistent", **{**settings, **flags})
    return Trainer(assemble(config, context, rewards, PhaseTimer()), context)


def drift(report: StepReport) -> tuple[float, float]:
    """Largest |log ratio| of text and images."""
    loss = report.loss
    return loss.text_log_ratio.abs().max().item(), loss.image_log_ratio.abs().max().item()


@pytest.fixture(scope="module")
def consistent(context) -> tuple[Trainer, list[StepReport], FakeRewards]:
    rewards = FakeRewards()
    runner = trainer(context, rewards)
    return runner, [runner.run_step(step) for step in range(2)], rewards


def test_consistent_recipe_does_not_drift(consistent):
    _, reports, _ = consistent
    assert [r.rollout.stage for r in reports] == [Stage.GENERATE, Stage.REFINE]
    for report in reports:
        assert report.loss.text_log_ratio.numel() > 10
        assert report.loss.image_log_ratio.numel() == 3
        assert max(drift(report)) < 1e-5
        assert report.loss.text_kl.item() < 1e-6
        assert report.loss.image_kl.item() == 0


def test_upstream_recipe_drifts_in_images(context):
    runner = trainer(context, FakeRewards(), r3_recipe="upstream")
    for report in (runner.run_step(step) for step in range(2)):
        text, image = drift(report)
        assert text < 1e-5  # in fp32
        assert image > 1e-3


def test_a_step_reports_what_it_did(consistent):
    runner, reports, rewards = consistent
    prompts = read_prompts(PARITY / "prompts40.jsonl")
    generate, refine = reports
    assert generate.rollout.prompt == prompts[runner.parts.sampler.index_for(0, 0)]
    assert rewards.sent == [[r.rollout.prompt.raw] * 3 for r in reports]
    entry = refine.rollout.entry
    pairs = zip(generate.rewards, generate.rollout.samples, strict=True)
    drawn = [(r.score, np.asarray(s.picture).tobytes()) for r, s in pairs]
    assert (entry.score, np.asarray(entry.picture).tobytes()) in drawn
    assert entry.prompt.raw == generate.rollout.prompt.raw
    for report in reports:
        assert report.grad_norm > 0
        phases = ("rollout", "pack", "forward", "rewards", "backward", "optimizer")
        seconds = [report.phase_seconds[f"time/{phase}"] for phase in phases]
        assert min(seconds) > 0
        assert 0.5 * report.seconds < sum(seconds) <= report.seconds
    assert [(r.learning_rate, r.next_learning_rate) for r in reports] == [(0.0, 0.0)] * 2


def test_learning_rate_zero_moves_nothing_and_the_next_one_does(context):
    runner = trainer(context, FakeRewards(), lr=1e-3, warmup_steps=2)
    before = {n: p.full_tensor().clone() for n, p in runner.policy.named_parameters()}
    report = runner.run_step(0)
    assert (report.learning_rate, report.next_learning_rate) == (0.0, 5e-4)
    for name, param in runner.policy.named_parameters():
        assert torch.equal(param.full_tensor(), before[name]), name
    runner.run_step(1)
    after = dict(runner.policy.named_parameters())
    moved = {n for n, param in after.items() if not torch.equal(param.full_tensor(), before[n])}
    frozen = {n for n in before if n.startswith("vit_model") or n.endswith("pos_embed")}
    assert frozen == {n for n, param in after.items() if not param.requires_grad}
    assert len(moved & frozen) == 0
    assert len(moved) > 0.9 * (len(before) - len(frozen))
    for name, param in runner.parts.reference.named_parameters():
        assert torch.equal(param.full_tensor(), before[name]), name


def test_failed_rewards_abort_the_step(context):
    runner = trainer(context, FakeRewards(failing=(0,)), reward_outage="abort")
    message = "no rewards for this step: rank 0: RewardOutageError.*the server is gone"
    with pytest.raises(StepError, match=message):
        runner.run_step(0)


def test_skipped_rewards_leave_their_sample_out(context):
    runner = trainer(context, FakeRewards(failing=(0,)), reward_outage="skip")
    report = runner.run_step(0)
    assert [r.error is None for r in report.rewards] == [True, True, False]
    assert report.advantages.text[2] == report.advantages.image[2] == 0
    scores = [r.score for r in report.rewards[:2]]
    expected = [(scores[0] - scores[1]) / 2, (scores[1] - scores[0]) / 2]
    assert report.advantages.image[:2].tolist() == pytest.approx(expected, abs=1e-6)
    assert [e.score for e in runner.parts.buffer.rest] == scores
    assert torch.isfinite(report.loss.loss)
    assert report.packed.label_samples.max() == 2  # it stays in the counts


def test_an_empty_buffer_falls_back_to_generating(context, caplog):
    runner = trainer(context, FakeRewards(), group_size=2)
    with caplog.at_level(logging.WARNING, logger="faster_r3"):
        report = runner.run_step(1)
    assert report.rollout.stage is Stage.GENERATE
    assert "step 1: the refine buffer is empty, generating instead" in caplog.text
    assert len(runner.parts.buffer) == 2
    assert runner.stage_of(3) is Stage.REFINE


def test_perfect_pictures_are_kept_apart(context):
    runner = trainer(context, FakeRewards(perfect=True), group_size=2)
    runner.run_step(0)
    assert (len(runner.parts.buffer.perfect), len(runner.parts.buffer.rest)) == (2, 0)


@pytest.mark.parametrize(
    "flags",
    [
        {"tune_image_cot": False},
        {"enable_sde_gen": False, "enable_sde_edit": False},
        {"tune_text_cot": False},
        {"cfg_text_scale": 1.0, "cfg_img_scale": 1.0},
        {"freeze_und": True, "activation_checkpointing": False},
    ],
)
def test_other_settings_train_without_drift(context, flags):
    runner = trainer(context, FakeRewards(), **flags)
    for report in (runner.run_step(step) for step in range(2)):
        has_images = "tune_image_cot" not in flags and "enable_sde_gen" not in flags
        assert (report.loss.image_log_ratio.numel() > 0) == has_images
        has_text = "tune_text_cot" not in flags
        assert (report.loss.text_log_ratio.numel() > 0) == has_text
        for ratios in (report.loss.text_log_ratio, report.loss.image_log_ratio):
            assert (ratios.abs() < 1e-5).all()
        # At no drift the gradient comes of the advantages alone; equal rewards have none.
        gains = report.advantages
        has_gain = (has_text and gains.text.any()) or (has_images and gains.image.any())
        assert (report.grad_norm > 0) == bool(has_gain)


def test_drawing_without_thinking_does_not_drift(context):
    report = trainer(context, FakeRewards(), think_mode=False).run_step(0)
    assert report.loss.text_log_ratio.numel() == 0
    assert report.loss.image_log_ratio.numel() == 3
    assert drift_of_images(report) < 1e-5
    assert report.grad_norm > 0


def drift_of_images(report: StepReport) -> float:
    return report.loss.image_log_ratio.abs().max().item()


def captured_execution(backend: FakeBackend) -> Execution:
    capture, stack = GraphCapture(backend), EagerStack()
    prefix, encoders = PrefixGraphs(stack, capture), EncoderGraphs(capture)
    return Execution(Stacks(stack, stack), TextGraphs(capture), True, capture, prefix, encoders)


def assert_same_steps(eager: StepReport, captured: StepReport) -> None:
    thoughts = ([s.thought.ids for s in r.rollout.samples] for r in (eager, captured))
    assert next(thoughts) == next(thoughts)
    assert torch.equal(eager.rollout.flow.after, captured.rollout.flow.after)
    assert eager.loss.loss.item() == pytest.approx(captured.loss.loss.item(), rel=1e-5)
    assert eager.grad_norm == pytest.approx(captured.grad_norm, rel=1e-5)


def test_captured_rollouts_train_like_eager_ones(context):
    """Graphs over sharded weights: gathered and freed between steps, so captured anew in each."""
    reports: dict[str, list[StepReport]] = {}
    for mode in ("eager", "captured"):
        runner = trainer(context, FakeRewards(), lr=1e-3, warmup_steps=0)
        backend = FakeBackend()
        if mode == "captured":
            runner.parts.controller.execution = captured_execution(backend)
        reports[mode] = [runner.run_step(step) for step in range(4)]
    for eager, captured in zip(*reports.values(), strict=True):
        assert_same_steps(eager, captured)
        assert captured.graph_counters["graphs/fallen_back"] == 0
    assert backend.replays > 20 and backend.captures >= 4
    assert eager.graph_counters == {}


def test_text_graphs_outlive_a_step(context):
    """Every step after the first two replays its text turns; moved weights cost a capture each."""
    runner = trainer(context, FakeRewards(), lr=1e-3, warmup_steps=0)
    backend = FakeBackend()
    capture = GraphCapture(backend)
    graphs = TextGraphs(capture)
    runner.parts.controller.execution = Execution(text_graphs=graphs, capture=capture)
    replays, kept = [], None
    for step in range(6):
        before = backend.replays
        report = runner.run_step(step)
        replays.append(backend.replays - before)
        turns = max(len(sample.thought.ids) for sample in report.rollout.samples)
        if step == 3:
            kept = graphs.memory.spec, capture.counters.captured
        if step > 3:
            assert turns - replays[-1] <= 1  # eager: a number of samples that never came before
    counters = capture.counters
    assert kept[0] == graphs.memory.spec
    assert counters.captured <= 3  # one for each number of samples, generate and refine alike
    assert counters.captured + counters.recaptured == backend.captures
    assert graphs.memory.lent is None and counters.fallen_back == 0


def test_a_broken_rollout_does_not_reach_the_next_one(context):
    reports = {}
    for mode in ("eager", "captured"):
        runner = trainer(context, FakeRewards())
        if mode == "captured":
            runner.parts.controller.execution = captured_execution(FakeBackend())

        def broken(name: str, value: object) -> None:
            if name.startswith("flow1"):
                raise InterruptedError("in the middle of a flow")

        probe, runner.parts.controller.probe = runner.parts.controller.probe, broken
        with pytest.raises(InterruptedError) as caught:
            runner.run_step(0)
        runner.parts.controller.probe = probe
        reports[mode] = [runner.run_step(step) for step in range(1, 3)]
        assert caught.tb is not None  # its frames hold on to the contexts until here
    for eager, captured in zip(*reports.values(), strict=True):
        assert_same_steps(eager, captured)
