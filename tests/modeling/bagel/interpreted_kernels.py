"""Run by test_fused_ops.py with TRITON_INTERPRET=1: checks one group of kernels and says so."""

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
import triton.language as tl
from triton.runtime import interpreter

from modeling import autoencoder, fused_maps
from modeling.autoencoder import AutoEncoder, VaeConfig
from modeling.bagel import (
    attention,
    cublas_order,
    exact_sampling,
    few_rows,
    fused_attention,
    fused_flow,
    many_rows,
)
from modeling.bagel.bagel import EagerStack, LayerPass, Wanted
from modeling.bagel.cache import CacheAppend, CacheSpec, KvCache
from modeling.bagel.config import LlmConfig
from modeling.bagel.cublas_order import split_product
from modeling.bagel.exact_sampling import ExactSampler, Tempering
from modeling.bagel.fused_attention import (
    few_queries_attention,
    fits_few,
    image_attention,
)
from modeling.bagel.fused_flow import FusedStack
from modeling.bagel.fused_ops import (
    add_rms_norm,
    qk_norm_rope_store,
    reduce_width,
    rms_norm,
    silu_mul,
)
from modeling.bagel.fused_sampling import draw_tokens
from modeling.bagel.layers import RMSNorm, rotary_table
from modeling.bagel.qwen2_navit import GEN, Attention, Decoder, ExpertOrder, QkRounding
from modeling.bagel.sampling import SamplingConfig, keep_nucleus, masses_of, sample_tokens
from modeling.fused_maps import FusedMap, Tile

EPS, NAN = 1e-6, float("nan")


def poisoned(*shape: int) -> torch.Tensor:
    return torch.full(shape, float("nan"))


