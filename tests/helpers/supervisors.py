"""Supervisors of sandboxes in a place of their own, and what of them is left on this machine."""

import asyncio
import functools
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import pytest

from rollforward.sandbox import cgroups
from rollforward.sandbox.client import Sandbox, SandboxClient
from rollforward.sandbox.config import ContainerConfig
from rollforward.sandbox.homes import Home, supervisor_id
from rollforward.sandbox.launch import LocalTransport
from rollforward.sandbox.leases import started_ticks
from rollforward.sandbox.types import ExecRequest, ExecResult, PoolStats
from tests.helpers.sandboxes import descendants, is_gone


def on_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """A test that is a coroutine."""

    @functools.wraps(test)
    def run(*arguments: Any, **named: Any) -> None:
        asyncio.run(test(*arguments, **named))

    return run


class Stage:
    """One home of a supervisor, of which every trace can be looked for."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch, name: str | None = None) -> None:
        """Let homes lie in the folder, in this process and in those that it starts."""
        patch.setenv("TMPDIR", str(folder))
        patch.setattr(tempfile, "tempdir", str(folder))
        self.folder = folder
        self.name = supervisor_id(str(folder)) if name is None else name
        self.seen: dict[int, int | None] = {}

    @property
    def home(self) -> Home:
        return Home(self.folder / f"rollforward-sandboxes-{os.geteuid()}" / self.name)

    def transport(self, **settings: Any) -> LocalTransport:
        return LocalTransport(self.name, config(**settings))

    def client(self, owner: str = "test", **settings: Any) -> SandboxClient:
        return SandboxClient([self.transport(**settings)], config(**settings), owner=owner)

    async def up(self, **settings: Any) -> Path:
        """Have it started; where its socket is."""
        transport = self.transport(**settings)
        await transport.start()
        await transport.close()
        return self.home.socket

    def supervisor(self) -> int:
        pid = self.home.holder()
        assert pid is not None
        return pid

    def guard(self) -> int | None:
        """None where it was killed: the supervisor is somebody else's child then."""
        pid = parent(self.supervisor())
        return pid if self.name in command(pid) else None

    def look(self) -> set[int]:
        """Remember which processes there are now, the guard and all below it; returns all that were remembered."""
        pid, guard = self.supervisor(), self.guard()
        alive = self.alive()
        for one in (pid, *descendants(pid), *([] if guard is None else [guard])):
            if one not in alive:
                self.seen[one] = started_ticks(one)
        return set(self.seen)

    def alive(self) -> list[int]:
        """Those that were remembered and are there. Numbers come round: who else has one is none of them."""
        return [pid for pid, ticks in self.seen.items() if started_ticks(pid) == ticks and not is_gone(pid)]

    def left(self) -> list[str]:
        """What there is of it."""
        found = [f"process {pid} {command(pid)}" for pid in self.alive()]
        found += [f"process {pid} {command(pid)}" for pid in pids() if self.name in command(pid)]
        found += [f"group {path}" for path in groups(self.name)]
        mounts = Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines()
        found += [f"mount {line}" for line in mounts if self.name in line]
        return found + [f"file {path}/{names}" for path, *names in os.walk(self.home.path)]

    async def gone(self, within_s: float = 60.0) -> None:
        """Wait until there is nothing left of it, on a busy machine too."""
        end_s = time.monotonic() + within_s
        while left := self.left():
            assert time.monotonic() < end_s, left
            await asyncio.sleep(0.05)

    def end(self) -> None:
        """End the supervisor, in order if it can."""
        pid = self.home.holder()
        if pid is None:
            return
        self.look()
        os.kill(pid, signal.SIGCONT)
        os.kill(pid, signal.SIGTERM)
        asyncio.run(self.gone())


async def until(condition: Callable[[], Awaitable[object]], within_s: float = 60.0) -> None:
    """Wait until something is so; long enough for any machine."""
    end_s = time.monotonic() + within_s
    while not await condition():
        assert time.monotonic() < end_s, "waited in vain"
        await asyncio.sleep(0.02)


async def until_begun(sandbox: Sandbox) -> None:
    """Wait until a command of it has made the file `begun`."""

    async def has_begun() -> bool:
        return (await sh(sandbox, "test -e begun")).exit_code == 0

    await until(has_begun)


async def settled(client: SandboxClient) -> PoolStats:
    """Counters when nothing is being made or ended."""
    while (stats := await client.stats()).ending or stats.waiting:
        await asyncio.sleep(0.02)
    return stats


def config(**settings: Any) -> ContainerConfig:
    return ContainerConfig(**({"warm": 0, "lease_s": 30.0, "create_timeout_s": 60.0} | settings))


async def sh(sandbox: Sandbox, script: str, *, key: str | None = None, wall_s: float = 20.0) -> ExecResult:
    return await sandbox.exec(ExecRequest(argv=("sh", "-c", script), wall_s=wall_s), key=key)


def groups(label: str) -> list[Path]:
    return [path for parent_ in cgroups.find().parents() for path in parent_.glob(f"rollforward.{label}.*")]


def mount_count() -> int:
    """Mounts of this machine that are an overlay or belong to a sandbox."""
    lines = Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines()
    return sum(" - overlay " in line or "rollforward" in line for line in lines)


def pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace").strip()
    except OSError:
        return ""


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(") ")[2].split()[1])


def owner_process(
    stage: Stage, owner: str, kinds: Sequence[str], lease_s: float, mark: str = "1e6"
) -> "subprocess.Popen[str]":
    """A process that makes sandboxes of these kinds and prints them (owner_main.py); in a session of its own."""
    program = Path(__file__).parent / "owner_main.py"
    arguments = [stage.name, owner, ",".join(kinds), str(lease_s), mark]
    return subprocess.Popen(
        [sys.executable, program, *arguments], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
