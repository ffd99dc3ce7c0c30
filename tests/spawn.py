"""Runs a test's function on several gloo ranks of this machine."""

import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from train.dist import stop_processes


def run_ranks(worker: Callable[..., None], world_size: int, *args: Any) -> None:
    """Calls `worker(rank, world_size, *args)` in `world_size` processes; an error in one raises."""
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        mp.spawn(_start, (world_size, store, worker, args), nprocs=world_size)


def _start(rank: int, world_size: int, store: str, worker: Callable, args: tuple) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=60),
    )
    try:
        worker(rank, world_size, *args)
    finally:
        stop_processes()
