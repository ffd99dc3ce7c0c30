"""The numbers of a run: how they are measured, what they are called and where they are written."""

import json
import logging
import math
import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from train.files import write_text_atomic
from train.wandb_sink import WandbSettings, WandbSink

LOGGER = logging.getLogger("faster_r3")
METRICS_FILE = "metrics.jsonl"

Value = float | int | str | None


class MetricsLogger:
    """Writes one JSON object a step to `metrics.jsonl`, and the same to wandb.

    Does nothing where `is_main` is False. `start_step` is the first step this run will do: older
    lines stay, lines of that step and later ones are dropped, so no step appears twice.
    `config` (dataclass or mapping) goes to wandb without its secrets.
    """

    def __init__(
        self,
        run_dir: Path,
        is_main: bool,
        wandb: WandbSettings,
        config: object,
        start_step: int = 0,
    ) -> None:
        self._file = None
        self._wandb = None
        self._last_step = start_step - 1
        self._non_finite: set[str] = set()
        if not is_main:
            return
        path = Path(run_dir) / METRICS_FILE
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            _drop_steps_from(path, start_step)
        self._file = path.open("a", encoding="utf-8")
        self._wandb = WandbSink(path.parent, wandb, config)

    def log_step(self, step: int, values: Mapping[str, Value]) -> None:
        """Write the metrics of one step and flush.

        Numbers may be Python, numpy or one-element tensors. Non-finite ones become null, with a
        warning the first time for each name. None means "not measured" and becomes null too.
        Raises ValueError for a step that is not later than the last one, or a value of another
        kind.
        """
        if self._file is None:
            return
        if step <= self._last_step:
            raise ValueError(f"metrics of step {step} come after step {self._last_step}")
        row = {name: _plain_value(name, value) for name, value in values.items()}
        bad = [name for name, value in row.items() if _is_non_finite(value)]
        self._warn_once(step, bad)
        row.update(dict.fromkeys(bad))
        self._file.write(json.dumps({"step": step, **row}, allow_nan=False) + "\n")
        self._file.flush()
        self._last_step = step
        self._wandb.log(step, {name: value for name, value in row.items() if value is not None})

    def close(self) -> None:
        """Close the file and finish the wandb run; more calls do nothing."""
        if self._file is not None:
            self._file.close()
            self._wandb.close()
            self._file = None

    def _warn_once(self, step: int, names: Sequence[str]) -> None:
        new = [name for name in names if name not in self._non_finite]
        if new:
            self._non_finite.update(new)
            LOGGER.warning(
                "step %d: not a finite number: %s (null in %s; said once for each metric)",
                step,
                ", ".join(new),
                METRICS_FILE,
            )


def read_metrics(run_dir: Path) -> list[dict[str, Value]]:
    """Return the rows of `metrics.jsonl` in `run_dir`, oldest first; none if it is missing."""
    path = Path(run_dir) / METRICS_FILE
    return [row for _, row in _rows(path)] if path.exists() else []


Mark = float | torch.cuda.Event
"""A moment: seconds of the host's clock, or where a GPU's stream stood."""


