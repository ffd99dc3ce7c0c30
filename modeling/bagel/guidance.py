"""Classifier-free guidance of the velocity, the one implementation of rollout and learner.

Legend: B images, n tokens of an image, P numbers of a latent patch (64).
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

RENORM_TYPES = ("global", "channel", "text_channel")
NORM_EPS = 1e-8


@dataclass(frozen=True)
class GuidanceConfig:
    """Scales, times and renormalisation of guidance; a scale of at most 1 skips its part.

    `interval` is (lo, hi) in flow time, 1 = noise. Raises ValueError naming the flag at fault.
    """

    text_scale: float
    image_scale: float
    interval: tuple[float, float]
    renorm_type: str
    renorm_min: float

    def __post_init__(self) -> None:
        for flag, scale in (("text", self.text_scale), ("img", self.image_scale)):
            if not (math.isfinite(scale) and scale >= 0):
                raise ValueError(f"--cfg_{flag}_scale {scale}: expected a finite number >= 0")
        low, high = self.interval
        if not 0 <= low <= high <= 1:
            raise ValueError(
                f"--cfg_interval_low {low} and --cfg_interval_high {high}: "
                "expected 0 <= low <= high <= 1"
            )
        if self.renorm_type not in RENORM_TYPES:
            raise ValueError(
                f"--cfg_renorm_type_gen / --cfg_renorm_type_edit {self.renorm_type!r}: "
                f"expected one of {', '.join(RENORM_TYPES)}"
            )
        if not 0 <= self.renorm_min <= 1:
            raise ValueError(f"--cfg_renorm_min {self.renorm_min}: expected 0 <= value <= 1")

    def is_active(self, t: float, closed_low: bool = False) -> bool:
        """Whether guidance is on at time `t`: lo < t <= hi, or lo <= t <= hi if `closed_low`."""
        low, high = self.interval
        return (low <= t if closed_low else low < t) and t <= high


def guide(
    cond: Tensor, text: Tensor | None, image: Tensor | None, config: GuidanceConfig
) -> Tensor:
    """Guides the velocity with the copies that exist.

    Args:
        cond: [B, n, P] velocity under the full context, any float type.
        text: [B, n, P] without the text, or None to skip its part.
        image: [B, n, P] without the image, or None to skip its part.
        config: scales and renormalisation. Its interval is for the caller to ask.

    Returns:
        [B, n, P] fp32. Where norms are taken: `global` over an image, `channel` over a token,
        both after the image part; `text_channel` over a token, before the image part.
    """
    if cond.dim() != 3:
        raise ValueError(f"cond has shape {tuple(cond.shape)}, expected [images, tokens, numbers]")
    cond = cond.float()
    has_text = text is not None and config.text_scale > 1
    has_image = image is not None and config.image_scale > 1
    if not (has_text or has_image):
        return cond
    guided = _extrapolate(cond, text, config.text_scale) if has_text else cond
    if config.renorm_type == "text_channel" and has_text:
        guided = _renorm(cond, guided, (-1,), config.renorm_min)
    if has_image:
        guided = _extrapolate(guided, image, config.image_scale)
    if config.renorm_type == "channel":
        guided = _renorm(cond, guided, (-1,), config.renorm_min)
    elif config.renorm_type == "global":
        guided = _renorm(cond, guided, (-2, -1), config.renorm_min)
    return guided


def _extrapolate(target: Tensor, base: Tensor, scale: float) -> Tensor:
    # A base of another shape would broadcast, and one image's copy would guide them all.
    if base.shape != target.shape:
        raise ValueError(
            f"guidance copy has shape {tuple(base.shape)}, expected {tuple(target.shape)}"
        )
    base = base.float()
    return base + scale * (target - base)


def _renorm(cond: Tensor, guided: Tensor, dims: tuple[int, ...], minimum: float) -> Tensor:
    """Shrinks `guided` to the norm of `cond`, never stretches it, and not below `minimum`."""
    cond_norm = torch.linalg.vector_norm(cond, dim=dims, keepdim=True)
    guided_norm = torch.linalg.vector_norm(guided, dim=dims, keepdim=True)
    return guided * (cond_norm / (guided_norm + NORM_EPS)).clamp(min=minimum, max=1.0)
