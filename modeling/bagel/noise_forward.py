"""The flow's forward: velocities of the same noisy latents behind one or several branches at once.

Shape letters: R branches, B contexts of each, n image tokens, P numbers in a latent token (64),
D hidden.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from modeling.bagel.bagel import Wanted
from modeling.bagel.cache import CacheAppend
from modeling.bagel.config import ImageSize
from modeling.bagel.context import INVARIANT_ROWS, NUM_MARKERS, Contexts
from modeling.bagel.layers import to_device
from modeling.bagel.qwen2_navit import ExpertOrder

Rows = tuple[int, ...]
"""Some of the contexts of a branch, in order."""


class NoiseForward:
    """A noise segment planned behind the contexts of R branches, overwritten by each forward.

    With `rows` a forward goes through these contexts of each branch only. The others get the
    velocities of one of them: their own where all have the same prefix and the same latents, and
    otherwise some that nobody may read.
    """

    def __init__(
        self, branches: list[Contexts], grid: ImageSize, rows: Sequence[Rows] | None = None
    ):
        self.branches = branches
        self._model = branches[0].model
        is_joint = len(branches) > 1
        pairs = list(zip(branches, rows or [tuple(each.rows) for each in branches], strict=True))
        plans = [contexts.plan_noise(grid, some, is_joint) for contexts, some in pairs]
        of_picture = plans[0].position_ids[: grid.height * grid.width]
        self._position_ids = of_picture.repeat(branches[0].cache.num_rows)
        self._picks = [_Pick.of(contexts, some) for contexts, some in pairs]
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
        model, tokens = self._model, x.flatten(0, 1)
        latents = model.embed_latents(tokens, self._time(t, tokens.shape[0]), self._position_ids)
        chosen = [pick.rows_of(latents) for pick in self._picks]
        embedded = torch.cat((model.embed_text(self._marker_ids), *chosen))
        hidden = model.extend(
            embedded,
            self._experts,
            self._rope_ids,
            self._append,
            self.branches[0].rounding,
            self.branches[0].stacks.image,
            Wanted.GEN,
        )
        # Of each branch all rows: that this product, too, has the same bits for other numbers of
        # rows is not known.
        parts = hidden[self._experts.num_und :].split([part.shape[0] for part in chosen])
        pairs = zip(self._picks, parts, strict=True)
        velocities = [model.llm2vae(pick.to_all(part)) for pick, part in pairs]
        return torch.stack(velocities).view(len(parts), *x.shape)

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


@dataclass(frozen=True)
class _Pick:
    """Which of B contexts a forward goes through, and whose results each context gets.

    None for both where it goes through all of them.
    """

    num_contexts: int
    chosen: Tensor | None
    sources: Tensor | None

    @staticmethod
    def of(contexts: Contexts, rows: Rows) -> "_Pick":
        if rows == tuple(contexts.rows):
            return _Pick(len(rows), None, None)
        sources = [rows.index(row) if row in rows else 0 for row in contexts.rows]
        chosen, sources = (
            to_device(torch.tensor(ids), contexts.device) for ids in (rows, sources)
        )
        return _Pick(contexts.cache.num_rows, chosen, sources)

    def rows_of(self, x: Tensor) -> Tensor:
        """[B * n, D] -> what belongs to the contexts gone through, one after the other."""
        if self.chosen is None:
            return x
        return x.unflatten(0, (self.num_contexts, -1))[self.chosen].flatten(0, 1)

    def to_all(self, x: Tensor) -> Tensor:
        """The way back: [B * n, D]."""
        if self.sources is None:
            return x
        return x.unflatten(0, (self.chosen.numel(), -1))[self.sources].flatten(0, 1)


def can_join(branches: list[Contexts], grid: ImageSize) -> bool:
    """Whether one forward for all branches keeps the bits of one for each."""
    rows = [contexts.cache.num_rows * grid.height * grid.width for contexts in branches]
    return branches[0].stacks.image.keeps_runs_apart and min(rows) >= INVARIANT_ROWS


def can_choose(branches: list[Contexts], grid: ImageSize) -> bool:
    """Whether a forward through some contexts keeps the bits that they have among all.

    Gen rows of one picture must be enough for products that do not look at others, and the few und
    rows must be summed in the order of all contexts' rows.
    """
    if grid.height * grid.width < INVARIANT_ROWS:
        return False
    stack, decoder = branches[0].stacks.image, branches[0].model.decoder
    und_rows = {NUM_MARKERS * contexts.cache.num_rows for contexts in branches}
    return all(stack.keeps_order(decoder, rows) for rows in und_rows)


def _by_expert(branches: list[Sequence]) -> list:
    """What each branch has for und and for gen: all for und, then all for gen."""
    return [part for parts in zip(*branches, strict=True) for part in parts]


def _sizes(experts: ExpertOrder) -> list[int]:
    return [experts.num_und, experts.num_gen]
