"""The rollout's stack of layers with fused operators: norms, RoPE, cache writes, SwiGLU.

In the exact grade it computes what `Bagel.extend` computes layer by layer in its eager form, bit
for bit: matrix products are those of cuBLAS, or kernels of its own that sum in the same order. The
fast grade rounds differently where rows are few.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from modeling.bagel import few_rows, many_rows
from modeling.bagel.attention import JointRead
from modeling.bagel.bagel import LayerPass, Wanted
from modeling.bagel.cache import CacheAppend, CacheRun
from modeling.bagel.config import LlmConfig
from modeling.bagel.cublas_order import splits_of
from modeling.bagel.fused_ops import (
    add_rms_norm,
    fits_norm,
    qk_norm_rope_store,
    rms_norm,
    silu_mul,
)
from modeling.bagel.qwen2_navit import GEN, Decoder, DecoderLayer, ExpertOrder, Rotary
from modeling.bagel.text_layers import TextLayers, is_text_turn

SIDE_BY_SIDE_ROWS = 64
"""Up to so many rows a projection is too small to fill the GPU alone."""
PART_ROWS = 16384
"""Rows of several spans that go through products together: the more, the fuller the waves of tiles.
Three branches of 4,096 tokens fit; the limit is for the memory that the MLP's rows take."""
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

    `side_by_side` runs what is small on streams of its own: the few und rows of an image segment
    beside its gen rows, and, inside a graph capture only, small projections that are left to
    cuBLAS beside each other.
    """

    keeps_runs_apart = True

    def __init__(self, side_by_side: bool, is_fast: bool = False):
        self._streams = [torch.cuda.Stream() for _ in range(3)] if side_by_side else []
        self.is_fast = is_fast
        self._turns = TextLayers()
        # Turns in one launch are exact in both grades, and compared with this.
        self._exact = FusedStack(side_by_side=False) if is_fast else self

    def run(self, layer_pass: LayerPass) -> Tensor:
        """As in `Stack`; overwrites x.

        Rows that are not wanted end with their keys and values of the last layer.
        """
        if is_text_turn(layer_pass):
            splits = _turn_splits(layer_pass.decoder, layer_pass.experts.num_und)
            if splits is not None:
                normed = self._turns.run(layer_pass, splits, self._exact.run_parts)
                if normed is not None:
                    return normed
        return self.run_parts(layer_pass)

    def run_parts(self, layer_pass: LayerPass) -> Tensor:
        """`run` by a kernel or more for each operator."""
        decoder, wanted = layer_pass.decoder, layer_pass.wanted
        shared = _Pass(decoder, layer_pass.x, layer_pass.rotary)
        und_spans, gen_spans = _spans(layer_pass.append, layer_pass.experts)
        und = self._und_parts(shared, und_spans)
        gen = [self._part(shared, GEN, group) for group in _groups(gen_spans)]
        side = None
        if self._streams and all(part.x.shape[0] <= SIDE_BY_SIDE_ROWS for part in und):
            side = self._streams[0] if und and gen else None
            if torch.cuda.is_current_stream_capturing():
                for part in und:
                    part.streams = self._streams[1:]
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

    def _und_parts(self, shared: "_Pass", spans: list[Span]) -> list["_Part"]:
        """All spans together where few rows have the bits that each span has alone, or need not."""
        together = [self._part(shared, "", group) for group in _groups(spans)]
        keep_bits = (isinstance(part, _OrderedRows) or len(part.spans) == 1 for part in together)
        if self.is_fast or all(keep_bits):
            return together
        return [self._part(shared, "", [span]) for span in spans]

    def _part(self, shared: "_Pass", suffix: str, spans: list[Span]) -> "_Part":
        decoder, few = shared.decoder, _fits_few(shared.decoder, suffix, _num_rows(spans))
        if few and self.is_fast:
            return _WeighedRows(shared, suffix, spans)
        lengths = {run.eager_tokens for _, run in spans}
        splits = _find_order(decoder, suffix, max(lengths)) if few and len(lengths) == 1 else None
        if splits is not None:
            return _OrderedRows(shared, suffix, spans, splits)
        if _num_rows(spans) < min(lengths) <= few_rows.MAX_ROWS:
            raise RuntimeError(f"the order of the sums of {max(lengths)} und rows is not known")
        return _Part(shared, suffix, spans)

    def keeps_order(self, decoder: Decoder, num_rows: int) -> bool:
        """As in `Stack`; decided once for each number, outside of graph captures."""
        if not _fits_few(decoder, "", num_rows):
            return False
        return self.is_fast or _find_order(decoder, "", num_rows) is not None

    def project(self, x: Tensor, linear: torch.nn.Linear) -> Tensor:
        """The product of x [M, K] with a linear layer without bias: [M, N]."""
        if few_rows.fits(x.shape[0], linear.weight):
            splits = 1 if self.is_fast else splits_of(x.shape[0], linear)
            if splits is not None:
                return few_rows.linear(x, linear.weight, splits)
        return linear(x)


def _num_rows(spans: list[Span]) -> int:
    return spans[-1][0].stop - spans[0][0].start


def _fits_few(decoder: Decoder, suffix: str, num_rows: int) -> bool:
    """Whether all products of that many rows of an expert have kernels of few rows."""
    # By sizes and type, which all layers share.
    linears = decoder.layers[0].linears(suffix)
    return all(few_rows.fits(num_rows, linear.weight) for linear in linears)


def _find_order(
    decoder: Decoder, suffix: str, num_rows: int
) -> dict[torch.nn.Linear, int] | None:
    """The splits of all products of that many rows of an expert, if there are kernels for them."""
    layers = [layer.linears(suffix) for layer in decoder.layers]
    splits = {linear: splits_of(num_rows, linear) for layer in layers for linear in layer}
    has_kernels = all(few_rows.fits_splits(*map(splits.get, layer)) for layer in layers)
    return splits if has_kernels else None


def _turn_splits(decoder: Decoder, num_rows: int) -> int | None:
    """The splits of down where turns of that many rows fit `TextLayers`: two of all attention's."""
    splits = _find_order(decoder, "", num_rows)
    if splits is None:
        return None
    found = {tuple(splits[linear] for linear in layer.linears()) for layer in decoder.layers}
    if len(found) > 1:
        return None
    *attention, _, _, down = found.pop()
    return down if set(attention) == {2} else None


