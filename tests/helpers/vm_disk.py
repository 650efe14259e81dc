"""Disks of guests whose write cache is lost with the power.

QEMU writes to the file of a killed guest's disk what the drive had accepted, so by itself it is a drive whose cache
survives. Real ones promise only what a FLUSH covered. So every write and flush is also recorded in order (QEMU's
`blklogwrites`, the format of the kernel's dm-log-writes), and after the cut the disk is made anew from what it was
before the boot: everything before the last flush, and of each later write whole, none, or some of its sectors.
"""

import random
import shutil
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.helpers.vm_image import tool

SECTOR_BYTES = 512
SIZE_BYTES = 96 << 20

CACHES = ("kept", "flushed", "torn")
"""What happens to writes that no flush covers: all kept, all lost, or each by itself in part."""

_MAGIC = 0x6A736677736872
_SUPER = struct.Struct("<QQQI")
_ENTRY = struct.Struct("<QQQQ")
_FLUSH, _FUA = 1, 2


INSTANTS = ("end", "any", "unflushed")
"""When the power went: at the kill, at any request that the drive had served, or right before one of its flushes."""


class Cut(NamedTuple):
    """What a power cut did to a disk."""

    log_bytes: int
    """Length of the log when the power went: what the guest said when it was shorter was said before."""
    unflushed: int
    """Writes after the last flush."""
    lost_sectors: int
    """Of those writes."""


class _Request(NamedTuple):
    """A write, or without data a flush, which the drive answered."""

    offset: int
    data: bytes
    is_durable: bool
    log_bytes: int
    """Length of the log with it."""

    @property
    def is_flush(self) -> bool:
        return not self.data


class Disk:
    """A drive with an ext4 file system; `start` before each boot, `cut` after it."""

    def __init__(self, folder: Path, name: str) -> None:
        self.name = name
        self.path = folder / f"{name}.raw"
        self.work, self.log = folder / f"{name}.work", folder / f"{name}.log"
        self.format()

    def format(self) -> None:
        """Make it new and empty."""
        self.path.unlink(missing_ok=True)
        with self.path.open("wb") as file:
            file.truncate(SIZE_BYTES)
        options = "lazy_itable_init=0,lazy_journal_init=0,nodiscard"
        command = [tool("mke2fs", "e2fsprogs"), "-q", "-t", "ext4", "-b", "4096", "-E", options, str(self.path)]
        subprocess.run(command, check=True, capture_output=True)

    def start(self) -> None:
        """Prepare the files that QEMU writes."""
        _copy_sparse(self.path, self.work)
        self.log.write_bytes(b"")

    def cut(self, cache: str, draw: random.Random, *, instant: str = "end", log_bytes: int | None = None) -> Cut:
        """Leave on the disk what a drive must have kept, and of the rest what `cache` says.

        Args:
            cache: one of CACHES.
            draw: decides "torn", and which instant.
            instant: one of INSTANTS.
            log_bytes: cut when the log had this length instead.

        """
        requests = list(_read_log(self.log.read_bytes()))
        num_served = len(requests)
        flushes = [index for index, request in enumerate(requests) if request.is_flush]
        if log_bytes is not None:
            num_served = sum(request.log_bytes <= log_bytes for request in requests)
        elif instant == "any":
            num_served = draw.randrange(len(requests) + 1)
        elif instant == "unflushed" and flushes:
            num_served = draw.choice(flushes)
        requests = requests[:num_served]
        last_flush = max((index for index in flushes if index < num_served), default=-1)
        unflushed = lost = 0
        with self.path.open("r+b") as file:
            for index, request in enumerate(requests):
                sectors = range(len(request.data) // SECTOR_BYTES)
                kept: list[int] | range = sectors
                if index > last_flush and not request.is_durable:
                    unflushed += 1
                    kept = sectors if cache == "kept" else range(0) if cache == "flushed" else _some(sectors, draw)
                    lost += len(sectors) - len(kept)
                for sector in kept:
                    file.seek(request.offset + sector * SECTOR_BYTES)
                    file.write(request.data[sector * SECTOR_BYTES : (sector + 1) * SECTOR_BYTES])
        return Cut(requests[-1].log_bytes if requests else 0, unflushed, lost)


def _some(sectors: range, draw: random.Random) -> list[int] | range:
    """Sectors of an unflushed write that reached the medium: none, all, a beginning, or any."""
    match draw.randrange(4):
        case 0:
            return range(0)
        case 1:
            return sectors
        case 2:
            return sectors[: draw.randrange(len(sectors) + 1)]
        case _:
            return [sector for sector in sectors if draw.random() < 0.5]


def _read_log(log: bytes) -> Iterator[_Request]:
    """What the drive served, in order."""
    if len(log) < SECTOR_BYTES:
        return
    magic, version, _, sector_bytes = _SUPER.unpack_from(log)
    assert (magic, version, sector_bytes) in ((_MAGIC, 1, SECTOR_BYTES), (0, 0, 0)), "not a log of blklogwrites"
    at = SECTOR_BYTES
    while at + SECTOR_BYTES <= len(log):
        sector, num_sectors, flags, _ = _ENTRY.unpack_from(log, at)
        head = log[at + _ENTRY.size : at + SECTOR_BYTES]
        at += SECTOR_BYTES
        if not (sector or num_sectors or flags):
            # The place of a request that was under way while a later one was already recorded.
            continue
        assert flags in (0, _FLUSH, _FUA), f"entry that ends at {at} has flags {flags}: no guest here discards"
        assert not any(head), f"entry that ends at {at} has other bytes behind it"
        if num_sectors:
            size = num_sectors * SECTOR_BYTES
            if at + size <= len(log):
                yield _Request(sector * SECTOR_BYTES, log[at : at + size], flags == _FUA, at + size)
            at += size
        if flags == _FLUSH:
            yield _Request(0, b"", True, at)


def _copy_sparse(source: Path, target: Path) -> None:
    target.unlink(missing_ok=True)
    copied = subprocess.run(["cp", "--sparse=always", "--reflink=auto", source, target], check=False)
    if copied.returncode:
        shutil.copyfile(source, target)
