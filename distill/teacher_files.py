"""Where a teacher's files are: a local directory as it is, or a URL that is fetched once into a folder of this host.

    cache_dir/0f3a.../           the teacher's *.json and *.safetensors, each under its name only when it is whole
                FETCHED          the URL; of each whole file its size, what the remote said of it, its stamp here
              0f3a....lock       held with flock by the process that fetches; the others wait and find everything there

The folder is named by a hash of the URL. A fetch that was killed goes on with the file that it was at. The remote is
asked each time, so a file that changed there is told and fetched anew: what is returned is what the remote has now. A
remote that says nothing of a file but its size, such as a web server without ETag and Last-Modified, may change it
within that size, and nothing here can notice.

Here: files and their sizes. Not here: what is in them (teacher_weights.py), whose tokens they speak
(compatibility.py).
"""

import fcntl
import hashlib
import os
import re
import shutil
import stat
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from rollforward.conf import console
from rollforward.conf.errors import first_line
from rollforward.distill.config import TeacherConfig
from rollforward.distill.errors import TeacherError, TeacherReadError
from rollforward.model.safetensors_stream import sync_path
from rollforward.rollout.wal_files import replace_file

CONFIG_NAME = "config.json"
"""The file that says what the tensors are."""
_RECORD_NAME = "FETCHED"  # no name that a teacher's file may have
_TENSORS = ".safetensors"
_SUFFIXES = (".json", _TENSORS)
"""All that a teacher needs; a repository may hold the same weights in other formats, and pictures."""

_STAMP_KEYS = ("etag", "md5hash", "content-md5", "generation", "mtime", "lastmodified", "last-modified", "created")
"""What file systems say of a file that is another when the file is, best first, in lower case."""

_SHOWN_CHARACTERS = 200

_CONNECT_S = 30
_SILENCE_S = 60
"""Longest that a web server may send nothing. How long a whole file takes is no sign of anything."""


class FileStamp(NamedTuple):
    """What tells a file from others without reading it. Two files of one stamp are one, even on two hosts: nobody can
    set the last two."""

    num_bytes: int
    written_ns: int
    """Time of the last change of the content."""
    inode: int
    touched_ns: int
    """Time of the last change of anything: name, owner, content."""

    @classmethod
    def of(cls, stat: os.stat_result) -> "FileStamp":
        """Return the stamp of what the system says of a file."""
        return cls(stat.st_size, stat.st_mtime_ns, stat.st_ino, stat.st_ctime_ns)

    def is_content_of(self, other: "FileStamp | None") -> bool:
        """Whether the content is that of an earlier stamp of the file, whose names and owners may have changed."""
        return other is not None and self[:2] == other[:2]


class _Fetched(msgspec.Struct, frozen=True, kw_only=True):
    """One file as the remote described it."""

    num_bytes: int | None
    """None where the remote does not say."""
    stamp: str
    """Changes when the file does; empty where the remote says nothing of the kind."""


class _Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Content of `FETCHED`, as JSON."""

    url: str
    files: dict[str, _Fetched]
    stamps: dict[str, FileStamp]
    """Of the files here, by the same names, as they were when they had arrived."""


class _Remote(NamedTuple):
    """A directory of some file system."""

    url: str
    """As it may be shown."""
    filesystem: Any
    """fsspec's."""
    paths: Mapping[str, str]
    """By name of file."""
    files: Mapping[str, _Fetched]
    """By the same names."""


def locate(name: str, config: TeacherConfig, store: str | None) -> str:
    """Return where a teacher's files are, a path or a URL.

    Args:
        name: the teacher. config: its own. store: `teacher_store` of the run.

    Returns:
        A URL as it was given; a path so that it means the same to a process with another working directory or home.

    Raises:
        TeacherError: neither of the two says, or what they say is no path.
    """
    if config.model_dir is not None:
        return _absolute(name, config.model_dir)
    if store is None:
        raise TeacherError(
            f"teachers.{name} has no model_dir and teacher_store is not set; nobody knows where it lies. Set one of"
            " them"
        )
    return _absolute(name, f"{store.rstrip('/')}/{name}" if "://" in store else str(Path(store, name)))


