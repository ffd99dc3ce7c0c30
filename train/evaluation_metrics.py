"""The numbers of an evaluation: what a rank knows of its samples, and the means of all of them."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class TurnScore:
    """One turn in numbers; `num_tokens` counts the thought's ids, its two markers included.

    `reward` and `score` are NaN where the service gave none; `error` then says why. A turn that
    declines to edit leaves the picture alone and repeats all three.
    """

    reward: float
    score: float
    format_reward: float
    num_tokens: int
    declines_edit: bool
    error: str | None


@dataclass(frozen=True)
class PromptScore:
    """The turns of one prompt, fewer than there are rounds where it stopped."""

    tag: str
    turns: tuple[TurnScore, ...]

    def at(self, round_index: int) -> TurnScore:
        """The turn whose picture stands after a round: a stopped sample keeps its last."""
        return self.turns[min(round_index, len(self.turns) - 1)]


def evaluation_metrics(scores: Sequence[PromptScore], num_rounds: int) -> dict[str, float]:
    """Means over prompts, under eval/...; fractions in 0..1.

    What the service did not score is left out of every mean, and counted in `eval/failures`; a
    mean of nothing is left out. Fractions compare a round's reward with the one before it; a sample
    that has stopped counts as unchanged.
    """
    turns = [turn for score in scores for turn in score.turns]
    last = [score.at(num_rounds - 1) for score in scores]
    means = {
        "eval/reward": _mean(turn.reward for turn in last),
        "eval/score": _mean(turn.score for turn in last),
        "eval/format": _mean(turn.format_reward for turn in turns),
        "eval/thought_tokens": _mean(float(turn.num_tokens) for turn in turns),
    }
    for tag in sorted({score.tag for score in scores}):
        pairs = zip(scores, last, strict=True)
        means[f"eval/tag/{tag}"] = _mean(turn.reward for score, turn in pairs if score.tag == tag)
    for index in range(num_rounds):
        means |= _round_metrics(scores, index)
    metrics = {name: mean for name, mean in means.items() if not math.isnan(mean)}
    metrics["eval/num_prompts"] = float(len(scores))
    metrics["eval/failures"] = float(len(failures_of(scores)))
    return metrics


def failures_of(scores: Sequence[PromptScore]) -> list[str]:
    """One message for each picture that has no reward."""
    return [
        turn.error
        for score in scores
        for turn in score.turns
        if turn.error is not None and not turn.declines_edit
    ]


def _round_metrics(scores: Sequence[PromptScore], index: int) -> dict[str, float]:
    prefix, now = f"eval/round{index}", [score.at(index) for score in scores]
    means = {f"{prefix}/reward": _mean(turn.reward for turn in now)}
    if index == 0:
        return means
    # NaN where one of the two is missing: such a pair counts nowhere.
    changes = [score.at(index).reward - score.at(index - 1).reward for score in scores]
    known = [change for change in changes if not math.isnan(change)]
    return means | {
        f"{prefix}/improved": _mean(float(change > 0) for change in known),
        f"{prefix}/worse": _mean(float(change < 0) for change in known),
        f"{prefix}/unchanged": _mean(float(change == 0) for change in known),
        f"{prefix}/finished": _mean(float(turn.declines_edit) for turn in now),
    }


def _mean(values: Iterable[float]) -> float:
    """Mean of what is not NaN; NaN of nothing."""
    known = [value for value in values if not math.isnan(value)]
    return math.fsum(known) / len(known) if known else math.nan
