"""Contexts of a rollout: text and image segments appended to a batch of cached prefixes.

Shape letters: B contexts, T packed new tokens, D hidden, P numbers in a latent token (64).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from modeling.bagel.bagel import Bagel, EagerStack, Stack, Wanted
from modeling.bagel.cache import CacheAppend, KvCache
from modeling.bagel.config import ImageSize
from modeling.bagel.images import position_ids
from modeling.bagel.layers import to_device
from modeling.bagel.qwen2_navit import ExpertOrder, QkRounding
from modeling.bagel.sampling import SamplingConfig, sample_tokens
from modeling.bagel.tokenizer import BagelTokenizer

Draw = Callable[[Tensor, SamplingConfig, torch.Generator], tuple[Tensor, Tensor]]
"""Tokens int64 [B] and their probabilities fp32 [B] from logits [B, V]."""
NUM_MARKERS = 2
INVARIANT_ROWS = 512
"""From so many rows on, cuBLAS gives a row of a product the same bits whatever the others are."""


@dataclass(frozen=True)
class SpecialTokens:
    """Ids of the four marker tokens."""

    bos: int
    eos: int
    vision_start: int
    vision_end: int

    @staticmethod
    def of(tokenizer: BagelTokenizer) -> "SpecialTokens":
        """The markers of a tokenizer."""
        return SpecialTokens(
            tokenizer.bos, tokenizer.eos, tokenizer.vision_start, tokenizer.vision_end
        )

    def text_segment(self, tokens: list[int]) -> list[int]:
        """A text segment: bos, tokens, eos."""
        return [self.bos, *tokens, self.eos]


@dataclass(frozen=True)
class ConditionImage:
    """One picture as the model reads it: frozen encoder outputs, computed once and shared."""

    vit_patches: Tensor  # fp32 [I, patch * patch * 3]
    vit_features: Tensor  # [I, D_vit]
    vit_grid: ImageSize
    latents: Tensor  # [G, P], clean
    latent_grid: ImageSize

    @property
    def vit_length(self) -> int:
        """Tokens of its image-encoder segment, markers included."""
        return self.vit_features.shape[0] + NUM_MARKERS

    @property
    def latent_length(self) -> int:
        """Tokens of its latent segment, markers included."""
        return self.latents.shape[0] + NUM_MARKERS


@dataclass(frozen=True)
class ImageAppend:
    """A planned image segment for each context: its split, RoPE ids and cache places."""

    experts: ExpertOrder
    marker_ids: Tensor
    rope_ids: Tensor
    position_ids: Tensor
    append: CacheAppend


@dataclass(frozen=True)
class Stacks:
    """What runs the layers over text and over image segments, and what draws tokens."""

    text: Stack = EagerStack()
    image: Stack = EagerStack()
    draw: Draw = sample_tokens


EAGER = Stacks()


class Contexts:
    """B growing contexts over one KV cache. Construct and use on resident weights, no_grad."""

    def __init__(
        self,
        model: Bagel,
        cache: KvCache,
        special: SpecialTokens,
        rounding: QkRounding,
        stacks: Stacks = EAGER,
    ):
        self.model = model
        self.stacks = stacks
        self.cache = cache
        self.special = special
        self.rounding = rounding
        self.device = cache.device

    @property
    def rows(self) -> list[int]:
        return list(range(self.cache.num_rows))

    def add_text(self, segments: list[list[int]]) -> None:
        """Appends to context i the text segment with tokens `segments[i]` (no markers)."""
        segments = [self.special.text_segment(tokens) for tokens in segments]
        self.feed_text(self.rows, segments)

    def feed_text(self, rows: list[int], tokens: list[list[int]]) -> Tensor:
        """Appends raw token runs to some contexts: final hidden states [T, D]."""
        lengths = [len(run) for run in tokens]
        ropes = [
            self.cache.next_rope[row] + i
            for row, length in zip(rows, lengths, strict=True)
            for i in range(length)
        ]
        ids = to_device(torch.tensor([i for run in tokens for i in run]), self.device)
        append = self.cache.append(rows, lengths, causal=True)
        experts = ExpertOrder(ids.numel(), 0, None, None)
        rope_ids = to_device(torch.tensor(ropes), self.device)
        hidden = self.extend_text(self.model.embed_text(ids), experts, rope_ids, append)
        self.cache.advance(rows, lengths, lengths)
        return hidden

    def extend_text(
        self, x: Tensor, experts: ExpertOrder, rope_ids: Tensor, append: CacheAppend
    ) -> Tensor:
        """The layers over text tokens, which are all of the und expert."""
        return self.model.extend(x, experts, rope_ids, append, self.rounding, self.stacks.text)

    def text_logits(self, hidden: Tensor) -> Tensor:
        """Logits [T, V] of final hidden states [T, D]."""
        return self.stacks.text.project(hidden, self.model.language_model.lm_head)

    def draw(
        self, logits: Tensor, sampling: SamplingConfig, generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        """Next tokens int64 [T] and their untempered probabilities fp32 [T]."""
        return self.stacks.draw(logits, sampling, generator)

    def weights(self) -> list[Tensor]:
        """All weights that a pass reads, as they lie now."""
        return list(self.model.parameters())

    def add_vit(self, images: list[ConditionImage]) -> None:
        """Appends the image-encoder segment of `images[i]` to context i."""
        self._run_vit(images, rope_offset=0)
        lengths = [image.vit_length for image in images]
        self.cache.advance(self.rows, lengths, [1] * len(images))

    def add_image(self, images: list[ConditionImage], overlay: bool) -> None:
        """Appends the latent and then the image-encoder segment of `images[i]` to context i.

        With `overlay` (the upstream recipe) both begin at the same cache position and the length
        moves on only after both: latent entries are lost, up to the end of the encoder's, and as
        many zero entries behind the longer segment are attended instead.
        """
        lengths = [(image.latent_length, image.vit_length) for image in images]
        if not overlay:
            self._run_vae(images)
            self.cache.advance(self.rows, [latent for latent, _ in lengths], [1] * len(images))
            self.add_vit(images)
            return
        # Of latent entries nothing reads but those that reach behind the encoder's.
        if any(latent > vit for latent, vit in lengths):
            self._run_vae(images)
        self._run_vit(images, rope_offset=1)
        self.cache.advance(self.rows, list(map(sum, lengths)), [2] * len(images))
        # Behind the longer of the two segments nothing was written.
        self.cache.leave_blank(self.rows, list(map(min, lengths)))

    def plan_noise(
        self, grid: ImageSize, rows: Sequence[int], by_expert: bool = False
    ) -> ImageAppend:
        """Plans a noise segment behind some contexts, for `NoiseForward`.

        With `by_expert` each expert's tokens attend as a run, as they always do on a GPU.
        """
        side = self.model.config.max_latent_size
        positions = [position_ids(grid, side)] * len(rows)
        return self._plan_image(positions, 0, is_gen=True, by_expert=by_expert, rows=rows)

    def _run_vae(self, images: list[ConditionImage]) -> None:
        side = self.model.config.max_latent_size
        plan = self._plan_image(
            [position_ids(image.latent_grid, side) for image in images], 0, is_gen=True
        )
        latents = torch.cat([image.latents for image in images])
        # One time for all tokens: its embedding is a matrix product of a single row.
        zero = self.model.time_embedder(torch.zeros(1, device=self.device))
        self._extend(plan, self.model.embed_latents(latents, zero, plan.position_ids))

    def _run_vit(self, images: list[ConditionImage], rope_offset: int) -> None:
        side = self.model.config.vit.side
        plan = self._plan_image(
            [position_ids(image.vit_grid, side) for image in images], rope_offset, is_gen=False
        )
        features = torch.cat([image.vit_features for image in images])
        self._extend(plan, self.model.embed_vit(features, plan.position_ids))

    def _plan_image(
        self,
        positions: list[Tensor],
        rope_offset: int,
        is_gen: bool,
        by_expert: bool = False,
        rows: Sequence[int] | None = None,
    ) -> ImageAppend:
        rows = self.rows if rows is None else list(rows)
        counts = [p.numel() for p in positions]
        lengths = [count + NUM_MARKERS for count in counts]
        markers, patches, start = [], [], 0
        for length in lengths:
            markers += [start, start + length - 1]
            patches.append(torch.arange(start + 1, start + length - 1))
            start += length
        und, gen = torch.tensor(markers), torch.cat(patches)
        experts = ExpertOrder.from_positions(*(to_device(x, self.device) for x in (und, gen)))
        # On a CPU the whole segment attends at once: recorded runs hold the bits of that.
        by_expert = by_expert or self.device.type == "cuda"
        runs = [[NUM_MARKERS] * len(rows), counts] if by_expert else None
        if not is_gen:
            # Encoder tokens go through the und expert too: one run in document order.
            experts, runs = ExpertOrder(start, 0, None, experts.inverse), None
        ropes = [self.cache.next_rope[row] + rope_offset for row in rows]
        rope_ids = torch.repeat_interleave(torch.tensor(ropes), torch.tensor(lengths))
        ids = [self.special.vision_start, self.special.vision_end] * len(rows)
        return ImageAppend(
            experts=experts,
            marker_ids=to_device(torch.tensor(ids), self.device),
            rope_ids=to_device(rope_ids, self.device),
            position_ids=to_device(torch.cat(positions), self.device),
            append=self.cache.append(
                rows,
                lengths,
                False,
                experts if is_gen else None,
                runs,
                of_rows=self.cache.num_rows,
            ),
        )

    def _extend(self, plan: ImageAppend, patches: Tensor) -> None:
        x = torch.cat((self.model.embed_text(plan.marker_ids), patches))
        experts = plan.experts
        if experts.num_gen == 0:
            x = x[experts.inverse]
            experts = ExpertOrder(x.shape[0], 0, None, None)
        self.model.extend(
            x, experts, plan.rope_ids, plan.append, self.rounding, self.stacks.image, Wanted.NONE
        )
