"""Group commit: a bounded queue, one thread, one write and one sync per batch, and the seq up to which all is durable.

Here: frames in, durability out; segments rotate on the way. Not here: what a frame means (rollout/wal.py over it,
rollout/wal_records.py), segments (rollout/wal_segments.py), fencing (rollout/wal_files.py).
"""

import threading
import time
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from rollforward.rollout.errors import RolloutError, WalStalledError, WalUsageError, WalWriteError
from rollforward.rollout.wal_files import EpochClaim, write_error
from rollforward.rollout.wal_records import WAL_KIND, WalConfig
from rollforward.rollout.wal_segments import SegmentWriter
from rollforward.sandbox.codec import MAX_PAYLOAD_BYTES, SegmentHeader, encode_frame, frame_seed

_QUEUE_ENTRY_BYTES = 128


class WalStats(msgspec.Struct, frozen=True, kw_only=True):
    """Counters of a writer since it was opened; the source of the `wal/*` metrics."""

    frames: int
    """Frames committed."""
    bytes_written: int
    """Bytes committed, without segment headers."""
    commits: int
    """Group commits, one sync each."""
    sync_s: float
    """Time in syncs, seconds, summed over commits."""
    sync_max_s: float
    """Longest sync, seconds."""
    backpressure_s: float
    """Time that appends waited for room in the queue, seconds."""
    segments: int
    """Segments created."""


class _Queued(NamedTuple):
    """A record on its way to the writer thread."""

    seq: int
    frame_type: int
    flags: int
    payload: bytes


