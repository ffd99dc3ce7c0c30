"""Matrix products of many rows in Triton, with what follows them in their epilogues.

Gate and up with SwiGLU, and products that are added to the residual stream. Every output is summed
over the inner dimension in order, in one fp32 accumulator of the tensor core, as cuBLAS sums it on
Hopper where there are many rows; so the bits are those of the products and the operators behind
them, which is checked once for each size. What lies between never reaches memory.

Shape letters: M rows, K inner, N outputs.
"""

import logging
from collections.abc import Callable

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from modeling.bagel.context import INVARIANT_ROWS
from modeling.bagel.fused_ops import EXACT, is_hopper, silu_mul, silu_times
from modeling.bagel.layers import is_capturing

ROW_BLOCK, OUT_BLOCK, INNER_BLOCK = 128, 128, 64
"""A tile has ROW_BLOCK rows and twice OUT_BLOCK outputs, which end one half after the other."""
STAGES = 3
GROUP = 16
"""Blocks of rows that go through the weights together: their tiles and those of the weights they
meet at a time share the second-level cache about evenly."""
ALIGNMENT, MAX_STRIDE = 16, 2**40
"""Of addresses and strides of a tensor map, in bytes (CUDA driver API, tensor map objects)."""
logger = logging.getLogger("faster_r3")
_checked: dict[tuple, bool] = {}


@triton.jit
def _tile_place(tile, down, across, GROUP: tl.constexpr):
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
        row, first = _tile_place(tile, down, across, GROUP)
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


@triton.jit
def _add_product_kernel(
    x_rows,
    inner_rows,
    weight_rows,
    out_rows,
    num_rows,
    size,
    inner,
    ROWS: tl.constexpr,
    OUTS: tl.constexpr,
    STEP: tl.constexpr,
    GROUP: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Each program takes every so many tiles of 2 * OUTS outputs; rounds before it adds."""
    down, across = tl.cdiv(num_rows, ROWS), tl.cdiv(size, 2 * OUTS)
    for tile in tl.range(tl.program_id(0), down * across, tl.num_programs(0), flatten=True):
        row, first = _tile_place(tile, down, across, GROUP)
        row, first = row * ROWS, first * (2 * OUTS)
        acc = tl.zeros((ROWS, 2 * OUTS), tl.float32)
        for k in tl.range(0, inner, STEP, num_stages=STAGES):
            acc = tl.dot(inner_rows.load([row, k]), weight_rows.load([first, k]).T, acc)
        left, right = _halves(acc, ROWS, OUTS)
        dtype: tl.constexpr = out_rows.dtype
        x = x_rows.load([row, first]).to(tl.float32)
        out_rows.store([row, first], (x + left.to(dtype).to(tl.float32)).to(dtype))
        x = x_rows.load([row, first + OUTS]).to(tl.float32)
        out_rows.store([row, first + OUTS], (x + right.to(dtype).to(tl.float32)).to(dtype))


def fits_swiglu(x: Tensor, gate: Tensor, up: Tensor) -> bool:
    """Whether `swiglu` takes rows [M, K] and two weights [N, K], and gives the bits of cuBLAS."""
    distance = abs(up.data_ptr() - gate.data_ptr())
    return (
        _fits(x, gate, up)
        and 0 < distance < MAX_STRIDE
        and _has_cublas_bits(
            "gate and up products",
            gate,
            lambda: swiglu(x, gate, up),
            lambda: silu_mul(F.linear(x, gate), F.linear(x, up)),
        )
    )


def fits_add(x: Tensor, inner: Tensor, weight: Tensor) -> bool:
    """As `fits_swiglu` for `add_product`: x [M, N], inner [M, K] and a weight [N, K]."""
    return _fits(inner, weight, x) and _has_cublas_bits(
        "products in the residual stream",
        weight,
        lambda: add_product(x, inner, weight, torch.empty_like(x)),
        lambda: x + F.linear(inner, weight),
    )


def _fits(rows: Tensor, *others: Tensor) -> bool:
    """Whether there are many rows, and tensor maps over all of these."""
    tensors = (rows, *others)
    return (
        rows.shape[0] >= INVARIANT_ROWS
        and rows.is_cuda
        and is_hopper(rows.device)
        and all(each.dtype == torch.bfloat16 and each.is_contiguous() for each in tensors)
        and all(each.data_ptr() % ALIGNMENT == 0 for each in tensors)
        and all(each.shape[1] * each.element_size() % ALIGNMENT == 0 for each in tensors)
    )


def _has_cublas_bits(
    what: str, weight: Tensor, compute: Callable[[], Tensor], twin: Callable[[], Tensor]
) -> bool:
    """Whether the first rows that came for these sizes had the bits of cuBLAS.

    Which kernels cuBLAS takes is not promised, so another version may sum otherwise. Rows that
    come inside a graph capture before all others cannot be compared, and are not taken.
    """
    sizes = (what, weight.device, *weight.shape)
    if sizes not in _checked:
        if is_capturing(weight.device):
            return False
        same = torch.equal(compute().view(torch.int16), twin().view(torch.int16))
        _checked[sizes] = same
        if not same:
            logger.warning(
                "%s of %d by %d have other bits than cuBLAS gives on %s: left to cuBLAS",
                what,
                *weight.shape,
                weight.device,
            )
    return _checked[sizes]


def _num_programs(device: torch.device) -> int:
    """As many as run at once: a tile's memory leaves room for one on a multiprocessor."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


def swiglu(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    """silu(x gate^T) * (x up^T): [M, N], rounded where the eager path rounds.

    Args:
        x: [M, K]. gate, up: [N, K]. Contiguous, of one type, bf16 on a GPU; see `fits_swiglu`.
    """
    (num_rows, inner), size = x.shape, gate.shape[0]
    out = x.new_empty(num_rows, size)
    tiles = triton.cdiv(num_rows, ROW_BLOCK) * triton.cdiv(size, OUT_BLOCK)
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
        **_tile_sizes(),
    )
    return out


def add_product(x: Tensor, inner: Tensor, weight: Tensor, out: Tensor) -> Tensor:
    """x + inner weight^T into `out`: [M, N], rounded where the eager path rounds.

    Args:
        x, out: [M, N]. inner: [M, K]. weight: [N, K]. Contiguous, of one type, bf16 on a GPU; see
            `fits_add`.
    """
    (num_rows, depth), size = inner.shape, weight.shape[0]
    tiles = triton.cdiv(num_rows, ROW_BLOCK) * triton.cdiv(size, 2 * OUT_BLOCK)
    _add_product_kernel[(min(tiles, _num_programs(x.device)),)](
        TensorDescriptor.from_tensor(x, [ROW_BLOCK, OUT_BLOCK]),
        TensorDescriptor.from_tensor(inner, [ROW_BLOCK, INNER_BLOCK]),
        TensorDescriptor.from_tensor(weight, [2 * OUT_BLOCK, INNER_BLOCK]),
        TensorDescriptor.from_tensor(out, [ROW_BLOCK, OUT_BLOCK]),
        num_rows,
        size,
        depth,
        **_tile_sizes(),
    )
    return out


def _tile_sizes() -> dict[str, object]:
    """Options of both kernels."""
    sizes = {"ROWS": ROW_BLOCK, "OUTS": OUT_BLOCK, "STEP": INNER_BLOCK}
    return {**sizes, "GROUP": GROUP, "STAGES": STAGES, "num_warps": 8, **EXACT}
