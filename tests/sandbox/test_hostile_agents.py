"""Proves: whatever is said in an agent's or an emulator's place, the host's side ends in bounded time and memory, as an
error or a lost sandbox; answers to other questions are no answers; and a sandbox that stands still goes on.

The hostile side is written here, at the other end of a socket pair. Does not prove what honest ones do
(test_container.py, test_machines.py).
"""

import asyncio
import contextlib
import functools
import json
import os
import signal
import socket
import subprocess
import tracemalloc
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import msgspec
import pytest

from rollforward.sandbox import agent_link, outcomes, vm_keeper, vm_monitor
from rollforward.sandbox import instance as instance_module
from rollforward.sandbox.agent_link import AgentLink, Parts
from rollforward.sandbox.config import Limits, ToolConfig
from rollforward.sandbox.errors import (
    GoneCause,
    SandboxBusyError,
    SandboxError,
    SandboxFileError,
    SandboxGoneError,
    SandboxUnavailableError,
)
from rollforward.sandbox.gate import Gate
from rollforward.sandbox.inside import frames
from rollforward.sandbox.instance import Instance
from rollforward.sandbox.types import Call, CallStatus, ExecRequest, ExecStatus, SandboxSpec
from rollforward.sandbox.vm import Layout
from rollforward.sandbox.vm_keeper import Keeper
from rollforward.sandbox.vm_machine import Machine, Wires
from rollforward.sandbox.vm_monitor import Monitor
from tests.helpers.supervisors import on_loop
from tests.sandbox.test_vm_stream import STREAM

pytestmark = pytest.mark.timeout(60)
SPEC = SandboxSpec(limits=Limits(output_bytes=64), tools=(ToolConfig(name="calculator"),))
WITHIN_S = 20.0


@pytest.fixture(autouse=True)
def _no_last_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who is killed here leaves its socket open, which is not waited for."""
    monkeypatch.setattr(instance_module, "_LAST_WORDS_S", 0.05)


def message(head: Any, *blobs: bytes) -> bytes:
    """Like `frames.pack`, but that nothing is added to the JSON."""
    text = head if isinstance(head, bytes) else json.dumps(head).encode()
    rest = frames.LENGTH.pack(len(text)) + text + b"".join(blobs)
    return frames.LENGTH.pack(len(rest)) + rest


@contextlib.contextmanager
def bounded_memory(most: int) -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < most
    finally:
        tracemalloc.stop()


# What no message is, as JSON and bytes.
BROKEN: dict[str, tuple[Any, bytes]] = {
    "no JSON": (b"{", b""),
    "no object": ([], b""),
    "a word": ("blobs", b""),
    "no lengths": ({"id": 1}, b""),
    "a length that is an object": ({"id": 1, "blobs": {"1": 1}}, b"x"),
    "lengths as text": ({"id": 1, "blobs": "1"}, b"x"),
    "a negative length": ({"id": 1, "blobs": [-1, 2]}, b"x"),
    "a length that is true": ({"id": 1, "blobs": [True]}, b"x"),
    "half a byte": ({"id": 1, "blobs": [0.5, 0.5]}, b"x"),
    "too short": ({"id": 1, "blobs": [1]}, b"xy"),
    "too long": ({"id": 1, "blobs": [3]}, b"xy"),
    "very many": ({"id": 1, "blobs": [0] * 5000}, b""),
    "deep": (b"[" * 100_000, b""),
    "a long number": (b'{"id": 1, "blobs": [' + b"9" * 10_000 + b"]}", b""),
    "no UTF-8": (b'{"blobs": [], "\xff": 1}', b""),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_no_message_is_refused(name: str) -> None:
    head, blob = BROKEN[name]
    with pytest.raises(ValueError):  # noqa: PT011, which one says nothing
        frames.unpack(message(head, blob)[frames.LENGTH.size :])


def test_lengths_that_overlap_are_refused_before_anything_is_copied() -> None:
    size, num = 100_000, 2000
    lengths = [size, -size] * num + [size]
    data = message({"blobs": lengths}, bytes(size))[frames.LENGTH.size :]
    with bounded_memory(8 << 20), pytest.raises(ValueError, match="add up"):
        frames.unpack(data)


def test_a_message_that_is_one_comes_back() -> None:
    data = frames.pack({"id": 3, "text": "\ud800"}, b"one", b"", b"two")[frames.LENGTH.size :]
    assert frames.unpack(data) == ({"id": 3, "text": "\ud800", "blobs": [3, 0, 3]}, [b"one", b"", b"two"])


class Heard:
    """A link, the agent's end of it, and whether nonsense was heard."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self.ours = ours
        self.reader: asyncio.StreamReader
        self.writer: asyncio.StreamWriter
        self._theirs = theirs
        self.nonsense = asyncio.Event()

    async def open(self, **settings: Any) -> AgentLink:
        self.reader, self.writer = await asyncio.open_unix_connection(sock=self._theirs)
        self.link = await AgentLink.open(self.ours, self.nonsense.set, **settings)
        self.link.hello.cancel()  # nobody waits for it here
        return self.link

    async def asked(self) -> frames.Head:
        """What it was asked next."""
        (size,) = frames.LENGTH.unpack(await self.reader.readexactly(frames.LENGTH.size))
        return frames.unpack(await self.reader.readexactly(size))[0]

    def close(self) -> None:
        self.link.end(SandboxGoneError("gone", GoneCause.CLOSED))
        self.writer.close()


