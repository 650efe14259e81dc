"""Proves: a supervisor's substrates end at once and leave nothing, also while one of them is being started; and work
that must come to its end does, however often those who wait for it are cancelled.
"""

import asyncio
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from rollforward.sandbox.errors import SandboxUnavailableError
from rollforward.sandbox.host import HostReport
from rollforward.sandbox.substrate import Substrates
from rollforward.sandbox.types import SandboxSpec
from rollforward.sandbox.unbroken import in_thread, left_alone, to_its_end
from tests.helpers.machines import need_machines
from tests.helpers.supervisors import Stage, command, on_loop, pids

pytestmark = pytest.mark.timeout(120)
LONG_S = 600


class Starting:
    """A substrate whose start takes until it may end."""

    def __init__(self) -> None:
        self.may, self.done = asyncio.Event(), list[str]()

    async def start(self) -> HostReport:
        self.done.append("start")
        await self.may.wait()
        return HostReport()

    async def create(self, sandbox_id: str, spec: SandboxSpec, **_: Any) -> Any:
        self.done.append(sandbox_id)

    def left(self, sandbox_id: str) -> None:
        return None

    async def close(self) -> None:
        self.done.append("close")


@on_loop
async def test_they_are_closed_while_one_is_started() -> None:
    first, second = Starting(), Starting()
    first.may.set()
    substrates = Substrates({"container": lambda: first, "microvm": lambda: second})
    await substrates.start()
    asking = [asyncio.create_task(substrates.create(f"m{n}", SandboxSpec(substrate="microvm"))) for n in range(2)]
    asking[1].cancel()
    while "start" not in second.done:
        await asyncio.sleep(0)
    async with asyncio.timeout(60.0):
        await substrates.close()
    assert (first.done, second.done) == (["start", "close"], ["start", "close"])
    with pytest.raises(SandboxUnavailableError, match="closed"):
        await asking[0]
    with pytest.raises(SandboxUnavailableError, match="closed"):
        await substrates.create("m2", SandboxSpec(substrate="microvm"))


@on_loop
async def test_one_is_started_once_whoever_goes_away() -> None:
    only = Starting()
    substrates = Substrates({"container": lambda: only})
    asking = [asyncio.create_task(substrates.create(f"c{n}", SandboxSpec())) for n in range(3)]
    await asyncio.sleep(0.01)
    asking[0].cancel()
    await asyncio.sleep(0.01)
    only.may.set()
    await asyncio.gather(*asking[1:])
    assert only.done == ["start", "c1", "c2"]
    await substrates.close()


def test_a_supervisor_that_is_told_to_end_while_a_kernel_is_downloaded_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    need_machines()
    programs = tmp_path / "programs"
    programs.mkdir()
    (programs / "apt-cache").write_text("#!/bin/sh\necho '  Depends: linux-image-6.1.0-1-cloud-amd64'\n")
    download = f"sleep {LONG_S}.{os.getpid()}"
    (programs / "apt-get").write_text(f"#!/bin/sh\n{download} &\nwait\n")
    for program in programs.iterdir():
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    stage = Stage(tmp_path, monkeypatch)

    def downloads() -> list[int]:
        return [pid for pid in pids() if command(pid) == download]

    async def go() -> None:
        async with stage.client(create_timeout_s=60.0) as client:
            asking = asyncio.create_task(client.create("one", SandboxSpec(substrate="microvm")))
            while not downloads():
                assert not asking.done(), await asking
                await asyncio.sleep(0.02)
            stage.look()
            asking.cancel()  # or it would be asked of a successor
            await asyncio.wait([asking])
            os.kill(stage.supervisor(), signal.SIGTERM)
            await stage.gone()
            assert downloads() == []

    try:
        asyncio.run(go())
    finally:
        stage.end()


@on_loop
async def test_work_comes_to_its_end_however_often_its_asker_is_cancelled() -> None:
    may, done = threading.Event(), asyncio.Event()

    async def work() -> None:
        await done.wait()
        raise KeyError

    asking = [asyncio.create_task(in_thread(may.wait)), asyncio.create_task(to_its_end(work()))]
    try:
        for _ in range(5):
            await asyncio.sleep(0.01)
            for one in asking:
                assert not one.done()
                one.cancel()
    finally:
        may.set()
        done.set()
        await asyncio.wait(asking)
    assert all(one.cancelled() for one in asking)
    assert await in_thread(lambda: 42) == 42
    assert await left_alone(lambda: 42) == 42
    with pytest.raises(ZeroDivisionError):
        await left_alone(lambda: 1 // 0)


def test_a_process_does_not_wait_for_what_is_left_alone() -> None:
    program = f"""
import asyncio, time
from rollforward.sandbox.unbroken import left_alone

async def go():
    waiting = asyncio.ensure_future(left_alone(lambda: time.sleep({LONG_S})))
    await asyncio.sleep(0.05)
    waiting.cancel()

asyncio.run(go())
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
