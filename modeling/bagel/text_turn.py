"""One turn of static text decoding: state on the device that moves on in place, and its program.

Shape letters: A active samples.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from modeling.bagel.attention import cache_read
from modeling.bagel.cache import CacheAppend, CacheRun, KvCache
from modeling.bagel.context import Contexts
from modeling.bagel.layers import to_device
from modeling.bagel.qwen2_navit import ExpertOrder
from modeling.bagel.sampling import SamplingConfig


@dataclass(frozen=True)
class TurnState:
    """Device state of A active samples, written in place: by `load`, and by each turn."""

    tokens: Tensor  # int64 [A], to be fed
    moving: Tensor  # int64 [3, A]: what grows by 1 with each turn, the three below
    rope_ids: Tensor
    places: Tensor  # flat cache positions of the fed tokens
    keys_used: Tensor  # filled positions with the fed token
    key_starts: Tensor  # int32 [A + 1], flat cache positions where rows begin, and the last ends
    drawn: Tensor  # float64 [2, A]: next tokens and their probabilities, read by the host

    @staticmethod
    def zeros(count: int, device: torch.device) -> "TurnState":
        """State of `count` samples before anything is loaded."""
        moving = torch.zeros(3, count, dtype=torch.int64, device=device)
        return TurnState(
            torch.zeros(count, dtype=torch.int64, device=device),
            moving,
            *moving,
            key_starts=torch.zeros(count + 1, dtype=torch.int32, device=device),
            drawn=torch.zeros(2, count, dtype=torch.float64, device=device),
        )

    def load(self, cache: KvCache, rows: list[int]) -> None:
        """Takes over what the host knows of `rows`; the tokens to be fed are left as they are."""
        lengths = [cache.lengths[row] for row in rows]
        starts = [row * cache.capacity for row in rows]
        numbers = {
            "rope_ids": [cache.next_rope[row] for row in rows],
            "places": [start + n for start, n in zip(starts, lengths, strict=True)],
            "key_starts": [*starts, starts[-1] + cache.capacity],
            "keys_used": [n + 1 for n in lengths],
        }
        loaded = torch.tensor([n for part in numbers.values() for n in part])
        loaded = to_device(loaded, cache.device)
        parts = loaded.split([len(part) for part in numbers.values()])
        for name, part in zip(numbers, parts, strict=True):
            getattr(self, name).copy_(part)


@dataclass(frozen=True)
class TurnSource:
    """What the turns of one decode work on."""

    contexts: Contexts
    weights: list[Tensor]
    generator: torch.Generator


class TurnProgram:
    """One turn of A samples: feed, attend, draw, move on. Runs eagerly or captured.

    Built once for a number of samples; `load` says which rows of which contexts they are. All that
    depends on the rows is device state, so a captured turn serves any of them.
    """

    def __init__(self, count: int, sampling: SamplingConfig, device: torch.device):
        self.state = TurnState.zeros(count, device)
        self.sampling = sampling
        read = cache_read([0] * count, [1] * count, self.state.keys_used, 0, causal=True)
        self._read = replace(read, key_starts=self.state.key_starts)
        self._experts = ExpertOrder(count, 0, None, None)
        self.source: TurnSource | None = None
        self._append: CacheAppend | None = None

    def load(self, source: TurnSource, rows: list[int]) -> None:
        """Makes the next turn that of `rows`, which are as many as ever."""
        cache = source.contexts.cache
        self.state.load(cache, rows)
        self.source = source
        read = replace(self._read, rows=tuple(rows))
        self._append = CacheAppend(CacheRun(cache, self.state.places, read, len(read.rows)))

    def run(self) -> None:
        state, contexts = self.state, self.source.contexts
        hidden = contexts.extend_text(
            contexts.model.embed_text(state.tokens), self._experts, state.rope_ids, self._append
        )
        logits = contexts.text_logits(hidden)
        tokens, probs = contexts.draw(logits, self.sampling, self.source.generator)
        state.tokens.copy_(tokens)
        state.drawn[0].copy_(tokens)
        state.drawn[1].copy_(probs)
        state.moving.add_(1)

    def watched(self) -> list[Tensor]:
        """Everything whose address a graph of this turn bakes in."""
        cache = self.source.contexts.cache
        own = [*vars(self.state).values(), self._read.query_bounds]
        return [*own, *cache.keys, *cache.values, *self.source.weights]
