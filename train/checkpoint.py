"""Training state on disk: saved and restored shard by shard, complete or not there at all."""

import json
import logging
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from train.files import write_text_atomic
from train.records import BufferEntry
from train.refine_buffer import entry_from_record, entry_to_record

logger = logging.getLogger("faster_r3")

STATE_FILE = "train_state.json"  # written last, so a folder that has it is complete
TENSOR_FOLDER = "tensors"
_STEP_FOLDER = re.compile(r"step_(\d+)")
_UNFINISHED = ".partial"
_ADAM_PARTS = ("step", "exp_avg", "exp_avg_sq")


class Ranks(Protocol):
    """What saving needs of the process set-up."""

    rank: int
    world_size: int

    def all_gather_object(self, value: object) -> list: ...


@dataclass(frozen=True)
class TrainState:
    """Everything a run needs beside the weights and Adam's state to go on bit for bit.

    `step` is the next one to run. `generators` (uint8 states) and `buffer` are each rank's own,
    the rest is equal on all ranks.
    """

    step: int
    epoch: int
    total_steps: int
    recipe: str
    generators: dict[str, Tensor] = field(default_factory=dict)
    buffer: list[BufferEntry] = field(default_factory=list)


def checkpoint_folder(run_dir: str | Path, step: int) -> Path:
    """`checkpoints/step_000050` of a run."""
    return Path(run_dir) / "checkpoints" / f"step_{step:06d}"


def latest_checkpoint(run_dir: str | Path) -> Path | None:
    """The complete checkpoint of a run with the highest step, or None. Strange names are passed."""
    found = _complete_checkpoints(Path(run_dir) / "checkpoints")
    return found[-1] if found else None


def save_checkpoint(
    folder: str | Path,
    model: nn.Module,
    optimizer: torch.optim.AdamW,
    state: TrainState,
    context: Ranks,
    keep_last: int = 0,
) -> None:
    """Saves parameters, Adam state and `state` as `folder`, on a file system that all ranks see.

    A collective. Ranks write their own shards, and rank 0 gives the folder its name when all have
    finished; an older folder of that name is replaced. Then only the `keep_last` highest steps
    beside it are kept (0 keeps all). Raises RuntimeError on every rank if any rank fails.
    """
    folder = Path(folder)
    partial = folder.with_name(f".{folder.name}{_UNFINISHED}")
    tensors = _model_tensors(model) | _adam_tensors(model, optimizer)
    what = f"saving {folder}"
    _on_all(context, what, lambda: _start_folder(partial) if context.rank == 0 else None)
    _on_all(context, what, lambda: _write_tensors(partial / TENSOR_FOLDER, tensors))
    _on_all(context, what, lambda: _write_rank_file(_rank_file(partial, context), state))

    def finish() -> None:
        record = {
            "world_size": context.world_size,
            **{name: getattr(state, name) for name in _shared_fields()},
        }
        write_text_atomic(partial / STATE_FILE, json.dumps(record, indent=2) + "\n")
        _replace(partial, folder)
        _prune(folder, keep_last)

    _on_all(context, what, lambda: finish() if context.rank == 0 else None)
    logger.info("saved %s", folder)


def load_checkpoint(
    folder: str | Path,
    model: nn.Module,
    optimizer: torch.optim.AdamW,
    context: Ranks,
    total_steps: int,
    recipe: str,
) -> TrainState:
    """Restores what `save_checkpoint` wrote, in place, and returns the rest of the state.

    A collective. `model` is materialised and sharded, `optimizer` is new or old. Another
    `total_steps` or `recipe` than the run's (the arguments) warns: the one is part of the seeds,
    the other of the numbers. Raises RuntimeError on every rank, naming the rank and the cause, if
    the folder is not a complete checkpoint, is of another world size (generators and buffer are
    per rank), or holds other parameters.
    """
    folder = Path(folder)
    what = f"--resume_from {folder}"
    record = _on_all(context, what, lambda: _read_record(folder, context.world_size))
    saved = _on_all(context, what, lambda: _check_tensors(folder, model, optimizer))
    _prepare_adam(model, optimizer, saved)
    tensors = _model_tensors(model) | _adam_tensors(model, optimizer)
    _on_all(context, what, lambda: _read_tensors(folder / TENSOR_FOLDER, tensors))
    own = _on_all(context, what, lambda: _read_rank_file(_rank_file(folder, context)))
    state = TrainState(**{name: record[name] for name in _shared_fields()}, **own)
    for name, now in (("total_steps", total_steps), ("recipe", recipe)):
        then = getattr(state, name)
        if then != now:
            logger.warning(
                "%s was saved with %s %s and goes on with %s: it will not repeat the first run's "
                "numbers",
                folder,
                name,
                then,
                now,
            )
    return state


