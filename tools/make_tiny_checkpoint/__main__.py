"""Writes a tiny BAGEL checkpoint: python -m tools.make_tiny_checkpoint OUT [--seed 0]."""

import argparse
import logging
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tools.make_tiny_checkpoint.maker import NUM_STEPS, make_checkpoint


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 2 if OUT is taken."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.make_tiny_checkpoint",
        description="Writes a tiny BAGEL checkpoint, briefly trained; offline, on one CPU thread.",
    )
    parser.add_argument("out", type=Path, help="folder to write, new or empty")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=NUM_STEPS, help="training steps")
    options = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    start = time.monotonic()
    try:
        make_checkpoint(options.out, options.seed, options.steps)
    except ValueError as error:
        print(f"make_tiny_checkpoint: {error}", file=sys.stderr)
        return 2
    print(f"done in {time.monotonic() - start:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
