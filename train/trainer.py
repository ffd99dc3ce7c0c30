"""The trainer: one RL step after another, each a sequence of phases."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from PIL import Image

from data.geneval import GenevalPrompt
from modeling.bagel.bagel import Bagel
from modeling.bagel.flow import StochasticDraw
from modeling.bagel.probe import Probe, no_probe
from train.advantages import Advantages, compute_advantages
from train.assembly import Parts
from train.dist import ProcessContext, gather_from_all, mean_over_policy_group
from train.engine import resident_weights
from train.learner import Scored
from train.losses import LossReport
from train.packing import Packed
from train.records import BufferEntry, Rollout, Stage
from train.refine_buffer import entry_from_record, entry_to_record
from train.reward_rounds import await_rewards, never
from train.rewards import RewardOutageError, RewardResult
from train.rollout_controller import StepDraws, flow_trace

logger = logging.getLogger("faster_r3")


class StepError(RuntimeError):
    """A rank could not finish a step; raised on every rank with the first rank's words."""


@dataclass(frozen=True)
class StepReport:
    """What one rank knows of a finished step."""

    step: int
    rollout: Rollout
    packed: Packed
    rewards: list[RewardResult]
    advantages: Advantages
    loss: LossReport
    grad_norm: float
    learning_rate: float
    next_learning_rate: float
    num_tokens: int
    seconds: float
    phase_seconds: dict[str, float]
    graph_counters: dict[str, float]


