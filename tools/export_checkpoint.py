"""Turns a training checkpoint into a BAGEL folder that any BAGEL loader takes.

    python -m tools.export_checkpoint RUN/checkpoints/step_000050 --model_path SOURCE OUT

One process without a GPU. The weights are rounded to bf16 as they are read, so it takes their size
in memory (29 GB for BAGEL-7B-MoT) and as much on the disk. SOURCE is the folder that the run
started from: configuration, tokenizer, position tables and autoencoder are taken from there.
"""

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from modeling.bagel.bagel import Bagel
from modeling.bagel.export import export_checkpoint
from modeling.bagel.weights import read_bagel_config
from train.checkpoint import load_weights
from train.engine import meta_model


def main(argv: Sequence[str] | None = None) -> int:
    """Exports; returns 1 and says why where that is not possible."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.export_checkpoint", description=__doc__.splitlines()[0]
    )
    parser.add_argument("checkpoint", type=Path, help="a step_... folder of a run")
    parser.add_argument("out", type=Path, help="folder to write; must not exist")
    parser.add_argument(
        "--model_path", type=Path, required=True, help="BAGEL folder that the run started from"
    )
    options = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        # An existing folder is found before 29 GB have been read.
        if options.out.exists():
            raise ValueError(f"{options.out} exists already, export to another folder")
        model = read_model(options.checkpoint, options.model_path)
        export_checkpoint(model, options.model_path, options.out, is_writer=True)
    except (ValueError, RuntimeError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def read_model(checkpoint: Path, source: Path) -> Bagel:
    """The model of `source` with the weights of a training checkpoint, bf16 on the CPU."""
    model = meta_model(read_bagel_config(source)).to(torch.bfloat16)
    model.to_empty(device="cpu")
    load_weights(checkpoint, model)
    return model


if __name__ == "__main__":
    sys.exit(main())
