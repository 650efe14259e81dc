"""From a directory's bytes to the frames that count, in order, and an account of everything else.

    files --scan--> segments --by epoch--> frames by seq, without doubles and fenced ones --> lost ranges, torn tail

What was durable is proven, not guessed: a frame's batch_seq, a segment's first_seq and the first_seq of a later epoch
each say that everything below was on disk. A missing frame below that is *lost* (damage); anything from the first
missing frame above it on is *torn*: nobody had been told, so it is cut. A segment gets its name when its header is on
disk, so one at the log's end of which nothing can be read is damage too, of unknown extent.

Here: reading and ordering. Not here: the meaning of frames (rollout/wal_recovery.py), second copies
(rollout/wal_mirror.py), repairs (rollout/wal_repair.py). Nothing here raises on bad bytes.
"""

from collections import Counter
from collections.abc import Iterable
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

import msgspec

from rollforward.rollout.types import RequestId
from rollforward.rollout.wal_files import EPOCH_NAME, parse_segment_name, read_epoch_file, segment_name
from rollforward.rollout.wal_mirror import LogFiles, read_log_files
from rollforward.rollout.wal_records import WAL_KIND
from rollforward.rollout.wal_retention import Mark, read_mark
from rollforward.sandbox.codec import (
    SEGMENT_HEADER_BYTES,
    Frame,
    FrameScan,
    HeaderFault,
    SegmentHeader,
    frame_seed,
    parse_segment_header,
    scan_frames,
)

FIRST_SEQ = 1
"""Sequence number of a stream's first frame."""


class ProblemKind(StrEnum):
    """What can be wrong with a log."""

    FOREIGN_FILE = "foreign_file"
    """A file that no writer of this log made (empty, other content); ignored."""
    FOREIGN_STREAM = "foreign_stream"
    """An intact segment of another stream or another kind of log; ignored."""
    UNSUPPORTED = "unsupported"
    """An intact segment or record of a newer format; not read. The only problem that a user can fix."""
    UNREADABLE = "unreadable"
    """The operating system could not read a file."""
    DAMAGED_EPOCH_FILE = "damaged_epoch_file"
    """EPOCH is not readable; the epochs of the segments are used."""
    DAMAGED_MARK = "damaged_mark"
    """RETIRED is not readable; the log begins with its oldest segment, and what was lost before that is not noticed."""
    HEALED = "healed"
    """One of two copies was damaged or had lost something; the other one has it, so nothing is lost."""
    DAMAGED_HEADER = "damaged_header"
    """A segment's header does not verify; its frames do and were used."""
    DAMAGED_BYTES = "damaged_bytes"
    """Bytes between good frames that are not frames."""
    LOST_FRAMES = "lost_frames"
    """Sequence numbers that were durable once and are gone; every request open at that point fails as infra."""
    CONFLICT = "conflict"
    """Two different records for one place; neither is believed and the requests concerned fail as infra."""
    BROKEN_CHAIN = "broken_chain"
    """A segment does not continue the frame before it (files of two histories are mixed); as bad as a lost frame."""
    BAD_RECORD = "bad_record"
    """A frame that verifies but whose content makes no sense where it stands."""


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """One finding of a recovery."""

    kind: ProblemKind
    """Kind of the finding."""
    where: str
    """File name, or epoch and sequence numbers."""
    detail: str
    """The values, for a person."""
    requests: tuple[RequestId, ...] = ()
    """Requests that fail because of it."""


class OrderedFrames(msgspec.Struct, frozen=True, kw_only=True):
    """Frames of one epoch that count."""

    epoch: int
    """The epoch."""
    frames: tuple[Frame, ...]
    """In order of seq, each once."""
    lost: tuple[tuple[int, int], ...]
    """Ranges [first, end) of seq that were durable and are gone."""
    broken: frozenset[int] = frozenset()
    """Seqs of frames that do not continue the frame before them."""


class Cut(NamedTuple):
    """A file that a repair truncates."""

    path: Path
    """The file."""
    size_bytes: int
    """Its size after the repair."""


