"""`rollforward sandbox list|replay`: exact counts, exit codes, sentences for mistakes, and not a byte written."""

import json
import os
import signal
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from rollforward.conf import cli
from rollforward.sandbox.client import SandboxClient
from rollforward.sandbox.codec import SEGMENT_HEADER_BYTES
from rollforward.sandbox.command_log import PREPARED_NAME, log_path
from rollforward.sandbox.homes import Home, supervisor_id
from rollforward.sandbox.prepared import Preparation
from rollforward.sandbox.session import Session
from rollforward.sandbox.types import Call
from tests.helpers.sandboxes import wait_for
from tests.helpers.trajectories import Trajectory, end, mark, supervised

COUNTS = ("trajectories", "commands", "answered", "open", "closed", "oom", "unknown", "infra", "damaged")


@pytest.fixture(scope="module")
def home() -> Generator[Home]:
    with supervised() as found:
        yield found


def trajectory(home: Home, run_dir: Path, name: str) -> Trajectory:
    return Trajectory(home, log_path(run_dir, name).parent, name)


def ask(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, dict[str, Any], list[str]]:
    """Exit code, the last line as JSON, and the lines before it."""
    code = cli.main(["sandbox", *map(str, words)])
    *table, last = capsys.readouterr().out.splitlines()
    return code, json.loads(last), table


