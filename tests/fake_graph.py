"""A graph backend without a GPU: it keeps the recorded function and calls it at every replay."""

from collections.abc import Callable, Sequence

import torch


class FakeBackend:
    """Records what was captured and replayed; `refuses` makes every capture fail."""

    def __init__(self, refuses: bool = False):
        self.refuses = refuses
        self.refused = 0
        self.captures = 0
        self.replays = 0
        self.generators: list[torch.Generator] = []

    def capture(self, work: Callable[[], None], generators: Sequence[torch.Generator]) -> object:
        if self.refuses:
            self.refused += 1
            raise RuntimeError("operation not permitted when stream is capturing")
        self.captures += 1
        self.generators += generators
        return work  # a capture records, it does not run

    def replay(self, graph: object) -> None:
        self.replays += 1
        graph()

    def pool_gib(self) -> float:
        return 0.0
