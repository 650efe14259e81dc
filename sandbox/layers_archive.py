"""Layers out of tar archives, plain or compressed with gzip or zstd, whoever made them.

A stream is read once, forwards, and never believed: long headers, sizes and the number of members are bounded before
they are held, paths are checked and written without following a link (`layers_tree.py`). A name `.wh.NAME` hides NAME
of the layers below, and `.wh..wh..opq` all that they have in its directory, as in OCI images.

Refused: paths that are absolute, go up or pass a link; further names of what is not in the layer; devices, pipes,
sockets and sparse files. Left out: owners, setuid and setgid bits, extended attributes but overlay's opaque mark.
"""

import gzip
import hashlib
import os
import stat
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Final, Protocol

from rollforward.sandbox.errors import LayerError
from rollforward.sandbox.inside.files import PART_BYTES
from rollforward.sandbox.layers_tree import OPAQUE, Bounds, TreeWriter, parts_of, refused_kind

_MAX_HEADER_BYTES: Final = 1 << 20
"""Of a member's long name or extended header."""
_MAX_RECORDS: Final = 256
"""Of an extended header."""
_MAX_NUMBER_CHARS: Final = 64
_GZIP, _ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
_HIDES, _HIDES_ALL, _RESERVED = ".wh.", ".wh..wh..opq", ".wh..wh."
_OWN_HEADERS: Final = (tarfile.XHDTYPE, tarfile.SOLARIS_XHDTYPE)
_LONG_NAMES: Final = (tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK)
_HEADERS: Final = (*_OWN_HEADERS, *_LONG_NAMES, tarfile.XGLTYPE)
_REGULAR: Final = (tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.CONTTYPE)
_OPAQUE_HEADER: Final = f"SCHILY.xattr.{OPAQUE}"
_SPARSE: Final = "GNU.sparse."
_KEPT_RECORDS: Final = ("path", "linkpath", "size", "mtime", _OPAQUE_HEADER)
"""Of extended headers nothing else is held but that there was a record of a sparse file."""


class Readable(Protocol):
    """A stream of bytes."""

    def read(self, size: int, /) -> bytes:
        """So many bytes, or fewer; none at its end."""
        ...


class Hashed:
    """A stream whose bytes are counted and hashed as they are read.

    Raises:
        LayerError: there are more than it may have, or they cannot be had.
    """

    def __init__(self, source: Readable, algorithm: str, max_bytes: int) -> None:
        self._source, self._max_bytes = source, max_bytes
        self._state = hashlib.new(algorithm)
        self.total = 0

    def read(self, size: int, /) -> bytes:
        """See `Readable`."""
        try:
            data = self._source.read(size)
        except (OSError, EOFError, zlib.error, ValueError) as error:
            if isinstance(error, LayerError):
                raise
            raise LayerError(f"it is damaged or cannot be read: {error}") from None
        self._state.update(data)
        self.total += len(data)
        if self.total > self._max_bytes:
            raise LayerError(
                f"it has more than {self._max_bytes} bytes (sandbox.container.layers.max_bytes bounds what is"
                " unpacked). Raise that, or leave something out"
            )
        return data

    def drain(self) -> None:
        """Read to the end."""
        while self.read(PART_BYTES):
            pass

    def hexdigest(self) -> str:
        """Of what was read so far."""
        return self._state.hexdigest()


def open_archive(path: Path) -> IO[bytes]:
    """An archive's file.

    Raises:
        LayerError: it is no regular file, or cannot be read.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise LayerError(f"{path} cannot be read: {error.strerror}") from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise LayerError(f"{path} is no regular file")
    return open(descriptor, "rb")


def decompressed(file: IO[bytes], source: Readable | None = None) -> Readable:
    """The stream of an archive without its compression, which its first bytes tell.

    Args:
        file: at its start; can be wound back.
        source: what to read instead of it, from its start.
    """
    head = file.read(4)
    file.seek(0)
    raw: Any = file if source is None else source
    if head.startswith(_GZIP):
        return gzip.GzipFile(fileobj=raw, mode="rb")
    if head == _ZSTD:
        import pyarrow  # costs more than all else here

        return pyarrow.CompressedInputStream(pyarrow.PythonFile(_Seekless(raw), mode="r"), "zstd")
    return raw


class _Seekless:
    """What pyarrow asks of a file that it reads."""

    def __init__(self, source: Readable) -> None:
        self._source = source
        self.closed = False

    def read(self, size: int = -1) -> bytes:
        return self._source.read(size)

    def close(self) -> None:
        self.closed = True


def unpack(stream: Readable, writer: TreeWriter, bounds: Bounds) -> str:
    """Write the layer that an uncompressed archive holds.

    Returns:
        The SHA-256 of the whole stream, which is read to its end.

    Raises:
        LayerError: it is no archive, is cut short, or holds what a layer may not.
        OSError: the tree cannot be written.
    """
    counted = Hashed(stream, "sha256", bounds.max_bytes)
    try:
        for info, data in _members(counted, bounds):
            _write(writer, info, data)
        counted.drain()
    except LayerError:
        raise
    except (EOFError, tarfile.TarError, ValueError, OverflowError) as error:
        raise LayerError(f"it is no whole tar archive, plain or with gzip or zstd: {error}") from None
    writer.finish()
    return counted.hexdigest()


def _members(stream: Hashed, bounds: Bounds) -> Iterator[tuple[tarfile.TarInfo, Iterator[bytes]]]:
    """The members and their bytes. Bytes that nobody took are skipped. Headers that say more of a member are as many as
    there may be files."""
    shared: dict[str, str] = {}
    own: dict[str, str] = {}
    headers = 0
    while True:
        head = _exactly(stream, tarfile.BLOCKSIZE)
        if len(head) != tarfile.BLOCKSIZE:
            raise EOFError("it ends without its end mark")
        if not any(head):
            return
        info = tarfile.TarInfo.frombuf(head, "utf-8", "surrogateescape")
        headers += info.type in _HEADERS
        bounds.check(0, headers)
        if info.type in _OWN_HEADERS:
            own |= _records(_long(stream, info))
        elif info.type == tarfile.XGLTYPE:
            shared |= _records(_long(stream, info))
        elif info.type in _LONG_NAMES:
            key = "path" if info.type == tarfile.GNUTYPE_LONGNAME else "linkpath"
            own[key] = _long(stream, info).partition(b"\0")[0].decode("utf-8", "surrogateescape")
        else:
            _extend(info, shared | own)
            own = {}
            left = _Payload(stream, info)
            yield info, iter(left)
            left.skip()


class _Payload:
    """A member's bytes."""

    def __init__(self, stream: Hashed, info: tarfile.TarInfo) -> None:
        self._stream = stream
        self._left = info.size if info.type in _REGULAR else 0
        self._padding = -self._left % tarfile.BLOCKSIZE

    def __iter__(self) -> Iterator[bytes]:
        while self._left:
            data = self._stream.read(min(self._left, PART_BYTES))
            if not data:
                raise EOFError("it ends inside a member")
            self._left -= len(data)
            yield data

    def skip(self) -> None:
        for _ in self:
            pass
        if len(_exactly(self._stream, self._padding)) != self._padding:
            raise EOFError("it ends inside a member")


