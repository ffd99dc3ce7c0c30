"""What bounds a rollout on this GPU: its copy rate, and the rate of products that it can keep up.

    python -m tools.gpu_limits --json OUT.json

A large matrix product may run faster for some milliseconds than the card's power allows for long:
each product is timed as a short burst after a pause and for some seconds, while clock and power are
read from nvidia-smi.
"""

import argparse
import json
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch

from tools.bench_rollout import SAMPLES, TOKENS
from tools.make_random_checkpoint import LLM
from tools.operator_check import copy_rate
from tools.profile_rollout import milliseconds

BURST_MS, PAUSE_S, SUSTAINED_S, SAMPLE_MS = 30.0, 1.0, 2.0, 100
QUERY = "clocks.sm,clocks.max.sm,power.draw,power.limit"


def parse_sample(line: str) -> tuple[float, ...]:
    """One line of nvidia-smi: the numbers of QUERY, MHz and W.

    Raises:
        ValueError: the line holds something else.
    """
    cells = [cell.strip() for cell in line.split(",")]
    if len(cells) != QUERY.count(",") + 1:
        raise ValueError(f"nvidia-smi printed {line!r}, expected {QUERY}")
    return tuple(float(cell) for cell in cells)


class Watch:
    """Clock and power while a block runs. Lines that are no numbers raise when the block ends."""

    def __enter__(self) -> "Watch":
        command = ["nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,noheader,nounits", "-i", "0"]
        self._process = subprocess.Popen(
            [*command, "-lms", str(SAMPLE_MS)], stdout=subprocess.PIPE, text=True
        )
        self._lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        return self

    def _read(self) -> None:
        self._lines.extend(self._process.stdout)

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait()
        self._reader.join()

    def summary(self) -> dict[str, float]:
        """Medians of the second half, when clocks have settled."""
        samples = [parse_sample(line) for line in self._lines]
        settled = samples[len(samples) // 2 :]
        names = ("sm_mhz", "max_sm_mhz", "watts", "watts_limit")
        return {
            name: statistics.median(column)
            for name, column in zip(names, zip(*settled, strict=True), strict=True)
        }


def run_for(work: Callable[[], None], duration_ms: float) -> float:
    """Mean milliseconds of a run, over runs that fill the given time without a wait between."""
    return milliseconds(work, max(3, round(duration_ms / milliseconds(work, 1))))


def measure(outs: int, inner: int) -> dict[str, float]:
    """TFLOP/s of a product of a flow's rows, in a burst and kept up, with clock and power."""
    rows = SAMPLES * TOKENS
    x = torch.randn(rows, inner, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(outs, inner, device="cuda", dtype=torch.bfloat16) * 0.02
    operations = 2 * rows * outs * inner

    def product() -> None:
        torch.mm(x, weight.t())

    run_for(product, BURST_MS)
    time.sleep(PAUSE_S)
    burst = run_for(product, BURST_MS)
    with Watch() as watch:
        sustained = run_for(product, SUSTAINED_S * 1e3)
    return {
        "burst_tflop_s": operations / burst / 1e9,
        "sustained_tflop_s": operations / sustained / 1e9,
        **watch.summary(),
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="where the figures go")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("error: no GPU: there is nothing to measure", file=sys.stderr)
        return 2
    hidden, mlp = LLM["hidden_size"], LLM["intermediate_size"]
    record = {"copy_tb_s": copy_rate() / 1e12}
    print(f"copy {record['copy_tb_s']:.2f} TB/s")
    for name, outs, inner in (("q", hidden, hidden), ("gate", mlp, hidden), ("down", hidden, mlp)):
        figures = measure(outs, inner)
        record[name] = figures
        print(
            f"{name}: {figures['burst_tflop_s']:.0f} TFLOP/s in a burst, "
            f"{figures['sustained_tflop_s']:.0f} kept up at {figures['sm_mhz']:.0f} of "
            f"{figures['max_sm_mhz']:.0f} MHz and {figures['watts']:.0f} of "
            f"{figures['watts_limit']:.0f} W"
        )
    if args.json:
        args.json.write_text(json.dumps(record, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
