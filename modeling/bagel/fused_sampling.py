"""Nucleus sampling in two Triton kernels, for the fast grade: sums unlike those of sampling.py.

Same rule, same random numbers from the same generator. Shape letters: B samples, V vocabulary, C
candidates.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from modeling.bagel.fused_ops import power_of_2
from modeling.bagel.sampling import MAX_NUCLEUS_CANDIDATES, SamplingConfig, TopK, sample_tokens

CHUNK, NUM_CHUNKS = 1024, 64


@triton.jit
def _masses_kernel(
    logits_ptr,
    largest_ptr,
    part_ptr,
    vocab_size,
    largest_stride,
    temperature,
    CHUNK: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
):
    """One of NUM_CHUNKS shares of a row: its sums of plain and of tempered exponentials."""
    row, share = tl.program_id(0).to(tl.int64), tl.program_id(1)
    largest = tl.load(largest_ptr + row * largest_stride).to(tl.float32)
    plain = tl.zeros((CHUNK,), tl.float32)
    tempered = tl.zeros((CHUNK,), tl.float32)
    for first in tl.range(share * CHUNK, vocab_size, NUM_CHUNKS * CHUNK):
        places = first + tl.arange(0, CHUNK)
        inside = places < vocab_size
        logits = tl.load(logits_ptr + row * vocab_size + places, mask=inside, other=float("-inf"))
        below = logits.to(tl.float32) - largest
        plain += tl.exp(below)
        tempered += tl.exp(below / temperature)
    tl.store(part_ptr + row * (2 * NUM_CHUNKS) + share, tl.sum(plain))
    tl.store(part_ptr + row * (2 * NUM_CHUNKS) + NUM_CHUNKS + share, tl.sum(tempered))


@triton.jit
def _draw_kernel(
    value_ptr,
    id_ptr,
    waiting_ptr,
    part_ptr,
    token_ptr,
    prob_ptr,
    num_candidates,
    temperature,
    top_p,
    BLOCK: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
):
    """One row: keeps the nucleus of the sorted candidates and takes the largest p / Exp(1)."""
    row = tl.program_id(0).to(tl.int64)
    parts = part_ptr + row * (2 * NUM_CHUNKS) + tl.arange(0, NUM_CHUNKS)
    plain, tempered = tl.sum(tl.load(parts)), tl.sum(tl.load(parts + NUM_CHUNKS))
    place = tl.arange(0, BLOCK)
    inside = place < num_candidates
    at = row * num_candidates + place
    values = tl.load(value_ptr + at, mask=inside, other=float("-inf")).to(tl.float32)
    largest = tl.load(value_ptr + row * num_candidates).to(tl.float32)
    probs = tl.exp((values - largest) / temperature) / tempered
    kept = tl.where(tl.cumsum(probs, axis=0) - probs <= top_p, probs, 0.0)
    # The first candidate always stays; the kept mass need not be made 1 to compare.
    waiting = tl.load(waiting_ptr + at, mask=inside, other=1.0)
    drawn = tl.argmax(tl.where(inside, kept / waiting, -1.0), axis=0)
    # In a row of NaN nothing is largest: any candidate will do, its probability says NaN.
    drawn = tl.minimum(drawn, num_candidates - 1)
    value = tl.load(value_ptr + row * num_candidates + drawn).to(tl.float32)
    tl.store(token_ptr + row, tl.load(id_ptr + row * num_candidates + drawn))
    tl.store(prob_ptr + row, tl.exp(value - largest) / plain)


def draw_tokens(
    logits: Tensor,
    config: SamplingConfig,
    generator: torch.Generator | None = None,
    topk: TopK = torch.topk,
) -> tuple[Tensor, Tensor]:
    """`sample_tokens` with its sums in another order; what is no nucleus goes there.

    Args:
        logits: [B, V], contiguous, any float type; computed in fp32.
        config: how to draw.
        generator: stream of the draws, on the device of `logits`.
        topk: takes the largest logits, as torch.topk does.

    Returns:
        tokens int64 [B] and probs fp32 [B].
    """
    if not config.takes_nucleus:
        return sample_tokens(logits, config, generator, topk)
    num_rows, vocab_size = logits.shape
    count = min(MAX_NUCLEUS_CANDIDATES, vocab_size)
    values, ids = topk(logits, count)
    waiting = torch.empty(num_rows, count, device=logits.device)
    waiting.exponential_(1, generator=generator)
    parts = waiting.new_empty(num_rows, 2, NUM_CHUNKS)
    tokens, probs = ids.new_empty(num_rows), waiting.new_empty(num_rows)
    _masses_kernel[(num_rows, NUM_CHUNKS)](
        logits,
        values,
        parts,
        vocab_size,
        count,
        config.temperature,
        CHUNK=CHUNK,
        NUM_CHUNKS=NUM_CHUNKS,
        num_warps=4,
    )
    _draw_kernel[(num_rows,)](
        values,
        ids,
        waiting,
        parts,
        tokens,
        probs,
        count,
        config.temperature,
        config.top_p,
        BLOCK=power_of_2(count),
        NUM_CHUNKS=NUM_CHUNKS,
        num_warps=4,
    )
    return tokens, probs