def load_weights(folder: str | Path, model: nn.Module) -> None:
    """Reads a checkpoint's parameters into `model` (plain, materialised), in the model's dtypes.

    For a single process without a process group, whatever the number of ranks that saved. Raises
    ValueError for a folder that is no complete checkpoint or holds other parameters, RuntimeError
    where it cannot be read.
    """
    folder = Path(folder)
    _require_complete(folder)
    saved = _saved_shapes(folder)
    weights = {name: shape for name, shape in saved.items() if name.startswith("model.")}
    _require_fit(_model_shapes(model), weights)
    try:
        _read_tensors(folder / TENSOR_FOLDER, _model_tensors(model))
    except RuntimeError as error:
        raise RuntimeError(f"{folder} cannot be read: {error}") from error


def _on_all(context: Ranks, what: str, action: Callable):
    """Result of `action`; if it fails anywhere, all ranks raise, so that none waits for another."""
    result, error = None, None
    try:
        result = action()
    except Exception as caught:  # raised again below, here and on the other ranks
        error = caught
    text = None if error is None else f"{type(error).__name__}: {error}"
    reports = context.all_gather_object(text)
    failed = [f"rank {rank}: {report}" for rank, report in enumerate(reports) if report is not None]
    if failed:
        raise RuntimeError(f"{what} failed on {'; '.join(failed)}") from error
    return result


# Tensors. One flat dict of names, so that files and errors speak of the model's own names.


def _model_tensors(model: nn.Module) -> dict[str, Tensor]:
    return {f"model.{name}": param.detach() for name, param in model.named_parameters()}


def _adam_tensors(model: nn.Module, optimizer: torch.optim.AdamW) -> dict[str, Tensor]:
    """Adam's state by parameter name; a parameter that never had a gradient has none."""
    found = {}
    for name, param in _optimized(model, optimizer).items():
        state = optimizer.state.get(param)
        if state:
            if set(state) != set(_ADAM_PARTS):
                raise ValueError(f"{name}: expected AdamW state {_ADAM_PARTS}, got {sorted(state)}")
            found |= {f"{part}.{name}": state[part] for part in _ADAM_PARTS}
    return found


def _optimized(model: nn.Module, optimizer: torch.optim.AdamW) -> dict[str, nn.Parameter]:
    if not isinstance(optimizer, torch.optim.AdamW):
        raise ValueError(f"only AdamW can be saved, got {type(optimizer).__name__}")
    members = {id(param) for group in optimizer.param_groups for param in group["params"]}
    return {name: param for name, param in model.named_parameters() if id(param) in members}


def _prepare_adam(model: nn.Module, optimizer: torch.optim.AdamW, saved: set[str]) -> None:
    """Empty Adam state, in AdamW's own form, for exactly the parameters that were saved with it."""
    flags = {
        id(param): bool(group.get("fused") or group.get("capturable"))
        for group in optimizer.param_groups
        for param in group["params"]
    }
    optimizer.state.clear()
    for name, param in _optimized(model, optimizer).items():
        if f"step.{name}" in saved:
            device = param.device if flags[id(param)] else torch.device("cpu")
            optimizer.state[param] = {
                "step": torch.zeros((), dtype=torch.float32, device=device),
                "exp_avg": torch.zeros_like(param, memory_format=torch.preserve_format),
                "exp_avg_sq": torch.zeros_like(param, memory_format=torch.preserve_format),
            }


def _check_tensors(folder: Path, model: nn.Module, optimizer: torch.optim.AdamW) -> set[str]:
    """Names in the checkpoint, after comparing names and shapes; nothing is read or changed."""
    saved, shapes = _saved_shapes(folder), _model_shapes(model)
    for name, param in _optimized(model, optimizer).items():
        present = [part for part in _ADAM_PARTS if f"{part}.{name}" in saved]
        shape = tuple(param.shape)
        shapes |= {f"{part}.{name}": shape if part != "step" else () for part in present}
    _require_fit(shapes, saved)
    return set(saved)


