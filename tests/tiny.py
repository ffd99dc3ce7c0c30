"""The tiny checkpoint and what tests of the core build from it."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from modeling.bagel.bagel import Bagel, EagerStack, LayerPass, Wanted
from modeling.bagel.cache import CacheSpec, KvCache
from modeling.bagel.config import ImageSize
from modeling.bagel.context import ConditionImage, Contexts, SpecialTokens
from modeling.bagel.qwen2_navit import Decoder, QkRounding
from modeling.bagel.tokenizer import BagelTokenizer, load_tokenizer
from modeling.bagel.weights import (
    check_header,
    fill_sharded,
    load_sharded,
    parameter_shapes,
    read_bagel_config,
    read_header,
)
from tools.replay_trace.trace import Trace
from train.config import TrainConfig
from train.dist import LaunchInfo, ProcessContext, start_processes, stop_processes
from train.settings import ProcessConfig

PARITY = Path(__file__).parent / "parity"
CHECKPOINT = PARITY / "tiny_bagel"
CPU = torch.device("cpu")


def move_weights(model: nn.Module) -> None:
    """Other memory under the same tensors, as weights that are freed and gathered again."""
    for param in model.parameters():
        param.data = param.data.clone()


@cache
def tiny_model() -> Bagel:
    """The tiny model in fp32 without gradients; shared, so nobody may change it."""
    model = Bagel(read_bagel_config(CHECKPOINT))
    file = CHECKPOINT / "ema.safetensors"
    load_sharded(model, file, check_header(read_header(file), parameter_shapes(model)))
    fill_sharded(model, model.position_tables())
    return model.eval().requires_grad_(False)


@cache
def tiny_tokenizer() -> BagelTokenizer:
    return load_tokenizer(CHECKPOINT)


def special_tokens() -> SpecialTokens:
    tokenizer = tiny_tokenizer()
    return SpecialTokens(tokenizer.bos, tokenizer.eos, tokenizer.vision_start, tokenizer.vision_end)


@cache
def units() -> dict[str, Tensor]:
    """Golden values of single operations."""
    return load_file(PARITY / "units.safetensors")


@cache
def units_json() -> dict:
    return json.loads((PARITY / "units.json").read_text(encoding="utf-8"))


@cache
def trace(name: str) -> Trace:
    return Trace(PARITY / name)


def tiny_config(trace_name: str, **flags: object) -> TrainConfig:
    """The settings of a recorded run on the tiny checkpoint, with some flags changed."""
    return trace(trace_name).train_config(CHECKPOINT, num_shard=1).replace(**flags)


def contexts(rows: int, capacity: int = 96, rounding: QkRounding | None = None) -> Contexts:
    """Empty contexts of the tiny model."""
    return contexts_over(KvCache.zeros(cache_spec(rows, capacity)), rounding)


def cache_spec(rows: int, capacity: int = 96) -> CacheSpec:
    return CacheSpec(tiny_model().config.llm, rows, capacity, CPU, torch.float32)


def contexts_over(cache: KvCache, rounding: QkRounding | None = None) -> Contexts:
    """Contexts of the tiny model over a given cache."""
    return Contexts(tiny_model(), cache, special_tokens(), rounding or QkRounding())


class PoisonedStack(EagerStack):
    """Runs the layers eagerly where a GPU has a fused stack; unwanted rows come back as NaN."""

    keeps_runs_apart = True

    def run(self, layer_pass: LayerPass) -> Tensor:
        x, num_und = super().run(layer_pass), layer_pass.experts.num_und
        first = {Wanted.ALL: 0, Wanted.GEN: num_und, Wanted.NONE: x.shape[0]}[layer_pass.wanted]
        x[:first] = float("nan")
        return x

    def keeps_order(self, decoder: Decoder, num_rows: int) -> bool:
        return True


def condition_image(seed: int = 0) -> ConditionImage:
    """A made-up picture as the model reads it: 3 x 5 encoder patches, 2 x 3 latent tokens."""
    generator = torch.Generator().manual_seed(seed)
    vit_grid, latent_grid = ImageSize(3, 5), ImageSize(2, 3)
    patches = torch.rand(15, 588, generator=generator) * 2 - 1
    return ConditionImage(
        vit_patches=patches,
        vit_features=tiny_model().encode_vit(patches, vit_grid),
        vit_grid=vit_grid,
        latents=torch.randn(6, 64, generator=generator),
        latent_grid=latent_grid,
    )


@contextmanager
def one_rank() -> Iterator[ProcessContext]:
    """A world of one on the CPU, for as long as the block lasts."""
    processes = ProcessConfig(num_shard=1, device="cpu", process_group_timeout_s=60.0)
    context = start_processes(processes, 1, LaunchInfo())
    try:
        yield context
    finally:
        stop_processes()