HOSTILE = {
    **{name: message(*broken) for name, broken in BROKEN.items()},
    "a great message": frames.LENGTH.pack(frames.MAX_BYTES + 1),
    "no number": message({"blobs": []}),
    "a number that is text": message({"id": "1", "blobs": []}),
    "a number that is a list": message({"id": [], "blobs": []}),
    "a number that is true": message({"id": True, "blobs": []}),
    "no last words": message({"id": -1, "blobs": []}),
    "a part without bytes": message({"id": 1, "more": True, "blobs": []}),
    "a part of two": message({"id": 1, "more": True, "blobs": [1, 1]}, b"xy"),
    "more bytes than asked for": message({"id": 1, "more": True, "blobs": [1001]}, bytes(1001)),
    "a part of no file": message({"id": 1, "more": True, "index": 2, "blobs": [1]}, b"x"),
    "a part before the first": message({"id": 1, "more": True, "index": -1, "blobs": [1]}, b"x"),
    "a part of true": message({"id": 1, "more": True, "index": True, "blobs": [1]}, b"x"),
    "a part of a list": message({"id": 1, "more": True, "index": [], "blobs": [1]}, b"x"),
    "no end of parts": message({"id": 1, "more": True, "blobs": [0]}, b"") * 100,
    "a great JSON": message({"id": 1, "x": "x" * (3 << 20), "blobs": []}),
    "its end": b"",
}


@pytest.mark.parametrize("name", HOSTILE)
@on_loop
async def test_a_link_ends_at_the_first_nonsense(name: str) -> None:
    heard = Heard()
    link = await heard.open()
    asking = asyncio.create_task(link.ask({"op": "download"}, parts=Parts(1000, 2)))
    await heard.asked()
    assert not heard.nonsense.is_set()
    heard.writer.write(HOSTILE[name])
    if not HOSTILE[name]:
        heard.writer.write_eof()
    async with asyncio.timeout(WITHIN_S):
        await heard.nonsense.wait()
    assert not asking.done()
    heard.close()
    with pytest.raises(SandboxGoneError):
        await asking


@on_loop
async def test_parts_are_put_together_and_their_heads_are_not_kept() -> None:
    parts = Parts(1 << 20, 2)
    with bounded_memory(4 << 20):
        for number in range(4000):
            parts.add({"id": 1, "index": number % 2, "more": "x" * 10_000}, [b"%04d" % number])
    assert [len(parts.found[index]) for index in range(2)] == [8000, 8000]
    assert parts.found[1].startswith(b"00010003")


@on_loop
async def test_a_flood_that_nobody_waits_for_leaves_the_loop_alive_and_ends() -> None:
    heard = Heard()
    await heard.open()
    flood, num_turns, most = message({"id": 7, "blobs": []}) * 4096, 0, 1 << 13

    async def say() -> None:
        with contextlib.suppress(ConnectionError):
            while True:
                heard.writer.write(flood)
                await heard.writer.drain()

    saying = asyncio.create_task(say())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(agent_link, "_MAX_STRAYS", most)
        async with asyncio.timeout(WITHIN_S):
            while not heard.nonsense.is_set():
                num_turns += 1
                await asyncio.sleep(0)
    saying.cancel()
    heard.close()
    assert num_turns > most


