"""Training checkpoints: a resumed run equals an uninterrupted one, and failures leave nothing."""

import json
import logging
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from PIL import Image
from torch import nn
from torch.distributed.fsdp import fully_shard

from data.geneval import parse_line
from tests.spawn import run_ranks
from train import checkpoint
from train.checkpoint import (
    TrainState,
    checkpoint_folder,
    latest_checkpoint,
    load_checkpoint,
    save_checkpoint,
)
from train.records import BufferEntry

PROMPT = (
    '{"tag": "colors", "include": [{"class": "cat", "count": 1, "color": "red"}], '
    '"prompt": "a red cat"}'
)


@dataclass
class Context:
    rank: int = 0
    world_size: int = 1

    def all_gather_object(self, value: object) -> list:
        if not dist.is_initialized():
            return [value]
        values = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values


class Toy(nn.Module):
    """Rows that two ranks cannot share evenly, and a part without a gradient."""

    def __init__(self, width: int = 5) -> None:
        super().__init__()
        self.first = nn.Linear(3, width)
        self.last = nn.Linear(width, 1)
        self.unused = nn.Linear(2, 2)
        self.frozen = nn.Linear(2, 3).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.first(x)))


class Run:
    """A toy trainer: model, AdamW with warm-up, one random stream."""

    def __init__(self, seed: int, shard: bool, width: int = 5, fused: bool = False) -> None:
        torch.manual_seed(seed)
        self.model = Toy(width)
        if shard:
            fully_shard(self.model.first)
            fully_shard(self.model)
        trained = [param for param in self.model.parameters() if param.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=0.05, fused=fused)
        self.step = 0
        self.noise = torch.Generator().manual_seed(seed)

    def train(self, steps: int) -> None:
        for _ in range(steps):
            x = torch.randn(4, 3, generator=self.noise)
            self.model(x).square().mean().backward()
            self.optimizer.param_groups[0]["lr"] = 0.05 * min(1.0, self.step / 5)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.step += 1

    def state(self, step: int, buffer: list[BufferEntry]) -> TrainState:
        return TrainState(
            step=step,
            epoch=step - 1,
            total_steps=6,
            recipe="upstream",
            generators={"noise": self.noise.get_state()},
            buffer=buffer,
        )

    def resume(self, folder: Path, context: Context) -> TrainState:
        state = load_checkpoint(folder, self.model, self.optimizer, context, 6, "upstream")
        self.step = state.step
        self.noise.set_state(state.generators["noise"])
        return state

    def everything(self) -> dict[str, torch.Tensor]:
        found = {"noise": self.noise.get_state()}
        for name, param in self.model.named_parameters():
            parts = {"value": param.detach()} | dict(self.optimizer.state.get(param, {}))
            for part, tensor in parts.items():
                local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
                found[f"{name}.{part}"] = local.clone()
        return found


def _entry(rank: int, mode: str = "RGB") -> BufferEntry:
    picture = Image.new(mode, (8, 6), (10 * rank, 20, 30) if mode == "RGB" else 0)
    return BufferEntry(parse_line(PROMPT, "test", 1), 0.1 + rank, picture)


def _equal(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> None:
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name


def _resume_worker(rank: int, world_size: int, run_dir: str) -> None:
    context = Context(rank, world_size)
    whole = Run(seed=rank, shard=True)
    whole.train(3)
    folder = checkpoint_folder(run_dir, 3)
    saved = whole.state(3, [_entry(rank), _entry(rank + 5)])
    save_checkpoint(folder, whole.model, whole.optimizer, saved, context)
    at_save = whole.everything()
    whole.train(3)
    assert "unused.weight.exp_avg" not in at_save and "first.weight.exp_avg" in at_save

    assert latest_checkpoint(run_dir) == folder
    resumed = Run(seed=77 + rank, shard=True)
    resumed.train(1)
    state = resumed.resume(folder, context)
    _equal(resumed.everything(), at_save)
    resumed.train(3)
    _equal(resumed.everything(), whole.everything())

    assert (state.step, state.epoch) == (3, 2)
    for entry, expected in zip(state.buffer, saved.buffer, strict=True):
        assert (entry.prompt, entry.score) == (expected.prompt, expected.score)
        assert entry.picture.mode == "RGB"
        assert entry.picture.tobytes() == expected.picture.tobytes()

    # One rank alone cannot write: all ranks hear of it, and there is no new checkpoint.
    bad = whole.state(6, [_entry(rank, "CMYK" if rank == 1 else "RGB")])
    with pytest.raises(RuntimeError, match="rank 1: ValueError: .*CMYK, expected RGB"):
        save_checkpoint(checkpoint_folder(run_dir, 6), whole.model, whole.optimizer, bad, context)
    assert [path.name for path in Path(run_dir, "checkpoints").glob("step_*")] == [folder.name]

    # Nor can one rank alone miss its file.
    dist.barrier()
    if rank == 0:
        (folder / "rank_00001.pt").unlink()
    dist.barrier()
    with pytest.raises(RuntimeError, match="rank 1: FileNotFoundError"):
        resumed.resume(folder, context)


def test_resumed_run_is_bit_identical(tmp_path):
    run_ranks(_resume_worker, 2, str(tmp_path))


@pytest.fixture
def run():
    run = Run(seed=0, shard=False)
    run.train(2)
    return run


def _save(run: Run, run_dir: Path, step: int, keep_last: int = 0) -> Path:
    folder = checkpoint_folder(run_dir, step)
    state = run.state(step, [])
    save_checkpoint(folder, run.model, run.optimizer, state, Context(), keep_last)
    return folder


@pytest.mark.parametrize("fused", [False, True])
def test_one_rank_without_a_process_group(tmp_path, fused):
    whole = Run(seed=0, shard=False, fused=fused)
    whole.train(3)
    folder = _save(whole, tmp_path, 3)
    whole.train(2)
    resumed = Run(seed=1, shard=False, fused=fused)
    resumed.resume(folder, Context())
    resumed.train(2)
    _equal(resumed.everything(), whole.everything())


def test_killed_save_is_never_taken_for_a_checkpoint(tmp_path, run, monkeypatch):
    class Killed(BaseException):
        pass

    def kill(*_):
        raise Killed

    first = _save(run, tmp_path, 5)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "_write_rank_file", kill)
        with pytest.raises(Killed):
            _save(run, tmp_path, 10)
    names = {path.name for path in first.parent.iterdir()}
    assert names == {"step_000005", ".step_000010.partial"}
    assert latest_checkpoint(tmp_path) == first
    _save(run, tmp_path, 15)
    names = {path.name for path in first.parent.iterdir()}
    assert names == {"step_000005", "step_000015"}


