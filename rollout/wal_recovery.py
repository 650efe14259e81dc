"""From a log's frames to requests: what each one had sampled, durably, when its writer stopped.

    frames --replay--> runs (one per OPEN: a request in one epoch) --merge--> requests (runs joined by token position)

A request is finished (answer it from the log), unfinished (prefill prompt + logged tokens and go on) or failed (damage:
its failure type is infra). A lost frame may have held tokens of every request open at that point, so all of those fail,
and the slots they held are deaf until the next OPEN.

Here: the meaning of records. Not here: files, checksums, order (rollout/wal_scan.py); joining runs
(rollout/wal_runs.py); writing (rollout/wal.py).
"""

from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from rollforward.rollout.errors import WalUsageError
from rollforward.rollout.types import BoolArray, Float32Array, Int32Array, RequestId
from rollforward.rollout.wal_columns import RaggedColumn
from rollforward.rollout.wal_records import (
    NO_SLOT,
    NUM_SLOTS,
    CloseRecord,
    KvSavedRecord,
    ObserveRecord,
    OpenRecord,
    RecordType,
    VersionRecord,
    WalRecord,
    decode_record,
)
from rollforward.rollout.wal_repair import repair_log
from rollforward.rollout.wal_runs import RecoveredRequest, Run, asked_columns, merge_runs
from rollforward.rollout.wal_scan import LogScan, OrderedFrames, Problem, ProblemKind, scan_log
from rollforward.rollout.wal_step import StepRecord, decode_step
from rollforward.sandbox.codec import Frame

_UNBOUND = -1
_DEAF = -2