class LogScan(msgspec.Struct, frozen=True, kw_only=True):
    """A directory's frames, and an account of all other bytes."""

    epochs: tuple[OrderedFrames, ...]
    """By growing epoch."""
    problems: tuple[Problem, ...]
    """Findings, in order of files and then of sequence numbers."""
    cuts: tuple[Cut, ...]
    """What a repair truncates."""
    mark: SegmentHeader | None
    """Header of the first segment where older ones were removed; a repair removes what is left of them."""
    lost_end: str | None
    """Name of the first segment behind the last good one, where nothing of it can be read: what it held is not known.
    """
    stale: tuple[str, ...]
    """Files of which one copy lacks what the other holds; a repair makes them equal."""
    last_segments: tuple[Path, ...]
    """Newest segment of the last epoch (and its copies); empty for an empty log."""
    next_seq: int
    """Sequence number that the next writer starts with."""
    tail_crc: int
    """crc of frame next_seq - 1, or 0 when there is none."""
    num_segments: int
    """Segments read."""
    num_frames: int
    """Records that count."""
    torn_bytes: int
    """Bytes of writes that were never acknowledged."""
    room_bytes: int
    """Zeros at the end of the newest segment, prepared for frames that were never written."""
    torn_frames: int
    """Whole frames among them."""
    damaged_bytes: int
    """Bytes between or after good frames that were acknowledged once, or headers that do not verify."""
    lost_frames: int
    """Sequence numbers that were durable once and are gone."""
    duplicate_frames: int
    """Frames that occurred again with equal content; ignored."""
    fenced_frames: int
    """Frames that a writer appended after a newer epoch had begun; ignored."""


class _Segment(msgspec.Struct, kw_only=True):
    """One segment file, scanned."""

    path: Path
    epoch: int
    number: int
    header: SegmentHeader | None
    """None when it does not verify; epoch and number then come from the name."""
    scan: FrameScan
    size_bytes: int

    @property
    def sort_key(self) -> tuple[int, int, bool, str]:
        """By epoch and number; of several copies the one under its proper name first."""
        proper = parse_segment_name(self.path.name) == (self.epoch, self.number)
        return self.epoch, self.number, not proper, self.path.name


class _Account:
    """Counters and findings that the passes fill in."""

    def __init__(self) -> None:
        self.problems: list[Problem] = []
        self.cuts: list[Cut] = []
        self.wiped: list[tuple[int, int]] = []  # (epoch, number) of segments without anything that can be read
        self.torn_bytes = self.torn_frames = self.damaged_bytes = self.room_bytes = 0
        self.lost_frames = self.duplicate_frames = self.fenced_frames = 0

    def add(self, kind: ProblemKind, where: str, detail: str) -> None:
        self.problems.append(Problem(kind=kind, where=where, detail=detail))


def scan_log(directory: Path, *, stream: str | None = None, mirror: Path | None = None) -> LogScan:
    """Returns the frames of a log directory in order, with everything that is wrong with it counted and named.

    Args:
        directory: of one stream; absent or empty is an empty log.
        stream: whose segments count; None takes what EPOCH says, or without it the stream of most segments.
        mirror: directory of the log's second copy, if it has one; what either holds counts.

    Invariants: reads only; deterministic; never raises on the content of files.

    """
    account = _Account()
    segments, stale, mark = _read_segments(directory, mirror, stream, account)
    by_epoch: dict[int, list[_Segment]] = {}
    for segment in segments:
        by_epoch.setdefault(segment.epoch, []).append(segment)
    epochs: list[OrderedFrames] = []
    last_crcs: dict[int, int] = {}
    cutoffs: dict[int, int] = {}
    start = FIRST_SEQ
    if mark is not None:
        start = mark.first_seq
        last_crcs[start - 1] = mark.tail_crc
    for epoch, members in by_epoch.items():
        later = [_first_seq(segment) for segment in segments if segment.epoch > epoch]
        cutoff = min((seq for seq in later if seq is not None), default=None)
        if cutoff is not None:
            cutoffs[epoch] = cutoff
        ordered, start = _order_epoch(epoch, members, start, cutoff, account)
        for frame in ordered.frames:
            last_crcs[frame.seq] = frame.crc
        epochs.append(ordered)
    broken: set[int] = set()
    for segment in segments:
        header = segment.header
        if header is None or header.first_seq > cutoffs.get(segment.epoch, header.first_seq):
            continue
        if last_crcs.get(header.first_seq - 1, header.tail_crc) != header.tail_crc:
            broken.add(header.first_seq)
    newest = max(((segment.epoch, segment.number) for segment in segments), default=(0, 0))
    lost_end = min((number for number in account.wiped if number > newest), default=None)
    return LogScan(
        epochs=tuple(msgspec.structs.replace(ordered, broken=frozenset(broken)) for ordered in epochs),
        problems=tuple(account.problems),
        cuts=tuple(account.cuts),
        mark=mark,
        lost_end=None if lost_end is None else segment_name(*lost_end),
        stale=stale,
        last_segments=tuple(segment.path for segment in segments if (segment.epoch, segment.number) == newest),
        next_seq=start,
        tail_crc=last_crcs.get(start - 1, 0),
        num_segments=len(segments),
        num_frames=sum(len(ordered.frames) for ordered in epochs),
        torn_bytes=account.torn_bytes,
        room_bytes=account.room_bytes,
        torn_frames=account.torn_frames,
        damaged_bytes=account.damaged_bytes,
        lost_frames=account.lost_frames,
        duplicate_frames=account.duplicate_frames,
        fenced_frames=account.fenced_frames,
    )


