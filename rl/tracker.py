"""Where a run's numbers go: metrics.jsonl and answers.jsonl in the run directory, and Weights & Biases (offline unless
configured).

A line of metrics.jsonl is {"step", "attempt", "wandb_step", "time_s", metrics...}, one of answers.jsonl {"step",
"attempt", an answer...}. A resumed run appends with the next attempt number, so a step that was repeated after a
checkpoint stands twice and is told apart.

W&B drops what goes back in its own step. So that step counts lines, over all attempts, and is not the run's: that is
`train/step`, over which W&B draws every metric. Id and next W&B step are in the checkpoint; what the attempt after it
logged is read from metrics.jsonl.
"""

import json
import math
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec

from rollforward.conf.console import say
from rollforward.conf.errors import first_line
from rollforward.rl.answers import ANSWERS_NAME, Answer, table_columns, table_row
from rollforward.rl.config import TrackerConfig
from rollforward.rl.errors import TrackerError

METRICS_NAME = "metrics.jsonl"
"""Name of the metrics file in a run directory."""

_WANDB_ID_NAME = "wandb_id.txt"


class TrackerState(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What of a tracker is in a checkpoint."""

    wandb_id: str | None
    """The W&B run; None where W&B is disabled."""
    next_step: int
    """W&B's own step of the next line."""


class Tracker:
    """Writes metrics of one run. One process; as a context manager it closes, which flushes the tracker's files.

    States: opened -> begun (`begin`, which starts W&B) -> closed. W&B that fails while the run works is left out from
    then on, with a word to the user; training goes on.
    """

    def __init__(self, run_dir: Path, config: TrackerConfig, *, run_config: Mapping[str, Any]) -> None:
        """Open metrics.jsonl for appending.

        Args:
            run_dir: the run's directory; must exist.
            config: mode and project.
            run_config: plain data, shown by W&B.
        """
        path = run_dir / METRICS_NAME
        self._run_dir, self._config, self._run_config = run_dir, config, dict(run_config)
        attempt, wandb_step = _last_line(path)
        self._attempt, self._next_step = attempt + 1, wandb_step + 1
        for name in (METRICS_NAME, ANSWERS_NAME):
            _end_last_line(run_dir / name)
        self._file = path.open("a", encoding="utf-8")
        self._start_s = time.monotonic()
        self._wandb: Any = None
        self._wandb_id: str | None = None

    @property
    def attempt(self) -> int:
        """Number of this process among those that worked on the run, from 0."""
        return self._attempt

    @property
    def state(self) -> TrackerState:
        """What a checkpoint keeps."""
        return TrackerState(wandb_id=self._wandb_id, next_step=self._next_step)

    @property
    def wandb_place(self) -> str | None:
        """Where W&B's copy is: an address, or the directory of its files; None where there is none."""
        if self._wandb is None:
            return None
        return str(self._run_dir / "wandb" if self._config.mode == "offline" else self._wandb.url)

    def begin(self, state: TrackerState | None) -> None:
        """Start W&B, unless disabled, with the id that the run has had.

        Args:
            state: of the checkpoint that the run goes on from; None at its start.

        Raises:
            TrackerError: W&B refuses the first attempt at the run. A later attempt does without it, says so, and
                trains.
        """
        if state is not None:
            self._next_step = max(self._next_step, state.next_step)
        if self._config.mode == "disabled":
            return
        self._wandb_id = _wandb_id(self._run_dir, state.wandb_id if state is not None else None)
        try:
            self._wandb = self._start_wandb(self._wandb_id)
        except Exception as error:
            if self._attempt == 0:
                raise TrackerError(
                    f"tracker.mode is {self._config.mode}, and W&B does not start: {first_line(error)}. Call"
                    " `wandb login`, or set tracker.mode=offline (files, to be synced later) or tracker.mode=disabled"
                ) from error
            self._give_up_wandb(error)

    def log(self, step: int, values: Mapping[str, float], answers: Sequence[Answer] = ()) -> None:
        """Write one step's numbers, and some of its answers; NaN and infinities become null, which JSON has."""
        finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
        record = {
            "step": step,
            "attempt": self._attempt,
            "wandb_step": self._next_step,
            "time_s": round(time.monotonic() - self._start_s, 3),
            **finite,
        }
        if answers:
            with (self._run_dir / ANSWERS_NAME).open("a", encoding="utf-8") as file:
                for answer in answers:
                    line = {"step": step, "attempt": self._attempt, **msgspec.to_builtins(answer)}
                    file.write(json.dumps(line, ensure_ascii=False) + "\n")
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()
        wandb_step, self._next_step = self._next_step, self._next_step + 1
        self._guarded(lambda: self._log_to_wandb(step, wandb_step, values, answers))

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
        self._guarded(lambda: self._wandb.finish(exit_code=1 if has_failed else 0))

    def _start_wandb(self, wandb_id: str) -> Any:
        import wandb

        run = wandb.init(
            dir=str(self._run_dir),
            project=self._config.project,
            mode="online" if self._config.mode == "online" else "offline",
            id=wandb_id,
            resume="allow",
            name=self._run_dir.name,
            config=self._run_config,
            settings=wandb.Settings(silent=True, console="off"),
        )
        self._next_step = max(self._next_step, run.step)  # online, W&B knows what it has
        run.define_metric("train/step")
        run.define_metric("*", step_metric="train/step")
        return run

    def _log_to_wandb(self, step: int, wandb_step: int, values: Mapping[str, float], answers: Sequence[Answer]) -> None:
        record: dict[str, Any] = {**values, "train/step": step, "attempt": self._attempt}
        if answers:
            import wandb

            rows = [[step, self._attempt, *table_row(answer)] for answer in answers]
            record["answers"] = wandb.Table(columns=["step", "attempt", *table_columns()], data=rows)
        self._wandb.log(record, step=wandb_step)

    def _guarded(self, call: Callable[[], None]) -> None:
        """Calls W&B, if there still is one. A tracker is no reason to stop training."""
        if self._wandb is None:
            return
        try:
            call()
        except Exception as error:  # noqa: BLE001 - W&B and what it calls raise anything
            self._give_up_wandb(error)

    def _give_up_wandb(self, error: Exception) -> None:
        self._wandb = None
        say(f"W&B failed and is left out until the run is resumed ({first_line(error)}); {METRICS_NAME} has everything")


def _end_last_line(path: Path) -> None:
    """Adds the end that the last line lacks where its writer was killed, so that the next line is one of its own."""
    if path.exists() and path.stat().st_size > 0 and not path.read_bytes().endswith(b"\n"):
        with path.open("ab") as file:
            file.write(b"\n")


def _last_line(path: Path) -> tuple[int, int]:
    """(attempt, W&B's step) of the last whole line, -1 without one."""
    attempt = wandb_step = -1
    if not path.exists():
        return attempt, wandb_step
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            record = json.loads(line)
            attempt = max(attempt, int(record["attempt"]))
            wandb_step = max(wandb_step, int(record["wandb_step"]))
        except (ValueError, KeyError, TypeError):
            continue  # a line torn by a kill
    return attempt, wandb_step


def _wandb_id(run_dir: Path, saved: str | None) -> str:
    """The run's id: the checkpoint's, or else the one drawn by the first process, kept in the run directory."""
    path = run_dir / _WANDB_ID_NAME
    found = saved or (path.read_text(encoding="utf-8").strip() if path.exists() else "") or uuid.uuid4().hex[:12]
    partial = path.with_name(path.name + ".partial")
    partial.write_text(found, encoding="utf-8")
    partial.replace(path)
    return found
