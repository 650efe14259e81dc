"""Trajectories whose sandbox is lost with its supervisor and goes on in one of another: what is restored, what is done
again, what is refused, and what several begin with.

Proves that a trajectory that was cut short anywhere says and leaves the same bits as an undisturbed one where a
snapshot or `on_lost=restore` allows it, and is an infra failure, never a score, where they do not.
"""

import asyncio
import signal
from collections.abc import Generator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rollforward.sandbox.blobs import BlobStore
from rollforward.sandbox.client import Sandbox
from rollforward.sandbox.command_log import CommandLog, read_log
from rollforward.sandbox.command_records import SnapshotRecord, StartRecord, encode_call
from rollforward.sandbox.homes import Home
from rollforward.sandbox.session import Session
from rollforward.sandbox.types import Call, CallResult, CallStatus, Collected
from tests.helpers.trajectories import CONFIG, FILES, Trajectory, end, mark, supervised

RESTORE = msgspec.structs.replace(CONFIG, on_lost="restore")
MAX_BYTES = 1 << 24
COMMANDS = 5


@pytest.fixture(scope="module")
def home() -> Generator[Home]:
    with supervised() as found:
        yield found


@pytest.fixture
def trajectory(home: Home, tmp_path: Path) -> Trajectory:
    return Trajectory(home, tmp_path / "step_000012")


async def some(session: Session, count: int, first: int = 0) -> list[CallResult]:
    results = [(await session.call(f"t{n}c0", mark(f"m{n}"))).result for n in range(first, first + count)]
    return [msgspec.structs.replace(result, seconds=0.0) for result in results]


async def effects(session: Session) -> Collected:
    return await session.collect(["effects", *FILES], max_bytes=1 << 16)


def lose(trajectory: Trajectory) -> None:
    """Its sandbox, whoever holds it."""
    for name in trajectory.alive():

        async def close(client: Any, name: str = name) -> None:
            await (await client.adopt(name)).close()

        trajectory.ask(close)


@pytest.fixture(scope="module")
def undisturbed(home: Home, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[CallResult], dict[str, bytes]]:
    trajectory = Trajectory(home, tmp_path_factory.mktemp("undisturbed") / "step_000012")

    async def whole(session: Session) -> tuple[list[CallResult], dict[str, bytes]]:
        return await some(session, COMMANDS), (await effects(session)).files

    return trajectory.live(whole)


@pytest.mark.parametrize("policy", ["fail", "restore"])
@pytest.mark.parametrize("kept_after", [1, 3])
def test_a_killed_supervisor_and_all_it_held_cost_nothing_that_a_snapshot_has(
    tmp_path: Path, undisturbed: tuple[list[CallResult], dict[str, bytes]], kept_after: int, policy: Any
) -> None:
    with supervised() as first:
        trajectory = Trajectory(first, tmp_path / "step_000012")
        trajectory.config = msgspec.structs.replace(CONFIG, on_lost=policy)

        async def begin(session: Session) -> list[CallResult]:
            results = await some(session, kept_after)
            assert await session.snapshot(max_bytes=MAX_BYTES)
            assert await session.snapshot(max_bytes=MAX_BYTES), "it is as it was kept"
            return results

        before = trajectory.live(begin)
        end(first, signal.SIGKILL)
    with supervised() as second:
        trajectory.home = second

        async def go_on(session: Session) -> tuple[list[CallResult], dict[str, bytes], int]:
            results = await some(session, COMMANDS)
            return results, (await effects(session)).files, session.num_restored

        results, files, restored = trajectory.live(go_on)
    assert (results, files) == undisturbed
    assert (results[:kept_after], restored) == (before, 1)
    history = read_log(trajectory.log).history
    assert (history.opened and history.opened.restored) == history.snapshot_seq > 0


