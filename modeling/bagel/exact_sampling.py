"""Nucleus sampling in fewer launches, with the bits that `sample_tokens` has on a GPU.

Sums, running sums and random numbers stay those of PyTorch, in its order; what lies between is done
by four Triton kernels. Shape letters: B samples, V vocabulary, C candidates.
"""

import logging
from dataclasses import dataclass
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs
from triton.language.extra import libdevice

from modeling.bagel.fused_ops import EXACT, num_blocks, power_of_2
from modeling.bagel.layers import FoundByTrying, scattered
from modeling.bagel.sampling import (
    MAX_NUCLEUS_CANDIDATES,
    SamplingConfig,
    TopK,
    masses_of,
    sample_tokens,
)

BLOCK = 1024
NUM_WARPS = 8
"""Four numbers a thread: stores of 16 bytes, with bf16 loaded in the same order."""
TRIED_ROWS = 16
logger = logging.getLogger("faster_r3")


# Chosen here, not by a flag inside: Triton compares the globals of a kernel at every launch.
if knobs.runtime.interpret:

    # The interpreter knows only Triton's own functions, and no instructions of a GPU.
    @triton.jit
    def _exp(x):
        return tl.exp(x)

    @triton.jit
    def _divide(x, y):
        return tl.div_rn(x, y)