@on_loop
async def test_an_answer_to_an_ancestors_question_is_no_answer() -> None:
    wires = Wires()
    machine = Machine.__new__(_Rejoined)
    keeping = asyncio.create_task(_keep(wires.keeper_end))
    Machine.__init__(machine, "m", SPEC, _LAYOUT, _no_group, lambda _: None)
    await machine.rejoin(wires, None)  # type: ignore[arg-type] # asked only where it fails
    await keeping
    reader, writer = await asyncio.open_unix_connection(sock=wires.agent_end)
    link = machine._link
    assert link is not None
    asking = asyncio.create_task(link.ask({"op": "verify"}))
    assert (await _heard(reader))["op"] == "go on"
    number = (await _heard(reader))["id"]
    assert 1 << 20 < number < 1 << 53
    for inherited in range(100):  # whatever its ancestor had been asked
        writer.write(message({"id": inherited, "whose": "ancestor", "blobs": []}))
    await writer.drain()
    await asyncio.sleep(0.05)
    assert not asking.done()
    writer.write(message({"id": number, "whose": "own", "blobs": []}))
    assert (await asking)[0]["whose"] == "own"
    link.end(SandboxGoneError("gone", GoneCause.CLOSED))
    writer.close()
    wires.monitor_end.close()
    wires.keeper_end.close()
    wires.keeper.close()
    wires.monitor.close()


class _Rejoined(Machine):
    async def take(self, monitor: Monitor, stream: int, max_bytes: int) -> list[bytes]:
        raise NotImplementedError


async def _heard(reader: asyncio.StreamReader) -> frames.Head:
    """What an agent is told next."""
    (size,) = frames.LENGTH.unpack(await reader.readexactly(frames.LENGTH.size))
    return frames.unpack(await reader.readexactly(size))[0]


_LAYOUT = Layout("/bin/true", "tcg", 1 << 20, (), "key")


async def _keep(end: socket.socket) -> None:
    """Answer one renewal, as the guest's first process does."""
    end.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_recv(end, 1 << 16)
    await loop.sock_sendall(end, frames.pack({"ooms": 0}))


class NoGroup:
    """A control group without limits: what is hostile here is one process that only sleeps."""

    paths = ()

    def kill(self) -> None:
        pass

    def remove(self) -> bool:
        return True

    def oom_kills(self) -> int:
        return 0


def _no_group(*_: object) -> Any:
    return NoGroup()


class Puppet(Instance):
    """A sandbox whose process does nothing, and whose agent says what it is told to."""

    @classmethod
    async def come_up(cls, hello: Any) -> "Puppet":
        puppet = cls("p", SPEC, _no_group, lambda _: None)
        puppet.process = subprocess.Popen(["sleep", "60"])
        puppet._watch(os.pidfd_open(puppet.process.pid))
        ours, theirs = socket.socketpair()
        puppet.reader, puppet.writer = await asyncio.open_unix_connection(sock=theirs)
        puppet.writer.write(message(hello))
        await puppet._greet(ours, [], WITHIN_S)
        return puppet

    process: subprocess.Popen[bytes]
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def say(self, head: Any, *blobs: bytes) -> None:
        """Wait for a question, and answer it; the number and the lengths are put in."""
        (size,) = frames.LENGTH.unpack(await self.reader.readexactly(frames.LENGTH.size))
        number = frames.unpack(await self.reader.readexactly(size))[0]["id"]
        self.writer.write(message({"id": number, **head, "blobs": [len(blob) for blob in blobs]}, *blobs))

    async def bury(self) -> None:
        await self.kill()
        self.writer.close()
        self.process.wait()


UP = {"id": 0, "kind": "", "error": "", "blobs": []}
ENDED = {"is_over": False, "code": 0, "seconds": 0.5, "cpu_s": 0.25, "is_full": False}
RAN = {**ENDED, "stdout_bytes": 3, "stderr_bytes": 0, "leader": 0}
ODD: list[Any] = [None, "x", [], {}, -1, 1 << 70, 1e400, float("nan"), True]


