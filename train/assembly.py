"""Puts a run together from its configuration: model, rollout, learner, optimizer, streams."""

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from PIL import Image

from data.geneval import GenevalPrompt, read_prompts
from modeling.autoencoder import AutoEncoder, load_autoencoder
from modeling.bagel.bagel import Bagel
from modeling.bagel.config import BagelConfig, ImageSize
from modeling.bagel.context import SpecialTokens
from modeling.bagel.execution import build_execution
from modeling.bagel.flow import FlowConfig
from modeling.bagel.guidance import GuidanceConfig
from modeling.bagel.tokenizer import BagelTokenizer, load_tokenizer
from modeling.bagel.weights import read_bagel_config
from modeling.diffusion.sde_sampler import SdeConfig
from train.config import TrainConfig
from train.dist import ProcessContext
from train.engine import (
    EngineConfig,
    Optimizer,
    OptimizerSettings,
    build_policy,
    build_reference,
)
from train.learner import Learner, LearnerConfig
from train.losses import LossConfig
from train.metrics import PhaseTimer
from train.packing import PackLayout
from train.prompts import PromptSampler
from train.recipe import Recipe, recipe_named
from train.refine_buffer import RefineBuffer
from train.rollout_controller import RolloutConfig, RolloutController, StageConfig
from train.streams import RandomStreams, StreamSeeds, square


class RewardSource(Protocol):
    """What the trainer asks of a reward client."""

    def submit(self, images: list[Image.Image], metadata: list[dict]) -> list: ...

    def close(self) -> None: ...


@dataclass
class Parts:
    """Everything a trainer works with on one rank."""

    config: TrainConfig
    recipe: Recipe
    compute_dtype: torch.dtype
    image_size: ImageSize
    tokenizer: BagelTokenizer
    policy: Bagel
    reference: Bagel
    autoencoder: AutoEncoder
    optimizer: Optimizer
    controller: RolloutController
    learner: Learner
    prompts: list[GenevalPrompt]
    sampler: PromptSampler
    streams: RandomStreams
    buffer: RefineBuffer
    rewards: RewardSource
    timer: PhaseTimer


def assemble(
    config: TrainConfig, context: ProcessContext, rewards: RewardSource, timer: PhaseTimer
) -> Parts:
    """Builds all parts of a run; the configuration has been validated before."""
    folder = Path(config.paths.model_path)
    recipe = recipe_named(config.switches.recipe)
    sizes = read_bagel_config(folder)
    dtype = compute_dtype(config, context.device)
    tokenizer = load_tokenizer(folder, sizes.llm.vocab_size)
    engine = EngineConfig(
        compute_dtype=dtype,
        checkpoint_activations=config.processes.activation_checkpointing,
        freeze_und=config.rl.freeze_und,
        load_concurrency=config.switches.load_concurrency,
    )
    policy = build_policy(folder, sizes, engine, context)
    reference = build_reference(policy, engine, context)
    autoencoder = load_autoencoder(folder, context.device)
    prompts = read_prompts(
        config.paths.train_data_path, require_clauses=config.rewards.reward_fn == "geneval"
    )
    return Parts(
        config=config,
        recipe=recipe,
        compute_dtype=dtype,
        image_size=square(config.images.image_size),
        tokenizer=tokenizer,
        policy=policy,
        reference=reference,
        autoencoder=autoencoder,
        optimizer=Optimizer(policy, optimizer_settings(config), context.device),
        controller=RolloutController(
            policy,
            autoencoder,
            tokenizer,
            rollout_config(config, sizes, recipe),
            recipe,
            timer,
            execution=build_execution(config.switches, sizes.llm, context.device, dtype),
        ),
        learner=Learner(
            tokenizer,
            pack_layout(tokenizer, sizes),
            learner_config(config, dtype, context.device.type),
            recipe,
        ),
        prompts=prompts,
        sampler=PromptSampler(
            len(prompts),
            context.world_size,
            config.rl.policy_group_size,
            config.seeds.data_seed,
            recipe.lagging_prompt_epoch,
        ),
        streams=RandomStreams(stream_seeds(config, context), context.device),
        buffer=RefineBuffer(config.rl.perfect_probability),
        rewards=rewards,
        timer=timer,
    )


def compute_dtype(config: TrainConfig, device: torch.device) -> torch.dtype:
    """Type that weights are gathered in and latents start in."""
    is_bf16 = config.processes.precision_on(device.type) == "bf16"
    return torch.bfloat16 if is_bf16 else torch.float32


def stream_seeds(config: TrainConfig, context: ProcessContext) -> StreamSeeds:
    """What the random streams of this rank are seeded with."""
    return StreamSeeds(
        rank=context.rank,
        world_size=context.world_size,
        policy_group_id=context.policy_group_id,
        total_steps=config.schedule.total_steps,
        global_seed=config.seeds.global_seed,
    )


def optimizer_settings(config: TrainConfig) -> OptimizerSettings:
    """Optimizer settings of the configuration."""
    optimizer = config.optimizer
    return OptimizerSettings(
        lr=optimizer.lr,
        warmup_steps=optimizer.warmup_steps,
        betas=(optimizer.beta1, optimizer.beta2),
        eps=optimizer.eps,
        weight_decay=optimizer.weight_decay,
        max_grad_norm=optimizer.max_grad_norm,
    )


def rollout_config(config: TrainConfig, sizes: BagelConfig, recipe: Recipe) -> RolloutConfig:
    """How both stages sample."""

    def flow(num_timesteps: int, guidance: GuidanceConfig, sde: SdeConfig) -> FlowConfig:
        shift = config.flow.timestep_shift
        return FlowConfig(num_timesteps, shift, guidance, sde, recipe.score_stored)

    text = config.text
    return RolloutConfig(
        generate=StageConfig(
            sampling=config.sampling_gen,
            max_tokens=text.max_output_token_n_gen,
            flow=flow(config.flow.num_timesteps_gen, config.guidance_gen, config.sde_gen),
            think=text.think_mode,
        ),
        refine=StageConfig(
            sampling=config.sampling_edit,
            max_tokens=text.max_output_token_n_edit,
            flow=flow(config.flow.num_timesteps_edit, config.guidance_edit, config.sde_edit),
        ),
        image_size=square(config.images.image_size),
        vae_transform=config.images.vae_transform,
        vit_transform=config.images.vit_transform(sizes.vit.patch_size),
    )


def learner_config(config: TrainConfig, dtype: torch.dtype, device_type: str) -> LearnerConfig:
    """How rollouts are scored."""
    rl = config.rl
    return LearnerConfig(
        guidance_generate=config.guidance_gen,
        guidance_refine=config.guidance_edit,
        sde_generate=config.sde_gen,
        sde_refine=config.sde_edit,
        loss=LossConfig(
            ce_weight=rl.ce_weight,
            mse_weight=rl.mse_weight,
            kl_weight_text=rl.kl_weight_text,
            kl_weight_image=rl.kl_weight_image,
            clip_ratio=rl.grpo_clip_ratio,
            kl_limit=rl.kl_limit,
        ),
        train_text=rl.tune_text_cot,
        train_images=rl.tune_image_cot,
        think_in_generate=config.text.think_mode,
        compute_dtype=dtype,
        attention=config.switches.attention_on(device_type),
    )


def pack_layout(tokenizer: BagelTokenizer, sizes: BagelConfig) -> PackLayout:
    """Marker ids and table sides for packing."""
    special = SpecialTokens.of(tokenizer)
    return PackLayout(special, sizes.max_latent_size, sizes.vit.side)
