"""Sessions over real sandboxes of a real supervisor: what is answered from the log, asked again, replaced, given up.

Proves that a command runs once over all lives of a trajectory, or that the trajectory says that nobody knows; that a
log torn anywhere, with its sandbox alive, lost or replaced, always leads to one of these. The kills of processes are in
tests/faults/test_command_kills.py.
"""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Generator
from pathlib import Path

import msgspec
import pytest

from rollforward.sandbox import tenancy as tenancy_module
from rollforward.sandbox.client import Sandbox, SandboxClient, SocketTransport
from rollforward.sandbox.codec import SEGMENT_HEADER_BYTES, Frame, frame_seed, scan_frames
from rollforward.sandbox.command_log import CommandLog, read_log
from rollforward.sandbox.command_records import StartRecord, encode_call
from rollforward.sandbox.config import KeptSubstrate, Limits, ToolConfig
from rollforward.sandbox.homes import Home
from rollforward.sandbox.session import OOM_TEXT, Collected, Session, SessionResult
from rollforward.sandbox.types import Call, CallStatus, SandboxSpec
from tests.helpers.trajectories import CONFIG, FILES, Trajectory, end, mark, supervised

NOWHERE = Path("/nowhere/socket")


@pytest.fixture(scope="module")
def home() -> Generator[Home]:
    with supervised() as found:
        yield found


@pytest.fixture
def trajectory(home: Home, tmp_path: Path) -> Trajectory:
    return Trajectory(home, tmp_path / "step_000012")


async def some(session: Session, count: int = 3, first: int = 0) -> list[SessionResult]:
    return [await session.call(f"t{n}c0", mark(f"m{n}")) for n in range(first, first + count)]


async def effects(session: Session) -> Collected:
    return await session.collect(["effects", "absent"], max_bytes=1 << 16)


def marks(*numbers: int) -> dict[str, bytes]:
    return {"effects": b"".join(b"m%d\n" % number for number in numbers)}


def infra(result: SessionResult, *words: str) -> None:
    """The result is an infra failure that says all the words, and nothing that could be scored."""
    assert (result.result.status, result.result.text) == (CallStatus.INFRA, "")
    for word in words:
        assert word in result.result.detail, result.result.detail


def test_calls_are_made_in_order_and_answered_from_the_log_in_the_next_life(trajectory: Trajectory) -> None:
    async def first(session: Session) -> list[SessionResult]:
        results = await some(session)
        results += await asyncio.gather(*(session.call(f"t5c{n}", mark(f"m{n}")) for n in range(5)))
        results.append(await session.call("t6c0", Call(tool="shout", arguments={"chars": 100_000})))
        results.append(await session.call("t6c1", Call(tool="raise_it", arguments={"text": "no \ud800"})))
        results.append(await session.call("t6c2", Call(tool="nothing", arguments={})))
        results.append(await session.call("t6c3", Call(tool="read", arguments={"path": "deep/../given.txt"})))
        assert session.num_created == 1
        return results

    made = trajectory.live(first)
    assert [one.result.status for one in made] == [CallStatus.OK] * 9 + [CallStatus.ERROR] * 2 + [CallStatus.OK]
    assert [int(one.result.text.split()[0]) for one in made[:8]] == list(range(1, 9))
    assert (len(made[8].result.text), made[8].result.total_bytes) == (100_000, 200_000)
    assert made[11].result.text == "given"
    assert [one.position for one in made] == sorted({one.position for one in made})
    assert not any(one.is_replayed for one in made)

    async def second(session: Session) -> list[SessionResult]:
        again = await some(session)
        again += [await session.call(f"t5c{n}", mark(f"m{n}")) for n in range(5)]
        again.append(await session.call("t6c0", Call(tool="shout", arguments={"chars": 100_000})))
        return again

    # Nobody is there to be asked: the log alone answers.
    again = trajectory.live(second, transport=SocketTransport(NOWHERE))
    assert all(one.is_replayed for one in again)
    assert [(one.result, one.position) for one in again] == [(one.result, one.position) for one in made[:9]]


