"""The wait for rewards: the three outage policies, their deadlines, and what a person sees."""

import logging
import threading
import time
from concurrent.futures import Future

import pytest

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
    score,
)
from train.rewards import (
    RewardClient,
    RewardFuture,
    RewardOutageError,
    RewardResult,
    resolve_rewards,
)


def test_a_hang_does_not_outlast_the_step():
    with running(lambda handler, number: handler.server.released.wait(30)) as stub:
        start = time.monotonic()
        results = score(stub.url, count=2, request_timeout_s=60.0, deadline_s=0.3)
        assert time.monotonic() - start < 1.5, "close() must not wait for the hung threads"
    assert all("2 of 2 rewards did not come within 0.3 s" in r.error for r in results)


def test_slow_start(caplog):
    port = free_port()
    stubs = []
    timer = threading.Timer(0.6, lambda: stubs.append(Stub(good, port=port)))
    timer.start()
    with caplog.at_level(logging.WARNING, "faster_r3"):
        results = score(f"http://127.0.0.1:{port}", count=2, policy="abort", retries=1)
    timer.join()
    stubs[0].stop()
    assert [r.error for r in results] == [None, None]
    assert "for 2 of 2 rewards; next try in" in caplog.text
    assert "abort in" in caplog.text
    assert all(r.retries >= 2 and 0.5 < r.latency_s < 5 for r in results), "renewals count too"


def test_abort_ends_at_the_deadline_and_names_the_cause():
    url = f"http://127.0.0.1:{free_port()}"
    start = time.monotonic()
    with pytest.raises(RewardOutageError, match=r"1 of 1 rewards .* within 0.5 s; last.*refused"):
        score(url, policy="abort", deadline_s=0.5)
    assert 0.4 < time.monotonic() - start < 1.5


def test_abort_does_not_wait_for_what_will_not_pass():
    with running(always(404, b"no")) as stub:
        start = time.monotonic()
        with pytest.raises(RewardOutageError, match="HTTP 404"):
            score(stub.url, policy="abort", deadline_s=30.0)
        assert time.monotonic() - start < 2


def test_skip_gives_up_after_the_retries():
    start = time.monotonic()
    (result,) = score(f"http://127.0.0.1:{free_port()}", policy="skip", deadline_s=30.0)
    assert time.monotonic() - start < 3
    assert "refused" in result.error and result.retries == 3


def test_a_round_of_a_wait_ends_at_its_deadline(caplog):
    with running(lambda handler, number: handler.server.released.wait(30)) as stub:
        statuses = []
        with RewardClient(config_for(stub.url, request_timeout_s=60.0), 0) as client:
            futures = client.submit([PICTURE] * 2, [META] * 2)
            with caplog.at_level(logging.WARNING, "faster_r3"):
                results = resolve_rewards(futures, 0.5, "wait", statuses.append, PACE)
    assert all("2 of 2 rewards did not come within 0.5 s" in r.error for r in results)
    assert [status.num_open for status in statuses[:3]] == [2, 2, 2]
    assert 0 < statuses[1].remaining_s < 0.4 and "; next round in 0 s" in caplog.text


def test_what_on_wait_raises_ends_the_wait():
    def stop(status):
        raise KeyboardInterrupt

    with RewardClient(config_for(f"http://127.0.0.1:{free_port()}"), 0) as client:
        futures = client.submit([PICTURE], [META])
        with pytest.raises(KeyboardInterrupt):
            resolve_rewards(futures, 5.0, "wait", stop, PACE)


def test_a_defect_of_ours_is_raised_and_not_called_an_outage():
    health = {"formats": ["json"]}
    with running(good, health=health) as stub, RewardClient(config_for(stub.url), 0) as client:
        futures = client.submit([PICTURE], [{"prompt": object()}])
        with pytest.raises(TypeError, match="JSON"):
            resolve_rewards(futures, 5.0, "wait", pace=PACE)
        with pytest.raises(ValueError, match="2 images but 1 metadata"):
            client.submit([PICTURE] * 2, [META])


def test_futures_from_elsewhere_are_resolved_too():
    futures = [Future(), Future()]
    futures[1].set_result(RewardResult(1.0, 1.0, 1.0, 0.1, 0, None))
    threading.Timer(0.1, futures[0].set_result, [RewardResult(0.5, 0, 0, 0.1, 0, None)]).start()
    assert [r.score for r in resolve_rewards(futures, 5.0, "abort")] == [0.5, 1.0]
    failed = Future()
    failed.set_result(RewardResult(0, 0, 0, 0, 0, "boom", True))
    with pytest.raises(RewardOutageError, match="boom"):
        resolve_rewards([failed], 5.0, "abort")
    assert resolve_rewards([], 0.0, "abort") == []


def test_abandoned_futures_do_not_try_again():
    with running(always(500, b"no")) as stub:
        with RewardClient(config_for(stub.url, backoff_s=20.0), 0) as client:
            (future,) = client.submit([PICTURE], [META])
            assert isinstance(future, RewardFuture)
            while not stub.posts:
                time.sleep(0.01)
            future.abandon()
            assert "HTTP 500" in future.result(timeout=5).error
        assert len(stub.posts) == 1


def test_unknown_policy_is_refused():
    with pytest.raises(ValueError, match="--reward_outage: 'hope'"):
        resolve_rewards([], 1.0, "hope")
