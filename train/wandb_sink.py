"""Metrics to Weights & Biases, which may fail without hurting the run."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from train.environment import redact

LOGGER = logging.getLogger("faster_r3")
WANDB_MODES = ("offline", "online", "disabled")
_RUN_ID_FILE = "wandb_run_id.txt"


@dataclass(frozen=True)
class WandbSettings:
    """Where wandb files a run. `name` may be empty; `mode` is one of `WANDB_MODES`."""

    project: str
    name: str = ""
    mode: str = "offline"

    def __post_init__(self) -> None:
        if self.mode not in WANDB_MODES:
            allowed = ", ".join(WANDB_MODES)
            raise ValueError(f"WANDB_MODE is {self.mode!r}; allowed: {allowed}")


class WandbSink:
    """One wandb run; after its first failure it warns once and stays silent."""

    def __init__(self, run_dir: Path, settings: WandbSettings, config: object) -> None:
        self._run = None
        if settings.mode != "disabled":
            self._guard("start", lambda: self._start(run_dir, settings, config))

    def log(self, step: int, values: Mapping[str, object]) -> None:
        """Send one step; the values must be finite numbers or strings."""
        if self._run is not None:
            self._guard("log", lambda: self._run.log({"step": step, **values}))

    def close(self) -> None:
        """Finish the run and write what is left."""
        if self._run is not None:
            self._guard("finish", lambda: self._run.finish())
            self._run = None

    def _start(self, run_dir: Path, settings: WandbSettings, config: object) -> None:
        import wandb  # slow to import, and not needed by other ranks

        id_file = run_dir / _RUN_ID_FILE
        run_id = id_file.read_text(encoding="utf-8").strip() if id_file.exists() else None
        self._run = wandb.init(
            project=settings.project,
            name=settings.name or None,
            mode=settings.mode,
            dir=str(run_dir),
            id=run_id,
            resume="allow",
            config=redact(config),
            # wandb's own metadata holds the raw command line, which may carry an API key;
            # environment.json says the same without it. The console belongs to the bar.
            settings=wandb.Settings(
                x_disable_meta=True, disable_git=True, console="off", quiet=True
            ),
        )
        # Own step axis: wandb's built-in one refuses steps that a resumed run does again.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        id_file.write_text(self._run.id + "\n", encoding="utf-8")

    def _guard(self, action: str, call: Callable[[], object]) -> None:
        try:
            call()
        except Exception as error:  # any failure of an optional service: training goes on
            self._run = None
            LOGGER.warning(
                "wandb failed to %s (%s: %s); it is off for the rest of the run, "
                "metrics.jsonl goes on",
                action,
                type(error).__name__,
                error,
            )
