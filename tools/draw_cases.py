"""Cases of draws from a nucleus: the exact grade's sampler against sample_tokens, in graphs."""

from collections.abc import Callable, Iterator
from itertools import product

import torch
from torch import Tensor

from modeling.bagel.exact_sampling import draw_nucleus, find_tempering
from modeling.bagel.sampling import SamplingConfig, sample_tokens
from modeling.bagel.top_tokens import TopTokens
from tools.operator_cases import Case, draw

VOCAB = 152064
ROWS = (1, 2, 3, 4, 100)
DRAWN = ("tiny", "huge", "mixed")
KINDS = ("normal", "steep", *DRAWN, "few values", "all equal", "impossible", "nan", "infinity")
CONFIGS = tuple(
    SamplingConfig(True, temperature, 0, top_p)
    for temperature, top_p in product((1.0, 0.7, 1.3), (0.5, 0.9, 0.999))
)

Draw = Callable[[SamplingConfig, torch.Generator], tuple[Tensor, Tensor]]


def draw_cases() -> Iterator[Case]:
    """Logits of all kinds; each case draws once with every one of `CONFIGS`.

    Raises RuntimeError where the sampler would be left unused.
    """
    logits = draw_logits(4, "normal")
    found = {config: find_tempering(logits, config) for config in CONFIGS}
    for config, tempering in found.items():
        if tempering is None:
            raise RuntimeError(f"draws of {config} have not the bits of sample_tokens")
    topk = TopTokens().take
    for rows, kind in product(ROWS, KINDS):
        logits = draw_logits(rows, kind)

        def fused(config: SamplingConfig, generator: torch.Generator, logits: Tensor = logits):
            return draw_nucleus(logits, config, generator, topk, found[config])

        def plain(config: SamplingConfig, generator: torch.Generator, logits: Tensor = logits):
            return sample_tokens(logits, config, generator, topk)

        yield draw_case(f"{len(CONFIGS)} draws of {rows}, {kind}", fused, plain, logits)


def draw_case(name: str, fused: Draw, plain: Draw, logits: Tensor) -> Case:
    """Tokens and probabilities of all draws by replays of two graphs."""
    (graph, drawn), (plain_graph, expected) = captured(fused), captured(plain)

    def run() -> list[Tensor]:
        for tensor in drawn:
            tensor.fill_(-1)
        graph.replay()
        return drawn

    def twin() -> list[Tensor]:
        plain_graph.replay()
        return expected

    return Case(name, run, twin, len(CONFIGS) * logits.nbytes, kernel=graph.replay)


def captured(draws: Draw) -> tuple[torch.cuda.CUDAGraph, list[Tensor]]:
    """A graph of draws of all configs, from a generator of its own, and what it writes."""
    generator = torch.Generator("cuda").manual_seed(1)
    for config in CONFIGS:
        draws(config, torch.Generator("cuda"))  # compiles, and tries what has to be tried
    graph = torch.cuda.CUDAGraph()
    graph.register_generator_state(generator)
    with torch.cuda.graph(graph):
        drawn = [tensor for config in CONFIGS for tensor in draws(config, generator)]
    return graph, drawn


def draw_logits(rows: int, kind: str) -> Tensor:
    """bf16 logits [rows, V] of one of `KINDS`; only the first row has a NaN or an infinity."""
    logits = draw((rows, VOCAB), kind if kind in DRAWN else "normal", rows)
    if kind in ("normal", "steep"):
        return logits * (4 if kind == "normal" else 20)
    if kind == "few values":
        return (logits * 4).round()
    if kind == "all equal":
        return torch.full_like(logits, -1.5)
    if kind == "impossible":  # all of the last row, and of the others all but one in 44
        logits = logits.masked_fill(logits < 2, -float("inf"))
        logits[-1] = -float("inf")
    elif kind in ("nan", "infinity"):
        logits[0, VOCAB // 3] = float("nan" if kind == "nan" else "inf")
    return logits