def _absolute(name: str, place: str) -> str:
    if "://" in place:
        return place
    try:
        if not place:
            raise ValueError("it is empty")
        path = Path(place).expanduser().resolve()
        path.is_dir()  # tells what no system could open
    except (OSError, RuntimeError, ValueError) as error:  # too long; links in a circle, nobody's home; a NUL
        shown = place if len(place) <= _SHOWN_CHARACTERS else place[:_SHOWN_CHARACTERS] + "..."
        said = error.strerror if isinstance(error, OSError) else error
        raise TeacherError(
            f"teacher {name}: {shown!r} is no path: {said}; a teacher is a model directory. Correct its model_dir, or"
            " teacher_store"
        ) from error
    return str(path)


def check_present(place: str, setting: str) -> None:
    """Refuse a teacher that is not there; of a URL, the remote is asked for the names of its files and nothing else.

    Args:
        place: from ``locate``.
        setting: what names it, for an error.

    Raises:
        TeacherError, TeacherReadError: as ``fetch``.
    """
    with naming(setting):
        if "://" in place:
            _listed(place)
        else:
            _check_directory(place)


@contextmanager
def naming(setting: str) -> Generator[None]:
    """Put the setting that names a teacher before what is wrong with the place.

    Raises:
        TeacherError, TeacherReadError: in place of one without the setting.
    """
    try:
        yield
    except (TeacherError, TeacherReadError) as error:
        raise type(error)(f"{setting}: {error}") from None  # what the file system said may have the password in it


def check_store(teachers: Mapping[str, TeacherConfig], store: str | None) -> None:
    """Refuse a `teacher_store` in which no teacher is looked for.

    Raises:
        TeacherError: every teacher has a directory of its own.
    """
    if store is not None and all(teacher.model_dir is not None for teacher in teachers.values()):
        raise TeacherError(
            f"teacher_store is {_public(store)} and every teacher has a model_dir, so nothing is looked for in it."
            " Remove teacher_store, or the model_dir of each teacher that lies there under its name"
        )


def fetch(url: str, cache_dir: Path, *, with_tensors: bool = True) -> Path:
    """Return a local directory with a teacher's files, for which a URL is fetched where it is not there yet.

    Args:
        url: a path, or any URL that fsspec knows.
        cache_dir: made if absent. Processes of one host may call this at the same time; one fetches.
        with_tensors: False leaves the large files to a later call; what is known without them may refuse the teacher.

    Raises:
        TeacherError: there is no model directory, nothing on this machine speaks the protocol, or the disk has no room.
        TeacherReadError: the remote fails, or a file does not arrive whole. Whole files stay for the next call.
    """
    if "://" not in url:
        return _check_directory(url)
    cache_dir = cache_dir.expanduser()
    directory = cache_dir / hashlib.blake2b(url.encode(), digest_size=16).hexdigest()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with locked(directory.with_name(directory.name + ".lock")):
            _complete(directory, _listed(url), with_tensors=with_tensors)
    except (TeacherError, TeacherReadError) as error:
        # What the file system said may have the password in it.
        raise error from (error.__cause__ if url == _public(url) else None)
    except OSError as error:  # the remote's are told in other types
        raise TeacherReadError(
            f"{_public(url)} cannot be kept in {directory}: {error}. Put the disk right, or set teacher_cache.directory"
        ) from error
    return directory


def _check_directory(place: str) -> Path:
    directory = Path(place).expanduser()
    _check_names(place, [path.name for path in directory.iterdir()] if directory.is_dir() else None)
    check_regular(directory)
    return directory


def _check_names(place: str, names: list[str] | None) -> None:
    """Refuse what is no model directory; None stands for what is no directory."""
    if names is None:
        raise _no_directory(place)
    if CONFIG_NAME not in names or not any(name.endswith(_TENSORS) for name in names):
        lacks = CONFIG_NAME if CONFIG_NAME not in names else f"{_TENSORS} file"
        raise TeacherError(
            f"{place} has no {lacks}; a teacher is a model directory in the official layout. Correct its model_dir"
        )