def test_full_disk_is_reported(tmp_path, run, monkeypatch):
    def fail(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint.torch, "save", fail)
    with pytest.raises(RuntimeError, match="saving .*step_000005 failed .*No space left"):
        _save(run, tmp_path, 5)
    assert latest_checkpoint(tmp_path) is None


def test_latest_sorts_by_number_and_passes_strange_names(tmp_path, run):
    assert latest_checkpoint(tmp_path) is None
    first = _save(run, tmp_path, 999_999)
    newest = first.with_name("step_1000000")
    shutil.copytree(first, newest)
    unfinished = first.with_name("step_2000000")
    shutil.copytree(first, unfinished)
    (unfinished / "train_state.json").unlink()
    shutil.copytree(first, first.with_name("step_best"))
    shutil.copytree(first, first.with_name("step_3000000_old"))
    assert latest_checkpoint(tmp_path) == newest
    with pytest.raises(RuntimeError, match="--resume_from .*unfinished"):
        run.resume(unfinished, Context())


def test_keep_last_prunes_old_ones_but_never_the_new_one(tmp_path, run):
    for step in (2, 4, 10):
        _save(run, tmp_path, step, keep_last=2)
    parent = tmp_path / "checkpoints"
    assert {path.name for path in parent.iterdir()} == {"step_000004", "step_000010"}
    _save(run, tmp_path, 3, keep_last=1)
    assert {path.name for path in parent.iterdir()} == {"step_000003", "step_000010"}


def test_saving_a_step_again_replaces_it(tmp_path, run):
    _save(run, tmp_path, 2)
    run.train(1)
    folder = _save(run, tmp_path, 2)
    again = Run(seed=1, shard=False)
    again.resume(folder, Context())
    _equal(again.everything(), run.everything())
    assert [path.name for path in folder.parent.iterdir()] == ["step_000002"]


def test_other_seeds_or_recipe_warn(tmp_path, run, caplog):
    folder = _save(run, tmp_path, 2)
    with caplog.at_level(logging.WARNING, "faster_r3"):
        load_checkpoint(folder, run.model, run.optimizer, Context(), 6, "upstream")
        assert not [record for record in caplog.records if record.name == "faster_r3"]
        load_checkpoint(folder, run.model, run.optimizer, Context(), 7, "consistent")
    assert "total_steps 6 and goes on with 7" in caplog.text
    assert "recipe upstream and goes on with consistent" in caplog.text


def test_other_world_size_is_refused(tmp_path, run):
    folder = _save(run, tmp_path, 2)
    record = json.loads((folder / "train_state.json").read_text())
    (folder / "train_state.json").write_text(json.dumps(record | {"world_size": 8}))
    with pytest.raises(RuntimeError, match="saved by 8 ranks, this run has 1.*--nproc_per_node"):
        run.resume(folder, Context())


def test_other_models_are_refused_before_anything_changes(tmp_path, run):
    folder = _save(run, tmp_path, 2)
    other = Run(seed=3, shard=False, width=6)
    before = other.everything()
    with pytest.raises(RuntimeError, match=r"model.first.weight has shape \(5, 3\), expected"):
        other.resume(folder, Context())
    _equal(other.everything(), before)
    run.model.extra = nn.Linear(1, 1)
    with pytest.raises(RuntimeError, match="model.extra.weight is missing"):
        run.resume(folder, Context())
    del run.model.extra, run.model.frozen
    with pytest.raises(RuntimeError, match="model.frozen.weight is not of this model"):
        run.resume(folder, Context())


def test_other_optimizers_are_refused(tmp_path, run):
    sgd = torch.optim.SGD(run.model.parameters())
    with pytest.raises(ValueError, match="only AdamW .*SGD"):
        save_checkpoint(tmp_path / "step_1", run.model, sgd, run.state(1, []), Context())


def test_prompts_without_clauses_survive(tmp_path, run):
    raw = '{"tag": "style", "prompt": "an old map", "include": [1]}'
    prompt = parse_line(raw, "test", 1, require_clauses=False)
    entry = BufferEntry(prompt, 1.0, Image.new("RGB", (2, 2)))
    folder = checkpoint_folder(tmp_path, 2)
    state = replace(run.state(2, []), buffer=[entry])
    save_checkpoint(folder, run.model, run.optimizer, state, Context())
    assert run.resume(folder, Context()).buffer[0].prompt == prompt
