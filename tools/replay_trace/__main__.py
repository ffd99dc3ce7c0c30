"""`python -m tools.replay_trace DIR --checkpoint CKPT`: exits 1 where a deviation is too large."""

import argparse
import socket
import sys
import tempfile
from pathlib import Path

import torch
import torch.multiprocessing as mp

from tools.replay_trace.compare import Deviations, limits_for, table
from tools.replay_trace.trace import Trace
from tools.replay_trace.worker import Replay, run_rank


def run_ranks(replay: Replay) -> Deviations:
    """Runs all ranks as processes and merges what they found."""
    world_size = Trace(replay.folder).world_size
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as out:
        mp.spawn(run_rank, args=(replay, port, Path(out)), nprocs=world_size)
        merged = Deviations()
        for rank in range(world_size):
            merged.merge(Deviations(**torch.load(Path(out) / f"rank{rank}.pt")))
    return merged


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.replay_trace", description=__doc__)
    parser.add_argument("folder", type=Path, metavar="DIR", help="folder with trace.json")
    parser.add_argument("--checkpoint", type=Path, required=True, help="BAGEL folder it ran on")
    parser.add_argument(
        "--pictures",
        choices=("trace", "own"),
        default="trace",
        help="whose pictures are rewarded and refined: the trace's, or those drawn here",
    )
    parser.add_argument(
        "--num_shard", type=int, default=0, help="ranks a copy of the weights; default: all of them"
    )
    args = parser.parse_args(argv)
    trace = Trace(args.folder)
    is_thresholded = trace.config["reward"]["threshold"] is not None
    deviations = run_ranks(
        Replay(args.folder, args.checkpoint, args.pictures, args.num_shard)
    )
    text, passed = table(deviations, limits_for(args.pictures, is_thresholded))
    print(f"{args.folder.name}: {trace.world_size} ranks, {trace.num_steps} steps, "
          f"recipe {trace.config['recipe']}, pictures {args.pictures}")
    print(text)
    print("passed" if passed else "FAILED")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
