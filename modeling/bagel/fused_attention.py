"""Attention over the rollout's static cache in Triton: a few queries a row, and whole images.

Both read keys and values in place, from the filled positions of padded cache rows. What a query
gets does not depend on the other queries, on the number of rows or on the padding: keys are taken
in blocks of fixed size, counted from the start of the row and from the end of its blank range.
Online softmax in fp32 (Milakov & Gimelshein 2018; Dao et al. 2022), split over keys where queries
are few (Dao et al. 2023).

Shape letters: T queries, B cache rows, P padded positions of all rows, N heads, K KV heads, H head
size.
"""

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from modeling.bagel.fused_ops import capability, num_blocks, power_of_2
from modeling.bagel.layers import once_per_device

MAX_FEW = 16
"""Query rows of a KV head (queries times heads that share it) that one program holds."""
SPLIT_KEYS, FEW_BLOCK = 128, 64
SPLITS_AT_ONCE, FEW_WARPS = 8, 4
QUERY_BLOCK, KEY_BLOCK = 128, 128
MIN_IMAGE_QUERIES, IMAGE_HEAD_SIZE = 64, 128
MAX_LOCKS = 65536
MAX_CACHES = 3
"""Caches whose few queries one launch takes: those of the branches of guidance."""
LOG2_E = math.log2(math.e)


@triton.jit
def _online_softmax(scores, values, acc, top, total, scale):
    """Takes a block of scores [Q, B], unscaled like `top`, and values [B, H] into the softmax."""
    new_top = tl.maximum(top, tl.max(scores, axis=1))
    # Scaled behind the maximum: product and difference are then one instruction.
    weights = tl.math.exp2(scores * scale - (new_top * scale)[:, None])
    shrink = tl.math.exp2((top - new_top) * scale)
    total = total * shrink + tl.sum(weights, axis=1)
    acc = tl.dot(weights.to(values.dtype), values, acc * shrink[:, None])
    return acc, new_top, total


@triton.jit
def _load_filled(key_ptr, value_ptr, offset, at, inside, KV_HEADS: tl.constexpr, H: tl.constexpr):
    """Keys [H, B] and values [B, H] of one head at positions `at`, zero where not `inside`."""
    lane = tl.arange(0, H)
    key_places = offset + at[None, :] * (KV_HEADS * H) + lane[:, None]
    keys = tl.load(key_ptr + key_places, mask=inside[None, :], other=0.0)
    value_places = offset + at[:, None] * (KV_HEADS * H) + lane[None, :]
    values = tl.load(value_ptr + value_places, mask=inside[:, None], other=0.0)
    return keys, values


