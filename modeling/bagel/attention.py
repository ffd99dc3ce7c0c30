"""Attention backends: packed varlen, padded static cache, and masks over a forest of segments.

Shape letters: S packed tokens, T query tokens, B cache rows, C cache positions, N heads,
K KV heads, H head size. On a GPU the varlen kernels are PyTorch's own flash attention, and what a
flow and a text turn read from the cache goes through kernels of our own (fused_attention.py); on a
CPU every document is one scaled_dot_product_attention call.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from modeling.bagel.layers import once_per_device, to_device
from modeling.bagel.layout import SegmentPlan

FLEX_BLOCK = 128
MASK_PAIRS = 2**26
BACKENDS = ("auto", "dense", "flex", "flash")


def varlen_attention(
    q: Tensor, k: Tensor, v: Tensor, seqlens: list[int], causal: bool
) -> Tensor:
    """Attention inside each of several packed sequences.

    Args:
        q: [T, N, H]. k, v: [T, K, H]; K divides N. The same type, bf16 or fp16 on a GPU.
        seqlens: lengths of the sequences; they add up to T.
        causal: whether a token sees only itself and earlier ones.

    Returns:
        [T, N, H].
    """
    if _has_kernels(q):
        is_alone = len(seqlens) == 1
        bounds = _bounds_of_one(*seqlens, q.device) if is_alone else _bounds(seqlens, q.device)
        return torch.ops.aten._flash_attention_forward(
            q, k, v, bounds, bounds, max(seqlens), max(seqlens), 0.0, causal, False
        )[0]
    pieces = zip(q.split(seqlens), k.split(seqlens), v.split(seqlens), strict=True)
    return torch.cat([_sdpa(q1, k1, v1, is_causal=causal) for q1, k1, v1 in pieces])


@dataclass(frozen=True)
class CacheRead:
    """Which cached positions each of the packed query sequences sees.

    `rows[i]` is the cache row of sequence i, `query_lengths[i]` its tokens and `keys_used[i]` the
    filled positions of that row, its own tokens included. `blanks[i]` is begin and end of those of
    them that hold zeros, [sequences, 2], for kernels that need not read them; None if there are
    none. Tensors are int32 on the device; where all queries are single tokens, `keys_used` may be
    int64.
    """

    rows: tuple[int, ...]
    query_lengths: tuple[int, ...]
    causal: bool
    query_bounds: Tensor
    key_starts: Tensor
    keys_used: Tensor
    blanks: Tensor | None


def cache_read(
    rows: list[int],
    query_lengths: list[int],
    keys_used: Tensor,
    capacity: int,
    causal: bool,
    blanks: Tensor | None = None,
) -> CacheRead:
    """Builds a CacheRead; `capacity` is C, the padded length of a cache row."""
    device = keys_used.device
    starts = [row * capacity for row in rows]
    return CacheRead(
        rows=tuple(rows),
        query_lengths=tuple(query_lengths),
        causal=causal,
        query_bounds=_bounds(query_lengths, device),
        key_starts=_ints([*starts, starts[-1] + capacity], device),
        keys_used=keys_used,
        blanks=blanks,
    )


def cached_attention(
    q: Tensor, keys: Tensor, values: Tensor, read: CacheRead, out: Tensor | None = None
) -> Tensor:
    """Attention of packed queries over a padded static cache, read in place.

    A causal query sequence stands at the end of its filled positions.

    Args:
        q: [T, N, H], sequences in the order of `read`.
        keys, values: [B, C, K, H].
        out: [T, N, H], contiguous, where the result goes; None makes a new tensor.

    Returns:
        [T, N, H].
    """
    if _has_kernels(q):
        return _cached_on_gpu(q, keys, values, read, out)
    outputs = []
    pieces = q.split(list(read.query_lengths))
    for q1, row, used in zip(pieces, read.rows, read.keys_used.tolist(), strict=True):
        mask = None
        if read.causal and q1.shape[0] > 1:
            mask = torch.ones(q1.shape[0], used, dtype=torch.bool, device=q.device)
            mask = mask.tril(used - q1.shape[0])
        outputs.append(_sdpa(q1, keys[row, :used], values[row, :used], mask=mask))
    result = torch.cat(outputs)
    return result if out is None else out.copy_(result)


def _cached_on_gpu(
    q: Tensor, keys: Tensor, values: Tensor, read: CacheRead, out: Tensor | None
) -> Tensor:
    """cached_attention by kernels that read the padded cache in place."""
    # Imported late: Triton comes with PyTorch's GPU builds only.
    from modeling.bagel.fused_attention import (
        few_queries_attention,
        fits_few,
        fits_image,
        image_attention,
    )

    capacity, flat = keys.shape[1], (keys.flatten(0, 1), values.flatten(0, 1))
    queries, where = _equal_queries([read]), (read.key_starts, read.keys_used)
    if queries is not None:
        if fits_few(queries, q, keys):
            return few_queries_attention(q, [flat], *where, capacity, out)
        if fits_image(queries, q):
            return image_attention(q, *flat, *where, out, read.blanks)
    result = flash_cached_attention(q, keys, values, read)
    return result if out is None else out.copy_(result)


@dataclass(frozen=True)
class JointRead:
    """What a few queries each of several caches' sequences see, for one launch on a GPU."""

    key_starts: Tensor  # int32 [sequences]
    keys_used: Tensor  # int32 [sequences]
    capacity: int

    @staticmethod
    def of(reads: Sequence[CacheRead], caches: Sequence[Tensor], q: Tensor) -> "JointRead | None":
        """The reads of one cache after the other, for queries like `q`, or None if they differ.

        Args:
            reads: of each cache.
            caches: its keys, in one layer: [B, C, K, H].
            q: [T, N, H].
        """
        queries, counts = _equal_queries(reads), {len(read.rows) for read in reads}
        if not _has_kernels(q) or queries is None or len(counts) > 1:
            return None
        # Imported late: Triton comes with PyTorch's GPU builds only.
        from modeling.bagel.fused_attention import MAX_CACHES, fits_few

        if len(reads) > MAX_CACHES or not fits_few(queries, q, caches[0]):
            return None
        return JointRead(
            torch.cat([read.key_starts[: len(read.rows)] for read in reads]),
            torch.cat([read.keys_used for read in reads]),
            max(keys.shape[1] for keys in caches),
        )

    def attend(self, q: Tensor, caches: Sequence[tuple[Tensor, Tensor]], out: Tensor) -> None:
        """`cached_attention` of q [T, N, H] over keys and values [P, K, H] of each cache."""
        from modeling.bagel.fused_attention import few_queries_attention

        where = (self.key_starts, self.keys_used, self.capacity)
        few_queries_attention(q, caches, *where, out)


