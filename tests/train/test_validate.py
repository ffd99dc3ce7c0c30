"""Every refusal of a run's settings, each from one change to settings that pass."""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from modeling.bagel.config import BagelConfig, LlmConfig, VitConfig
from train.config import TrainConfig
from train.flags import ConfigError
from train.validate import SOURCE_TREE, validate_config, validate_files, validate_run

TINY = Path(__file__).resolve().parents[1] / "parity" / "tiny_bagel"
REAL = BagelConfig(
    LlmConfig(3584, 18944, 28, 28, 4, 152064), VitConfig(1152, 4304, 26, 16, 980, 14), 64
)
SMALL_IMAGES = {
    "image_size": 64,
    "vae_max_image_size": 64,
    "vae_min_image_size": 32,
    "vit_max_image_size": 112,
    "vit_min_image_size": 56,
}


def refusal(world_size: int = 8, sizes: BagelConfig = REAL, **flags: object) -> str:
    """The one line with which these settings are refused."""
    with pytest.raises(ConfigError) as error:
        validate_config(TrainConfig().replace(**flags), world_size, sizes)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    "flags, world_size",
    [
        ({}, 8),
        ({}, 16),
        ({"policy_group_size": 1}, 1),
        ({"policy_group_size": 2, "group_size": 4}, 2),
        ({"image_size": 1024, "vae_max_image_size": 1024}, 8),
        ({"think_mode": False}, 8),
        ({"enable_sde_gen": False}, 8),
        ({"enable_sde_edit": False, "max_sde_timestep_idx_for_edit": 99}, 8),
        ({"tune_image_cot": False}, 8),
        ({"tune_text_cot": False, "freeze_und": True}, 8),
        ({"lr": 0, "eval_freq": 0, "save_every": 0, "rollout_vis_step": 0}, 8),
    ],
)
def test_settings_that_work_pass(flags, world_size):
    validate_config(TrainConfig().replace(**flags), world_size, REAL)


@pytest.mark.parametrize(
    "flags, words",
    [
        ({"group_size": 18}, "--group_size 18: expected a multiple of --policy_group_size 4"),
        ({"freeze_vit": False}, "--freeze_vit False:"),
        ({"tune_text_cot": False, "tune_image_cot": False}, "nothing is trained"),
        ({"freeze_und": True, "tune_image_cot": False}, "--freeze_und True and --tune_image_cot"),
        ({"think_mode": False, "enable_sde_gen": False}, "generate steps train nothing"),
        ({"think_mode": False, "tune_image_cot": False}, "generate steps train nothing"),
        ({"tune_text_cot": False, "enable_sde_gen": False}, "generate steps train nothing"),
        ({"tune_text_cot": False, "enable_sde_edit": False}, "refine steps train nothing"),
        ({"cfg_interval_low": 0.9, "cfg_interval_high": 0.5}, "--cfg_interval_low 0.9: expected"),
        ({"max_sde_timestep_idx_for_edit": 21}, "at most the 20 forwards of --num_timesteps_edit"),
        ({"reward_url": ""}, "--reward_url"),
        ({"reward_url": "ftp://host"}, "--reward_url"),
        ({"reward_fn": "tiif"}, "--reward_model_name"),
        ({"reward_fn": "tiif", "reward_model_name": "judge"}, "--reward_api_key"),
        ({"reward_request_timeout_s": 481}, "at most --reward_step_deadline_s 480.0"),
        ({"reward_step_deadline_s": 1800}, "less than --process_group_timeout_s 1800.0"),
        ({"image_size": 520}, "--image_size 520: expected a multiple of 16"),
        ({"image_size": 1040}, "64 latent positions a side, expected at most 1024"),
        ({"image_size": 528}, "the VAE would see an edit's input at 512 x 512"),
        ({"image_size": 240}, "the VAE would see an edit's input at 256 x 256"),
        ({"vae_min_image_size": 513}, "--vae_min_image_size 513: expected at most --vae_max"),
        ({"vit_min_image_size": 505}, "--vit_min_image_size 505: expected at most --vit_max"),
        ({"vit_max_image_size": 1400, "vit_min_image_size": 1400}, "table ends at 980; lower"),
    ],
)
def test_settings_that_cannot_work_are_refused(flags, words):
    assert words in refusal(**flags)


def test_worlds_that_do_not_divide_are_refused():
    assert "--policy_group_size 4: does not divide the 6 ranks" in refusal(world_size=6)
    assert "--num_shard 8: does not divide the 12 ranks" in refusal(world_size=12)


def test_a_large_vit_bound_is_fine_while_pictures_stay_small():
    config = TrainConfig().replace(vit_max_image_size=1400)
    validate_config(config, 8, REAL)


def test_position_tables_of_a_small_checkpoint_bound_the_picture():
    small = dataclasses.replace(REAL, max_latent_size=8)
    assert "expected at most 128" in refusal(sizes=small)
    assert "table ends at 112" in refusal(
        sizes=dataclasses.replace(REAL, vit=dataclasses.replace(REAL.vit, image_size=112))
    )


def test_values_out_of_range_are_refused_even_in_hand_built_settings():
    config = TrainConfig()
    broken = dataclasses.replace(config, text=dataclasses.replace(config.text, top_p=0.0))
    with pytest.raises(ConfigError, match="--top_p 0.0: expected a number above 0 and at most 1"):
        validate_config(broken, 8, REAL)


