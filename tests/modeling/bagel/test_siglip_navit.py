"""The image encoder against golden values, the real checkpoint's names, and bad input."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from modeling.bagel.config import VitConfig, read_vit_config
from modeling.bagel.siglip_navit import SiglipVit

PARITY = Path(__file__).parents[2] / "parity"
SEQLENS = json.loads((PARITY / "units.json").read_text())["vit_seqlens"]
PREFIX = "vit_model."


@pytest.fixture(scope="module")
def vit() -> SiglipVit:
    model = SiglipVit(read_vit_config(PARITY / "tiny_bagel"))
    weights = load_file(PARITY / "tiny_bagel" / "ema.safetensors")
    state = {
        name.removeprefix(PREFIX): tensor.float()
        for name, tensor in weights.items()
        if name.startswith(PREFIX)
    }
    model.load_state_dict(state)  # strict: the names are the checkpoint's
    return model.eval().requires_grad_(False)


@pytest.fixture(scope="module")
def packed() -> tuple[torch.Tensor, torch.Tensor]:
    golden = load_file(PARITY / "units.safetensors")
    return golden["vit.patches"], golden["vit.position_ids"]


def test_golden_hidden_states(vit, packed):
    expected = load_file(PARITY / "units.safetensors")["vit.hidden"]
    torch.testing.assert_close(vit(*packed, SEQLENS), expected, rtol=1e-5, atol=1e-5)


def test_pictures_do_not_see_each_other(vit, packed):
    patches, position_ids = packed
    together = vit(patches, position_ids, SEQLENS)
    alone = vit(patches[: SEQLENS[0]], position_ids[: SEQLENS[0]], SEQLENS[:1])
    torch.testing.assert_close(together[: SEQLENS[0]], alone, rtol=1e-5, atol=1e-5)
    as_one = vit(patches, position_ids, [sum(SEQLENS)])
    assert (as_one - together).abs().max() > 1e-3


def test_patches_inside_a_picture_see_later_ones(vit, packed):
    patches, position_ids = packed
    changed = patches.clone()
    changed[SEQLENS[0] - 1] = 0
    difference = vit(changed, position_ids, SEQLENS) - vit(patches, position_ids, SEQLENS)
    assert difference[0].abs().max() > 0
    assert difference[SEQLENS[0] :].abs().max() == 0


def test_computes_in_the_type_of_the_weights(vit, packed):
    patches, position_ids = packed
    half = SiglipVit(read_vit_config(PARITY / "tiny_bagel"))
    half.load_state_dict(vit.state_dict())
    out = half.bfloat16()(patches, position_ids, SEQLENS)
    assert out.dtype == torch.bfloat16
    exact = vit(patches, position_ids, SEQLENS)
    assert (out.float() - exact).norm() < 0.02 * exact.norm()


def test_real_structure_has_exactly_the_published_tensors():
    keys = json.loads((PARITY / "checkpoint_keys.json").read_text())
    config = VitConfig(1152, 4304, 26, 16, image_size=980, patch_size=14)
    expected = {
        name.replace("{i}", str(layer)).removeprefix(PREFIX): tuple(shape)
        for group, layers in (("per_layer", config.num_layers), ("other", 1))
        for name, shape in keys[group].items()
        if name.startswith(PREFIX)
        for layer in range(layers)
    }
    with torch.device("meta"):
        model = SiglipVit(config)
    assert {name: tuple(x.shape) for name, x in model.state_dict().items()} == expected


@pytest.mark.parametrize(
    ("patches", "ids", "seqlens"), [(44, 44, [20, 23]), (44, 43, [20, 24]), (43, 44, [20, 24])]
)
def test_counts_that_do_not_match_are_refused(vit, packed, patches, ids, seqlens):
    with pytest.raises(ValueError, match="do not match"):
        vit(packed[0][:patches], packed[1][:ids], seqlens)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_gpu_kernel_is_as_good_as_bfloat16_on_the_cpu(vit, packed):
    exact = vit(*packed, SEQLENS)
    half = SiglipVit(read_vit_config(PARITY / "tiny_bagel"))
    half.load_state_dict(vit.state_dict())
    half = half.bfloat16()
    cpu_error = (half(*packed, SEQLENS).float() - exact).norm()
    gpu_out = half.cuda()(packed[0].cuda(), packed[1].cuda(), SEQLENS)
    assert (gpu_out.cpu().float() - exact).norm() < 2 * cpu_error
