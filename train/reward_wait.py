"""One rank's wait for its rewards: bounded by a deadline, visible, and bound to a policy."""

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future
from concurrent.futures import wait as wait_futures
from dataclasses import dataclass

from train.reward_results import (
    OUTAGE_POLICIES,
    Attempts,
    RewardFuture,
    RewardOutageError,
    RewardResult,
    failed_result,
    require_one_of,
)

logger = logging.getLogger("faster_r3")


@dataclass(frozen=True)
class WaitStatus:
    """What a wait for rewards looks like from outside.

    `next_try_s` is the time until a failed sample is asked for again, None while none has failed.
    """

    waited_s: float
    remaining_s: float
    next_try_s: float | None
    num_open: int
    num_samples: int
    last_error: str | None


@dataclass(frozen=True)
class WaitPace:
    """Seconds between two log lines of a wait, and before a failed sample is asked for again."""

    log_every_s: float = 10.0
    renew_after_s: float = 15.0


@dataclass
class _Slot:
    """A sample that is waited for; `renew_at` is set while its failure waits for the next try."""

    future: Future
    renew_at: float | None = None
    result: RewardResult | None = None


def resolve_rewards(
    futures: Sequence[Future],
    deadline_s: float,
    policy: str,
    on_wait: Callable[[WaitStatus], None] | None = None,
    pace: WaitPace | None = None,
) -> list[RewardResult]:
    """Wait for the rewards of a step; results in the order of the futures.

    *skip* and *wait* return at the latest after deadline_s; samples that failed or did not come
    carry an `error`, and it is the caller's to renew them. *abort* asks again for passing failures
    until deadline_s and then raises RewardOutageError, at once for a failure that would repeat
    itself. A wait is logged, and told to on_wait, every `log_every_s`; what on_wait raises ends it.
    """
    require_one_of("--reward_outage", policy, OUTAGE_POLICIES)
    wait = _Wait(futures, deadline_s, policy, pace or WaitPace())
    try:
        return wait.run(on_wait)
    finally:
        wait.abandon_rest()


class _Wait:
    """One wait: its slots, and when the next thing is due."""

    def __init__(
        self, futures: Sequence[Future], deadline_s: float, policy: str, pace: WaitPace
    ) -> None:
        self._start = time.monotonic()
        self._end = self._start + deadline_s
        self._next_log = self._start + pace.log_every_s
        self._slots = [_Slot(future) for future in futures]
        self._deadline_s = deadline_s
        self._policy = policy
        self._pace = pace
        self._last_error: str | None = None

    def run(self, on_wait: Callable[[WaitStatus], None] | None) -> list[RewardResult]:
        """Wait to the end; see resolve_rewards."""
        while True:
            now = time.monotonic()
            for slot in self._open_slots():
                self._advance(slot, now)
            if not self._open_slots() or now >= self._end:
                break
            if now >= self._next_log:
                self._next_log = now + self._pace.log_every_s
                status = self._status(now)
                _log(status, self._policy)
                if on_wait is not None:
                    on_wait(status)
            self._rest(now)
        if self._open_slots() and self._policy == "abort":
            raise RewardOutageError(self._overdue())
        return [slot.result or self._missing(slot.future) for slot in self._slots]

    def abandon_rest(self) -> None:
        """Take the client's threads off what nobody waits for any more."""
        for slot in self._slots:
            if isinstance(slot.future, RewardFuture) and not slot.future.done():
                slot.future.abandon()

    def _open_slots(self) -> list[_Slot]:
        return [slot for slot in self._slots if slot.result is None]

    def _advance(self, slot: _Slot, now: float) -> None:
        """Settle a slot, or see to its next try."""
        if slot.renew_at is not None:
            if now >= slot.renew_at:
                slot.future = slot.future.renew()
                slot.renew_at = None
        elif slot.future.done():
            self._take(slot, slot.future.result(), now)

    def _take(self, slot: _Slot, result: RewardResult, now: float) -> None:
        if result.error is None:
            slot.result = result
            return
        self._last_error = result.error
        if self._policy != "abort":
            slot.result = result
        elif result.is_retryable and isinstance(slot.future, RewardFuture):
            slot.renew_at = now + self._pace.renew_after_s
        else:
            raise RewardOutageError(f"a picture could not be scored: {result.error}")

    def _rest(self, now: float) -> None:
        """Sleep until a future is done or something is due."""
        slots = self._open_slots()
        renewals = [slot.renew_at for slot in slots if slot.renew_at is not None]
        pending = [slot.future for slot in slots if slot.renew_at is None]
        pause_s = max(0.0, min(self._end, self._next_log, *renewals) - now)
        if pending:
            wait_futures(pending, timeout=pause_s, return_when=FIRST_COMPLETED)
        else:
            time.sleep(pause_s)

    def _status(self, now: float) -> WaitStatus:
        slots = self._open_slots()
        tries = [slot.renew_at - now for slot in slots if slot.renew_at is not None]
        return WaitStatus(
            waited_s=now - self._start,
            remaining_s=self._end - now,
            next_try_s=min(tries, default=None),
            num_open=len(slots),
            num_samples=len(self._slots),
            last_error=self._last_error,
        )

    def _overdue(self) -> str:
        count = f"{len(self._open_slots())} of {len(self._slots)}"
        cause = f"; last error: {self._last_error}" if self._last_error else ""
        return f"{count} rewards did not come within {self._deadline_s:g} s{cause}"

    def _missing(self, future: Future) -> RewardResult:
        attempts = future.attempts if isinstance(future, RewardFuture) else Attempts()
        started = self._start if attempts.started is None else attempts.started
        elapsed_s = time.monotonic() - started
        return failed_result(self._overdue(), elapsed_s, attempts.num_repeats, True)


def _log(status: WaitStatus, policy: str) -> None:
    parts = [
        f"waiting {status.waited_s:.0f} s for {status.num_open} of {status.num_samples} rewards"
    ]
    if status.next_try_s is not None:
        parts.append(f"next try in {max(0.0, status.next_try_s):.0f} s")
    action = "next round" if policy == "wait" else policy
    parts.append(f"{action} in {max(0.0, status.remaining_s):.0f} s")
    if status.last_error is not None:
        parts.append(status.last_error)
    logger.warning("%s", "; ".join(parts))
