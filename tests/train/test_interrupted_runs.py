"""Runs through the real launcher that break off: an outage, a SIGTERM, and going on bit for bit."""

import json
import os
import pickle
import subprocess
import sys
import time
import zlib
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.scripts.script_tree import SCRIPTS, write_program
from tests.train.reward_stub import ANSWER, Stub, free_port

PARITY = Path(__file__).resolve().parents[1] / "parity"
NUM_STEPS = 4
PICTURES = 4  # a step, on both ranks
FLAGS = {
    "device": "cpu",
    "image_size": "64",
    "vae_max_image_size": "64",
    "vae_min_image_size": "32",
    "vit_max_image_size": "112",
    "vit_min_image_size": "56",
    "rollout_vis_step": "0",
    "reward_request_timeout_s": "1",
    "reward_step_deadline_s": "2",
}
SETTINGS = {
    "MODEL_PATH": str(PARITY / "tiny_bagel"),
    "TRAIN_DATA_PATH": str(PARITY / "prompts40.jsonl"),
    "VAL_DATA_PATH": str(PARITY / "prompts40.jsonl"),
    "NPROC_PER_NODE": "2",
    "POLICY_GROUP_SIZE": "2",
    "GROUP_SIZE": str(PICTURES),
    "TOTAL_STEPS": str(NUM_STEPS),
    "EVAL_FREQ": "0",
    "LR": "1e-3",
    "WARMUP_STEPS": "1",
    "R3_RECIPE": "consistent",
    "NUM_TIMESTEPS_GEN": "4",
    "NUM_TIMESTEPS_EDIT": "4",
    "MAX_OUTPUT_TOKEN_N_GEN": "16",
    "MAX_OUTPUT_TOKEN_N_EDIT": "16",
    "AUTO_RESUME": "True",
    "WANDB_MODE": "disabled",
    "OMP_NUM_THREADS": "1",
}


@dataclass(frozen=True)
class Launch:
    """What came of one start of the launcher."""

    status: int
    lines: list[str]
    checkpoints: list[str]
    rows: list[dict]


class Runs:
    """Starts the launcher against one service, which can die or send a SIGTERM at a picture."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.stub = Stub(self._behave)
        self.process: subprocess.Popen | None = None
        self.dies_at = self.stops_at = sys.maxsize
        self.torchrun = write_program(
            folder / "torchrun",
            f'#!/usr/bin/env bash\nexec "{sys.executable}" -m torch.distributed.run "$@"\n',
        )

    def start(
        self, name: str, dies_at: int = sys.maxsize, stops_at: int = sys.maxsize
    ) -> Launch:
        """One start; `dies_at` and `stops_at` count pictures since it."""
        before = len(self.stub.posts)
        self.dies_at, self.stops_at = before + dies_at, before + stops_at
        environ = {
            **SETTINGS,
            "PATH": os.environ["PATH"],
            "HOME": str(self.folder),
            "LOG_DIR": str(self.folder),
            "EXP_NAME": name,
            "TORCHRUN": str(self.torchrun),
            "MASTER_PORT": str(free_port()),
            "REWARD_URL": self.stub.url,
        }
        flags = [f"--{name}={value}" for name, value in FLAGS.items()]
        self.process = subprocess.Popen(
            ["bash", str(SCRIPTS / "train_faster_r3_geneval.sh"), *flags],
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        output, _ = self.process.communicate(timeout=120)
        run = self.folder / "R3" / name
        checkpoints = sorted(path.name for path in (run / "checkpoints").glob("step_*"))
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        return Launch(self.process.returncode, output.splitlines(), checkpoints, rows)

    def _behave(self, handler, number: int) -> None:
        if number >= self.dies_at:
            return handler.reset()
        if number == self.stops_at:
            self.process.terminate()
            time.sleep(0.3)  # the step is still at work when the signal arrives
        jpeg = pickle.loads(handler.server.posts[number][2])["images"][0]
        score = zlib.crc32(jpeg) / 2**32  # told apart by a single bit
        return handler.answer(200, pickle.dumps({**ANSWER, "scores": [score]}))


@pytest.fixture(scope="module")
def launches(tmp_path_factory):
    """An undisturbed run, and one that breaks off in steps 1 and 2 and is taken up again twice."""
    runs = Runs(tmp_path_factory.mktemp("runs"))
    found = {
        "whole": runs.start("whole"),
        "outage": runs.start("broken", dies_at=PICTURES),
        "sigterm": runs.start("broken", stops_at=PICTURES),
        "rest": runs.start("broken"),
    }
    runs.stub.stop()
    return found


def numbers(row: dict) -> dict:
    """The part of a metrics row that must not depend on the machine or the clock."""
    changing = ("time/", "memory/", "reward_service/", "timestamp")
    return {name: value for name, value in row.items() if not name.startswith(changing)}


def test_an_undisturbed_run_finishes(launches):
    whole = launches["whole"]
    assert whole.status == 0, "\n".join(whole.lines[-20:])
    assert [row["stage"] for row in whole.rows] == ["generate", "refine"] * 2
    assert whole.checkpoints == ["step_000004"]
    assert not [line for line in whole.lines if "error" in line.lower()]


def test_an_outage_saves_the_step_and_ends_with_its_error(launches):
    outage = launches["outage"]
    assert outage.status == 1 and outage.checkpoints == ["step_000001"]
    assert [row["step"] for row in outage.rows] == [0]
    last = outage.lines[-1]
    assert last.startswith("error: no rewards for this step: rank 0: RewardOutageError: ")
    assert "rewards did not come within 2 s; last error: " in last
    assert any("step 1 was given up; a checkpoint starts with it" in line for line in outage.lines)


def test_a_sigterm_saves_after_the_step_and_is_no_failure(launches):
    stopped = launches["sigterm"]
    assert stopped.status == 0, "\n".join(stopped.lines[-20:])
    assert stopped.checkpoints == ["step_000001", "step_000003"]
    assert [row["step"] for row in stopped.rows] == [0, 1, 2]
    assert any("SIGTERM: stopped after step 2" in line for line in stopped.lines)


def test_a_run_that_was_taken_up_twice_equals_an_undisturbed_one(launches):
    rest, whole = launches["rest"], launches["whole"]
    assert rest.status == 0, "\n".join(rest.lines[-20:])
    assert rest.checkpoints[-1] == "step_000004"
    assert [row["step"] for row in rest.rows] == list(range(NUM_STEPS))
    for broken, straight in zip(rest.rows, whole.rows, strict=True):
        assert numbers(broken) == numbers(straight)
    changing = {"loss/total", "optim/grad_norm", "reward/mean"}
    for name in changing:
        assert len({row[name] for row in whole.rows}) == NUM_STEPS, name
