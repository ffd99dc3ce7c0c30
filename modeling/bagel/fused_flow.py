"""The rollout's stack of layers with fused operators: norms, RoPE, cache writes, SwiGLU.

Computes what `Bagel.extend` computes layer by layer in its eager form, bit for bit, with the same
matrix products. Rows stay in expert order; only queries go to document order and back.
"""

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
        return f"hidden size {config.hidden_size}, expected a multiple of 4 from 128 on"
    if config.head_size != 128:
        return f"head size {config.head_size}, expected 128"
    return None


class FusedStack:
    """Runs all layers over new tokens. Use under no_grad, on resident bf16 weights.

    `side_by_side` runs independent projections of few rows on streams of their own, inside a
    graph capture only, where the graph keeps their memory apart.
    """

    def __init__(self, side_by_side: bool):
        self._streams = [torch.cuda.Stream() for _ in range(2)] if side_by_side else []

    def run(
        self, decoder: Decoder, x: Tensor, experts: ExpertOrder, rotary: Rotary, append: CacheAppend
    ) -> Tensor:
        """x [S, D] in expert order -> [S, D] after all layers and the final norm."""
        work = _Work(decoder, x, experts, rotary, append)
        if x.shape[0] <= SIDE_BY_SIDE_ROWS and torch.cuda.is_current_stream_capturing():
            work.streams = self._streams
        for index, layer in enumerate(decoder.layers):
            work.norm(layer, "input_layernorm")
            work.attention(index, layer)
            work.norm(layer, "post_attention_layernorm")
            work.mlp(layer)
        work.norm(decoder, "norm")
        return work.normed


class _Work:
    """The running state of one pass: residual stream, its norm, and what is still to be added."""

    def __init__(
        self, decoder: Decoder, x: Tensor, experts: ExpertOrder, rotary: Rotary, append: CacheAppend
    ):
        config = decoder.config
        self.eps = config.rms_norm_eps
        self.streams: list[torch.cuda.Stream] = []
        self.append = append
        self.rotary = rotary
        self.experts = experts
        num_und, num_rows = experts.num_und, x.shape[0]
        self.halves = [("", slice(0, num_und))]
        if experts.num_gen:
            self.halves.append((GEN, slice(num_und, num_rows)))
        self.x = x.contiguous()
        self.delta: Tensor | None = None
        self.total = torch.empty_like(self.x)
        self.normed = torch.empty_like(self.x)
        self.spare = torch.empty_like(self.x)
        shape = (num_rows, config.num_heads, config.head_size)
        self.queries = torch.empty(shape, dtype=x.dtype, device=x.device)
        self.document = experts.order
        if self.document is None:
            self.document = torch.arange(num_rows, device=x.device)
        self.slots = append.places[self.document]

    def norm(self, owner: torch.nn.Module, name: str) -> None:
        """Adds what is pending to the residual stream and norms it, each expert by its weight."""
        for suffix, part in self.halves:
            weight = getattr(owner, name + suffix).weight
            out = self.normed[part]
            if self.delta is None:
                rms_norm(self.x[part], weight, self.eps, out)
            else:
                delta, total = self.delta[part], self.total[part]
                add_rms_norm(self.x[part], delta, weight, self.eps, total, out)
        if self.delta is not None:
            self.x, self.total, self.delta = self.total, self.x, None

    def attention(self, index: int, layer: DecoderLayer) -> None:
        module = layer.self_attn
        cache = self.append.cache
        targets = (cache.keys[index].flatten(0, 1), cache.values[index].flatten(0, 1))
        rounding = self.rotary.rounding
        for suffix, part in self.halves:
            projections = [getattr(module, f"{name}_proj{suffix}") for name in "qkv"]
            projected = self._apply(projections, self.normed[part])
            weights = tuple(getattr(module, f"{name}_norm{suffix}").weight for name in "qk")
            qk_norm_rope_store(
                projected,
                weights,
                (self.rotary.cos[part], self.rotary.sin[part]),
                (self.document[part], self.slots[part]),
                (self.queries, *targets),
                self.eps,
                rounding.gen if suffix else rounding.und,
            )
        out = self.append.read_attention(index, self.queries).flatten(1)
        self._project(self.experts.to_expert(out), module, "o_proj")

    def mlp(self, layer: DecoderLayer) -> None:
        delta = self.spare
        for suffix, part in self.halves:
            module = getattr(layer, "mlp" + suffix)
            x = self.normed[part]
            inner = silu_mul(*self._apply([module.gate_proj, module.up_proj], x))
            torch.mm(inner, module.down_proj.weight.t(), out=delta[part])
        self.delta = delta

    def _project(self, x: Tensor, module: torch.nn.Module, name: str) -> None:
        delta = self.spare
        for suffix, part in self.halves:
            weight = getattr(module, name + suffix).weight
            torch.mm(x[part], weight.t(), out=delta[part])
        self.delta = delta

    def _apply(self, modules: list[torch.nn.Module], x: Tensor) -> tuple[Tensor, ...]:
        """All modules on x, those behind the first on side streams if there are any."""
        main = torch.cuda.current_stream() if self.streams else None
        results = []
        for stream in self.streams[: len(modules) - 1]:
            stream.wait_stream(main)
        for i, module in enumerate(modules):
            if self.streams and i > 0:
                with torch.cuda.stream(self.streams[i - 1]):
                    results.append(module(x))
            else:
                results.append(module(x))
        for stream in self.streams[: len(modules) - 1]:
            main.wait_stream(stream)
        return tuple(results)
