"""The image flow's forward as a static graph: captured once for each branch, then replayed.

Computes the bits of `flow.eager_velocity`. A branch's first forward runs eagerly (it warms kernels
up), the second is captured, and from then on forwards are replays over static inputs.
"""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from modeling.bagel.config import ImageSize
from modeling.bagel.context import Contexts, ImageAppend
from modeling.bagel.flow import MakeVelocity
from modeling.bagel.graph_capture import CapturedWork, CaptureError, GraphCapture


def static_velocity(capture: GraphCapture) -> MakeVelocity:
    """Makes forwards that are captured by `capture`; a flow drops its graphs when it ends."""
    return partial(StaticVelocity, capture)


class StaticVelocity:
    """The forward of one branch."""

    def __init__(self, capture: GraphCapture, contexts: Contexts, grid: ImageSize):
        self._capture = capture
        self._contexts = contexts
        self._plan = contexts.plan_noise(grid)
        self._forward: _Forward | None = None
        self._work: CapturedWork | None = None
        self._is_eager = not capture.is_available

    def __call__(self, x: Tensor, t: Tensor) -> Tensor:
        """Velocity [B, n, P] at x [B, n, P], t scalar; overwritten by the next call."""
        if self._forward is None:
            static = (x.clone(), t.clone(), torch.empty_like(x))
            self._forward = _Forward(self._contexts, self._plan, *static)
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

    contexts: Contexts
    plan: ImageAppend
    x: Tensor
    t: Tensor
    out: Tensor

    def run(self) -> None:
        self.out.copy_(self.contexts.noise_velocity(self.plan, self.x, self.t))

    def watched(self) -> list[Tensor]:
        cache = self.contexts.cache
        own = [self.x, self.t, self.out]
        return [*own, *cache.keys, *cache.values, *self.contexts.weights()]
