"""A detector that reads flat rectangles, so that the service can be tested without any model."""

import numpy as np
from PIL import Image

from tools.geneval_service.app import make_app
from tools.geneval_service.detectors import DetectedObject
from tools.geneval_service.hue_colors import pixel_colors
from tools.geneval_service.pipeline import GenevalScorer
from tools.geneval_service.scoring import COLORS, Detection
from tools.geneval_service.self_check import PICTURE

GREY = (128, 128, 128)


class RectangleDetector:
    """Each color on a grey picture is one cat; the built-in photograph shows one, too.

    `batches` keeps the sizes of the batches that came.
    """

    name = "rectangles"

    def __init__(self, finds_the_cat=True):
        self.finds_the_cat = finds_the_cat
        self.batches = []
        with Image.open(PICTURE) as file:
            self.photograph_size = file.size

    def detect(self, images):
        self.batches.append(len(images))
        return [self._detect_one(image) for image in images]

    def _detect_one(self, image):
        if image.size == self.photograph_size:
            return [found("cat", (9, 0, 408, 297))] if self.finds_the_cat else []
        colors = pixel_colors(image)
        objects = []
        for index in range(len(COLORS)):
            rows, columns = np.nonzero(colors == index)
            if len(rows) > 200:  # JPEG blurs edges into a few pixels of other colors
                box = (columns.min(), rows.min(), columns.max() + 1, rows.max() + 1)
                objects.append(found("cat", box, mask=colors == index))
        return objects


class MaskColorJudge:
    """The commonest color in the mask."""

    name = "mask"

    def __init__(self):
        self.calls = []

    def name_colors(self, views):
        self.calls.append(len(views))
        names = []
        for view in views:
            inside = pixel_colors(view.image)[view.item.mask]
            names.append(COLORS[np.bincount(inside, minlength=11)[:10].argmax()])
        return names


def found(name, box, score=0.95, mask=None):
    return DetectedObject(Detection(name, tuple(float(x) for x in box), score), mask)


def rectangles(*parts, size=(120, 90)):
    """A grey picture with rectangles (rgb, (left, top, right, bottom))."""
    picture = Image.new("RGB", size, GREY)
    for rgb, box in parts:
        picture.paste(rgb, box)
    return picture


def fake_app(finds_the_cat=True):
    """For gunicorn: the real app around the fakes."""
    return make_app(GenevalScorer(RectangleDetector(finds_the_cat), MaskColorJudge(), batch_size=3))


def sleepy_app():
    """Its scoring takes so long that a client hangs up meanwhile."""
    import time

    class Sleepy(RectangleDetector):
        def detect(self, images):
            time.sleep(0.3)
            return super().detect(images)

    return make_app(GenevalScorer(Sleepy(), MaskColorJudge()))
