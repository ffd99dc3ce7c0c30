"""Every random stream starts from the seed that the recorded runs used."""

import pytest
import torch

from tests.tiny import CPU
from train.streams import RandomStreams, StreamSeeds, evaluation_noise

SHAPE = (6, 64)


def streams(rank: int = 3, world_size: int = 8) -> RandomStreams:
    """Policy groups of two, 1000 steps."""
    seeds = StreamSeeds(
        rank=rank,
        world_size=world_size,
        policy_group_id=rank // 2,
        total_steps=1000,
        global_seed=4396,
    )
    return RandomStreams(seeds, CPU)


def test_seeds():
    mine = streams()
    assert mine.flow_noise.initial_seed() == 4396 * 8 + 3
    assert mine.sample(7).initial_seed() == (3 + 1) * 1000 + 7
    assert mine.group(7).initial_seed() == (1 + 1) * 1000 + 7
    assert mine.evaluation(num_batches=5, first_index=32).initial_seed() == (3 + 1) * 6 + 32


@pytest.mark.parametrize("is_refine", [False, True])
def test_group_draws_two_noises_and_an_index(is_refine):
    for step in range(6):
        generator = torch.Generator().manual_seed(2000 + step)
        noises = [torch.randn(SHAPE, generator=generator) for _ in range(2)]
        index = torch.randint(0, 15, (1,), generator=generator, dtype=torch.int32).item()
        draws = streams().group_draws(step, SHAPE, torch.float32, is_refine, bound=15)
        assert torch.equal(draws.noise, noises[1 if is_refine else 0])
        assert draws.sde_index == index


def test_group_noise_is_drawn_in_its_type():
    draws = streams().group_draws(7, SHAPE, torch.bfloat16, False, bound=15)
    generator = torch.Generator().manual_seed(2007)
    assert torch.equal(draws.noise, torch.randn(SHAPE, generator=generator, dtype=torch.bfloat16))


def test_index_stays_below_its_bound():
    indexes = {
        streams().group_draws(step, (1, 1), torch.float32, True, bound=2).sde_index
        for step in range(20)
    }
    assert indexes == {0, 1}


def test_ranks_of_a_group_draw_alike_and_others_do_not():
    second, third, fourth = (
        streams(rank).group_draws(5, SHAPE, torch.float32, False, 15) for rank in (2, 3, 4)
    )
    assert torch.equal(second.noise, third.noise)
    assert not torch.equal(third.noise, fourth.noise)
    assert not torch.equal(
        torch.rand(4, generator=streams(2).sample(5)), torch.rand(4, generator=streams(3).sample(5))
    )


def test_step_streams_start_anew_and_the_flow_stream_goes_on():
    mine = streams()
    assert torch.equal(
        torch.rand(4, generator=mine.sample(5)), torch.rand(4, generator=mine.sample(5))
    )
    first, second = (torch.rand(4, generator=mine.flow_noise) for _ in range(2))
    assert not torch.equal(first, second)


def test_state_of_the_flow_stream_is_kept():
    mine, resumed = streams(), streams(rank=0)
    torch.rand(7, generator=mine.flow_noise)
    resumed.load_state(mine.state())
    expected = torch.rand(4, generator=mine.flow_noise)
    assert torch.equal(torch.rand(4, generator=resumed.flow_noise), expected)


def test_evaluation_noise_is_drawn_before_any_text():
    generator, again = (torch.Generator().manual_seed(9) for _ in range(2))
    noises = evaluation_noise(generator, 4, SHAPE, torch.float32)
    expected = [torch.randn(SHAPE, generator=again) for _ in range(4)]
    assert all(torch.equal(a, b) for a, b in zip(noises, expected, strict=True))
    assert len(noises) == 4
    assert torch.equal(generator.get_state(), again.get_state())