def test_commands_after_the_snapshot_are_done_again_only_where_that_is_allowed(
    trajectory: Trajectory, undisturbed: tuple[list[CallResult], dict[str, bytes]]
) -> None:
    async def begin(session: Session) -> None:
        await some(session, 1)
        assert await session.snapshot(max_bytes=MAX_BYTES)
        await some(session, 2, first=1)

    async def go_on(session: Session) -> tuple[list[CallResult], dict[str, bytes]]:
        return await some(session, COMMANDS), (await effects(session)).files

    trajectory.live(begin)
    lose(trajectory)
    log = trajectory.log.read_bytes()
    results, files = trajectory.live(go_on)
    assert [one.status for one in results] == [CallStatus.OK] * 3 + [CallStatus.INFRA] * 2
    assert files == {}

    trajectory.log.write_bytes(log)
    trajectory.config = RESTORE
    assert trajectory.live(go_on) == undisturbed


@pytest.mark.parametrize("with_files", [True, False])
def test_without_a_snapshot_everything_is_done_again_from_the_beginning(
    home: Home, tmp_path: Path, with_files: bool
) -> None:
    found: list[Any] = []
    for disturbed in (False, True):
        trajectory = Trajectory(home, tmp_path / str(disturbed))
        trajectory.config, trajectory.files = RESTORE, FILES if with_files else {}

        async def whole(
            session: Session, disturbed: bool = disturbed
        ) -> tuple[list[CallResult], dict[str, bytes], int]:
            results = await some(session, 3)
            if disturbed:
                assert session._tenancy is not None
                assert session._tenancy._sandbox is not None
                await session._tenancy._sandbox.close()
            results += await some(session, 2, first=3)
            return results, (await effects(session)).files, session.num_restored

        *same, restored = trajectory.live(whole)
        assert restored == disturbed
        found.append(same)
    assert found[0] == found[1]


def test_a_command_that_differs_when_it_is_done_again_is_an_infra_failure(trajectory: Trajectory) -> None:
    trajectory.config = RESTORE

    async def begin(session: Session) -> None:
        await some(session, 1)
        assert (await session.call("t1c0", Call(tool="differ", arguments={}))).result.status is CallStatus.OK

    trajectory.live(begin)
    lose(trajectory)

    async def go_on(session: Session) -> str:
        assert (await session.call("t1c0", Call(tool="differ", arguments={}))).is_replayed
        result = (await session.call("t2c0", mark("m2"))).result
        assert (result.status, result.text) == (CallStatus.INFRA, "")
        assert "t1c0, done again, does not end as it did" in result.detail
        return session.failure

    assert trajectory.live(go_on) == trajectory.live(go_on)
    assert trajectory.alive() == []


@pytest.mark.parametrize("policy", ["fail", "restore"])
def test_a_command_without_an_end_runs_in_a_restored_sandbox_or_stays_unknown(
    trajectory: Trajectory, undisturbed: tuple[list[CallResult], dict[str, bytes]], policy: Any
) -> None:
    trajectory.config = msgspec.structs.replace(CONFIG, on_lost=policy)

    async def begin(session: Session) -> None:
        await some(session, 2)
        assert await session.snapshot(max_bytes=MAX_BYTES)

    trajectory.live(begin)
    log = CommandLog.open(trajectory.log, sync=False)
    encoded = encode_call(mark("m2"))
    log.append(StartRecord("t2c0", encoded.digest, encoded.request))
    log.close()
    lose(trajectory)

    async def go_on(session: Session) -> tuple[list[CallResult], dict[str, bytes]]:
        return await some(session, COMMANDS), (await effects(session)).files

    results, files = trajectory.live(go_on)
    if policy == "restore":
        assert (results, files) == undisturbed
    else:
        assert results[2].status is CallStatus.INFRA
        assert read_log(trajectory.log).history.is_unknown


def test_a_sandbox_that_dies_inside_a_command_is_restored_and_the_command_runs_once_in_what_is_left(
    trajectory: Trajectory, undisturbed: tuple[list[CallResult], dict[str, bytes]]
) -> None:
    trajectory.config = RESTORE

    async def strike(key: str, sandbox: Sandbox) -> None:
        if key == "t2c0" and not struck:
            struck.append(key)
            await sandbox.close()

    async def whole(session: Session) -> tuple[list[CallResult], dict[str, bytes]]:
        await some(session, 1)
        assert await session.snapshot(max_bytes=MAX_BYTES)
        return await some(session, COMMANDS), (await effects(session)).files

    struck: list[str] = []
    assert trajectory.live(whole, saboteur=strike) == undisturbed
    assert struck == ["t2c0"]