def test_the_end_collects_once_and_closes_the_sandbox(trajectory: Trajectory) -> None:
    async def first(session: Session) -> Collected:
        await some(session)
        collected = await effects(session)
        infra(await session.call("t9c0", mark("late")), "after the files were collected")
        return collected

    collected = trajectory.live(first)
    assert (collected.files, collected.problem, collected.failure) == (marks(0, 1, 2), "", "")
    assert trajectory.alive() == []


def test_a_closed_trajectory_answers_and_does_nothing_new(trajectory: Trajectory) -> None:
    async def whole(session: Session) -> tuple[list[SessionResult], Collected]:
        results = await some(session)
        collected = await effects(session)
        await session.close()
        await session.close()
        return results, collected

    results, collected = trajectory.live(whole)
    assert trajectory.alive() == []

    async def again(session: Session) -> None:
        assert [one.result for one in await some(session)] == [one.result for one in results]
        found = await effects(session)
        assert (found.files, found.position, found.is_replayed) == (collected.files, collected.position, True)
        infra(await session.call("t7c0", mark("new")), "t7c0 is asked for after the trajectory was closed")
        await session.close()

    before = trajectory.log.read_bytes()
    for transport in (SocketTransport(NOWHERE), SocketTransport(trajectory.home.socket)):
        trajectory.live(again, transport=transport)
    assert trajectory.log.read_bytes() == before
    assert trajectory.alive() == []


async def until_marked(trajectory: Trajectory, name: str) -> None:
    """Wait until a command has left its mark."""

    def look(client: SandboxClient) -> Awaitable[dict[str, bytes]]:
        return _download(client, f"{trajectory.id}-a0", "effects")

    while name.encode() not in (await asyncio.to_thread(trajectory.ask, look)).get("effects", b""):
        await asyncio.sleep(0.02)


def test_a_command_that_ended_while_nobody_listened_runs_once(trajectory: Trajectory) -> None:
    slow = mark("m1", after_s=2.0)

    async def cut_short(session: Session) -> None:
        await some(session, 1)
        asking = asyncio.create_task(session.call("t1c0", slow))
        await until_marked(trajectory, "m1")
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking

    trajectory.live(cut_short)
    view = read_log(trajectory.log)
    assert view.history.running is not None

    async def go_on(session: Session) -> tuple[SessionResult, SessionResult, Collected]:
        last = await session.call("t1c0", slow)
        return last, await session.call("t2c0", mark("m2")), await effects(session)

    last, after, collected = trajectory.live(go_on)
    assert (last.is_replayed, after.is_replayed) == (False, False)
    assert [one.result.text.split()[0] for one in (last, after)] == ["2", "3"]
    assert collected.files == marks(0, 1, 2)


def test_a_call_that_is_cancelled_is_asked_for_again_in_the_same_life(trajectory: Trajectory) -> None:
    async def both(session: Session) -> Collected:
        for patience_s in (0.02, 0.1):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(session.call("t0c0", mark("m0", before_s=3.0)), patience_s)
        infra_free = await session.call("t0c0", mark("m0", before_s=3.0))
        assert infra_free.result.status is CallStatus.OK
        return await effects(session)

    assert trajectory.live(both).files == marks(0)


def test_a_call_that_is_cancelled_while_its_sandbox_is_made_gets_one_that_is_not_given_up(
    home: Home, tmp_path: Path
) -> None:
    for number, patience_s in enumerate((0.0, 0.001, 0.002, 0.003, 0.004, 0.006, 0.008, 0.012)):
        trajectory = Trajectory(home, tmp_path / str(number))

        async def both(session: Session, patience_s: float = patience_s) -> Collected:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(session.call("t0c0", mark("m0")), patience_s)
            await some(session, 2)
            await asyncio.sleep(0.02)
            await some(session, 1, first=2)
            return await effects(session)

        assert trajectory.live(both).files == marks(0, 1, 2)


