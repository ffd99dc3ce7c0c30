"""A reward service for tests that misbehaves as told, and short cuts to score against it."""

import json
import pickle
import socket
import struct
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from PIL import Image

from train.rewards import RewardClient, RewardConfig, WaitPace, resolve_rewards

META = {"tag": "colors", "include": [{"class": "cat", "count": 1, "color": "red"}], "prompt": "p"}
ANSWER = {
    "scores": [0.5],
    "rewards": [1.0],
    "strict_rewards": [0.0],
    "group_rewards": {"colors": [1.0]},
    "group_strict_rewards": {"colors": [0.0]},
}
GOOD = pickle.dumps(ANSWER)
PACE = WaitPace(log_every_s=0.1, renew_after_s=0.05)
PICTURE = Image.new("RGB", (16, 16), "red")


class Stub(ThreadingHTTPServer):
    """A service whose POST answers come from `behave(handler, number of this POST, from 0)`."""

    daemon_threads = True
    request_queue_size = 64  # a full queue drops connections, which looks like an outage

    def __init__(self, behave, port=0, health=None):
        self.behave, self.health = behave, health
        self.posts, self.gets, self.connections = [], 0, set()
        self.released = threading.Event()
        super().__init__(("127.0.0.1", port), StubHandler)
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, request, client_address):
        pass

    def stop(self):
        self.released.set()
        self.shutdown()
        self.server_close()


class StubHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *args):
        pass

    def do_GET(self):
        self.server.gets += 1
        if self.server.health is None:
            return self.answer(405, b"<html>no</html>", "text/html")
        return self.answer(200, json.dumps(self.server.health).encode(), "application/json")

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        number = len(self.server.posts)
        self.server.posts.append((self.path, dict(self.headers), body))
        self.server.connections.add(self.client_address)
        self.server.behave(self, number)

    def answer(self, status, body, kind="text/html; charset=utf-8", length=None):
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body) if length is None else length))
        self.end_headers()
        self.wfile.write(body)

    def reset(self):
        linger = struct.pack("ii", 1, 0)
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        self.close_connection = True
        self.connection.close()


def always(status, body):
    return lambda handler, number: handler.answer(status, body)


def good(handler, number):
    handler.answer(200, GOOD)


@contextmanager
def running(behave, **kwargs):
    stub = Stub(behave, **kwargs)
    try:
        yield stub
    finally:
        stub.stop()


def config_for(*urls, **changes):
    settings = dict(request_timeout_s=3.0, step_deadline_s=5.0, backoff_s=0.02, cooldown_s=0.2)
    return RewardConfig(urls=urls, **{**settings, **changes})


def score(*urls, count=1, policy="skip", deadline_s=5.0, **changes):
    """Results of `count` pictures."""
    with RewardClient(config_for(*urls, **changes), rank=0) as client:
        futures = client.submit([PICTURE] * count, [META] * count)
        return resolve_rewards(futures, deadline_s, policy, pace=PACE)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
