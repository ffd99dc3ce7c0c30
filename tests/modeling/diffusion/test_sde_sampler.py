"""Flow schedule and stochastic step against golden values, statistics and edge times."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from modeling.diffusion.sde_sampler import (
    SdeConfig,
    flow_schedule,
    sde_kl,
    sde_log_prob,
    sde_mean,
    sde_std,
    sde_step,
)

PARITY = Path(__file__).parents[2] / "parity"
UNITS = json.loads((PARITY / "units.json").read_text())
CLOSE = {"rtol": 1e-5, "atol": 1e-5}
TINY = {"rtol": 1e-5, "atol": 0}


@pytest.mark.parametrize("num_points", sorted(UNITS["schedule"], key=int))
def test_golden_schedule(num_points):
    t, dt = flow_schedule(int(num_points), 3.0)
    torch.testing.assert_close(t, torch.tensor(UNITS["schedule"][num_points]["t"]), **TINY)
    torch.testing.assert_close(dt, torch.tensor(UNITS["schedule"][num_points]["dt"]), **CLOSE)
    assert t.dtype == dt.dtype == torch.float32
    assert t[0] == 1 and (t > 0).all()
    torch.testing.assert_close(dt.sum(), torch.tensor(1.0))


def test_schedule_ends_exactly_at_zero():
    t, dt = flow_schedule(16, 3.0)
    assert t[-1] - dt[-1] == 0
    assert torch.equal(flow_schedule(5, 1.0)[0], torch.tensor([1.0, 0.75, 0.5, 0.25]))


@pytest.mark.parametrize("index", range(len(UNITS["sde"])))
def test_golden_step(index):
    case, golden = UNITS["sde"][index], load_file(PARITY / "units.safetensors")
    x, v, v_ref, x_next, mean, log_prob, kl = (
        golden[f"sde.{index}.{name}"]
        for name in ("x_t", "velocity", "velocity_ref", "x_next", "mean", "log_prob", "kl")
    )
    config = SdeConfig(case["eta"], case["eta_mode"])
    t, dt = torch.tensor(case["t"]), torch.tensor(case["dt"])
    std = sde_std(t, dt, config)
    torch.testing.assert_close(std, torch.tensor(case["std"]), **TINY)
    our_mean = sde_mean(x, v, t, dt, config)
    torch.testing.assert_close(our_mean, mean, **CLOSE)
    torch.testing.assert_close(sde_log_prob(x_next, our_mean, std), log_prob, **CLOSE)
    our_kl = sde_kl(our_mean, sde_mean(x, v_ref, t, dt, config), std)
    torch.testing.assert_close(our_kl, kl, rtol=1e-3, atol=1e-7)


def random_step(*shape: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, v, noise = (torch.randn(*shape, 64, generator=generator) for _ in range(3))
    return x, v, noise


def test_step_is_its_parts():
    x, v, noise = random_step(2, 5)
    config, t, dt = SdeConfig(0.7, "monotonic"), torch.tensor(0.75), torch.tensor(0.25)
    step = sde_step(x.bfloat16(), v.bfloat16(), t, dt, config, noise)
    assert step.next.dtype == step.mean.dtype == step.log_prob.dtype == torch.float32
    assert torch.equal(step.mean, sde_mean(x.bfloat16(), v.bfloat16(), t, dt, config))
    assert torch.equal(step.next, step.mean + sde_std(t, dt, config) * noise)
    assert step.log_prob.shape == (2, 5) and step.std.shape == ()
    # (next - mean) / std is the noise again.
    torch.testing.assert_close(step.log_prob, -noise.square().mean(-1) / 2, rtol=1e-4, atol=1e-5)


def test_times_broadcast_per_token_and_per_image():
    x, v, noise = random_step(2, 3)
    config = SdeConfig(1.0, "monotonic")
    t, dt = torch.tensor([0.9, 0.5]), torch.tensor([0.1, 0.2])
    per_image = sde_step(x, v, t[:, None], dt[:, None], config, noise)
    flat = [part.flatten(0, 1) for part in (x, v, noise)]
    times = [part.repeat_interleave(3) for part in (t, dt)]
    per_token = sde_step(flat[0], flat[1], *times, config, flat[2])
    assert torch.equal(per_image.next.flatten(0, 1), per_token.next)
    assert torch.equal(per_image.log_prob.flatten(), per_token.log_prob)
    for image in range(2):
        alone = sde_step(x[image], v[image], t[image], dt[image], config, noise[image])
        torch.testing.assert_close(per_image.next[image], alone.next, rtol=0, atol=1e-6)


def test_autocast_changes_nothing():
    x, v, noise = random_step(4)
    config, t, dt = SdeConfig(0.7, "monotonic"), torch.tensor(0.75), torch.tensor(0.25)
    plain = sde_step(x, v, t, dt, config, noise)
    with torch.autocast("cpu", torch.bfloat16):
        cast = sde_step(x, v, t, dt, config, noise)
    assert torch.equal(plain.next, cast.next) and torch.equal(plain.log_prob, cast.log_prob)


def test_monotonic_eta_holds_its_denominator_near_one():
    config, one = SdeConfig(0.7, "monotonic"), torch.tensor(1.0)
    for t in (0.95, 0.97, 1.0):
        expected = 0.7 * (t / 0.05) ** 0.5
        assert sde_std(torch.tensor(t), one, config).item() == pytest.approx(expected, rel=1e-5)
    assert sde_std(torch.tensor(0.5), one, config).item() == pytest.approx(0.7, rel=1e-6)


@pytest.mark.parametrize("mode", ["monotonic", "constant"])
def test_time_zero_is_nan_not_a_number_that_looks_right(mode):
    x, v, noise = random_step(3)
    dt = torch.tensor(0.1)
    step = sde_step(x, v, torch.tensor(0.0), dt, SdeConfig(1.0, mode), noise)
    assert step.mean.isnan().all() and step.next.isnan().all() and step.log_prob.isnan().all()
    at_one = sde_step(x, v, torch.tensor(1.0), dt, SdeConfig(1.0, mode), noise)
    assert at_one.next.isfinite().all() and at_one.log_prob.isfinite().all()


def test_log_prob_passes_gradients_to_the_velocity():
    x, v, noise = random_step(3)
    config, t, dt = SdeConfig(0.7, "monotonic"), torch.tensor(0.75), torch.tensor(0.25)
    x_next = sde_step(x, v, t, dt, config, noise).next
    v.requires_grad_()
    mean = sde_mean(x, v, t, dt, config)
    sde_log_prob(x_next, mean, sde_std(t, dt, config)).sum().backward()
    assert v.grad.isfinite().all() and v.grad.abs().sum() > 0


@pytest.mark.parametrize(
    ("eta", "mode", "flag"),
    [
        (0.7, "linear", "--eta_mode 'linear'.*monotonic"),
        (0.0, "constant", "--constant_eta_gen"),
        (float("inf"), "constant", "--constant_eta_edit"),
    ],
)
def test_bad_settings_name_their_flag(eta, mode, flag):
    with pytest.raises(ValueError, match=flag):
        SdeConfig(eta, mode)


@pytest.mark.parametrize(
    ("num_points", "shift", "flag"),
    [(1, 3.0, "--num_timesteps_gen"), (16, 0.0, "--timestep_shift 0.0")],
)
def test_bad_schedule_names_its_flag(num_points, shift, flag):
    with pytest.raises(ValueError, match=flag):
        flow_schedule(num_points, shift)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("mode", ["monotonic", "constant"])
def test_gpu_steps_without_synchronising(mode):
    x, v, noise = random_step(4)
    config, t, dt = SdeConfig(0.7, mode), torch.tensor(0.97), torch.tensor(0.02)
    expected = sde_step(x, v, t, dt, config, noise)
    on_gpu = [part.cuda() for part in (x, v, t, dt, noise)]
    torch.cuda.set_sync_debug_mode("error")
    try:
        step = sde_step(*on_gpu[:4], config, on_gpu[4])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.testing.assert_close(step.next.cpu(), expected.next, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(step.log_prob.cpu(), expected.log_prob, rtol=1e-4, atol=1e-5)