def start_by_hand(trajectory: Trajectory, key: str, call: Call) -> None:
    """What a predecessor leaves that was killed after its START and before it sent anything."""
    log = CommandLog.open(trajectory.log, sync=False)
    encoded = encode_call(call)
    log.append(StartRecord(key, encoded.digest, encoded.request))
    log.close()


def test_a_command_that_was_never_sent_runs_once(trajectory: Trajectory) -> None:
    trajectory.live(lambda session: some(session, 2))
    start_by_hand(trajectory, "t2c0", mark("m2"))

    async def go_on(session: Session) -> Collected:
        assert (await session.call("t2c0", mark("m2"))).result.text.startswith("3 ")
        return await effects(session)

    assert trajectory.live(go_on).files == marks(0, 1, 2)


def test_a_command_whose_sandbox_is_gone_is_unknown_for_good(trajectory: Trajectory) -> None:
    trajectory.live(lambda session: some(session, 2))
    start_by_hand(trajectory, "t2c0", mark("m2"))
    trajectory.ask(lambda client: _close(client, f"{trajectory.id}-a0"))

    async def go_on(session: Session) -> str:
        assert [one.result.status for one in await some(session, 2)] == [CallStatus.OK] * 2
        infra(await session.call("t2c0", mark("m2")), "unknown outcome of t2c0", f"{trajectory.id}-a0")
        infra(await session.call("t3c0", mark("m3")), "unknown outcome of t2c0")
        assert "unknown outcome of t2c0" in (await effects(session)).failure
        assert session.num_created == 0
        return session.failure

    failures = {trajectory.live(go_on) for _ in range(3)}
    assert len(failures) == 1
    assert trajectory.alive() == []
    assert read_log(trajectory.log).history.is_unknown


async def _close(client: SandboxClient, sandbox_id: str) -> None:
    await (await client.adopt(sandbox_id)).close()


def test_another_sandbox_under_the_same_name_gets_no_command(trajectory: Trajectory) -> None:
    trajectory.live(lambda session: some(session, 1))

    async def replace(client: SandboxClient) -> str:
        await _close(client, f"{trajectory.id}-a0")
        made = await client.create(f"{trajectory.id}-a0", trajectory.spec)
        return made.instance

    instance = trajectory.ask(replace)

    async def go_on(session: Session) -> None:
        infra(await session.call("t1c0", mark("m1")), instance, "its files are gone")

    trajectory.live(go_on)
    assert not read_log(trajectory.log).history.is_unknown


def test_a_sandbox_that_is_lost_before_the_first_command_is_replaced_so_often(trajectory: Trajectory) -> None:
    async def look(session: Session) -> Collected:
        return await session.collect(list(FILES), max_bytes=1 << 16)

    async def prepare(session: Session) -> None:
        assert session._tenancy is not None
        async with session._lock:  # a session that is opened looks for its sandbox itself
            await session._tenancy.ready()

    async def given(client: SandboxClient, sandbox_id: str) -> dict[str, bytes]:
        return await (await client.adopt(sandbox_id)).download(list(FILES), max_bytes=1 << 16)

    for attempt in range(CONFIG.attempts):
        sandbox_id = f"{trajectory.id}-a{attempt}"
        for _ in range(2):  # the second life finds what the first made
            trajectory.live(prepare)
            assert trajectory.alive() == [sandbox_id]
        assert trajectory.ask(lambda client, sandbox_id=sandbox_id: given(client, sandbox_id)) == FILES
        trajectory.ask(lambda client, sandbox_id=sandbox_id: _close(client, sandbox_id))
    failure = trajectory.live(look).failure
    assert "3 sandboxes of this trajectory were lost before a command reached them" in failure
    assert "sandbox.container.attempts=3" in failure
    assert trajectory.live(look).failure == failure
    assert trajectory.alive() == []


