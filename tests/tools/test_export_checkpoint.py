"""Export of a training checkpoint: what two ranks saved comes out in bf16, and nothing else."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor

from modeling.bagel.weights import (
    POSITION_TABLES,
    check_header,
    parameter_shapes,
    read_bagel_config,
    read_header,
)
from tests.spawn import run_ranks
from tests.tiny import CHECKPOINT
from tools.export_checkpoint import main
from train import engine
from train.checkpoint import TrainState, checkpoint_folder, save_checkpoint


class Ranks:
    """What saving asks of the process set-up."""

    def __init__(self, rank: int, world_size: int):
        self.rank = rank
        self.world_size = world_size

    def all_gather_object(self, value: object) -> list:
        values = [None] * self.world_size
        torch.distributed.all_gather_object(values, value)
        return values


def _save(rank: int, world_size: int, run_dir: str) -> None:
    """A sharded tiny model of random weights, which bf16 does not hold, with Adam's state."""
    model = engine.meta_model(read_bagel_config(CHECKPOINT))
    for module in (*model.decoder.layers, model):
        torch.distributed.fsdp.fully_shard(module)
    model.to_empty(device="cpu")
    torch.manual_seed(rank)
    for param in model.parameters():
        local = param.detach().to_local()
        local.copy_(torch.randn(local.shape))
    adam = torch.optim.AdamW(model.parameters(), lr=0.1)
    for param in model.parameters():
        param.grad = param.detach().clone()
    adam.step()
    full = {
        name: param.full_tensor() if isinstance(param, DTensor) else param
        for name, param in model.state_dict().items()
    }
    if rank == 0:
        save_file({n: t.contiguous() for n, t in full.items()}, f"{run_dir}/trained.safetensors")
    state = TrainState(step=7, epoch=7, total_steps=9, recipe="consistent")
    save_checkpoint(checkpoint_folder(run_dir, 7), model, adam, state, Ranks(rank, world_size))


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    run_ranks(_save, 2, str(folder))
    return folder


def export(checkpoint: Path, out: Path, source: Path = CHECKPOINT) -> int:
    return main([str(checkpoint), "--model_path", str(source), str(out)])


def test_the_export_holds_the_trained_values(run_dir, tmp_path):
    out = tmp_path / "exported"
    assert export(checkpoint_folder(run_dir, 7), out) == 0
    model = engine.meta_model(read_bagel_config(out))
    file = out / "ema.safetensors"
    report = check_header(read_header(file), parameter_shapes(model))
    assert report.missing == () and report.unexpected == ()
    trained = load_file(run_dir / "trained.safetensors")
    written, source = load_file(file), load_file(CHECKPOINT / "ema.safetensors")
    assert written.keys() == source.keys()
    for name, tensor in written.items():
        is_table = name in POSITION_TABLES
        expected = source[name] if is_table else trained[name]
        assert tensor.dtype == torch.bfloat16
        assert torch.equal(tensor, expected.to(torch.bfloat16)), name
        assert is_table or not torch.equal(tensor.float(), expected), "bf16 held it by chance"
    for name in ("llm_config.json", "vit_config.json", "vocab.json", "ae.safetensors"):
        assert (out / name).read_bytes() == (CHECKPOINT / name).read_bytes()


def test_an_existing_folder_is_left_alone(run_dir, tmp_path, capsys):
    assert export(checkpoint_folder(run_dir, 7), tmp_path) == 1
    assert "exists already" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_an_unfinished_checkpoint_is_refused(run_dir, tmp_path, capsys):
    copy = tmp_path / "step_000007"
    shutil.copytree(checkpoint_folder(run_dir, 7), copy)
    (copy / "train_state.json").unlink()
    assert export(copy, tmp_path / "out") == 1
    assert "train_state.json is missing: not a checkpoint" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_checkpoint_of_another_model_is_refused(run_dir, tmp_path, capsys):
    source = tmp_path / "source"
    shutil.copytree(CHECKPOINT, source)
    config = source / "vit_config.json"
    values = json.loads(config.read_text())
    config.write_text(json.dumps({**values, "hidden_size": 2 * values["hidden_size"]}))
    assert export(checkpoint_folder(run_dir, 7), tmp_path / "out", source) == 1
    message = capsys.readouterr().err
    assert message.startswith("error: ") and "tensors do not fit: model.vit_model" in message
    assert not (tmp_path / "out").exists()


def test_a_broken_checkpoint_is_named(run_dir, tmp_path, capsys):
    copy = tmp_path / "step_000007"
    shutil.copytree(checkpoint_folder(run_dir, 7), copy)
    for path in (copy / "tensors").glob("*.distcp"):
        path.write_bytes(path.read_bytes()[:100])
    assert export(copy, tmp_path / "out") == 1
    assert capsys.readouterr().err.startswith(f"error: {copy} cannot be read: tensors by rank")
    assert not (tmp_path / "out").exists()
