"""Proves: a local teacher is used as it is; a URL is fetched once however many processes of a host ask, whole or not at
all, goes on where it was interrupted, and is fetched anew where the remote changed; what is no teacher is refused by
name.

Remotes here are fsspec's memory and local file systems; web servers are in test_teacher_web.py.
"""

import fcntl
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import TypeVar

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from rollforward.distill import teacher_files
from rollforward.distill.compatibility import check_teacher
from rollforward.distill.config import TeacherConfig
from rollforward.distill.errors import TeacherError, TeacherReadError
from rollforward.distill.teacher_files import check_store, fetch, locate
from rollforward.distill.teacher_source import describe_teacher
from rollforward.model.config import config_json
from rollforward.model.tokenizer import TokenizerConfig, train_tokenizer
from tests.helpers.teachers import write_teacher
from tests.helpers.tiny import tiny_config

T = TypeVar("T")

URL = "memory://store/maths"
FILES = {
    "config.json": b'{"a": 1}',
    "model-1.safetensors": b"one" * 1000,
    "model-2.safetensors": b"second" * 1000,
    "tokenizer.json": b"{}",
}


@pytest.fixture
def remote() -> Iterator[MemoryFileSystem]:
    filesystem = fsspec.filesystem("memory")
    for name, content in (FILES | {"README.md": b"words", "other.bin": b"other weights"}).items():
        filesystem.pipe(f"/store/maths/{name}", content)
    yield filesystem
    filesystem.rm("/store", recursive=True)


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of files that were fetched."""
    names: list[str] = []
    get_file = MemoryFileSystem.get_file

    def counted(self: MemoryFileSystem, rpath: str, lpath: str, **options: object) -> None:
        names.append(rpath.rsplit("/", 1)[-1])
        get_file(self, rpath, lpath, **options)

    monkeypatch.setattr(MemoryFileSystem, "get_file", counted)
    return names


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.name != "FETCHED"}


def _folder(path: Path) -> None:
    (path / "deep").mkdir(parents=True)


def within_a_minute(call: Callable[[], T]) -> T:
    """What a call returns or raises; one that waits for a pipe fails, and its thread is left to wait."""
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(call())
        except (TeacherError, TeacherReadError, OSError) as error:
            done.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return done.result(60)


def test_where_a_teacher_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert locate("a", TeacherConfig(model_dir="/x/y"), "s3://b") == "/x/y"
    assert locate("a", TeacherConfig(), "s3://b/") == "s3://b/a"
    assert locate("a", TeacherConfig(), "/data/teachers") == "/data/teachers/a"
    assert locate("a", TeacherConfig(model_dir="s3://c/./d/"), "/x") == "s3://c/./d/"
    with pytest.raises(TeacherError, match=r"teachers\.a has no model_dir and teacher_store is not set"):
        locate("a", TeacherConfig(), None)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "mine"))
    for said, meant in (
        ("teachers", f"{tmp_path}/teachers"),
        ("./teachers/../b/", f"{tmp_path}/b"),
        ("~/t", f"{tmp_path}/mine/t"),
        ("/", "/"),
    ):
        assert locate("a", TeacherConfig(model_dir=said), None) == meant
        assert Path(locate("a", TeacherConfig(), said)) == Path(meant, "a")


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("", "is no path: it is empty"),
        ("/a\0b", "is no path: embedded null"),
        ("/" + "x" * 5000, r"x\.\.\.' is no path: File name too long"),
        ("/" + "x/" * 5000, r"\.\.\.' is no path: File name too long"),
        ("circle", "is no path: Symlink loop"),
        ("circle/x", "is no path: Symlink loop"),
        ("~nobody-of-that-name/x", "is no path: Could not determine home"),
    ],
)
def test_what_no_path_can_be_is_told_with_the_teacher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str, told: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("circle").symlink_to("circle")
    with pytest.raises(TeacherError, match=rf"^teacher maths: .*{told}.* Correct its model_dir") as caught:
        locate("maths", TeacherConfig(model_dir=said), None)
    assert len(str(caught.value)) < 500
    if said:
        with pytest.raises(TeacherError, match=r"^teacher maths: .*is no path.*teacher_store"):
            locate("maths", TeacherConfig(), said)


@pytest.mark.parametrize("url", ["dir:///x", "dir://x", "simplecache://x", "nonsense://a"])
def test_a_url_of_nothing_is_told(tmp_path: Path, url: str) -> None:
    with pytest.raises(TeacherError, match=f"^{url}: .*a teacher's URL is one that fsspec knows. Correct it"):
        fetch(url, tmp_path)


def test_a_store_must_be_asked_for_somebody() -> None:
    own, looked_for = TeacherConfig(model_dir="/x"), TeacherConfig()
    check_store({"a": own}, None)
    check_store({"a": own, "b": looked_for}, "s3://b")
    with pytest.raises(TeacherError, match=r"teacher_store is s3://b and every teacher has a model_dir.* Remove"):
        check_store({"a": own, "b": own}, "s3://b")


def test_a_local_directory_is_used_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = tmp_path / "maths"
    told = f"{directory} is no directory.*Correct its model_dir, or, where it has none .*teacher_store$"
    with pytest.raises(TeacherError, match=told):
        fetch(str(directory), tmp_path / "cache")
    directory.mkdir()
    with pytest.raises(TeacherError, match=r"has no config\.json"):
        fetch(str(directory), tmp_path / "cache")
    (directory / "config.json").write_text("{}")
    with pytest.raises(TeacherError, match=r"has no \.safetensors file"):
        fetch(str(directory), tmp_path / "cache")
    (directory / "model.safetensors").write_bytes(b"x")
    assert fetch(str(directory), tmp_path / "cache") == directory
    monkeypatch.setenv("HOME", str(tmp_path))
    assert fetch("~/maths", tmp_path / "cache") == directory
    assert not (tmp_path / "cache").exists()


@pytest.mark.usefixtures("remote")
def test_a_url_is_fetched_once(tmp_path: Path, fetched: list[str]) -> None:
    directory = fetch(URL, tmp_path / "deep" / "cache")
    assert contents(directory) == FILES
    assert fetched == sorted(FILES)
    assert fetch(URL, tmp_path / "deep" / "cache") == directory
    assert fetched == sorted(FILES)
    record = json.loads((directory / "FETCHED").read_bytes())
    assert record["url"] == URL
    assert {name: one["num_bytes"] for name, one in record["files"].items()} == {n: len(c) for n, c in FILES.items()}
    assert fetch("memory://store/maths/", tmp_path / "cache") != directory


@pytest.mark.usefixtures("remote")
def test_tensors_come_later_where_they_are_not_wanted_yet(
    tmp_path: Path, fetched: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    small = {name: content for name, content in FILES.items() if name.endswith(".json")}
    needed = sum(map(len, FILES.values()))
    with monkeypatch.context() as patch:
        usage = shutil.disk_usage(tmp_path)
        patch.setattr(shutil, "disk_usage", lambda _path: usage._replace(free=needed - 1))
        with pytest.raises(TeacherError, match=f"{needed} bytes are to be fetched"):  # the tensors' room too
            fetch(URL, tmp_path, with_tensors=False)
    for _ in range(2):
        directory = fetch(URL, tmp_path, with_tensors=False)
        assert contents(directory) == small
        assert fetched == sorted(small)
    assert fetch(URL, tmp_path) == directory
    assert contents(directory) == FILES
    assert sorted(fetched) == sorted(FILES)
    fetched.clear()
    os.truncate(directory / "model-2.safetensors", 10)
    assert contents(fetch(URL, tmp_path, with_tensors=False)).keys() == FILES.keys() - {"model-2.safetensors"}
    assert fetched == []
    assert contents(fetch(URL, tmp_path)) == FILES
    assert fetched == ["model-2.safetensors"]


def test_a_file_url(tmp_path: Path) -> None:
    for name, content in FILES.items():
        (tmp_path / "maths").mkdir(exist_ok=True)
        (tmp_path / "maths" / name).write_bytes(content)
    (tmp_path / "maths" / "folder.json").mkdir()
    assert contents(fetch(f"file://{tmp_path}/maths", tmp_path / "cache")) == FILES


def test_a_changed_remote_is_told_and_fetched_anew(
    tmp_path: Path, remote: MemoryFileSystem, fetched: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    directory = fetch(URL, tmp_path)
    capsys.readouterr()
    time.sleep(0.002)  # the remote's clock has to tell the two apart
    remote.pipe("/store/maths/model-1.safetensors", b"ONE" * 1000)  # the same size
    remote.rm("/store/maths/model-2.safetensors")
    remote.pipe("/store/maths/model-3.safetensors", b"third")
    fetched.clear()
    assert fetch(URL, tmp_path) == directory
    assert fetched == ["model-1.safetensors", "model-3.safetensors"]
    told = f"{URL}: model-1.safetensors, model-2.safetensors changed since it was fetched; what is there now is fetched"
    assert told in capsys.readouterr().err
    names = {"config.json", "tokenizer.json", "model-1.safetensors", "model-3.safetensors"}
    assert contents(directory).keys() == names
    assert (directory / "model-1.safetensors").read_bytes() == b"ONE" * 1000
    assert json.loads((directory / "FETCHED").read_bytes())["files"].keys() == names
    fetched.clear()
    fetch(URL, tmp_path)
    assert fetched == []
    assert "changed" not in capsys.readouterr().err


@pytest.mark.usefixtures("remote")
def test_a_shortened_file_and_a_torn_record_are_mended(tmp_path: Path, fetched: list[str]) -> None:
    directory = fetch(URL, tmp_path)
    os.truncate(directory / "model-2.safetensors", 10)
    fetched.clear()
    assert contents(fetch(URL, tmp_path)) == FILES
    assert fetched == ["model-2.safetensors"]
    for content in (b"", b'{"url": "x", "fil', b"\xff\xfe", b"[]"):
        (directory / "FETCHED").write_bytes(content)
        fetched.clear()
        assert contents(fetch(URL, tmp_path)) == FILES
        assert fetched == sorted(FILES)


@pytest.mark.usefixtures("remote")
def test_a_copy_with_other_bytes_of_the_same_size_and_time_is_fetched_again(
    tmp_path: Path, fetched: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    directory = fetch(URL, tmp_path)
    for damaged in ("model-1.safetensors", "config.json"):
        before = (directory / damaged).stat()
        (directory / damaged).write_bytes(b"x" * before.st_size)
        os.utime(directory / damaged, ns=(before.st_atime_ns, before.st_mtime_ns))
        fetched.clear()
        capsys.readouterr()
        assert contents(fetch(URL, tmp_path)) == FILES
        assert fetched == [damaged]
        assert f"{damaged} in {directory} changed since it was fetched; it is fetched again" in capsys.readouterr().err
        fetch(URL, tmp_path)
        assert fetched == [damaged]


@pytest.mark.usefixtures("remote")
@pytest.mark.parametrize("name", ["FETCHED", "model-1.safetensors", "config.json", ".config.json.partial"])
@pytest.mark.parametrize("make", [os.mkfifo, _folder], ids=["pipe", "folder"])
def test_what_is_no_file_in_the_cache_is_replaced(
    tmp_path: Path, fetched: list[str], name: str, make: Callable[[Path], None]
) -> None:
    directory = fetch(URL, tmp_path)
    (directory / name).unlink(missing_ok=True)
    make(directory / name)
    fetched.clear()
    assert contents(within_a_minute(lambda: fetch(URL, tmp_path))) == FILES
    assert (directory / "FETCHED").is_file()
    assert fetched == (sorted(FILES) if name == "FETCHED" else [name] if name in FILES else [])
    fetched.clear()
    fetch(URL, tmp_path)
    assert fetched == []


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "encoding.json", "model.safetensors"])
def test_a_pipe_by_the_name_of_a_file_is_refused_where_a_reader_would_wait(tmp_path: Path, name: str) -> None:
    student, tokenizer = tmp_path / "student", train_tokenizer(["7 plus 8"], TokenizerConfig(vocab_size=320))
    student.mkdir()
    (student / "config.json").write_text(json.dumps(config_json(tiny_config())))
    (student / "tokenizer.json").write_text(tokenizer.serialized)
    teacher = write_teacher(tmp_path / "maths", tiny_config(), seed=6).directory
    shutil.copy(student / "tokenizer.json", teacher)
    (teacher / name).unlink(missing_ok=True)
    os.mkfifo(teacher / name)
    for reader in (
        lambda: fetch(str(teacher), tmp_path / "cache"),
        lambda: describe_teacher("maths", teacher),
        lambda: check_teacher("maths", teacher, student_dir=student, longest_tokens=8),
    ):
        with pytest.raises(TeacherError, match=rf"{teacher / name} is no regular file"):
            within_a_minute(reader)


def test_a_pipe_as_a_record_of_what_was_read_is_none(tmp_path: Path) -> None:
    teacher = write_teacher(tmp_path / "maths", tiny_config(), seed=6).directory
    first = describe_teacher("maths", teacher, tmp_path / "records")
    (record,) = (tmp_path / "records").glob("*.fingerprints")
    record.unlink()
    os.mkfifo(record)
    assert within_a_minute(lambda: describe_teacher("maths", teacher, tmp_path / "records")) == first
    assert record.is_file()


def test_an_interrupted_fetch_keeps_whole_files(
    tmp_path: Path, remote: MemoryFileSystem, fetched: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = MemoryFileSystem.get_file

    def dies(self: MemoryFileSystem, rpath: str, lpath: str, **options: object) -> None:
        if rpath.endswith("model-2.safetensors"):
            Path(lpath).write_bytes(b"sec")
            raise ConnectionResetError("gone")
        counted(self, rpath, lpath, **options)

    with monkeypatch.context() as patch:
        patch.setattr(MemoryFileSystem, "get_file", dies)
        with pytest.raises(TeacherReadError, match=r"model-2\.safetensors cannot be read: gone"):
            fetch(URL, tmp_path)
    (directory,) = (path for path in tmp_path.iterdir() if path.is_dir())
    assert not (directory / "model-2.safetensors").exists()
    assert fetched == ["config.json", "model-1.safetensors"]
    # Whatever it was killed at, the rest is fetched; and a remote that changed meanwhile gives no mixture.
    fetched.clear()
    remote.pipe("/store/maths/model-1.safetensors", b"changed")
    assert contents(fetch(URL, tmp_path)) == FILES | {"model-1.safetensors": b"changed"}
    assert fetched == ["model-1.safetensors", "model-2.safetensors", "tokenizer.json"]


@pytest.mark.usefixtures("remote")
def test_a_file_that_arrives_short_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def short(_self: MemoryFileSystem, rpath: str, lpath: str, **_options: object) -> None:
        Path(lpath).write_bytes(FILES[rpath.rsplit("/", 1)[-1]][:-1])

    monkeypatch.setattr(MemoryFileSystem, "get_file", short)
    with pytest.raises(TeacherReadError, match=r"config\.json of memory://store/maths arrived with 7 bytes, and has 8"):
        fetch(URL, tmp_path)
    assert not list(tmp_path.rglob("*config.json*"))


@pytest.mark.usefixtures("remote")
def test_a_disk_without_room_is_told_first(tmp_path: Path, fetched: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    needed = sum(map(len, FILES.values()))
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage._replace(free=needed - 1))
    with pytest.raises(TeacherError, match=rf"{needed} bytes are to be fetched into .* where {needed - 1} are free"):
        fetch(URL, tmp_path)
    assert fetched == []


def test_what_is_no_teacher(tmp_path: Path, remote: MemoryFileSystem) -> None:
    with pytest.raises(TeacherError, match="memory://store/nothing is no directory"):
        fetch("memory://store/nothing", tmp_path)
    with pytest.raises(TeacherError, match=r"config\.json is no directory"):
        fetch(URL + "/config.json", tmp_path)
    with pytest.raises(TeacherError, match="nonsense://a/b: Protocol not known: nonsense"):
        fetch("nonsense://a/b", tmp_path)
    with pytest.raises(TeacherError, match=r"Install .*oci.* to use|Install ocifs"):
        fetch("oci://bucket/a", tmp_path)
    remote.rm("/store/maths/config.json")
    with pytest.raises(TeacherError, match=r"memory://store/maths has no config\.json"):
        fetch(URL, tmp_path)
    assert not list(tmp_path.rglob("*.json"))


def test_a_remote_that_fails_and_a_disk_that_refuses(
    tmp_path: Path, remote: MemoryFileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbidden(*_arguments: object, **_options: object) -> None:
        raise PermissionError("403 Forbidden\nmuch more")

    with monkeypatch.context() as patch:
        patch.setattr(type(remote), "ls", forbidden)
        with pytest.raises(TeacherReadError, match=r"cannot be read: 403 Forbidden\. Look at"):
            fetch(URL, tmp_path)
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(TeacherReadError, match=r"cannot be kept in .*teacher_cache\.directory"):
        fetch(URL, tmp_path / "file")


def _fetch_in_process(url: str, cache: Path, seen: Path, go: Callable[[], object]) -> None:
    """Records each file that this process fetches, one line in a file of its own."""
    original = teacher_files._fetch_file

    def recorded(directory: Path, remote: teacher_files._Remote, name: str) -> teacher_files.FileStamp:
        with (seen / str(os.getpid())).open("a") as out:
            out.write(name + "\n")
        return original(directory, remote, name)

    teacher_files._fetch_file = recorded
    go()
    assert contents(fetch(url, cache)) == FILES


def test_processes_of_a_host_fetch_once(tmp_path: Path) -> None:
    (tmp_path / "maths").mkdir()
    (tmp_path / "seen").mkdir()
    for name, content in FILES.items():
        (tmp_path / "maths" / name).write_bytes(content)
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(4)
    arguments = (f"file://{tmp_path}/maths", tmp_path / "cache", tmp_path / "seen", barrier.wait)
    processes = [context.Process(target=_fetch_in_process, args=arguments) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0] * 4
    lines = [line for path in (tmp_path / "seen").iterdir() for line in path.read_text().split()]
    assert sorted(lines) == sorted(FILES)


@pytest.mark.usefixtures("remote")
def test_who_comes_second_waits_for_the_lock(tmp_path: Path) -> None:
    directory = fetch(URL, tmp_path)
    lock = directory.with_name(directory.name + ".lock")
    descriptor = os.open(lock, os.O_RDWR)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    found: list[Path] = []
    thread = threading.Thread(target=lambda: found.append(fetch(URL, tmp_path)))
    thread.start()
    thread.join(0.2)
    assert thread.is_alive()
    assert found == []
    os.close(descriptor)
    thread.join(60)
    assert found == [directory]


def test_a_killed_fetch_goes_on(tmp_path: Path) -> None:
    """SIGKILL in the middle of the second file."""
    (tmp_path / "maths").mkdir()
    for name, content in FILES.items():
        (tmp_path / "maths" / name).write_bytes(content)
    url = f"file://{tmp_path}/maths"
    code = f"""
import os, signal
from pathlib import Path
from fsspec.implementations.local import LocalFileSystem
from rollforward.distill.teacher_files import fetch
original = LocalFileSystem.get_file
def dies(self, rpath, lpath, **options):
    if "model-1" in rpath:
        Path(lpath).write_bytes(b"on")
        os.kill(os.getpid(), signal.SIGKILL)
    original(self, rpath, lpath, **options)
LocalFileSystem.get_file = dies
fetch({url!r}, Path({str(tmp_path / "cache")!r}))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == -9, done.stderr
    (directory,) = (path for path in (tmp_path / "cache").iterdir() if path.is_dir())
    assert {"config.json", ".model-1.safetensors.partial"} == contents(directory).keys()
    before = (directory / "config.json").stat().st_ino
    assert contents(fetch(url, tmp_path / "cache")) == FILES
    assert (directory / "config.json").stat().st_ino == before
