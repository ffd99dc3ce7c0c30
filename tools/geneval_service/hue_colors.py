"""Colors of objects from hue statistics inside the box, for the small detector.

Every pixel is called one of the ten colors, or none, by its hue, saturation and value. A box holds
background too, so that pixels count less towards its edge, and what is around the box is taken off:
the color whose share inside exceeds its share outside by most is the object's.
"""

from collections.abc import Sequence

import numpy as np
from PIL import Image

from data.vocabulary import COLORS
from tools.geneval_service.detectors import ObjectView
from tools.geneval_service.scoring import Box

SAMPLED_SIDE = 160
# How much of the box on each side is taken as the surroundings, and how much they count.
RING = 0.15
RING_WEIGHT = 0.5
# Black and white also come from shadow, light and background, so they must be plenty.
GREY_WEIGHT = 0.5

MIN_SATURATION = 0.22
MAX_VALUE_BLACK = 0.25
MIN_VALUE_WHITE = 0.72
# Upper end of each hue in degrees; above the last it is red again.
HUES = (
    (15, "red"),
    (42, "orange"),
    (68, "yellow"),
    (165, "green"),
    (258, "blue"),
    (295, "purple"),
    (342, "pink"),
    (361, "red"),
)
# Orange that is dark or dull is brown, red that is light and dull is pink.
MAX_VALUE_BROWN = 0.72
MAX_SATURATION_BROWN = 0.55
MAX_SATURATION_PINK = 0.55
MIN_VALUE_PINK = 0.75
NO_COLOR = len(COLORS)


class HueColorJudge:
    """Needs no model; `name_colors` looks at each object by itself."""

    name = "hue"

    def name_colors(self, views: Sequence[ObjectView]) -> list[str]:
        """The color that stands out inside each object's mask or box."""
        return [_name_color(view) for view in views]


def pixel_colors(image: Image.Image) -> np.ndarray:
    """Index into COLORS of every pixel of an RGB picture, int64 [height, width]; 10 for none."""
    hsv = np.asarray(image.convert("HSV"), dtype=np.float64)
    hue, saturation, value = hsv[..., 0] * (360 / 256), hsv[..., 1] / 255, hsv[..., 2] / 255
    ends = [end for end, _ in HUES]
    names = np.array([COLORS.index(name) for _, name in HUES])
    color = names[np.searchsorted(ends, hue, side="right")]
    is_orange, is_red = color == COLORS.index("orange"), color == COLORS.index("red")
    is_dull = (value < MAX_VALUE_BROWN) | (saturation < MAX_SATURATION_BROWN)
    color[is_orange & is_dull] = COLORS.index("brown")
    is_pale = (saturation < MAX_SATURATION_PINK) & (value > MIN_VALUE_PINK)
    color[is_red & is_pale] = COLORS.index("pink")
    is_grey = saturation < MIN_SATURATION
    color[is_grey] = NO_COLOR
    color[is_grey & (value > MIN_VALUE_WHITE)] = COLORS.index("white")
    color[value < MAX_VALUE_BLACK] = COLORS.index("black")
    return color


def _name_color(view: ObjectView) -> str:
    box, mask = view.item.detection.box, view.item.mask
    around = _grown(box, view.image.size)
    region = view.image.crop(around)
    scale = min(1.0, SAMPLED_SIDE / max(region.size))
    size = tuple(max(1, round(side * scale)) for side in region.size)
    # Nearest keeps the colors that are there; averaging would invent new ones.
    region = region.resize(size, Image.Resampling.NEAREST)
    columns = _sample_points(around[0], around[2], size[0])
    rows = _sample_points(around[1], around[3], size[1])
    if mask is None:
        across, down = _offset(columns, box[0], box[2]), _offset(rows, box[1], box[3])[:, None]
        is_inside = (abs(across) <= 1) & (abs(down) <= 1)
        weights = np.maximum(1 - across**2 - down**2, 0.0)  # 0 on the ellipse that touches the box
    else:
        is_inside = mask[np.ix_(rows.astype(int), columns.astype(int))]
        weights = is_inside.astype(np.float64)
    colors = pixel_colors(region)
    shares = _shares(colors, weights)
    shares -= RING_WEIGHT * _shares(colors, (~is_inside).astype(np.float64))
    shares[[COLORS.index("black"), COLORS.index("white")]] *= GREY_WEIGHT
    if shares.max() > 0:
        return COLORS[int(shares.argmax())]
    # Grey, or no color that its surroundings do not have as well.
    return "black" if _mean_value(region, weights) < 0.5 else "white"


def _mean_value(region: Image.Image, weights: np.ndarray) -> float:
    values = np.asarray(region).max(axis=-1) / 255
    return float((values * weights).sum() / max(weights.sum(), 1e-9))


def _shares(colors: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """The weighted share of each of the ten colors, float64 [10]; 0 where nothing has weight."""
    counts = np.bincount(colors.ravel(), weights.ravel(), minlength=NO_COLOR + 1)
    return counts[:NO_COLOR] / max(counts.sum(), 1e-9)


def _sample_points(low: int, high: int, count: int) -> np.ndarray:
    """The middles of `count` equal parts of an interval."""
    return low + (np.arange(count) + 0.5) / count * (high - low)


def _offset(points: np.ndarray, low: float, high: float) -> np.ndarray:
    """Distance from an interval's middle in halves of its length."""
    return (points - (low + high) / 2) / max((high - low) / 2, 0.5)


def _grown(box: Box, size: tuple[int, int]) -> tuple[int, int, int, int]:
    """The box with its surroundings, in whole pixels, cut to the picture."""
    extra_x, extra_y = RING * (box[2] - box[0]), RING * (box[3] - box[1])
    left = min(max(0, int(box[0] - extra_x)), size[0] - 1)
    top = min(max(0, int(box[1] - extra_y)), size[1] - 1)
    right = max(left + 1, min(size[0], int(box[2] + extra_x) + 1))
    bottom = max(top + 1, min(size[1], int(box[3] + extra_y) + 1))
    return left, top, right, bottom