def _without(head: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in head.items() if key != name}


COMMANDS: list[tuple[Any, ...]] = [
    *[(_without(RAN, name), b"out", b"") for name in RAN if name != "leader"],
    *[
        ({**RAN, name: odd}, b"out", b"")
        for name in RAN
        for odd in ODD
        if type(odd) is not type(RAN[name]) and (name, odd) not in (("leader", None), ("leader", -1), ("code", -1))
    ],
    ({**RAN, "leader": -65}, b"out", b""),
    ({**RAN, "leader": 256}, b"out", b""),
    ({**RAN, "leader_cpu_s": "x"}, b"out", b""),
    ({**RAN, "error": 1}, b"out", b""),
    ({**RAN, "not_run": ["x"]}, b"out", b""),
    ({**RAN, "\ud800": 1}, b"out", b""),
    (RAN, b"more", b""),
    (RAN, b"out", b"x"),
    (RAN, b"out"),
    (RAN, b"out", b"", b""),
    ({**RAN, "stdout_bytes": 65}, bytes(65), b""),
]


@pytest.mark.parametrize("number", range(len(COMMANDS)))
def test_an_answer_of_a_command_that_cannot_be_is_nonsense(number: int) -> None:
    head, *blobs = COMMANDS[number]
    with pytest.raises(outcomes.NonsenseError):
        outcomes.exec_result(head, blobs, SPEC.limits, False)


def test_an_answer_of_a_command_that_can_be_is_its_result() -> None:
    result = outcomes.exec_result(RAN, [b"out", b""], SPEC.limits, False)
    assert (result.status, result.exit_code, result.stdout, result.seconds) == (ExecStatus.OK, 0, b"out", 0.5)
    result = outcomes.exec_result({"error": "why \ud800"}, [], SPEC.limits, False)
    assert (result.status, result.detail) == (ExecStatus.INFRA, "why ?")
    msgspec.msgpack.encode(result)
    result = outcomes.exec_result({"not_run": "why", "x": 1}, [], SPEC.limits, True)
    assert (result.status, result.detail) == (ExecStatus.OOM, "did not run: why")


CALLS: list[tuple[Any, ...]] = [
    *[(_without(ENDED, name), b"+{}") for name in ("is_over", "code", "seconds", "cpu_s")],
    ({**ENDED, "seconds": "1"}, b"+{}"),
    (ENDED,),
    (ENDED, b"+", b""),
    (ENDED, bytes((8 << 20) + 2)),
]


@pytest.mark.parametrize("number", range(len(CALLS)))
def test_an_answer_of_a_call_that_cannot_be_is_nonsense(number: int) -> None:
    head, *blobs = CALLS[number]
    with pytest.raises(outcomes.NonsenseError):
        outcomes.call_result(head, blobs, SPEC.tools[0], SPEC.limits, False)


async def _exec(puppet: Puppet) -> None:
    result = await puppet.exec(ExecRequest(argv=("true",)))
    assert result.status == ExecStatus.INFRA
    assert "unknown outcome" in result.detail


async def _call(puppet: Puppet) -> None:
    result = await puppet.call(Call(tool="calculator", arguments={}))
    assert result.status == CallStatus.INFRA
    assert "unknown outcome" in result.detail


async def _download(puppet: Puppet) -> None:
    with pytest.raises(SandboxGoneError):
        await puppet.download(["a"], max_bytes=10)


async def _upload(puppet: Puppet) -> None:
    with pytest.raises(SandboxGoneError):
        await puppet.upload({"a": b"x"})


async def _verify(puppet: Puppet) -> None:
    with pytest.raises(SandboxGoneError):
        await puppet.is_fresh()


LIES: dict[str, tuple[Callable[[Puppet], Coroutine[Any, Any, None]], dict[str, Any]]] = {
    "a command": (_exec, {"is_over": "no"}),
    "a call": (_call, {}),
    "a download's refusal": (_download, {"file_error": ["x"]}),
    "a download's index": (_download, {"more": True, "index": 1}),
    "an upload's refusal": (_upload, {"error": 1}),
}


