"""The service under a real gunicorn with one worker: whatever comes, that worker goes on."""

import pickle
import random
import socket
import struct
import time
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

import pytest
import requests

from tests.tools.geneval_service.bad_pictures import encoded, huge_jpeg, huge_png
from tests.tools.geneval_service.fakes import rectangles
from tests.tools.geneval_service.gunicorn_process import (
    REWARD_SCRIPTS,
    free_port,
    serving,
    spawn,
)
from tools.reward_service.exchange import MAX_BODY_BYTES
from train.reward_wire import RewardRequest, decode_answer, encode_jpeg, encode_request
from train.rewards import RewardClient, RewardConfig, resolve_rewards

RED = (220, 20, 20)
CAT = {"tag": "single_object", "include": [{"class": "cat", "count": 1}], "prompt": "p"}
# The real configuration, but patience for a silent client is cut from 30 s to 1 s.
CONFIG = """
import runpy

globals().update(runpy.run_path({path!r}))
when_ready.__globals__["SOCKET_TIMEOUT_S"] = 1
"""


def one_cat():
    return encode_jpeg(rectangles((RED, (10, 30, 40, 60))), 90)


def good_body():
    return encode_request(RewardRequest([one_cat()], [CAT], False), "pickle")


def arguments(config, app):
    return ["gunicorn", "-c", config, f"tests.tools.geneval_service.fakes:{app}"]


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    folder = tmp_path_factory.mktemp("survival")
    config = folder / "config.py"
    config.write_text(CONFIG.format(path=str(REWARD_SCRIPTS / "gunicorn_geneval.py")))
    port = free_port()
    bind = {"R3_REWARD_GPUS": "0", "R3_REWARD_BIND": f"127.0.0.1:{port}"}
    with serving(arguments(config, "sleepy_app()"), port, folder / "log", **bind) as url:
        yield url


def worker_of(url):
    return requests.get(url + "/health", timeout=20).json()["pid"]


@pytest.fixture
def url(service):
    worker = worker_of(service)
    yield service
    # Whatever a test sent: the same worker lives and still scores.
    answer = requests.post(service, data=good_body(), timeout=20)
    assert decode_answer(answer.content, 1)[0].reward == 1.0
    assert worker_of(service) == worker


def asking(**change):
    return {**CAT, **change}


@pytest.mark.parametrize(
    ("image", "meta"),
    [
        (b"not an image", CAT),
        (huge_png(20000), CAT),
        (huge_jpeg(rectangles(), 20000), CAT),
        (one_cat(), asking(include=[{"class": "unicorn", "count": 1}])),
        (one_cat(), asking(exclude=[{"class": "dog"}])),
        (one_cat(), asking(include=[{"class": "cat", "count": 1, "position": ["above", 0]}])),
        (one_cat(), {}),
    ],
)
@pytest.mark.parametrize("form", ["json", "pickle"])
def test_bad_requests_get_4xx_and_a_reason(url, image, meta, form):
    body = encode_request(RewardRequest([image], [meta], False), form)
    headers = {"Content-Type": "application/json"} if form == "json" else {}
    answer = requests.post(url, data=body, headers=headers, timeout=20)
    assert answer.status_code == 400 and answer.json()["error"].startswith("image 0")


def test_no_images_and_no_body(url):
    empty = {"images": [], "meta_datas": [], "only_strict": False}
    for body in (pickle.dumps(empty), b""):
        answer = requests.post(url, data=body, timeout=20)
        assert answer.status_code == 400 and answer.json()["error"].startswith("bad request")


def test_png_and_cmyk_are_scored(url):
    picture = rectangles((RED, (10, 30, 40, 60)))
    for image in (encoded(picture), encoded(picture.convert("CMYK"), "JPEG")):
        body = encode_request(RewardRequest([image], [CAT], False), "pickle")
        answer = requests.post(url, data=body, timeout=20)
        assert decode_answer(answer.content, 1)[0].reward == 1.0


def raw(url, data, half_close=False):
    """Sends bytes as they are and returns the whole answer."""
    with socket.create_connection(("127.0.0.1", urlsplit(url).port), timeout=20) as sock:
        sock.sendall(data)
        if half_close:
            sock.shutdown(socket.SHUT_WR)
        parts = []
        while part := sock.recv(65536):
            parts.append(part)
    return b"".join(parts)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ("Content-Length: 100", 400),
        (f"Content-Length: {MAX_BODY_BYTES + 1}", 413),
        ("Content-Length: 99999999999999999999999", 413),
        ("Content-Length: -5", 400),
        ("Content-Length: 1e3", 400),
        ("Transfer-Encoding: chunked", 411),
    ],
)
def test_bad_lengths_are_refused(url, headers, status):
    head = f"POST / HTTP/1.1\r\nHost: x\r\n{headers}\r\n\r\nshort"
    assert raw(url, head.encode(), half_close=True).startswith(f"HTTP/1.1 {status} ".encode())


def test_a_body_that_does_not_come_is_given_up(url):
    start = time.monotonic()
    head = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n"
    answer = raw(url, head + b"some")
    assert answer.startswith(b"HTTP/1.1 400 ") and b"did not come whole" in answer
    assert raw(url, head[:20]) == b""
    assert time.monotonic() - start < 10


def test_bytes_that_are_not_http(url):
    rng = random.Random(0)
    for _ in range(20):
        raw(url, rng.randbytes(200) + b"\r\n\r\n", half_close=True)


def test_a_client_that_hangs_up(url):
    body = good_body()
    head = f"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    for data in (b"", head[:9], head, head + body[:50], head + body):
        sock = socket.create_connection(("127.0.0.1", urlsplit(url).port), timeout=5)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        sock.sendall(data)
        time.sleep(0.1)  # the last one leaves while it is being scored
        sock.close()
    assert "reward_client_hang_ups_total" in requests.get(url + "/metrics", timeout=20).text


def test_two_hundred_requests_at_once(url):
    body = encode_request(RewardRequest([b"not an image"], [CAT], False), "pickle")
    good = good_body()

    def post(index):
        data = good if index % 20 == 0 else body
        return index % 20, requests.post(url, data=data, timeout=60).status_code

    with ThreadPoolExecutor(200) as pool:
        answers = set(pool.map(post, range(200)))
    assert answers == {(index, 200 if index == 0 else 400) for index in range(20)}


def test_the_trainers_client_scores_over_json(url):
    picture = rectangles((RED, (10, 30, 40, 60)))
    with RewardClient(RewardConfig(urls=(url,)), 0) as client:
        metas = [CAT, asking(include=[{"class": "cat", "count": 2}])]
        results = resolve_rewards(client.submit([picture] * 2, metas), 20.0, "abort")
    assert [(r.reward, r.score) for r in results] == [(1.0, 1.0), (0.0, 0.5)]


def test_a_service_that_fails_its_self_check_ends(tmp_path):
    log, port = tmp_path / "log", free_port()
    app = arguments(REWARD_SCRIPTS / "gunicorn_geneval.py", "fake_app(finds_the_cat=False)")
    bind = {"R3_REWARD_GPUS": "0", "R3_REWARD_BIND": f"127.0.0.1:{port}"}
    process = spawn(app, log, TMPDIR=str(tmp_path), **bind)
    try:
        assert process.wait(timeout=60) == 3
    finally:
        process.terminate()  # had it served after all
    assert "does not find the cat" in log.read_text()
    assert [path.name for path in tmp_path.iterdir()] == ["log"]
