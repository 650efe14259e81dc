"""What the next owner of a log does to its files before it writes: the torn tail is cut, copies are healed, leftovers
go, and what is kept is made durable.

Here: writes to what a scan found. Not here: the scan (rollout/wal_scan.py), new segments (rollout/wal_segments.py).
"""

import os
from pathlib import Path

from rollforward.rollout.errors import WalFencedError
from rollforward.rollout.wal_files import TEMPORARY_SUFFIX, parse_segment_name, read_epoch_file
from rollforward.rollout.wal_mirror import heal
from rollforward.rollout.wal_retention import apply_mark
from rollforward.rollout.wal_scan import LogScan
from rollforward.sandbox.files import sync_directory


def repair_log(directory: Path, scan: LogScan, *, mirror: Path | None = None) -> None:
    """Truncates what `scan` found torn, removes leftovers of unfinished work, and makes the rest durable.

    A frame that a killed process wrote but never synced counts as logged from here on, so it must be on disk first.

    Raises:
        WalFencedError: somebody else has begun a segment under the epoch that this owner claimed. Nothing was changed:
            what looks torn may be a write of theirs.
        OSError: a directory cannot be written; nothing was published yet, so it is safe to run again.

    """
    _check_nobody_writes(directory, scan)
    if mirror is not None and scan.stale:
        heal(directory, mirror, scan.stale)
    sizes = dict(scan.cuts)
    homes = [home for home in (directory, mirror) if home is not None and home.is_dir()]
    if scan.mark is not None:
        apply_mark(homes, scan.mark)
    for home in homes:
        for path in scan.last_segments:
            if (home / path.name).exists():
                _cut(home / path.name, sizes.get(path))
        for path in home.glob(f"*{TEMPORARY_SUFFIX}"):
            # What is no file is none of a writer's.
            if not path.is_dir():
                path.unlink(missing_ok=True)
        sync_directory(home)


def _check_nobody_writes(directory: Path, scan: LogScan) -> None:
    """Raises WalFencedError where two took over at one moment and got one epoch, of which the other has begun."""
    own = read_epoch_file(directory)
    for path in scan.last_segments:
        number = parse_segment_name(path.name)
        if own is not None and number is not None and number[0] >= own.epoch:
            raise WalFencedError(
                f"log {directory}: {path.name} was begun by another writer of epoch {own.epoch}. End this replica."
            )


def _cut(path: Path, size_bytes: int | None) -> None:
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        if size_bytes is not None and size_bytes < os.fstat(descriptor).st_size:
            os.ftruncate(descriptor, size_bytes)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
