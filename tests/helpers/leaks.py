"""What sandboxes could leave on a machine, looked for from outside of everything that makes them."""

import asyncio
import contextlib
import ctypes
import gc
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Collection
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from rollforward.sandbox import vm_cache
from tests.helpers.sandboxes import descendants
from tests.helpers.supervisors import command, mount_count, pids

_PR_SET_CHILD_SUBREAPER: Final = 36
_LOOK_S: Final = 0.1


class Household:
    """All that is started below this process stays below it, whoever in between is killed: nothing can hide.

    A context manager. What is left of processes, mounts, shared memory, sockets, scratch directories of the user's
    cache and this process's own descriptors is what was not there at its beginning.
    """

    def __init__(self, folder: Path) -> None:
        """Name where temporary files lie, of which there are none yet."""
        self._folder = folder

    def __enter__(self) -> Self:
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self._processes = set(descendants(os.getpid()))
        self._mounts = mount_count()
        self._shared, self._scratch = _shared_memory(), _scratch()
        self._descriptors = own_descriptors()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)

    def reap(self, but: Collection[int] = ()) -> None:
        """Let orphans go that have ended. Children that this process waits for itself are `but`."""
        for pid in _children():
            if pid not in self._processes and pid not in but and _state(pid) == "Z":
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)

    def left(self) -> list[str]:
        """What there is, of files and sockets all that lie in the folder."""
        self.reap()
        found = [f"process {pid} {command(pid)}" for pid in descendants(os.getpid()) if pid not in self._processes]
        if (more := mount_count() - self._mounts) > 0:
            found.append(f"{more} mounts")
        found += [f"shared memory {name}" for name in _shared_memory() - self._shared - _opened_shared_memory()]
        found += [f"scratch {name}" for name in _scratch() - self._scratch]
        found += [f"file {path}" for path in self._folder.rglob("*")]
        sockets = Path("/proc/net/unix").read_text(encoding="utf-8", errors="replace").splitlines()
        return found + [f"socket {line}" for line in sockets if str(self._folder) in line]

    def own_descriptors(self) -> Counter[str]:
        """Those of this process that were not there."""
        return own_descriptors() - self._descriptors

    async def settled(self, within_s: float) -> None:
        """Wait until nothing is left. What others of this machine are making just now goes by itself."""
        await until(lambda: self.left(), within_s)


async def until(left: Callable[[], Collection[object]], within_s: float) -> None:
    """Wait until nothing is left."""
    end_s = time.monotonic() + within_s
    while found := left():
        assert time.monotonic() < end_s, found
        await asyncio.sleep(_LOOK_S)


def descriptors(pid: int) -> Counter[str]:
    """How many a process has of each kind; numbers in names of pipes and sockets are left out."""
    found: Counter[str] = Counter()
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):  # it is closed by now: that of this very directory
            found[re.sub(r"\[\d+\]", "", os.readlink(path)).removesuffix(" (deleted)")] += 1
    return +Counter({name: number for name, number in found.items() if f"/proc/{pid}/fd" != name})


def own_descriptors() -> Counter[str]:
    """How many this process has, without those that wait for the collector of garbage."""
    gc.collect()
    return descriptors(os.getpid())


def _children() -> list[int]:
    lists = [path.read_text(encoding="ascii").split() for path in Path("/proc/self/task").glob("*/children")]
    return [int(pid) for pids_ in lists for pid in pids_]


def _state(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(") ")[2][:1]
    return ""


def _shared_memory() -> set[str]:
    """Files, and segments of other users: of this one's nobody can say whose they are."""
    segments = [line.split() for line in Path("/proc/sysvipc/shm").read_text(encoding="ascii").splitlines()[1:]]
    found = {f"segment {fields[1]} of user {fields[7]}" for fields in segments if int(fields[7]) != os.geteuid()}
    return found | {f"/dev/shm/{name}" for name in os.listdir("/dev/shm")}


def _opened_shared_memory() -> set[str]:
    """Files of shared memory that a process has, which is no part of a sandbox: those are gone."""
    found: set[str] = set()
    for pid in pids():
        with contextlib.suppress(OSError):
            found.update(re.findall(r"/dev/shm/\S+", Path(f"/proc/{pid}/maps").read_text(encoding="utf-8")))
    return found


def _scratch() -> set[str]:
    """Directories of the user's cache that are being filled, or were when somebody was killed."""
    return {path.name for path in vm_cache.CACHE.glob(".*-*")}
