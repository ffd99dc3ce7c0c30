"""Passes of a prefix that samples share as static graphs, one for each kind, kept between rollouts.

Computes the bits of the stack that it wraps, whose many launches of few rows take the host longer
than the device. When passes are captured and when replayed: see static_calls.py.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn

from modeling.bagel.bagel import LayerPass, Stack
from modeling.bagel.cache import CacheAppend, CacheRun, CacheSpec, KvCache
from modeling.bagel.cache_memory import CacheMemory
from modeling.bagel.graph_capture import GraphCapture
from modeling.bagel.qwen2_navit import Decoder, ExpertOrder
from modeling.bagel.static_calls import Call, StaticCalls, Weights


class StaticPass:
    """A pass over tensors that stay. Eager or captured it runs what was loaded last, once."""

    def __init__(self, stack: Stack, like: LayerPass, hidden: Tensor):
        self._stack = stack
        self._inputs = [torch.empty_like(tensor) for tensor in _inputs(like)]
        self.out = torch.empty_like(hidden, device=like.x.device)
        self._pass: LayerPass | None = None
        self._weights: list[Tensor] = []

    def load(self, layer_pass: LayerPass, weights: list[Tensor]) -> None:
        """Makes the next run that of `layer_pass`, which is of the same kind as ever."""
        torch._foreach_copy_(self._inputs, _inputs(layer_pass))
        # Cache and modules are those of the pass itself: a new capture is one of this rollout.
        kept = iter(self._inputs)
        self._pass = _with_inputs(layer_pass, lambda _: next(kept))
        self._weights = weights

    def run(self) -> None:
        self.out.copy_(self._stack.run(self._pass))

    def watched(self) -> list[Tensor]:
        """Everything whose address a graph of this pass bakes in."""
        cache = self._pass.append.runs[0].cache
        return [*self._inputs, self.out, *cache.keys, *cache.values, *self._weights]


class PrefixGraphs:
    """A `Stack` that replays passes over the caches that it lends, and leaves others to `stack`."""

    def __init__(self, stack: Stack, capture: GraphCapture):
        self.stack = stack
        self.calls: StaticCalls[StaticPass] = StaticCalls(capture, "prefill")
        self.keeps_runs_apart = stack.keeps_runs_apart
        self.memory = CacheMemory(before_move=self.calls.drop)
        self._weights: Weights | None = None  # asked for once in a lending

    @contextmanager
    def lend(self, spec: CacheSpec) -> Iterator[KvCache]:
        """An empty cache of zeros for one prefix, until the block ends; one at a time.

        Raises:
            RuntimeError: it is lent already.
        """
        with self.memory.lend(spec) as cache:
            # As in `KvCache.zeros`: the overlay attends to positions nothing was written to.
            torch._foreach_zero_([*cache.keys, *cache.values])
            self._weights = None
            yield cache

    def run(self, layer_pass: LayerPass) -> Tensor:
        """As in `Stack`; the next pass of the same kind overwrites what is returned."""
        lent = self.memory.lent
        if any(run.cache is not lent for run in layer_pass.append.runs):
            return self.stack.run(layer_pass)
        if self._weights is None:
            self._weights = Weights.of(layer_pass.decoder)
        weights = self._weights
        call = Call(
            _kind(layer_pass),
            run=lambda: self.stack.run(layer_pass),
            make=lambda hidden: StaticPass(self.stack, layer_pass, hidden),
            load=lambda program: program.load(layer_pass, weights.tensors),
        )
        return self.calls.run(call, weights)

    def project(self, x: Tensor, linear: nn.Linear) -> Tensor:
        """As in `Stack`."""
        return self.stack.project(x, linear)

    def keeps_order(self, decoder: Decoder, num_rows: int) -> bool:
        """As in `Stack`."""
        return self.stack.keeps_order(decoder, num_rows)

    def release(self) -> None:
        """Drops all graphs and the memory; captures that were given up are tried again."""
        self.memory.release()
        self.calls.release()
        self._weights = None


def _kind(layer_pass: LayerPass) -> tuple:
    """All that the host decides by in a pass over one memory; the rest are its inputs."""
    experts, append, x = layer_pass.experts, layer_pass.append, layer_pass.x
    runs = tuple(
        (run.read.rows, run.read.query_lengths, run.read.causal, run.read.blanks is None)
        + (run.eager_tokens,)
        for run in append.runs
    )
    return (
        (experts.num_und, experts.num_gen, experts.order is None, append.order is None),
        runs,
        (layer_pass.wanted, layer_pass.rotary.rounding),
        (x.shape, x.dtype),
    )


def _inputs(layer_pass: LayerPass) -> list[Tensor]:
    found: list[Tensor] = []

    def take(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    _with_inputs(layer_pass, take)
    return found


def _with_inputs(layer_pass: LayerPass, swap: Callable[[Tensor], Tensor]) -> LayerPass:
    """The pass with `swap` of each of its input tensors, which come in the same order each time."""

    def swap_order(experts: ExpertOrder | None) -> ExpertOrder | None:
        if experts is None or experts.order is None:
            return experts
        return replace(experts, order=swap(experts.order), inverse=swap(experts.inverse))

    def swap_run(run: CacheRun) -> CacheRun:
        names = ["query_bounds", "key_starts", "keys_used"]
        names += ["blanks"] if run.read.blanks is not None else []
        read = replace(run.read, **{name: swap(getattr(run.read, name)) for name in names})
        return replace(run, places=swap(run.places), read=read)

    rotary, append = layer_pass.rotary, layer_pass.append
    return replace(
        layer_pass,
        x=swap(layer_pass.x),
        experts=swap_order(layer_pass.experts),
        rotary=replace(rotary, cos=swap(rotary.cos), sin=swap(rotary.sin)),
        append=CacheAppend(*map(swap_run, append.runs), order=swap_order(append.order)),
    )
