"""Every attention backend of a CPU against one plain softmax."""

import pytest
import torch
from torch import Tensor

from modeling.bagel import attention
from modeling.bagel.attention import (
    CacheRead,
    JointRead,
    cache_read,
    cached_attention,
    forest_attention,
    varlen_attention,
)
from modeling.bagel.layout import ROOT, ForestBuilder, SegmentKind, SegmentPlan

HEADS, KV_HEADS, HEAD_SIZE = 4, 2, 8
CPU = torch.device("cpu")
TEXT, IMAGE, NOISE = SegmentKind.TEXT, SegmentKind.IMAGE, SegmentKind.NOISE


def heads(tokens: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(
        torch.randn(tokens, count, HEAD_SIZE, generator=generator)
        for count in (HEADS, KV_HEADS, KV_HEADS)
    )


def softmax_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Attention written out in fp64; query heads 0, 1 share key head 0, and 2, 3 share 1."""
    k, v = (x.repeat_interleave(HEADS // KV_HEADS, dim=1).double() for x in (k, v))
    scores = torch.einsum("qnh,knh->nqk", q.double(), k) / HEAD_SIZE**0.5
    weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
    return torch.einsum("nqk,knh->qnh", weights, v).float()


def full_or_causal(queries: int, keys: int, causal: bool) -> Tensor:
    """A causal query sequence stands at the end of the keys."""
    mask = torch.ones(queries, keys, dtype=torch.bool)
    return mask.tril(keys - queries) if causal else mask


@pytest.mark.parametrize("causal", [True, False])
def test_varlen_attends_inside_each_sequence(causal):
    seqlens = [3, 1, 5]
    q, k, v = heads(sum(seqlens), 0)
    expected = [
        softmax_attention(*rows, full_or_causal(n, n, causal))
        for n, *rows in zip(seqlens, *(x.split(seqlens) for x in (q, k, v)), strict=True)
    ]
    out = varlen_attention(q, k, v, seqlens, causal)
    torch.testing.assert_close(out, torch.cat(expected), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("causal", [True, False])
def test_cached_attention_is_attention_over_the_filled_positions(causal):
    capacity, rows, new, filled = 9, [2, 0], [3, 1], [7, 4]
    keys, values = torch.full((2, 3, capacity, KV_HEADS, HEAD_SIZE), float("nan"))
    expected, queries = [], []
    for row, count, used in zip(rows, new, filled, strict=True):
        q, k, v = heads(used, 10 + row)
        keys[row, :used], values[row, :used] = k, v
        queries.append(q[used - count :])
        mask = full_or_causal(count, used, causal)
        expected.append(softmax_attention(queries[-1], k, v, mask))
    read = cache_read(rows, new, torch.tensor(filled, dtype=torch.int32), capacity, causal)
    out = cached_attention(torch.cat(queries), keys, values, read)
    torch.testing.assert_close(out, torch.cat(expected), rtol=1e-5, atol=1e-5)


def test_cache_read_describes_padded_rows_to_kernels():
    read = cache_read([2, 0], [3, 1], torch.tensor([7, 4], dtype=torch.int32), 9, True)
    assert read.query_bounds.tolist() == [0, 3, 4]
    assert read.key_starts.tolist()[:2] == [18, 0]
    assert read.keys_used.tolist() == [7, 4]
    assert {t.dtype for t in (read.query_bounds, read.key_starts, read.keys_used)} == {torch.int32}


ROWS = (
    ((IMAGE, 4), (IMAGE, 5), (TEXT, 3), (NOISE, 4)),
    ((IMAGE, 4), (IMAGE, 5), (NOISE, 4)),
    ((IMAGE, 4), (IMAGE, 5), (TEXT, 6), (NOISE, 4), (TEXT, 2)),
)
SHARED = 9
"""The first two segments of every row are the same tokens."""


def read_of(
    lengths: list[int], used: list[int], capacity: int = 20, causal: bool = False
) -> CacheRead:
    rows = list(range(len(lengths)))
    return cache_read(rows, lengths, torch.tensor(used, dtype=torch.int32), capacity, causal)


def test_reads_of_several_caches_are_joined_where_one_launch_can_serve_them(monkeypatch):
    pytest.importorskip("triton", reason="Triton comes with PyTorch's GPU builds only")
    q, caches = torch.empty(8, 14, 32), [torch.empty(2, c, 2, 32) for c in (20, 30, 25)]
    reads = [read_of([1, 1], [5, 9]), read_of([1, 1], [30, 2], capacity=30, causal=True)]
    assert JointRead.of(reads, caches[:2], q) is None  # not on a GPU
    monkeypatch.setattr(attention, "_has_kernels", lambda q: True)
    joint = JointRead.of(reads, caches[:2], q)
    assert joint.key_starts.tolist() == [0, 20, 0, 30]
    assert joint.keys_used.tolist() == [5, 9, 30, 2]
    assert joint.capacity == 30
    # Other numbers of queries; of sequences; queries that do not see each other; a fourth cache.
    pairs = read_of([2, 2], [5, 9])
    assert JointRead.of([pairs, pairs], caches[:2], q) is not None
    assert JointRead.of([reads[0], pairs], caches[:2], q) is None
    assert JointRead.of([reads[0], read_of([1], [4])], caches[:2], q) is None
    later = read_of([2, 2], [5, 9], causal=True)
    assert JointRead.of([pairs, later], caches[:2], q) is None
    assert JointRead.of([pairs] * 4, [*caches, caches[0]], q) is None
    wide = read_of([3, 3], [5, 9])
    assert JointRead.of([wide, wide], caches[:2], q) is None  # more than a program holds


def flat_plan() -> SegmentPlan:
    builder = ForestBuilder()
    for row in ROWS:
        parent = ROOT
        for kind, length in row:
            parent = builder.add(kind, length, parent)
    return builder.finish()


def shared_plan() -> tuple[SegmentPlan, list[list[int]]]:
    """The rows over one copy of their prefix, and the packed positions of each row's tokens."""
    builder, places = ForestBuilder(), []
    prefix = builder.add(IMAGE, 5, builder.add(IMAGE, 4))
    for row in ROWS:
        parent, positions = prefix, list(range(SHARED))
        for kind, length in row[2:]:
            parent = builder.add(kind, length, parent)
            segment = builder.segment(parent)
            positions += range(segment.start, segment.end)
        places.append(positions)
    return builder.finish(), places


def row_mask(row: tuple) -> Tensor:
    kinds = [(i, kind) for i, (kind, length) in enumerate(row) for _ in range(length)]
    mask = torch.zeros(len(kinds), len(kinds), dtype=torch.bool)
    for query, (own, kind) in enumerate(kinds):
        for key, (other, other_kind) in enumerate(kinds):
            if own == other:
                mask[query, key] = kind is not TEXT or key <= query
            else:
                mask[query, key] = other < own and other_kind is not NOISE
    return mask


def test_forest_attends_inside_each_row():
    plan = flat_plan()
    q, k, v = heads(plan.num_tokens, 3)
    out = forest_attention(plan, CPU, "dense")(q, k, v)
    for row, (start, end) in zip(ROWS, plan.tree_ranges, strict=True):
        expected = softmax_attention(q[start:end], k[start:end], v[start:end], row_mask(row))
        torch.testing.assert_close(out[start:end], expected, rtol=1e-5, atol=1e-5)


def test_shared_prefix_packing_equals_flat_packing():
    flat, (shared, places) = flat_plan(), shared_plan()
    assert shared.num_tokens == flat.num_tokens - 2 * SHARED
    packed = [x.requires_grad_() for x in heads(shared.num_tokens, 4)]
    flat_index = torch.tensor([position for row in places for position in row])
    rope_ids = torch.tensor(shared.rope_ids())
    assert rope_ids[flat_index].tolist() == flat.rope_ids()

    out = forest_attention(shared, CPU)(*packed)
    expected = forest_attention(flat, CPU)(*(x[flat_index] for x in packed))
    torch.testing.assert_close(out[flat_index], expected, rtol=1e-5, atol=1e-6)

    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(5))
    gradients = [
        torch.autograd.grad((rows * weights).sum(), packed) for rows in (out[flat_index], expected)
    ]
    for mine, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("backend", "message"),
    [
        ("sdpa", "R3_ATTENTION=sdpa: expected one of auto, dense, flex"),
        ("", "R3_ATTENTION=: expected one of"),
        ("flex", "R3_ATTENTION=flex needs a GPU"),
    ],
)
def test_backends_that_cannot_be_used_are_refused(backend, message):
    with pytest.raises(ValueError, match=message):
        forest_attention(flat_plan(), CPU, backend)
