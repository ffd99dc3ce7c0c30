"""Refusals before anything is allocated: settings against each other, the files and the world.

Every refusal is a ConfigError of one line that names the flag and what is allowed. The first one
found is raised.
"""

import os
from collections.abc import Callable
from pathlib import Path

import torch

from data.geneval import read_prompts
from modeling.autoencoder import check_autoencoder
from modeling.bagel.bagel import Bagel
from modeling.bagel.config import LATENT_CHANNELS, LATENT_PATCH, BagelConfig, ImageSize
from modeling.bagel.weights import (
    check_header,
    find_weight_file,
    parameter_shapes,
    read_bagel_config,
    read_header,
)
from train.config import FLAGS, TrainConfig
from train.dist import check_world
from train.flags import ConfigError, check_value
from train.prompts import PromptSampler
from train.recipe import recipe_named
from train.settings import VAE_STRIDE

SOURCE_TREE = Path(__file__).resolve().parents[1]

__all__ = [
    "ConfigError",
    "read_checkpoint_sizes",
    "validate_config",
    "validate_files",
    "validate_prompts",
    "validate_run",
    "validate_weights",
]


def validate_run(config: TrainConfig, world_size: int) -> BagelConfig:
    """All refusals in order; returns the checkpoint's sizes. Reads headers, allocates nothing."""
    validate_files(config)
    sizes = read_checkpoint_sizes(config)
    validate_config(config, world_size, sizes)
    validate_weights(config, sizes)
    validate_prompts(config, world_size)
    return sizes


def validate_files(config: TrainConfig) -> None:
    """Raises ConfigError when a file is missing that the run reads, or its folder cannot be."""
    paths = config.paths
    _check_model_folder(paths.model_path)
    for name in ("train_data_path", "val_data_path"):
        path = getattr(paths, name)
        if not Path(path).is_file():
            raise ConfigError(f"--{name} {path}: no such file, expected a GenEval JSONL file")
    if paths.resume_from and not Path(paths.resume_from).is_dir():
        raise ConfigError(
            f"--resume_from {paths.resume_from}: no such folder, expected a checkpoint of this "
            "trainer or nothing"
        )
    _check_run_folder(config)
    tree = config.switches.source_tree
    if tree and Path(tree).resolve() != SOURCE_TREE:
        raise ConfigError(
            f"--r3_source_tree {tree}: this trainer runs from {SOURCE_TREE}; "
            "scripts/train_faster_r3_geneval.sh starts the one of another tree"
        )


def read_checkpoint_sizes(config: TrainConfig) -> BagelConfig:
    """Sizes of the checkpoint of --model_path. Raises ConfigError when it does not fit together."""
    return _as_config_error(lambda: read_bagel_config(Path(config.paths.model_path)))


def validate_weights(config: TrainConfig, sizes: BagelConfig) -> None:
    """Raises ConfigError when the headers of the checkpoint lack a tensor or give another shape."""
    folder = Path(config.paths.model_path)
    with torch.device("meta"):
        shapes = parameter_shapes(Bagel(sizes))
    header = _as_config_error(lambda: read_header(find_weight_file(folder)))
    _as_config_error(lambda: check_header(header, shapes))
    autoencoder = _as_config_error(lambda: check_autoencoder(folder))
    stride = autoencoder.downsample * LATENT_PATCH
    if stride != VAE_STRIDE or autoencoder.config.z_channels != LATENT_CHANNELS:
        raise ConfigError(
            f"--model_path {folder}: the autoencoder has {autoencoder.config.z_channels} channels "
            f"and {stride} pixels a latent token, expected {LATENT_CHANNELS} and {VAE_STRIDE}"
        )


def validate_prompts(config: TrainConfig, world_size: int) -> None:
    """Raises ConfigError for a bad line of a prompt file, and for fewer prompts than ranks."""
    has_clauses = config.rewards.reward_fn == "geneval"
    paths, limit = config.paths, config.evaluation.eval_prompts or None
    prompts = _as_config_error(
        lambda: read_prompts(paths.train_data_path, require_clauses=has_clauses)
    )
    _as_config_error(
        lambda: PromptSampler(
            len(prompts),
            world_size,
            config.rl.policy_group_size,
            config.seeds.data_seed,
            recipe_named(config.switches.recipe).lagging_prompt_epoch,
        )
    )
    if config.schedule.eval_freq:
        _as_config_error(lambda: read_prompts(paths.val_data_path, limit, has_clauses))


def validate_config(config: TrainConfig, world_size: int, sizes: BagelConfig) -> None:
    """Raises ConfigError for settings that cannot work together, with this world and checkpoint."""
    values = config.to_flags()
    for name, entry in FLAGS.items():
        if entry.group != "switches":  # the switch table has checked those
            check_value(entry, values[name])
    check_world(world_size, config.processes.num_shard, config.rl.policy_group_size)
    _check_groups(config)
    _check_trained_parts(config)
    _check_flow(config)
    _check_rewards(config)
    _check_geometry(config, sizes)


