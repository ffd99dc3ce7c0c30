"""Fused elementwise operators of the rollout in Triton, bit-identical to their eager twins.

Every kernel keeps the rounding points of the eager formula: no fused multiply-add, and sums in the
order in which PyTorch's CUDA reduction adds them (see `_fold`). The twins are `RMSNorm` and
`rotate` in layers.py, SwiGlu in qwen2_navit.py.

Shape letters: S rows, D hidden, N heads, H head size, I width of the MLP.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs
from triton.language.extra import libdevice

VECTOR = 4
MAX_REDUCE_THREADS = 512
WARP = 32
SILU_BLOCK = 1024
HEAD_BLOCK = 4
MANY_ROWS = 512
# Contraction to a fused multiply-add would skip a rounding that the eager path has.
EXACT = {"enable_fp_fusion": False}


@cache
def capability(device: torch.device) -> int:
    """The major compute capability of a GPU."""
    return torch.cuda.get_device_capability(device)[0]


def is_hopper(device: torch.device) -> bool:
    """Whether a GPU is one on which the order of cuBLAS's sums is known: compute capability 9."""
    return capability(device) == 9


@cache
def num_multiprocessors(device: torch.device) -> int:
    """How many multiprocessors a GPU has."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def num_blocks(count: int, block: int) -> int:
    """Blocks that `count` fill, the last one in part. `triton.cdiv` takes 20 times as long."""
    return -(-count // block)


def power_of_2(number: int) -> int:
    """The least power of two that is not below a positive number; see `num_blocks`."""
    return 1 << (number - 1).bit_length()


@cache
def reduce_width(num_rows: int, size: int) -> int:
    """Threads that PyTorch's reduction puts on a row of `size` fp32 numbers, `num_rows` of them.

    Follows the block shape of ATen's `setReduceConfig` for a contiguous inner dimension that is
    read in vectors of 4: a warp, or more where few rows would leave threads idle.
    """
    vectors = 1 << ((size // VECTOR).bit_length() - 1)
    rows = 1 << (num_rows.bit_length() - 1)
    height = min(rows, MAX_REDUCE_THREADS // min(vectors, WARP))
    return min(vectors, MAX_REDUCE_THREADS // height)


def fits_norm(size: int) -> bool:
    """Whether a row of this size is reduced in the order that the kernels repeat."""
    return size % VECTOR == 0 and size >= 128


# Chosen here, not by a flag inside: Triton compares the globals of a kernel at every launch.
if knobs.runtime.interpret:

    # The interpreter knows only Triton's own functions, not those of the device library.
    @triton.jit
    def _rsqrt(x):
        return tl.rsqrt(x)
else:
    _rsqrt = libdevice.rsqrt


@triton.jit
def _fold(x, BATCH: tl.constexpr, WIDTH: tl.constexpr):
    """Sums [BATCH, WIDTH] as ATen's block reduction adds threads: the upper half to the lower."""
    if WIDTH >= 512:
        x = tl.sum(tl.reshape(x, (BATCH, 2, 256)), axis=1)
    if WIDTH >= 256:
        x = tl.sum(tl.reshape(x, (BATCH, 2, 128)), axis=1)
    if WIDTH >= 128:
        x = tl.sum(tl.reshape(x, (BATCH, 2, 64)), axis=1)
    if WIDTH >= 64:
        x = tl.sum(tl.reshape(x, (BATCH, 2, 32)), axis=1)
    x = tl.sum(tl.reshape(x, (BATCH, 2, 16)), axis=1)
    x = tl.sum(tl.reshape(x, (BATCH, 2, 8)), axis=1)
    x = tl.sum(tl.reshape(x, (BATCH, 2, 4)), axis=1)
    x = tl.sum(tl.reshape(x, (BATCH, 2, 2)), axis=1)
    return tl.sum(x, axis=1)


@triton.jit
def _add_vectors(x, BATCH: tl.constexpr, WIDTH: tl.constexpr):
    """Adds the 4 running sums of each thread in order: [BATCH, WIDTH * 4] to [BATCH, WIDTH]."""
    even, odd = tl.split(tl.reshape(x, (BATCH, WIDTH, 2, 2)))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return ((first + second) + third) + fourth


