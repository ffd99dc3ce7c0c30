"""Draws the next text token from logits, without ever waiting for the device.

Legend: B samples, V vocabulary, C candidates.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

# Nucleus sampling looks at this many of the largest probabilities at most.
MAX_NUCLEUS_CANDIDATES = 1000


@dataclass(frozen=True)
class SamplingConfig:
    """How a token is drawn: `top_p < 1` excludes `top_k`; `top_k <= 0` means no limit.

    Raises ValueError for a temperature, `top_k` or `top_p` that no distribution belongs to.
    """

    do_sample: bool
    temperature: float
    top_k: int
    top_p: float

    def __post_init__(self) -> None:
        if self.do_sample and not (math.isfinite(self.temperature) and self.temperature > 0):
            raise ValueError(
                f"--text_temperature {self.temperature}: expected a finite number above 0 "
                "(greedy decoding is --do_sample False)"
            )
        if self.top_k < -1:
            raise ValueError(f"--top_k {self.top_k}: expected a count, or 0 or -1 for no limit")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"--top_p {self.top_p}: expected 0 < top_p <= 1 (1 switches it off)")


def sample_tokens(
    logits: Tensor, config: SamplingConfig, generator: torch.Generator | None = None
) -> tuple[Tensor, Tensor]:
    """Draws one token per row.

    Args:
        logits: [B, V], any float type; computed in fp32.
        config: how to draw.
        generator: stream of the draws, on the device of `logits`; unused when greedy.

    Returns:
        tokens int64 [B], and probs fp32 [B]: the token's probability under the softmax of the
        untempered logits. A row with a NaN or +inf logit reports NaN: looking for it here would
        make the host wait, so the caller's check of the recorded probabilities has to find it.
    """
    logits = logits.float()
    probs = torch.softmax(logits, dim=-1)
    if config.do_sample:
        tokens = _draw(logits / config.temperature, config, generator)
    else:
        tokens = logits.argmax(dim=-1)
    return tokens, probs.gather(-1, tokens[:, None]).squeeze(-1)


def _draw(logits: Tensor, config: SamplingConfig, generator: torch.Generator | None) -> Tensor:
    """Tempered logits [B, V] -> token ids [B]."""
    vocab_size = logits.shape[-1]
    if config.top_p < 1:
        probs = torch.softmax(logits, dim=-1)
        candidates = probs.topk(min(MAX_NUCLEUS_CANDIDATES, vocab_size), dim=-1)
        weights, ids = keep_nucleus(candidates.values, config.top_p), candidates.indices
    elif config.top_k > 0:
        candidates = logits.topk(min(config.top_k, vocab_size), dim=-1)
        weights, ids = torch.softmax(candidates.values, dim=-1), candidates.indices
    else:
        return draw_index(torch.softmax(logits, dim=-1), generator)
    return ids.gather(-1, draw_index(weights, generator)[:, None]).squeeze(-1)


def keep_nucleus(sorted_probs: Tensor, top_p: float) -> Tensor:
    """Zeroes all but the smallest prefix whose mass exceeds `top_p`, and renormalises the rest.

    `sorted_probs` [B, C] descends in each row. A token stays if the mass before it is at most
    `top_p`: so the token that crosses stays, and the first one always does.
    """
    mass_before = sorted_probs.cumsum(dim=-1).roll(1, dims=-1)
    mass_before[..., 0] = 0
    kept = sorted_probs.masked_fill(mass_before > top_p, 0)
    return kept / kept.sum(dim=-1, keepdim=True)


def draw_index(probs: Tensor, generator: torch.Generator | None) -> Tensor:
    """`torch.multinomial(probs, 1)` [B, C] -> [B]: the same draws from the same generator.

    multinomial, too, takes the largest p / Exp(1) (Gumbel-max trick), but checks its input first:
    several more launches a token, and where a row is broken a device assert, after which the
    process can use the GPU no more, instead of a NaN that says which sample it was.
    """
    waiting = torch.empty_like(probs).exponential_(1, generator=generator)
    return (probs / waiting).argmax(dim=-1)
