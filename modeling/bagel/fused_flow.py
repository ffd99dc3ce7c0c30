"""The rollout's stack of layers with fused operators: norms, RoPE, cache writes, SwiGLU.

In the exact grade it computes what `Bagel.extend` computes layer by layer in its eager form, bit
for bit, with the same matrix products. The fast grade takes kernels of its own for the products of
few rows, which round differently.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from modeling.bagel import few_rows, many_rows
from modeling.bagel.bagel import Wanted
from modeling.bagel.cache import CacheAppend, CacheRun
from modeling.bagel.config import LlmConfig
from modeling.bagel.few_rows import MAX_ROWS
from modeling.bagel.fused_ops import (
    add_rms_norm,
    fits_norm,
    qk_norm_rope_store,
    rms_norm,
    silu_mul,
)
from modeling.bagel.qwen2_navit import GEN, Decoder, DecoderLayer, ExpertOrder, Rotary

SIDE_BY_SIDE_ROWS = 64
"""Up to so many rows a projection is too small to fill the GPU alone."""
PART_ROWS = 4096
"""Rows of several spans that go through products together. Beyond, products are full without
company, and rows that no longer fit into the second-level cache cost time."""
Span = tuple[slice, CacheRun]
"""Rows of a pass, and the run of the append that they are."""


def unsupported(config: LlmConfig, dtype: torch.dtype) -> str | None:
    """Why a model cannot take the fused path; None if it can."""
    if dtype != torch.bfloat16:
        return f"weights are gathered as {dtype}, the kernels are checked for bfloat16"
    if not fits_norm(config.hidden_size):
        return f"hidden size {config.hidden_size}, expected at least 128"
    if config.head_size != 128:
        return f"head size {config.head_size}, expected 128"
    return None


class FusedStack:
    """Runs all layers over new tokens. Use under no_grad, on resident bf16 weights.

    `side_by_side` runs what is small on streams of its own, inside a graph capture only, where
    the graph keeps memory apart: the few und rows of an image segment beside its gen rows, and
    the projections of a text turn beside each other.
    """

    def __init__(self, side_by_side: bool, is_fast: bool = False):
        self._streams = [torch.cuda.Stream() for _ in range(3)] if side_by_side else []
        self.is_fast = is_fast

    def run(
        self,
        decoder: Decoder,
        x: Tensor,
        experts: ExpertOrder,
        rotary: Rotary,
        append: CacheAppend,
        wanted: Wanted = Wanted.ALL,
    ) -> Tensor:
        """x [S, D] in expert order, overwritten -> [S, D] after all layers and the final norm.

        Rows that are not wanted end with their keys and values of the last layer.
        """
        shared = _Pass(decoder, x, rotary, self.is_fast)
        und_spans, gen_spans = _spans(append, experts)
        # In the exact grade few rows stay alone: beside others cuBLAS gives them other bits.
        und = [_Part(shared, "", group) for group in _groups(und_spans, self.is_fast)]
        gen = [_Part(shared, GEN, group) for group in _groups(gen_spans, True)]
        streams = self._streams if torch.cuda.is_current_stream_capturing() else []
        side = None
        if streams and all(part.x.shape[0] <= SIDE_BY_SIDE_ROWS for part in und):
            side = streams[0] if gen else None
            for part in und:
                part.streams = streams[1:]
        layers = list(decoder.layers)
        _each(und, gen, lambda part: part.start(layers[0]), side)
        for index, layer in enumerate(layers):
            following = layers[index + 1] if index + 1 < len(layers) else None
            if following is None:
                und = und if wanted is Wanted.ALL else []
                gen = [] if wanted is Wanted.NONE else gen
            _each(und, gen, partial(_Part.finish, layer=layer, following=following), side)
            shared.index += 1
        return shared.normed

    def project(self, x: Tensor, linear: torch.nn.Linear) -> Tensor:
        """The product of x [M, K] with a linear layer without bias: [M, N]."""
        return _multiply(x, linear, self.is_fast)


def _multiply(x: Tensor, linear: torch.nn.Linear, is_fast: bool) -> Tensor:
    if is_fast and few_rows.fits(x.shape[0], linear.weight):
        return few_rows.linear(x, linear.weight)
    return linear(x)


def _spans(append: CacheAppend, experts: ExpertOrder) -> tuple[list[Span], list[Span]]:
    """The runs of an append with the rows that they have, und and gen."""
    und, gen, start = [], [], 0
    for run in append.runs:
        span = (slice(start, start + run.num_tokens), run)
        (und if start < experts.num_und else gen).append(span)
        start += run.num_tokens
    return und, gen


def _groups(spans: list[Span], may_join: bool) -> list[list[Span]]:
    """Neighbouring spans that go through products together: none if they may not, else as many
    as have PART_ROWS rows in all."""
    groups: list[list[Span]] = []
    for span in spans:
        if may_join and groups and span[0].stop - groups[-1][0][0].start <= PART_ROWS:
            groups[-1].append(span)
        else:
            groups.append([span])
    return groups


def _each(
    und: list["_Part"], gen: list["_Part"], work: Callable, side: torch.cuda.Stream | None
) -> None:
    """Does `work` for each part; for the und parts on the side stream if there is one."""
    if side is None:
        for part in und + gen:
            work(part)
        return
    main = torch.cuda.current_stream()
    side.wait_stream(main)
    with torch.cuda.stream(side):
        for part in und:
            work(part)
    for part in gen:
        work(part)
    main.wait_stream(side)


class _Pass:
    """What the parts share in one pass: inputs, and queries and norms of all rows."""

    def __init__(self, decoder: Decoder, x: Tensor, rotary: Rotary, is_fast: bool):
        config, num_rows = decoder.config, x.shape[0]
        self.decoder = decoder
        self.eps = config.rms_norm_eps
        self.rotary = rotary
        self.is_fast = is_fast
        self.index = 0
        self.x = x.contiguous()
        self.other = torch.empty_like(self.x)
        self.normed = torch.empty_like(self.x)
        shape = (num_rows, config.num_heads, config.head_size)
        self.queries = torch.empty(shape, dtype=x.dtype, device=x.device)


class _Part:
    """Neighbouring rows of one expert on their way: they meet other rows in a cache only."""

    def __init__(self, shared: _Pass, suffix: str, spans: list[Span]):
        self.shared = shared
        self.suffix = suffix
        self.spans = spans
        self.rows = slice(spans[0][0].start, spans[-1][0].stop)
        self.x, self.other = shared.x[self.rows], shared.other[self.rows]
        self.normed = shared.normed[self.rows]
        self.streams: list[torch.cuda.Stream] = []

    def start(self, layer: DecoderLayer) -> None:
        """The first norm, and the projections of the first layer."""
        weight = getattr(layer, "input_layernorm" + self.suffix).weight
        rms_norm(self.x, weight, self.shared.eps, self.normed)
        self._project_heads(layer, 0)

    def finish(self, layer: DecoderLayer, following: DecoderLayer | None) -> None:
        """From the attention of one layer to the projections of the following one."""
        shared, mlp = self.shared, getattr(layer, "mlp" + self.suffix)
        o_proj = self._linear(layer.self_attn, "o_proj")
        delta = _multiply(self._attend(), o_proj, shared.is_fast)
        self._add_and_norm(delta, layer, "post_attention_layernorm")
        inner = self._swiglu(mlp.gate_proj, mlp.up_proj)
        delta = _multiply(inner, mlp.down_proj, shared.is_fast)
        if following is None:
            self._add_and_norm(delta, shared.decoder, "norm")
            return
        self._add_and_norm(delta, following, "input_layernorm")
        self._project_heads(following, shared.index + 1)

    def _attend(self) -> Tensor:
        """Attention of all spans, each over its own cache: [rows, N * H]."""
        shared = self.shared
        out = torch.empty_like(shared.queries[self.rows])
        for rows, run in self.spans:
            run.attend(shared.index, shared.queries[rows], out[self._own(rows)])
        return out.flatten(1)

    def _own(self, rows: slice) -> slice:
        """Rows of the pass, counted from the first one of this part."""
        return slice(rows.start - self.rows.start, rows.stop - self.rows.start)

    def _linear(self, owner: torch.nn.Module, name: str) -> torch.nn.Linear:
        return getattr(owner, name + self.suffix)

    def _heads(self, layer: DecoderLayer) -> list[torch.nn.Linear]:
        return [self._linear(layer.self_attn, name) for name in ("q_proj", "k_proj", "v_proj")]

    def _add_and_norm(self, delta: Tensor, owner: torch.nn.Module, name: str) -> None:
        weight, is_few = getattr(owner, name + self.suffix).weight, 0 < self.x.shape[0] <= MAX_ROWS
        add_norm = few_rows.add_rms_norm if self.shared.is_fast and is_few else add_rms_norm
        add_norm(self.x, delta, weight, self.shared.eps, self.other, self.normed)
        self.x, self.other = self.other, self.x

    def _has_own_product(self, *linears: torch.nn.Linear) -> bool:
        rows = self.x.shape[0]
        return self.shared.is_fast and all(few_rows.fits(rows, each.weight) for each in linears)

    def _swiglu(self, gate: torch.nn.Linear, up: torch.nn.Linear) -> Tensor:
        if self._has_own_product(gate, up):
            return few_rows.swiglu(self.normed, gate.weight, up.weight)
        if many_rows.fits(self.normed, gate.weight, up.weight):
            return many_rows.swiglu(self.normed, gate.weight, up.weight)
        return silu_mul(*self._apply([gate, up]))

    def _project_heads(self, layer: DecoderLayer, index: int) -> None:
        shared, module = self.shared, layer.self_attn
        linears = self._heads(layer)
        if self._has_own_product(*linears):
            weights, biases = zip(*((each.weight, each.bias) for each in linears), strict=True)
            projections = few_rows.project_heads(self.normed, weights, biases)
        else:
            projections = self._apply(linears)
        rounding = shared.rotary.rounding
        norms = tuple(getattr(module, f"{name}_norm{self.suffix}").weight for name in "qk")
        for rows, run in self.spans:
            own = self._own(rows)
            qk_norm_rope_store(
                tuple(projection[own] for projection in projections),
                norms,
                (shared.rotary.cos[rows], shared.rotary.sin[rows]),
                run.places,
                (shared.queries[rows], *run.memory(index)),
                shared.eps,
                rounding.gen if self.suffix else rounding.und,
            )

    def _apply(self, modules: list[torch.nn.Module]) -> tuple[Tensor, ...]:
        """All modules on the normed rows, those behind the first on side streams if any."""
        x = self.normed
        streams = self.streams[: len(modules) - 1]
        main = torch.cuda.current_stream() if streams else None
        for stream in streams:
            stream.wait_stream(main)
        results = [modules[0](x)]
        for i, module in enumerate(modules[1:]):
            if streams:
                with torch.cuda.stream(streams[i]):
                    results.append(module(x))
            else:
                results.append(module(x))
        for stream in streams:
            main.wait_stream(stream)
        return tuple(results)