def mistake(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    """What a user who is wrong is told."""
    assert cli.main(["sandbox", *map(str, words)]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert "Traceback" not in said.err
    return " ".join(said.err.replace("error: ", "").split())


def fill(home: Home, run_dir: Path) -> list[Trajectory]:
    """One of each outcome but infra and oom."""

    async def whole(session: Session) -> None:
        await session.call("t1c0", mark("m0"))
        await session.call("t2c0", Call(tool="shout", arguments={"chars": 70_000}))
        await session.collect(["effects", "given.txt"], max_bytes=1000)
        await session.close()

    async def half(session: Session) -> None:
        await session.call("t1c0", mark("m0"))

    async def lost(session: Session) -> None:
        await session.call("t1c0", mark("m0"))

        async def saboteur(key: str, sandbox: Any) -> None:
            await sandbox.close()

        session._saboteur = saboteur
        await session.call("t2c0", mark("m1"))

    made = [trajectory(home, run_dir, name) for name in ("s0-p0-m0", "s0-p0-m1", "s1-p0-m0", "eval2-p0-m0")]
    for one, work in zip(made, (whole, half, lost, half), strict=True):
        one.live(work)
    made[1].live(lambda session: session.call("t2c0", mark("m1")))
    with made[1].log.open("ab") as file:
        file.write(b"a write that was cut short")
    data = bytearray(made[3].log.read_bytes())
    data[SEGMENT_HEADER_BYTES + 40] ^= 1
    made[3].log.write_bytes(data)
    return made


def snapshot(root: Path) -> dict[Path, tuple[int, bytes]]:
    return {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in root.rglob("*") if path.is_file()}


def test_list_counts_exactly_and_touches_nothing(
    home: Home, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "run"
    made = fill(home, run_dir)
    before = snapshot(run_dir)
    code, found, table = ask(capsys, "list", run_dir)
    assert (code, [found[name] for name in COUNTS]) == (0, [4, 6, 5, 1, 1, 0, 1, 0, 1])
    assert [line.split() for line in table[:5]] == [
        ["trajectory", "commands", "answered", "epochs", "sandboxes", "files", "outcome"],
        ["eval2-p0-m0", "0", "0", "0", "0", "0", "damaged"],
        ["s0-p0-m0", "2", "2", "1", "1", "2", "closed"],
        ["s0-p0-m1", "2", "2", "2", "1", "0", "open"],
        ["s1-p0-m0", "2", "1", "1", "1", "0", "unknown"],
    ]
    assert len(table) == 7
    assert table[5].startswith(f"{made[3].log}: command log {made[3].log} has damaged bytes")
    assert "unknown outcome of t2c0" in table[6]
    logs = {log["trajectory"]: log for log in found["logs"]}
    assert logs["s0-p0-m1"]["torn_bytes"] == len(b"a write that was cut short")
    assert ask(capsys, "list", run_dir / "commands" / "step_000000", "json=true")[1]["trajectories"] == 2
    assert ask(capsys, "list", f"run_dir={run_dir}", "json=true")[2] == []
    (tmp_path / "runs.log").write_text("no command log")
    table = ask(capsys, "list", tmp_path)[2]
    assert len(table) == 7
    assert snapshot(run_dir) == before


def test_two_runs_of_a_recipe_are_told_apart(home: Home, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("one", "two"):
        trajectory(home, tmp_path / name, "s0-p0-m0").live(lambda session: session.call("t1c0", mark("m0")))
    table = ask(capsys, "list", tmp_path)[2]
    assert [line.split()[0] for line in table[1:]] == [f"{n}/commands/step_000000/s0-p0-m0.log" for n in ("one", "two")]


def test_hostile_logs_are_named_and_the_others_listed(
    home: Home, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = trajectory(home, tmp_path, "s0-p0-m0")
    one.live(lambda session: session.call("t1c0", mark("m0")))
    folder = one.log.parent
    (folder / "s0-p0-m1.log").mkdir()
    os.mkfifo(folder / "s0-p0-m2.log")
    (folder / "s0-p0-m3.log").symlink_to("/dev/zero")
    (folder / "s0-p0-m4.log").write_bytes(b"")
    (folder / "s0-p0-m5.log").write_bytes(one.log.read_bytes())
    (folder / os.fsdecode(b"\xff\n.log")).write_bytes(b"\x1b[31m")
    found = ask(capsys, "list", tmp_path)[1]
    assert (found["trajectories"], found["damaged"], found["open"]) == (7, 6, 1)
    for number, why in enumerate(
        ("regular file", "regular file", "is a link", "is empty", "is the one of s0-p0-m0"), 1
    ):
        said = mistake(capsys, "replay", f"s0-p0-m{number}", f"run_dir={tmp_path}")
        assert f"s0-p0-m{number}.log" in said
        assert why in said


def test_a_replay_begins_with_what_was_prepared(home: Home, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = tmp_path / "run"
    one = trajectory(home, run_dir, "s0-p0-m0")
    noise = [["sh", "-c", "head -c 99 /dev/urandom > given.txt; head -c 99999 /dev/urandom > large"]]

    async def prepared(client: SandboxClient) -> None:
        place = one.log.parent / PREPARED_NAME
        begin = Preparation(client, place, spec=one.spec, files={}, commands=noise, config=one.config, sync=False)
        session = await one.open(client, begin=begin)
        await session.call("t1c0", mark("m0"))
        await session.collect(["given.txt", "effects"], max_bytes=1000)
        await session.close()

    one.ask(prepared)
    (run_dir / "config.json").write_text(json.dumps({"sandbox": {"container": {"trusted_code": True}}}))
    words = ("replay", "s0-p0-m0", f"run_dir={run_dir}")
    try:
        assert ask(capsys, *words, "json=true")[1]["same"] == 2
        for path in (one.log.parent / PREPARED_NAME).glob("*"):
            if path.suffix not in (".state", ".lock"):
                path.unlink()
        assert "cannot be replayed" in mistake(capsys, *words)
    finally:
        end(Home.of(supervisor_id("replay", os.getuid(), run_dir)), signal.SIGTERM)


def test_replay_compares_and_exits_with_one_where_something_differs(
    home: Home, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "run"
    one = trajectory(home, run_dir, "s0-p0-m0")

    async def work(session: Session) -> None:
        await session.call("t1c0", mark("m0"))
        await session.call("t1c1", Call(tool="differ", arguments={}))
        await session.collect(["effects"], max_bytes=1000)
        await session.close()

    one.live(work)
    settings = {"sandbox": {"container": {"trusted_code": True, "warm": 3}}}
    (run_dir / "config.json").write_text(json.dumps(settings))
    before = snapshot(run_dir)
    name = supervisor_id("replay", os.getuid(), run_dir)
    try:
        code, found, table = ask(capsys, "replay", "s0-p0-m0", f"run_dir={run_dir}")
        counts = ("same", "masked", "differs", "unknown", "lost")
        assert (code, [found[count] for count in counts]) == (1, [2, 0, 1, 0, 0])
        assert [line.split()[0] for line in table] == ["key", "t1c0", "t1c1", "files", "t1c1:"]
        assert table[1].split() == ["t1c0", "mark(name='m0')", "ok", "same"]
        code, found, table = ask(
            capsys, "replay", "s0-p0-m0", f"run_dir={run_dir}", "mask=\\b[0-9a-f]{8}\\b", "json=true"
        )
        assert (code, [found[count] for count in counts], table) == (0, [2, 1, 0, 0, 0], [])
        assert snapshot(run_dir) == before
        (run_dir / "config.json").unlink()
        # The defaults are for code that nobody vouches for; where this machine cannot hold it, that is a sentence.
        code = cli.main(["sandbox", "replay", "s0-p0-m0", f"run_dir={run_dir}"])
        said = capsys.readouterr()
        assert code == 1 or "trusted_code" in said.err
        assert "Traceback" not in said.err
    finally:
        end(Home.of(name), 15)
    wait_for(lambda: Home.of(name).holder() is None)


def test_mistakes_are_sentences(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    usage = "sandbox list DIR, or sandbox replay TRAJECTORY run_dir=DIR"
    here = f"run_dir={tmp_path}"
    wrong: list[list[str]] = [
        [],
        ["list"],
        ["list", ".", "."],
        ["list", ".", "json=yes"],
        ["list", ".", "mask=x"],
        ["list", ".", "a=b"],
        ["replay"],
        ["replay", "s0-p0-m0"],
        ["replay", here],
        ["replay", "s0-p0-m0", here, "trusted_code=1"],
        ["replay", "s0-p0-m0", "s0-p0-m1", here],
        ["remove", "."],
        ["json=true"],
    ]
    for words in wrong:
        assert usage in mistake(capsys, *words), words
    assert "holds no command log" in mistake(capsys, "list", tmp_path)
    assert "is no directory" in mistake(capsys, "list", tmp_path / "absent")
    assert "cannot be a directory" in mistake(capsys, "list", "a\0b")
    assert "must read s<step>" in mistake(capsys, "replay", "../../etc", here)
    said = mistake(capsys, "replay", "s0-p0-m0", here)
    assert "is not there" in said
    assert f"rollforward sandbox list {tmp_path}" in said


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"sandbox": {"container": {"lease_s": 0}}}', "\0", "[" * 100_000])
def test_settings_that_say_nothing_of_sandboxes_are_named(
    home: Home, tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    trajectory(home, tmp_path, "s0-p0-m0").live(lambda session: session.call("t1c0", mark("m0")))
    (tmp_path / "config.json").write_text(text)
    said = mistake(capsys, "replay", "s0-p0-m0", f"run_dir={tmp_path}")
    assert f"{tmp_path / 'config.json'} does not say how" in said
    assert "mask '(' is no regular expression" in mistake(capsys, "replay", "s0-p0-m0", f"run_dir={tmp_path}", "mask=(")


def test_help_explains_both(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["sandbox", "--help"]) == 0
    said = capsys.readouterr().out
    assert "replay TRAJECTORY run_dir=DIR" in said
    assert cli.main(["--help"]) == 0
    assert "sandbox" in capsys.readouterr().out
