"""Products of many rows in Triton: gate and up with SwiGLU, plain ones, and ones that are added.

Every output is summed over the inner dimension in order, in one fp32 accumulator of the tensor
core, as cuBLAS sums it on Hopper where there are many rows; so the bits are those of cuBLAS, and
of what PyTorch does behind it, which is checked once for each size. Gate and up never reach
memory, and one read of the rows serves both; what is added to the residual stream is added there,
by the memory. A product whose tiles do not fill whole waves leaves fewer multiprocessors idle at
its end than that of cuBLAS.

Shape letters: M rows, K inner, N outputs.
"""

import logging
from collections.abc import Callable

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs
from triton.tools.tensor_descriptor import TensorDescriptor

from modeling.bagel.context import INVARIANT_ROWS
from modeling.bagel.fused_ops import (
    EXACT,
    is_hopper,
    num_blocks,
    num_multiprocessors,
    silu_mul,
    silu_times,
)
from modeling.bagel.layers import FoundByTrying

ROW_BLOCK, OUT_BLOCK, INNER_BLOCK = 128, 128, 64
"""A tile has ROW_BLOCK rows and twice OUT_BLOCK outputs, which end one half after the other."""
TAIL_BLOCK = 64
"""Outputs of the tiles that the left-over ones are cut into."""
STAGES, TAIL_STAGES = 3, 4
GROUP = 16
"""Blocks of rows that go through the weights together: their tiles and those of the weights they
meet at a time share the second-level cache about evenly."""
MIN_OUTS = 1024
"""Of a plain product. Of narrower ones, of keys and values, most tiles would be cut."""
CHECKED_ROWS = 4096
"""Rows of which the bits of gate and up are compared: their products take memory."""
ALIGNMENT, MAX_STRIDE = 16, 2**40
"""Of addresses and strides of a tensor map, in bytes (CUDA driver API, tensor map objects)."""
logger = logging.getLogger("faster_r3")
_checked: FoundByTrying[bool] = FoundByTrying()


@triton.jit
def _place(tile, down, across, GROUP: tl.constexpr):
    """Row and column of a tile, down the rows of a group first."""
    group = tile // (GROUP * across)
    height = min(down - group * GROUP, GROUP)
    place = tile % (GROUP * across)
    return group * GROUP + place % height, place // height


@triton.jit
def _halves(acc, ROWS: tl.constexpr, OUTS: tl.constexpr):
    """The left and the right half of [ROWS, 2 * OUTS]."""
    return tl.split(tl.permute(tl.reshape(acc, (ROWS, 2, OUTS)), (0, 2, 1)))


