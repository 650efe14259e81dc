"""Segments of a token log as they are written: filled with zeros beforehand, in one directory or in two at once.

    commit --append--> segment k of every directory, in parallel --all synced--> durable
    worker: temporary file of zeros, synced --rotation: header, link, directory synced--> segment k + 1

A sync that only overwrites zeros has no new size and no new extents to write, which about halves it. The next segment
is prepared while the current one is in use, so a rotation costs one small sync. The first segment of an epoch is small
and each following one larger, so that a short run neither waits for zeros nor leaves many.

A descriptor on which a write or a sync failed is closed and never used again. Zeros that could not be prepared (a full
disk) cost only the speed: the segment then grows as it is written.

Here: bytes to durable files. Not here: which bytes (rollout/wal_commit.py), names and fencing (rollout/wal_files.py).
"""

import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec

from rollforward.rollout.errors import WalFencedError
from rollforward.rollout.wal_files import TEMPORARY_SUFFIX, segment_name
from rollforward.rollout.wal_records import WalConfig
from rollforward.sandbox.codec import (
    ROOM_ALIGNMENT_BYTES,
    SEGMENT_HEADER_BYTES,
    SegmentHeader,
    encode_segment_header,
)
from rollforward.sandbox.files import sync_directory

Sync = Callable[[int], None]
"""Makes a descriptor's data durable."""

_T = TypeVar("_T")

_FIRST_ROOM_BYTES = 1 << 20
_ROOM_GROWTH = 8
_ZEROS = bytes(1 << 20)


class Prepared(NamedTuple):
    """A file under a temporary name that waits to become a segment."""

    path: Path
    """Its name."""
    descriptor: int
    """Open for writing."""
    room_bytes: int
    """Its size: zeros, all on disk. 0 for a file that grows."""


def prepare(directory: Path, name: str, *, room_bytes: int, sync: Sync | None) -> Prepared:
    """Creates a file of zeros under a temporary name; it does not count as part of the log.

    Args:
        directory: of the stream.
        name: of the segment that it is for.
        room_bytes: how many zeros; 0 for a file that grows.
        sync: makes a descriptor's data durable, or None for the level `process`.

    Raises:
        OSError: the kernel's; nothing is left of the file.

    """
    path = directory / f"{name}.{os.getpid()}{TEMPORARY_SUFFIX}"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
    prepared = Prepared(path, descriptor, room_bytes)
    try:
        done = 0
        while done < room_bytes:
            done += _written(os.pwrite(descriptor, _ZEROS[: room_bytes - done], done), path)
        if room_bytes and sync is not None:
            sync(descriptor)
    except OSError as error:
        discard(prepared)
        raise _named(error, path) from None
    return prepared


def discard(prepared: Prepared) -> None:
    """Closes and removes a prepared file."""
    os.close(prepared.descriptor)
    prepared.path.unlink(missing_ok=True)