def _exactly(stream: Hashed, size: int) -> bytes:
    data = b""
    while len(data) < size and (part := stream.read(size - len(data))):
        data += part
    return data


def _long(stream: Hashed, info: tarfile.TarInfo) -> bytes:
    if not 0 <= info.size <= _MAX_HEADER_BYTES:
        raise LayerError(f"a member has a header of {info.size} bytes; one has at most {_MAX_HEADER_BYTES}")
    data = _exactly(stream, info.size + -info.size % tarfile.BLOCKSIZE)
    if len(data) < info.size:
        raise EOFError("it ends inside a header")
    return data[: info.size]


def _records(data: bytes) -> dict[str, str]:
    """Of a pax header, `LENGTH KEY=VALUE\\n` one after the other: those that are used."""
    found: dict[str, str] = {}
    start, end, total = 0, len(data.rstrip(b"\0")), 0
    while start < end:
        space = data.find(b" ", start, start + _MAX_NUMBER_CHARS)
        size = data[start : max(start, space)]
        stop = start + int(size) if size.isdigit() else 0
        if not space + 2 < stop <= end or data[stop - 1 : stop] != b"\n":
            raise ValueError("an extended header is malformed")
        key, equals, value = data[space + 1 : stop - 1].partition(b"=")
        if not equals:
            raise ValueError("an extended header is malformed")
        if (total := total + 1) > _MAX_RECORDS:
            raise LayerError(f"a member has an extended header of more than {_MAX_RECORDS} records")
        name = key.decode("utf-8", "surrogateescape")
        if name in _KEPT_RECORDS:
            found[name] = value.decode("utf-8", "surrogateescape")
        elif name.startswith(_SPARSE):
            found[_SPARSE] = ""
        start = stop
    return found


def _extend(info: tarfile.TarInfo, records: dict[str, str]) -> None:
    info.name = records.get("path", info.name)
    info.linkname = records.get("linkpath", info.linkname)
    info.size = int(_number(records, "size", info.size))
    info.mtime = float(_number(records, "mtime", info.mtime))
    info.pax_headers = records
    if info.size < 0:
        raise ValueError(f"member {info.name[:200]!r} has {info.size} bytes")
    if info.type == tarfile.GNUTYPE_SPARSE or _SPARSE in records:
        raise LayerError(f"{info.name[:200]!r} is a sparse file. Make the archive without (tar without --sparse)")


def _number(records: dict[str, str], name: str, otherwise: float) -> str | float:
    value = records.get(name, otherwise)
    if isinstance(value, str) and len(value) > _MAX_NUMBER_CHARS:
        raise ValueError(f"a member has a {name} of {len(value)} characters")
    return value


def _write(writer: TreeWriter, info: tarfile.TarInfo, data: Iterator[bytes]) -> None:
    parts = parts_of(info.name)
    mtime = max(0, min(int(info.mtime), 1 << 33))
    name = parts[-1] if parts else ""
    if name == _HIDES_ALL:
        writer.opaque(parts[:-1])
    elif name.startswith(_RESERVED):
        pass  # AUFS kept its own records under such names; OCI reserves them
    elif name.startswith(_HIDES):
        if (hidden := name.removeprefix(_HIDES)) in ("", ".", ".."):
            raise LayerError(f"{info.name[:200]!r} hides no name")
        writer.whiteout([*parts[:-1], hidden])
    elif info.isdir():
        writer.directory(parts, info.mode, mtime, is_opaque=info.pax_headers.get(_OPAQUE_HEADER) == "y")
    elif not parts:
        raise LayerError("its root is no directory")
    elif info.type in _REGULAR:
        writer.file(parts, info.mode, mtime, data)
    elif info.islnk():
        writer.copy(parts, parts_of(info.linkname))
    elif info.issym():
        writer.link(parts, info.linkname, mtime)
    elif info.ischr() and (info.devmajor, info.devminor) == (0, 0):
        writer.whiteout(parts)
    else:
        raise refused_kind(info.name)