def _has_kernels(q: Tensor) -> bool:
    """Whether queries like these go through kernels of a GPU."""
    return q.is_cuda and q.dtype != torch.float32


def _equal_queries(reads: Sequence[CacheRead]) -> int | None:
    """The queries of each sequence, if all have as many and each sees all keys; else None."""
    lengths = {length for read in reads for length in read.query_lengths}
    if len(lengths) > 1 or (lengths != {1} and any(read.causal for read in reads)):
        return None
    return lengths.pop()


def flash_cached_attention(q: Tensor, keys: Tensor, values: Tensor, read: CacheRead) -> Tensor:
    """`cached_attention` by PyTorch's flash kernel, on a GPU, for any lengths."""
    return torch.ops.aten._flash_attention_forward(
        q,
        keys.flatten(0, 1),
        values.flatten(0, 1),
        read.query_bounds,
        read.key_starts,
        max(read.query_lengths),
        # The capacity, not the fill: the kernel splits keys by it, and sums in another order.
        keys.shape[1],
        0.0,
        read.causal,
        False,
        seqused_k=read.keys_used,
    )[0]


AttendForest = Callable[[Tensor, Tensor, Tensor], Tensor]


def forest_attention(
    plan: SegmentPlan, device: torch.device, backend: str = "auto"
) -> AttendForest:
    """Prepares differentiable attention over a packed forest: ancestor-or-self, then own rule.

    Args:
        plan: the forest.
        device: where the batch lies.
        backend: `dense` (one mask of S x S), `flex` (compiled FlexAttention, GPU only), or
            `auto` (`flex` on a GPU, `dense` elsewhere, because FlexAttention has no backward on
            a CPU).

    Returns:
        A function of q [S, N, H], k and v [S, K, H] that returns [S, N, H].

    Raises:
        ValueError: an unknown backend, or `flex` on a CPU (R3_ATTENTION).
    """
    if backend == "auto":
        backend = "flex" if device.type == "cuda" else "dense"
    if backend == "flex":
        if device.type != "cuda":
            raise ValueError("R3_ATTENTION=flex needs a GPU: FlexAttention has no CPU backward")
        return _flex_forest(plan, device)
    if backend == "dense":
        return _dense_forest(plan, device)
    raise ValueError(f"R3_ATTENTION={backend}: expected one of {', '.join(BACKENDS[:3])}")


