"""Proves: a machine that is saved while it hears or says something goes on as one that was saved between two messages,
and so does its ancestor; nobody says anything to an agent that is to be quiet; nothing is booted to go on; and whatever
goes wrong meanwhile, the end of a machine or a lack of something, has its own error and leaves nothing.
"""

import asyncio
import contextlib
import hashlib
import os
import resource
import signal
import socket
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from rollforward.sandbox import vm_keeper, vm_machine
from rollforward.sandbox.agent_link import AgentLink
from rollforward.sandbox.errors import GoneCause, SandboxGoneError, SandboxUnavailableError
from rollforward.sandbox.inside import frames
from rollforward.sandbox.types import ExecRequest, ExecStatus
from rollforward.sandbox.vm_forked import ForkedMachine
from rollforward.sandbox.vm_keeper import Keeper
from rollforward.sandbox.vm_monitor import Monitor
from rollforward.sandbox.vm_state import close_all
from tests.helpers.containers import SMALL
from tests.helpers.machines import MachineWorld
from tests.helpers.supervisors import on_loop

pytestmark = pytest.mark.timeout(300)
MIB = 1 << 20
MAX_BYTES = 1 << 30


@pytest.fixture(scope="module", params=["microvm", "fullvm"])
def world(request: pytest.FixtureRequest) -> Iterator[MachineWorld]:
    with MachineWorld(request.param) as world:
        yield world


def test_one_that_is_saved_in_the_middle_of_messages_goes_on(world: MachineWorld) -> None:
    machine = world.create()
    given, kept = os.urandom(MIB), os.urandom(MIB // 2)
    world.do(machine.upload({"kept": kept}))

    async def hear() -> None:
        result = await machine.exec(ExecRequest(argv=("md5sum",), stdin=given, wall_s=60.0))
        assert result.stdout.split()[0].decode() == hashlib.md5(given).hexdigest()

    async def say() -> None:
        for _ in range(2):
            assert await machine.download(["kept"], max_bytes=MIB) == {"kept": kept}

    async def saved_amid(delay_s: float) -> bytes:
        under_way = [asyncio.create_task(work()) for work in (say, hear, say)]
        await asyncio.sleep(delay_s)
        saved = await machine.save(max_bytes=MAX_BYTES)
        await asyncio.gather(*under_way)
        return saved

    for delay_s in (0.0, 0.05):
        again = world.create(saved=world.do(saved_amid(delay_s)))
        assert world.sh(again, "echo well").stdout == b"well\n"
        assert world.do(again.download(["kept"], max_bytes=MIB)) == {"kept": kept}
        world.do(again.kill())
    assert world.sh(machine, "echo well").stdout == b"well\n"


def test_one_that_uses_all_the_memory_that_it_may_lives_is_saved_and_goes_on(world: MachineWorld) -> None:
    size = 450 * MIB
    machine = world.create(msgspec.structs.replace(SMALL, memory_bytes=size + 100 * MIB, wall_s=150.0))
    script = f"import time\nx = bytearray(b'x') * {size}\nopen('done', 'w').close()\ntime.sleep(1000)"
    running = world.loop.create_task(machine.exec(ExecRequest(argv=("python3", "-c", script))))
    while not world.do(machine.download(["done"], max_bytes=1)):
        assert not running.done(), running.result()
    saved = world.do(machine.save(max_bytes=MAX_BYTES))
    assert len(saved) > size
    again = world.create(machine.spec.limits, saved=saved)
    for one in (machine, again):
        assert world.sh(one, "echo well").stdout == b"well\n"
        world.do(one.kill())
    assert world.do_died(machine) == GoneCause.CLOSED


def test_one_goes_on_where_none_has_booted(world: MachineWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    first = world.create()
    world.sh(first, "echo kept > x")
    saved = world.do(first.save(max_bytes=MAX_BYTES))
    world.do(first.kill())

    async def refuse(*_: Any) -> None:
        raise AssertionError("nothing is to be booted or loaded")

    monkeypatch.setattr(ForkedMachine, "boot", refuse)
    with MachineWorld(world.name) as other:
        monkeypatch.setattr(other.substrate, "_state", refuse)
        again = other.create(saved=saved)
        assert other.sh(again, "cat x").stdout == b"kept\n"
        assert again.platform == first.platform


def test_one_whose_agent_does_not_come_to_the_end_of_a_message_is_lost(
    world: MachineWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vm_machine, "_QUIET_S", 0.3)
    machine = world.create()
    assert machine._link is not None
    machine._link.tell({"op": "hold", "id": 0})  # and nobody lets it go on
    with pytest.raises(SandboxGoneError):
        world.do(machine.save(max_bytes=MAX_BYTES))
    assert world.do_died(machine) == GoneCause.LOST
    assert world.sh(machine, "true").status == ExecStatus.SANDBOX_DEAD
    world.do(machine.kill())


async def _heard(reader: asyncio.StreamReader) -> frames.Head:
    (size,) = frames.LENGTH.unpack(await reader.readexactly(frames.LENGTH.size))
    return frames.unpack(await reader.readexactly(size))[0]


@pytest.mark.parametrize("killed", ["closed", "lost"])
def test_one_that_ends_while_it_is_saved_is_gone(
    world: MachineWorld, monkeypatch: pytest.MonkeyPatch, killed: str
) -> None:
    for command in ("stop", "getfd", "query-migrate", "cont"):
        machine = world.create()
        ask = Monitor.ask
        has_ended = False

        async def end_first(monitor: Monitor, asked: str, **more: Any) -> Any:
            nonlocal has_ended
            if asked == command and not has_ended:  # noqa: B023
                has_ended = True
                if killed == "closed":
                    ending.append(asyncio.ensure_future(machine.kill()))  # noqa: B023
                else:
                    os.kill(machine.pid, signal.SIGKILL)  # noqa: B023
            return await ask(monitor, asked, **more)  # noqa: B023

        ending: list[asyncio.Future[None]] = []
        cause = GoneCause.CLOSED if killed == "closed" else GoneCause.LOST
        with monkeypatch.context() as patch:
            patch.setattr(Monitor, "ask", end_first)
            if command == "cont":  # it has been taken by then
                assert world.do(machine.save(max_bytes=MAX_BYTES))
            else:
                with pytest.raises(SandboxGoneError) as raised:
                    world.do(machine.save(max_bytes=MAX_BYTES))
                assert raised.value.cause == cause
        assert has_ended
        assert world.do_died(machine) == cause
        world.do(machine.kill())
        assert machine.is_gone


def test_whatever_the_system_refuses_is_told_and_leaves_no_descriptor(world: MachineWorld) -> None:
    world.do(world.create().kill())
    machine = world.create()
    spec = machine.spec
    for room in range(24):
        before = os.listdir("/proc/self/fd")
        made = None
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, before)) + 1 + room, hard))
        free = [os.dup(0) for _ in range(max(map(int, before)) + 1 - len(before))]  # numbers below that are free
        try:
            if room == 0:
                with pytest.raises(SandboxUnavailableError, match=r"cannot be saved: Too many open files.*ulimit"):
                    world.do(machine.save(max_bytes=MAX_BYTES))
            with contextlib.suppress(SandboxUnavailableError):
                made = world.do(world.substrate.create(f"few-{room}", spec))
        finally:
            close_all(free)
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for one in (made, world.substrate.left(f"few-{room}")):
            if one is not None:
                world.do(one.kill())
                assert one.is_gone
        while not set(os.listdir("/proc/self/fd")) <= set(before):
            world.do(asyncio.sleep(0.01))
        if made is not None:
            break
    assert made is not None
    assert world.sh(machine, "echo well").stdout == b"well\n"
    world.do(machine.kill())


