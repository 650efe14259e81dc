"""Where a run's numbers go: metrics.jsonl in the run directory, and Weights & Biases (offline unless configured).

A line of metrics.jsonl is {"step", "attempt", "time_s", metrics...}. A resumed run appends with the next attempt
number, so a step that was repeated after a checkpoint stands twice and is told apart.
"""

import json
import math
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rollforward.rl.config import TrackerConfig

METRICS_NAME = "metrics.jsonl"
"""Name of the metrics file in a run directory."""

_WANDB_ID_NAME = "wandb_id.txt"


class Tracker:
    """Writes metrics of one run. One process; as a context manager it closes, which flushes the tracker's files."""

    def __init__(self, run_dir: Path, config: TrackerConfig, *, run_config: Mapping[str, Any]) -> None:
        """Open metrics.jsonl for appending and, unless disabled, a W&B run with a stable id.

        Args:
            run_dir: the run's directory; must exist.
            config: mode and project.
            run_config: plain data, shown by W&B.
        """
        path = run_dir / METRICS_NAME
        self._attempt = _last_attempt(path) + 1
        self._file = path.open("a", encoding="utf-8")
        if _is_torn(path):
            self._file.write("\n")
        self._start_s = time.monotonic()
        self._wandb: Any = None
        if config.mode != "disabled":
            import wandb

            settings = wandb.Settings(silent=True, console="off")
            self._wandb = wandb.init(
                dir=str(run_dir),
                project=config.project,
                mode=config.mode,
                id=_wandb_id(run_dir),
                resume="allow",
                name=run_dir.name,
                config=dict(run_config),
                settings=settings,
            )

    @property
    def attempt(self) -> int:
        """Number of this process among those that worked on the run, from 0."""
        return self._attempt

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Write one step's numbers; NaN and infinities become null, which JSON has."""
        finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
        record = {
            "step": step,
            "attempt": self._attempt,
            "time_s": round(time.monotonic() - self._start_s, 3),
            **finite,
        }
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()
        if self._wandb is not None:
            self._wandb.log({**values, "attempt": self._attempt}, step=step)

    def __enter__(self) -> Self:
        """Returns itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Closes; W&B shows a run whose body raised as failed."""
        self.close(has_failed=kind is not None)

    def close(self, *, has_failed: bool = False) -> None:
        """Flush and end the W&B run, as failed or as finished."""
        self._file.close()
        if self._wandb is not None:
            self._wandb.finish(exit_code=1 if has_failed else 0)


def _is_torn(path: Path) -> bool:
    """Whether the last line lacks its end: its writer was killed."""
    return path.stat().st_size > 0 and not path.read_bytes().endswith(b"\n")


def _last_attempt(path: Path) -> int:
    """Attempt number of the last whole line, -1 without one."""
    if not path.exists():
        return -1
    last = -1
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            last = max(last, int(json.loads(line)["attempt"]))
        except (ValueError, KeyError, TypeError):
            continue  # a line torn by a kill
    return last


def _wandb_id(run_dir: Path) -> str:
    """The run's id, drawn once and kept in the run directory, so that a resumed run continues the same W&B run."""
    path = run_dir / _WANDB_ID_NAME
    if not path.exists():
        path.write_text(uuid.uuid4().hex[:12], encoding="utf-8")
    return path.read_text(encoding="utf-8").strip()
