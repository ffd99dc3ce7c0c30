"""Start the GenEval reward service: python -m tools.geneval_service --detector mask2former|ssd.

This is gunicorn with scripts/reward/gunicorn_geneval.py, so that there is one way to serve.
"""

import argparse
import os
import sys
from pathlib import Path

from gunicorn.app.wsgiapp import WSGIApplication

ROOT = Path(__file__).resolve().parents[2]
CONFIG = ROOT / "scripts" / "reward" / "gunicorn_geneval.py"
ABOUT = "GenEval reward service: POST / scores pictures, GET /health and /metrics tell about it."


def main(argv: list[str] | None = None) -> None:
    """Serve until SIGTERM or Ctrl-C; ends with a status other than 0 if it refuses to serve."""
    options = _parse(argv)
    if options.gpus is not None:
        os.environ["R3_REWARD_GPUS"] = str(options.gpus)
    elif options.detector == "ssd":
        os.environ.setdefault("R3_REWARD_GPUS", "0")
    app = {
        "detector": options.detector,
        "model_folder": _absolute(options.model_folder),
        "clip_folder": _absolute(options.clip_folder),
        "device": options.device,
        "batch_size": options.batch_size,
    }
    arguments = ", ".join(f"{name}={value!r}" for name, value in app.items())
    sys.argv = ["gunicorn", "--config", str(CONFIG), "--pythonpath", str(ROOT)]
    if options.host is not None or options.port is not None:
        sys.argv += ["--bind", f"{options.host or '127.0.0.1'}:{options.port or 18085}"]
    sys.argv.append(f"tools.geneval_service.app:create_app({arguments})")
    WSGIApplication().run()


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tools.geneval_service", description=ABOUT)
    parser.add_argument("--detector", choices=("mask2former", "ssd"), default="mask2former")
    parser.add_argument(
        "--model-folder", help="Mask2Former in transformers' layout; the network's files for ssd"
    )
    parser.add_argument("--clip-folder", help="CLIP ViT-L/14 in transformers' layout")
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    parser.add_argument("--batch-size", type=int, default=8, help="pictures at once")
    parser.add_argument(
        "--gpus", type=int, help="one worker each, 0 for the CPU [R3_REWARD_GPUS, else 8; ssd 0]"
    )
    parser.add_argument("--host", help="address to listen on [that of R3_REWARD_BIND]")
    parser.add_argument("--port", type=int, help="port [that of R3_REWARD_BIND, 18085]")
    options = parser.parse_args(argv)
    if options.detector == "mask2former" and not (options.model_folder and options.clip_folder):
        parser.error("--detector mask2former needs --model-folder and --clip-folder")
    if options.gpus is not None and options.gpus < 0:
        parser.error(f"--gpus {options.gpus}, expected 0 or more")
    return options


def _absolute(folder: str | None) -> str | None:
    return None if folder is None else str(Path(folder).resolve())


if __name__ == "__main__":
    main()
