"""Writing a BAGEL folder: bf16 weights streamed out of the shards, with the other files beside."""

import json
import logging
import os
import shutil
import struct
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path

import torch
from safetensors import safe_open
from torch import nn
from torch.distributed.tensor import DTensor

from modeling.bagel.tokenizer import TOKENIZER_FILES
from modeling.bagel.weights import POSITION_TABLES, WEIGHT_FILES, find_weight_file, read_header

logger = logging.getLogger("faster_r3")

CONFIG_FILES = ("llm_config.json", "vit_config.json", "config.json", "generation_config.json")
VAE_FILE = "ae.safetensors"


def export_checkpoint(
    module: nn.Module, source_folder: str | Path, out_folder: str | Path, is_writer: bool
) -> None:
    """Writes the parameters of `module` as a BAGEL folder that any BAGEL loader takes.

    A collective for sharded parameters: call it on every rank, with `is_writer` on one.
    Parameters are gathered one by one, in bf16, so no rank holds more than two of them in full.
    The position tables, configuration, tokenizer and autoencoder (hard link
    or copy) come from `source_folder`. The folder gets its name when it is complete, on the
    writer's return. Raises ValueError if `out_folder` exists or if the source lacks a file.
    """
    source, out = Path(source_folder), Path(out_folder)
    if out.exists():
        raise ValueError(f"{out} exists already, export to another folder")
    weight_file = find_weight_file(source)
    names = [name for name, _ in module.named_parameters() if name not in POSITION_TABLES]
    tables = {
        name: info.shape
        for name, info in read_header(weight_file).items()
        if name in POSITION_TABLES
    }
    shapes = {name: tuple(module.get_parameter(name).shape) for name in names} | tables
    if not is_writer:
        for _ in _gathered(module, names):
            pass
        return
    partial = out.with_name(f".{out.name}.partial")
    if partial.exists():
        shutil.rmtree(partial)
    partial.mkdir(parents=True)
    tensors = chain(_gathered(module, names), _read(weight_file, tables))
    write_bf16(partial / WEIGHT_FILES[0], shapes, tensors)
    copy_other_files(source, partial)
    partial.rename(out)
    logger.info("exported %d tensors to %s", len(shapes), out)


def write_bf16(
    file: str | Path,
    shapes: Mapping[str, tuple[int, ...]],
    tensors: Iterable[torch.Tensor],
) -> None:
    """Writes a safetensors file, one tensor at a time, all of them bf16.

    `tensors` come in the order of `shapes`, in any float dtype, on any device. The format:
    8 bytes little-endian header length, JSON header padded with spaces, the tensors' bytes.
    Raises ValueError if a tensor's shape is not the announced one or if their number differs.
    """
    header: dict[str, dict] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in shapes.items():
        end = offset + 2 * torch.Size(shape).numel()
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    with Path(file).open("wb") as stream:
        stream.write(struct.pack("<Q", len(raw)) + raw)
        for (name, shape), tensor in zip(shapes.items(), tensors, strict=True):
            if tuple(tensor.shape) != tuple(shape):
                raise ValueError(f"{name} has shape {tuple(tensor.shape)}, announced {shape}")
            values = tensor.detach().to(torch.bfloat16).cpu().contiguous()
            stream.write(memoryview(values.reshape(-1).view(torch.uint8).numpy()))
        stream.flush()
        os.fsync(stream.fileno())


def copy_other_files(source: Path, out: Path) -> None:
    """Puts configuration, tokenizer and autoencoder of `source` into `out`, byte for byte."""
    for name in (*CONFIG_FILES, *TOKENIZER_FILES):
        if (source / name).is_file():
            shutil.copyfile(source / name, out / name)
    vae = (source / VAE_FILE).resolve()  # a link to a link could dangle
    if not vae.is_file():
        raise ValueError(f"--model_path {source}: {VAE_FILE} is missing")
    try:
        os.link(vae, out / VAE_FILE)
    except OSError:  # another file system, or one without hard links
        shutil.copyfile(vae, out / VAE_FILE)


def _gathered(module: nn.Module, names: list[str]) -> Iterator[torch.Tensor]:
    for name in names:
        # Rounded before it is gathered: half the traffic, and no full fp32 copy anywhere.
        tensor = module.get_parameter(name).detach().to(torch.bfloat16)
        yield tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _read(file: Path, names: Iterable[str]) -> Iterator[torch.Tensor]:
    with safe_open(file, framework="pt") as weights:
        for name in names:
            yield weights.get_tensor(name)
