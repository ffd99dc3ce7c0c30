"""Holds the GPU's attention backends against dense fp32 references, forward and backward.

    python -m tools.check_attention --json OUT.json

Rule: a backend's error against fp32 is at most twice that of dense attention in bf16.
"""

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from triton.testing import do_bench_cudagraph

from modeling.bagel.attention import (
    CacheRead,
    cache_read,
    cached_attention,
    flash_cached_attention,
    forest_attention,
    varlen_attention,
)
from modeling.bagel.layout import ROOT, ForestBuilder, SegmentKind, SegmentPlan

HEADS, KV_HEADS, HEAD_SIZE = 28, 4, 128
VIT_HEADS, VIT_HEAD_SIZE = 16, 72
SLACK = 1e-4
ZEROS = (1298, 2324)
"""Where cache rows hold zeros behind a picture's encoder segment, in the upstream recipe."""
# Queries and keys of a sample: text turns, and the gen tokens of a flow without and with a picture;
# the last two with zeros among the keys, read and left out.
TIMED = (
    (1, 300),
    (1, 1500),
    (1024, 1150),
    (1024, 3300),
    (1024, 3366, ZEROS, False),
    (1024, 3366, ZEROS, True),
)


def relative_error(out: Tensor, reference: Tensor) -> float:
    return ((out.float() - reference).norm() / reference.norm()).item()


