"""Files of a container as its agent reads and writes them, beside whatever runs there and renames what it likes.

Every path is opened part by part from a directory that nobody can replace, through no link, no mount and nothing above
(`system.open_inside`), as the sandbox's user, without waiting; only regular files are read and written. What comes back
is sent in parts, so that it never lies in the sandbox's memory as a whole.
"""

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from typing import Any, Final

from rollforward.sandbox.inside import root, system

PART_BYTES: Final = 1 << 20
"""The most that is read or written at once."""
_MAX_PATH_BYTES: Final = 1 << 16
_SLICE: Final = 64
"""Parts of a path that are opened at once: far fewer bytes than a path may have."""
_PATH_ONLY: Final = os.O_PATH | os.O_DIRECTORY
_REASONS: Final = {
    errno.ELOOP: "its path passes a link",
    errno.EXDEV: "its path leaves the sandbox's own files",
    errno.ENOSPC: "the sandbox has no room",
    errno.EDQUOT: "the sandbox has no room",
    errno.EAGAIN: "something else holds it or renames it",
    errno.ENXIO: "it is no regular file",
}


_OVERLAY, _ESCAPED = "user.overlay.", "user.overlay.overlay."
"""Beginning of attributes that the kernel gives a directory which is in the image too, and of such as somebody set."""


class FileError(Exception):
    """A file cannot be read or written; the reason is for the caller."""


class AsUser:
    """A context in which files are those of the sandbox's user."""

    def __init__(self) -> None:
        self._is_needed = os.getuid() == 0

    def __enter__(self) -> None:
        if self._is_needed:
            system.set_file_user(root.USER)

    def __exit__(self, *_: object) -> None:
        if self._is_needed:
            system.set_file_user(0)


def parts_of(path: str) -> list[str]:
    """The parts of a path from the container's root; one that does not start with '/' is below /workspace.

    Raises:
        FileError: it has '..' or a NUL, names nothing, is too long, or cannot be written as bytes.
    """
    try:
        os.fsencode(path)
    except UnicodeEncodeError:
        raise FileError(f"{path[:200]!a} is no path of a file: it holds half a character") from None
    whole = path if path.startswith("/") else f"/workspace/{path}"
    parts = [part for part in whole.split("/") if part not in ("", ".")]
    if not path or not parts or ".." in parts or "\0" in path or path.endswith("/") or len(path) > _MAX_PATH_BYTES:
        raise FileError(f"{path[:200]!r} is no path of a file: it may not be empty, end in '/', or hold '..'")
    return parts


def open_directory(start: int, parts: list[str], *, make: bool) -> int:
    """A descriptor of a directory below another, whatever its depth.

    Args:
        start: where the path starts; it stays open.
        parts: the path.
        make: whether what is missing is made.
    """
    here = os.dup(start)
    try:
        for begin in range(0, len(parts), _SLICE):
            some = parts[begin : begin + _SLICE]
            try:
                there = system.open_inside(here, "/".join(some), _PATH_ONLY)
            except FileNotFoundError:
                if not make:
                    raise
                there = _make_directories(here, some)
            os.close(here)
            here = there
    except BaseException:
        os.close(here)
        raise
    return here


def _make_directories(start: int, parts: list[str]) -> int:
    here = os.dup(start)
    try:
        for part in parts:
            with contextlib.suppress(FileExistsError):
                os.mkdir(part, 0o755, dir_fd=here)
            there = system.open_inside(here, part, _PATH_ONLY)
            os.close(here)
            here = there
    except BaseException:
        os.close(here)
        raise
    return here


def open_regular(path: str, flags: int, *, make: bool) -> int:
    """A descriptor of a regular file of the container.

    Raises:
        FileNotFoundError, NotADirectoryError: it is absent.
        FileError: it is no regular file, or its path is none.
        OSError: other reasons.
    """
    *parents, name = parts_of(path)
    top = os.open("/", _PATH_ONLY)
    try:
        directory = open_directory(top, parents, make=make)
    finally:
        os.close(top)
    try:
        mode = 0o644 if flags & os.O_CREAT else 0
        descriptor = system.open_inside(directory, name, flags | os.O_NONBLOCK | os.O_NOCTTY, mode)
    finally:
        os.close(directory)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise FileError(f"{path[:200]!r} is no regular file")
    return descriptor


def upload(request: dict[str, Any], data: bytes) -> None:
    """Write a part of a file at an offset; the first makes or empties it, and makes the directories above it.

    Raises:
        FileError: why not.
    """
    path = request["path"]
    try:
        with AsUser():
            descriptor = open_regular(path, os.O_WRONLY | os.O_CREAT, make=True)
            try:
                if request["offset"] == 0:
                    os.ftruncate(descriptor, 0)
                os.lseek(descriptor, request["offset"], os.SEEK_SET)
                system.write_all(descriptor, data)
            finally:
                os.close(descriptor)
    except OSError as error:
        raise FileError(_said(path, error)) from None


def download(request: dict[str, Any]) -> Iterator[tuple[dict[str, Any], bytes]]:
    """The parts of files, as ({"index"}, bytes) and in order; at least one for each file that is there.

    Raises:
        FileError: why not.
    """
    room = request["max_bytes"]
    for index, path in enumerate(request["paths"]):
        try:
            with AsUser():
                descriptor = open_regular(path, os.O_RDONLY, make=False)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            raise FileError(_said(path, error)) from None
        try:
            is_first = True
            while (data := os.read(descriptor, min(PART_BYTES, room + 1))) or is_first:
                is_first = False
                room -= len(data)
                if room < 0:
                    raise FileError(f"{path[:200]!r} makes it more than {request['max_bytes']} bytes")
                yield {"index": index}, data
        finally:
            os.close(descriptor)


def is_full(upper: int) -> bool:
    """Whether there is no room for another page, or another file."""
    room = os.fstatvfs(upper)
    return room.f_bavail < 1 or room.f_favail < 1


def first_change(upper: int, own: set[int]) -> str:
    """What differs from a fresh container, or nothing.

    Args:
        upper: the private layer.
        own: processes that are the agent's.
    """
    if pids := {int(name) for name in os.listdir("/proc") if name.isdecimal()} - own:
        return f"{len(pids)} processes beside the agent"
    if os.listdir("/dev/shm"):
        return "/dev/shm has files"
    return changed_file(upper)


def changed_file(upper: int) -> str:
    """What lies in the private layer that a fresh container has not, or nothing."""
    owners = {name: (mode, owner) for name, mode, owner in root.OWN}
    if sorted(os.listdir(upper)) != sorted(owners):
        return "/ has other files"
    for name, (mode, owner) in owners.items():
        descriptor = system.open_inside(upper, name, os.O_RDONLY | os.O_DIRECTORY)
        try:
            found = os.fstat(descriptor)
            if os.listdir(descriptor):
                return f"/{name} has files"
            names = os.listxattr(descriptor)
            is_marked = any(not name.startswith(_OVERLAY) or name.startswith(_ESCAPED) for name in names)
            if is_marked or stat.S_IMODE(found.st_mode) != mode:
                return f"/{name} has another mode, or attributes"
            if os.getuid() == 0 and found.st_uid != owner:
                return f"/{name} has another owner"
        finally:
            os.close(descriptor)
    return ""


def _said(path: str, error: OSError) -> str:
    return f"{path[:200]!r}: {_REASONS.get(error.errno or 0) or error.strerror}"