def _dense_forest(plan: SegmentPlan, device: torch.device) -> AttendForest:
    ids, ancestors, causal = plan.segment_ids(), plan.ancestors(), plan.causal()
    same = ids[:, None] == ids[None, :]
    not_later = torch.ones_like(same).tril()
    # One mask for the whole batch, not one a tree: that is what the recorded CPU runs summed over.
    mask = (ancestors[ids][:, ids] | (same & (~causal[ids][:, None] | not_later))).to(device)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return _sdpa(q, k, v, mask=mask)

    return attend


def _flex_forest(plan: SegmentPlan, device: torch.device) -> AttendForest:
    ids, ancestors = plan.segment_ids().to(device), plan.ancestors().to(device)
    causal = plan.causal().to(device)

    def rule(batch, head, q_index, k_index):
        q_segment, k_segment = ids[q_index], ids[k_index]
        own = (q_segment == k_segment) & (~causal[q_segment] | (k_index <= q_index))
        return ancestors[q_segment, k_segment] | own

    block_mask = _block_mask(plan, rule, device)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
        out = _compiled_flex()(q, k, v, block_mask=block_mask, enable_gqa=True)
        return out.squeeze(0).transpose(0, 1)

    return attend


def _block_mask(plan: SegmentPlan, rule: Callable, device: torch.device):
    """The BlockMask of `rule`, which is only evaluated inside trees.

    `create_block_mask` evaluates all S x S pairs: uncompiled that takes too much memory, and its
    compilation has been seen to stall.
    """
    from torch.nn.attention.flex_attention import BlockMask

    num_blocks = -(-plan.num_tokens // FLEX_BLOCK)
    some = torch.zeros(num_blocks, num_blocks, dtype=torch.bool, device=device)
    every = torch.zeros_like(some)
    for start, end in plan.tree_ranges:
        first, last = start // FLEX_BLOCK, -(-end // FLEX_BLOCK)
        keys = torch.arange(first * FLEX_BLOCK, last * FLEX_BLOCK, device=device)
        is_token = keys < plan.num_tokens
        keys = keys.clamp(max=plan.num_tokens - 1)
        width = last - first
        for block in range(first, last, step := max(1, MASK_PAIRS // (width * FLEX_BLOCK**2))):
            stop = min(block + step, last)
            rows = slice((block - first) * FLEX_BLOCK, (stop - first) * FLEX_BLOCK)
            seen = rule(0, 0, keys[rows, None], keys[None, :])
            seen = seen & is_token[rows, None] & is_token[None, :]
            tiles = seen.view(stop - block, FLEX_BLOCK, width, FLEX_BLOCK)
            # A block that two trees share is looked at once for each of them.
            some[block:stop, first:last] |= tiles.any(dim=3).any(dim=1)
            every[block:stop, first:last] |= tiles.all(dim=3).all(dim=1)
    return BlockMask.from_kv_blocks(
        *_block_lists(some & ~every),
        *_block_lists(every),
        BLOCK_SIZE=FLEX_BLOCK,
        mask_mod=rule,
        seq_lengths=(plan.num_tokens, plan.num_tokens),
    )


def _block_lists(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Counts [1, 1, Q] and leading column indexes [1, 1, Q, K] of a bool matrix, int32."""
    counts = blocks.sum(dim=1, dtype=torch.int32)
    indexes = blocks.int().argsort(dim=1, descending=True, stable=True).int()
    return counts[None, None], indexes[None, None]


@cache
def _compiled_flex() -> Callable:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=True)


@once_per_device
def _bounds_of_one(length: int, device: torch.device) -> Tensor:
    """Kept, so that a captured encoder needs nothing from the host."""
    return _bounds([length], device)


def _bounds(lengths: list[int], device: torch.device) -> Tensor:
    totals = [0]
    for length in lengths:
        totals.append(totals[-1] + length)
    return _ints(totals, device)


def _ints(values: list[int], device: torch.device) -> Tensor:
    return to_device(torch.tensor(values, dtype=torch.int32), device)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, is_causal=False) -> Tensor:
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=is_causal, enable_gqa=q.shape[1] != k.shape[1]
    )
    return out.squeeze(0).transpose(0, 1)
