"""Finds and kills processes of a run, by the kernel's own list (`rollforward drill`)."""

import contextlib
import os
import signal
import time
from pathlib import Path
from typing import NamedTuple

from rollforward.rl.drill_config import DrillKind

_TITLES = {"engine": ("ray::RolloutActor",), "learner": ("ray::LearnerActor", "ray::DistillActor")}
"""How Ray calls the processes."""


class Process(NamedTuple):
    """One process; pid and start together are of one process only."""

    pid: int
    start: int
    title: str


def family(pid: int) -> list[Process]:
    """A process's descendants, itself left out."""
    children: dict[int, list[Process]] = {}
    for directory in Path("/proc").iterdir():
        if directory.name.isdigit():
            with contextlib.suppress(OSError):
                # Behind the name, which may hold anything: state, parent, ..., and as the 20th the start.
                fields = (directory / "stat").read_text(errors="replace").rpartition(")")[2].split()
                title = (directory / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                if fields[0] != "Z":
                    child = Process(int(directory.name), int(fields[19]), title)
                    children.setdefault(int(fields[1]), []).append(child)
    found: list[Process] = []
    waiting = [pid]
    while waiting:
        below = children.get(waiting.pop(), [])
        found += below
        waiting += [child.pid for child in below]
    return found


def victims(driver: int, kind: DrillKind) -> list[int]:
    """Pids of the processes of a kind below a driver, which counts itself while it has a replica; in order."""
    processes = family(driver)
    if kind == "driver":
        return [driver] if _titled(processes, _TITLES["engine"]) else []
    if kind == "sandbox":
        engines = _titled(processes, _TITLES["engine"])
        # bubblewrap and what it runs; with either the other ends.
        return sorted(p.pid for engine in engines for p in family(engine) if "/program.py" in p.title)
    return _titled(processes, _TITLES[kind])


def _titled(processes: list[Process], starts: tuple[str, ...]) -> list[int]:
    return sorted(process.pid for process in processes if process.title.startswith(starts))


def kill(pid: int) -> bool:
    """SIGKILL; whether there was such a process."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


def end(processes: set[Process], timeout_s: float) -> None:
    """Wait for processes to end by themselves, and kill those that do not."""
    deadline_s = time.monotonic() + timeout_s
    while (left := [process for process in processes if _lives(process)]) and time.monotonic() < deadline_s:
        time.sleep(0.1)
    for process in left:
        kill(process.pid)


def _lives(process: Process) -> bool:
    try:
        fields = Path(f"/proc/{process.pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return False
    return fields[0] != "Z" and int(fields[19]) == process.start