def _read_segments(
    directory: Path, mirror: Path | None, stream: str | None, account: _Account
) -> tuple[list[_Segment], tuple[str, ...], SegmentHeader | None]:
    """Returns every usable segment, sorted, the names of files whose copies differ, and where the log begins."""
    owns: list[SegmentHeader] = []
    homes = [home for home in (directory, mirror) if home is not None]
    for home in homes:
        own = read_epoch_file(home)
        if own is not None:
            owns.append(own)
        elif (home / EPOCH_NAME).exists():
            detail = "not readable; epochs are taken from the segments"
            account.add(ProblemKind.DAMAGED_EPOCH_FILE, _place(home / EPOCH_NAME, directory), detail)
    if stream is None and owns:
        stream = owns[0].stream
    mark, found = _read_files(directory, mirror, stream)
    for path, fault in mark.faults:
        kind = ProblemKind.UNSUPPORTED if fault is HeaderFault.UNSUPPORTED else ProblemKind.DAMAGED_MARK
        account.add(kind, _place(path, directory), f"{fault.value}; not used")
    for finding in found.findings:
        kind = ProblemKind.UNREADABLE if finding.is_unreadable else ProblemKind.HEALED
        account.add(kind, _place(finding.path, directory), finding.detail)
    loaded = [(path, data, parse_segment_header(data)) for path, data in found.files]
    if stream is None and mark.first is not None:
        stream = mark.first.stream
    if stream is None:
        named = Counter(
            header.stream for _, _, header in loaded if isinstance(header, SegmentHeader) and header.kind == WAL_KIND
        )
        stream = named.most_common(1)[0][0] if named else ""
    places = _places(found, [header for _, _, header in loaded], stream, mark.first)
    account.wiped += places - {parse_segment_name(path.name) for path, _ in found.files}
    claimed = max((own.epoch for own in owns), default=0)
    segments = [_read_segment(path, data, header, stream, places, account) for path, data, header in loaded]
    _note_replaced(loaded, stream, places, claimed, account)
    usable = sorted((segment for segment in segments if segment is not None), key=lambda segment: segment.sort_key)
    if mark.first is None and mark.faults:
        oldest = next((segment.header for segment in usable if segment.header is not None), None)
        return usable, found.stale, oldest
    return usable, found.stale, mark.first


def _read_files(directory: Path, mirror: Path | None, stream: str | None) -> tuple[Mark, LogFiles]:
    """Returns where the log begins and the files from there on, also while a live writer removes older ones."""
    homes = [home for home in (directory, mirror) if home is not None]
    while True:
        mark = read_mark(homes, stream)
        first = (0, 0) if mark.first is None else (mark.first.epoch, mark.first.segment)
        found = read_log_files(directory, mirror, first=first)
        if read_mark(homes, stream).first == mark.first:
            return mark, found


def _place(path: Path, directory: Path) -> str:
    """A file's name, with its directory where that is the mirror."""
    return path.name if path.parent == directory else str(path)


