"""Proves: no tensor of any teacher is fetched before all of them, and the room for what they say, have passed; what
changed while tensors came is looked at again; what was read once is not read again by the next run.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from rollforward.distill import teacher_source
from rollforward.distill.config import DistillRun
from rollforward.distill.errors import HiddenRoomError, TeacherError, TeacherMismatchError, TeacherReadError
from rollforward.distill.teacher_files import locate
from rollforward.distill.teacher_source import TeacherSource, describe_teacher, local_teacher
from rollforward.distill.train import find_teachers
from tests.helpers.distill_runs import small_distill, write_models


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    write_models(root, "student", "a", "b")
    return root


@pytest.fixture
def remote(models: Path) -> Iterator[MemoryFileSystem]:
    """Teachers a and b."""
    filesystem = fsspec.filesystem("memory")
    for name in "ab":
        for file in (models / name).iterdir():
            filesystem.pipe(f"/store/{name}/{file.name}", file.read_bytes())
    yield filesystem
    filesystem.rm("/store", recursive=True)


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Files that were fetched, by teacher and name."""
    names: list[str] = []
    get_file = MemoryFileSystem.get_file

    def counted(self: MemoryFileSystem, rpath: str, lpath: str, **options: object) -> None:
        names.append("/".join(rpath.split("/")[-2:]))
        get_file(self, rpath, lpath, **options)

    monkeypatch.setattr(MemoryFileSystem, "get_file", counted)
    return names


def run_of(models: Path, tmp_path: Path, name: str = "run", **changes: Any) -> DistillRun:
    """Runs of one path have one cache."""
    where: dict[str, Any] = {
        "teacher_store": "memory://store",
        "routing": "all",
        "teacher_cache": {"directory": str(tmp_path / "cache")},
    }
    return small_distill(tmp_path / name, models / "student", {"a": {}, "b": {}}, **where | changes)


def find(run: DistillRun) -> dict[str, TeacherSource]:
    return find_teachers(run, {name: locate(name, one, run.teacher_store) for name, one in run.teachers.items()})


def is_tensor(name: str) -> bool:
    return name.endswith(".safetensors")


def other_merges(content: bytes) -> bytes:
    entries = json.loads(content)
    entries["model"]["merges"][:2] = entries["model"]["merges"][1::-1]
    return json.dumps(entries).encode()


@pytest.mark.usefixtures("remote")
def test_small_files_of_all_come_before_the_tensors_of_any(models: Path, tmp_path: Path, fetched: list[str]) -> None:
    found = find(run_of(models, tmp_path))
    for name in "ab":
        assert found[name].version == describe_teacher(name, models / name).version
        assert {path.name for path in (models / name).iterdir()} <= {p.name for p in found[name].directory.iterdir()}
    first = next(index for index, name in enumerate(fetched) if is_tensor(name))
    assert {name.split("/")[0] for name in fetched[:first]} == {"a", "b"}
    assert all(map(is_tensor, fetched[first:]))
    assert len(set(fetched)) == len(fetched)


def test_nothing_large_is_fetched_for_a_run_that_is_refused(
    models: Path, tmp_path: Path, remote: MemoryFileSystem, fetched: list[str]
) -> None:
    with pytest.raises(HiddenRoomError):
        find(run_of(models, tmp_path, teacher_cache={"directory": str(tmp_path / "cache"), "max_hidden_gib": 1e-6}))
    tokenizer = remote.cat_file("/store/b/tokenizer.json")
    remote.pipe("/store/b/tokenizer.json", other_merges(tokenizer))
    with pytest.raises(TeacherMismatchError, match=r"teacher b in .*: model\.merges\[0\]"):
        find(run_of(models, tmp_path))
    assert {name.split("/")[0] for name in fetched} == {"a", "b"}
    assert not any(map(is_tensor, fetched))


