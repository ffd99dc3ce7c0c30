"""Draws the next text token from logits, without ever waiting for the device.

Legend: B samples, V vocabulary, C candidates.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

# Nucleus sampling looks at this many of the largest probabilities at most.
MAX_NUCLEUS_CANDIDATES = 1000

TopK = Callable[[Tensor, int], tuple[Tensor, Tensor]]
"""The C largest of logits [B, V] in descending order and their tokens int64, both [B, C]."""


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

    @property
    def takes_nucleus(self) -> bool:
        """Whether tokens are drawn from a nucleus (Holtzman et al. 2020)."""
        return self.do_sample and self.top_p < 1


def sample_tokens(
    logits: Tensor,
    config: SamplingConfig,
    generator: torch.Generator | None = None,
    topk: TopK = torch.topk,
) -> tuple[Tensor, Tensor]:
    """Draws one token per row.

    Args:
        logits: [B, V], any float type; computed in fp32.
        config: how to draw.
        generator: stream of the draws, on the device of `logits`; unused when greedy.
        topk: takes the largest logits, as torch.topk does.

    Returns:
        tokens int64 [B], and probs fp32 [B]: the token's probability under the softmax of the
        untempered logits; without gradient. A row with a NaN or +inf logit reports NaN: looking
        for it here would make the host wait, so the caller's check of the recorded probabilities
        has to find it.
    """
    given, logits = logits.detach(), logits.detach().float()
    if not config.do_sample:
        tokens = logits.argmax(dim=-1, keepdim=True)
        masses, totals = masses_of(logits, logits.gather(-1, tokens))
    elif config.takes_nucleus:
        # In the type as given: half as many digits to select by as in fp32.
        values, ids = topk(given, min(MAX_NUCLEUS_CANDIDATES, given.shape[-1]))
        masses, totals = masses_of(logits, values[:, :1].float(), config.temperature)
        probs = masses[-1].gather(-1, ids) / totals[-1]
        drawn = draw_index(keep_nucleus(probs, config.top_p), generator)
        tokens = ids.gather(-1, drawn[:, None])
    elif config.top_k > 0:
        values, ids = topk(given, min(config.top_k, given.shape[-1]))
        largest = values.float()
        masses, totals = masses_of(logits, largest[:, :1])
        drawn = draw_index(torch.softmax(largest / config.temperature, dim=-1), generator)
        tokens = ids.gather(-1, drawn[:, None])
    else:
        masses, totals = masses_of(logits, logits.amax(dim=-1, keepdim=True), config.temperature)
        tokens = draw_index(masses[-1] / totals[-1], generator)[:, None]
    return tokens.squeeze(-1), (masses[0].gather(-1, tokens) / totals[0]).squeeze(-1)


def masses_of(logits: Tensor, largest: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """What softmaxes are made of: exponentials and their sums, of plain and of tempered logits.

    Not torch.softmax: over a few long rows it keeps only as many thread blocks busy as there are
    rows, while elementwise operators and sums spread over the whole GPU.

    Args:
        logits: fp32 [B, V].
        largest: fp32 [B, 1], the largest logit of each row.

    Returns:
        exp((logits - largest) / temperature) [1 or 2, B, V] and its sums over V [1 or 2, B, 1]:
        the plain ones first, those at `temperature` last. At temperature 1 they are the same.
    """
    masses = logits.new_empty(1 if temperature == 1 else 2, *logits.shape)
    torch.sub(logits, largest, out=masses[0])
    if temperature != 1:
        torch.div(masses[0], temperature, out=masses[1])
    masses.exp_()
    return masses, masses.sum(dim=-1, keepdim=True)


def keep_nucleus(sorted_probs: Tensor, top_p: float) -> Tensor:
    """Zeroes all but the smallest prefix whose mass exceeds `top_p`, and renormalises the rest.

    `sorted_probs` [B, C] descends in each row. A token stays if the mass before it is at most
    `top_p`: so the token that crosses stays, and the first one always does.
    """
    mass = sorted_probs.cumsum(dim=-1)
    kept = sorted_probs.clone()
    kept[..., 1:].masked_fill_(mass[..., :-1] > top_p, 0)
    return kept / kept.sum(dim=-1, keepdim=True)


def draw_index(probs: Tensor, generator: torch.Generator | None) -> Tensor:
    """`torch.multinomial(probs, 1)` [B, C] -> [B]: the same draws from the same generator.

    multinomial, too, takes the largest p / Exp(1) (Gumbel-max trick), but checks its input first:
    several more launches a token, and where a row is broken a device assert, after which the
    process can use the GPU no more, instead of a NaN that says which sample it was.
    """
    waiting = torch.empty_like(probs).exponential_(1, generator=generator)
    return (probs / waiting).argmax(dim=-1)
