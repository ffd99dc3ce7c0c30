"""Passes of shared prefixes through a fake graph on a CPU: the bits of the stack they wrap."""

import copy
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from modeling.bagel import static_calls
from modeling.bagel.bagel import Bagel, EagerStack, LayerPass, Wanted
from modeling.bagel.cache import CacheAppend, KvCache
from modeling.bagel.context import Contexts, Stacks
from modeling.bagel.graph_capture import MAX_REFUSED, GraphCapture
from modeling.bagel.qwen2_navit import QkRounding
from modeling.bagel.static_prefix_graph import PrefixGraphs
from tests.fake_graph import FakeBackend
from tests.tiny import (
    cache_spec,
    condition_image,
    contexts,
    contexts_over,
    move_weights,
    tiny_model,
)

SHORT, OTHER, LONG = [5, 77, 300], [12, 9, 41], [250, 8, 16, 23, 4, 15]
IMAGES = {seed: condition_image(seed) for seed in range(3)}


class OverwritingStack(EagerStack):
    """Like a fused stack it writes over x, and leaves out hidden states that nobody wants."""

    def run(self, layer_pass: LayerPass) -> Tensor:
        hidden = super().run(layer_pass)
        layer_pass.x.fill_(float("nan"))
        return hidden if layer_pass.wanted is Wanted.ALL else torch.full_like(hidden, float("nan"))


class BakingBackend(FakeBackend):
    """Replays a pass as it was when captured, like a real graph: only its tensors are read anew."""

    def capture(self, work: Callable[[], None], generators: Sequence[torch.Generator]) -> object:
        super().capture(work, generators)
        program = work.__self__
        append = program._pass.append
        cache = append.runs[0].cache
        memory = KvCache(list(cache.keys), list(cache.values))
        runs = [replace(run, cache=memory) for run in append.runs]
        baked = replace(program._pass, append=CacheAppend(*runs, order=append.order))
        return lambda: program.out.copy_(program._stack.run(baked))


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def prefix_graphs(refuses: bool = False) -> tuple[PrefixGraphs, FakeBackend]:
    backend = BakingBackend(refuses)
    return PrefixGraphs(OverwritingStack(), GraphCapture(backend)), backend


@contextmanager
def lent(
    graphs: PrefixGraphs,
    capacity: int = 96,
    model: Bagel | None = None,
    rounding: QkRounding | None = None,
) -> Iterator[Contexts]:
    """A prefix over memory of the graphs, in which earlier ones left what must not be read."""
    for layer in (*graphs.memory._keys, *graphs.memory._values):
        layer.fill_(float("nan"))
    with graphs.lend(cache_spec(1, capacity)) as cache:
        grown = contexts_over(cache, rounding)
        grown.model, grown.stacks = model or grown.model, Stacks(graphs, graphs)
        yield grown


def assert_same_cache(mine: Contexts, eager: Contexts) -> None:
    mine, eager = mine.cache, eager.cache
    assert (mine.lengths, mine.next_rope) == (eager.lengths, eager.next_rope)
    pairs = zip((*mine.keys, *mine.values), (*eager.keys, *eager.values), strict=True)
    for kept, reference in pairs:
        assert torch.equal(kept[:, : eager.lengths[0]], reference[:, : eager.lengths[0]])


def assert_like_eager(graphs: PrefixGraphs, *steps: list[int] | int | str, **settings) -> None:
    """One prefix of texts, pictures and overlaid pictures ("overlay 1") has the eager bits."""
    eager = contexts(1, rounding=settings.get("rounding"))
    eager.model = settings.get("model") or eager.model
    with lent(graphs, **settings) as static:
        for grown in (eager, static):
            for step in steps:
                if isinstance(step, list):
                    grown.add_text([step])
                elif isinstance(step, int):
                    grown.add_vit([IMAGES[step]])
                else:
                    word, seed = step.split()
                    grown.add_image([IMAGES[int(seed)]], overlay=word == "overlay")
        assert_same_cache(static, eager)


def test_the_first_pass_is_eager_the_second_captured_then_replayed():
    graphs, backend = prefix_graphs()
    for sight in range(5):
        assert_like_eager(graphs, SHORT)
        assert (backend.captures, backend.replays) == (min(sight, 1), sight)
    counters = graphs.calls.capture.counters
    assert (counters.captured, counters.replayed) == (1, 4)
    assert (counters.recaptured, counters.fallen_back) == (0, 0)


