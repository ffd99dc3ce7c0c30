"""The reward client against a service that misbehaves, each case bounded in seconds."""

import json
import os
import pickle
import random
import time

import pytest

from tests.train.reward_stub import (
    ANSWER,
    GOOD,
    META,
    PACE,
    PICTURE,
    always,
    config_for,
    free_port,
    good,
    running,
    score,
)
from train.reward_wire import MAX_ANSWER_BYTES
from train.rewards import RewardClient, RewardConfig, make_reward_client, resolve_rewards


def test_scores_come_in_order_over_pickle_at_the_root():
    def numbered(handler, number):
        meta = pickle.loads(handler.server.posts[number][2])["meta_datas"][0]
        value = float(meta["prompt"])
        time.sleep(0.02 * (5 - value))
        body = {**ANSWER, "scores": [value], "rewards": [0], "strict_rewards": [True]}
        handler.answer(200, pickle.dumps(body))

    with running(numbered) as stub, make_reward_client(config_for(stub.url), 0) as client:
        metas = [{**META, "prompt": str(i)} for i in range(5)]
        results = resolve_rewards(client.submit([PICTURE] * 5, metas), 5.0, "abort")
        assert [r.score for r in results] == [0.0, 1.0, 2.0, 3.0, 4.0]
        assert all((r.reward, r.strict_reward, r.retries) == (0.0, 1.0, 0) for r in results)
        assert all(r.error is None and 0 < r.latency_s < 2 for r in results)
        path, headers, body = stub.posts[0]
        request = pickle.loads(body)
        assert path == "/" and headers["Accept"].startswith("application/json")
        assert request["only_strict"] is False and request["images"][0][:2] == b"\xff\xd8"


def test_json_is_spoken_where_it_is_offered():
    def answer(handler, number):
        handler.answer(200, json.dumps(ANSWER).encode(), "application/json")

    with running(answer, health={"formats": ["json", "pickle"]}) as stub:
        (result,) = score(stub.url + "/")
        path, headers, body = stub.posts[0]
    assert result.score == 0.5 and path == "/"
    assert headers["Content-Type"] == "application/json"
    assert json.loads(body)["meta_datas"] == [META]


@pytest.mark.parametrize("health", [{"formats": "json?"}, {"formats": ["pickle"]}, ["json"], {}])
def test_other_health_answers_mean_pickle(health):
    with running(good, health=health) as stub:
        (result,) = score(stub.url + "/geneval/")
    assert result.error is None and stub.posts[0][0] == "/geneval"
    assert stub.posts[0][2][:1] == b"\x80"


def test_connections_are_kept():
    with running(good) as stub, RewardClient(config_for(stub.url, pool_size=1), 0) as client:
        for _ in range(3):
            resolve_rewards(client.submit([PICTURE] * 2, [META] * 2), 5.0, "abort")
        assert len(stub.posts) == 6 and stub.gets == 1 and len(stub.connections) == 1


def test_404_with_html_is_not_tried_again():
    with running(always(404, b"<html>Not here</html>")) as stub:
        (result,) = score(stub.url)
    assert len(stub.posts) == 1 and result.retries == 0 and not result.is_retryable
    assert "RewardStatusError" in result.error and "HTTP 404" in result.error
    assert "<html>Not here</html>" in result.error and stub.url in result.error
    assert result.score != result.score


@pytest.mark.parametrize(
    ("status", "body", "shown"),
    [
        (502, b"<html>Bad gateway</html>", "Bad gateway"),
        (500, b"Traceback (most recent call last):\n" + b" x\n" * 200 + b"KeyError: 'tag'", "KeyE"),
        (503, b"", "(nothing)"),
        (504, b"late", "late"),
    ],
)
def test_passing_statuses_are_tried_three_times_more(status, body, shown):
    with running(always(status, body)) as stub:
        (result,) = score(stub.url)
    assert len(stub.posts) == 4 and result.retries == 3 and result.is_retryable
    assert f"HTTP {status}" in result.error and shown in result.error


def test_a_500_that_passes():
    def behave(handler, number):
        handler.answer(500, b"once") if number < 2 else good(handler, number)

    with running(behave) as stub:
        (result,) = score(stub.url)
    assert result.error is None and result.retries == 2


class Runs:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_a_pickle_that_would_run_code(tmp_path):
    target = tmp_path / "ran"
    with running(always(200, pickle.dumps({**ANSWER, "scores": [Runs(target)]}))) as stub:
        (result,) = score(stub.url)
    assert not target.exists()
    assert "RewardAnswerError" in result.error and "not plain data" in result.error


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (GOOD[:-20], "not a complete pickle"),
        (pickle.dumps({**ANSWER, "scores": []}), "'scores' has 0 entries for 1 images"),
        (pickle.dumps({**ANSWER, "scores": [float("nan")]}), "'scores' holds nan"),
        (b"<html>login</html>", "it began: <html>login</html>"),
        (b"", "(nothing)"),
        (b"\x80" + b"x" * (MAX_ANSWER_BYTES + 1), "bytes are more than"),
    ],
)
def test_bad_answers_end_at_once(body, message):
    with running(always(200, body)) as stub:
        (result,) = score(stub.url)
    assert "RewardAnswerError" in result.error and message in result.error
    assert result.retries == 0 and len(stub.posts) == 1


def test_a_hang_ends_at_the_request_timeout():
    with running(lambda handler, number: handler.server.released.wait(30)) as stub:
        start = time.monotonic()
        (result,) = score(stub.url, request_timeout_s=0.2, retries=1)
        assert time.monotonic() - start < 2
    assert "no answer within 0.2 s" in result.error and result.retries == 1