class PhaseTimer:
    """Seconds by phase: `with timer.phase("decode"): ...`.

    A phase inside another is named by its path ("rollout/decode"), and the outer one's time
    contains the inner one's. A phase entered again adds up. With `on_device` a phase lasts from
    where the GPU's current stream meets its beginning to where it meets its end, and nothing
    waits for the GPU before the seconds are asked for; without, host time is measured. `on_enter`
    is told each phase's path.
    """

    def __init__(
        self, on_device: bool = False, on_enter: Callable[[str], None] | None = None
    ) -> None:
        self._on_device = on_device
        self._on_enter = on_enter
        self._open: list[str] = []
        self._ended: list[tuple[str, Mark, Mark]] = []
        self._seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure the block as phase `name`, also when it raises."""
        self._open.append(name)
        path = "/".join(self._open)
        self._seconds.setdefault(path, 0.0)  # outer phases are listed before inner ones
        if self._on_enter is not None:
            self._on_enter(path)
        start = self._mark()
        try:
            yield
        finally:
            self._open.pop()
            self._ended.append((path, start, self._mark()))

    def seconds(self) -> dict[str, float]:
        """Seconds since the last reset by phase path, in the order first entered."""
        for path, start, end in self._ended:
            self._seconds[path] = self._seconds.get(path, 0.0) + _between(start, end)
        self._ended.clear()
        return dict(self._seconds)

    def metrics(self) -> dict[str, float]:
        """The same under metric names: `time/<phase path>`."""
        return {f"time/{path}": seconds for path, seconds in self.seconds().items()}

    def reset(self) -> None:
        """Forget all phases; one that is still open counts from its own start when it ends."""
        self._ended.clear()
        self._seconds.clear()

    def _mark(self) -> Mark:
        if not self._on_device:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def _between(start: Mark, end: Mark) -> float:
    """Seconds between two marks of one timer; waits until the GPU has met both."""
    if isinstance(end, float):
        return end - start
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def percentile(values: Sequence[float] | torch.Tensor, percent: float) -> float:
    """Return the percentile (0..100) of any shape, linear between ranks, in float64.

    NaN for no values, or if one of them is NaN. (`torch.quantile` refuses large inputs.)
    """
    if not 0 <= percent <= 100:
        raise ValueError(f"percent is {percent}; it must lie between 0 and 100")
    flat = torch.as_tensor(values, dtype=torch.float64).detach().flatten().cpu()
    if flat.numel() == 0 or bool(flat.isnan().any()):
        return math.nan
    ordered = flat.sort().values
    rank = (flat.numel() - 1) * percent / 100
    low = math.floor(rank)
    lower, upper = float(ordered[low]), float(ordered[math.ceil(rank)])
    return lower if lower == upper else lower + (upper - lower) * (rank - low)


def drift_statistics(log_ratio: torch.Tensor) -> tuple[float, float]:
    """Mean and 99th percentile of |log ratio| (any shape); (nan, nan) if there is none."""
    if log_ratio.numel() == 0:
        return math.nan, math.nan
    size = log_ratio.detach().double().abs()
    return float(size.mean()), percentile(size, 99)


def ratio_metrics(kind: str, log_ratio: torch.Tensor) -> dict[str, float]:
    """Ratio and drift of one `kind` ("text" or "image"); nothing where nothing was trained.

    `log_ratio` is the learner's log-prob minus the behaviour log-prob, of any shape: per token
    for text, per picture for images.
    """
    if log_ratio.numel() == 0:
        return {}
    ratio = log_ratio.detach().double().exp()
    mean, p99 = drift_statistics(log_ratio)
    return {
        f"ratio/{kind}_mean": float(ratio.mean()),
        f"ratio/{kind}_min": float(ratio.min()),
        f"ratio/{kind}_max": float(ratio.max()),
        f"drift/{kind}_mean": mean,
        f"drift/{kind}_p99": p99,
    }


def reward_metrics(
    scores: Sequence[float], format_rewards: Sequence[float], tags: Sequence[str]
) -> dict[str, float]:
    """Mean score, mean format reward and mean score by tag, one entry a sample in each list.

    A score of NaN (a sample whose reward failed) is left out; without any score there is no mean.
    """
    if not len(scores) == len(format_rewards) == len(tags):
        sizes = f"{len(scores)}, {len(format_rewards)}, {len(tags)}"
        raise ValueError(f"scores, format rewards and tags differ in length: {sizes}")
    by_tag: dict[str, list[float]] = {}
    for score, tag in zip(scores, tags, strict=True):
        if not math.isnan(score):
            by_tag.setdefault(tag, []).append(score)
    valid = [score for tag_scores in by_tag.values() for score in tag_scores]
    metrics = {"reward/mean": _mean(valid)} if valid else {}
    if format_rewards:
        metrics["reward/format"] = _mean(format_rewards)
    metrics.update({f"reward/tag/{tag}": _mean(by_tag[tag]) for tag in sorted(by_tag)})
    return metrics


def reward_service_metrics(
    latencies_s: Sequence[float], num_retries: int, num_failures: int
) -> dict[str, float]:
    """Latency percentiles in seconds, retries and failures of a step's reward requests."""
    metrics: dict[str, float] = {}
    if len(latencies_s) > 0:
        metrics["reward_service/latency_p50_s"] = percentile(latencies_s, 50)
        metrics["reward_service/latency_p99_s"] = percentile(latencies_s, 99)
    metrics["reward_service/retries"] = num_retries
    metrics["reward_service/failures"] = num_failures
    return metrics


def peak_memory_gib(device: torch.device) -> float:
    """Peak of allocated GPU memory since its last reset; on a CPU the peak of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _is_non_finite(value: Value) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def _plain_value(name: str, value: object) -> Value:
    """Turn a number of any library into Python's own; strings, None and booleans pass."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError) as error:
        kind = type(value).__name__
        raise ValueError(f"metric {name} is a {kind}; it must be one number or text") from error


def _rows(path: Path) -> Iterator[tuple[str, dict[str, Value]]]:
    """Yield each line with its parsed row; a line that is no row is named and left out."""
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            row = None
        if isinstance(row, dict) and isinstance(row.get("step"), int):
            yield line, row
        else:
            # A run that was killed may leave half a line at the end.
            LOGGER.warning("%s:%d is no metrics row; it is left out", path, number)


def _drop_steps_from(path: Path, start_step: int) -> None:
    rows = list(_rows(path))
    kept = [line for line, row in rows if row["step"] < start_step]
    if len(kept) < len(rows):
        dropped = len(rows) - len(kept)
        LOGGER.info("%s: dropped %d rows from step %d on", path, dropped, start_step)
    write_text_atomic(path, "".join(line + "\n" for line in kept))
