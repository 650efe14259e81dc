"""A replica's lives one after another, each killed, until its requests are done; with a ledger of what left it."""

import json
import pickle
import signal
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from rollforward.rollout.ledger import Counts, LedgerClient, LedgerProcess, held
from rollforward.rollout.types import Completion
from rollforward.rollout.wal_recovery import RecoveredLog, recover
from tests.helpers.lives_main import SCOPE


class Kill(NamedTuple):
    """A SIGKILL of a life: at an event that it reaches itself, or from outside after some seconds."""

    event: str | None = None
    """As in lives_main.py."""
    number: int = 0
    """Events of the kind that come before."""
    after_s: float | None = None
    """Since its start."""
    hangs: bool = False
    """The life's log is written but never synced, so that nothing of it becomes durable."""


class Drilled(NamedTuple):
    """What came of a directory whose lives were killed."""

    kills: int
    """Lives that were killed."""
    counts: Counts
    """At the end, against the log."""
    lost_at_kills: int
    """Published tokens that the log did not hold right after a kill, over all kills."""
    foreign_at_kills: int
    """Logged tokens then that were not the undisturbed ones."""
    completions: list[Completion]
    """The last life's."""


class Lives:
    """Starts lives; one at a time. A context manager."""

    def __init__(self) -> None:
        """Start the process that forks; it imports meanwhile."""
        main = Path(__file__).with_name("lives_main.py")
        self._process = subprocess.Popen(
            [sys.executable, str(main)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def __enter__(self) -> "Lives":
        return self

    def __exit__(self, *_error: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)

    def life(self, directory: Path, **order: Any) -> tuple[int, float]:
        """One life; its exit code, negative for a signal, and how long it took."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"directory": str(directory / "wal"), **order}) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        return answer["code"], answer["seconds"]

    def drill(
        self,
        directory: Path,
        kills: Iterable[Kill],
        *,
        undisturbed: list[Completion] | None = None,
        build: str = "right",
        sync_s: float = 0.0,
        seed: int = 0,
    ) -> Drilled:
        """Kill lives as planned until the plan or the work is over, then let one live to its end."""
        expected = {one.id: one.token_ids[one.sampled_mask].tolist() for one in undisturbed or ()}
        result = directory / "result"
        num_kills = lost = foreign = 0
        with LedgerProcess() as ledger:
            asking = LedgerClient(ledger.path)
            for life, kill in enumerate([*kills, Kill()]):
                code, _ = self.life(
                    directory,
                    result=str(result),
                    ledger=str(ledger.path),
                    kill=None if kill.event is None else {"event": kill.event, "number": kill.number},
                    after_s=kill.after_s,
                    hang=kill.hangs,
                    build=build,
                    life=life,
                    sync_s=sync_s,
                    seed=seed,
                )
                assert code in (0, -signal.SIGKILL), "a life failed by itself; see standard error"
                log = recover(directory / "wal")
                counts = asking.counts(_left(log))
                if code == 0 and kill.after_s is None:
                    break
                num_kills += code != 0
                lost += counts.lost
                foreign += _foreign(log, expected) if expected else 0
            counts = asking.counts(_left(recover(directory / "wal")))
        return Drilled(num_kills, counts, lost, foreign, pickle.loads(result.read_bytes()))


def _left(log: RecoveredLog) -> list[Any]:
    return [
        held(SCOPE, str(identity), one.token_ids, one.behavior_logprobs)
        for identity, one in log.requests.items()
        if identity not in log.failed
    ]


def _foreign(log: RecoveredLog, expected: dict[Any, list[int]]) -> int:
    return sum(
        token != true
        for identity, one in log.requests.items()
        for token, true in zip(one.token_ids.tolist(), expected[identity], strict=False)
    )
