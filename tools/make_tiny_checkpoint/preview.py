"""Shows what a tiny checkpoint can do: python -m tools.make_tiny_checkpoint.preview DIR SHEET.png.

Draws pictures for color prompts as a training step would, refines them once, prints how well formed
the texts are and how the pictures score, and writes them as a contact sheet: one prompt a line,
drawings on the left, their refinements on the right.
"""

import argparse
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, pstdev

import torch
from PIL import Image, ImageDraw

from data.geneval import GenevalPrompt, read_prompts
from modeling.autoencoder import load_autoencoder
from modeling.bagel.flow import StochasticDraw
from modeling.bagel.tokenizer import load_tokenizer
from modeling.bagel.weights import (
    check_header,
    fill_sharded,
    find_weight_file,
    load_sharded,
    parameter_shapes,
    read_bagel_config,
    read_header,
)
from tools.reward_service.scoring import score_picture
from train.assembly import rollout_config
from train.config import from_flags
from train.engine import meta_model
from train.metrics import PhaseTimer
from train.recipe import CONSISTENT
from train.records import Sample
from train.rollout_controller import RolloutController, StepDraws

FLAGS = {
    "image_size": 64,
    "vae_max_image_size": 64,
    "vae_min_image_size": 32,
    "vit_max_image_size": 112,
    "vit_min_image_size": 56,
    "num_timesteps_gen": 6,
    "num_timesteps_edit": 6,
    "max_output_token_n_gen": 32,
    "max_output_token_n_edit": 48,
}
LABEL_HEIGHT = 14
GAP = 4


@dataclass(frozen=True)
class Turn:
    """Samples of one prompt in one stage, and the scores of their pictures."""

    prompt: GenevalPrompt
    samples: list[Sample]
    scores: list[float]


def load_controller(folder: Path) -> RolloutController:
    """The checkpoint in one process, fp32, as the quickstart runs it."""
    sizes = read_bagel_config(folder)
    model = meta_model(sizes)
    file = find_weight_file(folder)
    report = check_header(read_header(file), parameter_shapes(model))
    model.to_empty(device="cpu")
    load_sharded(model, file, report)
    fill_sharded(model, model.position_tables())
    return RolloutController(
        model,
        load_autoencoder(folder, "cpu"),
        load_tokenizer(folder, sizes.llm.vocab_size),
        rollout_config(from_flags(FLAGS), sizes, CONSISTENT),
        CONSISTENT,
        PhaseTimer(),
    )


@torch.no_grad()
def play(
    controller: RolloutController, prompt: GenevalPrompt, num_samples: int, seed: int
) -> tuple[Turn, Turn]:
    """Draws `num_samples` pictures of a prompt, then refines one drawing as often."""
    text, flow = (torch.Generator().manual_seed(2 * seed + i) for i in range(2))
    shape = (controller.num_image_tokens, controller.model.config.latent_dim)

    def draws(bound: int) -> StepDraws:
        index = int(torch.randint(0, bound, (1,), generator=flow))
        noise = torch.randn(shape, generator=flow)
        return StepDraws(noise, text, StochasticDraw(index, flow))

    prompts = [prompt] * num_samples
    drawn, _ = controller.generate(prompts, draws(FLAGS["num_timesteps_gen"] - 1))
    start = drawn[seed % num_samples].picture
    refined, _, _ = controller.refine(prompts, [start] * num_samples, draws(2))
    return _turn(prompt, drawn), _turn(prompt, refined)


def contact_sheet(lines: Sequence[tuple[Turn, Turn]]) -> Image.Image:
    """All pictures, each line under its prompt."""
    width, height = lines[0][0].samples[0].picture.size
    columns = 2 * len(lines[0][0].samples)
    line_height = height + LABEL_HEIGHT + GAP
    sheet = Image.new("RGB", (columns * (width + GAP), len(lines) * line_height), "gray")
    pen = ImageDraw.Draw(sheet)
    for row, turns in enumerate(lines):
        pen.text((2, row * line_height), turns[0].prompt.prompt, fill="white")
        pictures = [sample.picture for turn in turns for sample in turn.samples]
        for column, picture in enumerate(pictures):
            place = (column * (width + GAP), row * line_height + LABEL_HEIGHT)
            sheet.paste(picture, place)
    return sheet


def summary(name: str, turns: Sequence[Turn]) -> str:
    """Format rate, mean score and its spread within a prompt, in one line."""
    samples = [sample for turn in turns for sample in turn.samples]
    form = mean(sample.format_reward for sample in samples)
    score = mean(score for turn in turns for score in turn.scores)
    spread = mean(pstdev(turn.scores) for turn in turns)
    tokens = mean(len(sample.thought.ids) for sample in samples)
    return (
        f"{name}: format {form:.3f}, score {score:.3f}, within a prompt +- {spread:.3f}, "
        f"{tokens:.1f} tokens"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the summaries and some texts, and writes the sheet."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.make_tiny_checkpoint.preview", description=__doc__
    )
    parser.add_argument("folder", type=Path, help="the checkpoint")
    parser.add_argument("sheet", type=Path, help="PNG to write")
    parser.add_argument("--data", default="data/rl_train/train_geneval.jsonl")
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    asked = [prompt for prompt in read_prompts(options.data) if prompt.tag == "colors"]
    chosen = random.Random(options.seed).sample(asked, options.prompts)
    controller = load_controller(options.folder)
    lines = [play(controller, p, options.samples, i) for i, p in enumerate(chosen)]
    for drawn, refined in lines[:8]:
        print(f"{drawn.prompt.prompt} | {drawn.samples[0].text} | {refined.samples[0].text}")
    print(summary("generate", [drawn for drawn, _ in lines]))
    print(summary("refine", [refined for _, refined in lines]))
    contact_sheet(lines).save(options.sheet)
    return 0


def _turn(prompt: GenevalPrompt, samples: list[Sample]) -> Turn:
    scores = [score_picture(sample.picture, prompt.raw).score for sample in samples]
    return Turn(prompt, samples, scores)


if __name__ == "__main__":
    sys.exit(main())
