"""Typed records of one packed learner batch: model inputs and loss targets.

Shape letters: S packed tokens, W text tokens (markers and padding included), I image-encoder
tokens, G latent tokens, Y text labels, M trained images, P numbers in a latent token (64).
Empty is a zero-length tensor.
"""

from dataclasses import dataclass, fields, replace
from typing import NamedTuple

import torch
from torch import Tensor

from modeling.bagel.layout import SegmentPlan
from modeling.bagel.qwen2_navit import ExpertOrder


@dataclass(frozen=True)
class PackedBatch:
    """Inputs of one learner forward. Indexes are packed (document) positions, int64."""

    plan: SegmentPlan
    rope_ids: Tensor  # [S]
    text_ids: Tensor  # [W]
    text_index: Tensor  # [W]
    vit_features: Tensor  # [I, D_vit], frozen image-encoder output
    vit_position_ids: Tensor  # [I]
    vit_index: Tensor  # [I]
    latents: Tensor  # [G, P], clean or noisy
    timesteps: Tensor  # fp32 [G], 0 for clean latents
    latent_position_ids: Tensor  # [G]
    latent_index: Tensor  # [G]
    label_index: Tensor  # [Y], positions whose next token is scored
    noise_index: Tensor  # positions of noise tokens, in row order

    def to(self, device: torch.device) -> "PackedBatch":
        moved = {
            f.name: getattr(self, f.name).to(device, non_blocking=True)
            for f in fields(self)
            if isinstance(getattr(self, f.name), Tensor)
        }
        return replace(self, **moved)

    def experts(self) -> ExpertOrder:
        und = torch.cat((self.text_index, self.vit_index))
        return ExpertOrder.from_positions(und, self.latent_index)


class LearnerOutput(NamedTuple):
    """What the losses need of one forward.

    A tuple, because FSDP2 must find the tensors in it to gather weights for the backward.
    """

    logits: Tensor  # [Y, V] in the compute type
    velocity: Tensor  # [noise tokens, P] in the compute type
