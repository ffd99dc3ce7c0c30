"""Text turns in one launch: the kernel compiles without spills, and is used where it may be."""

import logging
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from modeling.bagel import layers, text_layers
from modeling.bagel.bagel import LayerPass
from modeling.bagel.cache import CacheSpec, KvCache
from modeling.bagel.config import LlmConfig
from modeling.bagel.cuda_source import ARCH, CudaSourceError, compile_source
from modeling.bagel.qwen2_navit import Decoder, ExpertOrder, QkRounding
from modeling.bagel.text_layers import (
    SECOND_SPLIT_UNITS,
    SOURCE,
    TextLayers,
    TextSizes,
    down_firsts,
    is_text_turn,
)
from tests.modeling.bagel.cuda_kernels import NO_SPILLS, compile_log

SIZES = TextSizes(
    hidden=3584,
    inner=18944,
    heads=28,
    kv_heads=4,
    layers=28,
    rows=4,
    down_splits=7,
    blocks=132,
    rounds_early=False,
)
TINY = LlmConfig(256, 512, 2, 2, 1, vocab_size=32)


def compile_for(sizes: TextSizes) -> str:
    """The log of a compilation."""
    return compile_log(SOURCE, sizes.macros(), ARCH)


@pytest.mark.parametrize("rows", [1, 2, 3, 4])
def test_the_kernel_compiles_for_the_real_sizes_and_spills_nothing(rows):
    # Reloads come from the second-level cache or from behind it: every poll of a barrier throws
    # out the first-level one.
    assert NO_SPILLS in compile_for(replace(SIZES, rows=rows))


def test_the_kernel_compiles_for_other_sizes():
    compile_for(TextSizes(256, 512, 2, 1, 2, 2, 2, 5, True))


def test_a_structure_that_is_packed_otherwise_does_not_compile():
    macros = SIZES.macros()
    macros["WORK_BYTES"] += 8
    compile_for(SIZES)
    with pytest.raises(CudaSourceError, match="as packed by"):
        compile_source(SOURCE, macros, ARCH)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"rows": 5}, "5 rows"),
        ({"heads": 27}, "27 heads"),
        ({"heads": 28, "kv_heads": 3}, "28 heads of which 3"),
        ({"inner": 18950}, "inner 18950"),
        ({"down_splits": 3}, "in 3 splits"),
        ({"blocks": 3}, "7 splits for 3 multiprocessors"),
        ({"hidden": 12288, "heads": 96, "kv_heads": 24, "down_splits": 2}, "slots"),
    ],
)
def test_sizes_without_a_kernel_say_why(changes, reason):
    found = replace(SIZES, **changes).unsupported()
    assert found is None if reason is None else reason in found


def plan(rows: int, length: int = 1) -> LayerPass:
    """New tokens of some rows behind a cache with something in it."""
    torch.manual_seed(0)
    decoder = Decoder(TINY)
    spec = CacheSpec(TINY, rows, 16, torch.device("cpu"), torch.float32)
    cache = KvCache.zeros(spec)
    cache.lengths = [3] * rows
    append = cache.append(list(range(rows)), [length] * rows, causal=True)
    experts = ExpertOrder(rows * length, 0, None, None)
    rotary = decoder.rotary(torch.full((rows * length,), 3), experts, QkRounding())
    x = torch.ones(rows * length, TINY.hidden_size)
    return LayerPass(decoder, x, experts, rotary, append)


def test_a_text_turn_is_one_token_of_each_of_few_rows():
    assert is_text_turn(plan(1)) and is_text_turn(plan(4))
    assert not is_text_turn(plan(5))
    assert not is_text_turn(plan(2, length=2))


def test_tokens_of_an_image_are_no_text_turn():
    assert not is_text_turn(replace(plan(2), experts=ExpertOrder(1, 1, None, None)))


