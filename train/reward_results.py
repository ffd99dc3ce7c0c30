"""What comes of a picture sent to a reward service, and the policies for when nothing comes."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

from train.reward_wire import RewardError

OUTAGE_POLICIES = ("wait", "skip", "abort")


class RewardOutageError(RewardError):
    """The rewards of a step did not come and the outage policy says not to go on without them."""


@dataclass(frozen=True)
class RewardResult:
    """Outcome for one picture.

    `score` is the training signal, `reward` the evaluation's; all three numbers are nan where
    `error` says why there is none. `latency_s` runs from the first attempt to the outcome, and
    `retries` counts what came after it, renewals included.
    `is_retryable` says whether a failure may be a passing one (an outage) or will repeat itself.
    """

    score: float
    reward: float
    strict_reward: float
    latency_s: float
    retries: int
    error: str | None
    is_retryable: bool = False


@dataclass
class Attempts:
    """Progress of one sample: the flag that tells it to give up, and what it took so far.

    `num_retries` are repeated attempts of one asking, which a client limits; `num_earlier` those of
    the askings before it. `started` is the time of the very first attempt, None before it.
    """

    given_up: threading.Event = field(default_factory=threading.Event)
    num_retries: int = 0
    num_earlier: int = 0
    started: float | None = None

    @property
    def num_repeats(self) -> int:
        """Attempts after the very first."""
        return self.num_earlier + self.num_retries

    def renewed(self) -> "Attempts":
        """The next asking, which is a repeat in itself if an attempt was made before."""
        earlier = self.num_repeats + (self.started is not None)
        return Attempts(num_earlier=earlier, started=self.started)


class RewardFuture(Future):
    """A future RewardResult. A failure to score is a result with `error`, not an exception."""

    def __init__(self, attempts: Attempts, renew: Callable[[], "RewardFuture"]) -> None:
        super().__init__()
        self.attempts = attempts
        self.renew = renew

    def abandon(self) -> None:
        """Nobody waits any more: do not start it, or do not try again."""
        self.attempts.given_up.set()
        self.cancel()


def failed_result(
    error: str, latency_s: float, retries: int, is_retryable: bool
) -> RewardResult:
    """The result of a sample that has no scores."""
    nan = float("nan")
    return RewardResult(nan, nan, nan, latency_s, retries, error, is_retryable)


def require_one_of(flag: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{flag}: {value!r} is not one of {', '.join(allowed)}")
