"""The kernel of text turns on the CPU, thread by thread, against the eager path."""

import pytest
import torch

from modeling.bagel import text_layers
from modeling.bagel.bagel import EagerStack
from modeling.bagel.cache import CacheSpec
from modeling.bagel.config import LlmConfig
from modeling.bagel.qwen2_navit import Decoder
from modeling.bagel.text_layers import SOURCE, TextSizes, run_layers
from tests.modeling.bagel.cuda_kernels import HostKernel
from tools.turn_cases import plan_turn

CONFIG = LlmConfig(256, 576, 2, 2, 1, vocab_size=32)
CAPACITY = 416
TOLERANCE = 0.015
"""Relative: bf16 has 8 bits, and sums are in other orders."""


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
def plain_norm(monkeypatch, decoder):
    """The norm behind the kernel, on the CPU."""

    def rms_norm(x, weight, eps, out):
        out.copy_(decoder.norm(x))

    monkeypatch.setattr(text_layers, "rms_norm", rms_norm)


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
    sizes = TextSizes.of(CONFIG, len(filled), down_splits, num_blocks, early)
    assert sizes.unsupported() is None
    macros = {**sizes.macros(), **({"EAGER_COPIES": 1} if eager_copies else {})}
    kernel = HostKernel(SOURCE, macros, sizes.blocks, tmp_path)
    generator = torch.Generator().manual_seed(sum(filled))
    spec = CacheSpec(CONFIG, sizes.rows, CAPACITY, torch.device("cpu"), torch.bfloat16)
    # Filled beyond what may be seen, with what would be noticed.
    before = [torch.randn(x.shape, generator=generator).bfloat16() for x in spec.empty() * 2]
    x = torch.randn(sizes.rows, CONFIG.hidden_size, generator=generator).bfloat16()
    caches, expected_caches = ([part.clone() for part in before] for _ in range(2))
    hidden = run_layers(kernel, sizes, plan_turn(decoder, caches, x.clone(), filled, early))
    expected = EagerStack().run(plan_turn(decoder, expected_caches, x.clone(), filled, early))
    assert_near(hidden, expected)
    for cache, wanted, old in zip(caches, expected_caches, before, strict=True):
        for row, length in enumerate(filled):
            assert_near(cache[row, length], wanted[row, length])
            cache[row, length] = old[row, length]
        assert torch.equal(cache, old), "other positions were written"
