"""Says whether a run has learned, and plots it: python -m tools.learning_curve RUN_DIR."""

import argparse
import io
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from train.metrics import METRICS_FILE, read_metrics
from train.report_layout import STAGES
from train.reports import write_index

PLOT_FILE = "learning_curve.png"
REWARD, FORMAT, RATE = "reward/mean", "reward/format", "optim/lr"
MIN_RISE = 0.15  # of a reward in 0..1
# Heading, metric, stage or None for all steps.
LINES = (
    ("reward", REWARD, None),
    *((f"reward, {stage} steps", REWARD, stage) for stage in STAGES),
    ("format", FORMAT, None),
)
_SMOOTH_WINDOW = 10  # points of one stage behind the thick line
_COLORS = {"generate": "#2f5fd0", "refine": "#c2570c"}

Rows = Sequence[Mapping[str, object]]


@dataclass(frozen=True)
class Tenths:
    """Means of a metric over the first and over the last tenth of a run's steps."""

    first: float
    last: float

    @property
    def rise(self) -> float:
        return self.last - self.first


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0 if the reward rose by enough, 1 if not, 2 if there is too little to judge.

    Where the learning rate was 0 throughout, it is the other way round: such a run is the control
    and must not rise.
    """
    parser = argparse.ArgumentParser(prog="python -m tools.learning_curve", description=__doc__)
    parser.add_argument("run_dir", type=Path, help="folder of the run, with metrics.jsonl")
    parser.add_argument("--min-rise", type=float, default=MIN_RISE, help="rise that is asked for")
    options = parser.parse_args(argv)
    rows = read_metrics(options.run_dir)
    try:
        tenths = {heading: measure(rows, metric, stage) for heading, metric, stage in LINES}
        is_control = not any(row.get(RATE) for row in rows)
    except ValueError as error:
        print(f"{options.run_dir / METRICS_FILE}: {error}", file=sys.stderr)
        return 2
    print("\n".join(format_tenths(tenths, len(rows))))
    path = options.run_dir / PLOT_FILE
    plot = draw_plot(rows, tenths["reward"])
    path.write_bytes(plot)
    index = write_index(options.run_dir, rows, plot, "Reward and format over steps")
    print(f"plot         {path}\nreport       {index}")
    verdict, passed = judge(tenths["reward"].rise, options.min_rise, is_control)
    print(verdict)
    return 0 if passed else 1


def measure(rows: Rows, metric: str, stage: str | None) -> Tenths:
    """Means of `metric` over the first and the last tenth of all steps, rounded down.

    With a stage, over its steps in there. Values that are missing stay out.

    Raises:
        ValueError: fewer than 10 steps, or a tenth without a value.
    """
    count = len(rows) // 10
    if not count:
        raise ValueError(f"{len(rows)} steps, at least 10 are needed for a tenth (TOTAL_STEPS)")
    means = []
    for name, part in (("first", rows[:count]), ("last", rows[-count:])):
        points = _points(part, metric, stage)
        if not points:
            steps = f"{stage} steps" if stage else "steps"
            raise ValueError(f"no {metric} in the {steps} of the {name} tenth ({count} steps)")
        means.append(sum(value for _, value in points) / len(points))
    return Tenths(*means)


def format_tenths(tenths: Mapping[str, Tenths], num_steps: int) -> list[str]:
    """The means as aligned lines under a heading."""
    count = num_steps // 10
    lines = [f"means over the first and the last {count} of {num_steps} steps"]
    lines.append(f"{'':24}{'first':>8}{'last':>8}{'rise':>8}")
    for heading, pair in tenths.items():
        lines.append(f"{heading:24}{pair.first:8.3f}{pair.last:8.3f}{pair.rise:+8.3f}")
    return lines


def judge(rise: float, min_rise: float, is_control: bool) -> tuple[str, bool]:
    """The verdict in words, and whether it is the wanted one."""
    learned = rise >= min_rise
    if is_control:
        result = "rose without learning" if learned else "did not rise, as it should not"
        return f"control: with a learning rate of 0 the reward {result} ({rise:+.3f})", not learned
    result = "learned" if learned else "did not learn"
    return f"{result}: the reward rose by {rise:+.3f}, asked for is {min_rise:+.3f}", learned


def draw_plot(rows: Rows, reward: Tenths) -> bytes:
    """A PNG of reward and format over steps by stage, and of the two means that are compared."""
    # Imported here, as nothing else needs it; a Figure without pyplot needs no display.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6), dpi=120, layout="constrained")
    upper, lower = figure.subplots(2, sharex=True, gridspec_kw={"height_ratios": (3, 2)})
    for axes, metric, label in ((upper, REWARD, "mean reward"), (lower, FORMAT, "well-formed")):
        for stage in STAGES:
            _draw_stage(axes, _points(rows, metric, stage), stage)
        axes.set(ylabel=label, ylim=(-0.02, 1.02))
        axes.grid(alpha=0.3)
    steps = [row["step"] for row in rows]
    count = len(rows) // 10
    for value, part in ((reward.first, steps[:count]), (reward.last, steps[-count:])):
        upper.hlines(value, part[0], part[-1], color="#333333", linewidth=3, zorder=3)
        upper.annotate(f"{value:.2f}", (part[0], value), (0, 5), textcoords="offset points")
    upper.set_title("thick: trailing mean; black: mean of the first and of the last tenth")
    upper.legend(loc="lower right")
    lower.set_xlabel("step")
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def _draw_stage(axes: object, points: Sequence[tuple[int, float]], stage: str) -> None:
    """One stage's points, faint, and their trailing mean."""
    if not points:
        return
    steps, values = zip(*points, strict=True)
    ends = range(1, len(values) + 1)
    trailing = [_mean(values[max(0, end - _SMOOTH_WINDOW) : end]) for end in ends]
    color = _COLORS[stage]
    axes.plot(steps, values, ".", color=color, alpha=0.35)
    axes.plot(steps, trailing, color=color, linewidth=2, label=stage)


def _points(rows: Rows, metric: str, stage: str | None) -> list[tuple[int, float]]:
    return [
        (row["step"], float(row[metric]))
        for row in rows
        if stage in (None, row.get("stage")) and _is_number(row.get(metric))
    ]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


if __name__ == "__main__":
    sys.exit(main())
