"""Proves: a checkpoint is whole or absent, the newest whole one is taken, a damaged one is named, old ones go; what
does not read back as it was written never becomes one; a token log that lost records is named.

That real kills leave the checkpoint before is in tests/faults/test_learner_crash.py.
"""

import errno
import os
import shutil
from pathlib import Path

import msgspec
import numpy as np
import pytest

from rollforward.rl import checkpoints
from rollforward.rl.checkpoints import (
    STATE_NAME,
    LoopState,
    latest_checkpoint,
    log_positions,
    name_lost_logs,
    save_checkpoint,
)
from rollforward.rl.errors import CheckpointWriteError
from rollforward.rl.prompts import DataCursor
from rollforward.rollout.replica import LogStats
from rollforward.rollout.types import Request, RequestId, ResumeStats, SamplingParams
from rollforward.rollout.wal import open_log
from rollforward.rollout.wal_records import WalConfig


def _state(step: int) -> LoopState:
    return LoopState(step=step, cursor=DataCursor(source="a" * 16, epoch=1, position=step * 7))


def _write(text: str = "weights") -> object:
    return lambda directory: (directory / "data").write_text(text)


def test_the_newest_is_found_and_old_ones_go(tmp_path: Path) -> None:
    assert latest_checkpoint(tmp_path) is None
    for step in (9, 10, 11):
        save_checkpoint(tmp_path, _state(step), _write(str(step)), keep=2)  # type: ignore[arg-type]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_000010", "step_000011"]
    found = latest_checkpoint(tmp_path)
    assert found is not None
    assert found[1] == _state(11)
    assert (found[0] / "data").read_text() == "11"