class RecoveredLog(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """What a log directory holds, and an account of what it lost."""

    requests: dict[RequestId, RecoveredRequest]
    """Newest attempt of every request whose OPEN is intact, in order of first opening."""
    earlier_attempts: tuple[RecoveredRequest, ...]
    """Attempts that a later one replaced."""
    failed: dict[RequestId, str]
    """Requests that damage touched, with the reason; one whose OPEN is lost is named only here."""
    problems: tuple[Problem, ...]
    """Every finding; empty for a log that only ended early."""
    versions: tuple[tuple[int, int], ...]
    """(seq, policy version) of every VERSION record, in order."""
    weights: dict[int, str]
    """Digest of the weights that the replica last held under a version, where one was told."""
    num_tokens: int
    """Tokens in `requests`."""
    scan: LogScan
    """Counts of bytes and frames (torn_bytes, damaged_bytes, ...); its frames are dropped."""
    was_sealed: bool
    """Whether the last writer closed the log in order."""


def recover(
    directory: Path, *, stream: str | None = None, repair: bool = False, mirror: Path | None = None
) -> RecoveredLog:
    """Returns everything durable in a log directory, per request.

    Args:
        directory: of one stream; absent or empty gives an empty result.
        stream: whose segments count; None asks the directory.
        repair: also truncate the torn tail, sync what is kept and remove temporary files. Only for the holder of
            the stream's lock (`open_log` does it); without it nothing is written and any process may read.
        mirror: directory of the log's second copy, if it has one; what either holds counts, and a repair heals both.

    Raises:
        OSError: only with repair, when the directory cannot be written.

    Invariants: deterministic; idempotent; never raises on the content of files. Arrays are not shared with the file.

    """
    scan = scan_log(directory, stream=stream, mirror=mirror)
    if repair:
        repair_log(directory, scan, mirror=mirror)
    replay = _Replay()
    for ordered in scan.epochs:
        replay.feed(ordered)
    if scan.lost_end is not None:
        replay.lose_end(scan.lost_end)
    runs = replay.finish()
    newest, earlier, problems = merge_runs(runs, replay.orphans)
    damaged = {identity: request.damage for identity, request in newest.items() if request.damage is not None}
    last_frames = scan.epochs[-1].frames if scan.epochs else ()
    return RecoveredLog(
        requests=newest,
        earlier_attempts=tuple(earlier),
        failed={**replay.orphans, **damaged},
        problems=(*scan.problems, *replay.problems, *problems),
        versions=tuple(replay.versions),
        weights=replay.weights,
        num_tokens=sum(len(request.token_ids) for request in newest.values()),
        scan=msgspec.structs.replace(scan, epochs=()),
        was_sealed=bool(last_frames) and last_frames[-1].frame_type == RecordType.SEAL,
    )


class _Replay:
    """Feeds frames in order and collects runs. Tokens stay in columns until `finish` sorts them in one pass."""

    def __init__(self) -> None:
        self.runs: list[Run] = []
        self.problems: list[Problem] = []
        self.orphans: dict[RequestId, str] = {}
        self.versions: list[tuple[int, int]] = []
        self.weights: dict[int, str] = {}
        self._run_of_slot = np.full(NUM_SLOTS, _UNBOUND, np.int32)
        self._latest: dict[RequestId, Run] = {}
        # Per run, growing: tokens so far in this run, and the version of its last token.
        self._counts = np.zeros(1024, np.int64)
        self._versions = np.zeros(1024, np.int64)
        # Per run the flag bits of the columns that its tokens must come with; those of all runs together.
        self._asked = np.zeros(1024, np.uint8)
        self._flags_asked = 0
        self._routes, self._kept = RaggedColumn(), RaggedColumn()
        self._columns: list[tuple[npt.NDArray[np.int32], npt.NDArray[np.int64], Int32Array, Float32Array]] = []
        self._where = ""
        self._epoch = 0

    def feed(self, ordered: OrderedFrames) -> None:
        """Replays one epoch, which starts with no slot bound."""
        self._epoch = ordered.epoch
        self._run_of_slot[:] = _UNBOUND
        lost = list(ordered.lost)
        for frame in ordered.frames:
            while lost and lost[0][0] < frame.seq:
                self._lose(*lost.pop(0))
            self._where = f"epoch {ordered.epoch} seq {frame.seq}"
            if frame.seq in ordered.broken:
                self._doubt(ProblemKind.BROKEN_CHAIN, "does not continue the frame before it")
            try:
                if frame.frame_type == RecordType.STEP:
                    self._step(decode_step(frame.flags, frame.payload))
                elif frame.frame_type != RecordType.SEAL:
                    self._record(frame, decode_record(frame.frame_type, frame.flags, frame.payload))
            except WalUsageError as error:
                self._fail_open_runs(ProblemKind.BAD_RECORD, str(error))
        for first, end in lost:
            self._lose(first, end)

    def lose_end(self, where: str) -> None:
        """Fails what frames behind the last ones could have touched: a segment is there that cannot be read."""
        self._where = where
        self._doubt(ProblemKind.LOST_FRAMES, "nothing of this segment can be read")

    def finish(self) -> list[Run]:
        """Returns the runs with their tokens in order; call once."""
        sizes = self._counts[: len(self.runs)]
        starts = np.cumsum(sizes) - sizes
        token_ids = np.empty(int(sizes.sum()), np.int32)
        logprobs = np.empty(len(token_ids), np.float32)
        for runs, positions, step_tokens, step_logprobs in self._columns:
            target = starts[runs] + positions
            token_ids[target] = step_tokens
            logprobs[target] = step_logprobs
        self._columns.clear()
        routes, kept = self._routes.finish(starts, len(token_ids)), self._kept.finish(starts, len(token_ids))
        for run, start, size in zip(self.runs, starts.tolist(), sizes.tolist(), strict=True):
            run.routes = None if routes is None else routes.part(start, start + size)
            run.kept = None if kept is None else kept.part(start, start + size)
            run.token_ids = token_ids[start : start + size]
            run.logprobs = logprobs[start : start + size]
        return self.runs

    def _step(self, step: StepRecord) -> None:
        runs = self._run_of_slot[step.slots]
        token_ids, logprobs = step.token_ids, step.logprobs
        known: BoolArray | None = None
        if step.routes is not None:
            self._routes.check(step.routes.routes_PLK)
        if len(runs) and runs.min() < 0:
            unknown = np.flatnonzero(runs == _UNBOUND)
            if len(unknown):
                self._problem(
                    ProblemKind.BAD_RECORD, f"tokens for slots {step.slots[unknown].tolist()}, which no OPEN bound"
                )
                self._run_of_slot[step.slots[unknown]] = _DEAF
            known = runs >= 0
            runs, token_ids, logprobs = runs[known], token_ids[known], logprobs[known]
        positions = self._counts[runs]
        changed = self._versions[runs] != step.policy_version
        if changed.any():
            for index, position in zip(runs[changed].tolist(), positions[changed].tolist(), strict=True):
                self._span(self.runs[index], position, step.policy_version)
        self._counts[runs] = positions + 1
        self._columns.append((runs, positions, token_ids, logprobs))
        if step.routes is not None:
            self._routes.add(runs, positions, step.routes.counts_N, step.routes.routes_PLK, known)
        if step.kept is not None:
            self._kept.add(runs, positions, step.kept.counts_T, step.kept.token_ids, known)
        if self._flags_asked & ~step.flags:
            missing = self._asked[runs] & ~np.uint8(step.flags)
            for index in runs[missing != 0].tolist():
                self._fail(self.runs[index], ProblemKind.BAD_RECORD, "STEP without the routes or kept sets asked for")

    def _record(self, frame: Frame, record: WalRecord) -> None:
        match record:
            case OpenRecord():
                self._open(record)
            case VersionRecord():
                self.versions.append((frame.seq, record.policy_version))
                if record.weights:
                    self.weights[record.policy_version] = record.weights
            case CloseRecord(slot=slot) if slot == NO_SLOT:
                self._close_elsewhere(record)
            case ObserveRecord() | KvSavedRecord() | CloseRecord():
                self._event(record)
            case _:
                raise WalUsageError(f"record {type(record).__name__} cannot stand here")

    def _open(self, opened: OpenRecord) -> None:
        if not 0 <= opened.slot < NO_SLOT:
            raise WalUsageError(f"OPEN of {opened.request.id} in slot {opened.slot}; slots are 0..{NO_SLOT - 1}")
        holder = int(self._run_of_slot[opened.slot])
        if holder >= 0:
            self._fail(
                self.runs[holder], ProblemKind.BAD_RECORD, f"slot {opened.slot} was bound again before its CLOSE"
            )
        run = Run(len(self.runs), self._epoch, opened)
        self.runs.append(run)
        if run.index == len(self._counts):
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
            self._versions = np.concatenate([self._versions, np.zeros_like(self._versions)])
            self._asked = np.concatenate([self._asked, np.zeros_like(self._asked)])
        self._asked[run.index] = asked_columns(opened.request)
        self._flags_asked |= int(self._asked[run.index])
        if opened.attempt > 0:
            # What lost its OPEN belongs to an attempt before this one.
            self.orphans.pop(run.identity, None)
        self._run_of_slot[opened.slot] = run.index
        self._latest[run.identity] = run
        self._span(run, 0, opened.request.policy_version)

    def _event(self, record: ObserveRecord | KvSavedRecord | CloseRecord) -> None:
        """Applies a record of one open request; a close frees the slot whatever its state."""
        if not 0 <= record.slot < NO_SLOT:
            raise WalUsageError(f"record of {record.id} in slot {record.slot}; slots are 0..{NO_SLOT - 1}")
        index = int(self._run_of_slot[record.slot])
        if isinstance(record, CloseRecord):
            self._run_of_slot[record.slot] = _UNBOUND
        if index < 0:
            self._orphan(record)
            return
        run = self.runs[index]
        if run.identity != record.id:
            self._fail(run, ProblemKind.BAD_RECORD, f"{type(record).__name__} in its slot names {record.id}")
            return
        total = run.opened.resumed_tokens + int(self._counts[index])
        match record:
            case ObserveRecord():
                if record.after_tokens != total or record.ordinal != run.opened.resumed_observations + len(
                    run.observations
                ):
                    self._fail(
                        run,
                        ProblemKind.BAD_RECORD,
                        f"observation {record.ordinal} after {record.after_tokens} tokens, log has {total}",
                    )
                run.observations.append(record)
            case KvSavedRecord():
                run.kv = record
            case CloseRecord():
                if record.num_tokens != total:
                    self._fail(run, ProblemKind.BAD_RECORD, f"closed with {record.num_tokens} tokens, log has {total}")
                run.close = record

    def _close_elsewhere(self, record: CloseRecord) -> None:
        """Applies a CLOSE that a later epoch wrote without opening the request again."""
        run = self._latest.get(record.id)
        if run is None:
            self._orphan(record)
        elif run.close is None:
            run.close = record

    def _orphan(self, record: ObserveRecord | KvSavedRecord | CloseRecord) -> None:
        """Fails the request of a record whose OPEN is lost; this is where a request lost in damage gets its name."""
        run = self._latest.get(record.id)
        detail = f"{type(record).__name__} without OPEN"
        if run is None:
            self.orphans[record.id] = f"{self._where}: {detail}"
            self._problem(ProblemKind.BAD_RECORD, detail, (record.id,))
        elif run.damage is None:
            self._fail(run, ProblemKind.BAD_RECORD, detail)

    def _span(self, run: Run, position: int, version: int) -> None:
        run.spans.append((position, version))
        self._versions[run.index] = version

    def _lose(self, first: int, end: int) -> None:
        self._where = f"epoch {self._epoch} seq {first}..{end - 1}"
        self._doubt(ProblemKind.LOST_FRAMES, f"{end - first} lost frames")

    def _doubt(self, kind: ProblemKind, detail: str) -> None:
        """Fails what unknown frames here could have touched: open runs, and unfinished requests of earlier epochs."""
        for run in self._latest.values():
            if run.epoch < self._epoch and run.close is None and run.damage is None:
                self._fail(run, kind, f"may have gone on here: {detail}")
        self._fail_open_runs(kind, detail)

    def _fail_open_runs(self, kind: ProblemKind, detail: str) -> None:
        """Fails every run that a frame at this place could have touched, and makes its slot deaf."""
        slots = np.flatnonzero(self._run_of_slot >= 0)
        failed = [self.runs[index] for index in self._run_of_slot[slots].tolist()]
        self._run_of_slot[slots] = _DEAF
        for run in failed:
            run.damage = run.damage or f"{self._where}: {detail}"
        self._problem(kind, f"{detail}; {len(failed)} open requests fail", tuple(run.identity for run in failed))

    def _fail(self, run: Run, kind: ProblemKind, detail: str) -> None:
        run.damage = run.damage or f"{self._where}: {detail}"
        self._problem(kind, detail, (run.identity,))

    def _problem(self, kind: ProblemKind, detail: str, requests: tuple[RequestId, ...] = ()) -> None:
        self.problems.append(Problem(kind=kind, where=self._where, detail=detail, requests=requests))
