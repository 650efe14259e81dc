"""Proves: what the client asks arrives as it is, errors keep their type, and only what is safe is asked again.

With real supervisors and containers. Does not prove: what happens to sandboxes whose owner or supervisor is killed
(test_supervisor_kills.py).
"""

import asyncio
import os
import pickle
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rollforward.sandbox import errors, wire
from rollforward.sandbox.client import Sandbox, SandboxClient, SocketTransport, _Route
from rollforward.sandbox.config import Limits, ToolConfig
from rollforward.sandbox.errors import (
    GoneCause,
    SandboxConnectionError,
    SandboxError,
    SandboxFileError,
    SandboxGoneError,
    SandboxIdentityError,
    SandboxUnavailableError,
)
from rollforward.sandbox.homes import supervisor_id
from rollforward.sandbox.types import Call, CallStatus, ExecRequest, ExecStatus, PoolStats, SandboxSpec
from rollforward.sandbox.vm_machine import BootError
from rollforward.sandbox.vm_monitor import MonitorLostError
from tests.helpers.supervisors import Stage, config, on_loop, sh, until


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    with pytest.MonkeyPatch.context() as patch:
        made = Stage(tmp_path_factory.mktemp("homes"), patch)
        yield made
        made.end()


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    """An identity of the test's own."""
    return request.node.originalname.replace("_", "-")[:50]


WAITS = "until test -e go; do sleep 0.05; done"
"""A command that ends when it is told to."""


class Cutting:
    """A transport whose connection is cut while the first questions of a kind are on their way."""

    def __init__(self, inner: SocketTransport, operation: str, cuts: int, after_s: float | None = 0.3) -> None:
        """Cut after that time, or when the answer is there but has not been handed on."""
        self._inner, self._operation, self._cuts, self._after_s = inner, operation, cuts, after_s
        self.asked: list[str] = []

    async def ask(self, operation: str, payload: bytes) -> bytes:
        self.asked.append(operation)
        if operation != self._operation or self._cuts == 0:
            return await self._inner.ask(operation, payload)
        self._cuts -= 1
        asking = asyncio.create_task(self._inner.ask(operation, payload))
        if self._after_s is None:
            await asking
            await self._inner.close()
            raise SandboxConnectionError("cut")
        await asyncio.sleep(self._after_s)
        await self._inner.close()
        return await asking

    async def close(self) -> None:
        await self._inner.close()


async def cutting(
    stage: Stage, operation: str, cuts: int, after_s: float | None = 0.3
) -> tuple[SandboxClient, Cutting]:
    transport = Cutting(SocketTransport(await stage.up()), operation, cuts, after_s)
    return SandboxClient([transport], config(), owner="test"), transport


@on_loop
async def test_bytes_and_texts_arrive_as_they_are(stage: Stage, name: str) -> None:
    async with stage.client() as client:
        sandbox = await client.create(name, SandboxSpec())
        everything = bytes(range(256)) * 300
        request = ExecRequest(
            argv=("python3", "-c", "import sys; sys.stdout.buffer.write(sys.stdin.buffer.read())"),
            stdin=everything[: 60 << 10],
        )
        result = await sandbox.exec(request)
        assert (result.status, result.stdout) == (ExecStatus.OK, everything[: 60 << 10])
        odd = os.fsdecode(b"\xff\xfe caf\xc3\xa9")
        result = await sandbox.exec(ExecRequest(argv=("printf", "%s|", odd, "\u00e9"), env={"X": odd}, cwd="/"))
        assert result.stdout == b"\xff\xfe caf\xc3\xa9|\xc3\xa9|"
        files = {"a/b": everything, "/workspace/caf\u00e9": b"", "empty": b""}
        await sandbox.upload(files)
        assert await sandbox.download([*files, "absent"], max_bytes=1 << 20) == files
        await sandbox.close()


