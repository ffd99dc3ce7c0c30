"""The embedded reward service: its scores, both wire forms, and what it refuses without dying."""

import json
import pickle
import random
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import requests
from PIL import Image

from tests.tools.geneval_service.bad_pictures import encoded, huge_jpeg, huge_png
from tools.reward_service.scoring import GREY, NEUTRAL, PALETTE, decode_picture, score_picture
from tools.reward_service.server import RewardServer
from train.reward_wire import RewardRequest, decode_answer, encode_jpeg, encode_request
from train.rewards import RewardClient, RewardConfig, resolve_rewards

PICKLE = "application/octet-stream"


def asking(*colours):
    include = [{"class": "cat", "count": 1, "color": colour} for colour in colours]
    return {"tag": "color_attr", "include": include, "prompt": "p"}


def flat(colour, size=(64, 64)):
    return Image.new("RGB", size, PALETTE.get(colour, colour))


def noise():
    values = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    return Image.fromarray(values)


def halves(left, right, share=0.5):
    picture = flat(right)
    picture.paste(flat(left), (int(64 * share) - 64, 0))
    return picture


def one_red():
    """A good request in the public form."""
    request = RewardRequest([encode_jpeg(flat("red"), 75)], [asking("red")], False)
    return encode_request(request, "pickle")


def through_jpeg(picture):
    return decode_picture(encode_jpeg(picture, 75))


@pytest.fixture(scope="module")
def server():
    server = RewardServer("127.0.0.1", 0)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def url(server):
    yield f"http://127.0.0.1:{server.server_port}"
    # Whatever a test sent, the service must still score.
    with requests.Session() as session:
        body = one_red()
        answer = session.post(f"http://127.0.0.1:{server.server_port}", data=body, timeout=5)
    assert decode_answer(answer.content, 1)[0].score == 1.0


@pytest.mark.parametrize("colour", PALETTE)
def test_a_flat_picture_is_perfect_for_its_colour_only(colour):
    picture = through_jpeg(flat(colour))
    scores = {name: score_picture(picture, asking(name)) for name in PALETTE}
    own = scores.pop(colour)
    assert (own.score, own.reward, own.strict_reward) == (1.0, 1.0, 1.0)
    assert all(other.score < 0.7 and other.reward == 0.0 for other in scores.values())


def test_the_score_rises_all_the_way_to_the_colour():
    for name, wanted in PALETTE.items():
        start = np.array(PALETTE["blue" if name in ("yellow", "white", "orange") else "yellow"])
        path = [start + (np.array(wanted) - start) * step for step in np.linspace(0, 1, 11)]
        scores = [score_picture(flat(tuple(c.astype(int))), asking(name)).score for c in path]
        assert scores[-1] == 1.0 and scores[0] < 0.45
        assert scores[-1] - scores[0] > 0.5
        assert max(scores[:6]) < min(scores[9:])


def test_the_score_grows_with_the_area():
    shares = [0.0, 0.25, 0.5, 0.75, 1.0]
    scores = [score_picture(halves("green", "pink", s), asking("green")) for s in shares]
    values = [s.score for s in scores]
    assert values == sorted(values) and values[1] - values[0] > 0.15 and values[-1] == 1.0
    assert [s.reward for s in scores] == [0, 0, 0, 1, 1]
    assert [s.strict_reward for s in scores] == [0, 0, 0, 0, 1]


def test_two_colours_want_half_the_picture_each():
    both = score_picture(through_jpeg(halves("red", "blue")), asking("red", "blue"))
    assert both.score > 0.98 and both.reward == both.strict_reward == 1.0
    one = score_picture(flat("red"), asking("red", "blue"))
    assert 0.4 < one.score < 0.7 and one.reward == 0.0
    assert score_picture(flat("red"), asking("red", "red")).score == 1.0


def test_grey_and_noise_cover_no_colour():
    for picture in (flat(GREY), noise()):
        for colour in PALETTE:
            scores = score_picture(picture, asking(colour))
            assert scores.reward == 0.0 and 0.0 < scores.score < 0.7


def test_colourless_clauses_are_left_out_and_a_colourless_prompt_is_neutral():
    plain = {"class": "dog", "count": 2}
    mixed = asking("red")
    mixed["include"].append(plain)
    assert score_picture(flat("red"), mixed).score == 1.0
    assert score_picture(flat("red"), {"include": [plain]}) == NEUTRAL
    assert (NEUTRAL.score, NEUTRAL.reward) == (0.5, 0.0)


def test_large_pictures_score_as_small_ones():
    assert score_picture(flat("red", (1000, 30)), asking("red")).score == 1.0
    large = halves("red", "blue").resize((512, 512), Image.Resampling.NEAREST)
    assert score_picture(large, asking("red", "blue")).score > 0.98


