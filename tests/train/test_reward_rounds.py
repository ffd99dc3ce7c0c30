"""Rounds of waiting for rewards: alone, and on two ranks whose collectives must not time out."""

import json
import logging
import threading
import time
from multiprocessing.synchronize import Barrier
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp

from tests.tiny import one_rank
from tests.train.reward_stub import (
    META,
    PACE,
    PICTURE,
    Stub,
    always,
    config_for,
    free_port,
    good,
    running,
)
from train.dist import LaunchInfo, ProcessContext, start_processes, stop_processes
from train.reward_results import RewardResult
from train.reward_rounds import await_rewards, never
from train.rewards import RewardClient, RewardOutageError
from train.settings import ProcessConfig, RewardSettings

GROUP_TIMEOUT_S = 3.0
DOWN_S = 4.5


@pytest.fixture(scope="module")
def alone():
    with one_rank() as context:
        yield context


def settings_for(policy: str, deadline_s: float) -> RewardSettings:
    return RewardSettings(reward_outage=policy, reward_step_deadline_s=deadline_s)


def score(
    context: ProcessContext,
    url: str,
    policy: str,
    deadline_s: float,
    should_stop=never,
    **changes: object,
) -> list[RewardResult]:
    """Two pictures sent and waited for."""
    with RewardClient(config_for(url, **changes), context.rank) as client:
        futures = client.submit([PICTURE] * 2, [META] * 2)
        return await_rewards(
            context, futures, settings_for(policy, deadline_s), should_stop, PACE
        )


def test_wait_outlasts_errors_and_the_deadline(alone, caplog):
    def behave(handler, number):
        handler.answer(404, b"no") if number < 12 else good(handler, number)

    with running(behave) as stub, caplog.at_level(logging.WARNING, "faster_r3"):
        results = score(alone, stub.url, "wait", 0.2)
    assert [r.error for r in results] == [None, None]
    assert sum(r.retries for r in results) == 12, "each renewal is a repeated attempt"
    assert all(0.2 < r.latency_s < 5 for r in results), "from the first attempt on"
    assert "the step is held for 0 s; next try in 0 s; 2 of 2 rewards are missing" in caplog.text
    assert "rank 0: RewardStatusError" in caplog.text and "HTTP 404" in caplog.text


def test_wait_asks_anew_for_a_sample_that_hangs(alone):
    def behave(handler, number):
        handler.server.released.wait(30) if number == 0 else good(handler, number)

    with running(behave) as stub:
        results = score(alone, stub.url, "wait", 0.3, request_timeout_s=60.0)
    assert [r.error for r in results] == [None, None] and len(stub.posts) == 3
    assert sorted(r.retries for r in results) == [0, 1]


def test_wait_takes_the_thread_off_the_sample_that_it_asks_for_anew(alone):
    def behave(handler, number):
        handler.answer(500, b"once") if number == 0 else good(handler, number)

    with running(behave) as stub:
        start = time.monotonic()
        changes = {"pool_size": 1, "backoff_s": 60.0, "step_deadline_s": 60.0}
        results = score(alone, stub.url, "wait", 0.3, **changes)
        assert time.monotonic() - start < 10
    assert [r.error for r in results] == [None, None] and len(stub.posts) == 3


def test_skip_takes_one_round_and_says_what_is_missing(alone, caplog):
    def behave(handler, number):
        handler.answer(404, b"no") if number == 0 else good(handler, number)

    with running(behave) as stub, caplog.at_level(logging.WARNING, "faster_r3"):
        results = score(alone, stub.url, "skip", 5.0)
    assert sorted(r.error is None for r in results) == [False, True] and len(stub.posts) == 2
    assert "1 of 2 rewards are missing; rank 0: RewardStatusError" in caplog.text
    assert "they are skipped" in caplog.text


@pytest.mark.parametrize("hangs", [False, True])
def test_a_wait_ends_when_the_run_is_told_to_stop(alone, hangs):
    asked = threading.Event()

    def behave(handler, number):
        asked.set()
        handler.server.released.wait(30) if hangs else handler.answer(404, b"no")

    with running(behave) as stub:
        start = time.monotonic()
        message = r"rank 0: RewardOutageError: told to stop while 2 rewards were missing; last"
        with pytest.raises(RewardOutageError, match=message):
            score(alone, stub.url, "wait", 30.0, asked.is_set, request_timeout_s=20.0)
        assert time.monotonic() - start < 5


def test_a_defect_of_ours_ends_even_a_wait(alone):
    health = {"formats": ["json"]}
    with running(good, health=health) as stub, RewardClient(config_for(stub.url), 0) as client:
        futures = client.submit([PICTURE], [{"prompt": object()}])
        with pytest.raises(RewardOutageError, match="rank 0: TypeError: .*JSON"):
            await_rewards(alone, futures, settings_for("wait", 5.0), pace=PACE)


def _dies_for_rank_1(context: ProcessContext) -> dict:
    """Longer than the group's timeout there is no service for rank 1; rank 0's is well."""
    port = free_port()
    stubs = [] if context.rank else [Stub(good, port=port)]
    timer = threading.Timer(DOWN_S * context.rank, lambda: stubs.append(Stub(good, port=port)))
    if context.rank:
        timer.start()
    start = time.monotonic()
    try:
        results = score(context, f"http://127.0.0.1:{port}", "wait", 1.0)
    finally:
        timer.cancel()
        for stub in stubs:
            stub.stop()
    return {
        "seconds": time.monotonic() - start,
        "errors": [r.error for r in results],
        "retries": [r.retries for r in results],
    }


def _gives_up_on_rank_1(context: ProcessContext, policy: str) -> dict:
    behave = always(404, b"<html>") if context.rank else good
    with running(behave) as stub:
        start = time.monotonic()
        try:
            results = score(context, stub.url, policy, 1.0)
        except RewardOutageError as error:
            return {"error": str(error), "seconds": time.monotonic() - start}
        return {"errors": [r.error is not None for r in results]}


def _run_rank(rank: int, port: int, ready: Barrier, out: str) -> None:
    torch.set_num_threads(1)
    ready.wait(60)  # else a slow start of one would count against the group's timeout
    processes = ProcessConfig(
        master_port=port, num_shard=2, device="cpu", process_group_timeout_s=GROUP_TIMEOUT_S
    )
    context = start_processes(processes, 2, LaunchInfo(rank, 2, rank, 2))
    seen = {
        "dead": _dies_for_rank_1(context),
        "abort": _gives_up_on_rank_1(context, "abort"),
        "skip": _gives_up_on_rank_1(context, "skip"),
    }
    Path(out, f"{rank}.json").write_text(json.dumps(seen))
    stop_processes()


def test_no_rank_waits_too_long_for_another(tmp_path):
    ready = mp.get_context("spawn").Barrier(2)
    mp.spawn(_run_rank, args=(free_port(), ready, str(tmp_path)), nprocs=2)
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    for rank, seen in enumerate(ranks):
        assert seen["dead"]["errors"] == [None, None]
        assert seen["dead"]["seconds"] > DOWN_S - 0.5 > GROUP_TIMEOUT_S
        assert (min(seen["dead"]["retries"]) > 3) == (rank == 1)
        assert seen["abort"]["error"].startswith("rank 1: RewardOutageError: a picture could not")
        assert seen["abort"]["seconds"] < 3
        assert seen["skip"]["errors"] == [rank == 1] * 2
