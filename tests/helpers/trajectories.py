"""A supervisor of a test's own, and trajectories in its sandboxes whose commands leave a trace that can be counted."""

import asyncio
import contextlib
import itertools
import os
import secrets
import signal
from collections.abc import Awaitable, Callable, Generator
from pathlib import Path
from typing import Any, TypeVar

from rollforward.sandbox.client import SandboxClient, SocketTransport
from rollforward.sandbox.config import ContainerConfig, Limits, ToolConfig
from rollforward.sandbox.homes import Home, supervisor_id
from rollforward.sandbox.launch import LocalTransport
from rollforward.sandbox.session import Session
from rollforward.sandbox.types import Call, SandboxSpec
from tests.helpers.sandboxes import wait_for

T = TypeVar("T")

TOOLS = '''
import hashlib, os, time

def mark(name: str, before_s: float = 0.0, after_s: float = 0.0) -> str:
    """Appends a line to a file and says what is in it: where it runs twice, that shows."""
    time.sleep(before_s)
    with open("effects", "a") as file:
        file.write(name + "\\n")
    time.sleep(after_s)
    data = open("effects", "rb").read()
    return f"{data.count(10)} {hashlib.sha256(data).hexdigest()}"

def shout(chars: int) -> str:
    """Says much."""
    return "\\u00fc" * chars

def read(path: str) -> str:
    """Says what is in a file."""
    return open(path).read()

def remove(path: str) -> str:
    """Puts a link where a file was."""
    os.path.lexists(path) and os.unlink(path)
    os.symlink("/etc/passwd", path)
    return ""

def differ() -> str:
    """Is never the same."""
    return f"{time.time()} {id(object()):#x} {os.urandom(4).hex()} {time.ctime()}"

def raise_it(text: str) -> str:
    """Raises."""
    raise ValueError(text)

def hoard() -> str:
    """Takes all memory."""
    held = []
    while True:
        held.append(os.urandom(1 << 16) * 16)

def hoard_and_wait(seconds: float) -> str:
    """Has a process of its own take all memory, and lives on."""
    if os.fork() == 0:
        hoard()
    os.wait()
    open("hoarded", "w").close()
    time.sleep(seconds)
    return "lived on"
'''
NAMES = ("mark", "shout", "read", "remove", "differ", "raise_it", "hoard", "hoard_and_wait")
CONFIG = ContainerConfig(trusted_code=True, lease_s=60.0, warm=1, create_timeout_s=60.0)
FILES = {"given.txt": b"given", "deep/er/bytes": bytes(range(256))}

_numbers = itertools.count()


def spec_in(folder: Path) -> SandboxSpec:
    """A sandbox with the tools; their file is written into the folder."""
    file = folder / "trajectory_tools.py"
    file.write_text(TOOLS, encoding="utf-8")
    tools = tuple(ToolConfig(name=name, file=str(file), timeout_s=30.0, max_output_chars=1 << 20) for name in NAMES)
    return SandboxSpec(limits=Limits(memory_bytes=96 << 20), tools=tools)


@contextlib.contextmanager
def supervised(config: ContainerConfig = CONFIG) -> Generator[Home]:
    """A supervisor that ends with the block, and everything that it holds with it."""
    name = supervisor_id("trajectories", secrets.token_hex(8))
    home = Home.of(name)

    async def start() -> None:
        transport = LocalTransport(name, config)
        await transport.start()
        await transport.close()

    asyncio.run(start())
    try:
        yield home
    finally:
        end(home, signal.SIGTERM)


def end(home: Home, number: signal.Signals) -> None:
    """Ends a supervisor and waits until nothing is left of it."""
    holder = home.holder()
    if holder is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(holder, number)
    wait_for(lambda: not home.path.exists())


class Trajectory:
    """One trajectory, in as many lives as a test gives it."""

    def __init__(self, home: Home, folder: Path, name: str = "s12-p3-m0") -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.home = home
        self.log = folder / f"{name}.log"
        self.spec = spec_in(folder)
        self.id = f"t{os.getpid()}-{next(_numbers)}-{name}"
        self.files = FILES
        self.config = CONFIG

    def live(self, work: Callable[[Session], Awaitable[T]], **more: Any) -> T:
        """One life: opens the log, does the work, and leaves all else to a successor."""

        async def go() -> T:
            transport = more.pop("transport", None) or SocketTransport(self.home.socket)
            async with SandboxClient([transport], self.config, owner=self.id) as client:
                session = await self.open(client, **more)
                try:
                    return await work(session)
                finally:
                    await session.detach()

        return asyncio.run(asyncio.wait_for(go(), 120))

    async def open(self, client: SandboxClient, **more: Any) -> Session:
        settings: dict[str, Any] = {
            "log_path": self.log,
            "sandbox_id": self.id,
            "spec": self.spec,
            "files": self.files,
            "config": self.config,
            "sync": False,
        }
        return await Session.open(client, **(settings | more))

    def ask(self, work: Callable[[SandboxClient], Awaitable[T]]) -> T:
        """Something that another client asks."""

        async def go() -> T:
            async with SandboxClient([SocketTransport(self.home.socket)], self.config, owner="somebody") as client:
                return await work(client)

        return asyncio.run(asyncio.wait_for(go(), 60))

    def alive(self) -> list[str]:
        """Its sandboxes."""

        async def look(client: SandboxClient) -> list[str]:
            return sorted(info.sandbox_id for info in await client.list() if info.sandbox_id.startswith(self.id))

        return self.ask(look)

    def kill(self) -> None:
        """SIGKILL to the first process of its sandbox, and so to all of them."""
        (record,) = [found for found in self.home.book.read() if found.sandbox_id.startswith(self.id)]
        assert record.pid is not None
        os.kill(record.pid, signal.SIGKILL)


def mark(name: str, **more: float) -> Call:
    return Call(tool="mark", arguments={"name": name, **more})
