"""Token sampling against the golden draws, torch.multinomial and hand-made distributions."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from modeling.bagel.sampling import SamplingConfig, draw_index, keep_nucleus, sample_tokens

PARITY = Path(__file__).parents[2] / "parity"
CASES = json.loads((PARITY / "units.json").read_text())["sampling"]


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("case", CASES)
def test_golden_tokens_and_probabilities(case):
    logits = load_file(PARITY / "units.safetensors")["sampling.logits"]
    config = SamplingConfig(True, case["temperature"], case["top_k"], case["top_p"])
    tokens, probs = sample_tokens(logits, config, seeded(case["generator_seed"]))
    assert tokens.dtype == torch.int64 and probs.dtype == torch.float32
    assert tokens.tolist() == case["tokens"]
    torch.testing.assert_close(probs, torch.tensor(case["reported_probs"]), rtol=1e-5, atol=0)


@pytest.mark.parametrize("width", [1, 50, 1000, 4096])
def test_draws_equal_multinomial_and_advance_the_stream_alike(width):
    ours, theirs = seeded(7), seeded(7)
    for seed in range(5):
        probs = torch.softmax(3 * torch.randn(6, width, generator=seeded(seed)), -1)
        expected = torch.multinomial(probs, 1, generator=theirs).squeeze(-1)
        assert torch.equal(draw_index(probs, ours), expected)
    assert torch.equal(ours.get_state(), theirs.get_state())


def test_greedy_takes_the_maximum_and_leaves_the_stream_alone():
    logits = torch.randn(4, 30, generator=seeded(0), dtype=torch.bfloat16)
    stream = seeded(1)
    before = stream.get_state()
    tokens, probs = sample_tokens(logits, SamplingConfig(False, 0.0, 0, 1.0), stream)
    assert torch.equal(tokens, logits.argmax(-1))
    assert torch.equal(probs, torch.softmax(logits.float(), -1).max(-1).values)
    assert torch.equal(stream.get_state(), before)


def test_nucleus_keeps_the_token_that_crosses():
    probs = torch.tensor([[0.5, 0.25, 0.125, 0.125], [1.0, 0.0, 0.0, 0.0]])
    expected = torch.tensor([[2 / 3, 1 / 3, 0, 0], [1.0, 0, 0, 0]])
    torch.testing.assert_close(keep_nucleus(probs, 0.6), expected)
    # A prefix of mass equal to top_p does not exceed it: one more token stays.
    expected = torch.tensor([[4 / 7, 2 / 7, 1 / 7, 0], [1.0, 0, 0, 0]])
    torch.testing.assert_close(keep_nucleus(probs, 0.75), expected)


def test_nucleus_counts_mass_of_the_whole_vocabulary():
    # 1500 equal tokens: the 1000 candidates hold 2/3 of the mass, so all of them pass top_p 0.9.
    logits = torch.zeros(2000, 1500)
    tokens, probs = sample_tokens(logits, SamplingConfig(True, 1.0, 0, 0.9), seeded(0))
    assert len(set(tokens.tolist())) > 800
    candidates = set(torch.softmax(logits[:1], -1).topk(1000).indices[0].tolist())
    assert set(tokens.tolist()) <= candidates
    torch.testing.assert_close(probs, torch.full([2000], 1 / 1500))


@pytest.mark.parametrize(
    ("config", "allowed"),
    [
        (SamplingConfig(True, 1.0, 2, 1.0), {3, 1}),
        (SamplingConfig(True, 1.0, 1, 1.0), {3}),
        (SamplingConfig(True, 1.0, 1, 0.6), {3, 1}),  # top_k is not used below top_p 1
        (SamplingConfig(True, 0.01, 0, 1.0), {3}),
        (SamplingConfig(True, 1.0, 99, 1.0), {0, 1, 2, 3}),  # top_k above the vocabulary
        (SamplingConfig(True, 1.0, -1, 1.0), {0, 1, 2, 3}),
    ],
)
def test_only_and_all_allowed_tokens_come_out(config, allowed):
    logits = torch.tensor([0.125, 0.25, 0.125, 0.5]).log().expand(400, 4)
    tokens, _ = sample_tokens(logits, config, seeded(3))
    assert set(tokens.tolist()) == allowed


def test_a_broken_row_reports_nan_and_spares_the_others():
    logits = torch.randn(3, 20, generator=seeded(0))
    logits[1, 4] = float("nan")
    for top_p in (0.9, 1.0):
        _, probs = sample_tokens(logits, SamplingConfig(True, 1.0, 0, top_p), seeded(0))
        assert probs.isnan().tolist() == [False, True, False]


@pytest.mark.parametrize(
    ("fields", "flag"),
    [
        ({"temperature": 0.0}, "--text_temperature 0.0"),
        ({"temperature": -1.0}, "--text_temperature"),
        ({"temperature": float("nan")}, "--text_temperature"),
        ({"top_p": 1.5}, "--top_p 1.5"),
        ({"top_p": 0.0}, "--top_p"),
        ({"top_p": float("nan")}, "--top_p"),
        ({"top_k": -2}, "--top_k -2"),
    ],
)
def test_bad_settings_name_their_flag(fields, flag):
    good = {"do_sample": True, "temperature": 0.9, "top_k": 50, "top_p": 0.9}
    with pytest.raises(ValueError, match=flag):
        SamplingConfig(**{**good, **fields})


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("top_k", "top_p"), [(50, 0.9), (50, 1.0), (0, 1.0)])
def test_gpu_draws_equal_multinomial_without_synchronising(top_k, top_p):
    logits = 5 * torch.randn(4, 152064, device="cuda", dtype=torch.bfloat16)
    config = SamplingConfig(True, 0.9, top_k, top_p)
    ours, theirs = (torch.Generator("cuda").manual_seed(11) for _ in range(2))
    sample_tokens(logits, config, torch.Generator("cuda"))  # first calls may set up and wait
    torch.cuda.set_sync_debug_mode("error")
    try:
        drawn = [sample_tokens(logits, config, ours)[0] for _ in range(5)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    tempered = logits.float() / 0.9
    if top_p < 1:
        sorted_probs, ids = torch.softmax(tempered, -1).topk(1000)
        probs = keep_nucleus(sorted_probs, top_p)
    elif top_k > 0:
        values, ids = tempered.topk(top_k)
        probs = torch.softmax(values, -1)
    else:
        probs, ids = torch.softmax(tempered, -1), torch.arange(152064, device="cuda").expand(4, -1)
    for tokens in drawn:
        picked = torch.multinomial(probs, 1, generator=theirs)
        assert torch.equal(tokens, ids.gather(-1, picked).squeeze(-1))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_gpu_capture_replays_the_eager_draws():
    logits = torch.randn(4, 4096, device="cuda")
    config = SamplingConfig(True, 0.9, 50, 0.9)
    eager, captured = (torch.Generator("cuda").manual_seed(5) for _ in range(2))
    expected = [sample_tokens(logits, config, eager)[0] for _ in range(3)]
    graph = torch.cuda.CUDAGraph()
    graph.register_generator_state(captured)
    with torch.cuda.graph(graph):
        tokens, _ = sample_tokens(logits, config, captured)
    for draw in expected:
        graph.replay()
        assert torch.equal(tokens, draw)
