"""A container's private layer as an uncompressed tar, and back.

It holds directories, regular files and links; what the layer hides of those below is a character device 0:0 (a removed
name) or an attribute of a directory (`_OPAQUE`), as in the layer itself. Sockets and pipes are left out. Owners are not
kept: all is the sandbox's user's. Two names of one file become two files.
"""

import os
import stat
import tarfile
from collections.abc import Iterator
from typing import IO, Final

from rollforward.sandbox.inside import root, system
from rollforward.sandbox.inside.files import PART_BYTES, FileError, open_directory

_OPAQUE: Final = "user.overlay.opaque"
_OPAQUE_HEADER: Final = f"SCHILY.xattr.{_OPAQUE}"
_WHITEOUT: Final = os.makedev(0, 0)
_MAX_TIMED_CHARS: Final = 4096
"""Directories with longer paths get the time of their making."""
_KEPT_BITS: Final = 0o1777


def take(upper: int, max_bytes: int) -> Iterator[bytes]:
    """The parts of the tar. It is exact where nothing runs meanwhile; else each file is as it was when it was read.

    Raises:
        FileError: it has more than `max_bytes`.
    """
    total = 0
    for data in _parts(upper):
        total += len(data)
        if total > max_bytes:
            raise FileError(f"the snapshot has more than {max_bytes} bytes")
        yield data


def _parts(upper: int) -> Iterator[bytes]:
    waiting: list[list[str]] = [[]]
    while waiting:
        above = waiting.pop()
        try:
            path = open_directory(upper, above, make=False)
            try:
                directory = system.open_inside(path, ".", os.O_RDONLY | os.O_DIRECTORY)
            finally:
                os.close(path)
        except OSError:
            continue  # it was there a moment ago
        try:
            for name in sorted(os.listdir(directory)):
                kind = yield from _entry(directory, above, name)
                if kind == tarfile.DIRTYPE:
                    waiting.append([*above, name])
        finally:
            os.close(directory)
    yield bytes(2 * tarfile.BLOCKSIZE)


def _entry(directory: int, above: list[str], name: str) -> Iterator[bytes]:
    """The parts of one member; returns its kind."""
    try:
        found = os.stat(name, dir_fd=directory, follow_symlinks=False)
        info = tarfile.TarInfo("/".join([*above, name]))
        info.mode, info.mtime = stat.S_IMODE(found.st_mode) & _KEPT_BITS, int(found.st_mtime)
        info.uid = info.gid = root.USER
        if stat.S_ISREG(found.st_mode):
            yield from _regular(directory, name, info)
        elif stat.S_ISDIR(found.st_mode):
            info.type = tarfile.DIRTYPE
            if _is_opaque(directory, name):
                info.pax_headers = {_OPAQUE_HEADER: "y"}
            yield _header(info)
        elif stat.S_ISLNK(found.st_mode):
            info.type, info.linkname = tarfile.SYMTYPE, os.readlink(name, dir_fd=directory)
            yield _header(info)
        elif stat.S_ISCHR(found.st_mode) and found.st_rdev == _WHITEOUT:
            info.type = tarfile.CHRTYPE
            yield _header(info)
        else:
            return None
    except FileNotFoundError:
        return None
    return info.type


def _regular(directory: int, name: str, info: tarfile.TarInfo) -> Iterator[bytes]:
    descriptor = system.open_inside(directory, name, os.O_RDONLY | os.O_NONBLOCK)
    try:
        info.size = os.fstat(descriptor).st_size
        yield _header(info)
        left = info.size
        while left:
            # It may be cut meanwhile: the header has said how long it is.
            data = os.read(descriptor, min(left, PART_BYTES)) or bytes(min(left, PART_BYTES))
            left -= len(data)
            yield data
        yield bytes(-info.size % tarfile.BLOCKSIZE)
    finally:
        os.close(descriptor)


