"""Calls of fixed kinds as static graphs, kept between rollouts.

A call of a kind that was never seen runs eagerly (it warms kernels up, and looks up what is found
by trying), the next one is captured, and from then on they are replayed. Weights that lie elsewhere
make a kind a new one: where they move at every step calls stay eager, as captures would take
longer.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn

from modeling.bagel.graph_capture import (
    MAX_REFUSED,
    CapturedWork,
    CaptureError,
    GraphCapture,
)

MAX_KEPT = 64
"""Kinds of calls that are kept. Texts of every length are kinds of their own."""


class StaticProgram(Protocol):
    """A call over tensors that stay. Eager or captured it runs what was loaded last, once."""

    out: Tensor

    def run(self) -> None:
        """Computes `out`."""

    def watched(self) -> list[Tensor]:
        """Everything whose address a graph of this call bakes in."""


Program = TypeVar("Program", bound=StaticProgram)


@dataclass(frozen=True)
class Weights:
    """What a call reads, and where it lies: a walk through all modules, which takes 1 ms."""

    tensors: list[Tensor]
    addresses: list[int]

    @staticmethod
    def of(module: nn.Module) -> "Weights":
        """All weights of a module."""
        tensors = list(module.parameters())
        return Weights(tensors, [tensor.data_ptr() for tensor in tensors])


@dataclass(frozen=True)
class Call(Generic[Program]):
    """One call: its kind, and how it is done eagerly, or by a program that stays.

    `make` gets a tensor like the result, on the meta device.
    """

    kind: tuple
    run: Callable[[], Tensor]
    make: Callable[[Tensor], Program]
    load: Callable[[Program], None]


@dataclass
class KeptCall(Generic[Program]):
    """A kind of call that ran: where the weights lay, and its graph once it was captured."""

    addresses: list[int]
    like: Tensor
    program: Program | None = None
    work: CapturedWork | None = None

    def release(self) -> None:
        """Drops the graph."""
        if self.work is not None:
            self.work.release()


class StaticCalls(Generic[Program]):
    """The graphs of one family of calls, which warnings call `what`."""

    def __init__(self, capture: GraphCapture, what: str):
        self.capture = capture
        self.num_refused = 0
        self.kept: dict[tuple, KeptCall[Program]] = {}  # in the order of their last use
        self._what = what

    def run(self, call: Call[Program], weights: Weights) -> Tensor:
        """The result of a call; the next one of the same kind overwrites it."""
        if not self._is_usable():
            return call.run()
        # Back in its place once it ran: a kind whose capture is refused begins anew.
        kept = self.kept.pop(call.kind, None)
        if kept is None or kept.addresses != weights.addresses:
            if kept is not None:
                kept.release()
            result = call.run()
            like = torch.empty_like(result, device="meta")
            self._keep(call.kind, KeptCall(weights.addresses, like))
            return result
        try:
            result = self._replay(kept, call)
            self._keep(call.kind, kept)
            return result
        except CaptureError as error:
            self.num_refused += 1
            self.capture.fall_back(f"{self._what}: {error}")
            return call.run()

    def drop(self) -> None:
        """Drops all graphs."""
        for kept in self.kept.values():
            kept.release()
        self.kept.clear()

    def release(self) -> None:
        """Drops all graphs; captures that were given up are tried again."""
        self.drop()
        self.num_refused = 0

    def _is_usable(self) -> bool:
        if not self.capture.is_available:
            return False
        if self.num_refused >= MAX_REFUSED:
            self.capture.fall_back(
                f"{self._what}: captures were refused {MAX_REFUSED} times in a row, "
                "no more are tried"
            )
            return False
        return True

    def _replay(self, kept: KeptCall[Program], call: Call[Program]) -> Tensor:
        """Replays a call of a kind that was seen before, after capturing it where needed."""
        if kept.program is None:
            kept.program = call.make(kept.like)
        call.load(kept.program)
        if kept.work is None:
            kept.work = self.capture.capture(kept.program.run, kept.program.watched)
        else:
            kept.work.watch_anew()
        kept.work.run()
        self.num_refused = 0
        return kept.program.out

    def _keep(self, kind: tuple, kept: KeptCall[Program]) -> None:
        self.kept[kind] = kept
        if len(self.kept) > MAX_KEPT:
            self.kept.pop(next(iter(self.kept))).release()
