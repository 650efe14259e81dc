"""Ranks of a learner as processes of their own that can be killed, from one that has imported everything already."""

import json
import subprocess
import sys
import uuid
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple


class Fault(NamedTuple):
    """A SIGKILL."""

    point: str
    """Key of `learner_main.POINTS`: before which call; or "byte" of a checkpoint."""
    step: int
    """From the step on that follows so many, counted over restarts; a checkpoint belongs to the step that it covers."""
    rank: int = 0
    """Who gets there."""
    call: int = 0
    """Calls of the point before the fatal one; of "byte" the bytes that the rank has written."""
    everyone: bool = False
    """All ranks are killed, not this one alone."""


class Ended(NamedTuple):
    """How a group of ranks ended."""

    codes: list[int]
    """By rank; negative is a signal."""
    last_s: float
    """Seconds from the first rank's end to the last one's."""


class Learners:
    """Starts groups of ranks; one at a time. A context manager."""

    def __init__(self) -> None:
        """Start the process that forks; it imports meanwhile."""
        main = Path(__file__).with_name("learner_main.py")
        self._process = subprocess.Popen(
            [sys.executable, str(main)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def __enter__(self) -> "Learners":
        return self

    def __exit__(self, *_error: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)

    def start(
        self, root: Path, *, num_ranks: int, steps: int, fault: Fault | None = None, zero_size: int | None = None
    ) -> list[int]:
        """Start ranks that work in ``root`` until ``steps`` steps are done; return their process ids."""
        root.mkdir(parents=True, exist_ok=True)
        order = {
            "num_ranks": num_ranks,
            "root": str(root),
            "rendezvous": str(root / f"rendezvous-{uuid.uuid4().hex}"),
            "steps": steps,
            "zero_size": zero_size,
            "fault": None if fault is None else fault._asdict(),
        }
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return self._answer()["pids"]

    def wait(self) -> Ended:
        """Wait for the ranks to end."""
        return Ended(**self._answer())

    def run(self, root: Path, **order: Any) -> Ended:
        """Start ranks and wait for their end; arguments as of `start`."""
        self.start(root, **order)
        return self.wait()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())


def weights(root: Path) -> dict[int, str]:
    """Step -> hash of all weights after it, on which all ranks that ever got there must agree."""
    found: dict[int, set[str]] = defaultdict(set)
    for path in root.glob("weights-*.jsonl"):
        for text in path.read_text().splitlines():
            line = json.loads(text)
            found[line["step"]].add(line["hash"])
    assert all(len(hashes) == 1 for hashes in found.values()), f"ranks or attempts disagree: {dict(found)}"
    return {step: hashes.pop() for step, hashes in sorted(found.items())}


def logs(root: Path) -> str:
    """What the ranks said, for a failed assertion."""
    return "\n".join(f"{path.name}:\n{path.read_text()[-1500:]}" for path in sorted(root.glob("rank-*.log")))
