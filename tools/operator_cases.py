"""Cases of the fused operators: inputs, fused result, eager twin; compared bit for bit."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from modeling.bagel import few_rows, many_rows
from modeling.bagel.context import INVARIANT_ROWS
from modeling.bagel.cublas_order import splits_of
from modeling.bagel.fused_ops import (
    add_rms_norm,
    is_hopper,
    qk_norm_rope_store,
    rms_norm,
    silu_mul,
)
from modeling.bagel.layers import RMSNorm, rotary_table
from modeling.bagel.qwen2_navit import Attention
from modeling.fused_maps import FusedMap, Term

HIDDEN, MLP, HEADS, KV_HEADS, HEAD_SIZE = 3584, 18944, 28, 4, 128
EPS, THETA = 1e-6, 1e6
DISTRIBUTIONS = ("normal", "tiny", "huge", "mixed")
CACHE_SLACK = 7


@dataclass(frozen=True)
class Case:
    """One comparison. `run` writes NaN-poisoned outputs; both give lists of tensors.

    With a `reference`, in fp32, `run` need not have the bits of `twin`: it may be off by a little
    more than that is. The fast grade's operators are held so. `kernel` is what is timed where
    `run` does more than that.
    """

    name: str
    run: Callable[[], list[Tensor]]
    twin: Callable[[], list[Tensor]]
    num_bytes: int
    reference: Callable[[], list[Tensor]] | None = None
    kernel: Callable[[], object] | None = None


def draw(shape: tuple[int, ...], distribution: str, seed: int) -> Tensor:
    """bf16 values on the GPU: normal, subnormal, near overflow, or all scales mixed."""
    generator = torch.Generator(device="cuda").manual_seed(seed)
    values = torch.randn(shape, generator=generator, device="cuda")
    if distribution == "tiny":
        values *= 1e-39
    elif distribution == "huge":
        values *= 1e18
    elif distribution == "mixed":
        exponents = torch.randint(-30, 8, shape, generator=generator, device="cuda")
        values = torch.ldexp(values, exponents)
    return values.bfloat16()


def poisoned(*shape: int) -> Tensor:
    return torch.full(shape, float("nan"), dtype=torch.bfloat16, device="cuda")


def norm_module(size: int, seed: int) -> RMSNorm:
    module = RMSNorm(size, EPS).cuda().bfloat16()
    with torch.no_grad():
        module.weight.copy_(draw((size,), "normal", seed) * 0.2 + 1)
    return module


def norm_case(rows: int, distribution: str, strided: bool = False) -> Case:
    x = draw((rows, HIDDEN), distribution, rows)
    if strided:  # rows of a wider tensor, made contiguous as the stack does
        x = draw((rows, 2 * HIDDEN), distribution, rows)[:, :HIDDEN].contiguous()
    module = norm_module(HIDDEN, 1)

    def run() -> list[Tensor]:
        out = poisoned(rows, HIDDEN)
        rms_norm(x, module.weight, EPS, out)
        return [out]

    name = f"rms_norm {rows} {distribution}{' strided' if strided else ''}"
    return Case(name, run, lambda: [module(x)], 2 * x.nbytes)


def add_norm_case(rows: int, distribution: str) -> Case:
    x, residual = (draw((rows, HIDDEN), distribution, rows + i) for i in (0, 1))
    module = norm_module(HIDDEN, 2)

    def run() -> list[Tensor]:
        total, out = poisoned(rows, HIDDEN), poisoned(rows, HIDDEN)
        add_rms_norm(x, residual, module.weight, EPS, total, out)
        return [total, out]

    def twin() -> list[Tensor]:
        total = x + residual
        return [total, module(total)]

    return Case(f"add_rms_norm {rows} {distribution}", run, twin, 4 * x.nbytes)


def silu_case(rows: int, distribution: str) -> Case:
    gate, up = (draw((rows, MLP), distribution, rows + i) for i in (0, 1))

    def twin() -> list[Tensor]:
        return [F.silu(gate) * up]

    name = f"silu_mul {rows} {distribution}"
    return Case(name, lambda: [silu_mul(gate, up)], twin, 3 * gate.nbytes)


def every_silu_case() -> Case:
    """All values of bf16, infinities and NaN among them."""
    codes = torch.arange(2**16, device="cuda", dtype=torch.int32)
    gate = codes.to(torch.int16).view(torch.bfloat16)
    up = torch.ones_like(gate)
    return Case(
        "silu_mul of every bf16 value",
        lambda: [silu_mul(gate, up)],
        lambda: [F.silu(gate) * up],
        3 * gate.nbytes,
    )


def gated_case(rows: int, distribution: str, is_up_first: bool) -> Case:
    """Gate and up products with SwiGLU, against cuBLAS; either weight may lie first in memory.

    On Hopper GPUs only.
    """
    x = draw((rows, HIDDEN), distribution, rows)
    weights = torch.stack([draw((MLP, HIDDEN), "normal", i) for i in (6, 7)]) * 0.02
    gate, up = weights.flip(0) if is_up_first else weights
    assert many_rows.fits_swiglu(x, gate, up)

    def run() -> list[Tensor]:
        poisoned(rows, MLP)  # freed at once: the result takes its memory
        return [many_rows.swiglu(x, gate, up)]

    return Case(
        f"many_rows.swiglu {rows} {distribution}{' up first' if is_up_first else ''}",
        run,
        lambda: [F.silu(x @ gate.t()) * (x @ up.t())],
        2 * weights.nbytes,
    )


def linear_cases(rows: int, distribution: str) -> Iterator[Case]:
    """Plain products of many rows against cuBLAS: o, q with its bias, down. On Hopper GPUs only."""
    for name, inner, has_bias in (("o", HIDDEN, False), ("q", HIDDEN, True), ("down", MLP, False)):
        x = draw((rows, inner), distribution, rows)
        linear = linear_module(HIDDEN, inner, 8, has_bias)

        def run(x: Tensor = x, linear: nn.Linear = linear) -> list[Tensor]:
            poisoned(rows, HIDDEN)  # freed at once: the result takes its memory
            return [many_rows.linear(x, linear.weight, linear.bias)]

        yield Case(
            f"many_rows.linear {rows} {distribution} {name}",
            run,
            partial(lambda x, linear: [linear(x)], x, linear),
            x.nbytes + linear.weight.nbytes + 2 * rows * HIDDEN,
        )
        if not has_bias:
            yield adding_case(f"{rows} {distribution} {name}", x, linear.weight, distribution)


def adding_case(name: str, x: Tensor, weight: Tensor, distribution: str) -> Case:
    """A product of many rows that is added where the sum lies, against cuBLAS and a sum."""
    total = draw((x.shape[0], HIDDEN), distribution, x.shape[0] + 1)

    def run() -> list[Tensor]:
        added = total.clone()
        many_rows.add_linear(added, x, weight)
        return [added]

    return Case(
        f"many_rows.add_linear {name}",
        run,
        lambda: [total + F.linear(x, weight)],
        x.nbytes + weight.nbytes + 4 * total.nbytes,
    )


def qk_case(rows: int, distribution: str, early: bool) -> Case:
    q = draw((rows, HEADS * HEAD_SIZE), distribution, rows)
    k, v = (draw((rows, KV_HEADS * HEAD_SIZE), distribution, rows + i) for i in (1, 2))
    q_norm, k_norm = norm_module(HEAD_SIZE, 3), norm_module(HEAD_SIZE, 4)
    generator = torch.Generator(device="cuda").manual_seed(rows)
    rope_ids = torch.randperm(rows, generator=generator, device="cuda") * 3
    slots = torch.randperm(rows + CACHE_SLACK, generator=generator, device="cuda")[:rows]
    cos, sin = rotary_table(rope_ids, HEAD_SIZE, THETA)

    def run() -> list[Tensor]:
        queries = poisoned(rows, HEADS, HEAD_SIZE)
        keys, values = (poisoned(rows + CACHE_SLACK, KV_HEADS, HEAD_SIZE) for _ in range(2))
        qk_norm_rope_store(
            (q, k, v),
            (q_norm.weight, k_norm.weight),
            (cos, sin),
            slots,
            (queries, keys, values),
            EPS,
            early,
        )
        return [queries, keys, values]

    def twin() -> list[Tensor]:
        queries = poisoned(rows, HEADS, HEAD_SIZE)
        keys, values = (poisoned(rows + CACHE_SLACK, KV_HEADS, HEAD_SIZE) for _ in range(2))
        turn = Attention._norm_and_rotate
        queries[:] = turn(q.view(rows, HEADS, HEAD_SIZE), q_norm, cos, sin, early)
        keys[slots] = turn(k.view(rows, KV_HEADS, HEAD_SIZE), k_norm, cos, sin, early)
        values[slots] = v.view(rows, KV_HEADS, HEAD_SIZE)
        return [queries, keys, values]

    name = f"qk_norm_rope {rows} {distribution} {'early' if early else 'late'}"
    return Case(name, run, twin, 2 * (q.nbytes + k.nbytes + v.nbytes) + 2 * cos.nbytes)


def linear_module(size: int, inner: int, seed: int, has_bias: bool = False) -> nn.Linear:
    module = nn.Linear(inner, size, bias=has_bias, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        module.weight.copy_(draw((size, inner), "normal", seed) * 0.02)
        if has_bias:
            module.bias.copy_(draw((size,), "normal", seed + 1))
    return module


def ordered_cases(rows: int, distribution: str) -> Iterator[Case]:
    """The exact grade's products of few rows, in the order of cuBLAS where that is known."""
    x, inner = draw((rows, HIDDEN), distribution, rows), draw((rows, MLP), distribution, rows + 1)
    sizes = (HIDDEN, KV_HEADS * HEAD_SIZE, KV_HEADS * HEAD_SIZE)
    heads = [linear_module(size, HIDDEN, size + i, has_bias=True) for i, size in enumerate(sizes)]
    o_proj, down = linear_module(HIDDEN, HIDDEN, 4), linear_module(HIDDEN, MLP, 5)
    gate, up = (linear_module(MLP, HIDDEN, i) for i in (6, 7))
    splits = [splits_of(rows, linear) for linear in (*heads, o_proj, gate, up, down)]
    if not few_rows.fits_splits(*splits):
        print(f"ordered products of {rows}: splits {splits} of cuBLAS are left to it")
        return
    weights, biases = zip(*((linear.weight, linear.bias) for linear in heads), strict=True)
    name = f"{rows} {distribution}"
    yield Case(
        f"ordered heads {name}, {splits[0]} splits",
        lambda: list(few_rows.project_heads(x, weights, biases, splits[0])),
        lambda: [linear(x) for linear in heads],
        sum(weight.nbytes for weight in weights),
    )
    for left, linear, count in ((x, o_proj, splits[3]), (inner, down, splits[6])):
        yield Case(
            f"ordered product {name}, {left.shape[1]} in {count} splits",
            partial(lambda *given: [few_rows.linear(*given)], left, linear.weight, count),
            partial(lambda left, linear: [linear(left)], left, linear),
            linear.weight.nbytes,
        )
    yield Case(
        f"ordered swiglu {name}",
        lambda: [few_rows.swiglu(x, gate.weight, up.weight)],
        lambda: [F.silu(gate(x)) * up(x)],
        gate.weight.nbytes + up.weight.nbytes,
    )


