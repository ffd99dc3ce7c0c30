"""The kernel of text turns on the CPU, thread by thread, against the eager path."""

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from modeling.bagel import text_layers
from modeling.bagel.bagel import EagerStack
from modeling.bagel.cache import CacheSpec, KvCache
from modeling.bagel.config import LlmConfig
from modeling.bagel.qwen2_navit import Decoder, ExpertOrder, QkRounding
from modeling.bagel.text_layers import SOURCE, TextPass, TextSizes, run_layers

CONFIG = LlmConfig(256, 576, 2, 2, 1, vocab_size=32)
HOST = Path(__file__).parent / "cuda_on_host"
CAPACITY = 416
TOLERANCE = 0.015
"""Relative: bf16 has 8 bits, and sums are in other orders."""


def sizes_of(rows: int, down_splits: int) -> TextSizes:
    return TextSizes(
        CONFIG.hidden_size,
        CONFIG.intermediate_size,
        CONFIG.num_heads,
        CONFIG.num_kv_heads,
        CONFIG.num_layers,
        rows,
        down_splits,
    )


class HostKernel:
    """Stands in for a CudaKernel."""

    def __init__(self, folder: Path, sizes: TextSizes, num_blocks: int, eager_copies: bool):
        self._num_blocks = num_blocks
        compiler = shutil.which("g++")
        if compiler is None:
            pytest.skip("needs a C++ compiler")
        # basics.cuh is the one for the host.
        for file in (*SOURCE.parent.iterdir(), *HOST.iterdir()):
            shutil.copy(file, folder)
        library = folder / "text_layers.so"
        macros = [f"-D{name}={value}" for name, value in sizes.macros().items()]
        flags = ["-std=c++17", "-O1", "-w", "-ffp-contract=off", "-fPIC", "-shared"]
        flags += ["-DEAGER_COPIES"] * eager_copies
        program = str(folder / "run_on_host.cpp")
        subprocess.run([compiler, *flags, *macros, "-o", str(library), program], check=True)
        self._library = ctypes.CDLL(str(library))

    def launch(self, work: ctypes.Structure) -> None:
        assert self._library.run_on_host(ctypes.byref(work), self._num_blocks) == 0, "threads wait"


@pytest.fixture(scope="module")
def decoder():
    torch.manual_seed(0)
    decoder = Decoder(CONFIG)
    for name, weight in decoder.named_parameters():
        weight.requires_grad_(False)
        if "norm" in name:
            weight.copy_(1 + 0.2 * torch.randn_like(weight))
    return decoder.bfloat16()


@pytest.fixture
def plain_norm(monkeypatch):
    """The norm behind the kernel, on the CPU."""

    def rms_norm(x, weight, eps, out):
        wide = x.float()
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        out.copy_(weight * (wide * scale).to(x.dtype))

    monkeypatch.setattr(text_layers, "rms_norm", rms_norm)


def run_both(decoder, kernel, sizes, filled, early):
    """Hidden states and caches after a turn: the kernel's and the eager path's, and before it."""
    generator = torch.Generator().manual_seed(sum(filled))
    rows = list(range(sizes.rows))
    spec = CacheSpec(CONFIG, sizes.rows, CAPACITY, torch.device("cpu"), torch.bfloat16)
    # Filled beyond what may be seen, with what would be noticed.
    memory = [torch.randn(x.shape, generator=generator).bfloat16() for x in spec.empty() * 2]
    x = torch.randn(sizes.rows, CONFIG.hidden_size, generator=generator).bfloat16()
    experts = ExpertOrder(sizes.rows, 0, None, None)
    rotary = decoder.rotary(torch.tensor(filled), experts, QkRounding(und=early))
    found = []
    for is_kernel in (True, False):
        copies = [part.clone() for part in memory]
        cache = KvCache(copies[: CONFIG.num_layers], copies[CONFIG.num_layers :])
        cache.lengths = list(filled)
        append = cache.append(rows, [1] * sizes.rows, causal=True)
        if is_kernel:
            turn = TextPass(decoder, x.clone(), rotary, *append.runs)
            hidden = run_layers(kernel, sizes, turn)
        else:
            hidden = EagerStack().run(decoder, x.clone(), experts, rotary, append)
        found.append((hidden, copies))
    return found, memory


@pytest.fixture
def poisoned_memory():
    """New memory is NaN, or the largest integers."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def assert_near(found: torch.Tensor, expected: torch.Tensor) -> None:
    for row, (a, b) in enumerate(zip(found.float(), expected.float(), strict=True)):
        error = ((a - b).norm() / b.norm()).item()
        assert error < TOLERANCE, f"row {row} is off by {error}"


@pytest.mark.parametrize(
    ("filled", "down_splits", "num_blocks", "early", "eager_copies"),
    [
        ((0,), 3, 3, False, False),
        ((300,), 3, 4, True, True),
        ((63, 127), 3, 7, False, True),
        ((128, 0, 191), 5, 5, True, False),
        ((400, 64, 1, 255), 3, 3, False, False),
        ((129, 129, 129, 129), 9, 9, True, True),
    ],
)
def test_a_turn_is_that_of_the_eager_path(
    decoder,
    plain_norm,
    poisoned_memory,
    tmp_path,
    filled,
    down_splits,
    num_blocks,
    early,
    eager_copies,
):
    sizes = sizes_of(len(filled), down_splits)
    assert sizes.unsupported() is None
    kernel = HostKernel(tmp_path, sizes, num_blocks, eager_copies)
    ((hidden, caches), (expected, expected_caches)), before = run_both(
        decoder, kernel, sizes, filled, early
    )
    assert_near(hidden, expected)
    for cache, wanted, old in zip(caches, expected_caches, before, strict=True):
        for row, length in enumerate(filled):
            assert_near(cache[row, length], wanted[row, length])
            cache[row, length] = old[row, length]
        assert torch.equal(cache, old), "other positions were written"
