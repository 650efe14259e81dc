"""The store of layers: what images are stacked of, each once by its digest, shared by all processes of a machine.

    ~/.cache/rollforward/layers/
      trees/9f86d0...          a layer, never changed again (layers_tree.py)
      files/9f86d0....ext4     the same as the image of a disk, where somebody asked for it (layers_files.py)
      sources/3b1c...json      which layer a directory or an archive was when it was read last
      locks/9f86d0...          held shared by whoever uses the layer, alone by whoever removes it
      making/4e07...           what is being made; where its lock is free its maker was killed, and it goes

    a source --same as last time--> its layer
             --new or changed-----> making/ --whole and on the device--> renamed into trees/ --> sources/

A layer has its name when it is whole, so whoever is killed at any point leaves a store that is used as before. Two who
want the same wait for each other or, at worst, make it twice. Not here: images (`images.py`).
"""

import contextlib
import fcntl
import hashlib
import os
import re
import secrets
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Final, Self

import msgspec

from rollforward.sandbox.config import LayersConfig
from rollforward.sandbox.errors import LayerError, SandboxUnavailableError
from rollforward.sandbox.files import read_regular, sync_directory
from rollforward.sandbox.layers_archive import decompressed, open_archive, unpack
from rollforward.sandbox.layers_files import FileKind, write_file
from rollforward.sandbox.layers_oci import MARK, oci_layers, unpack_oci
from rollforward.sandbox.layers_tree import Bounds, TreeWriter, remove_tree, tree_digest, walk, write_copy
from rollforward.sandbox.refusals import way_out

STORED: Final = "layer:"
"""Begins a source that names a layer of the store by its digest."""

_DIGEST: Final = re.compile(r"[0-9a-f]{64}")
_PLACES: Final = ("trees", "files", "sources", "locks", "making")
_MAX_RECORD_BYTES: Final = 1 << 16


class Layer(msgspec.Struct, frozen=True, kw_only=True):
    """A layer that is there, and stays as long as the store that it was got from is held."""

    digest: str
    """64 hexadecimal digits, of its canonical form."""
    directory: Path
    """Its tree, which nobody may change."""


class LayerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A layer of the store, for people."""

    digest: str
    """Names it."""
    source: str
    """What it was made of last; empty where that is not known."""
    bytes: int
    """Of its files."""
    files: int
    """Directories, files and links."""
    used_unix_s: float
    """When it was used last."""
    is_held: bool
    """Whether a process uses it now."""
    file_bytes: int
    """What its image files take on disk."""


class _Source(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a source."""

    source: str
    stamp: str
    digest: str
    bytes: int
    files: int


