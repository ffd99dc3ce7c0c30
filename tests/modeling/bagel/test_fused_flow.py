"""Which passes of the fused stack go through all layers in one launch."""

import pytest
import torch

from modeling.bagel import fused_flow
from modeling.bagel.bagel import LayerPass
from modeling.bagel.cache import CacheSpec, KvCache
from modeling.bagel.config import LlmConfig
from modeling.bagel.fused_flow import FusedStack
from modeling.bagel.qwen2_navit import Decoder, ExpertOrder, QkRounding

TINY = LlmConfig(256, 512, 2, 2, 1, vocab_size=32)


class Recorder:
    """Stands in for TextLayers: notes what it is asked for."""

    def __init__(self, has_kernel: bool = True):
        self.has_kernel = has_kernel
        self.asked: list[tuple] = []

    def run(self, turn, down_splits, by_parts):
        self.asked.append((turn, down_splits, by_parts))
        return turn.x + 1 if self.has_kernel else None


@pytest.fixture
def decoder():
    torch.manual_seed(0)
    return Decoder(TINY)


def use_splits(monkeypatch, decoder, attention=2, down=7, odd_layer=None):
    """Makes cuBLAS's order known: splits of q, k, v and o, none of gate and up, those of down."""
    splits = {}
    for index, layer in enumerate(decoder.layers):
        *heads, gate, up, last = layer.linears()
        splits |= dict.fromkeys(heads, attention) | {gate: 1, up: 1}
        splits[last] = 5 if index == odd_layer else down
    monkeypatch.setattr(fused_flow, "_find_order", lambda *args: splits)


def run(stack, decoder, lengths=(1, 1)):
    spec = CacheSpec(TINY, len(lengths), 16, torch.device("cpu"), torch.float32)
    append = KvCache.zeros(spec).append(list(range(len(lengths))), list(lengths), causal=True)
    experts = ExpertOrder(sum(lengths), 0, None, None)
    rotary = decoder.rotary(torch.zeros(sum(lengths), dtype=torch.int64), experts, QkRounding())
    x = torch.zeros(sum(lengths), TINY.hidden_size)
    return stack.run(LayerPass(decoder, x, experts, rotary, append)), append


@pytest.fixture
def make_stack(monkeypatch):
    """A stack whose turns are recorded, and whose passes by parts give 5."""

    def make(is_fast: bool = False, has_kernel: bool = True) -> FusedStack:
        def run_parts(self, layer_pass):
            self.parts_x = layer_pass.x
            return torch.full_like(layer_pass.x, 5.0)

        monkeypatch.setattr(FusedStack, "run_parts", run_parts)
        stack = FusedStack(side_by_side=False, is_fast=is_fast)
        stack._turns = Recorder(has_kernel)
        return stack

    return make


def test_a_text_turn_goes_through_all_layers_in_one_launch(monkeypatch, decoder, make_stack):
    use_splits(monkeypatch, decoder)
    stack = make_stack()
    hidden, append = run(stack, decoder)
    assert (hidden == 1).all()
    ((turn, splits, _),) = stack._turns.asked
    assert turn.append is append
    assert splits == 7


def test_where_there_is_no_kernel_a_turn_goes_by_parts(monkeypatch, decoder, make_stack):
    use_splits(monkeypatch, decoder)
    stack = make_stack(has_kernel=False)
    assert (run(stack, decoder)[0] == 5).all()
    assert len(stack._turns.asked) == 1


@pytest.mark.parametrize("changes", [{"attention": 1}, {"odd_layer": 1}])
def test_orders_that_the_kernel_has_not_go_by_parts(monkeypatch, decoder, make_stack, changes):
    use_splits(monkeypatch, decoder, **changes)
    stack = make_stack()
    assert (run(stack, decoder)[0] == 5).all()
    assert not stack._turns.asked


def test_an_order_that_is_not_known_goes_by_parts(monkeypatch, decoder, make_stack):
    monkeypatch.setattr(fused_flow, "_find_order", lambda *args: None)
    stack = make_stack()
    assert (run(stack, decoder)[0] == 5).all()


def test_several_tokens_of_a_row_go_by_parts(monkeypatch, decoder, make_stack):
    use_splits(monkeypatch, decoder)
    stack = make_stack()
    assert (run(stack, decoder, lengths=(1, 2))[0] == 5).all()
    assert not stack._turns.asked


def test_the_fast_grade_compares_turns_with_exact_parts(monkeypatch, decoder, make_stack):
    use_splits(monkeypatch, decoder)
    stack = make_stack(is_fast=True)
    run(stack, decoder)
    ((turn, _, by_parts),) = stack._turns.asked
    assert (by_parts(turn) == 5).all()
    exact = stack._exact
    assert exact is not stack and not exact.is_fast
    assert exact.parts_x.shape == (2, TINY.hidden_size)
    assert not hasattr(stack, "parts_x")