@on_loop
async def test_arguments_of_a_tool_arrive_as_they_are(stage: Stage, name: str, tmp_path: Path) -> None:
    (tmp_path / "say.py").write_text('def say(value: dict) -> str:\n    """Says."""\n    return repr(value)\n')
    spec = SandboxSpec(tools=(ToolConfig(name="say", file=str(tmp_path / "say.py")),))
    async with stage.client() as client:
        await (await client.create(f"{name}-1", SandboxSpec(tools=spec.tools, limits=Limits(processes=32)))).close()
        (tmp_path / "say.py").unlink()  # the supervisor may be on another machine
        sandbox = await client.create(name, spec)
        value = {"big": 1 << 200, "half": "\ud83d", "nul": "\0", "float": 0.1, "none": None, "list": [1, [2.5, "x"]]}
        result = await sandbox.call(Call(tool="say", arguments={"value": value}), key="t0c0")
        assert (result.status, result.text) == (CallStatus.OK, repr(value))
        for none in ({"value": {1, 2}}, {"value": b"bytes"}):
            result = await sandbox.call(Call(tool="say", arguments=none))
            assert (result.status, result.text) == (CallStatus.ERROR, "the arguments are no JSON")
        result = await sandbox.call(Call(tool="sey", arguments={}))
        assert result.status == CallStatus.ERROR
        await sandbox.close()


@on_loop
async def test_a_tool_without_a_file_is_told_before_anything_is_asked(stage: Stage, name: str) -> None:
    async with stage.client() as client:
        with pytest.raises(errors.ToolError, match="cannot be read"):
            await client.create(name, SandboxSpec(tools=(ToolConfig(name="x", file="nowhere.py"),)))


@on_loop
async def test_an_identity_names_one_sandbox(stage: Stage, name: str) -> None:
    async with stage.client() as client:
        first, second = await asyncio.gather(*(client.create(name, SandboxSpec(labels={"n": n})) for n in "12"))
        assert first.instance == second.instance
        assert (await client.create(name, SandboxSpec())).instance == first.instance
        with pytest.raises(SandboxIdentityError, match="something else"):
            await client.create(name, SandboxSpec(limits=Limits(wall_s=1.0)))
        await first.close()
        third = await client.create(name, SandboxSpec(limits=Limits(wall_s=1.0)))
        assert third.instance != first.instance
        await first.close()  # of an incarnation that is gone already
        assert (await sh(third, "echo here")).text() == "here\n"
        with pytest.raises(SandboxGoneError):
            await sh(first, "echo not here")
        await third.close()


@pytest.mark.parametrize("bad", ["", "A", "a_b", "a/b", "..", "a" * 65, "a\n", "\ud800", "\u00e9"])
@on_loop
async def test_what_is_no_identity_is_refused(stage: Stage, bad: str) -> None:
    async with stage.client() as client:
        with pytest.raises(SandboxIdentityError, match=r"1 to 64"):
            await client.create(bad, SandboxSpec())


@on_loop
async def test_a_sandbox_that_is_gone_says_why_to_every_question(stage: Stage, name: str) -> None:
    async with stage.client() as client:
        sandbox = await client.create(name, SandboxSpec())
        await sandbox.close()
        await sandbox.close()
        questions: list[Any] = [
            lambda: sh(sandbox, "true"),
            lambda: sandbox.call(Call(tool="x", arguments={})),
            lambda: sandbox.upload({"a": b""}),
            lambda: sandbox.download(["a"], max_bytes=1),
            lambda: sandbox.snapshot(max_bytes=1 << 20),
            lambda: client.adopt(name),
        ]
        for question in questions:
            with pytest.raises(SandboxGoneError, match="it was closed") as caught:
                await question()
            assert caught.value.cause == GoneCause.CLOSED
        with pytest.raises(SandboxGoneError) as caught:
            await client.adopt("never-there")
        assert caught.value.cause == GoneCause.LOST


@on_loop
async def test_a_successor_finds_everything(stage: Stage, name: str) -> None:
    async with stage.client("before") as client:
        sandbox = await client.create(name, SandboxSpec(labels={"task": "x"}))
        await sh(sandbox, "echo kept > file", key="t0c0")
    async with stage.client("after") as client:
        found = await client.adopt(name)
        assert (found.id, found.instance, found.spec.labels) == (name, sandbox.instance, {"task": "x"})
        assert await found.download(["file"], max_bytes=100) == {"file": b"kept\n"}
        info = next(info for info in await client.list() if info.sandbox_id == name)
        assert (info.owner, info.instance, info.spec.labels) == ("after", sandbox.instance, {"task": "x"})
        assert 20.0 < info.lease_s <= 30.0
        assert (await sh(found, "echo kept > file", key="t0c0")).seconds > 0  # answered, not run
        await found.close()