def close(mine: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(mine, theirs, rtol=2e-6, atol=2e-6)


def module(size: int) -> RMSNorm:
    norm = RMSNorm(size, EPS)
    norm.weight.data = torch.rand(size) + 0.5
    return norm.requires_grad_(False)


def norms() -> None:
    for rows, size in ((0, 128), (1, 128), (3, 512), (5, 896), (20, 132), (64, 256)):
        x, residual, norm = torch.randn(rows, size), torch.randn(rows, size), module(size)
        out, total = poisoned(rows, size), poisoned(rows, size)
        rms_norm(x, norm.weight, EPS, out)
        close(out, norm(x))
        add_rms_norm(x, residual, norm.weight, EPS, total, out)
        assert torch.equal(total, x + residual)
        close(out, norm(x + residual))


def ordered_sum(squares: torch.Tensor, width: int) -> torch.Tensor:
    """Row sums as ATen's reduction adds them, spelled out with single additions."""
    rows, size = squares.shape
    rounds = -(-size // (4 * width))
    padded = torch.zeros(rows, rounds * 4 * width)
    padded[:, :size] = squares
    running = torch.zeros(rows, width, 4)
    for part in padded.view(rows, rounds, width, 4).unbind(1):
        running = running + part
    first, second, third, fourth = running.unbind(-1)
    threads = ((first + second) + third) + fourth
    while threads.shape[1] > 1:
        low, high = threads.chunk(2, dim=1)
        threads = low + high
    return threads[:, 0]


def reduction_order() -> None:
    differing = 0
    for rows, size in ((1, 1024), (4, 896), (9, 640), (40, 512)):
        x, norm = torch.randn(rows, size), RMSNorm(size, EPS).requires_grad_(False)
        out = poisoned(rows, size)
        rms_norm(x, norm.weight, EPS, out)
        inverse = torch.tensor(1 / size, dtype=torch.float32)
        scale = torch.rsqrt(ordered_sum(x * x, reduce_width(rows, size)) * inverse + EPS)
        # The interpreter's rsqrt may round otherwise; the sum behind it must not move it more.
        torch.testing.assert_close(out, x * scale[:, None], rtol=1.3e-7, atol=0)
        plain = torch.rsqrt((x * x).sum(-1) * inverse + EPS)
        differing += int((plain != scale).sum())
    assert differing > 0, "the cases cannot tell one order from another"
    widths = {(1, 3584): 512, (2, 3584): 256, (4, 3584): 128, (8, 3584): 64, (16, 3584): 32}
    widths |= {(4104, 3584): 32, (4, 128): 32, (100, 128): 32}
    for (rows, size), width in widths.items():
        assert reduce_width(rows, size) == width, (rows, size)


def norms_of_joined_rows() -> None:
    """Rows beside others are normed to the bits that they have alone, for as few rows."""
    (x, residual), norm = torch.randn(2, 80, 3584), module(3584)
    alone, joined, beside, total, plain = (poisoned(80, 3584) for _ in range(5))
    for start in range(0, 80, 8):
        rows = slice(start, start + 8)
        norm_in = (x[rows], residual[rows], norm.weight, EPS, total[rows], alone[rows])
        add_rms_norm(*norm_in)
    add_rms_norm(x, residual, norm.weight, EPS, total, joined, rows_alone=8)
    add_rms_norm(x, residual, norm.weight, EPS, total, beside)
    assert torch.equal(joined, alone) and not torch.equal(beside, alone)
    rms_norm(total, norm.weight, EPS, plain, rows_alone=8)
    assert torch.equal(plain, alone)


def swiglu() -> None:
    for shape in ((0, 8), (1, 1), (3, 1000), (2, 1025)):
        gate, up = torch.randn(shape) * 4, torch.randn(shape)
        close(silu_mul(gate, up), F.silu(gate) * up)


def heads() -> None:
    for rows, num_heads, num_kv in ((0, 4, 4), (1, 28, 4), (5, 6, 2)):
        size = 128
        q = torch.randn(rows, num_heads * size)
        k, v = torch.randn(rows, num_kv * size), torch.randn(rows, num_kv * size)
        q_norm, k_norm = module(size), module(size)
        slots = torch.randperm(rows + 3)[:rows]
        cos, sin = rotary_table(torch.randperm(rows) * 7, size, 1e6)
        for early in (False, True):
            queries = poisoned(rows, num_heads, size)
            keys, values = poisoned(rows + 3, num_kv, size), poisoned(rows + 3, num_kv, size)
            qk_norm_rope_store(
                (q, k, v),
                (q_norm.weight, k_norm.weight),
                (cos, sin),
                slots,
                (queries, keys, values),
                EPS,
                early,
            )
            turn = Attention._norm_and_rotate
            close(queries, turn(q.view(rows, num_heads, size), q_norm, cos, sin, early))
            close(keys[slots], turn(k.view(rows, num_kv, size), k_norm, cos, sin, early))
            assert torch.equal(values[slots], v.view(rows, num_kv, size))
            untouched = torch.ones(rows + 3, dtype=torch.bool)
            untouched[slots] = False
            assert bool(keys[untouched].isnan().all())


def small_decoder(hidden: int = 256) -> Decoder:
    decoder = Decoder(LlmConfig(hidden, 512, 2, hidden // 128, 1, 32))
    for name, param in decoder.named_parameters():
        is_norm = "norm" in name
        param.copy_(torch.rand(param.shape) + 0.5 if is_norm else torch.randn(param.shape) / 16)
    return decoder


def stack() -> None:
    check_stack(FusedStack(side_by_side=False))


def many_row_stack() -> None:
    """All products in the kernels of many rows, but for those that are too narrow."""
    many_rows._fits = lambda *_: True
    many_rows.MIN_OUTS = 256  # k and v have 128
    many_rows._share_tiles = lambda *_: (1, 1)
    many_rows._has_cublas_bits = lambda *_: True
    counts = dict.fromkeys(("linear", "add_linear", "swiglu"), 0)
    for name in counts:
        setattr(many_rows, name, counted(name, getattr(many_rows, name), counts))
    check_stack(FusedStack(side_by_side=False))
    assert counts["linear"] >= counts["swiglu"] > 0, counts  # q
    assert counts["add_linear"] == counts["swiglu"] * 2, counts  # o, down


class FakeStream:
    """Stands for one of torch.cuda's streams; notes whom it waits for."""

    def __init__(self, name: str, waits: list[tuple[str, str]]):
        self.name = name
        self.waits = waits

    def wait_stream(self, other: "FakeStream") -> None:
        self.waits.append((self.name, other.name))


def side_stack() -> None:
    """Und rows beside gen rows: on the side stream from start to end, which is joined each time."""
    waits: list[tuple[str, str]] = []
    current = [FakeStream("main", waits)]

    @contextmanager
    def use(stream: FakeStream) -> Iterator[None]:
        current.append(stream)
        yield
        current.pop()

    torch.cuda.stream, torch.cuda.current_stream = use, lambda: current[-1]
    stack = FusedStack(side_by_side=False)
    stack._streams = [FakeStream("side", waits)]
    seen: set[tuple[str, str]] = set()
    finish = fused_flow._Part.finish

    def record(self: fused_flow._Part, *args: object, **given: object) -> None:
        seen.add((current[-1].name, self.suffix))
        finish(self, *args, **given)

    fused_flow._Part.finish = record
    check_stack(stack)
    # Und rows alone stay on the main stream.
    assert seen == {("main", GEN), ("side", ""), ("main", "")}
    assert waits and waits == [("side", "main"), ("main", "side")] * (len(waits) // 2)


def fast_stack() -> None:
    few_rows.fits = lambda num_rows, weight: 0 < num_rows <= few_rows.MAX_ROWS  # fp32 too
    counts = dict.fromkeys(("add_product", "project_heads", "swiglu"), 0)
    for name in counts:
        setattr(few_rows, name, counted(name, getattr(few_rows, name), counts))
    check_stack(FusedStack(side_by_side=False, is_fast=True))
    assert min(counts.values()) > 0, counts


def counted(name: str, function: Callable, counts: dict[str, int]) -> Callable:
    def call(*given: object) -> object:
        counts[name] += 1
        return function(*given)

    return call


def ordered_stack() -> None:
    """Few rows of the exact grade, in splits of any number that cuBLAS might take."""
    few_rows.fits = lambda num_rows, weight: 0 < num_rows <= few_rows.MAX_ROWS  # fp32 too
    asked: list[int] = []

    def splits_of(num_rows: int, linear: torch.nn.Linear) -> int:
        asked.append(num_rows)
        return 1 if linear.weight.shape[0] == 512 else 3  # gate and up, the others

    fused_flow.splits_of = splits_of
    counts = dict.fromkeys(("linear", "project_heads", "swiglu"), 0)
    for name in counts:
        setattr(few_rows, name, counted(name, getattr(few_rows, name), counts))
    normed: list[tuple[int, int]] = []

    def norm(x: torch.Tensor, *given: object) -> None:
        normed.append((x.shape[0], given[-1]))
        add_rms_norm(x, *given)

    fused_flow.add_rms_norm = norm
    check_stack(FusedStack(side_by_side=False))
    assert min(counts.values()) > 0 and set(asked) == {4, 8}, (counts, asked)
    assert set(normed) == {(4, 4), (8, 8)}
    asked.clear()
    normed.clear()
    joint_stack((False,))
    assert set(asked) == {2}, "a span's order is that of its own rows, whatever is beside it"
    assert (4, 2) in normed and {alone for _, alone in normed} == {2}
    for splits, is_taken in (
        ((2, 2, 2, 2, 1, 1, 7), True),
        ((2, 2, 3, 2, 1, 1, 7), False),
        ((2, 2, 2, 2, 1, 2, 7), False),
        ((2, 2, 2, None, 1, 1, 7), False),
        ((None, None, None, 2, 1, 1, 7), False),
    ):
        assert few_rows.fits_splits(*splits) is is_taken, splits


@torch.no_grad()
def check_stack(stack: FusedStack) -> None:
    """All layers of a small decoder: fused against eager, mixed experts and und only."""
    decoder = small_decoder()
    config = decoder.config
    # Capture does not exist here, and nothing else of the stack asks for a GPU.
    torch.cuda.is_current_stream_capturing = lambda: False
    for gen in (torch.tensor([1, 2, 5, 6]), torch.tensor([], dtype=torch.int64)):
        und = torch.tensor([i for i in range(8) if i not in gen.tolist()])
        experts = ExpertOrder.from_positions(und, gen)
        outputs, caches = [], []
        for wanted in (None, Wanted.ALL, Wanted.GEN, Wanted.NONE):
            cache = KvCache.zeros(CacheSpec(config, 2, 12, torch.device("cpu"), torch.float32))
            runs = [[2, 2], [2, 2]] if gen.numel() else [[4, 4]]
            append = cache.append([1, 0], [4, 4], False, experts, runs)
            x = torch.randn(8, 256, generator=torch.Generator().manual_seed(1))
            rotary = decoder.rotary(torch.arange(8), experts, QkRounding())
            if wanted is not None:
                x = stack.run(LayerPass(decoder, x, experts, rotary, append, wanted))
            else:
                x = EagerStack().run(LayerPass(decoder, x, experts, rotary, append))
            outputs.append(x)
            caches.append(cache)
        torch.testing.assert_close(outputs[1], outputs[0], rtol=1e-4, atol=1e-4)
        assert torch.equal(outputs[2][und.numel() :], outputs[1][und.numel() :])
        for mine, theirs in zip(caches[1].keys, caches[0].keys, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)
        for less in caches[2:]:
            for mine, theirs in zip(less.keys, caches[1].keys, strict=True):
                assert torch.equal(mine, theirs)


@torch.no_grad()
def joined_bits() -> None:
    """Exact grade: what rows of two branches get in one pass has the bits of a pass for each.

    Products are summed in float64 here, so that they do not depend on the rows beside a row.
    """
    few_rows.fits = lambda num_rows, weight: 0 < num_rows <= few_rows.MAX_ROWS  # fp32 too
    fused_flow.splits_of = lambda num_rows, linear: 1
    torch.cuda.is_current_stream_capturing = lambda: False
    narrow = np.matmul
    np.matmul = lambda a, b, dtype=None: narrow(a.astype("f8"), b.astype("f8")).astype("f4")
    decoder = small_decoder(512)  # its norms of 4 rows are added up otherwise than of 8
    assert reduce_width(4, 512) != reduce_width(8, 512)
    stack, rope_ids = FusedStack(False), torch.arange(8)
    experts = ExpertOrder.from_positions(torch.tensor([0, 3, 4, 7]), torch.tensor([1, 2, 5, 6]))
    spec = CacheSpec(decoder.config, 2, 12, torch.device("cpu"), torch.float32)
    inputs, alone, runs = [], [], []
    for _ in range(2):
        x, halves = torch.randn(8, 512), [[2, 2], [2, 2]]
        appends = [
            KvCache.zeros(spec).append([0, 1], [4, 4], False, experts, halves) for _ in range(2)
        ]
        rotary = decoder.rotary(rope_ids, experts, QkRounding())
        alone.append(stack.run(LayerPass(decoder, x.clone(), experts, rotary, appends[0])))
        inputs.append(x)
        runs.append(appends[1].runs)
    ids = experts.to_expert(rope_ids).split(4)
    joint = ExpertOrder(8, 8, None, None)
    rotary = decoder.rotary(torch.cat([ids[0]] * 2 + [ids[1]] * 2), joint, QkRounding())
    x, expected = (
        torch.cat([one[part] for part in (slice(0, 4), slice(4, 8)) for one in pair])
        for pair in (inputs, alone)
    )
    append = CacheAppend(*(pair[i] for i in (0, 1) for pair in runs))
    assert torch.equal(stack.run(LayerPass(decoder, x.clone(), joint, rotary, append)), expected)
    # The second row of one branch alone: the order of sums is that of both.
    some = ExpertOrder.from_positions(torch.tensor([0, 3]), torch.tensor([1, 2]))
    rotary = decoder.rotary(rope_ids[4:], some, QkRounding())
    for of_rows in (2, 8):
        append = KvCache.zeros(spec).append([1], [4], False, some, [[2], [2]], of_rows)
        x = inputs[0][[2, 3, 6, 7]]
        out = stack.run(LayerPass(decoder, x.clone(), some, rotary, append))
        assert torch.equal(out, alone[0][[2, 3, 6, 7]]) == (of_rows == 2)


@torch.no_grad()
def joint_stack(grades: tuple[bool, ...] = (False, True)) -> None:
    """The rows of two caches in one pass: as in a pass each."""
    decoder = small_decoder()
    torch.cuda.is_current_stream_capturing = lambda: False
    experts = ExpertOrder.from_positions(torch.tensor([0, 3]), torch.tensor([1, 2]))
    rope_ids = experts.to_expert(torch.arange(4))
    for is_fast in grades:
        stack, alone, appends = FusedStack(False, is_fast), [], []
        for seed in (0, 1):
            x = torch.randn(4, 256, generator=torch.Generator().manual_seed(seed))
            spec = CacheSpec(decoder.config, 1, 12, torch.device("cpu"), torch.float32)
            first, second = (
                KvCache.zeros(spec).append([0], [4], False, experts, [[2], [2]]) for _ in range(2)
            )
            rotary = decoder.rotary(torch.arange(4), experts, QkRounding())
            alone.append((x, stack.run(LayerPass(decoder, x.clone(), experts, rotary, first))))
            appends.append(second)
        joint = ExpertOrder(4, 4, None, None)
        rotary = decoder.rotary(
            torch.cat([rope_ids[:2]] * 2 + [rope_ids[2:]] * 2), joint, QkRounding()
        )
        runs = [append.runs[i] for i in (0, 1) for append in appends]
        x, expected = (
            torch.cat([pair[i][part] for part in (slice(0, 2), slice(2, 4)) for pair in alone])
            for i in (0, 1)
        )
        for part_rows in (16384, 3):  # the gen rows of both in one part, or apart
            fused_flow.PART_ROWS = part_rows
            out = stack.run(LayerPass(decoder, x.clone(), joint, rotary, CacheAppend(*runs)))
            torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)


def cache_with_holes(used: list[int], capacity: int, size: int) -> tuple:
    """Keys and values of rows in mixed order, NaN where nothing is filled: starts, used, both."""
    rows = len(used)
    keys, values = torch.randn(2, rows * capacity, 2, size)
    starts = torch.randperm(rows).int() * capacity
    for start, filled in zip(starts.tolist(), used, strict=True):
        keys[start + filled : start + capacity] = values[start + filled : start + capacity] = NAN
    return starts, torch.tensor(used, dtype=torch.int32), keys, values


def dense(q: torch.Tensor, starts, used, keys, values) -> torch.Tensor:
    outputs = []
    for queries, start, filled in zip(
        q.chunk(len(used)), starts.tolist(), used.tolist(), strict=True
    ):
        q1, k1, v1 = (
            x.transpose(0, 1)[None]
            for x in (queries, keys[start : start + filled], values[start : start + filled])
        )
        out = F.scaled_dot_product_attention(q1, k1, v1, enable_gqa=True)
        outputs.append(out[0].transpose(0, 1))
    return torch.cat(outputs)


def few_queries() -> None:
    for queries, capacity, used in (
        (1, 100, [1, 100, 64]),
        (1, 700, [3, 700, 257]),
        (1, 2500, [2500, 2049, 40]),
        (2, 300, [128, 129, 300]),
    ):
        q = torch.randn(3 * queries, 14, 32)
        starts, filled, keys, values = cache_with_holes(used, capacity, 32)
        expected = dense(q, starts, filled, keys, values)
        for _ in range(2):  # the second launch finds what the first one left in the counters
            out = poisoned(*q.shape)
            few_queries_attention(q, [(keys, values)], starts, filled, capacity, out)
            close(out, expected)
        wider = poisoned(*q.shape)
        few_queries_attention(q, [(keys, values)], starts, filled, capacity + 1000, wider)
        assert torch.equal(wider, out), "an unused capacity changed bits"
    caches, parts, alone = [], [], []
    for used in ([3, 128], [260, 129], [1, 300]):
        q = torch.randn(4, 14, 32)
        starts, filled, *cache = cache_with_holes(used, 300, 32)
        alone.append(few_queries_attention(q, [cache], starts, filled, 300))
        caches.append(cache)
        parts.append((q, starts[:2], filled))
        q, starts, filled = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
        together = few_queries_attention(q, caches, starts, filled, 300)
        assert torch.equal(together, torch.cat(alone)), "several caches changed bits"
    q, keys = torch.empty(2, 28, 128), torch.empty(9, 4, 128)
    assert fits_few(2, q, keys) and not fits_few(3, q, keys)
    assert not fits_few(1, q[..., :72], keys[..., :72])


def whole_images() -> None:
    for queries, capacity, used in ((64, 200, [64, 128, 200]), (130, 300, [130, 300, 257])):
        q = torch.randn(3 * queries, 14, 32)
        starts, filled, keys, values = cache_with_holes(used, capacity, 32)
        out = poisoned(*q.shape)
        image_attention(q, keys, values, starts, filled, out)
        close(out, dense(q, starts, filled, keys, values))


def blank_ranges() -> None:
    """What lies in a blank range counts as zeros, and is not read: NaN lies there."""
    fused_attention.fits_image = lambda queries, q: queries >= 64  # not on a GPU
    for queries, used, blanks in (
        (64, [650, 257, 456], [(130, 300), (0, 0), (0, 200)]),
        (130, [180, 512, 421], [(50, 51), (128, 384), (256, 400)]),
        (64, [400, 100, 301], [(100, 300), (60, 100), (0, 300)]),  # two tails; none behind; one key
        (64, [600], [(257, 471)]),
    ):
        capacity, count = max(used) + 50, len(used)
        q = torch.randn(count * queries, 14, 32)
        starts, filled, keys, values = cache_with_holes(used, capacity, 32)
        zeroed, poison = (keys.clone(), values.clone()), (keys.clone(), values.clone())
        for start, (begin, end) in zip(starts.tolist(), blanks, strict=True):
            for into, value in ((zeroed, 0), (poison, NAN)):
                for each in into:
                    each[start + begin : start + end] = value
        ranges = torch.tensor(blanks, dtype=torch.int32)
        out, plain = poisoned(*q.shape), poisoned(*q.shape)
        image_attention(q, *poison, starts, filled, out, ranges)
        close(out, dense(q, starts, filled, *zeroed))
        image_attention(q, *zeroed, starts, filled, plain)
        pairs = zip(out.split(queries), plain.split(queries), blanks, strict=True)
        for mine, theirs, (begin, end) in pairs:
            assert torch.equal(mine, theirs) == (begin == end), (begin, end)
        # By way of the cache's reads: the same bits.
        rows, lengths = (starts // capacity).tolist(), [queries] * count
        read = attention.cache_read(rows, lengths, filled, capacity, False, ranges)
        cached = [each.unflatten(0, (count, capacity)) for each in poison]
        assert torch.equal(attention._cached_on_gpu(q, *cached, read, None), out)


def many_row_products() -> None:
    """Tiles that overhang every edge; either weight may lie first in memory."""
    for rows, width, inner in ((130, 192, 96), (1, 128, 64), (300, 144, 80)):
        x, weights = torch.randn(rows, inner), torch.randn(3, width, inner) / 16
        for gate, up in ((weights[0], weights[2]), (weights[2], weights[0])):
            expected = F.silu(x @ gate.t()) * (x @ up.t())
            out = many_rows.swiglu(x, gate, up)
            torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    # More groups of rows than one, the last of them smaller.
    many_rows.GROUP = 2
    x, (gate, up) = torch.randn(650, 16), torch.randn(2, 16, 16) / 16
    expected = F.silu(x @ gate.t()) * (x @ up.t())
    torch.testing.assert_close(many_rows.swiglu(x, gate, up), expected, rtol=1e-5, atol=1e-5)
    rows, gate, up = (each.bfloat16() for each in (x, gate, up))
    assert not many_rows.fits_swiglu(rows, gate, up)  # not on a GPU


def many_row_linears() -> None:
    """Plain products of whole tiles, of cut ones and of both; tiles overhang every edge."""
    near = partial(torch.testing.assert_close, rtol=1e-5, atol=1e-5)
    many_rows.GROUP = 2
    for rows, size, inner, programs, shares in (
        (130, 592, 80, 4, (4, 2)),
        (130, 592, 80, 5, (5, 1)),
        (130, 592, 96, 3, (6, 0)),
        (130, 592, 80, 7, (6, 0)),  # too many left over to cut them
        (130, 592, 80, 12, (0, 6)),
        (650, 272, 16, 5, (10, 2)),  # more groups of rows than one, the last of them smaller
        (1, 16, 64, 1, (1, 0)),
        (129, 256, 64, 132, (0, 2)),
    ):
        many_rows._num_programs = lambda device, programs=programs: programs
        assert many_rows._share_tiles(rows, size, torch.device("cpu")) == shares
        x, weight, bias = torch.randn(rows, inner), torch.randn(size, inner) / 16, torch.randn(size)
        near(many_rows.linear(x, weight), x @ weight.t())
        near(many_rows.linear(x, weight, bias), x @ weight.t() + bias)
        total = torch.randn(rows, size)
        expected = total + x @ weight.t()
        many_rows.add_linear(total, x, weight)
        near(total, expected)
    x, weight = torch.empty(512, 64, dtype=torch.bfloat16), torch.empty(2048, 64).bfloat16()
    assert not many_rows.fits_linear(x, weight)  # not on a GPU


def bits_of_cublas() -> None:
    """Looked at once for each pair of sizes; other bits are reported and leave the work to it."""
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logging.getLogger("faster_r3").addHandler(handler)
    many_rows._fits = lambda *_: True
    computed, same = many_rows.swiglu, many_rows.fits_swiglu
    x, weights = torch.randn(4, 16), torch.randn(3, 16, 16)
    many_rows.swiglu = lambda x, gate, up: silu_mul(F.linear(x, gate), F.linear(x, up))
    assert same(x, *weights[:2]) and not records
    many_rows.swiglu = lambda *_: 1 / 0  # not asked again for these sizes, whatever the rows
    assert same(x[:2], *weights[1:]) and not records
    many_rows.swiglu = lambda *given: torch.nextafter(computed(*given), torch.tensor(9.0))
    for _ in range(2):
        assert not same(x, *torch.randn(2, 32, 16))
    assert len(records) == 1 and "products of 32 by 16" in records[0]


def bits_of_linears() -> None:
    """Looked at once for every pair of sizes, with bias and without, where both kernels work."""
    many_rows._fits, many_rows._num_programs = lambda *_: True, lambda _: 3
    asked: list[tuple[int, bool]] = []

    def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        asked.append((x.shape[0], bias is not None))
        return F.linear(x, weight, bias)

    many_rows.linear = linear
    weight, bias = torch.randn(1024, 16), torch.randn(1024)
    for rows in (1, 128):  # 4 tiles: a wave of 3 whole ones, and 1 to cut
        assert many_rows.fits_linear(torch.randn(rows, 16), weight)
        assert many_rows.fits_linear(torch.randn(rows, 16), weight, bias)
    assert asked == [(1, False), (1, True)]
    for programs in (2, 4, 9):  # whole waves, one wave, and too few tiles for one
        many_rows._num_programs = lambda _, programs=programs: programs
        assert not many_rows.fits_linear(torch.randn(1, 16), weight)
    many_rows._num_programs = lambda _: 3
    assert not many_rows.fits_linear(torch.randn(1, 16), weight[:1016])  # too narrow
    many_rows.linear = lambda x, weight, bias: F.linear(x, weight, bias) + 1
    assert not many_rows.fits_linear(torch.randn(1, 24), torch.randn(1024, 24))
    total, x = torch.randn(2, 1024), torch.randn(2, 16)
    kept = total.clone()
    many_rows.add_linear = lambda total, x, weight: total.add_(F.linear(x, weight))
    assert many_rows.fits_add(total, x, weight)
    assert torch.equal(total, kept), "what was compared is to be added yet"
    assert not many_rows.fits_add(total[:, :1016], x, weight[:1016])  # too narrow
    many_rows.add_linear = lambda total, x, weight: total.add_(F.linear(x, weight) + 1)
    assert many_rows.fits_add(total, x, weight)  # these sizes are known
    assert not many_rows.fits_add(total, torch.randn(2, 24), torch.randn(1024, 24))


def few_row_products() -> None:
    for rows in (1, 4, 9, 17, 32):
        x, weight = torch.randn(rows, 512), torch.randn(64, 512) / 16
        torch.testing.assert_close(few_rows.linear(x, weight), x @ weight.t(), rtol=0, atol=1e-5)
    for rows, splits, size in ((4, 2, 512), (4, 3, 384), (24, 5, 256), (4, 7, 192), (24, 7, 192)):
        assert few_rows.split_size(1024, splits) == size
        x, weight, bias = torch.randn(rows, 1024), torch.randn(64, 1024) / 16, torch.randn(64)
        expected = x @ weight.t()
        near = partial(torch.testing.assert_close, rtol=0, atol=1e-5)
        near(few_rows.linear(x, weight, splits), expected)
        near(split_product(x, weight, bias, splits), expected + bias)
        near(split_product(x, weight, None, splits), expected)
        outs = few_rows.project_heads(x, [weight] * 3, [bias] * 3, splits)
        near(torch.stack(outs), (expected + bias).expand(3, -1, -1))
    gate, up = torch.randn(2, 32, 512) / 16
    x = torch.randn(4, 512)
    near(few_rows.swiglu(x, gate, up), F.silu(x @ gate.t()) * (x @ up.t()))
    weight = torch.empty(48, 512, dtype=torch.bfloat16)
    assert few_rows.fits(4, weight)
    assert not few_rows.fits(17, weight) and few_rows.fits(17, weight.new_empty(64, 512))
    assert not few_rows.fits(33, weight) and not few_rows.fits(0, weight)
    assert not few_rows.fits(4, weight[:, :500]) and not few_rows.fits(4, weight[:40])
    assert not few_rows.fits(4, weight.float())


def order_of_cublas() -> None:
    """The number of splits is found by its bits, or not at all."""
    weight, bias = torch.randn(16, 1280), torch.randn(16)
    assert cublas_order.splits_of(4, torch.nn.Linear(1280, 16)) is None  # not on a GPU
    plain = F.linear
    for splits in (1, 2, 3, 7):
        F.linear = lambda x, weight, bias, splits=splits: split_product(x, weight, bias, splits)
        assert cublas_order.find_splits(4, weight, bias) == splits
    assert cublas_order.find_splits(4, torch.zeros(16, 1280), None) is None  # no order shows
    F.linear = lambda x, weight, bias: plain(x.double(), weight.double()).float()
    assert cublas_order.find_splits(4, weight, None) is None


def few_row_norms() -> None:
    """The residual stream through products behind norms: a head projection, an MLP, an end."""
    size = 1280  # more parts than are added up at once
    for rows in (1, 4, 9, 17, 32):
        x, norm, inner = torch.randn(rows, size), module(size), torch.randn(rows, 512)
        weights = [torch.randn(width, size) / 32 for width in (128, 64, 64)]
        biases = [torch.randn(weight.shape[0]) for weight in weights]
        weighed = few_rows.weigh(x, norm.weight, EPS)
        close(weighed.rows, x * norm.weight)
        outs = few_rows.project_heads(weighed, weights, biases)
        for out, weight, bias in zip(outs, weights, biases, strict=True):
            torch.testing.assert_close(out, norm(x) @ weight.t() + bias, rtol=0, atol=1e-5)
        down, total = torch.randn(size, 512) / 16, x.clone()
        weighed = few_rows.add_product(total, inner, down, norm.weight, EPS)
        torch.testing.assert_close(total, x + inner @ down.t(), rtol=0, atol=1e-5)
        close(weighed.rows, total * norm.weight)
        gate, up = torch.randn(2, 32, size) / 32
        expected = F.silu(norm(total) @ gate.t()) * (norm(total) @ up.t())
        out = few_rows.swiglu(weighed, gate, up)
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


def sampling() -> None:
    """The same draws as the exact sampler, and its probabilities but for rounding."""
    counts = []

    def topk(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        counts.append(count)
        return torch.topk(logits, count)

    for seed, (rows, vocab, temperature, top_p) in enumerate(
        ((1, 300, 0.9, 0.9), (3, 2000, 0.3, 0.5), (4, 1500, 1.0, 0.99), (2, 1200, 0.9, 1e-6))
    ):
        logits = torch.randn(rows, vocab) * 4
        config = SamplingConfig(True, temperature, 0, top_p)
        exact, mine = (torch.Generator().manual_seed(seed) for _ in range(2))
        for _ in range(10):
            tokens, probs = sample_tokens(logits, config, exact)
            drawn, drawn_probs = draw_tokens(logits, config, mine, topk)
            assert torch.equal(drawn, tokens)
            torch.testing.assert_close(drawn_probs, probs, rtol=1e-5, atol=0)
        assert torch.equal(exact.get_state(), mine.get_state())
    assert counts == [300] * 10 + [1000] * 30
    broken = torch.randn(2, 1100)
    broken[0, 7] = NAN
    drawn, probs = draw_tokens(broken, SamplingConfig(True, 0.9, 0, 0.9), torch.Generator())
    assert 0 <= int(drawn[0]) < 1100 and bool(probs[0].isnan()) and not bool(probs[1].isnan())
    greedy = SamplingConfig(False, 0.0, 0, 0.9)
    assert torch.equal(draw_tokens(logits, greedy)[0], logits.argmax(-1))


def exponentials_of_torch() -> None:
    """Makes the interpreter's exponential that of PyTorch, whose last bit may be another."""
    np.exp = lambda values: torch.from_numpy(values).exp().numpy()


def same(mine: torch.Tensor, theirs: torch.Tensor) -> None:
    """Equality of numbers and types; NaN equals NaN."""
    torch.testing.assert_close(mine, theirs, rtol=0, atol=0, equal_nan=True)


def exact_sampling_steps() -> None:
    """Masses by a factor or by division; a nucleus of few, of all, and behind sums of NaN."""
    exponentials_of_torch()
    num_subnormal = 0
    for rows, vocab, temperature in ((1, 37, 1), (3, 1500, 1.0), (2, 2048, 0.7), (4, 1025, 2)):
        logits = torch.randn(rows, vocab) * 40
        logits[0, 5], logits[-1, 7] = -float("inf"), NAN if rows > 2 else 0.0
        values = torch.topk(logits, 9).values
        for divides in (True, False):
            tempering = Tempering(temperature, 1 / 3, divides)
            masses = exact_sampling.fused_masses(logits, values, tempering)
            expected, totals = masses_of(logits, values[:, :1], temperature)
            if not divides and temperature != 1:
                below = (logits - values[:, :1]) * torch.tensor(1 / 3)
                expected = torch.stack((expected[0], below.exp()))
            same(masses, expected)
        num_subnormal += int(((masses > 0) & (masses < torch.finfo(torch.float32).tiny)).sum())
        ids = torch.stack([torch.randperm(vocab)[:33] for _ in range(rows)])
        for top_p in (1e-9, 0.3, 0.999):
            kept = exact_sampling._keep_nucleus(masses, totals, ids, top_p)
            probs = masses[-1].gather(-1, ids) / totals[-1]
            same(kept / kept.sum(-1, keepdim=True), keep_nucleus(probs, top_p))
    assert num_subnormal > 0


def exact_sampling_draws() -> None:
    """The draws of sample_tokens, found to be the same and drawn with kernels: bit for bit."""
    exponentials_of_torch()
    exact_sampling.is_supported = lambda device: True
    counts = {"draw_nucleus": 0}
    exact_sampling.draw_nucleus = counted("draw_nucleus", exact_sampling.draw_nucleus, counts)
    for seed, (rows, vocab, temperature, top_p) in enumerate(
        ((1, 300, 0.9, 0.9), (3, 2000, 0.3, 0.5), (4, 1500, 1.0, 0.99), (2, 1200, 1.3, 1e-6))
    ):
        sampler, config = ExactSampler(), SamplingConfig(True, temperature, 50, top_p)
        theirs, mine = (torch.Generator().manual_seed(seed) for _ in range(2))
        for dtype in (torch.float32, torch.bfloat16):
            logits = (torch.randn(rows, vocab) * 4).to(dtype)
            tied = logits.round()
            broken = logits.clone()
            broken[0, 7], broken[-1, 8] = NAN, float("inf")
            impossible = torch.full_like(logits, -float("inf"))
            for given in (logits, tied, broken, impossible):
                for pair in zip(
                    sampler.draw(given, config, mine),
                    sample_tokens(given, config, theirs),
                    strict=True,
                ):
                    same(*pair)
        assert torch.equal(mine.get_state(), theirs.get_state())
    # Two to compare for each type, and all that were drawn.
    assert counts["draw_nucleus"] == 4 * 2 * (2 + 4), counts


def edges_of_nuclei() -> None:
    """A candidate stays behind a sum that equals top_p, and each one behind a NaN."""
    probs = torch.tensor([[0.5, 0.25, 0.125, 0.125], [1, 0.5, NAN, 0.25], [0.5, 0.125, 0, 0]])
    for top_p in (0.75, 0.5, 0.625):
        kept = probs.clone()
        exact_sampling._drop_kernel[(3,)](probs.cumsum(-1), kept, 4, top_p, BLOCK=8)
        same(kept / kept.sum(-1, keepdim=True), keep_nucleus(probs, top_p))


def first_of_equals() -> None:
    """Ties go to the first candidate, those by rounding too, and NaN is above all others."""
    ulp = 2.0**-23
    kept = torch.tensor([[1.0, 2, 2, 1], [0, 0, 0, 0], [1, NAN, 3, NAN], [NAN] * 4, [0, 1, 3, 3]])
    kept = torch.cat((kept, torch.tensor([[1.5, 1.5 + ulp, 1.5 + 2 * ulp, 1]])))
    rows, count = kept.shape
    ids = torch.stack([torch.randperm(count) for _ in range(rows)])
    sums, waiting = torch.full((rows, 1), 3.0), torch.full((rows, count), 0.5)
    masses, totals = torch.rand(rows, count), torch.rand(rows, 1)
    tokens, probs = ids.new_empty(rows), masses.new_empty(rows)
    given = (kept, sums, waiting, ids, masses, totals, tokens, probs)
    exact_sampling._draw_kernel[(rows,)](*given, count, count, BLOCK=8)
    scores = kept / sums / waiting
    assert not torch.equal(scores.argmax(-1)[-1], kept.argmax(-1)[-1])
    expected = ids.gather(-1, scores.argmax(-1)[:, None])
    assert torch.equal(tokens, expected.squeeze(-1))
    same(probs, (masses.gather(-1, expected) / totals).squeeze(-1))


def round_to_bf16() -> None:
    """Has the interpreter round to the nearest bf16 as GPUs do, and add numbers of bf16.

    By itself it cuts the last places off, and adds up the codes of such numbers.
    """
    convert, add = interpreter._convert_float, interpreter.InterpreterBuilder.create_fadd

    def rounded(x: np.ndarray, source: tl.dtype, target: tl.dtype, *rest: object) -> np.ndarray:
        if (source, target) != (tl.float32, tl.bfloat16):
            return convert(x, source, target, *rest)
        return torch.from_numpy(np.array(x)).bfloat16().view(torch.int16).numpy().view(np.uint16)

    def added(self: interpreter.InterpreterBuilder, *terms: object) -> object:
        if terms[0].dtype.scalar != tl.bfloat16:
            return add(self, *terms)
        total = add(self, *(self.cast_impl(term, tl.float32) for term in terms))
        return self.cast_impl(total, tl.bfloat16)

    interpreter._convert_float = rounded
    interpreter.InterpreterBuilder.create_fadd = added


def outstanding(shape: tuple[int, ...], has_bias: bool) -> tuple[FusedMap, torch.Tensor]:
    """A map of a convolution that copies, and what it is in bf16 with its bias added."""
    x = (torch.randn(shape) + 5).bfloat16()
    conv = torch.nn.Conv2d(shape[1], shape[1], 1, bias=has_bias).requires_grad_(False)
    conv.weight.copy_(torch.eye(shape[1])[:, :, None, None])
    y = x + conv.bias.bfloat16()[:, None, None] if has_bias else x
    return FusedMap.of(x).convolved(conv), y


def tile_sizes() -> Iterator[None]:
    """The tiles as they are, and ones so small that parts, steps and joins are several."""
    yield
    small = {name: Tile(1024, 3, 1) for name in ("READ_TILE", "NORM_TILE", "RESIZE_TILE")}
    for name, value in (small | {"MIN_PROGRAMS": 2, "PARTS_AT_ONCE": 4}).items():
        setattr(fused_maps, name, value)
    yield


MAPS = (((2, 128, 9, 14), 32), ((1, 512, 5, 3), 4), ((3, 256, 4, 4), 2), ((2, 96, 7, 5), 4))
"""Shapes and groups of maps."""


def map_norms() -> None:
    """Norms of a map alone, of a sum, and of a map that was written before its norm."""
    round_to_bf16()
    for _tiles in tile_sizes():
        for index, (shape, groups) in enumerate(MAPS):
            norm = torch.nn.GroupNorm(groups, shape[1], eps=EPS).requires_grad_(False)
            norm.weight.copy_(torch.randn(shape[1]))
            norm.bias.copy_(torch.randn(shape[1]))
            (left, x), (right, y) = outstanding(shape, index % 2 == 0), outstanding(shape, True)
            total, both = left + right, x + y
            for fused, plain in ((left, x), (total, both), (right, y)):
                if fused is right:
                    assert torch.equal(right.tensor(), y)
                wide = norm(plain.float())
                for has_swish, expected in ((False, wide), (True, F.silu(wide))):
                    out = fused.normalised(norm, has_swish).tensor()
                    assert out.is_contiguous(memory_format=torch.channels_last)
                    # Half a place of bf16, and the last places of fp32.
                    error = (out.float() - expected).abs()
                    assert bool((error <= expected.abs() * 2**-8 + 1e-5).all()), error.max()
            assert torch.equal(total.tensor(), both)
            assert torch.equal((right + left).tensor(), both)
            assert torch.equal((total + left).tensor(), both + x)


def resized_maps() -> None:
    """Doubled and padded maps, alone and of sums, to the bit."""
    round_to_bf16()
    for _tiles in tile_sizes():
        for index, (shape, _) in enumerate(MAPS):
            (left, x), (right, y) = outstanding(shape, index % 2 == 0), outstanding(shape, True)
            for fused, plain in ((left, x), (right, y), (left + right, x + y)):
                doubled, padded = fused.doubled().tensor(), fused.padded().tensor()
                assert torch.equal(doubled, F.interpolate(plain, scale_factor=2, mode="nearest"))
                assert torch.equal(padded, F.pad(plain, (0, 1, 0, 1)))
                for out in (doubled, padded):
                    assert out.is_contiguous(memory_format=torch.channels_last)


def whole_autoencoder() -> None:
    """All layers on fused maps are about as far from fp32 as plain bf16 is on a CPU."""
    round_to_bf16()
    model = AutoEncoder(VaeConfig(32, (1, 2), 1, 4, 3)).requires_grad_(False)
    picture = torch.rand(2, 3, 12, 20) * 2 - 1
    wide = model.encode(picture)
    exact = {"encode": wide, "decode": model.decode(wide)}
    inputs = {"encode": picture, "decode": wide}

    def errors() -> dict[str, float]:
        with torch.autocast("cpu", torch.bfloat16):
            outs = {name: getattr(model, name)(inputs[name]) for name in inputs}
        assert all(out.dtype == torch.bfloat16 for out in outs.values())
        return {
            name: float((out - exact[name]).norm() / exact[name].norm())
            for name, out in outs.items()
        }

    plain = errors()
    autoencoder._is_fused = lambda x: True
    kinds = set()
    normalised = FusedMap.normalised

    def counted(self: FusedMap, norm: torch.nn.GroupNorm, has_swish: bool) -> FusedMap:
        kinds.add((len(self._terms), self._terms[0].bias is None, has_swish))
        return normalised(self, norm, has_swish)

    FusedMap.normalised = counted
    fused = errors()
    # Norms of convolutions' results, of sums, and of what was written already.
    assert {kind[:2] for kind in kinds} == {(1, False), (2, False), (1, True), (2, True)}, kinds
    for name in plain:
        assert 0 < fused[name] <= 1.5 * plain[name], (fused, plain)


if __name__ == "__main__":
    torch.manual_seed(0)
    checks = (
        norms,
        reduction_order,
        norms_of_joined_rows,
        swiglu,
        heads,
        stack,
        many_row_stack,
        side_stack,
        fast_stack,
        ordered_stack,
        joint_stack,
        joined_bits,
        few_queries,
        whole_images,
        blank_ranges,
        many_row_products,
        many_row_linears,
        bits_of_cublas,
        bits_of_linears,
        few_row_products,
        few_row_norms,
        order_of_cublas,
        sampling,
        exact_sampling_steps,
        exact_sampling_draws,
        edges_of_nuclei,
        first_of_equals,
        map_norms,
        resized_maps,
        whole_autoencoder,
    )
    {check.__name__: check for check in checks}[sys.argv[1]]()
    sys.stdout.write(f"checked {sys.argv[1]}\n")
