"""Text decoding as a static graph: one captured turn for each number of active samples.

Draws the same numbers and computes the same bits as `text_decode.decode_text`. State lives on the
device and moves on inside the graph; the host reads a turn's tokens while the next one runs, and
waits for nothing else. Shape letters: A active samples, B cache rows.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from modeling.bagel.attention import cache_read
from modeling.bagel.cache import CacheAppend
from modeling.bagel.context import Contexts
from modeling.bagel.graph_capture import CapturedWork, GraphCapture
from modeling.bagel.qwen2_navit import ExpertOrder
from modeling.bagel.sampling import SamplingConfig, sample_tokens
from modeling.bagel.text_decode import DecodedText


@dataclass(frozen=True)
class TurnState:
    """Device state of A active samples; every tensor is written in place by each turn."""

    rows: list[int]
    tokens: Tensor  # int64 [A], to be fed
    rope_ids: Tensor  # int64 [A]
    places: Tensor  # int64 [A], flat cache positions of the fed tokens
    keys_used: Tensor  # int32 [A], filled positions with the fed token
    drawn: Tensor  # float64 [2, A]: next tokens and their probabilities, read by the host

    @staticmethod
    def start(contexts: Contexts, rows: list[int], tokens: Tensor) -> "TurnState":
        """State of `rows` before their next turn; lengths come from the host's bookkeeping."""
        cache, device = contexts.cache, contexts.device
        lengths = [cache.lengths[row] for row in rows]
        places = [row * cache.capacity + n for row, n in zip(rows, lengths, strict=True)]
        used = [n + 1 for n in lengths]
        return TurnState(
            rows=rows,
            tokens=tokens,
            rope_ids=torch.tensor([cache.next_rope[row] for row in rows], device=device),
            places=torch.tensor(places, device=device),
            keys_used=torch.tensor(used, dtype=torch.int32, device=device),
            drawn=torch.zeros(2, len(rows), dtype=torch.float64, device=device),
        )


class TurnProgram:
    """One turn over a TurnState: feed, attend, draw, move on. Runs eagerly or captured."""

    def __init__(
        self,
        contexts: Contexts,
        state: TurnState,
        sampling: SamplingConfig,
        generator: torch.Generator,
    ):
        self.contexts = contexts
        self.state = state
        self.sampling = sampling
        self.generator = generator
        cache, count = contexts.cache, len(state.rows)
        read = cache_read(state.rows, [1] * count, state.keys_used, cache.capacity, causal=True)
        self.append = CacheAppend(cache, state.places, read)
        self.experts = ExpertOrder(count, 0, None, None)

    def run(self) -> None:
        state, model = self.state, self.contexts.model
        hidden = self.contexts.extend_text(
            model.embed_text(state.tokens), self.experts, state.rope_ids, self.append
        )
        logits = model.language_model.lm_head(hidden)
        tokens, probs = sample_tokens(logits, self.sampling, self.generator)
        state.tokens.copy_(tokens)
        state.drawn[0].copy_(tokens)
        state.drawn[1].copy_(probs)
        state.rope_ids.add_(1)
        state.places.add_(1)
        state.keys_used.add_(1)

    def watched(self) -> list[Tensor]:
        """Everything whose address a graph of this turn bakes in."""
        state, cache = self.state, self.contexts.cache
        own = [state.tokens, state.rope_ids, state.places, state.keys_used, state.drawn]
        return [*own, *cache.keys, *cache.values, *self.contexts.weights()]


@dataclass
class _Turn:
    """One launched turn: who took part, and where the host will find what was drawn."""

    rows: list[int]
    drawn: Tensor
    done: Callable[[], None]


