"""Evaluation on the tiny checkpoint: rounds, stops, draws, failures, and uneven shares of ranks."""

import json
import math
from dataclasses import replace

import pytest
import torch

import train.rollout_controller as rollout_controller
from data.geneval import read_prompts
from tests.train.evaluation_world import (
    PROMPTS,
    ColourRewards,
    evaluate_on_ranks,
    is_sharded,
    tiny_config,
)
from train.assembly import assemble
from train.dist import LaunchInfo, start_processes, stop_processes
from train.evaluation import Evaluator, share_of
from train.metrics import PhaseTimer
from train.trainer import StepError

EDIT, STOP = "make it red", "No further edit needed."


@pytest.fixture(scope="module")
def world():
    """The parts and the context of a world of one."""
    torch.set_num_threads(1)
    config = tiny_config()
    context = start_processes(config.processes, config.rl.policy_group_size, LaunchInfo())
    yield assemble(config, context, ColourRewards(), PhaseTimer()), context
    stop_processes()


@pytest.fixture
def make(world):
    """Makes an evaluator with other flags and another reward source."""
    parts, context = world

    def with_flags(rewards=None, **flags):
        rewards = ColourRewards() if rewards is None else rewards
        return Evaluator(replace(parts, config=tiny_config(**flags), rewards=rewards), context)

    return with_flags


@pytest.fixture
def script(monkeypatch):
    """Dictates the edit operations, in the order in which they are asked for."""

    def dictate(operations):
        given = iter(operations)
        monkeypatch.setattr(rollout_controller, "edit_operation", lambda text: next(given))

    return dictate


def mean(values):
    return math.fsum(values) / len(values)


def without_time(metrics):
    return {name: value for name, value in metrics.items() if name != "eval/time_s"}


def test_a_run_draws_all_prompts_and_averages_what_the_service_says(make, script):
    script([EDIT] * 3)
    rewards = ColourRewards()
    report = make(rewards).run(step=0)
    assert rewards.calls == [2, 2, 1, 1]  # a batch of two, then one of one, two rounds each
    prompts = read_prompts(PROMPTS, limit=3)
    assert rewards.metadata == [prompts[i].raw for i in (0, 1, 0, 1, 2, 2)]
    drawn, refined = ([rewards.results[i] for i in numbers] for numbers in ((0, 1, 4), (2, 3, 5)))
    metrics = report.metrics
    assert metrics["eval/reward"] == mean([result.reward for result in refined])
    assert metrics["eval/score"] == mean([result.score for result in refined])
    assert metrics["eval/reward"] != metrics["eval/score"]
    assert metrics["eval/round0/reward"] == mean([result.reward for result in drawn])
    assert metrics["eval/round1/reward"] == metrics["eval/reward"]
    single = [r.reward for r, p in zip(refined, prompts, strict=True) if p.tag == "single_object"]
    assert metrics["eval/tag/single_object"] == mean(single)
    assert {name for name in metrics if "/tag/" in name} == {f"eval/tag/{p.tag}" for p in prompts}
    better = [b.reward > a.reward for a, b in zip(drawn, refined, strict=True)]
    assert metrics["eval/round1/improved"] == mean(better)
    assert metrics["eval/round1/worse"] == pytest.approx(1 - mean(better))
    assert metrics["eval/round1/unchanged"] == metrics["eval/round1/finished"] == 0
    assert metrics["eval/num_prompts"] == 3 and metrics["eval/failures"] == 0
    assert 0 <= metrics["eval/format"] <= 1 and 2 < metrics["eval/thought_tokens"] <= 33
    assert metrics["eval/time_s"] > 0


def test_an_evaluation_repeats_itself_whatever_ran_before(make, world):
    evaluator = make()
    first = evaluator.run(step=0)
    torch.manual_seed(7)
    torch.rand(3)
    world[0].streams.sample(3)
    second = evaluator.run(step=50)
    assert without_time(first.metrics) == without_time(second.metrics)
    pairs = list(zip(first.cards, second.cards, strict=True))
    assert pairs and all(a.image.tobytes() == b.image.tobytes() for a, b in pairs)
    other = make(eval_num_timesteps=4).run(step=0).metrics
    assert other["eval/reward"] != first.metrics["eval/reward"]


