"""Proves: what was done in a machine goes on at another supervisor when everything else was killed: files, processes,
counters; and a trajectory in it says and leaves the same bits as an undisturbed one, on whatever substrate.

Guests are emulated where the machine has no working KVM. What a machine is made of is in the tests of its substrate.
"""

import asyncio
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pytest

from rollforward.sandbox.client import SandboxClient, SocketTransport
from rollforward.sandbox.command_log import read_log
from rollforward.sandbox.config import KeptSubstrate
from rollforward.sandbox.homes import Home
from rollforward.sandbox.session import Session
from rollforward.sandbox.types import CallResult, ExecRequest, SandboxSpec, Snapshot, SnapshotKind
from tests.helpers.trajectories import CONFIG, FILES, Trajectory, end, mark, supervised

T = TypeVar("T")
MAX_BYTES = (1 << 30) - (1 << 20)
MACHINES = msgspec.structs.replace(CONFIG, warm=0, create_timeout_s=300.0)
COUNTER = "i=0; while :; do i=$((i+1)); echo $i > new; mv new count; sleep 0.1; done"

pytestmark = pytest.mark.timeout(600)


def asked(home: Home, work: Callable[[SandboxClient], Awaitable[T]]) -> T:
    async def go() -> T:
        async with SandboxClient([SocketTransport(home.socket)], MACHINES, owner="test") as client:
            return await work(client)

    return asyncio.run(asyncio.wait_for(go(), 400))


async def sh(sandbox: Any, script: str) -> str:
    return (await sandbox.exec(ExecRequest(argv=("sh", "-c", script), wall_s=30.0))).text()


async def whole(session: Session) -> tuple[list[CallResult], dict[str, bytes]]:
    results = [(await session.call(f"t{n}c0", mark(f"m{n}"))).result for n in range(4)]
    files = (await session.collect(["effects", *FILES], max_bytes=1 << 16)).files
    return [msgspec.structs.replace(result, seconds=0.0) for result in results], files


async def begun(session: Session) -> bool:
    for number in range(2):
        await session.call(f"t{number}c0", mark(f"m{number}"))
    return await session.snapshot(max_bytes=MAX_BYTES)


async def count(client: SandboxClient, spec: SandboxSpec) -> tuple[Snapshot, int]:
    """Has a machine count, branches it, and takes its state while it counts; with what it has counted later."""
    sandbox = await client.create("counting", spec)
    running = asyncio.create_task(sandbox.exec(ExecRequest(argv=("sh", "-c", COUNTER), wall_s=300.0)))
    while int(await sh(sandbox, "cat count || echo 0")) < 3:
        await asyncio.sleep(0.1)
    await sh(sandbox, "echo kept > file")
    fork = await sandbox.fork("branch", max_bytes=MAX_BYTES)
    assert int(await sh(fork, "sleep 1; cat count")) > 3
    taken = await sandbox.snapshot(max_bytes=MAX_BYTES)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    return taken, int(await sh(sandbox, "cat count"))


async def count_on(client: SandboxClient, spec: SandboxSpec, taken: Snapshot) -> list[int]:
    sandbox = await client.create("counting-on", spec, snapshot=taken)
    assert await sh(sandbox, "cat file") == "kept\n"
    return [int(await sh(sandbox, f"sleep {pause}; cat count")) for pause in (0, 1)]


@pytest.mark.parametrize("substrate", ["microvm", "fullvm"])
def test_files_processes_counters_and_trajectories_go_on_where_everything_else_was_killed(
    tmp_path: Path, substrate: KeptSubstrate
) -> None:
    spec = SandboxSpec(substrate=substrate)
    with supervised(MACHINES) as first:
        undisturbed = Trajectory(first, tmp_path / "plain").live(whole)
        trajectory = Trajectory(first, tmp_path / "machine")
        trajectory.config = MACHINES
        trajectory.spec = msgspec.structs.replace(trajectory.spec, substrate=substrate)
        assert trajectory.live(begun)
        taken, seen = asked(first, lambda client: count(client, spec))
        end(first, signal.SIGKILL)
    snapshot = read_log(trajectory.log).history.snapshot
    assert snapshot is not None
    assert snapshot.kind is taken.kind is SnapshotKind.MACHINE
    with supervised(MACHINES) as second:
        trajectory.home = second
        assert trajectory.live(whole) == undisturbed
        before, after = asked(second, lambda client: count_on(client, spec, taken))
    assert 3 <= before <= seen + 50
    assert after > before
