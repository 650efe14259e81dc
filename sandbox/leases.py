"""Leases: what is on disk of each sandbox before it exists, and until when its owner may stay silent.

    leases/4be0c1d2a3f40516     one file an instance: crc32 of the rest, in hexadecimal, and the record as JSON

A record is written before its sandbox is made, written again with where that is, and removed when nothing of it is
left. It is read by whoever cleans up after a supervisor that was killed (`homes.py`). The deadline is not in it: a
supervisor's sandboxes die with it, so nobody but it could act on one, and a renewal costs no write.

Records need not survive the machine, so nothing is synced; they are whole or not there, whatever is killed.
"""

import contextlib
import os
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import msgspec

from rollforward.sandbox.errors import SandboxUnavailableError

_MAX_BYTES: Final = 1 << 20
_TEMPORARY: Final = ".new"


class LeaseRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What is on disk of a sandbox."""

    instance: str
    """Its incarnation, which its control groups are named after."""
    sandbox_id: str
    """Its identity; empty while it is nobody's."""
    owner: str
    """Who asked for it."""
    labels: dict[str, str]
    """Of its spec."""
    made_unix_s: float
    """When it was asked for."""
    pid: int | None = None
    """Its first process, once there is one."""
    started_ticks: int | None = None
    """When that process started, as the kernel counts: another one with its number has another."""
    cgroups: tuple[str, ...] = ()
    """Its control groups."""


class LeaseBook:
    """The records of one supervisor. One thread."""

    def __init__(self, directory: Path) -> None:
        """Keep where records are; the directory is made with the first."""
        self._directory = directory

    def write(self, record: LeaseRecord) -> None:
        """Put a record on disk, in place of an earlier one of its instance.

        Raises:
            SandboxUnavailableError: there is no room for it or no right to write it; then no sandbox may be made.
        """
        path = self._directory / record.instance
        new = path.with_suffix(_TEMPORARY)
        body = msgspec.json.encode(record)
        try:
            self._directory.mkdir(mode=0o700, exist_ok=True)
            try:
                new.write_bytes(b"%08x\n%b\n" % (zlib.crc32(body), body))
                os.replace(new, path)
            except OSError:
                with contextlib.suppress(OSError):
                    new.unlink()
                raise
        except OSError as error:
            raise SandboxUnavailableError(
                f"the record of a sandbox cannot be written to {path} ({error.strerror}), and without it nobody could"
                " clean up after a crash. Make room there"
            ) from None

    def remove(self, instance: str) -> None:
        """Forget an instance of which nothing is left."""
        with contextlib.suppress(FileNotFoundError):
            (self._directory / instance).unlink()

    def read(self) -> Iterator[LeaseRecord]:
        """The records that are whole. Torn and foreign files are none; never raises."""
        try:
            paths = sorted(self._directory.iterdir())
        except OSError:
            return
        for path in paths:
            record = _read(path)
            if record is not None and record.instance == path.name:
                yield record


class Deadline:
    """Until when the owner of a sandbox may stay silent."""

    def __init__(self, lease_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """Start with a sign of life."""
        self._clock = clock
        self._end_s = clock() + lease_s

    def renew(self, lease_s: float) -> None:
        """A sign of life. It never shortens what is left."""
        self._end_s = max(self._end_s, self._clock() + lease_s)

    def put_off(self, seconds: float) -> None:
        """For so long nobody could be heard."""
        self._end_s += seconds

    @property
    def left_s(self) -> float:
        """Seconds that are left; negative: it has run out."""
        return self._end_s - self._clock()


def started_ticks(pid: int) -> int | None:
    """When a process started, in clock ticks since the machine did; None where there is no such process."""
    try:
        return int(
            Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(") ")[2].split()[19]
        )
    except (OSError, ValueError, IndexError):
        return None


def _read(path: Path) -> LeaseRecord | None:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            crc, _, body = os.read(descriptor, _MAX_BYTES).partition(b"\n")
        finally:
            os.close(descriptor)
    except OSError:
        return None
    body = body.removesuffix(b"\n")
    try:
        return msgspec.json.decode(body, type=LeaseRecord) if int(crc, 16) == zlib.crc32(body) else None
    except (ValueError, msgspec.MsgspecError):
        return None