def draw(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator(device="cuda").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cuda")


def verdict(name: str, error: float, plain: float) -> dict:
    passed = error <= 2 * plain + SLACK
    print(f"{name:<36} error {error:.2e}  bf16 dense {plain:.2e}  {'ok' if passed else 'FAILED'}")
    return {"name": name, "error": error, "plain_bf16": plain, "passed": passed}


def check_varlen(causal: bool, heads: int, kv_heads: int, size: int) -> dict:
    lengths = [1, 100, 1296, 63]
    q = draw(sum(lengths), heads, size, seed=0)
    k, v = (draw(sum(lengths), kv_heads, size, seed=i) for i in (1, 2))
    reference = varlen_attention(q, k, v, lengths, causal)
    half = [x.bfloat16() for x in (q, k, v)]
    out = varlen_attention(*half, lengths, causal)
    plain = varlen_attention(*(x.float() for x in half), lengths, causal).bfloat16()
    name = f"varlen causal={causal} heads={heads}/{kv_heads}x{size}"
    return verdict(name, relative_error(out, reference), relative_error(plain, reference))


def check_cached(causal: bool, query_lengths: list[int], capacity: int = 600) -> list[dict]:
    """Also that the same rows give the same bits again, alone, and behind other padding."""
    rows, used = [2, 0, 1], [max(512, query_lengths[0]), 37 + query_lengths[1], capacity]
    q = draw(sum(query_lengths), HEADS, HEAD_SIZE, seed=3)
    keys, values = (draw(3, capacity, KV_HEADS, HEAD_SIZE, seed=i) for i in (4, 5))
    for row, filled in zip(rows, used, strict=True):  # what is not filled may hold anything
        keys[row, filled:] = values[row, filled:] = float("nan")
    read = _read(rows, query_lengths, used, capacity, causal)
    reference = cached_attention(q, keys, values, read)
    half = [x.bfloat16() for x in (q, keys, values)]
    out = cached_attention(*half, read)
    plain = cached_attention(*(x.float() for x in half), read).bfloat16()
    name = f"cached causal={causal} queries={query_lengths} of {capacity}"
    results = [verdict(name, relative_error(out, reference), relative_error(plain, reference))]
    if len(set(query_lengths)) == 1 and (query_lengths[0] == 1 or not causal):
        count = query_lengths[0]
        alone = _read(rows[1:2], [count], used[1:2], capacity, causal)
        pad = [torch.nn.functional.pad(x, (0, 0, 0, 0, 0, 300)) for x in half[1:]]
        wide = _read(rows, query_lengths, used, capacity + 300, causal)
        same = [
            torch.equal(cached_attention(*half, read), out),
            torch.equal(
                cached_attention(half[0][count : 2 * count], *half[1:], alone),
                out[count : 2 * count],
            ),
            torch.equal(cached_attention(half[0], *pad, wide), out),
        ]
        print(f"{'':<36} again, alone, padded: {same}")
        results.append({"name": f"{name} repeats bit for bit", "passed": all(same)})
    return results


def check_blank(queries: int, used: int) -> list[dict]:
    """Zeros that are attended without being read, in all rows but the last.

    Also that they change no bit of that row, and that the same comes again.
    """
    rows, lengths, capacity = [2, 0, 1, 3], [queries] * 4, used + 200
    q = draw(4 * queries, HEADS, HEAD_SIZE, seed=13)
    memory = [draw(4, capacity, KV_HEADS, HEAD_SIZE, seed=i) for i in (14, 15)]
    for each in memory:
        each[:3, slice(*ZEROS)] = 0
    read = _read(rows, lengths, [used] * 4, capacity, False, [ZEROS] * 3 + [(0, 0)])
    reference = cached_attention(q, *memory, read)
    half = [x.bfloat16() for x in (q, *memory)]
    plain = cached_attention(*(x.float() for x in half), read).bfloat16()
    without = cached_attention(*half, replace(read, blanks=None))
    for each in half[1:]:
        each[:3, slice(*ZEROS)] = float("nan")
    out = cached_attention(*half, read)
    name = f"cached, zeros left out, {queries} queries of {used}"
    same = [
        torch.equal(cached_attention(*half, read), out),
        torch.equal(out[3 * queries :], without[3 * queries :]),
    ]
    print(f"{'':<36} again, row without zeros: {same}")
    return [
        verdict(name, relative_error(out, reference), relative_error(plain, reference)),
        {"name": f"{name} repeats bit for bit", "passed": all(same)},
    ]


def _read(
    rows: list[int],
    query_lengths: list[int],
    used: list[int],
    capacity: int,
    causal: bool,
    blanks: list[tuple[int, int]] | None = None,
) -> CacheRead:
    filled, ranges = (
        None if each is None else torch.tensor(each, dtype=torch.int32, device="cuda")
        for each in (used, blanks)
    )
    return cache_read(rows, query_lengths, filled, capacity, causal, ranges)


def time_cached(
    queries: int, used: int, zeros: tuple[int, int] = (0, 0), is_known: bool = False
) -> dict:
    """Microseconds of attention over the cache at a rollout's shapes, beside PyTorch's kernel.

    Keys and values of the range `zeros` are zeros; where that `is_known`, ours leaves them out.
    """
    capacity = used + 200
    q = draw(4 * queries, HEADS, HEAD_SIZE, seed=10).bfloat16()
    keys, values = (draw(4, capacity, KV_HEADS, HEAD_SIZE, seed=i).bfloat16() for i in (11, 12))
    keys[:, slice(*zeros)] = values[:, slice(*zeros)] = 0
    blanks, left_out = ([zeros] * 4, zeros[1] - zeros[0]) if is_known else (None, 0)
    read = _read([0, 1, 2, 3], [queries] * 4, [used] * 4, capacity, queries == 1, blanks)

    own, theirs = (
        do_bench_cudagraph(partial(attend, q, keys, values, read), return_mode="median") * 1e3
        for attend in (cached_attention, flash_cached_attention)
    )
    rate = 4 * 4 * queries * (used - left_out) * HEADS * HEAD_SIZE / own / 1e6
    print(f"{queries:>5} queries, {used:>5} keys", end="")
    print(f", {left_out} of them left out" if is_known else "", end="")
    print(f": {own:>7.1f} us, flash {theirs:>7.1f} us", end="")
    print(f", {rate:.0f} TFLOP/s" if queries > 1 else "")
    shape = {"queries": queries, "keys": used, "left_out": left_out}
    return {**shape, "own_us": own, "flash_us": theirs}


def forest() -> SegmentPlan:
    """Rows as a refine step has them, at half size, and a shared prefix."""
    builder = ForestBuilder()
    for _ in range(2):
        system = builder.add(SegmentKind.TEXT, 57, ROOT)
        image = builder.add(SegmentKind.IMAGE, 326, system)
        for _ in range(2):
            thought = builder.add(SegmentKind.TEXT, 101, image)
            builder.add(SegmentKind.TEXT, 128 - 101, thought)
        builder.add(SegmentKind.NOISE, 258, image)
    return builder.finish()


def grads(attend: Callable, inputs: list[Tensor], weight: Tensor) -> list[Tensor]:
    leaves = [x.detach().clone().requires_grad_(True) for x in inputs]
    out = attend(*leaves)
    (out * weight.to(out.dtype)).sum().backward()
    return [out.detach(), *(leaf.grad for leaf in leaves)]


def check_forest() -> list[dict]:
    plan, device = forest(), torch.device("cuda")
    tokens = plan.num_tokens
    inputs = [draw(tokens, HEADS, HEAD_SIZE, seed=6)]
    inputs += [draw(tokens, KV_HEADS, HEAD_SIZE, seed=i) for i in (7, 8)]
    weight = draw(tokens, HEADS, HEAD_SIZE, seed=9)
    half = [x.bfloat16() for x in inputs]
    dense = forest_attention(plan, device, "dense")
    reference = grads(dense, inputs, weight)
    plain = grads(dense, half, weight)
    flex = forest_attention(plan, device, "flex")
    out = grads(flex, half, weight)
    again = grads(flex, half, weight)
    results = [
        verdict(f"flex forest {name}", relative_error(o, r), relative_error(p, r))
        for name, o, p, r in zip(("out", "dq", "dk", "dv"), out, plain, reference, strict=True)
    ]
    same = all(torch.equal(a, b) for a, b in zip(out, again, strict=True))
    print(f"flex forest, run twice: {'bit-identical' if same else 'DIFFERS'}")
    results.append({"name": "flex forest repeats bit for bit", "passed": same})
    return results


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("error: no GPU: the CPU's backends are covered by the tests", file=sys.stderr)
        return 2
    results = [check_varlen(causal, HEADS, KV_HEADS, HEAD_SIZE) for causal in (False, True)]
    results.append(check_varlen(False, VIT_HEADS, VIT_HEADS, VIT_HEAD_SIZE))
    for causal in (False, True):
        results += check_cached(causal, [1, 1, 1])
        results += check_cached(causal, [100, 3, 258])
    for count, capacity in ((1, 3000), (2, 600), (2, 1500), (64, 600), (130, 600), (1024, 1700)):
        results += check_cached(False, [count] * 3, capacity)
    results += check_blank(1024, 3366)
    results += check_forest()
    timed = [time_cached(*shape) for shape in TIMED]
    if args.json:
        args.json.write_text(json.dumps({"checked": results, "timed": timed}, indent=1))
    return 0 if all(result["passed"] for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
