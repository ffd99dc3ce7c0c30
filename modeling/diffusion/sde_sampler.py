"""The flow's time grid, and its stochastic step with log-probability and KL (Mix-GRPO).

Times run from 1 (noise) to 0 (data); the velocity is v = noise - data. Everything here is fp32,
elementwise and free of host synchronisation, so it means the same in autocast and CUDA graphs.

Legend: `...` token dimensions, P numbers of a latent patch (64). `x`, `v`, means and noise are
[..., P]; times and deviations have any shape that broadcasts to [...].
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

ETA_MODES = ("monotonic", "constant")
# The monotonic eta would be infinite at t = 1: from here on its denominator stands still.
MONOTONIC_T_MAX = 0.95


@dataclass(frozen=True)
class SdeConfig:
    """Noise level of the stochastic step: `constant` is eta at any time, `monotonic` grows in t.

    Raises ValueError for an unknown mode and for an eta that makes the step deterministic.
    """

    eta: float
    eta_mode: str

    def __post_init__(self) -> None:
        if self.eta_mode not in ETA_MODES:
            allowed = ", ".join(ETA_MODES)
            raise ValueError(f"--eta_mode {self.eta_mode!r}: expected one of {allowed}")
        if not (math.isfinite(self.eta) and self.eta > 0):
            raise ValueError(
                f"--constant_eta_gen / --constant_eta_edit {self.eta}: expected a finite number "
                "above 0 (--enable_sde_gen False / --enable_sde_edit False switch the step off)"
            )


@dataclass(frozen=True)
class SdeStep:
    """One stochastic step: `next`, `mean` [..., P]; `log_prob` [...]; `std` shaped like t."""

    next: Tensor
    log_prob: Tensor
    mean: Tensor
    std: Tensor


def flow_schedule(num_points: int, shift: float) -> tuple[Tensor, Tensor]:
    """Times and step lengths of a flow over `num_points` points.

    u = linspace(1, 0, num_points), t = shift * u / (1 + (shift - 1) * u).

    Returns:
        t, dt: fp32 [num_points - 1] on the CPU, so that every device sees the same bits.
        t starts at 1 and never reaches 0; dt[i] = t[i] - t[i + 1] with 0 after the last.
    """
    if num_points < 2:
        raise ValueError(
            f"--num_timesteps_gen / --num_timesteps_edit {num_points}: expected 2 points or more"
        )
    if not (math.isfinite(shift) and shift > 0):
        raise ValueError(f"--timestep_shift {shift}: expected a finite number above 0")
    uniform = torch.linspace(1, 0, num_points, dtype=torch.float32, device="cpu")
    points = shift * uniform / (1 + (shift - 1) * uniform)
    return points[:-1], points[:-1] - points[1:]


def sde_std(t: Tensor, dt: Tensor, config: SdeConfig) -> Tensor:
    """Standard deviation of the step, eta(t) * sqrt(dt), fp32 in the shape of t and dt."""
    return _eta(t.float(), config) * dt.float().sqrt()


def sde_mean(x: Tensor, v: Tensor, t: Tensor, dt: Tensor, config: SdeConfig) -> Tensor:
    """Mean of the step from `x` [..., P] with velocity `v`: x - (v - eta^2 * score / 2) * dt.

    The score is that of the flow's marginal at t, with x0 = x - t * v as the data estimate.
    It does not exist at t = 0: there the mean is NaN. `flow_schedule` never gives that time.
    """
    x, v = x.float(), v.float()
    t, dt = t.float().unsqueeze(-1), dt.float().unsqueeze(-1)
    x0 = x - t * v
    score = -(x - (1 - t) * x0) / t**2
    return x - (v - _eta(t, config) ** 2 * score / 2) * dt


def sde_step(
    x: Tensor, v: Tensor, t: Tensor, dt: Tensor, config: SdeConfig, noise: Tensor
) -> SdeStep:
    """Steps from `x` with the given standard normal `noise` [..., P]; `t` must be above 0."""
    mean = sde_mean(x, v, t, dt, config)
    std = sde_std(t, dt, config)
    x_next = mean + std.unsqueeze(-1) * noise.float()
    return SdeStep(next=x_next, log_prob=sde_log_prob(x_next, mean, std), mean=mean, std=std)


def sde_log_prob(x_next: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Log-probability of `x_next` per token, fp32 [...]: the mean over its P numbers.

    Without the Gaussian's normaliser, which cancels in every ratio taken of it.
    """
    return -((x_next.float() - mean) / std.unsqueeze(-1)).square().mean(dim=-1) / 2


def sde_kl(mean: Tensor, mean_ref: Tensor, std_ref: Tensor) -> Tensor:
    """Distance of the policy's step from the reference's, fp32 [...]: mean over the P numbers.

    ((mean - mean_ref) / std_ref)^2, which is twice the KL of two Gaussians of equal deviation.
    """
    return ((mean - mean_ref) / std_ref.unsqueeze(-1)).square().mean(dim=-1)


def _eta(t: Tensor, config: SdeConfig) -> Tensor:
    if config.eta_mode == "constant":
        return torch.full_like(t, config.eta)
    held = torch.where(t >= MONOTONIC_T_MAX, MONOTONIC_T_MAX, t)
    return config.eta * torch.sqrt(t / (1 - held))
