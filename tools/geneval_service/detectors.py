"""What a detector and a color judge must offer, so that the scoring knows no model."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from PIL import Image

from tools.geneval_service.scoring import Detection


@dataclass(frozen=True, eq=False)
class DetectedObject:
    """A detection and, where the detector gives one, its mask: bool [height, width] of the picture.

    Raises ValueError for a mask of another type.
    """

    detection: Detection
    mask: np.ndarray | None = None

    def __post_init__(self) -> None:
        if self.mask is not None and (self.mask.ndim != 2 or self.mask.dtype != np.bool_):
            raise ValueError(
                f"a mask must be bool [height, width], not {self.mask.dtype} {self.mask.shape}"
            )


@dataclass(frozen=True, eq=False)
class ObjectView:
    """An object and the RGB picture that it is in."""

    image: Image.Image
    item: DetectedObject


class Detector(Protocol):
    """Finds the objects of the 80 COCO classes."""

    name: str

    def detect(self, images: Sequence[Image.Image]) -> list[list[DetectedObject]]:
        """The objects of each RGB picture, in any order. A picture's do not depend on the others.

        Objects that score 0.3 or less may be left out: nothing counts them.
        """
        ...


class ColorJudge(Protocol):
    """Names the colors of objects."""

    name: str

    def name_colors(self, views: Sequence[ObjectView]) -> list[str]:
        """One of GenEval's ten colors for each object."""
        ...
