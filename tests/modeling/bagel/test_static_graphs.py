"""Static decode and flow against the eager path, through a fake graph on a CPU."""

import copy
import gc
import logging
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from modeling.bagel import noise_forward
from modeling.bagel.bagel import LayerPass
from modeling.bagel.cache import KvCache
from modeling.bagel.config import ImageSize
from modeling.bagel.context import EAGER, Contexts, Stacks
from modeling.bagel.flow import FlowBranches, FlowStep, eager_forwards
from modeling.bagel.graph_capture import GraphCapture
from modeling.bagel.sampling import SamplingConfig
from modeling.bagel.static_flow_graph import StaticForwards, static_forwards
from modeling.bagel.static_text_graph import TextGraphs, decode_text_static
from modeling.bagel.text_decode import DecodedText, decode_text
from tests.fake_graph import FakeBackend
from tests.tiny import (
    PoisonedStack,
    cache_spec,
    contexts,
    contexts_over,
    move_weights,
    tiny_model,
    tiny_tokenizer,
)

HOT = SamplingConfig(do_sample=True, temperature=1.6, top_k=50, top_p=0.9)
COLD = SamplingConfig(do_sample=True, temperature=0.5, top_k=50, top_p=0.9)
GRID = ImageSize(4, 4)
CAT, LONG = "a photo of a cat", "a photo of two red dogs and of one blue car below them"


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def fill(grown: Contexts, prompts: list[str]) -> Contexts:
    grown.add_text([tiny_tokenizer().encode(prompt) for prompt in prompts])
    return grown


def prefilled(rows: int) -> Contexts:
    return fill(contexts(rows), [CAT] * rows)


def text_graphs(refuses: bool = False) -> tuple[TextGraphs, FakeBackend]:
    backend = FakeBackend(refuses)
    return TextGraphs(GraphCapture(backend)), backend


@contextmanager
def lent(graphs: TextGraphs, prompts: list[str], capacity: int = 96) -> Iterator[Contexts]:
    """Contexts over memory of the graphs, in which nothing but what they write can be read."""
    with graphs.memory.lend(cache_spec(len(prompts), capacity)) as cache:
        for layer in (*cache.keys, *cache.values):
            layer.fill_(float("nan"))
        yield fill(contexts_over(cache), prompts)


def assert_same_cache(mine: KvCache, theirs: KvCache) -> None:
    assert mine.lengths == theirs.lengths
    assert mine.next_rope == theirs.next_rope
    pairs = zip((*mine.keys, *mine.values), (*theirs.keys, *theirs.values), strict=True)
    for kept, reference in pairs:
        for row, length in enumerate(theirs.lengths):
            assert torch.equal(kept[row, :length], reference[row, :length])


def assert_like_eager(
    graphs: TextGraphs,
    seed: int,
    prompts: list[str],
    max_tokens: int = 16,
    sampling: SamplingConfig = HOT,
    capacity: int = 96,
) -> list[DecodedText]:
    """One rollout through graphs: ids, probabilities, streams and caches are the eager path's."""
    first, second = (torch.Generator().manual_seed(seed) for _ in range(2))
    eager = fill(contexts(len(prompts), capacity), prompts)
    expected = decode_text(eager, sampling, max_tokens, first)
    with lent(graphs, prompts, capacity) as static:
        texts = decode_text_static(static, sampling, max_tokens, second, graphs)
        assert_same_cache(static.cache, eager.cache)
    assert texts == expected
    assert torch.equal(first.get_state(), second.get_state())
    return texts


def turns_by_count(texts: list[DecodedText]) -> dict[int, int]:
    """How many turns each number of active samples had."""
    fed = sorted(len(text.ids) for text in texts)
    starts = [0, *fed]
    spans = {len(fed) - i: fed[i] - starts[i] for i in range(len(fed))}
    return {count: span for count, span in spans.items() if span}


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("max_tokens", [2, 3, 12])
def test_static_decode_draws_what_the_eager_path_draws(seed, max_tokens):
    graphs, _ = text_graphs()
    assert_like_eager(graphs, seed, [CAT] * 4, max_tokens)
    assert graphs.capture.counters.fallen_back == 0


