"""metrics.jsonl, wandb and the measured numbers."""

import json
import logging
import math
import sys
import types

import numpy as np
import pytest
import torch

from train.metrics import (
    MetricsLogger,
    PhaseTimer,
    drift_statistics,
    peak_memory_gib,
    percentile,
    ratio_metrics,
    read_metrics,
    reward_metrics,
    reward_service_metrics,
)
from train.wandb_sink import WandbSettings

DISABLED = WandbSettings(project="R3", mode="disabled")


class FakeRun:
    def __init__(self, fail_on=()):
        self.id = "run7"
        self.fail_on = fail_on
        self.logged = []
        self.finished = False

    def define_metric(self, name, step_metric=None):
        pass

    def log(self, values):
        if "log" in self.fail_on:
            raise RuntimeError("disk full")
        self.logged.append(values)

    def finish(self):
        self.finished = True


@pytest.fixture
def fake_wandb(monkeypatch):
    module = types.ModuleType("wandb")
    module.run = FakeRun()
    module.calls = []

    def init(**arguments):
        module.calls.append(arguments)
        return module.run

    module.init = init
    module.Settings = lambda **arguments: arguments
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


def lines(run_dir):
    text = (run_dir / "metrics.jsonl").read_text(encoding="utf-8")
    return [json.loads(line, parse_constant=pytest.fail) for line in text.splitlines()]


def test_one_flushed_object_a_step(tmp_path):
    log = MetricsLogger(tmp_path / "run", True, DISABLED, {})
    log.log_step(0, {"stage": "generate", "loss/total": -0.5, "tokens/text": 12})
    assert lines(tmp_path / "run") == [
        {"step": 0, "stage": "generate", "loss/total": -0.5, "tokens/text": 12}
    ]
    log.log_step(1, {"loss/total": torch.tensor(0.25), "optim/lr": np.float32(0.5)})
    log.close()
    log.close()
    assert lines(tmp_path / "run")[1] == {"step": 1, "loss/total": 0.25, "optim/lr": 0.5}


def test_other_ranks_write_nothing(tmp_path, fake_wandb):
    log = MetricsLogger(tmp_path / "run", False, WandbSettings(project="R3"), {})
    log.log_step(0, {"loss/total": 1.0})
    log.close()
    assert not (tmp_path / "run").exists() and fake_wandb.calls == []


def test_non_finite_numbers_become_null_with_one_warning(tmp_path, caplog, fake_wandb):
    log = MetricsLogger(tmp_path, True, WandbSettings(project="R3"), {})
    with caplog.at_level(logging.WARNING, "faster_r3"):
        for step in range(3):
            values = {"a": math.nan, "b": torch.tensor(math.inf), "c": 1.0, "d": None}
            log.log_step(step, {**values, "e": np.float64("-inf")})
    log.close()
    row = {"step": 2, "a": None, "b": None, "c": 1.0, "d": None, "e": None}
    assert lines(tmp_path)[2] == row
    assert fake_wandb.run.logged[2] == {"step": 2, "c": 1.0}
    assert len(caplog.records) == 1
    assert "a, b, e" in caplog.text and "step 0" in caplog.text


def test_values_that_are_no_numbers_are_refused(tmp_path):
    log = MetricsLogger(tmp_path, True, DISABLED, {})
    for value in ([1.0], torch.zeros(2), object()):
        with pytest.raises(ValueError, match="loss/total"):
            log.log_step(0, {"loss/total": value})
    log.log_step(0, {"loss/total": 1.0})
    with pytest.raises(ValueError, match="step 0 come after step 0"):
        log.log_step(0, {"loss/total": 1.0})
    log.close()
    assert len(lines(tmp_path)) == 1


