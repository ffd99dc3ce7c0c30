"""Totals and advantages by hand, and as the recorded runs had them."""

import math

import pytest
import torch
from PIL import Image
from torch import Tensor

from data.geneval import parse_prompt
from modeling.bagel.text_decode import DecodedText
from tests.tiny import trace
from train.advantages import Advantages, compute_advantages
from train.records import BufferEntry, Rollout, Sample, Stage

PROMPT = parse_prompt(
    {"tag": "colors", "include": [{"class": "cat", "count": 1}], "prompt": "a cat"}, "test"
)
PICTURE = Image.new("RGB", (4, 4))
EDIT, NO_EDIT = "make it red", "Then NO further Edit needed."


def rollout(
    formats: list[float], operations: list[str] | None = None, previous: float | None = None
) -> Rollout:
    operations = operations or [""] * len(formats)
    samples = [
        Sample(DecodedText((), ()), "", f, operation, PICTURE)
        for f, operation in zip(formats, operations, strict=True)
    ]
    if previous is None:
        return Rollout(Stage.GENERATE, PROMPT, samples, None, None)
    entry = BufferEntry(PROMPT, previous, PICTURE)
    return Rollout(Stage.REFINE, PROMPT, samples, None, None, entry)


def alone(local: Tensor) -> Tensor:
    """The group mean of a single rank."""
    return local[:, 0]


def advantages(
    rolled: Rollout, scores: list[float], valid: list[bool] | None = None, weight: float = 1.0
) -> Advantages:
    return compute_advantages(rolled, scores, valid or [True] * len(scores), weight, alone)


def assert_values(tensor: Tensor, expected: list[float]) -> None:
    assert tensor.dtype == torch.float32
    assert tensor.tolist() == pytest.approx(expected, abs=1e-6)


def test_generate_multiplies_by_the_format():
    got = advantages(rollout([1.0, 0.0, 1.0]), [0.5, 0.9, -0.1], weight=2.0)
    assert got.totals == [0.5 + 2.0, 0.0, -0.1 + 2.0]
    mean = (2.5 + 0.0 + 1.9) / 3
    assert_values(got.text, [2.5 - mean, -mean, 1.9 - mean])
    mean = (0.5 + 0.9 - 0.1) / 3
    assert_values(got.image, [0.5 - mean, 0.9 - mean, -0.1 - mean])


def test_refine_rewards_the_rise():
    got = advantages(rollout([1.0, 0.0], [EDIT, EDIT], previous=0.25), [0.75, 0.5], weight=2.0)
    assert got.totals == [2.0 + 0.5, 0.0]
    assert_values(got.text, [1.25, -1.25])
    assert_values(got.image, [0.125, -0.125])


def test_declining_to_edit_takes_no_part_in_the_image_loss_but_in_its_mean():
    got = advantages(rollout([1.0, 1.0], [NO_EDIT, EDIT], previous=0.25), [0.25, 0.75])
    assert got.totals == [1.0, 1.5]
    assert_values(got.image, [0.0, 0.25])
    assert math.copysign(1, got.image[0].item()) == -1  # times 0, not replaced by 0


def test_a_perfect_picture_rightly_left_alone_gains_one():
    got = advantages(
        rollout([1.0, 1.0, 0.0], [NO_EDIT, EDIT, NO_EDIT], previous=1.0), [1.0, 1.0, 1.0]
    )
    assert got.totals == [2.0, 1.0, 0.0]


@pytest.mark.parametrize("previous", [0.9999999, 1.0000001])
def test_perfect_means_exactly_one(previous):
    got = advantages(rollout([1.0], [NO_EDIT], previous=previous), [previous])
    assert got.totals == [1.0]


def test_totals_are_formed_in_double_precision():
    got = advantages(rollout([1.0], [EDIT], previous=0.3), [0.7])
    assert got.totals == [1.0 + (0.7 - 0.3)]


def test_a_sample_without_reward_has_no_advantage_and_no_share_in_means():
    nan = float("nan")
    got = advantages(rollout([1.0, 1.0, 1.0]), [0.5, nan, 0.1], [True, False, True])
    assert got.totals == [1.5, 0.0, 1.1]
    assert_values(got.text, [0.2, 0.0, -0.2])
    assert_values(got.image, [0.2, 0.0, -0.2])


def test_a_rank_without_rewards_weighs_nothing():
    seen = []

    def record(local: Tensor) -> Tensor:
        seen.append(local)
        return torch.tensor([3.0, 0.4])

    got = compute_advantages(rollout([1.0, 1.0]), [float("nan")] * 2, [False] * 2, 1.0, record)
    assert torch.equal(seen[0], torch.zeros(2, 2))
    assert got.text.tolist() == got.image.tolist() == [0.0, 0.0]
    compute_advantages(rollout([1.0, 0.0]), [0.5, 0.7], [True, True], 1.0, record)
    torch.testing.assert_close(seen[1], torch.tensor([[0.75, 1.0], [0.6, 1.0]]))


@pytest.mark.parametrize("name", ["trace_upstream", "trace_upstream_edges"])
def test_advantages_of_recorded_steps(name):
    for step in range(6):
        records = [steps[step] for steps in trace(name).ranks]
        scores = [[value for (value,) in record["rewards"]] for record in records]
        rolled = [recorded_rollout(name, step, record) for record in records]
        locals_: list[Tensor] = []

        def collect(local: Tensor, seen: list[Tensor] = locals_) -> Tensor:
            seen.append(local)
            return local[:, 0]

        for rank_rollout, rank_scores in zip(rolled, scores, strict=True):
            compute_advantages(rank_rollout, rank_scores, [True] * len(rank_scores), 1.0, collect)
        mean = torch.stack(locals_).mean(0)[:, 0]
        for rank_rollout, rank_scores, record in zip(rolled, scores, records, strict=True):
            valid = [True] * len(rank_scores)
            got = compute_advantages(rank_rollout, rank_scores, valid, 1.0, lambda _, m=mean: m)
            assert [[total] for total in got.totals] == record["total_rewards"]
            for mine, key in ((got.text, "text"), (got.image, "image")):
                theirs = [value for (value,) in record[f"{key}_advantages"]]
                assert mine.tolist() == pytest.approx(theirs, abs=1e-7), (step, key)


def recorded_rollout(name: str, step: int, record: dict) -> Rollout:
    """Only what advantages read; the entry's score is inferred from a recorded total."""
    formats = [value for (value,) in record["format_rewards"]]
    if step % 2 == 0:
        return rollout(formats)
    rows = zip(
        record["rewards"],
        record["total_rewards"],
        formats,
        record["edit_operations"],
        strict=True,
    )
    # A declined edit of a perfect picture does not tell the rise, so another row is better.
    rises = [
        ("no further edit" in operation.lower(), score - (total - 1.0))
        for (score,), (total,), f, operation in rows
        if f == 1
    ]
    previous = min(rises)[1]
    scores = [
        value for steps in trace(name).ranks for (value,) in steps[step - 1]["rewards"]
    ]
    exact = min(scores, key=lambda score: abs(score - previous))
    assert abs(exact - previous) < 1e-8
    return rollout(formats, record["edit_operations"], exact)
