"""Cases of text turns in one launch: two layers of the real widths against the eager path."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from modeling.bagel.bagel import EagerStack, LayerPass
from modeling.bagel.cache import CacheSpec, KvCache
from modeling.bagel.config import LlmConfig
from modeling.bagel.cublas_order import splits_of
from modeling.bagel.fused_ops import is_hopper, num_multiprocessors
from modeling.bagel.qwen2_navit import Decoder, ExpertOrder, QkRounding
from modeling.bagel.text_layers import TextSizes, compile_kernel, run_layers
from tools.operator_cases import HEADS, HIDDEN, KV_HEADS, MLP, Case, draw

CONFIG = LlmConfig(HIDDEN, MLP, 2, HEADS, KV_HEADS, vocab_size=64)
CAPACITY = 2304
LENGTHS = ((0,), (127,), (128,), (300,), (0, 63, 64, 65), (255, 1, 900, 2029), (2029,))
"""Filled positions before the turn, repeated for all rows."""


def turn_cases() -> Iterator[Case]:
    """Turns of 1 to 4 rows behind contexts of all lengths, in both roundings; on Hopper only."""
    device = torch.device("cuda")
    if not is_hopper(device):
        print("text turns run kernel by kernel on this GPU")
        return
    decoder, memory = random_decoder(device), random_memory(device)
    for rows in (1, 2, 3, 4):
        down_splits = splits_of(rows, decoder.layers[0].mlp.down_proj)
        for early in (False, True):
            blocks = num_multiprocessors(device)
            sizes = TextSizes.of(CONFIG, rows, down_splits, blocks, early)
            run = partial(run_layers, compile_kernel(sizes), sizes)
            for lengths in LENGTHS:
                filled = [lengths[row % len(lengths)] for row in range(rows)]
                yield turn_case(decoder, memory, filled, early, run)


def random_decoder(device: torch.device) -> Decoder:
    """Layers of the real widths with random weights; norms near 1."""
    with device:
        decoder = Decoder(CONFIG).bfloat16()
    for index, (name, weight) in enumerate(decoder.named_parameters()):
        weight.requires_grad_(False)
        values = draw(tuple(weight.shape), "normal", index) * 0.02
        weight.copy_(values * 5 + 1 if "norm" in name else values)
    return decoder


def random_memory(device: torch.device) -> list[Tensor]:
    """Keys, then values of all layers, filled everywhere: [4, CAPACITY, K, H] each."""
    spec = CacheSpec(CONFIG, 4, CAPACITY, device, torch.bfloat16)
    return [draw(tuple(x.shape), "normal", 100 + i) for i, x in enumerate(spec.empty() * 2)]


def plan_turn(
    decoder: Decoder, memory: list[Tensor], x: Tensor, filled: list[int], early: bool
) -> LayerPass:
    """One token x [A, D] of each row behind `filled` positions.

    `memory` holds keys, then values of all layers, [A, C, K, H] each. What it has behind the
    filled positions must not be seen.
    """
    num_rows, num_layers = x.shape[0], decoder.config.num_layers
    cache = KvCache(memory[:num_layers], memory[num_layers:])
    cache.lengths = list(filled)
    experts = ExpertOrder(num_rows, 0, None, None)
    ropes = torch.tensor(filled, device=x.device)
    rotary = decoder.rotary(ropes, experts, QkRounding(und=early))
    append = cache.append(list(range(num_rows)), [1] * num_rows, causal=True)
    return LayerPass(decoder, x, experts, rotary, append)


def turn_case(
    decoder: Decoder,
    memory: list[Tensor],
    filled: list[int],
    early: bool,
    run: Callable[[LayerPass], Tensor],
) -> Case:
    """One turn by `run` and by the eager path: hidden states, and all keys and values behind it."""
    x = draw((len(filled), HIDDEN), "normal", sum(filled))
    kept = [part[: len(filled)] for part in memory]

    def after(run: Callable[[LayerPass], Tensor]) -> list[Tensor]:
        copies = [part.clone() for part in kept]
        return [run(plan_turn(decoder, copies, x.clone(), filled, early)), *copies]

    timed = plan_turn(decoder, kept, x, filled, early)
    linears = [linear for layer in decoder.layers for linear in layer.linears()]
    return Case(
        f"text turn behind {','.join(map(str, filled))}{' early' if early else ''}",
        partial(after, run),
        partial(after, EagerStack().run),
        sum(linear.weight.nbytes for linear in linears),
        kernel=lambda: run(replace(timed, x=x.clone())),
    )
