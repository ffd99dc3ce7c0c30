"""Runs RL steps of a random model of the real widths with the real trainer, and prints its phases.

    python -m tools.bench_step --layers 4 --steps 4 --json OUT.json

Writes the checkpoint, starts the embedded reward service and launches torchrun on the GPUs of this
machine, with the recipe's sizes: 4 samples a rank, 512 x 512 pictures, thoughts up to their limits
(random weights never end one early).
"""

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import torch

from tools.make_random_checkpoint import write_checkpoint
from tools.reward_service.server import RewardServer
from train.metrics import read_metrics

ROOT = Path(__file__).resolve().parents[1]


@contextlib.contextmanager
def reward_service() -> Iterator[str]:
    """The embedded service on a free port; yields its URL."""
    server = RewardServer("127.0.0.1", 0)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


def launch(checkpoint: Path, out: Path, args: argparse.Namespace, extra: list[str]) -> Path:
    """Trains and returns the run folder."""
    with reward_service() as url:
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            f"--nproc_per_node={args.ranks}",
            str(ROOT / "train" / "online_rl.py"),
            f"--model_path={checkpoint}",
            f"--log_dir={out}",
            "--exp_name=bench",
            f"--reward_url={url}",
            f"--total_steps={args.steps}",
            f"--group_size={4 * args.ranks}",
            f"--policy_group_size={args.ranks}",
            "--save_every=0",
            "--eval_freq=0",
            "--rollout_vis_step=0",
            *extra,
        ]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "WANDB_MODE": "disabled"}
        subprocess.run(command, check=True, env=environment)
    return out / "R3" / "bench"


def print_phases(rows: list[dict]) -> None:
    """One column a step, one line a phase, seconds."""
    names = list(dict.fromkeys(name for row in rows for name in row if name.startswith("time/")))
    print(f"{'seconds':<28}" + "".join(f"{row['step']:>4} {row['stage']:<9}" for row in rows))
    for name in names:
        shown = "".join(f"{_cell(row.get(name)):>14}" for row in rows)
        print(f"{name.removeprefix('time/'):<28}{shown}")
    for name in (
        "tokens/packed",
        "tokens/decoded",
        "memory/peak_gib",
        "drift/text_mean",
        "drift/text_p99",
        "drift/image_mean",
        "ratio/text_min",
        "ratio/text_max",
        "ratio/image_mean",
        "loss/text_kl",
        "optim/grad_norm",
    ):
        shown = "".join(f"{_cell(row.get(name)):>14}" for row in rows)
        print(f"{name:<28}{shown}")


def _cell(value: object) -> str:
    return f"{value:.5g}" if isinstance(value, (int, float)) else "-"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--json", type=Path, help="where the figures go")
    args, extra = parser.parse_known_args(argv)
    if not torch.cuda.is_available():
        print("error: no GPU: this command times real widths", file=sys.stderr)
        return 2
    scratch = Path(tempfile.mkdtemp())
    try:
        write_checkpoint(scratch / "checkpoint", args.layers, 26, seed=0)
        run_dir = launch(scratch / "checkpoint", scratch / "out", args, extra)
        rows = read_metrics(run_dir)
        print_phases(rows)
        if args.json:
            settings = {"layers": args.layers, "ranks": args.ranks, "extra": extra}
            environment = json.loads((run_dir / "environment.json").read_text())
            args.json.write_text(
                json.dumps({"settings": settings, "environment": environment, "steps": rows})
            )
    finally:
        shutil.rmtree(scratch)
    return 0


if __name__ == "__main__":
    sys.exit(main())