class SegmentFile:
    """One open segment: created whole, written at its end, synced, closed. Not thread-safe.

    States: open -> failed (a write or sync raised: only `close` is left) | finished (`finish`) | closed (`close`).
    """

    def __init__(self, directory: Path, header: SegmentHeader, *, prepared: Prepared, sync: Sync | None) -> None:
        """Creates the file; when this returns its header is on disk under its final name.

        Args:
            directory: of the stream.
            header: of the segment.
            prepared: the file that it becomes; owned from here on.
            sync: makes a descriptor's data durable (os.fdatasync), or None for the level `process`.

        Raises:
            WalFencedError: a segment of that name exists: somebody else has this epoch.
            OSError: the kernel's; nothing that a reader would take for damage is left.

        """
        self.path = directory / segment_name(header.epoch, header.segment)
        self.size_bytes = 0
        self._sync = sync
        self._descriptor = prepared.descriptor
        self._room_bytes = prepared.room_bytes
        try:
            self.write(encode_segment_header(header))
            self.sync()
            os.link(prepared.path, self.path)
            os.unlink(prepared.path)
            if sync is not None:
                sync_directory(directory)
        except FileExistsError:
            self.close()
            raise WalFencedError(
                f"segment {self.path} exists already: another writer has epoch {header.epoch}. End this replica."
            ) from None
        except OSError as error:
            self.close()
            raise _named(error, self.path) from None

    def write(self, data: bytes) -> None:
        """Writes all of `data` at the end; a short write is continued, an error is final.

        Raises:
            OSError: the kernel's, with the file's name; part of `data` may be in the file.

        """
        view = memoryview(data)
        while view:
            try:
                written = _written(os.pwrite(self._descriptor, view, self.size_bytes), self.path)
            except OSError as error:
                raise _named(error, self.path) from None
            self.size_bytes += written
            view = view[written:]

    def sync(self) -> None:
        """Makes everything written durable (nothing to do at level `process`).

        Raises:
            OSError: the kernel's, with the file's name; the descriptor must not be used again.

        """
        if self._sync is not None:
            try:
                self._sync(self._descriptor)
            except OSError as error:
                raise _named(error, self.path) from None

    def finish(self) -> None:
        """Cuts what is left of the zeros and closes; for a segment in which everything is durable.

        The cut itself need not be: zeros at a segment's end mean nothing.

        Raises:
            OSError: the kernel's, with the file's name.

        """
        if self._descriptor >= 0 and self._room_bytes > self.size_bytes:
            try:
                os.ftruncate(self._descriptor, self.size_bytes)
            except OSError as error:
                raise _named(error, self.path) from None
        self.close()

    def close(self) -> None:
        """Closes the descriptor and touches nothing else; safe to call twice."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class SegmentWriter:
    """The current segment of a stream in each of its directories, and the zeros for the next one.

    Not thread-safe: owned by the thread that commits. A call that raised leaves nothing to go on with but `close`.
    """

    def __init__(
        self, directories: Sequence[Path], header: SegmentHeader, *, config: WalConfig, sync: Sync | None
    ) -> None:
        """Creates the epoch's first segment.

        Args:
            directories: the first one, and at level `cluster` its mirror.
            header: of the segment, number 0.
            config: sizes.
            sync: makes a descriptor durable, or None to leave it to the kernel.

        Raises:
            WalFencedError: another process has this epoch.
            OSError: the segment cannot be made.

        """
        self._config = config
        self._sync = sync
        self._directories = tuple(directories)
        self._copiers = [_Worker(f"wal-copy-{header.stream}") for _ in self._directories[1:]]
        self._preparer = _Worker(f"wal-zeros-{header.stream}")
        self._coming: list[Future[Prepared]] = []
        self._segments: list[SegmentFile] = []
        self._header = header
        self._is_cut = False
        self.num_segments = 0
        try:
            self._create(header, self._room_bytes(0))
        except BaseException:
            self.close()
            raise

    @property
    def path(self) -> Path:
        """The current segment in the first directory."""
        return self._directories[0] / segment_name(self._header.epoch, self._header.segment)

    @property
    def is_empty(self) -> bool:
        """Whether the current segment has no frame yet."""
        return self._segments[0].size_bytes <= SEGMENT_HEADER_BYTES

    @property
    def size_bytes(self) -> int:
        """Bytes of the current segment, without what is left of its zeros."""
        return self._segments[0].size_bytes

    def has_room(self, num_bytes: int) -> bool:
        """Whether so many bytes belong into the current segment."""
        if self.is_empty:
            return True
        return not self._is_cut and self.size_bytes + num_bytes <= self._limit_bytes(self._header.segment)

    def cut(self, first_seq: int, tail_crc: int) -> SegmentHeader:
        """Lets the next frame begin a segment, if the current one has any, and returns the header it will have.

        Only while nobody appends: everything is durable and nothing comes.

        Args:
            first_seq: seq of the next frame. tail_crc: crc of the frame before that.

        """
        self._is_cut = not self.is_empty
        number = self._header.segment + self._is_cut
        return msgspec.structs.replace(self._header, segment=number, first_seq=first_seq, tail_crc=tail_crc)

    def rotate(self, first_seq: int, tail_crc: int) -> None:
        """Ends the current segment, in which everything is durable, and starts the next.

        Args:
            first_seq: seq of its first frame. tail_crc: crc of the frame before that.

        Raises:
            WalFencedError, OSError: as for the first segment.

        """
        for segment in self._segments:
            segment.finish()
        number = self._header.segment + 1
        header = SegmentHeader(
            kind=self._header.kind,
            stream=self._header.stream,
            epoch=self._header.epoch,
            segment=number,
            first_seq=first_seq,
            tail_crc=tail_crc,
        )
        self._create(header, self._room_bytes(number))

    def append(self, data: bytes) -> float:
        """Writes `data` to every directory and returns when it is durable in all of them.

        Returns:
            Seconds that the sync took, of the slowest directory.

        Raises:
            OSError: the kernel's, with the file's name. Nothing of `data` may be published.

        """
        copies = [
            copier.submit(lambda segment=segment: _append(segment, data))
            for copier, segment in zip(self._copiers, self._segments[1:], strict=True)
        ]
        sync_s = 0.0
        try:
            sync_s = _append(self._segments[0], data)
        finally:
            # Also when the first one failed: nothing may go on writing behind an error.
            sync_s = max([sync_s, *(copy.result() for copy in copies)])
        self._prepare_next()
        return sync_s

    def finish(self) -> None:
        """Ends the last segment, in which everything is durable; then nothing is left open."""
        for segment in self._segments:
            segment.finish()
        self.close()

    def close(self) -> None:
        """Closes everything and leaves the segments as they are; safe to call twice."""
        for worker in (*self._copiers, self._preparer):
            worker.end()
        for coming in self._coming:
            if coming.exception() is None:
                discard(coming.result())
        self._coming = []
        for segment in self._segments:
            segment.close()

    def _limit_bytes(self, number: int) -> int:
        """Size beyond which the next segment starts."""
        most = self._config.segment_bytes
        return min(most, _FIRST_ROOM_BYTES * _ROOM_GROWTH ** min(number, 8)) if self._is_preallocating else most

    def _room_bytes(self, number: int) -> int:
        limit = self._limit_bytes(number)
        return limit - limit % ROOM_ALIGNMENT_BYTES if self._is_preallocating else 0

    @property
    def _is_preallocating(self) -> bool:
        # Without a sync there is nothing that zeros would make faster.
        return self._config.preallocate and self._sync is not None

    def _prepare_next(self) -> None:
        """Starts to fill the next segment when the current one is half full."""
        number = self._header.segment
        if self._coming or not self._is_preallocating or 2 * self.size_bytes < self._limit_bytes(number):
            return
        name, room_bytes = segment_name(self._header.epoch, number + 1), self._room_bytes(number + 1)
        self._coming = [
            self._preparer.submit(
                lambda directory=directory: prepare(directory, name, room_bytes=room_bytes, sync=self._sync)
            )
            for directory in self._directories
        ]

    def _create(self, header: SegmentHeader, room_bytes: int) -> None:
        """Makes a segment the current one, from prepared zeros where there are some."""
        self._header = header
        self._is_cut = False
        self._segments = []
        coming, self._coming = self._coming, []
        name = segment_name(header.epoch, header.segment)
        prepared: list[Prepared] = []
        try:
            for index, directory in enumerate(self._directories):
                prepared.append(self._file(directory, name, room_bytes, coming[index] if coming else None))
            for directory, file in zip(self._directories, prepared, strict=True):
                self._segments.append(SegmentFile(directory, header, prepared=file, sync=self._sync))
        except BaseException:
            for file in prepared[len(self._segments) + 1 :]:
                discard(file)
            raise
        self.num_segments += 1

    def _file(self, directory: Path, name: str, room_bytes: int, coming: Future[Prepared] | None) -> Prepared:
        try:
            if coming is not None:
                return coming.result()
            return prepare(directory, name, room_bytes=room_bytes, sync=self._sync)
        except OSError:
            # No room for zeros may still be room for frames; this file is a new one, with its own descriptor.
            return prepare(directory, name, room_bytes=0, sync=self._sync)


class _Worker:
    """One daemon thread that does what it is given, in order: a stuck device does not keep the process from ending."""

    def __init__(self, name: str) -> None:
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def submit(self, work: Callable[[], _T]) -> Future[_T]:
        """Returns the future of a call in the thread, which starts with the first one."""
        future: Future[_T] = Future()

        def task() -> None:
            try:
                future.set_result(work())
            except BaseException as error:  # noqa: BLE001 the future carries it to who waits
                future.set_exception(error)

        if not self._thread.is_alive():
            self._thread.start()
        self._tasks.put(task)
        return future

    def end(self) -> None:
        """Lets the thread finish what it was given and waits for it; safe to call twice."""
        if self._thread.is_alive():
            self._tasks.put(None)
            self._thread.join()

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            task()


def _append(segment: SegmentFile, data: bytes) -> float:
    segment.write(data)
    started = time.monotonic()
    segment.sync()
    return time.monotonic() - started


def _written(count: int, path: Path) -> int:
    """The count, or OSError where a device accepted nothing: that loop would never end."""
    if count <= 0:
        raise OSError(f"write to {path} accepted {count} bytes")
    return count


def _named(error: OSError, path: Path) -> OSError:
    """The error, with the file's name where it is one of the kernel's that has none."""
    if error.filename is None and error.errno is not None:
        error.filename = str(path)
    return error