def test_another_history_is_refused_and_nothing_runs(trajectory: Trajectory) -> None:
    trajectory.live(lambda session: some(session, 2))
    sound = trajectory.log.read_bytes()

    async def refused(session: Session, key: str, call: Call, *words: str) -> None:
        infra(await session.call(key, call), *words)
        infra(await session.call("t7c0", mark("m7")), *words)

    cases: list[tuple[str, Call, str]] = [
        ("t1c0", mark("other"), "t1c0 is asked for with another tool or other arguments"),
        ("t1c0", Call(tool="read", arguments={"name": "m1"}), "another tool"),
        ("t0c1", mark("m0"), "goes on to t1c0"),
        ("t01c0", mark("m0"), "must read t<turn>c<index>"),
        ("1", mark("m0"), "must read t<turn>c<index>"),
    ]
    for key, call, word in cases:
        trajectory.log.write_bytes(sound)
        # The sandbox ends with the first refusal; who goes on from the sound log is told that it is gone.
        trajectory.live(lambda session, key=key, call=call, word=word: refused(session, key, call, word))
        assert read_log(trajectory.log).history.failure != ""

    trajectory.log.write_bytes(sound)
    start_by_hand(trajectory, "t2c0", mark("m2"))
    trajectory.live(lambda session: refused(session, "t3c0", mark("m3"), "t3c0 is asked for while t2c0 has no result"))

    trajectory.log.write_bytes(sound)
    for name, value, word in (
        ("files", {"given.txt": b"other"}, "the files that it begins with are not those"),
        ("spec", SandboxSpec(limits=Limits(files=100), tools=trajectory.spec.tools), "image, limits or tools are not"),
        ("known_position", 1000, "record 1000 was durable once"),
    ):
        more = {name: value}
        trajectory.live(lambda session, word=word: refused(session, "t0c0", mark("m0"), word), **more)
        assert trajectory.log.read_bytes() == sound


def test_a_tool_whose_text_changed_is_another_sandbox(trajectory: Trajectory) -> None:
    trajectory.live(lambda session: some(session, 1))
    file = Path(trajectory.spec.tools[0].file or "")
    file.write_text(file.read_text() + "\n# changed\n")

    async def refused(session: Session) -> None:
        infra(await session.call("t0c0", mark("m0")), "image, limits or tools are not those")

    trajectory.live(refused)


def test_out_of_memory_is_the_policys_doing_in_every_life(trajectory: Trajectory) -> None:
    hoard = Call(tool="hoard", arguments={})

    async def first(session: Session) -> list[SessionResult]:
        return [*await some(session, 1), await session.call("t1c0", hoard)]

    made = trajectory.live(first)
    assert made[1].result.status is CallStatus.OOM
    is_gone = trajectory.alive() == []
    assert is_gone == (made[1].result.text == OOM_TEXT)

    async def second(session: Session) -> list[SessionResult]:
        return [
            await session.call("t1c0", hoard),
            await session.call("t2c0", Call(tool="read", arguments={"path": "effects"})),
        ]

    again = trajectory.live(second)
    assert again[0].result == made[1].result
    assert again[1].result.text == (OOM_TEXT if is_gone else "m0\n")
    assert again[1].result.status is (CallStatus.OOM if is_gone else CallStatus.OK)