def test_what_is_left_of_an_interrupted_fetch_is_no_reason_to_refuse(
    models: Path, tmp_path: Path, remote: MemoryFileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of two shards is there, and the index of both."""
    index = {"metadata": {}, "weight_map": {"x": "model-1.safetensors", "y": "model-2.safetensors"}}
    remote.pipe("/store/a/model.safetensors.index.json", json.dumps(index).encode())
    remote.pipe("/store/a/model-2.safetensors", b"")
    get_file = MemoryFileSystem.get_file

    def dies(self: MemoryFileSystem, rpath: str, lpath: str, **options: object) -> None:
        if rpath.endswith("model-2.safetensors"):
            raise ConnectionResetError("gone")
        get_file(self, rpath, lpath, **options)

    monkeypatch.setattr(MemoryFileSystem, "get_file", dies)
    run = run_of(models, tmp_path)
    for _ in range(2):
        with pytest.raises(TeacherReadError, match=r"model-2\.safetensors cannot be read: gone"):
            find(run)


def test_what_a_url_stands_for_may_change_while_tensors_come(
    models: Path, tmp_path: Path, remote: MemoryFileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    get_file = MemoryFileSystem.get_file

    def changing(self: MemoryFileSystem, rpath: str, lpath: str, **options: object) -> None:
        if rpath.startswith("/store/a/") and is_tensor(rpath):
            remote.pipe("/store/b/tokenizer.json", other_merges(remote.cat_file("/store/b/tokenizer.json")))
        get_file(self, rpath, lpath, **options)

    monkeypatch.setattr(MemoryFileSystem, "get_file", changing)
    with pytest.raises(TeacherMismatchError, match=r"teacher b in .*: model\.merges\[0\]"):
        find(run_of(models, tmp_path))


def test_a_url_that_changed_before_a_rank_fetched_it_is_told_with_both_versions(
    models: Path, tmp_path: Path, remote: MemoryFileSystem
) -> None:
    """Of the same size to the byte."""
    source = find(run_of(models, tmp_path))["a"]
    (file,) = (path for path in (models / "b").iterdir() if is_tensor(path.name))
    assert len(remote.cat_file(f"/store/a/{file.name}")) == file.stat().st_size
    remote.pipe(f"/store/a/{file.name}", file.read_bytes())
    other = find(run_of(models, tmp_path / "other"))["a"]
    told = rf"teacher a: .*{other.version[:12]}.*began with version {source.version[:12]}"
    with pytest.raises(TeacherReadError, match=told):
        local_teacher(source, other.directory, tmp_path / "records")
    assert local_teacher(other, other.directory, tmp_path / "records") == other


def test_the_next_run_reads_what_changed_alone(
    models: Path, tmp_path: Path, remote: MemoryFileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[Path] = []
    fingerprints = teacher_source.stored_fingerprints
    monkeypatch.setattr(
        teacher_source, "stored_fingerprints", lambda path, config: (read.append(path), fingerprints(path, config))[1]
    )
    found = find(run_of(models, tmp_path, "first"))
    assert read == [found["a"].directory, found["b"].directory]
    read.clear()
    assert find(run_of(models, tmp_path, "second")) == found
    assert read == []
    (file,) = (path for path in (models / "b").iterdir() if is_tensor(path.name))
    remote.pipe(f"/store/a/{file.name}", file.read_bytes())
    assert find(run_of(models, tmp_path, "third"))["a"].version == found["b"].version
    assert read == [found["a"].directory]


def test_a_store_that_no_teacher_uses_is_refused(models: Path, tmp_path: Path) -> None:
    run = small_distill(
        tmp_path / "run",
        models / "student",
        {name: {"model_dir": str(models / name)} for name in "ab"},
        teacher_store=str(models),
        routing="all",
    )
    with pytest.raises(TeacherError, match=rf"teacher_store is {models} and every teacher has a model_dir"):
        find(run)


def test_a_path_means_the_same_in_another_working_directory(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(models.parent)
    run = run_of(models, tmp_path, teacher_store=models.name)
    urls = {name: locate(name, one, run.teacher_store) for name, one in run.teachers.items()}
    monkeypatch.chdir(tmp_path)
    assert {name: source.directory for name, source in find_teachers(run, urls).items()} == {
        name: models / name for name in "ab"
    }
