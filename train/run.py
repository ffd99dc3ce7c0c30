"""The run loop: steps, evaluations, checkpoints, metrics and reports, from start or resume."""

import logging
from pathlib import Path

from train.assembly import assemble
from train.checkpoint import (
    TrainState,
    checkpoint_folder,
    latest_checkpoint,
    load_checkpoint,
    save_checkpoint,
)
from train.config import TrainConfig
from train.dist import ProcessContext, gather_from_all, gather_in_policy_group
from train.evaluation import EvaluationReport, Evaluator
from train.metrics import MetricsLogger, PhaseTimer, read_metrics
from train.progress import Progress
from train.reports import write_report
from train.rewards import make_reward_client
from train.step_metrics import report_cards, step_metrics
from train.stop import StopRequest
from train.trainer import StepError, StepReport, Trainer
from train.wandb_sink import WandbSettings

logger = logging.getLogger("faster_r3")


class Run:
    """One training run on one rank, from assembly to the last step."""

    def __init__(self, config: TrainConfig, context: ProcessContext, wandb_mode: str):
        self.config = config
        self.context = context
        self.run_dir = config.paths.run_dir
        self.progress: Progress | None = None
        timer = PhaseTimer(on_device=context.device.type == "cuda", on_enter=self._show_phase)
        rewards = make_reward_client(config.rewards.client_config(), context.rank)
        self.parts = assemble(config, context, rewards, timer)
        self.stop = StopRequest()
        self.trainer = Trainer(self.parts, context, should_stop=self.stop)
        self.evaluator = Evaluator(self.parts, context, should_stop=self.stop)
        self.saved_step: int | None = None
        self.start_step = self._resume()
        self.metrics = MetricsLogger(
            self.run_dir,
            context.is_main,
            WandbSettings(config.paths.wandb_project, config.wandb_name, wandb_mode),
            config,
            self.start_step,
        )

    def train(self) -> None:
        """Runs the remaining steps. After a SIGTERM to any rank, all save and end with their step.

        Raises:
            StepError: a step could not be finished. A checkpoint that starts with that step has
                been written before.
        """
        total = self.config.schedule.total_steps
        self.stop.listen()
        with Progress(total, self.start_step, self.context.is_main) as self.progress:
            for step in range(self.start_step, total):
                self._step(step)
                if any(gather_from_all(self.context, self.stop())):
                    self._save(step + 1)
                    logger.warning("SIGTERM: stopped after step %d, see --auto_resume", step)
                    break
        self.progress = None

    def close(self) -> None:
        """Ends the reward client and the logs; SIGTERM has its usual effect again."""
        self.stop.restore()
        self.parts.rewards.close()
        self.metrics.close()

    def _step(self, step: int) -> None:
        before = self.parts.streams.state()
        try:
            evaluation = self._evaluate(step)
            self.progress.begin_step(step, self.trainer.stage_of(step).value)
            report = self.trainer.run_step(step)
        except StepError:
            self.parts.streams.load_state(before)
            self._save_given_up(step)
            raise
        self._record(report, evaluation)
        done, schedule = step + 1, self.config.schedule
        every = schedule.save_every
        if every and (done % every == 0 or done == schedule.total_steps):
            self._save(done)

    def _evaluate(self, step: int) -> EvaluationReport | None:
        every = self.config.schedule.eval_freq
        if not every or step % every:
            return None
        self.progress.begin_step(step, "evaluate")
        return self.evaluator.run(step)

    def _save_given_up(self, step: int) -> None:
        """Saves before the error of a step is raised, which a failing disk must not hide."""
        try:
            self._save(step)
        except RuntimeError:  # on every rank
            logger.exception("step %d was given up, and no checkpoint could be written", step)
        else:
            logger.error("step %d was given up; a checkpoint starts with it again", step)

    def _record(self, report: StepReport, evaluation: EvaluationReport | None) -> None:
        values = step_metrics(report, self.context)
        if evaluation is not None:
            values |= evaluation.metrics
        self.metrics.log_step(report.step, values)
        self.progress.finish_step(values)
        every = self.config.report.rollout_vis_step
        if not every or report.step % every:
            return
        gathered = gather_in_policy_group(self.context, report_cards(report))
        if self.context.is_main:
            cards = [card for cards in gathered for card in cards]
            cards += evaluation.cards if evaluation is not None else []
            rows = read_metrics(self.run_dir)
            write_report(self.run_dir, report.step, report.rollout.stage.value, cards, rows)

    def _save(self, next_step: int) -> None:
        """Writes a checkpoint that starts with `next_step`, unless this run has just done so."""
        if next_step == self.saved_step:
            return
        self._show_phase("checkpoint")
        state = TrainState(
            step=next_step,
            epoch=self.parts.sampler.epoch_for(next_step),
            total_steps=self.config.schedule.total_steps,
            recipe=self.parts.recipe.name,
            generators=self.parts.streams.state(),
            buffer=self.parts.buffer.entries(),
        )
        folder = checkpoint_folder(self.run_dir, next_step)
        save_checkpoint(
            folder,
            self.parts.policy,
            self.parts.optimizer.adamw,
            state,
            self.context,
            self.config.schedule.keep_checkpoints,
        )
        self.saved_step = next_step

    def _resume(self) -> int:
        folder = self._resume_folder()
        if folder is None:
            return 0
        state = load_checkpoint(
            folder,
            self.parts.policy,
            self.parts.optimizer.adamw,
            self.context,
            self.config.schedule.total_steps,
            self.parts.recipe.name,
        )
        self.parts.streams.load_state(state.generators)
        self.parts.buffer.replace(state.buffer)
        logger.info("resumed from %s at step %d", folder, state.step)
        return state.step

    def _resume_folder(self) -> Path | None:
        paths = self.config.paths
        newest = latest_checkpoint(self.run_dir) if paths.auto_resume else None
        if newest is not None:
            return newest
        return Path(paths.resume_from) if paths.resume_from else None

    def _show_phase(self, name: str) -> None:
        if self.progress is not None:
            self.progress.phase(name)