def test_a_sandbox_that_is_gone_with_its_memory_is_the_policys_doing_in_every_life(trajectory: Trajectory) -> None:
    """What the kernel does in the last resort: a process of the command dies, and the sandbox's first one."""
    hoard = Call(tool="hoard_and_wait", arguments={"seconds": 20.0})

    async def hoarded() -> bool:
        def look(client: SandboxClient) -> object:
            return _download(client, f"{trajectory.id}-a0", "hoarded")

        return bool(await asyncio.to_thread(trajectory.ask, look))

    async def first(session: Session) -> list[SessionResult]:
        results = await some(session, 1)
        asking = asyncio.create_task(session.call("t1c0", hoard))
        while not await hoarded():
            await asyncio.sleep(0.02)
        trajectory.kill()
        return [*results, await asking]

    made = trajectory.live(first)
    assert [one.result.status for one in made] == [CallStatus.OK, CallStatus.OOM]
    assert made[1].result.text == OOM_TEXT
    assert trajectory.alive() == []

    async def second(session: Session) -> Collected:
        assert (await session.call("t1c0", hoard)).result == made[1].result
        for key in ("t2c0", "t3c0"):
            told = (await session.call(key, mark(key))).result
            assert (told.status, told.text) == (CallStatus.OOM, OOM_TEXT)
        return await effects(session)

    for _ in range(2):
        # Nobody needs to be asked.
        collected = trajectory.live(second, transport=SocketTransport(NOWHERE))
        assert (collected.files, collected.problem, collected.failure) == ({}, OOM_TEXT, "")
    assert read_log(trajectory.log).history.failure == ""


async def _download(client: SandboxClient, sandbox_id: str, path: str) -> dict[str, bytes]:
    return await (await client.adopt(sandbox_id)).download([path], max_bytes=1 << 16)


@pytest.mark.parametrize("how", ["killed", "closed"])
def test_a_sandbox_that_is_lost_inside_a_command_leaves_it_unknown_for_good(trajectory: Trajectory, how: str) -> None:
    slow = mark("m1", after_s=20.0)

    async def first(session: Session) -> SessionResult:
        await some(session, 1)
        asking = asyncio.create_task(session.call("t1c0", slow))
        await until_marked(trajectory, "m1")
        if how == "killed":
            trajectory.kill()
        else:
            await asyncio.to_thread(trajectory.ask, lambda client: _close(client, f"{trajectory.id}-a0"))
        return await asking

    infra(trajectory.live(first), "unknown outcome of t1c0")

    async def second(session: Session) -> None:
        infra(await session.call("t1c0", slow), "unknown outcome of t1c0")
        infra(await session.call("t2c0", mark("m2")), "unknown outcome of t1c0")
        assert session.num_created == 0

    for _ in range(2):
        trajectory.live(second)
    assert trajectory.alive() == []


def test_who_only_answers_from_the_log_holds_the_lease_too(tmp_path: Path) -> None:
    config = msgspec.structs.replace(CONFIG, lease_s=3.0)
    with supervised(config) as home:
        trajectory = Trajectory(home, tmp_path / "step_000012")
        trajectory.config = config
        trajectory.live(lambda session: some(session, 1))

        async def slow_model(session: Session) -> Collected:
            assert (await some(session, 1))[0].is_replayed
            await asyncio.sleep(5.0)
            return await effects(session)

        assert trajectory.live(slow_model).files == marks(0)


def test_what_cannot_be_collected_is_the_policys_doing_and_said_again(trajectory: Trajectory) -> None:
    async def first(session: Session) -> Collected:
        await session.call("t0c0", Call(tool="remove", arguments={"path": "answer"}))
        return await session.collect(["answer"], max_bytes=100)

    found = trajectory.live(first)
    assert (found.files, found.failure) == ({}, "")
    assert "answer" in found.problem
    again = trajectory.live(lambda session: session.collect(["answer"], max_bytes=100))
    assert (again.problem, again.is_replayed) == (found.problem, True)
    other = trajectory.live(lambda session: session.collect(["answer"], max_bytes=101))
    assert "others were collected" in other.failure


