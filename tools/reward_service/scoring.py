"""Scores the colour clauses of GenEval metadata from the pixels of a picture.

This is a toy. It does not know what a giraffe is: "a brown giraffe" is judged by how brown the
picture is, and counts, classes and positions are not judged at all. What it gives is a smooth and
honest signal for the one thing that it measures, so that a tiny model can be seen to learn.

Rule. With n different colours asked for, each is due 1/n of the picture. A pixel's closeness to a
colour falls smoothly from 1 with the distance in OKLab (a colour space in which equal distances
look about equally large). A colour's closeness is the mean over the 1/n of the pixels that are
closest to it, its coverage the share of pixels nearer to it than to any other reference, relative
to 1/n and at most 1. `score` is the mean closeness over the clauses. `reward` is 1 if every colour
covers at least six tenths of its due, `strict_reward` if nine tenths. A prompt without a colour is
not judged: score 0.5, which teaches nothing as it is the same for all pictures, and rewards 0.
"""

import io
import zlib

import numpy as np
from PIL import Image

from train.reward_wire import Scores

# sRGB of GenEval's ten colours. Grey is no GenEval colour; it keeps a dull picture from covering
# whichever colour happens to be nearest.
PALETTE = {
    "red": (255, 0, 0),
    "orange": (255, 140, 0),
    "yellow": (255, 230, 0),
    "green": (0, 160, 0),
    "blue": (0, 0, 255),
    "purple": (128, 0, 160),
    "pink": (255, 150, 190),
    "brown": (125, 70, 25),
    "black": (0, 0, 0),
    "white": (255, 255, 255),
}
GREY = (128, 128, 128)

NEUTRAL = Scores(score=0.5, reward=0.0, strict_reward=0.0)
REWARD_COVERAGE = 0.6
STRICT_COVERAGE = 0.9
# Within the tolerance a colour counts as right (JPEG moves a flat colour by about 0.01); the width
# is the further distance at which closeness has halved. Red and orange are 0.18 apart, red and
# blue 0.54, so that even from the opposite colour the slope is felt.
TOLERANCE = 0.06
HALF_WIDTH = 0.15

MAX_PIXELS = 4096 * 4096
SAMPLED_SIDE = 96

_DECODE_ERRORS = (OSError, ValueError, SyntaxError, EOFError, KeyError, IndexError, zlib.error)

# Bjorn Ottosson, "A perceptual color space for image processing" (2020).
_LMS = np.array(
    [
        [0.4122214708, 0.5363325363, 0.0514459929],
        [0.2119034982, 0.6806995451, 0.1073969566],
        [0.0883024619, 0.2817188376, 0.6299787005],
    ]
)
_LAB = np.array(
    [
        [0.2104542553, 0.7936177850, -0.0040720468],
        [1.9779984951, -2.4285922050, 0.4505937099],
        [0.0259040371, 0.7827717662, -0.8086757660],
    ]
)


def oklab(srgb: np.ndarray) -> np.ndarray:
    """OKLab coordinates, float64 [..., 3], of sRGB values 0..255 [..., 3]."""
    value = np.asarray(srgb, dtype=np.float64) / 255.0
    linear = np.where(value <= 0.04045, value / 12.92, ((value + 0.055) / 1.055) ** 2.4)
    return np.cbrt(linear @ _LMS.T) @ _LAB.T


_NAMES = tuple(PALETTE)
_REFERENCES = oklab(np.array([*PALETTE.values(), GREY]))


def decode_picture(data: bytes) -> Image.Image:
    """RGB picture from JPEG or PNG bytes; ValueError for anything else.

    The size is read from the header and checked before any pixel is decoded. Transparency goes on
    white.
    """
    try:
        image = Image.open(io.BytesIO(data), formats=("JPEG", "PNG"))
    except Image.DecompressionBombError as error:
        raise ValueError(f"picture is too large: {error}") from error
    except _DECODE_ERRORS as error:
        # Pillow's message shows the address of the buffer, which helps nobody.
        raise ValueError("not a JPEG or PNG picture") from error
    if image.width * image.height > MAX_PIXELS:
        raise ValueError(
            f"picture is too large: {image.width} x {image.height}, more than {MAX_PIXELS} pixels"
        )
    try:
        if "transparency" in image.info or image.mode in ("RGBA", "LA", "PA"):
            rgba = image.convert("RGBA")
            ground = Image.new("RGBA", rgba.size, "white")
            return Image.alpha_composite(ground, rgba).convert("RGB")
        return image.convert("RGB")
    except _DECODE_ERRORS as error:
        raise ValueError(f"picture cannot be decoded: {error}") from error


def wanted_colours(metadata: dict) -> list[str]:
    """The colours of the include clauses, in order; ValueError that names what is malformed."""
    include = metadata.get("include")
    if not isinstance(include, list | tuple) or not include:
        raise ValueError("metadata need a non-empty list 'include'")
    colours = []
    for index, clause in enumerate(include):
        if not isinstance(clause, dict) or not isinstance(clause.get("class"), str):
            raise ValueError(f"include {index} must be a mapping with a 'class' text")
        colour = clause.get("color")
        if colour is None:
            continue
        if not isinstance(colour, str) or colour not in PALETTE:
            shown = colour[:40] if isinstance(colour, str) else type(colour).__name__
            raise ValueError(f"include {index}: colour {shown!r} is not one of {', '.join(_NAMES)}")
        colours.append(colour)
    return colours


def tag_of(metadata: dict) -> str:
    """The tag, for the group lists; an absent one is empty."""
    tag = metadata.get("tag", "")
    if not isinstance(tag, str):
        raise ValueError(f"'tag' must be a text, not {type(tag).__name__}")
    return tag


def score_picture(picture: Image.Image, metadata: dict) -> Scores:
    """Scores of an RGB picture by the rule at the top of this file, each in 0..1."""
    colours = wanted_colours(metadata)
    if not colours:
        return NEUTRAL
    distance = _distances(picture)
    nearest = distance.argmin(axis=1)
    due = 1.0 / len(set(colours))
    closeness, coverage = [], []
    for colour in colours:
        column = _NAMES.index(colour)
        beyond = np.maximum(distance[:, column] - TOLERANCE, 0.0)
        close = np.sort(1.0 / (1.0 + (beyond / HALF_WIDTH) ** 2))[::-1]
        closeness.append(float(close[: max(1, round(due * len(close)))].mean()))
        coverage.append(min(1.0, float((nearest == column).mean()) / due))
    return Scores(
        score=sum(closeness) / len(closeness),
        reward=float(min(coverage) >= REWARD_COVERAGE),
        strict_reward=float(min(coverage) >= STRICT_COVERAGE),
    )


def _distances(picture: Image.Image) -> np.ndarray:
    """OKLab distance of every pixel to every reference, [pixels, references]."""
    if max(picture.size) > SAMPLED_SIDE:
        # Nearest keeps colours that are in the picture; averaging would invent new ones.
        size = tuple(min(side, SAMPLED_SIDE) for side in picture.size)
        picture = picture.resize(size, Image.Resampling.NEAREST)
    lab = oklab(np.asarray(picture).reshape(-1, 3))
    return np.linalg.norm(lab[:, None, :] - _REFERENCES[None], axis=2)
