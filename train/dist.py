"""Process set-up: ranks, devices, the process group, the device mesh and the policy groups.

Weights and gradients travel over nccl on GPUs and gloo on CPUs (FSDP2 does that through the mesh).
What the ranks tell each other beside that (scores, pictures, errors) is on the host and goes
through gloo everywhere, so that a GPU kernel in flight never holds it up.
"""

import gc
import os
import time
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from train.flags import ConfigError
from train.settings import ProcessConfig

T = TypeVar("T")

THREAD_GRACE_S = 0.3
_TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
_DEFAULT_VARIABLES = {
    "TOKENIZERS_PARALLELISM": "false",  # else the tokenizer warns when a process forks after it
}


@dataclass(frozen=True)
class LaunchInfo:
    """What the launcher said. `is_torchrun` is False for a single process started by hand."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    node_rank: int = 0
    is_torchrun: bool = False

    @property
    def num_nodes(self) -> int:
        """Machines of the run."""
        return self.world_size // self.local_world_size


@dataclass(frozen=True)
class ProcessContext:
    """This process among the others.

    `mesh` is 1-D ("shard") or, when the world is larger than NUM_SHARD, 2-D ("replicate",
    "shard"): hand it to `fully_shard` as it is. `policy_group` is a gloo group (CPU tensors and
    objects only) of the `policy_group_size` consecutive ranks that share a prompt.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    device: torch.device
    mesh: DeviceMesh
    host_group: dist.ProcessGroup
    policy_group: dist.ProcessGroup
    policy_group_size: int

    @property
    def policy_group_id(self) -> int:
        """Number of the rank's policy group."""
        return self.rank // self.policy_group_size

    @property
    def is_main(self) -> bool:
        """Whether this rank writes logs, reports and progress."""
        return self.rank == 0

    def all_gather_object(self, value: T) -> list[T]:
        """The values of all ranks, in rank order, on every rank (see `gather_from_all`)."""
        return gather_from_all(self, value)


def read_launch(environ: Mapping[str, str] | None = None) -> LaunchInfo:
    """Reads torchrun's variables; without any of them this is a world of one.

    Raises ConfigError when only some are set or one is no number.
    """
    environ = os.environ if environ is None else environ
    if "RANK" not in environ and "WORLD_SIZE" not in environ:
        return LaunchInfo()
    missing = [name for name in _TORCHRUN_VARIABLES if not environ.get(name)]
    if missing:
        raise ConfigError(
            f"{', '.join(missing)} not set beside RANK or WORLD_SIZE: start the trainer through "
            "torchrun, or unset them for a single process"
        )
    world_size = _read_int(environ, "WORLD_SIZE")
    launch = LaunchInfo(
        rank=_read_int(environ, "RANK"),
        world_size=world_size,
        local_rank=_read_int(environ, "LOCAL_RANK"),
        local_world_size=_read_int(environ, "LOCAL_WORLD_SIZE", world_size),
        node_rank=_read_int(environ, "GROUP_RANK", 0),
        is_torchrun=True,
    )
    if not (launch.rank < launch.world_size and launch.local_rank < launch.local_world_size):
        raise ConfigError(
            f"rank {launch.rank} of {launch.world_size}, local rank {launch.local_rank} of "
            f"{launch.local_world_size}: a rank must be below its world"
        )
    return launch


def check_launch(processes: ProcessConfig, launch: LaunchInfo) -> None:
    """Raises ConfigError when a given --nnodes, --nproc_per_node or --node_rank is not true."""
    facts = {
        "nproc_per_node": launch.local_world_size,
        "nnodes": launch.num_nodes,
        "node_rank": launch.node_rank,
    }
    for name, fact in facts.items():
        stated = getattr(processes, name)
        if stated is not None and stated != fact:
            raise ConfigError(
                f"--{name} {stated}: the processes were started with {fact}; "
                "leave the flag out or start through scripts/train_faster_r3_geneval.sh"
            )


