"""gunicorn configuration of the public GenEval service as it comes, for comparisons.

    gunicorn -c .../scripts/reward/gunicorn_geneval_baseline.py "app_geneval:create_app()"

One synchronous worker for each GPU as in gunicorn_geneval.py, with the same R3_REWARD_GPUS and
R3_REWARD_BIND. Threads and the processes that crop for the colors are left at their defaults.
"""

import os
import runpy
from pathlib import Path

_shared = runpy.run_path(str(Path(__file__).with_name("gpu_workers.py")))
_workers = _shared["GpuWorkers"].from_environment(os.environ)

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
