"""Weight files: header checks, one test a failure, and loading into plain and sharded modules."""

import json
import logging
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

from modeling.bagel.bagel import Bagel
from modeling.bagel.weights import (
    POSITION_TABLES,
    TensorInfo,
    check_header,
    fill_sharded,
    find_weight_file,
    load_sharded,
    local_rows,
    parameter_shapes,
    read_bagel_config,
    read_header,
)
from tests.spawn import run_ranks

TINY = Path(__file__).parents[2] / "parity" / "tiny_bagel"
WEIGHTS = TINY / "ema.safetensors"
Q_PROJ = "language_model.model.layers.1.self_attn.q_proj.weight"


class Block(nn.Module):
    """Parameters and nested blocks by name, without a forward pass."""


def build(shapes: dict[str, tuple[int, ...]]) -> nn.Module:
    """A module on the meta device with the given parameter names and shapes."""
    root = Block()
    for name, shape in shapes.items():
        *parents, leaf = name.split(".")
        block = root
        for parent in parents:
            if parent not in dict(block.named_children()):
                block.add_module(parent, Block())
            block = block.get_submodule(parent)
        block.register_parameter(leaf, nn.Parameter(torch.empty(shape, device="meta")))
    return root


def shapes_of(file: Path) -> dict[str, tuple[int, ...]]:
    return {
        name: info.shape for name, info in read_header(file).items() if name not in POSITION_TABLES
    }


@pytest.fixture
def folder(tmp_path):
    shutil.copytree(TINY, tmp_path / "model")
    return tmp_path / "model"


def _edit_json(path: Path, **changes) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def _raw_file(path: Path, header: bytes, data: bytes = b"") -> Path:
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)
    return path


def test_header_is_what_the_library_reads():
    header = read_header(WEIGHTS)
    tensors = load_file(WEIGHTS)
    assert {name: info.shape for name, info in header.items()} == {
        name: tuple(tensor.shape) for name, tensor in tensors.items()
    }
    assert header[Q_PROJ] == TensorInfo("BF16", (64, 64))


def test_config_of_the_tiny_checkpoint(folder):
    (folder / "config.json").write_text("not JSON")
    config = read_bagel_config(folder)
    assert config.max_latent_size == 8
    assert (config.llm.num_layers, config.vit.num_layers) == (2, 2)


def test_weight_file_by_preference_and_never_by_glob(folder):
    shutil.copy(folder / "ema.safetensors", folder / "model.safetensors")
    assert find_weight_file(folder).name == "ema.safetensors"
    (folder / "ema.safetensors").unlink()
    assert find_weight_file(folder).name == "model.safetensors"
    (folder / "model.safetensors").rename(folder / "model-00001.safetensors")
    with pytest.raises(ValueError, match="--model_path .*ema.safetensors or model.safetensors"):
        find_weight_file(folder)


@pytest.mark.parametrize("rows", [None, 63, 0])
def test_latent_table_must_give_a_side(folder, rows):
    tensors = load_file(WEIGHTS)
    table = tensors.pop("latent_pos_embed.pos_embed")
    if rows is not None:
        tensors["latent_pos_embed.pos_embed"] = table[:rows].clone()
    save_file(tensors, folder / "ema.safetensors")
    with pytest.raises(ValueError, match="latent_pos_embed.pos_embed .*--model_path"):
        read_bagel_config(folder)


def test_truncated_and_padded_files(tmp_path):
    raw = WEIGHTS.read_bytes()
    file = tmp_path / "ema.safetensors"
    for content in (raw[:-1], raw + b"\0", raw[:5000]):
        file.write_bytes(content)
        with pytest.raises(ValueError, match="truncated.*--model_path"):
            read_header(file)


@pytest.mark.parametrize("content", [b"", b"\x80\x02}q", b"version https://git-lfs.github.com"])
def test_not_a_safetensors_file(tmp_path, content):
    file = tmp_path / "ema.safetensors"
    file.write_bytes(content)
    with pytest.raises(ValueError, match="not a safetensors file"):
        read_header(file)
    with pytest.raises(ValueError, match="is missing"):
        read_header(tmp_path / "absent")


