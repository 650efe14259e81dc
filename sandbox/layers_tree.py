"""A layer's tree on disk: written without ever following a link, walked in one order, told apart by its digest.

A tree holds directories, regular files and symbolic links; what it hides of the layers below is a character device 0:0
(a removed name) or the attribute `user.overlay.opaque` of a directory, as overlay has them. Its canonical form, of
which the digest is made, is the sorted list of paths with kind, permission bits, content and target; times and owners
do not count, two names of one file are two files. Nothing in a tree is setuid or setgid, its owner can read all of it,
and no path has more than MAX_PATH_BYTES.

Not here: where layers come from (`layers_archive.py`, `layers_oci.py`), where trees lie (`layers.py`).
"""

import contextlib
import hashlib
import os
import stat
from collections.abc import Generator, Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Final, NamedTuple, Self

from rollforward.sandbox.errors import LayerError
from rollforward.sandbox.inside import system
from rollforward.sandbox.inside.files import PART_BYTES, open_directory

MAX_PATH_BYTES: Final = 4000
"""A path is shorter than the kernel takes in one call."""
_MAX_NAME_BYTES: Final = 255
OPAQUE: Final = "user.overlay.opaque"
"""Attribute of a directory that hides all below it."""

_WHITEOUT: Final = os.makedev(0, 0)
_KEPT_BITS: Final = 0o1777
_FORM: Final = b"rollforward layer 1"
_DIGEST_BYTES: Final = 32
_MADE_MODE: Final = 0o755
_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY


class Bounds(NamedTuple):
    """What one layer may have."""

    max_bytes: int
    """Of its files, and of its archive unpacked."""
    max_files: int
    """Directories, files and links."""

    def check(self, total_bytes: int, total_files: int) -> None:
        """Refuse what has more.

        Raises:
            LayerError: it has.
        """
        if total_bytes > self.max_bytes:
            raise LayerError(
                f"it has more than {self.max_bytes} bytes (sandbox.container.layers.max_bytes). Raise that, or leave"
                " something out"
            )
        if total_files > self.max_files:
            raise LayerError(
                f"it has more than {self.max_files} files (sandbox.container.layers.max_files). Raise that, or leave"
                " something out"
            )


class Entry(NamedTuple):
    """Something in a tree."""

    path: str
    """From the tree's root, without a slash at either end."""
    status: os.stat_result
    """Of itself, no link followed."""

    @property
    def is_whiteout(self) -> bool:
        """Whether it hides a name of the layers below."""
        return stat.S_ISCHR(self.status.st_mode) and self.status.st_rdev == _WHITEOUT