def test_resume_appends_and_drops_steps_done_again(tmp_path, caplog):
    log = MetricsLogger(tmp_path, True, DISABLED, {})
    for step in range(6):
        log.log_step(step, {"x": 0.1 + step})
    log.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "x"')  # killed while writing
    with caplog.at_level(logging.WARNING, "faster_r3"):
        log = MetricsLogger(tmp_path, True, DISABLED, {}, start_step=4)
    assert "metrics.jsonl:7" in caplog.text
    with pytest.raises(ValueError, match="step 3"):
        log.log_step(3, {})
    log.log_step(4, {"x": 100.0})
    log.close()
    assert [(row["step"], row["x"]) for row in read_metrics(tmp_path)] == [
        (0, 0.1), (1, 1.1), (2, 2.1), (3, 3.1), (4, 100.0),
    ]  # fmt: skip
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_read_metrics_of_a_new_run_is_empty(tmp_path):
    assert read_metrics(tmp_path) == []


def test_wandb_gets_the_config_without_secrets_and_resumes_its_run(tmp_path, fake_wandb):
    config = {"reward_api_key": "sk-123456", "lr": 5e-6}
    for start_step in (0, 3):
        settings = WandbSettings(project="R3", name="mine")
        log = MetricsLogger(tmp_path, True, settings, config, start_step)
        log.log_step(start_step, {"stage": "generate", "loss/total": 1.0})
        log.close()
    first, second = fake_wandb.calls
    assert first["project"] == "R3" and first["name"] == "mine" and first["mode"] == "offline"
    assert first["config"] == {"reward_api_key": "<redacted>", "lr": 5e-6}
    assert first["settings"]["x_disable_meta"] is True
    assert (first["id"], second["id"]) == (None, "run7")
    assert fake_wandb.run.logged[0] == {"step": 0, "stage": "generate", "loss/total": 1.0}
    assert fake_wandb.run.finished