def product_cases(rows: int) -> Iterator[Case]:
    """The fast grade's products of few rows and norms behind them, against cuBLAS and fp32."""
    x, attended = (draw((rows, HIDDEN), "normal", rows + i) for i in (0, 2))
    inner, kv = draw((rows, MLP), "normal", rows + 1), KV_HEADS * HEAD_SIZE
    norm = norm_module(HIDDEN, 2)
    heads = [draw((size, HIDDEN), "normal", size) * 0.02 for size in (HIDDEN, kv, kv)]
    biases = [draw((size,), "normal", size + 1) for size in (HIDDEN, kv, kv)]
    out_proj = draw((HIDDEN, HIDDEN), "normal", 4) * 0.02
    down = draw((HIDDEN, MLP), "normal", 5) * 0.02
    gate, up = (draw((MLP, HIDDEN), "normal", i) * 0.02 for i in (6, 7))

    def normed(cast: Callable) -> Tensor:
        return F.rms_norm(cast(x), (HIDDEN,), cast(norm.weight), EPS)

    def project(cast: Callable) -> list[Tensor]:
        pairs = zip(heads, biases, strict=True)
        return [F.linear(normed(cast), cast(w), cast(b)) for w, b in pairs]

    def gated(cast: Callable) -> list[Tensor]:
        rows = normed(cast)
        return [F.silu(rows @ cast(gate).t()) * (rows @ cast(up).t())]

    def case(name: str, run: Callable, twin: Callable, *weights: Tensor) -> Case:
        num_bytes = sum(weight.nbytes for weight in weights)
        plain, wide = partial(twin, lambda y: y), partial(twin, Tensor.float)
        return Case(f"few_rows.{name} {rows}", run, plain, num_bytes, wide)

    weighed = few_rows.weigh(x, norm.weight, EPS)
    yield case(
        "project_heads",
        lambda: list(few_rows.project_heads(weighed, heads, biases)),
        project,
        *heads,
    )
    yield case("swiglu", lambda: [few_rows.swiglu(weighed, gate, up)], gated, gate, up)
    for name, left, weight in (("o", attended, out_proj), ("down", inner, down)):

        def add(left: Tensor = left, weight: Tensor = weight) -> list[Tensor]:
            total = x.clone()
            added = few_rows.add_product(total, left, weight, norm.weight, EPS)
            scale = (added.squares.sum(0)[:, None] / HIDDEN + EPS).rsqrt()
            return [total, added.rows.float() * scale]

        def twin(cast: Callable, left: Tensor = left, weight: Tensor = weight) -> list[Tensor]:
            total = cast(x) + cast(left) @ cast(weight).t()
            return [total, F.rms_norm(total, (HIDDEN,), cast(norm.weight), EPS)]

        kernel = partial(few_rows.add_product, x.clone(), left, weight, norm.weight, EPS)
        yield replace(case(f"add_product {name}", add, twin, weight), kernel=kernel)


