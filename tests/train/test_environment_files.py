"""config.json and environment.json: complete, valid and without secrets."""

import enum
import json
import math
import os
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from train.environment import (
    collect_environment,
    redact,
    redact_command_line,
    source_state,
    write_run_files,
)
from train.files import json_ready, write_text_atomic

SECRET = "sk-verysecret-0123"


@dataclass(frozen=True)
class RewardPart:
    reward_api_key: str = SECRET
    reward_url: tuple[str, ...] = (f"http://user:{SECRET}@host:1/v1", f"http://h/?api_key={SECRET}")
    max_output_token_n_gen: int = 196


@dataclass(frozen=True)
class Config:
    reward: RewardPart = field(default_factory=RewardPart)
    log_dir: Path = Path("output")
    kl_limit: float = math.inf


def test_secrets_are_in_neither_file(tmp_path, monkeypatch):
    monkeypatch.setenv("SOME_HOST_VARIABLE", "host-only-value")
    argv = ["train/online_rl.py", "--reward_api_key", SECRET, f"--reward_url=http://h/{SECRET}"]
    write_run_files(tmp_path, Config(), {"R3_FUSE_FLOW": True}, argv)
    text = "".join(path.read_text(encoding="utf-8") for path in tmp_path.iterdir())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "environment.json"]
    assert SECRET not in text and "host-only-value" not in text
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    assert config == {
        "reward": {
            "reward_api_key": "<redacted>",
            "reward_url": ["http://<redacted>@host:1/v1", "http://h/?api_key=<redacted>"],
            "max_output_token_n_gen": 196,
        },
        "log_dir": "output",
        "kl_limit": None,
    }
    environment = json.loads((tmp_path / "environment.json").read_text(encoding="utf-8"))
    assert environment["switches"] == {"R3_FUSE_FLOW": True}
    assert environment["command_line"][1:] == [
        "--reward_api_key", "<redacted>", "--reward_url=http://h/<redacted>",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "is_secret"),
    [
        ("reward_api_key", True), ("REWARD_API_KEY", True), ("apikey", True), ("password", True),
        ("hf_access_token", True), ("client_secret", True), ("max_output_token_n_gen", False),
        ("tokens", False), ("top_k", False), ("wandb_project", False),
    ],
)  # fmt: skip
def test_secrets_are_known_by_name(name, is_secret):
    shown = "<redacted>" if is_secret else "value"
    assert redact({"a": [{name: "value"}]}) == {"a": [{name: shown}]}
    assert redact({name: ""}) == {name: ""}
    assert redact_command_line([f"--{name}=value", f"--{name}", "value"]) == [
        f"--{name}={shown}", f"--{name}", shown,
    ]  # fmt: skip


def test_command_line_of_harmless_flags_is_kept():
    argv = ["x.py", "--reward-api-key", "abc", "--lr", "5e-6", "--top_p=0.9", "http://h/?tag=a&n=1"]
    assert redact_command_line(argv) == [*argv[:2], "<redacted>", *argv[3:]]
    # Short secrets are hidden by name only: cutting every "a" would leave nothing to read.
    assert redact_command_line(["--exp_name", "banana"], {"reward_api_key": "a"})[1] == "banana"


def test_environment_states_versions_and_source():
    environment = collect_environment({}, {}, [])
    assert environment["packages"]["torch"] and environment["packages"]["transformers"]
    assert environment["host_cpus"] == os.cpu_count()
    assert set(environment) == {
        "python", "platform", "packages", "cuda", "driver", "gpus", "host_cpus", "source",
        "switches", "command_line",
    }  # fmt: skip
    json.dumps(environment, allow_nan=False)


def test_source_state_follows_the_repository(tmp_path):
    nothing = {"commit": None, "has_changes": None}
    assert source_state(tmp_path / "missing") == nothing

    def git(*arguments):
        identity = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
        subprocess.run(["git", "-C", str(tmp_path), *identity, *arguments], check=True)

    git("init", "-q")
    (tmp_path / "file").write_text("1")
    git("add", "file")
    git("commit", "-q", "-m", "first")
    state = source_state(tmp_path)
    assert len(state["commit"]) == 40 and state["has_changes"] is False
    (tmp_path / "file").write_text("2")
    assert source_state(tmp_path) == {"commit": state["commit"], "has_changes": True}
    # A folder inside another project is not that project.
    (tmp_path / "inner").mkdir()
    assert source_state(tmp_path / "inner") == nothing


def test_source_state_without_git(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert source_state() == {"commit": None, "has_changes": None}


def test_json_ready_takes_everything():
    class Colour(enum.Enum):
        RED = "red"

    value = {1: (Colour.RED, {"b", "a"}), "x": [math.nan, -math.inf, True, None], "y": object}
    assert json_ready(value) == {
        "1": ["red", ["a", "b"]], "x": [None, None, True, None], "y": "<class 'object'>",
    }  # fmt: skip


def test_failed_write_keeps_the_old_file(tmp_path):
    path = tmp_path / "deep" / "a.txt"
    write_text_atomic(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_text_atomic(path, "new \ud800")
    assert path.read_text() == "old" and list(path.parent.iterdir()) == [path]
