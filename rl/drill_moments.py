"""Sees from outside, by the files of a run, what the run is at (`rollforward drill`)."""

import time
from pathlib import Path

from rollforward.rl.drill_config import DrillMoment

_LOOK_S = 0.001
"""Between two looks; a commit of a tiny run takes about as long."""

_BEING_WRITTEN = {"publish": "*/weights/.*.partial", "checkpoint": "*/checkpoints/.*.partial"}
"""What is there, below the directory of a recipe's runs, while it is written."""


class Moments:
    """Watches the directory of a recipe's runs. Reads only."""

    def __init__(self, directory: Path) -> None:
        """Args:
        directory: holds the runs, one directory each; need not exist yet.
        """
        self._directory = directory
        self._logs: dict[Path, int] = {}

    def wait(self, moment: DrillMoment, timeout_s: float) -> bool:
        """Return whether the moment came within so many seconds; at once where it is `any`, or there already."""
        deadline_s = time.monotonic() + timeout_s
        if moment == "commit":
            self._logs = self._written()  # what was written before is no commit of now
        while not self._is_now(moment):
            if time.monotonic() >= deadline_s:
                return False
            time.sleep(_LOOK_S)
        return True

    def _is_now(self, moment: DrillMoment) -> bool:
        match moment:
            case "any":
                return True
            case "commit":
                return any(self._logs.get(path) != written for path, written in self._written().items())
            case "publish" | "checkpoint":
                return any(True for _ in self._directory.glob(_BEING_WRITTEN[moment]))

    def _written(self) -> dict[Path, int]:
        """When each segment was written last: a commit does not make it longer."""
        return {path: path.stat().st_mtime_ns for path in self._directory.glob("*/wal/*/*.wal")}