@pytest.mark.parametrize(
    ("number", "way_out"),
    [
        (errno.ENOSPC, "Make room or set keep_checkpoints lower"),
        (errno.EDQUOT, "Make room or set keep_checkpoints lower"),
        (errno.EACCES, "Let this user write there"),
        (errno.EROFS, "Let this user write there"),
        (errno.EIO, "See what stands there and look at the device"),
        (errno.ENOTDIR, "Move away what stands there, or name another place"),
    ],
)
def test_a_write_that_fails_leaves_the_one_before_and_says_what_to_do(
    tmp_path: Path, number: int, way_out: str
) -> None:
    save_checkpoint(tmp_path, _state(1), _write(), keep=3)  # type: ignore[arg-type]

    def fail(directory: Path) -> None:
        (directory / "data").write_text("half")
        raise OSError(number, os.strerror(number))

    with pytest.raises(CheckpointWriteError, match="the checkpoint before it is kept") as caught:
        save_checkpoint(tmp_path, _state(2), fail, keep=3)
    assert f"cannot be written: [Errno {number}] {os.strerror(number)}. {way_out}" in str(caught.value)
    assert ("Make room" in str(caught.value)) == ("Make room" in way_out)
    found = latest_checkpoint(tmp_path)
    assert found is not None
    assert found[1].step == 1
    save_checkpoint(tmp_path, _state(2), _write(), keep=3)  # type: ignore[arg-type]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_000001", "step_000002"]


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"step": "x"}', None])
def test_a_damaged_one_is_named_and_the_one_before_is_taken(
    tmp_path: Path, content: bytes | None, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in (1, 2):
        save_checkpoint(tmp_path, _state(step), _write(), keep=3)  # type: ignore[arg-type]
    file = tmp_path / "step_000002" / STATE_NAME
    if content is None:
        file.unlink()
    else:
        file.write_bytes(content)
    found = latest_checkpoint(tmp_path)
    assert found is not None
    assert found[1].step == 1
    assert "step_000002 is damaged" in capsys.readouterr().err


@pytest.mark.parametrize("damage", ["flip", "cut", "gone"])
def test_a_flipped_bit_in_what_the_learner_wrote_is_damage_too(
    tmp_path: Path, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in (1, 2):
        save_checkpoint(tmp_path, _state(step), _write(), keep=3)  # type: ignore[arg-type]
    file = tmp_path / "step_000002" / "data"
    match damage:
        case "flip":
            content = file.read_bytes()
            file.write_bytes(bytes([content[0] ^ 1]) + content[1:])
        case "cut":
            file.write_bytes(file.read_bytes()[:-1])
        case _:
            file.unlink()
    found = latest_checkpoint(tmp_path)
    assert found is not None
    assert found[1].step == 1
    told = capsys.readouterr().err
    assert "step_000002 is damaged: data" in told
    assert f"going on from {found[0]}" in told


def test_where_nothing_is_whole_the_run_begins_again_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_checkpoint(tmp_path, _state(1), _write(), keep=3)  # type: ignore[arg-type]
    (tmp_path / "step_000001" / "data").write_text("")
    assert latest_checkpoint(tmp_path) is None
    assert "from the start of the run" in capsys.readouterr().err


@pytest.mark.parametrize("damage", ["flip", "cut", "gone", "state", "no state"])
def test_what_reads_back_differently_never_becomes_a_checkpoint(
    tmp_path: Path, damage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Damaged between the write and the rename, as by a disk that does not keep what it took."""
    save_checkpoint(tmp_path, _state(1), _write(), keep=1)  # type: ignore[arg-type]
    sync_path = checkpoints.sync_path

    def faulty(directory: Path) -> None:
        sync_path(directory)
        if not directory.name.endswith(".partial"):
            return
        file = directory / (STATE_NAME if "state" in damage else "data")
        match damage:
            case "flip":
                file.write_bytes(bytes([file.read_bytes()[0] ^ 1]) + file.read_bytes()[1:])
            case "cut":
                file.write_bytes(file.read_bytes()[:-1])
            case "state":
                file.write_bytes(file.read_bytes().replace(b'"position":14', b'"position":15'))
            case _:
                file.unlink()

    monkeypatch.setattr(checkpoints, "sync_path", faulty)
    with pytest.raises(CheckpointWriteError, match="step_000002"):
        save_checkpoint(tmp_path, _state(2), _write(), keep=1)  # type: ignore[arg-type]
    found = latest_checkpoint(tmp_path)
    assert found is not None
    assert found[1] == _state(1), "the one before is whole and is taken"
    monkeypatch.undo()
    save_checkpoint(tmp_path, _state(3), _write(), keep=1)  # type: ignore[arg-type]
    assert [path.name for path in tmp_path.iterdir()] == ["step_000003"], "leftovers of any step go"


@pytest.mark.parametrize("keep", [1, 2])
def test_a_damaged_newer_one_does_not_count_among_those_kept(tmp_path: Path, keep: int) -> None:
    """A run that went back to step 2 and saves again must not lose that for the damaged one of step 9."""
    for step in (2, 9):
        save_checkpoint(tmp_path, _state(step), _write(), keep=3)  # type: ignore[arg-type]
    (tmp_path / "step_000009" / "data").write_text("")
    save_checkpoint(tmp_path, _state(3), _write(), keep=keep)  # type: ignore[arg-type]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_000002", "step_000003"][-keep:]
    found = latest_checkpoint(tmp_path)
    assert found is not None
    assert found[1] == _state(3)


@pytest.mark.parametrize(
    ("before", "after"), [('"position":14', '"position":15'), ('"log_positions":{}', '"log_positions":{"engine":7}')]
)
def test_another_number_in_the_state_is_damage_too(
    tmp_path: Path, before: str, after: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is valid JSON, and the run would go on with prompts that it has not reached."""
    for step in (1, 2):
        save_checkpoint(tmp_path, _state(step), _write(), keep=3)  # type: ignore[arg-type]
    file = tmp_path / "step_000002" / STATE_NAME
    assert file.read_text().count(before) == 1
    file.write_text(file.read_text().replace(before, after))
    found = latest_checkpoint(tmp_path)
    assert found is not None
    assert found[1] == _state(1)
    assert f"step_000002 is damaged: {STATE_NAME}" in capsys.readouterr().err


def test_a_file_that_nobody_wrote_is_damage_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A trainer reads all shards that it finds: one of another number of ranks would be believed."""
    for step in (1, 2):
        save_checkpoint(tmp_path, _state(step), _write(), keep=3)  # type: ignore[arg-type]
    (tmp_path / "step_000002" / "shard_7").write_text("")
    found = latest_checkpoint(tmp_path)
    assert found is not None
    assert found[1] == _state(1)
    assert "step_000002 is damaged: shard_7" in capsys.readouterr().err


def _logged(directory: Path, name: str, prompts: range) -> LogStats:
    """Stats of a real log to which some requests are appended."""
    writer, _ = open_log(directory / name, stream=name, config=WalConfig(level="process"))
    with writer:
        for prompt in prompts:
            sampling = SamplingParams(max_new_tokens=4)
            request = Request(
                id=RequestId(0, prompt, 0),
                prompt_ids=np.arange(3, dtype=np.int32),
                seed=prompt,
                sampling=sampling,
                policy_version=1,
            )
            seq = writer.append_open(request, slot=prompt)
            writer.wait_durable(seq)
        return LogStats(replica=name, position=writer.durable_seq, written=writer.stats(), resumed=ResumeStats())


def test_a_log_that_lost_records_is_named_with_both_positions(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Positions grow over restarts, also of a log to which nothing is added; one that is gone begins anew."""
    first = [_logged(tmp_path, "engine-0", range(5)), _logged(tmp_path, "engine-1", range(2))]
    state = msgspec.structs.replace(_state(4), log_positions=log_positions(first))
    assert state.log_positions["engine-0"] - state.log_positions["engine-1"] == 3
    again = [_logged(tmp_path, "engine-0", range(0)), _logged(tmp_path, "engine-1", range(0))]
    name_lost_logs(state, again)
    assert capsys.readouterr().err == ""
    shutil.rmtree(tmp_path / "engine-0")
    lost = [_logged(tmp_path, "engine-0", range(1)), again[1]]
    name_lost_logs(state, lost)
    told = capsys.readouterr().err.splitlines()
    end, position = lost[0].position, first[0].position
    assert len(told) == 1
    assert (
        f"log of engine-0 ends at record {end}, but the checkpoint of step 4 was taken at record {position}" in told[0]
    )
    name_lost_logs(state, again[:1])
    assert "log of engine-1 ends at record -1" in capsys.readouterr().err, "a replica that is gone"