class TreeWriter:
    """Fills an empty directory with a layer; a context manager. Paths are parts, from `parts_of`.

    A later entry takes the place of an earlier one of the same path, but no directory is replaced.
    """

    def __init__(self, directory: Path, bounds: Bounds) -> None:
        """Open an empty directory."""
        self._root = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        self._bounds = bounds
        self._directories: dict[str, tuple[int, int]] = {}
        self._bytes = self._files = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._root)

    def directory(self, parts: list[str], mode: int, mtime: int, *, is_opaque: bool = False) -> None:
        """Make a directory, or give the one that there is these bits."""
        if parts:
            with self._place(parts) as (parent, name):
                found = _status(parent, name)
                if found is not None and not stat.S_ISDIR(found.st_mode):
                    is_opaque = is_opaque or _is_whiteout(found)
                    os.unlink(name, dir_fd=parent)
                if found is None or not stat.S_ISDIR(found.st_mode):
                    os.mkdir(name, 0o700, dir_fd=parent)
        self._directories["/".join(parts)] = (mode, mtime)
        if is_opaque:
            self.opaque(parts)

    def opaque(self, parts: list[str]) -> None:
        """Have a directory hide all that the layers below have in it; it is made if need be."""
        if not parts:
            raise LayerError("it hides all that lies below it. Leave the layers below it out of the image")
        if "/".join(parts) not in self._directories:
            self.directory(parts, _MADE_MODE, 0)
        descriptor = self._open(parts)
        try:
            os.setxattr(descriptor, OPAQUE, b"y")
        finally:
            os.close(descriptor)

    def file(self, parts: list[str], mode: int, mtime: int, data: Iterable[bytes]) -> None:
        """Write a regular file."""
        with self._place(parts) as (parent, name):
            self._clear(parent, name, parts)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            descriptor = os.open(name, flags, 0o600, dir_fd=parent)
            try:
                for part in data:
                    self._count(len(part), 0)
                    system.write_all(descriptor, part)
                os.fchmod(descriptor, mode & _KEPT_BITS | stat.S_IRUSR)
                os.utime(descriptor, (mtime, mtime))
            finally:
                os.close(descriptor)

    def copy(self, parts: list[str], source: list[str]) -> None:
        """Write a regular file with the bytes and bits of another one of this tree: a further name of it.

        Raises:
            LayerError: there is none.
        """
        try:
            descriptor = system.open_inside(self._root, "/".join(source), os.O_RDONLY | os.O_NONBLOCK)
        except OSError as error:
            raise LayerError(
                f"{_shown(parts)} is a further name of {_shown(source)}, which cannot be had: {error.strerror}"
            ) from None
        try:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode):
                raise LayerError(f"{_shown(parts)} is a further name of {_shown(source)}, which is no regular file")
            if parts != source:
                self.file(parts, found.st_mode, int(found.st_mtime), read_parts(descriptor))
        finally:
            os.close(descriptor)

    def link(self, parts: list[str], target: str, mtime: int) -> None:
        """Make a symbolic link. Whatever it says, nothing here follows it."""
        if not 0 < len(os.fsencode(target)) <= MAX_PATH_BYTES or "\0" in target:
            raise LayerError(f"{_shown(parts)} is a link to no path or to one that is too long")
        with self._place(parts) as (parent, name):
            self._clear(parent, name, parts)
            os.symlink(target, name, dir_fd=parent)
            os.utime(name, (mtime, mtime), dir_fd=parent, follow_symlinks=False)

    def whiteout(self, parts: list[str]) -> None:
        """Hide a name of the layers below. What this layer has under it stays."""
        with self._place(parts) as (parent, name):
            found = _status(parent, name)
            if found is None:
                os.mknod(name, stat.S_IFCHR, _WHITEOUT, dir_fd=parent)
                os.utime(name, (0, 0), dir_fd=parent, follow_symlinks=False)
        if found is not None and stat.S_ISDIR(found.st_mode):
            self.opaque(parts)

    def finish(self) -> None:
        """Give directories their bits and times, and write all that is in memory to the disk. Nothing comes after."""
        self._directories[""] = _MADE_MODE, 0  # of an image the private layer's counts
        for path, (mode, mtime) in sorted(self._directories.items(), reverse=True):
            descriptor = self._open(path.split("/") if path else [])
            try:
                os.fchmod(descriptor, mode & _KEPT_BITS | stat.S_IRWXU)
                os.utime(descriptor, (mtime, mtime))
            finally:
                os.close(descriptor)
        descriptor = self._open([])
        try:
            system.sync_file_system(descriptor)
        finally:
            os.close(descriptor)

    @contextlib.contextmanager
    def _place(self, parts: list[str]) -> Generator[tuple[int, str]]:
        """The directory that an entry is in, made if need be, and its name."""
        self._count(0, 1)
        for number in range(len(parts) - 1, 0, -1):
            above = "/".join(parts[:number])
            if above in self._directories:
                break
            self._count(0, 1)
            self._directories[above] = (_MADE_MODE, 0)
        try:
            parent = open_directory(self._root, parts[:-1], make=True)
        except OSError as error:
            raise LayerError(f"{_shown(parts)} lies in what is no directory of the layer: {error.strerror}") from None
        try:
            yield parent, parts[-1]
        finally:
            os.close(parent)

    def _clear(self, parent: int, name: str, parts: list[str]) -> None:
        found = _status(parent, name)
        if found is None:
            return
        if stat.S_ISDIR(found.st_mode):
            raise LayerError(f"{_shown(parts)} is a directory and something else as well")
        os.unlink(name, dir_fd=parent)

    def _open(self, parts: list[str]) -> int:
        return system.open_inside(self._root, "/".join(parts) or ".", _DIRECTORY)

    def _count(self, more_bytes: int, more_files: int) -> None:
        self._bytes += more_bytes
        self._files += more_files
        self._bounds.check(self._bytes, self._files)


def parts_of(path: str) -> list[str]:
    """The parts of a path within a layer; none for its root.

    Raises:
        LayerError: it is absolute, goes up, or is none.
    """
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if path.startswith("/") or ".." in parts or "\0" in path:
        raise LayerError(f"{path[:200]!r} leaves the layer: a path in it is relative and has no `..`")
    if len(os.fsencode(path)) > MAX_PATH_BYTES or any(len(os.fsencode(part)) > _MAX_NAME_BYTES for part in parts):
        raise LayerError(
            f"{path[:80]!r}... is longer than the {MAX_PATH_BYTES} bytes that a path, or the {_MAX_NAME_BYTES} that a"
            " name may have"
        )
    return parts


def walk(root: int) -> Iterator[Entry]:
    """All that is in a tree but its root, a directory before what is in it, names in the order of their bytes.

    Raises:
        LayerError: a path is too long, or something else is mounted in the tree.
        OSError: something cannot be read.
    """
    waiting = [""]
    while waiting:
        path = waiting.pop()
        try:
            descriptor = system.open_inside(root, path or ".", _DIRECTORY)
        except OSError as error:
            raise LayerError(f"{path or 'its root'} cannot be read: {error.strerror}") from None
        try:
            below: list[str] = []
            for name in sorted(os.listdir(descriptor), key=os.fsencode):
                inner = f"{path}/{name}" if path else name
                if len(os.fsencode(inner)) > MAX_PATH_BYTES:
                    raise LayerError(
                        f"{inner[:80]!r}... is longer than the {MAX_PATH_BYTES} bytes that a path may have"
                    )
                entry = Entry(inner, os.stat(name, dir_fd=descriptor, follow_symlinks=False))
                yield entry
                if stat.S_ISDIR(entry.status.st_mode):
                    below.append(inner)
        finally:
            os.close(descriptor)
        waiting += reversed(below)


