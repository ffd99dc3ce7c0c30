"""Cached contexts: growing in pieces, image segments, the overlay, and the noise segment."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from modeling.bagel.bagel import EagerStack, LayerPass
from modeling.bagel.config import ImageSize
from modeling.bagel.context import ConditionImage, Contexts, Stacks
from tests.tiny import condition_image, contexts, special_tokens, tiny_tokenizer

TOKENS = [5, 77, 300, 12, 9, 41, 250]
VIT_TOKENS, VAE_TOKENS = 15 + 2, 6 + 2


def entries(grown: Contexts, row: int, start: int, end: int) -> Tensor:
    """Keys and values of all layers at some positions of a row."""
    return torch.stack([x[row, start:end] for x in (*grown.cache.keys, *grown.cache.values)])


def assert_near(mine: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


class RecordingStack(EagerStack):
    """Notes the tokens of each expert in every pass."""

    def __init__(self) -> None:
        self.passes: list[tuple[int, int]] = []

    def run(self, layer_pass: LayerPass) -> Tensor:
        self.passes.append((layer_pass.experts.num_und, layer_pass.experts.num_gen))
        return super().run(layer_pass)


def with_latents(image: ConditionImage, height: int, width: int) -> ConditionImage:
    """The picture with that many latent tokens."""
    generator = torch.Generator().manual_seed(height * width)
    latents = torch.randn(height * width, 64, generator=generator)
    return replace(image, latents=latents, latent_grid=ImageSize(height, width))


def stale_contexts(rows: int) -> Contexts:
    """Contexts over memory in which every entry that was not written is NaN."""
    grown = contexts(rows)
    for layer in (*grown.cache.keys, *grown.cache.values):
        layer.fill_(float("nan"))
    return grown


def test_prefill_in_pieces_equals_one_pass():
    whole, pieces = contexts(1), contexts(1)
    hidden = whole.feed_text([0], [TOKENS])
    parts = [pieces.feed_text([0], [run]) for run in (TOKENS[:3], TOKENS[3:4], TOKENS[4:])]
    assert_near(torch.cat(parts), hidden)
    assert_near(entries(pieces, 0, 0, 7), entries(whole, 0, 0, 7))
    assert pieces.cache.lengths == pieces.cache.next_rope == [7]


def test_rows_of_unequal_length_do_not_see_each_other():
    together = contexts(3)
    hidden = together.feed_text([0, 2], [TOKENS, TOKENS[:2]]).split([7, 2])
    hidden2 = together.feed_text([2, 1], [TOKENS[2:], TOKENS[:4]]).split([5, 4])
    for got, tokens in ((hidden[0], TOKENS), (hidden2[1], TOKENS[:4])):
        assert_near(got, contexts(1).feed_text([0], [tokens]))
    assert_near(hidden2[0], hidden[0][2:])  # row 2, fed in two calls
    assert together.cache.lengths == together.cache.next_rope == [7, 4, 7]


def test_text_segments_carry_their_markers():
    special = special_tokens()
    marked, raw = contexts(1), contexts(1)
    marked.add_text([TOKENS])
    raw.feed_text([0], [[special.bos, *TOKENS, special.eos]])
    assert marked.cache.lengths == [9]
    assert torch.equal(entries(marked, 0, 0, 9), entries(raw, 0, 0, 9))


def test_image_segments_append_one_after_the_other():
    grown = contexts(2)
    images = [condition_image(0), condition_image(1)]
    grown.add_image(images, overlay=False)
    assert grown.cache.lengths == [VAE_TOKENS + VIT_TOKENS] * 2
    assert grown.cache.next_rope == [2, 2]
    grown.add_vit(images)
    assert grown.cache.lengths == [VAE_TOKENS + 2 * VIT_TOKENS] * 2
    assert grown.cache.next_rope == [3, 3]
    assert grown.cache.blanks == [(0, 0)] * 2
    alone = contexts(1)
    alone.add_image(images[1:], overlay=False)
    end = VAE_TOKENS + VIT_TOKENS
    assert_near(entries(alone, 0, 0, end), entries(grown, 1, 0, end))
    assert not torch.allclose(entries(grown, 0, 0, end), entries(grown, 1, 0, end), atol=1e-2)


def test_overlay_loses_the_latents_and_attends_zeros_instead():
    image, overlaid = condition_image(), contexts(1)
    overlaid.add_image([image], overlay=True)
    assert overlaid.cache.lengths == [VAE_TOKENS + VIT_TOKENS]
    assert overlaid.cache.next_rope == [2]
    # The encoder segment saw itself alone, on RoPE id 1.
    alone = contexts(1)
    alone.cache.next_rope[0] = 1
    alone.add_vit([image])
    assert_near(entries(overlaid, 0, 0, VIT_TOKENS), entries(alone, 0, 0, VIT_TOKENS))
    behind = entries(overlaid, 0, VIT_TOKENS, VIT_TOKENS + VAE_TOKENS)
    assert torch.equal(behind, torch.zeros_like(behind))
    assert overlaid.cache.blanks == [(VIT_TOKENS, VIT_TOKENS + VAE_TOKENS)]


def test_latents_longer_than_the_encoder_segment_stay_behind_it():
    image, overlaid = with_latents(condition_image(), 4, 5), contexts(1)
    overlaid.feed_text([0], [TOKENS])
    overlaid.add_image([image], overlay=True)
    begin, end = len(TOKENS) + 22, len(TOKENS) + 22 + VIT_TOKENS
    assert overlaid.cache.lengths == [end]
    assert overlaid.cache.blanks == [(begin, end)]
    assert not entries(overlaid, 0, begin, end).any()
    assert entries(overlaid, 0, begin - 1, begin).any()


@torch.no_grad()
@pytest.mark.parametrize("grids", [[(2, 3), (3, 5)], [(2, 3), (4, 5)], [(4, 5), (5, 5)]])
def test_overlay_has_the_bits_of_both_passes(grids):
    images = [with_latents(condition_image(seed), *grid) for seed, grid in enumerate(grids)]
    overlaid, both = stale_contexts(2), stale_contexts(2)
    for grown in (overlaid, both):
        grown.feed_text([0, 1], [TOKENS, TOKENS[:2]])
    both._run_vae(images)  # moves no length on
    overlaid.add_image(images, overlay=True)
    both.add_image(images, overlay=True)
    for row, (height, width) in enumerate(grids):
        start, longer = (len(TOKENS), 2)[row], max(VIT_TOKENS, height * width + 2)
        assert entries(overlaid, row, start, start + longer).isfinite().all()
        assert entries(overlaid, row, start + longer, 96).isnan().all()
    mine, theirs = (entries(grown, slice(None), 0, 96) for grown in (overlaid, both))
    torch.testing.assert_close(mine, theirs, rtol=0, atol=0, equal_nan=True)
    for name in ("lengths", "next_rope", "blanks", "is_uniform"):
        assert getattr(overlaid.cache, name) == getattr(both.cache, name)


@torch.no_grad()
@pytest.mark.parametrize(
    ("grids", "passes"),
    [
        ([(2, 3), (2, 3)], [(2 * VIT_TOKENS, 0)]),
        ([(2, 3), (3, 5)], [(2 * VIT_TOKENS, 0)]),
        ([(2, 3), (4, 4)], [(4, 6 + 16), (2 * VIT_TOKENS, 0)]),
    ],
)
def test_overlay_runs_latents_only_where_some_are_left(grids, passes):
    grown, stack = contexts(2), RecordingStack()
    grown.stacks = Stacks(stack, stack)
    images = [with_latents(condition_image(), *grid) for grid in grids]
    grown.add_image(images, overlay=True)
    assert stack.passes == passes


@torch.no_grad()
def test_latents_behind_the_encoder_segment_are_those_of_their_own_pass():
    images = [condition_image(0), with_latents(condition_image(1), 4, 5)]
    overlaid, latents = contexts(2), contexts(2)
    latents._run_vae(images)
    overlaid.add_image(images, overlay=True)
    tails = [entries(grown, 1, VIT_TOKENS, 22) for grown in (overlaid, latents)]
    assert torch.equal(*tails) and tails[0].any()


def test_overlaid_zeros_are_attended():
    image, overlaid, shorter = condition_image(), contexts(1), contexts(1)
    for grown in (overlaid, shorter):
        grown.add_image([image], overlay=True)
    shorter.cache.lengths[0] -= VAE_TOKENS
    with_zeros, without = (grown.feed_text([0], [TOKENS]) for grown in (overlaid, shorter))
    assert (with_zeros - without).abs().max() > 1e-2


def test_appended_encoder_segment_sees_the_latents():
    image, appended, alone = condition_image(), contexts(1), contexts(1)
    appended.add_image([image], overlay=False)
    alone.cache.next_rope[0] = 1
    alone.add_vit([image])
    mine = entries(appended, 0, VAE_TOKENS, VAE_TOKENS + VIT_TOKENS)
    theirs = entries(alone, 0, 0, VIT_TOKENS)
    assert_near(mine[0], theirs[0])  # keys of the first layer do not depend on attention
    assert (mine[1] - theirs[1]).abs().max() > 1e-3


@pytest.mark.parametrize("order", [[0, 1], [1, 0]])
def test_a_full_row_refuses_more(order):
    grown = contexts(2, capacity=8)
    grown.feed_text([0], [TOKENS])
    with pytest.raises(ValueError, match="cache row 0 holds 7 of 8 positions, 2 more do not fit"):
        grown.feed_text(order, [[1, 2], [1, 2]])
    assert grown.cache.lengths == [7, 0]  # a refused append moves nothing
    grown.feed_text([0], [[3]])
    assert grown.cache.lengths == [8, 0]


@torch.no_grad()
def test_copied_rows_go_on_like_their_source():
    tokenizer = tiny_tokenizer()
    prefix, copies, whole = contexts(1), contexts(3), contexts(3)
    words = [tokenizer.encode(text) for text in ("a photo of", "a cat", "two dogs", "a red car")]
    prefix.add_text(words[:1])
    copies.cache.copy_rows(prefix.cache)
    whole.add_text(words[:1] * 3)
    for grown in (copies, whole):
        grown.add_text(words[1:])
    assert copies.cache.lengths == whole.cache.lengths
    assert copies.cache.next_rope == whole.cache.next_rope
    for mine, theirs in zip(copies.cache.keys, whole.cache.keys, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


def test_rows_are_uniform_until_they_are_appended_to():
    prefix, copies, again = contexts(1), contexts(3), contexts(3)
    assert copies.cache.is_uniform  # all empty
    words = [tiny_tokenizer().encode(text) for text in ("a photo of", "a cat", "two dogs")]
    prefix.add_text(words[:1])
    copies.cache.copy_rows(prefix.cache)
    again.cache.copy_rows(copies.cache)
    assert copies.cache.is_uniform and again.cache.is_uniform
    copies.add_text(words)
    again.cache.copy_rows(copies.cache)
    assert not copies.cache.is_uniform and not again.cache.is_uniform


def test_some_rows_stand_for_all():
    cache = contexts(3).cache
    few = cache.append([2], [6], False, runs=[[2], [4]], of_rows=3)
    assert [(run.num_tokens, run.eager_tokens) for run in few.runs] == [(2, 6), (4, 12)]
    every = cache.append([0, 1], [6, 5], False, runs=[[2, 2], [4, 3]])
    assert [(run.num_tokens, run.eager_tokens) for run in every.runs] == [(4, 4), (7, 7)]


def test_copied_rows_keep_their_blank_range():
    prefix, copies, again = (contexts(rows).cache for rows in (1, 2, 2))
    prefix.advance([0], [6], [6])
    prefix.leave_blank([0], [4])
    copies.copy_rows(prefix)
    copies.advance([1], [3], [3])
    copies.leave_blank([1], [1])
    again.copy_rows(copies)
    assert prefix.blanks == [(2, 6)]
    assert copies.blanks == again.blanks == [(2, 6), (8, 9)]


def test_reads_know_the_blank_ranges_of_their_rows():
    cache = contexts(3).cache
    cache.advance([0, 2], [5, 9], [5, 9])
    cache.leave_blank([0, 2], [3, 9])
    for run in cache.append([2, 1, 0], [6] * 3, False, runs=[[2] * 3, [4] * 3]).runs:
        assert run.read.blanks.tolist() == [[0, 9], [0, 0], [2, 5]]
        assert run.read.blanks.dtype == torch.int32
    (run,) = cache.append([1], [6], False).runs
    assert run.read.blanks is None


@torch.no_grad()
def test_noise_behind_an_overlaid_image_knows_the_zeros():
    overlaid, appended = contexts(2), contexts(2)
    for grown, overlay in ((overlaid, True), (appended, False)):
        grown.add_image([condition_image()] * 2, overlay)
        grown.feed_text([0, 1], [TOKENS, TOKENS[:2]])
    blank = [VIT_TOKENS, VIT_TOKENS + VAE_TOKENS]
    for rows in ((0, 1), (1,)):
        for run in overlaid.plan_noise(ImageSize(2, 3), rows, by_expert=True).append.runs:
            assert run.read.blanks.tolist() == [blank] * len(rows)
            assert run.read.keys_used.min() >= blank[1]
    plan = appended.plan_noise(ImageSize(2, 3), (0, 1), by_expert=True)
    assert [run.read.blanks for run in plan.append.runs] == [None, None]


def test_zeros_lie_in_what_is_filled():
    cache = contexts(2).cache
    cache.advance([1], [5], [5])
    with pytest.raises(ValueError, match="cache row 1 holds 5 positions, not 6 zeros"):
        cache.leave_blank([1], [6])
    assert cache.blanks == [(0, 0)] * 2


@pytest.mark.parametrize(("rows", "capacity"), [(2, 96), (3, 4)])
def test_rows_that_do_not_fit_are_not_copied(rows, capacity):
    source = contexts(rows)
    source.cache.advance([0], [5], [5])
    with pytest.raises(ValueError, match="cannot start 3 rows"):
        contexts(3, capacity).cache.copy_rows(source.cache)
