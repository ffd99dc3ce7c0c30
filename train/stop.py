"""SIGTERM as a request: a preempted run finishes its step, saves, and ends."""

import signal
from types import FrameType


class StopRequest:
    """Whether this rank has been told to stop. Use it on the main thread only."""

    def __init__(self) -> None:
        self._is_set = False
        self._previous: object = None

    def __call__(self) -> bool:
        """Whether a SIGTERM has come since `listen`."""
        return self._is_set

    def listen(self) -> None:
        """From now on SIGTERM is noted and does nothing else."""
        self._previous = signal.signal(signal.SIGTERM, self._note)

    def restore(self) -> None:
        """Gives SIGTERM back its former effect; more calls do nothing."""
        if self._previous is not None:
            signal.signal(signal.SIGTERM, self._previous)
            self._previous = None

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._is_set = True  # no message: a handler may interrupt one that is being written
