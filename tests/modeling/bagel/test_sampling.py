"""Token sampling against the golden draws, torch.multinomial and hand-made distributions."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from modeling.bagel.sampling import SamplingConfig, draw_index, keep_nucleus, sample_tokens

PARITY = Path(__file__).parents[2] / "parity"
CASES = json.loads((PARITY / "units.json").read_text())["sampling"]


NUCLEUS, TOP_K, FULL = (50, 0.9), (50, 1.0), (0, 1.0)
INF, NAN = float("inf"), float("nan")


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def expected_draws(logits: torch.Tensor, config: SamplingConfig, generator: torch.Generator):
    """The tokens by way of torch.softmax and torch.multinomial."""
    tempered = logits.float() / config.temperature
    num_tokens = logits.shape[-1]
    if config.top_p < 1:
        # Ordered by logit, not by probability: where that underflows, it tells no order.
        ids = logits.float().topk(min(1000, num_tokens)).indices
        probs = keep_nucleus(torch.softmax(tempered, -1).gather(-1, ids), config.top_p)
    elif config.top_k > 0:
        values, ids = tempered.topk(min(config.top_k, num_tokens))
        probs = torch.softmax(values, -1)
    else:
        probs = torch.softmax(tempered, -1)
        ids = torch.arange(num_tokens, device=logits.device).expand(len(logits), -1)
    return ids.gather(-1, torch.multinomial(probs, 1, generator=generator)).squeeze(-1)


def expected_probs(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Untempered probabilities, computed in fp64, as fp32 [B]."""
    return torch.softmax(logits.double(), -1).gather(-1, tokens[:, None]).squeeze(-1).float()


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
    expected = torch.softmax(logits.float(), -1).max(-1).values
    torch.testing.assert_close(probs, expected, rtol=1e-6, atol=0)
    assert torch.equal(stream.get_state(), before)


@pytest.mark.parametrize("temperature", [0.3, 0.9, 1.0])
@pytest.mark.parametrize(("top_k", "top_p"), [NUCLEUS, TOP_K, FULL, (9999, 1.0)])
@pytest.mark.parametrize("shape", [(1, 4000), (3, 700), (2, 1)])
def test_draws_and_probabilities_equal_those_of_softmax(temperature, top_k, top_p, shape):
    config = SamplingConfig(True, temperature, top_k, top_p)
    ours, theirs = seeded(1), seeded(1)
    for seed in range(8):
        logits = 4 * torch.randn(shape, generator=seeded(seed))
        before = logits.clone()
        tokens, probs = sample_tokens(logits, config, ours)
        assert torch.equal(logits, before)
        assert torch.equal(tokens, expected_draws(logits, config, theirs))
        torch.testing.assert_close(probs, expected_probs(logits, tokens), rtol=1e-6, atol=0)
    assert torch.equal(ours.get_state(), theirs.get_state())


def extreme_logits(name: str) -> torch.Tensor:
    """[4, 1200] logits that a careless softmax gets wrong."""
    logits = torch.randn(4, 1200, generator=seeded(2))
    if name == "large negative":
        return logits - 1e4
    if name == "large positive":
        return logits + 1e4
    if name == "impossible tokens":
        return logits.masked_fill(torch.rand(4, 1200, generator=seeded(3)) < 0.99, -INF)
    if name == "one dominates":
        logits[:, 77] = 300
        return logits
    # Largest numbers of both signs: their difference is no number of fp32.
    return logits / logits.abs().amax(-1, keepdim=True) * 3.3e38


EXTREMES = ["large negative", "large positive", "impossible tokens", "one dominates", "huge spread"]


@pytest.mark.parametrize("name", EXTREMES)
@pytest.mark.parametrize("temperature", [0.3, 0.9, 1.0])
@pytest.mark.parametrize(("top_k", "top_p"), [NUCLEUS, FULL])
def test_extreme_logits_keep_their_probabilities(name, temperature, top_k, top_p):
    logits = extreme_logits(name)
    config = SamplingConfig(True, temperature, top_k, top_p)
    tokens, probs = sample_tokens(logits, config, seeded(4))
    assert bool((probs > 0).all())
    torch.testing.assert_close(probs, expected_probs(logits, tokens), rtol=1e-6, atol=0)
    if name in ("one dominates", "huge spread"):
        assert torch.equal(tokens, logits.argmax(-1))
    else:
        # In fp64, so that dividing the large logits by the temperature costs no digits.
        wide = logits.double() - logits.double().amax(-1, keepdim=True)
        assert torch.equal(tokens, expected_draws(wide, config, seeded(4)))


def test_probabilities_carry_no_gradient():
    logits = torch.randn(2, 9, generator=seeded(0)).requires_grad_()
    _, probs = sample_tokens(logits, SamplingConfig(True, 0.9, 0, 0.9), seeded(0))
    assert not probs.requires_grad


