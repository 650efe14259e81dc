"""Files of a token log's directory: segments, the epoch file, the lock.

    00000003-000002.wal   segment 2 of epoch 3 (created whole under a temporary name, then linked: never half a header)
    EPOCH                 a segment header of kind "EPOC": stream, newest epoch (who has an older one is fenced), and
                          the log's identity, which its mirror shares
    RETIRED               header of the first segment that is kept, where older ones were removed (wal_retention.py)
    LOCK                  held with flock by the live writer

Here: names, atomic creation, locking and fencing. Not here: the bytes (sandbox/codec.py), the writer thread
(rollout/wal_commit.py), segments being written (rollout/wal_segments.py), reading (rollout/wal_scan.py).
"""

import errno
import fcntl
import os
import re
import stat
from pathlib import Path
from typing import Self

from rollforward.conf.errors import is_lasting, way_out
from rollforward.rollout.errors import WalFencedError, WalLockedError, WalRefusedError, WalUsageError, WalWriteError
from rollforward.sandbox.codec import SegmentHeader, encode_segment_header, parse_segment_header
from rollforward.sandbox.files import sync_directory

SEGMENT_SUFFIX = ".wal"
"""Ending of segment files."""

TEMPORARY_SUFFIX = ".tmp"
"""Ending of files that were being created; a repair removes them."""

EPOCH_NAME = "EPOCH"
"""Name of the epoch file."""

RETIRED_NAME = "RETIRED"
"""Name of the file that says where the log begins, once something of it was removed."""

LOCK_NAME = "LOCK"
"""Name of the lock file."""

_EPOCH_KIND = "EPOC"
# Numbers of more digits fit no header; such a name is nobody's.
_SEGMENT_NAME = re.compile(r"([0-9]{8,18})-([0-9]{6,18})\.wal")
_MAX_BYTES = 1 << 34


def segment_name(epoch: int, segment: int) -> str:
    """Returns the file name of a segment."""
    return f"{epoch:08d}-{segment:06d}{SEGMENT_SUFFIX}"


def parse_segment_name(name: str) -> tuple[int, int] | None:
    """Returns (epoch, segment) of a segment's file name, or None for any other name."""
    match = _SEGMENT_NAME.fullmatch(name)
    return (int(match[1]), int(match[2])) if match else None


def read_regular(path: Path) -> bytes:
    """Returns the bytes of a file; never waits for a pipe, reads a device, or takes more than a log's files can hold.

    Raises:
        OSError: the kernel's; it is no regular file; it is larger than any file of a log, or than the memory.

    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        if status.st_size > _MAX_BYTES:
            raise OSError(errno.EFBIG, f"{status.st_size} bytes are more than any file of a log has", str(path))
        with open(descriptor, "rb", closefd=False) as file:
            return file.read()
    except MemoryError:
        raise OSError(errno.ENOMEM, "more bytes than fit the memory", str(path)) from None
    finally:
        os.close(descriptor)


def read_epoch_file(directory: Path) -> SegmentHeader | None:
    """Returns the content of EPOCH (stream and epoch), or None when it is absent or does not verify."""
    try:
        header = parse_segment_header(read_regular(directory / EPOCH_NAME))
    except OSError:
        return None
    return header if isinstance(header, SegmentHeader) and header.kind == _EPOCH_KIND else None


class EpochClaim:
    """Ownership of a stream's directories by one writer: their locks, and an epoch newer than any before.

    States: held (from `claim`) -> released (`release`, or the process ends). A claim that another one overtook stays
    held but `check` raises.
    """

    def __init__(self, directories: tuple[Path, ...], epoch: int, locks: list[int]) -> None:
        """Use `claim`."""
        self.directories = directories
        self.epoch = epoch
        self._locks = locks

    @property
    def directory(self) -> Path:
        """The first directory."""
        return self.directories[0]

    @classmethod
    def claim(cls, directory: Path, *, stream: str, takeover: bool, mirror: Path | None = None) -> Self:
        """Creates the directory if need be, takes the lock and a new epoch; from then on older writers are fenced.

        Args:
            directory: of one stream; shared with nobody else.
            stream: its identity; a directory keeps the first one it was claimed with.
            takeover: go past a lock that is still held (a stopped or partitioned process that a coordinator gave up).
            mirror: directory of the second copy, claimed in the same way.

        Raises:
            WalLockedError: another live process holds a lock.
            WalUsageError: a directory belongs to another stream, or the mirror to another log, or something that is no
                file has the name of one.
            OSError: a directory cannot be made or written.

        """
        directories = (directory,) if mirror is None else (directory, mirror)
        locks: list[int] = []
        try:
            for home in directories:
                _check_place(home)
                home.mkdir(parents=True, exist_ok=True)
                if not (home / EPOCH_NAME).exists():
                    _sync_parents(home)
                locks.append(_lock(home / LOCK_NAME, takeover=takeover))
            epoch, identity = _next_epoch(directories, stream)
            # The identity of the log stands where a segment has its first seq.
            content = SegmentHeader(
                kind=_EPOCH_KIND, stream=stream, epoch=epoch, segment=0, first_seq=identity, tail_crc=0
            )
            for home in directories:
                replace_file(home / EPOCH_NAME, encode_segment_header(content))
        except BaseException:
            for lock in locks:
                os.close(lock)
            raise
        return cls(directories, epoch, locks)

    def check(self) -> None:
        """Raises WalFencedError when a newer epoch exists or a directory is gone; costs one small read of each."""
        for home in self.directories:
            current = read_epoch_file(home)
            if current is None or current.epoch != self.epoch:
                newest = "none" if current is None else current.epoch
                raise WalFencedError(
                    f"log {home}: this writer has epoch {self.epoch}, the directory's is {newest}."
                    " Another replica took over; end this one."
                )

    def release(self) -> None:
        """Gives the locks back; safe to call twice."""
        while self._locks:
            os.close(self._locks.pop())


def _check_place(home: Path) -> None:
    """Raises WalUsageError where something stands in the way that no log leaves behind."""
    if home.exists() and not home.is_dir():
        raise WalUsageError(f"log directory {home} is no directory; move away what is there.")
    for name in (LOCK_NAME, EPOCH_NAME, EPOCH_NAME + TEMPORARY_SUFFIX, RETIRED_NAME, RETIRED_NAME + TEMPORARY_SUFFIX):
        if (home / name).exists() and not (home / name).is_file():
            raise WalUsageError(f"log {home}: {name} is no regular file, and the log needs that name; move it away.")


def _sync_parents(home: Path) -> None:
    """Makes a new log's own name durable, and those of the directories that it lies in: whoever made them did not."""
    device = os.stat(home).st_dev
    for parent in home.resolve().parents:
        try:
            if os.stat(parent).st_dev != device:
                return
            sync_directory(parent)
        except OSError:
            # Not readable for us, so not made by us.
            continue


