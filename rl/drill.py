"""Entry point of `rollforward drill`: a user's own proof, on this machine and recipe, that kills cost nothing.

    recipe, shortened --undisturbed--> run A
                      --while processes are killed, `rollforward resume` whenever it ended--> runs B, C, with a ledger
    A = B = C in every bit?  Is every token that the ledger saw published in the logs of B and C, and drawn once?

Everything is done by commands that a user could type, in processes of their own; this one only kills and compares.
"""

import itertools
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
from rollforward.rl.drill_config import KINDS, DrillKind, DrillMoment, DrillRun
from rollforward.rl.drill_moments import Moments
from rollforward.rl.drill_processes import Process, end, family, kill, victims
from rollforward.rl.errors import DrillError
from rollforward.rl.tracker import METRICS_NAME
from rollforward.rollout.ledger import Counts, LedgerClient, LedgerProcess

_POLL_S = 0.02
_LEFTOVER_S = 30.0
"""After a run its orphans have so long to end by themselves."""
_PER_WORK = 6.0
"""Kills in the time that the undisturbed run works, about: instants are drawn from twice the mean distance."""
_WITHIN_S = {"any": 0.0, "commit": 0.002, "publish": 0.5, "checkpoint": 0.3}
"""How long a tiny run is at it, about: a kill comes so much later at most. Publishing ends when the engines answer."""
_ENDS_THE_RUN = ("driver", "learner")
"""Kinds whose death ends the run, which is then resumed; the others are replaced inside it."""


class Killed(NamedTuple):
    """One kill."""

    at_s: float
    progress: int
    """Tokens published and steps logged before."""


class _Next(NamedTuple):
    """Who is killed next, and when."""

    kind: DrillKind
    moment: DrillMoment
    wait_s: float
    """From when such a process is there to when the moment is waited for."""
    delay_s: float
    """From the moment to the kill."""


class _Plan:
    """What is next: every kind at every moment, in an order of its own each time."""

    def __init__(self, run: DrillRun, work_s: float) -> None:
        self._draws = random.Random(run.drill.seed)
        self._pairs = list(itertools.product(run.drill.kinds or KINDS, run.drill.moments))
        self._spread_s = 2 * work_s / _PER_WORK
        self._left: list[tuple[DrillKind, DrillMoment]] = []

    def next(self) -> _Next:
        if not self._left:
            self._left = self._draws.sample(self._pairs, len(self._pairs))
        kind, moment = self._left.pop()
        return _Next(kind, moment, self._draws.random() * self._spread_s, self._draws.random() * _WITHIN_S[moment])

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
        self._moments = Moments(directory)
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
            is_due, due_s = False, None  # whether its end is owed to a kill; when the next kill is due
            planned = self._plan.next()
            try:
                while (code := driver.poll()) != 0:
                    if code is not None:
                        self._require(is_due, code)
                        console.say(f"  the run ended (exit code {code}); rollforward resume {self._directory}")
                        driver, is_due, due_s = _start(["resume", str(self._directory)], log), False, None
                    self._note_progress()
                    if self.kills < kills and victims(driver.pid, planned.kind):
                        due_s = due_s or time.monotonic() + planned.wait_s
                        is_now = time.monotonic() >= due_s and self._moments.wait(planned.moment, _POLL_S)
                        if is_now and self._kill(driver.pid, planned, f"{done + self.kills + 1}/{total}"):
                            is_due |= planned.kind in _ENDS_THE_RUN
                            planned, due_s = self._plan.next(), None
                    time.sleep(_POLL_S)
            finally:
                self._family |= set(family(driver.pid))
                driver.kill()
                driver.wait()
                self._note_progress(is_done=True)
                end(self._family, _LEFTOVER_S)

    def _kill(self, driver: int, planned: _Next, number: str) -> bool:
        """Kill one of a kind; whether there still was one."""
        time.sleep(planned.delay_s)
        self._family |= set(family(driver))
        pids = victims(driver, planned.kind)
        if not pids or not kill(pid := self._plan.choose(pids)):
            return False
        self._waiting.append(Killed(time.monotonic(), self._progress()))
        self.kills += 1
        at = "" if planned.moment == "any" else f" at a {planned.moment}"
        console.say(f"  kill {number}: {planned.kind}{at} (pid {pid})")
        return True

    def _require(self, is_due: bool, code: int) -> None:
        """Raise DrillError unless the run's end is owed to a kill."""
        if not is_due:
            raise DrillError(
                f"the drilled run ended with exit code {code} though neither it nor its learner was killed since it was"
                f" started, and whatever else was killed is replaced inside a run; what it said is in {self._log_path}:"
                f" {_last_line(self._log_path)}"
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
        0, or 1 when a token was lost or drawn again, anything is not equal, or a run failed by itself.
    """
    try:
        return _drill(run)
    except DrillError as error:
        console.say(f"drill FAILED: {error}")
        return 1


def _drill(run: DrillRun) -> int:
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
        "moments": ", ".join(run.drill.moments),
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
