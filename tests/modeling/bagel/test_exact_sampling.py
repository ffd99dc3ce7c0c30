"""The exact grade's sampler: its kernels are used where they give what sample_tokens gives.

The kernels themselves run interpreted in test_fused_ops.py.
"""

import logging
from functools import partial
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton", reason="Triton comes with PyTorch's GPU builds only")

from modeling.bagel import exact_sampling, layers
from modeling.bagel.exact_sampling import TRIED_ROWS, ExactSampler, varied_rows
from modeling.bagel.sampling import SamplingConfig, masses_of, sample_tokens

CONFIG = SamplingConfig(True, 0.9, 50, 0.9)
NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture
def on_gpu(monkeypatch):
    """Lets a run on the CPU pass for one on a GPU; returns what the kernels do there."""
    plan = SimpleNamespace(divides=False, mass_offset=0.0, token_offset=0, tried=[], drawn=[])

    def fused_masses(logits, values, tempering):
        plan.tried.append(tempering.divides)
        masses, _ = masses_of(logits.float(), values[:, :1].float(), tempering.temperature)
        return masses + plan.mass_offset + (tempering.divides != plan.divides)

    def draw_nucleus(logits, config, generator, topk, tempering):
        plan.drawn.append(tempering)
        tokens, probs = sample_tokens(logits, config, generator, topk)
        return tokens + plan.token_offset, probs

    monkeypatch.setattr(exact_sampling, "is_supported", lambda device: True)
    monkeypatch.setattr(exact_sampling, "fused_masses", fused_masses)
    monkeypatch.setattr(exact_sampling, "draw_nucleus", draw_nucleus)
    return plan


def logits_of(rows: int = 2, vocab: int = 800, dtype: torch.dtype = torch.bfloat16):
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(rows)).to(dtype)


