"""Entry of a training run: torchrun starts this file once a rank."""

import logging
import sys
import time
import traceback
from pathlib import Path

import torch

from modeling.bagel.switches import log_inactive_once
from train.config import TrainConfig, parse_args
from train.dist import (
    ProcessContext,
    broadcast_from_main,
    first_error,
    read_launch,
    start_processes,
    stop_processes,
    wandb_mode,
)
from train.environment import write_run_files
from train.flags import ConfigError
from train.run import Run
from train.trainer import StepError
from train.validate import validate_run

logger = logging.getLogger("faster_r3")

BAD_CONFIG_EXIT = 2
FAILED_EXIT = 1
GRACE_S = 20.0


def main(argv: list[str] | None = None) -> int:
    """Runs one rank. Returns the exit code: 2 for a refused configuration, 1 for a failed run."""
    argv = sys.argv[1:] if argv is None else argv
    rank = 0
    try:
        launch = read_launch()
        rank = launch.rank
        config = parse_args(argv)
        _set_up_logging(config, rank)
        validate_run(config, launch.world_size)
        context = start_processes(config.processes, config.rl.policy_group_size, launch)
    except ConfigError as error:
        if rank != 0:
            # torchrun ends all ranks when one does: leave rank 0 the time to say why.
            time.sleep(GRACE_S)
        print_error(str(error))
        return BAD_CONFIG_EXIT
    try:
        return _train(config, context, argv)
    except Exception as failure:  # of one rank alone, most likely: it must say so by itself
        traceback.print_exc()
        print_error(f"rank {rank}: {type(failure).__name__}: {failure}")
        return FAILED_EXIT
    finally:
        stop_processes()


def print_error(message: str) -> None:
    """One line on the error stream; the last one of a run that failed."""
    sys.stderr.write(f"error: {message}\n")
    sys.stderr.flush()


def _train(config: TrainConfig, context: ProcessContext, argv: list[str]) -> int:
    _set_up_numerics(config, context)
    if context.is_main:
        write_run_files(config.paths.run_dir, config, config.switches, [sys.argv[0], *argv])
    run, error = None, None
    try:
        run = Run(config, context, wandb_mode())
    except ValueError as caught:
        # Checkpoint and data errors are found on every rank alike, or passed on by first_error.
        error = caught
    message = first_error(context, error)
    if message is not None:
        if context.is_main:
            print_error(message)
        return FAILED_EXIT
    try:
        run.train()
    except StepError as failure:
        if context.is_main:
            print_error(str(failure))
        return FAILED_EXIT
    finally:
        run.close()
    broadcast_from_main(context, None)  # nobody tears the group down under a rank still at work
    return 0


def _set_up_logging(config: TrainConfig, rank: int) -> None:
    level = getattr(logging, config.report.log_level.upper())
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter(f"%(asctime)s rank {rank} %(levelname)s %(message)s"))
    handler.formatter.converter = time.localtime
    logger.addHandler(handler)
    # Ranks agree on nearly everything; the others speak up only when something is wrong.
    logger.setLevel(level if rank == 0 else max(level, logging.WARNING))
    logger.propagate = False


def _set_up_numerics(config: TrainConfig, context: ProcessContext) -> None:
    torch.set_float32_matmul_precision("high")
    log_inactive_once(config.switches, context.device.type)


if __name__ == "__main__":
    # `torchrun train/online_rl.py` puts train/ on the path, not the tree above it.
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    sys.exit(main())
