"""gunicorn configuration for a GenEval reward service, this project's or the public one.

    gunicorn -c scripts/reward/gunicorn_geneval.py "tools.geneval_service.app:create_app(...)"
    gunicorn -c .../scripts/reward/gunicorn_geneval.py "app_geneval:create_app()"

R3_REWARD_GPUS [8]: one synchronous worker for each GPU, 0 for one on the CPU.
R3_REWARD_BIND [127.0.0.1:18085]: the address.
OMP_NUM_THREADS, MKL_NUM_THREADS [4]: threads of each worker.
"""

import functools
import inspect
import os
import runpy
import shutil
import sys
import tempfile
from pathlib import Path

# Run, not imported: no folder of this project need be on the public service's path.
_shared = runpy.run_path(str(Path(__file__).with_name("gpu_workers.py")))
_workers = _shared["GpuWorkers"].from_environment(os.environ)

DEFAULT_THREADS = 4
METRICS_VARIABLE = "R3_REWARD_METRICS_DIR"

for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    _threads = os.environ.setdefault(_name, str(DEFAULT_THREADS))
    if not (_threads.isascii() and _threads.isdigit() and int(_threads) > 0):
        raise ValueError(f"{_name} is {_threads!r}, expected a positive number of threads")

bind = _workers.bind
workers = _workers.num_workers
worker_class = "sync"
preload_app = False
control_socket_disable = True  # newer versions would all open the same one in the home folder
timeout = _shared["WORKER_TIMEOUT_S"]
pre_fork = _workers.pre_fork
post_fork = _workers.post_fork
child_exit = _workers.child_exit
when_ready = _shared["limit_socket_waits"]


def on_starting(server):
    """In the master: the folder through which workers add up their counters."""
    os.environ[METRICS_VARIABLE] = tempfile.mkdtemp(prefix="geneval_metrics_")


def on_exit(server):
    """In the master, at the end."""
    shutil.rmtree(os.environ[METRICS_VARIABLE], ignore_errors=True)


def post_worker_init(worker):
    """In the worker, after the app was loaded and before it serves.

    The public app cuts out the crops whose colors it judges in a DataLoader with four processes,
    started anew for every object class of every picture, and has no setting for their number.
    """
    module = sys.modules.get("torch.utils.data")
    if module is not None:
        load_in_process(module.DataLoader)


def load_in_process(loader_class):
    """Makes every DataLoader that this process will construct load in the process itself."""
    construct = loader_class.__init__
    signature = inspect.signature(construct)

    @functools.wraps(construct)
    def construct_in_process(self, *args, **kwargs):
        bound = signature.bind(self, *args, **kwargs)
        # The others mean something to worker processes only and are refused without any.
        for name in ("prefetch_factor", "persistent_workers", "timeout", "multiprocessing_context"):
            bound.arguments.pop(name, None)
        bound.arguments["num_workers"] = 0
        construct(*bound.args, **bound.kwargs)

    loader_class.__init__ = construct_in_process