def assert_draws(
    sampler: ExactSampler, logits: torch.Tensor, config: SamplingConfig = CONFIG
) -> None:
    mine, theirs = (torch.Generator(logits.device).manual_seed(3) for _ in range(2))
    found = sampler.draw(logits, config, mine)
    for a, b in zip(found, sample_tokens(logits, config, theirs), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(mine.get_state(), theirs.get_state())


def test_kernels_that_give_the_same_are_compared_once_and_used(on_gpu):
    sampler = ExactSampler()
    for rows in (2, 3, 2):
        assert_draws(sampler, logits_of(rows))
    # Twice to compare, with the logits and with varied ones, whatever the number of rows.
    assert len(on_gpu.tried) == 2 and len(on_gpu.drawn) == 5
    assert_draws(sampler, logits_of(vocab=640))
    assert_draws(sampler, logits_of(dtype=torch.float32))
    assert_draws(sampler, logits_of(), SamplingConfig(True, 0.8, 50, 0.9))
    assert len(on_gpu.tried) == 8 and len(on_gpu.drawn) == 14


def test_a_row_that_is_nan_compares_equal(on_gpu):
    logits = logits_of()
    logits[0, 3] = float("nan")
    assert_draws(ExactSampler(), logits)
    assert len(on_gpu.drawn) == 3


@pytest.mark.parametrize("divides", [False, True])
def test_how_pytorch_tempers_is_found_out(on_gpu, divides):
    on_gpu.divides = divides
    assert_draws(ExactSampler(), logits_of())
    assert on_gpu.tried == ([False, True, True] if divides else [False, False])
    assert {tempering.divides for tempering in on_gpu.drawn} == {divides}
    inverse = (torch.tensor([1.0]) / CONFIG.temperature).item()
    assert {tempering.factor for tempering in on_gpu.drawn} == {inverse}


@pytest.mark.parametrize("broken", ["mass_offset", "token_offset"])
def test_kernels_that_give_something_else_are_left_alone_with_a_warning(on_gpu, caplog, broken):
    setattr(on_gpu, broken, 1)
    sampler = ExactSampler()
    with caplog.at_level(logging.WARNING, logger="faster_r3"):
        for _ in range(2):
            assert_draws(sampler, logits_of())
    (record,) = caplog.records
    assert "by sample_tokens" in record.getMessage() and "top_p=0.9" in record.getMessage()
    assert on_gpu.tried == [False, True]


def test_nothing_is_tried_inside_a_capture(on_gpu, monkeypatch):
    monkeypatch.setattr(layers, "is_capturing", lambda device: True)
    sampler = ExactSampler()
    assert_draws(sampler, logits_of())
    assert not on_gpu.tried
    monkeypatch.setattr(layers, "is_capturing", lambda device: False)
    assert_draws(sampler, logits_of())
    monkeypatch.setattr(layers, "is_capturing", lambda device: True)
    assert_draws(sampler, logits_of())
    assert len(on_gpu.tried) == 2 and len(on_gpu.drawn) == 4


@pytest.mark.parametrize(
    ("logits", "config"),
    [
        (logits_of(), SamplingConfig(False, 0.0, 0, 0.9)),
        (logits_of(), SamplingConfig(True, 0.9, 50, 1.0)),
        (logits_of(), SamplingConfig(True, 0.9, 0, 1.0)),
        (logits_of(rows=0), CONFIG),
        (logits_of(vocab=1600)[:, ::2], CONFIG),
    ],
    ids=["greedy", "top-k", "all", "no rows", "strided"],
)
def test_what_is_no_nucleus_or_lies_otherwise_is_left_to_sample_tokens(on_gpu, logits, config):
    assert_draws(ExactSampler(), logits, config)
    assert not on_gpu.tried and not on_gpu.drawn


def test_other_devices_are_left_to_sample_tokens(on_gpu, monkeypatch):
    monkeypatch.undo()
    assert not exact_sampling.is_supported(torch.device("cpu"))
    assert_draws(ExactSampler(), logits_of())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_varied_rows_tie_underflow_and_end_their_nuclei_early_or_not(dtype):
    rows = varied_rows(logits_of(1, 152064, dtype))
    assert rows.shape == (TRIED_ROWS, 152064) and rows.dtype == dtype
    assert rows.isnan().sum(-1).tolist() == [0] * (TRIED_ROWS - 1) + [1]
    sound = rows[:-1].float()
    assert bool((sound.amax(-1) == 0).all()) and sound.unique().numel() < sound.numel() / 2
    masses = sound.exp()
    assert bool(((masses > 0) & (masses < torch.finfo(torch.float32).tiny)).any())
    head = masses.sort(-1, descending=True).values[:, :999].sum(-1) / masses.sum(-1)
    assert bool((head < 0.9).any()) and bool((head > 0.9).any())


def test_candidates_come_from_the_topk_that_is_passed_in(on_gpu):
    counts, sampler, logits = [], ExactSampler(), logits_of(vocab=1500)

    def topk(given: torch.Tensor, count: int):
        counts.append(count)
        return torch.topk(given, count)

    sampler.draw(logits, CONFIG, torch.Generator(), topk)
    assert counts == [1000]


@pytest.mark.parametrize("execution", ["exact", "fast", "eager"])
@pytest.mark.parametrize("is_fused", [True, False])
def test_the_exact_grade_of_a_fused_text_decode_draws_by_way_of_it(
    on_gpu, execution_on_gpu, execution, is_fused
):
    built = execution_on_gpu(execution, is_fused)
    greedy = SamplingConfig(False, 0.0, 0, 1.0)
    built.stacks.draw(logits_of(), greedy, torch.Generator())
    assert not on_gpu.drawn
    if execution == "fast" and is_fused:
        return  # its kernels do not run here
    built.stacks.draw(logits_of(), CONFIG, torch.Generator())
    assert len(on_gpu.drawn) == (3 if execution == "exact" and is_fused else 0)


@NEEDS_GPU
@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
@pytest.mark.parametrize("top_p", [0.5, 0.9, 0.999])
def test_gpu_draws_have_the_bits_of_sample_tokens(temperature, top_p):
    config, sampler = SamplingConfig(True, temperature, 50, top_p), ExactSampler()
    for rows in (1, 4, 100):
        logits = 5 * torch.randn(rows, 152064, device="cuda", dtype=torch.bfloat16)
        for given in (logits, logits.round(), varied_rows(logits)):
            assert_draws(sampler, given, config)
    (tempering,) = sampler._temperings._found.values()
    assert tempering is not None


@NEEDS_GPU
@pytest.mark.parametrize("temperature", [0.9, 1.0])
def test_gpu_capture_replays_the_eager_draws(temperature):
    logits = torch.randn(4, 4096, device="cuda", dtype=torch.bfloat16)
    config, sampler = SamplingConfig(True, temperature, 0, 0.9), ExactSampler()
    eager, captured = (torch.Generator("cuda").manual_seed(5) for _ in range(2))
    expected = [sample_tokens(logits, config, eager) for _ in range(3)]
    draw = partial(sampler.draw, logits, config)
    draw(torch.Generator("cuda"))
    graph = torch.cuda.CUDAGraph()
    graph.register_generator_state(captured)
    with torch.cuda.graph(graph):
        tokens, probs = draw(captured)
    for drawn, recorded in expected:
        graph.replay()
        assert torch.equal(tokens, drawn)
        assert torch.equal(probs, recorded)


@NEEDS_GPU
def test_gpu_draws_do_not_make_the_host_wait():
    logits = torch.randn(4, 4096, device="cuda", dtype=torch.bfloat16)
    sampler, generator = ExactSampler(), torch.Generator("cuda")
    sampler.draw(logits, CONFIG, generator)
    torch.cuda.set_sync_debug_mode("error")
    try:
        sampler.draw(logits, CONFIG, generator)
    finally:
        torch.cuda.set_sync_debug_mode("default")
