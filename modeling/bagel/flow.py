"""Eager image flow: Euler steps under guidance, one of them stochastic.

Shape letters: B samples, n image tokens, P numbers in a latent token (64).
"""

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


def run_flow(
    branches: FlowBranches,
    noise: Tensor,
    grid: ImageSize,
    config: FlowConfig,
    sde_index: int | None = None,
    generator: torch.Generator | None = None,
    probe: Probe = no_probe,
) -> FlowResult:
    """Integrates the flow from noise to latents.

    Args:
        branches: contexts of each guidance copy, B of each.
        noise: [n, P], the start of every sample; its type is the latents' type.
        grid: rows and columns of image tokens, n in all.
        config: the recipe.
        sde_index: which forward is stochastic; None for none.
        generator: stream of the stochastic step's noise.
        probe: sees `flow{i}.{branch}` velocities and `sde.{x_t,velocity,x_next}`.
    """
    num_samples = branches.cond.cache.num_rows
    x = noise.expand(num_samples, *noise.shape).contiguous()
    plans = {name: contexts.plan_noise(grid) for name, contexts in branches.items()}
    times, steps = (a.to(x.device) for a in flow_schedule(config.num_timesteps, config.shift))
    stochastic = None
    for index, t_value in enumerate(times.tolist()):
        guided = config.guidance.is_active(t_value)
        t, dt = times[index], steps[index]
        velocities = {}
        for name, contexts in branches.items():
            if name == "cond" or guided:
                t_tokens = t.expand(x.shape[0] * x.shape[1])
                velocities[name] = contexts.noise_velocity(plans[name], x, t_tokens).float()
                probe(f"flow{index}.{name}", velocities[name])
        v = guide(
            velocities["cond"],
            velocities.get("cfg_text"),
            velocities.get("cfg_img"),
            config.guidance,
        )
        if index == sde_index:
            stochastic = _stochastic_step(x, v, t, dt, config, generator)
            probe("sde.x_t", x)
            probe("sde.velocity", v)
            probe("sde.x_next", stochastic.after)
            x = stochastic.after
        else:
            x = (x.float() - v * dt).to(x.dtype)
    return FlowResult(x, stochastic)


def _stochastic_step(
    x: Tensor, v: Tensor, t: Tensor, dt: Tensor, config: FlowConfig, generator
) -> StochasticStep:
    flat = (x.shape[0] * x.shape[1], x.shape[2])
    draw = torch.randn(flat, generator=generator, device=generator.device).to(x.device)
    step = sde_step(x.float(), v, t, dt, config.sde, draw.view(x.shape))
    after = step.next.to(x.dtype)
    log_prob = step.log_prob
    if config.score_stored:
        log_prob = sde_log_prob(after.float(), step.mean, step.std)
    return StochasticStep(x, after, log_prob, t.item(), dt.item())
