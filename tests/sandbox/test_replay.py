"""Doing a trajectory again in a fresh sandbox: what is the same, masked, or different, and that nothing is changed.

Proves which differences the masks hide and that no others are hidden; does not prove that commands are deterministic.
"""

import asyncio
import re
from collections.abc import Generator, Sequence
from pathlib import Path

import pytest

from rollforward.sandbox.blobs import BlobStore
from rollforward.sandbox.command_log import BLOBS_NAME, read_log
from rollforward.sandbox.errors import CommandLogDamagedError, ToolError
from rollforward.sandbox.homes import Home
from rollforward.sandbox.replay import Masks, Replayed, Verdict, replay
from rollforward.sandbox.session import Session
from rollforward.sandbox.types import Call
from tests.helpers.trajectories import Trajectory, mark, supervised


@pytest.fixture(scope="module")
def home() -> Generator[Home]:
    with supervised() as found:
        yield found


@pytest.fixture
def trajectory(home: Home, tmp_path: Path) -> Trajectory:
    return Trajectory(home, tmp_path / "step_000012")


def again(trajectory: Trajectory, masks: Sequence[str] = ()) -> Replayed:
    view = read_log(trajectory.log)
    blobs = BlobStore(trajectory.log.parent / BLOBS_NAME, sync=False)
    return trajectory.ask(lambda client: replay(client, view, blobs, config=trajectory.config, masks=Masks(masks)))


def verdicts(replayed: Replayed) -> list[tuple[str, str]]:
    return [(step.key, step.verdict.value) for step in replayed.steps]


def test_what_is_a_function_of_the_sandbox_is_the_same_bit_for_bit(trajectory: Trajectory) -> None:
    async def work(session: Session) -> None:
        await session.call("t1c0", mark("m0"))
        await session.call("t1c1", mark("m1"))
        await session.call("t2c0", Call(tool="read", arguments={"path": "given.txt"}))
        await session.call("t3c0", Call(tool="shout", arguments={"chars": 100_000}))
        await session.call("t4c0", Call(tool="raise_it", arguments={"text": "\ud800 \n \x1b[31m"}))
        await session.call("t5c0", Call(tool="hoard", arguments={}))
        await session.collect(["effects", "deep/er/bytes"], max_bytes=1 << 16)
        await session.close()

    trajectory.live(work)
    before = {path: path.read_bytes() for path in trajectory.log.parent.rglob("*") if path.is_file()}
    replayed = again(trajectory)
    keys = ["t1c0", "t1c1", "t2c0", "t3c0", "t4c0", "t5c0", "files"]
    assert verdicts(replayed) == [(key, "same") for key in keys]
    assert (replayed.trajectory, replayed.diverged, replayed.notes) == ("s12-p3-m0", 0, ())
    assert all(step.what.isprintable() for step in replayed.steps)
    assert {path: path.read_bytes() for path in trajectory.log.parent.rglob("*") if path.is_file()} == before
    assert trajectory.alive() == []
    assert trajectory.ask(lambda client: client.list()) == []


def test_what_differs_by_nature_is_masked_and_the_rest_is_told(trajectory: Trajectory) -> None:
    async def work(session: Session) -> None:
        await session.call("t1c0", Call(tool="differ", arguments={}))
        await session.call("t2c0", mark("m0"))

    trajectory.live(work)
    plain = again(trajectory)
    assert verdicts(plain) == [("t1c0", "differs"), ("t2c0", "same")]
    assert re.fullmatch(r"line 1 was '<epoch> <address> [0-9a-f]{8} .*, is now .*", plain.steps[0].difference)
    assert plain.diverged == 1
    masked = again(trajectory, [r"\b[0-9a-f]{8}\b"])
    assert verdicts(masked) == [("t1c0", "masked"), ("t2c0", "same")]
    assert masked.diverged == 0


def test_a_command_without_a_result_is_not_done_again(trajectory: Trajectory) -> None:
    async def cut_short(session: Session) -> None:
        await session.call("t1c0", mark("m0"))
        asking = asyncio.create_task(session.call("t2c0", mark("m1", before_s=2.0)))
        while read_log(trajectory.log).history.running is None:
            await asyncio.sleep(0.01)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking

    trajectory.live(cut_short)
    replayed = again(trajectory)
    assert verdicts(replayed) == [("t1c0", "same"), ("t2c0", "unknown")]
    assert replayed.diverged == 0


def test_a_tool_that_changed_is_noted_and_what_it_says_now_differs(trajectory: Trajectory) -> None:
    async def work(session: Session) -> None:
        await session.call("t1c0", mark("m0"))
        await session.call("t2c0", Call(tool="read", arguments={"path": "given.txt"}))
        await session.collect(["effects"], max_bytes=100)

    trajectory.live(work)
    file = Path(trajectory.spec.tools[0].file or "")
    file.write_text(file.read_text().replace('name + "\\n"', 'name + "!\\n"').replace("open(path)", "open(path + 'x')"))
    replayed = again(trajectory)
    assert verdicts(replayed) == [("t1c0", "differs"), ("t2c0", "differs"), ("files", "differs")]
    assert replayed.steps[1].difference == "status ok is now error"
    assert replayed.steps[2].difference == "effects: line 1 was 'm0', is now 'm0!'"
    assert "the text of a tool" in replayed.notes[0]
    file.unlink()
    with pytest.raises(ToolError, match=re.escape(str(file))):
        again(trajectory)


