"""The image flow's forwards as static graphs: captured once, then replayed.

Computes the bits of `flow.eager_forwards`. Where that keeps them, the branches of a guided step go
through one forward, contexts that are copies of each other go through the first step once, and
samples that are not wanted are left out. A forward runs eagerly at first (it warms kernels up),
then it is captured, and from then on replayed over static inputs.
"""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from modeling.bagel.config import ImageSize
from modeling.bagel.context import Contexts
from modeling.bagel.flow import FlowBranches, FlowStep, MakeForwards
from modeling.bagel.graph_capture import CapturedWork, CaptureError, GraphCapture
from modeling.bagel.noise_forward import NoiseForward, Rows, can_choose, can_join

Group = tuple[tuple[str, Rows], ...]
"""Branches that go through one forward, and contexts of each that do."""


def static_forwards(capture: GraphCapture) -> MakeForwards:
    """Makes forwards that are captured by `capture`; a flow drops its graphs when it ends."""
    return partial(StaticForwards, capture)


class StaticForwards:
    """The forwards of one flow: one for each set of samples, of all branches or of one."""

    def __init__(self, capture: GraphCapture, branches: FlowBranches, grid: ImageSize):
        self._capture = capture
        self._grid = grid
        self._branches = dict(branches.items())
        every = list(self._branches.values())
        self._is_joint, self._may_choose = can_join(every, grid), can_choose(every, grid)
        self._forwards: dict[Group, StaticVelocity] = {}

    def __call__(self, x: Tensor, t: Tensor, step: FlowStep) -> dict[str, Tensor]:
        """Velocities [B, n, P] by branch at x [B, n, P], t scalar; overwritten by the next call."""
        names = tuple(self._branches) if step.is_guided else ("cond",)
        chosen = [(name, self._rows(name, step)) for name in names]
        if not chosen[0][1]:
            return dict.fromkeys(names, torch.zeros_like(x))
        groups = [tuple(chosen)] if self._is_joint else [(each,) for each in chosen]
        velocities: dict[str, Tensor] = {}
        for group in groups:
            velocities |= zip((name for name, _ in group), self._forward(group)(x, t), strict=True)
        return velocities

    def _rows(self, name: str, step: FlowStep) -> Rows:
        """The contexts of a branch that a step goes through."""
        contexts = self._branches[name]
        every = tuple(contexts.rows)
        if not self._may_choose:
            return every
        wanted = every if step.wanted is None else step.wanted
        return (0,) if wanted and step.is_start and contexts.cache.is_uniform else wanted

    def _forward(self, group: Group) -> "StaticVelocity":
        if group not in self._forwards:
            branches = [self._branches[name] for name, _ in group]
            rows = [rows for _, rows in group]
            self._forwards[group] = StaticVelocity(self._capture, branches, self._grid, rows)
        return self._forwards[group]


class StaticVelocity:
    """One forward of some branches."""

    def __init__(
        self, capture: GraphCapture, branches: list[Contexts], grid: ImageSize, rows: list[Rows]
    ):
        self._capture = capture
        self._noise = NoiseForward(branches, grid, rows)
        self._forward: _Forward | None = None
        self._work: CapturedWork | None = None
        self._is_eager = not capture.is_available

    def __call__(self, x: Tensor, t: Tensor) -> Tensor:
        """Velocities [R, B, n, P] at x [B, n, P], t scalar; overwritten by the next call."""
        if self._forward is None:
            out = x.new_empty(len(self._noise.branches), *x.shape)
            self._forward = _Forward(self._noise, x.clone(), t.clone(), out)
            self._forward.run()
            return self._forward.out
        self._forward.x.copy_(x)
        self._forward.t.copy_(t)
        if self._work is None and not self._is_eager:
            self._record()
        if self._work is None:
            self._forward.run()
        else:
            self._work.run()
        return self._forward.out

    def _record(self) -> None:
        try:
            self._work = self._capture.capture(self._forward.run, self._forward.watched)
        except CaptureError as error:
            self._is_eager = True
            self._capture.fall_back(f"image flow: {error}")


@dataclass(frozen=True)
class _Forward:
    """What is captured. It does not know its graph, which therefore ends with the flow."""

    noise: NoiseForward
    x: Tensor
    t: Tensor
    out: Tensor

    def run(self) -> None:
        self.out.copy_(self.noise(self.x, self.t))

    def watched(self) -> list[Tensor]:
        own = [self.x, self.t, self.out]
        return [*own, *self.noise.memory(), *self.noise.branches[0].weights()]