@on_loop
async def test_of_two_supervisors_that_know_an_identity_the_one_with_the_incarnation_is_found(
    tmp_path: Path, name: str
) -> None:
    """The first made it too late for who asked, and another was made."""
    with pytest.MonkeyPatch.context() as patch:
        stages = [Stage(tmp_path, patch, supervisor_id(tmp_path, number)) for number in range(2)]
        made: list[Sandbox] = []
        try:
            routes = [stage.transport() for stage in stages]
            for route in routes:
                alone = SandboxClient([route], config(), owner="before")
                made.append(await alone.create(name, SandboxSpec()))
                await sh(made[-1], f"echo {made[-1].instance} > file")
            async with SandboxClient([*routes, SocketTransport(tmp_path / "none")], config(), owner="after") as client:
                for sandbox in (*made, *made):
                    found = await client.adopt(name, instance=sandbox.instance)
                    assert await found.download(["file"], max_bytes=99) == {"file": f"{sandbox.instance}\n".encode()}
                with pytest.raises(SandboxConnectionError):  # whoever was not heard may have it
                    await client.adopt(name, instance="0" * 16)
            async with SandboxClient(routes, config(), owner="after") as client:
                found = await client.adopt(name, instance="0" * 16)
                assert found.instance == made[0].instance, "whichever has the identity"
        finally:
            await asyncio.to_thread(lambda: [stage.end() for stage in stages])


@on_loop
async def test_a_command_with_a_key_runs_once_however_often_the_connection_is_cut(stage: Stage, name: str) -> None:
    client, transport = await cutting(stage, "exec", 2)
    async with client:
        sandbox = await client.create(name, SandboxSpec())
        script = f"{WAITS}; echo x >> runs; cat runs"
        running = asyncio.create_task(sh(sandbox, script, key="t0c0", wall_s=100.0))
        while transport.asked.count("exec") < 3:
            await asyncio.sleep(0.01)
        await sandbox.upload({"go": b""})
        result = await running
        assert (result.status, result.stdout) == (ExecStatus.OK, b"x\n")
        assert transport.asked.count("exec") == 3
        again = await sh(sandbox, script, key="t0c0", wall_s=100.0)
        assert again == result
        assert await sandbox.download(["runs"], max_bytes=100) == {"runs": b"x\n"}
        await sandbox.close()


@on_loop
async def test_a_command_without_a_key_is_not_asked_again(stage: Stage, name: str) -> None:
    client, transport = await cutting(stage, "exec", 1)
    async with client:
        sandbox = await client.create(name, SandboxSpec())
        with pytest.raises(SandboxConnectionError, match="may have happened"):
            await sh(sandbox, f"{WAITS}; echo x >> runs", wall_s=100.0)
        assert transport.asked.count("exec") == 1
        await sandbox.upload({"go": b""})
        ended = "until grep -qs x runs; do sleep 0.05; done; cat runs"
        assert (await sh(sandbox, ended, wall_s=100.0)).stdout == b"x\n"  # it came to its end
        await sandbox.close()


@pytest.mark.parametrize("operation", ["create", "upload", "download", "snapshot", "adopt", "close", "renew", "list"])
@on_loop
async def test_what_is_safe_is_asked_again(stage: Stage, name: str, operation: str) -> None:
    client, transport = await cutting(stage, operation, 1, None)
    async with client:
        sandbox = await client.create(f"{name}-{operation}", SandboxSpec())
        await sandbox.upload({"file": b"bytes"})
        assert await sandbox.download(["file"], max_bytes=100) == {"file": b"bytes"}
        assert b"bytes" in (await sandbox.snapshot(max_bytes=1 << 20)).data
        assert (await client.adopt(sandbox.id)).instance == sandbox.instance
        await client.renew([sandbox.id])
        assert sandbox.id in {info.sandbox_id for info in await client.list()}
        await sandbox.close()
        assert transport.asked.count(operation) == 2


