"""Process set-up: what torchrun says, what is refused, and real gloo groups of 1, 2 and 4 ranks."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from train import dist as subject
from train.dist import LaunchInfo, check_launch, check_world, choose_device, read_launch
from train.flags import ConfigError
from train.settings import ProcessConfig

ROOT = Path(__file__).resolve().parents[2]
WORKER = Path(__file__).with_name("dist_worker.py")
TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "29509",
}


def test_without_torchrun_it_is_a_world_of_one():
    assert read_launch({"PATH": "/bin"}) == LaunchInfo()


def test_torchrun_variables_are_read():
    launch = read_launch(TORCHRUN)
    assert launch == LaunchInfo(5, 8, 1, 4, 1, True) and launch.num_nodes == 2


@pytest.mark.parametrize(
    "change, message",
    [
        ({"WORLD_SIZE": None}, "WORLD_SIZE not set"),
        ({"RANK": None, "MASTER_PORT": None}, "RANK, MASTER_PORT not set"),
        ({"RANK": "first"}, "RANK is 'first', expected a non-negative integer"),
        ({"RANK": "-1"}, "RANK is '-1', expected a non-negative integer"),
        ({"RANK": "8"}, "rank 8 of 8"),
        ({"LOCAL_RANK": "4"}, "local rank 4 of 4"),
    ],
)
def test_torn_launches_are_refused(change, message):
    environ = {**TORCHRUN, **change}
    environ = {name: value for name, value in environ.items() if value is not None}
    with pytest.raises(ConfigError, match=message):
        read_launch(environ)


@pytest.mark.parametrize("flag, wrong", [("nnodes", 1), ("nproc_per_node", 8), ("node_rank", 0)])
def test_flags_that_contradict_torchrun_are_refused(flag, wrong):
    launch = read_launch(TORCHRUN)
    check_launch(ProcessConfig(nnodes=2, nproc_per_node=4, node_rank=1), launch)
    check_launch(ProcessConfig(), launch)
    with pytest.raises(ConfigError, match=f"--{flag} {wrong}: the processes were started with"):
        check_launch(ProcessConfig(**{flag: wrong}), launch)


@pytest.mark.parametrize(
    "world, num_shard, group, message",
    [
        (8, 8, 3, "--policy_group_size 3: does not divide the 8 ranks; allowed: 1, 2, 4, 8"),
        (2, 8, 4, "--policy_group_size 4: does not divide the 2 ranks; allowed: 1, 2"),
        (12, 8, 4, "--num_shard 8: does not divide the 12 ranks; allowed: 1, 2, 3, 4, 6, 12, or"),
    ],
)
def test_worlds_that_do_not_divide_are_refused(world, num_shard, group, message):
    with pytest.raises(ConfigError) as error:
        check_world(world, num_shard, group)
    assert message in str(error.value)


def test_worlds_that_divide_pass():
    for world, num_shard, group in [(1, 8, 1), (2, 8, 2), (6, 8, 2), (16, 8, 4), (8, 1, 8)]:
        check_world(world, num_shard, group)


def test_device_is_the_local_gpu_if_there_is_one(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    launch = LaunchInfo(rank=3, world_size=4, local_rank=1, local_world_size=2)
    assert choose_device("auto", launch) == torch.device("cuda", 1)
    assert choose_device("cpu", launch) == torch.device("cpu")
    for local_rank in range(3):  # all ranks refuse alike, so that the first one can say it
        crowded = LaunchInfo(local_rank, 3, local_rank, 3)
        with pytest.raises(ConfigError, match="--nproc_per_node 3: 2 GPUs are visible"):
            choose_device("cuda", crowded)
        assert choose_device("cpu", crowded) == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device("auto", launch) == torch.device("cpu")
    with pytest.raises(ConfigError, match="--device cuda: no GPU"):
        choose_device("cuda", launch)


def test_wandb_is_offline_unless_the_user_says_otherwise():
    assert subject.wandb_mode({}) == subject.wandb_mode({"WANDB_MODE": ""}) == "offline"
    assert subject.wandb_mode({"WANDB_MODE": "online"}) == "online"


def test_defaults_for_libraries_leave_the_user_alone():
    fresh, given = {}, {"TOKENIZERS_PARALLELISM": "true"}
    subject.set_environment_defaults(fresh)
    subject.set_environment_defaults(given)
    assert fresh == {"TOKENIZERS_PARALLELISM": "false"}
    assert given == {"TOKENIZERS_PARALLELISM": "true"}


def test_mean_over_ranks_wants_fp32():
    with pytest.raises(ValueError, match="fp32 on the CPU"):
        subject.mean_over_policy_group(None, torch.zeros(2, dtype=torch.float64))


def run_world(world_size: int, num_shard: int, policy_group_size: int) -> list[dict]:
    """Starts the worker on every rank and returns what each printed, in rank order."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    workers = []
    for rank in range(world_size):
        environ = {
            **os.environ,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
        }
        command = [sys.executable, str(WORKER), str(num_shard), str(policy_group_size)]
        pipe = subprocess.PIPE
        workers.append(subprocess.Popen(command, env=environ, stdout=pipe, stderr=pipe, text=True))
    try:
        finished = [worker.communicate(timeout=120) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    for worker, (_, errors) in zip(workers, finished, strict=True):
        assert worker.returncode == 0, errors[-2000:]
    return [json.loads(output.strip().splitlines()[-1]) for output, _ in finished]


def test_a_world_of_one_works_without_torchrun(monkeypatch):
    for name in TORCHRUN:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")  # what it sets must not outlive this test
    context = subject.start_processes(ProcessConfig(device="cpu"), policy_group_size=1)
    try:
        assert context.is_main and context.mesh.size() == 1
        assert subject.gather_in_policy_group(context, "x") == ["x"]
        assert context.all_gather_object(1) == [1]
        subject.barrier(context)
    finally:
        subject.stop_processes()
    subject.stop_processes()  # a second call has nothing to do


def test_two_ranks_share_a_prompt_and_the_weights():
    ranks = run_world(world_size=2, num_shard=8, policy_group_size=2)
    for rank, seen in enumerate(ranks):
        assert seen["rank"] == rank and seen["mesh"] == {"shard": 2} and seen["local_rows"] == 4
        assert seen["group_id"] == 0 and seen["group"] == [0, 1]
        assert seen["all"] == ["r0", "r1"] and seen["main"] == "from 0"
        assert seen["group_mean"] == [0.5, 1.0]
        assert seen["scores"] == [rank, 2 * rank]  # the input is left alone
        assert seen["no_error"] is None and seen["error"] == "rank 1: ValueError: bad"
        assert seen["turn"] == rank * 10
    assert ranks[0]["turn_error"] == "RuntimeError: rank 1: OSError: disk is gone"
    assert ranks[1]["turn_error"] == "OSError: disk is gone"


def test_four_ranks_replicate_when_they_exceed_num_shard():
    ranks = run_world(world_size=4, num_shard=2, policy_group_size=2)
    for rank, seen in enumerate(ranks):
        assert seen["mesh"] == {"replicate": 2, "shard": 2} and seen["local_rows"] == 4
        assert seen["group_id"] == rank // 2
        assert seen["group"] == [rank // 2 * 2, rank // 2 * 2 + 1]
        assert seen["group_mean"] == [rank // 2 * 2 + 0.5, rank // 2 * 4 + 1.0]
