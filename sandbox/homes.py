"""Directories of supervisors, one each, and cleaning up after those that were killed.

    rollforward-sandboxes-1000/          of one user, closed to others, where temporary files are (TMPDIR)
      5f0c9a7712ab34de/                  home of one supervisor, named after whom it serves
        LOCK                             held with flock while the supervisor lives; its process id
        socket                           where it answers
        log                              what it and the processes below it say
        leases/                          leases.py
        tools/                           sources of tools, by hash
        groups                           where its control groups are: below the group of whoever started it
      5f0c9a7712ab34de.log               the end of the log of one that crashed, until one has ended in order

A home whose lock is free is nobody's: whoever takes the lock ends what its records and its name in the control groups
lead to, and removes it. A supervisor is told apart from its predecessor by the lock alone, never by its files.
"""

import contextlib
import errno
import fcntl
import hashlib
import os
import re
import shutil
import signal
import stat
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Final, Self

from rollforward.sandbox import cgroups
from rollforward.sandbox.errors import SandboxUnavailableError
from rollforward.sandbox.leases import LeaseBook, LeaseRecord, started_ticks

_LOCK: Final = "LOCK"
_GROUPS: Final = "groups"
_LEASES: Final = "leases"
_END_S: Final = 5.0
"""For killed processes to leave their control groups."""
_LOOK_S: Final = 0.01
_PATIENCE_S: Final = 2.0
"""For somebody who only looks whether a lock is free (`Home.holder`) to let it go again."""
_NAME: Final = re.compile(r"[0-9a-f]{16}")
_MAX_KEPT_BYTES: Final = 1 << 16
"""Of the log of a supervisor that crashed."""


def supervisor_id(*parts: object) -> str:
    """Names a supervisor after whom it serves: 16 hexadecimal digits."""
    return hashlib.blake2b(repr(parts).encode("utf-8", "replace"), digest_size=8).hexdigest()


def homes_root() -> Path:
    """The directory of all homes of this user on this machine, made if need be.

    Raises:
        SandboxUnavailableError: it cannot be made, or somebody else's stands in its place.
    """
    root = Path(tempfile.gettempdir()) / f"rollforward-sandboxes-{os.geteuid()}"
    found = None
    try:
        while found is None:
            with contextlib.suppress(FileExistsError):
                root.mkdir(mode=0o700)
            with contextlib.suppress(FileNotFoundError):  # whoever left last removed it again
                found = root.lstat()
    except OSError as error:
        raise SandboxUnavailableError(
            f"sandboxes: {root} cannot be made ({error.strerror}). Make room or set TMPDIR to a directory of yours"
        ) from None
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise SandboxUnavailableError(
            f"sandboxes: {root} is no directory that belongs to you alone (mode 0700). Somebody else may have made it:"
            " remove it, or set TMPDIR to a directory of yours"
        )
    return root


