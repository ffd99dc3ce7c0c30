"""Geometry of packed forests: RoPE ids, who sees whom, and refused shapes."""

import random

import pytest
import torch

from modeling.bagel.attention import forest_attention
from modeling.bagel.layout import ROOT, ForestBuilder, SegmentKind, SegmentPlan

TEXT, IMAGE, NOISE = SegmentKind.TEXT, SegmentKind.IMAGE, SegmentKind.NOISE


def path(*segments: tuple[SegmentKind, int]) -> SegmentPlan:
    """One row."""
    builder, parent = ForestBuilder(), ROOT
    for kind, length in segments:
        parent = builder.add(kind, length, parent)
    return builder.finish()


def random_forest(seed: int) -> SegmentPlan:
    """Up to three trees of up to seven segments, with parents drawn inside each tree."""
    draw, builder = random.Random(seed), ForestBuilder()
    for _ in range(draw.randint(1, 3)):
        tree = [builder.add(draw.choice((TEXT, IMAGE, NOISE)), draw.randint(1, 5))]
        for _ in range(draw.randint(0, 6)):
            kind = draw.choice((TEXT, TEXT, IMAGE, NOISE))
            tree.append(builder.add(kind, draw.randint(1, 5), draw.choice(tree)))
    return builder.finish()


def defined_mask(plan: SegmentPlan) -> torch.Tensor:
    """Who sees whom, token by token, from the definition alone."""
    holder = [
        index for index, segment in enumerate(plan.segments) for _ in range(segment.length)
    ]
    mask = torch.zeros(len(holder), len(holder), dtype=torch.bool)
    for query, own in enumerate(holder):
        line, up = [], plan.segments[own].parent
        while up != ROOT:
            line.append(up)
            up = plan.segments[up].parent
        for key, other in enumerate(holder):
            if other == own:
                mask[query, key] = plan.segments[own].kind is not TEXT or key <= query
            else:
                mask[query, key] = other in line and plan.segments[other].kind is not NOISE
    return mask


def observed_mask(plan: SegmentPlan) -> torch.Tensor:
    """Who sees whom as attention has it: with equal scores, the weights of one-hot values."""
    size = plan.num_tokens
    zeros, values = torch.zeros(size, 1, size), torch.eye(size)[:, None]
    weights = forest_attention(plan, torch.device("cpu"), "dense")(zeros, zeros, values)[:, 0]
    visible = weights > 0
    torch.testing.assert_close(weights, visible / visible.sum(-1, keepdim=True))
    return visible


def test_text_counts_up_and_an_image_takes_one_id():
    plan = path((TEXT, 3), (IMAGE, 4), (TEXT, 2))
    assert plan.rope_ids() == [0, 1, 2, 3, 3, 3, 3, 4, 5]


def test_ids_do_not_move_past_noise():
    plan = path((TEXT, 2), (NOISE, 3), (TEXT, 2))
    assert plan.rope_ids() == [0, 1, 2, 2, 2, 2, 3]


def test_each_row_starts_at_zero():
    builder = ForestBuilder()
    builder.add(TEXT, 2)
    builder.add(IMAGE, 2, builder.add(IMAGE, 2))
    plan = builder.finish()
    assert plan.rope_ids() == [0, 1, 0, 0, 1, 1]
    assert plan.tree_ranges == ((0, 2), (2, 6))
    assert plan.num_tokens == 6
    assert plan.segment_ids().tolist() == [0, 0, 1, 1, 2, 2]
    assert plan.causal().tolist() == [True, False, False]


def test_noise_is_invisible_to_what_follows():
    plan = path((TEXT, 2), (NOISE, 3), (TEXT, 2))
    assert plan.ancestors().tolist() == [
        [False, False, False],
        [True, False, False],
        [True, False, False],
    ]


def test_siblings_share_a_prefix_and_do_not_see_each_other():
    builder = ForestBuilder()
    prefix = builder.add(IMAGE, 3)
    first = builder.add(TEXT, 2, prefix)
    noise = builder.add(NOISE, 2, first)
    second = builder.add(NOISE, 2, prefix)
    plan = builder.finish()
    visible = plan.ancestors()
    assert visible[noise].tolist() == [True, True, False, False]
    assert visible[second].tolist() == [True, False, False, False]
    # Both continue from the prefix's id, as they would in rows of their own.
    assert plan.segments[first].rope_start == plan.segments[second].rope_start == 1
    assert plan.tree_ranges == ((0, 9),)


@pytest.mark.parametrize("seed", range(12))
def test_mask_of_random_forests(seed):
    plan = random_forest(seed)
    assert torch.equal(observed_mask(plan), defined_mask(plan))


def test_random_forests_hold_every_kind_of_case():
    plans = [random_forest(seed) for seed in range(12)]
    kinds = {segment.kind for plan in plans for segment in plan.segments}
    assert kinds == {TEXT, IMAGE, NOISE}
    parents = [[s.parent for s in plan.segments if s.parent != ROOT] for plan in plans]
    assert any(len(set(p)) < len(p) for p in parents)  # siblings
    below_noise = [
        plan.segments[s.parent].kind is NOISE
        for plan in plans
        for s in plan.segments
        if s.parent != ROOT
    ]
    assert any(below_noise)


@pytest.mark.parametrize("length", [0, -3])
def test_empty_segments_are_refused(length):
    with pytest.raises(ValueError, match=f"segment of {length} tokens"):
        ForestBuilder().add(TEXT, length)


@pytest.mark.parametrize("parent", [1, 7, -2])
def test_unknown_parents_are_refused(parent):
    builder = ForestBuilder()
    builder.add(TEXT, 2)
    with pytest.raises(ValueError, match=f"parent {parent} of a segment does not exist"):
        builder.add(TEXT, 2, parent)


def test_parents_in_a_closed_tree_are_refused():
    builder = ForestBuilder()
    closed = builder.add(TEXT, 2)
    builder.add(TEXT, 2)
    with pytest.raises(ValueError, match="already closed"):
        builder.add(TEXT, 2, closed)
