"""The mixture-of-transformers decoder: two parameter sets, one attention.

The residual stream is kept in *expert order*: all tokens of the und expert first, then all of the
gen expert. Each expert works on its own contiguous half, and only attention joins them.

Shape letters: S packed tokens, U of them und, G gen, D hidden, N heads, K KV heads, H head size,
V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from modeling.bagel.config import LlmConfig
from modeling.bagel.layers import RMSNorm, rotary_table, rotate

GEN = "_moe_gen"
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Attention of q [S, N, H] over k and v [S, K, H] and what they join: [S, N, H], expert order."""


@dataclass(frozen=True)
class ExpertOrder:
    """How packed tokens split between the experts.

    `order` (int64 [S]) lists document positions in expert order, `inverse` undoes it. Both are
    None for tokens that are all und and in document order already.
    """

    num_und: int
    num_gen: int
    order: Tensor | None
    inverse: Tensor | None

    @staticmethod
    def from_positions(und: Tensor, gen: Tensor) -> "ExpertOrder":
        """und, gen: int64 document positions, in any order, that cover every token once."""
        order = torch.cat((und, gen))
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(order.numel(), device=order.device)
        return ExpertOrder(und.numel(), gen.numel(), order, inverse)

    def to_document(self, x: Tensor) -> Tensor:
        return x if self.inverse is None else x[self.inverse]

    def to_expert(self, x: Tensor) -> Tensor:
        return x if self.order is None else x[self.order]

    def reordered(self, attend: Attend) -> Attend:
        """Attention in expert order by one that wants document order."""

        def attend_experts(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return self.to_expert(attend(*(self.to_document(x) for x in (q, k, v))))

        return attend_experts

    def apply(self, x: Tensor, und: Callable, gen: Callable) -> Tensor:
        """und on the first U rows of x, gen on the rest."""
        if self.num_gen == 0:
            return und(x)
        return torch.cat((und(x[: self.num_und]), gen(x[self.num_und :])))


@dataclass(frozen=True)
class QkRounding:
    """Whether q and k are rounded to the compute type between their norm and RoPE, per expert."""

    und: bool = False
    gen: bool = False


@dataclass(frozen=True)
class Rotary:
    """Cosines and sines [S, 1, H] (fp32, expert order) and where rounding happens."""

    cos: Tensor
    sin: Tensor
    rounding: QkRounding


class Attention(nn.Module):
    """Per-expert projections and per-head q/k norms around one shared attention."""

    def __init__(self, config: LlmConfig):
        super().__init__()
        self.head_size = config.head_size
        width, kv_width = config.hidden_size, config.num_kv_heads * config.head_size
        for suffix in ("", GEN):
            self.add_module("q_proj" + suffix, nn.Linear(width, width))
            self.add_module("k_proj" + suffix, nn.Linear(width, kv_width))
            self.add_module("v_proj" + suffix, nn.Linear(width, kv_width))
            self.add_module("o_proj" + suffix, nn.Linear(width, width, bias=False))
            self.add_module("q_norm" + suffix, RMSNorm(self.head_size, config.rms_norm_eps))
            self.add_module("k_norm" + suffix, RMSNorm(self.head_size, config.rms_norm_eps))

    def forward(self, x: Tensor, experts: ExpertOrder, rotary: Rotary, attend: Attend) -> Tensor:
        """x [S, D] in expert order -> [S, D] in expert order."""
        halves = [self._project(x[: experts.num_und], "", 0, rotary)]
        if experts.num_gen:
            halves.append(self._project(x[experts.num_und :], GEN, experts.num_und, rotary))
        q, k, v = (
            torch.cat(parts) if len(parts) > 1 else parts[0] for parts in zip(*halves, strict=True)
        )
        return experts.apply(attend(q, k, v).flatten(1), self.o_proj, self.o_proj_moe_gen)

    def _project(self, x: Tensor, suffix: str, start: int, rotary: Rotary) -> tuple:
        heads = (x.shape[0], -1, self.head_size)
        cos, sin = (table[start : start + x.shape[0]] for table in (rotary.cos, rotary.sin))
        early = rotary.rounding.gen if suffix else rotary.rounding.und
        q, k = (
            self._norm_and_rotate(
                getattr(self, f"{name}_proj{suffix}")(x).view(heads),
                getattr(self, f"{name}_norm{suffix}"),
                cos,
                sin,
                early,
            )
            for name in ("q", "k")
        )
        return q, k, getattr(self, "v_proj" + suffix)(x).view(heads)

    @staticmethod
    def _norm_and_rotate(x: Tensor, norm: RMSNorm, cos: Tensor, sin: Tensor, early: bool) -> Tensor:
        wide = x if early else x.float()
        return rotate(norm(wide), cos, sin).to(x.dtype)


class SwiGlu(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, config: LlmConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    """Norm, attention, residual, norm, MLP, residual; everything but attention per expert."""

    def __init__(self, config: LlmConfig):
        super().__init__()
        self.checkpoint_activations = False
        self.self_attn = Attention(config)
        for suffix in ("", GEN):
            self.add_module("mlp" + suffix, SwiGlu(config))
            for name in ("input_layernorm", "post_attention_layernorm"):
                norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
                self.add_module(name + suffix, norm)

    def linears(self, suffix: str = "") -> list[nn.Linear]:
        """All linear layers of one expert: q, k, v, o, gate, up, down."""
        heads = [getattr(self.self_attn, f"{name}_proj{suffix}") for name in "qkvo"]
        mlp = getattr(self, "mlp" + suffix)
        return [*heads, mlp.gate_proj, mlp.up_proj, mlp.down_proj]

    def forward(self, x: Tensor, experts: ExpertOrder, rotary: Rotary, attend: Attend) -> Tensor:
        """The learner's entry: hooks of FSDP2 gather this layer's weights around it."""
        if self.checkpoint_activations and torch.is_grad_enabled():
            return checkpoint(self.run, x, experts, rotary, attend, use_reentrant=False)
        return self.run(x, experts, rotary, attend)

    def run(self, x: Tensor, experts: ExpertOrder, rotary: Rotary, attend: Attend) -> Tensor:
        """The layer itself; the rollout calls it directly on resident weights, past the hooks."""
        normed = experts.apply(x, self.input_layernorm, self.input_layernorm_moe_gen)
        x = x + self.self_attn(normed, experts, rotary, attend)
        normed = experts.apply(
            x, self.post_attention_layernorm, self.post_attention_layernorm_moe_gen
        )
        return x + experts.apply(normed, self.mlp, self.mlp_moe_gen)


class Decoder(nn.Module):
    """Token embedding, the stack of layers, the final per-expert norm."""

    def __init__(self, config: LlmConfig):
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.norm_moe_gen = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def rotary(self, rope_ids: Tensor, experts: ExpertOrder, rounding: QkRounding) -> Rotary:
        """rope_ids int64 [S] in document order; read by every layer of one forward."""
        tables = rotary_table(rope_ids, self.config.head_size, self.config.rope_theta)
        cos, sin = (experts.to_expert(table) for table in tables)
        return Rotary(cos, sin, rounding)

    def final_norm(self, x: Tensor, experts: ExpertOrder) -> Tensor:
        return experts.apply(x, self.norm, self.norm_moe_gen)


class MotCausalLM(nn.Module):
    """The decoder and its text head."""

    def __init__(self, config: LlmConfig):
        super().__init__()
        self.model = Decoder(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