else:
    # The instructions of CUDA's expf: what they flush to zero inside would be lost anyway, and
    # subnormal results stay. tl.exp is a fast one.
    _exp = libdevice.exp

    @triton.jit
    def _divide(x, y):
        # In Triton 3.5 tl.div_rn takes subnormal numbers for zero.
        return tl.inline_asm_elementwise(
            "div.rn.f32 $0, $1, $2;", "=f,f,f", [x, y], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def _masses_kernel(
    logits_ptr,
    largest_ptr,
    mass_ptr,
    vocab_size,
    largest_stride,
    temperature,
    factor,
    IS_TEMPERED: tl.constexpr,
    DIVIDES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A block of a row: exponentials of its plain logits and, behind all rows, of tempered ones."""
    row = tl.program_id(0).to(tl.int64)
    places = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = places < vocab_size
    largest = tl.load(largest_ptr + row * largest_stride).to(tl.float32)
    logits = tl.load(logits_ptr + row * vocab_size + places, mask=inside, other=0.0)
    below = logits.to(tl.float32) - largest
    tl.store(mass_ptr + row * vocab_size + places, _exp(below), mask=inside)
    if IS_TEMPERED:
        tempered = _divide(below, temperature) if DIVIDES else below * factor
        row += tl.num_programs(0)
        tl.store(mass_ptr + row * vocab_size + places, _exp(tempered), mask=inside)


@triton.jit
def _probs_kernel(
    mass_ptr,
    total_ptr,
    id_ptr,
    prob_ptr,
    vocab_size,
    num_candidates,
    IS_TEMPERED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One row: the probabilities of its candidates, from the last masses that there are of it."""
    row = tl.program_id(0).to(tl.int64)
    last = row + tl.num_programs(0) if IS_TEMPERED else row
    place = tl.arange(0, BLOCK)
    inside = place < num_candidates
    at = row * num_candidates + place
    ids = tl.load(id_ptr + at, mask=inside, other=0)
    masses = tl.load(mass_ptr + last * vocab_size + ids, mask=inside, other=0.0)
    tl.store(prob_ptr + at, _divide(masses, tl.load(total_ptr + last)), mask=inside)


@triton.jit
def _drop_kernel(sum_ptr, prob_ptr, num_candidates, top_p, BLOCK: tl.constexpr):
    """One row: zeroes the candidates behind the nucleus, by the sums up to those before them."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK)
    at = row * num_candidates + place
    follows = (place > 0) & (place < num_candidates)
    before = tl.load(sum_ptr + at - 1, mask=follows, other=0.0)
    tl.store(prob_ptr + at, tl.zeros_like(before), mask=follows & (before > top_p))


@triton.jit
def _draw_kernel(
    kept_ptr,
    kept_sum_ptr,
    waiting_ptr,
    id_ptr,
    mass_ptr,
    total_ptr,
    token_ptr,
    prob_ptr,
    vocab_size,
    num_candidates,
    BLOCK: tl.constexpr,
):
    """One row: takes the largest p / Exp(1), the first of equal ones, and its plain probability."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK)
    inside = place < num_candidates
    at = row * num_candidates + place
    kept = tl.load(kept_ptr + at, mask=inside, other=0.0)
    waiting = tl.load(waiting_ptr + at, mask=inside, other=1.0)
    scores = _divide(_divide(kept, tl.load(kept_sum_ptr + row)), waiting)
    # None is negative, so they ascend as their bits do. To argmax, NaN is above all others.
    keys = tl.where(scores == scores, scores.to(tl.int32, bitcast=True), 0x7FFFFFFF)
    keys = tl.where(inside, keys, -1)
    drawn = tl.min(tl.where(keys == tl.max(keys, axis=0), place, BLOCK), axis=0)
    token = tl.load(id_ptr + row * num_candidates + drawn)
    mass = tl.load(mass_ptr + row * vocab_size + token)
    tl.store(token_ptr + row, token)
    tl.store(prob_ptr + row, _divide(mass, tl.load(total_ptr + row)))


@dataclass(frozen=True)
class Tempering:
    """How torch.div divides by a temperature: it multiplies by a factor instead, or it divides."""

    temperature: float
    factor: float
    divides: bool

    @property
    def is_needed(self) -> bool:
        """Whether there are masses of tempered logits beside the plain ones."""
        return self.temperature != 1


class ExactSampler:
    """Draws as `sample_tokens` does, with fewer launches where they give the same bits."""

    def __init__(self) -> None:
        self._temperings: FoundByTrying[Tempering | None] = FoundByTrying()

    def draw(
        self,
        logits: Tensor,
        config: SamplingConfig,
        generator: torch.Generator | None = None,
        topk: TopK = torch.topk,
    ) -> tuple[Tensor, Tensor]:
        """`sample_tokens`: same arguments, same tokens and probabilities.

        The first call for some vocabulary, type and config compares with it, and waits for the
        device. It has to be outside of graph captures: in them `sample_tokens` serves until there
        was one.
        """
        tempering = None
        if config.takes_nucleus and _fits(logits):
            key = (logits.shape[-1], logits.dtype, config, logits.device)
            find = partial(find_tempering, logits, config)
            tempering = self._temperings.get(key, logits.device, find)
        if tempering is None:
            return sample_tokens(logits, config, generator, topk)
        return draw_nucleus(logits, config, generator, topk, tempering)


def _fits(logits: Tensor) -> bool:
    """Whether the kernels can read logits."""
    is_plain = logits.dim() == 2 and logits.is_contiguous() and logits.numel() > 0
    return is_plain and is_supported(logits.device)


def is_supported(device: torch.device) -> bool:
    """Whether a device is one that the kernels run on."""
    return device.type == "cuda"


def draw_nucleus(
    logits: Tensor,
    config: SamplingConfig,
    generator: torch.Generator | None,
    topk: TopK,
    tempering: Tempering,
) -> tuple[Tensor, Tensor]:
    """`sample_tokens` of contiguous logits [B, V] at a `top_p` below 1, tempered as found out."""
    logits = logits.detach()
    num_rows, vocab_size = logits.shape
    count = min(MAX_NUCLEUS_CANDIDATES, vocab_size)
    values, ids = topk(logits, count)
    masses = fused_masses(logits, values, tempering)
    totals = masses.sum(dim=-1, keepdim=True)
    kept = _keep_nucleus(masses, totals, ids, config.top_p)
    waiting = torch.empty_like(kept).exponential_(1, generator=generator)
    tokens, probs = ids.new_empty(num_rows), kept.new_empty(num_rows)
    _draw_kernel[(num_rows,)](
        kept,
        kept.sum(dim=-1, keepdim=True),
        waiting,
        ids,
        masses,
        totals,
        tokens,
        probs,
        vocab_size,
        count,
        BLOCK=power_of_2(count),
        num_warps=NUM_WARPS,
        **EXACT,
    )
    return tokens, probs


def fused_masses(logits: Tensor, values: Tensor, tempering: Tempering) -> Tensor:
    """The masses of `masses_of` [1 or 2, B, V], from logits [B, V] of any float type.

    `values` [B, C] begins with the largest logit of each row.
    """
    num_rows, vocab_size = logits.shape
    num_sets = 2 if tempering.is_needed else 1
    masses = logits.new_empty(num_sets, num_rows, vocab_size, dtype=torch.float32)
    _masses_kernel[(num_rows, num_blocks(vocab_size, BLOCK))](
        logits,
        values,
        masses,
        vocab_size,
        values.stride(0),
        float(tempering.temperature),
        tempering.factor,
        IS_TEMPERED=tempering.is_needed,
        DIVIDES=tempering.divides,
        BLOCK=BLOCK,
        num_warps=NUM_WARPS,
        **EXACT,
    )
    return masses


def _keep_nucleus(masses: Tensor, totals: Tensor, ids: Tensor, top_p: float) -> Tensor:
    """Probabilities of the candidates [B, C] with zeros behind the nucleus, not renormalised."""
    num_rows, count = ids.shape
    probs = masses.new_empty(num_rows, count)
    launch = {"BLOCK": power_of_2(count), "num_warps": NUM_WARPS, **EXACT}
    _probs_kernel[(num_rows,)](
        masses,
        totals,
        ids,
        probs,
        masses.shape[-1],
        count,
        IS_TEMPERED=len(masses) > 1,
        **launch,
    )
    _drop_kernel[(num_rows,)](probs.cumsum(dim=-1), probs, count, top_p, **launch)
    return probs


def find_tempering(logits: Tensor, config: SamplingConfig) -> Tempering | None:
    """How to temper for the bits of `sample_tokens`, on these logits and on others of their kind.

    None, with a warning, if no way has them.
    """
    # What a 1 becomes, if torch.div multiplies: in which precision it inverts is its own affair.
    factor = (torch.ones(1, device=logits.device) / config.temperature).item()
    tried = (logits.detach(), varied_rows(logits))
    for divides in (False, True):
        tempering = Tempering(config.temperature, factor, divides)
        if all(_has_same_bits(rows, config, tempering) for rows in tried):
            return tempering
    logger.warning("draws of %s by sample_tokens: fewer launches give something else", config)
    return None


def varied_rows(logits: Tensor) -> Tensor:
    """Logits like the given ones [TRIED_ROWS, V]: of few values, steeper with each row.

    They fall from 0 to between -32 and -512, so that some exponentials are subnormal numbers and
    some nuclei end before the last candidate. The last row has a NaN.
    """
    vocab_size, device = logits.shape[-1], logits.device
    rows = torch.arange(TRIED_ROWS, device=device)[:, None]
    steps = scattered(TRIED_ROWS, vocab_size, device) % 2048
    varied = (steps * (rows + 1) / -64).to(logits.dtype)
    varied[-1, vocab_size // 2] = float("nan")
    return varied


def _has_same_bits(logits: Tensor, config: SamplingConfig, tempering: Tempering) -> bool:
    """Whether masses and draws are those of `sample_tokens`; NaN equals NaN."""
    largest = torch.topk(logits, 1).values
    masses, _ = masses_of(logits.float(), largest.float(), config.temperature)
    if not _equal(fused_masses(logits, largest, tempering), masses):
        return False
    # Of one seed, so that the caller's stream stays where it is.
    mine, theirs = (torch.Generator(logits.device).manual_seed(0) for _ in range(2))
    tokens, probs = draw_nucleus(logits, config, mine, torch.topk, tempering)
    expected_tokens, expected_probs = sample_tokens(logits, config, theirs)
    return torch.equal(tokens, expected_tokens) and _equal(probs, expected_probs)


def _equal(found: Tensor, expected: Tensor) -> bool:
    return torch.allclose(found, expected, rtol=0, atol=0, equal_nan=True)
