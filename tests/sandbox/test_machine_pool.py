"""Proves: machines are had through a supervisor as containers are: keys, warm ones, what isolates them, closing; many
are forked at once, of their kind or of one that runs, and share nothing; when it is killed none is left; and one that
is paused is had, and ends, as others do.
"""

import asyncio
import os
import signal
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rollforward.sandbox.client import Sandbox, SandboxClient
from rollforward.sandbox.config import KeptSubstrate, Limits
from rollforward.sandbox.errors import SandboxGoneError
from rollforward.sandbox.launch import LocalTransport
from rollforward.sandbox.types import ExecStatus, SandboxSpec
from tests.helpers.machines import need_machines
from tests.helpers.sandboxes import is_gone, wait_for
from tests.helpers.supervisors import Stage, command, config, settled, sh

pytestmark = pytest.mark.timeout(400)
SPEC = SandboxSpec(substrate="microvm", limits=Limits(memory_bytes=64 << 20, disk_bytes=4 << 20))
CONFIG = config(warm=1, create_timeout_s=300.0)


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    need_machines()
    made = Stage(tmp_path, monkeypatch)
    yield made
    made.end()


def test_machines_are_had_as_containers_are(stage: Stage) -> None:
    one_of_each = config(warm=2, create_timeout_s=300.0)

    async def go() -> None:
        async with SandboxClient([LocalTransport(stage.name, one_of_each)], one_of_each, owner="test") as client:
            first = await client.create("one", SPEC)
            beside = await client.create("two", SandboxSpec())
            once = [await sh(first, "echo x >> n; wc -l < n", key="k") for _ in range(2)]
            assert [result.stdout for result in once] == [b"1\n"] * 2
            assert {info.sandbox_id: info.platform.split()[0] for info in await client.list()} == {
                "one": "microvm",
                "two": "container",
            }
            while (await client.stats()).warm < 2:
                await asyncio.sleep(0.05)
            await first.close()
            await beside.close()
            again = await client.create("three", SPEC)
            assert (await sh(again, "ls")).stdout == b""
            assert (await client.stats()).warm_hits >= 1
            with pytest.raises(SandboxGoneError):
                await sh(first, "true")
            stage.look()
            await again.close()
            assert (await settled(client)).held == 0

    asyncio.run(go())


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kind", ["microvm", "fullvm"])
def test_thirty_are_forked_at_once_and_share_nothing(stage: Stage, kind: KeptSubstrate) -> None:
    spec = msgspec.structs.replace(SPEC, substrate=kind)
    settings = config(warm=0, create_timeout_s=300.0)

    async def go() -> None:
        async with SandboxClient([LocalTransport(stage.name, settings)], settings, owner="test") as client:
            made = await asyncio.gather(*(client.create(f"m{n}", spec) for n in range(30)))
            assert (await client.stats()).held == 30
            drawn = "head -c 16 /dev/urandom | od -An -tx1"
            said = await asyncio.gather(
                *(sh(one, f"ls; echo {n} > n; sleep 0.5; cat n; {drawn}", wall_s=250.0) for n, one in enumerate(made))
            )
            assert [result.text().split("\n")[0] for result in said] == [str(n) for n in range(30)]
            assert len({result.text() for result in said}) == 30
            assert len({result.text().split("\n", 1)[1] for result in said}) == 30, "they drew the same numbers"
            await asyncio.gather(*(one.close() for one in made[1:]))
            # And of one that runs, with what it has.
            forks = await asyncio.gather(*(made[0].fork(f"f{n}", max_bytes=1 << 29) for n in range(6)))
            said = await asyncio.gather(
                *(sh(one, f"cat n; echo f{n} >> n; cat n", wall_s=250.0) for n, one in enumerate(forks))
            )
            assert [result.text() for result in said] == [f"0\n0\nf{n}\n" for n in range(6)]
            assert (await sh(made[0], "cat n")).text() == "0\n"
            stage.look()
            await asyncio.gather(*(one.close() for one in (made[0], *forks)))
            assert (await settled(client)).held == 0

    asyncio.run(go())


def test_no_emulator_outlives_a_supervisor_and_guard_that_are_killed(stage: Stage) -> None:
    async def go() -> None:
        async with SandboxClient([LocalTransport(stage.name, CONFIG)], CONFIG, owner="test") as client:
            sandbox = await client.create("one", SPEC)
            assert (await sh(sandbox, "true")).status == ExecStatus.OK
            seen = stage.look()
            assert any("qemu" in command(pid) for pid in seen)
            guard, supervisor = stage.guard(), stage.supervisor()
            assert guard is not None
            for pid in (guard, supervisor):
                os.kill(pid, signal.SIGKILL)
            await stage.up()
            await asyncio.to_thread(wait_for, lambda: not any("qemu" in command(pid) for pid in stage.alive()))

    asyncio.run(go())


@pytest.mark.parametrize("kind", ["microvm", pytest.param("fullvm", marks=pytest.mark.slow)])
def test_one_that_is_paused_answers_whoever_takes_it_over_and_goes_as_others_do(
    stage: Stage, kind: KeptSubstrate
) -> None:
    spec = msgspec.structs.replace(SPEC, substrate=kind)

    def client(owner: str, lease_s: float = 60.0) -> SandboxClient:
        return stage.client(owner, create_timeout_s=300.0, lease_s=lease_s)

    def emulators() -> set[int]:
        return {pid for pid in stage.look() if "qemu" in command(pid) and not is_gone(pid)}

    async def paused(client: SandboxClient, name: str) -> tuple[Sandbox, int]:
        before = emulators()
        sandbox = await client.create(name, spec)
        assert (await sh(sandbox, "echo kept > file")).status == ExecStatus.OK
        (emulator,) = emulators() - before
        for _ in range(2):  # the second one has nothing to do
            await sandbox.pause()
            await asyncio.to_thread(wait_for, lambda: _state(emulator) == "T")
        return sandbox, emulator

    async def end(ask: Coroutine[Any, Any, Any], emulator: int) -> None:
        await asyncio.to_thread(wait_for, lambda: is_gone(emulator))
        with pytest.raises(SandboxGoneError):
            await ask

    async def go() -> None:
        await stage.up()
        async with client("first") as first, client("second") as second:
            found = {name: await paused(first, name) for name in ("took", "forked", "saved", "closed", "killed")}
            took = await second.adopt("took")
            assert (await sh(took, "cat file")).text() == "kept\n"
            fork = await found["forked"][0].fork("fork", max_bytes=1 << 29)
            taken = await found["saved"][0].snapshot(max_bytes=1 << 29)
            restored = await second.create("restored", spec, snapshot=taken)
            for one in (fork, restored):
                assert (await sh(one, "cat file")).text() == "kept\n"
                await one.close()
            sandbox, emulator = found["closed"]
            await sandbox.close()
            await end(sandbox.resume(), emulator)
            sandbox, emulator = found["killed"]
            os.kill(emulator, signal.SIGKILL)
            while not (await second.stats()).lost:
                await asyncio.sleep(0.01)
            await end(sh(sandbox, "true"), emulator)
            async with client("third", lease_s=2.0) as third:
                sandbox, emulator = await paused(third, "left")
            await end(second.adopt("left"), emulator)
            assert (await settled(second)).expired == 1
            for has_guard in (False, True):
                await stage.up()
                sandbox, emulator = await paused(second, "last")
                for pid in (stage.supervisor(), *([] if has_guard else [stage.guard()])):
                    assert pid is not None
                    os.kill(pid, signal.SIGKILL)
                await end(sandbox.pause(), emulator)

    asyncio.run(go())


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]