def _model_shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {f"model.{name}": tuple(param.shape) for name, param in model.named_parameters()}


def _saved_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    metadata = dcp.FileSystemReader(folder / TENSOR_FOLDER).read_metadata().state_dict_metadata
    return {name: tuple(entry.size) for name, entry in metadata.items()}


def _require_fit(wanted: dict[str, tuple[int, ...]], saved: dict[str, tuple[int, ...]]) -> None:
    problems = [f"{name} is missing" for name in wanted if name not in saved]
    problems += [f"{name} is not of this model" for name in saved if name not in wanted]
    problems += [
        f"{name} has shape {saved[name]}, expected {shape}"
        for name, shape in wanted.items()
        if name in saved and saved[name] != shape
    ]
    if problems:
        raise ValueError(f"{len(problems)} tensors do not fit: {'; '.join(problems[:8])}")


def _write_tensors(folder: Path, tensors: dict[str, Tensor]) -> None:
    _collective(dcp.save, tensors, folder)


def _read_tensors(folder: Path, tensors: dict[str, Tensor]) -> None:
    _collective(dcp.load, tensors, folder)


def _collective(function: Callable, tensors: dict[str, Tensor], folder: Path) -> None:
    try:
        function(tensors, checkpoint_id=folder, no_dist=not dist.is_initialized())
    except dcp.CheckpointException as error:  # a BaseException, its text a page of tracebacks
        causes = {rank: repr(cause) for rank, (cause, _) in error.failures.items()}
        raise RuntimeError(f"tensors by rank: {causes}") from error


# A rank's own part: plain containers, numbers, text and bytes, so that it loads as data only.


def _rank_file(folder: Path, context: Ranks) -> Path:
    return folder / f"rank_{context.rank:05d}.pt"


def _write_rank_file(path: Path, state: TrainState) -> None:
    buffer = [entry_to_record(entry) for entry in state.buffer]
    with path.open("wb") as stream:
        torch.save({"generators": dict(state.generators), "buffer": buffer}, stream)
        stream.flush()
        os.fsync(stream.fileno())


def _read_rank_file(path: Path) -> dict:
    own = torch.load(path, map_location="cpu", weights_only=True)
    buffer = [entry_from_record(record) for record in own["buffer"]]
    return {"generators": own["generators"], "buffer": buffer}


# Folders.


def _shared_fields() -> tuple[str, ...]:
    names = TrainState.__dataclass_fields__
    return tuple(name for name in names if name not in ("generators", "buffer"))


def _read_record(folder: Path, world_size: int) -> dict:
    _require_complete(folder)
    record = json.loads((folder / STATE_FILE).read_text(encoding="utf-8"))
    if record["world_size"] != world_size:
        raise ValueError(
            f"saved by {record['world_size']} ranks, this run has {world_size}: random streams and "
            "buffer are per rank (--nproc_per_node, --nnodes)"
        )
    return record


def _require_complete(folder: Path) -> None:
    path = folder / STATE_FILE
    if not path.is_file():
        raise ValueError(f"{path} is missing: not a checkpoint, or an unfinished one")


def _start_folder(partial: Path) -> None:
    partial.parent.mkdir(parents=True, exist_ok=True)
    for leftover in partial.parent.glob(f".step_*{_UNFINISHED}"):  # of killed saves
        shutil.rmtree(leftover)
    partial.mkdir()


def _replace(partial: Path, folder: Path) -> None:
    if not folder.exists():
        partial.rename(folder)
        return
    logger.warning("replacing %s", folder)
    old = folder.with_name(f".{folder.name}.old{_UNFINISHED}")
    folder.rename(old)
    partial.rename(folder)
    shutil.rmtree(old)


def _complete_checkpoints(parent: Path) -> list[Path]:
    found = []
    for path in parent.glob("step_*"):
        match = _STEP_FOLDER.fullmatch(path.name)
        if match and (path / STATE_FILE).is_file():
            found.append((int(match[1]), path))
    return [path for _, path in sorted(found)]


def _prune(folder: Path, keep_last: int) -> None:
    if keep_last > 0:
        for path in _complete_checkpoints(folder.parent)[:-keep_last]:
            if path != folder:
                shutil.rmtree(path)