def _is_opaque(directory: int, name: str) -> bool:
    descriptor = system.open_inside(directory, name, os.O_RDONLY | os.O_DIRECTORY)
    try:
        return os.getxattr(descriptor, _OPAQUE) == b"y"
    except OSError:
        return False
    finally:
        os.close(descriptor)


def _header(info: tarfile.TarInfo) -> bytes:
    return info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")


def restore(upper: int, snapshot: IO[bytes]) -> None:
    """Unpack a snapshot into the private layer, before it is in use.

    Raises:
        FileError: it is none, holds something else than a snapshot may, or does not fit.
    """
    times: list[tuple[list[str], int]] = []
    try:
        with tarfile.open(fileobj=snapshot, mode="r:", encoding="utf-8", errors="surrogateescape") as tar:
            while (member := tar.next()) is not None:
                vars(tar)["members"].clear()  # or all of them would be held
                parts = _checked(member)
                _unpack(upper, tar, member, parts)
                if member.isdir() and len(member.name) < _MAX_TIMED_CHARS:
                    times.append((parts, int(member.mtime)))
        for parts, mtime in reversed(times):
            above = open_directory(upper, parts[:-1], make=False)
            try:
                os.utime(parts[-1], (mtime, mtime), dir_fd=above, follow_symlinks=False)
            finally:
                os.close(above)
    except (tarfile.TarError, ValueError, OverflowError, EOFError, RecursionError) as error:
        raise FileError(f"it is no snapshot: {error}") from None
    except OSError as error:
        raise FileError(f"it does not fit in here: {error.strerror}") from None


def _checked(member: tarfile.TarInfo) -> list[str]:
    parts = [part for part in member.name.split("/") if part != "."]
    if not parts or "" in parts or ".." in parts or "\0" in member.name:
        raise FileError(f"member {member.name[:200]!r} leaves the sandbox")
    is_whiteout = member.ischr() and member.devmajor == 0 and member.devminor == 0
    is_plain = member.type in (tarfile.REGTYPE, tarfile.AREGTYPE) and member.sparse is None
    if not (is_plain or member.isdir() or member.issym() or is_whiteout):
        raise FileError(f"member {member.name[:200]!r} is no directory, regular file, link or removed name")
    return parts


def _unpack(upper: int, tar: tarfile.TarFile, member: tarfile.TarInfo, parts: list[str]) -> None:
    *parents, name = parts
    mode = member.mode & _KEPT_BITS
    directory = open_directory(upper, parents, make=True)
    try:
        if member.isdir():
            try:
                os.mkdir(name, dir_fd=directory)
                _own(directory, name)
            except FileExistsError:
                pass
            opened = system.open_inside(directory, name, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fchmod(opened, mode)
                if member.pax_headers.get(_OPAQUE_HEADER) == "y":
                    os.setxattr(opened, _OPAQUE, b"y")
            finally:
                os.close(opened)
        elif member.issym():
            os.symlink(member.linkname, name, dir_fd=directory)
            _own(directory, name)
        elif member.ischr():
            os.mknod(name, stat.S_IFCHR, _WHITEOUT, dir_fd=directory)
        else:
            _write(directory, name, tar, member, mode)
        if not member.isdir():
            os.utime(name, (member.mtime, member.mtime), dir_fd=directory, follow_symlinks=False)
    finally:
        os.close(directory)


def _write(directory: int, name: str, tar: tarfile.TarFile, member: tarfile.TarInfo, mode: int) -> None:
    descriptor = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600, dir_fd=directory)
    try:
        source = tar.extractfile(member)
        left = member.size
        while left and source is not None:
            data = source.read(min(left, PART_BYTES))
            if not data:
                raise EOFError(f"member {member.name[:200]!r} ends early")
            system.write_all(descriptor, data)
            left -= len(data)
        os.fchmod(descriptor, mode)
    finally:
        os.close(descriptor)
    _own(directory, name)


def _own(directory: int, name: str) -> None:
    if os.getuid() == 0:
        os.chown(name, root.USER, root.USER, dir_fd=directory, follow_symlinks=False)
