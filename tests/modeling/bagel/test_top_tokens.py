"""Top tokens in one launch: the kernel compiles, and is used where it gives what topk gives."""

import logging
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from modeling.bagel import layers, top_tokens
from modeling.bagel.cuda_source import ARCH, CudaSourceError, compile_source
from modeling.bagel.sampling import SamplingConfig
from modeling.bagel.top_tokens import SOURCE, TopSizes, TopTokens, tied_rows
from tests.modeling.bagel.cuda_kernels import NO_SPILLS, compile_log

VOCAB = 152064
SIZES = TopSizes.of(4, VOCAB, 1000, 132)
COUNT = 40


@pytest.mark.parametrize("rows", [1, 2, 3, 4])
@pytest.mark.parametrize("count", [50, 1000])
def test_the_kernel_compiles_for_the_real_sizes_and_spills_nothing(rows, count):
    sizes = TopSizes.of(rows, VOCAB, count, 132)
    assert sizes.unsupported() is None and sizes.blocks == 30
    assert NO_SPILLS in compile_log(SOURCE, sizes.macros(), ARCH)


def test_the_largest_sizes_compile():
    # Each thread has the most numbers that it may have.
    sizes = TopSizes(4, 2**18, 1024, 13)
    assert sizes.unsupported() is None
    assert NO_SPILLS in compile_log(SOURCE, sizes.macros(), ARCH)


def test_a_structure_that_is_packed_otherwise_does_not_compile():
    macros = SIZES.macros()
    compile_log(SOURCE, macros, ARCH)
    macros["WORK_BYTES"] += 8
    with pytest.raises(CudaSourceError, match="as packed by"):
        compile_source(SOURCE, macros, ARCH)


def test_blocks_of_all_rows_run_at_once():
    for rows in (1, 2, 3, 4):
        for multiprocessors in (4, 78, 132):
            sizes = TopSizes.of(rows, VOCAB, 1000, multiprocessors)
            assert sizes.blocks >= 1 and rows * sizes.blocks <= multiprocessors
    assert TopSizes.of(1, 512, 100, 132).blocks == 1


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"count": 33}, None),
        ({"count": 1024, "vocab": 1024}, None),
        ({"rows": 5}, "5 rows"),
        ({"rows": 0}, "0 rows"),
        ({"count": 32}, "count 32"),
        ({"count": 1025}, "count 1025"),
        ({"vocab": 992}, "count 1000 of 992"),
        ({"vocab": 152060}, "vocabulary 152060"),
        ({"blocks": 7}, "for 7 blocks"),
    ],
)
def test_sizes_without_a_kernel_say_why(changes, reason):
    found = replace(SIZES, **changes).unsupported()
    assert found is None if reason is None else reason in found


def test_tied_rows_part_equals_at_the_last_number_and_mix_zeros():
    sizes = TopSizes(3, 2048, 1000, 1)
    rows = tied_rows(sizes, torch.device("cpu"))
    assert rows.shape == (3, 2048) and rows.dtype == torch.bfloat16
    assert not torch.equal(rows[0], rows[1])
    for row in rows:
        last = row.sort(descending=True).values[sizes.count - 1]
        assert (row > last).sum() < sizes.count < (row >= last).sum()
        zeros = row[row == 0].signbit()
        assert last < 0 and 0 < zeros.sum() < zeros.numel()


@pytest.fixture
def on_hopper(monkeypatch):
    """Lets a run on the CPU pass for one on a GPU; returns what will be compiled and run."""

    class Plan:
        error: CudaSourceError | None = None
        compiled: list[TopSizes] = []
        ran: list[TopSizes] = []
        offset = 0

    def compile_kernel(sizes):
        Plan.compiled.append(sizes)
        if Plan.error is not None:
            raise Plan.error
        return SimpleNamespace()

    def run(kernel, sizes, logits):
        Plan.ran.append(sizes)
        values, tokens = torch.topk(logits, sizes.count)
        return values, tokens + Plan.offset

    monkeypatch.setattr(top_tokens, "is_supported", lambda device: True)
    monkeypatch.setattr(top_tokens, "num_multiprocessors", lambda device: 132)
    monkeypatch.setattr(top_tokens, "compile_kernel", compile_kernel)
    monkeypatch.setattr(top_tokens, "run", run)
    Plan.compiled, Plan.ran = [], []
    return Plan


