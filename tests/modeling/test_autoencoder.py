"""The autoencoder against golden values, the real checkpoint's shapes, and damaged files."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from modeling.autoencoder import AutoEncoder, VaeConfig, load_autoencoder

PARITY = Path(__file__).parents[1] / "parity"
TINY = PARITY / "tiny_bagel"


@pytest.fixture(scope="module")
def tiny() -> AutoEncoder:
    return load_autoencoder(TINY, "cpu")


@pytest.fixture(scope="module")
def golden() -> dict[str, torch.Tensor]:
    return load_file(PARITY / "units.safetensors")


def real_shapes() -> dict[str, tuple[int, ...]]:
    keys = json.loads((PARITY / "checkpoint_keys.json").read_text())["vae"]
    return {name: tuple(shape) for name, shape in keys.items()}


def shapes_of(model: AutoEncoder) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def test_golden_latent(tiny, golden):
    latent = tiny.encode(golden["vae.image"])
    torch.testing.assert_close(latent, golden["vae.latent"], rtol=1e-5, atol=1e-5)


def test_golden_picture(tiny, golden):
    decoded = tiny.decode(golden["vae.latent"])
    torch.testing.assert_close(decoded, golden["vae.decoded"], rtol=1e-5, atol=1e-5)


def test_tiny_structure_is_derived_and_frozen(tiny):
    assert tiny.config == VaeConfig(32, (1, 1, 2, 2), 1, 16, 3)
    assert tiny.downsample == 8 and not tiny.training
    assert all(x.dtype == torch.float32 and not x.requires_grad for x in tiny.parameters())


def test_real_structure_has_exactly_the_published_tensors():
    config = VaeConfig.from_shapes(real_shapes())
    assert config == VaeConfig(128, (1, 2, 4, 4), 2, 16, 3)
    with torch.device("meta"):
        model = AutoEncoder(config)
    assert shapes_of(model) == real_shapes()
    assert len(real_shapes()) == 244
    assert sum(x.numel() for x in model.parameters()) == 83_819_683


def test_another_depth_round_trips(tmp_path):
    torch.manual_seed(0)
    model = AutoEncoder(VaeConfig(32, (1, 3), 2, 4, 1))
    save_file(model.state_dict(), tmp_path / "ae.safetensors")
    loaded = load_autoencoder(tmp_path / "ae.safetensors", "cpu")
    assert loaded.config == model.config and loaded.downsample == 2
    image = torch.rand(2, 1, 6, 10)
    assert torch.equal(loaded.encode(image), model.eval().encode(image))
    assert loaded.decode(loaded.encode(image)).shape == image.shape


def test_images_of_a_batch_do_not_mix(tiny, golden):
    image = golden["vae.image"]
    pair = torch.cat([image, -image])
    torch.testing.assert_close(tiny.encode(pair)[:1], tiny.encode(image), rtol=1e-5, atol=1e-5)


def test_half_precision_files_load_as_float32(tmp_path):
    tensors = load_file(TINY / "ae.safetensors")
    save_file({name: x.bfloat16() for name, x in tensors.items()}, tmp_path / "ae.safetensors")
    loaded = load_autoencoder(tmp_path, "cpu")
    assert all(x.dtype == torch.float32 for x in loaded.parameters())


def test_faults_are_named_together(tmp_path):
    tensors = load_file(TINY / "ae.safetensors")
    del tensors["decoder.mid.attn_1.q.bias"]
    tensors["encoder.quant.weight"] = torch.zeros(1)
    tensors["decoder.conv_out.bias"] = torch.zeros(4)
    save_file(tensors, tmp_path / "ae.safetensors")
    with pytest.raises(ValueError, match="--model_path") as caught:
        load_autoencoder(tmp_path, "cpu")
    message = str(caught.value)
    assert "1 missing: decoder.mid.attn_1.q.bias" in message
    assert "1 unexpected: encoder.quant.weight" in message
    assert "1 misshapen: decoder.conv_out.bias (4,) instead of (3,)" in message


@pytest.mark.parametrize("name", ["encoder.conv_in.weight", "decoder.conv_in.weight"])
def test_a_file_without_its_first_layer_is_refused(name):
    shapes = real_shapes()
    del shapes[name]
    with pytest.raises(ValueError, match=f"{name} is missing.*--model_path"):
        VaeConfig.from_shapes(shapes)


def test_widths_that_no_structure_explains_are_refused():
    shapes = real_shapes() | {"encoder.down.1.block.0.conv1.weight": (200, 128, 3, 3)}
    with pytest.raises(ValueError, match=r"\[128, 200, 512, 512\] channels.*--model_path"):
        VaeConfig.from_shapes(shapes)


def test_missing_and_broken_files_are_refused(tmp_path):
    with pytest.raises(ValueError, match="does not exist.*--model_path"):
        load_autoencoder(tmp_path, "cpu")
    (tmp_path / "ae.safetensors").write_bytes(b"not a checkpoint")
    with pytest.raises(ValueError, match="no safetensors file.*--model_path"):
        load_autoencoder(tmp_path, "cpu")


def test_sides_must_divide(tiny):
    with pytest.raises(ValueError, match="12 x 16 pixels.*multiples of 8"):
        tiny.encode(torch.zeros(1, 3, 16, 12))
