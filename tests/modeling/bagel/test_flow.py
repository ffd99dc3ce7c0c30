"""The eager flow against a loop by hand: Euler, guidance and the stochastic step."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from modeling.bagel.config import ImageSize
from modeling.bagel.context import Contexts
from modeling.bagel.flow import FlowBranches, FlowConfig, StochasticDraw, run_flow
from modeling.bagel.guidance import GuidanceConfig, guide
from modeling.bagel.noise_forward import NoiseForward
from modeling.diffusion.sde_sampler import SdeConfig, sde_log_prob, sde_mean, sde_std
from tests.tiny import contexts

GRID, NUM_TOKENS = ImageSize(2, 3), 6
TIMES = [1.0, 0.9, 0.75, 0.5]
"""Of five points with shift 3."""
NO_GUIDANCE = GuidanceConfig(1.0, 1.0, (0.4, 1.0), "global", 0.0)
GUIDANCE = GuidanceConfig(4.0, 1.5, (0.4, 1.0), "text_channel", 0.0)


def config(guidance: GuidanceConfig = NO_GUIDANCE, score_stored: bool = False) -> FlowConfig:
    return FlowConfig(5, 3.0, guidance, SdeConfig(0.7, "monotonic"), score_stored)


def prompted(*runs: list[int]) -> Contexts:
    """Contexts that hold one token run each."""
    grown = contexts(len(runs))
    grown.feed_text(grown.rows, list(runs))
    return grown


def branches() -> FlowBranches:
    return FlowBranches(
        cond=prompted([5, 77, 300], [12, 9]),
        text=prompted([5], [5]),
        image=prompted([77, 300], [9]),
    )


def noise(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(NUM_TOKENS, 64, generator=torch.Generator().manual_seed(2)).to(dtype)


def velocity(grown: Contexts, x: Tensor, t: float) -> Tensor:
    return NoiseForward([grown], GRID)(x, torch.tensor(t))[0]


@torch.no_grad()
def test_euler_steps_equal_a_loop_by_hand():
    x, grown = noise().repeat(2, 1, 1), branches().cond
    for t, t_next in zip(TIMES, [*TIMES[1:], 0.0], strict=True):
        x = x - velocity(grown, x, t) * (t - t_next)
    result = run_flow(FlowBranches(branches().cond), noise(), GRID, config())
    torch.testing.assert_close(result.latents, x, rtol=1e-5, atol=1e-5)
    assert result.stochastic is None
    assert (x[0] - x[1]).abs().max() > 1e-3  # one noise, two contexts


@torch.no_grad()
def test_guided_steps_equal_a_loop_by_hand():
    x, by_hand = noise().repeat(2, 1, 1), branches()
    guidance = replace(GUIDANCE, interval=(0.6, 0.95))
    for t, t_next in zip(TIMES, [*TIMES[1:], 0.0], strict=True):
        v = velocity(by_hand.cond, x, t)
        if 0.6 < t <= 0.95:
            text, image = velocity(by_hand.text, x, t), velocity(by_hand.image, x, t)
            v = guide(v, text, image, guidance)
        x = x - v * (t - t_next)
    result = run_flow(branches(), noise(), GRID, config(guidance))
    torch.testing.assert_close(result.latents, x, rtol=1e-4, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize(
    ("interval", "guided"),
    [
        ((0.4, 1.0), [0, 1, 2, 3]),
        ((0.5, 1.0), [0, 1, 2]),  # the lower end is out
        ((0.0, 0.75), [2, 3]),  # the upper end is in
        ((0.0, 0.0), []),
    ],
)
def test_copies_run_inside_the_interval_only(interval, guided):
    seen: list[str] = []
    flow = config(replace(GUIDANCE, interval=interval))
    run_flow(branches(), noise(), GRID, flow, probe=lambda name, value: seen.append(name))
    expected = [
        f"flow{i}.{name}"
        for i in range(4)
        for name in (("cond", "cfg_text", "cfg_img") if i in guided else ("cond",))
    ]
    assert seen == expected


@torch.no_grad()
def test_stochastic_step_draws_once_for_all_samples():
    stream, expected = (torch.Generator().manual_seed(8) for _ in range(2))
    draw = StochasticDraw(1, stream)
    result = run_flow(FlowBranches(branches().cond), noise(), GRID, config(), draw)
    draws = torch.randn(2 * NUM_TOKENS, 64, generator=expected).view(2, NUM_TOKENS, 64)
    assert torch.equal(stream.get_state(), expected.get_state())

    step, flow = result.stochastic, config()
    assert (step.t, step.dt) == pytest.approx((0.9, 0.15))
    t, dt = torch.tensor(step.t), torch.tensor(step.dt)
    grown, x = branches().cond, noise().repeat(2, 1, 1)
    x = x - velocity(grown, x, 1.0) * 0.1
    torch.testing.assert_close(step.before, x, rtol=1e-5, atol=1e-5)
    mean = sde_mean(step.before, velocity(grown, step.before, 0.9), t, dt, flow.sde)
    std = sde_std(t, dt, flow.sde)
    torch.testing.assert_close(step.after, mean + std * draws, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(step.log_prob, -draws.square().mean(-1) / 2, rtol=1e-4, atol=1e-4)
    x = step.after
    for t, dt in ((0.75, 0.25), (0.5, 0.5)):
        x = x - velocity(grown, x, t) * dt
    torch.testing.assert_close(result.latents, x, rtol=1e-4, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize(
    ("draw_at", "expected"),
    [(1, [None, None, (0, 2), (0, 2)]), (None, [(0, 2)] * 4)],
)
def test_discarded_samples_are_wanted_up_to_the_stochastic_step(draw_at, expected):
    steps = []

    def make_forwards(branches, grid):
        def velocities(x, t, step):
            steps.append(step)
            return {"cond": torch.ones_like(x)}

        return velocities

    draw = None if draw_at is None else StochasticDraw(draw_at, torch.Generator())
    grown = FlowBranches(prompted([5], [9], [12]))
    run_flow(
        grown, noise(), GRID, config(), draw, make_forwards=make_forwards, discarded=[1]
    )
    assert [step.wanted for step in steps] == expected
    assert [step.is_start for step in steps] == [True, False, False, False]


@torch.no_grad()
def test_no_stochastic_step_draws_nothing():
    state = torch.get_rng_state()
    result = run_flow(FlowBranches(branches().cond), noise(), GRID, config())
    assert result.stochastic is None
    assert torch.equal(torch.get_rng_state(), state)


@torch.no_grad()
def test_score_is_of_the_stored_latent_where_asked():
    results, seen = {}, {}
    for stored in (True, False):
        stream = torch.Generator().manual_seed(8)
        flow = config(score_stored=stored)
        start = noise(torch.bfloat16)
        results[stored] = run_flow(
            FlowBranches(branches().cond),
            start,
            GRID,
            flow,
            StochasticDraw(1, stream),
            seen.__setitem__,
        )
    assert results[True].latents.dtype == torch.bfloat16
    stored, drawn = results[True].stochastic, results[False].stochastic
    assert stored.before.dtype == stored.after.dtype == torch.bfloat16
    assert torch.equal(stored.after, drawn.after)
    assert stored.log_prob.dtype == drawn.log_prob.dtype == torch.float32

    t, dt = torch.tensor(stored.t), torch.tensor(stored.dt)
    sde = config().sde
    mean = sde_mean(stored.before, seen["sde.velocity"], t, dt, sde)
    expected = sde_log_prob(stored.after, mean, sde_std(t, dt, sde))
    torch.testing.assert_close(stored.log_prob, expected, rtol=1e-6, atol=1e-7)
    draws = torch.randn(2 * NUM_TOKENS, 64, generator=torch.Generator().manual_seed(8))
    unrounded = -draws.view(2, NUM_TOKENS, 64).square().mean(-1) / 2
    torch.testing.assert_close(drawn.log_prob, unrounded, rtol=1e-5, atol=1e-6)
    assert (stored.log_prob - drawn.log_prob).abs().max() > 1e-5
