"""Bytes by their hash: what is too large for a record of a command log, in a directory beside the logs.

    run_dir/commands/step_000012/blobs/9f86d0...   named by the BLAKE2b-256 of its content

Logs of one step share the directory (members of a group have the same files), and it goes when they go. Not here: the
records that name blobs (`command_records.py`).
"""

import contextlib
import hashlib
import os
import threading
from pathlib import Path
from typing import Final

import msgspec

from rollforward.sandbox.errors import CommandLogDamagedError, CommandLogWriteError
from rollforward.sandbox.files import read_regular, sync_directory, write_all

MAX_INLINE_BYTES: Final = 64 << 10
"""More than so many bytes go to a blob."""

_DIGEST_BYTES: Final = 32


class Stored(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Bytes as a record holds them: in itself, or by the name of a blob."""

    size_bytes: int
    """How many they are."""
    data: bytes | None
    """They themselves; None where they are a blob."""
    digest: bytes = b""
    """The blob's BLAKE2b-256; empty where there is none."""


class BlobStore:
    """The blobs of one directory. Any thread and any process may use it at the same time."""

    def __init__(self, directory: Path, *, sync: bool) -> None:
        """Bind to a directory, which need not exist.

        Args:
            directory: of blobs alone.
            sync: whether a blob must survive a power cut when `put` returns.

        """
        self._directory = directory
        self._sync = sync

    def put(self, data: bytes) -> Stored:
        """Returns what a record keeps of the bytes; a blob is on disk before that.

        Raises:
            CommandLogWriteError: it cannot be written.

        Invariants: the same bytes have the same name; one that is there and intact is not written again.

        """
        if len(data) <= MAX_INLINE_BYTES:
            return Stored(len(data), data)
        digest = hashlib.blake2b(data, digest_size=_DIGEST_BYTES).digest()
        stored = Stored(len(data), None, digest)
        path = self._path(digest)
        try:
            if not self._is_there(path, data):
                self._write(path, data)
        except OSError as error:
            raise CommandLogWriteError(
                f"blob {path}: {error}; nothing that needs it is handed out. Make room or look at the device."
            ) from error
        return stored

    def get(self, stored: Stored) -> bytes:
        """Returns the bytes that `put` was given.

        Raises:
            CommandLogDamagedError: the blob is absent, or is not what its name says.

        """
        if stored.data is not None:
            return stored.data
        path = self._path(stored.digest)
        try:
            data = read_regular(path, max_bytes=stored.size_bytes)
        except OSError as error:
            raise CommandLogDamagedError(f"blob {path}, which a command log names: {error}.") from None
        if hashlib.blake2b(data, digest_size=_DIGEST_BYTES).digest() != stored.digest:
            raise CommandLogDamagedError(
                f"blob {path} has {len(data)} bytes that do not match its name: it is damaged."
            )
        return data

    def keep_only(self, stored: Stored | None) -> None:
        """Removes every blob but one; the directory too where none is left. What cannot be removed stays."""
        kept = "" if stored is None or stored.data is not None else stored.digest.hex()
        with contextlib.suppress(OSError):
            for path in self._directory.iterdir():
                if path.name != kept:
                    path.unlink(missing_ok=True)
            if not kept:
                self._directory.rmdir()

    def _path(self, digest: bytes) -> Path:
        return self._directory / digest.hex()

    def _is_there(self, path: Path, data: bytes) -> bool:
        try:
            return read_regular(path, max_bytes=len(data)) == data
        except OSError:
            return False

    def _write(self, path: Path, data: bytes) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_native_id()}.tmp")
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        try:
            write_all(descriptor, data)
            if self._sync:
                os.fsync(descriptor)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise
        finally:
            os.close(descriptor)
        os.replace(temporary, path)
        if self._sync:
            sync_directory(self._directory)
            sync_directory(self._directory.parent)
