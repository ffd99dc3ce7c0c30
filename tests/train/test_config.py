"""The run's settings: names and defaults of the interface, parsing, recipe, record, replace."""

import dataclasses
import json
import re
from pathlib import Path

import pytest

from modeling.bagel.config import ImageSize
from modeling.bagel.guidance import GuidanceConfig
from modeling.bagel.sampling import SamplingConfig
from modeling.diffusion.sde_sampler import SdeConfig
from train.config import FLAGS, TrainConfig, from_flags, parse_args
from train.environment import redact
from train.flags import ConfigError

# Every variable of the launcher's interface that is a flag, with the default it must have.
INTERFACE = """
model_path= log_dir=./output train_data_path=data/rl_train/train_geneval.jsonl
dataset_name=geneval wandb_project=R3 wandb_name= resume_from= auto_resume=False exp_name=*
val_data_path=* nnodes=None node_rank=None nproc_per_node=None master_addr=localhost
master_port=None num_shard=8 reward_url=http://127.0.0.1:18085 reward_fn=geneval reward_api_key=
reward_model_name= format_reward_weight=1.0 total_steps=1000 save_every=50 eval_freq=50 lr=5e-06
warmup_steps=10 rounds=2 group_size=16 policy_group_size=4 ce_weight=1.0 mse_weight=2.0
kl_weight_text=0.001 kl_weight_image=0.001 tune_text_cot=True tune_image_cot=True freeze_vit=True
freeze_und=False think_mode=True max_output_token_n_gen=196 max_output_token_n_edit=384
text_temperature=0.9 top_k=50 top_p=0.9 num_timesteps_gen=16 num_timesteps_edit=21
eta_mode=monotonic constant_eta_gen=0.7 constant_eta_edit=1.0 cfg_text_scale=4.0
cfg_img_scale=1.5 cfg_renorm_type_gen=global cfg_renorm_type_edit=text_channel
enable_sde_gen=True enable_sde_edit=True global_seed=4396 data_seed=42 r3_recipe=upstream
r3_load_concurrency=8 r3_source_tree= r3_attention=auto r3_fused_decode=True
r3_fused_decode_streams=True r3_fuse_flow=True r3_fused_train_ops=True r3_fuse_train_split=True
r3_fused_swiglu_contract=True r3_execution=auto
"""


def test_every_variable_of_the_interface_is_a_flag_with_its_default():
    values = parse_args([], environ={}).to_flags()
    for pair in INTERFACE.split():
        name, _, default = pair.partition("=")
        assert name in values, name
        assert default in ("*", str(values[name])), name


def test_every_field_is_documented_once():
    helps = [entry.info.help for entry in FLAGS.values()]
    assert all(len(text) > 5 for text in helps)
    config = TrainConfig()
    groups = [getattr(config, group.name) for group in dataclasses.fields(config)]
    assert sum(len(dataclasses.fields(group)) for group in groups) == len(FLAGS)


def test_defaults_are_within_their_own_limits():
    assert from_flags(TrainConfig().to_flags()) == TrainConfig()


def test_values_land_in_their_groups():
    argv = "--lr 1e-4 --group_size 8 --tune_text_cot False --nnodes 2 --exp_name=a --exp_name b"
    config = parse_args(argv.split(), environ={})
    assert config.optimizer.lr == 1e-4 and config.rl.group_size == 8
    assert config.rl.tune_text_cot is False and config.processes.nnodes == 2
    assert config.paths.exp_name == "b"
    assert config.paths.run_dir == Path("output/R3/b")


@pytest.mark.parametrize(
    "argv, message",
    [
        (["--groupsize", "8"], "--groupsize is no flag, did you mean --group_size?"),
        (["--lr", "fast"], "--lr 'fast': expected a number"),
        (["--reward_fn", "clip"], "'clip': expected one of geneval, geneval_plus, tiif"),
        (["--rounds", "3"], "--rounds 3: expected an integer at least 2 and at most 2"),
        (["--tune_text_cot", "perhaps"], "--tune_text_cot 'perhaps': expected True or False"),
        (["--r3_recipe", "new"], "(--r3_recipe) is 'new', expected one of upstream, consistent"),
        (["--r3_fuse_flow", "7"], "(--r3_fuse_flow) is '7', expected 0 or 1"),
        (["--eta_mode", "none"], "--eta_mode 'none': expected one of monotonic, constant"),
    ],
)
def test_bad_flags_are_refused_in_one_line(argv, message):
    with pytest.raises(ConfigError) as error:
        parse_args(argv, environ={})
    assert message in str(error.value) and "\n" not in str(error.value)


