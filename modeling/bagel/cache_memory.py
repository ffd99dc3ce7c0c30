"""Cache memory of contexts that run through graphs, lent to one rollout after another.

Graphs bake its addresses in, so it stays where it is until a rollout needs more of it.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from torch import Tensor

from modeling.bagel.cache import CacheSpec, KvCache

CAPACITY_STEP = 256
"""Capacities are rounded up to this many positions: prompts differ a little in length."""


class CacheMemory:
    """Keys and values of one KV cache at a time. `before_move` runs before memory is given up."""

    def __init__(self, before_move: Callable[[], None]):
        self._before_move = before_move
        self._spec: CacheSpec | None = None
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []
        self.lent: KvCache | None = None

    @property
    def spec(self) -> CacheSpec | None:
        """What there is memory for; None before the first use."""
        return self._spec

    @contextmanager
    def lend(self, spec: CacheSpec) -> Iterator[KvCache]:
        """An empty cache of `spec.rows` and at least `spec.capacity`, until the block ends.

        However the block ends, the cache is closed then and the memory is free for the next one.
        It is not cleared: entries of earlier rollouts lie behind the filled lengths, where no
        attention looks. Contexts that attend to zeros there (the overlay) have to write them.

        Raises:
            RuntimeError: the memory is lent already.
        """
        if self.lent is not None:
            raise RuntimeError(
                "the cache memory is lent already: contexts over it have to end before the next "
                "ones begin"
            )
        self._reserve(spec)
        cache = KvCache(*([x[: spec.rows] for x in xs] for xs in (self._keys, self._values)))
        self.lent = cache
        try:
            yield cache
        finally:
            self.lent = None
            cache.close()

    def release(self) -> None:
        """Gives the memory up."""
        self._before_move()
        self._spec, self._keys, self._values = None, [], []

    def _reserve(self, spec: CacheSpec) -> None:
        held = self._spec
        if held is not None and replace(held, rows=spec.rows, capacity=spec.capacity) == spec:
            if held.rows >= spec.rows and held.capacity >= spec.capacity:
                return
            # Room for both: what alternates between stages must not move with each of them.
            rows, capacity = max(held.rows, spec.rows), max(held.capacity, spec.capacity)
            spec = replace(spec, rows=rows, capacity=capacity)
        self.release()  # first: there may not be room for the old and the new
        spec = replace(spec, capacity=-(-spec.capacity // CAPACITY_STEP) * CAPACITY_STEP)
        self._keys, self._values = spec.empty(), spec.empty()
        self._spec = spec