def test_restores_without_progress_come_to_an_end(trajectory: Trajectory) -> None:
    trajectory.config = RESTORE

    strikes: list[str] = []

    async def strike(key: str, sandbox: Sandbox) -> None:
        if key == "t1c0":
            strikes.append(sandbox.id)
            await sandbox.close()

    async def whole(session: Session) -> str:
        await some(session, 1)
        result = (await session.call("t1c0", mark("m1"))).result
        assert result.status is CallStatus.INFRA
        return result.detail

    assert f"attempts={RESTORE.attempts}" in trajectory.live(whole, saboteur=strike)
    assert len(strikes) == len({*strikes}) == 1 + RESTORE.attempts
    assert trajectory.alive() == []


def test_memory_that_runs_out_between_two_lives_is_the_policys_doing_and_never_restored(
    trajectory: Trajectory,
) -> None:
    trajectory.config = RESTORE
    hoard = Call(tool="hoard_and_wait", arguments={"seconds": 20.0})

    async def hoarded(client: Any) -> bool:
        return bool(await (await client.adopt(f"{trajectory.id}-a0")).download(["hoarded"], max_bytes=1))

    async def first(session: Session) -> None:
        await some(session, 1)
        assert await session.snapshot(max_bytes=MAX_BYTES)
        asking = asyncio.create_task(session.call("t1c0", hoard))
        while not await asyncio.to_thread(trajectory.ask, hoarded):
            await asyncio.sleep(0.02)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)

    trajectory.live(first)
    trajectory.kill()

    async def second(session: Session) -> list[CallStatus]:
        told = [(await session.call(key, call)).result for key, call in (("t1c0", hoard), ("t2c0", mark("m")))]
        assert session.num_restored == 0
        return [result.status for result in told]

    assert trajectory.live(second) == [CallStatus.OOM] * 2
    assert read_log(trajectory.log).history.failure == ""


def cut_points(data: bytes) -> range:
    return range(len(data) - 1, len(data) - 400, -37)


def test_a_log_torn_anywhere_after_a_snapshot_leads_to_the_same_end_or_to_infra(
    home: Home, tmp_path: Path, undisturbed: tuple[list[CallResult], dict[str, bytes]]
) -> None:
    made = Trajectory(home, tmp_path / "made")
    made.config = RESTORE

    async def begin(session: Session) -> None:
        await some(session, 2)
        assert await session.snapshot(max_bytes=MAX_BYTES)
        await some(session, 1, first=2)

    made.live(begin)
    lose(made)
    data = made.log.read_bytes()

    async def go_on(session: Session) -> tuple[list[CallResult], dict[str, bytes]]:
        return await some(session, COMMANDS), (await effects(session)).files

    for size in cut_points(data):
        made.log.write_bytes(data[:size])
        assert made.live(go_on) == undisturbed, size
        lose(made)  # or the next life would find it under its name


def test_a_snapshot_that_is_lost_or_damaged_is_an_infra_failure(trajectory: Trajectory) -> None:
    trajectory.files = {"large": bytes(range(256)) * 1024}

    async def begin(session: Session) -> None:
        await some(session, 1)
        assert await session.snapshot(max_bytes=MAX_BYTES)

    trajectory.live(begin)
    lose(trajectory)
    (blob,) = (trajectory.log.parent / "snapshots" / "s12-p3-m0").iterdir()
    blob.write_bytes(blob.read_bytes()[:-1] + b"x")

    async def go_on(session: Session) -> str:
        result = (await session.call("t1c0", mark("m1"))).result
        assert result.status is CallStatus.INFRA
        return result.detail

    assert "does not match" in trajectory.live(go_on) or "damaged" in trajectory.live(go_on)