def test_recipe_comes_from_the_environment_and_the_flag_wins():
    environ = {"R3_RECIPE": "consistent", "R3_FUSE_FLOW": "0", "OTHER": "x"}
    config = parse_args([], environ)
    assert config.switches.recipe == "consistent" and config.switches.fuse_flow is False
    config = parse_args(["--r3_recipe", "upstream"], environ)
    assert config.switches.recipe == "upstream" and config.switches.fuse_flow is False


def test_unknown_switch_in_the_environment_is_refused():
    with pytest.raises(ConfigError, match="R3_RECIPES is no switch"):
        parse_args([], {"R3_RECIPES": "upstream"})


def test_api_key_comes_from_the_environment_and_is_not_written():
    config = parse_args([], {"REWARD_API_KEY": "sk-very-secret"})
    assert config.rewards.reward_api_key == "sk-very-secret"
    assert "sk-very-secret" not in json.dumps(redact(config))


def test_the_record_holds_every_setting():
    written = redact(parse_args(["--lr", "0.25"], {}))
    assert written["optimizer"]["lr"] == 0.25 and written["switches"]["recipe"] == "upstream"
    assert sum(len(group) for group in written.values()) == len(FLAGS)


def test_replace_changes_only_what_is_named():
    config = TrainConfig().replace(lr=0.0, r3_recipe="consistent", nnodes=2)
    assert config.optimizer.lr == 0.0 and config.switches.recipe == "consistent"
    assert config.replace(lr=5e-6, r3_recipe="upstream", nnodes=None) == TrainConfig()
    with pytest.raises(ConfigError, match="--learning_rate is no flag"):
        config.replace(learning_rate=1.0)
    with pytest.raises(ConfigError, match="--top_p 2.0: expected a number"):
        config.replace(top_p=2.0)


def test_typed_settings_of_the_model():
    config = TrainConfig()
    assert config.sampling_gen == config.sampling_edit == SamplingConfig(True, 0.9, 50, 0.9)
    assert config.sampling_eval == SamplingConfig(True, 0.3, 50, 0.9)
    assert config.guidance_gen == GuidanceConfig(4.0, 1.0, (0.4, 1.0), "global", 0.0)
    assert config.guidance_edit == GuidanceConfig(4.0, 1.5, (0.4, 1.0), "text_channel", 0.0)
    assert config.sde_gen == SdeConfig(0.7, "monotonic")
    assert config.sde_edit == SdeConfig(1.0, "monotonic")
    assert config.samples_per_rank == 4


def test_image_transforms_follow_the_settings():
    images = TrainConfig().images
    drawn = ImageSize(512, 512)
    assert images.vae_transform.target_size(drawn) == drawn
    assert images.vit_transform(14).target_size(drawn) == ImageSize(504, 504)


def test_precision_follows_the_device_unless_set():
    processes = TrainConfig().processes
    assert (processes.precision_on("cuda"), processes.precision_on("cpu")) == ("bf16", "fp32")
    assert TrainConfig().replace(precision="fp32").processes.precision_on("cuda") == "fp32"


def test_names_and_urls():
    config = TrainConfig().replace(reward_url="http://a:1, http://b:2,", exp_name="run")
    assert config.rewards.client_config().urls == ("http://a:1", "http://b:2")
    assert config.wandb_name == "run" and config.replace(wandb_name="w").wandb_name == "w"


def test_help_lists_every_flag(capsys):
    with pytest.raises(SystemExit):
        parse_args(["--help"], environ={})
    shown = set(re.findall(r"--([a-z0-9_]+) VALUE", capsys.readouterr().out))
    assert shown == set(FLAGS)
