"""Means of an evaluation over hand-made samples."""

import pytest

from train.evaluation_metrics import PromptScore, TurnScore, evaluation_metrics, failures_of

NAN = float("nan")


def turn(reward, declines=False, error=None):
    return TurnScore(reward, reward / 2, 1.0 if reward == 1 else 0.0, 10, declines, error)


SCORES = [
    PromptScore("colors", (turn(0.0), turn(1.0), turn(1.0, declines=True))),
    PromptScore("colors", (turn(1.0), turn(0.0), turn(0.0))),
    PromptScore("counting", (turn(1.0), turn(1.0, declines=True))),
    PromptScore("counting", (turn(1.0), turn(NAN, error="lost"), turn(0.0))),
]


def test_stopped_samples_keep_their_last_numbers():
    metrics = evaluation_metrics(SCORES, num_rounds=3)
    assert metrics["eval/reward"] == 0.5 and metrics["eval/score"] == 0.25
    assert metrics["eval/tag/colors"] == metrics["eval/tag/counting"] == 0.5
    assert [metrics[f"eval/round{i}/reward"] for i in range(3)] == [0.75, pytest.approx(2 / 3), 0.5]
    assert metrics["eval/round1/finished"] == 0.25 and metrics["eval/round2/finished"] == 0.5
    assert "eval/round0/finished" not in metrics and "eval/round0/improved" not in metrics


def test_changes_are_counted_where_both_rewards_are_known():
    metrics = evaluation_metrics(SCORES, num_rounds=3)
    names = ("improved", "worse", "unchanged")
    assert [metrics[f"eval/round1/{name}"] for name in names] == pytest.approx([1 / 3] * 3)
    assert [metrics[f"eval/round2/{name}"] for name in names] == [0.0, 0.0, 1.0]


def test_format_and_length_are_means_over_turns():
    metrics = evaluation_metrics(SCORES, num_rounds=3)
    assert metrics["eval/format"] == pytest.approx(6 / 11)
    assert metrics["eval/thought_tokens"] == 10
    assert metrics["eval/num_prompts"] == 4


def test_a_failure_is_counted_once_even_if_the_sample_then_stops():
    lost = PromptScore("colors", (turn(NAN, error="lost"), turn(NAN, True, "lost")))
    assert failures_of([lost]) == ["lost"]
    metrics = evaluation_metrics([lost], num_rounds=2)
    assert metrics["eval/failures"] == 1
    assert not {"eval/reward", "eval/tag/colors", "eval/round1/improved"} & set(metrics)