def test_the_client_scores_over_json(server, url):
    before = server.counters.by_status.get(200, 0)
    with RewardClient(RewardConfig(urls=(url,)), 0) as client:
        metas = [asking("red"), asking("blue"), asking("red", "blue")]
        results = resolve_rewards(client.submit([flat("red")] * 3, metas), 5.0, "abort")
    assert [r.reward for r in results] == [1.0, 0.0, 0.0]
    assert results[0].score == 1.0 > results[2].score > results[1].score
    assert server.counters.by_status[200] >= before + 4


@pytest.mark.parametrize("form", ["json", "pickle"])
def test_batches_in_both_forms(url, form):
    pictures = [encode_jpeg(flat(name), 75) for name in ("red", "blue")]
    body = encode_request(RewardRequest(pictures, [asking("red")] * 2, False), form)
    kind = {"json": "application/json; charset=utf-8", "pickle": PICKLE}[form]
    answer = requests.post(url, data=body, headers={"Content-Type": kind}, timeout=5)
    assert answer.status_code == 200
    red, blue = decode_answer(answer.content, 2)
    assert red.score == 1.0 and blue.score < 0.2
    load = json.loads if form == "json" else pickle.loads
    assert load(answer.content)["group_rewards"]["color_attr"] == [1.0, 0.0]


def test_the_public_clients_request_needs_no_content_type(url):
    record = {
        "images": [encode_jpeg(flat("red"), 75)],
        "meta_datas": [asking("red")],
        "only_strict": False,
    }
    answer = requests.post(url, data=pickle.dumps(record), timeout=5)
    assert pickle.loads(answer.content)["scores"] == [1.0]


def test_health_metrics_and_other_pages(url):
    health = requests.get(url + "/health", timeout=5).json()
    assert health["status"] == "ok" and health["formats"] == ["json", "pickle"]
    metrics = requests.get(url + "/metrics", timeout=5).text
    assert 'reward_requests_total{status="200"}' in metrics and "reward_images_total" in metrics
    for path, status in (("/", 405), ("/x", 404)):
        answer = requests.get(url + path, timeout=5)
        assert answer.status_code == status and answer.json()["error"]
    assert requests.post(url + "/x", data=b"x", timeout=5).status_code == 404


def test_other_picture_kinds_are_scored(url):
    clear = Image.new("RGBA", (32, 32), (255, 0, 0, 0))
    cases = [
        (encoded(flat("red")), "red"),
        (encoded(flat("red").convert("CMYK"), "JPEG"), "red"),
        (encoded(flat("red").convert("P")), "red"),
        (encoded(clear), "white"),
        (encoded(Image.new("L", (8, 8), 255)), "white"),
        (encoded(Image.new("RGB", (1, 1), "black")), "black"),
    ]
    images, metas = [data for data, _ in cases], [asking(colour) for _, colour in cases]
    body = encode_request(RewardRequest(images, metas, False), "pickle")
    answer = requests.post(url, data=body, timeout=5)
    assert [s.reward for s in decode_answer(answer.content, len(cases))] == [1.0] * len(cases)


@pytest.mark.parametrize(
    ("image", "message"),
    [
        (b"not an image", "not a JPEG or PNG"),
        (b"", "not a JPEG or PNG"),
        (huge_png(20000), "too large"),
        (huge_png(4097), "too large: 4097 x 4097"),
        (huge_jpeg(flat("red"), 20000), "too large"),
        (encode_jpeg(noise(), 75)[:2000], "cannot be decoded"),
        (encoded(flat("red"))[:60], "cannot be decoded"),
        (encoded(flat("red"), "GIF"), "not a JPEG or PNG"),
    ],
)
def test_bad_pictures_are_refused(url, image, message):
    body = encode_request(RewardRequest([image], [asking("red")], False), "json")
    start = time.monotonic()
    answer = requests.post(url, data=body, headers={"Content-Type": "application/json"}, timeout=5)
    assert answer.status_code == 400 and message in answer.json()["error"]
    assert time.monotonic() - start < 1


@pytest.mark.parametrize(
    ("meta", "message"),
    [
        ({}, "'include'"),
        ({"include": []}, "'include'"),
        ({"include": "cat"}, "'include'"),
        ({"include": ["cat"]}, "include 0 must be a mapping"),
        ({"include": [{"count": 1}]}, "include 0 must be a mapping with a 'class'"),
        (asking("mauve"), "colour 'mauve' is not one of red"),
        (asking(["red"]), "colour 'list' is not one of"),
        ({**asking("red"), "tag": 3}, "'tag' must be a text"),
    ],
)
def test_bad_metadata_are_refused(url, meta, message):
    body = encode_request(RewardRequest([encode_jpeg(flat("red"), 75)], [meta], False), "pickle")
    answer = requests.post(url, data=body, timeout=5)
    assert answer.status_code == 400 and message in answer.json()["error"]


