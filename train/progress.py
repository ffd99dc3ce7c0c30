"""What the terminal shows: a progress bar (or plain lines) and one summary line a step."""

import contextlib
import logging
import math
import numbers
import sys
import time
from collections.abc import Mapping
from typing import TextIO

from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

_MAX_PHASES = 6


class Progress:
    """Shows step, phase and reward on the main rank; does nothing on the others.

    On a terminal it is a bar with the summaries scrolling above it (log lines too). Elsewhere
    each step is one line, and a phase gets its own line only if `quiet_s` seconds passed since
    the last one, so that a slow step does not look dead.
    """

    def __init__(
        self,
        total_steps: int,
        start_step: int = 0,
        is_main: bool = True,
        stream: TextIO | None = None,
        quiet_s: float = 15.0,
    ) -> None:
        self._total = total_steps
        self._step = start_step
        self._stage = ""
        self._reward: float | None = None
        self._stream = (sys.stderr if stream is None else stream) if is_main else None
        self._quiet_s = quiet_s
        self._last_line = time.monotonic()
        self._cleanup = contextlib.ExitStack()
        self._bar = None
        if self._stream is not None and self._stream.isatty():
            self._bar = tqdm(
                total=total_steps,
                initial=start_step,
                file=self._stream,
                dynamic_ncols=True,
                unit="step",
            )
            self._cleanup.callback(self._bar.close)
            candidates = (logging.getLogger(), logging.getLogger("faster_r3"))
            loggers = [logger for logger in candidates if logger.handlers]
            self._cleanup.enter_context(logging_redirect_tqdm(loggers))

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def begin_step(self, step: int, stage: str) -> None:
        """Say which step runs now and its stage ("generate" or "refine")."""
        self._step, self._stage = step, stage
        self._show("")

    def phase(self, name: str) -> None:
        """Say which phase of the step runs now; fits `PhaseTimer(on_enter=...)`."""
        self._show(name)

    def finish_step(self, values: Mapping[str, object]) -> None:
        """Show the summary of the current step from its metrics (see `step_summary`)."""
        if self._stream is None:
            return
        reward = values.get("reward/mean")
        if _is_number(reward):
            self._reward = float(reward)
        place = {"step": self._step, "total_steps": self._total, "stage": self._stage}
        self._line(step_summary({**place, **values}))
        if self._bar is not None:
            if self._reward is not None:
                self._bar.set_postfix_str(f"reward {self._reward:.3f}", refresh=False)
            self._bar.update(1)

    def close(self) -> None:
        """End the bar and give the log handlers back; more calls do nothing."""
        self._cleanup.close()

    def _show(self, phase: str) -> None:
        if self._stream is None:
            return
        text = " ".join(part for part in (f"step {self._step}", self._stage, phase) if part)
        if self._bar is not None:
            self._bar.set_description_str(text)
        elif time.monotonic() - self._last_line >= self._quiet_s:
            reward = "" if self._reward is None else f" (last reward {self._reward:.3f})"
            self._line(f"{text} ...{reward}")

    def _line(self, text: str) -> None:
        self._last_line = time.monotonic()
        if self._bar is not None:
            tqdm.write(text, file=self._stream)
        else:
            self._stream.write(text + "\n")
            self._stream.flush()


def step_summary(values: Mapping[str, object]) -> str:
    """One line about a step, from its metrics plus `step`, `total_steps` and `stage`.

    Shows what is there and leaves out what is not, for example
    `step 12/1000 refine  reward 0.612  format 1.00  loss -0.0031  grad 0.83  ratio 1.000/1.001
    11.9 s (decode 3.1 flow 2.0)` in one line; the ratio is text/image.
    """
    head = f"step {values.get('step', '?')}"
    if values.get("total_steps") is not None:
        head += f"/{values['total_steps']}"
    parts = [f"{head} {values.get('stage', '')}".rstrip()]
    shown = (
        ("reward", "reward/mean", ".3f"),
        ("format", "reward/format", ".2f"),
        ("loss", "loss/total", ".4f"),
        ("grad", "optim/grad_norm", ".3g"),
    )
    for label, name, spec in shown:
        if name in values:
            parts.append(f"{label} {_number(values[name], spec)}")
    ratios = [values.get("ratio/text_mean"), values.get("ratio/image_mean")]
    if any(ratio is not None for ratio in ratios):
        parts.append("ratio " + "/".join(_number(ratio, ".3f") for ratio in ratios))
    if "time/step" in values:
        parts.append(f"{_number(values['time/step'], '.1f')} s{_phases(values)}")
    return "  ".join(parts)


def leaf_phases(values: Mapping[str, object]) -> list[tuple[str, float]]:
    """Phases that contain no other one, from the `time/<path>` metrics, in their order.

    Labelled by the last part of the path, or by the whole path where two would read the same.
    """
    times = {
        name.removeprefix("time/"): float(value)
        for name, value in values.items()
        if name.startswith("time/") and name != "time/step" and _is_number(value)
    }
    leaves = [path for path in times if not any(p.startswith(path + "/") for p in times)]
    labels = [path.rpartition("/")[2] for path in leaves]
    return [
        (label if labels.count(label) == 1 else path, times[path])
        for label, path in zip(labels, leaves, strict=True)
    ]


def _phases(values: Mapping[str, object]) -> str:
    phases = leaf_phases(values)
    longest = sorted(phases, key=lambda phase: -phase[1])[:_MAX_PHASES]
    texts = [f"{label} {seconds:.1f}" for label, seconds in phases if (label, seconds) in longest]
    if not texts:
        return ""
    more = " ..." if len(phases) > len(longest) else ""
    return f" ({' '.join(texts)}{more})"


def _is_number(value: object) -> bool:
    return isinstance(value, numbers.Real) and math.isfinite(value)


def _number(value: object, spec: str) -> str:
    """Format a number; what is missing is "-", non-finite ones show as "nan" or "inf"."""
    return "-" if value is None else format(float(value), spec)
