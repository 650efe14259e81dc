"""Entry point of `rollforward drill`: a user's own proof, on this machine and recipe, that kills cost nothing.

    recipe, shortened --undisturbed--> run A
                      --while processes are killed, `rollforward resume` whenever it ended--> runs B, C, with a ledger
    A = B = C in every bit?  Is every token that the ledger saw published in the logs of B and C, and drawn once?

Everything is done by commands that a user could type, in processes of their own; this one only kills and compares.
"""

import json
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import IO, NamedTuple

from rollforward.conf import console
from rollforward.rl.drill_compare import differences, held_tokens, logged_requests
from rollforward.rl.drill_config import KINDS, DrillKind, DrillRun
from rollforward.rl.drill_processes import Process, end, family, kill, victims
from rollforward.rl.errors import DrillError
from rollforward.rl.tracker import METRICS_NAME
from rollforward.rollout.ledger import Counts, LedgerClient, LedgerProcess

_POLL_S = 0.02
_LEFTOVER_S = 30.0
"""After a run its orphans have so long to end by themselves."""
_PER_WORK = 3.0
"""Kills in the time that the undisturbed run works, about: instants are drawn from twice the mean distance."""


class Killed(NamedTuple):
    """One kill."""

    kind: DrillKind
    at_s: float
    progress: int
    """Tokens published and steps logged before."""


class _Plan:
    """Which kind is next, and how long after it is there."""

    def __init__(self, run: DrillRun, work_s: float) -> None:
        self._draws = random.Random(run.drill.seed)
        self._kinds = list(run.drill.kinds or KINDS)
        self._spread_s = 2 * work_s / _PER_WORK
        self._left: list[DrillKind] = []

    def next(self) -> tuple[DrillKind, float]:
        if not self._left:
            self._left = self._draws.sample(self._kinds, len(self._kinds))
        return self._left.pop(), self._draws.random() * self._spread_s

    def choose(self, pids: list[int]) -> int:
        return self._draws.choice(pids)


class Disturbed:
    """One run of the recipe while its processes are killed. A machine of one thread.

    States: driver at work <-> ended by a kill (resumed) -> done.
    """

    def __init__(self, run: DrillRun, directory: Path, ledger: LedgerProcess, plan: _Plan) -> None:
        """Nothing is started yet."""
        self._directory, self._plan = directory, plan
        self._command = [*_train_words(run, directory), f"all.rollout.ledger={ledger.path}"]
        self._ledger = LedgerClient(ledger.path)
        self._log_path = directory.with_suffix(".log")
        self._waiting: list[Killed] = []
        self._family: set[Process] = set()
        self.recoveries_s: list[float] = []
        self.kills = 0

    def run(self, kills: int, total: int, done: int) -> None:
        """Run to the end; kill at most so many processes.

        Raises:
            DrillError: the run ended by itself, not for a kill.
        """
        with self._log_path.open("ab") as log:
            driver = _start(self._command, log)
            is_fair, due_s = True, None  # whether it has not been killed since its start; when the next kill is due
            kind, wait_s = self._plan.next()
            try:
                while (code := driver.poll()) != 0:
                    if code is not None:
                        self._require_kill(is_fair, code)
                        console.say(f"  the run ended (exit code {code}); rollforward resume {self._directory}")
                        driver, is_fair, due_s = _start(["resume", str(self._directory)], log), True, None
                    self._note_progress()
                    if self.kills < kills and (pids := victims(driver.pid, kind)):
                        due_s = due_s or time.monotonic() + wait_s
                        if time.monotonic() >= due_s:
                            self._family |= set(family(driver.pid))
                            if kill(pid := self._plan.choose(pids)):
                                self._waiting.append(Killed(kind, time.monotonic(), self._progress()))
                                self.kills += 1
                                console.say(f"  kill {done + self.kills}/{total}: {kind} (pid {pid})")
                                is_fair, due_s = False, None
                                kind, wait_s = self._plan.next()
                    time.sleep(_POLL_S)
            finally:
                self._family |= set(family(driver.pid))
                driver.kill()
                driver.wait()
                self._note_progress(is_done=True)
                end(self._family, _LEFTOVER_S)

    def _require_kill(self, is_fair: bool, code: int) -> None:
        if is_fair:
            raise DrillError(
                f"the drilled run ended with exit code {code} though nothing of it was killed since it was started;"
                f" what it said is in {self._log_path}: {_last_line(self._log_path)}"
            )

    def _progress(self) -> int:
        """Grows with what the run brings about: tokens that were never published before, and steps."""
        steps = set[int]()
        for path in self._directory.glob(f"*/{METRICS_NAME}"):
            for line in path.read_text(errors="replace").splitlines():
                try:
                    steps.add(hash((path, json.loads(line)["step"])))
                except (ValueError, KeyError, TypeError):
                    continue  # being written
        return len(steps) + self._ledger.counts([]).published

    def _note_progress(self, *, is_done: bool = False) -> None:
        """Whoever was killed is made up for when the run brings about something new."""
        if not self._waiting:
            return
        progress, now_s = self._progress(), time.monotonic()
        for killed in list(self._waiting):
            if is_done or progress > killed.progress:
                self.recoveries_s.append(now_s - killed.at_s)
                self._waiting.remove(killed)


