"""Brings weights into the GPU's second-level cache ahead of the matrix product that reads them.

A text turn reads every weight once and is bound by that; between two products the memory would
stand still while norms and attention run. A prefetch changes no value.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

LINE = 2048
"""Bytes of one request."""
LINES = 32
INTERPRETED = tl.constexpr(bool(knobs.runtime.interpret))


@triton.jit
def _prefetch_kernel(ptr, num_bytes, LINE: tl.constexpr, LINES: tl.constexpr):
    first = tl.program_id(0).to(tl.int64) * (LINE * LINES)
    offsets = first + tl.arange(0, LINES) * LINE
    # The last whole line again, where the range is not a multiple.
    offsets = tl.minimum(offsets, num_bytes - LINE)
    addresses = ptr.to(tl.int64, bitcast=True) + offsets
    if not INTERPRETED:
        tl.inline_asm_elementwise(
            "cp.async.bulk.prefetch.L2.global [$1], 2048; mov.u32 $0, 0;",
            "=r,l",
            [addresses],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


def can_prefetch(device: torch.device) -> bool:
    """Whether the GPU has the instruction: compute capability 9 and later."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9


def prefetch(weight: Tensor, max_bytes: int) -> None:
    """Asks for the first `max_bytes` of a contiguous weight on the current stream."""
    num_bytes = min(weight.nbytes, max_bytes) // LINE * LINE
    if num_bytes:
        grid = (triton.cdiv(num_bytes, LINE * LINES),)
        _prefetch_kernel[grid](weight, num_bytes, LINE=LINE, LINES=LINES, num_warps=1)