@pytest.mark.parametrize("name", LIES)
@on_loop
async def test_a_sandbox_whose_agent_lies_is_lost(name: str) -> None:
    ask, answer = LIES[name]
    puppet = await Puppet.come_up(UP)
    try:
        async with asyncio.timeout(WITHIN_S):
            await asyncio.gather(ask(puppet), puppet.say(answer, b"x"))
            assert await puppet.died == GoneCause.LOST
    finally:
        await puppet.bury()


@pytest.mark.parametrize("ask", [_download, _upload, _verify], ids=["download", "upload", "verify"])
@on_loop
async def test_a_sandbox_whose_agent_says_nothing_is_lost(ask: Callable[[Puppet], Coroutine[Any, Any, None]]) -> None:
    puppet = await Puppet.come_up(UP)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(instance_module, "_FILES_S", 0.2)
            async with asyncio.timeout(WITHIN_S):
                await ask(puppet)
                assert await puppet.died == GoneCause.LOST
    finally:
        await puppet.bury()


HELLOS: dict[str, Any] = {
    "no kind": {"id": 0, "error": "", "blobs": []},
    "no error": {"id": 0, "kind": "tool", "blobs": []},
    "an error that is none": {"id": 0, "kind": "tool", "error": 5, "blobs": []},
    "a kind that is a list": {"id": 0, "kind": [], "error": "", "blobs": []},
    "a tool that there is not": {"id": 0, "kind": "tool", "error": "other\nE", "blobs": []},
    "half a character": {"id": 0, "kind": "\ud800", "error": "\ud800", "blobs": []},
}


@pytest.mark.parametrize("name", HELLOS)
@on_loop
async def test_one_that_says_nonsense_at_first_did_not_come_up(name: str) -> None:
    puppets: list[Puppet] = []
    make = functools.partial(Puppet.come_up, HELLOS[name])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Puppet, "_watch", lambda self, pidfd: puppets.append(self) or Instance._watch(self, pidfd))
        with pytest.raises(SandboxUnavailableError, match="did not come up"):
            await make()
    await puppets[0].bury()


class Emulator:
    """A monitor, and a thread's end of it that says what it is told to whatever it is asked."""

    def __init__(self) -> None:
        ours, self.end = socket.socketpair()
        self.end.setblocking(False)
        self.monitor = Monitor(ours)
        self.asked: list[dict[str, Any]] = []

    async def serve(self, answer: Callable[[dict[str, Any]], Any]) -> None:
        """Answer every question by a value, or by bytes as they are."""
        loop, heard = asyncio.get_running_loop(), b""
        await loop.sock_sendall(self.end, b'{"QMP": {"version": {}, "capabilities": []}}\r\n')
        while chunk := await loop.sock_recv(self.end, 1 << 16):
            heard += chunk
            while heard:
                try:
                    question, stop = json.JSONDecoder().raw_decode(heard.decode())
                except ValueError:
                    break
                heard = heard[stop:]
                self.asked.append(question)
                said: Any = {"return": {}} if question["execute"] == "qmp_capabilities" else answer(question)
                if isinstance(said, dict):
                    said = json.dumps({**said, "id": question["id"]}).encode() + b"\r\n"
                await loop.sock_sendall(self.end, said)

    def close(self) -> None:
        self.end.close()
        self.monitor.close()


async def _migrate(monitor: Monitor) -> None:
    with open("/dev/null", "wb") as file:
        await monitor.migrate(file.fileno())


async def _status(monitor: Monitor) -> None:
    await monitor.ask("query-status")


async def _load(monitor: Monitor) -> None:
    await monitor.wait_until_loaded()