class Trainer:
    """Runs steps on one rank. Its methods are the phases of a step, in order.

    `should_stop` says whether this rank has been told to end, which cuts short a wait for rewards.
    """

    def __init__(
        self,
        parts: Parts,
        context: ProcessContext,
        probe: Probe = no_probe,
        should_stop: Callable[[], bool] = never,
    ):
        self.parts = parts
        self.context = context
        self.should_stop = should_stop
        self.config = parts.config
        self.recipe = parts.recipe
        self.timer = parts.timer
        self.probe = probe
        parts.controller.probe = probe
        parts.learner.probe = probe

    @property
    def policy(self) -> Bagel:
        return self.parts.policy

    def stage_of(self, step: int) -> Stage:
        """Even steps generate, odd ones refine; with nothing to refine a step generates."""
        if step % self.config.rl.rounds == 0:
            return Stage.GENERATE
        if not len(self.parts.buffer):
            logger.warning("step %d: the refine buffer is empty, generating instead", step)
            return Stage.GENERATE
        return Stage.REFINE

    def run_step(self, step: int) -> StepReport:
        """One RL step: rollout, rewards, packing, forwards, loss, update."""
        self.timer.reset()
        start = time.perf_counter()
        rollout = self.roll_out(step, self.stage_of(step))
        futures = self.submit_rewards(rollout)
        with self.timer.phase("pack"):
            packed = self.parts.learner.pack(rollout)
        scored = self.forward(rollout, packed)
        rewards = self.await_rewards(futures)
        advantages = self.advantages(rollout, rewards)
        loss = self.backward(scored, advantages)
        grad_norm = self.update(step)
        if rollout.stage is Stage.GENERATE:
            self.fill_buffer(rollout, rewards)
        optimizer = self.parts.optimizer
        # Asked for first: it waits for the GPU, and so the step's seconds hold all of its work.
        phase_seconds = self.timer.metrics()
        return StepReport(
            step=step,
            rollout=rollout,
            packed=packed,
            rewards=rewards,
            advantages=advantages,
            loss=loss,
            grad_norm=grad_norm,
            learning_rate=optimizer.learning_rate(step),
            next_learning_rate=optimizer.learning_rate(step + 1),
            num_tokens=scored.num_tokens,
            seconds=time.perf_counter() - start,
            phase_seconds=phase_seconds,
            graph_counters=self.parts.controller.execution.counters(),
        )

    @torch.no_grad()
    def roll_out(self, step: int, stage: Stage) -> Rollout:
        """Samples this rank's share of the group on resident weights."""
        with self.timer.phase("rollout"):
            draws = self.draws(step, stage)
            with resident_weights(self.policy, self.timer):
                return self._sample(step, stage, draws)

    def _sample(self, step: int, stage: Stage, draws: StepDraws) -> Rollout:
        controller, count = self.parts.controller, self.config.samples_per_rank
        grid = controller.latent_grid(self.parts.image_size)
        sde_index = None if draws.stochastic is None else draws.stochastic.index
        if stage is Stage.GENERATE:
            prompt = self.prompt(step)
            samples, flow = controller.generate([prompt] * count, draws)
            return Rollout(stage, prompt, samples, flow_trace(flow, grid), sde_index)
        entry = self.draw_entry(step)
        samples, flow, conditions = controller.refine(
            [entry.prompt] * count, [entry.picture] * count, draws
        )
        trace = flow_trace(flow, grid)
        return Rollout(
            stage, entry.prompt, samples, trace, sde_index, entry, conditions[0]
        )

    def prompt(self, step: int) -> GenevalPrompt:
        """The prompt of this rank's policy group."""
        return self.parts.prompts[self.parts.sampler.index_for(step, self.context.rank)]

    def draw_entry(self, step: int) -> BufferEntry:
        """The picture that this rank's policy group refines."""
        return self.parts.buffer.draw(self.parts.streams.group(step))

    def draws(self, step: int, stage: Stage) -> StepDraws:
        """Random inputs of the step from their streams."""
        controller, flow = self.parts.controller, self.config.flow
        is_refine = stage is Stage.REFINE
        bound = flow.max_sde_timestep_idx_for_edit if is_refine else flow.num_timesteps_gen - 1
        shape = (controller.num_image_tokens, self.policy.config.latent_dim)
        group = self.parts.streams.group_draws(
            step, shape, self.parts.compute_dtype, is_refine, bound
        )
        stochastic = None
        if flow.enable_sde_edit if is_refine else flow.enable_sde_gen:
            stochastic = StochasticDraw(group.sde_index, self.parts.streams.flow_noise)
        return StepDraws(
            noise=group.noise,
            text=self.parts.streams.sample(step),
            stochastic=stochastic,
        )

    def submit_rewards(self, rollout: Rollout) -> list:
        """Sends every picture to the reward service; nothing waits here."""
        pictures: list[Image.Image] = [sample.picture for sample in rollout.samples]
        return self.parts.rewards.submit(pictures, [rollout.prompt.raw] * len(pictures))

    def forward(self, rollout: Rollout, packed: Packed) -> Scored:
        """Reference and policy forward over the packed batch."""
        with self.timer.phase("forward"):
            learner = self.parts.learner
            targets = learner.targets(rollout, packed, self.context.device)
            return learner.forward(
                self.policy, self.parts.reference, packed, targets, rollout.stage
            )

    def await_rewards(self, futures: list) -> list[RewardResult]:
        """Results in sample order. All ranks learn of a failure before any waits in a collective.

        Raises:
            StepError: on every rank, if the outage policy of one rank says not to go on.
        """
        with self.timer.phase("rewards"):
            try:
                return await_rewards(
                    self.context, futures, self.config.rewards, self.should_stop
                )
            except RewardOutageError as error:
                raise StepError(f"no rewards for this step: {error}") from error

    def advantages(self, rollout: Rollout, rewards: list[RewardResult]) -> Advantages:
        """Advantages against the policy group's mean."""
        return compute_advantages(
            rollout,
            [reward.score for reward in rewards],
            [reward.error is None for reward in rewards],
            self.config.rewards.format_reward_weight,
            self._group_mean,
        )

    def backward(self, scored: Scored, advantages: Advantages) -> LossReport:
        """Loss and gradients, averaged over ranks."""
        with self.timer.phase("backward"):
            report = self.parts.learner.loss(scored, advantages)
            report.loss.backward()
        return replace(report, loss=report.loss.detach())

    def update(self, step: int) -> float:
        """Clips and steps. Returns the gradient norm before clipping."""
        with self.timer.phase("optimizer"):
            return self.parts.optimizer.update(step)

    def fill_buffer(self, rollout: Rollout, rewards: list[RewardResult]) -> None:
        """Shares the scored drawings of all ranks for the next refine step.

        With no drawing scored anywhere the buffer keeps what it holds.
        """
        with self.timer.phase("buffer"):
            mine = [
                entry_to_record(BufferEntry(rollout.prompt, reward.score, sample.picture))
                for sample, reward in zip(rollout.samples, rewards, strict=True)
                if reward.error is None
            ]
            shared = gather_from_all(self.context, mine)
            entries = [entry_from_record(record) for records in shared for record in records]
            if entries:
                self.parts.buffer.replace(entries)

    def _group_mean(self, local: torch.Tensor) -> torch.Tensor:
        means, weights = local.unbind(-1)
        shared = mean_over_policy_group(self.context, torch.stack((means * weights, weights)))
        return shared[0] / shared[1].clamp(min=torch.finfo(torch.float32).tiny)
