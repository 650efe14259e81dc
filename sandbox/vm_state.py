"""States of virtual machines: memory, devices and disk of one, in files that nobody can change.

In a supervisor they are sealed files without a name: an emulator maps the memory privately, whoever it is, and can
write none. In the user's cache, and in snapshots, the memory is kept without its empty pages.
"""

import contextlib
import errno
import fcntl
import io
import json
import mmap
import os
import struct
from collections.abc import Generator, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from rollforward.sandbox import vm_stream
from rollforward.sandbox.errors import SandboxError, SandboxFileError, SandboxUnavailableError
from rollforward.sandbox.files import write_all
from rollforward.sandbox.refusals import refusals

_SEALS: Final = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
_PAGE_BYTES: Final = vm_stream.PAGE_BYTES
_CHUNK_BYTES: Final = 1 << 20
_READ_BYTES: Final = 1 << 23
_EMPTY: Final = bytes(_PAGE_BYTES)
_COPIED: Final = "a machine's memory cannot be copied"


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


class Saved(msgspec.Struct, frozen=True, kw_only=True):
    """A whole-machine snapshot."""

    machine: str
    """Key of its layout: it goes on in no other machine."""
    spec: str
    """Stands for limits and tools, which the agent in it has."""
    whole: Whole


_CONTENT: Final = ("memory", "devices", "disk")
"""What ends a record."""
_NOTHING: Final = b"".join(msgspec.msgpack.encode(name) + msgspec.msgpack.encode(b"") for name in _CONTENT)
_BYTES: Final = struct.Struct(">BI")
_BYTES_FOLLOW: Final = 0xC6
"""Of msgpack, and so many (32 bits)."""
_MAX_PART_BYTES: Final = (1 << 32) - 1


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


@contextlib.contextmanager
def closing_all() -> Generator[list[int]]:
    """Descriptors that are closed where this ends by an error."""
    opened: list[int] = []
    try:
        yield opened
    except BaseException:
        close_all(opened)
        raise


def share(state: State) -> State:
    """The same state once more, to be closed by itself."""
    with closing_all() as opened:
        for descriptor in state:
            opened.append(os.dup(descriptor) if descriptor >= 0 else -1)
    return State(*opened)


def sealed(state: State) -> State:
    """The state, once nobody can change it any more."""
    for descriptor in state:
        if descriptor >= 0:
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
    return state


def file_of(parts: Iterable[bytes | memoryview]) -> int:
    """A descriptor of a file without a name that holds these bytes, to be read from its beginning.

    Raises:
        SandboxUnavailableError: there is no room.
    """
    with refusals(_COPIED), closing_all() as opened:
        opened.append(memory_file(0))
        write_parts(opened[0], parts)
    return opened[0]


def write_parts(descriptor: int, parts: Iterable[bytes | memoryview]) -> None:
    """Write one after the other into an empty file.

    Raises:
        OSError: the kernel's.
    """
    offset = 0
    for data in parts:
        write_all(descriptor, data, offset=offset)
        offset += len(data)


def content(descriptor: int, max_bytes: int) -> list[bytes]:
    """All that a file holds, in parts.

    Raises:
        SandboxFileError: it is more.
        SandboxUnavailableError: it cannot be read.
    """
    check_size(size := os.fstat(descriptor).st_size, max_bytes)
    with refusals("a machine's state cannot be read"):
        return list(_parts(descriptor, size))


def check_size(size: int, max_bytes: int) -> None:
    """Refuse a machine that has more bytes than it may.

    Raises:
        SandboxFileError: it has.
    """
    if size > max_bytes:
        raise SandboxFileError(f"sandbox: the machine has {size} bytes, more than {max_bytes}")