class Verdict(NamedTuple):
    """What all disturbed runs together say."""

    counts: Counts
    wrong: list[str]


def main(run: DrillRun) -> int:
    """Run, kill, compare, and say what came of it.

    Returns:
        0, or 1 when a token was lost or drawn again, or anything is not equal.

    Raises:
        DrillError: a run failed by itself.
    """
    root = Path(run.run_dir).resolve()
    root.mkdir(parents=True, exist_ok=True)
    quiet = root / "undisturbed"
    console.say(f"undisturbed: rollforward {' '.join(_train_words(run, quiet))}")
    work_s = _undisturbed(run, quiet)
    console.say(f"undisturbed run done; its processes worked for {work_s:.0f} s")
    recoveries_s: list[float] = []
    kills = 0
    directories: list[Path] = []
    with LedgerProcess() as ledger:
        plan = _Plan(run, work_s)
        while kills < run.drill.kills:
            directory = root / f"disturbed_{len(directories) + 1}"
            _remove(directory)
            directories.append(directory)
            console.say(f"disturbed: {directory}")
            disturbed = Disturbed(run, directory, ledger, plan)
            disturbed.run(run.drill.kills - kills, run.drill.kills, kills)
            kills += disturbed.kills
            recoveries_s += disturbed.recoveries_s
            if disturbed.kills == 0 and len(directories) > 2:
                raise DrillError(
                    f"{directory}: the run was over before anything could be killed. Lengthen it: drill.steps=6, more"
                    " drill.prompts"
                )
        verdict = _compare(quiet, directories, LedgerClient(ledger.path))
    return _report(run, root, verdict, kills, recoveries_s)


def _train_words(run: DrillRun, directory: Path) -> list[str]:
    return ["train", f"recipe={run.recipe}", f"run_dir={directory}", *run.settings]


def _start(words: list[str], log: IO[bytes]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "rollforward.conf.cli", *words], stdin=subprocess.DEVNULL, stdout=log, stderr=log
    )


def _undisturbed(run: DrillRun, directory: Path) -> float:
    """Run the recipe and return how long there were actors; a finished run is kept, and its time with it."""
    kept = directory / "worked_s.json"
    log_path = directory.with_suffix(".log")
    first_s: float | None = None
    with log_path.open("ab") as log:
        driver = _start(_train_words(run, directory), log)
        try:
            while driver.poll() is None:
                if first_s is None and victims(driver.pid, "driver"):
                    first_s = time.monotonic()
                time.sleep(_POLL_S)
        finally:
            driver.kill()
            code = driver.wait()
    if code != 0:
        raise DrillError(
            f"the undisturbed run ended with exit code {code}; what it said is in {log_path}: {_last_line(log_path)}"
        )
    if first_s is not None:
        kept.write_text(json.dumps(time.monotonic() - first_s))
    return float(json.loads(kept.read_text())) if kept.exists() else 10.0


def _last_line(path: Path) -> str:
    lines = [line for line in path.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else "nothing"


def _remove(directory: Path) -> None:
    """What an earlier drill left: its ledger is gone, so it proves nothing."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.with_suffix(".log").unlink(missing_ok=True)


def _runs(directory: Path) -> Iterator[Path]:
    return (path.parent for path in sorted(directory.glob("*/config.json")))


def _compare(quiet: Path, directories: list[Path], ledger: LedgerClient) -> Verdict:
    wrong: list[str] = []
    left = []
    for directory in directories:
        for expected in _runs(quiet):
            found = directory / expected.name
            requests = logged_requests(found)
            left += held_tokens(found, requests)
            wrong += [f"{directory.name}/{expected.name}: {text}" for text in differences(expected, found, requests)]
    return Verdict(ledger.counts(left), wrong)


def _report(run: DrillRun, root: Path, verdict: Verdict, kills: int, recoveries_s: list[float]) -> int:
    counts = verdict.counts
    wrong = list(verdict.wrong)
    if counts.unequal:
        wrong.append(f"{counts.unequal} tokens were published again with another id or log-prob")
    for text in wrong[:20]:
        console.say(f"UNEQUAL {text}")
    is_clean = not (wrong or counts.lost or counts.duplicated)
    rows: dict[str, object] = {
        "kinds": ", ".join(run.drill.kinds or KINDS),
        "tokens published": counts.published,
        "tokens lost": counts.lost,
        "tokens drawn again": counts.duplicated,
        "weights, answers, metrics, completions": "equal in every bit" if not wrong else f"{len(wrong)} differ",
        "runs": root,
    }
    console.summary(f"drill {'passed' if is_clean else 'FAILED'}: {kills} kills", rows)
    outcome = {
        "kills": kills,
        "tokens_published": counts.published,
        "tokens_lost": counts.lost,
        "tokens_duplicated": counts.duplicated,
        "bit_equal": not wrong,
        "recovery_s_p50": round(median(recoveries_s), 3) if recoveries_s else None,
        "recovery_s_max": round(max(recoveries_s), 3) if recoveries_s else None,
    }
    console.result(json.dumps(outcome))
    return 0 if is_clean else 1
