"""GroupNorm with an optional swish in Triton, for the autoencoder's pictures on a GPU.

PyTorch has six passes over fp32 copies where this reads its input twice and writes its output once.
Sums are taken in another order, so results can differ from PyTorch's in the last place of fp32,
before they are rounded.

Shape letters: B pictures, C channels, h and w pixels.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

BLOCK = 4096
"""Numbers of a group that one program holds."""
PARTS_AT_ONCE = 256


@triton.jit
def _moments_kernel(x_ptr, mean_ptr, square_ptr, size, BLOCK: tl.constexpr):
    """Mean, and sum of squared deviations from it, of one block of a group of `size` numbers."""
    group, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place = block * BLOCK + tl.arange(0, BLOCK)
    inside = place < size
    x = tl.load(x_ptr + group * size + place, mask=inside, other=0.0).to(tl.float32)
    mean = tl.sum(x) / min(size - block * BLOCK, BLOCK)
    deviation = tl.where(inside, x - mean, 0.0)
    part = group * tl.num_programs(1) + block
    tl.store(mean_ptr + part, mean)
    tl.store(square_ptr + part, tl.sum(deviation * deviation))


@triton.jit
def _normalise_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    mean_ptr,
    square_ptr,
    out_ptr,
    size,
    plane,
    channels,
    eps,
    GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
    AT_ONCE: tl.constexpr,
    HAS_SWISH: tl.constexpr,
):
    """One block of a group: `channels` planes of `plane` numbers, `size` in all.

    Moments of the blocks are joined as Chan, Golub & LeVeque (1979) join two.
    """
    group, num_blocks = tl.program_id(0).to(tl.int64), tl.num_programs(1)
    mean_ptr += group * num_blocks
    square_ptr += group * num_blocks
    total = tl.zeros((AT_ONCE,), tl.float32)
    for first in tl.range(0, num_blocks, AT_ONCE):
        part = first + tl.arange(0, AT_ONCE)
        there = part < num_blocks
        count = tl.minimum(size - part * BLOCK, BLOCK)
        total += tl.load(mean_ptr + part, mask=there, other=0.0) * count
    mean = tl.sum(total) / size
    total = tl.zeros((AT_ONCE,), tl.float32)
    for first in tl.range(0, num_blocks, AT_ONCE):
        part = first + tl.arange(0, AT_ONCE)
        there = part < num_blocks
        count = tl.minimum(size - part * BLOCK, BLOCK)
        apart = tl.load(mean_ptr + part, mask=there, other=mean) - mean
        total += tl.load(square_ptr + part, mask=there, other=0.0) + apart * apart * count
    scale = tl.rsqrt(tl.sum(total) / size + eps)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = place < size
    channel = group % GROUPS * channels + place // plane
    weight = tl.load(weight_ptr + channel, mask=inside, other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + channel, mask=inside, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + group * size + place, mask=inside, other=0.0).to(tl.float32)
    y = (x - mean) * scale * weight + bias
    if HAS_SWISH:
        y = y / (1.0 + tl.exp(-y))
    tl.store(out_ptr + group * size + place, y.to(out_ptr.dtype.element_ty), mask=inside)


def group_norm(x: Tensor, norm: nn.GroupNorm, has_swish: bool) -> Tensor:
    """A norm of pictures [B, C, h, w], then y * sigmoid(y) if asked for: in fp32, rounded once."""
    x, groups = x.contiguous(), norm.num_groups
    (pictures, channels), plane = x.shape[:2], x.shape[2:].numel()
    size = channels // groups * plane
    grid = (pictures * groups, triton.cdiv(size, BLOCK))
    means, squares = torch.empty(2, *grid, dtype=torch.float32, device=x.device)
    out = torch.empty_like(x)
    _moments_kernel[grid](x, means, squares, size, BLOCK=BLOCK)
    _normalise_kernel[grid](
        x,
        norm.weight,
        norm.bias,
        means,
        squares,
        out,
        size,
        plane,
        channels // groups,
        norm.eps,
        GROUPS=groups,
        BLOCK=BLOCK,
        AT_ONCE=PARTS_AT_ONCE,
        HAS_SWISH=has_swish,
    )
    return out