def _spans(append: CacheAppend, experts: ExpertOrder) -> tuple[list[Span], list[Span]]:
    """The runs of an append with the rows that they have, und and gen."""
    und, gen, start = [], [], 0
    for run in append.runs:
        span = (slice(start, start + run.num_tokens), run)
        (und if start < experts.num_und else gen).append(span)
        start += run.num_tokens
    return und, gen


def _groups(spans: list[Span]) -> list[list[Span]]:
    """Neighbouring spans that go through products together: as many as have PART_ROWS in all."""
    groups: list[list[Span]] = []
    for span in spans:
        if groups and _num_rows([groups[-1][0], span]) <= PART_ROWS:
            groups[-1].append(span)
        else:
            groups.append([span])
    return groups


def _product(x: Tensor, linear: torch.nn.Linear) -> Tensor:
    """A linear layer on x [M, K]: [M, N], the bits of cuBLAS."""
    if many_rows.fits_linear(x, linear.weight, linear.bias):
        return many_rows.linear(x, linear.weight, linear.bias)
    return linear(x)


def _each(
    und: list["_Part"], gen: list["_Part"], work: Callable, side: torch.cuda.Stream | None
) -> None:
    """Does `work` for each part; for the und parts on the side stream if there is one.

    What both streams read or write was made before they part, and outlives their joining: caches,
    weights and what a `_Pass` holds. What an und part makes for itself stays on the side stream.
    """
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

    def __init__(self, decoder: Decoder, x: Tensor, rotary: Rotary):
        config, num_rows = decoder.config, x.shape[0]
        self.decoder = decoder
        self.eps = config.rms_norm_eps
        self.rotary = rotary
        self.index = 0
        self.x = x.contiguous()
        self.other = torch.empty_like(self.x)
        self.normed = torch.empty_like(self.x)
        shape = (num_rows, config.num_heads, config.head_size)
        self.queries = torch.empty(shape, dtype=x.dtype, device=x.device)


