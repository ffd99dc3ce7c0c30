"""The gate and up products of many rows in one Triton kernel, with SwiGLU in its epilogue.

Every output is summed over the inner dimension in order, in one fp32 accumulator of the tensor
core, as cuBLAS sums it on Hopper where there are many rows; so the bits are those of two products
and `fused_ops.silu_mul` behind them, which is checked once for each pair of sizes. Gate and up
never reach memory, and one read of the rows serves both.

Shape letters: M rows, K inner, N width of the MLP.
"""

import logging

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
STAGES = 3
GROUP = 16
"""Blocks of rows that go through the weights together: their tiles and those of the weights they
meet at a time share the second-level cache about evenly."""
ALIGNMENT, MAX_STRIDE = 16, 2**40
"""Of addresses and strides of a tensor map, in bytes (CUDA driver API, tensor map objects)."""
logger = logging.getLogger("faster_r3")
_checked: dict[tuple, bool] = {}


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
    """Each program takes every so many tiles [ROWS, OUTS], down the rows of a group first."""
    down, across = tl.cdiv(num_rows, ROWS), tl.cdiv(size, OUTS)
    for tile in tl.range(tl.program_id(0), down * across, tl.num_programs(0), flatten=True):
        group = tile // (GROUP * across)
        height = min(down - group * GROUP, GROUP)
        place = tile % (GROUP * across)
        row = (group * GROUP + place % height) * ROWS
        first = place // height * OUTS
        acc = tl.zeros((ROWS, 2 * OUTS), tl.float32)
        for k in tl.range(0, inner, STEP, num_stages=STAGES):
            x = x_rows.load([row, k])
            both = tl.reshape(weight_rows.load([0, first, k]), (2 * OUTS, STEP))
            acc = tl.dot(x, both.T, acc)
        gate, up = tl.split(tl.permute(tl.reshape(acc, (ROWS, 2, OUTS)), (0, 2, 1)))
        if IS_UP_FIRST:
            gate, up = up, gate
        dtype: tl.constexpr = out_rows.dtype
        out_rows.store([row, first], silu_times(gate.to(dtype), up.to(dtype)))


def fits(x: Tensor, gate: Tensor, up: Tensor) -> bool:
    """Whether the kernel takes rows [M, K] and two weights [N, K], and gives the bits of cuBLAS."""
    tensors, distance = (x, gate, up), abs(up.data_ptr() - gate.data_ptr())
    return (
        x.shape[0] >= INVARIANT_ROWS
        and x.is_cuda
        and is_hopper(x.device)
        and all(each.dtype == torch.bfloat16 and each.is_contiguous() for each in tensors)
        and all(each.data_ptr() % ALIGNMENT == 0 for each in tensors)
        and all(size * x.element_size() % ALIGNMENT == 0 for size in gate.shape)
        and 0 < distance < MAX_STRIDE
        and _has_cublas_bits(x, gate, up)
    )


def _has_cublas_bits(x: Tensor, gate: Tensor, up: Tensor) -> bool:
    """Whether the first rows that came for these sizes had the bits of cuBLAS.

    Which kernels cuBLAS takes is not promised, so another version may sum otherwise. Rows that
    come inside a graph capture before all others cannot be compared, and are not taken.
    """
    sizes = (x.device, *gate.shape)
    if sizes not in _checked:
        if is_capturing(x.device):
            return False
        expected = silu_mul(F.linear(x, gate), F.linear(x, up))
        same = torch.equal(swiglu(x, gate, up).view(torch.int16), expected.view(torch.int16))
        _checked[sizes] = same
        if not same:
            logger.warning(
                "gate and up products of %d by %d have other bits than cuBLAS gives on %s: "
                "left to cuBLAS",
                *gate.shape,
                x.device,
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
        x: [M, K]. gate, up: [N, K]. Contiguous, of one type, bf16 on a GPU; see `fits`.
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
        ROWS=ROW_BLOCK,
        OUTS=OUT_BLOCK,
        STEP=INNER_BLOCK,
        GROUP=GROUP,
        STAGES=STAGES,
        num_warps=8,
        **EXACT,
    )
    return out