def copy(memory: int, size: int) -> int:
    """A descriptor of a copy of a machine's memory that can be written.

    Raises:
        SandboxUnavailableError: there is no room.
    """
    with refusals(_COPIED), closing_all() as opened:
        opened.append(memory_file(size))
        for start, data in _runs(memory):
            write_all(opened[0], data, offset=start)
    return opened[0]


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
    try:
        with refusals(f"a kept machine in {home} cannot be read"), closing_all() as opened:
            has_disk = (home / "disk").exists()
            for size in (memory_bytes, 0, *([0] if has_disk else [])):
                opened.append(memory_file(size))
            state = State(*opened)
            with (home / "memory").open("rb") as kept:
                for start, size in json.loads((home / "runs").read_text(encoding="utf-8")):
                    write_all(state.memory, kept.read(size), offset=start)
            write_all(state.devices, (home / "devices").read_bytes())
            if has_disk:
                write_all(state.disk, (home / "disk").read_bytes())
            return sealed(state)
    except ValueError as error:
        raise SandboxUnavailableError(f"sandbox: a kept machine in {home} is damaged: {error}. Remove it") from None


def packed(saved: Saved, stream: int, disk: Sequence[bytes], memory_bytes: int, max_bytes: int) -> bytes:
    """A machine as one record: `saved` as msgpack, with what was saved in it. Other threads run meanwhile.

    Args:
        saved: whose it is.
        stream: `memory_file` with what an emulator has written of a machine that stands still, memory included.
        disk: parts of what was written to the disk that it can write; empty where it has none.
        memory_bytes: of the machine.
        max_bytes: of the record.

    Raises:
        SandboxFileError: it is more.
        SandboxUnavailableError: it cannot be read, or the emulator has written something else.
    """
    size = os.fstat(stream).st_size
    try:
        with refusals("a machine cannot be saved"), mmap.mmap(stream, size, prot=mmap.PROT_READ) as found:
            rest, places = vm_stream.part(found, memory_bytes)
            with memoryview(found) as view:
                return _packed(saved, view, places, rest, disk, max_bytes)
    except SandboxError:
        raise
    except ValueError as error:
        raise SandboxUnavailableError(f"sandbox: an emulator has not saved a machine: {error}") from None


def _packed(
    saved: Saved, view: memoryview, places: Sequence[int], rest: bytes, disk: Sequence[bytes], max_bytes: int
) -> bytes:
    runs = _runs_of(places)
    sizes = sum(length for _, length in runs), len(rest), sum(map(len, disk))
    check_size(max(sizes), _MAX_PART_BYTES)
    none = memoryview(b"")
    whole = Whole(runs=runs, memory=none, devices=none, disk=none)
    begin = msgspec.msgpack.encode(msgspec.structs.replace(saved, whole=whole))[: -len(_NOTHING)]
    heads = [
        msgspec.msgpack.encode(name) + _BYTES.pack(_BYTES_FOLLOW, size)
        for name, size in zip(_CONTENT, sizes, strict=True)
    ]
    check_size(len(begin) + sum(map(len, heads)) + sum(sizes), max_bytes)
    memory = (view[place : place + _PAGE_BYTES] for place in places if place)
    # Piece by piece: a copy of all of it at once would keep every other thread from running.
    out = io.BytesIO()
    out.write(begin)
    for head, parts in zip(heads, (memory, (rest,), disk), strict=True):
        out.write(head)
        for part in parts:
            out.write(part)
    return out.getvalue()


def _runs_of(places: Sequence[int]) -> list[tuple[int, int]]:
    """(offset, bytes) of memory whose pages have a place."""
    runs: list[tuple[int, int]] = []
    begin = -1
    for number, place in enumerate(places):
        if place and begin < 0:
            begin = number
        elif not place and begin >= 0:
            runs.append((begin * _PAGE_BYTES, (number - begin) * _PAGE_BYTES))
            begin = -1
    if begin >= 0:
        runs.append((begin * _PAGE_BYTES, (len(places) - begin) * _PAGE_BYTES))
    return runs


def fill(memory: int, found: Whole, size: int) -> None:
    """Write a machine's memory into an empty file of so many bytes.

    Raises:
        SandboxFileError: it is no memory of so many bytes.
        SandboxUnavailableError: there is no room.
    """
    begin = 0
    with refusals(_COPIED):
        for start, length in found.runs:
            end = begin + length
            if not 0 <= start < start + length <= size or end > len(found.memory):
                raise SandboxFileError(
                    f"sandbox: the snapshot is none of a machine: {length} bytes at {start} of {size}, {begin} of"
                    f" {len(found.memory)} in it"
                )
            write_all(memory, found.memory[begin:end], offset=start)
            begin = end


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
