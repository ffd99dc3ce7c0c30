"""From lessons to the learner's rows: one packed batch a training step, and its targets.

A row may end in several noise segments at different times: none sees another, so one context
serves them all. Shape letters: Y text labels, n image tokens, P numbers in a latent token (64).
"""

import random
from dataclasses import dataclass

import torch
from torch import Tensor

from data.vocabulary import COLORS
from modeling.bagel.batch import PackedBatch
from modeling.bagel.context import SpecialTokens
from modeling.bagel.tokenizer import BagelTokenizer
from tools.make_tiny_checkpoint.lessons import (
    COLOR_PROMPT_SHARE,
    OPERATION,
    Swatch,
    SwatchBook,
    asked_color,
    pictured_color,
    write_reflection,
    write_thought,
)
from train.interface_strings import GENERATE_SYSTEM, REFLECT_SYSTEM, reflect_request
from train.packing import (
    NoisePart,
    Packed,
    PackLayout,
    Row,
    TextPart,
    VaePart,
    VitPart,
    pack_rows,
)

TIMESTEP_SHIFT = 3.0
AT_PURE_NOISE = 0.1  # share of times that are exactly 1, where every flow starts
MIN_T = 0.02
DRAWS = 2  # noise segments behind a prompt, as many as still fit in a row of 128 tokens
BLANK_DRAWS = 4
KEEPS_PICTURE = 0.5  # how often an edit without its text leaves the picture as it is


@dataclass(frozen=True)
class Lesson:
    """One packed batch, the labels of its texts [Y] and the velocities of its noise [.., P]."""

    batch: PackedBatch
    label_ids: Tensor
    velocities: Tensor


class Teacher:
    """Makes one lesson after another from two seeded streams."""

    def __init__(
        self,
        tokenizer: BagelTokenizer,
        layout: PackLayout,
        swatches: SwatchBook,
        prompts: list[dict],
        seed: int,
    ):
        self.tokenizer = tokenizer
        self.layout = layout
        self.swatches = swatches
        self.color_prompts = [prompt for prompt in prompts if prompt["tag"] == "colors"]
        self.prompts = prompts
        self.rng = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self._velocities: list[Tensor] = []

    def lesson(self) -> Lesson:
        """Every kind of row that a rollout or its learner has, in one batch."""
        self._velocities = []
        parts = [
            *(self._generate() for _ in range(4)),
            self._generate_without_text(),
            *(self._reflect() for _ in range(2)),
            *(self._edit() for _ in range(2)),
            self._edit_without_text(),
            self._edit_without_image(),
        ]
        rows = [Row(index, "cond", tuple(row)) for index, row in enumerate(parts)]
        packed = pack_rows(rows, self.layout, torch.float32)
        batch, label_ids = with_end_labels(packed, self.layout.special)
        return Lesson(batch, label_ids, torch.cat(self._velocities))

    def _generate(self) -> list:
        prompt = self._prompt()
        thought = write_thought(asked_color(prompt, self.rng), self.rng)
        context = [
            self._text(GENERATE_SYSTEM),
            self._text(prompt["prompt"]),
            self._text(thought.text, is_trained=True),
        ]
        return context + self._draws(thought.color)

    def _generate_without_text(self) -> list:
        noise = [self._noise(self._any_swatch()) for _ in range(BLANK_DRAWS)]
        return [self._text(GENERATE_SYSTEM), *noise]

    def _reflect(self) -> list:
        prompt = self._prompt()
        swatch = self._any_swatch()
        asked = asked_color(prompt, self.rng)
        reflection = write_reflection(swatch.color, asked, self.rng)
        return [
            self._text(REFLECT_SYSTEM),
            VitPart(swatch.condition),
            self._text(reflect_request(prompt["prompt"])),
            self._text(reflection.text, is_trained=True),
        ]

    def _edit(self) -> list:
        swatch, color = self._any_swatch(), self.rng.choice(COLORS)
        return [*_image(swatch), self._text(OPERATION.format(color=color)), *self._draws(color)]

    def _edit_without_text(self) -> list:
        swatch = self._any_swatch()
        kept = [self.rng.random() < KEEPS_PICTURE for _ in range(DRAWS)]
        noise = [self._noise(swatch if keep else self._any_swatch()) for keep in kept]
        return [*_image(swatch), *noise]

    def _edit_without_image(self) -> list:
        color = self.rng.choice(COLORS)
        return [self._text(OPERATION.format(color=color)), *self._draws(color)]

    def _prompt(self) -> dict:
        is_color = self.rng.random() < COLOR_PROMPT_SHARE
        return self.rng.choice(self.color_prompts if is_color else self.prompts)

    def _any_swatch(self) -> Swatch:
        return self.swatches.draw(self.rng.choice(COLORS), self.rng)

    def _draws(self, named: str) -> list[NoisePart]:
        colors = [pictured_color(named, self.rng) for _ in range(DRAWS)]
        return [self._noise(self.swatches.draw(color, self.rng)) for color in colors]

    def _noise(self, swatch: Swatch) -> NoisePart:
        data = swatch.condition.latents
        u = self.rng.random()
        t = TIMESTEP_SHIFT * u / (1 + (TIMESTEP_SHIFT - 1) * u)
        t = 1.0 if self.rng.random() < AT_PURE_NOISE else max(t, MIN_T)
        noise = torch.randn(data.shape, generator=self.generator)
        self._velocities.append(noise - data)
        return NoisePart((1 - t) * data + t * noise, t, swatch.condition.latent_grid)

    def _text(self, text: str, is_trained: bool = False) -> TextPart:
        segment = self.layout.special.text_segment(self.tokenizer.encode(text))
        return TextPart(tuple(segment), is_trained)


def with_end_labels(packed: Packed, special: SpecialTokens) -> tuple[PackedBatch, Tensor]:
    """The batch and label ids with the end of each trained text as a label too.

    RL does not score the end of a text, so packing leaves it out; here it must be learned.
    """
    samples, index = packed.label_samples, packed.batch.label_index
    is_last = torch.ones_like(samples, dtype=torch.bool)
    is_last[:-1] = samples[1:] != samples[:-1]
    ends = index[is_last] + 1
    label_ids = torch.cat((packed.label_ids, torch.full_like(ends, special.eos)))
    batch = PackedBatch(**{**vars(packed.batch), "label_index": torch.cat((index, ends))})
    return batch, label_ids


def _image(swatch: Swatch) -> tuple:
    return VaePart(swatch.condition), VitPart(swatch.condition)
