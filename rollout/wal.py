"""The token write-ahead log's writer: one stream per engine replica, durable before published.

    engine --append_*--> bounded queue --thread: one write, one sync--> durable_seq --engine: publish what is below

A replica starts with `open_log`: it takes the directory (lock, new epoch: older writers are fenced), recovers what is
durable, and returns the writer together with the recovered requests. From then on every sampled token goes through
`append_step`; a token, and above all an end of sequence, leaves the replica only when its seq is <= `durable_seq`.

Here: opening, slot bookkeeping, one method per record. Not here: queue and thread (rollout/wal_commit.py), records
(rollout/wal_records.py), directories and fencing (rollout/wal_files.py), reading (rollout/wal_recovery.py).
"""

import os
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt

from rollforward.rollout.errors import RolloutError, WalUsageError
from rollforward.rollout.types import (
    FailureType,
    Float32Array,
    Int32Array,
    KeptSets,
    Request,
    RequestId,
    StopReason,
)
from rollforward.rollout.wal_commit import GroupCommitter, WalStats
from rollforward.rollout.wal_files import EPOCH_NAME, EpochClaim, write_error
from rollforward.rollout.wal_mirror import mirror_directory
from rollforward.rollout.wal_records import (
    NO_SLOT,
    NUM_SLOTS,
    CloseRecord,
    KvSavedRecord,
    ObserveRecord,
    OpenRecord,
    RecordType,
    VersionRecord,
    WalConfig,
    WalRecord,
    encode_record,
)
from rollforward.rollout.wal_recovery import RecoveredLog, recover
from rollforward.rollout.wal_retention import Retention, Retirement
from rollforward.rollout.wal_runs import asked_columns
from rollforward.rollout.wal_scan import ProblemKind
from rollforward.rollout.wal_step import StepRecord, StepRoutes

_FREE = -1


def open_log(
    directory: Path,
    *,
    stream: str,
    config: WalConfig,
    takeover: bool = False,
    sync: Callable[[int], None] = os.fdatasync,
) -> tuple["WalWriter", RecoveredLog]:
    """Takes over a stream: fences older writers, recovers what is durable, starts a writer that goes on after it.

    Bad bytes never stop it: a torn tail is cut, damage fails its requests (`RecoveredLog.failed`, `.problems`).

    Args:
        directory: of this stream alone; made if absent.
        stream: identity of the replica, at most 32 bytes; stays the same over restarts.
        config: durability level and sizes.
        takeover: go past a lock that another live process holds; only when a coordinator has given that process up.
        sync: makes a descriptor's data durable above level `process`; another one only to emulate a device in a
            benchmark or test.

    Returns:
        (writer, recovered). Finished requests are to be answered from `recovered`, unfinished ones opened again with
        `append_open(..., resumed_tokens=len(token_ids), resumed_observations=len(observations))`, failed ones closed
        with `append_close_recovered`.

    Raises:
        WalLockedError: another live process writes the stream.
        WalUsageError: the directory belongs to another stream, or a newer version of the format wrote in it, or the
            mirror is on the same device or belongs to another log.
        WalFencedError: another process took the stream over at the same moment.
        WalWriteError: the directory cannot be made or written; `WalRefusedError` where that stays so.

    Invariants: safe to call again after any error or kill; sequence numbers and epochs grow over all calls.

    """
    try:
        return _open(directory, stream=stream, config=config, takeover=takeover, sync=sync)
    except OSError as cause:
        raise write_error(cause, directory / EPOCH_NAME, "it was not opened, and what is durable stays so") from cause


def _open(
    directory: Path, *, stream: str, config: WalConfig, takeover: bool, sync: Callable[[int], None]
) -> tuple["WalWriter", RecoveredLog]:
    mirror = mirror_directory(config, directory)
    claim = EpochClaim.claim(directory, stream=stream, takeover=takeover, mirror=mirror)
    try:
        recovered = recover(directory, stream=stream, repair=True, mirror=mirror)
        newer = [problem.where for problem in recovered.problems if problem.kind is ProblemKind.UNSUPPORTED]
        if newer:
            raise WalUsageError(
                f"log {directory}: {', '.join(newer)} has a newer format than this version reads."
                " Upgrade, or use a fresh directory."
            )
        committer = GroupCommitter(
            claim,
            stream=stream,
            config=config,
            next_seq=recovered.scan.next_seq,
            tail_crc=recovered.scan.tail_crc,
            sync=None if config.level == "process" else sync,
        )
    except BaseException:
        claim.release()
        raise
    retention = Retention(
        claim.directories, keep_bytes=config.keep_bytes, recovered=(*recovered.requests, *recovered.failed)
    )
    return WalWriter(committer, epoch=claim.epoch, retention=retention), recovered


