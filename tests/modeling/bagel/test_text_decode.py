"""Eager decoding: who takes part in which turn, what is recorded, and the forced end."""

import pytest
import torch
from torch import Tensor

from modeling.bagel.attention import forest_attention
from modeling.bagel.batch import PackedBatch
from modeling.bagel.context import Contexts
from modeling.bagel.layout import ROOT, ForestBuilder, SegmentKind
from modeling.bagel.qwen2_navit import QkRounding
from modeling.bagel.sampling import SamplingConfig
from modeling.bagel.text_decode import DecodedText, decode_text
from tests.tiny import CPU, contexts, special_tokens, tiny_model, tiny_tokenizer

GREEDY = SamplingConfig(do_sample=False, temperature=1.0, top_k=0, top_p=1.0)
SAMPLED = SamplingConfig(do_sample=True, temperature=0.9, top_k=0, top_p=0.9)
PROMPTS = ("a photo of a black oven", "a photo of two cats and a green umbrella", "red")


def prompted(prompts: tuple[str, ...] = PROMPTS) -> Contexts:
    grown = contexts(len(prompts), capacity=128)
    grown.add_text([tiny_tokenizer().encode(prompt) for prompt in prompts])
    return grown


def generator(seed: int = 3) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.fixture
def script(monkeypatch):
    """Replaces sampling by given tokens for each turn; returns the rows of each turn's logits."""
    turns: list[int] = []

    def play(tokens_by_turn: list[list[int]], probs_by_turn: list[list[float]]) -> list[int]:
        def sample(_: Contexts, logits: Tensor, *__: object) -> tuple[Tensor, Tensor]:
            turn = len(turns)
            turns.append(logits.shape[0])
            return torch.tensor(tokens_by_turn[turn]), torch.tensor(probs_by_turn[turn])

        monkeypatch.setattr(Contexts, "draw", sample)
        return turns

    return play


def test_a_sample_leaves_after_the_turn_that_feeds_its_eos(script):
    eos, bos = special_tokens().eos, special_tokens().bos
    turns = script(
        [[10, 11], [eos, 21], [99, 31], [eos], [99]],
        [[0.5, 0.25], [0.125, 0.5], [0.75, 0.25], [0.5], [0.75]],
    )
    grown = prompted(PROMPTS[:2])
    before, ropes = list(grown.cache.lengths), list(grown.cache.next_rope)
    texts = decode_text(grown, SAMPLED, 50, generator())
    # Sample 0 takes part in turn 2, which feeds its eos; what it drew there is dropped.
    assert turns == [2, 2, 2, 1, 1]
    assert texts == [
        DecodedText((bos, 10, eos), (0.5, 0.125)),
        DecodedText((bos, 11, 21, 31, eos), (0.25, 0.5, 0.25, 0.5)),
    ]
    lengths = [len(text.ids) for text in texts]
    assert grown.cache.lengths == [a + b for a, b in zip(before, lengths, strict=True)]
    assert grown.cache.next_rope == [a + b for a, b in zip(ropes, lengths, strict=True)]


def test_an_empty_thought_is_bos_and_eos(script):
    special = special_tokens()
    turns = script([[special.eos], [7]], [[0.5], [0.5]])
    texts = decode_text(prompted(PROMPTS[:1]), SAMPLED, 50, generator())
    assert turns == [1, 1]
    assert texts == [DecodedText((special.bos, special.eos), (0.5,))]


def test_the_last_turn_forces_eos_and_keeps_the_drawn_probability(script):
    special = special_tokens()
    turns = script([[10], [11], [12], [13]], [[0.5], [0.25], [0.125], [0.75]])
    texts = decode_text(prompted(PROMPTS[:1]), SAMPLED, 3, generator())
    assert turns == [1, 1, 1, 1]  # three draws, then the turn that feeds eos
    assert texts == [DecodedText((special.bos, 10, 11, special.eos), (0.5, 0.25, 0.125))]


@torch.no_grad()
def test_forced_end_of_the_real_model():
    text = decode_text(prompted(PROMPTS[:1]), GREEDY, 4, generator())[0]
    longer = decode_text(prompted(PROMPTS[:1]), GREEDY, 5, generator())[0]
    assert len(text.ids) == 5
    assert text.ids[:4] == longer.ids[:4]
    assert text.ids[4] == special_tokens().eos != longer.ids[4]
    assert text.probs == longer.probs[:4]


@torch.no_grad()
def test_a_batch_decodes_as_its_samples_alone():
    together = decode_text(prompted(), GREEDY, 20, generator())
    for prompt, text in zip(PROMPTS, together, strict=True):
        alone = decode_text(prompted((prompt,)), GREEDY, 20, generator())[0]
        assert text.ids == alone.ids
        assert text.probs == pytest.approx(alone.probs, abs=1e-5)


@torch.no_grad()
def test_draws_come_from_the_given_stream():
    first, same, other = (
        decode_text(prompted(), SAMPLED, 20, generator(seed)) for seed in (3, 3, 4)
    )
    assert first == same
    assert [t.ids for t in first] != [t.ids for t in other]
    special = special_tokens()
    for text in first:
        assert len(text.probs) == len(text.ids) - 1
        assert (text.ids[0], text.ids[-1]) == (special.bos, special.eos)
        assert special.eos not in text.ids[1:-1]


def learner_logits(prompt: str, ids: tuple[int, ...]) -> Tensor:
    """Logits behind each id of a text, from the learner's packed forward."""
    segment = special_tokens().text_segment(tiny_tokenizer().encode(prompt))
    builder = ForestBuilder()
    context = builder.add(SegmentKind.TEXT, len(segment), ROOT)
    builder.add(SegmentKind.TEXT, len(ids), context)
    plan, tokens = builder.finish(), torch.tensor([*segment, *ids])
    none = torch.zeros(0, dtype=torch.int64)
    batch = PackedBatch(
        plan=plan,
        rope_ids=torch.tensor(plan.rope_ids()),
        text_ids=tokens,
        text_index=torch.arange(tokens.numel()),
        vit_features=torch.zeros(0, 0),
        vit_position_ids=none,
        vit_index=none,
        latents=torch.zeros(0, 64),
        timesteps=torch.zeros(0),
        latent_position_ids=none,
        latent_index=none,
        label_index=torch.arange(len(segment), tokens.numel()),
        noise_index=none,
    )
    return tiny_model()(batch, forest_attention(plan, CPU), QkRounding()).logits


@torch.no_grad()
def test_recorded_probabilities_are_the_learners():
    texts = decode_text(prompted(), SAMPLED, 20, generator(5))
    assert any(len(text.ids) < 21 for text in texts)  # one ended by itself
    for prompt, text in zip(PROMPTS, texts, strict=True):
        probs = learner_logits(prompt, text.ids).softmax(-1)
        drawn = probs[torch.arange(len(text.ids) - 1), list(text.ids[1:])]
        num_free = len(text.ids) - (2 if len(text.ids) == 21 else 1)  # a forced eos was not drawn
        assert text.probs[:num_free] == pytest.approx(drawn.tolist()[:num_free], abs=1e-5)
