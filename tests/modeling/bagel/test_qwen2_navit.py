"""The decoder: expert order, names of the real checkpoint, rounding and checkpointing."""

import json
from functools import partial

import pytest
import torch
from torch import Tensor

from modeling.bagel.attention import varlen_attention
from modeling.bagel.bagel import Bagel
from modeling.bagel.config import BagelConfig, LlmConfig, VitConfig
from modeling.bagel.qwen2_navit import GEN, Decoder, ExpertOrder, QkRounding
from modeling.bagel.weights import parameter_shapes, read_bagel_config, read_header
from tests.tiny import CHECKPOINT, PARITY

SMALL = LlmConfig(
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    vocab_size=10,
)
UND, GEN_POSITIONS = [0, 1, 5, 6, 8], [2, 3, 4, 7]


def expert_order() -> ExpertOrder:
    return ExpertOrder.from_positions(torch.tensor(UND), torch.tensor(GEN_POSITIONS))


def small_decoder(seed: int = 0) -> Decoder:
    """Random weights, norms included, and different experts."""
    generator = torch.Generator().manual_seed(seed)
    decoder = Decoder(SMALL)
    for parameter in decoder.parameters():
        scale = 0.3 if parameter.dim() > 1 else 1.0
        parameter.data = torch.randn(parameter.shape, generator=generator) * scale
    return decoder


def make_experts_equal(decoder: Decoder) -> None:
    parameters = dict(decoder.named_parameters())
    for name, parameter in parameters.items():
        if GEN in name:
            parameter.data.copy_(parameters[name.replace(GEN, "")])


def run(decoder: Decoder, x: Tensor, experts: ExpertOrder, rounding: QkRounding) -> Tensor:
    """Document order in, document order out; causal over all tokens."""
    attend = experts.reordered(partial(varlen_attention, seqlens=[x.shape[0]], causal=True))
    rotary = decoder.rotary(torch.arange(x.shape[0]), experts, rounding)
    x = experts.to_expert(x)
    for layer in decoder.layers:
        x = layer(x, experts, rotary, attend)
    return experts.to_document(decoder.final_norm(x, experts))


def inputs(tokens: int = 9) -> Tensor:
    return torch.randn(tokens, 32, generator=torch.Generator().manual_seed(1))


def test_expert_order_goes_there_and_back():
    experts, x = expert_order(), torch.arange(9) * 10
    assert (experts.num_und, experts.num_gen) == (5, 4)
    assert experts.to_expert(x).tolist() == [p * 10 for p in UND + GEN_POSITIONS]
    assert torch.equal(experts.to_document(experts.to_expert(x)), x)
    assert torch.equal(experts.to_expert(experts.to_document(x)), x)


def test_expert_order_applies_each_expert_to_its_tokens():
    experts, x = expert_order(), torch.ones(9)
    out = experts.to_document(experts.apply(x, lambda a: a * 2, lambda a: a * 3))
    assert out.tolist() == [2, 2, 3, 3, 3, 2, 2, 3, 2]


def test_expert_order_keeps_the_order_of_und_tokens_without_gen_tokens():
    # As in a packed batch of text and pictures to read, which lists all text first.
    und, none = torch.tensor([0, 3, 1, 2]), torch.zeros(0, dtype=torch.int64)
    experts, x = ExpertOrder.from_positions(und, none), torch.arange(4) * 10
    assert (experts.num_und, experts.num_gen) == (4, 0)
    assert experts.to_expert(x).tolist() == [0, 30, 10, 20]
    assert torch.equal(experts.to_document(experts.to_expert(x)), x)
    assert experts.apply(x, lambda a: a + 1, None).tolist() == (x + 1).tolist()


def test_expert_order_of_und_tokens_in_document_order_moves_nothing():
    experts, x = ExpertOrder(4, 0, None, None), torch.randn(4)
    assert experts.to_document(x) is x
    assert experts.to_expert(x) is x
    assert experts.apply(x, lambda a: a + 1, None).tolist() == (x + 1).tolist()