def fast_cases(rows: tuple[int, ...]) -> Iterator[Case]:
    """The fast grade's operators, at the row counts that they take."""
    for count in rows:
        if 0 < count <= few_rows.MAX_ROWS:
            yield from product_cases(count)


def picture_cases() -> Iterator[Case]:
    """The autoencoder's maps, its largest and its smallest, and odd ones; far from zero."""
    for shape in ((4, 128, 512, 512), (4, 512, 64, 64), (1, 256, 40, 72), (3, 96, 9, 7)):
        left, right = (
            (draw(shape, "normal", shape[1] + i) * 3 + 20).to(memory_format=torch.channels_last)
            for i in (0, 1)
        )
        biases = [torch.randn(shape[1], device="cuda") for _ in (left, right)]
        for has_bias, has_swish in product((True, False), (True, False)):
            yield map_norm_case(left, biases[0] if has_bias else None, has_swish)
        yield from map_sum_cases(Term(left, biases[0]), Term(right, biases[1]))


def biased(term: Term) -> Tensor:
    return term.x if term.bias is None else term.x + term.bias.bfloat16()[:, None, None]


def map_norm_case(x: Tensor, bias: Tensor | None, has_swish: bool) -> Case:
    """The norm of a convolution's result, whose bias is still to be added, or of a complete map."""
    channels = x.shape[1]
    norm = nn.GroupNorm(32, channels, eps=EPS, device="cuda")
    with torch.no_grad():
        norm.weight.copy_(draw((channels,), "normal", 1))
        norm.bias.copy_(draw((channels,), "normal", 2))

    def wide() -> Tensor:
        y = norm(biased(Term(x, bias)).float())
        return y * torch.sigmoid(y) if has_swish else y

    kind = f"{' bias' if bias is not None else ''}{' swish' if has_swish else ''}"
    return Case(
        f"map norm {'x'.join(map(str, x.shape))}{kind}",
        lambda: [FusedMap(Term(x, bias)).normalised(norm, has_swish).tensor()],
        lambda: [wide().bfloat16()],
        3 * x.nbytes,
        lambda: [wide()],
    )


