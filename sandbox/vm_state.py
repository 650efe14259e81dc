"""States of virtual machines: memory, devices and disk of one, in files that nobody can change.

In a supervisor they are sealed files without a name: an emulator maps the memory privately, whoever it is, and can
write none. In the user's cache, and in snapshots, the memory is kept without its empty pages.
"""

import errno
import fcntl
import json
import mmap
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from rollforward.sandbox import vm_stream
from rollforward.sandbox.errors import SandboxFileError, SandboxUnavailableError
from rollforward.sandbox.files import write_all
from rollforward.sandbox.inside import system

_SEALS: Final = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
_PAGE_BYTES: Final = vm_stream.PAGE_BYTES
_CHUNK_BYTES: Final = 1 << 20
_READ_BYTES: Final = 1 << 26
_EMPTY: Final = bytes(_PAGE_BYTES)


class State(NamedTuple):
    """A machine that stands still. The descriptors are its holder's to close (`close_all`)."""

    memory: int
    """Descriptor of a sealed file with its memory."""
    devices: int
    """Descriptor of a sealed file with everything else but the disk."""
    disk: int = -1
    """Descriptor of a sealed file with what was written to the disk that it can write; -1 where it has none."""


class Whole(msgspec.Struct, frozen=True, kw_only=True):
    """A machine as one record."""

    runs: list[tuple[int, int]]
    """Where its memory is not empty: offset and number of bytes, in order."""
    memory: memoryview
    """The bytes there, one run after the other."""
    devices: memoryview
    """Everything else but the disk, in the emulator's own form."""
    disk: memoryview
    """What was written to the disk that it can write, in the emulator's own form; empty where it has none."""


def memory_file(size: int) -> int:
    """A descriptor of a file without a name that can be sealed, and made no shorter: it can be mapped."""
    descriptor = os.memfd_create("machine", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, size)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    return descriptor


def again(descriptor: int) -> int:
    """Another opening of a file, to read from its beginning."""
    return os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC)


def close_all(descriptors: Sequence[int]) -> None:
    """Close them, but for those that are -1."""
    for descriptor in descriptors:
        if descriptor >= 0:
            os.close(descriptor)


def share(state: State) -> State:
    """The same state once more, to be closed by itself."""
    return State(*(os.dup(descriptor) if descriptor >= 0 else -1 for descriptor in state))


def sealed(state: State) -> State:
    """The state, once nobody can change it any more."""
    for descriptor in state:
        if descriptor >= 0:
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
    return state


def file_of(data: bytes | memoryview) -> int:
    """A descriptor of a file without a name that holds these bytes, to be read from its beginning.

    Raises:
        SandboxUnavailableError: there is no room.
    """
    return _filled(0, [(0, data)])


def content(descriptor: int, max_bytes: int) -> bytes:
    """All that a file holds.

    Raises:
        SandboxFileError: it is more.
        SandboxUnavailableError: it cannot be read.
    """
    _check_size(size := os.fstat(descriptor).st_size, max_bytes)
    try:
        return b"".join(_parts(descriptor, size))
    except OSError as error:
        raise SandboxUnavailableError(
            f"sandbox: a machine's state cannot be read: {error.strerror or error}. Look at the disk"
        ) from None


def _check_size(size: int, max_bytes: int) -> None:
    if size > max_bytes:
        raise SandboxFileError(f"sandbox: the machine has {size} bytes, more than {max_bytes}")


def copy(memory: int, size: int) -> int:
    """A descriptor of a copy of a machine's memory that can be written.

    Raises:
        SandboxUnavailableError: there is no room.
    """
    return _filled(size, _runs(memory))


def keep(state: State, home: Path) -> None:
    """Write a state into a directory.

    Raises:
        OSError: there is no room.
    """
    runs: list[tuple[int, int]] = []
    with (home / "memory").open("wb") as out:
        for start, data in _runs(state.memory):
            runs.append((start, len(data)))
            out.write(data)
    (home / "runs").write_text(json.dumps(runs), encoding="utf-8")
    for name, descriptor in (("devices", state.devices), ("disk", state.disk)):
        if descriptor >= 0:
            (home / name).write_bytes(b"".join(_parts(descriptor, os.fstat(descriptor).st_size)))


