"""The kernel's format of initial file systems ("newc": see its Documentation, early-userspace)."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Final, NamedTuple

_TRAILER: Final = "TRAILER!!!"


class Entry(NamedTuple):
    """A file or link."""

    content: Path | bytes
    """Where it is copied from, or what it holds or points to."""
    mode: int
    """Kind and rights, as of stat(2)."""

    @property
    def data(self) -> bytes:
        """What it holds."""
        return self.content if isinstance(self.content, bytes) else self.content.read_bytes()


def write_cpio(out: IO[bytes], entries: Mapping[str, Entry]) -> None:
    """Write a file system with these entries, by absolute names, and the directories above them; all is root's."""
    parents = {str(parent) for name in entries for parent in Path(name).parents} - {"/"}
    folders = {name: Entry(b"", 0o040755) for name in sorted(parents) if name not in entries}
    for number, (name, entry) in enumerate([*folders.items(), *entries.items(), (f"/{_TRAILER}", Entry(b"", 0))], 1):
        data, packed = entry.data, os.fsencode(name[1:]) + b"\0"
        fields = (number, entry.mode, 0, 0, 1, 0, len(data), 0, 0, 0, 0, len(packed), 0)
        header = b"070701" + b"".join(b"%08X" % field for field in fields)
        out.write(header + packed + bytes(-(len(header) + len(packed)) % 4) + data + bytes(-len(data) % 4))
