"""The flow's forward: velocities of the same noisy latents behind one or several branches at once.

Shape letters: R branches, B contexts of each, n image tokens, P numbers in a latent token (64).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from modeling.bagel.bagel import Wanted
from modeling.bagel.cache import CacheAppend
from modeling.bagel.config import ImageSize
from modeling.bagel.context import INVARIANT_ROWS, Contexts
from modeling.bagel.qwen2_navit import ExpertOrder


class NoiseForward:
    """A noise segment planned behind every context of R branches, overwritten by each forward."""

    def __init__(self, branches: list[Contexts], grid: ImageSize):
        self.branches = branches
        self._model = branches[0].model
        is_joint = len(branches) > 1
        plans = [contexts.plan_noise(grid, by_expert=is_joint) for contexts in branches]
        self._position_ids = plans[0].position_ids
        self._marker_ids = torch.cat([plan.marker_ids for plan in plans])
        self._experts, self._rope_ids = plans[0].experts, plans[0].rope_ids
        self._append = plans[0].append
        if is_joint:
            # The und tokens of all branches, then their gen tokens: expert order as it stands.
            und, gen = map(sum, zip(*(_sizes(plan.experts) for plan in plans), strict=True))
            self._experts = ExpertOrder(und, gen, None, None)
            ropes = [p.experts.to_expert(p.rope_ids).split(_sizes(p.experts)) for p in plans]
            self._rope_ids = torch.cat(_by_expert(ropes))
            self._append = CacheAppend(*_by_expert([plan.append.runs for plan in plans]))

    def __call__(self, x: Tensor, t: Tensor) -> Tensor:
        """Velocities [R, B, n, P] of x [B, n, P] at a time t (fp32 scalar)."""
        model, tokens, num_branches = self._model, x.flatten(0, 1), len(self.branches)
        latents = model.embed_latents(tokens, self._time(t, tokens.shape[0]), self._position_ids)
        embedded = torch.cat((model.embed_text(self._marker_ids), *[latents] * num_branches))
        hidden = model.extend(
            embedded,
            self._experts,
            self._rope_ids,
            self._append,
            self.branches[0].rounding,
            self.branches[0].stacks.image,
            Wanted.GEN,
        )
        # Branch by branch: that this product, too, has the same bits for more rows is not known.
        parts = hidden[self._experts.num_und :].split(tokens.shape[0])
        return torch.stack([model.llm2vae(part) for part in parts]).view(num_branches, *x.shape)

    def _time(self, t: Tensor, rows: int) -> Tensor:
        """The time, embedded: [rows, D], or [1, D] where one row is known to stand for all."""
        # Each token has its time embedded, as in the learner. On a GPU the products of so many
        # equal rows are equal bit for bit.
        if t.device.type == "cuda" and rows > INVARIANT_ROWS:
            return self._model.time_embedder(t.expand(INVARIANT_ROWS))[:1]
        return self._model.time_embedder(t.expand(rows))

    def memory(self) -> list[Tensor]:
        """All tensors of the caches that a forward reads and writes."""
        caches = [contexts.cache for contexts in self.branches]
        return [tensor for cache in caches for tensor in (*cache.keys, *cache.values)]


def can_join(branches: list[Contexts], grid: ImageSize) -> bool:
    """Whether one forward for all branches keeps the bits of one for each.

    The eager stack takes the und rows of all branches together, and so few have other bits then.
    """
    rows = [contexts.cache.num_rows * grid.height * grid.width for contexts in branches]
    return branches[0].stacks.image is not None and min(rows) >= INVARIANT_ROWS


def _by_expert(branches: list[Sequence]) -> list:
    """What each branch has for und and for gen: all for und, then all for gen."""
    return [part for parts in zip(*branches, strict=True) for part in parts]


def _sizes(experts: ExpertOrder) -> list[int]:
    return [experts.num_und, experts.num_gen]
