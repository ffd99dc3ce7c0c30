"""The image flow's forward as a static graph: captured once for each branch, then replayed.

Computes the bits of `flow.eager_velocity`. A branch's first forward runs eagerly (it warms kernels
up), the second is captured, and from then on forwards are replays over static inputs.
"""

from functools import partial

import torch
from torch import Tensor

from modeling.bagel.config import ImageSize
from modeling.bagel.context import Contexts
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
        self._inputs: tuple[Tensor, Tensor] | None = None
        self._out: Tensor | None = None
        self._work: CapturedWork | None = None
        self._is_eager = not capture.is_available

    def __call__(self, x: Tensor, t: Tensor) -> Tensor:
        """Velocity [B, n, P] at x [B, n, P], t scalar; overwritten by the next call."""
        if self._inputs is None:
            tokens = x.shape[0] * x.shape[1]
            self._inputs = (x.clone(), t.expand(tokens).clone())
            self._out = torch.empty_like(x)
            self._forward()
            return self._out
        self._inputs[0].copy_(x)
        self._inputs[1].copy_(t.expand_as(self._inputs[1]))
        if self._work is None and not self._is_eager:
            self._record()
        if self._work is None:
            self._forward()
        else:
            self._work.run()
        return self._out

    def _forward(self) -> None:
        self._out.copy_(self._contexts.noise_velocity(self._plan, *self._inputs))

    def _record(self) -> None:
        try:
            self._work = self._capture.capture(self._forward, self._watched)
        except CaptureError as error:
            self._is_eager = True
            self._capture.fall_back(f"image flow: {error}")

    def _watched(self) -> list[Tensor]:
        cache = self._contexts.cache
        return [*self._inputs, self._out, *cache.keys, *cache.values, *self._contexts.weights()]
