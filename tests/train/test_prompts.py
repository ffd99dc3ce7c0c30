"""The prompt sampler: against the recorded runs, and its own promises."""

import json
from pathlib import Path

import pytest
import torch

from data.geneval import read_prompts
from train.prompts import PromptSampler
from train.recipe import recipe_named

PARITY = Path(__file__).parents[1] / "parity"
TRACES = ("trace_upstream", "trace_consistent", "trace_upstream_edges", "trace_consistent_edges")


@pytest.mark.parametrize("trace", TRACES)
def test_recorded_runs_saw_these_prompts(trace):
    recorded = json.loads((PARITY / trace / "trace.json").read_text())
    config = recorded["config"]
    prompts = read_prompts(PARITY / config["data"])
    sampler = PromptSampler(
        len(prompts),
        config["world_size"],
        config["policy_group_size"],
        42,
        recipe_named(config["recipe"]).lagging_prompt_epoch,
    )
    num_checked = 0
    for rank, steps in enumerate(recorded["ranks"]):
        for step in range(0, len(steps), config["rounds"]):
            seen = steps[step]["samples"][0]["text"][1]
            assert prompts[sampler.index_for(step, rank)].prompt == seen, (step, rank)
            num_checked += 1
    assert num_checked == 6


def test_groups_take_the_shuffled_entries_in_order():
    sampler = PromptSampler(100, 8, 2, data_seed=42, epoch_lags=False)
    generator = torch.Generator().manual_seed(42 + 6)
    entries = torch.randperm(100, generator=generator)[:8]
    entries = entries[torch.randperm(8, generator=generator)].tolist()
    drawn = [sampler.index_for(6, rank) for rank in range(8)]
    assert drawn == [entry for entry in entries[:4] for _ in range(2)]
    assert len(set(drawn)) == 4


def test_upstream_repeats_its_first_prompts_and_lags():
    upstream = PromptSampler(100, 4, 2, data_seed=42, epoch_lags=True)
    consistent = PromptSampler(100, 4, 2, data_seed=42, epoch_lags=False)
    assert [upstream.epoch_for(step) for step in (0, 2, 4, 5, 6, 100)] == [0, 0, 0, 1, 2, 96]
    assert [consistent.epoch_for(step) for step in (0, 1, 100)] == [0, 1, 100]
    for rank in range(4):
        first = consistent.index_for(0, rank)
        assert [upstream.index_for(step, rank) for step in (0, 2, 4)] == [first] * 3
        assert upstream.index_for(9, rank) == consistent.index_for(5, rank)
    assert len({consistent.index_for(step, 0) for step in range(0, 40, 2)}) > 10


def test_order_of_calls_and_the_global_generator_do_not_matter():
    sampler = PromptSampler(50, 4, 2, data_seed=1, epoch_lags=False)
    forward = [sampler.index_for(step, 3) for step in range(6)]
    state = torch.get_rng_state()
    backward = [sampler.index_for(step, 3) for step in reversed(range(6))]
    assert forward == backward[::-1]
    assert torch.equal(state, torch.get_rng_state())
    other = PromptSampler(50, 4, 2, data_seed=2, epoch_lags=False)
    assert forward[1:] == [other.index_for(step, 3) for step in range(5)]  # seed plus epoch


def test_as_many_prompts_as_ranks_is_enough():
    sampler = PromptSampler(4, 4, 1, data_seed=42, epoch_lags=True)
    assert sorted(sampler.index_for(0, rank) for rank in range(4)) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        ((3, 4, 2, 42, True), "3 prompts for 4 ranks.*--train_data_path"),
        ((9, 4, 3, 42, True), "4 ranks.*groups of 3.*--policy_group_size"),
        ((9, 4, 0, 42, True), "groups of 0.*--policy_group_size"),
    ],
)
def test_bad_settings_are_refused(arguments, fault):
    with pytest.raises(ValueError, match=fault):
        PromptSampler(*arguments)


@pytest.mark.parametrize(("step", "rank"), [(-1, 0), (0, -1), (0, 4)])
def test_bad_step_or_rank_is_refused(step, rank):
    with pytest.raises(ValueError, match=f"step {step}, rank {rank} of 4"):
        PromptSampler(9, 4, 2, 42, True).index_for(step, rank)