@on_loop
async def test_a_snapshot_begins_another_sandbox(stage: Stage, name: str) -> None:
    async with stage.client() as client:
        sandbox = await client.create(name, SandboxSpec())
        await sh(sandbox, "mkdir -p d; echo deep > d/f; ln -s f d/l; chmod 700 d/f")
        taken = await sandbox.snapshot(max_bytes=1 << 20)
        with pytest.raises(SandboxFileError):
            await sandbox.snapshot(max_bytes=10)
        other = await client.create(f"{name}-2", SandboxSpec(), snapshot=taken)
        assert (await sh(other, "cat d/l; stat -c %a d/f")).text() == "deep\n700\n"
        await asyncio.gather(sandbox.close(), other.close())


@on_loop
async def test_who_gives_up_leaves_no_sandbox(stage: Stage, name: str) -> None:
    async with stage.client() as client:
        await client.list()
        creating = asyncio.create_task(client.create(name, SandboxSpec()))
        for _ in range(5):  # it is asked for, and no answer is so quick
            await asyncio.sleep(0)
        creating.cancel()
        with pytest.raises(asyncio.CancelledError):
            await creating
    async with stage.client() as client:

        async def is_gone() -> bool:
            return name not in {info.sandbox_id for info in await client.list()}

        await until(is_gone)


@on_loop
async def test_nobody_there_is_a_connection_error_and_no_loss(tmp_path: Path, stage: Stage, name: str) -> None:
    await stage.up()
    nobody, there = SocketTransport(tmp_path / "socket"), SocketTransport(stage.home.socket)
    (tmp_path / "socket").touch()
    async with SandboxClient([nobody, there], config(), owner="test") as client:
        with pytest.raises(SandboxConnectionError):
            await client.adopt(name)  # the one that was not asked may have it
        with pytest.raises(SandboxConnectionError):
            await client.list()


@on_loop
async def test_a_supervisor_that_fails_gets_no_sandboxes_for_a_while(tmp_path: Path, stage: Stage, name: str) -> None:
    await stage.up()
    dead = Cutting(SocketTransport(tmp_path / "nobody"), "", 0)
    settings = config(break_after=2, break_s=60.0, attempts=1)
    routes = [dead, SocketTransport(stage.home.socket)]
    async with SandboxClient(routes, settings, owner="test") as client:
        sandboxes = [await client.create(f"{name}-{n}", SandboxSpec()) for n in range(12)]
        assert dead.asked.count("create") == 2
        await asyncio.gather(*(sandbox.close() for sandbox in sandboxes))


