"""Export: what was loaded comes out again bit for bit, from plain and from sharded parameters."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed.fsdp import fully_shard

from modeling.bagel.bagel import Bagel
from modeling.bagel.export import copy_other_files, export_checkpoint, write_bf16
from modeling.bagel.tokenizer import load_tokenizer
from modeling.bagel.weights import (
    POSITION_TABLES,
    check_header,
    load_sharded,
    parameter_shapes,
    read_bagel_config,
    read_header,
)
from tests.spawn import run_ranks

TINY = Path(__file__).parents[2] / "parity" / "tiny_bagel"
WEIGHTS = TINY / "ema.safetensors"


class Odd(nn.Module):
    """Rows that two ranks cannot share evenly, values that bf16 does not hold."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first = nn.Linear(3, 5)
        self.second = nn.Linear(2, 1)


def _load_tiny(module: nn.Module, file: Path = WEIGHTS) -> None:
    report = check_header(read_header(file), parameter_shapes(module))
    module.to_empty(device="cpu")
    load_sharded(module, file, report)


def _new_bagel() -> Bagel:
    with torch.device("meta"):
        return Bagel(read_bagel_config(TINY))


def _export_worker(rank: int, world_size: int, folder: str) -> None:
    module = _new_bagel()
    fully_shard(module.language_model)
    fully_shard(module)
    _load_tiny(module)
    export_checkpoint(module, TINY, Path(folder) / "tiny", is_writer=rank == 0)
    odd = fully_shard(Odd())
    export_checkpoint(odd, TINY, Path(folder) / "odd", is_writer=rank == 1)


def test_export_from_shards(tmp_path):
    run_ranks(_export_worker, 2, str(tmp_path))
    source, exported = load_file(WEIGHTS), load_file(tmp_path / "tiny" / "ema.safetensors")
    assert exported.keys() == source.keys()
    for name, tensor in exported.items():
        assert tensor.dtype == torch.bfloat16
        assert torch.equal(tensor, source[name]), name
    odd = load_file(tmp_path / "odd" / "ema.safetensors")
    for name, value in Odd().named_parameters():
        assert torch.equal(odd[name], value.bfloat16()), name
    assert sorted(path.name for path in tmp_path.iterdir()) == ["odd", "tiny"]


def test_exported_folder_is_a_checkpoint(tmp_path):
    (tmp_path / ".out.partial").mkdir()
    (tmp_path / ".out.partial" / "leftover").touch()
    module = _new_bagel()
    _load_tiny(module)
    export_checkpoint(module, TINY, tmp_path / "out", is_writer=True)
    out = tmp_path / "out"
    assert sorted(path.name for path in out.iterdir()) == sorted(p.name for p in TINY.iterdir())
    assert read_bagel_config(out) == read_bagel_config(TINY)
    assert load_tokenizer(out).encode("a photo") == load_tokenizer(TINY).encode("a photo")
    assert (out / "ae.safetensors").read_bytes() == (TINY / "ae.safetensors").read_bytes()
    again = _new_bagel()
    _load_tiny(again, out / "ema.safetensors")
    for name, param in again.named_parameters():
        assert name in POSITION_TABLES or torch.equal(param, module.get_parameter(name)), name


def test_values_are_rounded_to_nearest_even(tmp_path):
    values = torch.tensor([1.0, 1 + 2**-8, 1 + 3 * 2**-8, -1e-40])
    write_bf16(tmp_path / "x.safetensors", {"a": (2, 2)}, [values.view(2, 2)])
    expected = torch.tensor([1.0, 1.0, 1 + 2**-6, -1e-40]).bfloat16().view(2, 2)
    assert torch.equal(load_file(tmp_path / "x.safetensors")["a"], expected)
    assert (tmp_path / "x.safetensors").stat().st_size % 8 == 0


def test_announced_shapes_are_kept(tmp_path):
    file = tmp_path / "x.safetensors"
    with pytest.raises(ValueError, match=r"a has shape \(3,\), announced \(2,\)"):
        write_bf16(file, {"a": (2,)}, [torch.zeros(3)])
    for tensors in ([torch.zeros(2)], [torch.zeros(2)] * 3):
        with pytest.raises(ValueError, match="zip"):
            write_bf16(file, {"a": (2,), "b": (2,)}, tensors)


def test_nothing_is_overwritten_and_failures_leave_no_folder(tmp_path):
    module = Odd()
    (tmp_path / "out").mkdir()
    with pytest.raises(ValueError, match="exists already"):
        export_checkpoint(module, TINY, tmp_path / "out", is_writer=True)
    source = tmp_path / "source"
    shutil.copytree(TINY, source)
    (source / "ae.safetensors").unlink()
    with pytest.raises(ValueError, match="--model_path .*ae.safetensors is missing"):
        export_checkpoint(module, source, tmp_path / "other", is_writer=True)
    assert not (tmp_path / "other").exists()


def test_linked_autoencoder_does_not_dangle(tmp_path):
    source, out = tmp_path / "source", tmp_path / "out"
    (source / "blobs").mkdir(parents=True)
    out.mkdir()
    shutil.copy(TINY / "ae.safetensors", source / "blobs" / "0f3a")
    (source / "ae.safetensors").symlink_to("blobs/0f3a")
    copy_other_files(source, out)
    assert (out / "ae.safetensors").read_bytes() == (TINY / "ae.safetensors").read_bytes()