@pytest.fixture
def on_hopper(monkeypatch):
    """Lets a run on the CPU pass for one on a GPU; returns what will be compiled and run."""
    calls = []

    class Plan:
        error: CudaSourceError | None = None
        offset = 0.0
        num_multiprocessors = 132

    def compile_kernel(sizes):
        calls.append(sizes)
        if Plan.error is not None:
            raise Plan.error
        return SimpleNamespace()

    def run_layers(kernel, sizes, turn):
        return turn.x + 1 + Plan.offset

    monkeypatch.setattr(text_layers, "is_hopper", lambda device: True)
    monkeypatch.setattr(
        text_layers, "num_multiprocessors", lambda device: Plan.num_multiprocessors
    )
    monkeypatch.setattr(text_layers, "compile_kernel", compile_kernel)
    monkeypatch.setattr(text_layers, "run_layers", run_layers)
    Plan.calls = calls
    return Plan


def run_turn(layers: TextLayers, by_parts=lambda turn: turn.x + 1, rows: int = 2):
    return layers.run(plan(rows), 2, by_parts)


def test_a_kernel_with_the_same_bits_is_compared_once_and_used(on_hopper):
    layers, compared = TextLayers(), []

    def by_parts(turn):
        compared.append(turn)
        return turn.x.add_(1)

    for _ in range(3):
        assert torch.equal(run_turn(layers, by_parts), torch.full((2, 256), 2.0))
    assert len(compared) == 1
    assert len(on_hopper.calls) == 1
    assert run_turn(layers, by_parts, rows=3) is not None
    assert len(compared) == 2


def test_a_kernel_with_other_bits_is_left_alone_with_a_warning(on_hopper, caplog):
    on_hopper.offset = 2**-20
    layers = TextLayers()
    with caplog.at_level(logging.WARNING, logger="faster_r3"):
        assert run_turn(layers) is None
        assert run_turn(layers) is None
    assert len(on_hopper.calls) == 1
    assert ["other bits" in record.getMessage() for record in caplog.records] == [True]


def test_a_kernel_that_cannot_be_had_is_tried_once_with_a_warning(on_hopper, caplog):
    on_hopper.error = CudaSourceError("libnvrtc.so.13 is not found")
    layers = TextLayers()
    with caplog.at_level(logging.WARNING, logger="faster_r3"):
        assert run_turn(layers) is None
        assert run_turn(layers) is None
    assert len(on_hopper.calls) == 1
    (record,) = caplog.records
    assert "kernel by kernel: libnvrtc.so.13 is not found" in record.getMessage()


def shares(firsts: list[int]) -> list[int]:
    return [end - first for first, end in pairwise(firsts)]


@pytest.mark.parametrize(
    ("tiles", "splits", "blocks"), [(448, 7, 114), (448, 5, 132), (32, 9, 9), (32, 9, 7)]
)
def test_blocks_share_the_last_product(tiles, splits, blocks):
    firsts = down_firsts(tiles, splits, blocks)
    assert (firsts[0], firsts[-1], len(firsts)) == (0, tiles * splits, blocks + 1)
    assert min(shares(firsts)) >= 0
    num_splits = [(end - 1) // tiles - first // tiles for first, end in pairwise(firsts)]
    assert max(num_splits) <= 1


def test_blocks_with_rows_of_two_splits_have_less_of_the_last_product():
    firsts = down_firsts(448, 7, 132)
    for (first, end), share in zip(pairwise(firsts), shares(firsts), strict=True):
        is_mixed = first // 448 != (end - 1) // 448
        assert share <= (24 - SECOND_SPLIT_UNITS if is_mixed else 24)


def test_a_gpu_of_too_few_multiprocessors_for_the_splits_has_no_kernel(on_hopper):
    on_hopper.num_multiprocessors = 2
    assert TextLayers().run(plan(2), 5, lambda turn: turn.x + 1) is None


def test_weights_that_copies_cannot_read_are_left_to_other_kernels(on_hopper):
    layers = TextLayers()
    given = plan(2)
    up = given.decoder.layers[1].mlp.up_proj
    up.weight = torch.nn.Parameter(torch.zeros(up.weight.numel() + 1)[1:].view_as(up.weight))
    assert layers.run(given, 2, lambda turn: turn.x + 1) is None


def test_no_kernel_is_looked_for_inside_a_capture(on_hopper, monkeypatch):
    monkeypatch.setattr(layers, "is_capturing", lambda device: True)
    text = TextLayers()
    assert run_turn(text) is None
    monkeypatch.setattr(layers, "is_capturing", lambda device: False)
    assert run_turn(text) is not None