class _SpanViews(NamedTuple):
    """The rows of one span in the tensors of a pass, cut out once for all layers."""

    run: CacheRun
    of_part: slice  # counted from the first row of the part
    tables: tuple[Tensor, Tensor]  # cosines and sines, fp32 [rows, 1, H]
    queries: Tensor  # [rows, N, H]
    attended: Tensor  # [rows, N, H]


class _Part:
    """Neighbouring rows of one expert on their way: they meet other rows in a cache only."""

    def __init__(self, shared: _Pass, suffix: str, spans: list[Span]):
        self.shared = shared
        self.suffix = suffix
        self.spans = spans
        self.rows = slice(spans[0][0].start, spans[-1][0].stop)
        self.rows_alone = spans[0][1].eager_tokens
        self.x, self.other = shared.x[self.rows], shared.other[self.rows]
        self.normed = shared.normed[self.rows]
        self.streams: list[torch.cuda.Stream] = []
        self._views = [self._view(rows, run) for rows, run in spans]
        self._joint_read = self._join_reads() if len(spans) > 1 else None

    def _view(self, rows: slice, run: CacheRun) -> _SpanViews:
        shared, queries = self.shared, self.shared.queries[rows]
        return _SpanViews(
            run=run,
            of_part=slice(rows.start - self.rows.start, rows.stop - self.rows.start),
            tables=(shared.rotary.cos[rows], shared.rotary.sin[rows]),
            queries=queries,
            # What was normed is read by the projections to heads, and written anew behind the
            # attention's own projection: in between its memory is free.
            attended=shared.normed[rows].view(queries.shape),
        )

    def start(self, layer: DecoderLayer) -> None:
        """The first norm, and the projections of the first layer."""
        self._norm(self._own(layer, "input_layernorm").weight)
        self._store_heads(layer, 0)

    def finish(self, layer: DecoderLayer, following: DecoderLayer | None) -> None:
        """From the attention of one layer to the projections of the following one."""
        norm = self._own(layer, "post_attention_layernorm").weight
        self._add_product(self._attend(), self._own(layer.self_attn, "o_proj"), norm)
        mlp = self._own(layer, "mlp")
        inner = self._swiglu(mlp.gate_proj, mlp.up_proj)
        if following is None:
            norm = self._own(self.shared.decoder, "norm").weight
            self._end(inner, mlp.down_proj, norm)
            return
        norm = self._own(following, "input_layernorm").weight
        self._add_product(inner, mlp.down_proj, norm)
        self._store_heads(following, self.shared.index + 1)

    def _own(self, owner: torch.nn.Module, name: str) -> torch.nn.Module:
        """The module of that name of this part's expert."""
        return getattr(owner, name + self.suffix)

    def _attend(self) -> Tensor:
        """Attention of all spans, each over its own cache: [rows, N * H]."""
        index = self.shared.index
        if self._joint_read is not None:
            caches = [span.run.memory(index) for span in self._views]
            queries = self.shared.queries[self.rows]
            self._joint_read.attend(queries, caches, self.normed.view(queries.shape))
            return self.normed
        for span in self._views:
            span.run.attend(index, span.queries, span.attended)
        return self.normed

    def _join_reads(self) -> JointRead | None:
        runs = [span.run for span in self._views]
        keys = [run.cache.keys[0] for run in runs]
        return JointRead.of([run.read for run in runs], keys, self._views[0].queries)

    def _store_heads(self, layer: DecoderLayer, index: int) -> None:
        """Projects to heads; norm and RoPE of q and k; keys and values go into the caches."""
        shared, module = self.shared, layer.self_attn
        q, k, v = self._project([self._own(module, f"{name}_proj") for name in "qkv"])
        rounding = shared.rotary.rounding
        norms = (self._own(module, "q_norm").weight, self._own(module, "k_norm").weight)
        for span in self._views:
            rows = span.of_part
            qk_norm_rope_store(
                (q[rows], k[rows], v[rows]),
                norms,
                span.tables,
                span.run.places,
                (span.queries, *span.run.memory(index)),
                shared.eps,
                rounding.gen if self.suffix else rounding.und,
            )

    def _norm(self, weight: Tensor) -> None:
        rms_norm(self.x, weight, self.shared.eps, self.normed, self.rows_alone)

    def _add_product(self, inner: Tensor, linear: torch.nn.Linear, norm_weight: Tensor) -> None:
        """Adds a product to the rows and normalises the sum."""
        if many_rows.fits_add(self.x, inner, linear.weight):
            many_rows.add_linear(self.x, inner, linear.weight)
            self._norm(norm_weight)
        else:
            self._add_and_norm(_product(inner, linear), norm_weight)

    def _add_and_norm(self, delta: Tensor, norm_weight: Tensor) -> None:
        norm = (norm_weight, self.shared.eps)
        add_rms_norm(self.x, delta, *norm, self.other, self.normed, self.rows_alone)
        self.x, self.other = self.other, self.x

    def _end(self, inner: Tensor, linear: torch.nn.Linear, norm_weight: Tensor) -> None:
        """As `_add_product`, for the last product of all."""
        self._add_product(inner, linear, norm_weight)

    def _project(self, linears: list[torch.nn.Linear]) -> tuple[Tensor, ...]:
        """Products of the normed rows, those behind the first on side streams if any."""
        x = self.normed
        streams = self.streams[: len(linears) - 1]
        main = torch.cuda.current_stream() if streams else None
        for stream in streams:
            stream.wait_stream(main)
        results = [_product(x, linears[0])]
        for i, linear in enumerate(linears[1:]):
            if streams:
                with torch.cuda.stream(streams[i]):
                    results.append(_product(x, linear))
            else:
                results.append(_product(x, linear))
        for stream in streams:
            main.wait_stream(stream)
        return tuple(results)

    def _swiglu(self, gate: torch.nn.Linear, up: torch.nn.Linear) -> Tensor:
        if many_rows.fits_swiglu(self.normed, gate.weight, up.weight):
            return many_rows.swiglu(self.normed, gate.weight, up.weight)
        return silu_mul(*self._project([gate, up]))


