"""Capture and replay of CUDA graphs: what a graph may rely on is checked at every replay."""

import contextlib
import gc
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

logger = logging.getLogger("faster_r3")

FLUSH_BELOW_GIB = 4.0
"""The allocator is flushed before a capture only when less than this is free on the device."""
MAX_REFUSED = 2
"""After so many refusals in a row those who keep graphs between rollouts try no more captures."""


class StaleGraphError(RuntimeError):
    """What a graph was captured with has moved or changed; replaying would read old memory."""


class CaptureError(RuntimeError):
    """Work could not be recorded; nothing of it has run."""


class GraphBackend(Protocol):
    """Records device work and plays it again; a fake one serves tests without a GPU."""

    def capture(self, work: Callable[[], None], generators: Sequence[torch.Generator]) -> object:
        """Records `work` without running it; the result is given to `replay`."""

    def replay(self, graph: object) -> None:
        """Runs recorded work on the current stream."""

    def pool_gib(self) -> float:
        """Memory that captured graphs hold."""


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Keeps the garbage collector out: an old graph that it frees would spoil the capture."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


class CudaBackend:
    """torch.cuda.CUDAGraph with one memory pool for all graphs of the process."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()
        # A pool ends with its last graph, and cannot be captured into again: this one stays.
        self._anchor_memory = torch.zeros(1, device="cuda")
        self._anchor = self.capture(lambda: self._anchor_memory.add_(1), ())

    def capture(self, work: Callable[[], None], generators: Sequence[torch.Generator]) -> object:
        free, _ = torch.cuda.mem_get_info()
        if free < FLUSH_BELOW_GIB * 2**30:
            torch.cuda.empty_cache()
        graph = torch.cuda.CUDAGraph()
        for generator in generators:
            graph.register_generator_state(generator)
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream), _no_collection():
            # Not the `torch.cuda.graph` context: that one flushes the allocator every time.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                work()
            finally:
                graph.capture_end()
        torch.cuda.current_stream().wait_stream(self._stream)
        return graph

    def replay(self, graph: object) -> None:
        graph.replay()

    def pool_gib(self) -> float:
        segments = torch.cuda.memory_snapshot()
        pools = [s for s in segments if tuple(s["segment_pool_id"]) == tuple(self._pool)]
        return sum(segment["total_size"] for segment in pools) / 2**30


@dataclass
class GraphCounters:
    """How often graphs were captured, replayed, and given up for the eager path."""

    captured: int = 0
    replayed: int = 0
    recaptured: int = 0
    fallen_back: int = 0


@dataclass
class GraphCapture:
    """Captures and replays for one rank; counts what it does and warns once for each reason."""

    backend: GraphBackend | None
    counters: GraphCounters = field(default_factory=GraphCounters)
    _warned: set[str] = field(default_factory=set)

    @property
    def is_available(self) -> bool:
        return self.backend is not None

    def metrics(self) -> dict[str, float]:
        """Counters so far and the pool's size, under their names in metrics.jsonl."""
        values = {f"graphs/{name}": float(count) for name, count in vars(self.counters).items()}
        if self.backend is not None:
            values["graphs/pool_gib"] = self.backend.pool_gib()
        return values

    def capture(
        self,
        work: Callable[[], None],
        watched: Callable[[], Sequence[Tensor]],
        generators: Sequence[torch.Generator] = (),
    ) -> "CapturedWork":
        """Records `work`, which reads and writes the `watched` tensors and draws from `generators`.

        Raises:
            CaptureError: there is no backend, or the work cannot be captured.
        """
        if self.backend is None:
            raise CaptureError("no graph backend: capture needs a GPU")
        captured = CapturedWork(self, work, watched, generators)
        captured.record()
        self.counters.captured += 1
        return captured

    def fall_back(self, reason: str) -> None:
        """Counts a use of the eager path where a graph was wanted; warns once for each reason."""
        self.counters.fallen_back += 1
        if reason not in self._warned:
            self._warned.add(reason)
            logger.warning("graph capture falls back to the eager path: %s", reason)


class CapturedWork:
    """Work recorded once. `run` replays it, after recording it anew if memory has moved."""

    def __init__(
        self,
        owner: GraphCapture,
        work: Callable[[], None],
        watched: Callable[[], Sequence[Tensor]],
        generators: Sequence[torch.Generator],
    ):
        self._owner = owner
        self._work = work
        self._watched = watched
        self._generators = tuple(generators)
        self._graph: object | None = None
        self._tensors: tuple[Tensor, ...] = ()
        self._addresses: list[int] = []

    def record(self) -> None:
        """Captures the work as memory lies now.

        Raises:
            CaptureError: it cannot be captured.
        """
        self.release()
        # The tensors themselves are kept: gathered weights are freed and gathered again into
        # the same tensor objects, so that their addresses tell, and a walk through all modules
        # at every replay would take longer than a turn of the text decode.
        self._tensors = tuple(self._watched())
        self._addresses = [tensor.data_ptr() for tensor in self._tensors]
        try:
            self._graph = self._owner.backend.capture(self._work, self._generators)
        except RuntimeError as error:
            raise CaptureError(str(error)) from error

    def watch_anew(self) -> None:
        """Asks again for the watched tensors, where other objects may have taken their place.

        A graph that outlives a rollout needs this once in each; addresses are compared later.
        """
        self._tensors = tuple(self._watched())

    def replay(self) -> None:
        """Replays.

        Raises:
            StaleGraphError: a watched tensor has moved or was freed, or the graph was released.
        """
        if self._graph is None:
            raise StaleGraphError("the graph was released")
        if [tensor.data_ptr() for tensor in self._tensors] != self._addresses:
            raise StaleGraphError("a tensor that the graph reads has moved since its capture")
        self._owner.backend.replay(self._graph)
        self._owner.counters.replayed += 1

    def run(self) -> None:
        """Replays, or records anew and replays where memory has moved since the capture.

        Raises:
            CaptureError: it cannot be captured anew; nothing has run.
        """
        try:
            self.replay()
        except StaleGraphError:
            self.record()
            self._owner.counters.recaptured += 1
            self.replay()

    def release(self) -> None:
        """Drops the graph and the memory that only it holds."""
        self._graph = None
        self._tensors = ()
