"""Rewards on all ranks: each waits for its own within a deadline, then all agree on what to do."""

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from train.dist import ProcessContext, first_error, gather_from_all
from train.rewards import RewardOutageError, RewardResult, WaitPace, WaitStatus, resolve_rewards
from train.settings import RewardSettings

logger = logging.getLogger("faster_r3")


@dataclass(frozen=True)
class _Missing:
    """What a rank lacks after a round."""

    num_samples: int
    num_missing: int
    cause: str | None


def never() -> bool:
    """Nobody asks this run to stop."""
    return False


def await_rewards(
    context: ProcessContext,
    futures: Sequence[Future],
    settings: RewardSettings,
    should_stop: Callable[[], bool] = never,
    pace: WaitPace | None = None,
) -> list[RewardResult]:
    """This rank's rewards, in the order of the futures. A collective.

    Ranks meet after every round, and a round ends by the step deadline, which is shorter than the
    process group's timeout: so no rank waits too long for another. *skip* and *abort* take one
    round; samples that are skipped carry an `error`. *wait* takes as many as it needs, and asks
    again for what failed, whatever the failure, `renew_after_s` after the end of a round.

    Raises:
        RewardOutageError: on every rank, with the first failing rank's words: the outage policy of
            one rank says not to go on, an answer met a defect of ours, or `should_stop` became true
            in the middle of an outage.
    """
    pace = pace or WaitPace()
    start = time.monotonic()

    def check(status: WaitStatus) -> None:
        if should_stop():
            raise RewardOutageError(_stopped(status.num_open, status.last_error))

    futures, results = list(futures), []
    while True:
        error = None
        try:
            futures = _renew_failed(futures, results)
            results = resolve_rewards(
                futures, settings.reward_step_deadline_s, settings.reward_outage, check, pace
            )
            mine = _missing(results)
            if mine.num_missing and settings.reward_outage == "wait" and should_stop():
                raise RewardOutageError(_stopped(mine.num_missing, mine.cause))
        except Exception as caught:  # raised below on every rank, when none waits for this one
            error = caught
        message = first_error(context, error)
        if message is not None:
            raise RewardOutageError(message) from error
        ranks = gather_from_all(context, mine)
        if not any(rank.num_missing for rank in ranks):
            return results
        if settings.reward_outage != "wait":
            if context.is_main:
                logger.warning("%s; they are skipped", _in_words(ranks))
            return results
        _hold(context, ranks, start, pace, should_stop)


def _renew_failed(futures: list[Future], results: list[RewardResult]) -> list[Future]:
    """The futures of the next round; before the first there are no results."""
    if not results:
        return futures
    return [
        future if result.error is None else future.renew()
        for future, result in zip(futures, results, strict=True)
    ]


def _hold(
    context: ProcessContext,
    ranks: list[_Missing],
    start: float,
    pace: WaitPace,
    should_stop: Callable[[], bool],
) -> None:
    """The pause before the next round, counted down in the log."""
    end = time.monotonic() + pace.renew_after_s
    while (left := end - time.monotonic()) > 0 and not should_stop():
        if context.is_main:
            logger.warning(
                "the step is held for %.0f s; next try in %.0f s; %s",
                time.monotonic() - start,
                left,
                _in_words(ranks),
            )
        time.sleep(min(left, pace.log_every_s))


def _missing(results: list[RewardResult]) -> _Missing:
    causes = [result.error for result in results if result.error is not None]
    return _Missing(len(results), len(causes), causes[0] if causes else None)


def _in_words(ranks: list[_Missing]) -> str:
    missing = sum(rank.num_missing for rank in ranks)
    total = sum(rank.num_samples for rank in ranks)
    first = next(number for number, rank in enumerate(ranks) if rank.num_missing)
    return f"{missing} of {total} rewards are missing; rank {first}: {ranks[first].cause}"


def _stopped(num_open: int, cause: str | None) -> str:
    return f"told to stop while {num_open} rewards were missing; last error: {cause or 'none'}"