def _check_model_folder(model_path: str) -> None:
    if not model_path:
        raise ConfigError("--model_path (MODEL_PATH) is required: the folder of a BAGEL checkpoint")
    folder = Path(model_path)
    if not folder.is_dir():
        raise ConfigError(f"--model_path {folder}: no such folder, expected a BAGEL checkpoint")
    for name in ("llm_config.json", "vit_config.json", "ae.safetensors"):
        if not (folder / name).is_file():
            raise ConfigError(f"--model_path {folder}: {name} is missing")
    has_tables = (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file()
    if not has_tables and not (folder / "tokenizer.json").is_file():
        raise ConfigError(
            f"--model_path {folder}: no tokenizer, expected vocab.json and merges.txt, or "
            "tokenizer.json"
        )
    _as_config_error(lambda: find_weight_file(folder))


def _check_run_folder(config: TrainConfig) -> None:
    for name in ("log_dir", "exp_name", "wandb_project"):
        if not getattr(config.paths, name).strip():
            raise ConfigError(f"--{name} is empty: expected a name")
    for name in ("exp_name", "wandb_project"):
        text = getattr(config.paths, name)
        if text in (".", "..") or "/" in text or "\0" in text:
            raise ConfigError(f"--{name} {text!r}: expected the name of one folder, without a /")
    folder = config.paths.run_dir
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(
            f"--log_dir {config.paths.log_dir}: {folder} is no folder that can be written to"
        )


def _check_groups(config: TrainConfig) -> None:
    rl = config.rl
    if rl.group_size % rl.policy_group_size:
        raise ConfigError(
            f"--group_size {rl.group_size}: expected a multiple of --policy_group_size "
            f"{rl.policy_group_size}"
        )


def _check_trained_parts(config: TrainConfig) -> None:
    rl, text, flow = config.rl, config.text, config.flow
    if not rl.freeze_vit:
        raise ConfigError("--freeze_vit False: it cannot be trained, expected True")
    if not rl.tune_text_cot and not rl.tune_image_cot:
        raise ConfigError(
            "--tune_text_cot False and --tune_image_cot False: nothing is trained, set one to True"
        )
    if rl.freeze_und and not rl.tune_image_cot:
        raise ConfigError(
            "--freeze_und True and --tune_image_cot False: thoughts train the understanding expert "
            "only, set one of them the other way"
        )
    if not (rl.tune_text_cot and text.think_mode) and not (
        rl.tune_image_cot and flow.enable_sde_gen
    ):
        raise ConfigError(
            "generate steps train nothing: expected --tune_text_cot True with --think_mode True, "
            "or --tune_image_cot True with --enable_sde_gen True"
        )
    if not rl.tune_text_cot and not flow.enable_sde_edit:
        raise ConfigError(
            "refine steps train nothing: expected --tune_text_cot True or --enable_sde_edit True"
        )


def _check_flow(config: TrainConfig) -> None:
    flow = config.flow
    if flow.cfg_interval_low > flow.cfg_interval_high:
        raise ConfigError(
            f"--cfg_interval_low {flow.cfg_interval_low}: expected at most --cfg_interval_high "
            f"{flow.cfg_interval_high}"
        )
    num_forwards = flow.num_timesteps_edit - 1
    if flow.enable_sde_edit and flow.max_sde_timestep_idx_for_edit > num_forwards:
        raise ConfigError(
            f"--max_sde_timestep_idx_for_edit {flow.max_sde_timestep_idx_for_edit}: expected at "
            f"most the {num_forwards} forwards of --num_timesteps_edit {flow.num_timesteps_edit}"
        )
    for build in (
        lambda: (config.guidance_gen, config.guidance_edit),
        lambda: (config.sde_gen, config.sde_edit),
        lambda: (config.sampling_gen, config.sampling_edit, config.sampling_eval),
    ):
        _as_config_error(build)


def _check_rewards(config: TrainConfig) -> None:
    rewards, timeout_s = config.rewards, config.processes.process_group_timeout_s
    _as_config_error(rewards.client_config)
    if rewards.reward_request_timeout_s > rewards.reward_step_deadline_s:
        raise ConfigError(
            f"--reward_request_timeout_s {rewards.reward_request_timeout_s}: expected at most "
            f"--reward_step_deadline_s {rewards.reward_step_deadline_s}"
        )
    # Else a stuck reward ends as a collective's timeout on another rank, which hides the cause.
    if rewards.reward_step_deadline_s >= timeout_s:
        raise ConfigError(
            f"--reward_step_deadline_s {rewards.reward_step_deadline_s}: expected less than "
            f"--process_group_timeout_s {timeout_s}"
        )


def _check_geometry(config: TrainConfig, sizes: BagelConfig) -> None:
    images = config.images
    side = images.image_size
    if side % VAE_STRIDE:
        raise ConfigError(f"--image_size {side}: expected a multiple of {VAE_STRIDE}")
    largest = sizes.max_latent_size * VAE_STRIDE
    if side > largest:
        raise ConfigError(
            f"--image_size {side}: the checkpoint has {sizes.max_latent_size} latent positions a "
            f"side, expected at most {largest}"
        )
    for kind in ("vae", "vit"):
        low = getattr(images, f"{kind}_min_image_size")
        high = getattr(images, f"{kind}_max_image_size")
        if low > high:
            raise ConfigError(
                f"--{kind}_min_image_size {low}: expected at most --{kind}_max_image_size {high}"
            )
    picture = ImageSize(side, side)
    resized = images.vae_transform.target_size(picture)
    if resized != picture:
        raise ConfigError(
            f"--image_size {side}: the VAE would see an edit's input at {resized.height} x "
            f"{resized.width}, expected --vae_min_image_size {images.vae_min_image_size} <= "
            f"image_size <= --vae_max_image_size {images.vae_max_image_size}"
        )
    patch = sizes.vit.patch_size
    seen = images.vit_transform(patch).target_size(picture)
    if max(seen) > sizes.vit.side * patch:
        raise ConfigError(
            f"--image_size {side}: the ViT would see {seen.height} x {seen.width} pixels, its "
            f"position table ends at {sizes.vit.side * patch}; lower --vit_max_image_size "
            f"{images.vit_max_image_size} to at most {sizes.vit.side * patch}"
        )


def _as_config_error(build: Callable[[], object]) -> object:
    """The result of `build`, its ValueError passed on as a ConfigError."""
    try:
        return build()
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(str(error)) from error
