"""Control groups of sandboxes: what limits their memory and processes together, and kills them to the last.

A group is a directory `rollforward.LABEL.ID` below this process's own group, in each hierarchy that counts: version 2
where it has the controllers, version 1 where those are there, both on hosts that have both (the limits in version 1,
`cgroup.kill` in version 2), or nowhere. All limits are those of the whole sandbox.
"""

import contextlib
import errno
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from rollforward.sandbox.inside import system

_PREFIX: Final = "rollforward"
_LABEL: Final = re.compile(r"[A-Za-z0-9_-]{1,80}")
_V1: Final = ("memory", "pids")
_FREEZE_S: Final = 5.0
_LOOK_S: Final = 0.0005


class Hierarchies:
    """Where groups can be made on this machine.

    Attributes:
        memory: directory below which a group counts memory, or None. pids: likewise. unified: a version 2 directory
            below which groups can be made, whatever its controllers are, or None.
    """

    def __init__(self, memory: Path | None, pids: Path | None, unified: Path | None) -> None:
        self.memory = memory
        self.pids = pids
        self.unified = unified

    def parents(self) -> list[Path]:
        """The distinct directories."""
        return list(dict.fromkeys(p for p in (self.memory, self.pids, self.unified) if p is not None))


def find(mounts: str | None = None, own: str | None = None) -> Hierarchies:
    """What there is and can be written.

    Args:
        mounts: text of /proc/self/mountinfo; None: read it.
        own: text of /proc/self/cgroup; None: read it.
    """
    with contextlib.suppress(OSError):
        mounts = Path("/proc/self/mountinfo").read_text() if mounts is None else mounts
        own = Path("/proc/self/cgroup").read_text() if own is None else own
    found: dict[str, Path] = {}
    for names, path in _own_groups(own or ""):
        for kind, options, root, point in _group_mounts(mounts or ""):
            is_it = kind == "cgroup2" if names == [""] else kind == "cgroup" and set(names) <= set(options)
            if not is_it:
                continue
            inner = os.path.relpath(path, root) if Path(path).is_relative_to(root) else "."
            place = Path(os.path.normpath(os.path.join(point, inner)))
            if os.access(place, os.W_OK):
                found.update(dict.fromkeys(names, place))
    unified = found.get("")
    v1 = {name: found.get(name) for name in _V1}
    if unified is not None:
        delegated = _delegate(unified, [name for name in _V1 if v1[name] is None])
        v1.update(dict.fromkeys(delegated, unified))
    return Hierarchies(v1["memory"], v1["pids"], unified)


def _own_groups(own: str) -> Iterator[tuple[list[str], str]]:
    for line in own.splitlines():
        _, names, path = line.split(":", 2)
        yield names.split(","), path


def _group_mounts(mounts: str) -> Iterator[tuple[str, list[str], str, str]]:
    for line in mounts.splitlines():
        before, _, after = line.partition(" - ")
        kind, _, options = after.split(" ", 2)
        if kind in ("cgroup", "cgroup2"):
            _, _, _, root, point, *_ = before.split(" ")
            yield kind, options.split(","), root, point


def _delegate(unified: Path, names: list[str]) -> list[str]:
    """Those of the controllers that groups below the directory will have."""
    try:
        there = [name for name in names if name in (unified / "cgroup.controllers").read_text().split()]
        wanted = [name for name in there if name not in (unified / "cgroup.subtree_control").read_text().split()]
    except OSError:
        return []
    if wanted and not _enable(unified, wanted):
        # A group with processes of its own gives its controllers to none below it: they move into one of those.
        with contextlib.suppress(OSError):
            leaf = unified / f"{_PREFIX}-supervisor"
            leaf.mkdir(exist_ok=True)
            for pid in (unified / "cgroup.procs").read_text().split():
                with contextlib.suppress(OSError):
                    (leaf / "cgroup.procs").write_text(pid)
        if not _enable(unified, wanted):
            return [name for name in there if name not in wanted]
    return there


def _enable(unified: Path, names: list[str]) -> bool:
    try:
        (unified / "cgroup.subtree_control").write_text(" ".join(f"+{name}" for name in names))
    except OSError:
        return False
    return True


