"""Weight files: sizes from the header, strict name and shape checks, loading into shards."""

import json
import logging
import math
import re
import struct
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from modeling.bagel.config import BagelConfig, read_llm_config, read_vit_config

logger = logging.getLogger("faster_r3")

WEIGHT_FILES = ("ema.safetensors", "model.safetensors")  # in order of preference
LATENT_TABLE = "latent_pos_embed.pos_embed"
VIT_TABLE = "vit_pos_embed.pos_embed"
POSITION_TABLES = frozenset({LATENT_TABLE, VIT_TABLE})  # rebuilt by the model, never loaded

_DECODER_LAYER = re.compile(r"language_model\.model\.layers\.(\d+)\.")
_MAX_PROBLEMS_SHOWN = 12
_FLOAT_BYTES = {"BF16": 2, "F16": 2, "F32": 4}
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit


@dataclass(frozen=True)
class TensorInfo:
    """One header entry: the format's dtype name ("BF16", "F32", ...) and the shape."""

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class LoadReport:
    """Names by fate. `missing` holds optional names only; `unexpected` ones are not read."""

    loaded: tuple[str, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]


def find_weight_file(folder: str | Path) -> Path:
    """`ema.safetensors` of `folder`, else `model.safetensors`.

    The index file and other `*.safetensors` are not looked at: BAGEL's index maps both weight
    files, and `ae.safetensors` lies beside them. Raises ValueError if there is neither.
    """
    for name in WEIGHT_FILES:
        path = Path(folder) / name
        if path.is_file():
            return path
    raise ValueError(f"--model_path {folder}: no weights, expected {' or '.join(WEIGHT_FILES)}")


def read_header(file: str | Path) -> dict[str, TensorInfo]:
    """Names, dtypes and shapes of a safetensors file, without reading a tensor.

    Raises ValueError if the file is missing, is not in the safetensors format, or is shorter or
    longer than its header says.
    """
    file = Path(file)
    if not file.is_file():
        raise ValueError(f"{file} is missing (--model_path)")
    file_bytes = file.stat().st_size
    with file.open("rb") as stream:
        prefix = stream.read(8)
        header_bytes = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        if not 2 <= header_bytes <= min(_MAX_HEADER_BYTES, file_bytes - 8):
            raise ValueError(f"{file} is not a safetensors file, or is truncated (--model_path)")
        raw = stream.read(header_bytes)
    try:
        entries = json.loads(raw)
        entries.pop("__metadata__", None)
        infos = {
            name: TensorInfo(entry["dtype"], tuple(entry["shape"]))
            for name, entry in entries.items()
        }
        ends = [0]
        for name, entry in entries.items():
            begin, end = entry["data_offsets"]
            width = _FLOAT_BYTES.get(entry["dtype"])
            if width and end - begin != math.prod(entry["shape"]) * width:
                raise ValueError(f"{name} has {end - begin} bytes for shape {entry['shape']}")
            ends.append(end)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(
            f"{file} is not a safetensors file, its header is damaged: {error} (--model_path)"
        ) from error
    expected_bytes = 8 + header_bytes + max(ends)
    if file_bytes != expected_bytes:
        raise ValueError(
            f"{file} has {file_bytes} bytes, its header describes {expected_bytes}: "
            "truncated or damaged, copy it again (--model_path)"
        )
    return infos


def read_bagel_config(folder: str | Path) -> BagelConfig:
    """Sizes of the model in `folder`: two JSON files, and max_latent_size from the weights' header.

    max_latent_size is the square root of the rows of the latent position table, since derived
    `config.json` files state wrong ones. Raises ValueError naming the file that does not fit.
    """
    folder = Path(folder)
    llm, vit = read_llm_config(folder), read_vit_config(folder)
    file = find_weight_file(folder)
    table = read_header(file).get(LATENT_TABLE)
    if table is None:
        raise ValueError(f"{file}: {LATENT_TABLE} is missing (--model_path)")
    rows = table.shape[0] if table.shape else 0
    side = math.isqrt(rows)
    if rows == 0 or side * side != rows:
        raise ValueError(
            f"{file}: {LATENT_TABLE} has shape {table.shape}, expected a square number of rows "
            "(--model_path)"
        )
    return BagelConfig(llm=llm, vit=vit, max_latent_size=side)


def parameter_shapes(module: nn.Module) -> dict[str, tuple[int, ...]]:
    """Global shapes of all parameters of `module` (which may be on the meta device, or sharded)."""
    return {name: tuple(param.shape) for name, param in module.named_parameters()}


