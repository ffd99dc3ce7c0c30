"""Steps on two ranks against reward services that misbehave: each ends as documented, in time."""

import math

import pytest

from tests.train.outage_world import DEADLINE_S, DOWN_S, Case, run_cases

SLACK_S = 4.0  # two busy cores
CASES = {
    "good": Case("good", "abort"),
    "404 abort": Case("404", "abort", ranks=(1,)),
    "502 abort": Case("502", "abort"),
    "500 skip": Case("500", "skip", ranks=(1,)),
    "truncated abort": Case("truncated", "abort", ranks=(1,)),
    "malicious abort": Case("malicious", "abort"),
    "one short skip": Case("one_short", "skip", ranks=(0,)),
    "NaN skip": Case("nan", "skip"),
    "refine": Case("good", "abort", step=1),
    "hang abort": Case("hang", "abort", ranks=(1,)),
    "hang skip": Case("hang", "skip", ranks=(0,)),
    "reset abort": Case("reset", "abort"),
    "slow start wait": Case("slow_start", "wait", ranks=(1,)),
    "two addresses abort": Case("one_of_two_dies", "abort"),
}


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """What both ranks saw, by case, and the folder that no pickle may make."""
    out = tmp_path_factory.mktemp("outages")
    return run_cases(CASES, out), out / "forbidden"


def of(world, name):
    ranks, _ = world
    return [seen[name] for seen in ranks]


@pytest.mark.parametrize(
    ("name", "words", "is_passing"),
    [
        ("404 abort", ("rank 1: ", "HTTP 404", "<html>Nothing here"), False),
        ("502 abort", ("rank 0: ", "2 of 2 rewards did not come", "HTTP 502", "<html>"), True),
        ("truncated abort", ("rank 1: ", "RewardAnswerError", "not a complete pickle"), False),
        ("malicious abort", ("rank 0: ", "RewardAnswerError", "not plain data"), False),
        ("hang abort", ("rank 1: ", "2 of 2 rewards did not come within 2 s"), True),
    ],
)
def test_abort_ends_the_step_on_both_ranks_with_one_error(world, name, words, is_passing):
    first, second = of(world, name)
    assert first["error"] == second["error"]
    assert first["error"].startswith(f"no rewards for this step: {words[0]}RewardOutageError: ")
    for word in words:
        assert word in first["error"]
    for seen in (first, second):
        assert not seen["grads"], "the weights must be those of the checkpoint that follows"
        if is_passing:
            assert DEADLINE_S - 0.1 < seen["waited_s"] < DEADLINE_S + SLACK_S
        else:
            assert seen["waited_s"] < DEADLINE_S - 0.1


def test_no_pickle_runs_code(world):
    assert not world[1].exists()


@pytest.mark.parametrize(
    ("name", "bad_rank", "word"),
    [
        ("500 skip", 1, "KeyError: 'tag'"),
        ("one short skip", 0, "'scores' has 0 entries for 1 images"),
        ("hang skip", 0, "within"),
    ],
)
def test_skip_leaves_the_samples_of_a_rank_out(world, name, bad_rank, word):
    ranks = of(world, name)
    bad, good = ranks[bad_rank], ranks[1 - bad_rank]
    assert bad["error"] is good["error"] is None
    assert bad["failed"] == [True, True] and good["failed"] == [False, False]
    assert all(word in cause for cause in bad["causes"])
    assert bad["image"] == bad["text"] == [0.0, 0.0]
    mean = sum(good["scores"]) / 2
    assert good["image"] == pytest.approx([score - mean for score in good["scores"]], abs=1e-6)
    assert max(good["image"]) > 0.1
    good_scores = sorted(good["scores"])
    for seen in ranks:
        assert sorted(seen["buffer"]) == good_scores
        assert seen["num_images"] == 2 and seen["num_labels"] > 0, "they stay in the counts"
        assert math.isfinite(seen["loss"])
        assert seen["metrics"]["reward_service/failures"] == 2
        assert seen["metrics"]["reward/mean"] == pytest.approx(mean)
        assert seen["waited_s"] < DEADLINE_S + SLACK_S


def test_a_step_without_any_reward_goes_on_and_keeps_the_buffer(world):
    for rank, seen in enumerate(of(world, "NaN skip")):
        assert seen["failed"] == [True, True] and "'scores' holds nan" in seen["causes"][0]
        assert seen["image"] == seen["text"] == [0.0, 0.0] and math.isfinite(seen["loss"])
        assert seen["buffer"] == of(world, "one short skip")[rank]["buffer"] != []
        assert seen["metrics"]["reward_service/failures"] == 4
        assert "reward/mean" not in seen["metrics"] and "reward/format" in seen["metrics"]
    assert [seen["stage"] for seen in of(world, "refine")] == ["refine", "refine"]


def test_a_reset_in_mid_answer_costs_one_retry_a_rank(world):
    for seen in of(world, "reset abort"):
        assert seen["failed"] == [False, False]
        assert seen["metrics"]["reward_service/retries"] == 2
        assert seen["waited_s"] < DEADLINE_S


def test_a_slow_start_holds_both_ranks(world):
    for seen in of(world, "slow start wait"):
        assert seen["failed"] == [False, False]
        metrics = seen["metrics"]
        assert metrics["reward_service/failures"] == 0 and metrics["reward_service/retries"] > 4
        assert metrics["reward_service/latency_p99_s"] > DOWN_S - 0.1
        assert seen["seconds"] > seen["waited_s"] > 0


def test_one_of_two_addresses_may_die(world):
    for seen in of(world, "two addresses abort"):
        assert seen["failed"] == [False, False]
        assert 2 <= seen["metrics"]["reward_service/retries"] <= 4
        assert seen["waited_s"] < DEADLINE_S


def test_a_good_service_is_not_an_outage(world):
    for name in ("good", "refine"):
        for seen in of(world, name):
            assert seen["failed"] == [False, False] and math.isfinite(seen["loss"])
            assert seen["metrics"]["reward_service/retries"] == 0