def choose_device(device: str, launch: LaunchInfo) -> torch.device:
    """The device of this rank for --device auto|cpu|cuda.

    Raises ConfigError if this machine has too few GPUs, on all of its ranks alike.
    """
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device == "cpu" or (device == "auto" and num_gpus == 0):
        return torch.device("cpu")
    if num_gpus == 0:
        raise ConfigError("--device cuda: no GPU is visible (allowed: auto, cpu)")
    if launch.local_world_size > num_gpus:
        raise ConfigError(
            f"--nproc_per_node {launch.local_world_size}: {num_gpus} GPUs are visible on this "
            f"machine, expected at most {num_gpus} ranks (or --device cpu)"
        )
    return torch.device("cuda", launch.local_rank)


def start_processes(
    processes: ProcessConfig, policy_group_size: int, launch: LaunchInfo | None = None
) -> ProcessContext:
    """Joins the process group and builds the mesh and the policy groups. Every rank calls it once.

    Raises ConfigError when the world does not divide (see `check_world`) or the device is missing.
    """
    launch = read_launch() if launch is None else launch
    check_launch(processes, launch)
    check_world(launch.world_size, processes.num_shard, policy_group_size)
    set_environment_defaults()
    device = choose_device(processes.device, launch)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    timeout = timedelta(seconds=processes.process_group_timeout_s)
    _init_process_group(processes, launch, device, timeout)
    # Every rank creates every group, in the same order: creation is a collective.
    starts = range(0, launch.world_size, policy_group_size)
    members = [list(range(start, start + policy_group_size)) for start in starts]
    groups = [dist.new_group(ranks, timeout=timeout, backend="gloo") for ranks in members]
    return ProcessContext(
        rank=launch.rank,
        world_size=launch.world_size,
        local_rank=launch.local_rank,
        local_world_size=launch.local_world_size,
        device=device,
        mesh=_build_mesh(device.type, launch.world_size, processes.num_shard),
        host_group=dist.new_group(timeout=timeout, backend="gloo"),
        policy_group=groups[launch.rank // policy_group_size],
        policy_group_size=policy_group_size,
    )


def check_world(world_size: int, num_shard: int, policy_group_size: int) -> None:
    """Raises ConfigError unless the world divides into policy groups and into shard groups."""
    if world_size % policy_group_size:
        raise ConfigError(
            f"--policy_group_size {policy_group_size}: does not divide the {world_size} ranks; "
            f"allowed: {_divisors(world_size)}"
        )
    if world_size > num_shard and world_size % num_shard:
        raise ConfigError(
            f"--num_shard {num_shard}: does not divide the {world_size} ranks; allowed: "
            f"{_divisors(world_size)}, or more than {world_size}"
        )


def set_environment_defaults(environ: MutableMapping[str, str] | None = None) -> None:
    """Sets what libraries read from the environment, where the user has not."""
    environ = os.environ if environ is None else environ
    for name, value in _DEFAULT_VARIABLES.items():
        environ.setdefault(name, value)


def wandb_mode(environ: Mapping[str, str] | None = None) -> str:
    """WANDB_MODE, offline unless the user says otherwise."""
    environ = os.environ if environ is None else environ
    return environ.get("WANDB_MODE", "") or "offline"


def stop_processes() -> None:
    """Leaves the process group, if one was joined; the last thing before a process ends.

    A gloo thread that frees tensors while Python shuts down aborts the process. So sharded modules
    in reference cycles go first, and the threads get the time to drop what their last collective
    held, which they do only after its result is there.
    """
    if not dist.is_initialized():
        return
    gc.collect()
    dist.destroy_process_group()
    time.sleep(THREAD_GRACE_S)


def barrier(context: ProcessContext) -> None:
    """Waits until every rank is here."""
    dist.all_reduce(torch.zeros(1), group=context.host_group)


def gather_from_all(context: ProcessContext, value: T) -> list[T]:
    """The values of all ranks, in rank order, on every rank. Pickled: small host objects only."""
    return _gather(value, context.world_size, context.host_group)


def gather_in_policy_group(context: ProcessContext, value: T) -> list[T]:
    """The values of the ranks of this policy group, in rank order, on each of them."""
    return _gather(value, context.policy_group_size, context.policy_group)


def broadcast_from_main(context: ProcessContext, value: T | None) -> T:
    """Rank 0's value, on every rank."""
    box = [value]
    dist.broadcast_object_list(box, src=0, group=context.host_group)
    return box[0]


def mean_over_policy_group(context: ProcessContext, value: Tensor) -> Tensor:
    """Mean over the ranks of the policy group of an fp32 CPU tensor; a new tensor, same shape."""
    if value.device.type != "cpu" or value.dtype != torch.float32:
        raise ValueError(f"mean over ranks of a {value.dtype} on {value.device}: fp32 on the CPU")
    # Sum and divide: gloo has no averaging reduction in the older supported versions of torch.
    total = value.detach().clone()
    dist.all_reduce(total, group=context.policy_group)
    return total / context.policy_group_size


def first_error(context: ProcessContext, error: BaseException | str | None) -> str | None:
    """What the lowest failing rank reports, the same on every rank; None if no rank failed.

    Every rank calls it after a piece of work that can fail on one rank alone, and before the next
    collective: so all stop together instead of waiting for the one that left.
    """
    message = None
    if error is not None:
        kind = "" if isinstance(error, str) else f"{type(error).__name__}: "
        message = f"rank {context.rank}: {kind}{error}"
    messages = gather_from_all(context, message)
    return next((text for text in messages if text is not None), None)


def run_in_turns(context: ProcessContext, at_once: int, work: Callable[[], T]) -> T:
    """Runs `work` on every rank, on at most `at_once` ranks at the same time.

    `work` must not call a collective. When it raises on a rank, that rank raises its own error and
    the others raise RuntimeError with the first one's text, after all turns are over.
    """
    result: T | None = None
    error: Exception | None = None
    for first in range(0, context.world_size, at_once):
        if first <= context.rank < first + at_once:
            try:
                result = work()
            except Exception as caught:  # re-raised below, when no rank waits for this one
                error = caught
        barrier(context)
    message = first_error(context, error)
    if error is not None:
        raise error
    if message is not None:
        raise RuntimeError(message)
    return result


def _init_process_group(
    processes: ProcessConfig, launch: LaunchInfo, device: torch.device, timeout: timedelta
) -> None:
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    if launch.is_torchrun:
        dist.init_process_group(backend, timeout=timeout)
        return
    if processes.master_port is None:
        store = dist.HashStore()
    else:
        host, port = processes.master_addr, processes.master_port
        store = dist.TCPStore(host, port, launch.world_size, launch.rank == 0, timeout=timeout)
    dist.init_process_group(
        backend, timeout=timeout, store=store, rank=launch.rank, world_size=launch.world_size
    )


def _build_mesh(device_type: str, world_size: int, num_shard: int) -> DeviceMesh:
    if world_size <= num_shard:
        return init_device_mesh(device_type, (world_size,), mesh_dim_names=("shard",))
    shape = (world_size // num_shard, num_shard)
    return init_device_mesh(device_type, shape, mesh_dim_names=("replicate", "shard"))


def _gather(value: T, size: int, group: dist.ProcessGroup) -> list[T]:
    gathered: list[T | None] = [None] * size
    dist.all_gather_object(gathered, value, group=group)
    return gathered


def _read_int(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environ.get(name, "")
    if not text and default is not None:
        return default
    if not (text.isascii() and text.isdecimal()):
        raise ConfigError(f"{name} is {text!r}, expected a non-negative integer (set by torchrun)")
    return int(text)


def _divisors(number: int) -> str:
    return ", ".join(str(part) for part in range(1, number + 1) if number % part == 0)
