"""The rollout's stack of layers with fused operators: norms, RoPE, cache writes, SwiGLU.

Computes what `Bagel.extend` computes layer by layer in its eager form, bit for bit, with the same
matrix products.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from modeling.bagel.cache import CacheAppend
from modeling.bagel.config import LlmConfig
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

    def __init__(self, side_by_side: bool):
        self._streams = [torch.cuda.Stream() for _ in range(3)] if side_by_side else []

    def run(
        self, decoder: Decoder, x: Tensor, experts: ExpertOrder, rotary: Rotary, append: CacheAppend
    ) -> Tensor:
        """x [S, D] in expert order -> [S, D] after all layers and the final norm."""
        shared = _Pass(decoder, x, experts, rotary, append)
        streams = self._streams if torch.cuda.is_current_stream_capturing() else []
        halves = [_Half(shared, "", slice(0, experts.num_und), streams[1:])]
        if experts.num_gen:
            halves.append(_Half(shared, GEN, slice(experts.num_und, x.shape[0]), []))
        is_small = experts.num_und <= SIDE_BY_SIDE_ROWS
        side = streams[0] if streams and is_small and len(halves) > 1 else None
        layers = list(decoder.layers)
        _each(halves, lambda half: half.start(layers[0]), side)
        for index, layer in enumerate(layers):
            following = layers[index + 1] if index + 1 < len(layers) else None
            _each(halves, partial(_Half.finish, layer=layer, following=following), side)
            shared.index += 1
        return shared.normed


def _each(halves: list["_Half"], work: Callable, side: torch.cuda.Stream | None) -> None:
    """Does `work` for each expert; on a side stream for the first one if there is one."""
    if side is None:
        for half in halves:
            work(half)
        return
    main = torch.cuda.current_stream()
    side.wait_stream(main)
    with torch.cuda.stream(side):
        work(halves[0])
    for half in halves[1:]:
        work(half)
    main.wait_stream(side)


class _Pass:
    """What the experts share in one pass: inputs, and queries and norms of all rows."""

    def __init__(
        self, decoder: Decoder, x: Tensor, experts: ExpertOrder, rotary: Rotary, append: CacheAppend
    ):
        config, num_rows = decoder.config, x.shape[0]
        self.decoder = decoder
        self.eps = config.rms_norm_eps
        self.rotary = rotary
        self.append = append
        self.index = 0
        self.x = x.contiguous()
        self.other = torch.empty_like(self.x)
        self.delta = torch.empty_like(self.x)
        self.normed = torch.empty_like(self.x)
        shape = (num_rows, config.num_heads, config.head_size)
        self.queries = torch.empty(shape, dtype=x.dtype, device=x.device)


class _Half:
    """The rows of one expert, a run of the append: they meet other rows in the cache only."""

    def __init__(
        self, shared: _Pass, suffix: str, part: slice, streams: list[torch.cuda.Stream]
    ):
        self.shared = shared
        self.run = 1 if suffix else 0
        self.suffix = suffix
        self.part = part
        self.x, self.other = shared.x[part], shared.other[part]
        self.delta, self.normed = shared.delta[part], shared.normed[part]
        self.streams = streams if self.x.shape[0] <= SIDE_BY_SIDE_ROWS else []

    def start(self, layer: DecoderLayer) -> None:
        """The first norm, and the projections of the first layer."""
        weight = getattr(layer, "input_layernorm" + self.suffix).weight
        rms_norm(self.x, weight, self.shared.eps, self.normed)
        self._project_heads(layer, 0)

    def finish(self, layer: DecoderLayer, following: DecoderLayer | None) -> None:
        """From the attention of one layer to the projections of the following one."""
        shared = self.shared
        queries = shared.queries[self.part]
        out = shared.append.read_run(shared.index, self.run, queries).flatten(1)
        self._multiply(out, layer.self_attn, "o_proj")
        self._add_and_norm(layer, "post_attention_layernorm")
        mlp = getattr(layer, "mlp" + self.suffix)
        inner = silu_mul(*self._apply([mlp.gate_proj, mlp.up_proj], self.normed))
        torch.mm(inner, mlp.down_proj.weight.t(), out=self.delta)
        if following is None:
            self._add_and_norm(shared.decoder, "norm")
            return
        self._add_and_norm(following, "input_layernorm")
        self._project_heads(following, shared.index + 1)

    def _add_and_norm(self, owner: torch.nn.Module, name: str) -> None:
        weight = getattr(owner, name + self.suffix).weight
        add_rms_norm(self.x, self.delta, weight, self.shared.eps, self.other, self.normed)
        self.x, self.other = self.other, self.x

    def _multiply(self, x: Tensor, owner: torch.nn.Module, name: str) -> None:
        torch.mm(x, getattr(owner, name + self.suffix).weight.t(), out=self.delta)

    def _project_heads(self, layer: DecoderLayer, index: int) -> None:
        shared, module, part = self.shared, layer.self_attn, self.part
        cache = shared.append.cache
        modules = [getattr(module, f"{name}_proj{self.suffix}") for name in "qkv"]
        weights = tuple(getattr(module, f"{name}_norm{self.suffix}").weight for name in "qk")
        rounding = shared.rotary.rounding
        qk_norm_rope_store(
            self._apply(modules, self.normed),
            weights,
            (shared.rotary.cos[part], shared.rotary.sin[part]),
            shared.append.places[part],
            (
                shared.queries[part],
                cache.keys[index].flatten(0, 1),
                cache.values[index].flatten(0, 1),
            ),
            shared.eps,
            rounding.gen if self.suffix else rounding.und,
        )

    def _apply(self, modules: list[torch.nn.Module], x: Tensor) -> tuple[Tensor, ...]:
        """All modules on x, those behind the first on side streams if there are any."""
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
