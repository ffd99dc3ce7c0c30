"""In what order cuBLAS sums a product of few rows, found by comparing bits.

On Hopper every output is summed over the inner dimension in order, in fp32; where a product has few
rows and outputs cuBLAS may cut the sum into splits and add those up, in order too. How many is its
choice, by sizes and alignment, and not promised: it is looked up once, by trying.
"""

import logging

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor, nn

from modeling.bagel.few_rows import SPLIT_TILE, split_size
from modeling.bagel.fused_ops import is_hopper, power_of_2
from modeling.bagel.layers import FoundByTrying

MAX_SPLITS, DRAWS, MAX_ALIGNMENT = 16, 24, 256
logger = logging.getLogger("faster_r3")
_found: FoundByTrying[int | None] = FoundByTrying()


@triton.jit
def _split_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    num_rows,
    split,
    N,
    K,
    N_BLOCK: tl.constexpr,
    K_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """A product in splits of any size: not fast, but compiled once for all of them."""
    outs = tl.program_id(0).to(tl.int64) * N_BLOCK + tl.arange(0, N_BLOCK)
    row, inner = tl.arange(0, ROWS), tl.arange(0, K_BLOCK)
    is_row = (row < num_rows)[None, :]
    total = tl.zeros((N_BLOCK, ROWS), tl.float32)
    for start in range(0, K, split):
        acc = tl.zeros((N_BLOCK, ROWS), tl.float32)
        for k in range(start, min(start + split, K), K_BLOCK):
            weight = tl.load(weight_ptr + outs[:, None] * K + k + inner[None, :])
            x = tl.load(x_ptr + row[None, :] * K + k + inner[:, None], mask=is_row, other=0.0)
            acc = tl.dot(weight, x, acc)
        total += acc
    if bias_ptr is not None:
        total += tl.load(bias_ptr + outs).to(tl.float32)[:, None]
    out = total.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row[None, :] * N + outs[:, None], out, mask=is_row)


def split_product(x: Tensor, weight: Tensor, bias: Tensor | None, splits: int) -> Tensor:
    """x [M, K] by weight [N, K] and bias [N] in that many splits; N a multiple of 16, K of 64."""
    num_rows, (size, inner) = x.shape[0], weight.shape
    out = x.new_empty(num_rows, size)
    _split_kernel[(size // 16,)](
        x,
        weight,
        bias,
        out,
        num_rows,
        split_size(inner, splits),
        size,
        inner,
        N_BLOCK=16,
        K_BLOCK=SPLIT_TILE,
        ROWS=max(16, power_of_2(num_rows)),
        num_warps=1,
    )
    return out


def splits_of(num_rows: int, linear: nn.Linear) -> int | None:
    """Into how many splits cuBLAS cuts the product of that many rows with a layer.

    None where that is not known: on other GPUs, for orders that are none of those tried, for
    weights that cannot tell them apart, and inside a graph capture for a product that was not
    looked up before.
    """
    weight, bias = linear.weight, linear.bias
    bias_alignment = None if bias is None else _alignment(bias)
    key = (weight.device, num_rows, weight.shape, _alignment(weight), bias_alignment)

    def find() -> int | None:
        if not (weight.is_cuda and is_hopper(weight.device)):
            return None
        splits = find_splits(num_rows, weight, bias)
        if splits is None:
            text = "how cuBLAS sums products of %d rows by %d x %d was not found: left to it"
            logger.warning(text, num_rows, *weight.shape)
        return splits

    return _found.get(key, weight.device, find)


def _alignment(tensor: Tensor) -> int:
    """The power of two that an address is a multiple of, as far as cuBLAS may look at it."""
    address = tensor.data_ptr() | MAX_ALIGNMENT
    return address & -address


def find_splits(num_rows: int, weight: Tensor, bias: Tensor | None) -> int | None:
    """The one number of splits that has the bits of cuBLAS for several draws of rows, if any."""
    inner = weight.shape[1]
    sizes = {split_size(inner, splits): splits for splits in range(MAX_SPLITS, 0, -1)}
    candidates = sorted(sizes.values())
    generator = torch.Generator(device=weight.device).manual_seed(0)
    shape = (num_rows, inner)
    for draw in range(DRAWS):
        x = torch.randn(shape, generator=generator, device=weight.device).to(weight.dtype)
        expected = F.linear(x, weight, bias)
        candidates = [
            splits
            for splits in candidates
            if torch.equal(split_product(x, weight, bias, splits), expected)
        ]
        if not candidates or (len(candidates) == 1 and draw > 0):
            break
    return candidates[0] if len(candidates) == 1 else None