class _OrderedRows(_Part):
    """A part of few rows in the exact grade: products of `few_rows` in the order of cuBLAS.

    Its spans stand for as many rows each; every one gets the bits that cuBLAS gives it alone.
    """

    def __init__(
        self, shared: _Pass, suffix: str, spans: list[Span], splits: dict[torch.nn.Linear, int]
    ):
        super().__init__(shared, suffix, spans)
        self._splits = splits

    def _add_product(self, inner: Tensor, linear: torch.nn.Linear, norm_weight: Tensor) -> None:
        delta = few_rows.linear(inner, linear.weight, self._splits[linear])
        self._add_and_norm(delta, norm_weight)

    def _project(self, linears: list[torch.nn.Linear]) -> tuple[Tensor, ...]:
        weights, biases = zip(*((each.weight, each.bias) for each in linears), strict=True)
        splits = self._splits[linears[0]]
        return few_rows.project_heads(self.normed, weights, biases, splits)

    def _swiglu(self, gate: torch.nn.Linear, up: torch.nn.Linear) -> Tensor:
        return few_rows.swiglu(self.normed, gate.weight, up.weight)


class _WeighedRows(_Part):
    """A part of few rows in the fast grade: products of `few_rows`, norms in their epilogues."""

    def _norm(self, weight: Tensor) -> None:
        self._weighed = few_rows.weigh(self.x, weight, self.shared.eps)

    def _add_product(self, inner: Tensor, linear: torch.nn.Linear, norm_weight: Tensor) -> None:
        norm = (norm_weight, self.shared.eps)
        self._weighed = few_rows.add_product(self.x, inner, linear.weight, *norm)

    def _end(self, inner: Tensor, linear: torch.nn.Linear, norm_weight: Tensor) -> None:
        self._add_product(inner, linear, norm_weight)
        rms_norm(self.x, norm_weight, self.shared.eps, self.normed)

    def _project(self, linears: list[torch.nn.Linear]) -> tuple[Tensor, ...]:
        weights, biases = zip(*((each.weight, each.bias) for each in linears), strict=True)
        return few_rows.project_heads(self._weighed, weights, biases)

    def _swiglu(self, gate: torch.nn.Linear, up: torch.nn.Linear) -> Tensor:
        return few_rows.swiglu(self._weighed, gate.weight, up.weight)