def decode_text_static(
    contexts: Contexts,
    sampling: SamplingConfig,
    max_tokens: int,
    generator: torch.Generator,
    capture: GraphCapture,
) -> list[DecodedText]:
    """`decode_text` through captured turns; same arguments, same numbers.

    The first turn of each number of active samples runs eagerly (it warms kernels up), the second
    is captured, and from then on turns are replays.
    """
    special = contexts.special
    ids = [[special.bos] for _ in contexts.rows]
    probs: list[list[float]] = [[] for _ in contexts.rows]
    tokens = torch.full((len(ids),), special.bos, device=contexts.device)
    runner = _Runner(contexts, sampling, generator, capture)
    runner.start(contexts.rows, tokens)
    pending: list[_Turn] = []
    turn = 0
    while True:
        pending.append(runner.launch())
        if turn == max_tokens - 1:
            runner.force(special.eos)
        # One turn stays in flight while the host looks at the one before it.
        if turn >= 1:
            _take_in(pending.pop(0), ids, probs, special.eos, turn - 1 == max_tokens - 1)
        turn += 1
        # Fed at turn `turn - 1` is what was drawn before it, which the host knows by now.
        fed = [ids[row][turn - 1] if len(ids[row]) >= turn else special.eos for row in runner.rows]
        staying = [i for i, token in enumerate(fed) if turn == 1 or token != special.eos]
        if not staying:
            break
        if len(staying) < len(fed):
            runner.keep(staying)
    runner.release()
    return [DecodedText(tuple(i), tuple(p)) for i, p in zip(ids, probs, strict=True)]


def _take_in(
    turn: _Turn, ids: list[list[int]], probs: list[list[float]], eos: int, is_forced: bool
) -> None:
    turn.done()
    tokens, drawn_probs = turn.drawn.tolist()
    for row, token, prob in zip(turn.rows, tokens, drawn_probs, strict=True):
        if len(ids[row]) > 1 and ids[row][-1] == eos:
            continue
        ids[row].append(eos if is_forced else int(token))
        probs[row].append(prob)


class _Runner:
    """Launches turns, eagerly, captured or replayed, and keeps the cache's bookkeeping."""

    def __init__(
        self,
        contexts: Contexts,
        sampling: SamplingConfig,
        generator: torch.Generator,
        capture: GraphCapture,
    ):
        self.contexts = contexts
        self.sampling = sampling
        self.generator = generator
        self.capture = capture
        self.rows: list[int] = []
        self.program: TurnProgram | None = None
        self.work: CapturedWork | None = None
        self.num_turns = 0

    def start(self, rows: list[int], tokens: Tensor) -> None:
        """Begins with a new set of active rows."""
        self.release()
        self.rows = rows
        state = TurnState.start(self.contexts, rows, tokens)
        self.program = TurnProgram(self.contexts, state, self.sampling, self.generator)
        self.num_turns = 0

    def keep(self, staying: list[int]) -> None:
        """Drops all samples but those at the given places."""
        index = torch.tensor(staying, device=self.contexts.device)
        tokens = self.program.state.tokens[index]
        self.start([self.rows[i] for i in staying], tokens)

    def launch(self) -> _Turn:
        """One turn of all active rows; nothing waits for it here."""
        if self.num_turns == 1 and self.capture.is_available:
            self.work = self._record()
        if self.work is not None:
            self.work.run()
        else:
            self.program.run()
        self.num_turns += 1
        ones = [1] * len(self.rows)
        self.contexts.cache.advance(self.rows, ones, ones)
        return self._read_back()

    def force(self, token: int) -> None:
        """Makes `token` what every sample is fed next."""
        self.program.state.tokens.fill_(token)

    def release(self) -> None:
        if self.work is not None:
            self.work.release()
        self.work = None

    def _record(self) -> CapturedWork | None:
        program = self.program
        try:
            return self.capture.capture(program.run, program.watched, [self.generator])
        except RuntimeError as error:
            self.capture.fall_back(f"text decode: {error}")
            return None

    def _read_back(self) -> _Turn:
        drawn = self.program.state.drawn
        if not drawn.is_cuda:
            return _Turn(self.rows, drawn.clone(), lambda: None)
        host = torch.empty(drawn.shape, dtype=drawn.dtype, pin_memory=True)
        host.copy_(drawn, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        return _Turn(self.rows, host, event.synchronize)
