"""Capture and replay of CUDA graphs: what a graph may rely on is checked at every replay."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

logger = logging.getLogger("faster_r3")

FLUSH_BELOW_GIB = 4.0
"""The allocator is flushed before a capture only when less than this is free on the device."""


class StaleGraphError(RuntimeError):
    """What a graph was captured with has moved or changed; replaying would read old memory."""


class GraphBackend(Protocol):
    """Records device work and plays it again; a fake one serves tests without a GPU."""

    def capture(self, work: Callable[[], None], generators: Sequence[torch.Generator]) -> object:
        """Records `work` without running it; the result is given to `replay`."""

    def replay(self, graph: object) -> None:
        """Runs recorded work on the current stream."""

    def pool_gib(self) -> float:
        """Memory that captured graphs hold."""


class CudaBackend:
    """torch.cuda.CUDAGraph with one memory pool for all graphs of the process."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()

    def capture(self, work: Callable[[], None], generators: Sequence[torch.Generator]) -> object:
        free, _ = torch.cuda.mem_get_info()
        if free < FLUSH_BELOW_GIB * 2**30:
            torch.cuda.empty_cache()
        graph = torch.cuda.CUDAGraph()
        for generator in generators:
            graph.register_generator_state(generator)
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
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
        pools = [s for s in segments if s.get("segment_pool_id", (0, 0)) == self._pool]
        return sum(segment["total_size"] for segment in pools) / 2**30


@dataclass
class GraphCounters:
    """How often graphs were captured, replayed, and given up for the eager path."""

    captured: int = 0
    replayed: int = 0
    recaptured: int = 0
    fallen_back: int = 0

    def metrics(self) -> dict[str, float]:
        """Under their names in metrics.jsonl."""
        return {f"graphs/{name}": float(count) for name, count in vars(self).items()}


@dataclass(frozen=True)
class _Mark:
    """What identifies a tensor that a graph reads: address, shape, strides and type."""

    address: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def of(tensor: Tensor) -> "_Mark":
        shape, stride = tuple(tensor.shape), tuple(tensor.stride())
        return _Mark(tensor.data_ptr(), shape, stride, tensor.dtype)


@dataclass
class GraphCapture:
    """Captures and replays for one rank; counts what it does and warns once for each reason."""

    backend: GraphBackend | None
    counters: GraphCounters = field(default_factory=GraphCounters)
    _warned: set[str] = field(default_factory=set)

    @property
    def is_available(self) -> bool:
        return self.backend is not None

    def capture(
        self,
        work: Callable[[], None],
        watched: Callable[[], Sequence[Tensor]],
        generators: Sequence[torch.Generator] = (),
    ) -> "CapturedWork":
        """Records `work`, which reads and writes the `watched` tensors and draws from `generators`.

        Raises:
            RuntimeError: there is no backend, or the work cannot be captured.
        """
        if self.backend is None:
            raise RuntimeError("no graph backend: capture needs a GPU")
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
        self._marks: tuple[_Mark, ...] = ()

    def record(self) -> None:
        """Captures the work as memory lies now."""
        self.release()
        self._marks = self._look()
        self._graph = self._owner.backend.capture(self._work, self._generators)

    def replay(self) -> None:
        """Replays.

        Raises:
            StaleGraphError: a watched tensor has moved, or the graph was released.
        """
        if self._graph is None:
            raise StaleGraphError("the graph was released")
        for before, now in zip(self._marks, self._look(), strict=True):
            if before != now:
                raise StaleGraphError(f"a tensor moved: captured {before}, now {now}")
        self._owner.backend.replay(self._graph)
        self._owner.counters.replayed += 1

    def run(self) -> None:
        """Replays, or records anew and replays where memory has moved since the capture."""
        try:
            self.replay()
        except StaleGraphError:
            self.record()
            self._owner.counters.recaptured += 1
            self.replay()

    def release(self) -> None:
        """Drops the graph and the memory that only it holds."""
        self._graph = None

    def _look(self) -> tuple[_Mark, ...]:
        return tuple(_Mark.of(tensor) for tensor in self._watched())