EMULATORS: dict[str, tuple[Callable[[Monitor], Coroutine[Any, Any, None]], Any]] = {
    "a list": (_status, b"[]\n"),
    "a number": (_status, b"5\n"),
    "no JSON": (_status, b"{\n"),
    "no UTF-8": (_status, b"\xff\n"),
    "deep": (_status, b"[" * 100_000 + b"\n"),
    "a line without end": (_status, bytes(2 << 20)),
    "no end of events": (_status, b'{"event": "STOP"}\n' * 2000),
    "no end of long events": (_status, (b'{"event": "' + b"x" * 500_000 + b'"}\n') * 12),
    "an error that is text": (_status, {"error": "no"}),
    "an error that is nothing": (_status, {"error": None}),
    "neither": (_status, {}),
    "a long error": (_status, {"error": {"desc": "x" * 500_000}}),
    "a state that is a list": (_migrate, {"return": []}),
    "a state of a number": (_migrate, {"return": {"status": 5}}),
    "a migration that failed": (_migrate, {"return": {"status": "failed", "error-desc": {"x": 1}}}),
    "a status that is a list": (_load, {"return": []}),
    "no status": (_load, {"return": {}}),
}


@pytest.mark.parametrize("name", EMULATORS)
@on_loop
async def test_an_emulator_that_lies_is_an_error_of_its_own_kind(name: str) -> None:
    ask, answer = EMULATORS[name]
    emulator = Emulator()
    serving = asyncio.create_task(emulator.serve(lambda _: answer))
    with bounded_memory(24 << 20):
        async with asyncio.timeout(WITHIN_S):
            with pytest.raises(SandboxUnavailableError) as raised:
                await ask(emulator.monitor)
    assert len(str(raised.value)) < 3000
    serving.cancel()
    emulator.close()


@pytest.mark.parametrize("flood", [b"x" * 65536, b'{"event": "STOP"}\n' * 4096], ids=["a line", "lines"])
@on_loop
async def test_an_emulator_that_floods_leaves_the_loop_alive(flood: bytes) -> None:
    emulator, num_turns = Emulator(), 0

    async def say() -> None:
        while True:
            await asyncio.get_running_loop().sock_sendall(emulator.end, flood)

    async def turn() -> None:
        nonlocal num_turns
        while True:
            num_turns += 1
            await asyncio.sleep(0)

    others = [asyncio.create_task(say()), asyncio.create_task(turn())]
    async with asyncio.timeout(WITHIN_S):
        with pytest.raises(SandboxUnavailableError, match=r"no end|not end"):
            await emulator.monitor.ask("query-status")
    assert num_turns > 5
    for other in others:
        other.cancel()
    await asyncio.wait(others)
    emulator.close()


@on_loop
async def test_an_emulator_that_is_silent_from_the_beginning_is_an_error() -> None:
    emulator = Emulator()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vm_monitor, "_ANSWER_S", 0.1)
        with pytest.raises(SandboxUnavailableError, match=r"not within 0\.1 s"):
            await emulator.monitor.ask("query-status")
        emulator.end.close()
        with pytest.raises(SandboxUnavailableError, match="does not answer"):
            await emulator.monitor.ask("query-status")
    emulator.close()


@on_loop
async def test_an_emulator_that_does_not_listen_is_an_error() -> None:
    emulator = Emulator()
    with contextlib.suppress(BlockingIOError):
        while True:
            emulator.monitor._control.send(bytes(1 << 16))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vm_monitor, "_ANSWER_S", 0.1)
        async with asyncio.timeout(5.0):
            with pytest.raises(SandboxUnavailableError, match=r"not within 0\.1 s"):
                await emulator.monitor.ask("query-status")
    emulator.close()


@on_loop
async def test_an_answer_is_found_behind_events_and_answers_to_those_who_went_away() -> None:
    emulator = Emulator()
    before = b'{"event": "STOP"}\n{"id": 1, "return": {"status": "late"}}\n'
    said = lambda question: before + json.dumps({"id": question["id"], "return": {"status": "own"}}).encode() + b"\n"  # noqa: E731
    serving = asyncio.create_task(emulator.serve(said))
    assert await emulator.monitor.ask("query-status") == {"status": "own"}
    serving.cancel()
    emulator.close()


class Standing(Machine):
    """A machine whose emulator is the test's."""

    async def take(self, monitor: Monitor, stream: int, max_bytes: int) -> list[bytes]:
        await monitor.migrate(stream)
        os.pwrite(stream, STREAM, 0)
        return [b"disk"]


async def _standing(emulator: Emulator) -> tuple[Standing, Wires]:
    machine, wires = Standing("m", SPEC, _LAYOUT, _no_group, lambda _: None), Wires()
    machine._monitor, machine._keeper = emulator.monitor, Keeper(wires.keeper)
    wires.monitor.close()
    machine._link = await AgentLink.open(wires.agent, lambda: None)
    machine._link.hello.cancel()
    return machine, wires


