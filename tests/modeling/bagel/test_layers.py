"""Building blocks against their formulas and golden values."""

import math

import pytest
import torch
import torch.nn.functional as F

from modeling.bagel import layers
from modeling.bagel.layers import (
    PositionTable,
    RMSNorm,
    once_per_device,
    rotary_table,
    rotate,
    sincos_table,
    timestep_features,
)
from tests.tiny import tiny_model, units

EPS = 1e-6


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(7)


def norm_of(weight: torch.Tensor) -> RMSNorm:
    norm = RMSNorm(weight.numel(), EPS).to(weight.dtype)
    norm.weight.data.copy_(weight)
    return norm


def test_rms_norm_is_its_formula():
    x = torch.randn(5, 48, generator=generator()) * 3
    weight = torch.randn(48, generator=generator())
    wide = x.double()
    expected = wide / torch.sqrt((wide**2).mean(-1, keepdim=True) + EPS) * weight.double()
    torch.testing.assert_close(norm_of(weight)(x).double(), expected, rtol=1e-6, atol=1e-6)


def test_rms_norm_rounds_to_the_input_type_before_it_scales():
    x = (torch.randn(64, 48, generator=generator()) * 3).bfloat16()
    weight = torch.randn(48, generator=generator()).bfloat16()
    wide = x.float()
    normed = (wide * torch.rsqrt((wide**2).mean(-1, keepdim=True) + EPS)).bfloat16()
    out = norm_of(weight)(x)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, (normed.float() * weight.float()).bfloat16())
    # The fused operator rounds once only: were it used, the line above would not hold.
    assert not torch.equal(out, F.rms_norm(x, (48,), weight, EPS))


def test_rms_norm_of_zeros_is_zero():
    assert torch.equal(norm_of(torch.ones(8))(torch.zeros(2, 8)), torch.zeros(2, 8))


def test_rotation_is_a_complex_product():
    ids, head_size, theta = torch.tensor([0, 1, 5, 77, 300]), 16, 1e6
    x = torch.randn(5, 3, head_size, generator=generator())
    half = head_size // 2
    numbers = torch.complex(x[..., :half].double(), x[..., half:].double())
    angles = ids[:, None].double() * theta ** (-torch.arange(half).double() * 2 / head_size)
    turned = numbers * torch.polar(torch.ones_like(angles), angles)[:, None]
    expected = torch.cat((turned.real, turned.imag), dim=-1)
    cos, sin = rotary_table(ids, head_size, theta)
    assert cos.shape == sin.shape == (5, 1, head_size)
    torch.testing.assert_close(rotate(x, cos, sin).double(), expected, rtol=0, atol=5e-5)


def test_rotation_keeps_the_type_of_its_input():
    cos, sin = rotary_table(torch.tensor([3, 4]), 8, 1e4)
    x = torch.randn(2, 1, 8, generator=generator()).bfloat16()
    rotated = rotate(x, cos, sin)
    assert rotated.dtype == torch.bfloat16
    expected = torch.cat((-x[..., 4:], x[..., :4]), -1) * sin.bfloat16() + x * cos.bfloat16()
    assert torch.equal(rotated, expected)


def test_rotary_table_has_the_bits_of_its_formula():
    ids = torch.cat((torch.arange(300), torch.tensor([32767, 2**20])))
    for head_size, theta in ((128, 1e6), (16, 1e6), (16, 1e4), (128, 1e6)):
        exponents = torch.arange(0, head_size, 2, dtype=torch.float32) / head_size
        angles = ids.float()[:, None] * (1.0 / theta**exponents)
        angles = torch.cat((angles, angles), dim=-1)[:, None, :]
        cos, sin = rotary_table(ids, head_size, theta)
        assert cos.dtype == sin.dtype == torch.float32
        assert torch.equal(cos, angles.cos()) and torch.equal(sin, angles.sin())


class Counted:
    """A constant that counts how often it is made."""

    def __init__(self):
        self.num_made = 0
        self.get = once_per_device(self.make)

    def make(self, size: int, device: torch.device) -> torch.Tensor:
        self.num_made += 1
        return torch.arange(size, device=device)


