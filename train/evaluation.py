"""Evaluation: draws every validation prompt, refines it round after round, and scores each round.

Random draws. Ranks take contiguous shares of the prompts and cut them into batches. A batch has one
generator, seeded by the rank, the number of its prompts and the index of the batch's first prompt
in the rank's own share. It draws the start noise of all rounds first, then tokens, round by round.
A sample that has stopped leaves the batch: it takes no part in the token draws of later rounds,
while their noise is what it would have been. So an evaluation depends on the weights, the prompts,
the batch size and the number of ranks, and on nothing that ran before it.
"""

import logging
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace

import torch
from PIL import Image

from data.geneval import GenevalPrompt, read_prompts
from train.assembly import Parts
from train.config import TrainConfig
from train.dist import ProcessContext, first_error, gather_from_all
from train.engine import resident_weights
from train.evaluation_metrics import PromptScore, TurnScore, evaluation_metrics, failures_of
from train.records import Sample
from train.reports import RolloutCard
from train.reward_rounds import await_rewards, never
from train.rewards import RewardOutageError, RewardResult
from train.rollout_controller import RolloutConfig, RolloutController, StageConfig, StepDraws
from train.streams import evaluation_noise
from train.trainer import StepError

logger = logging.getLogger("faster_r3")

NUM_CARDS = 4  # prompts shown in a report


@dataclass(frozen=True)
class EvaluationReport:
    """What an evaluation found.

    `metrics` are the same on every rank. `cards` show the first prompts, all turns of each as
    neighbours; they exist on rank 0 only, where reports are written.
    """

    metrics: dict[str, float]
    cards: list[RolloutCard]


@dataclass(frozen=True)
class _Course:
    """A prompt on its way through the rounds: its turns, and the reward of each new picture."""

    prompt: GenevalPrompt
    turns: list[Sample]
    futures: list[Future]

    @property
    def picture(self) -> Image.Image:
        return self.turns[-1].picture

    @property
    def has_stopped(self) -> bool:
        return self.turns[-1].declines_edit


class Evaluator:
    """Evaluates the policy of `parts` on --val_data_path, which is read once.

    Every rank builds one and calls `run` at the same steps. `should_stop` says whether this rank
    has been told to end, which cuts short a wait for rewards. Raises ValueError for a bad file.
    """

    def __init__(
        self,
        parts: Parts,
        context: ProcessContext,
        should_stop: Callable[[], bool] = never,
    ):
        config = parts.config
        self.parts = parts
        self.context = context
        self.should_stop = should_stop
        self.settings = config.evaluation
        prompts = read_prompts(
            config.paths.val_data_path,
            limit=self.settings.eval_prompts or None,
            require_clauses=config.rewards.reward_fn == "geneval",
        )
        self.share = share_of(prompts, context.rank, context.world_size)
        self.controller = RolloutController(
            parts.policy,
            parts.autoencoder,
            parts.tokenizer,
            evaluation_config(parts.controller.config, config),
            parts.recipe,
            parts.timer,
            execution=parts.controller.execution,
        )

    def run(self, step: int) -> EvaluationReport:
        """Draws and scores all prompts. `step` serves the messages; no draw depends on it.

        Weights are gathered by all ranks at once; drawing is then local to a rank, however many
        prompts it has, until all ranks meet: for errors, for the rewards, and to exchange numbers.

        Raises:
            StepError: on every rank, if one could not draw, or if the outage policy of the rewards
                says not to go on.
        """
        started = time.perf_counter()
        with self.parts.timer.phase("evaluation"):
            courses = self._draw_on_all(step)
            # Its batches may be larger than a step's: their memory would stay for the whole run.
            self.controller.execution.release()
            scores = self._await_scores(courses, step)
        cards = self._cards(courses, scores) if self.context.is_main else []
        gathered = gather_from_all(self.context, (scores, time.perf_counter() - started))
        everything = [score for shared, _ in gathered for score in shared]
        metrics = evaluation_metrics(everything, self.settings.eval_num_rounds)
        metrics["eval/time_s"] = max(seconds for _, seconds in gathered)
        if self.context.is_main:
            _warn_of_failures(step, everything)
        return EvaluationReport(metrics, cards)

    def _draw_on_all(self, step: int) -> list[_Course]:
        courses, error = [], None
        try:
            courses = self._draw_share()
        except Exception as caught:  # raised below, when no rank waits for this one
            error = caught
        message = first_error(self.context, error)
        if message is not None:
            raise StepError(f"no evaluation at step {step}: {message}") from error
        return courses

    @torch.no_grad()
    def _draw_share(self) -> list[_Course]:
        """All rounds of this rank's prompts; every picture is on its way to the service."""
        size, courses = self.settings.eval_batch_size, []
        with resident_weights(self.parts.policy, self.parts.timer):
            for first in range(0, len(self.share), size):
                courses += self._draw_batch(self.share[first : first + size], first)
        return courses

    def _draw_batch(self, prompts: list[GenevalPrompt], first: int) -> list[_Course]:
        """Draws, then refines what has not stopped. `first` is an index in the own share."""
        generator = self.parts.streams.evaluation(
            len(self.share) // self.settings.eval_batch_size, first
        )
        shape = (self.controller.num_image_tokens, self.parts.policy.config.latent_dim)
        noises = evaluation_noise(
            generator, self.settings.eval_num_rounds, shape, self.parts.compute_dtype
        )
        draws = [StepDraws(noise, text=generator) for noise in noises]
        samples, _ = self.controller.generate(prompts, draws[0])
        courses = [_Course(prompt, [], []) for prompt in prompts]
        self._take(courses, samples)
        for draw in draws[1:]:
            active = [course for course in courses if not course.has_stopped]
            if not active:
                break
            pictures = [course.picture for course in active]
            samples, _, _ = self.controller.refine([c.prompt for c in active], pictures, draw)
            self._take(active, samples)
        return courses

    def _take(self, courses: list[_Course], samples: list[Sample]) -> None:
        """Notes a round's turns and sends its new pictures off; nothing waits here."""
        for course, sample in zip(courses, samples, strict=True):
            course.turns.append(sample)
        changed = [course for course in courses if not course.has_stopped]
        futures = self.parts.rewards.submit(
            [course.picture for course in changed], [course.prompt.raw for course in changed]
        )
        for course, future in zip(changed, futures, strict=True):
            course.futures.append(future)

    def _await_scores(self, courses: list[_Course], step: int) -> list[PromptScore]:
        """Numbers of all turns. One deadline for all: most rewards came while others were drawn."""
        futures = [future for course in courses for future in course.futures]
        with self.parts.timer.phase("rewards"):
            try:
                rewards = await_rewards(
                    self.context, futures, self.parts.config.rewards, self.should_stop
                )
            except RewardOutageError as error:
                raise StepError(f"no evaluation at step {step}: {error}") from error
        results = iter(rewards)
        return [_score(course, [next(results) for _ in course.futures]) for course in courses]

    def _cards(self, courses: list[_Course], scores: list[PromptScore]) -> list[RolloutCard]:
        """The turns of the first prompts."""
        shown = list(zip(courses, scores, strict=True))[:NUM_CARDS]
        return [
            _card(course, score, index)
            for course, score in shown
            for index in range(len(course.turns))
        ]