@triton.jit
def _swiglu_kernel(
    x_rows,
    weight_rows,
    out_rows,
    num_rows,
    size,
    inner,
    IS_UP_FIRST: tl.constexpr,
    ROWS: tl.constexpr,
    OUTS: tl.constexpr,
    STEP: tl.constexpr,
    GROUP: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Each program takes every so many tiles: OUTS gates beside the OUTS ups of the same places."""
    down, across = tl.cdiv(num_rows, ROWS), tl.cdiv(size, OUTS)
    for tile in tl.range(tl.program_id(0), down * across, tl.num_programs(0), flatten=True):
        row, first = _place(tile, down, across, GROUP)
        row, first = row * ROWS, first * OUTS
        acc = tl.zeros((ROWS, 2 * OUTS), tl.float32)
        for k in tl.range(0, inner, STEP, num_stages=STAGES):
            x = x_rows.load([row, k])
            both = tl.reshape(weight_rows.load([0, first, k]), (2 * OUTS, STEP))
            acc = tl.dot(x, both.T, acc)
        gate, up = _halves(acc, ROWS, OUTS)
        if IS_UP_FIRST:
            gate, up = up, gate
        dtype: tl.constexpr = out_rows.dtype
        out_rows.store([row, first], silu_times(gate.to(dtype), up.to(dtype)))


# Chosen here, not by a flag inside: Triton compares the globals of a kernel at every launch.
if knobs.runtime.interpret:

    # The interpreter knows no additions by tensor maps.
    @triton.jit
    def _add_into(rows, row, first, part):
        total = rows.load([row, first]).to(tl.float32) + part.to(tl.float32)
        rows.store([row, first], total.to(part.dtype))
else:

    @triton.jit
    def _add_into(rows, row, first, part):
        """Adds a part where it lies: the second-level cache does, and rounds once."""
        rows.atomic_add([row, first], part)


@triton.jit
def _store(acc, bias_ptr, out_rows, row, first, size, OUTS: tl.constexpr, ADDS: tl.constexpr):
    """Adds the bias to OUTS columns in fp32, and rounds; writes them, or adds them to what is."""
    if bias_ptr is not None:
        outs = first + tl.arange(0, OUTS)
        bias = tl.load(bias_ptr + outs, mask=outs < size, other=0.0)
        acc += bias.to(tl.float32)[None, :]
    if ADDS:
        _add_into(out_rows, row, first, acc.to(out_rows.dtype))
    else:
        out_rows.store([row, first], acc.to(out_rows.dtype))


@triton.jit
def _linear_kernel(
    x_rows,
    weight_rows,
    out_rows,
    bias_ptr,
    num_rows,
    size,
    inner,
    num_main,
    ADDS: tl.constexpr,
    ROWS: tl.constexpr,
    OUTS: tl.constexpr,
    STEP: tl.constexpr,
    GROUP: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Each program takes every so many of the first `num_main` tiles."""
    down, across = tl.cdiv(num_rows, ROWS), tl.cdiv(size, 2 * OUTS)
    for tile in tl.range(tl.program_id(0), num_main, tl.num_programs(0), flatten=True):
        row, first = _place(tile, down, across, GROUP)
        row, first = row * ROWS, first * (2 * OUTS)
        acc = tl.zeros((ROWS, 2 * OUTS), tl.float32)
        for k in tl.range(0, inner, STEP, num_stages=STAGES):
            acc = tl.dot(x_rows.load([row, k]), weight_rows.load([first, k]).T, acc)
        left, right = _halves(acc, ROWS, OUTS)
        _store(left, bias_ptr, out_rows, row, first, size, OUTS, ADDS)
        _store(right, bias_ptr, out_rows, row, first + OUTS, size, OUTS, ADDS)


@triton.jit
def _tail_kernel(
    x_rows,
    weight_rows,
    out_rows,
    bias_ptr,
    num_rows,
    size,
    inner,
    num_main,
    ADDS: tl.constexpr,
    ROWS: tl.constexpr,
    OUTS: tl.constexpr,
    TAIL: tl.constexpr,
    STEP: tl.constexpr,
    GROUP: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Each program takes TAIL columns of a tile behind the first `num_main`."""
    down, across = tl.cdiv(num_rows, ROWS), tl.cdiv(size, 2 * OUTS)
    cuts: tl.constexpr = 2 * OUTS // TAIL
    row, first = _place(num_main + tl.program_id(0) // cuts, down, across, GROUP)
    row, first = row * ROWS, first * (2 * OUTS) + tl.program_id(0) % cuts * TAIL
    acc = tl.zeros((ROWS, TAIL), tl.float32)
    for k in tl.range(0, inner, STEP, num_stages=STAGES):
        acc = tl.dot(x_rows.load([row, k]), weight_rows.load([first, k]).T, acc)
    _store(acc, bias_ptr, out_rows, row, first, size, TAIL, ADDS)


def fits_swiglu(x: Tensor, gate: Tensor, up: Tensor) -> bool:
    """Whether `swiglu` takes rows [M, K] and two weights [N, K], and gives the bits of cuBLAS."""
    if not _fits(x, gate, up) or not 0 < abs(up.data_ptr() - gate.data_ptr()) < MAX_STRIDE:
        return False
    return _has_cublas_bits(
        ("gate and up products", x.device, *gate.shape),
        lambda: swiglu(x[:CHECKED_ROWS], gate, up),
        lambda: silu_mul(*(F.linear(x[:CHECKED_ROWS], weight) for weight in (gate, up))),
    )


def fits_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> bool:
    """As `fits_swiglu`, for `linear`: rows [M, K], a weight [N, K] and a bias [N] or none.

    And whether that pays: cuBLAS is as fast where tiles fill whole waves or one wave at most.
    """
    if weight.shape[0] < MIN_OUTS or not _fits(x, weight, *([] if bias is None else [bias])):
        return False
    if 0 in _share_tiles(x.shape[0], weight.shape[0], x.device):
        return False
    return _has_cublas_bits(
        ("products", x.device, *weight.shape, bias is not None),
        lambda: linear(x, weight, bias),
        lambda: F.linear(x, weight, bias),
    )


def fits_add(total: Tensor, x: Tensor, weight: Tensor) -> bool:
    """As `fits_swiglu`, for `add_linear`: the sum so far [M, N], rows [M, K], a weight [N, K]."""
    if weight.shape[0] < MIN_OUTS or not _fits(x, weight, total):
        return False

    def compute() -> Tensor:
        added = total.clone()
        add_linear(added, x, weight)
        return added

    key = ("products in the residual stream", x.device, *weight.shape)
    return _has_cublas_bits(key, compute, lambda: total + F.linear(x, weight))


def _fits(x: Tensor, weight: Tensor, *others: Tensor) -> bool:
    """Whether there are many rows, and tensors that tensor maps can describe."""
    tensors = (x, weight, *others)
    return (
        x.shape[0] >= INVARIANT_ROWS
        and x.is_cuda
        and is_hopper(x.device)
        and all(each.dtype == torch.bfloat16 and each.is_contiguous() for each in tensors)
        and all(each.data_ptr() % ALIGNMENT == 0 for each in tensors)
        and all(size * x.element_size() % ALIGNMENT == 0 for size in weight.shape)
    )


def _has_cublas_bits(
    key: tuple, compute: Callable[[], Tensor], twin: Callable[[], Tensor]
) -> bool:
    """Whether the first rows that came for a key had the bits of cuBLAS.

    Which kernels cuBLAS takes is not promised, so another version may sum otherwise. Rows that
    come inside a graph capture before all others cannot be compared, and are not taken.

    Args:
        key: what is computed, the device, N and K, and whatever else makes a difference.
        compute, twin: the product here and that of cuBLAS.
    """
    what, device, size, inner = key[:4]

    def find() -> bool:
        is_same = torch.equal(compute().view(torch.int16), twin().view(torch.int16))
        if not is_same:
            logger.warning(
                "%s of %d by %d have other bits than cuBLAS gives on %s: left to cuBLAS",
                what,
                size,
                inner,
                device,
            )
        return is_same

    return bool(_checked.get(key, device, find))


def _num_programs(device: torch.device) -> int:
    """As many as run at once: a tile's memory leaves room for one on a multiprocessor."""
    return num_multiprocessors(device) if device.type == "cuda" else 1


def swiglu(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    """silu(x gate^T) * (x up^T): [M, N], rounded where the eager path rounds.

    Args:
        x: [M, K]. gate, up: [N, K]. Contiguous, of one type, bf16 on a GPU; see `fits_swiglu`.
    """
    (num_rows, inner), size = x.shape, gate.shape[0]
    out = x.new_empty(num_rows, size)
    tiles = _num_tiles(num_rows, size, OUT_BLOCK)
    # One tensor map spans both weights, from the lower address to the higher: a load then brings
    # a tile of each, side by side, for a single product.
    lower, higher = sorted((gate, up), key=Tensor.data_ptr)
    distance = (higher.data_ptr() - lower.data_ptr()) // x.element_size()
    _swiglu_kernel[(min(tiles, _num_programs(x.device)),)](
        TensorDescriptor.from_tensor(x, [ROW_BLOCK, INNER_BLOCK]),
        TensorDescriptor(
            lower, [2, size, inner], [distance, inner, 1], [2, OUT_BLOCK, INNER_BLOCK]
        ),
        TensorDescriptor.from_tensor(out, [ROW_BLOCK, OUT_BLOCK]),
        num_rows,
        size,
        inner,
        IS_UP_FIRST=lower is up,
        STAGES=STAGES,
        num_warps=8,
        **_tiling(),
    )
    return out


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x weight^T + bias: [M, N], rounded once.

    Args:
        x: [M, K]. weight: [N, K]. bias: [N]. Contiguous, of one type, bf16 on a GPU; see
            `fits_linear`.
    """
    out = x.new_empty(x.shape[0], weight.shape[0])
    _launch_linear(x, weight, bias, out, adds=False)
    return out


def add_linear(total: Tensor, x: Tensor, weight: Tensor) -> None:
    """Adds x weight^T, rounded, to `total` [M, N] in place, and rounds again.

    Args:
        total: [M, N]. x: [M, K]. weight: [N, K]. Contiguous, of one type, bf16 on a GPU; see
            `fits_add`.
    """
    _launch_linear(x, weight, None, total, adds=True)


def _launch_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, adds: bool
) -> None:
    """Whole waves of tiles go to one kernel, what is left over in narrower tiles to another.

    In one kernel the second loop would make the first one slower.
    """
    (num_rows, inner), size = x.shape, weight.shape[0]
    num_main, num_left = _share_tiles(num_rows, size, x.device)
    describe = TensorDescriptor.from_tensor
    rows, sizes = describe(x, [ROW_BLOCK, INNER_BLOCK]), (num_rows, size, inner, num_main)
    if num_main:
        _linear_kernel[(min(num_main, _num_programs(x.device)),)](
            rows,
            describe(weight, [2 * OUT_BLOCK, INNER_BLOCK]),
            describe(out, [ROW_BLOCK, OUT_BLOCK]),
            bias,
            *sizes,
            ADDS=adds,
            STAGES=STAGES,
            num_warps=8,
            **_tiling(),
        )
    if num_left:
        _tail_kernel[(num_left * (2 * OUT_BLOCK // TAIL_BLOCK),)](
            rows,
            describe(weight, [TAIL_BLOCK, INNER_BLOCK]),
            describe(out, [ROW_BLOCK, TAIL_BLOCK]),
            bias,
            *sizes,
            ADDS=adds,
            TAIL=TAIL_BLOCK,
            STAGES=TAIL_STAGES,
            num_warps=4,
            **_tiling(),
        )


def _share_tiles(num_rows: int, size: int, device: torch.device) -> tuple[int, int]:
    """Tiles of a plain product that are taken whole, and those behind them that are cut."""
    tiles, programs = _num_tiles(num_rows, size, 2 * OUT_BLOCK), _num_programs(device)
    num_left = tiles % programs
    # Narrow tiles read the rows more often. Where more is left over, it is nearly a wave as it is.
    if num_left > programs // 2:
        num_left = 0
    return tiles - num_left, num_left


def _num_tiles(num_rows: int, size: int, width: int) -> int:
    return num_blocks(num_rows, ROW_BLOCK) * num_blocks(size, width)


def _tiling() -> dict[str, object]:
    """Options that all kernels here share."""
    sizes = {"ROWS": ROW_BLOCK, "OUTS": OUT_BLOCK, "STEP": INNER_BLOCK}
    return {**sizes, "GROUP": GROUP, **EXACT}
