"""`rollforward wal inspect|verify`: exact counts, an exit code for damage, and not a byte written."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollforward.conf import cli
from rollforward.rollout.types import Request, RequestId, SamplingParams, StopReason
from rollforward.rollout.wal import WalWriter, open_log
from rollforward.rollout.wal_records import WalConfig
from rollforward.sandbox.codec import SEGMENT_HEADER_BYTES, frame_seed, scan_frames


def write(directory: Path, config: WalConfig) -> WalWriter:
    """Three requests: one finished with 2 tokens, one with 3 tokens, one without any. 8 records."""
    writer, _ = open_log(directory, stream=directory.name, config=config)
    for member in range(3):
        request = Request(
            id=RequestId(0, 0, member),
            prompt_ids=np.array([1], np.int32),
            seed=member,
            sampling=SamplingParams(max_new_tokens=9),
            policy_version=1,
        )
        writer.wait_durable(writer.append_open(request, slot=member))
    for slots in ([0, 1], [1, 0]):
        rows = np.array(slots, np.uint16), np.array([7, 8], np.int32), np.zeros(2, np.float32)
        writer.wait_durable(writer.append_step(*rows, policy_version=1))
    writer.wait_durable(writer.append_close(0, StopReason.EOS))
    rows = np.array([1], np.uint16), np.array([9], np.int32), np.zeros(1, np.float32)
    writer.wait_durable(writer.append_step(*rows, policy_version=1))
    return writer


def snapshot(root: Path) -> dict[Path, tuple[int, bytes]]:
    return {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in root.rglob("*") if path.is_file()}


def ask(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, dict[str, Any], list[str]]:
    """Exit code, the last line as JSON, and the lines before it."""
    code = cli.main(["wal", *map(str, words)])
    *table, last = capsys.readouterr().out.splitlines()
    return code, json.loads(last), table


def test_a_log_in_use_is_counted_exactly_and_not_touched(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    writer = write(tmp_path / "wal" / "engine-0", WalConfig())
    before = snapshot(tmp_path)
    for action in ("inspect", "verify"):
        code, found, table = ask(capsys, action, tmp_path)
        assert code == 0
        names = ("records", "requests", "finished", "unfinished", "failed", "tokens", "torn_bytes", "damaged")
        assert [found[name] for name in names] == [7, 3, 1, 2, 0, 5, 0, 0]
        assert [line.split() for line in table] == [
            ["stream", *names],
            ["engine-0", "7", "3", "1", "2", "0", "5", "0", "0"],
        ]
    assert snapshot(tmp_path) == before
    writer.close()
    code, found, table = ask(capsys, "inspect", tmp_path / "wal" / "engine-0", "json=true")
    assert (code, found["records"], found["streams"][0]["is_sealed"], table) == (0, 8, True, [])


def test_a_torn_tail_is_no_damage_and_a_flipped_bit_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    home = tmp_path / "wal" / "engine-0"
    write(home, WalConfig(level="process")).abandon()
    (path,) = home.glob("*.wal")
    data = path.read_bytes()
    ends = [
        frame.end for frame in scan_frames(data, offset=SEGMENT_HEADER_BYTES, seed=frame_seed("engine-0", 1)).frames
    ]
    path.write_bytes(data[: ends[-2] + 20])
    code, found, _ = ask(capsys, "verify", tmp_path)
    assert (code, found["tokens"], found["torn_bytes"], found["damaged"]) == (0, 4, 20, 0)
    path.write_bytes(data[: ends[3] + 40] + bytes([data[ends[3] + 40] ^ 1]) + data[ends[3] + 41 :])
    for action, expected in (("inspect", 0), ("verify", 1)):
        code, found, table = ask(capsys, action, tmp_path)
        assert (code, found["lost_records"], found["failed"], found["torn_bytes"]) == (expected, 1, 3, 0)
        assert found["damaged"] >= 2
        assert any("lost_frames" in line and "s0-p0-m1" in line for line in table)


def test_all_runs_of_a_recipe_and_the_copies_that_their_settings_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mirror_dir = tmp_path / "mirror"
    config = WalConfig(level="cluster", mirror_dir=str(mirror_dir), mirror_same_device=True)
    runs = tmp_path / "runs"
    for name in ("sft", "grpo"):
        write(runs / name / "wal" / "engine-0", config).close()
        settings = {"rollout": {"wal": {"mirror_dir": str(mirror_dir)}}}
        (runs / name / "config.json").write_text(json.dumps(settings))
    code, found, table = ask(capsys, "verify", runs)
    assert (code, found["tokens"], len(found["streams"]), found["damaged"]) == (0, 10, 2, 0)
    assert str(runs / "sft" / "wal" / "engine-0") in table[2]
    for path in (runs / "sft" / "wal" / "engine-0").glob("*.wal"):
        path.unlink()
    code, found, table = ask(capsys, "verify", runs)
    assert (code, found["tokens"], found["failed"], found["damaged"]) == (1, 10, 0, 1)
    assert any("healed" in line for line in table)
    (runs / "sft" / "config.json").unlink()
    assert ask(capsys, "verify", runs / "sft")[1]["tokens"] == 0
    assert ask(capsys, "verify", runs / "sft", f"mirror_dir={mirror_dir}")[1]["tokens"] == 5
    shutil.rmtree(runs)


@pytest.mark.parametrize(
    "words",
    [[], ["inspect"], ["repair", "."], ["inspect", ".", "x"], ["verify", ".", "json=1"], ["verify", ".", "a=b"]],
)
def test_other_words_are_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    assert cli.main(["wal", *words]) == 2
    assert "wal inspect DIR or wal verify DIR" in " ".join(capsys.readouterr().err.split())
    assert cli.main(["wal", "verify", str(tmp_path)]) == 2
    assert "holds no token log" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("value", [5, [], {}, True, "a\0b"])
def test_nonsense_in_a_runs_settings_names_no_mirror(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], value: object
) -> None:
    write(tmp_path / "wal" / "engine-0", WalConfig(level="process")).close()
    (tmp_path / "config.json").write_text(json.dumps({"rollout": {"wal": {"mirror_dir": value}}}))
    code, found, _ = ask(capsys, "verify", tmp_path)
    assert (code, found["tokens"]) == (0, 5)


def test_a_directory_may_be_named_as_a_setting(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "wal" / "engine-0", WalConfig(level="process")).close()
    assert ask(capsys, "verify", f"run_dir={tmp_path}")[1]["tokens"] == 5


@pytest.mark.parametrize("word", ["a\0b", "a" * 5000])
def test_what_no_directory_can_be_called_is_told_in_a_sentence(capsys: pytest.CaptureFixture[str], word: str) -> None:
    assert cli.main(["wal", "verify", word]) == 2
    assert "cannot be a directory" in capsys.readouterr().err