def test_one_graph_for_each_number_of_active_samples():
    most = 0
    for seed in range(20):
        graphs, backend = text_graphs()
        spans = turns_by_count(assert_like_eager(graphs, seed, [CAT] * 4))
        most = max(most, len(spans))
        # A number of samples that takes part in two turns or more is captured on its second.
        assert backend.captures == sum(span > 1 for span in spans.values())
        assert backend.replays == sum(span - 1 for span in spans.values())
    assert most > 1, "no seed made samples finish at different turns"


def test_later_rollouts_capture_nothing_that_is_known():
    graphs, backend = text_graphs()
    turns, rows_of_count = {}, {}
    rollouts = [
        (seed, prompts, max_tokens)
        for seed, prompts in enumerate(([CAT] * 4, [LONG, CAT, LONG, CAT], [CAT, LONG] * 2) * 4)
        for max_tokens in (16, 9)
    ]
    for seed, prompts, max_tokens in rollouts:
        texts = assert_like_eager(graphs, seed, prompts, max_tokens)
        ends = {len(text.ids) for text in texts}
        for count, span in turns_by_count(texts).items():
            turns[count] = turns.get(count, 0) + span
        for end in ends:
            rows = tuple(i for i, text in enumerate(texts) if len(text.ids) >= end)
            rows_of_count.setdefault(len(rows), set()).add(rows)
        # Each number of samples ran eagerly once in all, and is captured once in all.
        assert backend.captures == sum(span > 1 for span in turns.values())
        assert backend.replays == sum(span - 1 for span in turns.values())
    assert max(len(rows) for rows in rows_of_count.values()) > 1, "always the same rows"
    assert len(set(backend.generators)) == 1
    counters = graphs.capture.counters
    assert (counters.recaptured, counters.fallen_back) == (0, 0)
    assert (counters.captured, counters.replayed) == (backend.captures, backend.replays)


def test_fewer_rows_than_the_memory_has_use_its_graphs():
    graphs, backend = text_graphs()
    for seed in range(8):
        assert_like_eager(graphs, seed, [CAT] * 4)
    known = backend.captures
    for seed in range(8):
        assert_like_eager(graphs, seed, [LONG] * 3)
    assert backend.captures == known and graphs.memory.spec.rows == 4


def test_samplings_have_their_own_graphs():
    graphs, backend = text_graphs()
    for sampling in (HOT, COLD, HOT, COLD):
        assert_like_eager(graphs, 1, [CAT], sampling=sampling)
    assert backend.captures == 2


@pytest.mark.parametrize(("rows", "capacity"), [(2, 300), (3, 96)])
def test_memory_that_grows_is_captured_anew(rows, capacity):
    graphs, backend = text_graphs()
    assert_like_eager(graphs, 0, [CAT] * 2)
    before, spec = backend.captures, graphs.memory.spec
    assert_like_eager(graphs, 0, [CAT] * rows, capacity=capacity)
    assert graphs.memory.spec != spec
    grown = backend.captures
    assert grown > before
    assert_like_eager(graphs, 0, [CAT] * 2)
    assert_like_eager(graphs, 0, [CAT] * rows, capacity=capacity)
    assert backend.captures - grown <= 1  # 2 of 3 rows may be new
    assert graphs.capture.counters.recaptured == 0  # old graphs were dropped, not found stale


def replace_weights(model: torch.nn.Module) -> None:
    """Other tensors in their places, while the old ones live on."""
    embedding = model.language_model.model.embed_tokens
    embedding.weight = torch.nn.Parameter(embedding.weight * 1.5, requires_grad=False)