@on_loop
async def test_a_supervisor_that_hangs_costs_no_sandbox_of_another_its_lease(tmp_path: Path, name: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        stages = [Stage(tmp_path, patch, supervisor_id(tmp_path, number)) for number in range(2)]
        settings = config(lease_s=3.0)
        routes = [stage.transport(lease_s=3.0) for stage in stages]
        try:
            async with SandboxClient(routes, settings, owner="test") as client:
                sandboxes = [await client.create(f"{name}-{n}"[-40:], SandboxSpec()) for n in range(8)]
                alone = SandboxClient(routes[1:], settings, owner="test")
                there = {info.sandbox_id for info in await alone.list()}
                assert 0 < len(there) < len(sandboxes), "both have some"
                os.kill(stages[0].supervisor(), signal.SIGSTOP)
                await asyncio.sleep(10.0)
                assert {info.sandbox_id for info in await alone.list()} == there
                await alone.close()
        finally:
            await asyncio.to_thread(lambda: [stage.end() for stage in stages])


def test_a_breaker_lets_one_try_after_its_time() -> None:
    route = _Route(SocketTransport(Path("nowhere")), config(break_after=2, break_s=1.0))
    route.failed()
    assert not route.is_broken()
    route.failed()
    assert route.is_broken()
    time.sleep(1.1)
    assert not route.is_broken()
    route.failed()
    assert route.is_broken()
    route.worked()
    route.failed()
    assert not route.is_broken()


@on_loop
async def test_with_all_supervisors_dead_it_says_so(tmp_path: Path) -> None:
    async with SandboxClient([SocketTransport(tmp_path / "nobody")], config(attempts=2), owner="test") as client:
        with pytest.raises(SandboxConnectionError, match="no sandbox supervisor answers"):
            await client.create("a", SandboxSpec())
    with pytest.raises(SandboxUnavailableError, match="at least one"):
        SandboxClient([], config(), owner="test")


@on_loop
async def test_a_transport_can_be_sent_elsewhere(stage: Stage, name: str) -> None:
    await stage.up()
    for transport in (stage.transport(), SocketTransport(stage.home.socket)):
        sent = pickle.loads(pickle.dumps(transport))
        async with SandboxClient([sent], config(), owner="test") as client:
            assert isinstance(await client.stats(), PoolStats)


@on_loop
async def test_a_long_path_of_a_socket_is_no_hindrance(stage: Stage, tmp_path: Path) -> None:
    await stage.up()
    long = tmp_path / ("x" * 200)
    long.mkdir()
    (long / "socket").symlink_to(stage.home.socket)
    async with SandboxClient([SocketTransport(long / "socket")], config(), owner="test") as client:
        assert isinstance(await client.stats(), PoolStats)


@on_loop
async def test_what_is_no_question_is_answered_or_cut_and_harms_nobody(stage: Stage, name: str) -> None:
    async with stage.client() as client:
        sandbox = await client.create(name, SandboxSpec())
        for noise in (b"GET / HTTP/1.1\r\n\r\n", b"\xff\xff\xff\xff", b"\4\0\0\0abcd", b"\3\0\0\0\x92\1\2", b"\0\0"):
            reader, writer = await asyncio.open_unix_connection(str(stage.home.socket))
            writer.write(noise)
            writer.write_eof()
            assert await reader.read() == b""
            writer.close()
        transport = SocketTransport(stage.home.socket)
        for operation, payload in (("nonsense", b""), ("exec", b"\xc1"), ("create", wire.encode(None))):
            with pytest.raises(SandboxConnectionError):
                wire.result(await transport.ask(operation, payload), type(None))
        await transport.close()
        assert (await sh(sandbox, "echo well")).text() == "well\n"
        await sandbox.close()


@pytest.mark.parametrize("kind", [kind for kind in vars(errors).values() if isinstance(kind, type)])
def test_every_error_keeps_its_type_and_sentence(kind: type) -> None:
    if not issubclass(kind, SandboxError):
        return
    for cause in GoneCause:
        error = kind("what happened", cause) if kind is SandboxGoneError else kind("what happened")
        with pytest.raises(kind, match="what happened") as caught:
            wire.result(wire.refusal(error), type(None))
        assert type(caught.value) is kind
        if isinstance(caught.value, SandboxGoneError):
            assert caught.value.cause == cause
        assert str(pickle.loads(pickle.dumps(error))) == "what happened"


@pytest.mark.parametrize("kind", [BootError, MonitorLostError])
def test_an_error_of_one_module_comes_as_the_one_that_everybody_knows(kind: type[SandboxError]) -> None:
    with pytest.raises(SandboxUnavailableError, match="what happened") as caught:
        wire.result(wire.refusal(kind("what happened")), type(None))
    assert type(caught.value) is SandboxUnavailableError
    with pytest.raises(SandboxConnectionError, match="the supervisor failed: ZeroDivisionError: what happened"):
        wire.result(wire.refusal(ZeroDivisionError("what happened")), type(None))


def test_counters_add_up() -> None:
    one = PoolStats(held=1, created=2, create_s=(1, *(0,) * 13))
    assert one + one == PoolStats(held=2, created=4, create_s=(2, *(0,) * 13))


def test_a_sandbox_says_which_it_is() -> None:
    sandbox = Sandbox(None, wire.Which(sandbox_id="a", instance="b"), SandboxSpec(), lambda *_: None, None)  # type: ignore[arg-type]
    assert (sandbox.id, sandbox.instance) == ("a", "b")
