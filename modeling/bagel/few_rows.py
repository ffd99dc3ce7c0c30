"""Products of a few rows in Triton, bound by reading the weights once.

Sums run over the inner dimension in fp32, in order, cut into as many splits as the caller says: the
exact grade asks for those of cuBLAS (see cublas_order.py) and gets its bits, the fast grade for
one. In the fast grade RMSNorm has no kernel of its own: a product that ends in the residual stream
also writes its rows times the next norm's weight, and sums of their squares; the products that read
them multiply what they get by the norm's scale. Shape letters: M rows (at most 32), K inner, N
outputs, P parts of a row's sum of squares.
"""

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from modeling.bagel.fused_ops import EXACT, num_blocks, power_of_2, silu_times

MAX_ROWS = 32
LARGE_N, LARGE_K = 65536, 8192
PART = 16
"""Neighbouring numbers of a row whose squares are added up first."""
PARTS_AT_ONCE = 32
SPLIT_TILE = 64
"""Inner numbers of a tile of cuBLAS's kernels: splits end where tiles do."""


class WeighedRows(NamedTuple):
    """Rows before a norm's scale: times its weight, squares of what they were, and its eps."""

    rows: Tensor  # [M, K]
    squares: Tensor  # fp32 [P, M]
    eps: float


@triton.jit
def _product(
    x_ptr,
    weight_ptr,
    first,
    num_rows,
    K: tl.constexpr,
    SPLIT: tl.constexpr,
    N_BLOCK: tl.constexpr,
    K_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """weight[first : first + N_BLOCK] times x transposed: fp32 [N_BLOCK, ROWS].

    Splits of SPLIT inner numbers are summed by themselves, then added up in order.
    """
    blocks: tl.constexpr = (SPLIT + K_BLOCK - 1) // K_BLOCK
    splits: tl.constexpr = (K + SPLIT - 1) // SPLIT
    halves: tl.constexpr = splits == 2 and K == 2 * SPLIT and SPLIT % (K_BLOCK // 2) == 0
    STEP: tl.constexpr = K_BLOCK // 2 if halves else K_BLOCK
    outs, row, inner = first + tl.arange(0, N_BLOCK), tl.arange(0, ROWS), tl.arange(0, STEP)
    weight_ptrs = weight_ptr + outs.to(tl.int64)[:, None] * K + inner[None, :]
    x_ptrs = x_ptr + row[None, :] * K + inner[:, None]
    acc = tl.zeros((N_BLOCK, ROWS), tl.float32)
    total = tl.zeros((N_BLOCK, ROWS), tl.float32)
    if halves:
        # Side by side: nothing then depends on where a split ends.
        other = tl.zeros((N_BLOCK, ROWS), tl.float32)
        for k in tl.range(0, SPLIT, STEP, num_stages=STAGES):
            is_row = (row < num_rows)[None, :]
            weight = tl.load(weight_ptrs + k, eviction_policy="evict_first")
            other_weight = tl.load(weight_ptrs + k + SPLIT, eviction_policy="evict_first")
            acc = tl.dot(weight, tl.load(x_ptrs + k, mask=is_row, other=0.0), acc)
            other_x = tl.load(x_ptrs + k + SPLIT, mask=is_row, other=0.0)
            other = tl.dot(other_weight, other_x, other)
        return total + acc + other
    # One loop over all blocks, so that the loads of a split begin while the last one is summed.
    for i in tl.range(0, splits * blocks, num_stages=STAGES):
        block = i if splits == 1 else i % blocks
        k = i * K_BLOCK if splits == 1 else i // blocks * SPLIT + block * K_BLOCK
        is_row = (row < num_rows)[None, :]
        if SPLIT % K_BLOCK == 0 and K % SPLIT == 0:
            weight = tl.load(weight_ptrs + k, eviction_policy="evict_first")
            x = tl.load(x_ptrs + k, mask=is_row, other=0.0)
        else:
            inside = (inner < SPLIT - block * K_BLOCK) & (inner < K - k)
            weight = tl.load(
                weight_ptrs + k, mask=inside[None, :], other=0.0, eviction_policy="evict_first"
            )
            x = tl.load(x_ptrs + k, mask=inside[:, None] & is_row, other=0.0)
        acc = tl.dot(weight, x, acc)
        if splits > 1:
            is_end = block == blocks - 1
            total = tl.where(is_end, total + acc, total)
            acc = tl.where(is_end, 0.0, acc)
    return total if splits > 1 else acc


@triton.jit
def _store(acc, out_ptr, first, num_rows, N: tl.constexpr, N_BLOCK: tl.constexpr, ROWS):
    outs, row = first + tl.arange(0, N_BLOCK), tl.arange(0, ROWS)
    places = row[None, :] * N + outs[:, None]
    tl.store(out_ptr + places, acc.to(out_ptr.dtype.element_ty), mask=(row < num_rows)[None, :])


@triton.jit
def _weigh(
    wide,
    norm_ptr,
    out_ptr,
    square_ptr,
    first,
    num_rows,
    N: tl.constexpr,
    N_BLOCK: tl.constexpr,
    PART: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Writes N_BLOCK outputs of new rows times the norm's weight, and sums of squares by parts."""
    weight = tl.load(norm_ptr + first + tl.arange(0, N_BLOCK)).to(tl.float32)
    _store(wide * weight[:, None], out_ptr, first, num_rows, N, N_BLOCK, ROWS)
    parts: tl.constexpr = N_BLOCK // PART
    squares = tl.sum(tl.reshape(wide * wide, (parts, PART, ROWS)), axis=1)
    row = tl.arange(0, ROWS)[None, :]
    places = (first // PART + tl.arange(0, parts)[:, None]) * num_rows + row
    tl.store(square_ptr + places, squares, mask=row < num_rows)


@triton.jit
def _scale(
    square_ptr, num_rows, eps, K: tl.constexpr, PART: tl.constexpr, ROWS, AT_ONCE: tl.constexpr
):
    """What the norm multiplies each row by: fp32 [ROWS]."""
    part, row = tl.arange(0, AT_ONCE), tl.arange(0, ROWS)
    total = tl.zeros((AT_ONCE, ROWS), tl.float32)
    for first in tl.static_range(0, K // PART, AT_ONCE):
        at = first + part
        inside = (at < K // PART)[:, None] & (row < num_rows)[None, :]
        places = at[:, None] * num_rows + row[None, :]
        total += tl.load(square_ptr + places, mask=inside, other=0.0)
    return tl.rsqrt(tl.sum(total, axis=0) / K + eps)


@triton.jit
def _linear_kernel(
    x_ptr,
    weight_ptr,
    out_ptr,
    num_rows,
    N: tl.constexpr,
    K: tl.constexpr,
    SPLIT: tl.constexpr,
    N_BLOCK: tl.constexpr,
    K_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
):
    first = tl.program_id(0) * N_BLOCK
    acc = _product(x_ptr, weight_ptr, first, num_rows, K, SPLIT, N_BLOCK, K_BLOCK, ROWS, STAGES)
    _store(acc, out_ptr, first, num_rows, N, N_BLOCK, ROWS)


@triton.jit
def _weigh_kernel(
    x_ptr,
    norm_ptr,
    out_ptr,
    square_ptr,
    num_rows,
    N: tl.constexpr,
    PART: tl.constexpr,
    ROWS: tl.constexpr,
):
    first = tl.program_id(0) * PART
    outs, row = first + tl.arange(0, PART), tl.arange(0, ROWS)
    places, inside = row[None, :] * N + outs[:, None], (row < num_rows)[None, :]
    wide = tl.load(x_ptr + places, mask=inside, other=0.0).to(tl.float32)
    _weigh(wide, norm_ptr, out_ptr, square_ptr, first, num_rows, N, PART, PART, ROWS)


@triton.jit
def _add_product_kernel(
    x_ptr,
    inner_ptr,
    weight_ptr,
    norm_ptr,
    out_ptr,
    square_ptr,
    num_rows,
    N: tl.constexpr,
    K: tl.constexpr,
    PART: tl.constexpr,
    N_BLOCK: tl.constexpr,
    K_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
):
    first = tl.program_id(0) * N_BLOCK
    acc = _product(inner_ptr, weight_ptr, first, num_rows, K, K, N_BLOCK, K_BLOCK, ROWS, STAGES)
    outs, row = first + tl.arange(0, N_BLOCK), tl.arange(0, ROWS)
    places, inside = row[None, :] * N + outs[:, None], (row < num_rows)[None, :]
    x = tl.load(x_ptr + places, mask=inside, other=0.0)
    total = (x.to(tl.float32) + acc).to(x.dtype)
    tl.store(x_ptr + places, total, mask=inside)
    wide = total.to(tl.float32)
    _weigh(wide, norm_ptr, out_ptr, square_ptr, first, num_rows, N, N_BLOCK, PART, ROWS)


@triton.jit
def _heads_kernel(
    x_ptr,
    square_ptr,
    q_weight_ptr,
    k_weight_ptr,
    v_weight_ptr,
    q_bias_ptr,
    k_bias_ptr,
    v_bias_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    num_rows,
    eps,
    Q: tl.constexpr,
    KV: tl.constexpr,
    K: tl.constexpr,
    SPLIT: tl.constexpr,
    PART: tl.constexpr,
    AT_ONCE: tl.constexpr,
    N_BLOCK: tl.constexpr,
    K_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Programs of q, then of k, then of v; with sums of squares, of rows before a norm's scale."""
    first = tl.program_id(0) * N_BLOCK
    weight_ptr, bias_ptr, out_ptr, size = q_weight_ptr, q_bias_ptr, q_ptr, Q
    if first >= Q + KV:
        first -= Q + KV
        weight_ptr, bias_ptr, out_ptr, size = v_weight_ptr, v_bias_ptr, v_ptr, KV
    elif first >= Q:
        first -= Q
        weight_ptr, bias_ptr, out_ptr, size = k_weight_ptr, k_bias_ptr, k_ptr, KV
    acc = _product(x_ptr, weight_ptr, first, num_rows, K, SPLIT, N_BLOCK, K_BLOCK, ROWS, STAGES)
    if square_ptr is not None:
        acc *= _scale(square_ptr, num_rows, eps, K, PART, ROWS, AT_ONCE)[None, :]
    acc += tl.load(bias_ptr + first + tl.arange(0, N_BLOCK)).to(tl.float32)[:, None]
    _store(acc, out_ptr, first, num_rows, size, N_BLOCK, ROWS)


@triton.jit
def _swiglu_kernel(
    x_ptr,
    square_ptr,
    gate_ptr,
    up_ptr,
    out_ptr,
    num_rows,
    eps,
    N: tl.constexpr,
    K: tl.constexpr,
    PART: tl.constexpr,
    AT_ONCE: tl.constexpr,
    N_BLOCK: tl.constexpr,
    K_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Rounded as in the eager path or, with sums of squares of the rows, once."""
    first = tl.program_id(0) * N_BLOCK
    outs, row, inner = first + tl.arange(0, N_BLOCK), tl.arange(0, ROWS), tl.arange(0, K_BLOCK)
    places = outs.to(tl.int64)[:, None] * K + inner[None, :]
    x_ptrs = x_ptr + row[None, :] * K + inner[:, None]
    gate = tl.zeros((N_BLOCK, ROWS), tl.float32)
    up = tl.zeros((N_BLOCK, ROWS), tl.float32)
    for k in tl.range(0, K, K_BLOCK, num_stages=STAGES):
        gate_weight = tl.load(gate_ptr + places + k, eviction_policy="evict_first")
        up_weight = tl.load(up_ptr + places + k, eviction_policy="evict_first")
        x = tl.load(x_ptrs + k, mask=(row < num_rows)[None, :], other=0.0)
        gate = tl.dot(gate_weight, x, gate)
        up = tl.dot(up_weight, x, up)
    if square_ptr is not None:
        scale = _scale(square_ptr, num_rows, eps, K, PART, ROWS, AT_ONCE)[None, :]
        gate, up = gate * scale, up * scale
        product = gate / (1.0 + tl.exp(-gate)) * up
    else:
        dtype: tl.constexpr = out_ptr.dtype.element_ty
        product = silu_times(gate.to(dtype), up.to(dtype))
    _store(product, out_ptr, first, num_rows, N, N_BLOCK, ROWS)


def fits(num_rows: int, weight: Tensor) -> bool:
    """Whether a product of that many rows with a weight [N, K] has a kernel here."""
    if not 0 < num_rows <= MAX_ROWS or weight.dtype != torch.bfloat16:
        return False
    num_outs, inner = weight.shape
    blocks = _blocks(num_rows, num_outs, inner)
    return num_outs % blocks["N_BLOCK"] == 0 and inner % blocks["K_BLOCK"] == 0


@cache
def _blocks(num_rows: int, num_outs: int, inner: int) -> dict[str, int]:
    """Tile sizes, by what was fastest on an H200 at 4 rows, and at 24 where they are many.

    Every block reads all rows, so where these weigh as much as its weights it has more outputs.
    """
    rows = max(8, power_of_2(num_rows))
    if num_outs >= LARGE_N:
        return _tile(64, 128, max(16, rows), 5, 4)
    if inner >= LARGE_K:
        return _tile(32, 256, rows, 6, 4) if rows > 16 else _tile(PART, 512, max(16, rows), 4, 2)
    return _tile(64, 256, rows, 3, 4) if rows > 16 else _tile(PART, 256, rows, 4, 1)


def _swiglu_blocks(num_rows: int) -> dict[str, int]:
    """As `_blocks`, for gate and up: two weights at a time."""
    return _tile(PART, 256, max(8, power_of_2(num_rows)), 3, 1)


def _tile(n_block: int, k_block: int, rows: int, stages: int, warps: int) -> dict[str, int]:
    names = ("N_BLOCK", "K_BLOCK", "ROWS", "STAGES", "num_warps")
    return dict(zip(names, (n_block, k_block, rows, stages, warps), strict=True))


def fits_splits(
    q: int | None,
    k: int | None,
    v: int | None,
    o: int | None,
    gate: int | None,
    up: int | None,
    down: int | None,
) -> bool:
    """Whether the products of a layer have kernels here for these splits; None is not known."""
    return None not in (q, o, down) and q == k == v and gate == up == 1


def split_size(inner: int, splits: int) -> int:
    """Inner numbers of all splits but the last one: whole tiles of cuBLAS, as many in each."""
    return num_blocks(inner // SPLIT_TILE, splits) * SPLIT_TILE


def linear(x: Tensor, weight: Tensor, splits: int = 1) -> Tensor:
    """x [M, K] by weight [N, K]: [M, N]."""
    num_rows, (size, inner) = x.shape[0], weight.shape
    out = x.new_empty(num_rows, size)
    blocks = _blocks(num_rows, size, inner)
    _linear_kernel[(size // blocks["N_BLOCK"],)](
        x, weight, out, num_rows, N=size, K=inner, SPLIT=split_size(inner, splits), **blocks
    )
    return out


def weigh(x: Tensor, norm_weight: Tensor, eps: float) -> WeighedRows:
    """Rows x [M, K] on their way into products behind a norm; K is a multiple of PART."""
    num_rows, size = x.shape
    weighed = _empty_weighed(x, eps)
    _weigh_kernel[(size // PART,)](
        x,
        norm_weight,
        weighed.rows,
        weighed.squares,
        num_rows,
        N=size,
        PART=PART,
        ROWS=power_of_2(num_rows),
        num_warps=1,
    )
    return weighed


def add_product(
    x: Tensor, inner: Tensor, weight: Tensor, norm_weight: Tensor, eps: float
) -> WeighedRows:
    """Adds inner [M, K] by weight [N, K] to x [M, N] in place; the sum, for products behind a norm.

    The residual stream has fewer than LARGE_N numbers a row.
    """
    num_rows, (size, depth) = x.shape[0], weight.shape
    weighed = _empty_weighed(x, eps)
    blocks = _blocks(num_rows, size, depth)
    _add_product_kernel[(size // blocks["N_BLOCK"],)](
        x,
        inner,
        weight,
        norm_weight,
        weighed.rows,
        weighed.squares,
        num_rows,
        N=size,
        K=depth,
        PART=PART,
        **blocks,
    )
    return weighed


def _empty_weighed(x: Tensor, eps: float) -> WeighedRows:
    num_rows, size = x.shape
    squares = torch.empty(size // PART, num_rows, dtype=torch.float32, device=x.device)
    return WeighedRows(torch.empty_like(x), squares, eps)


def project_heads(
    x: Tensor | WeighedRows,
    weights: tuple[Tensor, ...],
    biases: tuple[Tensor, ...],
    splits: int = 1,
) -> tuple[Tensor, ...]:
    """q, k and v projections of normed rows [M, K] in one launch: [M, Q], [M, KV], [M, KV].

    Normed they are already, or are weighed and get the norm's scale here.
    """
    rows, squares, eps = x if isinstance(x, WeighedRows) else (x, None, 0.0)
    (num_rows, inner), sizes = rows.shape, [weight.shape[0] for weight in weights]
    outs = [rows.new_empty(num_rows, size) for size in sizes]
    blocks = _blocks(num_rows, sizes[0], inner)
    _heads_kernel[(sum(sizes) // blocks["N_BLOCK"],)](
        rows,
        squares,
        *weights,
        *biases,
        *outs,
        num_rows,
        eps,
        Q=sizes[0],
        KV=sizes[1],
        K=inner,
        SPLIT=split_size(inner, splits),
        PART=PART,
        AT_ONCE=PARTS_AT_ONCE,
        **blocks,
    )
    return tuple(outs)


def swiglu(x: Tensor | WeighedRows, gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate x) * (up x) of normed rows x [M, K] by weights [N, K]: [M, N].

    Of rows that are normed already it is rounded where the eager path rounds, of weighed ones once.
    """
    rows, squares, eps = x if isinstance(x, WeighedRows) else (x, None, 0.0)
    num_rows, (size, inner) = rows.shape[0], gate.shape
    out = rows.new_empty(num_rows, size)
    blocks = _swiglu_blocks(num_rows)
    _swiglu_kernel[(size // blocks["N_BLOCK"],)](
        rows,
        squares,
        gate,
        up,
        out,
        num_rows,
        eps,
        N=size,
        K=inner,
        PART=PART,
        AT_ONCE=PARTS_AT_ONCE,
        **blocks,
        **EXACT,
    )
    return out