def check_regular(directory: Path) -> None:
    """Refuse a model directory in which a pipe or device has the name of a file: a reader of it would wait for ever.

    Raises:
        TeacherError: it has; names it.
    """
    for path in sorted(directory.iterdir()) if directory.is_dir() else ():
        if path.name.endswith(_SUFFIXES) and path.exists() and not path.is_file() and not path.is_dir():
            raise TeacherError(f"{path} is no regular file; a teacher's files are. Put the file in its place")


def read_regular(path: Path) -> bytes:
    """Return the content of a file; what is none, such as a pipe, is as absent.

    Raises:
        FileNotFoundError: there is no regular file of the name. OSError: it cannot be read.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # to open a pipe would wait for a writer
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise FileNotFoundError(f"{path} is no regular file")
    with open(descriptor, "rb") as file:
        return file.read()


def _no_directory(place: str) -> TeacherError:
    return TeacherError(
        f"{place} is no directory; a teacher is a model directory. Correct its model_dir, or, where it has none and is"
        " looked for under its name, teacher_store"
    )


@contextmanager
def locked(path: Path) -> Generator[None]:
    """Hold a lock between processes, whose file is made if absent; wait however long its holder takes.

    Raises:
        OSError: the file cannot be made.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _listed(url: str) -> _Remote:
    """What the remote has now."""
    # Late: it costs a while, and a run whose teachers are local does without.
    import fsspec

    try:
        filesystem, root = fsspec.core.url_to_fs(url, **_options(url))
    except OSError as error:  # some connect at once
        raise _failed(url, error) from error
    except (
        ImportError,
        ValueError,
        AttributeError,
        LookupError,
        TypeError,
    ) as error:  # as it meets what it expects not
        raise TeacherError(
            f"{_public(url)}: {_public(first_line(error))}; a teacher's URL is one that fsspec knows. Correct it,"
            " install what it asks for, or fetch the directory yourself and set model_dir to it"
        ) from error
    except Exception as error:  # every file system has its own
        raise _failed(url, error) from error
    try:
        filesystem.invalidate_cache()
        if not filesystem.isdir(root):
            raise _no_directory(_public(url))
        paths = {str(path).rstrip("/").rsplit("/", 1)[-1]: str(path) for path in filesystem.ls(root, detail=False)}
        paths = {name: path for name, path in sorted(paths.items()) if name.endswith(_SUFFIXES)}
        described = {name: filesystem.info(path) for name, path in paths.items()}
    except TeacherError:
        raise
    except Exception as error:  # every file system has its own
        raise _failed(url, error) from error
    paths = {name: path for name, path in paths.items() if described[name].get("type", "file") == "file"}
    _check_names(_public(url), list(paths))
    return _Remote(_public(url), filesystem, paths, {name: _described(described[name]) for name in paths})


def _options(url: str) -> dict[str, Any]:
    """What a file system is told beside the URL."""
    protocol = url.partition("://")[0].rpartition("::")[2]
    if protocol not in ("http", "https"):
        return {}
    import aiohttp  # late, as above

    # Its own limit is 5 minutes for a whole file, which a large one always exceeds.
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S, sock_read=_SILENCE_S)
    return {protocol: {"client_kwargs": {"timeout": timeout}}}


def _described(info: Mapping[str, Any]) -> _Fetched:
    lowered = {key.lower(): value for key, value in info.items()}
    said = [f"{key} {lowered[key]}" for key in _STAMP_KEYS if lowered.get(key)]
    return _Fetched(num_bytes=info.get("size"), stamp=said[0] if said else "")


def _public(text: str) -> str:
    """The text without the user and password of a URL in it."""
    return re.sub(r"://[^/\s]*@", "://***@", text)


def _failed(url: str, error: Exception) -> TeacherReadError:
    return TeacherReadError(
        f"{_public(url)} cannot be read: {_public(_said(error))}. Look at the network and at who may read it, and start"
        " again; files that arrived whole are kept"
    )


