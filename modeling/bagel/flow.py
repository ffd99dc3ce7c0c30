"""Eager image flow: Euler steps under guidance, one of them stochastic.

Shape letters: B samples, n image tokens, P numbers in a latent token (64).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from modeling.bagel.config import ImageSize
from modeling.bagel.context import Contexts
from modeling.bagel.guidance import GuidanceConfig, guide
from modeling.bagel.noise_forward import NoiseForward
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
    """Final latents [B, n, P], any for discarded samples, and the stochastic step if any."""

    latents: Tensor
    stochastic: StochasticStep | None


@dataclass(frozen=True)
class StochasticDraw:
    """Which forward is stochastic, and the stream that its noise comes from."""

    index: int
    generator: torch.Generator


@dataclass(frozen=True)
class FlowStep:
    """What a step asks of its forwards."""

    is_guided: bool
    """Whether velocities of all branches are wanted, or of `cond` alone."""
    is_start: bool = False
    """Whether all samples still have the same latents."""
    wanted: tuple[int, ...] | None = None
    """Samples whose velocities count, None for all; the others' may be any finite values."""


Forwards = Callable[[Tensor, Tensor, FlowStep], dict[str, Tensor]]
"""Velocities [B, n, P] by branch of latents x [B, n, P] at a time t (fp32 scalar on the device)."""
MakeForwards = Callable[[FlowBranches, ImageSize], Forwards]


def eager_forwards(branches: FlowBranches, grid: ImageSize) -> Forwards:
    """The forwards of a flow, branch by branch and operator by operator."""
    forwards = {name: NoiseForward([contexts], grid) for name, contexts in branches.items()}

    def velocities(x: Tensor, t: Tensor, step: FlowStep) -> dict[str, Tensor]:
        names = forwards if step.is_guided else ("cond",)
        return {name: forwards[name](x, t)[0] for name in names}

    return velocities


def run_flow(
    branches: FlowBranches,
    noise: Tensor,
    grid: ImageSize,
    config: FlowConfig,
    draw: StochasticDraw | None = None,
    probe: Probe = no_probe,
    make_forwards: MakeForwards = eager_forwards,
    discarded: Sequence[int] = (),
) -> FlowResult:
    """Integrates the flow from noise to latents.

    Args:
        branches: contexts of each guidance copy, B of each.
        noise: [n, P], the start of every sample; its type is the latents' type.
        grid: rows and columns of image tokens, n in all.
        config: the recipe.
        draw: which forward is stochastic, and its stream; None for none.
        probe: sees `flow{i}.{branch}` velocities and `sde.{x_t,velocity,x_next}`.
        make_forwards: makes the forwards of the branches; eager or captured.
        discarded: samples whose final latents nobody reads. Behind the stochastic step, the last
            that others read of them, they need not go through forwards.
    """
    num_samples = branches.cond.cache.num_rows
    x = noise.expand(num_samples, *noise.shape).contiguous()
    forwards = make_forwards(branches, grid)
    times, steps = flow_schedule(config.num_timesteps, config.shift)
    on_device = torch.stack((times, steps)).to(x.device)
    stochastic = None
    kept = tuple(i for i in range(num_samples) if i not in discarded) if discarded else None
    for index, t_value in enumerate(times.tolist()):
        is_scored = draw is None or index > draw.index
        guided = config.guidance.is_active(t_value)
        step = FlowStep(guided, index == 0, kept if is_scored else None)
        t, dt = on_device[:, index]
        velocities = {name: v.float() for name, v in forwards(x, t, step).items()}
        for name, velocity in velocities.items():
            probe(f"flow{index}.{name}", velocity)
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