def share_of(prompts: list[GenevalPrompt], rank: int, world_size: int) -> list[GenevalPrompt]:
    """A rank's contiguous share. The first ranks have one more where it does not divide."""
    size, rest = divmod(len(prompts), world_size)
    start = rank * size + min(rank, rest)
    return prompts[start : start + size + (rank < rest)]


def evaluation_config(rollout: RolloutConfig, config: TrainConfig) -> RolloutConfig:
    """The rollout's stages with the points and the temperature of an evaluation."""

    def stage(base: StageConfig) -> StageConfig:
        flow = replace(base.flow, num_timesteps=config.evaluation.eval_num_timesteps)
        return replace(base, sampling=config.sampling_eval, flow=flow)

    return replace(rollout, generate=stage(rollout.generate), refine=stage(rollout.refine))


def _score(course: _Course, results: list[RewardResult]) -> PromptScore:
    turns = []
    for index, sample in enumerate(course.turns):
        result = results[min(index, len(results) - 1)]  # a turn that declines has none of its own
        turns.append(
            TurnScore(
                reward=result.reward,
                score=result.score,
                format_reward=sample.format_reward,
                num_tokens=len(sample.thought.ids),
                declines_edit=sample.declines_edit,
                error=result.error,
            )
        )
    return PromptScore(course.prompt.tag, tuple(turns))


def _warn_of_failures(step: int, scores: Sequence[PromptScore]) -> None:
    failures = failures_of(scores)
    if failures:
        logger.warning(
            "step %d: %d pictures of the evaluation have no reward and are left out of its means, "
            "the first because: %s", step, len(failures), failures[0]
        )


def _card(course: _Course, score: PromptScore, index: int) -> RolloutCard:
    """One turn. The total and the advantages are of training only, so they show as missing."""
    sample, turn = course.turns[index], score.turns[index]
    stopped = ", stops here" if turn.declines_edit else ""
    outcome = f"no reward: {turn.error}" if turn.error else f"evaluation reward {turn.reward:g}"
    return RolloutCard(
        prompt=course.prompt.prompt,
        tag=course.prompt.tag,
        thought=sample.text,
        operation=sample.operation,
        input_image=course.turns[index - 1].picture if index else None,
        image=sample.picture,
        score=turn.score,
        format_reward=turn.format_reward,
        total=math.nan,
        text_advantage=math.nan,
        image_advantage=math.nan,
        note=f"Round {index}{stopped}; {outcome}",
    )
