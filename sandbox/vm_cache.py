"""What virtual machines need and is made once for a user: kernel, agent system, base image, kept states.

    ~/.cache/rollforward/vm/
      kernel-5f0c9a77.../             a prepared directory: its files, and
        DIGESTS                       their digests, by which it is believed; written last

A directory gets its name when it is whole, so processes may make the same one at a time: the first wins. One that is
damaged is made anew. Whoever was given one holds its lock, shared, until its process ends: others leave it alone.
Everything here may be removed at any time while no supervisor runs.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from rollforward.sandbox.refusals import refusals

CACHE: Final = Path.home() / ".cache" / "rollforward" / "vm"
_DIGESTS: Final = "DIGESTS"
_KEEP_UNUSED_S: Final = 2 * 86400.0
_UNLOCKED_S: Final = 60.0
"""Whoever makes one has its lock sooner."""

_held: dict[Path, int] = {}
"""Descriptors of the directories that this process was given, which hold their locks."""
_holding: Final = threading.Lock()


def prepared(kind: str, key: str, make: Callable[[Path], None]) -> Path:
    """A directory of this kind and key, made if there is none that is whole; it stays as long as this process lives.

    Args:
        kind: what it is, for people; letters and '-'.
        key: what it is made of, hexadecimal digits: equal keys are equal directories.
        make: fills an empty directory.

    Raises:
        SandboxUnavailableError: it cannot be kept, or `make` says why it cannot be made.
    """
    home = CACHE / f"{kind}-{key}"
    with refusals(f"{home} cannot be made"):
        while not (_hold(home) and _is_whole(home)):
            _make(kind, home, make)
        os.utime(home)
        _forget_unused(kind, home)
    return home


def found(kind: str, key: str) -> Path | None:
    """The directory of this kind and key, if there is one that is whole; it stays as long as this process lives."""
    home = CACHE / f"{kind}-{key}"
    try:
        if not (_hold(home) and _is_whole(home)):
            return None
        os.utime(home)
    except OSError:
        return None
    return home


def digest(*parts: object) -> str:
    """A key: 32 hexadecimal digits that stand for these parts."""
    return hashlib.blake2b(repr(parts).encode("utf-8", "surrogateescape"), digest_size=16).hexdigest()


def file_digest(path: Path) -> str:
    """32 hexadecimal digits that stand for a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def kept_digest(path: Path) -> str:
    """`file_digest` of a file of a prepared directory, without reading it."""
    digests: dict[str, str] = json.loads((path.parent / _DIGESTS).read_bytes())
    return digests[path.name]


def _make(kind: str, home: Path, make: Callable[[Path], None]) -> None:
    CACHE.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{kind}-", dir=CACHE))
    lock = os.open(scratch, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_SH)
        make(scratch)
        digests = {str(path.relative_to(scratch)): file_digest(path) for path in _files(scratch)}
        for path in _files(scratch):
            path.chmod(0o644)  # an emulator is another user, to whom it is handed as a descriptor
        (scratch / _DIGESTS).write_text(json.dumps(digests), encoding="utf-8")
        if home.exists() and not _is_whole(home):
            shutil.rmtree(home, ignore_errors=True)
        with contextlib.suppress(OSError):  # another process was first
            scratch.rename(home)
        if not _is_whole(home):
            raise OSError(0, "it is damaged, and is in use")
    finally:
        os.close(lock)
        shutil.rmtree(scratch, ignore_errors=True)


def _hold(home: Path) -> bool:
    """Hold a directory's lock, shared, until this process ends; whether it is there."""
    with _holding:
        while True:
            try:
                if home in _held and os.path.samestat(os.fstat(_held[home]), home.stat()):
                    return True
                descriptor = os.open(home, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            except FileNotFoundError:
                return False
            fcntl.flock(descriptor, fcntl.LOCK_SH)
            if home in _held:
                os.close(_held[home])
            _held[home] = descriptor  # looked at once more: it may have been removed meanwhile


def _is_whole(home: Path) -> bool:
    try:
        digests: dict[str, str] = json.loads((home / _DIGESTS).read_bytes())
        return all(file_digest(home / name) == found for name, found in digests.items())
    except (OSError, ValueError, AttributeError):
        return False


def _files(home: Path) -> list[Path]:
    return sorted(path for path in home.rglob("*") if path.is_file() and path.name != _DIGESTS)


def _forget_unused(kind: str, but: Path) -> None:
    """Remove others of the kind that nobody has asked for in two days, and what a killed process has left half made."""
    for pattern, unused_s in ((f"{kind}-*", _KEEP_UNUSED_S), (f".{kind}-*", _UNLOCKED_S)):
        for path in CACHE.glob(pattern):
            with contextlib.suppress(OSError):
                if path != but and time.time() - path.stat().st_mtime > unused_s:
                    _remove_unheld(kind, path)


def _remove_unheld(kind: str, path: Path) -> None:
    """Remove a directory if no process holds its lock."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Renamed first: one of its name is there whole or not at all, and who waits for its lock sees that it is gone.
        gone = Path(tempfile.mkdtemp(prefix=f".{kind}-", dir=CACHE)) / path.name
        path.rename(gone)
        shutil.rmtree(gone.parent, ignore_errors=True)
    finally:
        os.close(descriptor)