def map_sum_cases(left: Term, right: Term) -> Iterator[Case]:
    """A residual sum as it is written in front of a norm, doubled, and padded."""

    def total() -> FusedMap:
        poisoned(*left.x.shape)  # freed at once: the result takes its memory
        return FusedMap(left, right)

    def plain() -> Tensor:
        return biased(left) + biased(right)

    name = "x".join(map(str, left.x.shape))
    yield Case(
        f"map sum {name}", lambda: [total().tensor()], lambda: [plain()], 3 * left.x.nbytes
    )
    yield Case(
        f"map doubled {name}",
        lambda: [total().doubled().tensor()],
        lambda: [F.interpolate(plain(), scale_factor=2, mode="nearest")],
        6 * left.x.nbytes,
    )
    yield Case(
        f"map padded {name}",
        lambda: [total().padded().tensor()],
        lambda: [F.pad(plain(), (0, 1, 0, 1))],
        3 * left.x.nbytes,
    )


def cases(rows: tuple[int, ...], distributions: tuple[str, ...]) -> Iterator[Case]:
    """All operators at all row counts and distributions."""
    takes_many = is_hopper(torch.device("cuda"))
    if not takes_many:
        print("products of many rows are left to cuBLAS on this GPU")
    for count in rows:
        is_many = takes_many and count >= INVARIANT_ROWS
        for distribution in distributions:
            yield norm_case(count, distribution)
            yield add_norm_case(count, distribution)
            yield silu_case(count, distribution)
            for early in (False, True):
                yield qk_case(count, distribution, early)
            if 0 < count <= few_rows.MAX_ROWS:
                yield from ordered_cases(count, distribution)
            if is_many:
                yield gated_case(count, distribution, is_up_first=False)
                yield from linear_cases(count, distribution)
        if is_many:
            yield gated_case(count, "normal", is_up_first=True)
        yield norm_case(count, "normal", strided=True)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equality of bits, so that signed zeros count; NaN equals NaN."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not a.is_floating_point():
        return torch.equal(a, b)
    bits = torch.int32 if a.element_size() == 4 else torch.int16
    equal = a.view(bits) == b.view(bits)
    return bool((equal | (a.isnan() & b.isnan())).all())