def test_draws_come_from_one_stream_a_batch(make, script, monkeypatch):
    """Noise of all rounds first, then text; seeds as the design states them for rank 0."""
    script([EDIT] * 3)
    evaluator, seen = make(), []
    for name in ("generate", "refine"):
        method = getattr(evaluator.controller, name)

        def watched(*args, name=name, method=method):
            draws = args[-1]
            # With the noise drawn, the stream stands before the batch's text.
            seen.append((name, len(args[0]), draws, draws.text.get_state()))
            return method(*args)

        monkeypatch.setattr(evaluator.controller, name, watched)
    evaluator.run(step=0)
    turns = [(name, size) for name, size, _, _ in seen]
    assert turns == [("generate", 2), ("refine", 2), ("generate", 1), ("refine", 1)]
    for first_turn, first_index in ((0, 0), (2, 2)):
        generator = torch.Generator().manual_seed((0 + 1) * (3 // 2 + 1) + first_index)
        for _, _, draws, _ in seen[first_turn : first_turn + 2]:
            assert torch.equal(draws.noise, torch.randn((16, 64), generator=generator))
            assert draws.stochastic is None
        assert torch.equal(seen[first_turn][3], generator.get_state())
    stages = evaluator.controller.config.generate, evaluator.controller.config.refine
    assert all(stage.flow.num_timesteps == 3 for stage in stages)
    assert all(stage.sampling.temperature == 0.3 for stage in stages)


def test_a_sample_that_says_stop_leaves_and_keeps_its_reward(make, script):
    # Round 1 of samples 0, 1, 2; round 2 of 0, 2; round 3 of 2.
    script([EDIT, STOP, EDIT, STOP, EDIT, EDIT])
    rewards = ColourRewards()
    report = make(rewards, eval_num_rounds=4, eval_batch_size=3).run(step=0)
    assert rewards.calls == [3, 2, 1, 1]
    rewarded, metrics = [result.reward for result in rewards.results], report.metrics
    held = [[0, 1, 2], [3, 1, 4], [3, 1, 5], [3, 1, 6]]
    for index, numbers in enumerate(held):
        assert metrics[f"eval/round{index}/reward"] == mean([rewarded[i] for i in numbers])
    assert metrics["eval/reward"] == metrics["eval/round3/reward"]
    finished = [metrics[f"eval/round{index}/finished"] for index in (1, 2, 3)]
    assert finished == pytest.approx([1 / 3, 2 / 3, 2 / 3])
    unchanged = [metrics[f"eval/round{index}/unchanged"] for index in (1, 2, 3)]
    assert unchanged == pytest.approx([1 / 3, 2 / 3, 2 / 3])


def test_once_all_have_stopped_nothing_more_is_drawn(make, script):
    script([STOP, STOP])
    rewards = ColourRewards()
    metrics = make(rewards, eval_num_rounds=4, eval_prompts=2).run(step=0).metrics
    assert rewards.calls == [2, 0]  # no third round, and pictures that stay are not scored again
    for index in (1, 2, 3):
        assert metrics[f"eval/round{index}/reward"] == metrics["eval/round0/reward"]
        assert metrics[f"eval/round{index}/finished"] == 1


def test_drawing_goes_on_while_pictures_are_scored(make, script):
    script([EDIT] * 3)
    rewards = ColourRewards(hold=6)  # no answer before the last round of the last batch has come
    metrics = make(rewards, reward_step_deadline_s=2.0).run(step=0).metrics
    assert rewards.calls == [2, 2, 1, 1] and metrics["eval/failures"] == 0


def test_failed_rewards_are_counted_and_left_out(make, script, caplog):
    script([EDIT] * 3)
    rewards = ColourRewards(failing=(2, 4))  # a refined picture of prompt 0, a drawn one of 2
    metrics = make(rewards, reward_outage="skip").run(step=0).metrics
    good = [result.reward for result in rewards.results]
    assert metrics["eval/failures"] == 2 and metrics["eval/num_prompts"] == 3
    assert metrics["eval/reward"] == mean([good[3], good[5]])
    assert metrics["eval/round0/reward"] == mean([good[0], good[1]])
    changes = ("improved", "worse", "unchanged")
    assert sum(metrics[f"eval/round1/{name}"] for name in changes) == 1
    assert metrics["eval/round1/improved"] == float(good[3] > good[1])
    assert all(math.isfinite(value) for value in metrics.values())
    assert "2 pictures of the evaluation have no reward" in caplog.text
    assert "no such object" in caplog.text


def test_without_any_reward_there_is_no_mean(make):
    rewards = ColourRewards(failing=tuple(range(6)))
    metrics = make(rewards, reward_outage="skip").run(step=0).metrics
    assert "eval/reward" not in metrics and "eval/round0/reward" not in metrics
    assert metrics["eval/failures"] == len(rewards.results) and "eval/format" in metrics


def test_a_missing_reward_ends_the_run_under_abort(make, world):
    evaluator = make(ColourRewards(failing=(1,)), reward_outage="abort")
    with pytest.raises(StepError, match="no evaluation at step 50: rank 0: .*no such object"):
        evaluator.run(step=50)
    assert is_sharded(world[0])


def test_an_error_while_drawing_reaches_every_rank_and_shards_the_weights(make, script, world):
    script([EDIT])  # the second sample of the batch has no operation
    with pytest.raises(StepError, match="no evaluation at step 5: rank 0: StopIteration"):
        make().run(step=5)
    assert is_sharded(world[0])


def test_the_weights_are_resident_while_drawing_and_sharded_after(make, world, monkeypatch):
    evaluator, seen = make(), []
    method = evaluator.controller.generate

    def watched(*args):
        seen.append(is_sharded(world[0]))
        return method(*args)

    monkeypatch.setattr(evaluator.controller, "generate", watched)
    evaluator.run(step=0)
    assert seen == [False, False] and is_sharded(world[0])


def test_cards_show_all_turns_of_the_first_prompts(make, script):
    script([EDIT, STOP] + [EDIT] * 6)
    rewards = ColourRewards(failing=(2,))
    cards = make(rewards, eval_prompts=6, eval_batch_size=3, reward_outage="skip").run(0).cards
    prompts = read_prompts(PROMPTS, limit=6)
    assert [card.prompt for card in cards] == [p.prompt for p in prompts[:4] for _ in range(2)]
    drawn, edited = cards[0], cards[1]
    assert drawn.input_image is None and drawn.operation == ""
    assert edited.input_image is drawn.image and edited.operation == EDIT
    assert drawn.score == rewards.results[0].score
    assert drawn.note == f"Round 0; evaluation reward {rewards.results[0].reward:g}"
    assert cards[3].image is cards[2].image and "Round 1, stops here;" in cards[3].note
    assert cards[4].note == "Round 0; no reward: no such object" and math.isnan(cards[4].score)


@pytest.mark.parametrize(
    "count, sizes", [(3, [2, 1]), (1, [1, 0]), (8, [4, 4]), (5, [2, 2, 1]), (2, [1, 1, 0, 0])]
)
def test_shares_are_contiguous_and_complete(count, sizes):
    prompts = read_prompts(PROMPTS, limit=count)
    shares = [share_of(prompts, rank, len(sizes)) for rank in range(len(sizes))]
    assert [len(share) for share in shares] == sizes
    assert [prompt for share in shares for prompt in share] == prompts


def test_prompts_are_read_once_and_a_bad_file_is_refused_at_the_start(make, tmp_path):
    path = tmp_path / "val.jsonl"
    with pytest.raises(ValueError, match="--val_data_path"):
        make(val_data_path=str(path))
    line = PROMPTS.read_text(encoding="utf-8").splitlines()[2]
    path.write_text(line + "\n", encoding="utf-8")
    evaluator = make(val_data_path=str(path), eval_prompts=0)
    path.write_text(json.dumps({"tag": "colors", "prompt": "x"}) + "\n", encoding="utf-8")
    assert evaluator.run(step=0).metrics["eval/num_prompts"] == 1
    with pytest.raises(ValueError, match="line 1: include is missing"):
        make(val_data_path=str(path))


def test_two_ranks_with_uneven_shares_agree(make, tmp_path):
    cases = [
        {},
        {"eval_prompts": 1},
        {"failing_rank": 1, "reward_outage": "skip"},
        {"failing_rank": 1, "reward_outage": "abort"},
    ]
    ranks = evaluate_on_ranks(2, cases, tmp_path)
    for seen in zip(*ranks, strict=True):
        assert all(outcome["is_sharded"] for outcome in seen)
        assert seen[0].get("metrics") == seen[1].get("metrics")
    (uneven, lone, skip, abort), others = ranks
    assert uneven["calls"][0] == 2 and others[0]["calls"][0] == 1
    assert uneven["metrics"]["eval/num_prompts"] == 3 and lone["metrics"]["eval/num_prompts"] == 1
    drawn = [*uneven["rewards"][:2], others[0]["rewards"][0]]
    assert uneven["metrics"]["eval/round0/reward"] == mean(drawn)
    assert lone["calls"][0] == 1 and others[1]["calls"] == []
    assert uneven["num_cards"] == 4 and others[0]["num_cards"] == 0
    assert skip["metrics"]["eval/failures"] == 1
    assert abort["error"] == others[3]["error"]
    assert "rank 1: RewardOutageError" in abort["error"]
    # Rank 0 draws as a world of one does with the same share.
    rewards = ColourRewards()
    make(rewards, eval_prompts=2).run(step=0)
    assert uneven["rewards"] == pytest.approx([result.reward for result in rewards.results])