@triton.jit
def _rms_norm_kernel(
    x_ptr,
    residual_ptr,
    sum_ptr,
    weight_ptr,
    out_ptr,
    eps,
    inverse_size,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * SIZE
    lanes = tl.arange(0, WIDTH * 4)
    rounds: tl.constexpr = (SIZE + WIDTH * 4 - 1) // (WIDTH * 4)
    total = tl.zeros((WIDTH * 4,), dtype=tl.float32)
    # Unrolled, so that the loads of all rounds are in flight together.
    for round in tl.static_range(rounds):
        places = round * (WIDTH * 4) + lanes
        inside = places < SIZE
        x = tl.load(x_ptr + row + places, mask=inside, other=0.0)
        if HAS_RESIDUAL:
            added = tl.load(residual_ptr + row + places, mask=inside, other=0.0)
            x = (x.to(tl.float32) + added.to(tl.float32)).to(x.dtype)
        wide = x.to(tl.float32)
        total += wide * wide
    threads = _add_vectors(tl.reshape(total, (1, WIDTH * 4)), 1, WIDTH)
    mean = _fold(threads, 1, WIDTH) * inverse_size
    scale = _rsqrt(mean + eps)
    # Read again, from the first-level cache, in the widest accesses: keeping the row in registers
    # ties the stores to the narrow ones of the sum, and took twice as long.
    places = tl.arange(0, BLOCK)
    inside = places < SIZE
    x = tl.load(x_ptr + row + places, mask=inside, other=0.0)
    if HAS_RESIDUAL:
        added = tl.load(residual_ptr + row + places, mask=inside, other=0.0)
        x = (x.to(tl.float32) + added.to(tl.float32)).to(x.dtype)
        tl.store(sum_ptr + row + places, x, mask=inside)
    weight = tl.load(weight_ptr + places, mask=inside, other=0.0).to(tl.float32)
    normed = (x.to(tl.float32) * scale).to(x.dtype).to(tl.float32)
    tl.store(out_ptr + row + places, (weight * normed).to(x.dtype), mask=inside)


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, out: Tensor, rows_alone: int | None = None
) -> None:
    """Writes RMSNorm of x [S, D] by weight [D] into `out` [S, D]; all contiguous, one type.

    PyTorch adds up a row in an order that goes with the number of rows. `rows_alone` is the number
    to go by, where the eager path norms fewer rows at a time; None means S.
    """
    _launch_norm(x, x, x, weight, eps, out, rows_alone, has_residual=False)


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    total: Tensor,
    out: Tensor,
    rows_alone: int | None = None,
) -> None:
    """Writes x + residual into `total` and its RMSNorm into `out`; all [S, D], contiguous.

    `rows_alone`: see `rms_norm`.
    """
    _launch_norm(x, residual, total, weight, eps, out, rows_alone, has_residual=True)


def _launch_norm(
    x: Tensor,
    residual: Tensor,
    total: Tensor,
    weight: Tensor,
    eps: float,
    out: Tensor,
    rows_alone: int | None,
    has_residual: bool,
) -> None:
    num_rows, size = x.shape
    if num_rows == 0:
        return
    _rms_norm_kernel[(num_rows,)](
        x,
        residual,
        total,
        weight,
        out,
        eps,
        1 / size,
        SIZE=size,
        BLOCK=power_of_2(size),
        WIDTH=reduce_width(rows_alone or num_rows, size),
        HAS_RESIDUAL=has_residual,
        # A row of many is one warp's work; few rows need all the threads they can get.
        num_warps=1 if num_rows >= MANY_ROWS else 8,
        **EXACT,
    )