class Home:
    """The directory of one supervisor."""

    def __init__(self, path: Path) -> None:
        """Name it; nothing is made."""
        self.path = path
        self.name = path.name
        self.socket = path / "socket"
        self.log = path / "log"
        self.crash_log = path.with_name(f"{path.name}.log")
        self.tools = path / "tools"
        self.book = LeaseBook(path / _LEASES)

    @classmethod
    def of(cls, name: str) -> Self:
        """The one of that name.

        Raises:
            SandboxUnavailableError: see `homes_root`.
        """
        return cls(homes_root() / name)

    def holder(self) -> int | None:
        """Process id of whoever holds the lock, as far as it said so; None where nobody does."""
        try:
            descriptor = os.open(self.path / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            return None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            with contextlib.suppress(ValueError):
                return int(os.pread(descriptor, 32, 0))
            return None
        else:
            return None
        finally:
            os.close(descriptor)

    def keep_log(self) -> None:
        """Keep what one that crashed has said last, if it said something: its home goes."""
        with contextlib.suppress(OSError):
            with self.log.open("rb") as log:
                log.seek(max(log.seek(0, os.SEEK_END) - _MAX_KEPT_BYTES, 0))
                said = log.read()
            if said.strip():
                self.crash_log.write_bytes(said)

    def last_words(self) -> str:
        """The last line of the log of one that crashed; empty where there is none."""
        with contextlib.suppress(OSError):
            lines = self.crash_log.read_text(encoding="utf-8", errors="replace").split("\n")
            return next((line.strip() for line in reversed(lines) if line.strip()), "")
        return ""


class Claim:
    """A home whose lock is held, by this process alone. States: held (from `take`) -> released."""

    def __init__(self, home: Home, descriptor: int) -> None:
        """Use `take`."""
        self.home = home
        self._descriptor = descriptor

    @classmethod
    def take(cls, home: Home, *, make: bool) -> Self | None:
        """Take the lock; None where somebody else holds it or, without `make`, there is no home.

        Raises:
            OSError: it cannot be made or written.
        """
        while True:
            try:
                if make:
                    with contextlib.suppress(FileExistsError):  # not exist_ok: it may be gone again when that looks
                        home.path.mkdir(mode=0o700)
                flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_CREAT
                descriptor = os.open(home.path / _LOCK, flags, 0o600)
            except FileNotFoundError:
                if make:  # it was removed between the two, and perhaps the root with it
                    homes_root()
                    continue
                return None
            except NotADirectoryError:
                if make:
                    raise
                return None
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if _is_same(descriptor, home.path / _LOCK):
                    os.ftruncate(descriptor, 0)
                    os.pwrite(descriptor, b"%d\n" % os.getpid(), 0)
                    return cls(home, descriptor)
            except BlockingIOError:
                os.close(descriptor)
                return None
            except OSError:
                os.close(descriptor)
                raise
            os.close(descriptor)  # of a home that was removed meanwhile

    def clean(self) -> bool:
        """End what a killed predecessor has left, and say whether nothing is; the home stays, and what was said last.

        A process that waits in the kernel, killed as it is, is left: then so is what leads to it.
        """
        self.home.keep_log()
        records = list(self.home.book.read())
        for record in records:
            _end_process(record)
        parents = self._group_parents() | {Path(g).parent for r in records for g in r.cgroups}
        is_gone = _end_groups(self.home.name, parents)
        leads = {_LOCK} if is_gone else {_LOCK, _GROUPS, _LEASES}
        for entry in self.home.path.iterdir():
            if entry.name not in leads:
                _remove(entry)
        return is_gone

    def note_groups(self) -> None:
        """Write down where control groups will be, before there are any.

        Raises:
            OSError: there is no room.
        """
        (self.home.path / _GROUPS).write_bytes(b"\n".join(os.fsencode(path) for path in cgroups.find().parents()))

    def _group_parents(self) -> set[Path]:
        try:
            noted = (self.home.path / _GROUPS).read_bytes()
        except OSError:
            return set()
        return {Path(os.fsdecode(line)) for line in noted.splitlines() if line.startswith(b"/")}

    def remove(self) -> None:
        """Remove the home and release the lock. While a process of it waits in the kernel, killed as it is, the home
        stays, for its guard to clean up.
        """
        if cgroups.sweep(cgroups.find(), self.home.name):
            self.release()
            return
        for entry in self.home.path.iterdir():
            if entry.name != _LOCK:
                _remove(entry)
        # The lock goes last, still held: who waits for it finds that its file is gone and starts over.
        (self.home.path / _LOCK).unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # a successor may stand in it already, and others beside it
            self.home.path.rmdir()
            self.home.path.parent.rmdir()
        self.release()

    def release(self) -> None:
        """Let the lock go; the home stays."""
        os.close(self._descriptor)


def sweep_homes(*, but: str = "") -> list[str]:
    """Clean up after all supervisors of this user that were killed, and return their names.

    Args:
        but: name of a home that is left alone.

    Raises:
        SandboxUnavailableError: see `homes_root`.
    """
    root, names = homes_root(), list[str]()
    with contextlib.suppress(FileNotFoundError):
        names = os.listdir(root)
    return [name for name in names if name != but and sweep_home(Home(root / name))]


def sweep_home(home: Home, *, is_dead: bool = False) -> bool:
    """Clean up after one supervisor if it is dead, and say whether that was done. What is no home stays.

    Args:
        home: of the supervisor.
        is_dead: whether that is known: who has its lock then is a successor, or looks at it and has it for a moment.
    """
    if _NAME.fullmatch(home.name) is None:
        return False
    end_s = time.monotonic() + (_PATIENCE_S if is_dead else 0.0)
    try:
        while (claim := Claim.take(home, make=False)) is None:
            if time.monotonic() >= end_s or not home.path.exists():
                return False
            time.sleep(_LOOK_S)
    except OSError:
        return False
    try:
        if claim.clean():
            claim.remove()
            return True
    except OSError:
        pass
    claim.release()  # for whoever tries again
    return False


def _is_same(descriptor: int, path: Path) -> bool:
    try:
        named = path.lstat()
    except OSError:
        return False
    held = os.fstat(descriptor)
    return (held.st_dev, held.st_ino) == (named.st_dev, named.st_ino)


def _end_process(record: LeaseRecord) -> None:
    """Kill what the record names, if it is still that."""
    if record.pid is None:
        return
    try:
        descriptor = os.pidfd_open(record.pid)
    except OSError:
        return
    try:
        if started_ticks(record.pid) == record.started_ticks:
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)
    except OSError as error:
        if error.errno not in (errno.ESRCH, errno.EPERM):
            raise
    finally:
        os.close(descriptor)


def _end_groups(label: str, parents: Iterable[Path]) -> bool:
    """Kill and remove the control groups of a label, where this process would make some and where others did; whether
    none is left."""
    places = [cgroups.find(), *(cgroups.Hierarchies(None, None, parent) for parent in parents)]
    end_s = time.monotonic() + _END_S
    while sum(cgroups.sweep(place, label) for place in places):
        if time.monotonic() > end_s:
            return False
        time.sleep(_LOOK_S)
    return True


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