@pytest.mark.parametrize("change", [move_weights, replace_weights])
def test_weights_that_moved_are_captured_anew_without_an_eager_turn(change):
    graphs, backend = text_graphs()
    model, kept = copy.deepcopy(tiny_model()), []

    def roll(seed: int) -> tuple[list[DecodedText], list[DecodedText]]:
        results = []
        for decode, extra in ((decode_text, ()), (decode_text_static, (graphs,))):
            with graphs.memory.lend(cache_spec(1)) as cache:
                static = contexts_over(cache)
                static.model = model
                fill(static, [CAT])
                generator = torch.Generator().manual_seed(seed)
                results.append(decode(static, HOT, 8, generator, *extra))
        return results[0], results[1]

    expected, texts = roll(0)
    assert texts == expected
    kept += model.parameters()
    change(model)
    replays = backend.replays
    expected, texts = roll(1)
    assert texts == expected
    assert backend.replays - replays == len(texts[0].ids)
    assert graphs.capture.counters.recaptured == 1
    roll(2)
    assert graphs.capture.counters.recaptured == 1


def fail_after(monkeypatch, *calls: int) -> None:
    """Makes some draws fail, counted from the first or the last failure; others are as ever."""
    draw, left = Contexts.draw, [n for call in calls for n in (*[False] * call, True)]

    def failing(*args):
        if left and left.pop(0):
            raise InterruptedError("in the middle of a turn")
        return draw(*args)

    monkeypatch.setattr(Contexts, "draw", failing)


@pytest.mark.parametrize("calls", [0, 1, 5])
def test_an_exception_in_a_decode_does_not_reach_the_next_one(monkeypatch, calls):
    graphs, _ = text_graphs()
    assert_like_eager(graphs, 9, [CAT] * 2)
    fail_after(monkeypatch, calls, calls)
    first, second = (torch.Generator().manual_seed(0) for _ in range(2))
    with pytest.raises(InterruptedError):
        decode_text(fill(contexts(3), [CAT] * 3), HOT, 16, first)
    with pytest.raises(InterruptedError) as caught, lent(graphs, [CAT] * 3) as static:
        decode_text_static(static, HOT, 16, second, graphs)
    assert torch.equal(first.get_state(), second.get_state())
    for seed in range(3):
        assert_like_eager(graphs, seed, [LONG, CAT, CAT])
    assert graphs.capture.counters.fallen_back == 0
    assert caught.tb is not None  # it keeps the frames of the broken rollout alive until here


def test_contexts_elsewhere_are_refused():
    graphs, _ = text_graphs()
    generator = torch.Generator()
    with pytest.raises(ValueError, match=r"a cache that TextGraphs\.memory lends"):
        decode_text_static(prefilled(1), HOT, 4, generator, graphs)
    with lent(graphs, [CAT]) as past:
        pass
    with pytest.raises(ValueError, match="lends"):
        decode_text_static(past, HOT, 4, generator, graphs)


def test_without_a_backend_turns_are_eager():
    graphs = TextGraphs(GraphCapture(None))
    for seed in range(2):
        assert_like_eager(graphs, seed, [CAT] * 3)
    assert graphs.capture.counters.captured == graphs.capture.counters.fallen_back == 0