@triton.jit
def _norm_heads(
    x,
    other,
    w,
    w_other,
    eps,
    HEADS: tl.constexpr,
    H: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Normalises heads [HEADS, H] and their rotated halves by one scale a head."""
    wide = x.to(tl.float32)
    mean = _fold(_add_vectors(wide * wide, HEADS, H // 4), HEADS, H // 4) * (1.0 / H)
    scale = _rsqrt(mean + eps)[:, None]
    a, b = wide * scale, other.to(tl.float32) * scale
    if EARLY:
        a, b = a.to(x.dtype).to(tl.float32), b.to(x.dtype).to(tl.float32)
    a, b = w[None, :] * a, w_other[None, :] * b
    if EARLY:
        a, b = a.to(x.dtype).to(tl.float32), b.to(x.dtype).to(tl.float32)
    return a, b


@triton.jit
def _rotate_heads(a, b, cos, sin, sign, dtype: tl.constexpr, EARLY: tl.constexpr):
    """a * cos + (rotated halves) * sin, rounded after each step where the eager path is."""
    if EARLY:
        cos, sin = cos.to(dtype).to(tl.float32), sin.to(dtype).to(tl.float32)
        left = (a * cos[None, :]).to(dtype).to(tl.float32)
        right = (b * sign[None, :] * sin[None, :]).to(dtype).to(tl.float32)
    else:
        left = a * cos[None, :]
        right = b * sign[None, :] * sin[None, :]
    return (left + right).to(dtype)


@triton.jit
def _turn_heads(
    x_ptr,
    weight_ptr,
    cos_ptr,
    sin_ptr,
    out_ptr,
    first,
    NUM_HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    H: tl.constexpr,
    EARLY: tl.constexpr,
    eps,
):
    """Norm and RoPE of heads first .. first + BLOCK of one row."""
    lane = tl.arange(0, H)
    partner = (lane + H // 2) % H
    sign = tl.where(lane < H // 2, -1.0, 1.0)
    heads = first + tl.arange(0, BLOCK)[:, None]
    inside = heads < NUM_HEADS
    a, b = _norm_heads(
        tl.load(x_ptr + heads * H + lane[None, :], mask=inside, other=0.0),
        tl.load(x_ptr + heads * H + partner[None, :], mask=inside, other=0.0),
        tl.load(weight_ptr + lane).to(tl.float32),
        tl.load(weight_ptr + partner).to(tl.float32),
        eps,
        BLOCK,
        H,
        EARLY,
    )
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    turned = _rotate_heads(
        a, b, tl.load(cos_ptr + lane), tl.load(sin_ptr + lane), sign, dtype, EARLY
    )
    tl.store(out_ptr + heads * H + lane[None, :], turned, mask=inside)


@triton.jit
def _qk_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    q_weight_ptr,
    k_weight_ptr,
    cos_ptr,
    sin_ptr,
    slot_ptr,
    q_out_ptr,
    key_ptr,
    value_ptr,
    eps,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    H: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Programs of a row: blocks of query heads, then blocks of key and value heads."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    q_parts: tl.constexpr = (Q_HEADS + BLOCK - 1) // BLOCK
    cos_ptr += row * H
    sin_ptr += row * H
    if part < q_parts:
        q_ptr += row * (Q_HEADS * H)
        q_out_ptr += row * (Q_HEADS * H)
        first = part * BLOCK
        _turn_heads(
            q_ptr, q_weight_ptr, cos_ptr, sin_ptr, q_out_ptr, first, Q_HEADS, BLOCK, H, EARLY, eps
        )
    else:
        first = (part - q_parts) * BLOCK
        slot = tl.load(slot_ptr + row) * (KV_HEADS * H)
        k_ptr += row * (KV_HEADS * H)
        key_ptr += slot
        _turn_heads(
            k_ptr, k_weight_ptr, cos_ptr, sin_ptr, key_ptr, first, KV_HEADS, BLOCK, H, EARLY, eps
        )
        heads = first + tl.arange(0, BLOCK)[:, None]
        places = heads * H + tl.arange(0, H)[None, :]
        inside = heads < KV_HEADS
        value = tl.load(v_ptr + row * (KV_HEADS * H) + places, mask=inside)
        tl.store(value_ptr + slot + places, value, mask=inside)


def qk_norm_rope_store(
    projections: tuple[Tensor, Tensor, Tensor],
    weights: tuple[Tensor, Tensor],
    tables: tuple[Tensor, Tensor],
    slots: Tensor,
    outputs: tuple[Tensor, Tensor, Tensor],
    eps: float,
    early: bool,
) -> None:
    """Norm and RoPE of q and k; k and v go straight into the cache.

    Args:
        projections: q [S, N * H], k and v [S, K * H].
        weights: of the q and k norms [H].
        tables: cosines and sines fp32 [S, 1, H].
        slots: int64 [S], cache slot of each row.
        outputs: q [S, N, H]; keys and values by slot [*, K, H].
        eps: of the norms.
        early: whether values are rounded to their type between norm and RoPE.
    """
    q, k, v = projections
    num_rows, head_size = q.shape[0], weights[0].shape[0]
    if num_rows == 0:
        return
    q_heads, kv_heads = q.shape[1] // head_size, k.shape[1] // head_size
    parts = num_blocks(q_heads, HEAD_BLOCK) + num_blocks(kv_heads, HEAD_BLOCK)
    _qk_kernel[(num_rows, parts)](
        q,
        k,
        v,
        *weights,
        *tables,
        slots,
        *outputs,
        eps,
        Q_HEADS=q_heads,
        KV_HEADS=kv_heads,
        BLOCK=HEAD_BLOCK,
        H=head_size,
        EARLY=early,
        num_warps=1,
        **EXACT,
    )


@triton.jit
def silu_times(gate, up):
    """silu(gate) * up of two blocks of one type; silu is rounded to it first.

    The fast exponential and division are off by some units in the last place of fp32. For none of
    the 65,536 values of bf16 that moves the rounded result, as the operator check confirms.
    """
    wide = gate.to(tl.float32)
    silu = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype)
    return (silu.to(tl.float32) * up.to(tl.float32)).to(gate.dtype)


@triton.jit
def _silu_mul_kernel(gate_ptr, up_ptr, out_ptr, count, BLOCK: tl.constexpr):
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = places < count
    gate = tl.load(gate_ptr + places, mask=inside, other=0.0)
    up = tl.load(up_ptr + places, mask=inside, other=0.0)
    tl.store(out_ptr + places, silu_times(gate, up), mask=inside)


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up for contiguous tensors of one shape and type; silu is rounded first."""
    out = torch.empty_like(gate)
    count = gate.numel()
    if count:
        grid = (num_blocks(count, SILU_BLOCK),)
        _silu_mul_kernel[grid](gate, up, out, count, BLOCK=SILU_BLOCK, num_warps=4, **EXACT)
    return out