LEFT = """
mkdir -p dir/deep; echo x > dir/file; ln -s good link; ln -s dir way; mkfifo pipe; echo x > mine; chmod 0 mine
mkdir shut; echo x > shut/file; chmod 0 shut; touch empty; head -c 60 /dev/zero > large; head -c 2000 /dev/zero > huge
python3 -c "import socket; socket.socket(socket.AF_UNIX).bind('socket')"
printf good > good; printf %040d 0 > last
"""
TAKEN = ("good", "absent", "dir", "dir/file", "link", "way/file", "pipe", "socket", "/dev/null", "mine", "shut/file")
TAKEN += ("good/below", "huge", "empty", "large", "last", "dir/deep", "last")
PROBLEMS = {
    "dir": "is no regular file",
    "link": "its path passes a link",
    "way/file": "its path passes a link",
    "pipe": "is no regular file",
    "socket": "it is no regular file",
    "/dev/null": "its path leaves the sandbox's own files",
    "mine": "Permission denied",
    "shut/file": "Permission denied",
    "huge": "makes it more than 64 bytes",
    "large": "makes it more than 64 bytes",
    "dir/deep": "is no regular file",
}
"""Paths that are taken, of 64 bytes in all, and of those at which something is that cannot be: why."""


@pytest.mark.parametrize("substrate", ["container", "microvm"])
def test_what_cannot_be_collected_costs_itself_alone_and_is_said(
    trajectory: Trajectory, substrate: KeptSubstrate
) -> None:
    bash = ToolConfig(name="bash", timeout_s=30.0)
    trajectory.spec = msgspec.structs.replace(trajectory.spec, substrate=substrate, tools=(bash,))

    async def work(session: Session) -> Collected:
        told = await session.call("t0c0", Call(tool="bash", arguments={"command": LEFT}))
        assert told.result.status is CallStatus.OK, told.result
        return await session.collect(TAKEN, max_bytes=64)

    found = trajectory.live(work)
    assert (found.files, found.failure) == ({"good": b"good", "dir/file": b"x\n", "empty": b"", "last": b"0" * 40}, "")
    said = found.problem.split("; ")
    for (path, why), one in zip(PROBLEMS.items(), said, strict=True):
        assert one.startswith(repr(path)), one
        assert why in one
    again = trajectory.live(work, transport=SocketTransport(NOWHERE))
    assert (again.files, again.problem, again.is_replayed) == (found.files, found.problem, True)


def test_large_files_and_answers_are_blobs_of_the_step(trajectory: Trajectory) -> None:
    trajectory.files = {"large": os.urandom(200_000)}

    async def first(session: Session) -> Collected:
        await session.call("t0c0", Call(tool="shout", arguments={"chars": 50_000}))
        return await session.collect(["large"], max_bytes=1 << 20)

    assert trajectory.live(first).files == trajectory.files
    blobs = sorted((trajectory.log.parent / "blobs").iterdir(), key=lambda path: path.stat().st_size)
    assert [path.stat().st_size for path in blobs] == [100_000, 200_000]
    blobs[0].write_bytes(b"")

    async def second(session: Session) -> None:
        infra(await session.call("t0c0", Call(tool="shout", arguments={"chars": 50_000})), str(blobs[0]))

    trajectory.live(second)


def test_a_damaged_log_fails_its_trajectory_by_name_and_is_left_as_it_is(trajectory: Trajectory) -> None:
    trajectory.live(lambda session: some(session, 2))
    data = bytearray(trajectory.log.read_bytes())
    data[SEGMENT_HEADER_BYTES + 50] ^= 1
    trajectory.log.write_bytes(data)

    async def refused(session: Session) -> None:
        infra(await session.call("t0c0", mark("m0")), str(trajectory.log), "damaged bytes")
        infra(await session.call("t2c0", mark("m2")), str(trajectory.log))
        assert str(trajectory.log) in (await effects(session)).failure
        await session.close()

    trajectory.live(refused)
    assert trajectory.log.read_bytes() == data
    assert trajectory.alive() == [f"{trajectory.id}-a0"]


def test_a_second_session_of_a_trajectory_waits_and_then_gives_up(
    trajectory: Trajectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tenancy_module, "_LOCK_WAIT_S", 0.1)

    async def work(session: Session) -> None:
        await some(session, 1)
        async with SandboxClient([SocketTransport(trajectory.home.socket)], CONFIG, owner="other") as client:
            second = await trajectory.open(client)
            infra(await second.call("t0c0", mark("m0")), str(trajectory.log), "another session of this one")
            await second.close()
        await some(session, 2)

    trajectory.live(work)
    assert trajectory.live(effects).files == marks(0, 1)