# Contexts of all lengths share one compiled kernel.
@triton.jit(do_not_specialize=["max_splits"])
def _few_queries_kernel(
    q_ptr,
    key_ptr,
    value_ptr,
    second_key_ptr,
    second_value_ptr,
    third_key_ptr,
    third_value_ptr,
    out_ptr,
    part_ptr,
    stat_ptr,
    lock_ptr,
    start_ptr,
    used_ptr,
    scale,
    seqs_each,
    max_splits,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    H: tl.constexpr,
    QUERIES: tl.constexpr,
    ROWS: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """One KV head of one sequence over SPLIT keys; the last program to end joins all splits."""
    seq, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    group: tl.constexpr = HEADS // KV_HEADS
    if seq >= 2 * seqs_each:
        key_ptr, value_ptr = third_key_ptr, third_value_ptr
    elif seq >= seqs_each:
        key_ptr, value_ptr = second_key_ptr, second_value_ptr
    used = tl.load(used_ptr + seq)
    num_splits = (used + SPLIT - 1) // SPLIT
    if split < num_splits:
        lane, row = tl.arange(0, H), tl.arange(0, ROWS)
        is_row = row < group * QUERIES
        places = (seq * QUERIES + row // group) * (HEADS * H) + (kv_head * group + row % group) * H
        places = places[:, None] + lane[None, :]
        q = tl.load(q_ptr + places, mask=is_row[:, None], other=0.0)
        offset = tl.load(start_ptr + seq).to(tl.int64) * (KV_HEADS * H) + kv_head * H
        top = tl.full((ROWS,), float("-inf"), tl.float32)
        total = tl.zeros((ROWS,), tl.float32)
        acc = tl.zeros((ROWS, H), tl.float32)
        for first in tl.static_range(0, SPLIT, BLOCK):
            at = split * SPLIT + first + tl.arange(0, BLOCK)
            inside = at < used
            keys, values = _load_filled(key_ptr, value_ptr, offset, at, inside, KV_HEADS, H)
            # Finite, so that a block without keys leaves the sums as they are and makes no NaN.
            scores = tl.where(inside[None, :], tl.dot(q, keys), -1e30)
            acc, top, total = _online_softmax(scores, values, acc, top, total, scale)
        if num_splits == 1:
            out = (acc / total[:, None]).to(out_ptr.dtype.element_ty)
            tl.store(out_ptr + places, out, mask=is_row[:, None])
        else:
            pair = seq * KV_HEADS + kv_head
            tile = row[:, None] * H + lane[None, :]
            slot = pair * max_splits + split
            tl.store(part_ptr + slot * (ROWS * H) + tile, acc, mask=is_row[:, None])
            tl.store(stat_ptr + slot * (2 * ROWS) + row, top * scale, mask=is_row)
            tl.store(stat_ptr + slot * (2 * ROWS) + ROWS + row, total, mask=is_row)
            # The barrier puts all stores of the program before the one thread's release.
            tl.debug_barrier()
            num_ended = tl.atomic_add(lock_ptr + pair, 1, sem="acq_rel")
            if num_ended == num_splits - 1:
                tl.debug_barrier()
                _join_splits(
                    part_ptr + pair * max_splits * (ROWS * H) + tile,
                    stat_ptr + pair * max_splits * (2 * ROWS) + row,
                    out_ptr + places,
                    is_row,
                    num_splits,
                    H,
                    ROWS,
                    AT_ONCE,
                )
                tl.store(lock_ptr + pair, 0)


@triton.jit
def _join_splits(
    part_ptrs,
    stat_ptrs,
    out_ptrs,
    is_row,
    num_splits,
    H: tl.constexpr,
    ROWS: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """Joins the splits in their order, whatever order they ended in; loads AT_ONCE ahead."""
    top = tl.full((ROWS,), -1e30, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, H), tl.float32)
    for first in tl.range(0, num_splits, AT_ONCE):
        for i in tl.static_range(AT_ONCE):
            split = first + i
            there = is_row & (split < num_splits)
            stats, parts = stat_ptrs + split * (2 * ROWS), part_ptrs + split * (ROWS * H)
            # What is not there changes no bit: its weight is 0, and what is there shrinks by 1.
            split_top = tl.load(stats, mask=there, other=-1e30, cache_modifier=".cg")
            split_total = tl.load(stats + ROWS, mask=there, other=0.0, cache_modifier=".cg")
            part = tl.load(parts, mask=there[:, None], other=0.0, cache_modifier=".cg")
            new_top = tl.maximum(top, split_top)
            shrink, weight = tl.math.exp2(top - new_top), tl.math.exp2(split_top - new_top)
            total = total * shrink + weight * split_total
            acc = acc * shrink[:, None] + weight[:, None] * part
            top = new_top
    out = (acc / total[:, None]).to(out_ptrs.dtype.element_ty)
    tl.store(out_ptrs, out, mask=is_row[:, None])


def fits_few(num_queries: int, q: Tensor, keys: Tensor) -> bool:
    """Whether that many queries of every sequence, of heads like these, fit into one program."""
    num_heads, size = q.shape[-2:]
    rows = num_queries * (num_heads // keys.shape[-2])
    return rows <= MAX_FEW and size >= 16 and size == power_of_2(size)


def fits_image(num_queries: int, q: Tensor) -> bool:
    """Whether the kernel for whole images takes these: its loads want compute capability 9."""
    has_loads = capability(q.device) >= 9
    return has_loads and num_queries >= MIN_IMAGE_QUERIES and q.shape[-1] == IMAGE_HEAD_SIZE


def few_queries_attention(
    q: Tensor,
    caches: Sequence[tuple[Tensor, Tensor]],
    starts: Tensor,
    used: Tensor,
    capacity: int,
    out: Tensor | None = None,
) -> Tensor:
    """Attention of the same small number of queries for every sequence over all its keys.

    Args:
        q: [T, N, H], sequence by sequence, contiguous.
        caches: keys and values of up to MAX_CACHES caches, [P, K, H] each, contiguous. The
            sequences are theirs in order, of each as many.
        starts: int32 [at least sequences], first position of each in its cache.
        used: int32 or int64 [sequences], filled positions of each.
        capacity: at least the largest number of filled positions.
        out: [T, N, H], contiguous, where the result goes; None makes a new tensor.

    Returns:
        [T, N, H].
    """
    num_seqs, (num_heads, size), kv_heads = used.shape[0], q.shape[1:], caches[0][0].shape[1]
    # Programs beyond the filled positions end at once.
    num_splits = num_blocks(capacity, SPLIT_KEYS)
    pairs = num_seqs * kv_heads
    out = torch.empty_like(q) if out is None else out
    parts = q.new_empty(pairs * num_splits * MAX_FEW * size, dtype=torch.float32)
    stats = q.new_empty(pairs * num_splits * MAX_FEW * 2, dtype=torch.float32)
    given = [*caches, *caches[:1] * (MAX_CACHES - len(caches))]
    _few_queries_kernel[(num_seqs, kv_heads, num_splits)](
        q,
        *(tensor for cache in given for tensor in cache),
        out,
        parts,
        stats,
        _locks(q.device),
        starts,
        used,
        size**-0.5 * LOG2_E,
        num_seqs // len(caches),
        num_splits,
        HEADS=num_heads,
        KV_HEADS=kv_heads,
        H=size,
        QUERIES=q.shape[0] // num_seqs,
        ROWS=MAX_FEW,
        SPLIT=SPLIT_KEYS,
        BLOCK=FEW_BLOCK,
        AT_ONCE=SPLITS_AT_ONCE,
        num_warps=FEW_WARPS,
    )
    return out


@once_per_device
def _locks(device: torch.device) -> Tensor:
    """Counters of ended splits, zero between launches: the last program of a pair resets its own.

    All launches share them: within a pass they follow each other, on one stream, and passes do.
    """
    return torch.zeros(MAX_LOCKS, dtype=torch.int32, device=device)


@triton.jit
def _image_kernel(
    q_rows,
    key_rows,
    value_rows,
    key_ptr,
    value_ptr,
    out_ptr,
    start_ptr,
    used_ptr,
    blank_ptr,
    num_queries,
    scale,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    H: tl.constexpr,
    QUERIES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """QUERIES queries of one head of one sequence over all its keys.

    Whole blocks in front of the blank range and behind it come first, then what both leave over.
    """
    first, head, seq = tl.program_id(0) * QUERIES, tl.program_id(1), tl.program_id(2)
    kv_head = head // (HEADS // KV_HEADS)
    q = q_rows.load([seq * num_queries + first, head * H])
    start, used = tl.load(start_ptr + seq), tl.load(used_ptr + seq)
    top = tl.full((QUERIES,), float("-inf"), tl.float32)
    total = tl.zeros((QUERIES,), tl.float32)
    acc = tl.zeros((QUERIES, H), tl.float32)
    whole = used // BLOCK * BLOCK
    if blank_ptr is not None:
        begin, end = tl.load(blank_ptr + 2 * seq), tl.load(blank_ptr + 2 * seq + 1)
        # A zero key has score 0, weight 1 at a top of 0, and adds no value.
        top = tl.where(begin < end, tl.zeros_like(top), top)
        total += end - begin
        used -= end - begin
        front = begin // BLOCK * BLOCK
        whole = front + (used - begin) // BLOCK * BLOCK
    for key in tl.range(0, whole, BLOCK, num_stages=3):
        place = start + key
        if blank_ptr is not None:
            place += tl.where(key < front, 0, end - front)
        keys = key_rows.load([place, kv_head * H])
        values = value_rows.load([place, kv_head * H])
        scores = tl.dot(q, keys.T)
        acc, top, total = _online_softmax(scores, values, acc, top, total, scale)
    lane = tl.arange(0, H)
    for tail in tl.static_range(1 if blank_ptr is None else 2):
        if whole + tail * BLOCK < used:
            at = whole + tail * BLOCK + tl.arange(0, BLOCK)
            inside = at < used
            if blank_ptr is not None:
                at += tl.where(at - whole < begin - front, front - whole, end - begin)
            offset = start.to(tl.int64) * (KV_HEADS * H) + kv_head * H
            keys, values = _load_filled(key_ptr, value_ptr, offset, at, inside, KV_HEADS, H)
            scores = tl.where(inside[None, :], tl.dot(q, keys), float("-inf"))
            acc, top, total = _online_softmax(scores, values, acc, top, total, scale)
    rows = first + tl.arange(0, QUERIES)
    places = (seq * num_queries + rows).to(tl.int64)[:, None] * (HEADS * H) + head * H
    out = (acc / total[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + places + lane[None, :], out, mask=(rows < num_queries)[:, None])


def image_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    starts: Tensor,
    used: Tensor,
    out: Tensor | None = None,
    blanks: Tensor | None = None,
) -> Tensor:
    """Attention of the same number of queries for every sequence over all its keys.

    Args:
        q: [T, N, H], sequence by sequence, contiguous.
        keys, values: [P, K, H], contiguous.
        starts: int32 [at least sequences], first position of each.
        used: int32 [sequences], filled positions of each.
        out: [T, N, H], contiguous, where the result goes; None makes a new tensor.
        blanks: int32 [sequences, 2], contiguous, begin and end of filled positions of each whose
            keys and values are zeros: they are attended without being read. None if no sequence
            has any.

    Returns:
        [T, N, H].
    """
    num_seqs, (num_heads, size), kv_heads = used.shape[0], q.shape[1:], keys.shape[1]
    num_queries = q.shape[0] // num_seqs
    out = torch.empty_like(q) if out is None else out
    key_rows, value_rows = (
        TensorDescriptor.from_tensor(x.flatten(1), [KEY_BLOCK, size]) for x in (keys, values)
    )
    _image_kernel[(num_blocks(num_queries, QUERY_BLOCK), num_heads, num_seqs)](
        TensorDescriptor.from_tensor(q.flatten(1), [QUERY_BLOCK, size]),
        key_rows,
        value_rows,
        keys,
        values,
        out,
        starts,
        used,
        blanks,
        num_queries,
        size**-0.5 * LOG2_E,
        HEADS=num_heads,
        KV_HEADS=kv_heads,
        H=size,
        QUERIES=QUERY_BLOCK,
        BLOCK=KEY_BLOCK,
        num_warps=8,
    )
    return out