class TestRefusedCaptures:
    def test_the_decode_goes_on_eagerly_and_the_next_one_captures(self, caplog):
        graphs, backend = text_graphs(refuses=True)
        with caplog.at_level(logging.WARNING, logger="faster_r3"):
            assert_like_eager(graphs, 0, [CAT] * 4)
        assert (backend.refused, len(caplog.records)) == (1, 1)
        assert "operation not permitted" in caplog.text
        assert graphs.capture.counters.fallen_back == 1
        backend.refuses = False
        assert_like_eager(graphs, 1, [CAT] * 4)
        assert backend.captures >= 1
        assert graphs.capture.counters.fallen_back == 1

    def test_two_decodes_in_a_row_end_the_tries(self, caplog):
        graphs, backend = text_graphs(refuses=True)
        with caplog.at_level(logging.WARNING, logger="faster_r3"):
            for seed in range(4):
                assert_like_eager(graphs, seed, [CAT] * 4)
        assert backend.refused == 2
        assert graphs.capture.counters.fallen_back == 4
        reasons = [record.getMessage() for record in caplog.records]
        assert len(reasons) == 2 and "refused in 2 decodes in a row" in reasons[1]
        backend.refuses = False
        assert_like_eager(graphs, 5, [CAT] * 4)
        assert backend.captures == 0
        graphs.release()
        assert_like_eager(graphs, 6, [CAT] * 4)
        assert backend.captures >= 1

    def test_a_good_decode_between_two_refused_ones_counts_anew(self):
        graphs, backend = text_graphs()
        for seed, refuses in enumerate((True, False, True, False)):
            if refuses:
                graphs.drop()
            backend.refuses = refuses
            assert_like_eager(graphs, seed, [CAT] * 2)
        assert backend.refused == 2 and graphs.is_usable

    def test_a_capture_that_cannot_be_renewed_is_left_for_the_eager_path(self):
        graphs, backend = text_graphs()
        assert_like_eager(graphs, 0, [CAT])
        backend.refuses = True
        for turn in graphs._turns.values():
            turn.work.release()
        assert_like_eager(graphs, 1, [CAT])
        counters = graphs.capture.counters
        assert (backend.refused, counters.fallen_back, counters.recaptured) == (1, 1, 0)


def test_release_drops_graphs_and_memory():
    graphs, backend = text_graphs()
    assert_like_eager(graphs, 0, [CAT] * 2)
    works = [turn.work for turn in graphs._turns.values() if turn.work is not None]
    captures, counters = backend.captures, graphs.capture.counters
    graphs.release()
    assert graphs.memory.spec is None
    for work in works:
        assert work._graph is None and work._tensors == ()
    assert counters.captured == captures == len(works) > 0
    assert_like_eager(graphs, 0, [CAT] * 2)
    assert backend.captures == counters.captured == 2 * captures
    assert counters.recaptured == 0


def flow_branches(stacks: Stacks = EAGER) -> FlowBranches:
    branches = FlowBranches(prefilled(2), text=prefilled(2), image=contexts(2))
    for _, each in branches.items():
        each.stacks = stacks
    return branches


@pytest.mark.parametrize("is_joint", [False, True])
def test_static_forwards_follow_their_inputs(monkeypatch, is_joint):
    if is_joint:
        monkeypatch.setattr(noise_forward, "INVARIANT_ROWS", 2 * 16)
    backend = FakeBackend()
    reference = eager_forwards(flow_branches(), GRID)
    branches = flow_branches(Stacks(image=PoisonedStack()))
    forwards = static_forwards(GraphCapture(backend))(branches, GRID)
    generator = torch.Generator().manual_seed(0)
    for time, is_guided in ((1.0, True), (0.8, True), (0.7, True), (0.3, False), (0.1, False)):
        x, t = torch.randn(2, 16, 64, generator=generator), torch.tensor(time)
        step = FlowStep(is_guided)
        mine, expected = forwards(x, t, step), reference(x, t, step)
        assert list(mine) == list(expected)
        for name, velocity in mine.items():
            torch.testing.assert_close(velocity, expected[name], rtol=1e-4, atol=1e-4)
    # Joint: one graph for guided steps and one for the others. Apart: one for each branch.
    assert (backend.captures, backend.replays) == ((2, 3) if is_joint else (3, 8))