def _answers(question: dict[str, Any]) -> dict[str, Any]:
    return {"return": {"status": "completed"}}


@on_loop
async def test_two_saves_of_a_machine_come_one_after_the_other_and_each_renews_it() -> None:
    emulator = Emulator()
    machine, wires = await _standing(emulator)
    serving = asyncio.create_task(emulator.serve(_answers))
    renewals: list[int] = []
    keeping = asyncio.create_task(_keep_all(wires.keeper_end, renewals))
    told: list[str] = []
    agent = asyncio.create_task(_hold_all(wires.agent_end, told))
    saved = await asyncio.gather(*(machine.save(max_bytes=1 << 20) for _ in range(2)), machine.pause())
    assert saved[0] == saved[1]
    done = [question["execute"] for question in emulator.asked[1:]]
    assert done == [*["stop", "getfd", "migrate", "query-migrate", "cont"] * 2, "stop"]
    names = [question["arguments"]["fdname"] for question in emulator.asked if question["execute"] == "getfd"]
    assert len(set(names)) == 2
    with pytest.raises(SandboxFileError, match="more than 50"):
        await machine.save(max_bytes=50)
    assert emulator.asked[-1]["execute"] == "cont"
    assert len(renewals) == 3
    while len(told) < 6:
        await asyncio.sleep(0)
    assert told == ["hold", "go on"] * 3
    keeping.cancel()
    agent.cancel()
    serving.cancel()
    machine._link.end(SandboxGoneError("gone", GoneCause.CLOSED))  # type: ignore[union-attr]
    for end in (wires.agent_end, wires.keeper_end, wires.monitor_end, wires.keeper):
        end.close()
    emulator.close()


@on_loop
async def test_sockets_of_one_that_does_not_end_are_not_closed_under_who_waits_at_them() -> None:
    emulator, group = Emulator(), NoGroup()
    machine, wires = await _standing(emulator)
    machine._group = group  # type: ignore[assignment]
    asking = asyncio.create_task(emulator.monitor.ask("query-status"))
    await asyncio.sleep(0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(instance_module, "_REMOVE_TRIES", 1)
        patch.setattr(group, "remove", lambda: False)
        await machine.kill()
    serving = asyncio.create_task(emulator.serve(_answers))
    async with asyncio.timeout(WITHIN_S):
        assert await asking == {"status": "completed"}
    await machine.kill()
    assert machine.is_gone
    assert wires.keeper.fileno() == -1
    serving.cancel()
    machine._link.end(SandboxGoneError("gone", GoneCause.CLOSED))  # type: ignore[union-attr]
    for end in (wires.agent_end, wires.keeper_end, wires.monitor_end):
        end.close()
    emulator.close()


@pytest.mark.parametrize("how", ["late", "cancelled", "nonsense", "two at once", "gone"])
@on_loop
async def test_an_answer_of_a_first_process_is_no_answer_to_a_later_question(how: str) -> None:
    ours, end = socket.socketpair()
    keeper, answer = Keeper(ours), message({"ooms": 7, "blobs": []})
    with pytest.MonkeyPatch.context() as patch:
        if how == "cancelled":
            asking = asyncio.create_task(keeper.renew())
            await asyncio.sleep(0.02)
            asking.cancel()
            await asyncio.wait([asking])
        else:
            if how == "late":
                patch.setattr(vm_keeper, "_ANSWER_S", 0.02)
            elif how == "gone":
                end.close()
            else:
                end.sendall(answer * 2 if how == "two at once" else message([]))
            with pytest.raises(SandboxUnavailableError, match=r"did not|ended before"):
                await keeper.renew()
    with contextlib.suppress(OSError):
        end.sendall(answer)
    with pytest.raises(SandboxUnavailableError, match="not asked any more"):
        await keeper.renew()
    keeper.close()
    end.close()


@on_loop
async def test_a_machine_whose_first_process_does_not_answer_is_given_up() -> None:
    emulator, sent = Emulator(), list[signal.Signals]()
    machine, wires = await _standing(emulator)
    machine._signal = lambda number=signal.SIGKILL: sent.append(number)  # type: ignore[method-assign]
    serving = asyncio.create_task(emulator.serve(_answers))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vm_keeper, "_ANSWER_S", 0.05)
        await machine.resume()
    assert sent == [signal.SIGCONT, signal.SIGKILL]
    serving.cancel()
    machine._link.end(SandboxGoneError("gone", GoneCause.CLOSED))  # type: ignore[union-attr]
    for end in (wires.agent_end, wires.keeper_end, wires.monitor_end, wires.keeper):
        end.close()
    emulator.close()