@torch.no_grad()
def test_all_und_path_equals_the_mixed_path():
    decoder, x = small_decoder(), inputs()
    all_und = ExpertOrder(9, 0, None, None)
    alone = run(decoder, x, all_und, QkRounding())
    mixed = run(decoder, x, expert_order(), QkRounding())
    assert (mixed - alone)[2].abs().max() > 1e-2  # the experts differ
    make_experts_equal(decoder)
    torch.testing.assert_close(
        run(decoder, x, expert_order(), QkRounding()), alone, rtol=1e-5, atol=1e-5
    )


@torch.no_grad()
def test_attention_sees_document_order():
    decoder, x = small_decoder(), inputs()
    base = run(decoder, x, expert_order(), QkRounding())
    x[4] += 1  # a gen token
    moved = run(decoder, x, expert_order(), QkRounding())
    assert torch.equal(base[:4], moved[:4])  # und and gen tokens before it
    assert (base - moved)[5:].abs().amax(-1).min() > 1e-5  # und and gen tokens after it


@torch.no_grad()
@pytest.mark.parametrize("expert", ["und", "gen"])
def test_rounding_touches_the_named_expert_in_bf16_only(expert):
    rounding, tokens = QkRounding(**{expert: True}), inputs()
    order = expert_order()
    wide = small_decoder()
    assert torch.equal(
        run(wide, tokens, order, rounding), run(wide, tokens, order, QkRounding())
    )
    layer = small_decoder().bfloat16().layers[0]
    seen = {}

    def keep(name: str, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        seen[name] = torch.cat((q, k), dim=1)
        return torch.zeros_like(q)

    for name, where in (("rounded", rounding), ("wide", QkRounding())):
        rotary = Decoder(SMALL).rotary(torch.arange(9), order, where)
        attend = order.reordered(partial(keep, name))
        layer.run(order.to_expert(tokens.bfloat16()), order, rotary, attend)
    changed = (seen["rounded"] != seen["wide"]).flatten(1).any(-1)
    mine, other = (UND, GEN_POSITIONS) if expert == "und" else (GEN_POSITIONS, UND)
    assert seen["wide"].dtype == torch.bfloat16
    assert changed[mine].any()
    assert not changed[other].any()


def test_activation_checkpointing_changes_no_bit():
    gradients = []
    for is_on in (False, True):
        decoder = small_decoder()
        for layer in decoder.layers:
            layer.checkpoint_activations = is_on
        run(decoder, inputs(), expert_order(), QkRounding()).square().sum().backward()
        gradients.append({n: p.grad for n, p in decoder.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    assert len(gradients[0]) == len(list(small_decoder().parameters())) - 1  # not the embedding
    for name, gradient in gradients[0].items():
        assert torch.equal(gradient, gradients[1][name]), name


def real_config() -> BagelConfig:
    """Sizes of BAGEL-7B-MoT."""
    llm = LlmConfig(
        hidden_size=3584,
        intermediate_size=18944,
        num_layers=28,
        num_heads=28,
        num_kv_heads=4,
        vocab_size=152064,
    )
    vit = VitConfig(
        hidden_size=1152,
        intermediate_size=4304,
        num_layers=26,
        num_heads=16,
        image_size=980,
        patch_size=14,
    )
    return BagelConfig(llm, vit, max_latent_size=64)


def test_real_size_has_the_checkpoints_names_and_shapes():
    keys = json.loads((PARITY / "checkpoint_keys.json").read_text())
    expected = {name: tuple(shape) for name, shape in keys["other"].items()}
    for name, shape in keys["per_layer"].items():
        layers = 26 if name.startswith("vit_model") else 28
        expected |= {name.replace("{i}", str(i)): tuple(shape) for i in range(layers)}
    with torch.device("meta"):
        model = Bagel(real_config())
    assert parameter_shapes(model) == expected
    assert len(expected) == 1223
    assert sum(p.numel() for p in model.parameters()) == keys["parameters"] == 14_607_260_128
    assert not list(model.buffers())


def test_tiny_size_has_the_tiny_files_names_and_shapes():
    with torch.device("meta"):
        model = Bagel(read_bagel_config(CHECKPOINT))
    header = read_header(CHECKPOINT / "ema.safetensors")
    assert parameter_shapes(model) == {name: info.shape for name, info in header.items()}
