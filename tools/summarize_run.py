"""Prints a run as a short table: python -m tools.summarize_run RUN_DIR [--last N]."""

import argparse
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from train.metrics import METRICS_FILE, read_metrics
from train.reports import REPORT_FOLDER

# Heading, metrics joined with a slash, format.
COLUMNS: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("step", ("step",), "d"),
    ("stage", ("stage",), "s"),
    ("reward", ("reward/mean",), ".3f"),
    ("format", ("reward/format",), ".2f"),
    ("ratio text/image", ("ratio/text_mean", "ratio/image_mean"), ".4f"),
    ("step time (s)", ("time/step",), ".2f"),
)
EVALUATION = "eval/"


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table; returns 1 where the run has no metrics."""
    parser = argparse.ArgumentParser(prog="python -m tools.summarize_run", description=__doc__)
    parser.add_argument("run_dir", type=Path, help="folder of the run, with metrics.jsonl")
    parser.add_argument("--last", type=int, default=0, help="only the last N steps; 0 shows all")
    options = parser.parse_args(argv)
    rows = read_metrics(options.run_dir)
    if not rows:
        path = options.run_dir / METRICS_FILE
        print(f"{path} is missing or holds no steps; is this a run folder?", file=sys.stderr)
        return 1
    shown = rows[-options.last :] if options.last > 0 else rows
    print("\n".join(format_table(shown)))
    for line in format_evaluation(rows):
        print(line)
    for line in describe_outputs(options.run_dir):
        print(line)
    return 0


def format_table(rows: Sequence[Mapping[str, object]]) -> list[str]:
    """The rows as aligned lines under a heading; what a row lacks is a dash."""
    table = [[heading for heading, _, _ in COLUMNS]]
    for row in rows:
        table.append(
            ["/".join(_cell(row.get(name), spec) for name in names) for _, names, spec in COLUMNS]
        )
    widths = [max(len(line[column]) for line in table) for column in range(len(COLUMNS))]
    return ["  ".join(map(str.rjust, line, widths)) for line in table]


def format_evaluation(rows: Sequence[Mapping[str, object]]) -> list[str]:
    """The figures of the newest evaluation, one a line; nothing where there was none."""
    for row in reversed(rows):
        figures = {name: value for name, value in row.items() if name.startswith(EVALUATION)}
        if figures:
            lines = [f"evaluation at step {row['step']}"]
            return lines + [f"  {name}  {_cell(value, '.3f')}" for name, value in figures.items()]
    return []


def describe_outputs(run_dir: Path) -> list[str]:
    """Where the metrics, the report and the checkpoints of a run lie."""
    lines = [f"metrics      {run_dir / METRICS_FILE}"]
    index = run_dir / REPORT_FOLDER / "index.html"
    lines.append(f"report       {index if index.is_file() else 'none was written'}")
    folders = sorted(run_dir.glob("checkpoints/step_*"))
    return lines + [f"checkpoint   {folder}" for folder in folders]


def _cell(value: object, spec: str) -> str:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return value if isinstance(value, str) and value else "-"
    return format(value, spec) if math.isfinite(value) and spec != "s" else str(value)


if __name__ == "__main__":
    sys.exit(main())
