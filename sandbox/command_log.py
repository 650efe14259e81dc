"""The command log of one trajectory: everything that was asked of its sandbox, in order, durable before it counts.

    run_dir/commands/step_000012/s12-p3-m0.log    of training; eval_000012/eval12-p3-m0.log of an evaluation
    run_dir/commands/step_000012/blobs/           what is too large for a record
    run_dir/commands/step_000012/snapshots/NAME/  the last state of one trajectory's sandbox
    run_dir/commands/step_000012/prepared/        states that several trajectories begin with

A log is one segment of the codec: a header (kind CMND, the trajectory as its stream) and one frame for each record.
It gets its name when its header is on disk, so a file without a header is damage and never a beginning. Each record is
written and synced before the next, so bytes after the last good frame are one write that was cut short: nobody had been
told of it, and the next writer cuts it. Anything else that is no frame is damage: the log is refused whole and left as
it is.

Here: files, lock, order of bytes. Not here: the meaning of records (`command_records.py`), sandboxes (`session.py`).
"""

import contextlib
import errno
import fcntl
import os
import re
import threading
from pathlib import Path
from typing import Final, NamedTuple, Self

from rollforward.sandbox.blobs import BlobStore
from rollforward.sandbox.codec import (
    SEGMENT_HEADER_BYTES,
    HeaderFault,
    SegmentHeader,
    encode_frame,
    encode_segment_header,
    frame_seed,
    parse_segment_header,
    scan_frames,
)
from rollforward.sandbox.command_history import CommandHistory
from rollforward.sandbox.command_records import COMMAND_LOG_KIND, FIRST_SEQ, CommandRecord, decode_record, encode_record
from rollforward.sandbox.errors import (
    CodecUsageError,
    CommandLogDamagedError,
    CommandLogError,
    CommandLogLockedError,
    CommandLogWriteError,
)
from rollforward.sandbox.files import read_descriptor, sync_directory, write_all

LOG_SUFFIX: Final = ".log"
"""Ending of command logs."""

COMMANDS_NAME: Final = "commands"
"""Directory of a run's command logs, in its run_dir."""

BLOBS_NAME: Final = "blobs"
"""Directory of the blobs, beside the logs that name them."""

SNAPSHOTS_NAME: Final = "snapshots"
"""Directory of snapshots, of which there is one directory for each trajectory."""

PREPARED_NAME: Final = "prepared"
"""Directory of states that trajectories begin with."""

_EPOCH: Final = 1
_MAX_BYTES: Final = 1 << 30
_TRAJECTORY = re.compile(
    r"(s|eval)(0|[1-9][0-9]{0,8})-p(?:0|[1-9][0-9]{0,8})-m(?:0|[1-9][0-9]{0,8})(?:-a[1-9][0-9]{0,3})?"
)


def log_path(run_dir: Path, trajectory: str) -> Path:
    """Returns where a trajectory's command log lies.

    Args:
        run_dir: of the run.
        trajectory: such as `s12-p3-m0` or `eval12-p3-m0`; with `-a1`, `-a2`, ... where it was begun again.

    Raises:
        ValueError: it reads otherwise.

    """
    match = _TRAJECTORY.fullmatch(trajectory)
    if match is None:
        raise ValueError(
            f"trajectory is {trajectory!r}; it must read s<step>-p<prompt>-m<member> or eval<step>-p<prompt>-m<member>,"
            " such as s12-p3-m0"
        )
    purpose = "step" if match[1] == "s" else "eval"
    return run_dir / COMMANDS_NAME / f"{purpose}_{int(match[2]):06d}" / log_name(trajectory)


def is_trajectory(name: str) -> bool:
    """Whether a text reads like a trajectory's name."""
    return _TRAJECTORY.fullmatch(name) is not None


def log_name(trajectory: str) -> str:
    """Returns the file name of a trajectory's log."""
    return f"{trajectory}{LOG_SUFFIX}"


class LogView(NamedTuple):
    """What a log holds, for who only looks."""

    trajectory: str
    """Whose it is, by its header; by its name where that is not readable."""
    history: CommandHistory
    """What its records say, up to the first that cannot be believed."""
    size_bytes: int
    """Of the file."""
    torn_bytes: int
    """Bytes of a write that was cut short; no damage."""
    damage: str
    """Why the log is not believed; empty where it is."""


def read_log(path: Path) -> LogView:
    """Returns what a log holds, without its lock and without changing it; somebody may be writing it.

    Invariants: never raises, whatever lies there.
    """
    history = CommandHistory()
    trajectory, size_bytes, torn_bytes, damage = path.name.removesuffix(LOG_SUFFIX), 0, 0, ""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            data = read_descriptor(descriptor, path, max_bytes=_MAX_BYTES)
        finally:
            os.close(descriptor)
        size_bytes = len(data)
        header = _header(data, path)
        trajectory = header.stream
        torn_bytes = size_bytes - _fill(history, data, header, path)
    except OSError as error:
        damage = _unreadable(error, path)
    except CommandLogError as error:
        damage = str(error)
    return LogView(trajectory, history, size_bytes, torn_bytes, damage)


