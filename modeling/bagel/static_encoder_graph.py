"""The frozen encoders of pictures as static graphs, one for each shape, kept between rollouts.

Computes the bits of the encoders, whose launches take the host longer than the device. When calls
are captured and when replayed: see static_calls.py.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from modeling.bagel.graph_capture import GraphCapture
from modeling.bagel.static_calls import Call, StaticCalls, Weights

Encode = Callable[[Tensor], Tensor]
"""An encoder, which needs nothing from the host but launches once it ran on such a tensor."""


class StaticEncoder:
    """An encoder over a tensor that stays."""

    def __init__(self, x: Tensor, result: Tensor):
        self.out = torch.empty_like(result, device=x.device)
        self._x = torch.empty_like(x)
        self._encode: Encode | None = None
        self._weights: list[Tensor] = []

    def load(self, encode: Encode, x: Tensor, weights: Weights) -> None:
        """Makes the next run `encode(x)`, which is of the same kind as ever."""
        self._x.copy_(x)
        self._encode, self._weights = encode, weights.tensors

    def run(self) -> None:
        self.out.copy_(self._encode(self._x))

    def watched(self) -> list[Tensor]:
        return [self._x, self.out, *self._weights]


class EncoderGraphs:
    """Runs encoders through graphs."""

    def __init__(self, capture: GraphCapture):
        self.calls: StaticCalls[StaticEncoder] = StaticCalls(capture, "picture encoders")

    def run(self, encode: Encode, x: Tensor, module: nn.Module, *settings: object) -> Tensor:
        """encode(x), a new tensor.

        Args:
            encode: computes with the weights of `module`; all that it does besides goes by the
                shape and type of x, by autocast and by `settings`.
            x: on the device.
            module: the encoder.
            settings: hashable.
        """
        weights, is_cast = Weights.of(module), torch.is_autocast_enabled(x.device.type)
        call = Call(
            (type(module), settings, is_cast, x.shape, x.stride(), x.dtype),
            run=lambda: encode(x),
            make=lambda result: StaticEncoder(x, result),
            load=lambda program: program.load(encode, x, weights),
        )
        # The next call overwrites what this one returns, which outlives the rollout.
        return self.calls.run(call, weights).clone()

    def release(self) -> None:
        """Drops all graphs; captures that were given up are tried again."""
        self.calls.release()
