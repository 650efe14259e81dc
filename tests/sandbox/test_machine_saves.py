"""Proves: a machine that is saved while it hears or says something goes on as one that was saved between two messages,
and so does its ancestor; nobody says anything to an agent that is to be quiet; and nothing is booted to go on.
"""

import asyncio
import contextlib
import hashlib
import os
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from rollforward.sandbox import vm_machine
from rollforward.sandbox.agent_link import AgentLink
from rollforward.sandbox.errors import GoneCause, SandboxGoneError
from rollforward.sandbox.inside import frames
from rollforward.sandbox.types import ExecRequest, ExecStatus
from rollforward.sandbox.vm_forked import ForkedMachine
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