def _read_segment(
    path: Path,
    data: bytes,
    header: SegmentHeader | HeaderFault,
    stream: str,
    places: set[tuple[int, int]],
    account: _Account,
) -> _Segment | None:
    """Returns the scanned segment, or None (with a finding) when the file is not one of this log or nothing of it can
    be read."""
    if isinstance(header, SegmentHeader):
        if header.kind != WAL_KIND or header.stream != stream:
            account.add(
                ProblemKind.FOREIGN_STREAM,
                path.name,
                f"kind {header.kind!r} of {header.stream!r}, not {WAL_KIND!r} of {stream!r}",
            )
            return None
        scan = scan_frames(data, offset=SEGMENT_HEADER_BYTES, seed=frame_seed(header.stream, header.epoch))
        return _Segment(
            path=path, epoch=header.epoch, number=header.segment, header=header, scan=scan, size_bytes=len(data)
        )
    if header is HeaderFault.UNSUPPORTED:
        account.add(ProblemKind.UNSUPPORTED, path.name, "written by a newer version")
        return None
    named = parse_segment_name(path.name)
    if named is not None and len(data) > SEGMENT_HEADER_BYTES:
        scan = scan_frames(data, offset=SEGMENT_HEADER_BYTES, seed=frame_seed(stream, named[0]))
        if scan.frames:
            account.add(
                ProblemKind.DAMAGED_HEADER, path.name, f"header is {header.value}; frames of epoch {named[0]} verify"
            )
            account.damaged_bytes += SEGMENT_HEADER_BYTES
            return _Segment(path=path, epoch=named[0], number=named[1], header=None, scan=scan, size_bytes=len(data))
    is_ours = named is not None and named in places
    kind = ProblemKind.DAMAGED_BYTES if is_ours else ProblemKind.FOREIGN_FILE
    account.add(kind, path.name, f"{header.value}, {len(data)} bytes, no frame of this log")
    if named is not None and is_ours:
        account.damaged_bytes += len(data)
        account.wiped.append(named)
    return None


def _note_replaced(
    loaded: Iterable[tuple[Path, bytes, SegmentHeader | HeaderFault]],
    stream: str,
    places: set[tuple[int, int]],
    claimed: int,
    account: _Account,
) -> None:
    """Counts segments in whose place another log's lies. A place beyond the newest epoch was never this log's."""
    held = {
        (header.epoch, header.segment)
        for _, _, header in loaded
        if isinstance(header, SegmentHeader) and (header.kind, header.stream) == (WAL_KIND, stream)
    }
    for path, data, header in loaded:
        named = parse_segment_name(path.name)
        is_foreign = isinstance(header, SegmentHeader) and (header.kind, header.stream) != (WAL_KIND, stream)
        if is_foreign and named in places - held and named[0] <= claimed:
            account.add(ProblemKind.DAMAGED_BYTES, path.name, "another log's segment lies where this log's was")
            account.damaged_bytes += len(data)
            account.wiped.append(named)


def _places(
    found: LogFiles, headers: Iterable[SegmentHeader | HeaderFault], stream: str, first: SegmentHeader | None
) -> set[tuple[int, int]]:
    """Returns (epoch, number) of the segments that were this log's: by their headers, and where nothing can be read by
    a name that continues these. A name that does not is taken for somebody else's file."""
    places = {(first.epoch, first.segment)} if first is not None else set[tuple[int, int]]()
    for header in headers:
        if isinstance(header, SegmentHeader) and (header.kind, header.stream) == (WAL_KIND, stream):
            places.add((header.epoch, header.segment))
    paths = [path for path, _ in found.files] + [finding.path for finding in found.findings if finding.is_unreadable]
    for number in sorted(filter(None, (parse_segment_name(path.name) for path in paths))):
        epoch, segment = number
        if segment:
            follows = (epoch, segment - 1) in places
        else:
            follows = epoch == 1 or any(place[0] == epoch - 1 for place in places)
        if follows:
            places.add(number)
    return places


def _first_seq(segment: _Segment) -> int | None:
    if segment.header is not None:
        return segment.header.first_seq
    return segment.scan.frames[0].seq if segment.scan.frames else None


