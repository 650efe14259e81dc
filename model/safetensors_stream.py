"""Files of the safetensors format, one tensor in memory at a time: headers, reads at an offset, writes at an offset.

    8 bytes: length of the header | JSON: name -> dtype, shape, [begin, end) | data, without holes, in that order

The library maps a file, and a map of a file that another process shortens ends the process; it also writes a file from
tensors that are all in memory. Here a read is a copy into memory of its own, a short one is an error, and a file is
written from its header on, so that memory is bounded by a tensor. Bytes are those that the library writes.

What does not live here: which tensors a checkpoint has (`checkpoint_headers.py`), folders (`checkpoint_writer.py`).
"""

import json
import os
import stat
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Annotated

import msgspec
import torch

from rollforward.model.errors import CheckpointError
from rollforward.model.shapes import DTYPE_BYTES, StoredDtype, StoredTensor

MAX_HEADER_BYTES = 100_000_000
"""Longer headers are refused, as the library does."""

TORCH_DTYPE: dict[str, torch.dtype] = {
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.uint8,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "I64": torch.int64,
}
"""What the element types of a checkpoint are in memory. Scales are bytes here: the value is 2^(byte - 127)."""

_DATA_ORDER: tuple[StoredDtype, ...] = ("I64", "F32", "BF16", "F8_E8M0", "F8_E4M3", "I8")
"""The library writes the data of these types one after another, names in order within one."""

_LENGTH_BYTES = 8
_METADATA = "__metadata__"
_MAX_TRANSFER_BYTES = 2**28

Extent = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
"""A size or an offset in a file."""


class StoredEntry(msgspec.Struct, frozen=True, kw_only=True):
    """Where one stored tensor lies, from a file's header."""

    file: Path
    """The safetensors file."""
    dtype: str
    """Element type as safetensors spells it."""
    shape: tuple[int, ...]
    """Shape in the file."""
    offset: int
    """First byte of the data in the file."""
    spelling: str
    """Name in the file, which need not be the official one."""

    @property
    def num_bytes(self) -> int:
        """Size of the data; the element type is one that a checkpoint may hold."""
        return prod(self.shape) * TORCH_DTYPE[self.dtype].itemsize


class _HeaderEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    dtype: str
    shape: tuple[Extent, ...]
    data_offsets: tuple[Extent, Extent]


def read_header(file: Path) -> dict[str, StoredEntry]:
    """Return the entries of a file by their names in it, and read no data.

    Args:
        file: a safetensors file. A link to one is fine: model caches are made of links.

    Raises:
        CheckpointError: the file is absent or no regular file; its header is damaged, or longer than MAX_HEADER_BYTES;
            tensors overlap, leave a hole, or do not end where the file ends.
    """
    try:
        descriptor = _open_regular(file)
        try:
            size = os.fstat(descriptor).st_size
            header = _header_bytes(descriptor, size)
        finally:
            os.close(descriptor)
        raw = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
        raw.pop(_METADATA, None)
        decoder = msgspec.json.Decoder(_HeaderEntry)
        found = {name: decoder.decode(entry) for name, entry in raw.items()}
        data_start = _LENGTH_BYTES + len(header)
        _check_extents(found, size - data_start)
    except OSError as error:
        raise CheckpointError(f"{file} is damaged or absent: {error.strerror or error}. Fetch it again.") from error
    except (ValueError, RecursionError) as error:  # msgspec's errors are ValueErrors
        raise CheckpointError(f"{file} is damaged or absent: {error}. Fetch it again.") from error
    return {
        name: StoredEntry(
            file=file, dtype=one.dtype, shape=one.shape, offset=data_start + one.data_offsets[0], spelling=name
        )
        for name, one in found.items()
    }


def _open_regular(file: Path) -> int:
    """A pipe by that name would keep a reader waiting for ever."""
    descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ValueError("it is no regular file")
    return descriptor


def _header_bytes(descriptor: int, size: int) -> bytes:
    length = os.pread(descriptor, _LENGTH_BYTES, 0)
    if len(length) < _LENGTH_BYTES:
        raise ValueError(f"it has {size} bytes, fewer than a header")
    num_bytes = int.from_bytes(length, "little")
    if num_bytes > min(MAX_HEADER_BYTES, size - _LENGTH_BYTES):
        raise ValueError(
            f"its header is said to have {num_bytes} bytes; the file has {size}, and a header at most"
            f" {MAX_HEADER_BYTES}"
        )
    header = os.pread(descriptor, num_bytes, _LENGTH_BYTES)
    if len(header) < num_bytes:
        raise ValueError("it ends within its header")
    return header


