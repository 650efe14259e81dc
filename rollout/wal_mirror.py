"""Two copies of a log: where the second one lies, what both together hold, and how one is healed from the other.

    directory/SEGMENT --+
                        +--merge--> every frame that either holds --heal--> both whole again
    mirror/SEGMENT -----+

The copies are written with the same bytes at the same offsets, so a good frame of one may stand for bad bytes of the
other. What is bad in both is damage as in a log without a mirror.

Here: files of two directories to the bytes that count. Not here: what they mean (rollout/wal_scan.py), writing new ones
(rollout/wal_segments.py).
"""

import os
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np

from rollforward.rollout.errors import WalUsageError
from rollforward.rollout.wal_files import (
    EPOCH_NAME,
    LOCK_NAME,
    RETIRED_NAME,
    TEMPORARY_SUFFIX,
    parse_segment_name,
    read_regular,
    replace_file,
    sync_directory,
)
from rollforward.rollout.wal_records import WalConfig
from rollforward.sandbox.codec import (
    SEGMENT_HEADER_BYTES,
    Frame,
    FrameScan,
    SegmentHeader,
    frame_seed,
    parse_segment_header,
    scan_frames,
)

_NO_SCAN = FrameScan(frames=(), damaged=(), torn_bytes=0, room_bytes=0, end=SEGMENT_HEADER_BYTES)


class LogFile(NamedTuple):
    """One file of a log, as all its copies together say."""

    path: Path
    """Where it lies in the log's first directory, or would; in the mirror for a copy that cannot be merged."""
    data: bytes
    """Its bytes."""


class Finding(NamedTuple):
    """Something that is wrong with one copy of a file."""

    path: Path
    """The copy."""
    detail: str
    """What."""
    is_unreadable: bool = False
    """Whether the operating system could not read it."""


class LogFiles(NamedTuple):
    """What the directories of a log hold."""

    files: list[LogFile]
    """Every file but EPOCH, RETIRED, LOCK and temporary ones, by name."""
    findings: list[Finding]
    """What is wrong with single copies; nothing of it is lost unless `files` shows it too."""
    stale: tuple[str, ...]
    """Names of which a copy lacks what another one holds; `heal` makes them equal."""


class _Copy(NamedTuple):
    """One copy of a segment, scanned."""

    data: bytes
    header: SegmentHeader | None
    scan: FrameScan


class _Merged(NamedTuple):
    """What two copies hold together."""

    data: bytes
    is_stale: tuple[bool, bool]
    details: tuple[str | None, str | None]
    """What is wrong with each copy beyond what a crash between the two writes explains."""


def mirror_directory(config: WalConfig, directory: Path, *, makes: bool = True) -> Path | None:
    """Returns where a log's second copy lies, or None below level `cluster`.

    Its place below `mirror_dir` is named after the end of the log's path, so that one `mirror_dir` serves all logs of a
    run: runs/a/wal/engine-0 -> MIRROR_DIR/a/wal/engine-0.

    Args:
        config: the log's settings.
        directory: of the log.
        makes: create both directories if absent, and refuse those that are no two copies.

    Raises:
        WalUsageError: it is on the same device as the log, or is the log.
        OSError: it cannot be made.

    """
    if config.level != "cluster" or config.mirror_dir is None:
        return None
    home = directory.resolve()
    mirror = Path(config.mirror_dir, *home.parts[1:][-3:])
    if not makes:
        return mirror
    home.mkdir(parents=True, exist_ok=True)
    mirror.mkdir(parents=True, exist_ok=True)
    is_same_device = os.stat(mirror).st_dev == os.stat(home).st_dev
    if mirror.resolve() == home or (is_same_device and not config.mirror_same_device):
        raise WalUsageError(
            f"wal.mirror_dir={config.mirror_dir} is on the same device as the log {home}: both copies would be lost"
            " together. Name a directory of another machine (a shared file system), or use wal.level=node."
        )
    return mirror


def read_log_files(directory: Path, mirror: Path | None, *, first: tuple[int, int] = (0, 0)) -> LogFiles:
    """Returns the files of a log, each with what all its copies hold.

    Args:
        directory: of the log.
        mirror: of its second copy, if it has one.
        first: (epoch, number) of the oldest segment that counts; older ones are as good as removed.

    Invariants: reads only; never raises on the content of files; a directory that is absent holds nothing.

    """
    findings: list[Finding] = []
    ours = _contents(directory, findings, first)
    if mirror is None:
        return LogFiles([LogFile(directory / name, data) for name, data in sorted(ours.items())], findings, ())
    others = _contents(mirror, findings, first)
    names = sorted({*ours, *others})
    numbered = [number for number in map(parse_segment_name, names) if number is not None]
    files: list[LogFile] = []
    stale: list[str] = []
    for name in names:
        number = parse_segment_name(name)
        copies = ours.get(name), others.get(name)
        if copies[0] == copies[1]:
            files.append(LogFile(directory / name, copies[0] or b""))
            continue
        merged = None if number is None else _merge(*copies, is_newest=number == max(numbered))
        if merged is None:
            found = ((directory, copies[0]), (mirror, copies[1]))
            files += [LogFile(home / name, data) for home, data in found if data is not None]
            continue
        files.append(LogFile(directory / name, merged.data))
        if any(merged.is_stale):
            stale.append(name)
        for home, detail in zip((directory, mirror), merged.details, strict=True):
            if detail is not None:
                findings.append(Finding(home / name, detail))
    return LogFiles(files, findings, tuple(stale))


