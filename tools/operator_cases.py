"""Cases of the fused operators: inputs, fused result, eager twin; compared bit for bit."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from modeling.bagel import few_rows, many_rows
from modeling.bagel.context import INVARIANT_ROWS
from modeling.bagel.fused_ops import add_rms_norm, qk_norm_rope_store, rms_norm, silu_mul
from modeling.bagel.layers import RMSNorm, rotary_table
from modeling.bagel.qwen2_navit import Attention

HIDDEN, MLP, HEADS, KV_HEADS, HEAD_SIZE = 3584, 18944, 28, 4, 128
EPS, THETA = 1e-6, 1e6
DISTRIBUTIONS = ("normal", "tiny", "huge", "mixed")
CACHE_SLACK = 7


@dataclass(frozen=True)
class Case:
    """One comparison. `run` writes NaN-poisoned outputs; both give lists of tensors.

    With a `reference`, in fp32, `run` need not have the bits of `twin`: it may be off by a little
    more than that is. The fast grade's operators are held so.
    """

    name: str
    run: Callable[[], list[Tensor]]
    twin: Callable[[], list[Tensor]]
    num_bytes: int
    reference: Callable[[], list[Tensor]] | None = None


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
    """Gate and up products with SwiGLU, against cuBLAS; either weight may lie first in memory."""
    x = draw((rows, HIDDEN), distribution, rows)
    weights = torch.stack([draw((MLP, HIDDEN), "normal", i) for i in (6, 7)]) * 0.02
    gate, up = weights.flip(0) if is_up_first else weights
    assert many_rows.fits(x, gate, up)

    def run() -> list[Tensor]:
        poisoned(rows, MLP)  # freed at once: the result takes its memory
        return [many_rows.swiglu(x, gate, up)]

    return Case(
        f"many_rows.swiglu {rows} {distribution}{' up first' if is_up_first else ''}",
        run,
        lambda: [F.silu(x @ gate.t()) * (x @ up.t())],
        2 * weights.nbytes,
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


def product_cases(rows: int) -> Iterator[Case]:
    """The fast grade's products of few rows, against cuBLAS and fp32."""
    x, inner = draw((rows, HIDDEN), "normal", rows), draw((rows, MLP), "normal", rows + 1)
    kv = KV_HEADS * HEAD_SIZE
    heads = [draw((size, HIDDEN), "normal", size) * 0.02 for size in (HIDDEN, kv, kv)]
    biases = [draw((size,), "normal", size + 1) for size in (HIDDEN, kv, kv)]
    down = draw((HIDDEN, MLP), "normal", 5) * 0.02
    gate, up = (draw((MLP, HIDDEN), "normal", i) * 0.02 for i in (6, 7))

    def project(cast: Callable) -> list[Tensor]:
        return [F.linear(cast(x), cast(w), cast(b)) for w, b in zip(heads, biases, strict=True)]

    def gated(cast: Callable) -> list[Tensor]:
        return [F.silu(cast(x) @ cast(gate).t()) * (cast(x) @ cast(up).t())]

    yield Case(
        f"few_rows.project_heads {rows}",
        lambda: list(few_rows.project_heads(x, heads, biases)),
        lambda: project(lambda y: y),
        sum(weight.nbytes for weight in heads),
        lambda: project(Tensor.float),
    )
    yield Case(
        f"few_rows.linear {rows} x {MLP}",
        lambda: [few_rows.linear(inner, down)],
        lambda: [inner @ down.t()],
        down.nbytes,
        lambda: [inner.float() @ down.float().t()],
    )
    yield Case(
        f"few_rows.swiglu {rows}",
        lambda: [few_rows.swiglu(x, gate, up)],
        lambda: gated(lambda y: y),
        gate.nbytes + up.nbytes,
        lambda: gated(Tensor.float),
    )


def few_norm_case(rows: int) -> Case:
    """The fast grade's norm, against PyTorch's own and fp32."""
    x, delta = (draw((rows, HIDDEN), "normal", rows + i) for i in (0, 1))
    module = norm_module(HIDDEN, 2)

    def run() -> list[Tensor]:
        total, out = poisoned(rows, HIDDEN), poisoned(rows, HIDDEN)
        few_rows.add_rms_norm(x, delta, module.weight, EPS, total, out)
        return [total, out]

    def twin(cast: Callable) -> list[Tensor]:
        total = cast(x + delta)
        return [total, F.rms_norm(total, (HIDDEN,), cast(module.weight), EPS)]

    return Case(
        f"few_rows.add_rms_norm {rows}",
        run,
        lambda: twin(lambda y: y),
        4 * x.nbytes,
        lambda: twin(Tensor.float),
    )


def fast_cases(rows: tuple[int, ...]) -> Iterator[Case]:
    """The fast grade's operators, at the row counts that they take."""
    for count in rows:
        if 0 < count <= few_rows.MAX_ROWS:
            yield from product_cases(count)
            yield few_norm_case(count)


def cases(rows: tuple[int, ...], distributions: tuple[str, ...]) -> Iterator[Case]:
    """All operators at all row counts and distributions."""
    for count in rows:
        for distribution in distributions:
            yield norm_case(count, distribution)
            yield add_norm_case(count, distribution)
            yield silu_case(count, distribution)
            for early in (False, True):
                yield qk_case(count, distribution, early)
            if count >= INVARIANT_ROWS:
                yield gated_case(count, distribution, is_up_first=False)
        if count >= INVARIANT_ROWS:
            yield gated_case(count, "normal", is_up_first=True)
        yield norm_case(count, "normal", strided=True)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equality of bits, so that signed zeros count; NaN equals NaN."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    equal = a.view(torch.int16) == b.view(torch.int16)
    return bool((equal | (a.isnan() & b.isnan())).all())