def test_an_opening_that_is_cancelled_leaves_the_log_to_the_next(trajectory: Trajectory) -> None:
    async def go() -> list[str]:
        failures: list[str] = []
        async with SandboxClient([SocketTransport(trajectory.home.socket)], CONFIG, owner="test") as client:
            for patience_s in (0.0, 0.0001, 0.0002, 0.0005, 0.001, 0.002):
                opening = asyncio.create_task(trajectory.open(client))
                await asyncio.sleep(patience_s)
                opening.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await (await opening).detach()
                session = await trajectory.open(client)
                failures.append(session.failure)
                await session.detach()
        return failures

    assert set(asyncio.run(go())) == {""}


def test_a_sandbox_that_no_record_leads_to_is_ended(trajectory: Trajectory) -> None:
    async def work(session: Session) -> list[str]:
        assert session._log is not None  # pyright: ignore[reportPrivateUsage]
        session._log.close()  # pyright: ignore[reportPrivateUsage]
        infra(await session.call("t0c0", mark("m0")), "is closed")
        async with SandboxClient([SocketTransport(trajectory.home.socket)], CONFIG, owner="other") as other:
            return [info.sandbox_id for info in await other.list() if info.sandbox_id.startswith(trajectory.id)]

    assert trajectory.live(work) == []


def test_a_log_that_cannot_be_written_hands_nothing_out_and_the_next_life_has_it(trajectory: Trajectory) -> None:
    """The END of the second command does not fit the limit on a file's size; the command has run by then."""
    trajectory.live(lambda session: some(session, 1))
    size = trajectory.log.stat().st_size
    code = """
import asyncio, resource, signal, sys
from pathlib import Path
from rollforward.sandbox.client import SandboxClient, SocketTransport
import msgspec
from rollforward.sandbox.session import Session
from rollforward.sandbox.types import Call, SandboxSpec
from rollforward.sandbox.config import ContainerConfig

socket, log, identity, spec, config, files, limit = sys.argv[1:]

async def main():
    config_ = msgspec.json.decode(config, type=ContainerConfig)
    async with SandboxClient([SocketTransport(Path(socket))], config_, owner="x") as client:
        session = await Session.open(client, log_path=Path(log), sandbox_id=identity, spec=msgspec.json.decode(spec,
            type=SandboxSpec), files=msgspec.json.decode(files, type=dict[str, bytes]), config=config_, sync=True)
        await session.call("t0c0", Call(tool="mark", arguments={"name": "m0"}))
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(limit), int(limit)))
        result = await session.call("t1c0", Call(tool="mark", arguments={"name": "m1"}))
        print(result.result.status.value, result.result.detail, flush=True)
        result = await session.call("t2c0", Call(tool="mark", arguments={"name": "m2"}))
        print(result.result.status.value, result.result.detail, flush=True)
        await session.detach()

asyncio.run(main())
"""
    values = (trajectory.spec, trajectory.config, trajectory.files)
    encoded = [msgspec.json.encode(value).decode() for value in values]
    # Room for the OPENED of this life and the START, not for the END.
    room = size + opened_bytes(trajectory.log) + 150
    words = [str(trajectory.home.socket), str(trajectory.log), trajectory.id, *encoded, str(room)]
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert lines[0] == lines[1]
    assert lines[0].startswith("infra unknown outcome of t1c0")
    assert "File too large" in lines[0]
    assert read_log(trajectory.log).history.running is not None

    async def go_on(session: Session) -> Collected:
        assert [one.result.text.split()[0] for one in await some(session, 3)] == ["1", "2", "3"]
        return await effects(session)

    assert trajectory.live(go_on).files == marks(0, 1, 2)


def opened_bytes(log: Path) -> int:
    return scan(log)[0].end - scan(log)[0].start


