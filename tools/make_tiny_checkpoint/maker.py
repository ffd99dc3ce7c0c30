"""Puts the tiny checkpoint together and writes its folder."""

import logging
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import save

from modeling.autoencoder import FILE_NAME, AutoEncoder
from modeling.bagel.bagel import Bagel
from modeling.bagel.context import SpecialTokens
from modeling.bagel.export import write_bf16
from modeling.bagel.tokenizer import load_tokenizer
from modeling.bagel.weights import WEIGHT_FILES, parameter_shapes
from tools.make_tiny_checkpoint.lesson_rows import Teacher
from tools.make_tiny_checkpoint.lessons import SwatchBook, draw_prompts, tokenizer_texts
from tools.make_tiny_checkpoint.linear_autoencoder import build_autoencoder
from tools.make_tiny_checkpoint.sizes import CONFIG, VAE_CONFIG, VOCAB_SIZE, write_configs
from tools.make_tiny_checkpoint.training import build_model, train
from tools.make_tiny_checkpoint.vocabulary import write_tokenizer
from train.packing import PackLayout

logger = logging.getLogger("faster_r3")

NUM_STEPS = 1100


def make_checkpoint(out: Path, seed: int = 0, num_steps: int = NUM_STEPS) -> None:
    """Writes a complete BAGEL folder. The same seed gives the same bytes on the same machine.

    Raises ValueError if `out` exists and is not an empty folder.
    """
    out = Path(out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} exists and is not an empty folder, choose another OUT")
    out.mkdir(parents=True, exist_ok=True)
    prompts = draw_prompts()
    write_tokenizer(out, tokenizer_texts(prompts))
    tokenizer = load_tokenizer(out, VOCAB_SIZE)
    write_configs(out, tokenizer.bos, tokenizer.eos)
    with _one_thread(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        autoencoder = build_autoencoder(VAE_CONFIG)
        model = build_model(CONFIG, seed)
        special = SpecialTokens(
            tokenizer.bos, tokenizer.eos, tokenizer.vision_start, tokenizer.vision_end
        )
        layout = PackLayout(special, CONFIG.max_latent_size, CONFIG.vit.side)
        swatches = SwatchBook(model, autoencoder, random.Random(seed))
        train(model, Teacher(tokenizer, layout, swatches, prompts, seed), num_steps)
    _write_weights(out, model, autoencoder)
    logger.info("wrote a tiny BAGEL checkpoint to %s", out)


def _write_weights(out: Path, model: Bagel, autoencoder: AutoEncoder) -> None:
    write_bf16(out / WEIGHT_FILES[0], parameter_shapes(model), model.parameters())
    tensors = {name: tensor.contiguous() for name, tensor in autoencoder.state_dict().items()}
    (out / FILE_NAME).write_bytes(save(tensors, metadata={"format": "pt"}))


@contextmanager
def _one_thread() -> Iterator[None]:
    """Sums do not depend on the number of cores then, and on tensors this small nothing is lost."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
