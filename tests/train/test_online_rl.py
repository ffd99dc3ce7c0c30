"""The entry of a rank: a failure that only this rank knows of ends with a line that names it."""

from pathlib import Path

import pytest

from train import online_rl

PARITY = Path(__file__).resolve().parents[1] / "parity"
FLAGS = {
    "model_path": PARITY / "tiny_bagel",
    "train_data_path": PARITY / "prompts40.jsonl",
    "val_data_path": PARITY / "prompts40.jsonl",
    "device": "cpu",
    "num_shard": 1,
    "policy_group_size": 1,
    "image_size": 64,
    "vae_max_image_size": 64,
    "vae_min_image_size": 32,
    "vit_max_image_size": 112,
    "vit_min_image_size": 56,
}


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Runs the entry around another `_train`."""
    monkeypatch.setattr(online_rl, "_set_up_logging", lambda *_: None)  # it changes the logger

    def run(train) -> int:
        monkeypatch.setattr(online_rl, "_train", train)
        flags = {**FLAGS, "log_dir": tmp_path}
        return online_rl.main([f"--{name}={value}" for name, value in flags.items()])

    return run


def test_a_failure_of_one_rank_is_the_last_line(run, capsys):
    def fail(*_):
        raise MemoryError("no room for logits")

    assert run(fail) == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1] == "error: rank 0: MemoryError: no room for logits"
    assert "Traceback (most recent call last):" in lines


def test_the_status_of_a_run_is_passed_on(run, capsys):
    assert run(lambda *_: 0) == 0 and run(lambda *_: 1) == 1
    assert "error" not in capsys.readouterr().err