class GroupCommitter:
    """Commits frames of one stream in the order they were submitted.

    States: running -> closed (`close`: everything durable) | abandoned (`abandon`: queued frames dropped, as in a
    crash) | failed (a write or sync error, or a newer epoch: every later submit and wait raises that error).
    Threads: every method from any thread; its own thread does the writing.
    """

    def __init__(
        self,
        claim: EpochClaim,
        *,
        stream: str,
        config: WalConfig,
        next_seq: int,
        tail_crc: int,
        sync: Callable[[int], None] | None,
    ) -> None:
        """Creates the epoch's first segment and starts the thread.

        Args:
            claim: ownership of the directory; released when the committer ends.
            stream: identity in segment headers.
            config: sizes and time limits.
            next_seq: seq of the first frame.
            tail_crc: crc of the frame before it, 0 when there is none.
            sync: makes a descriptor durable, or None to leave it to the kernel.

        Raises:
            WalFencedError: another process has this epoch.
            OSError: the segment cannot be made.

        """
        self._claim = claim
        self._config = config
        self._seed = frame_seed(stream, claim.epoch)
        self._tail_crc = tail_crc
        self._next_seq = next_seq
        self._durable_seq = next_seq - 1
        header = SegmentHeader(
            kind=WAL_KIND, stream=stream, epoch=claim.epoch, segment=0, first_seq=next_seq, tail_crc=tail_crc
        )
        self._segments = SegmentWriter(claim.directories, header, config=config, sync=sync)

        self._condition = threading.Condition()
        self._queue: list[_Queued] = []
        self._queued_bytes = 0
        self._is_closing = False
        self._is_abandoned = False
        self._error: RolloutError | None = None

        self._frames = self._bytes_written = self._commits = 0
        self._sync_s = self._sync_max_s = self._backpressure_s = 0.0
        self._thread = threading.Thread(target=self._run, name=f"wal-{stream}", daemon=True)
        self._thread.start()

    @property
    def durable_seq(self) -> int:
        """Every frame with a seq up to this one is durable. Never shrinks; costs nothing to read."""
        return self._durable_seq

    @property
    def _durable(self) -> str:
        return f"durable up to seq {self._durable_seq}, nothing after it may be published"

    @property
    def error(self) -> RolloutError | None:
        """Why the committer failed, or None."""
        return self._error

    def stats(self) -> WalStats:
        """Returns the counters; values of a commit in progress may be partly in."""
        return WalStats(
            frames=self._frames,
            bytes_written=self._bytes_written,
            commits=self._commits,
            sync_s=self._sync_s,
            sync_max_s=self._sync_max_s,
            backpressure_s=self._backpressure_s,
            segments=self._segments.num_segments,
        )

    def submit(self, frame_type: int, flags: int, payload: bytes) -> int:
        """Queues a frame, waiting for room if need be, and returns its seq.

        Args:
            frame_type: u8.
            flags: u8.
            payload: owned by the committer from here on.

        Raises:
            WalUsageError: the payload is too large, or the committer is closed. Nothing was queued.
            WalWriteError, WalFencedError: the committer failed (now or earlier).
            WalStalledError: no room within stall_timeout_s. Nothing was queued; may be repeated.

        """
        size = len(payload) + _QUEUE_ENTRY_BYTES
        if len(payload) > MAX_PAYLOAD_BYTES:
            raise WalUsageError(
                f"record of {len(payload)} bytes; the log holds at most {MAX_PAYLOAD_BYTES} in one record."
            )
        with self._condition:
            if self._queue and self._queued_bytes + size > self._config.queue_bytes:
                self._wait_for_room(size)
            if self._error is not None:
                raise self._error
            if self._is_closing:
                raise WalUsageError("the log is closed; open it again with open_log.")
            seq = self._next_seq
            self._next_seq = seq + 1
            self._queue.append(_Queued(seq, frame_type, flags, payload))
            self._queued_bytes += size
            if len(self._queue) == 1:
                self._condition.notify_all()
        return seq

    def wait_durable(self, seq: int, *, timeout_s: float | None = None) -> None:
        """Returns when every frame up to `seq` is durable.

        Args:
            seq: as `submit` returned it.
            timeout_s: seconds; None for the configured stall_timeout_s.

        Raises:
            WalWriteError, WalFencedError: the writer failed before; the frames must not be published.
            WalStalledError: not durable yet; may be repeated.
            WalUsageError: `submit` returned no such seq.

        """
        limit_s = self._config.stall_timeout_s if timeout_s is None else timeout_s
        with self._condition:
            if seq >= self._next_seq:
                raise WalUsageError(f"seq {seq} was never submitted; the newest is {self._next_seq - 1}.")
            self._condition.wait_for(lambda: self._durable_seq >= seq or self._error is not None, limit_s)
            if self._durable_seq >= seq:
                return
            if self._error is not None:
                raise self._error
            raise WalStalledError(
                f"log {self._claim.directory}: seq {seq} is not durable after {limit_s} s ({self._durable_seq} is)."
                " Look at the disk; raise stall_timeout_s if it is only slow."
            )

    def cut(self) -> SegmentHeader:
        """Lets the next frame begin a segment and returns that segment's header. Only while nobody submits.

        Raises:
            WalWriteError, WalFencedError: the committer failed, or a newer epoch exists.
            WalStalledError: what was submitted is not durable yet; may be repeated.

        """
        self.wait_durable(self._next_seq - 1)
        if self._error is not None:
            raise self._error
        self._claim.check()
        with self._condition:
            return self._segments.cut(self._next_seq, self._tail_crc)

    def close(self, *, seal: int) -> None:
        """Makes everything durable, writes a last frame of type `seal`, ends the thread; safe to call twice.

        Raises:
            WalWriteError, WalFencedError: the committer failed; what is above durable_seq must not be published.
            WalStalledError: the disk did not keep up; may be repeated.

        """
        if not self._is_closing and self._error is None:
            # Alone in its commit, so that its batch_seq vouches for every frame before it.
            self.wait_durable(self._next_seq - 1)
            self.submit(seal, 0, b"")
        with self._condition:
            self._is_closing = True
            self._condition.notify_all()
        self._end()
        if self._error is not None and not self._is_abandoned:
            raise self._error

    def abandon(self) -> None:
        """Ends the thread and gives the lock back without committing what is queued, as a crash would."""
        with self._condition:
            self._is_closing = self._is_abandoned = True
            self._queue.clear()
            self._condition.notify_all()
        self._end()

    def _end(self) -> None:
        self._thread.join(self._config.stall_timeout_s)
        if self._thread.is_alive():
            raise WalStalledError(
                f"log {self._claim.directory}: a sync has not returned for {self._config.stall_timeout_s} s;"
                " end the process."
            )
        try:
            if self._error is None and not self._is_abandoned:
                self._segments.finish()
        except OSError as cause:
            self._error = write_error(cause, self._segments.path, self._durable)
        finally:
            self._segments.close()
            self._claim.release()

    def _wait_for_room(self, size: int) -> None:
        """Blocks until a record of `size` bytes fits, or something else ends the wait.

        The caller holds the condition.
        """
        limit = self._config.queue_bytes - size

        def is_over() -> bool:
            return not self._queue or self._queued_bytes <= limit or self._error is not None or self._is_closing

        started = time.monotonic()
        has_room = self._condition.wait_for(is_over, self._config.stall_timeout_s)
        self._backpressure_s += time.monotonic() - started
        if not has_room:
            raise WalStalledError(
                f"log {self._claim.directory}: its queue of {self._config.queue_bytes} bytes stayed full for"
                f" {self._config.stall_timeout_s} s. Look at the disk; raise stall_timeout_s if it is only slow."
            )

    def _run(self) -> None:
        """The writer thread: commits until closed, abandoned or failed."""
        error: RolloutError | None = WalWriteError(
            f"log {self._claim.directory}: the writer thread ended by a bug; see its stack on stderr."
        )
        try:
            while batch := self._take():
                self._commit(batch)
            error = None
        except OSError as cause:
            error = write_error(cause, self._segments.path, self._durable)
        except RolloutError as cause:
            error = cause
        finally:
            with self._condition:
                self._error = error
                self._condition.notify_all()

    def _take(self) -> list[_Queued]:
        """Returns everything queued, waiting for something; empty when closing and nothing is left."""
        with self._condition:
            self._condition.wait_for(lambda: self._queue or self._is_closing)
            batch, self._queue = self._queue, []
            self._queued_bytes = 0
            self._condition.notify_all()
        return batch

    def _commit(self, batch: list[_Queued]) -> None:
        """Writes a batch with one write, syncs once, checks the epoch, and only then lets it be published."""
        parts: list[bytes] = []
        first_seq = batch[0].seq
        tail_crc = self._tail_crc
        for entry in batch:
            frame, tail_crc = encode_frame(
                frame_type=entry.frame_type,
                flags=entry.flags,
                seq=entry.seq,
                batch_seq=first_seq,
                payload=entry.payload,
                seed=self._seed,
            )
            parts.append(frame)
        data = b"".join(parts)
        if not self._segments.has_room(len(data)):
            self._segments.rotate(first_seq, self._tail_crc)
        sync_s = self._segments.append(data)
        self._claim.check()
        self._tail_crc = tail_crc
        self._frames += len(batch)
        self._bytes_written += len(data)
        self._commits += 1
        self._sync_s += sync_s
        self._sync_max_s = max(self._sync_max_s, sync_s)
        with self._condition:
            self._durable_seq = batch[-1].seq
            self._condition.notify_all()