async def _keep_all(end: socket.socket, renewals: list[int]) -> None:
    while True:
        await _keep(end)
        renewals.append(1)


async def _hold_all(end: socket.socket, told: list[str]) -> None:
    """Answer what an agent is asked."""
    reader, writer = await asyncio.open_unix_connection(sock=end.dup())
    while True:
        head = await _heard(reader)
        told.append(head["op"])
        if "id" in head:
            writer.write(message({"id": head["id"], "blobs": []}))


class Slow:
    """What a gate needs of a sandbox, each of whose changes waits until it may."""

    id = "s"

    def __init__(self) -> None:
        self.may, self.has_begun = asyncio.Event(), asyncio.Event()
        self.is_standing, self.fails = False, False
        self.done: list[str] = []

    async def pause(self) -> None:
        self.is_standing = True
        self.has_begun.set()
        await self.may.wait()
        self.done.append("pause")
        if self.fails:
            raise SandboxUnavailableError("sandbox: it cannot be said")

    async def resume(self) -> None:
        self.has_begun.set()
        await self.may.wait()
        self.done.append("resume")
        self.is_standing = False


async def _nothing() -> str:
    return "answer"


@on_loop
async def test_one_whose_asker_goes_away_while_it_is_paused_goes_on_when_it_is_asked() -> None:
    slow = Slow()
    gate = Gate(slow)  # type: ignore[arg-type]
    pausing = asyncio.create_task(gate.pause())
    await slow.has_begun.wait()
    pausing.cancel()
    await asyncio.wait([pausing])
    asking = asyncio.create_task(gate.ask(_nothing))
    await asyncio.sleep(0)
    slow.may.set()
    assert await asking == "answer"
    assert (slow.done, slow.is_standing) == (["pause", "resume"], False)


@on_loop
async def test_one_whose_pause_failed_goes_on_when_it_is_asked_and_is_paused_when_that_is_asked_again() -> None:
    slow = Slow()
    slow.may.set()
    slow.fails = True
    gate = Gate(slow)  # type: ignore[arg-type]
    with pytest.raises(SandboxError):
        await gate.pause()
    assert await gate.ask(_nothing) == "answer"
    assert not slow.is_standing
    with pytest.raises(SandboxError):
        await gate.pause()
    slow.fails = False
    await gate.pause()
    assert slow.is_standing


@on_loop
async def test_a_resume_whose_asker_goes_away_comes_to_its_end() -> None:
    slow = Slow()
    slow.may.set()
    gate = Gate(slow)  # type: ignore[arg-type]
    await gate.pause()
    slow.may.clear()
    slow.has_begun.clear()
    resuming = asyncio.create_task(gate.resume())
    await slow.has_begun.wait()
    resuming.cancel()
    await asyncio.wait([resuming])
    slow.may.set()
    assert await gate.ask(_nothing) == "answer"
    assert slow.done == ["pause", "resume"]


@on_loop
async def test_none_is_paused_while_it_answers() -> None:
    slow, may = Slow(), asyncio.Event()
    slow.may.set()
    gate = Gate(slow)  # type: ignore[arg-type]
    asking = asyncio.create_task(gate.ask(may.wait))
    await asyncio.sleep(0)
    with pytest.raises(SandboxBusyError):
        await gate.pause()
    may.set()
    await asking
    await gate.pause()
    assert slow.is_standing


def test_a_refusal_is_the_files_own_and_no_nonsense() -> None:
    assert outcomes.refusal({"file_error": "a", "error": "b"}) == "a"
    assert outcomes.refusal({"error": "b"}) == "b"
    assert outcomes.refusal({}) == ""