def test_snapshots_are_kept_once_and_go_with_the_trajectory(trajectory: Trajectory) -> None:
    trajectory.files = {"large": bytes(range(256)) * 1024}
    place = trajectory.log.parent / "snapshots" / "s12-p3-m0"

    async def whole(session: Session) -> None:
        assert not await session.snapshot(max_bytes=1024), "it has more"
        for count in range(3):
            await some(session, 1, first=count)
            assert await session.snapshot(max_bytes=MAX_BYTES)
            assert len(list(place.iterdir())) == 1
        await effects(session)
        assert not await session.snapshot(max_bytes=MAX_BYTES)
        await session.close()

    trajectory.live(whole)
    assert not place.exists()


@pytest.mark.parametrize("lost", [False, True])
def test_members_begin_with_one_state_and_know_nothing_of_each_other(home: Home, tmp_path: Path, lost: bool) -> None:
    folder = tmp_path / "step_000012"
    one = Trajectory(home, folder, "s12-p3-m0")
    others = [Trajectory(home, folder, f"s12-p3-m{n}") for n in (1, 2)]

    async def prepare(session: Session) -> list[SnapshotRecord]:
        await some(session, 2)
        assert session._tenancy is not None
        taken = await (await session._tenancy.ready()).snapshot(max_bytes=MAX_BYTES)
        await some(session, 1, first=2)
        stores = [BlobStore(folder / "snapshots" / f"s12-p3-m{n}", sync=False) for n in (1, 2)]
        return [SnapshotRecord(taken.kind, taken.image, store.put(taken.data)) for store in stores]

    begins = one.live(prepare)
    for number, (other, begin) in enumerate(zip(others, begins, strict=True)):

        async def prepare_only(session: Session) -> None:
            assert session._tenancy is not None
            async with session._lock:  # a session that is opened looks for its sandbox itself
                await session._tenancy.ready()

        if lost:  # before the first command: another one begins like it
            other.live(prepare_only, begin=begin)
            lose(other)

        async def whole(session: Session, number: int = number) -> bytes:
            first = (await session.call("t0c0", mark(f"own{number}"))).result
            assert first.text.split()[0] == "3", first
            return (await effects(session)).files["effects"]

        assert other.live(whole, begin=begin) == b"m0\nm1\nown%d\n" % number

        async def again(session: Session) -> str:
            return (await session.call("t5c0", mark("x"))).result.detail

        assert "the state that it begins with" in other.live(again)
    assert BlobStore(folder / "snapshots" / "s12-p3-m1", sync=False).get(begins[0].data)


def test_fork_pause_and_restore_of_the_client(home: Home, tmp_path: Path, trajectory: Trajectory) -> None:
    async def work(client: Any) -> None:
        sandbox = await client.create(f"{trajectory.id}-x", trajectory.spec)
        await sandbox.upload({"effects": b"m0\n"})
        fork = await sandbox.fork(f"{trajectory.id}-y", max_bytes=MAX_BYTES)
        running = asyncio.create_task(sandbox.call(mark("m1", before_s=3.0)))
        await asyncio.sleep(0.2)
        for ask in (sandbox.pause, lambda: sandbox.snapshot(max_bytes=MAX_BYTES)):
            with pytest.raises(Exception, match="between two commands"):
                await ask()
        assert (await running).text.startswith("2 ")
        await sandbox.pause()
        assert (await sandbox.download(["effects"], max_bytes=99)) == {"effects": b"m0\nm1\n"}
        await sandbox.pause()
        await sandbox.resume()
        assert (await fork.call(mark("z"))).text.startswith("2 ")
        assert (await fork.download(["effects"], max_bytes=99)) == {"effects": b"m0\nz\n"}
        taken = await fork.snapshot(max_bytes=MAX_BYTES)
        wrong = msgspec.structs.replace(taken, image="another")
        with pytest.raises(Exception, match="its own image"):
            await client.create(f"{trajectory.id}-z", trajectory.spec, snapshot=wrong)
        for one in (sandbox, fork):
            await one.close()

    trajectory.ask(work)
