"""Proves: a teacher's version is of its bytes and configuration; what was read once is not read again while its files
are the same; a process whose copy holds another teacher is told so, with both versions, whatever sizes and times say.
"""

import multiprocessing
import os
import shutil
from collections.abc import Callable
from multiprocessing.synchronize import Barrier
from pathlib import Path

import msgspec
import pytest

from rollforward.distill import teacher_source
from rollforward.distill.errors import TeacherError, TeacherReadError
from rollforward.distill.teacher_source import (
    FileStamp,
    TeacherSource,
    changed_file,
    describe_teacher,
    local_teacher,
)
from rollforward.model.checkpoint import read_packed, write_checkpoint
from rollforward.model.checkpoint_headers import scan_checkpoint
from rollforward.model.config import ModelConfig
from rollforward.rollout.weights import publish_weights, version_directory
from tests.helpers.teachers import wide_config, write_teacher
from tests.helpers.tiny import random_params, tiny_config


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Directories of which all tensors were read."""
    seen: list[Path] = []
    read = teacher_source.stored_fingerprints

    def noting(directory: Path, config: ModelConfig) -> dict[str, str]:
        seen.append(directory)
        return read(directory, config)

    monkeypatch.setattr(teacher_source, "stored_fingerprints", noting)
    return seen


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return write_teacher(tmp_path / "teachers" / "maths", tiny_config(), seed=6).directory


def overwrite(directory: Path, tensor: str, content: bytes) -> Path:
    """Write into a tensor; size and times of the file stay, as far as anybody can set them."""
    entry = scan_checkpoint(directory)[tensor]
    before = entry.file.stat()
    with entry.file.open("r+b") as out:
        out.seek(entry.offset)
        out.write(content)
    os.utime(entry.file, ns=(before.st_atime_ns, before.st_mtime_ns))
    return entry.file


def copied(directory: Path, to: Path) -> Path:
    """A copy with the sizes and times of the original, as rsync makes it."""
    shutil.copytree(directory, to)
    for file in to.iterdir():
        assert FileStamp.of(file.stat()).is_content_of(FileStamp.of((directory / file.name).stat()))
    return to


def test_a_description_is_of_bytes_and_configuration(tmp_path: Path) -> None:
    config, root = tiny_config(), tmp_path
    params = random_params(config, 3)
    write_checkpoint(root / "a", config, params)
    write_checkpoint(root / "b", config, params, max_shard_bytes=2**18)
    first, second = (describe_teacher("maths", root / name) for name in "ab")
    assert len(first.stamps) == 3 < len(second.stamps)
    assert second.stamps.keys() == {path.name for path in (root / "b").iterdir()}
    assert (first.version, first.width, first.name) == (second.version, 128, "maths")
    assert first.stamps == {path.name: FileStamp.of(path.stat()) for path in (root / "a").iterdir()}
    packed = read_packed(root / "a", config)
    packed["layers.3.ffn.experts.w1.weight"].data[7, 63, 63] ^= 1
    write_checkpoint(root / "c", config, packed)
    other = msgspec.structs.replace(config, routed_scaling_factor=2.0)
    write_checkpoint(root / "d", other, params)
    assert len({describe_teacher("maths", root / name).version for name in "acd"}) == 3
    for made in (root / "nothing", tmp_path.parent):
        with pytest.raises(TeacherError, match="teacher maths: "):
            describe_teacher("maths", made)


def test_a_published_directory_is_held_to_its_manifest(tmp_path: Path) -> None:
    config: ModelConfig = wide_config()
    write_checkpoint(tmp_path / "start", config, random_params(config, 3))
    publish_weights(tmp_path / "weights", 1, config, read_packed(tmp_path / "start", config))
    directory = version_directory(tmp_path / "weights", 1)
    described = describe_teacher("maths", directory)
    assert described.width == 160
    overwrite(directory, "embed.weight", b"\x12")
    with pytest.raises(TeacherError, match=r"teacher maths: tensors in .* changed since manifest\.json was written"):
        describe_teacher("maths", directory)
    (directory / "manifest.json").write_text("{}")
    with pytest.raises(TeacherError, match=r"teacher maths: .*holds no readable manifest\.json"):
        describe_teacher("maths", directory)
    (directory / "manifest.json").unlink()
    assert describe_teacher("maths", directory).version != described.version


def test_what_was_read_is_read_again_only_when_a_file_changed(
    tmp_path: Path, directory: Path, reads: list[Path]
) -> None:
    records = tmp_path / "deep" / "records"
    first = describe_teacher("maths", directory, records)
    assert first == describe_teacher("maths", directory)
    reads.clear()
    assert describe_teacher("maths", directory, records) == first
    assert describe_teacher("other name", directory, records).version == first.version
    (directory / "notes.json").write_text("{}")  # says nothing of the model
    assert describe_teacher("maths", directory, records) == first
    assert reads == []
    overwrite(directory, "embed.weight", b"\x12")  # same size, same time
    second = describe_teacher("maths", directory, records)
    assert second.version != first.version
    assert reads == [directory]
    # Of two directories neither is taken for the other.
    copy = copied(directory, tmp_path / "copy")
    assert describe_teacher("maths", copy, records).version == second.version
    assert describe_teacher("maths", directory, records) == second
    assert reads == [directory, copy]


def test_a_configuration_counts_however_the_tensors_were_recorded(
    tmp_path: Path, directory: Path, reads: list[Path]
) -> None:
    first = describe_teacher("maths", directory, tmp_path)
    config = directory / "config.json"
    config.write_text(config.read_text().replace('"routed_scaling_factor": 1.5', '"routed_scaling_factor": 2.5'))
    second = describe_teacher("maths", directory, tmp_path)
    assert second == describe_teacher("maths", directory)
    assert second.version != first.version
    assert len(reads) == 3


@pytest.mark.parametrize("content", [b"", b'{"stamps": {"conf', b"\xff\xfe", b"[]", b'{"stamps": {}, "tensors": {}}'])
def test_a_torn_or_foreign_record_is_no_proof(
    tmp_path: Path, directory: Path, reads: list[Path], content: bytes
) -> None:
    first = describe_teacher("maths", directory, tmp_path / "records")
    (record,) = (tmp_path / "records").glob("*.fingerprints")
    record.write_bytes(content)
    assert describe_teacher("maths", directory, tmp_path / "records") == first
    assert describe_teacher("maths", directory, tmp_path / "records") == first
    assert len(reads) == 2


def test_a_record_that_cannot_be_kept_is_told(tmp_path: Path, directory: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(TeacherError, match=r"teacher maths: .*Not a directory.*file.*teacher_cache\.directory"):
        describe_teacher("maths", directory, tmp_path / "file" / "records")


def test_a_teacher_that_changes_while_it_is_read_is_neither_taken_nor_recorded(
    tmp_path: Path, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = teacher_source.stored_fingerprints

    def during(of: Path, config: ModelConfig) -> dict[str, str]:
        found = read(of, config)
        overwrite(of, "embed.weight", b"\x12")
        return found

    with monkeypatch.context() as patch:
        patch.setattr(teacher_source, "stored_fingerprints", during)
        for records in (None, tmp_path / "records"):
            with pytest.raises(TeacherReadError, match=r"teacher maths: .* changed while it was read"):
                describe_teacher("maths", directory, records)
    assert not list((tmp_path / "records").glob("*.fingerprints"))


def test_the_files_that_were_described_need_no_second_proof(tmp_path: Path, directory: Path, reads: list[Path]) -> None:
    source = describe_teacher("maths", directory)
    reads.clear()
    assert local_teacher(source, directory, tmp_path / "records") == source
    assert reads == []
    assert not (tmp_path / "records").exists()


def test_another_copy_is_proved_once(tmp_path: Path, directory: Path, reads: list[Path]) -> None:
    source = describe_teacher("maths", directory)
    copy = copied(directory, tmp_path / "copy")
    reads.clear()
    for _ in range(3):
        found = local_teacher(source, copy, tmp_path / "records")
        assert found == msgspec.structs.replace(source, directory=copy, stamps=found.stamps)
        assert found.stamps == {file.name: FileStamp.of(file.stat()) for file in copy.iterdir()}
    assert reads == [copy]


def _in_weights(copy: Path) -> None:
    overwrite(copy, "layers.3.ffn.experts.5.w2.weight", b"\x12\x34\x56")


def _in_the_configuration(copy: Path) -> None:
    before = (copy / "config.json").stat()
    text = (copy / "config.json").read_text()
    (copy / "config.json").write_text(
        text.replace('"routed_scaling_factor": 1.5', '"routed_scaling_factor": 2.5'),
    )
    os.utime(copy / "config.json", ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize("change", [_in_weights, _in_the_configuration])
def test_a_copy_that_holds_another_teacher_is_named_with_both_versions(
    tmp_path: Path, directory: Path, change: Callable[[Path], None]
) -> None:
    """Whatever sizes and times say, and whether or not the record knows it."""
    source = describe_teacher("maths", directory)
    copy = copied(directory, tmp_path / "copy")
    local_teacher(source, copy, tmp_path / "records")
    change(copy)
    for file in copy.iterdir():
        assert FileStamp.of(file.stat()).is_content_of(source.stamps[file.name]), "sizes and times agree"
    other = describe_teacher("maths", copy).version
    told = rf"teacher maths: {copy} on \S+ holds version {other[:12]}, and the run began with version"
    for _ in range(2):
        with pytest.raises(TeacherReadError, match=rf"{told} {source.version[:12]}; every node"):
            local_teacher(source, copy, tmp_path / "records")


def test_a_file_replaced_by_one_of_its_size_and_time_is_told_and_a_touched_one_is_proved_once(
    directory: Path, reads: list[Path]
) -> None:
    def now() -> dict[str, FileStamp]:
        return {file.name: FileStamp.of(file.stat()) for file in directory.iterdir()}

    source = describe_teacher("maths", directory)
    reads.clear()
    assert changed_file(source, now()) is None
    assert reads == []
    for file in directory.iterdir():
        file.chmod(0o600)
    for _ in range(3):
        assert changed_file(source, now()) is None
    assert reads == [directory]
    mapped = now()
    removed = mapped | {"config.json": mapped["config.json"]._replace(inode=1)}
    assert changed_file(source, removed) in source.stamps, "nobody can read what no name stands for"
    reads.clear()
    written = overwrite(directory, "embed.weight", b"\x12\x34")
    for _ in range(2):
        assert changed_file(source, now()) in source.stamps
    assert reads == [directory]
    assert changed_file(source, mapped) is None, "proved before"
    reads.clear()
    os.utime(written)
    assert changed_file(source, now()) == written.name
    assert reads == [], "a size or time suffices"
    unknown = TeacherSource(name="maths", directory=directory, version="f" * 32, width=128)
    assert changed_file(unknown, now()) is None


def test_a_source_that_nobody_described_is_no_proof(tmp_path: Path, directory: Path) -> None:
    source = TeacherSource(name="maths", directory=directory, version="f" * 32, width=128)
    with pytest.raises(TeacherReadError, match=r"the run began with version f{12};"):
        local_teacher(source, directory, tmp_path / "records")


def _prove(source: TeacherSource, copy: Path, records: Path, seen: Path, barrier: Barrier) -> None:
    read = teacher_source.stored_fingerprints

    def noting(directory: Path, config: ModelConfig) -> dict[str, str]:
        (seen / str(os.getpid())).touch()
        return read(directory, config)

    teacher_source.stored_fingerprints = noting
    barrier.wait()
    assert local_teacher(source, copy, records).version == source.version


def test_of_the_ranks_of_a_node_one_reads(tmp_path: Path, directory: Path) -> None:
    source = describe_teacher("maths", directory)
    copy = copied(directory, tmp_path / "copy")
    (tmp_path / "seen").mkdir()
    context = multiprocessing.get_context("spawn")  # a fork of threads that compute would wait for them forever
    arguments = (source, copy, tmp_path / "records", tmp_path / "seen", context.Barrier(3))
    processes = [context.Process(target=_prove, args=arguments) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0] * 3
    assert len(list((tmp_path / "seen").iterdir())) == 1
