"""The gunicorn configurations: the GPU and the threads of each worker, and its crop workers."""

import os
import runpy
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import requests
from torch.utils.data import DataLoader

from tests.tools.geneval_service.gunicorn_process import REWARD_SCRIPTS, free_port, serving, spawn

OURS = REWARD_SCRIPTS / "gunicorn_geneval.py"
BASELINE = REWARD_SCRIPTS / "gunicorn_geneval_baseline.py"
VARIABLES = (
    "R3_REWARD_GPUS",
    "R3_REWARD_BIND",
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "CUDA_VISIBLE_DEVICES",
)
# What the public app does that matters here; its real one needs packages of its own.
PUBLIC_APP = """
import json, os, time
import torch.utils.data

def create_app():
    seen_at_import = {name: os.environ.get(name) for name in NAMES}

    def app(environ, start_response):
        loader = torch.utils.data.DataLoader([1], batch_size=16, num_workers=4)
        time.sleep(0.05)  # so that a second request goes to the second worker
        start_response("200 OK", [("Content-Type", "application/json")])
        record = {**seen_at_import, "num_workers": loader.num_workers, "pid": os.getpid()}
        return [json.dumps(record).encode()]

    return app
"""
TORCH = """
class DataLoader:
    def __init__(self, dataset, batch_size=1, num_workers=0):
        self.num_workers = num_workers
"""


@pytest.fixture
def settings(monkeypatch):
    """Runs a configuration under the given variables and returns its settings."""

    def run(path=OURS, **variables):
        for name in VARIABLES:
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        return runpy.run_path(str(path))

    yield run
    for name in VARIABLES:  # the configuration sets some itself
        monkeypatch.setenv(name, "")


@pytest.mark.parametrize("path", [OURS, BASELINE])
def test_defaults(settings, path):
    found = settings(path)
    assert (found["workers"], found["bind"]) == (8, "127.0.0.1:18085")
    assert (found["worker_class"], found["preload_app"]) == ("sync", False)
    found = settings(path, R3_REWARD_GPUS="3", R3_REWARD_BIND="0.0.0.0:1")
    assert (found["workers"], found["bind"]) == (3, "0.0.0.0:1")


def test_threads_are_capped_by_ours_and_left_alone_by_the_baseline(settings):
    settings()
    assert (os.environ["OMP_NUM_THREADS"], os.environ["MKL_NUM_THREADS"]) == ("4", "4")
    settings(OMP_NUM_THREADS="2")
    assert (os.environ["OMP_NUM_THREADS"], os.environ["MKL_NUM_THREADS"]) == ("2", "4")
    settings(BASELINE)
    assert "OMP_NUM_THREADS" not in os.environ and "MKL_NUM_THREADS" not in os.environ
    for value in ("0", "-1", "many", ""):
        with pytest.raises(ValueError, match="MKL_NUM_THREADS is"):
            settings(MKL_NUM_THREADS=value)


@pytest.mark.parametrize(
    ("variables", "gpus"),
    [
        ({}, ["0", "1", "2", "3", "4", "5", "6", "7"]),
        ({"R3_REWARD_GPUS": "2"}, ["0", "1"]),
        ({"R3_REWARD_GPUS": "0"}, [""]),
        ({"R3_REWARD_GPUS": "0", "CUDA_VISIBLE_DEVICES": "3"}, [""]),
        ({"CUDA_VISIBLE_DEVICES": "4,6"}, ["4", "6"]),
        ({"CUDA_VISIBLE_DEVICES": "4, 6", "R3_REWARD_GPUS": "1"}, ["4"]),
        ({"CUDA_VISIBLE_DEVICES": "GPU-1a,GPU-2b"}, ["GPU-1a", "GPU-2b"]),
    ],
)
def test_gpus_of_the_workers(variables, gpus):
    list_gpus = runpy.run_path(str(REWARD_SCRIPTS / "gpu_workers.py"))["list_gpus"]
    assert list_gpus(variables) == gpus


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"R3_REWARD_GPUS": "all"}, "R3_REWARD_GPUS is 'all'"),
        ({"R3_REWARD_GPUS": "-1"}, "R3_REWARD_GPUS is '-1'"),
        ({"R3_REWARD_GPUS": "3", "CUDA_VISIBLE_DEVICES": "4,6"}, "3, but .*=4,6 lists less"),
    ],
)
def test_gpus_that_are_not_there(settings, variables, message):
    with pytest.raises(ValueError, match=message):
        settings(**variables)


def test_a_worker_that_is_replaced_leaves_its_gpu_to_the_next(settings):
    found = settings(R3_REWARD_GPUS="2")
    workers = [SimpleNamespace() for _ in range(5)]
    for worker in workers[:2]:
        found["pre_fork"](None, worker)
    found["child_exit"](None, workers[0])
    found["pre_fork"](None, workers[2])
    assert [worker.gpu for worker in workers[:3]] == ["0", "1", "0"]
    # A reload starts new workers before it ends the old ones: they share GPUs for a while.
    for worker in workers[3:]:
        found["pre_fork"](None, worker)
    assert [worker.gpu for worker in workers[3:]] == ["0", "1"]
    found["post_fork"](None, workers[4])
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "1"


def test_loaders_load_in_the_process_itself(settings, monkeypatch):
    monkeypatch.setattr(DataLoader, "__init__", DataLoader.__init__)  # restored at the end
    settings()["post_worker_init"](None)
    loader = DataLoader([1, 2, 3], 2, num_workers=4, prefetch_factor=2, persistent_workers=True)
    assert loader.num_workers == 0 and [len(batch) for batch in loader] == [2, 1]
    assert DataLoader([1], 1, False, None, None, 4, timeout=9).num_workers == 0


@pytest.fixture
def public_folder(tmp_path):
    (tmp_path / "app_geneval.py").write_text(PUBLIC_APP.replace("NAMES", repr(VARIABLES)))
    (tmp_path / "torch/utils").mkdir(parents=True)
    (tmp_path / "torch/__init__.py").touch()
    (tmp_path / "torch/utils/__init__.py").touch()
    (tmp_path / "torch/utils/data.py").write_text(TORCH)
    return tmp_path


@pytest.mark.parametrize(("path", "num_workers", "threads"), [(OURS, 0, "4"), (BASELINE, 4, None)])
def test_the_public_app_is_served(public_folder, path, num_workers, threads):
    port = free_port()
    arguments = ["gunicorn", "-c", path, "app_geneval:create_app()"]
    variables = {"R3_REWARD_GPUS": "2", "R3_REWARD_BIND": f"127.0.0.1:{port}"}
    service = serving(arguments, port, public_folder / "log", public_folder, **variables)
    with service as url, ThreadPoolExecutor(8) as pool:
        answers = pool.map(lambda _: requests.get(url, timeout=20).json(), range(40))
        workers = {record.pop("pid"): record for record in answers}
    assert sorted(r["CUDA_VISIBLE_DEVICES"] for r in workers.values()) == ["0", "1"]
    for record in workers.values():
        assert record["num_workers"] == num_workers
        assert record["OMP_NUM_THREADS"] == record["MKL_NUM_THREADS"] == threads


def test_the_command_refuses_what_cannot_work(tmp_path):
    for arguments, message in (
        (["--detector", "mask2former"], "needs --model-folder and --clip-folder"),
        (["--detector", "ssd", "--gpus", "-1"], "--gpus -1"),
        (["--detector", "yolo"], "invalid choice"),
    ):
        log = tmp_path / "log"
        assert spawn(["tools.geneval_service", *arguments], log).wait(timeout=30) == 2
        assert message in log.read_text()