def heal(directory: Path, mirror: Path, names: tuple[str, ...]) -> None:
    """Makes the copies of the named files equal, each replaced whole or not at all. Only for the log's owner.

    Raises:
        OSError: a directory cannot be written; safe to run again.

    """
    first, second = _contents(directory, []), _contents(mirror, [])
    for name in names:
        merged = _merge(first.get(name), second.get(name), is_newest=False)
        if merged is None:
            continue
        for home, is_stale in zip((directory, mirror), merged.is_stale, strict=True):
            if is_stale:
                replace_file(home / name, merged.data)
    for home in (directory, mirror):
        sync_directory(home)


def _contents(directory: Path, findings: list[Finding], first: tuple[int, int] = (0, 0)) -> dict[str, bytes]:
    """Returns the bytes of every file that may be a segment, by name; without segments before the first that counts."""
    if not directory.is_dir():
        return {}
    contents: dict[str, bytes] = {}
    for path in sorted(directory.iterdir()):
        if path.name in (EPOCH_NAME, RETIRED_NAME, LOCK_NAME) or path.name.endswith(TEMPORARY_SUFFIX):
            continue
        if (parse_segment_name(path.name) or first) < first:
            continue
        try:
            contents[path.name] = read_regular(path)
        except FileNotFoundError as error:
            if path.is_symlink():
                findings.append(Finding(path, str(error), is_unreadable=True))
            # Else a live writer removed it meanwhile.
        except OSError as error:
            findings.append(Finding(path, str(error), is_unreadable=True))
    return contents


def _merge(first: bytes | None, second: bytes | None, *, is_newest: bool) -> _Merged | None:
    """Returns what two copies of a segment hold together, or None when they are not copies of one segment."""
    copies = (_scanned(first), _scanned(second))
    headers = [copy.header for copy in copies if copy.header is not None]
    if not headers or headers[0] != headers[-1]:
        return None
    if len(headers) == 1:
        # Frames behind a bad header verify with the other copy's.
        copies = (_scanned(first, headers[0]), _scanned(second, headers[0]))
    frames: dict[int, Frame] = {}
    for copy in copies:
        for frame in copy.scan.frames:
            if frames.setdefault(frame.seq, frame)[4:7] != frame[4:7]:
                return None
    ordered = sorted(frames.values(), key=lambda frame: frame.start)
    if any(before.end > after.start for before, after in pairwise(ordered)):
        return None
    end = ordered[-1].end if ordered else SEGMENT_HEADER_BYTES
    other, base = sorted(copies, key=lambda copy: (copy.scan.end, len(copy.data)))
    data = bytearray(base.data.ljust(end, b"\0"))
    whole = base if base.header is not None else other
    data[:SEGMENT_HEADER_BYTES] = whole.data[:SEGMENT_HEADER_BYTES]
    for frame in other.scan.frames:
        data[frame.start : frame.end] = other.data[frame.start : frame.end]
    merged = bytes(data)
    proven_seq = max([headers[0].first_seq, *(frame.batch_seq for frame in ordered)])
    return _Merged(
        merged,
        (copies[0].data[:end] != merged[:end], copies[1].data[:end] != merged[:end]),
        (
            _detail(copies[0], merged[:end], headers[0], proven_seq, is_newest=is_newest),
            _detail(copies[1], merged[:end], headers[0], proven_seq, is_newest=is_newest),
        ),
    )


def _scanned(data: bytes | None, header: SegmentHeader | None = None) -> _Copy:
    own = parse_segment_header(data or b"")
    own = own if isinstance(own, SegmentHeader) else None
    header = header or own
    if data is None or header is None or len(data) < SEGMENT_HEADER_BYTES:
        return _Copy(data or b"", own, _NO_SCAN)
    seed = frame_seed(header.stream, header.epoch)
    return _Copy(data, own, scan_frames(data, offset=SEGMENT_HEADER_BYTES, seed=seed))


def _detail(copy: _Copy, whole: bytes, header: SegmentHeader, proven_seq: int, *, is_newest: bool) -> str | None:
    """Returns what is wrong with a copy, or None: equal, or only behind as a crash between two writes leaves it."""
    if copy.data[: len(whole)] == whole:
        return None
    last_seq = copy.scan.frames[-1].seq if copy.scan.frames else header.first_seq - 1
    is_prefix = not copy.scan.damaged and (copy.header is not None or not copy.data)
    if is_newest and is_prefix and last_seq + 1 >= proven_seq:
        return None
    if not copy.data:
        return f"absent or empty; {len(whole)} bytes are in the other copy"
    num_both = min(len(copy.data), len(whole))
    differs = np.frombuffer(copy.data, np.uint8, num_both) != np.frombuffer(whole, np.uint8, num_both)
    num_bad = int(np.count_nonzero(differs)) + len(whole) - num_both
    return f"{num_bad} of {len(whole)} bytes are damaged or missing; the other copy has them"