def test_one_that_ends_while_its_kind_is_prepared_cannot_be_made(
    world: MachineWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def end(machine: ForkedMachine) -> None:
        os.kill(machine.pid, signal.SIGKILL)
        await asyncio.wait([machine.died])

    limits = msgspec.structs.replace(SMALL, output_bytes=4099)  # a kind of its own
    with monkeypatch.context() as patch:
        patch.setattr(ForkedMachine, "rehearse", end)
        with pytest.raises(SandboxUnavailableError, match="ended while it was prepared"):
            world.create(limits)
    world.do(world.create(limits).kill())


def test_one_whose_first_process_does_not_answer_is_lost(world: MachineWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    async def unheard(keeper: Keeper, question: bytes) -> None:
        pass

    machine = world.create()
    with monkeypatch.context() as patch:
        patch.setattr(Keeper, "_tell", unheard)  # what has not reached it is not answered, however fast it is
        patch.setattr(vm_keeper, "_ANSWER_S", 0.05)
        assert world.do(machine.save(max_bytes=MAX_BYTES)), "it had been taken by then"
    assert world.do_died(machine) == GoneCause.LOST
    with pytest.raises(SandboxGoneError):
        world.do(machine.save(max_bytes=MAX_BYTES))
    world.do(machine.kill())


@on_loop
async def test_nobody_says_anything_to_one_that_is_to_be_quiet() -> None:
    ours, theirs = socket.socketpair()
    reader, writer = await asyncio.open_unix_connection(sock=theirs)
    link = await AgentLink.open(ours, lambda: None)
    link.hello.cancel()
    earlier = asyncio.create_task(link.ask({"op": "earlier"}))
    said = await _heard(reader)
    is_quiet, may = asyncio.Event(), asyncio.Event()

    async def be_quiet() -> None:
        async with link.quiet():
            is_quiet.set()
            await may.wait()
            raise KeyError

    quiet = asyncio.create_task(be_quiet())
    hold = await _heard(reader)
    assert hold["op"] == "hold"
    later = asyncio.create_task(link.ask({"op": "later"}))
    await asyncio.sleep(0.02)
    assert not is_quiet.is_set(), "it may still say something"
    writer.write(frames.pack({"id": said["id"]}) + frames.pack({"id": hold["id"]}))
    await earlier
    await is_quiet.wait()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(0.05):
            raise AssertionError(f"it was told {await _heard(reader)}")
    may.set()
    with pytest.raises(KeyError):
        await quiet
    assert [(await _heard(reader))["op"] for _ in range(2)] == ["go on", "later"]
    later.cancel()
    link.end(SandboxGoneError("gone", GoneCause.CLOSED))
    writer.close()


@on_loop
async def test_who_goes_away_while_it_becomes_quiet_has_it_go_on() -> None:
    ours, theirs = socket.socketpair()
    reader, writer = await asyncio.open_unix_connection(sock=theirs)
    link = await AgentLink.open(ours, lambda: None)
    link.hello.cancel()

    async def be_quiet() -> None:
        async with link.quiet():
            raise AssertionError("nobody has answered")

    quiet = asyncio.create_task(be_quiet())
    assert (await _heard(reader))["op"] == "hold"
    quiet.cancel()
    with pytest.raises(asyncio.CancelledError):
        await quiet
    later = asyncio.create_task(link.ask({"op": "later"}))
    assert (await _heard(reader))["op"] == "go on"
    assert (await _heard(reader))["op"] == "later"
    later.cancel()
    link.end(SandboxGoneError("gone", GoneCause.CLOSED))
    writer.close()
