"""One synchronous gunicorn worker per GPU: what both configurations beside this file share.

Standard library only, since it also runs in the public service's environment.
"""

import os
import socket
import struct
from collections.abc import Mapping

DEFAULT_GPUS = 8
DEFAULT_BIND = "127.0.0.1:18085"
# A worker that loads its models or scores a large batch is alive; the trainer's client gives up
# on a request long before this.
WORKER_TIMEOUT_S = 300
# A synchronous worker serves nobody while a client that stopped sending holds it.
SOCKET_TIMEOUT_S = 30


class GpuWorkers:
    """Hands GPUs to workers: each new worker gets the one that the fewest have."""

    def __init__(self, gpus: list[str], bind: str) -> None:
        self.bind = bind
        self.num_workers = len(gpus)
        self._num_workers_of = dict.fromkeys(gpus, 0)

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> "GpuWorkers":
        """From R3_REWARD_GPUS and R3_REWARD_BIND; ValueError for a count that cannot be."""
        bind = environment.get("R3_REWARD_BIND") or DEFAULT_BIND
        return cls(list_gpus(environment), bind)

    def pre_fork(self, server: object, worker: object) -> None:
        """In the master, before each worker."""
        worker.gpu = min(self._num_workers_of, key=self._num_workers_of.get)
        self._num_workers_of[worker.gpu] += 1

    def post_fork(self, server: object, worker: object) -> None:
        """In the worker, before the app and with it CUDA are loaded."""
        os.environ["CUDA_VISIBLE_DEVICES"] = worker.gpu

    def child_exit(self, server: object, worker: object) -> None:
        """In the master, after a worker ended: its GPU is free for the one that replaces it."""
        self._num_workers_of[worker.gpu] -= 1


def list_gpus(environment: Mapping[str, str]) -> list[str]:
    """The CUDA_VISIBLE_DEVICES of each worker; one empty entry, the CPU, for R3_REWARD_GPUS=0.

    GPUs are counted among those that CUDA_VISIBLE_DEVICES lists already, if it does.
    """
    text = environment.get("R3_REWARD_GPUS", "").strip()
    if text and not (text.isascii() and text.isdigit()):
        raise ValueError(f"R3_REWARD_GPUS is {text!r}, expected the number of GPUs, 0 for the CPU")
    visible = [name.strip() for name in environment.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    if not visible[0]:
        count = int(text) if text else DEFAULT_GPUS
        return [str(index) for index in range(count)] or [""]
    count = int(text) if text else min(DEFAULT_GPUS, len(visible))
    if count > len(visible):
        listed = ",".join(visible)
        raise ValueError(f"R3_REWARD_GPUS is {count}, but CUDA_VISIBLE_DEVICES={listed} lists less")
    return visible[:count] or [""]


def limit_socket_waits(server: object) -> None:
    """gunicorn's when_ready: a client that stops sending or reading costs 30 s, not the worker.

    Connections inherit the listener's limits on Linux; gunicorn itself sets none.
    """
    limit = struct.pack("ll", SOCKET_TIMEOUT_S, 0)
    for listener in server.LISTENERS:
        listener.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        listener.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