def test_an_answer_that_trickles_is_cut_off():
    def trickle(handler, number):
        handler.answer(200, GOOD[:1], length=len(GOOD))
        while not handler.server.released.wait(0.05):
            handler.wfile.write(b"\x80")

    with running(trickle) as stub:
        start = time.monotonic()
        (result,) = score(stub.url, request_timeout_s=0.3, retries=0)
        assert time.monotonic() - start < 1.5
    assert "no answer within 0.3 s" in result.error


@pytest.mark.parametrize("num_resets", [1, 99])
def test_a_reset_in_mid_answer(num_resets):
    def behave(handler, number):
        if number >= num_resets:
            return good(handler, number)
        handler.answer(200, GOOD[:30], length=len(GOOD))
        handler.wfile.flush()
        return handler.reset()

    with running(behave) as stub:
        (result,) = score(stub.url)
    assert result.retries == min(num_resets, 3)
    assert (result.error is None) == (num_resets == 1)
    assert result.error is None or "RewardConnectionError" in result.error


def test_an_answer_that_ends_early_is_tried_again():
    def behave(handler, number):
        if number:
            return good(handler, number)
        handler.answer(200, GOOD[:30], length=len(GOOD))
        handler.close_connection = True
        return None

    with running(behave) as stub:
        (result,) = score(stub.url)
    assert result.error is None and result.retries == 1


def test_two_addresses_share_the_load_and_one_dies(monkeypatch):
    with running(good) as first, running(good) as second:
        changes = {"cooldown_s": 600.0, "pool_size": 2}
        with RewardClient(config_for(first.url, second.url, **changes), 0) as client:

            def send(count):
                before = len(first.posts), len(second.posts)
                futures = client.submit([PICTURE] * count, [META] * count)
                results = resolve_rewards(futures, 30.0, "abort", pace=PACE)
                assert all(r.error is None for r in results)
                after = len(first.posts), len(second.posts)
                return after[0] - before[0], after[1] - before[1], sum(r.retries for r in results)

            assert send(10) == (5, 5, 0)
            second.behave = always(503, b"dying")
            to_first, to_second, retries = send(10)
            assert to_first == 10 and 1 <= to_second <= 2 and retries == to_second
            assert send(6) == (6, 0, 0), "a dead address is left alone during its cool-down"
            now = time.monotonic()
            monkeypatch.setattr("train.reward_endpoints.monotonic", lambda: now + 601.0)
            assert send(1) == (1, 1, 1), "then one sample tries it"
            assert send(6) == (6, 0, 0)
            monkeypatch.setattr("train.reward_endpoints.monotonic", lambda: now + 1202.0)
            second.behave = good
            assert send(1) == (0, 1, 0)
            assert send(10) == (5, 5, 0), "and it takes its turn again"


def test_a_refused_address_costs_no_sample():
    with running(good) as stub:
        dead = f"http://127.0.0.1:{free_port()}"
        start = time.monotonic()
        results = score(dead, stub.url, count=8, backoff_s=5.0)
    assert [r.error for r in results] == [None] * 8
    assert time.monotonic() - start < 2, "going over to the live address needs no back-off"


def test_loopback_goes_past_a_web_proxy(monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{free_port()}")
    with running(good) as stub:
        (result,) = score(stub.url)
    assert result.error is None


def test_training_randomness_is_untouched():
    random.seed(7)
    before = random.getstate()
    score(f"http://127.0.0.1:{free_port()}")
    assert random.getstate() == before


def test_closing_cancels_what_is_queued():
    with running(lambda handler, number: handler.server.released.wait(30)) as stub:
        client = RewardClient(config_for(stub.url, pool_size=1), 0)
        futures = client.submit([PICTURE] * 3, [META] * 3)
        time.sleep(0.1)
        client.close()
        assert futures[1].cancelled() and futures[2].cancelled()
        with pytest.raises(RuntimeError, match="closed"):
            client.submit([PICTURE], [META])


@pytest.mark.parametrize(
    ("changes", "flag"),
    [
        ({"urls": ()}, "--reward_url"),
        ({"urls": ("localhost:18085",)}, "--reward_url: 'localhost:18085'"),
        ({"urls": ("ftp://host",)}, "--reward_url"),
        ({"urls": ("http://host:99999",)}, "--reward_url"),
        ({"urls": ("http://host/?a=1",)}, "--reward_url"),
        ({"kind": "clip"}, "--reward_fn: 'clip' is not one of geneval, geneval_plus, tiif"),
        ({"outage": "panic"}, "--reward_outage: 'panic' is not one of wait, skip, abort"),
        ({"kind": "tiif", "api_key": "k"}, "--reward_model_name"),
        ({"kind": "geneval_plus", "model_name": "m"}, "--reward_api_key"),
        ({"request_timeout_s": 0.0}, "--reward_request_timeout_s"),
        ({"step_deadline_s": float("nan")}, "--reward_step_deadline_s"),
        ({"retries": -1}, "retries"),
        ({"jpeg_quality": 101}, "jpeg_quality"),
    ],
)
def test_bad_settings_are_refused(changes, flag):
    with pytest.raises(ValueError, match=flag):
        RewardConfig(**{"urls": ("http://127.0.0.1:1",), **changes})


def test_keys_and_passwords_stay_out_of_messages():
    with pytest.raises(ValueError) as caught:
        RewardConfig(urls=("http://a:1",), api_key="se cret")
    assert "cret" not in str(caught.value)
    with running(always(404, b"no")) as stub:
        url = stub.url.replace("//", "//user:secret@")
        (result,) = score(url)
        assert stub.posts[0][1]["Authorization"].startswith("Basic ")
        assert "secret" not in result.error
        score(stub.url, api_key="secret")
        assert stub.posts[1][1]["Authorization"] == "Bearer secret"
    assert "secret" not in repr(RewardConfig(urls=("http://a:1",), api_key="secret"))