@pytest.mark.parametrize(
    "header",
    [
        b"{,}",
        b"[1]",
        b'{"a": 1}',
        b'{"a": {"dtype": "BF16"}}',
        b'{"a": {"dtype": "BF16", "shape": 3, "data_offsets": [0, 6]}}',
        b'{"a": {"dtype": "BF16", "shape": [3], "data_offsets": [0, 8]}}',
        b'{"a": {"dtype": "BF16", "shape": [3], "data_offsets": [6]}}',
    ],
)
def test_damaged_headers(tmp_path, header):
    with pytest.raises(ValueError, match="header is damaged"):
        read_header(_raw_file(tmp_path / "ema.safetensors", header, b"\0" * 8))


def test_report_of_a_good_file(caplog):
    header = read_header(WEIGHTS)
    with caplog.at_level(logging.INFO, "faster_r3"):
        spare = {"spare.weight": TensorInfo("I64", (3,))}
        report = check_header(header | spare, shapes_of(WEIGHTS))
    assert set(report.loaded) == set(header) - POSITION_TABLES
    assert (report.missing, report.unexpected) == ((), ("spare.weight",))
    assert "109 tensors to load, 0 missing, 1 unexpected" in caplog.text
    assert "spare.weight" in caplog.text


def test_position_tables_are_optional_on_both_sides():
    header = read_header(WEIGHTS)
    shapes = shapes_of(WEIGHTS)
    tables = {"latent_pos_embed.pos_embed": (16, 64), "vit_pos_embed.pos_embed": (64, 64)}
    bare = {name: info for name, info in header.items() if name not in POSITION_TABLES}
    for file_header, missing in ((header, set()), (bare, POSITION_TABLES)):
        report = check_header(file_header, shapes | tables)
        assert set(report.loaded) == set(shapes)
        assert set(report.missing) == missing


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (None, f"{Q_PROJ} is missing"),
        (TensorInfo("BF16", (64, 32)), rf"{Q_PROJ} has shape \(64, 32\), expected \(64, 64\)"),
        (TensorInfo("F8_E4M3", (64, 64)), f"{Q_PROJ} is F8_E4M3"),
    ],
)
def test_bad_tensors_are_named(change, message):
    header = read_header(WEIGHTS)
    del header[Q_PROJ]
    if change is not None:
        header[Q_PROJ] = change
    with pytest.raises(ValueError, match=message + ".*") as caught:
        check_header(header, shapes_of(WEIGHTS))
    assert "--model_path" in str(caught.value) and "\n" not in str(caught.value)


def _layers(count: int) -> dict[str, tuple[int, ...]]:
    shapes = shapes_of(WEIGHTS)
    prefix = "language_model.model.layers."
    rest = {name: shape for name, shape in shapes.items() if not name.startswith(prefix)}
    first = {name: shape for name, shape in shapes.items() if name.startswith(prefix + "0")}
    for layer in range(count):
        rest |= {name.replace("layers.0", f"layers.{layer}"): s for name, s in first.items()}
    return rest


def test_wrong_layer_count_in_the_config():
    header = read_header(WEIGHTS)
    assert check_header(header, _layers(2)).unexpected == ()
    with pytest.raises(ValueError, match=r"layers\.2\..* is missing.* and 16 more"):
        check_header(header, _layers(3))
    with pytest.raises(ValueError, match=r"num_hidden_layers leaves out decoder layers \[1\]"):
        check_header(header, _layers(1))


def test_plain_load_equals_the_file():
    header = read_header(WEIGHTS)
    module = build(shapes_of(WEIGHTS))
    report = check_header(header, parameter_shapes(module))
    with pytest.raises(ValueError, match="meta device"):
        load_sharded(module, WEIGHTS, report)
    module.to_empty(device="cpu")
    for param in module.parameters():
        param.data.fill_(float("nan"))
    load_sharded(module, WEIGHTS, report)
    tensors = load_file(WEIGHTS)
    for name, param in module.named_parameters():
        assert param.dtype == torch.float32
        assert torch.equal(param, tensors[name].float()), name