def write_copy(source: Path, writer: TreeWriter) -> None:
    """Copy a directory of this machine into a layer.

    Raises:
        LayerError: it holds something that a layer may not.
        OSError: something cannot be read.
    """
    root = os.open(source, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for entry in walk(root):
            status, parts = entry.status, entry.path.split("/")
            mode, mtime = stat.S_IMODE(status.st_mode), int(status.st_mtime)
            if stat.S_ISDIR(mode_of := status.st_mode):
                writer.directory(parts, mode, mtime, is_opaque=_is_opaque(root, entry.path))
            elif stat.S_ISREG(mode_of):
                try:
                    descriptor = system.open_inside(root, entry.path, os.O_RDONLY | os.O_NONBLOCK)
                except OSError as error:
                    raise LayerError(f"{entry.path} cannot be read: {error.strerror}") from None
                try:
                    writer.file(parts, mode, mtime, read_parts(descriptor))
                finally:
                    os.close(descriptor)
            elif stat.S_ISLNK(mode_of):
                parent = open_directory(root, parts[:-1], make=False)
                try:
                    target = os.readlink(parts[-1], dir_fd=parent)
                finally:
                    os.close(parent)
                writer.link(parts, target, mtime)
            elif entry.is_whiteout:
                writer.whiteout(parts)
            else:
                raise refused_kind(entry.path)
    finally:
        os.close(root)
    writer.finish()


def tree_digest(directory: Path) -> tuple[str, int, int]:
    """The digest of a tree's canonical form, 64 hexadecimal digits; the bytes of its files; how much there is in it.

    Raises:
        LayerError: it holds something that a layer may not.
        OSError: something cannot be read.
    """
    state = hashlib.blake2b(_FORM, digest_size=_DIGEST_BYTES)
    total_bytes = total_files = 0
    root = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for entry in walk(root):
            total_files += 1
            path, mode = os.fsencode(entry.path), entry.status.st_mode
            bits = b"%o" % (stat.S_IMODE(mode) & _KEPT_BITS)
            if stat.S_ISDIR(mode):
                _take(state, b"d", path, bits, b"opaque" if _is_opaque(root, entry.path) else b"")
            elif stat.S_ISREG(mode):
                descriptor = system.open_inside(root, entry.path, os.O_RDONLY)
                try:
                    content = hashlib.blake2b(digest_size=_DIGEST_BYTES)
                    for part in read_parts(descriptor):
                        content.update(part)
                        total_bytes += len(part)
                finally:
                    os.close(descriptor)
                _take(state, b"f", path, bits, content.digest())
            elif stat.S_ISLNK(mode):
                parent = open_directory(root, entry.path.split("/")[:-1], make=False)
                try:
                    _take(state, b"l", path, os.fsencode(os.readlink(entry.path.rpartition("/")[2], dir_fd=parent)))
                finally:
                    os.close(parent)
            elif entry.is_whiteout:
                _take(state, b"w", path)
            else:
                raise refused_kind(entry.path)
    finally:
        os.close(root)
    return state.hexdigest(), total_bytes, total_files


def remove_tree(directory: Path) -> None:
    """Remove a tree, however deep; what is not there is no error."""
    try:
        root = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return
    try:
        directories: list[str] = []
        for entry in walk(root):
            if stat.S_ISDIR(entry.status.st_mode):
                directories.append(entry.path)
            else:
                os.unlink(entry.path, dir_fd=root)
        for path in reversed(directories):
            os.rmdir(path, dir_fd=root)
    finally:
        os.close(root)
    directory.rmdir()


def refused_kind(path: str) -> LayerError:
    """The error of what is a device, a pipe, a socket or unknown."""
    return LayerError(
        f"{path[:200]!r} is no directory, regular file or link: a layer has no devices, pipes and sockets. Leave it out"
        " (tar --exclude); sandboxes have a /dev of their own"
    )


def read_parts(descriptor: int) -> Iterator[bytes]:
    """The bytes of an open file, in parts."""
    while part := os.read(descriptor, PART_BYTES):
        yield part


def _take(state: hashlib.blake2b, *fields: bytes) -> None:
    for field in fields:
        state.update(len(field).to_bytes(8, "little"))
        state.update(field)


def _status(parent: int, name: str) -> os.stat_result | None:
    try:
        return os.stat(name, dir_fd=parent, follow_symlinks=False)
    except FileNotFoundError:
        return None


def _is_whiteout(status: os.stat_result) -> bool:
    return Entry("", status).is_whiteout


def _is_opaque(root: int, path: str) -> bool:
    descriptor = system.open_inside(root, path, _DIRECTORY)
    try:
        return os.getxattr(descriptor, OPAQUE) == b"y"
    except OSError:
        return False
    finally:
        os.close(descriptor)


def _shown(parts: list[str]) -> str:
    return repr("/".join(parts)[:200])
