"""Text decoding as static graphs, one for each number of active samples, kept between rollouts.

Draws the same numbers and computes the same bits as `text_decode.decode_text`. State lives on the
device and moves on inside the graph; the host reads a turn's tokens while the next one runs, and
waits for nothing else.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from modeling.bagel.cache_memory import CacheMemory
from modeling.bagel.context import Contexts
from modeling.bagel.graph_capture import (
    MAX_REFUSED,
    CapturedWork,
    CaptureError,
    GraphCapture,
)
from modeling.bagel.layers import to_device
from modeling.bagel.sampling import SamplingConfig
from modeling.bagel.text_decode import DecodedText
from modeling.bagel.text_turn import TurnProgram, TurnSource


@dataclass
class KeptTurn:
    """The turn of one number of samples. It is warm, and may be captured, once it ran eagerly."""

    program: TurnProgram
    work: CapturedWork | None = None
    is_warm: bool = False


class TextGraphs:
    """What outlives a rollout: captured turns, and the memory and generator they bake in.

    Contexts to be decoded have to stand on a cache that `memory` lends.
    """

    def __init__(self, capture: GraphCapture):
        self.capture = capture
        self.memory = CacheMemory(before_move=self.drop)
        self.num_refused = 0
        self._turns: dict[tuple, KeptTurn] = {}
        self._generator: torch.Generator | None = None

    @property
    def is_usable(self) -> bool:
        """Whether there is a backend that has not refused too often."""
        return self.capture.is_available and self.num_refused < MAX_REFUSED

    def turn(self, contexts: Contexts, sampling: SamplingConfig, count: int) -> KeptTurn:
        """The turn of `count` samples, new or from an earlier rollout."""
        key = (count, sampling, contexts.rounding)
        if key not in self._turns:
            self._turns[key] = KeptTurn(TurnProgram(count, sampling, contexts.device))
        return self._turns[key]

    def generator_like(self, generator: torch.Generator) -> torch.Generator:
        """The generator that graphs draw from, in the state of `generator`."""
        if self._generator is None:
            self._generator = torch.Generator(generator.device)
        self._generator.set_state(generator.get_state())
        return self._generator

    def refuse(self) -> None:
        """Counts a refused capture, and drops what it may have left unusable."""
        self.num_refused += 1
        self.drop()

    def drop(self) -> None:
        """Drops all graphs."""
        for turn in self._turns.values():
            if turn.work is not None:
                turn.work.release()
                turn.work = None
        self._turns.clear()
        # A capture that failed may leave its generator in the middle of recording.
        self._generator = None

    def release(self) -> None:
        """Drops all graphs and the memory; captures that were given up are tried again."""
        self.memory.release()
        self.num_refused = 0


@dataclass
class _Launched:
    """One launched turn: who took part, and where the host will find what was drawn."""

    rows: list[int]
    drawn: Tensor
    done: Callable[[], None]


def decode_text_static(
    contexts: Contexts,
    sampling: SamplingConfig,
    max_tokens: int,
    generator: torch.Generator,
    graphs: TextGraphs,
) -> list[DecodedText]:
    """`decode_text` through captured turns; same arguments, same numbers.

    The first turn that a number of active samples ever has runs eagerly (it warms kernels up), the
    next one is captured, and from then on turns are replays, in this rollout and in later ones.

    Raises:
        ValueError: the contexts do not stand on what `graphs.memory` has lent.
    """
    if contexts.cache is not graphs.memory.lent:
        raise ValueError("captured turns need contexts over a cache that TextGraphs.memory lends")
    decode = _Decode(contexts, sampling, generator, graphs)
    try:
        return _turn_by_turn(decode, max_tokens)
    finally:
        decode.finish()


def _turn_by_turn(decode: "_Decode", max_tokens: int) -> list[DecodedText]:
    special = decode.contexts.special
    ids = [[special.bos] for _ in decode.contexts.rows]
    probs: list[list[float]] = [[] for _ in decode.contexts.rows]
    decode.start(special.bos)
    pending: list[_Launched] = []
    turn = 0
    while True:
        pending.append(decode.launch())
        if turn == max_tokens - 1:
            decode.force(special.eos)
        # One turn stays in flight while the host looks at the one before it.
        if turn >= 1:
            _take_in(pending.pop(0), ids, probs, special.eos, turn - 1 == max_tokens - 1)
        turn += 1
        # Fed at turn `turn - 1` is what was drawn before it, which the host knows by now.
        fed = [ids[row][turn - 1] if len(ids[row]) >= turn else special.eos for row in decode.rows]
        staying = [i for i, token in enumerate(fed) if turn == 1 or token != special.eos]
        if not staying:
            break
        if len(staying) < len(fed):
            decode.keep(staying)
    return [DecodedText(tuple(i), tuple(p)) for i, p in zip(ids, probs, strict=True)]


def _take_in(
    turn: _Launched, ids: list[list[int]], probs: list[list[float]], eos: int, is_forced: bool
) -> None:
    turn.done()
    tokens, drawn_probs = turn.drawn.tolist()
    for row, token, prob in zip(turn.rows, tokens, drawn_probs, strict=True):
        if len(ids[row]) > 1 and ids[row][-1] == eos:
            continue
        ids[row].append(eos if is_forced else int(token))
        probs[row].append(prob)


class _Decode:
    """One decode: launches turns, eagerly, captured or replayed; keeps the cache's bookkeeping."""

    def __init__(
        self,
        contexts: Contexts,
        sampling: SamplingConfig,
        generator: torch.Generator,
        graphs: TextGraphs,
    ):
        self.contexts = contexts
        self.sampling = sampling
        self.generator = generator
        self.graphs = graphs
        self.is_eager = not graphs.is_usable
        if self.is_eager and graphs.capture.is_available:
            graphs.capture.fall_back(
                f"text decode: captures were refused in {MAX_REFUSED} decodes in a row, "
                "no more are tried"
            )
        drawing = generator if self.is_eager else graphs.generator_like(generator)
        self.source = TurnSource(contexts, contexts.weights(), drawing)
        self.rows: list[int] = []
        self.turn: KeptTurn | None = None

    def start(self, token: int) -> None:
        """Begins with all rows, each fed `token`."""
        self._load(self.contexts.rows)
        self.force(token)

    def keep(self, staying: list[int]) -> None:
        """Drops all samples but those at the given places."""
        index = to_device(torch.tensor(staying), self.contexts.device)
        tokens = self.turn.program.state.tokens[index]
        self._load([self.rows[i] for i in staying])
        self.turn.program.state.tokens.copy_(tokens)

    def launch(self) -> _Launched:
        """One turn of all active rows; nothing waits for it here."""
        if self.is_eager or not self.turn.is_warm or not self._replay():
            self.turn.program.run()
            self.turn.is_warm = True
        ones = [1] * len(self.rows)
        self.contexts.cache.advance(self.rows, ones, ones)
        return self._read_back()

    def force(self, token: int) -> None:
        """Makes `token` what every sample is fed next."""
        self.turn.program.state.tokens.fill_(token)

    def finish(self) -> None:
        """Hands the stream back to the caller's generator; however the decode ended."""
        if not self.is_eager:
            self.generator.set_state(self.source.generator.get_state())
            self.graphs.num_refused = 0

    def _load(self, rows: list[int]) -> None:
        self.rows = rows
        self.turn = self.graphs.turn(self.contexts, self.sampling, len(rows))
        self.turn.program.load(self.source, rows)
        if self.turn.work is not None:
            self.turn.work.watch_anew()

    def _replay(self) -> bool:
        """Replays the turn, after capturing it where needed; False if that is refused."""
        turn, program = self.turn, self.turn.program
        try:
            if turn.work is None:
                turn.work = self.graphs.capture.capture(
                    program.run, program.watched, [self.source.generator]
                )
            turn.work.run()
        except CaptureError as error:
            self._fall_back(error)
            return False
        return True

    def _fall_back(self, error: CaptureError) -> None:
        """Goes on without graphs, on the caller's own generator."""
        self.graphs.capture.fall_back(f"text decode: {error}")
        self.generator.set_state(self.source.generator.get_state())
        self.is_eager = True
        self.graphs.refuse()
        self.source = replace(self.source, generator=self.generator)
        self.turn.program.source = self.source

    def _read_back(self) -> _Launched:
        drawn = self.turn.program.state.drawn
        if not drawn.is_cuda:
            return _Launched(self.rows, drawn.clone(), lambda: None)
        host = torch.empty(drawn.shape, dtype=drawn.dtype, pin_memory=True)
        host.copy_(drawn, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        return _Launched(self.rows, host, event.synchronize)