def test_wandb_that_cannot_be_imported_only_warns(tmp_path, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with caplog.at_level(logging.WARNING, "faster_r3"):
        log = MetricsLogger(tmp_path, True, WandbSettings(project="R3"), {})
        log.log_step(0, {"x": 1})
        log.close()
    assert lines(tmp_path) == [{"step": 0, "x": 1}]
    assert len(caplog.records) == 1 and "failed to start" in caplog.text


def test_wandb_that_fails_later_warns_once(tmp_path, fake_wandb, caplog):
    fake_wandb.run = FakeRun(fail_on=("log",))
    log = MetricsLogger(tmp_path, True, WandbSettings(project="R3"), {})
    with caplog.at_level(logging.WARNING, "faster_r3"):
        for step in range(3):
            log.log_step(step, {"x": step})
        log.close()
    assert len(lines(tmp_path)) == 3
    assert len(caplog.records) == 1 and "disk full" in caplog.text


def test_wandb_modes(tmp_path, fake_wandb):
    MetricsLogger(tmp_path, True, DISABLED, {}).close()
    assert fake_wandb.calls == []
    with pytest.raises(ValueError, match="WANDB_MODE is 'of'; allowed: offline, online, disabled"):
        WandbSettings(project="R3", mode="of")


def test_phase_timer_adds_up_and_nests(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("train.metrics.time.perf_counter", lambda: now[0])
    seen = []
    timer = PhaseTimer(on_enter=seen.append)
    for _ in range(2):
        with timer.phase("rollout"):
            now[0] += 1
            with timer.phase("decode"):
                now[0] += 2
    with pytest.raises(KeyError), timer.phase("pack"):
        now[0] += 4
        raise KeyError
    assert timer.seconds() == {"rollout": 6.0, "rollout/decode": 4.0, "pack": 4.0}
    assert list(timer.metrics()) == ["time/rollout", "time/rollout/decode", "time/pack"]
    assert seen == ["rollout", "rollout/decode"] * 2 + ["pack"]
    timer.reset()
    assert timer.seconds() == {}
    with timer.phase("pack"):
        now[0] += 1
    assert timer.seconds() == {"pack": 1.0}


class FakeEvent:
    """A CUDA event on a stream that lags behind the host, and is waited for in the end."""

    recorded: list["FakeEvent"] = []
    waited = False

    def __init__(self, enable_timing: bool):
        assert enable_timing

    def record(self) -> None:
        self.milliseconds = 100.0 * len(self.recorded)
        self.recorded.append(self)

    def synchronize(self) -> None:
        FakeEvent.waited = True

    def elapsed_time(self, end: "FakeEvent") -> float:
        assert self.waited
        return end.milliseconds - self.milliseconds


def test_phase_timer_on_a_gpu_waits_only_when_asked_for_seconds(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    timer = PhaseTimer(on_device=True)
    for _ in range(2):
        with timer.phase("rollout"), timer.phase("decode"):
            pass
    assert not FakeEvent.waited
    assert timer.seconds() == pytest.approx({"rollout": 0.6, "rollout/decode": 0.2})
    assert timer.seconds() == timer.seconds()
    timer.reset()
    assert timer.seconds() == {}


def test_percentile_agrees_with_numpy():
    values = torch.randn(1001, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for percent in (0, 1, 37.5, 50, 99, 100):
        expected = np.percentile(values.numpy(), percent)
        assert percentile(values.view(7, 143), percent) == pytest.approx(expected, rel=1e-12)
    assert percentile([3.0, 1.0], 50) == 2.0 and percentile([5], 99) == 5.0
    assert percentile([1.0, math.inf], 100) == math.inf == percentile([math.inf] * 3, 50)
    assert math.isnan(percentile([], 50)) and math.isnan(percentile([1.0, math.nan], 50))
    with pytest.raises(ValueError, match="101"):
        percentile([1.0], 101)


def test_drift_statistics():
    log_ratio = torch.zeros(2, 50)
    log_ratio[0, 0], log_ratio[1, 7] = -0.5, 0.25
    mean, p99 = drift_statistics(log_ratio)
    assert mean == pytest.approx(0.0075)
    assert p99 == pytest.approx(np.percentile(log_ratio.double().abs().numpy(), 99))
    assert all(math.isnan(value) for value in drift_statistics(torch.empty(0)))


def test_ratio_metrics():
    metrics = ratio_metrics("text", torch.tensor([0.5, 2.0]).log())
    assert metrics["ratio/text_mean"] == pytest.approx(1.25)
    assert metrics["ratio/text_min"] == pytest.approx(0.5)
    assert metrics["ratio/text_max"] == pytest.approx(2.0)
    assert metrics["drift/text_mean"] == pytest.approx(math.log(2), rel=1e-6)
    assert set(metrics) - {f"ratio/text_{k}" for k in ("mean", "min", "max")} == {
        "drift/text_mean",
        "drift/text_p99",
    }
    assert ratio_metrics("image", torch.empty(0)) == {}


def test_reward_metrics_leave_failed_samples_out():
    tags = ["colors", "counting", "colors", "position"]
    metrics = reward_metrics([1.0, 0.25, 0.5, math.nan], [1, 1, 0, 0], tags)
    assert metrics == {
        "reward/mean": pytest.approx(1.75 / 3),
        "reward/format": 0.5,
        "reward/tag/colors": 0.75,
        "reward/tag/counting": 0.25,
    }
    assert reward_metrics([], [], []) == {}
    with pytest.raises(ValueError, match="1, 0, 1"):
        reward_metrics([1.0], [], ["colors"])


def test_reward_service_metrics():
    assert reward_service_metrics([0.1, 0.3, 0.2], 2, 1) == {
        "reward_service/latency_p50_s": pytest.approx(0.2),
        "reward_service/latency_p99_s": pytest.approx(0.298),
        "reward_service/retries": 2,
        "reward_service/failures": 1,
    }
    assert reward_service_metrics([], 0, 3)["reward_service/failures"] == 3


def test_peak_memory_of_a_cpu_run_is_that_of_the_process():
    assert 0.01 < peak_memory_gib(torch.device("cpu")) < 1024