def test_a_constant_is_made_once_for_its_settings_and_device():
    counted, cpu, meta = Counted(), torch.device("cpu"), torch.device("meta")
    assert counted.get(3, cpu) is counted.get(3, cpu)
    assert torch.equal(counted.get(3, cpu), torch.arange(3))
    assert counted.num_made == 1
    assert counted.get(4, cpu).shape == (4,) and counted.get(3, meta).device == meta
    assert counted.num_made == 3


def test_a_constant_made_in_a_capture_is_not_kept(monkeypatch):
    counted, cpu = Counted(), torch.device("cpu")
    monkeypatch.setattr(layers, "is_capturing", lambda device: True)
    in_capture = counted.get(3, cpu)
    monkeypatch.setattr(layers, "is_capturing", lambda device: False)
    kept = counted.get(3, cpu)
    assert kept is not in_capture and counted.num_made == 2
    monkeypatch.setattr(layers, "is_capturing", lambda device: True)
    assert counted.get(3, cpu) is kept


def test_constants_first_made_in_inference_mode_serve_the_learner():
    ids = torch.tensor([3, 4])
    with torch.inference_mode():
        rotary_table(ids, 24, 77.0)  # settings that no other test uses: made here
    x = torch.randn(2, 1, 24, generator=generator()).requires_grad_()
    cos, sin = rotary_table(ids, 24, 77.0)
    rotate(x, cos, sin).sum().backward()
    assert bool(x.grad.isfinite().all())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("eager_first", [True, False])
def test_gpu_capture_reads_or_makes_the_frequencies(eager_first):
    ids = torch.arange(40, device="cuda")
    theta = 1e5 + eager_first  # settings that no other test uses
    if eager_first:
        rotary_table(ids, 128, theta)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = rotary_table(ids, 128, theta)
    eager = rotary_table(ids, 128, theta)
    graph.replay()
    for table, expected in zip(captured, eager, strict=True):
        assert bool(expected.isfinite().all()) and torch.equal(table, expected)


def test_golden_position_tables():
    golden = units()
    small = sincos_table(8, 64)
    assert small.dtype == torch.float32
    torch.testing.assert_close(small, golden["pos.sincos_8_64"], rtol=0, atol=1e-7)
    rows = sincos_table(70, 64)[[0, 1, 69, 70, 71, 4899]]
    torch.testing.assert_close(rows, golden["pos.sincos_70_64_rows"], rtol=0, atol=1e-7)


def test_position_table_looks_rows_up():
    table = PositionTable(3, 8)
    table.pos_embed.data.copy_(sincos_table(3, 8))
    assert not table.pos_embed.requires_grad
    ids = torch.tensor([5, 0, 5])
    assert torch.equal(table(ids), sincos_table(3, 8)[ids])
    assert not torch.equal(table(ids)[0], table(ids)[1])


def test_golden_timestep_features():
    golden = units()
    torch.testing.assert_close(
        timestep_features(golden["time.t"]), golden["time.sinusoid"], rtol=0, atol=1e-6
    )


def test_timestep_features_have_cosines_first():
    features = timestep_features(torch.tensor([0.5]))[0]
    assert features.shape == (256,)
    assert features[0].item() == pytest.approx(math.cos(0.5), abs=1e-6)
    assert features[128].item() == pytest.approx(math.sin(0.5), abs=1e-6)
    assert features[1].item() == pytest.approx(math.cos(0.5 * 10000 ** (-1 / 128)), abs=1e-6)


def test_golden_timestep_embedding():
    golden = units()
    embedded = tiny_model().time_embedder(golden["time.t"])
    torch.testing.assert_close(embedded, golden["time.embedding"], rtol=1e-5, atol=1e-5)


def test_golden_image_embedding():
    golden = units()
    embedded = tiny_model().embed_vit(golden["vit.hidden"], golden["vit.position_ids"])
    torch.testing.assert_close(embedded, golden["vit.to_llm"], rtol=1e-5, atol=1e-5)
