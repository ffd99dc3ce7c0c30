"""Eager text decoding: one turn feeds a token of every active sample and draws the next.

The captured decode path must draw the same numbers as this one. Shape letters: A active
samples, V vocabulary.
"""

from dataclasses import dataclass

import torch

from modeling.bagel.context import Contexts
from modeling.bagel.sampling import SamplingConfig


@dataclass(frozen=True)
class DecodedText:
    """Ids from bos to eos, and the untempered probability of each id behind the bos."""

    ids: tuple[int, ...]
    probs: tuple[float, ...]


def decode_text(
    contexts: Contexts, sampling: SamplingConfig, max_tokens: int, generator: torch.Generator
) -> list[DecodedText]:
    """Decodes a text in every context; keys and values of all its tokens join the cache.

    A sample leaves the batch after the turn that fed its eos. At turn `max_tokens - 1` the next
    token is forced to eos, while its recorded probability stays that of the token drawn.

    Args:
        contexts: B contexts; decoding starts with bos at each one's next RoPE id.
        sampling: how tokens are drawn.
        max_tokens: turns until eos is forced.
        generator: the sample stream, on the contexts' device.

    Returns:
        One text a context.
    """
    special = contexts.special
    ids = [[special.bos] for _ in contexts.rows]
    probs: list[list[float]] = [[] for _ in contexts.rows]
    active, turn = contexts.rows, 0
    while active:
        hidden = contexts.feed_text(active, [[ids[row][-1]] for row in active])
        logits = contexts.text_logits(hidden)
        tokens, drawn_probs = contexts.draw(logits, sampling, generator)
        drawn = list(zip(active, tokens.tolist(), drawn_probs.tolist(), strict=True))
        active = []
        for row, token, prob in drawn:
            if len(ids[row]) > 1 and ids[row][-1] == special.eos:
                continue
            ids[row].append(special.eos if turn == max_tokens - 1 else token)
            probs[row].append(prob)
            active.append(row)
        turn += 1
    return [DecodedText(tuple(i), tuple(p)) for i, p in zip(ids, probs, strict=True)]