class LayerStore:
    """A process's hold of the store; layers that it was asked for stay until `close` or the end of the process.

    Any thread, one call at a time. Calls wait for the disk, and for others who make the same layer.
    """

    def __init__(self, config: LayersConfig) -> None:
        """Bind to a directory, which need not exist."""
        self.directory = Path(config.dir).expanduser()
        self._bounds = Bounds(config.max_bytes, config.max_files)
        self._held: dict[str, int] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of all layers. Idempotent."""
        for descriptor in self._held.values():
            os.close(descriptor)
        self._held.clear()

    def layers(self, source: str) -> list[Layer]:
        """The layers that a source is, the lowest first, made where they are not there.

        Args:
            source: a directory, a tar archive, an OCI layout, or `layer:DIGEST`.

        Raises:
            LayerError: it is none of these, is damaged, or holds what a layer may not.
            SandboxUnavailableError: the store cannot be written.
        """
        try:
            if source.startswith(STORED):
                return [self._stored(source.removeprefix(STORED))]
            self._prepare()
            path, _, name = source.partition("#") if "#" in source and not Path(source).exists() else (source, "", "")
            place = Path(path).expanduser()
            if (place / MARK).is_file():
                return self._oci(place, name, source)
            if name:
                raise LayerError(f"{path} is no OCI layout: it has no file {MARK!r}, and only a layout has names")
            if place.is_dir():
                return [
                    self._made(source, str(place.resolve()), _stamp_of(place), lambda into: write_copy(place, into))
                ]
            if not place.exists():
                raise LayerError(f"{path} is no directory, tar archive or OCI layout: it is not there")
            return [self._archive(place, source)]
        except LayerError as error:
            raise LayerError(f"layer {source}: {error}") from None
        except OSError as error:
            raise SandboxUnavailableError(
                f"layer {source}: the store {self.directory} (sandbox.container.layers.dir) cannot be written"
                f" ({error.strerror or error}). {way_out(error)}"
            ) from None

    def layer_file(self, layer: Layer, kind: FileKind = "ext4") -> Path:
        """A layer as the image of a file system: never changed, to be attached or mounted read-only. Made once.

        Raises:
            SandboxUnavailableError: the program that makes it is missing or fails, or there is no room.
        """
        path = self.directory / "files" / f"{layer.digest}.{kind}"
        if path.exists():
            return path
        with self._locked(f"file-{layer.digest}.{kind}"), self._making() as making:
            if not path.exists():
                write_file(layer.directory, making / "image", kind)
                os.rename(making / "image", path)
                sync_directory(path.parent)
        return path

    def infos(self) -> list[LayerInfo]:
        """What there is, the most recently used first."""
        known = {record.digest: record for record in self._records()}
        found: list[LayerInfo] = []
        for path in _entries(self.directory / "trees"):
            record, lock = known.get(path.name), self.directory / "locks" / path.name
            files = [file for file in _entries(self.directory / "files") if file.name.startswith(f"{path.name}.")]
            with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                found.append(
                    LayerInfo(
                        digest=path.name,
                        source="" if record is None else record.source,
                        bytes=0 if record is None else record.bytes,
                        files=0 if record is None else record.files,
                        used_unix_s=lock.stat().st_mtime,
                        is_held=not _is_free(lock),
                        file_bytes=sum(file.stat().st_blocks * 512 for file in files),
                    )
                )
        return sorted(found, key=lambda info: (-info.used_unix_s, info.digest))

    def collect(self, *, unused_s: float) -> list[LayerInfo]:
        """Remove layers that nobody holds and nobody has used for so long, and what killed makers left.

        Returns:
            What was removed.
        """
        removed: list[LayerInfo] = []
        if not self.directory.is_dir():
            return removed
        self._prepare()
        for info in self.infos():
            if time.time() - info.used_unix_s < unused_s:
                continue
            lock = _lock(self.directory / "locks" / info.digest, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if lock is None:
                continue
            try:
                for file in _entries(self.directory / "files"):
                    if file.name.startswith(f"{info.digest}."):
                        file.unlink(missing_ok=True)
                with self._making() as making:
                    # Renamed first: a layer is there whole or not at all.
                    os.rename(self.directory / "trees" / info.digest, making / "tree")
                (self.directory / "locks" / info.digest).unlink(missing_ok=True)
            finally:
                os.close(lock)
            removed.append(info)
        there = {path.name for path in _entries(self.directory / "trees")}
        for path in _entries(self.directory / "sources"):
            record = _read_record(path)
            if record is None or record.digest not in there:
                path.unlink(missing_ok=True)
        return removed

    def _prepare(self) -> None:
        for name in _PLACES:
            (self.directory / name).mkdir(parents=True, exist_ok=True)
        self.directory.chmod(0o700)
        for path in _entries(self.directory / "making"):
            if (lock := _lock_directory(path)) is not None:
                remove_tree(path)
                os.close(lock)

    def _stored(self, digest: str) -> Layer:
        if _DIGEST.fullmatch(digest) is None:
            raise LayerError(f"{digest[:100]!r} is no digest; `rollforward sandbox layers list` names those there are")
        layer = self._hold(digest)
        if layer is None:
            raise LayerError("it is not in the store. Name the directory or archive that it is made of")
        return layer

    def _archive(self, path: Path, source: str) -> Layer:
        def fill(writer: TreeWriter) -> None:
            with open_archive(path) as file:
                unpack(decompressed(file), writer, self._bounds)

        status = path.stat()
        stamp = f"{status.st_dev} {status.st_ino} {status.st_size} {status.st_mtime_ns} {status.st_ctime_ns}"
        return self._made(source, str(path.resolve()), stamp, fill)

    def _oci(self, layout: Path, name: str, source: str) -> list[Layer]:
        # A blob is named by its content, so whose layout it is does not matter.
        return [
            self._made(source, layer.digest, layer.diff_id, lambda into, it=layer: unpack_oci(it, into, self._bounds))
            for layer in oci_layers(layout, name)
        ]

    def _made(self, source: str, identity: str, stamp: str, fill: Callable[[TreeWriter], None]) -> Layer:
        """The layer of a source, which is read where it is not as it was."""
        key = hashlib.blake2b(identity.encode("utf-8", "surrogateescape"), digest_size=16).hexdigest()
        record_path = self.directory / "sources" / f"{key}.json"
        with self._locked(f"source-{key}"):
            known = _read_record(record_path)
            if known is not None and known.stamp == stamp and (layer := self._hold(known.digest)) is not None:
                return layer
            with self._making() as making:
                tree = making / "tree"
                tree.mkdir(mode=0o755)
                tree.chmod(0o755)
                with TreeWriter(tree, self._bounds) as writer:
                    fill(writer)
                digest, total_bytes, total_files = tree_digest(tree)
                layer = self._hold(digest, tree)
                assert layer is not None, "it was just put there"
                record = _Source(source=source, stamp=stamp, digest=digest, bytes=total_bytes, files=total_files)
                (making / "record").write_bytes(msgspec.json.encode(record))
                os.replace(making / "record", record_path)
            return layer

    def _hold(self, digest: str, tree: Path | None = None) -> Layer | None:
        """The layer of that digest, held from now on; where there is none it becomes the tree, if there is that."""
        directory = self.directory / "trees" / digest
        if digest not in self._held:
            if tree is None and not directory.is_dir():
                return None
            descriptor = _lock(self.directory / "locks" / digest, fcntl.LOCK_SH)
            assert descriptor is not None, "it was waited for"
            if tree is not None and not directory.is_dir():
                try:
                    os.rename(tree, directory)
                except OSError:
                    if not directory.is_dir():  # else somebody else has made the same
                        os.close(descriptor)
                        raise
                sync_directory(directory.parent)
            if not directory.is_dir():
                os.close(descriptor)
                return None
            self._held[digest] = descriptor
        os.utime(self.directory / "locks" / digest)
        return Layer(digest=digest, directory=directory)

    @contextlib.contextmanager
    def _locked(self, name: str) -> Generator[None]:
        """While it is open, nobody else is in it under this name."""
        descriptor = _lock(self.directory / "locks" / name, fcntl.LOCK_EX)
        assert descriptor is not None, "it was waited for"
        try:
            yield
        finally:
            os.close(descriptor)

    @contextlib.contextmanager
    def _making(self) -> Generator[Path]:
        """A directory that is gone afterwards; where this process is killed the next one removes it."""
        while True:
            path = self.directory / "making" / secrets.token_hex(8)
            path.mkdir(mode=0o700)
            if (lock := _lock_directory(path)) is not None:
                break
        try:
            yield path
        finally:
            remove_tree(path)
            os.close(lock)

    def _records(self) -> Iterator[_Source]:
        for path in _entries(self.directory / "sources"):
            if (record := _read_record(path)) is not None:
                yield record


def _lock(path: Path, how: int) -> int | None:
    """A descriptor that holds a lock, whose file is made if need be; None where another process does and it is not
    waited for."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(descriptor, how)
            held, named = os.fstat(descriptor), path.lstat()
            if (held.st_dev, held.st_ino) == (named.st_dev, named.st_ino):
                return descriptor
        except FileNotFoundError:  # removed by who had it
            pass
        except BlockingIOError:
            os.close(descriptor)
            return None
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _lock_directory(path: Path) -> int | None:
    """A descriptor of a directory that holds its lock; None where another process does, or it is gone."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if path.is_dir():  # names are never used again
            return descriptor
    except BlockingIOError:
        pass
    os.close(descriptor)
    return None


def _is_free(path: Path) -> bool:
    lock = _lock(path, fcntl.LOCK_EX | fcntl.LOCK_NB)
    if lock is None:
        return False
    os.close(lock)
    return True


def _entries(directory: Path) -> list[Path]:
    try:
        return sorted(directory.iterdir())
    except FileNotFoundError:
        return []


def _stamp_of(directory: Path) -> str:
    """Changes when anything below the directory does."""
    state = hashlib.blake2b(digest_size=16)
    root = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for path, status in walk(root):
            told = (status.st_mode, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
            state.update(repr((os.fsencode(path), told)).encode())
    finally:
        os.close(root)
    return state.hexdigest()


def _read_record(path: Path) -> _Source | None:
    try:
        record = msgspec.json.decode(read_regular(path, max_bytes=_MAX_RECORD_BYTES), type=_Source)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return None
    return record if _DIGEST.fullmatch(record.digest) else None