# Two texts, a longer one and an encoder segment; a latent one where it is not overlaid.
@pytest.mark.parametrize(("image", "kinds", "passes"), [("overlay", 4, 6), ("behind", 5, 7)])
def test_prefixes_of_all_stages_have_the_eager_bits(image, kinds, passes):
    graphs, backend = prefix_graphs()
    for seed in range(4):
        assert_like_eager(graphs, LONG, SHORT if seed % 2 else OTHER)  # generate
        assert_like_eager(graphs, LONG, seed % 3, [*LONG, seed])  # reflect
        assert_like_eager(graphs, f"{image} {seed % 3}")  # edit
    assert backend.captures == kinds
    assert backend.replays == 4 * passes - kinds
    assert graphs.calls.capture.counters.recaptured == 0


def test_equal_lengths_share_a_graph_at_any_position():
    graphs, backend = prefix_graphs()
    assert_like_eager(graphs, SHORT)
    assert_like_eager(graphs, SHORT, OTHER, LONG, SHORT)
    assert_like_eager(graphs, OTHER, 1, OTHER)
    assert_like_eager(graphs, LONG, OTHER)
    assert backend.captures == 2 and backend.replays == 3 + 2 + 2


def test_another_length_or_rounding_is_another_graph():
    graphs, backend = prefix_graphs()
    for captures, rounding in ((2, QkRounding()), (4, QkRounding(und=True))):
        for _ in range(3):
            assert_like_eager(graphs, SHORT, rounding=rounding)
            assert_like_eager(graphs, LONG, rounding=rounding)
        assert backend.captures == captures


def test_hidden_states_are_those_of_the_eager_path():
    graphs, _ = prefix_graphs()
    for tokens in (SHORT, OTHER, SHORT):
        with lent(graphs) as static:
            hidden = static.feed_text([0], [tokens])
            assert torch.equal(hidden, contexts(1).feed_text([0], [tokens]))
            logits = static.text_logits(hidden)
        assert torch.equal(logits, tiny_model().language_model.lm_head(hidden))


def test_the_overlay_attends_zeros_whatever_lay_there():
    graphs, _ = prefix_graphs()
    for seed in range(3):
        with lent(graphs, capacity=200) as static:
            static.add_image([IMAGES[seed]], overlay=True)
            behind = [layer[0, 17:] for layer in (*static.cache.keys, *static.cache.values)]
            assert not torch.stack(behind).any()
        assert_like_eager(graphs, f"overlay {seed}", SHORT, capacity=200)


def replace_weights(model: torch.nn.Module) -> None:
    """Another tensor in the place of one, while the old one lives on."""
    norm = model.decoder.layers[0].input_layernorm
    norm.weight = torch.nn.Parameter(norm.weight * 1.5, requires_grad=False)


@pytest.mark.parametrize("change", [move_weights, replace_weights])
def test_weights_that_moved_are_captured_anew_once_they_stay(change):
    graphs, backend = prefix_graphs()
    model = copy.deepcopy(tiny_model())
    for _ in range(2):
        assert_like_eager(graphs, SHORT, model=model)
    (old,) = graphs.calls.kept.values()
    weights = list(model.parameters())
    change(model)
    assert_like_eager(graphs, SHORT, model=model)
    assert (backend.captures, backend.replays) == (1, 1) and old.work._graph is None
    for _ in range(2):
        assert_like_eager(graphs, SHORT, model=model)
    assert (backend.captures, backend.replays) == (2, 3)
    assert weights


def test_passes_stay_eager_while_weights_move_every_time():
    graphs, backend = prefix_graphs()
    model = copy.deepcopy(tiny_model())
    lay_there = []
    for _ in range(4):
        assert_like_eager(graphs, SHORT, model=model)
        lay_there += [weight.data for weight in model.parameters()]  # none goes back there
        move_weights(model)
    assert (backend.captures, graphs.calls.capture.counters.fallen_back) == (0, 0)


def test_memory_that_grows_drops_the_graphs():
    graphs, backend = prefix_graphs()
    for _ in range(2):
        assert_like_eager(graphs, SHORT)
    works = [kept.work for kept in graphs.calls.kept.values()]
    assert_like_eager(graphs, SHORT, capacity=300)
    assert [work._graph for work in works] == [None]
    assert backend.captures == 1  # seen for the first time over this memory
    for _ in range(2):
        assert_like_eager(graphs, SHORT)
    assert (backend.captures, graphs.calls.capture.counters.recaptured) == (2, 0)