def scan(log: Path) -> list[Frame]:
    frames = scan_frames(log.read_bytes(), offset=SEGMENT_HEADER_BYTES, seed=frame_seed(log.stem, 1)).frames
    return list(frames)


def test_a_sandbox_that_is_killed_at_a_command_is_a_loss_like_any_other(trajectory: Trajectory) -> None:
    seen: list[str] = []

    async def saboteur(key: str, sandbox: Sandbox) -> None:
        seen.append(key)
        if key == "t1c0":
            await sandbox.close()

    async def work(session: Session) -> None:
        results = await some(session, 3)
        assert results[0].result.status is CallStatus.OK
        for result in results[1:]:
            infra(result, "unknown outcome of t1c0", "closed")

    trajectory.live(work, saboteur=saboteur)
    assert seen == ["t0c0", "t1c0"]
    trajectory.live(work)
    assert trajectory.alive() == []


def test_a_log_torn_anywhere_goes_on_where_its_sandbox_lives_and_else_says_so(trajectory: Trajectory) -> None:
    """Every record boundary and bytes around it, alive and dead: each command once, or not known and never again."""

    async def whole(session: Session) -> tuple[list[SessionResult], Collected]:
        return await some(session, 3), await effects(session)

    made, collected = trajectory.live(whole)
    data = trajectory.log.read_bytes()
    ends = [SEGMENT_HEADER_BYTES, *(frame.end for frame in scan(trajectory.log))]
    sizes = sorted({min(max(end + more, SEGMENT_HEADER_BYTES), len(data)) for end in ends for more in (-1, 0, 20)})
    assert len(sizes) > 20

    async def again(session: Session) -> None:
        results, found = await whole(session)
        assert [one.result.text for one in results] == [one.result.text for one in made]
        assert found.files == collected.files

    for size in sizes:
        trajectory.log.write_bytes(data[:size])
        trajectory.live(again)
    trajectory.ask(lambda client: _close(client, f"{trajectory.id}-a0"))

    async def dead(session: Session) -> list[CallStatus]:
        results, found = await whole(session)
        statuses = [one.result.status for one in results]
        assert (found.failure != "") == (CallStatus.INFRA in statuses or not found.files)
        return statuses

    for size in sizes:
        whole_records = sum(end <= size for end in ends) - 1
        trajectory.log.write_bytes(data[:size])
        statuses = trajectory.live(dead)
        has_start = whole_records >= 3  # OPENED, PUT, START
        num_ended = max((whole_records - 2) // 2, 0)
        if has_start:
            expected = [CallStatus.OK] * min(num_ended, 3) + [CallStatus.INFRA] * max(3 - num_ended, 0)
            assert statuses == expected
            assert trajectory.alive() == []
        else:
            # No command can have been sent: all of it runs, in another sandbox.
            assert statuses == [CallStatus.OK] * 3
            for sandbox_id in trajectory.alive():
                trajectory.ask(lambda client, sandbox_id=sandbox_id: _close(client, sandbox_id))


def test_a_supervisor_that_is_killed_inside_a_command_leaves_it_unknown(tmp_path: Path) -> None:
    with supervised() as home:
        trajectory = Trajectory(home, tmp_path / "step_000012")
        trajectory.config = msgspec.structs.replace(CONFIG, attempts=1)  # nobody comes back who could be waited for
        trajectory.live(lambda session: some(session, 1))

        async def kill(session: Session) -> None:
            asking = asyncio.create_task(session.call("t1c0", mark("m1", after_s=20)))
            await until_marked(trajectory, "m1")
            await asyncio.to_thread(end, home, signal.SIGKILL)
            infra(await asking, "unknown outcome of t1c0")

        trajectory.live(kill)
    with supervised() as home:
        trajectory.home = home

        async def go_on(session: Session) -> None:
            infra(await session.call("t1c0", mark("m1", after_s=20)), "unknown outcome of t1c0")

        trajectory.live(go_on)
        assert trajectory.alive() == []
