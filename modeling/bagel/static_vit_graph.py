"""The image encoder of one picture as static graphs, one for each size, kept between rollouts.

Computes the bits of `Bagel.encode_vit`, whose launches take the host longer than the device. When
calls are captured and when replayed: see static_calls.py.
"""

from torch import Tensor

from modeling.bagel.bagel import Bagel
from modeling.bagel.config import ImageSize
from modeling.bagel.graph_capture import GraphCapture
from modeling.bagel.static_calls import Call, StaticCalls, Weights


class StaticVit:
    """The encoder over patches that stay."""

    def __init__(self, model: Bagel, patches: Tensor, grid: ImageSize):
        self._patches = patches.clone()
        self._model, self._grid = model, grid
        self._weights: list[Tensor] = []
        config = model.config.vit
        self.out = patches.new_empty(patches.shape[0], config.hidden_size)

    def load(self, model: Bagel, patches: Tensor, weights: Weights) -> None:
        """Makes the next run that of `patches`, as many as ever."""
        self._model, self._weights = model, weights.tensors
        self._patches.copy_(patches)

    def run(self) -> None:
        self.out.copy_(self._model.encode_vit(self._patches, self._grid))

    def watched(self) -> list[Tensor]:
        return [self._patches, self.out, *self._weights]


class VitGraphs:
    """Encodes pictures one at a time."""

    def __init__(self, capture: GraphCapture):
        self.calls: StaticCalls[StaticVit] = StaticCalls(capture, "image encoder")

    def encode(self, model: Bagel, patches: Tensor, grid: ImageSize) -> Tensor:
        """As `Bagel.encode_vit`: features [I, D_vit] of patches [I, numbers of a patch]."""
        weights = Weights.of(model.vit_model)
        call = Call(
            (grid, patches.shape, patches.dtype),
            run=lambda: model.encode_vit(patches, grid),
            make=lambda: StaticVit(model, patches, grid),
            load=lambda program: program.load(model, patches, weights),
        )
        # Features outlive the rollout.
        return self.calls.run(call, weights).clone()

    def release(self) -> None:
        """Drops all graphs; captures that were given up are tried again."""
        self.calls.release()
