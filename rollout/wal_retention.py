"""Retention: what a checkpoint covers leaves the log, whole segments at a time, oldest first.

    segments 0 1 2 | 3 4      nothing was open at |, and everything opened before it is of a step that no checkpoint
             |     |          which is kept would ask for again
             |     +-- RETIRED names segment 3: from here on the log begins there
             +-- and only then these are unlinked; whoever dies in between leaves files that the next opening removes

A *cut* is a place where nothing is open: `WalWriter.retire` makes one where it is called, by letting the next frame
begin a segment, and uses it in a later call. Cuts are known to the process that made them; the next one makes its own.

Here: the file RETIRED, choosing a cut, unlinking. Not here: segments being written (rollout/wal_segments.py), reading a
log from its first segment on (rollout/wal_scan.py).
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from rollforward.rollout.types import RequestId
from rollforward.rollout.wal_files import (
    RETIRED_NAME,
    parse_segment_name,
    read_regular,
    replace_file,
    segment_name,
)
from rollforward.sandbox.codec import HeaderFault, SegmentHeader, encode_segment_header, parse_segment_header

_MARK_KIND = "RETI"


class Mark(NamedTuple):
    """What RETIRED says, of all copies together."""

    first: SegmentHeader | None
    """Header of the first segment that is kept; None where nothing was removed, or no copy can be read."""
    faults: tuple[tuple[Path, HeaderFault], ...] = ()
    """Copies that cannot be read, and why."""


class Retirement(msgspec.Struct, frozen=True, kw_only=True):
    """What a call of `WalWriter.retire` did."""

    num_segments: int = 0
    """Segments removed."""
    num_bytes: int = 0
    """Their size, in the log's first directory."""
    kept_because: str | None = None
    """What should not have been in the way, such as an open request; None where nothing was."""


class _Cut(NamedTuple):
    """A place where nothing was open."""

    first: SegmentHeader
    """Header of the segment that begins there."""
    last_step: int
    """Largest step of any request that was opened before it; -1 without any."""


class Retention:
    """Cuts of one writer, and the requests that decide which of them can be used. Under the writer's append lock."""

    def __init__(self, directories: Sequence[Path], *, keep_bytes: int | None, recovered: Iterable[RequestId]) -> None:
        """Begin without a cut.

        Args:
            directories: of the log and its second copy.
            keep_bytes: size that the log may have; None for any.
            recovered: every request that the log held when it was opened.

        """
        self._directories = tuple(directories)
        self._keep_bytes = keep_bytes
        # Where each request was seen first; one that comes again behind a cut ties both sides together.
        self._first_seqs = dict.fromkeys(recovered, 0)
        self._last_step = max((identity.step for identity in self._first_seqs), default=-1)
        self._cuts: list[_Cut] = []

    @property
    def is_due(self) -> bool:
        """Whether the log is larger than it may be.

        Raises:
            OSError: its directory cannot be read.

        """
        return self._keep_bytes is not None and sum(_sizes(self._directories[0]).values()) > self._keep_bytes

    def see(self, identity: RequestId, seq: int) -> None:
        """Learns that a record at `seq` opens or closes a request."""
        first_seq = self._first_seqs.setdefault(identity, seq)
        self._cuts = [cut for cut in self._cuts if not first_seq < cut.first.first_seq <= seq]
        self._last_step = max(self._last_step, identity.step)

    def add_cut(self, first: SegmentHeader) -> None:
        """Learns that nothing is open before the segment that this header will begin."""
        if not self._cuts or self._cuts[-1].first.first_seq < first.first_seq:
            self._cuts.append(_Cut(msgspec.structs.replace(first, kind=_MARK_KIND), self._last_step))

    def retire(self, before_step: int, *, durable_seq: int) -> Retirement:
        """Removes segments, oldest first, until the log is as small as it may be or nothing more can go.

        Args:
            before_step: requests of earlier steps are never asked for again.
            durable_seq: up to where everything is durable: a cut counts once something behind it is.

        Raises:
            OSError: a directory cannot be written; safe to call again.

        """
        sizes = _sizes(self._directories[0])
        usable = [cut for cut in self._cuts if cut.last_step < before_step and cut.first.first_seq <= durable_seq]
        for cut in usable:
            kept = sum(size for place, size in sizes.items() if place >= _place(cut.first))
            if cut is usable[-1] or kept <= (self._keep_bytes or 0):
                gone = [size for place, size in sizes.items() if place < _place(cut.first)]
                apply_mark(self._directories, cut.first)
                self._forget(cut.first.first_seq)
                return Retirement(num_segments=len(gone), num_bytes=sum(gone))
        return Retirement()

    def _forget(self, first_seq: int) -> None:
        self._cuts = [cut for cut in self._cuts if cut.first.first_seq > first_seq]
        self._first_seqs = {identity: seq for identity, seq in self._first_seqs.items() if seq >= first_seq}


def read_mark(directories: Sequence[Path], stream: str | None) -> Mark:
    """Returns what RETIRED says; of several copies the one that removed most, since a crash leaves one behind.

    Args:
        directories: of the log and its second copy.
        stream: whose log it is; None takes any.

    Invariants: reads only; never raises on the content of files.

    """
    found: list[SegmentHeader] = []
    faults: list[tuple[Path, HeaderFault]] = []
    for home in directories:
        path = home / RETIRED_NAME
        try:
            header = parse_segment_header(read_regular(path))
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError:
            header = HeaderFault.DAMAGED
        if isinstance(header, HeaderFault):
            faults.append((path, header))
        elif header.kind != _MARK_KIND or header.stream != (stream or header.stream):
            faults.append((path, HeaderFault.FOREIGN))
        else:
            found.append(header)
    return Mark(max(found, key=lambda header: header.first_seq, default=None), tuple(faults))


def apply_mark(directories: Sequence[Path], first: SegmentHeader) -> None:
    """Writes RETIRED where it says something else, then unlinks what lies before the first segment that is kept.

    Only for the log's owner. First the mark, in every directory, since segments without it would count as lost; then
    the oldest first, so that what a crash leaves has no gap.

    Raises:
        OSError: a directory cannot be written; safe to run again.

    """
    content = encode_segment_header(msgspec.structs.replace(first, kind=_MARK_KIND))
    for home in directories:
        path = home / RETIRED_NAME
        if not path.is_file() or read_regular(path) != content:
            replace_file(path, content)
    for home in directories:
        for place in sorted(_sizes(home)):
            if place < _place(first):
                (home / segment_name(*place)).unlink(missing_ok=True)


def _place(header: SegmentHeader) -> tuple[int, int]:
    return header.epoch, header.segment


def _sizes(directory: Path) -> dict[tuple[int, int], int]:
    """Returns the size of every segment, by (epoch, number). What is no file is none of a writer's."""
    names = ((parse_segment_name(path.name), path) for path in directory.iterdir())
    return {place: path.stat().st_size for place, path in names if place is not None and path.is_file()}
