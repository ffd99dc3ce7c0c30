"""The largest logits of up to four rows and their tokens in one launch: what torch.topk gives.

The kernel (cuda/top_tokens.cu) is compiled for sizes at their first use, and compared once with
torch.topk; where it cannot be compiled or gives something else it stays unused, with a warning.
Shape letters: B rows, V vocabulary, C count.
"""

import ctypes
import logging
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from modeling.bagel.cuda_source import CudaKernel, CudaSourceError, build_kernel
from modeling.bagel.fused_ops import is_hopper, num_blocks, num_multiprocessors
from modeling.bagel.layers import FoundByTrying, scattered

SOURCE = Path(__file__).parent / "cuda" / "top_tokens.cu"
MAX_ROWS = 4
MIN_COUNT, MAX_COUNT = 33, 1024
"""torch.topk sorts up to 32 values otherwise: equal ones are in no order of theirs."""
WARPS = 20
"""Of a block: more would count longer into the same memory, fewer have more blocks to wait for."""
MAX_EIGHTS = 4
"""That a thread keeps in registers."""
SHARED_BYTES = 16384
# As in the source: numbers of a load, bins of a row, and leaves of one.
EIGHT, BINS, LEAVES = 8, 2048, 32
COUNTS = BINS + 32
"""Counts of a row: its counter has a line of memory behind the bins."""
ALIGNMENT = 16
logger = logging.getLogger("faster_r3")


@dataclass(frozen=True)
class TopSizes:
    """What a kernel is compiled for. A row has `blocks` blocks."""

    rows: int
    vocab: int
    count: int
    blocks: int
    warps: int = WARPS

    @staticmethod
    def of(rows: int, vocab: int, count: int, multiprocessors: int) -> "TopSizes":
        """Sizes with eight numbers for a thread, as far as there are multiprocessors for it."""
        wanted = num_blocks(vocab, EIGHT * 32 * WARPS)
        return TopSizes(rows, vocab, count, max(min(wanted, multiprocessors // rows), 1))

    def macros(self) -> dict[str, int]:
        """The macros of the source."""
        return {
            "ROWS": self.rows,
            "VOCAB": self.vocab,
            "COUNT": self.count,
            "BLOCKS": self.blocks,
            "WARPS": self.warps,
            "COUNTS": COUNTS,
            "SHARED_BYTES": SHARED_BYTES,
            "WORK_BYTES": ctypes.sizeof(_Work),
        }

    def unsupported(self) -> str | None:
        """Why there is no kernel for these sizes; None if there is."""
        if not 0 < self.rows <= MAX_ROWS:
            return f"{self.rows} rows, expected up to {MAX_ROWS}"
        if not MIN_COUNT <= self.count <= min(MAX_COUNT, self.vocab):
            return f"count {self.count} of {self.vocab}, expected {MIN_COUNT} to {MAX_COUNT}"
        if self.vocab % EIGHT:
            return f"vocabulary {self.vocab}, expected a multiple of {EIGHT}"
        if num_blocks(self.vocab, EIGHT * self.blocks) > 32 * self.warps * MAX_EIGHTS:
            return f"vocabulary {self.vocab} for {self.blocks} blocks a row"
        return None


class _Work(ctypes.Structure):
    """The kernel's argument; the source checks its size."""

    _fields_ = [
        (name, ctypes.c_void_p)
        for name in ("logits", "values", "tokens", "counts", "leaves", "taken")
    ]


class TopTokens:
    """Takes the largest logits in one launch where that is possible and gives what topk gives."""

    def __init__(self) -> None:
        self._kernels: FoundByTrying[CudaKernel | None] = FoundByTrying()

    def take(self, logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """`torch.topk(logits, count)` of [B, V]: values [B, C] and tokens int64 [B, C].

        The first call for some sizes compares with torch.topk, and waits for the device. It has to
        be outside of graph captures: in them torch.topk serves until there was one.
        """
        sizes, device, kernel = _sizes(logits, count), logits.device, None
        if sizes is not None:
            kernel = self._kernels.get((sizes, device), device, partial(_find, sizes, logits))
        return torch.topk(logits, count) if kernel is None else run(kernel, sizes, logits)


def _sizes(logits: Tensor, count: int) -> TopSizes | None:
    """The sizes of a kernel for these logits; None if there is none."""
    if logits.dtype != torch.bfloat16 or logits.dim() != 2 or not logits.is_contiguous():
        return None
    if not is_supported(logits.device) or logits.numel() == 0 or logits.data_ptr() % ALIGNMENT:
        return None
    sizes = TopSizes.of(*logits.shape, count, num_multiprocessors(logits.device))
    return None if sizes.unsupported() else sizes


def is_supported(device: torch.device) -> bool:
    """Whether a device is one that the kernel is compiled for."""
    return device.type == "cuda" and is_hopper(device)


def _find(sizes: TopSizes, logits: Tensor) -> CudaKernel | None:
    """The kernel, if it can be had and gives what torch.topk gives."""
    try:
        kernel = compile_kernel(sizes)
        for rows in (logits, tied_rows(sizes, logits.device)):
            if not _same(run(kernel, sizes, rows), torch.topk(rows, sizes.count)):
                text = "top %d of %d rows by torch.topk: one launch gives something else"
                logger.warning(text, sizes.count, sizes.rows)
                return None
    except CudaSourceError as error:
        logger.warning("top tokens by torch.topk: %s", error)
        return None
    return kernel


def _same(found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> bool:
    """Equality of tokens and of the bits of values, so that NaN equals itself."""
    (values, tokens), (expected_values, expected_tokens) = found, expected
    same_values = torch.equal(values.view(torch.int16), expected_values.view(torch.int16))
    return same_values and torch.equal(tokens, expected_tokens)


def tied_rows(sizes: TopSizes, device: torch.device) -> Tensor:
    """Logits of few distinct values: 1, zero of either sign, -1 and so on, all over the rows.

    Each value has a third of the count, so the last one taken is not all taken.
    """
    ranks = scattered(sizes.rows, sizes.vocab, device)
    values = 1.0 - ranks // (sizes.count // 3)
    return torch.where((values == 0) & (ranks % 2 == 0), -0.0, values).bfloat16()


def compile_kernel(sizes: TopSizes) -> CudaKernel:
    """Compiles and loads the kernel for the current device.

    Raises:
        CudaSourceError: that is not possible.
    """
    blocks, threads = sizes.rows * sizes.blocks, sizes.warps * 32
    return build_kernel(SOURCE, sizes.macros(), blocks, threads, SHARED_BYTES)


def run(kernel: CudaKernel, sizes: TopSizes, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Values and tokens of the largest logits, by the kernel."""
    rows, count = sizes.rows, sizes.count
    values = logits.new_empty(rows, count)
    tokens = logits.new_empty(rows, count, dtype=torch.int64)
    memory = {
        "logits": logits,
        "values": values,
        "tokens": tokens,
        "counts": logits.new_zeros(rows, COUNTS, dtype=torch.int32),
        "leaves": logits.new_empty(rows, sizes.blocks, LEAVES, 2, dtype=torch.int32),
        "taken": logits.new_empty(rows, count, 2, dtype=torch.int32),
    }
    work = _Work(*(tensor.data_ptr() for tensor in memory.values()))
    kernel.launch(work)
    return values, tokens
