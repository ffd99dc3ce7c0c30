"""Cases of text turns in one launch: two layers of the real widths against the eager path."""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from modeling.bagel.bagel import EagerStack
from modeling.bagel.cache import CacheSpec, KvCache
from modeling.bagel.config import LlmConfig
from modeling.bagel.cublas_order import splits_of
from modeling.bagel.cuda_source import CudaKernel
from modeling.bagel.fused_ops import is_hopper
from modeling.bagel.qwen2_navit import Decoder, ExpertOrder, QkRounding
from modeling.bagel.text_layers import TextPass, TextSizes, compile_kernel, run_layers
from tools.operator_cases import HEADS, HIDDEN, KV_HEADS, MLP, Case, draw

LAYERS, CAPACITY = 2, 2304
LENGTHS = ((0,), (127,), (128,), (300,), (0, 63, 64, 65), (255, 1, 900, 2029), (2029,))
"""Filled positions before the turn, repeated for all rows."""


def turn_cases() -> Iterator[Case]:
    """Turns of 1 to 4 rows behind contexts of all lengths, in both roundings; on Hopper only."""
    device = torch.device("cuda")
    if not is_hopper(device):
        print("text turns run kernel by kernel on this GPU")
        return
    decoder, caches = random_decoder(device), random_cache(device)
    for rows in (1, 2, 3, 4):
        down_splits = splits_of(rows, decoder.layers[0].mlp.down_proj)
        sizes = TextSizes(HIDDEN, MLP, HEADS, KV_HEADS, LAYERS, rows, down_splits)
        kernel = compile_kernel(sizes)
        for lengths in LENGTHS:
            filled = [lengths[row % len(lengths)] for row in range(rows)]
            for early in (False, True):
                yield turn_case(decoder, caches, kernel, sizes, filled, early)


def random_decoder(device: torch.device) -> Decoder:
    """Layers of the real widths with random weights; norms near 1."""
    config = LlmConfig(HIDDEN, MLP, LAYERS, HEADS, KV_HEADS, vocab_size=64)
    with device:
        decoder = Decoder(config).bfloat16()
    for index, (name, weight) in enumerate(decoder.named_parameters()):
        weight.requires_grad_(False)
        values = draw(tuple(weight.shape), "normal", index) * 0.02
        weight.copy_(values * 5 + 1 if "norm" in name else values)
    return decoder


def random_cache(device: torch.device) -> list[Tensor]:
    """Keys and values of all layers, filled everywhere: 2 * LAYERS of [4, CAPACITY, K, H]."""
    config = LlmConfig(HIDDEN, MLP, LAYERS, HEADS, KV_HEADS, vocab_size=64)
    spec = CacheSpec(config, 4, CAPACITY, device, torch.bfloat16)
    return [draw(tuple(x.shape), "normal", 100 + i) for i, x in enumerate(spec.empty() * 2)]


def turn_case(
    decoder: Decoder,
    cache_values: list[Tensor],
    kernel: CudaKernel,
    sizes: TextSizes,
    filled: list[int],
    early: bool,
) -> Case:
    """One turn of rows behind `filled` positions: hidden states, and the keys and values written.

    The cache is filled beyond them, with what must not be seen.
    """
    rows = list(range(sizes.rows))
    x = draw((sizes.rows, HIDDEN), "normal", sum(filled))
    device = x.device
    experts = ExpertOrder(sizes.rows, 0, None, None)
    ropes = torch.tensor(filled, device=device)
    rotary = decoder.rotary(ropes, experts, QkRounding(und=early))

    def run(in_one_launch: bool) -> list[Tensor]:
        copies = [memory[: sizes.rows].clone() for memory in cache_values]
        cache = KvCache(copies[:LAYERS], copies[LAYERS:])
        cache.lengths = list(filled)
        append = cache.append(rows, [1] * sizes.rows, causal=True)
        if in_one_launch:
            (part,) = append.runs
            turn = TextPass(decoder, x.clone(), rotary, part)
            hidden = run_layers(kernel, sizes, turn)
        else:
            hidden = EagerStack().run(decoder, x.clone(), experts, rotary, append)
        return [hidden, *copies]

    kept = KvCache(cache_values[:LAYERS], cache_values[LAYERS:])
    kept.lengths = list(filled)
    (part,) = kept.append(rows, [1] * sizes.rows, causal=True).runs
    linears = [linear for layer in decoder.layers for linear in layer.linears()]
    text = ",".join(map(str, filled))
    return Case(
        f"text turn behind {text}{' early' if early else ''}",
        partial(run, True),
        partial(run, False),
        sum(linear.weight.nbytes for linear in linears),
        kernel=lambda: run_layers(kernel, sizes, TextPass(decoder, x.clone(), rotary, part)),
    )
