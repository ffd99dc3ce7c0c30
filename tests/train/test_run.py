"""The run loop in a world of one: what is saved when an evaluation or a step breaks off."""

import logging
import os
import signal

import pytest

from tests.tiny import one_rank
from tests.train.evaluation_world import tiny_config
from tests.train.reward_stub import always, good, running
from train import run as run_module
from train.run import Run
from train.trainer import StepError


@pytest.fixture(scope="module")
def context():
    with one_rank() as alone:
        yield alone


@pytest.fixture
def start(context, tmp_path):
    """Makes runs that share a folder, against a service at `url`."""
    runs = []

    def start(url: str, **flags: object) -> Run:
        config = tiny_config(
            num_shard=1, log_dir=str(tmp_path), exp_name="e", auto_resume=True, reward_url=url,
            reward_step_deadline_s=5.0, eval_freq=0, total_steps=2, save_every=0, eval_prompts=1,
            num_timesteps_gen=3, num_timesteps_edit=3, rollout_vis_step=0,
        )  # fmt: skip
        runs.append(Run(config.replace(**flags), context, "disabled"))
        return runs[-1]

    yield start
    for run in runs:
        run.close()


def checkpoints(run: Run) -> list[str]:
    return sorted(path.name for path in (run.run_dir / "checkpoints").glob("step_*"))


def test_an_outage_in_an_evaluation_saves_what_it_began_with(start):
    with running(always(404, b"no")) as stub:
        run = start(stub.url, eval_freq=1)
        with pytest.raises(StepError, match="no evaluation at step 0: rank 0: .*HTTP 404"):
            run.train()
        assert checkpoints(run) == ["step_000000"]
        assert start(stub.url).start_step == 0


def test_a_disk_that_fails_does_not_hide_the_outage(start, monkeypatch, caplog):
    def fail(*_: object) -> None:
        raise RuntimeError("saving failed on rank 0: No space left on device")

    monkeypatch.setattr(run_module, "save_checkpoint", fail)
    with running(always(404, b"no")) as stub:
        run = start(stub.url)
        with pytest.raises(StepError, match="no rewards for this step: .*HTTP 404"):
            run.train()
    assert "no checkpoint could be written" in caplog.text and "No space left" in caplog.text


def test_a_step_that_has_just_been_saved_is_not_saved_again(start, caplog):
    def behave(handler, number):
        handler.answer(404, b"no") if number >= 2 else good(handler, number)

    with running(behave) as stub, caplog.at_level(logging.INFO, "faster_r3"):
        run = start(stub.url, save_every=1)
        with pytest.raises(StepError):
            run.train()
    assert checkpoints(run) == ["step_000001"]
    assert caplog.text.count("saved ") == 1 and "replacing" not in caplog.text


def test_sigterm_is_noted_while_a_run_trains_and_not_after(start):
    before = signal.getsignal(signal.SIGTERM)

    def behave(handler, number):
        if number == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        good(handler, number)

    with running(behave) as stub:
        run = start(stub.url, total_steps=9)
        run.train()
        assert checkpoints(run) == ["step_000001"]
        run.close()
    assert signal.getsignal(signal.SIGTERM) is before
