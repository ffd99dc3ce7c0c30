"""What lets the kernels of a text turn follow each other closely: early starts, weights fetched.

A text turn reads every weight once and is bound by that, so that the memory should never stand
still. Two means, neither of which changes a value: programs of a small operator that ask for the
weights of the product behind it, and programmatic dependent launch (CUDA programming guide,
"Programmatic Dependent Launch"), by which a kernel is set up while the one before it still runs.
"""

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

LINE, LINES = 2048, 32
"""Bytes of one request, and requests of one program."""
# The interpreter runs one kernel after the other, and knows no inline assembly.
INTERPRETED = tl.constexpr(bool(knobs.runtime.interpret))


@triton.jit
def start_early(CHAINED: tl.constexpr):
    """Lets the next kernel be set up, and waits until all writes of the kernel before are seen."""
    if CHAINED and not INTERPRETED:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def fetch_lines(ptr, num_bytes, part, LINE: tl.constexpr, LINES: tl.constexpr):
    """Asks for the `part`-th run of lines of a weight, up to `num_bytes` of it."""
    offsets = part.to(tl.int64) * (LINE * LINES) + tl.arange(0, LINES) * LINE
    # Beyond the end the last line is asked for again.
    addresses = ptr.to(tl.int64, bitcast=True) + tl.minimum(offsets, num_bytes - LINE)
    if not INTERPRETED:
        tl.inline_asm_elementwise(
            "cp.async.bulk.prefetch.L2.global [$1], 2048; mov.u32 $0, 0;",
            "=r,l",
            [addresses],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@dataclass(frozen=True)
class Chain:
    """How a kernel stands in a chain: whether it starts early, and what it fetches ahead.

    `weights` are contiguous, of one size, at most two; up to `num_bytes` of each are fetched.
    """

    starts_early: bool = False
    weights: tuple[Tensor, ...] = ()
    num_bytes: int = 0

    @property
    def parts(self) -> int:
        """Programs that fetch one weight."""
        return triton.cdiv(self.fetched, LINE * LINES)

    @property
    def fetched(self) -> int:
        """Bytes of each weight that are fetched."""
        if not self.weights:
            return 0
        return min(self.weights[0].nbytes, self.num_bytes) // LINE * LINE

    @property
    def num_programs(self) -> int:
        """Programs that are launched behind those of the operator."""
        return self.parts * len(self.weights)

    def pointers(self, placeholder: Tensor) -> tuple[Tensor, Tensor]:
        """Two weights for the kernel's arguments; `placeholder` where there are none."""
        first = self.weights[0] if self.weights else placeholder
        return first, self.weights[-1] if self.weights else placeholder

    def options(self) -> dict[str, bool]:
        """Launch options of a chained kernel."""
        return {"launch_pdl": True} if self.starts_early else {}


LOOSE = Chain()


@cache
def can_chain(device: torch.device) -> bool:
    """Whether the GPU has the instructions: compute capability 9 and later."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9
