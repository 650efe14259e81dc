"""What a supervisor's pool needs of whatever isolates sandboxes, and the choice among those that there are.

    substrate       isolates by                                                      module
    container       namespaces, seccomp, control groups; the kernel is the host's    container.py
    gvisor          a kernel of its own that is a process, in a container            gvisor.py
    microvm         a virtual machine of few devices, forked from a booted one       microvm.py
    fullvm          a virtual machine like a PC, with a disk of its own              fullvm.py

Each says in its docstring what it does not isolate. Commands, tools, limits, files, keys, leases and command logs are
the same whichever it is: `instance.py` has what sandboxes have in common.
"""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from rollforward.sandbox.errors import SandboxUnavailableError
from rollforward.sandbox.host import HostReport
from rollforward.sandbox.instance import Instance
from rollforward.sandbox.types import SandboxSpec


class Substrate(Protocol):
    """Makes sandboxes of one kind. Belongs to one event loop, whose thread must live as long as they shall."""

    async def start(self) -> HostReport:
        """Make ready what all of them share; what this machine cannot enforce is in the report.

        Raises:
            SandboxUnavailableError: this machine cannot make them.
        """
        ...

    async def create(self, sandbox_id: str, spec: SandboxSpec, *, snapshot: bytes | None = None) -> Instance:
        """Make one.

        Raises:
            SandboxUnavailableError: it cannot be made; what is left of it is `left`.
            ToolError: a tool of the spec cannot be imported.
            SandboxFileError: the snapshot is none, or does not fit.
        """
        ...

    def left(self, sandbox_id: str) -> Instance | None:
        """What has been killed of one that could not be made and is not gone yet; None: nothing."""
        ...

    async def close(self) -> None:
        """End all of them, and what they share."""
        ...


class Substrates:
    """The substrates of a supervisor by name, as one. The first is started at once, each other one when it is asked
    for.
    """

    def __init__(self, makers: Mapping[str, Callable[[], Substrate]]) -> None:
        """Keep how to make each; nothing is made."""
        self._makers = dict(makers)
        self._started: dict[str, Substrate] = {}
        self._starting: dict[str, asyncio.Task[HostReport]] = {}
        self._is_closed = False

    async def start(self) -> HostReport:
        """See `Substrate`."""
        return await self._start(next(iter(self._makers)))

    async def create(
        self, sandbox_id: str, spec: SandboxSpec, *, snapshot: bytes | None = None, saved: bytes | None = None
    ) -> Instance:
        """See `Substrate`; `saved` is what `Instance.save` of a machine has returned, for substrates of machines."""
        if spec.substrate not in self._started:
            await self._start(spec.substrate)
        more: dict[str, Any] = {"snapshot": snapshot} if saved is None else {"saved": saved}
        return await self._started[spec.substrate].create(sandbox_id, spec, **more)

    def left(self, sandbox_id: str) -> Instance | None:
        """See `Substrate`."""
        found = (substrate.left(sandbox_id) for substrate in self._started.values())
        return next((instance for instance in found if instance is not None), None)

    async def close(self) -> None:
        """See `Substrate`. What is being started is broken off."""
        self._is_closed = True
        starting = list(self._starting.values())
        for start in starting:
            start.cancel()
        await asyncio.gather(*starting, return_exceptions=True)
        await asyncio.gather(*(substrate.close() for substrate in self._started.values()))

    async def _start(self, name: str) -> HostReport:
        """Wait until one is started, by whoever asked first; it goes on whoever goes away."""
        if self._is_closed:
            raise _closed()
        if name in self._started:
            return HostReport()
        start = self._starting.get(name)
        if start is None:
            start = self._starting[name] = asyncio.create_task(self._begin(name))
            start.add_done_callback(lambda done: self._has_begun(name, done))
        await asyncio.wait([start])
        if start.cancelled():
            raise _closed()
        return start.result()

    async def _begin(self, name: str) -> HostReport:
        substrate = self._makers[name]()
        try:
            report = await substrate.start()
        except BaseException:
            await substrate.close()
            raise
        self._started[name] = substrate
        return report

    def _has_begun(self, name: str, done: "asyncio.Task[HostReport]") -> None:
        del self._starting[name]
        if not done.cancelled():
            done.exception()  # nobody may be left to be told


def _closed() -> SandboxUnavailableError:
    return SandboxUnavailableError("sandbox: the substrate is closed; make a new one")
