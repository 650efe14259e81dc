"""Proves: a checkpoint is whole or absent, the newest whole one is taken, a damaged one is named, old ones go."""

from pathlib import Path

import pytest

from rollforward.rl.checkpoints import STATE_NAME, LoopState, latest_checkpoint, save_checkpoint
from rollforward.rl.prompts import DataCursor


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


def test_a_write_that_fails_leaves_the_one_before(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, _state(1), _write(), keep=3)  # type: ignore[arg-type]

    def fail(directory: Path) -> None:
        (directory / "data").write_text("half")
        raise OSError("the disk is full")

    with pytest.raises(OSError, match="full"):
        save_checkpoint(tmp_path, _state(2), fail, keep=3)
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
