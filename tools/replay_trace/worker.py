"""One rank of a replay: the real trainer, watched, and held against the trace step by step."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from tools.replay_trace.compare import Deviations
from tools.replay_trace.trace import Trace
from train.assembly import assemble
from train.dist import LaunchInfo, ProcessContext, start_processes, stop_processes
from train.metrics import PhaseTimer
from train.records import Rollout, Stage
from train.trainer import StepReport, Trainer

LOSS_SCALE = 1e-3
"""Losses are sums that may cancel; below this they are compared absolutely (times the limit)."""
GRADIENT_SCALE = 1e-3
"""Likewise a parameter's gradient norm, as a share of the total: fp32 resolves no more of it."""


class ReplayTrainer(Trainer):
    """The trainer with its pictures, gradients and probes in view."""

    def __init__(self, parts, context: ProcessContext, trace: Trace, use_trace_pictures: bool):
        super().__init__(parts, context, self._observe)
        self.trace = trace
        self.use_trace_pictures = use_trace_pictures
        self.seen: dict[str, Tensor] = {}
        self.own_pictures: list = []
        self.grad_norms: dict[str, float | None] = {}
        self.param_norms: dict[str, float] = {}

    def _observe(self, name: str, value: Tensor) -> None:
        self.seen[name] = value.detach().clone()

    def roll_out(self, step: int, stage: Stage) -> Rollout:
        self.seen = {}
        rollout = super().roll_out(step, stage)
        self.own_pictures = [sample.picture for sample in rollout.samples]
        if not self.use_trace_pictures:
            return rollout
        pictures = self.trace.pictures(self.context.rank, step)
        pairs = zip(rollout.samples, pictures, strict=True)
        return replace(rollout, samples=[replace(s, picture=p) for s, p in pairs])

    def update(self, step: int) -> float:
        self.grad_norms = {n: _norm(p.grad) for n, p in self.policy.named_parameters()}
        norm = super().update(step)
        self.param_norms = {n: _norm(p) for n, p in self.policy.named_parameters()}
        return norm


@dataclass(frozen=True)
class Replay:
    """What is replayed and how; `num_shard` below the world size replicates shards (HSDP)."""

    folder: Path
    checkpoint: Path
    pictures: str
    num_shard: int


def run_rank(rank: int, replay: Replay, store_port: int, out: Path) -> None:
    """Replays a whole trace on one rank and saves its deviations to `out`."""
    torch.set_num_threads(1)
    trace = Trace(replay.folder)
    config = trace.train_config(replay.checkpoint, replay.num_shard or trace.world_size)
    config = config.replace(master_port=store_port)
    launch = LaunchInfo(rank, trace.world_size, rank, trace.world_size)
    context = start_processes(config.processes, config.rl.policy_group_size, launch)
    parts = assemble(config, context, trace.reward(), PhaseTimer())
    trainer = ReplayTrainer(parts, context, trace, replay.pictures == "trace")
    found = Deviations()
    for step in range(trace.num_steps):
        report = trainer.run_step(step)
        StepComparison(trainer, report, found).compare()
    torch.save(vars(found), out / f"rank{rank}.pt")
    stop_processes()