@pytest.fixture
def run(tmp_path):
    """Settings of a run on a copy of the tiny checkpoint, and its folder."""
    model = tmp_path / "model"
    shutil.copytree(TINY, model)
    prompts = tmp_path / "prompts.jsonl"
    shutil.copyfile(TINY.parent / "prompts40.jsonl", prompts)
    config = TrainConfig().replace(
        model_path=str(model),
        train_data_path=str(prompts),
        val_data_path=str(prompts),
        log_dir=str(tmp_path / "output"),
        policy_group_size=2,
        **SMALL_IMAGES,
    )
    return config, model


def test_a_complete_run_passes_and_gives_the_sizes(run):
    sizes = validate_run(run[0], world_size=2)
    assert (sizes.llm.hidden_size, sizes.max_latent_size, sizes.vit.side) == (64, 8, 8)


@pytest.mark.parametrize(
    "names, words",
    [
        (["llm_config.json"], "llm_config.json is missing"),
        (["vit_config.json"], "vit_config.json is missing"),
        (["ae.safetensors"], "ae.safetensors is missing"),
        (["ema.safetensors"], "no weights, expected ema.safetensors or model.safetensors"),
        (["vocab.json"], "no tokenizer, expected vocab.json and merges.txt, or tokenizer.json"),
        (["merges.txt"], "no tokenizer"),
    ],
)
def test_missing_checkpoint_files_are_named(run, names, words):
    config, model = run
    for name in names:
        (model / name).unlink()
    with pytest.raises(ConfigError) as error:
        validate_run(config, world_size=2)
    assert words in str(error.value) and "--model_path" in str(error.value)


@pytest.mark.parametrize(
    "flags, words",
    [
        ({"model_path": ""}, "--model_path (MODEL_PATH) is required"),
        ({"model_path": "/no/such"}, "--model_path /no/such: no such folder"),
        ({"train_data_path": "/no/such.jsonl"}, "--train_data_path /no/such.jsonl: no such file"),
        ({"val_data_path": ""}, "--val_data_path : no such file"),
        ({"resume_from": "/no/such"}, "--resume_from /no/such: no such folder"),
        ({"exp_name": ""}, "--exp_name is empty"),
        ({"exp_name": "../elsewhere"}, "--exp_name '../elsewhere': expected the name of one"),
        ({"wandb_project": ".."}, "--wandb_project '..': expected the name of one"),
        ({"log_dir": "/dev/null/x"}, "/dev/null is no folder that can be written to"),
        ({"r3_source_tree": "/elsewhere"}, "--r3_source_tree /elsewhere: this trainer runs from"),
    ],
)
def test_missing_files_and_bad_folders_are_refused(run, flags, words):
    with pytest.raises(ConfigError) as error:
        validate_files(run[0].replace(**flags))
    assert words in str(error.value) and "\n" not in str(error.value)


def test_its_own_source_tree_is_accepted(run):
    validate_files(run[0].replace(r3_source_tree=str(SOURCE_TREE)))


def test_a_damaged_checkpoint_is_refused_by_its_header(run):
    config, model = run
    weights = model / "ema.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(ConfigError, match="truncated or damaged"):
        validate_run(config, world_size=2)


def test_a_config_that_is_no_json_is_refused(run):
    config, model = run
    (model / "llm_config.json").write_text("{")
    with pytest.raises(ConfigError, match="llm_config.json is not valid JSON"):
        validate_run(config, world_size=2)
    (model / "llm_config.json").write_text(json.dumps({"hidden_size": 0}))
    with pytest.raises(ConfigError, match="hidden_size is 0, expected a positive integer"):
        validate_run(config, world_size=2)


def rewrite(path, **changes):
    """Changes fields of a JSON file."""
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"num_hidden_layers": 3}, "layers.2."),
        ({"num_hidden_layers": 1}, "leaves out decoder layers [1]"),
        ({"intermediate_size": 175}, "has shape"),
        ({"vocab_size": 641}, "embed_tokens.weight has shape (640, 64), expected (641, 64)"),
    ],
)
def test_configuration_that_does_not_fit_the_weights_is_refused(run, changes, words):
    config, model = run
    rewrite(model / "llm_config.json", **changes)
    with pytest.raises(ConfigError) as error:
        validate_run(config, world_size=2)
    assert words in str(error.value) and "--model_path" in str(error.value)


def test_autoencoder_is_checked_by_its_header(run):
    config, model = run
    tensors = load_file(model / "ae.safetensors")
    del tensors["decoder.conv_out.bias"]
    save_file(tensors, model / "ae.safetensors")
    with pytest.raises(ConfigError, match=r"--model_path.*decoder.conv_out.bias"):
        validate_run(config, world_size=2)


@pytest.mark.parametrize("flag", ["train_data_path", "val_data_path"])
def test_bad_prompt_is_refused_before_weights_are_read(run, tmp_path, flag):
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"tag": "colors", "prompt": "a red cat"}\n')
    with pytest.raises(ConfigError, match=r"bad.jsonl, line 1: include is missing"):
        validate_run(run[0].replace(**{flag: str(bad)}), world_size=2)


def test_fewer_prompts_than_ranks_are_refused(run):
    with pytest.raises(ConfigError, match="40 prompts for 42 ranks"):
        validate_run(run[0].replace(num_shard=42), world_size=42)
