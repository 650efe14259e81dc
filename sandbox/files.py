"""Reading and writing files of logs without believing anything about them."""

import errno
import os
import stat
from pathlib import Path
from typing import Final

_LAST_BYTES: Final = 1 << 16


def read_regular(path: Path, *, max_bytes: int) -> bytes:
    """Returns the bytes of a file; never follows a link, waits for a pipe, reads a device or more than `max_bytes`.

    Raises:
        OSError: the kernel's; it is no regular file; it is larger than that, or than the memory.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        return read_descriptor(descriptor, path, max_bytes=max_bytes)
    finally:
        os.close(descriptor)


def read_descriptor(descriptor: int, path: Path, *, max_bytes: int) -> bytes:
    """Like `read_regular`, from the start of a file that is open already.

    Raises:
        OSError: as above.
    """
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    if status.st_size > max_bytes:
        raise OSError(errno.EFBIG, f"{status.st_size} bytes are more than the {max_bytes} it may have", str(path))
    parts: list[bytes] = []
    done = 0
    try:
        while part := os.pread(descriptor, status.st_size - done + 1, done):
            parts.append(part)
            done += len(part)
            if done > max_bytes:
                raise OSError(errno.EFBIG, f"it grows beyond {max_bytes} bytes while it is read", str(path))
        return b"".join(parts)
    except MemoryError:
        raise OSError(errno.ENOMEM, "more bytes than fit the memory", str(path)) from None


def write_all(descriptor: int, data: bytes | memoryview, *, offset: int = 0) -> None:
    """Writes all of `data` at an offset; a short write is continued, an error is final.

    Raises:
        OSError: the kernel's; part of `data` may be in the file.
    """
    view = memoryview(data)
    while view:
        written = os.pwrite(descriptor, view, offset)
        if written <= 0:
            raise OSError(errno.EIO, f"a write accepted {written} bytes")
        view = view[written:]
        offset += written


def sync_directory(directory: Path) -> None:
    """Makes the names in a directory durable.

    Raises:
        OSError: the kernel's.
    """
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def last_line(descriptor: int) -> str:
    """The last line that was written into a file, or nothing; whoever writes into it by the same description goes on
    where they are.
    """
    start = max(os.fstat(descriptor).st_size - _LAST_BYTES, 0)
    lines = os.pread(descriptor, _LAST_BYTES, start).decode("utf-8", "replace").strip().splitlines()
    return lines[-1] if lines else ""
