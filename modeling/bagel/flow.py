"""Eager image flow: Euler steps under guidance, one of them stochastic.

Shape letters: B samples, n image tokens, P numbers in a latent token (64).
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from modeling.bagel.config import ImageSize
from modeling.bagel.context import Contexts
from modeling.bagel.guidance import GuidanceConfig, guide
from modeling.bagel.probe import Probe, no_probe
from modeling.diffusion.sde_sampler import SdeConfig, flow_schedule, sde_log_prob, sde_step


@dataclass(frozen=True)
class FlowConfig:
    """Recipe of one flow. `num_timesteps` points give `num_timesteps - 1` forwards."""

    num_timesteps: int
    shift: float
    guidance: GuidanceConfig
    sde: SdeConfig
    score_stored: bool
    """Whether the log-prob is that of the latent as stored, not of the fp32 sample before it."""


@dataclass(frozen=True)
class FlowBranches:
    """Contexts of the guidance copies; a branch that is not used is None."""

    cond: Contexts
    text: Contexts | None = None
    image: Contexts | None = None

    def items(self) -> list[tuple[str, Contexts]]:
        named = (("cond", self.cond), ("cfg_text", self.text), ("cfg_img", self.image))
        return [(name, contexts) for name, contexts in named if contexts is not None]


@dataclass(frozen=True)
class StochasticStep:
    """What the learner scores: latents around the stochastic step and their log-prob."""

    before: Tensor  # [B, n, P] in the type of the latents
    after: Tensor  # [B, n, P] likewise
    log_prob: Tensor  # fp32 [B, n]
    t: float
    dt: float


@dataclass(frozen=True)
class FlowResult:
    """Final latents [B, n, P], and the stochastic step if there was one."""

    latents: Tensor
    stochastic: StochasticStep | None


@dataclass(frozen=True)
class StochasticDraw:
    """Which forward is stochastic, and the stream that its noise comes from."""

    index: int
    generator: torch.Generator


Velocity = Callable[[Tensor, Tensor], Tensor]
"""Velocity [B, n, P] of latents x [B, n, P] at a time t (fp32 scalar on the device)."""
MakeVelocity = Callable[[Contexts, ImageSize], Velocity]


def eager_velocity(contexts: Contexts, grid: ImageSize) -> Velocity:
    """The forward of one branch, run operator by operator."""
    plan = contexts.plan_noise(grid)

    def velocity(x: Tensor, t: Tensor) -> Tensor:
        return contexts.noise_velocity(plan, x, t)

    return velocity


def run_flow(
    branches: FlowBranches,
    noise: Tensor,
    grid: ImageSize,
    config: FlowConfig,
    draw: StochasticDraw | None = None,
    probe: Probe = no_probe,
    make_velocity: MakeVelocity = eager_velocity,
) -> FlowResult:
    """Integrates the flow from noise to latents.

    Args:
        branches: contexts of each guidance copy, B of each.
        noise: [n, P], the start of every sample; its type is the latents' type.
        grid: rows and columns of image tokens, n in all.
        config: the recipe.
        draw: which forward is stochastic, and its stream; None for none.
        probe: sees `flow{i}.{branch}` velocities and `sde.{x_t,velocity,x_next}`.
        make_velocity: makes the forward of one branch; eager or captured.
    """
    num_samples = branches.cond.cache.num_rows
    x = noise.expand(num_samples, *noise.shape).contiguous()
    forwards = {name: make_velocity(contexts, grid) for name, contexts in branches.items()}
    times, steps = flow_schedule(config.num_timesteps, config.shift)
    on_device = torch.stack((times, steps)).to(x.device)
    stochastic = None
    for index, t_value in enumerate(times.tolist()):
        guided = config.guidance.is_active(t_value)
        t, dt = on_device[:, index]
        velocities = {}
        for name, forward in forwards.items():
            if name == "cond" or guided:
                velocities[name] = forward(x, t).float()
                probe(f"flow{index}.{name}", velocities[name])
        v = guide(
            velocities["cond"],
            velocities.get("cfg_text"),
            velocities.get("cfg_img"),
            config.guidance,
        )
        if draw is not None and index == draw.index:
            scored = _stochastic_step(x, v, (t, dt), config, draw.generator)
            stochastic = StochasticStep(x, *scored, t_value, steps[index].item())
            probe("sde.x_t", x)
            probe("sde.velocity", v)
            probe("sde.x_next", stochastic.after)
            x = stochastic.after
        else:
            x = (x.float() - v * dt).to(x.dtype)
    return FlowResult(x, stochastic)


def _stochastic_step(
    x: Tensor, v: Tensor, times: tuple[Tensor, Tensor], config: FlowConfig, generator
) -> tuple[Tensor, Tensor]:
    """The latent after the step, in the type of x, and the log-prob fp32 [B, n]."""
    flat = (x.shape[0] * x.shape[1], x.shape[2])
    noise = torch.randn(flat, generator=generator, device=generator.device).to(x.device)
    step = sde_step(x.float(), v, *times, config.sde, noise.view(x.shape))
    after = step.next.to(x.dtype)
    if config.score_stored:
        return after, sde_log_prob(after.float(), step.mean, step.std)
    return after, step.log_prob
