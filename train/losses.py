"""The losses of one step: clipped policy ratios for text and images, and their KL terms.

Text follows GRPO, images Mix-GRPO; rollout and learner share guidance and the stochastic step.
Shape letters: Y text labels, M trained images, n image tokens, P numbers in a latent token (64).
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from modeling.bagel.batch import LearnerOutput
from modeling.bagel.guidance import GuidanceConfig, guide
from modeling.bagel.probe import Probe, no_probe
from modeling.diffusion.sde_sampler import SdeConfig, sde_kl, sde_log_prob, sde_mean, sde_std
from train.advantages import Advantages
from train.packing import NoiseRows

COUNT_EPS = 1e-4
PROB_FLOOR = 1e-20


@dataclass(frozen=True)
class LossConfig:
    """Weights and limits of the loss."""

    ce_weight: float
    mse_weight: float
    kl_weight_text: float
    kl_weight_image: float
    clip_ratio: float
    kl_limit: float


@dataclass(frozen=True)
class ImageScoring:
    """How the learner scores an image: guidance (None: unguided) and the stochastic step."""

    guidance: GuidanceConfig | None
    sde: SdeConfig


@dataclass(frozen=True)
class LossTargets:
    """What the forward's outputs are held against, on the device."""

    label_ids: Tensor  # int64 [Y]
    label_samples: Tensor  # int64 [Y]
    behaviour_probs: Tensor  # fp32 [Y]
    noise_rows: NoiseRows
    before: Tensor  # [M, n, P]
    after: Tensor  # [M, n, P]
    behaviour_log_prob: Tensor  # fp32 [M, n]
    t: Tensor  # fp32 scalar
    dt: Tensor  # fp32 scalar


@dataclass(frozen=True)
class LossReport:
    """The loss to differentiate, its parts (detached) and the ratios behind it."""

    loss: Tensor
    text_policy: Tensor
    image_policy: Tensor
    text_kl: Tensor
    image_kl: Tensor
    text_log_ratio: Tensor  # fp32 [Y]
    image_log_ratio: Tensor  # fp32 [M]


@dataclass(frozen=True)
class Scores:
    """Text log-probs [Y] and the mean [M, n, P] of each image's stochastic step, fp32."""

    text_log_probs: Tensor
    velocity: Tensor
    step_mean: Tensor
    step_std: Tensor


def text_log_probs(logits: Tensor, label_ids: Tensor, in_fp32: bool) -> Tensor:
    """Log-probabilities of labels [Y] under logits [Y, V], formed in fp32 or in their type."""
    if in_fp32:
        logits = logits.float()
    return -F.cross_entropy(logits, label_ids, reduction="none").float()


def score(
    output: LearnerOutput, targets: LossTargets, scoring: ImageScoring, in_fp32: bool
) -> Scores:
    """Scores labels and stochastic steps under one forward (of the policy or the reference)."""
    _, num_tokens, size = targets.before.shape
    num_copies = output.velocity.shape[0] // num_tokens
    copies = output.velocity.float().view(num_copies, num_tokens, size)
    rows = targets.noise_rows
    cond = copies[rows.cond]
    if scoring.guidance is not None:
        text = copies[rows.text] if rows.text else None
        image = copies[rows.image] if rows.image else None
        velocity = guide(cond, text, image, scoring.guidance)
    else:
        velocity = cond
    mean = sde_mean(targets.before.float(), velocity, targets.t, targets.dt, scoring.sde)
    std = sde_std(targets.t, targets.dt, scoring.sde)
    log_probs = text_log_probs(output.logits, targets.label_ids, in_fp32)
    return Scores(log_probs, velocity, mean, std)


def policy_loss(
    policy: Scores,
    reference: Scores,
    targets: LossTargets,
    advantages: Advantages,
    config: LossConfig,
    probe: Probe = no_probe,
) -> LossReport:
    """The step's loss on this rank (gradients are averaged over ranks afterwards)."""
    probe("label_logprobs", policy.text_log_probs)
    probe("v_train", policy.velocity)
    num_labels = targets.label_ids.numel()
    behaviour = torch.log(targets.behaviour_probs.clamp(min=PROB_FLOOR))
    text_log_ratio = policy.text_log_probs - behaviour
    text_advantages = advantages.text.to(text_log_ratio.device)[targets.label_samples]
    text_policy = _clipped(text_log_ratio, text_advantages, config.clip_ratio, num_labels)
    text_kl = _text_kl(policy.text_log_probs, reference.text_log_probs, config.kl_limit)

    after = targets.after.float()
    log_prob = sde_log_prob(after, policy.step_mean, policy.step_std)
    image_log_ratio = log_prob.mean(-1) - targets.behaviour_log_prob.mean(-1)
    # A flow without a stochastic step trains no image, though its pictures have advantages.
    image_advantages = advantages.image.to(image_log_ratio.device)[: image_log_ratio.numel()]
    image_policy = _clipped(
        image_log_ratio, image_advantages, config.clip_ratio, image_log_ratio.numel()
    )
    image_kl = sde_kl(policy.step_mean, reference.step_mean, reference.step_std)
    image_kl = image_kl.mean() if image_kl.numel() else image_kl.sum()

    text = config.ce_weight * (text_policy + config.kl_weight_text * text_kl)
    image = config.mse_weight * image_policy + config.kl_weight_image * image_kl
    return LossReport(
        loss=text + image,
        text_policy=text_policy.detach(),
        image_policy=image_policy.detach(),
        text_kl=text_kl.detach(),
        image_kl=image_kl.detach(),
        text_log_ratio=text_log_ratio.detach(),
        image_log_ratio=image_log_ratio.detach(),
    )


def _text_kl(log_probs: Tensor, reference: Tensor, limit: float) -> Tensor:
    """The k3 estimator, averaged over labels; 0 where that scalar exceeds `limit`."""

    def k3(difference: Tensor) -> Tensor:
        return (difference.exp() - difference - 1).sum() / (COUNT_EPS + difference.numel())

    difference = reference - log_probs
    # Masked before the exponential, not after: its gradient may be infinite there.
    is_broken = ~(k3(difference.detach()) <= limit)
    return k3(torch.where(is_broken, torch.zeros_like(difference), difference))


def _clipped(log_ratio: Tensor, advantages: Tensor, clip: float, count: int) -> Tensor:
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1 - clip, 1 + clip)
    gain = torch.minimum(ratio * advantages, clipped * advantages).sum()
    return -gain / (COUNT_EPS + count)