def _order_epoch(
    epoch: int, members: list[_Segment], start: int, cutoff: int | None, account: _Account
) -> tuple[OrderedFrames, int]:
    """Returns the frames of one epoch that count, and the seq after its end."""
    merged, conflicts = _merge(members, account)
    fenced = [seq for seq in merged if cutoff is not None and seq >= cutoff]
    account.fenced_frames += len(fenced)
    misplaced = [seq for seq in merged if seq < start]
    if misplaced:
        account.add(
            ProblemKind.BAD_RECORD,
            f"epoch {epoch}",
            f"{len(misplaced)} frames below the epoch's start {start}; ignored",
        )
    for seq in (*fenced, *misplaced):
        merged.pop(seq, None)
    frames = [merged[seq] for seq in sorted(merged)]
    proven = cutoff
    if proven is None:
        headers = (segment.header.first_seq for segment in members if segment.header is not None)
        proven = max((start, *headers, *(frame.batch_seq for frame in frames)))
    kept, lost, expected = _split(frames, start, proven)
    account.torn_frames += len(frames) - len(kept)
    for first, end in lost:
        account.lost_frames += end - first
    for seq in sorted(conflicts):
        account.add(
            ProblemKind.CONFLICT,
            f"epoch {epoch} seq {seq}",
            "two intact frames with different content; neither is used",
        )
    _count_bytes(
        members,
        kept,
        is_last_epoch=cutoff is None,
        tail_is_lost=bool(lost) and lost[-1][1] == expected,
        account=account,
    )
    return OrderedFrames(epoch=epoch, frames=tuple(kept), lost=tuple(lost)), expected


def _merge(members: Iterable[_Segment], account: _Account) -> tuple[dict[int, Frame], set[int]]:
    """Returns frames by seq over all copies of all segments, and the seqs whose copies differ (left out)."""
    merged: dict[int, Frame] = {}
    conflicts: set[int] = set()
    for segment in members:
        for frame in segment.scan.frames:
            known = merged.setdefault(frame.seq, frame)
            if known is frame:
                continue
            if known.crc == frame.crc and known.payload == frame.payload:
                account.duplicate_frames += 1
            else:
                conflicts.add(frame.seq)
    for seq in conflicts:
        del merged[seq]
    return merged, conflicts


def _split(frames: list[Frame], start: int, proven: int) -> tuple[list[Frame], list[tuple[int, int]], int]:
    """Returns (frames that count, lost ranges, seq after the last of both)."""
    lost: list[tuple[int, int]] = []
    expected = start
    for index, frame in enumerate(frames):
        if frame.seq > expected:
            if expected >= proven:
                return frames[:index], lost, expected
            lost.append((expected, frame.seq))
        expected = frame.seq + 1
    if expected < proven:
        lost.append((expected, proven))
        expected = proven
    return frames, lost, expected


def _count_bytes(
    members: list[_Segment], kept: list[Frame], *, is_last_epoch: bool, tail_is_lost: bool, account: _Account
) -> None:
    """Sorts the bytes of an epoch that are no frames into torn and damaged, and notes what a repair cuts."""
    newest = max(segment.number for segment in members)
    end_seq = kept[-1].seq if kept else -1
    for segment in members:
        frames = [frame for frame in segment.scan.frames if frame.seq <= end_seq]
        keep_end = frames[-1].end if frames else SEGMENT_HEADER_BYTES
        can_be_torn = segment.number == newest and not tail_is_lost
        damaged = [part for part in segment.scan.damaged if not can_be_torn or part.start < keep_end]
        damaged_bytes = sum(part.end - part.start for part in damaged)
        if can_be_torn:
            # Before the last epoch, what follows keep_end may be whole frames of a fenced writer; those are counted as
            # such.
            tail_bytes = segment.size_bytes - segment.scan.room_bytes - keep_end
            account.torn_bytes += tail_bytes if is_last_epoch else segment.scan.torn_bytes
            account.room_bytes += segment.scan.room_bytes
            if is_last_epoch and segment.size_bytes > keep_end:
                account.cuts.append(Cut(segment.path, keep_end))
        else:
            damaged_bytes += segment.scan.torn_bytes
        if damaged_bytes:
            account.damaged_bytes += damaged_bytes
            places = ", ".join(f"{part.start}..{part.end}" for part in damaged) or "tail"
            account.add(ProblemKind.DAMAGED_BYTES, segment.path.name, f"{damaged_bytes} bytes are no frames ({places})")
