"""Static KV cache of a rollout: one padded tensor a layer, filled lengths kept on the host.

Shape letters: B cache rows, C positions a row, K KV heads, H head size, T new tokens.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from modeling.bagel.attention import CacheRead, cache_read, cached_attention
from modeling.bagel.config import LlmConfig
from modeling.bagel.layers import to_device
from modeling.bagel.qwen2_navit import ExpertOrder


@dataclass(frozen=True)
class CacheSpec:
    """What a cache is made of: `rows` contexts of up to `capacity` positions, in every layer."""

    config: LlmConfig
    rows: int
    capacity: int
    device: torch.device
    dtype: torch.dtype

    def empty(self) -> list[Tensor]:
        """Uninitialised memory of the keys, or of the values: [B, C, K, H] for each layer."""
        shape = (self.rows, self.capacity, self.config.num_kv_heads, self.config.head_size)
        return [
            torch.empty(shape, device=self.device, dtype=self.dtype)
            for _ in range(self.config.num_layers)
        ]


class KvCache:
    """Keys and values of B contexts, and for each its filled length and its next RoPE id.

    Of each it also knows one range of filled positions that hold zeros, begin and end.

    Built over given memory, which is not cleared: what reads a cache masks by the filled lengths.
    """

    def __init__(self, keys: list[Tensor], values: list[Tensor]):
        rows, self.capacity = keys[0].shape[:2]
        self.device = keys[0].device
        self.keys = keys
        self.values = values
        self.lengths = [0] * rows
        self.next_rope = [0] * rows
        self.blanks = [(0, 0)] * rows
        self.is_uniform = True
        """Whether every row is a copy of one prefix, or empty."""

    @staticmethod
    def zeros(spec: CacheSpec) -> "KvCache":
        """An empty cache over new memory."""
        # Zeros, not empty: the upstream recipe attends to positions nothing was written to.
        keys, values = ([layer.zero_() for layer in spec.empty()] for _ in range(2))
        return KvCache(keys, values)

    def close(self) -> None:
        """Lets go of the memory, which goes to another cache; a pass over this one fails then."""
        self.keys.clear()
        self.values.clear()

    @property
    def num_rows(self) -> int:
        return len(self.lengths)

    def copy_rows(self, source: "KvCache") -> None:
        """Starts this empty cache with what `source` holds: row by row, or its one row for all.

        Raises:
            ValueError: the rows do not pair, or `source` holds more than a row of this cache.
        """
        longest = max(source.lengths)
        if source.num_rows not in (1, self.num_rows) or longest > self.capacity:
            raise ValueError(
                f"{source.num_rows} rows of up to {longest} positions cannot start "
                f"{self.num_rows} rows of {self.capacity}"
            )
        for mine, theirs in ((self.keys, source.keys), (self.values, source.values)):
            for layer, prefix in zip(mine, theirs, strict=True):
                layer[:, :longest] = prefix[:, :longest]
        copies = self.num_rows // source.num_rows
        self.lengths = source.lengths * copies
        self.next_rope = source.next_rope * copies
        self.blanks = source.blanks * copies
        self.is_uniform = source.num_rows == 1 or source.is_uniform

    def append(
        self,
        rows: list[int],
        lengths: list[int],
        causal: bool,
        experts: ExpertOrder | None = None,
        runs: list[list[int]] | None = None,
        of_rows: int | None = None,
    ) -> "CacheAppend":
        """Plans the writing of `lengths[i]` tokens behind row `rows[i]`; nothing moves on yet.

        Args:
            rows, lengths: where the tokens go.
            causal: whether a token sees only itself and earlier ones of those written.
            experts: the order in which tokens will come; None for document order.
            runs: tokens of each row in each expert's run, for attention run by run: what is not
                causal may. Without it all tokens attend together, in document order.
            of_rows: how many rows the eager path would append to at once, where these may be
                some of them, each with as many tokens; None if they are all.

        Raises:
            ValueError: a row would grow past the capacity.
        """
        starts = [self.lengths[row] for row in rows]
        for row, start, length in zip(rows, starts, lengths, strict=True):
            if start + length > self.capacity:
                raise ValueError(
                    f"cache row {row} holds {start} of {self.capacity} positions, "
                    f"{length} more do not fit"
                )
        firsts = [row * self.capacity + start for row, start in zip(rows, starts, strict=True)]
        spans = zip(firsts, lengths, strict=True)
        targets = torch.cat([torch.arange(first, first + length) for first, length in spans])
        targets = to_device(targets, self.device)
        ends = [start + length for start, length in zip(starts, lengths, strict=True)]
        used = to_device(torch.tensor(ends, dtype=torch.int32), self.device)
        ranges, blanks = [self.blanks[row] for row in rows], None
        if any(begin < end for begin, end in ranges):
            blanks = to_device(torch.tensor(ranges, dtype=torch.int32), self.device)
        if experts is not None:
            targets = experts.to_expert(targets)
        counts = runs or [lengths]
        parts = [
            CacheRun(
                self,
                part,
                cache_read(rows, count, used, self.capacity, causal, blanks),
                sum(count) * (of_rows or len(rows)) // len(rows),
            )
            for part, count in zip(targets.split(list(map(sum, counts))), counts, strict=True)
        ]
        return CacheAppend(*parts, order=None if runs else experts)

    def advance(self, rows: list[int], lengths: list[int], rope_steps: list[int]) -> None:
        """Moves filled lengths and RoPE ids on."""
        for row, length, step in zip(rows, lengths, rope_steps, strict=True):
            self.lengths[row] += length
            self.next_rope[row] += step
        self.is_uniform = False

    def leave_blank(self, rows: list[int], lengths: list[int]) -> None:
        """Notes that the last `lengths[i]` filled positions of row `rows[i]` hold zeros.

        Of a row that has such a range already the later one is known, and the other is read.

        Raises:
            ValueError: a row is not filled that far.
        """
        for row, length in zip(rows, lengths, strict=True):
            end = self.lengths[row]
            if length > end:
                raise ValueError(f"cache row {row} holds {end} positions, not {length} zeros")
            self.blanks[row] = (end - length, end)


@dataclass(frozen=True)
class CacheRun:
    """New tokens of a cache, row by row: where keys and values go, and what the tokens see.

    `eager_tokens` is how many tokens the eager path would take at once here. Sums over few rows
    depend on their number, and the exact grade adds up in the order of that many.
    """

    cache: KvCache
    places: Tensor
    read: CacheRead
    eager_tokens: int

    @property
    def num_tokens(self) -> int:
        return sum(self.read.query_lengths)

    def memory(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer by flat position: [B * C, K, H] each."""
        return self.cache.keys[layer].flatten(0, 1), self.cache.values[layer].flatten(0, 1)

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Writes k, v [T, K, H] into `layer`."""
        for memory, new in zip(self.memory(layer), (k, v), strict=True):
            memory.index_copy_(0, self.places, new)

    def attend(self, layer: int, q: Tensor, out: Tensor | None = None) -> Tensor:
        """Attends from q [T, N, H] over what the cache holds, the new tokens included: [T, N, H].

        The result is written into `out` if it is given.
        """
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        return cached_attention(q, keys, values, self.read, out)


class CacheAppend:
    """One planned append: runs of tokens in expert order.

    With `order` there is one run, whose attention wants document order: `order` leads there.
    """

    def __init__(self, *runs: CacheRun, order: ExpertOrder | None = None):
        self.runs = runs
        self.order = order

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Writes k, v [T, K, H] into `layer` and attends from q [T, N, H]: [T, N, H]."""
        sizes = [run.num_tokens for run in self.runs]
        for run, *new in zip(self.runs, k.split(sizes), v.split(sizes), strict=True):
            run.write(layer, *new)
        if self.order is not None:
            (run,) = self.runs
            return self.order.to_expert(run.attend(layer, self.order.to_document(q)))
        parts = zip(self.runs, q.split(sizes), strict=True)
        outputs = [run.attend(layer, part) for run, part in parts]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)