@pytest.mark.parametrize(
    ("body", "kind", "status", "message"),
    [
        (b"", PICKLE, 400, "not a complete pickle"),
        (b"cos\nsystem\n.", PICKLE, 400, "not plain data"),
        (b"\x80\x04.", PICKLE, 400, "empty stack"),
        (pickle.dumps({"images": [], "meta_datas": []}), PICKLE, 400, "at least one image"),
        (b'{"images": [], "meta_datas": []}', "application/json", 400, "at least one image"),
        (b"[" * 100_000, "application/json", 400, "nested too deeply"),
        (b"{}", PICKLE, 400, "pickle"),
        (b"{}", "text/plain", 415, "'text/plain' is not one of"),
        (b"a=1", "application/x-www-form-urlencoded", 415, "is not one of"),
    ],
)
def test_bad_bodies_are_refused(url, body, kind, status, message):
    answer = requests.post(url, data=body, headers={"Content-Type": kind}, timeout=5)
    assert answer.status_code == status
    assert any(part in answer.json()["error"] for part in message.split("|"))


def test_too_many_images_are_refused(url):
    record = {"images": [b"x"] * 257, "meta_datas": [{}] * 257, "only_strict": False}
    assert requests.post(url, data=pickle.dumps(record), timeout=5).status_code == 413


def raw(server, data, half_close=True):
    """Send bytes as they are and return the whole answer."""
    with socket.create_connection(("127.0.0.1", server.server_port), timeout=5) as sock:
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
        ("Content-Length: 99999999999999999999999", 413),
        ("Content-Length: -5", 400),
        ("Content-Length: 1e3", 400),
        ("Transfer-Encoding: chunked", 411),
        ("X: y", 411),
    ],
)
def test_bad_lengths_are_refused(server, url, headers, status):
    answer = raw(server, f"POST / HTTP/1.1\r\nHost: x\r\n{headers}\r\n\r\nshort".encode())
    assert answer.startswith(f"HTTP/1.1 {status} ".encode()) and b'"error"' in answer


def test_bytes_that_are_not_http(server, url):
    rng = random.Random(0)
    for _ in range(20):
        raw(server, rng.randbytes(200) + b"\r\n\r\n")


def test_a_client_that_hangs_up(server, url):
    before = server.counters.num_hang_ups
    body = one_red()
    head = f"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    for data in (head + body[:50], head + body, head):
        sock = socket.create_connection(("127.0.0.1", server.server_port), timeout=5)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        sock.sendall(data)
        sock.close()
    deadline = time.monotonic() + 3
    while server.counters.num_hang_ups == before and time.monotonic() < deadline:
        time.sleep(0.02)
    assert server.counters.num_hang_ups > before


def test_a_body_that_does_not_come(server, url, monkeypatch):
    monkeypatch.setattr(server.RequestHandlerClass, "timeout", 0.2)
    head = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\n"
    assert raw(server, head, half_close=False).startswith(b"HTTP/1.1 408 ")


def test_a_defect_costs_one_request_only(server, url, monkeypatch):
    def broken(picture, metadata):
        raise RuntimeError("boom")

    with monkeypatch.context() as patch:
        patch.setattr("tools.reward_service.server.score_picture", broken)
        body = encode_request(RewardRequest([encoded(flat("red"))], [asking("red")], False), "json")
        headers = {"Content-Type": "application/json"}
        answer = requests.post(url, data=body, headers=headers, timeout=5)
    assert answer.status_code == 500 and "boom" in answer.json()["error"]


def test_two_hundred_requests_at_once(url):
    body = one_red()

    def post(_):
        return requests.post(url, data=body, timeout=20).status_code

    with ThreadPoolExecutor(200) as pool:
        assert set(pool.map(post, range(200))) == {200}


def test_it_needs_no_torch():
    code = "import sys, tools.reward_service.server; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=20).returncode == 0


def test_the_command_starts_serves_and_ends(tmp_path):
    port_file = tmp_path / "port"
    command = [sys.executable, "-m", "tools.reward_service", "--port", "0"]
    process = subprocess.Popen(
        [*command, "--port-file", str(port_file)], stdout=subprocess.PIPE, text=True
    )
    try:
        line = process.stdout.readline()
        port = int(port_file.read_text())
        assert f"http://127.0.0.1:{port}" in line and "colours" in line
        health = requests.get(f"http://127.0.0.1:{port}/health", timeout=5)
        assert health.json()["status"] == "ok"
        taken = subprocess.run(
            [*command[:-1], str(port)], capture_output=True, text=True, timeout=20
        )
        assert taken.returncode == 1 and f"--port {port}" in taken.stderr
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=10) == 0
        process.stdout.close()
