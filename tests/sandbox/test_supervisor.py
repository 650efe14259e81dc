"""Proves: one supervisor a home; leases, room, warm sandboxes and counters keep their promises under real load.

Does not prove: what is left after kills (test_supervisor_kills.py, tests/faults/test_sandbox_leaks.py).
"""

import asyncio
import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollforward.sandbox import cgroups
from rollforward.sandbox import instance as instance_module
from rollforward.sandbox.client import Sandbox, SandboxClient
from rollforward.sandbox.config import Limits, ToolConfig
from rollforward.sandbox.container import Container, ContainerSubstrate
from rollforward.sandbox.errors import (
    GoneCause,
    SandboxBusyError,
    SandboxConnectionError,
    SandboxGoneError,
    SandboxUnavailableError,
)
from rollforward.sandbox.homes import homes_root
from rollforward.sandbox.images import Images
from rollforward.sandbox.leases import LeaseBook, LeaseRecord
from rollforward.sandbox.pool import Pool
from rollforward.sandbox.room import Room
from rollforward.sandbox.types import Call, ExecStatus, SandboxSpec
from tests.helpers.sandboxes import descendants, is_gone, wait_for
from tests.helpers.supervisors import Stage, command, config, groups, on_loop, pids, settled, sh, until, until_begun


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    made = Stage(tmp_path, monkeypatch)
    yield made
    made.end()
    assert made.left() == []
    assert list(tmp_path.glob("rollforward-sandboxes-*")) == []


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """One supervisor for tests that leave it as they found it. Identities are the test's own."""
    with pytest.MonkeyPatch.context() as patch:
        made = Stage(tmp_path_factory.mktemp("homes"), patch)
        yield made
        made.end()
        assert made.left() == []


async def created(client: SandboxClient, count: int, name: str = "s") -> list[Sandbox]:
    return await asyncio.gather(*(client.create(f"{name}-{n}", SandboxSpec()) for n in range(count)))


async def closed(*sandboxes: Sandbox) -> None:
    await asyncio.gather(*(sandbox.close() for sandbox in sandboxes))


async def until_waiting(client: SandboxClient, count: int) -> None:
    """Until so many wait for room."""

    async def are_so_many() -> bool:
        return (await client.stats()).waiting == count

    await until(are_so_many)