class StepComparison:
    """Holds one finished step against the trace."""

    def __init__(self, trainer: ReplayTrainer, report: StepReport, found: Deviations):
        self.trainer = trainer
        self.report = report
        self.found = found
        self.rank, self.step = trainer.context.rank, report.step
        self.recorded = trainer.trace.ranks[self.rank][self.step]
        self.where = f"rank {self.rank} step {self.step} "
        # On its own pictures a run carries noise that does not shrink with a step's signal: a
        # flipped grey level moves a reward by 1e-6, whatever the advantages. There the yardstick
        # is the largest value that the trace has of the same number in any step.
        steps = trainer.trace.ranks[self.rank]
        self.yardsticks = [self.recorded] if trainer.use_trace_pictures else steps

    def compare(self) -> None:
        self._samples()
        self._rewards()
        self._pictures()
        self._losses()
        if self.recorded.get("packed") is not None:
            self._packed()
            self._loss_inputs()
            self._tensors()
        if self.recorded.get("grad_norms") is not None:
            self._norms()

    def _theirs(self, name: str) -> Tensor | None:
        return self.trainer.trace.tensor(self.rank, self.step, name)

    def _samples(self) -> None:
        rollout, recorded = self.report.rollout, self.recorded
        exact, where = self.found.exact, self.where
        exact(where + "sde index", [rollout.sde_index], recorded["sde_timestep_idx"])
        operations = [sample.operation for sample in rollout.samples]
        if rollout.stage is Stage.REFINE:
            exact(where + "operations", operations, recorded["edit_operations"])
        formats = [[sample.format_reward] for sample in rollout.samples]
        exact(where + "format rewards", formats, recorded["format_rewards"])
        exact(where + "n_text", self.report.packed.label_ids.numel(), recorded["n_text"])
        exact(where + "n_img", rollout.flow.before.shape[0], recorded["n_img"])
        thoughts = [row for row in recorded["samples"] if row["generated_ids"]]
        exact(where + "number of thoughts", len(rollout.samples), len(thoughts))
        for i, (sample, row) in enumerate(zip(rollout.samples, thoughts, strict=True)):
            exact(f"{where}ids {i}", list(sample.thought.ids), row["generated_ids"])
            last = [text for text in row["text"] if not text.startswith("image(")][-1]
            exact(f"{where}text {i}", sample.text, last)
            self.found.numbers(
                "probabilities", f"{where}{i}", sample.thought.probs, row["generated_probs"]
            )
        for i, row in enumerate(recorded["samples"]):
            if row.get("timestep"):
                mine = [rollout.flow.t, rollout.flow.dt]
                theirs = [row["timestep"][0], row["dt"][0]]
                self.found.numbers("latents", f"{where}time of row {i}", mine, theirs)

    def _rewards(self) -> None:
        numbers, where = self.found.numbers, self.where
        for name, mine in (
            ("rewards", [reward.score for reward in self.report.rewards]),
            ("total_rewards", self.report.advantages.totals),
        ):
            numbers("rewards", where + name, mine, _flat(self.recorded[name]))
        for name, mine in (
            ("text_advantages", self.report.advantages.text),
            ("image_advantages", self.report.advantages.image),
        ):
            numbers("advantages", where + name, mine.tolist(), _flat(self.recorded[name]))

    def _pictures(self) -> None:
        theirs = self.trainer.trace.pictures(self.rank, self.step)
        pairs = zip(self.trainer.own_pictures, theirs, strict=True)
        for i, (mine, recorded) in enumerate(pairs):
            pixels = (torch.from_numpy(np.array(p)) for p in (mine, recorded))
            self.found.absolute("pictures (grey levels)", f"{self.where}picture {i}", *pixels)

    def _losses(self) -> None:
        loss, where = self.report.loss, self.where
        parts = self.recorded["loss_dict"]
        pairs = {
            "text_policy_loss": loss.text_policy,
            "img_policy_loss": loss.image_policy,
            "text_kl_loss": loss.text_kl,
            "img_kl_loss": loss.image_kl,
        }
        scale = self._scale(lambda recorded: recorded["loss"], LOSS_SCALE)
        self.found.relative(
            "losses", where + "loss", loss.loss.item(), self.recorded["loss"], scale
        )
        for name, mine in pairs.items():
            scale = self._scale(lambda recorded, n=name: recorded["loss_dict"][n][0], LOSS_SCALE)
            self.found.relative("losses", where + name, mine.item(), parts[name][0], scale)
        for kind, log_ratio in (("text", loss.text_log_ratio), ("img", loss.image_log_ratio)):
            ratio = log_ratio.exp()
            for name in ("mean", "max", "min"):
                theirs = parts[f"{kind}_prob_ratio_{name}"][0]
                mine = getattr(ratio, name)().item()
                self.found.relative("ratios", f"{where}{kind} {name}", mine, theirs, 1.0)
        self.found.relative(
            "gradient norms",
            where + "total",
            self.report.grad_norm,
            self.recorded["total_norm"],
            self._scale(lambda recorded: recorded["total_norm"], 0.0),
        )
        self.found.exact(
            where + "next lr", self.report.next_learning_rate, self.recorded["lr_next"]
        )

    def _scale(self, value: Callable[[dict], float], floor: float) -> float:
        return max(floor, *(abs(value(recorded)) for recorded in self.yardsticks))

    def _norms(self) -> None:
        for name, theirs in self.recorded["grad_norms"].items():
            mine = self.trainer.grad_norms[name]
            where = f"{self.where}{name}"
            if mine is None:
                self.found.exact(where + " has a gradient", False, True)
            else:
                floor = GRADIENT_SCALE * self.recorded["total_norm"]
                scale = self._scale(lambda r, n=name: r["grad_norms"].get(n, 0.0), floor)
                self.found.relative("gradient norms", where, mine, theirs, scale)
        for name, theirs in self.recorded["param_norms"].items():
            mine = self.trainer.param_norms[name]
            self.found.relative("parameter norms", f"{self.where}{name}", mine, theirs, 1e-3)
        if self.recorded.get("params_without_grad") is not None:
            without = sorted(n for n, norm in self.trainer.grad_norms.items() if norm is None)
            recorded = sorted(self.recorded["params_without_grad"])
            self.found.exact(self.where + "parameters without gradient", without, recorded)

    def _packed(self) -> None:
        batch, plan = self.report.packed.batch, self.report.packed.batch.plan
        recorded, where = self.recorded["packed"], self.where
        exact = self.found.exact
        exact(where + "sequence length", plan.num_tokens, recorded["sequence_length"])
        lengths = [end - start for start, end in plan.tree_ranges]
        exact(where + "row lengths", lengths, recorded["sample_lens"])
        exact(where + "splits", [s.length for s in plan.segments], recorded["split_lens"])
        exact(where + "modes", [s.kind.value for s in plan.segments], recorded["attn_modes"])
        indexes = {
            "packed_text_ids": batch.text_ids,
            "packed_text_indexes": batch.text_index,
            "packed_position_ids": batch.rope_ids,
            "packed_vae_token_indexes": batch.latent_index,
            "packed_latent_position_ids": batch.latent_position_ids,
            "packed_vit_token_indexes": batch.vit_index,
            "packed_vit_position_ids": batch.vit_position_ids,
            "ce_loss_indexes": batch.label_index,
            "mse_loss_indexes": batch.noise_index,
        }
        for name, mine in indexes.items():
            theirs = self._theirs("packed." + name)
            if theirs is not None:
                self.found.exact_tensor(where + name, mine, theirs)
        floats = {"packed_noisy_latent": batch.latents, "packed_timesteps": batch.timesteps}
        for name, mine in floats.items():
            self.found.absolute("latents", where + name, mine, self._theirs("packed." + name))
        patches = self._theirs("packed.packed_vit_tokens")
        if patches is not None:
            mine = self.report.rollout.condition.vit_patches
            copies = patches.shape[0] // mine.shape[0]
            self.found.absolute("latents", where + "patches", mine.repeat(copies, 1), patches)

    def _loss_inputs(self) -> None:
        packed, flow, where = self.report.packed, self.report.rollout.flow, self.where
        self.found.exact_tensor(
            where + "labels", packed.label_ids, self._theirs("loss_info.packed_label_ids")
        )
        num_tokens, rows = flow.before.shape[1], packed.noise_rows
        ranges = [
            [[row * num_tokens, (row + 1) * num_tokens] for row in copies]
            for copies in zip(*(r for r in (rows.cond, rows.text, rows.image) if r), strict=True)
        ]
        recorded = self.recorded["loss_info"]["mse_condition_token_indexes"]
        self.found.exact(where + "copies of images", ranges, recorded)
        pairs = {
            "packed_noisy_latent_for_loss": flow.before.flatten(0, 1),
            "packed_prev_latents": flow.after.flatten(0, 1),
            "log_probs": flow.log_prob.flatten(),
        }
        for name, mine in pairs.items():
            kind = "log-probs" if name == "log_probs" else "latents"
            self.found.absolute(kind, where + name, mine, self._theirs("loss_info." + name))
        advantages = self.report.advantages.text[packed.label_samples]
        theirs = self._theirs("loss_info.text_advantages")
        self.found.absolute("advantages", where + "per label", advantages, theirs)

    def _tensors(self) -> None:
        where, seen = self.where, self.trainer.seen
        for name, mine in seen.items():
            kind = "log-probs" if name in ("label_logprobs", "logits_head") else "velocities"
            if name == "logits_head":
                mine = mine[:4]
            if name.startswith("sde."):
                name, kind = name.replace("sde.", "sde0."), "latents"
            theirs = self._theirs(name)
            if theirs is None:
                self.found.exact(f"{where}{name} is in the trace", False, True)
                continue
            self.found.absolute(kind, where + name, mine.reshape(theirs.shape), theirs)


def _norm(value: Tensor | None) -> float | None:
    if value is None:
        return None
    norm = torch.linalg.vector_norm(value.detach().double())  # of all shards
    return (norm.full_tensor() if isinstance(norm, DTensor) else norm).item()


def _flat(nested: list) -> list[float]:
    return [value for entry in nested for value in entry]
