"""Guidance against the golden velocities and its limiting cases."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from modeling.bagel.guidance import RENORM_TYPES, GuidanceConfig, guide

PARITY = Path(__file__).parents[2] / "parity"
CASES = json.loads((PARITY / "units.json").read_text())["cfg"]
INTERVAL = (0.4, 1.0)


def velocities() -> dict[str, torch.Tensor]:
    golden = load_file(PARITY / "units.safetensors")
    return {name: golden[f"cfg.{name}"].unflatten(0, (2, 16)) for name in ("cond", "text", "img")}


@pytest.mark.parametrize("index", range(len(CASES)))
def test_golden(index):
    case, given = CASES[index], velocities()
    config = GuidanceConfig(
        case["text_scale"], case["img_scale"], INTERVAL, case["renorm"], case["renorm_min"]
    )
    guided = guide(given["cond"], given["text"], given["img"], config)
    expected = load_file(PARITY / "units.safetensors")[f"cfg.{index}.out"]
    torch.testing.assert_close(guided.flatten(0, 1), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("renorm", RENORM_TYPES)
def test_images_of_a_batch_do_not_mix(renorm):
    given = velocities()
    config = GuidanceConfig(4.0, 1.5, INTERVAL, renorm, 0.0)
    together = guide(given["cond"], given["text"], given["img"], config)
    alone = guide(given["cond"][1:], given["text"][1:], given["img"][1:], config)
    torch.testing.assert_close(together[1:], alone, rtol=0, atol=1e-6)


@pytest.mark.parametrize("renorm", RENORM_TYPES)
def test_missing_copies_skip_their_part(renorm):
    given = velocities()
    config = GuidanceConfig(4.0, 1.5, INTERVAL, renorm, 0.0)
    assert torch.equal(guide(given["cond"], None, None, config), given["cond"])
    text_off = GuidanceConfig(1.0, 1.0, INTERVAL, renorm, 0.0)
    assert torch.equal(guide(given["cond"], given["text"], given["img"], text_off), given["cond"])
    image_off = GuidanceConfig(4.0, 1.0, INTERVAL, renorm, 0.0)
    assert torch.equal(
        guide(given["cond"], given["text"], None, config),
        guide(given["cond"], given["text"], given["img"], image_off),
    )


def test_image_copy_alone_without_text_is_not_renormalised_per_text_channel():
    given = velocities()
    config = GuidanceConfig(4.0, 1.5, INTERVAL, "text_channel", 0.0)
    expected = given["img"] + 1.5 * (given["cond"] - given["img"])
    torch.testing.assert_close(guide(given["cond"], None, given["img"], config), expected)


def test_renorm_bounds():
    cond, text = torch.ones(1, 2, 4), torch.zeros(1, 2, 4)
    free = GuidanceConfig(4.0, 1.0, INTERVAL, "global", 0.0)
    torch.testing.assert_close(guide(cond, text, None, free), cond)
    held = GuidanceConfig(4.0, 1.0, INTERVAL, "global", 1.0)
    torch.testing.assert_close(guide(cond, text, None, held), 4 * cond)
    # Guidance that shortens the velocity is never stretched back.
    torch.testing.assert_close(guide(cond, 1.25 * cond, None, free), 0.25 * cond)
    assert guide(text, text, None, free).equal(text)  # 0 / 0 is kept finite


def test_bfloat16_input_is_computed_in_float32_and_carries_gradients():
    cond = velocities()["cond"].bfloat16().requires_grad_()
    text = velocities()["text"].bfloat16()
    config = GuidanceConfig(4.0, 1.0, INTERVAL, "global", 0.0)
    guided = guide(cond, text, None, config)
    assert guided.dtype == torch.float32
    assert torch.equal(guided, guide(cond.float(), text.float(), None, config))
    guided.sum().backward()
    assert cond.grad.isfinite().all() and cond.grad.abs().sum() > 0


@pytest.mark.parametrize(
    ("t", "is_open", "is_closed"),
    [(0.39, False, False), (0.4, False, True), (0.41, True, True), (1.0, True, True)],
)
def test_interval(t, is_open, is_closed):
    config = GuidanceConfig(4.0, 1.5, INTERVAL, "global", 0.0)
    assert config.is_active(t) is is_open
    assert config.is_active(t, closed_low=True) is is_closed


def test_interval_has_an_upper_end():
    config = GuidanceConfig(4.0, 1.5, (0.2, 0.8), "global", 0.0)
    assert config.is_active(0.8) and not config.is_active(0.81, closed_low=True)


@pytest.mark.parametrize(
    ("fields", "flag"),
    [
        ({"renorm_type": "per_token"}, "--cfg_renorm_type_gen.*'per_token'.*text_channel"),
        ({"renorm_min": 1.5}, "--cfg_renorm_min 1.5"),
        ({"text_scale": float("nan")}, "--cfg_text_scale nan"),
        ({"image_scale": -1.0}, "--cfg_img_scale -1.0"),
        ({"interval": (0.9, 0.1)}, "--cfg_interval_low 0.9"),
        ({"interval": (0.0, 1.5)}, "--cfg_interval_high 1.5"),
    ],
)
def test_bad_settings_name_their_flag(fields, flag):
    good = {
        "text_scale": 4.0,
        "image_scale": 1.5,
        "interval": INTERVAL,
        "renorm_type": "global",
        "renorm_min": 0.0,
    }
    with pytest.raises(ValueError, match=flag):
        GuidanceConfig(**{**good, **fields})


def test_shapes_that_would_broadcast_are_refused():
    given = velocities()
    config = GuidanceConfig(4.0, 1.5, INTERVAL, "global", 0.0)
    with pytest.raises(ValueError, match="expected \\(2, 16, 64\\)"):
        guide(given["cond"], given["text"][:1], None, config)
    with pytest.raises(ValueError, match="expected \\[images"):
        guide(given["cond"][0], given["text"][0], None, config)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("renorm", RENORM_TYPES)
def test_gpu_guides_without_synchronising(renorm):
    on_cpu = velocities()
    given = {name: velocity.cuda() for name, velocity in on_cpu.items()}
    config = GuidanceConfig(4.0, 1.5, INTERVAL, renorm, 0.0)
    torch.cuda.set_sync_debug_mode("error")
    try:
        guided = guide(given["cond"], given["text"], given["img"], config)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    expected = guide(on_cpu["cond"], on_cpu["text"], on_cpu["img"], config)
    torch.testing.assert_close(guided.cpu(), expected, rtol=1e-5, atol=1e-5)