def logits_of(rows: int = 2, vocab: int = 800, dtype: torch.dtype = torch.bfloat16):
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(rows)).to(dtype)


def assert_topk(top: TopTokens, logits: torch.Tensor, count: int = COUNT) -> None:
    expected = torch.topk(logits, count)
    values, tokens = top.take(logits, count)
    assert torch.equal(values.view(torch.int16), expected.values.view(torch.int16))
    assert torch.equal(tokens, expected.indices)


def test_a_kernel_that_gives_what_topk_gives_is_compared_once_and_used(on_hopper):
    top = TopTokens()
    for _ in range(3):
        assert_topk(top, logits_of())
    # Twice to compare, with the logits and with ties.
    assert len(on_hopper.compiled) == 1 and len(on_hopper.ran) == 5
    assert_topk(top, logits_of(rows=3))
    assert_topk(top, logits_of(), count=50)
    assert len(on_hopper.compiled) == 3 and len(on_hopper.ran) == 11


def test_a_row_that_is_nan_compares_equal(on_hopper):
    top, logits = TopTokens(), logits_of()
    logits[0, 3] = float("nan")
    for _ in range(2):
        assert_topk(top, logits)
    assert len(on_hopper.ran) == 4


def test_a_kernel_that_gives_something_else_is_left_alone_with_a_warning(on_hopper, caplog):
    on_hopper.offset = 1
    top = TopTokens()
    with caplog.at_level(logging.WARNING, logger="faster_r3"):
        for _ in range(2):
            assert_topk(top, logits_of())
    assert len(on_hopper.compiled) == 1 and len(on_hopper.ran) == 1
    assert ["something else" in record.getMessage() for record in caplog.records] == [True]


def test_a_kernel_that_cannot_be_had_is_tried_once_with_a_warning(on_hopper, caplog):
    on_hopper.error = CudaSourceError("libnvrtc.so.13 is not found")
    top = TopTokens()
    with caplog.at_level(logging.WARNING, logger="faster_r3"):
        for _ in range(2):
            assert_topk(top, logits_of())
    assert len(on_hopper.compiled) == 1
    (record,) = caplog.records
    assert "by torch.topk: libnvrtc.so.13 is not found" in record.getMessage()


@pytest.mark.parametrize(
    "logits",
    [
        logits_of(dtype=torch.float16),
        logits_of(rows=5),
        logits_of(vocab=804),
        logits_of(rows=0),
        logits_of()[0],
        logits_of(vocab=1600)[:, ::2],
        logits_of(rows=1, vocab=808)[0, 4:804].view(1, 800),
    ],
    ids=["fp16", "5 rows", "no eights", "no rows", "one dimension", "strided", "misaligned"],
)
def test_other_logits_are_left_to_topk(on_hopper, logits):
    assert_topk(TopTokens(), logits)
    assert not on_hopper.compiled


def test_few_of_the_logits_are_left_to_topk_as_it_sorts_them_otherwise(on_hopper):
    assert_topk(TopTokens(), logits_of(), count=32)
    assert not on_hopper.compiled


def test_other_devices_are_left_to_topk(on_hopper, monkeypatch):
    monkeypatch.undo()
    assert not top_tokens.is_supported(torch.device("cpu"))
    assert_topk(TopTokens(), logits_of())


def test_no_kernel_is_looked_for_inside_a_capture(on_hopper, monkeypatch):
    monkeypatch.setattr(layers, "is_capturing", lambda device: True)
    top = TopTokens()
    assert_topk(top, logits_of())
    assert not on_hopper.compiled
    monkeypatch.setattr(layers, "is_capturing", lambda device: False)
    assert_topk(top, logits_of())
    monkeypatch.setattr(layers, "is_capturing", lambda device: True)
    assert_topk(top, logits_of())
    assert len(on_hopper.compiled) == 1 and len(on_hopper.ran) == 4


@pytest.mark.parametrize("execution", ["exact", "fast"])
@pytest.mark.parametrize("is_fused", [True, False])
def test_fused_text_decode_draws_by_way_of_it(on_hopper, execution_on_gpu, execution, is_fused):
    built = execution_on_gpu(execution, is_fused)
    sampling = SamplingConfig(True, 0.9, 50, 1.0)
    built.stacks.draw(logits_of(), sampling, torch.Generator())
    assert len(on_hopper.ran) == (3 if is_fused else 0)