class WalWriter:
    """Appends records to one stream and says up to where they are durable.

    States: running -> closed (`close`: everything durable, stream sealed) | abandoned (`abandon`: queued records
    dropped, as in a crash) | failed (a write or sync error, or a newer epoch: every later append and wait raises it).
    Threads: append_*, wait_durable and durable_seq may be used from any thread; seqs are in the order of the appends.
    As a context manager it closes, or abandons when the body raised.
    """

    def __init__(self, committer: GroupCommitter, *, epoch: int, retention: Retention) -> None:
        """Use `open_log`: a writer without recovery would repeat sequence numbers."""
        self.epoch = epoch
        self._committer = committer
        self._retention = retention
        # One append at a time, so that one waiting for room keeps its place and the slot tables stay true.
        self._append_lock = threading.Lock()
        self._ids: dict[int, RequestId] = {}
        self._num_observations: dict[int, int] = {}
        # Sampled tokens per slot (_FREE where no request is open), and a scratch row to find repeated slots.
        self._num_tokens = np.full(NUM_SLOTS, _FREE, np.int64)
        self._scratch = np.zeros(NUM_SLOTS, np.int32)
        # Per slot the flag bits of the columns that its tokens must come with.
        self._asked = np.zeros(NUM_SLOTS, np.uint8)
        self._row_numbers = np.arange(NUM_SLOTS, dtype=np.int32)
        # A batch stays the same for many steps, and what was checked of it holds: its slots, as bytes too, the columns
        # that it came with, and its steps that are not in `_num_tokens` yet.
        self._batch = b""
        self._batch_slots = np.zeros(0, np.uint16)
        self._batch_flags = self._batch_steps = 0

    def __enter__(self) -> Self:
        """Returns itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Closes, or abandons when the body raised."""
        if kind is None:
            self.close()
        else:
            self.abandon()

    @property
    def durable_seq(self) -> int:
        """Every record with a seq up to this one is durable and may be published.

        Never shrinks; costs nothing to read.
        """
        return self._committer.durable_seq

    @property
    def error(self) -> RolloutError | None:
        """Why the writer failed, or None.

        A replica that polls `durable_seq` must look here too, or it waits for ever.
        """
        return self._committer.error

    def stats(self) -> WalStats:
        """Returns the counters since the log was opened, the source of the `wal/*` metrics."""
        return self._committer.stats()

    def append_open(
        self, request: Request, *, slot: int, attempt: int = 0, resumed_tokens: int = 0, resumed_observations: int = 0
    ) -> int:
        """Binds a free slot to a request and returns the record's seq.

        Args:
            request: the request; the same in every opening (its policy_version may differ).
            slot: 0 .. 65,534, not in use. Free again after `append_close`.
            attempt: grows only when a request starts over by decision.
            resumed_tokens: sampled tokens of the attempt that the log already holds (0 for a new one).
            resumed_observations: observations that it already holds.

        Raises:
            WalUsageError: the slot is taken or out of range. Nothing was appended.
            WalWriteError, WalFencedError, WalStalledError: as for every append, see `append_step`.

        """
        record = OpenRecord(
            slot=slot,
            request=request,
            attempt=attempt,
            resumed_tokens=resumed_tokens,
            resumed_observations=resumed_observations,
        )
        with self._append_lock:
            self._settle()
            if not 0 <= slot < NO_SLOT or slot in self._ids:
                state = f"held by {self._ids[slot]}" if slot in self._ids else "out of range"
                raise WalUsageError(
                    f"wal slot {slot} for {request.id}: it is {state}; take a free one of 0..{NO_SLOT - 1}."
                )
            seq = self._append(record)
            self._retention.see(request.id, seq)
            self._ids[slot] = request.id
            self._num_observations[slot] = resumed_observations
            self._num_tokens[slot] = resumed_tokens
            self._asked[slot] = asked_columns(request)
        return seq

    def append_step(
        self,
        slots: npt.NDArray[np.uint16],
        token_ids: Int32Array,
        logprobs: Float32Array,
        *,
        policy_version: int,
        routes: StepRoutes | None = None,
        kept: KeptSets | None = None,
    ) -> int:
        """Appends one decode step and returns its seq; the tokens may be published when that is durable.

        Args:
            slots: [n] uint16, n >= 1. Open slots, each at most once, in any order.
            token_ids: [n] int32. Token sampled for each.
            logprobs: [n] float32. Log-prob of each token.
            policy_version: weights that sampled them, in [0, 2**32).
            routes: of the positions since each slot's token before; needed where a slot's request has record_routes.
            kept: [n] sets that the tokens were drawn from; needed where a slot's request has top_p or top_k.

        Raises:
            WalUsageError: unequal lengths, wrong dtypes, a slot that is not open or occurs twice, or a column that a
                request asked for is missing. Nothing was appended.
            WalWriteError, WalFencedError: the writer failed (now or earlier); nothing more will become durable.
            WalStalledError: the queue stayed full for stall_timeout_s. Nothing was appended; may be repeated.

        Invariants: returns when the record is queued, not when it is durable; copies the arrays, which may be reused.

        """
        record = StepRecord(
            slots=slots,
            token_ids=token_ids,
            logprobs=logprobs,
            policy_version=policy_version,
            routes=routes,
            kept=kept,
        )
        encoded = encode_record(record)
        batch = slots.tobytes()
        with self._append_lock:
            if batch != self._batch or encoded.flags != self._batch_flags or not batch:
                self._settle()
                self._check_step(record, encoded.flags)
                self._batch, self._batch_slots, self._batch_flags = batch, slots.copy(), encoded.flags
            seq = self._committer.submit(*encoded)
            self._batch_steps += 1
        return seq

    def append_observe(self, slot: int, token_ids: Int32Array, *, command_position: int = 0) -> int:
        """Appends what the environment answered and returns the record's seq.

        The model may see the answer when that is durable.

        Args:
            slot: an open slot.
            token_ids: [T] int32. Tokens that enter the sequence after those sampled so far.
            command_position: position in the sandbox's command log that the answer reflects.

        Raises:
            WalUsageError: the slot is not open.
            WalWriteError, WalFencedError, WalStalledError: see `append_step`.

        """
        with self._append_lock:
            self._settle()
            identity = self._open_id(slot)
            ordinal = self._num_observations[slot]
            record = ObserveRecord(
                slot=slot,
                id=identity,
                ordinal=ordinal,
                after_tokens=int(self._num_tokens[slot]),
                token_ids=token_ids,
                command_position=command_position,
            )
            seq = self._append(record)
            self._num_observations[slot] = ordinal + 1
        return seq

    def append_kv_saved(self, slot: int, *, manifest: str, fingerprint: str) -> int:
        """Records that the KV state of all tokens so far lies at `manifest`, and returns the record's seq.

        Args:
            slot: an open slot.
            manifest: where the saved state's manifest lies; the state itself must be durable already.
            fingerprint: hash over model, weight version and layout.

        Raises:
            WalUsageError: the slot is not open.
            WalWriteError, WalFencedError, WalStalledError: see `append_step`.

        """
        with self._append_lock:
            self._settle()
            identity = self._open_id(slot)
            num_tokens = int(self._num_tokens[slot])
            return self._append(
                KvSavedRecord(slot=slot, id=identity, num_tokens=num_tokens, manifest=manifest, fingerprint=fingerprint)
            )

    def append_version(self, policy_version: int, *, weights: str = "") -> int:
        """Records that the replica holds these weights from here on, and returns the record's seq.

        Args:
            policy_version: their number.
            weights: their digest.

        Raises:
            WalWriteError, WalFencedError, WalStalledError: see `append_step`.

        """
        with self._append_lock:
            return self._append(VersionRecord(policy_version=policy_version, weights=weights))

    def append_close(self, slot: int, stop_reason: StopReason, *, failure: FailureType | None = None) -> int:
        """Ends the request of a slot, frees the slot, and returns the record's seq.

        The request may be delivered when that is durable.

        Raises:
            WalUsageError: the slot is not open.
            WalWriteError, WalFencedError, WalStalledError: see `append_step`.

        """
        with self._append_lock:
            self._settle()
            identity = self._open_id(slot)
            num_tokens = int(self._num_tokens[slot])
            seq = self._append(
                CloseRecord(slot=slot, id=identity, stop_reason=stop_reason, failure=failure, num_tokens=num_tokens)
            )
            del self._ids[slot], self._num_observations[slot]
            self._num_tokens[slot] = _FREE
        return seq

    def append_close_recovered(
        self, identity: RequestId, stop_reason: StopReason, *, num_tokens: int, failure: FailureType | None = None
    ) -> int:
        """Ends a recovered request that is not opened again, such as a damaged one, and returns the record's seq.

        Args:
            identity: the request.
            stop_reason: why it ended.
            num_tokens: tokens that recovery found for it.
            failure: FailureType.INFRA for a damaged one.

        Raises:
            WalWriteError, WalFencedError, WalStalledError: see `append_step`.

        """
        record = CloseRecord(slot=NO_SLOT, id=identity, stop_reason=stop_reason, failure=failure, num_tokens=num_tokens)
        with self._append_lock:
            seq = self._append(record)
            self._retention.see(identity, seq)
        return seq

    def retire(self, before_step: int) -> Retirement:
        """Removes what is covered by a checkpoint while the log is larger than `keep_bytes`, in whole segments.

        What a call finds is removed by a later one, when checkpoints have gone on: the log stays larger than keep_bytes
        by what the kept checkpoints do not cover.

        Args:
            before_step: requests of earlier steps, evaluations among them, are never asked for again: the step of the
                oldest checkpoint that is kept, which is durable.

        Returns:
            What was removed, or why nothing was: a request is open, or a directory cannot be written.

        Raises:
            WalWriteError, WalFencedError, WalStalledError: see `append_step`; nothing was removed.

        """
        with self._append_lock:
            if self._ids:
                return Retirement(kept_because=f"{len(self._ids)} requests are open")
            try:
                if not self._retention.is_due:
                    return Retirement()
                self._retention.add_cut(self._committer.cut())
                return self._retention.retire(before_step, durable_seq=self._committer.durable_seq)
            except OSError as error:
                return Retirement(kept_because=str(error))

    def wait_durable(self, seq: int, *, timeout_s: float | None = None) -> None:
        """Returns when every record up to `seq` is durable.

        Args:
            seq: as an append returned it.
            timeout_s: seconds; None for the configured stall_timeout_s.

        Raises:
            WalWriteError, WalFencedError: the writer failed before; the records must not be published.
            WalStalledError: not durable yet; may be repeated.
            WalUsageError: no append returned such a seq.

        """
        self._committer.wait_durable(seq, timeout_s=timeout_s)

    def close(self) -> None:
        """Makes everything durable, seals the stream, ends the thread and gives the lock back; safe to call twice.

        Open requests stay unfinished: the next `open_log` returns them to go on.

        Raises:
            WalWriteError, WalFencedError: the writer failed; what is above durable_seq must not be published.
            WalStalledError: the disk did not keep up; may be repeated.

        """
        self._committer.close(seal=RecordType.SEAL)

    def abandon(self) -> None:
        """Ends the thread and gives the lock back without committing what is queued, as a crash would."""
        self._committer.abandon()

    def _settle(self) -> None:
        """Brings the slot tables up to date; the next step is checked anew. The caller holds the append lock."""
        if self._batch_steps:
            self._num_tokens[self._batch_slots] += self._batch_steps
        self._batch, self._batch_steps = b"", 0

    def _check_step(self, record: StepRecord, flags: int) -> None:
        slots = record.slots
        rows = self._row_numbers[: len(slots)]
        self._scratch[slots] = rows
        if not len(slots) or self._num_tokens[slots].min() < 0 or not np.array_equal(self._scratch[slots], rows):
            raise WalUsageError(self._explain_slots(slots))
        missing = self._asked[slots] & ~np.uint8(flags)
        if missing.any():
            raise WalUsageError(
                f"STEP has no column for what slots {slots[missing != 0].tolist()} asked for (routes:"
                f" {record.routes is not None}, kept sets: {record.kept is not None}); give it with every token of"
                " theirs."
            )

    def _explain_slots(self, slots: npt.NDArray[np.uint16]) -> str:
        if not len(slots):
            return "STEP has no rows; append a step only when a token was sampled."
        unopened = slots[self._num_tokens[slots] < 0]
        if len(unopened):
            return f"STEP names slots {unopened.tolist()}, which are not open; call append_open first."
        return (
            f"STEP names a slot twice ({len(slots)} rows, {len(np.unique(slots))} slots); one token per slot and step."
        )

    def _open_id(self, slot: int) -> RequestId:
        identity = self._ids.get(slot)
        if identity is None:
            raise WalUsageError(f"wal slot {slot} is not open; call append_open first.")
        return identity

    def _append(self, record: WalRecord) -> int:
        return self._committer.submit(*encode_record(record))