def test_the_least_recently_used_are_dropped(monkeypatch):
    monkeypatch.setattr(static_calls, "MAX_KEPT", 2)
    graphs, backend = prefix_graphs()
    for text in (SHORT, SHORT, LONG, LONG, SHORT):
        assert_like_eager(graphs, text)
    short, long = (graphs.calls.kept[kind].work for kind in reversed(graphs.calls.kept))
    assert_like_eager(graphs, [*LONG, 1])
    assert long._graph is None and short._graph is not None and len(graphs.calls.kept) == 2
    for text in (SHORT, LONG, LONG):
        assert_like_eager(graphs, text)
    assert backend.captures == 3


def test_passes_over_other_caches_are_left_to_the_stack():
    graphs, backend = prefix_graphs()
    for rows in (1, 2, 1):
        grown, eager = contexts(rows), contexts(rows)
        grown.stacks = Stacks(graphs, graphs)
        for each in (grown, eager):
            each.add_text([SHORT] * rows)
        assert torch.equal(grown.cache.keys[-1], eager.cache.keys[-1])
    assert backend.captures == 0 and not graphs.calls.kept


def test_without_a_backend_passes_are_eager():
    graphs = PrefixGraphs(OverwritingStack(), GraphCapture(None))
    for _ in range(3):
        assert_like_eager(graphs, SHORT, 0, "overlay 1")
    counters = graphs.calls.capture.counters
    assert counters.captured == counters.fallen_back == 0 and not graphs.calls.kept


def test_an_exception_in_a_pass_does_not_reach_the_next_one(monkeypatch):
    graphs, _ = prefix_graphs()
    for sight in range(3):
        with monkeypatch.context() as patched, pytest.raises(InterruptedError), lent(graphs) as cut:

            def fail(*args):
                raise InterruptedError("in the middle of a pass")

            patched.setattr(cut.cache, "advance", fail)
            cut.add_text([SHORT])
        assert graphs.memory.lent is None
        assert_like_eager(graphs, LONG if sight == 0 else SHORT)
    assert graphs.calls.capture.counters.fallen_back == 0


class TestRefusedCaptures:
    def test_the_pass_runs_eagerly_and_a_later_one_is_captured(self, caplog):
        graphs, backend = prefix_graphs(refuses=True)
        with caplog.at_level(logging.WARNING, logger="faster_r3"):
            for _ in range(2):
                assert_like_eager(graphs, SHORT)
        assert (backend.refused, len(caplog.records)) == (1, 1)
        assert "prefill: operation not permitted" in caplog.text
        backend.refuses = False
        for _ in range(2):
            assert_like_eager(graphs, SHORT)
        assert backend.captures == 1
        assert graphs.calls.num_refused == 0 and graphs.calls.capture.counters.fallen_back == 1

    def test_two_in_a_row_end_the_tries_until_release(self, caplog):
        graphs, backend = prefix_graphs(refuses=True)
        with caplog.at_level(logging.WARNING, logger="faster_r3"):
            for text in (SHORT, LONG) * 4:
                assert_like_eager(graphs, text)
        assert backend.refused == MAX_REFUSED
        assert graphs.calls.capture.counters.fallen_back == 6
        reasons = [record.getMessage() for record in caplog.records]
        assert len(reasons) == 2 and "refused 2 times in a row" in reasons[1]
        backend.refuses = False
        assert_like_eager(graphs, SHORT)
        assert backend.captures == 0
        graphs.release()
        for _ in range(2):
            assert_like_eager(graphs, SHORT)
        assert backend.captures == 1

    def test_a_capture_that_cannot_be_renewed_is_left_for_the_eager_path(self):
        graphs, backend = prefix_graphs()
        for _ in range(2):
            assert_like_eager(graphs, SHORT)
        backend.refuses = True
        for kept in graphs.calls.kept.values():
            kept.work.release()
        assert_like_eager(graphs, SHORT)
        counters = graphs.calls.capture.counters
        assert (backend.refused, counters.fallen_back, counters.recaptured) == (1, 1, 0)


def test_release_drops_graphs_and_memory():
    graphs, backend = prefix_graphs()
    for _ in range(2):
        assert_like_eager(graphs, SHORT, 0)
    works = [kept.work for kept in graphs.calls.kept.values()]
    graphs.release()
    assert graphs.memory.spec is None and not graphs.calls.kept
    assert [(work._graph, work._tensors) for work in works] == [(None, ())] * 2
    for _ in range(2):
        assert_like_eager(graphs, SHORT, 0)
    assert backend.captures == 4
