"""Static decode and flow against the eager path, through a fake graph on a CPU."""

import pytest
import torch

from modeling.bagel.config import ImageSize
from modeling.bagel.flow import eager_velocity
from modeling.bagel.graph_capture import GraphCapture
from modeling.bagel.sampling import SamplingConfig
from modeling.bagel.static_flow_graph import static_velocity
from modeling.bagel.static_text_graph import decode_text_static
from modeling.bagel.text_decode import decode_text
from tests.fake_graph import FakeBackend
from tests.tiny import contexts, tiny_tokenizer

HOT = SamplingConfig(do_sample=True, temperature=1.6, top_k=50, top_p=0.9)
GRID = ImageSize(4, 4)


def prefilled(rows: int):
    grown = contexts(rows)
    tokenizer = tiny_tokenizer()
    grown.add_text([tokenizer.encode("a photo of a cat")] * rows)
    return grown


@torch.no_grad()
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("max_tokens", [2, 3, 12])
def test_static_decode_draws_what_the_eager_path_draws(seed, max_tokens):
    eager, static = prefilled(4), prefilled(4)
    first, second = (torch.Generator().manual_seed(seed) for _ in range(2))
    expected = decode_text(eager, HOT, max_tokens, first)
    backend = FakeBackend()
    capture = GraphCapture(backend)
    texts = decode_text_static(static, HOT, max_tokens, second, capture)
    assert [text.ids for text in texts] == [text.ids for text in expected]
    for text, other in zip(texts, expected, strict=True):
        assert text.probs == pytest.approx(other.probs, abs=1e-6)
    assert static.cache.lengths == eager.cache.lengths
    assert static.cache.next_rope == eager.cache.next_rope
    for mine, theirs in zip(static.cache.keys, eager.cache.keys, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)
    assert torch.equal(first.get_state(), second.get_state())
    assert capture.counters.fallen_back == 0


@torch.no_grad()
def test_one_graph_for_each_number_of_active_samples():
    lengths = set()
    for seed in range(20):
        grown = prefilled(4)
        backend = FakeBackend()
        generator = torch.Generator().manual_seed(seed)
        texts = decode_text_static(grown, HOT, 16, generator, GraphCapture(backend))
        fed = sorted({len(text.ids) for text in texts})
        lengths.add(len(fed))
        # A set of samples that takes part in two turns or more is captured once, on its second.
        spans = [end - start for start, end in zip([0, *fed], fed, strict=False)]
        assert backend.captures == sum(span > 1 for span in spans)
        assert backend.replays == sum(span - 1 for span in spans)
    assert max(lengths) > 1, "no seed made samples finish at different turns"


@torch.no_grad()
def test_decode_falls_back_where_capture_is_refused():
    eager, static = prefilled(2), prefilled(2)
    first, second = (torch.Generator().manual_seed(3) for _ in range(2))
    capture = GraphCapture(FakeBackend(refuses=True))
    texts = decode_text_static(static, HOT, 8, second, capture)
    expected = decode_text(eager, HOT, 8, first)
    assert [text.ids for text in texts] == [text.ids for text in expected]
    assert capture.counters.fallen_back >= 1


@torch.no_grad()
def test_static_velocity_follows_its_inputs():
    eager, static = prefilled(2), prefilled(2)
    backend = FakeBackend()
    reference = eager_velocity(eager, GRID)
    forward = static_velocity(GraphCapture(backend))(static, GRID)
    generator = torch.Generator().manual_seed(0)
    for index, time in enumerate((1.0, 0.8, 0.3)):
        x = torch.randn(2, 16, 64, generator=generator)
        t = torch.tensor(time)
        torch.testing.assert_close(forward(x, t), reference(x, t), rtol=1e-6, atol=1e-6)
        assert backend.replays == index
    assert backend.captures == 1
