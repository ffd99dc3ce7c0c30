"""Packs a rollout into one learner batch: rows, then a forest of segments, then tensors.

Geometry comes first and stays on the host; tensors are built once the plan is closed.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from modeling.bagel.batch import PackedBatch
from modeling.bagel.config import LATENT_CHANNELS, LATENT_PATCH, ImageSize
from modeling.bagel.context import ConditionImage, SpecialTokens
from modeling.bagel.images import position_ids
from modeling.bagel.layout import ROOT, ForestBuilder, Segment, SegmentKind

ROW_MULTIPLE = 128
LATENT_SIZE = LATENT_PATCH * LATENT_PATCH * LATENT_CHANNELS
BRANCHES = ("cond", "cfg_text", "cfg_img")


@dataclass(frozen=True)
class TextPart:
    """A text segment: ids with their markers, and whether it is trained."""

    ids: tuple[int, ...]
    is_trained: bool = False


@dataclass(frozen=True)
class VitPart:
    """The image-encoder segment of a picture."""

    image: ConditionImage


@dataclass(frozen=True)
class VaePart:
    """The clean latent segment of a picture."""

    image: ConditionImage


@dataclass(frozen=True)
class NoisePart:
    """The latent before the stochastic step of a sample: [n, P] at time t on its grid."""

    latents: Tensor
    t: float
    grid: ImageSize


Part = TextPart | VitPart | VaePart | NoisePart


@dataclass(frozen=True)
class Row:
    """One attention document. `branch` names its guidance copy; text rows are `cond` too."""

    sample: int
    branch: str
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class PlacedPart:
    """A part and the segment that holds it."""

    part: Part
    segment: Segment


@dataclass(frozen=True)
class PackLayout:
    """How images are addressed when their tokens are placed, and the ids of the markers."""

    special: SpecialTokens
    latent_table_side: int
    vit_table_side: int


@dataclass(frozen=True)
class NoiseRows:
    """Which noise segments, counted in packed order, are the guidance copies of each sample.

    Lists hold one index a trained image; `text` and `image` are empty where no such copy exists.
    """

    cond: list[int]
    text: list[int]
    image: list[int]


@dataclass(frozen=True)
class Packed:
    """A batch on the host, its labels, and where the copies of each trained image are."""

    batch: PackedBatch
    label_ids: Tensor  # int64 [Y]
    label_samples: Tensor  # int64 [Y], the sample each label belongs to
    noise_rows: NoiseRows


def pack_rows(rows: list[Row], layout: PackLayout, timestep_dtype: torch.dtype) -> Packed:
    """Packs rows flat: every row is a tree of its own, padded to a multiple of 128 tokens.

    Args:
        rows: at least one, in packed order.
        layout: marker ids and sides of the position tables.
        timestep_dtype: type that timesteps are rounded to on their way in.
    """
    builder, placed, sources = ForestBuilder(), [], []
    for row in rows:
        parent, row_start = ROOT, builder.num_tokens
        for part in row.parts:
            parent = builder.add(_kind(part), _length(part), parent)
            placed.append(PlacedPart(part, builder.segment(parent)))
            sources.append(row)
        missing = -(builder.num_tokens - row_start) % ROW_MULTIPLE
        if missing:
            parent = builder.add(SegmentKind.TEXT, missing, parent)
            padding = TextPart((layout.special.eos,) * missing)
            placed.append(PlacedPart(padding, builder.segment(parent)))
            sources.append(row)
    plan = builder.finish()
    batch, label_ids, label_samples = _tensors(plan, placed, sources, layout, timestep_dtype)
    return Packed(batch, label_ids, label_samples, _noise_rows(placed, sources))


def _kind(part: Part) -> SegmentKind:
    if isinstance(part, TextPart):
        return SegmentKind.TEXT
    return SegmentKind.NOISE if isinstance(part, NoisePart) else SegmentKind.IMAGE


def _num_patches(part: Part) -> int:
    if isinstance(part, VitPart):
        return part.image.vit_features.shape[0]
    latents = part.image.latents if isinstance(part, VaePart) else part.latents
    return latents.shape[0]


def _length(part: Part) -> int:
    return len(part.ids) if isinstance(part, TextPart) else _num_patches(part) + 2


def _noise_rows(placed: list[PlacedPart], sources: list[Row]) -> NoiseRows:
    branches = [
        row.branch
        for item, row in zip(placed, sources, strict=True)
        if isinstance(item.part, NoisePart)
    ]
    return NoiseRows(*([i for i, b in enumerate(branches) if b == name] for name in BRANCHES))


class _Collector:
    """Gathers ids and packed positions of one batch while its segments are walked."""

    def __init__(self) -> None:
        self.text_ids: list[int] = []
        self.text_index: list[int] = []
        self.vit_index: list[int] = []
        self.latent_index: list[int] = []
        self.label_index: list[int] = []
        self.noise_index: list[int] = []
        self.label_ids: list[int] = []
        self.label_samples: list[int] = []
        self.vit_features: list[Tensor] = []
        self.vit_positions: list[Tensor] = []
        self.latents: list[Tensor] = []
        self.latent_positions: list[Tensor] = []
        self.timesteps: list[Tensor] = []

    def add_text(self, part: TextPart, segment: Segment, sample: int) -> None:
        self.text_ids += part.ids
        self.text_index += range(segment.start, segment.end)
        if part.is_trained:
            # bos and eos carry no loss; the token at i predicts the id at i + 1.
            labels = part.ids[1:-1]
            self.label_ids += labels
            self.label_index += range(segment.start, segment.start + len(labels))
            self.label_samples += [sample] * len(labels)

    def add_image(self, part: Part, segment: Segment, layout: PackLayout) -> None:
        patches = range(segment.start + 1, segment.end - 1)
        self.text_ids += [layout.special.vision_start, layout.special.vision_end]
        self.text_index += [segment.start, segment.end - 1]
        if isinstance(part, VitPart):
            self.vit_index += patches
            self.vit_features.append(part.image.vit_features)
            self.vit_positions.append(position_ids(part.image.vit_grid, layout.vit_table_side))
            return
        is_noise = isinstance(part, NoisePart)
        latents = part.latents if is_noise else part.image.latents
        grid = part.grid if is_noise else part.image.latent_grid
        self.latent_index += patches
        self.latents.append(latents)
        self.latent_positions.append(position_ids(grid, layout.latent_table_side))
        time = part.t if is_noise else 0.0
        self.timesteps.append(torch.full((latents.shape[0],), time, dtype=torch.float32))
        if is_noise:
            self.noise_index += patches


def _tensors(
    plan, placed: list[PlacedPart], sources: list[Row], layout: PackLayout, timestep_dtype
) -> tuple[PackedBatch, Tensor, Tensor]:
    seen = _Collector()
    for item, row in zip(placed, sources, strict=True):
        if isinstance(item.part, TextPart):
            seen.add_text(item.part, item.segment, row.sample)
        else:
            seen.add_image(item.part, item.segment, layout)
    batch = PackedBatch(
        plan=plan,
        rope_ids=_ints(plan.rope_ids()),
        text_ids=_ints(seen.text_ids),
        text_index=_ints(seen.text_index),
        vit_features=torch.cat(seen.vit_features) if seen.vit_features else torch.zeros(0, 0),
        vit_position_ids=_concat_ints(seen.vit_positions),
        vit_index=_ints(seen.vit_index),
        latents=torch.cat(seen.latents) if seen.latents else torch.zeros(0, LATENT_SIZE),
        timesteps=torch.cat([torch.zeros(0), *seen.timesteps]).to(timestep_dtype).float(),
        latent_position_ids=_concat_ints(seen.latent_positions),
        latent_index=_ints(seen.latent_index),
        label_index=_ints(seen.label_index),
        noise_index=_ints(seen.noise_index),
    )
    return batch, _ints(seen.label_ids), _ints(seen.label_samples)


def _ints(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def _concat_ints(values: list[Tensor]) -> Tensor:
    return torch.cat(values) if values else _ints([])