def _said(error: BaseException) -> str:
    """What an error says, or, where time ran out below it, that."""
    below: BaseException | None = error
    while below is not None:
        if type(below).__name__ == "ConnectionTimeoutError":  # aiohttp's
            return f"no connection was made within {_CONNECT_S} s"
        if type(below).__name__ == "SocketTimeoutError":
            return f"it sent nothing for {_SILENCE_S} s"
        below = below.__cause__
    return first_line(error)


def _complete(directory: Path, remote: _Remote, *, with_tensors: bool) -> None:
    """Make the directory's files those of the remote, or all but the tensors that it lacks."""
    record = _recorded(directory)
    known = record.files
    current = [name for name, one in known.items() if remote.files.get(name) == one]
    kept = {
        name: known[name]
        for name in current
        if name in record.stamps and _stamp(directory / name) == record.stamps[name]
    }
    stamps = {name: record.stamps[name] for name in kept}
    damaged = [name for name in current if name not in kept]
    if damaged:
        console.say(f"{', '.join(damaged)} in {directory} changed since it was fetched; it is fetched again")
    changed = sorted(name for name, one in known.items() if remote.files.get(name) != one)
    if changed:
        console.say(f"{remote.url}: {', '.join(changed)} changed since it was fetched; what is there now is fetched")
    for path in directory.iterdir():
        # Of another version, or half: either would be read as part of this one. And a folder can't be replaced.
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name not in (*kept, _RECORD_NAME):
            path.unlink()
    missing = [name for name in remote.files if name not in kept]
    _check_room(directory, remote, missing)
    missing = [name for name in missing if with_tensors or not name.endswith(_TENSORS)]
    for name in missing:
        stamps[name] = _fetch_file(directory, remote, name)
        kept[name] = remote.files[name]
        _write_record(directory, _Record(url=remote.url, files=kept, stamps=stamps))
    if kept != known and not missing:
        _write_record(directory, _Record(url=remote.url, files=kept, stamps=stamps))


def _recorded(directory: Path) -> _Record:
    try:
        return msgspec.json.decode(read_regular(directory / _RECORD_NAME), type=_Record)
    except (FileNotFoundError, msgspec.MsgspecError, UnicodeError):
        return _Record(url="", files={}, stamps={})  # what is not recorded is fetched again


def _write_record(directory: Path, record: _Record) -> None:
    replace_file(directory / _RECORD_NAME, msgspec.json.encode(record))


def _stamp(path: Path) -> FileStamp | None:
    """None where there is no regular file."""
    return FileStamp.of(path.stat()) if path.is_file() else None


def _check_room(directory: Path, remote: _Remote, names: list[str]) -> None:
    needed = sum(remote.files[name].num_bytes or 0 for name in names)
    free = shutil.disk_usage(directory).free
    if needed > free:
        raise TeacherError(
            f"{remote.url}: {needed} bytes are to be fetched into {directory}, where {free} are free. Make room, or set"
            " teacher_cache.directory"
        )


def _fetch_file(directory: Path, remote: _Remote, name: str) -> FileStamp:
    """Fetch one file, which has its name only when it is whole and durable; return its stamp."""
    partial, expected = directory / f".{name}.partial", remote.files[name].num_bytes
    console.say(f"fetching {name} of {remote.url}" + ("" if expected is None else f", {expected} bytes"))
    try:
        remote.filesystem.get_file(remote.paths[name], str(partial))
    except Exception as error:  # every file system has its own
        raise _failed(remote.paths[name], error) from error
    found = partial.stat().st_size
    if expected not in (None, found):
        partial.unlink()
        raise TeacherReadError(
            f"{name} of {remote.url} arrived with {found} bytes, and has {expected}; it must be whole. Start again; if"
            " it happens again, fetch the directory yourself and set model_dir to it"
        )
    sync_path(partial)
    partial.rename(directory / name)
    return FileStamp.of((directory / name).stat())