def test_nucleus_keeps_the_token_that_crosses():
    probs = torch.tensor([[0.5, 0.25, 0.125, 0.125], [1.0, 0.0, 0.0, 0.0]])
    before = probs.clone()
    expected = torch.tensor([[2 / 3, 1 / 3, 0, 0], [1.0, 0, 0, 0]])
    torch.testing.assert_close(keep_nucleus(probs, 0.6), expected)
    # A prefix of mass equal to top_p does not exceed it: one more token stays.
    expected = torch.tensor([[4 / 7, 2 / 7, 1 / 7, 0], [1.0, 0, 0, 0]])
    torch.testing.assert_close(keep_nucleus(probs, 0.75), expected)
    assert torch.equal(probs, before)


@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.9, 0.999])
def test_nucleus_is_its_definition(top_p):
    probs = torch.softmax(2 * torch.randn(5, 300, generator=seeded(6)), -1).sort(-1, True).values
    kept = torch.zeros_like(probs)
    for row, source in zip(kept, probs, strict=True):
        mass = torch.cat((torch.zeros(1), source.cumsum(-1)[:-1]))
        size = int((mass <= top_p).sum())
        row[:size] = source[:size]
    assert torch.equal(keep_nucleus(probs, top_p), kept / kept.sum(-1, keepdim=True))


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


@pytest.mark.parametrize(("top_k", "top_p"), [NUCLEUS, TOP_K, FULL])
def test_candidates_come_from_the_topk_that_is_passed_in(top_k, top_p):
    logits = torch.randn(3, 1500, generator=seeded(0))
    config = SamplingConfig(True, 0.9, top_k, top_p)
    counts = []

    def topk(given: torch.Tensor, count: int):
        counts.append(count)
        return torch.topk(given, count)

    for mine, theirs in zip(
        sample_tokens(logits, config, seeded(1), topk),
        sample_tokens(logits, config, seeded(1)),
        strict=True,
    ):
        assert torch.equal(mine, theirs)
    assert counts == {NUCLEUS: [1000], TOP_K: [50], FULL: []}[top_k, top_p]


BROKEN_ROWS = {"nan": ([4], NAN), "inf": ([4], INF), "nothing possible": (range(20), -INF)}


@pytest.mark.parametrize("name", BROKEN_ROWS)
@pytest.mark.parametrize("temperature", [0.9, 1.0])
@pytest.mark.parametrize("mode", [NUCLEUS, TOP_K, FULL, "greedy"])
def test_a_broken_row_reports_nan_and_spares_the_others(name, temperature, mode):
    sound = torch.randn(3, 20, generator=seeded(0))
    logits = sound.clone()
    places, value = BROKEN_ROWS[name]
    logits[1, places] = value
    top_k, top_p = FULL if mode == "greedy" else mode
    config = SamplingConfig(mode != "greedy", temperature, top_k, top_p)
    tokens, probs = sample_tokens(logits, config, seeded(0))
    assert probs.isnan().tolist() == [False, True, False]
    assert 0 <= tokens[1] < 20
    others, other_probs = sample_tokens(sound, config, seeded(0))
    assert torch.equal(tokens[[0, 2]], others[[0, 2]])
    assert torch.equal(probs[[0, 2]], other_probs[[0, 2]])


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
@pytest.mark.parametrize("temperature", [0.9, 1.0])
@pytest.mark.parametrize(("top_k", "top_p"), [NUCLEUS, TOP_K, FULL])
def test_gpu_draws_equal_multinomial_without_synchronising(temperature, top_k, top_p):
    logits = 5 * torch.randn(4, 152064, device="cuda", dtype=torch.bfloat16)
    config = SamplingConfig(True, temperature, top_k, top_p)
    ours, theirs = (torch.Generator("cuda").manual_seed(11) for _ in range(2))
    sample_tokens(logits, config, torch.Generator("cuda"))  # first calls may set up and wait
    torch.cuda.set_sync_debug_mode("error")
    try:
        drawn = [sample_tokens(logits, config, ours) for _ in range(5)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for tokens, probs in drawn:
        assert torch.equal(tokens, expected_draws(logits, config, theirs))
        torch.testing.assert_close(probs, expected_probs(logits, tokens), rtol=2e-6, atol=0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("temperature", [0.9, 1.0])
@pytest.mark.parametrize(("top_k", "top_p"), [NUCLEUS, TOP_K, FULL])
def test_gpu_capture_replays_the_eager_draws(temperature, top_k, top_p):
    logits = torch.randn(4, 4096, device="cuda")
    config = SamplingConfig(True, temperature, top_k, top_p)
    eager, captured = (torch.Generator("cuda").manual_seed(5) for _ in range(2))
    expected = [sample_tokens(logits, config, eager) for _ in range(3)]
    graph = torch.cuda.CUDAGraph()
    graph.register_generator_state(captured)
    with torch.cuda.graph(graph):
        tokens, probs = sample_tokens(logits, config, captured)
    for draw, recorded in expected:
        graph.replay()
        assert torch.equal(tokens, draw)
        assert torch.equal(probs, recorded)