def _check_extents(found: dict[str, _HeaderEntry], data_bytes: int) -> None:
    """Every byte of the data belongs to exactly one tensor, so a name that stands twice has left a hole."""
    position = 0
    for name, entry in sorted(found.items(), key=lambda item: item[1].data_offsets):
        begin, end = entry.data_offsets
        if begin != position or end < begin:
            what = "overlaps what lies before it" if begin < position else "leaves a hole before it"
            raise ValueError(f"{name} lies in bytes {begin} to {end} of the data and {what}")
        dtype = TORCH_DTYPE.get(entry.dtype)
        if dtype is not None and end - begin != prod(entry.shape) * dtype.itemsize:
            raise ValueError(f"{name} has {end - begin} bytes, and is {entry.dtype} {list(entry.shape)}")
        position = end
    if position != data_bytes:
        raise ValueError(f"its header describes {position} bytes of data, the file has {data_bytes}")


class TensorReader:
    """Reads tensors of several files, each into memory of its own. Use as a context manager.

    A file stays open from its first read on, so one that is removed meanwhile is read to the end.
    """

    def __init__(self) -> None:
        self._descriptors: dict[Path, int] = {}

    def __enter__(self) -> "TensorReader":
        return self

    def __exit__(self, *_error: object) -> None:
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()

    def read(self, entry: StoredEntry) -> torch.Tensor:
        """Return the tensor of an entry, writable and contiguous; its dtype is of TORCH_DTYPE.

        Raises:
            CheckpointError: the file cannot be read, or has become shorter.
        """
        raw = torch.empty(entry.num_bytes, dtype=torch.uint8)
        try:
            if entry.file not in self._descriptors:
                self._descriptors[entry.file] = _open_regular(entry.file)
            _read_into(self._descriptors[entry.file], raw.numpy().data, entry.offset)
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"{entry.spelling} cannot be read from {entry.file}: {error}. Fetch it again."
            ) from error
        return raw.view(TORCH_DTYPE[entry.dtype]).view(entry.shape)


def _read_into(descriptor: int, target: memoryview, offset: int) -> None:
    position = 0
    while position < len(target):
        part = target[position : position + _MAX_TRANSFER_BYTES]
        count = os.preadv(descriptor, [part], offset + position)
        if count == 0:
            raise ValueError(f"the file ends at byte {offset + position}, {len(target) - position} before the tensor")
        position += count


class ShardFile:
    """One file that is being written: made with its header, filled at any offset, then complete and durable.

    States: made -> `write` until `is_full` -> `close`, which makes it durable. `abandon` at any time.
    """

    def __init__(self, file: Path, tensors: Sequence[StoredTensor]) -> None:
        """Make the file, which must not exist, and write its header.

        Raises:
            OSError: the kernel's.
        """
        ordered = sorted(tensors, key=lambda one: (_DATA_ORDER.index(one.dtype), one.name.encode()))
        header, self._offsets, end = _encoded_header(ordered)
        self._missing = end - len(header)
        self._descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            self._write_all(memoryview(header), 0)
        except OSError:
            self.abandon()
            raise

    @property
    def is_full(self) -> bool:
        """Whether as many bytes were written as the tensors have."""
        return self._missing == 0

    def write(self, name: str, data: torch.Tensor, start_bytes: int = 0) -> None:
        """Write bytes of a tensor, each once.

        Args:
            name: the tensor. data: its elements, or a contiguous run of them.
            start_bytes: where in the tensor's data they begin.

        Raises:
            OSError: the kernel's.
        """
        raw = data.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
        self._write_all(raw, self._offsets[name] + start_bytes)
        self._missing -= len(raw)

    def close(self) -> None:
        """Make the bytes durable and close the file.

        Raises:
            OSError: the kernel's, which may tell only now that the disk is full.
        """
        assert self.is_full, f"{self._missing} bytes were not written"
        try:
            os.fsync(self._descriptor)
            # What is durable need not stay in memory: a checkpoint is larger than it.
            os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Close the file as it is."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1

    def _write_all(self, raw: memoryview, offset: int) -> None:
        position = 0
        while position < len(raw):
            part = raw[position : position + _MAX_TRANSFER_BYTES]
            position += os.pwrite(self._descriptor, part, offset + position)


def _encoded_header(ordered: Sequence[StoredTensor]) -> tuple[bytes, dict[str, int], int]:
    """The header with its length, the offset of every tensor in the file, and the file's size."""
    fields: dict[str, object] = {_METADATA: {"format": "pt"}}
    begins: dict[str, int] = {}
    position = 0
    for one in ordered:
        end = position + prod(one.shape) * DTYPE_BYTES[one.dtype]
        fields[one.name] = {"dtype": one.dtype, "shape": list(one.shape), "data_offsets": [position, end]}
        begins[one.name] = position
        position = end
    encoded = json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode()
    encoded += b" " * (-len(encoded) % _LENGTH_BYTES)
    header = len(encoded).to_bytes(_LENGTH_BYTES, "little") + encoded
    return header, {name: len(header) + begin for name, begin in begins.items()}, len(header) + position


def sync_path(path: Path) -> None:
    """Make a file's bytes, or a folder's names, durable (fsync).

    Raises:
        OSError: the kernel's.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
