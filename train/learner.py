"""From a rollout to a loss: its rows, the two forwards over them, and their targets."""

from dataclasses import dataclass, replace

import torch

from modeling.bagel.attention import forest_attention
from modeling.bagel.bagel import Bagel
from modeling.bagel.batch import LearnerOutput
from modeling.bagel.guidance import GuidanceConfig
from modeling.bagel.probe import Probe, no_probe
from modeling.bagel.tokenizer import BagelTokenizer
from modeling.diffusion.sde_sampler import SdeConfig
from train.advantages import Advantages
from train.interface_strings import GENERATE_SYSTEM, REFLECT_SYSTEM, reflect_request
from train.losses import (
    ImageScoring,
    LossConfig,
    LossReport,
    LossTargets,
    Scores,
    policy_loss,
    score,
)
from train.packing import (
    NoisePart,
    Packed,
    PackLayout,
    Row,
    TextPart,
    VaePart,
    VitPart,
    pack_rows,
)
from train.recipe import Recipe
from train.records import Rollout, Stage


@dataclass(frozen=True)
class LearnerConfig:
    """How rollouts of each stage are scored, and what is trained of them."""

    guidance_generate: GuidanceConfig
    guidance_refine: GuidanceConfig
    sde_generate: SdeConfig
    sde_refine: SdeConfig
    loss: LossConfig
    train_text: bool
    train_images: bool
    think_in_generate: bool
    compute_dtype: torch.dtype
    attention: str


@dataclass(frozen=True)
class Scored:
    """Both forwards of a step, and the targets they await."""

    policy: Scores
    reference: Scores
    targets: LossTargets
    num_tokens: int