class CommandLog:
    """A log and its one writer. Any thread may call; records are written one at a time.

    States: open -> failed (a write or sync failed: nothing is written any more) -> closed (`close`).
    """

    def __init__(self, path: Path, descriptor: int, history: CommandHistory, *, end: int, sync: bool) -> None:
        """Use `open`."""
        self.history = history
        self.path = path
        self.blobs = BlobStore(path.parent / BLOBS_NAME, sync=sync)
        self.snapshots = BlobStore(path.parent / SNAPSHOTS_NAME / path.name.removesuffix(LOG_SUFFIX), sync=sync)
        self.prepared = BlobStore(path.parent / PREPARED_NAME, sync=sync)
        self._descriptor = descriptor
        self._end = end
        self.sync = sync
        self._seed = frame_seed(path.name.removesuffix(LOG_SUFFIX), _EPOCH)
        self._lock = threading.Lock()
        self._error: CommandLogWriteError | None = None

    @classmethod
    def open(cls, path: Path, *, sync: bool) -> Self:
        """Takes the log's lock, reads it, and cuts a write that was cut short. A log that is not there is made.

        Args:
            path: its file; the name without `.log` is the trajectory's, 1 to 32 bytes.
            sync: whether records must survive a power cut; without it they survive the death of any process.

        Raises:
            CommandLogLockedError: another writer has it.
            CommandLogDamagedError: it cannot be believed; nothing was changed.
            CommandLogWriteError: it cannot be made, cut or synced.
            CodecUsageError: the name is no trajectory's.

        """
        try:
            descriptor = _locked(path, sync=sync)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
                raise CommandLogDamagedError(_unreadable(error, path)) from None
            raise _write_error(path, error) from error
        try:
            history, end = cls._read(path, descriptor)
            if os.fstat(descriptor).st_size > end:
                os.ftruncate(descriptor, end)
            if sync:
                # What is answered from here on must not be lost: a predecessor may have died before its own sync.
                os.fsync(descriptor)
        except OSError as error:
            os.close(descriptor)
            raise _write_error(path, error) from error
        except BaseException:
            os.close(descriptor)
            raise
        return cls(path, descriptor, history, end=end, sync=sync)

    @staticmethod
    def _read(path: Path, descriptor: int) -> tuple[CommandHistory, int]:
        try:
            data = read_descriptor(descriptor, path, max_bytes=_MAX_BYTES)
        except OSError as error:
            raise CommandLogDamagedError(_unreadable(error, path)) from None
        header = _header(data, path)
        history = CommandHistory()
        return history, _fill(history, data, header, path)

    def append(self, record: CommandRecord) -> int:
        """Writes a record; when this returns it is durable and part of `history`.

        Returns:
            Its sequence number.

        Raises:
            CommandLogWriteError: it may or may not be on disk; the log is dead for good.
            CommandLogDamagedError: the record cannot stand here; a bug in the caller, nothing was written.

        """
        with self._lock:
            if self._error is not None:
                raise self._error
            seq = self.history.next_seq
            self.history.check(seq, record)
            kind, payload = encode_record(record)
            try:
                frame, _ = encode_frame(
                    frame_type=kind, flags=0, seq=seq, batch_seq=seq, payload=payload, seed=self._seed
                )
                write_all(self._descriptor, frame, offset=self._end)
                if self.sync:
                    os.fdatasync(self._descriptor)
            except (OSError, CodecUsageError) as error:
                self._error = _write_error(self.path, error)
                raise self._error from error
            self._end += len(frame)
            self.history.apply(seq, record)
            return seq

    def close(self) -> None:
        """Gives the lock back and leaves the file as it is; safe to call twice."""
        with self._lock:
            if self._descriptor >= 0:
                os.close(self._descriptor)
                self._descriptor = -1
                self._error = self._error or CommandLogWriteError(f"command log {self.path} is closed.")


def _header(data: bytes, path: Path) -> SegmentHeader:
    header = parse_segment_header(data)
    if isinstance(header, HeaderFault):
        what = {
            HeaderFault.EMPTY: "is empty",
            HeaderFault.FOREIGN: "does not begin as one",
            HeaderFault.DAMAGED: "has a damaged header",
            HeaderFault.UNSUPPORTED: "is of another version of this program",
        }[header]
        raise CommandLogDamagedError(f"command log {path} {what}; a log has a whole header from its beginning.")
    if header.kind != COMMAND_LOG_KIND:
        raise CommandLogDamagedError(f"{path} is a log of kind {header.kind!r}, no command log.")
    expected = path.name.removesuffix(LOG_SUFFIX)
    if header.stream != expected:
        raise CommandLogDamagedError(
            f"command log {path} is the one of {header.stream}, not of {expected}; files were moved or mixed."
        )
    if (header.epoch, header.segment, header.first_seq, header.tail_crc) != (_EPOCH, 0, FIRST_SEQ, 0):
        raise CommandLogDamagedError(f"command log {path} has a header that no command log has: {header}.")
    return header