def _next_epoch(directories: tuple[Path, ...], stream: str) -> tuple[int, int]:
    """Returns an epoch newer than any in the directories, and the identity of their log, drawn if it has none."""
    epochs = [0]
    identities: set[int] = set()
    for home in directories:
        current = read_epoch_file(home)
        if current is not None and current.stream != stream:
            raise WalUsageError(
                f"log directory {home} belongs to stream {current.stream!r}, not {stream!r};"
                " give each replica its own directory."
            )
        if current is not None:
            epochs.append(current.epoch)
            identities |= {current.first_seq} - {0}
        epochs += [name[0] for name in map(parse_segment_name, os.listdir(home)) if name]
    if len(identities) > 1:
        raise WalUsageError(
            f"log directory {directories[0]} and its mirror {directories[1]} belong to two different logs;"
            " give each run its own wal.mirror_dir, or remove what lies there if it is not needed."
        )
    return 1 + max(epochs), identities.pop() if identities else int.from_bytes(os.urandom(8)) | 1


def _lock(path: Path, *, takeover: bool) -> int:
    """Returns a descriptor that holds the lock; with takeover the old holder keeps a lock on an unlinked file."""
    for _ in range(2):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            if not takeover:
                break
            path.unlink(missing_ok=True)
            continue
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor
    raise WalLockedError(
        f"log directory {path.parent} is written by another live process;"
        " wait for its end, or pass takeover=True if it was declared dead."
    )


def write_error(cause: OSError, path: Path, state: str) -> WalWriteError:
    """What a person needs to know of a failed write.

    Args:
        cause: what the kernel said.
        path: what was written, where the kernel names no file.
        state: what holds of the log.

    Returns:
        An error that tells file, bytes free, and the way out.

    """
    name = Path(os.fsdecode(cause.filename)) if isinstance(cause.filename, str | bytes) else path
    try:
        found = os.statvfs(next(place for place in name.parents if place.is_dir()))
        free = f"{found.f_bavail * found.f_frsize} bytes are free there"
    except (OSError, StopIteration) as unknown:
        free = f"how much is free there is not known ({unknown})"
    remedy = way_out(cause, room="Make room (or raise the quota or the limit on a file's size)")
    kind = WalRefusedError if is_lasting(cause) else WalWriteError
    error = kind(
        f"log {name}: {cause}; {free}; {state}. {remedy}, then go on with `rollforward resume RUN_DIR`: a new writer"
        " continues from the durable tokens."
    )
    error.__cause__ = cause
    return error


def replace_file(path: Path, content: bytes) -> None:
    """Replaces a file so that a reader or a crash sees the old or the new content, never a mixture.

    Raises:
        OSError: the kernel's; the old content stays.

    """
    temporary = path.with_name(path.name + TEMPORARY_SUFFIX)
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
    try:
        view = memoryview(content)
        while view:
            view = view[os.write(descriptor, view) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    os.replace(temporary, path)
    sync_directory(path.parent)
