"""Proves: a teacher on a web server arrives however slowly, and a server that sends nothing, refuses, or for which a
library is absent is named; a password in a URL is neither said nor written.

Servers here are threads of this process.
"""

import functools
import http.server
import json
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, ClassVar

import fsspec
import pytest

from rollforward.distill import teacher_files
from rollforward.distill.config import TeacherConfig
from rollforward.distill.errors import TeacherError, TeacherReadError
from rollforward.distill.teacher_files import check_store, fetch

FILES = {
    "config.json": b'{"a": 1}',
    "model-1.safetensors": b"one" * 1000,
    "model-2.safetensors": b"second" * 1000,
    "tokenizer.json": b"{}",
}


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.name != "FETCHED"}


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


class Slow(Quiet):
    """Sends what it sends in small parts, with a pause before each: the largest file takes two seconds."""

    def copyfile(self, source: BinaryIO, outputfile: BinaryIO) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        while part := source.read(300):
            outputfile.write(part)
            outputfile.flush()
            time.sleep(0.1)


class Silent(Quiet):
    """Lists its files and then sends none, until `let_go`."""

    let_go: ClassVar[threading.Event]

    def copyfile(self, source: BinaryIO, outputfile: BinaryIO) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        if self.path.endswith("/"):
            super().copyfile(source, outputfile)
        else:
            self.let_go.wait(60)


@contextmanager
def web_server(root: Path, handler: type[Quiet]) -> Iterator[str]:
    """Serve a teacher; yields its address without the protocol."""
    (root / "maths").mkdir()
    for name, content in FILES.items():
        (root / "maths" / name).write_bytes(content)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(handler, directory=str(root)))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_port}/maths/"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_a_web_server(tmp_path: Path) -> None:
    with web_server(tmp_path, Quiet) as address:
        directory = fetch(f"http://{address}", tmp_path / "cache")
        assert contents(directory) == FILES
        stamps = [one["stamp"] for one in json.loads((directory / "FETCHED").read_bytes())["files"].values()]
        assert all(stamp.startswith("last-modified ") for stamp in stamps), stamps


def test_a_slow_web_server_is_waited_for_and_a_silent_one_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A whole file takes longer than the server may be silent. No limit for a whole file may be left."""
    monkeypatch.setattr(teacher_files, "_SILENCE_S", 1.5)
    timeout = teacher_files._options("https://a/b")["https"]["client_kwargs"]["timeout"]
    assert (timeout.total, timeout.sock_connect, timeout.sock_read) == (None, 30, 1.5)
    assert teacher_files._options("simplecache::http://a/b").keys() == {"http"}
    assert teacher_files._options("s3://http/b") == {}
    (tmp_path / "slow").mkdir()
    (tmp_path / "silent").mkdir()
    with web_server(tmp_path / "slow", Slow) as address:
        start = time.monotonic()
        assert contents(fetch(f"http://{address}", tmp_path / "cache")) == FILES
        assert time.monotonic() - start > 1.5
    Silent.let_go = threading.Event()
    with web_server(tmp_path / "silent", Silent) as address:
        with pytest.raises(
            TeacherReadError, match=rf"{address}config\.json cannot be read: it sent nothing for 1\.5 s"
        ):
            fetch(f"http://{address}", tmp_path / "cache")
        Silent.let_go.set()


def test_a_web_server_needs_its_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    with pytest.raises(TeacherError, match=r"http://127\.0\.0\.1:1/x: .*aiohttp.*install what"):
        fetch("http://127.0.0.1:1/x", tmp_path)


def test_a_server_that_refuses_is_told_without_the_password(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The library connects while it is made; nothing of it is the disk's."""
    with pytest.raises(TeacherReadError, match=r"^ftp://\*\*\*@127\.0\.0\.1:1/x cannot be read: .*refused") as caught:
        fetch("ftp://anna:secret@127.0.0.1:1/x", tmp_path)
    assert caught.value.__cause__ is None
    with pytest.raises(TeacherReadError, match=r"^ftp://127\.0\.0\.1:1/x cannot be read: .*refused") as caught:
        fetch("ftp://127.0.0.1:1/x", tmp_path)
    assert isinstance(caught.value.__cause__, ConnectionRefusedError)

    def speaks(*_arguments: object, **_options: object) -> None:
        raise RuntimeError("530 no, http://anna:se@cret@host/x")

    monkeypatch.setattr(fsspec.core, "url_to_fs", speaks)
    with pytest.raises(TeacherReadError, match=r"cannot be read: 530 no, http://\*\*\*@host/x\. Look"):
        fetch("ftp://anna:secret@host/x", tmp_path)
    with pytest.raises(TeacherError, match=r"teacher_store is ftp://\*\*\*@host "):
        check_store({"a": TeacherConfig(model_dir="/x")}, "ftp://anna:secret@host")
    assert "secret" not in capsys.readouterr().err


def test_a_password_is_neither_said_nor_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with web_server(tmp_path, Quiet) as address:
        directory = fetch(f"http://anna:secret@{address}", tmp_path / "cache")
        assert contents(directory) == FILES
    assert f"fetching config.json of http://***@{address}" in capsys.readouterr().err
    assert b"secret" not in (directory / "FETCHED").read_bytes()