class Learner:
    """Packs, scores and forms the loss; owns no state between steps."""

    def __init__(
        self,
        tokenizer: BagelTokenizer,
        layout: PackLayout,
        config: LearnerConfig,
        recipe: Recipe,
        probe: Probe = no_probe,
    ):
        self.tokenizer = tokenizer
        self.layout = layout
        self.config = config
        self.recipe = recipe
        self.probe = probe

    def pack(self, rollout: Rollout) -> Packed:
        """The rows of all samples of this rank as one batch on the host."""
        rows = [row for i in range(len(rollout.samples)) for row in self._rows(rollout, i)]
        dtype = torch.float32
        if not self.recipe.learner_timesteps_in_fp32:
            dtype = self.config.compute_dtype
        return pack_rows(rows, self.layout, dtype)

    def targets(self, rollout: Rollout, packed: Packed, device: torch.device) -> LossTargets:
        """What the forwards are held against."""
        probs = [p for s in rollout.samples for p in s.thought.probs[:-1]]
        flow = rollout.flow if self.config.train_images else None
        size = packed.batch.latents.shape[-1]
        empty = torch.zeros(0, 1, size, device=device)
        return LossTargets(
            label_ids=packed.label_ids.to(device),
            label_samples=packed.label_samples.to(device),
            behaviour_probs=torch.tensor(
                probs if self.config.train_text else [], dtype=torch.float32, device=device
            ),
            noise_rows=packed.noise_rows,
            before=empty if flow is None else flow.before,
            after=empty if flow is None else flow.after,
            behaviour_log_prob=empty[..., 0] if flow is None else flow.log_prob,
            t=torch.tensor(0.5 if flow is None else flow.t, device=device),
            dt=torch.tensor(0.5 if flow is None else flow.dt, device=device),
        )

    def forward(
        self, policy: Bagel, reference: Bagel, packed: Packed, targets: LossTargets, stage: Stage
    ) -> Scored:
        """Runs the reference without and the policy with gradients over one set of masks."""
        device = targets.label_ids.device
        batch = packed.batch.to(device)
        attend = forest_attention(batch.plan, device, self.config.attention)
        rounding = self.recipe.learner_rounding
        scoring = self._scoring(stage, packed)
        with torch.no_grad():
            output = reference(batch, attend, rounding)
            self.probe("ref_mse_preds", output.velocity)
            reference_scores = score(output, targets, scoring, in_fp32=True)
        output = policy(batch, attend, rounding)
        self._probe_policy(output)
        in_fp32 = self.recipe.text_scored_in_fp32
        scores = score(output, targets, scoring, in_fp32)
        return Scored(scores, reference_scores, targets, batch.plan.num_tokens)

    def loss(self, scored: Scored, advantages: Advantages) -> LossReport:
        """The loss of this rank, ready for backward."""
        return policy_loss(
            scored.policy,
            scored.reference,
            scored.targets,
            advantages,
            self.config.loss,
            self.probe,
        )

    def _probe_policy(self, output: LearnerOutput) -> None:
        self.probe("mse_preds", output.velocity)
        self.probe("logits_head", output.logits)

    def _guidance(self, stage: Stage) -> GuidanceConfig:
        is_refine = stage is Stage.REFINE
        return self.config.guidance_refine if is_refine else self.config.guidance_generate

    def _scoring(self, stage: Stage, packed: Packed) -> ImageScoring:
        sde = self.config.sde_refine if stage is Stage.REFINE else self.config.sde_generate
        rows, guidance = packed.noise_rows, self._guidance(stage)
        is_ignored = stage is Stage.GENERATE and self.recipe.ignores_generate_guidance
        if is_ignored or not (rows.text or rows.image):
            return ImageScoring(None, sde)
        if stage is Stage.REFINE and self.recipe.learner_renorm_edit is not None:
            guidance = replace(guidance, renorm_type=self.recipe.learner_renorm_edit)
        return ImageScoring(guidance, sde)

    def _rows(self, rollout: Rollout, index: int) -> list[Row]:
        noise = self._noise(rollout, index)
        copies = self._guidance_copies(rollout) if noise else ()
        if rollout.stage is Stage.GENERATE:
            return self._generate_rows(rollout, index, noise, copies)
        return self._refine_rows(rollout, index, noise, copies)

    def _generate_rows(
        self, rollout: Rollout, index: int, noise: tuple, copies: tuple
    ) -> list[Row]:
        system = (self._text(GENERATE_SYSTEM),) if self.config.think_in_generate else ()
        thought = self._thought(rollout, index)
        prompt = self._text(rollout.prompt.prompt)
        rows = [Row(index, "cond", (*system, prompt, *thought, *noise))]
        if "cfg_text" in copies:
            rows.append(Row(index, "cfg_text", (*system, *noise)))
        return rows

    def _refine_rows(
        self, rollout: Rollout, index: int, noise: tuple, copies: tuple
    ) -> list[Row]:
        vae, vit = VaePart(rollout.condition), VitPart(rollout.condition)
        request = self._text(reflect_request(rollout.prompt.prompt))
        thought = self._thought(rollout, index)
        rows = [Row(index, "cond", (self._text(REFLECT_SYSTEM), vit, request, *thought))]
        if not noise:
            return rows
        operation = self._text(rollout.samples[index].operation)
        rows.append(Row(index, "cond", (vae, vit, operation, *noise)))
        if "cfg_text" in copies:
            rows.append(Row(index, "cfg_text", (vae, vit, *noise)))
        if "cfg_img" in copies:
            rows.append(Row(index, "cfg_img", (operation, *noise)))
        return rows

    def _guidance_copies(self, rollout: Rollout) -> tuple[str, ...]:
        guidance = self._guidance(rollout.stage)
        closed = self.recipe.closed_interval_in_packing
        if not guidance.is_active(rollout.flow.t, closed_low=closed):
            return ()
        scales = {"cfg_text": guidance.text_scale, "cfg_img": guidance.image_scale}
        return tuple(name for name, value in scales.items() if value > 1)

    def _noise(self, rollout: Rollout, index: int) -> tuple[NoisePart, ...]:
        flow = rollout.flow
        if flow is None or not self.config.train_images:
            return ()
        return (NoisePart(flow.before[index], flow.t, flow.grid),)

    def _text(self, text: str) -> TextPart:
        return TextPart(tuple(self.layout.special.text_segment(self.tokenizer.encode(text))))

    def _thought(self, rollout: Rollout, index: int) -> tuple[TextPart, ...]:
        ids = rollout.samples[index].thought.ids
        return (TextPart(ids, self.config.train_text),) if ids else ()