class TestChosenSamples:
    """Samples that need not go through a forward do not."""

    X = torch.randn(3, 16, 64, generator=torch.Generator().manual_seed(0))
    START = X[:1].expand(3, -1, -1).contiguous()

    @pytest.fixture(autouse=True)
    def few_rows_are_enough(self, monkeypatch):
        monkeypatch.setattr(noise_forward, "INVARIANT_ROWS", 16)

    def branches(self, stacks: Stacks) -> FlowBranches:
        """The contexts of `cfg_text` are copies, those of `cond` are not."""
        prefix = fill(contexts(1), [CAT])
        text = contexts(3)
        text.cache.copy_rows(prefix.cache)
        cond = fill(contexts(3), [CAT, LONG, CAT])
        for each in (cond, text):
            each.stacks = stacks
        return FlowBranches(cond, text)

    def forwards(self, monkeypatch, stack: PoisonedStack) -> tuple[StaticForwards, list[int]]:
        """Forwards over such a stack, and how many gen rows each forward went through."""
        rows, run = [], stack.run

        def counted(layer_pass: LayerPass) -> torch.Tensor:
            rows.append(layer_pass.experts.num_gen)
            return run(layer_pass)

        monkeypatch.setattr(stack, "run", counted)
        branches = self.branches(Stacks(image=stack))
        return StaticForwards(GraphCapture(FakeBackend()), branches, GRID), rows

    def check(self, forwards: StaticForwards, x: torch.Tensor, step: FlowStep) -> None:
        expected = eager_forwards(self.branches(EAGER), GRID)(x, torch.tensor(0.8), step)
        mine = forwards(x, torch.tensor(0.8), step)
        assert list(mine) == list(expected)
        kept = list(range(3) if step.wanted is None else step.wanted)
        for name, velocity in mine.items():
            assert torch.isfinite(velocity).all()
            torch.testing.assert_close(velocity[kept], expected[name][kept], rtol=1e-4, atol=1e-4)

    def test_copies_go_through_the_first_step_once(self, monkeypatch):
        forwards, rows = self.forwards(monkeypatch, PoisonedStack())
        self.check(forwards, self.START, FlowStep(is_guided=True, is_start=True))
        self.check(forwards, self.X, FlowStep(is_guided=True))
        assert rows == [(3 + 1) * 16, (3 + 3) * 16]

    def test_unwanted_samples_go_through_no_forward(self, monkeypatch):
        forwards, rows = self.forwards(monkeypatch, PoisonedStack())
        for is_guided in (True, False):
            for _ in range(3):  # the last one is a replay
                self.check(forwards, self.X, FlowStep(is_guided, wanted=(0, 2)))
        self.check(forwards, self.X, FlowStep(is_guided=True, wanted=(1,)))
        self.check(forwards, self.START, FlowStep(is_guided=True, is_start=True, wanted=(1, 2)))
        assert set(rows) == {(2 + 2) * 16, 2 * 16, (1 + 1) * 16, (2 + 1) * 16}
        before = len(rows)
        for is_start in (True, False):
            self.check(forwards, self.X, FlowStep(True, is_start, wanted=()))
        assert len(rows) == before

    def test_all_go_where_the_stack_does_not_keep_the_order_of_sums(self, monkeypatch):
        stack = PoisonedStack()
        asked = []
        monkeypatch.setattr(stack, "keeps_order", lambda decoder, rows: asked.append(rows))
        forwards, rows = self.forwards(monkeypatch, stack)
        self.check(forwards, self.START, FlowStep(is_guided=True, is_start=True, wanted=(1,)))
        self.check(forwards, self.X, FlowStep(is_guided=True, wanted=()))
        assert asked == [2 * 3] and set(rows) == {(3 + 3) * 16}

    def test_pictures_of_few_tokens_go_together(self, monkeypatch):
        monkeypatch.setattr(noise_forward, "INVARIANT_ROWS", 17)
        forwards, rows = self.forwards(monkeypatch, PoisonedStack())
        self.check(forwards, self.START, FlowStep(is_guided=True, is_start=True, wanted=(1,)))
        assert rows == [(3 + 3) * 16]


def test_a_flow_that_ended_leaves_no_graph():
    backend = FakeBackend()
    forwards = static_forwards(GraphCapture(backend))(flow_branches(), GRID)
    for _ in range(2):
        forwards(torch.randn(2, 16, 64), torch.tensor(0.5), FlowStep(is_guided=False))
    works = [weakref.ref(each._work) for each in forwards._forwards.values()]
    gc.disable()
    try:
        del forwards
        assert [work() for work in works] == [None]
    finally:
        gc.enable()
