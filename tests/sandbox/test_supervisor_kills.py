"""Proves: whoever is killed or stands still, owner, supervisor, guard, nothing is left of their sandboxes in bounded
time, and whoever comes next is served.

Does not prove: that many kills at random leave nothing (tests/faults/test_sandbox_leaks.py).
"""

import asyncio
import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from rollforward.sandbox import client as client_module
from rollforward.sandbox import launch, wire
from rollforward.sandbox.errors import GoneCause, SandboxConnectionError, SandboxGoneError
from rollforward.sandbox.homes import supervisor_id
from rollforward.sandbox.types import SandboxSpec
from tests.helpers.sandboxes import is_gone, wait_for
from tests.helpers.supervisors import Stage, config, groups, on_loop, owner_process, sh, until_begun


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    made = Stage(tmp_path, monkeypatch)
    yield made
    made.end()
    assert made.left() == []


@on_loop
async def test_of_a_killed_owner_nothing_is_left_after_its_lease(stage: Stage) -> None:
    lease_s = 2.0
    with owner_process(stage, "owner", ["container"] * 3, lease_s) as owner:
        made = {owner.stdout.readline() for _ in range(3)} if owner.stdout is not None else set()
        assert len(made) == 3
        stage.look()
        assert len(groups(stage.name)) >= 3
        os.killpg(owner.pid, signal.SIGKILL)
    await asyncio.sleep(0.5)
    async with stage.client(lease_s=lease_s) as watching:
        assert {info.owner for info in await watching.list()} <= {"owner"}
    await stage.gone()
    # Its own processes counted, the supervisor ended as well.
    assert stage.home.holder() is None


@on_loop
async def test_of_a_killed_supervisor_nothing_is_left_and_a_successor_comes(stage: Stage) -> None:
    async with stage.client() as client:
        sandbox = await client.create("a", SandboxSpec())
        running = asyncio.create_task(
            sh(sandbox, "setsid sleep 1000 & touch begun; sleep 1000", key="t0c0", wall_s=1000.0)
        )
        await until_begun(sandbox)
        stage.look()
        os.kill(stage.supervisor(), signal.SIGKILL)
        # It is asked again, of a successor, which has never heard of it.
        with pytest.raises(SandboxGoneError) as caught:
            await running
        assert caught.value.cause == GoneCause.LOST
        wait_for(lambda: not stage.alive())
        again = await client.create("a", SandboxSpec())
        assert again.instance != sandbox.instance
        assert (await sh(again, "echo well")).text() == "well\n"
        assert {path.name for path in groups(stage.name)} == {f"rollforward.{stage.name}.{again.instance}"}
        with pytest.raises(SandboxGoneError):
            await sh(sandbox, "true")
        stage.look()
        os.kill(stage.supervisor(), signal.SIGKILL)
    await stage.gone()  # nobody comes, and the guard alone cleans up


@on_loop
async def test_whoever_looks_at_its_lock_does_not_keep_the_guard_from_cleaning_up(stage: Stage) -> None:
    async with stage.client() as client:
        await client.create("a", SandboxSpec())
        stage.look()
        guard, supervisor = stage.guard(), stage.supervisor()
        assert guard is not None
        os.kill(guard, signal.SIGSTOP)
        os.kill(supervisor, signal.SIGKILL)
        wait_for(lambda: is_gone(supervisor))
    with (stage.home.path / "LOCK").open("r+b") as lock:  # as `holder` does, for longer
        fcntl.flock(lock, fcntl.LOCK_EX)
        os.kill(guard, signal.SIGCONT)
        await asyncio.sleep(0.5)
        assert stage.left() != []
    await stage.gone()


@on_loop
async def test_a_guard_that_is_told_to_end_while_it_cleans_up_cleans_up(stage: Stage) -> None:
    async with stage.client() as client:
        await client.create("a", SandboxSpec())
        stage.look()
        guard, supervisor = stage.guard(), stage.supervisor()
        assert guard is not None
    with (stage.home.path / "LOCK").open("r+b") as lock:
        os.kill(guard, signal.SIGSTOP)
        os.kill(supervisor, signal.SIGKILL)
        wait_for(lambda: is_gone(supervisor))
        fcntl.flock(lock, fcntl.LOCK_EX)
        os.kill(guard, signal.SIGCONT)
        await asyncio.sleep(0.5)  # by now it waits for the lock
        os.kill(guard, signal.SIGTERM)
        await asyncio.sleep(0.2)
    await stage.gone()