def test_model_of_the_config_takes_the_whole_file():
    with torch.device("meta"):
        model = Bagel(read_bagel_config(TINY))
    report = check_header(read_header(WEIGHTS), parameter_shapes(model))
    assert (len(report.loaded), report.missing, report.unexpected) == (109, (), ())
    model.to_empty(device="cpu")
    load_sharded(model, WEIGHTS, report)
    fill_sharded(model, model.position_tables())
    for name, tensor in load_file(WEIGHTS).items():
        tolerance = 2**-8 if name in POSITION_TABLES else 0.0  # stored in bf16, rebuilt in fp32
        assert (model.get_parameter(name) - tensor.float()).abs().max() <= tolerance, name


def test_filling_refuses_strange_names_and_shapes():
    module = build({"a.pos_embed": (4, 2)}).to_empty(device="cpu")
    fill_sharded(module, {"a.pos_embed": torch.arange(8.0).view(4, 2)})
    assert torch.equal(module.get_parameter("a.pos_embed"), torch.arange(8.0).view(4, 2))
    for tensors in ({"a.pos_embed": torch.zeros(1, 2)}, {"b": torch.zeros(4, 2)}):
        with pytest.raises(ValueError, match="is not a parameter of the module"):
            fill_sharded(module, tensors)


def test_another_module_than_the_checked_one_is_refused():
    shapes = shapes_of(WEIGHTS)
    report = check_header(read_header(WEIGHTS), shapes)
    with pytest.raises(ValueError, match=r"not in the report \['extra.bias'\]"):
        load_sharded(build(shapes | {"extra.bias": (3,)}), WEIGHTS, report)
    del shapes["vae2llm.bias"]
    with pytest.raises(ValueError, match=r"not in the module \['vae2llm.bias'\]"):
        load_sharded(build(shapes), WEIGHTS, report)


UNEVEN = {"a.weight": (5, 3), "a.bias": (5,), "b.weight": (1, 4), "c.weight": (7,), "d": (4, 2)}


def _compare_shards(module: nn.Module, file: Path) -> None:
    load_sharded(module, file, check_header(read_header(file), parameter_shapes(module)))
    tensors = load_file(file)
    for name, param in module.named_parameters():
        start, stop = local_rows(param)
        assert torch.equal(param.to_local(), tensors[name][start:stop].float()), name
        assert torch.equal(param.full_tensor(), tensors[name].float()), name
    changed = {name: tensor.float() + 1 for name, tensor in tensors.items()}
    fill_sharded(module, {name: changed[name] for name in parameter_shapes(module)})
    for name, param in module.named_parameters():
        assert torch.equal(param.full_tensor(), changed[name]), name


def _sharded_worker(rank: int, world_size: int, uneven: str) -> None:
    meshes = [
        init_device_mesh("cpu", (world_size,)),
        init_device_mesh("cpu", (world_size, 1), mesh_dim_names=("replicate", "shard")),
        init_device_mesh("cpu", (1, world_size), mesh_dim_names=("replicate", "shard")),
    ]
    for file in (Path(uneven), WEIGHTS):
        for mesh in meshes:
            module = build(shapes_of(file))
            fully_shard(module.get_submodule("a" if file != WEIGHTS else "connector"), mesh=mesh)
            fully_shard(module, mesh=mesh)
            module.to_empty(device="cpu")
            _compare_shards(module, file)
    linear = fully_shard(
        nn.Linear(4, 4, bias=False), mesh=meshes[0], shard_placement_fn=lambda _: Shard(1)
    )
    with pytest.raises(ValueError, match="only Shard"):
        local_rows(linear.weight)


def test_sharded_load_equals_full_load(tmp_path):
    generator = torch.Generator().manual_seed(0)
    file = tmp_path / "uneven.safetensors"
    save_file(
        {name: torch.randn(s, generator=generator).bfloat16() for name, s in UNEVEN.items()}, file
    )
    run_ranks(_sharded_worker, 2, str(file))