def load(home: Path, memory_bytes: int) -> State:
    """A state that `keep` has written, of a machine with so much memory.

    Raises:
        SandboxUnavailableError: it cannot be read.
    """
    has_disk = (home / "disk").exists()
    state = State(memory_file(memory_bytes), memory_file(0), memory_file(0) if has_disk else -1)
    try:
        with (home / "memory").open("rb") as kept:
            for start, size in json.loads((home / "runs").read_text(encoding="utf-8")):
                os.lseek(state.memory, start, os.SEEK_SET)
                system.write_all(state.memory, kept.read(size))
        system.write_all(state.devices, (home / "devices").read_bytes())
        if has_disk:
            system.write_all(state.disk, (home / "disk").read_bytes())
    except (OSError, ValueError) as error:
        close_all(state)
        raise SandboxUnavailableError(f"sandbox: a kept machine in {home} cannot be read: {error}. Remove it") from None
    return sealed(state)


def whole(stream: int, disk: int, max_bytes: int) -> Whole:
    """A machine as one record.

    Args:
        stream: `memory_file` with what an emulator has written of a machine that stands still, memory included.
        disk: of the disk that it can write; -1 where it has none.
        max_bytes: of each.

    Raises:
        SandboxFileError: it is more.
        SandboxUnavailableError: it cannot be read, or the emulator has written something else.
    """
    _check_size(size := os.fstat(stream).st_size, max_bytes)
    try:
        rest, pages = vm_stream.part(mmap.mmap(stream, size, prot=mmap.PROT_READ))
    except (ValueError, OSError) as error:
        raise SandboxUnavailableError(f"sandbox: an emulator has not saved a machine: {error}") from None
    runs: list[tuple[int, int]] = []
    addresses = sorted(pages)
    for address in addresses:
        if runs and sum(runs[-1]) == address:
            runs[-1] = (runs[-1][0], runs[-1][1] + _PAGE_BYTES)
        else:
            runs.append((address, _PAGE_BYTES))
    memory = b"".join(pages[address] for address in addresses)
    written = content(disk, max_bytes) if disk >= 0 else b""
    return Whole(runs=runs, memory=memoryview(memory), devices=memoryview(rest), disk=memoryview(written))


def fill(memory: int, found: Whole, size: int) -> None:
    """Write a machine's memory into an empty file of so many bytes.

    Raises:
        SandboxFileError: it is no memory of so many bytes.
        SandboxUnavailableError: there is no room.
    """
    begin = 0
    try:
        for start, length in found.runs:
            end = begin + length
            if not 0 <= start < start + length <= size or end > len(found.memory):
                raise SandboxFileError(
                    f"sandbox: the snapshot is none of a machine: {length} bytes at {start} of {size}, {begin} of"
                    f" {len(found.memory)} in it"
                )
            write_all(memory, found.memory[begin:end], offset=start)
            begin = end
    except OSError as error:
        raise _no_room(error) from None


def _filled(size: int, runs: Iterable[tuple[int, bytes | memoryview]]) -> int:
    """A descriptor of a file without a name, of so many bytes at least, that holds these (offset, bytes)."""
    descriptor = -1
    try:
        descriptor = memory_file(size)
        for start, data in runs:
            write_all(descriptor, data, offset=start)
    except OSError as error:
        if descriptor >= 0:
            os.close(descriptor)
        raise _no_room(error) from None
    return descriptor


def _no_room(error: OSError) -> SandboxUnavailableError:
    return SandboxUnavailableError(
        f"sandbox: a machine's memory cannot be copied: {error.strerror or error}. Make room: machines are held in"
        " memory"
    )


def _parts(descriptor: int, size: int) -> Iterator[bytes]:
    """The first bytes of a file, however few are had at a time."""
    start = 0
    while start < size:
        data = os.pread(descriptor, min(_READ_BYTES, size - start), start)
        if not data:
            raise OSError(errno.EIO, f"it ends after {start} of {size} bytes")
        yield data
        start += len(data)


def _runs(memory: int) -> Iterator[tuple[int, bytes]]:
    """(offset, bytes) of what is not empty, in order; runs are as long as a chunk at most."""
    end, here = os.fstat(memory).st_size, 0
    while here < end:
        try:
            here = os.lseek(memory, here, os.SEEK_DATA)
        except OSError:
            return  # nothing but a hole is left
        stop = os.lseek(memory, here, os.SEEK_HOLE)
        while here < stop:
            data = os.pread(memory, min(_CHUNK_BYTES, stop - here), here)
            yield from _full_pages(here, data)
            here += len(data)


def _full_pages(start: int, data: bytes) -> Iterator[tuple[int, bytes]]:
    begin = -1
    for offset in range(0, len(data) + _PAGE_BYTES, _PAGE_BYTES):
        is_empty = offset >= len(data) or data[offset : offset + _PAGE_BYTES] == _EMPTY
        if not is_empty and begin < 0:
            begin = offset
        elif is_empty and begin >= 0:
            yield start + begin, data[begin:offset]
            begin = -1