@on_loop
async def test_what_nobody_cleaned_up_is_cleaned_up_by_the_next_one(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with stage.client() as client:
        for n in range(3):
            await client.create(f"a-{n}", SandboxSpec())
        stage.look()
        guard = stage.guard()
        assert guard is not None
        os.kill(guard, signal.SIGKILL)
        wait_for(lambda: is_gone(guard))
        assert {info.sandbox_id for info in await client.list()} == {"a-0", "a-1", "a-2"}
        os.kill(stage.supervisor(), signal.SIGKILL)
    wait_for(lambda: not stage.alive())
    assert groups(stage.name)  # so there is something to do
    other = Stage(stage.folder, monkeypatch, supervisor_id(str(stage.folder), "other"))
    await other.up()
    assert stage.left() == []
    other.look()
    os.kill(other.supervisor(), signal.SIGTERM)
    await other.gone()


@on_loop
async def test_one_that_stands_still_is_replaced(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    # Whoever asks gives it time, more than a busy machine needs, before its sandboxes are ended with it.
    assert 60.0 <= launch._HUNG_S < client_module._GRACE_S  # pyright: ignore[reportPrivateUsage]
    monkeypatch.setattr(launch, "_SLOW_S", 2.0)
    monkeypatch.setattr(launch, "_HUNG_S", 4.0)
    async with stage.client() as client:
        await client.create("a", SandboxSpec())
        stage.look()
        os.kill(stage.supervisor(), signal.SIGSTOP)
        with pytest.raises(SandboxGoneError):  # asked again, and answered by a successor
            await client.adopt("a")
        wait_for(lambda: not stage.alive())


@on_loop
async def test_what_one_that_was_killed_said_last_outlives_its_home(stage: Stage) -> None:
    await stage.up()
    stage.look()
    with stage.home.log.open("ab") as log:
        log.write(b"x" * (1 << 17) + b"\nas a library does that aborts the process\n\n")
    os.kill(stage.supervisor(), signal.SIGKILL)
    await stage.gone()
    assert stage.home.last_words() == "as a library does that aborts the process"
    assert stage.home.crash_log.stat().st_size <= 1 << 16
    # One that ends in order has nothing to say.
    await stage.up()
    stage.look()
    os.kill(stage.supervisor(), signal.SIGTERM)
    await stage.gone()
    assert stage.home.last_words() == ""
    assert not stage.home.path.parent.exists()


@pytest.mark.parametrize("is_ready", [False, True])
def test_a_crash_is_told_to_whoever_starts_it_or_stays_in_a_log(stage: Stage, is_ready: bool) -> None:
    code = (
        "from rollforward.sandbox import supervisor\n"
        "async def run(self, ready):\n"
        f"    {'ready()' if is_ready else 'pass'}\n"
        "    raise RuntimeError('broken')\n"
        "supervisor.Service.run = run\n"
        "supervisor.main()"
    )
    ours, theirs = os.pipe()
    settings = msgspec.json.encode(config()).decode()
    with open(ours, "rb") as said:
        command = [sys.executable, "-c", code, stage.name, settings, str(theirs)]
        process = subprocess.Popen(command, pass_fds=[theirs], stderr=subprocess.DEVNULL)
        os.close(theirs)
        process.wait()
        outcome = said.read()
    if is_ready:
        assert outcome == wire.READY
    else:
        with pytest.raises(SandboxConnectionError, match="the supervisor failed: RuntimeError: broken"):
            wire.result(outcome, type(None))
    wait_for(lambda: not stage.left())
    assert stage.home.last_words() == "RuntimeError: broken"


@on_loop
async def test_one_whose_starter_was_killed_meanwhile_serves_others_and_did_not_crash(stage: Stage) -> None:
    ours, theirs = os.pipe()
    os.close(ours)
    settings = msgspec.json.encode(config(lease_s=5.0)).decode()
    command = [sys.executable, "-m", "rollforward.sandbox.supervisor", stage.name, settings, str(theirs)]
    subprocess.run(command, pass_fds=[theirs], check=True)
    os.close(theirs)
    await asyncio.to_thread(wait_for, stage.home.socket.exists)
    first = stage.supervisor()
    async with stage.client(lease_s=5.0) as client:
        sandbox = await client.create("a", SandboxSpec())
        assert (await sh(sandbox, "echo well")).text() == "well\n"
        assert stage.supervisor() == first
        stage.look()
    await stage.gone()
    assert stage.home.last_words() == ""


@on_loop
async def test_whoever_starts_one_may_be_killed_at_any_time(stage: Stage) -> None:
    code = (
        "import asyncio, sys; from rollforward.sandbox.launch import LocalTransport\n"
        "from rollforward.sandbox.config import ContainerConfig\n"
        "asyncio.run(LocalTransport(sys.argv[1], ContainerConfig(lease_s=3.0)).start())"
    )
    for delay_s in (0.2, 0.35, 0.6):
        process = subprocess.Popen([sys.executable, "-c", code, stage.name], start_new_session=True)
        await asyncio.sleep(delay_s)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    async with stage.client(lease_s=3.0) as client:
        sandbox = await client.create("a", SandboxSpec())
        assert (await sh(sandbox, "echo well")).text() == "well\n"
        stage.look()
    await stage.gone()