def test_files_that_come_or_go_differ(trajectory: Trajectory) -> None:
    async def work(session: Session) -> None:
        await session.call("t1c0", Call(tool="remove", arguments={"path": "effects"}))
        await session.collect(["effects"], max_bytes=100)

    trajectory.live(work)
    assert verdicts(again(trajectory)) == [("t1c0", "same"), ("files", "same")]
    file = Path(trajectory.spec.tools[0].file or "")
    file.write_text(file.read_text().replace('os.symlink("/etc/passwd", path)', "pass"))
    replayed = again(trajectory)
    assert verdicts(replayed) == [("t1c0", "same"), ("files", "differs")]


def test_files_beside_one_that_cannot_be_taken_are_compared_too(trajectory: Trajectory) -> None:
    async def work(session: Session) -> None:
        await session.call("t1c0", mark("m0"))
        await session.collect(["deep", "effects"], max_bytes=100)

    trajectory.live(work)
    assert verdicts(again(trajectory)) == [("t1c0", "same"), ("files", "same")]
    file = Path(trajectory.spec.tools[0].file or "")
    changed = "open('effects', 'a').write('x'); return"
    file.write_text(file.read_text().replace('return f"{data.count', f'{changed} f"{{data.count'))
    replayed = again(trajectory)
    assert verdicts(replayed) == [("t1c0", "same"), ("files", "differs")]
    assert replayed.steps[1].difference == "effects: line 2 was '', is now 'x'"


def test_a_trajectory_without_a_sandbox_has_nothing_to_do(trajectory: Trajectory) -> None:
    async def nothing(session: Session) -> None:
        await session.close()

    trajectory.live(nothing)
    assert again(trajectory).steps == ()


def test_a_damaged_log_or_blob_is_not_replayed(trajectory: Trajectory) -> None:
    trajectory.live(lambda session: session.call("t1c0", Call(tool="shout", arguments={"chars": 50_000})))
    (blob,) = (trajectory.log.parent / "blobs").iterdir()
    blob.write_bytes(b"")
    with pytest.raises(CommandLogDamagedError, match=re.escape(str(blob))):
        again(trajectory)
    trajectory.log.write_bytes(trajectory.log.read_bytes()[:60])
    with pytest.raises(CommandLogDamagedError, match=re.escape(str(trajectory.log))):
        again(trajectory)
    assert trajectory.alive() == [f"{trajectory.id}-a0"]


@pytest.mark.parametrize(
    ("before", "now"),
    [
        ("at 2026-11-29T10:11:12.5Z", "at 2025-01-02T00:00:00+01:00"),
        ("Mon Nov 30 05:10:17 UTC 2026", "Tue Dec  1 15:10:18 UTC 2026"),
        ("-rw-r--r-- 1 u u 0 Nov  3 10:00 x", "-rw-r--r-- 1 u u 0 Dec 13 23:59 x"),
        ("3 passed in 0.12s", "3 passed in 1.5s"),
        ("real\t0m0.005s", "real\t1m2.125s"),
        ("took 12 ms", "took 9.5 ms"),
        ("<object object at 0x7f3a5c0b1d40>", "<object object at 0x55aa00ff1122>"),
        ("a/tmpab12cd_9/x and tmp.aB3dE6fG8h", "a/tmpzzzz0000/x and tmp.0000000000"),
        ("pid=17, PID 9: process 8", "pid=4242, PID 1: process 77"),
        ("[1] 1234", "[1] 99"),
        ("id 3fa85f64-5717-4562-b3fc-2c963f66afa6", "id 00000000-0000-0000-0000-000000000000"),
        ("1764479417.123456", "1764400000.5"),
    ],
)
def test_masks_hide_what_differs_by_nature(before: str, now: str) -> None:
    masks = Masks()
    assert masks(before) == masks(now) != before


@pytest.mark.parametrize(
    ("before", "now"),
    [
        ("42", "43"),
        ("3 passed", "4 passed"),
        ("exit 1", "exit 2"),
        ("0x10", "0x11"),
        ("x = 12345", "x = 12346"),
        ("1.5", "1.6"),
        ("tmp", "tmp1"),
        ("ratio 1:2", "ratio 1:3"),
        ("deadbeef", "deadbeff"),
        ("[1, 2]", "[1, 3]"),
        ("a b", "a  b"),
        ("May", "June"),
    ],
)
def test_masks_hide_no_results(before: str, now: str) -> None:
    masks = Masks()
    assert masks(before) != masks(now)


@pytest.mark.parametrize("pattern", ["(", "a{2,1}", "(?P<n>x)(?P<n>y)", "[z-a]"])
def test_a_mask_that_is_no_expression_is_named(pattern: str) -> None:
    with pytest.raises(ValueError, match=f"mask {re.escape(repr(pattern))} is no regular expression"):
        Masks([pattern])


def test_verdicts_are_what_a_table_shows() -> None:
    assert [verdict.value for verdict in Verdict] == ["same", "masked", "differs", "unknown", "lost"]