def _fill(history: CommandHistory, data: bytes, header: SegmentHeader, path: Path) -> int:
    """Applies the records of a log and returns where the last one ends."""
    scan = scan_frames(data, offset=SEGMENT_HEADER_BYTES, seed=frame_seed(header.stream, header.epoch))
    damaged = scan.damaged[0] if scan.damaged else None
    for frame in scan.frames:
        if damaged is not None and frame.start >= damaged.end:
            raise CommandLogDamagedError(
                f"command log {path} has damaged bytes {damaged.start} to {damaged.end}, before intact records."
            )
        try:
            if frame.batch_seq != frame.seq:
                raise CommandLogDamagedError(f"record {frame.seq} is part of a batch from {frame.batch_seq}")
            history.apply(frame.seq, decode_record(frame.frame_type, frame.flags, frame.payload))
        except CommandLogDamagedError as error:
            raise CommandLogDamagedError(f"command log {path}, byte {frame.start}: {error}.") from None
    return scan.end


def _locked(path: Path, *, sync: bool) -> int:
    """Returns a descriptor of the log that holds its lock; makes the log if there is none."""
    for _ in range(8):
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            made = _make(path, sync=sync)
            if made is None:
                continue
            return made
        if _take(descriptor, path, path):
            return descriptor
    raise _busy(path)


def _make(path: Path, *, sync: bool) -> int | None:
    """Makes a log with a header and nothing else; returns its descriptor, locked, or None where somebody else did.

    The file has its lock and its header before it has its name.
    """
    stream = path.name.removesuffix(LOG_SUFFIX)
    header = encode_segment_header(
        SegmentHeader(kind=COMMAND_LOG_KIND, stream=stream, epoch=_EPOCH, segment=0, first_seq=FIRST_SEQ, tail_crc=0)
    )
    _make_directory(path.parent, sync=sync)
    temporary = path.with_name(f".{path.name}.tmp")
    descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    if not _take(descriptor, temporary, path):
        return None
    try:
        if os.fstat(descriptor).st_nlink > 1:
            # It is a log already: who made it was killed before this name was gone.
            os.unlink(temporary)
            os.close(descriptor)
            return None
        os.ftruncate(descriptor, 0)
        write_all(descriptor, header)
        if sync:
            os.fsync(descriptor)
        with contextlib.suppress(FileExistsError):
            os.link(temporary, path)
            os.unlink(temporary)
            if sync:
                sync_directory(path.parent)
            return descriptor
        os.unlink(temporary)
    except BaseException:
        os.close(descriptor)
        raise
    os.close(descriptor)
    return None


def _make_directory(directory: Path, *, sync: bool) -> None:
    """Makes a directory and those above it; their names are durable too."""
    if directory.is_dir():
        return
    missing = [directory, *directory.parents]
    missing = [place for place in missing if not place.exists()]
    directory.mkdir(parents=True, exist_ok=True)
    if sync:
        for place in missing:
            sync_directory(place.parent)


def _take(descriptor: int, name: Path, log: Path) -> bool:
    """Locks an open file. False, and closed, where the name belongs to another file by now.

    Raises:
        CommandLogLockedError: somebody else has the lock.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        here, there = os.fstat(descriptor), os.stat(name, follow_symlinks=False)
        if (here.st_dev, here.st_ino) == (there.st_dev, there.st_ino):
            return True
    except BlockingIOError:
        os.close(descriptor)
        raise _busy(log) from None
    except FileNotFoundError:
        pass
    except BaseException:
        os.close(descriptor)
        raise
    os.close(descriptor)
    return False


def _busy(path: Path) -> CommandLogLockedError:
    return CommandLogLockedError(
        f"command log {path} is written by another process, or by another session of this one; one trajectory has one"
        " writer. Wait for its end."
    )


def _unreadable(error: OSError, path: Path) -> str:
    if error.errno == errno.ELOOP:
        return f"command log {path} is a link; a log is a file of its own."
    return f"command log {path} cannot be read: {error.strerror or error}."


def _write_error(path: Path, error: Exception) -> CommandLogWriteError:
    return CommandLogWriteError(
        f"command log {path}: {error}; nothing that is not on disk is handed out. Make room or look at the device, then"
        " go on with `rollforward resume RUN_DIR`."
    )