def check_header(
    header: Mapping[str, TensorInfo],
    expected: Mapping[str, tuple[int, ...]],
    optional: Collection[str] = POSITION_TABLES,
) -> LoadReport:
    """Compares a weight file with the parameters that the configuration asks for.

    `optional` names are never loaded: they may be in the file, in `expected`, in both or neither.
    Call it before anything is allocated. Logs the counts and the unexpected names. Raises
    ValueError naming the tensors that are missing, misshapen or not of a float dtype, and the
    decoder layers that the file has beyond the configured ones.
    """
    wanted = {name: tuple(shape) for name, shape in expected.items() if name not in optional}
    problems = [f"{name} is missing" for name in wanted if name not in header]
    loaded = [name for name in wanted if name in header]
    for name in loaded:
        info = header[name]
        if info.shape != wanted[name]:
            problems.append(f"{name} has shape {info.shape}, expected {wanted[name]}")
        elif info.dtype not in _FLOAT_BYTES:
            problems.append(f"{name} is {info.dtype}, expected one of {sorted(_FLOAT_BYTES)}")
    missing = tuple(name for name in expected if name in optional and name not in header)
    unexpected = tuple(name for name in header if name not in wanted and name not in optional)
    extra_layers = {int(found[1]) for found in map(_DECODER_LAYER.match, unexpected) if found}
    if extra_layers and any(map(_DECODER_LAYER.match, wanted)):
        problems.append(f"num_hidden_layers leaves out decoder layers {sorted(extra_layers)}")
    if problems:
        more = len(problems) - _MAX_PROBLEMS_SHOWN
        raise ValueError(
            "the weights do not fit llm_config.json and vit_config.json (--model_path): "
            + "; ".join(problems[:_MAX_PROBLEMS_SHOWN])
            + (f"; and {more} more" if more > 0 else "")
        )
    logger.info(
        "weights: %d tensors to load, %d missing, %d unexpected",
        len(loaded),
        len(missing),
        len(unexpected),
    )
    if unexpected:
        logger.warning("weights: not used by the model: %s", ", ".join(unexpected))
    return LoadReport(tuple(loaded), missing, unexpected)


@torch.no_grad()
def load_sharded(module: nn.Module, file: str | Path, report: LoadReport) -> None:
    """Fills the parameters named in `report.loaded` from `file`, each rank its own rows only.

    Parameters may be plain tensors or FSDP2 / HSDP DTensors sharded on dim 0, on any real device
    and in any float dtype. One tensor's rows at a time are in host memory, in the file's dtype.
    Raises ValueError if a parameter is still on the meta device, is sharded otherwise, or is in
    neither list of the report.
    """
    params = dict(module.named_parameters())
    unknown = set(params) - set(report.loaded) - POSITION_TABLES - set(report.missing)
    absent = set(report.loaded) - set(params)
    if unknown or absent:
        raise ValueError(
            f"the module is not the one that was checked: not in the report {sorted(unknown)}, "
            f"not in the module {sorted(absent)}"
        )
    with safe_open(file, framework="pt") as weights:
        for name in report.loaded:
            local, rows = _local_part(name, params[name])
            if local.numel():
                # Moved before it is cast: half the bytes cross the bus, and no fp32 host copy.
                local.copy_(weights.get_slice(name)[rows].to(local.device))


@torch.no_grad()
def fill_sharded(module: nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    """Copies this rank's rows of full `tensors` into parameters: the rebuilt position tables.

    Raises ValueError if a name is not a parameter or if a shape differs.
    """
    params = dict(module.named_parameters())
    for name, tensor in tensors.items():
        if name not in params or params[name].shape != tensor.shape:
            raise ValueError(f"{name} {tuple(tensor.shape)} is not a parameter of the module")
        local, rows = _local_part(name, params[name])
        local.copy_(tensor[rows])


def _local_part(name: str, param: torch.Tensor) -> tuple[torch.Tensor, slice]:
    if param.is_meta:
        raise ValueError(f"{name} is on the meta device, call to_empty first")
    start, stop = local_rows(param)
    local = param.to_local() if isinstance(param, DTensor) else param
    if tuple(local.shape) != (stop - start, *param.shape[1:]):
        raise ValueError(f"{name}: rows {start}:{stop} do not fit shard {tuple(local.shape)}")
    return local, slice(start, stop)


def local_rows(param: torch.Tensor) -> tuple[int, int]:
    """First and one-past-last row of `param` (at least 1-D) that this rank stores.

    Dim 0 is cut as torch.chunk does: ceil(rows / ranks) each, the last ranks short or empty.
    """
    start, stop = 0, param.shape[0]
    if not isinstance(param, DTensor):
        return start, stop
    for mesh_dim, placement in enumerate(param.placements):
        if type(placement) is Replicate:
            continue
        if type(placement) is not Shard or placement.dim != 0:  # subclasses cut in other orders
            raise ValueError(f"cannot load a parameter placed as {param.placements}, only Shard(0)")
        chunk = math.ceil((stop - start) / param.device_mesh.size(mesh_dim))
        first = min(start + chunk * param.device_mesh.get_local_rank(mesh_dim), stop)
        start, stop = first, min(first + chunk, stop)
    return start, stop
