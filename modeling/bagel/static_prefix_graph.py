"""Passes of a prefix that samples share as static graphs, one for each kind, kept between rollouts.

Computes the bits of the stack that it wraps, whose many launches of few rows take the host longer
than the device. A pass of a kind that was never seen runs eagerly (it warms kernels up, and looks
up the orders of sums), the next one is captured, and from then on they are replayed. Weights that
lie elsewhere make a kind a new one: where they move at every step passes stay eager, as captures
would take longer.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from modeling.bagel.bagel import LayerPass, Stack
from modeling.bagel.cache import CacheAppend, CacheRun, CacheSpec, KvCache
from modeling.bagel.cache_memory import CacheMemory
from modeling.bagel.graph_capture import (
    MAX_REFUSED,
    CapturedWork,
    CaptureError,
    GraphCapture,
)
from modeling.bagel.qwen2_navit import Decoder, ExpertOrder

MAX_KEPT = 64
"""Kinds of passes that are kept. Texts of every length are kinds of their own."""


class StaticPass:
    """A pass over tensors that stay. Eager or captured it runs what was loaded last, once."""

    def __init__(self, stack: Stack, like: LayerPass):
        self._stack = stack
        self._inputs = [torch.empty_like(tensor) for tensor in _inputs(like)]
        self.out = torch.empty_like(like.x)
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


@dataclass
class KeptPass:
    """A kind of pass: where the weights lay when it ran, and its graph once it was captured."""

    addresses: list[int]
    program: StaticPass | None = None
    work: CapturedWork | None = None

    def release(self) -> None:
        """Drops the graph."""
        if self.work is not None:
            self.work.release()


@dataclass(frozen=True)
class _Weights:
    """What a pass reads, and where it lies: a walk through all modules, which takes 1 ms."""

    tensors: list[Tensor]
    addresses: list[int]

    @staticmethod
    def of(decoder: Decoder) -> "_Weights":
        tensors = list(decoder.parameters())
        return _Weights(tensors, [tensor.data_ptr() for tensor in tensors])


class PrefixGraphs:
    """A `Stack` that replays passes over the caches that it lends, and leaves others to `stack`."""

    def __init__(self, stack: Stack, capture: GraphCapture):
        self.stack = stack
        self.capture = capture
        self.keeps_runs_apart = stack.keeps_runs_apart
        self.memory = CacheMemory(before_move=self.drop)
        self.num_refused = 0
        self._kept: dict[tuple, KeptPass] = {}  # in the order of their last use
        self._weights: _Weights | None = None  # asked for once in a lending

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
        if not self._wants_graph(layer_pass.append):
            return self.stack.run(layer_pass)
        if self._weights is None:
            self._weights = _Weights.of(layer_pass.decoder)
        kind, addresses = _kind(layer_pass), self._weights.addresses
        # Back in its place once it ran: a kind whose capture is refused begins anew.
        kept = self._kept.pop(kind, None)
        if kept is None or kept.addresses != addresses:
            if kept is not None:
                kept.release()
            hidden = self.stack.run(layer_pass)
            self._keep(kind, KeptPass(addresses))
            return hidden
        try:
            hidden = self._replay(kept, layer_pass)
            self._keep(kind, kept)
            return hidden
        except CaptureError as error:
            self.num_refused += 1
            self.capture.fall_back(f"prefill: {error}")
            return self.stack.run(layer_pass)

    def project(self, x: Tensor, linear: nn.Linear) -> Tensor:
        """As in `Stack`."""
        return self.stack.project(x, linear)

    def keeps_order(self, decoder: Decoder, num_rows: int) -> bool:
        """As in `Stack`."""
        return self.stack.keeps_order(decoder, num_rows)

    def drop(self) -> None:
        """Drops all graphs."""
        for kept in self._kept.values():
            kept.release()
        self._kept.clear()

    def release(self) -> None:
        """Drops all graphs and the memory; captures that were given up are tried again."""
        self.memory.release()
        self._weights = None
        self.num_refused = 0

    def _wants_graph(self, append: CacheAppend) -> bool:
        lent = self.memory.lent
        if not self.capture.is_available or any(run.cache is not lent for run in append.runs):
            return False
        if self.num_refused >= MAX_REFUSED:
            self.capture.fall_back(
                f"prefill: captures were refused {MAX_REFUSED} times in a row, no more are tried"
            )
            return False
        return True

    def _replay(self, kept: KeptPass, layer_pass: LayerPass) -> Tensor:
        """Replays a pass of a kind that was seen before, after capturing it where needed."""
        if kept.program is None:
            kept.program = StaticPass(self.stack, layer_pass)
        kept.program.load(layer_pass, self._weights.tensors)
        if kept.work is None:
            kept.work = self.capture.capture(kept.program.run, kept.program.watched)
        else:
            kept.work.watch_anew()
        kept.work.run()
        self.num_refused = 0
        return kept.program.out

    def _keep(self, kind: tuple, kept: KeptPass) -> None:
        self._kept[kind] = kept
        if len(self._kept) > MAX_KEPT:
            self._kept.pop(next(iter(self._kept))).release()


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