class Group:
    """The group of one sandbox, in all hierarchies.

    Raises:
        OSError: it cannot be made, or a limit cannot be set; nothing of it is left.
    """

    def __init__(self, hierarchies: Hierarchies, label: str, name: str, memory_bytes: int, processes: int) -> None:
        self._hierarchies = hierarchies
        self._name = f"{_PREFIX}.{label}.{name}"
        self._events = os.devnull
        self._made: list[Path] = []
        try:
            for parent in hierarchies.parents():
                path = parent / self._name
                with contextlib.suppress(FileExistsError):
                    path.mkdir()
                self._made.append(path)
            if hierarchies.memory is not None:
                self._limit_memory(hierarchies.memory / self._name, memory_bytes)
            if hierarchies.pids is not None:
                (hierarchies.pids / self._name / "pids.max").write_text(str(processes))
        except OSError:
            self.remove()
            raise

    def _limit_memory(self, path: Path, memory_bytes: int) -> None:
        is_second = (path / "memory.max").exists()
        self._events = str(path / ("memory.events" if is_second else "memory.oom_control"))
        if is_second:
            (path / "memory.max").write_text(str(memory_bytes))
            with contextlib.suppress(OSError):
                (path / "memory.swap.max").write_text("0")
            return
        (path / "memory.limit_in_bytes").write_text(str(memory_bytes))
        with contextlib.suppress(OSError):  # or else what lies in sockets would not count at all
            (path / "memory.kmem.tcp.limit_in_bytes").write_text(str(memory_bytes // 4))
        with contextlib.suppress(OSError):
            (path / "memory.memsw.limit_in_bytes").write_text(str(memory_bytes))

    @property
    def paths(self) -> tuple[Path, ...]:
        """Its directories."""
        return tuple(self._made)

    def open_procs(self) -> list[int]:
        """Descriptors to write "0" into, by a process that shall be in the group. The caller closes them."""
        opened: list[int] = []
        try:
            for path in self._made:
                descriptor = os.open(path / "cgroup.procs", os.O_WRONLY | os.O_CLOEXEC)
                opened.append(descriptor)
        except OSError:
            for descriptor in opened:
                os.close(descriptor)
            raise
        return opened

    def oom_kills(self) -> int:
        """Processes that the kernel has killed in it because there was no memory."""
        try:  # before and after every command, so with as few steps as can be
            with open(self._events, "rb", buffering=0) as file:
                return system.oom_kills(file.fileno())
        except OSError:
            return 0

    def processes(self) -> list[int]:
        """Those in it."""
        found: set[int] = set()
        for path in self._made:
            with contextlib.suppress(OSError):
                found.update(map(int, (path / "cgroup.procs").read_text().split()))
        return sorted(found - {0})

    def kill(self) -> None:
        """Kill all in it; they end soon after."""
        _kill(self._made)

    def freeze(self, is_frozen: bool) -> None:
        """Stop all in it, or let it go on; returns when that is so.

        Raises:
            OSError: there is no group of version 2, or it does not stop.
        """
        if self._hierarchies.unified is None:
            raise OSError(errno.ENOSYS, "there are no control groups of version 2")
        path = self._hierarchies.unified / self._name
        (path / "cgroup.freeze").write_text("1" if is_frozen else "0")
        end_s = time.monotonic() + _FREEZE_S
        while f"frozen {int(is_frozen)}" not in (path / "cgroup.events").read_text().splitlines():
            if time.monotonic() > end_s:
                raise OSError(errno.EBUSY, f"its processes did not stop within {_FREEZE_S:g} s")
            time.sleep(_LOOK_S)

    def remove(self) -> bool:
        """Remove what is empty of it; whether nothing is left."""
        self._made = [path for path in self._made if not _remove(path)]
        return not self._made


def sweep(hierarchies: Hierarchies, label: str) -> int:
    """Kill and remove the groups of a label, whoever made them; those that are left."""
    left = 0
    for parent in hierarchies.parents():
        for path in parent.glob(f"{_PREFIX}.{label}.*"):
            _kill([path])
            left += not _remove(path)
    return left


def check_label(label: str) -> str:
    """The label, which is part of a directory's name.

    Raises:
        ValueError: it cannot be.
    """
    if _LABEL.fullmatch(label) is None:
        raise ValueError(f"label {label!r} has other characters than A-Z a-z 0-9 _ -, or is empty or too long")
    return label


def _kill(paths: list[Path]) -> None:
    for path in paths:
        try:
            (path / "cgroup.kill").write_text("1")
        except OSError:
            with contextlib.suppress(OSError):
                for pid in (path / "cgroup.procs").read_text().split():
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(int(pid), 9)


def _remove(path: Path) -> bool:
    try:
        path.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True