def fds(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


@on_loop
async def test_many_start_it_at_one_time_and_there_is_one(stage: Stage) -> None:
    transports = [stage.transport() for _ in range(8)]
    await asyncio.gather(*(transport.start() for transport in transports))
    wait_for(lambda: {pid for pid in pids() if stage.name in command(pid)} == {stage.guard(), stage.supervisor()})
    assert os.getsid(stage.supervisor()) != os.getsid(0)
    await asyncio.gather(*(transport.close() for transport in transports))


@on_loop
async def test_what_a_dead_one_left_is_no_hindrance(stage: Stage) -> None:
    home = stage.home
    homes_root()
    (home.path / "leases").mkdir(parents=True)
    (home.path / "leases" / "torn").write_bytes(b"12345678\n{")
    (home.path / "leases" / "directory").mkdir()
    (home.path / "tools").symlink_to("/proc")
    (home.path / "LOCK").write_text("1\n")
    bind = ["python3", "-c", "import socket; socket.socket(socket.AF_UNIX).bind('socket')"]
    subprocess.run(bind, cwd=home.path, check=True)
    async with stage.client() as client:
        (sandbox,) = await created(client, 1)
        assert os.listdir(home.path / "leases") == [sandbox.instance]
        assert (await sh(sandbox, "echo well")).text() == "well\n"


@on_loop
async def test_a_sandbox_lives_as_long_as_its_lease(shared: Stage) -> None:
    async with shared.client(lease_s=3.0) as client, shared.client(lease_s=3.0) as watching:
        before = await watching.stats()
        kept, left = await created(client, 2, "lives")
        client._let_go(left.id, left.instance, client._routes[0])  # its owner forgets it

        async def only_one_is_left() -> bool:
            there = {info.sandbox_id for info in await watching.list()}
            assert kept.id in there
            return left.id not in there

        await until(only_one_is_left)
        with pytest.raises(SandboxGoneError, match="lease ran out") as caught:
            await client.adopt(left.id)
        assert caught.value.cause == GoneCause.EXPIRED
        stats = await settled(watching)
        assert (stats.held, stats.expired - before.expired, stats.lost - before.lost) == (1, 1, 0)
        await kept.close()


@on_loop
async def test_a_renewal_that_was_answered_holds(shared: Stage) -> None:
    """Renewals that race with expiry: what a renewal has not reported as gone is there for a lease from then on."""
    async with shared.client(lease_s=1.0) as client:
        sandboxes = await created(client, 8, "race")
        route = client._routes[0]
        for sandbox in sandboxes:
            client._let_go(sandbox.id, sandbox.instance, route)
        for n, sandbox in enumerate(sandboxes):
            client._held[sandbox.id] = route, sandbox.instance
            await asyncio.sleep(0.05)
            asked_s = time.monotonic()
            await client.renew([sandbox.id])
            is_there = client._held.pop(sandbox.id, None) is not None
            await asyncio.sleep(0.15 * (n % 3))
            if is_there:
                try:
                    assert (await client.adopt(sandbox.id)).instance == sandbox.instance
                    client._held.pop(sandbox.id)
                except SandboxGoneError:
                    assert time.monotonic() - asked_s > 1.0, "a busy machine let the lease run out meanwhile"

        async def all_are_gone() -> bool:
            return await client.list() == []

        await until(all_are_gone)


@on_loop
async def test_while_it_stood_still_nobody_is_expired(shared: Stage) -> None:
    async with shared.client(lease_s=2.0) as client:
        (sandbox,) = await created(client, 1, "stopped")
        await sh(sandbox, "echo kept > file")
        os.kill(shared.supervisor(), signal.SIGSTOP)
        await asyncio.sleep(4.0)
        os.kill(shared.supervisor(), signal.SIGCONT)
        await asyncio.sleep(0.5)
        assert (await sh(sandbox, "cat file")).text() == "kept\n"
        await sandbox.close()


@on_loop
async def test_room_is_given_first_come_first_served(shared: Stage) -> None:
    async with shared.client(max_sandboxes=2) as client:
        held = await created(client, 2, "fifo")
        order: list[str] = []

        async def wait(name: str) -> None:
            sandbox = await client.create(name, SandboxSpec())
            order.append(name)
            await sandbox.close()

        waiting: list[asyncio.Task[None]] = []
        for n in range(20):
            waiting.append(asyncio.create_task(wait(f"w-{n}")))
            await asyncio.sleep(0)
        await until_waiting(client, 20)
        assert (await client.stats()).held == 2
        await held[0].close()
        await asyncio.gather(*waiting)
        assert order == [f"w-{n}" for n in range(20)]
        await held[1].close()


@on_loop
async def test_who_finds_no_room_in_time_is_told_what_to_do(shared: Stage) -> None:
    async with shared.client(max_sandboxes=1, create_timeout_s=0.3) as client:
        before = await settled(client)
        (held,) = await created(client, 1, "busy")
        answers = await asyncio.gather(
            *(client.create(f"w-{n}", SandboxSpec()) for n in range(50)), return_exceptions=True
        )
        assert {type(answer) for answer in answers} == {SandboxBusyError}
        assert "sandbox.container.max_sandboxes" in str(answers[0])
        async with shared.client(max_sandboxes=1) as patient:
            cancelled = [asyncio.create_task(patient.create(f"c-{n}", SandboxSpec())) for n in range(50)]
            await until_waiting(client, 50)
            for task in cancelled:
                task.cancel()
            await asyncio.gather(*cancelled, return_exceptions=True)
            await until_waiting(client, 0)
        await held.close()
        stats = await settled(client)
        assert (stats.held, stats.waiting, stats.busy - before.busy) == (0, 0, 50)
    async with shared.client(max_sandboxes=1) as client:
        (after,) = await created(client, 1, "after")  # no place was lost on the way
        await after.close()


@on_loop
async def test_who_waits_and_goes_away_gives_its_place_in_the_queue_up(shared: Stage) -> None:
    async with shared.client(max_sandboxes=1) as client:
        (held,) = await created(client, 1, "stays")
        leaving = shared.client("leaving", max_sandboxes=1)
        asked = asyncio.create_task(leaving.create("nobody", SandboxSpec()))
        await until_waiting(client, 1)
        await leaving._routes[0].transport.close()
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        await leaving.close()
        await until_waiting(client, 0)
        await held.close()
        (other,) = await created(client, 1, "other")
        assert {info.sandbox_id for info in await client.list()} == {"other-0"}
        await other.close()


@on_loop
async def test_bounds_change_while_it_lives(shared: Stage) -> None:
    async with shared.client(max_sandboxes=1) as client:
        (held,) = await created(client, 1, "bound")
        waiting = asyncio.create_task(client.create("w", SandboxSpec()))
        await until_waiting(client, 1)
        assert not waiting.done()
        async with shared.client(max_sandboxes=2) as other:
            await other.stats()
            await closed(held, await waiting)


@on_loop
async def test_two_hundred_are_made_and_closed_together(shared: Stage) -> None:
    async with shared.client(max_sandboxes=64, create_timeout_s=200.0) as client:
        (first,) = await created(client, 1, "first")
        await sh(first, "true")
        before, open_before = await settled(client), fds(shared.supervisor())

        async def use(n: int) -> None:
            sandbox = await client.create(f"u-{n}", SandboxSpec(limits=Limits(memory_bytes=32 << 20)))
            assert (await sh(sandbox, f"echo {n}")).text() == f"{n}\n"
            await asyncio.gather(*(sandbox.close() for _ in range(3)))

        await asyncio.gather(*(use(n) for n in range(200)))
        stats = await settled(client)
        assert (stats.held, stats.created - before.created, stats.closed - before.closed) == (1, 200, 200)
        assert (stats.stuck, stats.lost - before.lost, sum(stats.create_s)) == (0, 0, stats.created)
        assert {path.name for path in groups(shared.name)} == {f"rollforward.{shared.name}.{first.instance}"}
        assert os.listdir(shared.home.path / "leases") == [first.instance]
        await asyncio.to_thread(wait_for, lambda: fds(shared.supervisor()) <= open_before + 2)
        await first.close()


@on_loop
async def test_no_record_no_sandbox(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk of the records is full."""
    small = stage.folder / "small"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", small], check=True)
    try:
        tight = Stage(small, monkeypatch, stage.name)
        async with tight.client(attempts=1, lease_s=2.0) as client:
            (held,) = await created(client, 1)
            ballast = small / "ballast"
            with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
                while True:
                    file.write(bytes(4096))
            for n in range(5):
                with pytest.raises(SandboxUnavailableError, match=r"No space left.*Make room"):
                    await client.create(f"none-{n}", SandboxSpec())
            assert {path.name for path in groups(stage.name)} == {f"rollforward.{stage.name}.{held.instance}"}
            assert (await sh(held, "echo well")).text() == "well\n"
            await asyncio.sleep(3.0)  # renewals need no room
            assert (await sh(held, "echo well")).text() == "well\n"
            ballast.unlink()
            await closed(*await created(client, 3, "again"), held)
        await tight.gone()
    finally:
        subprocess.run(["umount", "-l", small], check=True)
        Stage(stage.folder, monkeypatch, stage.name)


@on_loop
async def test_a_warm_sandbox_is_as_new_and_of_the_kind_that_is_asked_for(shared: Stage, tmp_path: Path) -> None:
    (tmp_path / "say.py").write_text('def say() -> str:\n    """Says."""\n    return "one"\n')
    spec = SandboxSpec(tools=(ToolConfig(name="say", file=str(tmp_path / "say.py")),), labels={"n": "1"})
    async with shared.client(warm=2) as client:
        before = await settled(client)
        first = await client.create("a-0", spec)
        await warm(client, 2)
        other = SandboxSpec(tools=spec.tools, labels={"n": "2"})
        second = await client.create("a-1", other)
        assert (await client.stats()).warm_hits == before.warm_hits + 1
        assert second.spec.labels == {"n": "2"}
        assert (await second.call(Call(tool="say", arguments={}))).text == "one"
        assert (await sh(second, "ls -A")).stdout == b""
        (tmp_path / "say.py").write_text('def say() -> str:\n    """Says."""\n    return "two"\n')
        async with shared.client(warm=2) as later:
            third = await later.create("a-2", other)  # the tool is another one now
            assert (await third.call(Call(tool="say", arguments={}))).text == "two"
            assert (await client.stats()).warm_hits == before.warm_hits + 1
            await warm(later, 2)
            await settled(later)
            infos = {info.sandbox_id: info for info in await later.list()}
            assert infos["a-1"].instance == second.instance
            assert len(os.listdir(shared.home.path / "leases")) == 5  # three that are held and two that are ready
            await closed(first, second, third)


@on_loop
async def test_a_warm_sandbox_that_died_is_not_handed_out(shared: Stage) -> None:
    async with shared.client(warm=1) as client:
        (first,) = await created(client, 1, "dead")
        await warm(client, 1)
        wait_for(lambda: sum(not r.sandbox_id for r in shared.home.book.read()) == 1)  # others may be on their way out
        (ready,) = [r for r in shared.home.book.read() if not r.sandbox_id]
        assert ready.pid is not None
        os.kill(ready.pid, signal.SIGKILL)
        (second,) = await created(client, 1, "t")
        assert second.instance != ready.instance
        assert (await sh(second, "echo well")).text() == "well\n"
        await closed(first, second)


@on_loop
async def test_a_template_that_is_killed_is_replaced_and_its_containers_are_lost(shared: Stage) -> None:
    async with shared.client() as client:
        stats_before = await settled(client)
        before = await created(client, 3, "template")
        running = asyncio.create_task(sh(before[0], "touch begun; sleep 100", key="t0c0", wall_s=200.0))
        await until_begun(before[0])
        for pid in descendants(shared.supervisor())[:1]:
            os.kill(pid, signal.SIGKILL)
        result = await running
        assert result.status in (ExecStatus.INFRA, ExecStatus.SANDBOX_DEAD)
        for sandbox in before:
            with pytest.raises(SandboxGoneError) as caught:
                await sh(sandbox, "true")
            assert caught.value.cause == GoneCause.LOST
        (after,) = await created(client, 1, "anew")
        assert (await sh(after, "echo well")).text() == "well\n"
        stats = await settled(client)
        assert (stats.held, stats.lost - stats_before.lost) == (1, 3)
        await after.close()


@on_loop
async def test_a_sandbox_whose_first_process_is_killed_is_lost(shared: Stage) -> None:
    async with shared.client() as client:
        before = await settled(client)
        (sandbox,) = await created(client, 1, "killed")
        (record,) = (record for record in shared.home.book.read() if record.sandbox_id == sandbox.id)
        assert record.pid is not None
        os.kill(record.pid, signal.SIGKILL)
        while (await client.stats()).lost == before.lost:
            await asyncio.sleep(0.01)
        with pytest.raises(SandboxGoneError) as caught:
            await sh(sandbox, "true")
        assert caught.value.cause == GoneCause.LOST


@on_loop
async def test_it_ends_by_itself_when_nobody_needs_it(stage: Stage) -> None:
    async with stage.client(lease_s=1.0, warm=2) as client:
        await closed(*await created(client, 1))
        stage.look()
        await asyncio.sleep(2.5)
        assert not is_gone(stage.supervisor())  # somebody is connected
    await stage.gone()


@on_loop
async def test_when_it_is_told_to_end_it_ends_everything(stage: Stage) -> None:
    async with stage.client(max_sandboxes=1) as client:
        (sandbox,) = await created(client, 1)
        asked = [
            asyncio.create_task(sh(sandbox, "trap '' TERM; touch begun; sleep 100", wall_s=200.0)),
            asyncio.create_task(client.create("waits", SandboxSpec())),
        ]
        await until_begun(sandbox)
        await until_waiting(client, 1)
        stage.look()
        guard = stage.guard()
        assert guard is not None
        os.kill(guard, signal.SIGTERM)
        answers = await asyncio.gather(*asked, return_exceptions=True)
        assert isinstance(answers[0], SandboxConnectionError)
        # The one that waited asked again, of a successor.
        assert isinstance(answers[1], Sandbox)
        with pytest.raises(SandboxGoneError):
            await sh(sandbox, "true")


@on_loop
async def test_room_is_never_lost_or_given_twice() -> None:
    room, inside = Room(3), set[int]()

    async def strive(n: int) -> None:
        try:
            await room.take(0.001 * (n % 7))
        except TimeoutError:
            return
        inside.add(n)
        assert len(inside) <= 3
        try:
            await asyncio.sleep(0.001 * (n % 3))
        finally:
            inside.remove(n)
            room.give()

    tasks = [asyncio.create_task(strive(n)) for n in range(400)]
    for n, task in enumerate(tasks):
        if n % 5 == 0:
            await asyncio.sleep(0)
            task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert (room.taken, room.num_waiting, inside) == (0, 0, set())
    for _ in range(3):
        await room.take(0.0)
    with pytest.raises(TimeoutError):
        await room.take(0.01)


async def warm(client: SandboxClient, count: int) -> None:
    async def are_so_many() -> bool:
        return (await client.stats()).warm == count

    await until(are_so_many)


@on_loop
async def test_a_warm_sandbox_in_which_something_was_left_is_thrown_away(shared: Stage) -> None:
    async with shared.client(warm=1) as client:
        (first,) = await created(client, 1, "clean")
        await warm(client, 1)
        before = await settled(client)
        (ready,) = [record for record in shared.home.book.read() if not record.sandbox_id]
        inside = os.open(Path("/proc", str(ready.pid), "root", "workspace"), os.O_RDONLY)
        plant = ["sh", "-c", f"echo x > /proc/self/fd/{inside}/planted"]
        owner = os.fstat(inside)
        subprocess.run(plant, pass_fds=(inside,), user=owner.st_uid, group=owner.st_gid, check=True)
        os.close(inside)
        (second,) = await created(client, 1, "dirty")
        assert second.instance != ready.instance
        assert (await sh(second, "ls -A")).stdout == b""
        assert (await client.stats()).unfresh == before.unfresh + 1
        await closed(first, second)


@on_loop
async def test_the_record_is_there_before_the_sandbox_and_as_long_as_it(tmp_path: Path) -> None:
    class Watched(LeaseBook):
        """Looks at the machine whenever a record is written or removed."""

        def write(self, record: LeaseRecord) -> None:
            seen.append(("write", len(groups(label)), record.pid is not None))
            super().write(record)

        def remove(self, instance: str) -> None:
            seen.append(("remove", len(groups(label)), False))
            super().remove(instance)

    label = f"watched-{os.getpid()}"
    seen: list[tuple[str, int, bool]] = []
    substrate = ContainerSubstrate(Images({}), label=label, max_sandboxes=4)
    await substrate.start()
    pool = Pool(substrate, Watched(tmp_path / "leases"), config())
    box = await pool.create("a", SandboxSpec(), owner="me", snapshot=None, within_s=10.0)
    made = len(groups(label))
    assert made > 0
    assert [record.pid for record in LeaseBook(tmp_path / "leases").read()] == [box.sandbox.pid]
    await pool.shutdown()
    assert seen == [("write", 0, False), ("write", made, True), ("remove", 0, False)]


def impatient(patch: pytest.MonkeyPatch) -> None:
    """Whoever ends a sandbox soon gives it up for stuck."""
    patch.setattr(instance_module, "_KILL_TIMEOUT_S", 0.3)
    patch.setattr(instance_module, "_REMOVE_TRIES", 5)


@contextlib.contextmanager
def undying(pid: int) -> Iterator[None]:
    """The kernel ends no first process of a namespace while somebody outside has not seen the end of a child that he
    has in it."""
    guest = subprocess.Popen(["nsenter", "--target", str(pid), "--pid", "sleep", "1000"])
    wait_for(lambda: bool(descendants(guest.pid)))
    os.kill(guest.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(guest.pid, signal.SIGCONT)
        guest.wait()


@on_loop
async def test_what_does_not_die_in_time_keeps_its_record_its_room_and_its_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without control groups too, which would tell of what is left."""
    substrate = ContainerSubstrate(
        Images({}), label=f"stuck-{os.getpid()}", max_sandboxes=4, hierarchies=cgroups.Hierarchies(None, None, None)
    )
    await substrate.start()
    book = LeaseBook(tmp_path / "leases")
    pool = Pool(substrate, book, config(max_sandboxes=1, create_timeout_s=0.5))
    users = list(substrate._users)  # pyright: ignore[reportPrivateUsage]
    box = await pool.create("a", SandboxSpec(), owner="me", snapshot=None, within_s=10.0)
    pid = box.sandbox.pid
    with undying(pid), monkeypatch.context() as patch:
        impatient(patch)
        pool.close("a", box.record.instance)
        while pool.stats().ending:
            await asyncio.sleep(0.02)
        for _ in range(2):
            assert not is_gone(pid)
            assert (pool.stats().stuck, pool.stats().held) == (1, 0)
            assert [record.pid for record in book.read()] == [pid]
            assert len(substrate._users) == len(users) - 1  # pyright: ignore[reportPrivateUsage]
            with pytest.raises(SandboxBusyError):
                await pool.create("b", SandboxSpec(), owner="me", snapshot=None, within_s=0.1)
            pool.sweep(0.0)
            await asyncio.sleep(0.1)
    while not box.sandbox.died.done():
        await asyncio.sleep(0.02)
    pool.sweep(0.0)
    await pool.create("b", SandboxSpec(), owner="me", snapshot=None, within_s=60.0)
    assert pool.stats().stuck == 0
    assert [record.sandbox_id for record in book.read()] == ["b"]
    await pool.shutdown()
    assert sorted(substrate._users) == sorted(users)  # pyright: ignore[reportPrivateUsage]


@pytest.mark.parametrize("has_groups", [False, True])
@on_loop
async def test_one_that_does_not_come_up_and_does_not_die_keeps_its_record_its_room_and_its_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_groups: bool
) -> None:
    label = f"unmade-{os.getpid()}"
    hierarchies = None if has_groups else cgroups.Hierarchies(None, None, None)
    substrate = ContainerSubstrate(Images({}), label=label, max_sandboxes=4, hierarchies=hierarchies)
    await substrate.start()
    book = LeaseBook(tmp_path / "leases")
    pool = Pool(substrate, book, config(max_sandboxes=1))
    users = list(substrate._users)  # pyright: ignore[reportPrivateUsage]
    with contextlib.ExitStack() as stack, monkeypatch.context() as short:
        impatient(short)

        async def hang(self: Container, *_: object) -> None:
            stack.enter_context(undying(self.pid))
            raise TimeoutError

        with monkeypatch.context() as patch:
            patch.setattr(Container, "_greet", hang)
            with pytest.raises(SandboxUnavailableError, match="did not come up"):
                await pool.create("a", SandboxSpec(), owner="me", snapshot=None, within_s=10.0)
        while pool.stats().ending:
            await asyncio.sleep(0.02)
        for _ in range(2):
            assert (pool.stats().stuck, pool.stats().held, pool.stats().failed) == (1, 0, 1)
            assert [record.sandbox_id for record in book.read()] == ["a"]
            assert len(substrate._users) == len(users) - 1  # pyright: ignore[reportPrivateUsage]
            with pytest.raises(SandboxBusyError):
                await pool.create("b", SandboxSpec(), owner="me", snapshot=None, within_s=0.1)
            pool.sweep(0.0)
            await asyncio.sleep(0.1)

    async def is_ended() -> bool:
        pool.sweep(0.0)
        while pool.stats().ending:
            await asyncio.sleep(0.02)
        return not pool.stats().stuck

    await until(is_ended)
    assert list(book.read()) == []
    assert groups(label) == []
    await pool.create("b", SandboxSpec(), owner="me", snapshot=None, within_s=60.0)
    with pytest.raises(SandboxBusyError):  # its place was given back once
        await pool.create("c", SandboxSpec(), owner="me", snapshot=None, within_s=0.1)
    await pool.shutdown()
    assert sorted(substrate._users) == sorted(users)  # pyright: ignore[reportPrivateUsage]


@on_loop
async def test_where_no_control_group_can_be_made_nothing_is_used_up(tmp_path: Path) -> None:
    absent = cgroups.Hierarchies(None, tmp_path / "absent", None)
    substrate = ContainerSubstrate(Images({}), label=f"groupless-{os.getpid()}", max_sandboxes=2, hierarchies=absent)
    await substrate.start()
    pool = Pool(substrate, LeaseBook(tmp_path / "leases"), config(max_sandboxes=1))
    for _ in range(3):
        with pytest.raises(SandboxUnavailableError, match="making its control group failed"):
            await pool.create("a", SandboxSpec(), owner="me", snapshot=None, within_s=1.0)
    assert len(substrate._users) == 2  # pyright: ignore[reportPrivateUsage]
    await pool.shutdown()
