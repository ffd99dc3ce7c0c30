"""Two ranks that run real steps on the tiny checkpoint against reward services that misbehave."""

import os
import pickle
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.multiprocessing as mp

from tests.train.evaluation_world import tiny_config
from tests.train.reward_stub import ANSWER, GOOD, PACE, Stub, always, config_for, free_port
from train import reward_rounds
from train.assembly import assemble
from train.dist import LaunchInfo, start_processes, stop_processes
from train.metrics import PhaseTimer
from train.records import Rollout
from train.rewards import make_reward_client
from train.step_metrics import step_metrics
from train.trainer import StepError, Trainer

DEADLINE_S = 2.0
DOWN_S = 1.0
HTML = b"<html>Nothing here</html>"
TRACEBACK = b"Traceback (most recent call last):\n  File x\nKeyError: 'tag'"


class Runs:
    """Unpickled by pickle itself, it makes a folder."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> tuple:
        return os.mkdir, (str(self.path),)


@dataclass(frozen=True)
class Case:
    """A service's behaviour, the ranks that meet it, and the outage policy."""

    service: str
    policy: str
    ranks: tuple[int, ...] = (0, 1)
    step: int = 0


def answer(**changes: object) -> bytes:
    return pickle.dumps({**ANSWER, **changes})


def good(handler, number: int) -> None:
    """Scores that differ from picture to picture."""
    handler.answer(200, answer(scores=[0.25 * (number % 4)]))


def reset_first(handler, number: int) -> None:
    if number:
        return good(handler, number)
    handler.answer(200, GOOD[:30], length=len(GOOD))
    handler.wfile.flush()
    return handler.reset()


def hang(handler, number: int) -> None:
    handler.server.released.wait(300)


def behaviour(service: str, forbidden: Path) -> Callable:
    """What a stub of this name does; `forbidden` is made by the pickle that runs code."""
    return {
        "good": good,
        "404": always(404, HTML),
        "502": always(502, HTML),
        "500": always(500, TRACEBACK),
        "truncated": always(200, GOOD[:-20]),
        "malicious": always(200, answer(scores=[Runs(forbidden)])),
        "one_short": always(200, answer(scores=[])),
        "nan": always(200, answer(scores=[float("nan")])),
        "hang": hang,
        "reset": reset_first,
    }[service]


class Service:
    """This rank's service: its addresses, and what happens once pictures have been sent to it."""

    def __init__(self, name: str, forbidden: Path):
        self.stubs: list[Stub] = []
        self.timer: threading.Timer | None = None
        if name == "slow_start":
            port = free_port()
            self.timer = threading.Timer(DOWN_S, self._start, args=(port,))
            self.urls = [f"http://127.0.0.1:{port}"]
            return
        behaviours = [good, always(502, b"dying")] if name == "one_of_two_dies" else []
        self.stubs += [Stub(each) for each in behaviours or [behaviour(name, forbidden)]]
        self.urls = [stub.url for stub in self.stubs]

    def begin(self) -> None:
        if self.timer is not None:
            self.timer.start()

    def stop(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
        for stub in self.stubs:
            stub.stop()

    def _start(self, port: int) -> None:
        self.stubs.append(Stub(good, port=port))


class WatchedTrainer(Trainer):
    """Tells the service when its pictures are on their way."""

    service: Service

    def submit_rewards(self, rollout: Rollout) -> list:
        futures = super().submit_rewards(rollout)
        self.service.begin()
        return futures


def run_cases(cases: dict[str, Case], out: Path) -> list[dict[str, dict]]:
    """Runs a step for each case in one world of two; what each rank saw, by case."""
    mp.spawn(_run_rank, args=(free_port(), cases, out), nprocs=2)
    return [torch.load(out / f"rank{rank}.pt", weights_only=False) for rank in range(2)]


def _run_rank(rank: int, port: int, cases: dict[str, Case], out: Path) -> None:
    torch.set_num_threads(1)
    reward_rounds.WaitPace = lambda: PACE  # seconds of a real outage are too many for a test
    config = tiny_config(
        master_port=port, num_shard=2, process_group_timeout_s=60.0,
        group_size=4, policy_group_size=2, num_timesteps_gen=4, num_timesteps_edit=4,
        r3_recipe="consistent",
    )  # fmt: skip
    context = start_processes(config.processes, 2, LaunchInfo(rank, 2, rank, 2))
    parts = assemble(config, context, None, PhaseTimer())
    trainer = WatchedTrainer(parts, context)
    seen = {}
    for name, case in cases.items():
        trainer.config = config.replace(
            reward_outage=case.policy, reward_step_deadline_s=DEADLINE_S
        )
        service = Service(case.service if rank in case.ranks else "good", out / "forbidden")
        changes = {"request_timeout_s": 1.0, "step_deadline_s": DEADLINE_S}
        parts.rewards = make_reward_client(config_for(*service.urls, **changes), rank)
        trainer.service = service
        seen[name] = _run_step(trainer, case.step)
        parts.rewards.close()
        service.stop()
    torch.save(seen, out / f"rank{rank}.pt")
    stop_processes()


def _run_step(trainer: Trainer, step: int) -> dict:
    start = time.monotonic()
    try:
        report = trainer.run_step(step)
    except StepError as error:
        return {
            "error": str(error),
            "waited_s": trainer.timer.metrics()["time/rewards"],
            "grads": any(p.grad is not None for p in trainer.policy.parameters()),
        }
    buffer = trainer.parts.buffer
    return {
        "error": None,
        "waited_s": report.phase_seconds["time/rewards"],
        "stage": report.rollout.stage.value,
        "failed": [reward.error is not None for reward in report.rewards],
        "causes": [reward.error or "" for reward in report.rewards],
        "scores": [reward.score for reward in report.rewards],
        "image": report.advantages.image.tolist(),
        "text": report.advantages.text.tolist(),
        "num_labels": report.packed.label_ids.numel(),
        "num_images": report.rollout.flow.before.shape[0],
        "loss": report.loss.loss.item(),
        "buffer": [entry.score for entry in (*buffer.perfect, *buffer.rest)],
        "metrics": step_metrics(report, trainer.context),
        "seconds": time.monotonic() - start,
    }
