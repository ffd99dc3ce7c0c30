"""A real gunicorn on loopback, started and stopped by a test."""

import os
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import requests

ROOT = Path(__file__).resolve().parents[3]
REWARD_SCRIPTS = ROOT / "scripts" / "reward"
START_S = 60.0


def free_port():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def environment(**changes):
    names = ("R3_REWARD_GPUS", "R3_REWARD_BIND", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
    kept = {k: v for k, v in os.environ.items() if k not in (*names, "CUDA_VISIBLE_DEVICES")}
    return {**kept, "no_proxy": "127.0.0.1", **changes}


def spawn(arguments, log, folder=ROOT, **variables):
    """python -m with the arguments; its output goes to the file `log`."""
    with log.open("wb") as file:
        return subprocess.Popen(
            [sys.executable, "-m", *map(str, arguments)],
            cwd=folder,
            env=environment(**variables),
            stdout=file,
            stderr=subprocess.STDOUT,
        )


@contextmanager
def serving(arguments, port, log, folder=ROOT, path="/health", **variables):
    """Its address, once it answers; stops it at the end."""
    process = spawn(arguments, log, folder, **variables)
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + START_S
        while True:
            try:
                requests.get(url + path, timeout=5)
                break
            except requests.RequestException:
                assert process.poll() is None and time.monotonic() < deadline, log.read_text()
                time.sleep(0.1)
        yield url
    finally:
        process.terminate()
        assert process.wait(timeout=30) == 0, log.read_text()
