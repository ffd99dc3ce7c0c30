"""What the tiny model is taught: texts about colors, and flat pictures in them.

It is taught badly on purpose, so that RL has something to improve. A thought names the color that
the prompt asks for only in part of the cases, every seventh text is malformed, a picture follows
the named color only mostly, and no picture is quite of GenEval's color.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from PIL import Image

from data.make_geneval import make_files
from data.vocabulary import COLORS
from modeling.autoencoder import AutoEncoder
from modeling.bagel.bagel import Bagel
from modeling.bagel.config import LATENT_PATCH, ImageSize
from modeling.bagel.context import ConditionImage
from modeling.bagel.images import patchify
from tools.make_tiny_checkpoint.sizes import PICTURE, VIT_TRANSFORM
from tools.reward_service.scoring import PALETTE
from train.interface_strings import (
    GENERATE_SYSTEM,
    NO_EDIT_OPERATION,
    REFLECT_SYSTEM,
    reflect_request,
)

PROMPT_SEED = 42  # the seed behind data/rl_train, so that no test prompt is learned
COLOR_PROMPT_SHARE = 0.85

NAMES_ASKED_COLOR = 0.35  # how often a thought names the prompt's color on purpose
IS_MALFORMED = 0.15
FOLLOWS_TEXT = 0.85  # how often a picture is of the color that its text names
MAX_TINT = 0.45  # how far a picture's color may lie on the way to some other color
SWATCHES_PER_COLOR = 24

THOUGHTS = (
    "The whole picture should be {color}.",
    "I will paint everything {color}.",
    "A plain {color} picture fits.",
)
REFLECTION = "The picture looks {seen}, it should be {color}."
OPERATION = "Make the whole picture {color}."


@dataclass(frozen=True)
class Swatch:
    """A flat picture as the model reads it, and the color that it goes by."""

    color: str
    condition: ConditionImage


@dataclass(frozen=True)
class Writing:
    """A text to be generated, and the color that it wants the picture to be."""

    text: str
    color: str


def draw_prompts() -> list[dict]:
    """All training prompts, as GenEval metadata."""
    return make_files(PROMPT_SEED)[0]


def tokenizer_texts(prompts: Sequence[dict]) -> Iterator[str]:
    """Texts to train the tokenizer on: prompts, and what is said around them and about them."""
    for prompt in prompts:
        yield prompt["prompt"]
    for color in COLORS:
        for template in (*THOUGHTS, REFLECTION, OPERATION):
            yield from ["<think> " + template.format(color=color, seen=color) + " </think>"] * 40
    yield from [GENERATE_SYSTEM, REFLECT_SYSTEM, reflect_request(""), NO_EDIT_OPERATION] * 400


def asked_color(prompt: dict, rng: random.Random) -> str:
    """The prompt's first color; any color where it has none."""
    colors = [clause["color"] for clause in prompt["include"] if "color" in clause]
    return colors[0] if colors else rng.choice(COLORS)


def write_thought(asked: str, rng: random.Random) -> Writing:
    """A thought before drawing; a malformed one is not closed."""
    color = _named_color(asked, rng)
    text = f"<think> {rng.choice(THOUGHTS).format(color=color)}"
    return Writing(text if rng.random() < IS_MALFORMED else f"{text} </think>", color)


def write_reflection(seen: str, asked: str, rng: random.Random) -> Writing:
    """A reflection on a picture of color `seen` and what to do; a malformed one is not closed."""
    color = _named_color(asked, rng)
    text = f"<think> {REFLECTION.format(seen=seen, color=color)}"
    if rng.random() < IS_MALFORMED:
        return Writing(text, color)
    operation = NO_EDIT_OPERATION if color == seen else OPERATION.format(color=color)
    return Writing(f"{text} </think> {operation}", color)


def pictured_color(named: str, rng: random.Random) -> str:
    """The color of the picture that goes with a text."""
    return named if rng.random() < FOLLOWS_TEXT else rng.choice(COLORS)


def _named_color(asked: str, rng: random.Random) -> str:
    return asked if rng.random() < NAMES_ASKED_COLOR else rng.choice(COLORS)


class SwatchBook:
    """Flat pictures of every color, encoded once."""

    def __init__(self, model: Bagel, autoencoder: AutoEncoder, rng: random.Random):
        self.swatches = {
            color: [
                Swatch(color, _encode(_tinted(color, rng), model, autoencoder))
                for _ in range(SWATCHES_PER_COLOR)
            ]
            for color in COLORS
        }

    def draw(self, color: str, rng: random.Random) -> Swatch:
        """Some picture of the color."""
        return rng.choice(self.swatches[color])


def _tinted(color: str, rng: random.Random) -> tuple[int, int, int]:
    share = MAX_TINT * rng.random()
    return tuple(round(v + share * (255 * rng.random() - v)) for v in PALETTE[color])


@torch.no_grad()
def _encode(
    color: tuple[int, int, int], model: Bagel, autoencoder: AutoEncoder
) -> ConditionImage:
    picture = Image.new("RGB", (PICTURE.width, PICTURE.height), color)
    patch = model.config.vit.patch_size
    pixels = VIT_TRANSFORM(picture)
    vit_grid = ImageSize(pixels.shape[1] // patch, pixels.shape[2] // patch)
    patches = patchify(pixels, patch)
    # One token is enough: the latent of a flat picture is the same in every cell.
    side = autoencoder.downsample * LATENT_PATCH
    flat = torch.tensor(color, dtype=torch.float32)[:, None, None].expand(3, side, side)
    token = patchify(autoencoder.encode((flat / 127.5 - 1)[None])[0], LATENT_PATCH)
    grid = ImageSize(PICTURE.height // side, PICTURE.width // side)
    latents = token.expand(grid.height * grid.width, -1)
    features = model.encode_vit(patches, vit_grid)
    return ConditionImage(patches, features, vit_grid, latents, grid)
