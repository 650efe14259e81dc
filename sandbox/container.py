"""The container substrate: a sandbox with files of its own that lasts from one command to the next.

Each is forked from one warm process inside bubblewrap (`inside/template.py`) into its own user, PID, mount, network,
IPC and UTS namespaces; its first process is an agent (`inside/agent.py`) that runs commands for this one. What of the
host can be seen at all is said by `bubblewrap.py`, and what a command is shut in with by `inside/command.py`. Files lie
in memory, in an overlay whose private layer has a fixed size (`inside/root.py`). What it does not isolate:

- The kernel is the host's. A flaw in a system call that an unprivileged process may make is a way out; micro-VMs are
  for code that looks for one. A command sees the kernel's version, the clock, the machine's load and memory in /proc,
  and where this machine's /usr and Python lie.
- CPU time: a command may keep as many cores busy as the sandbox has processes, until its deadline.
- Commands of one sandbox from each other: they are one user, share files and the loopback network, and can pass on what
  they have open.
- Memory, where control groups cannot be written: then it is limited by process (`host.py` says so at the start).
- Locks on files: the kernel counts their memory to nobody. Who takes many is killed before anything else there.
- Where the host's user is not root, commands are that user, whatever they see: his limits count for all of them.
- Terminals, netlink, inotify, System V and POSIX IPC, and memfds are not there at all.
- The image `host`: this machine's /usr and Python can be read, by nobody in particular. No secret belongs there. An
  image's files belong to nobody inside: what needs to change them as their owner cannot.
- The tools' own code: a file is imported in the container before any call, with rights over it, by whoever configured
  it.
- Timing: who shares the machine can be measured.
"""

import asyncio
import functools
import os
import socket
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from rollforward.sandbox import cgroups, host
from rollforward.sandbox.errors import SandboxGoneError, SandboxUnavailableError
from rollforward.sandbox.files import write_all
from rollforward.sandbox.images import Images
from rollforward.sandbox.instance import Instance, tool_code
from rollforward.sandbox.refusals import refusals
from rollforward.sandbox.types import SandboxSpec
from rollforward.sandbox.warm_template import FIRST_USER, USERS, WarmTemplate

_OWN_PROCESSES: Final = 2
"""The agent, and the process that waits for the next command."""
_SETUP_TIMEOUT_S: Final = 60.0
SPARE_PROCESSES: Final = 80
"""Beyond the limit: the agent and the processes around commands, so that no command can keep the agent from forking."""


class ContainerSubstrate:
    """Makes containers. Belongs to one event loop, whose thread must live as long as they shall.

    Args:
        images: what they can be made of.
        label: part of the names of control groups; letters, digits, '-' and '_'.
        max_sandboxes: at one time.
        hierarchies: control groups to use; None: those that there are.
    """

    first_user = FIRST_USER
    """See `WarmTemplate`; of another substrate another, so that no two sandboxes are one user."""

    def __init__(
        self,
        images: Images,
        *,
        label: str,
        max_sandboxes: int,
        hierarchies: cgroups.Hierarchies | None = None,
    ) -> None:
        self._images = images
        self._label = cgroups.check_label(label)
        if not 0 < max_sandboxes < USERS:
            raise ValueError(f"max_sandboxes is {max_sandboxes}; it must be 1 to {USERS - 1}")
        self._hierarchies = cgroups.find() if hierarchies is None else hierarchies
        self._users = list(range(self.first_user + max_sandboxes, self.first_user, -1))
        self._template: WarmTemplate | None = None
        self._starting = asyncio.Lock()
        self._containers: dict[str, Container] = {}
        self._is_closed = False

    async def start(self) -> host.HostReport:
        """Start the template; what this machine cannot enforce is in the report.

        Raises:
            SandboxUnavailableError: this machine cannot make containers.
        """
        await self._warm()
        return msgspec.structs.replace(host.probe(self._hierarchies), layers=self._images.report())

    async def create(self, sandbox_id: str, spec: SandboxSpec, *, snapshot: bytes | None = None) -> "Container":
        """Make a container.

        Raises:
            SandboxUnavailableError: it cannot be made; what is left of it is `left`.
            ToolError: a tool of the spec cannot be imported.
            SandboxFileError: the snapshot is none, or does not fit.
        """
        image = self._images.request(spec.image)
        codes = [tool_code(tool) for tool in spec.tools]
        if sandbox_id in self._containers:
            raise ValueError(f"there is a container {sandbox_id!r}; kill it first")
        if not self._users:
            raise SandboxUnavailableError("sandbox: there is no room for another container; kill one first")
        template = await self._warm()
        uid = self._users.pop()
        try:
            container = self.new(sandbox_id, spec, self._hierarchies, self._label, functools.partial(self._forget, uid))
        except BaseException:
            self._users.append(uid)
            raise
        self._containers[sandbox_id] = container
        try:
            with refusals("a container cannot be made"):
                await container.start(template, {**image, "uid": uid}, codes, snapshot or b"")
        except BaseException:
            await container.kill()
            raise
        return container

    def new(self, *arguments: Any) -> "Container":
        """A container that nothing runs of yet; arguments are its own."""
        return Container(*arguments)

    def shown(self) -> Sequence[str]:
        """Options of bubblewrap for what its template must see besides."""
        return ()

    def left(self, sandbox_id: str) -> "Container | None":
        """See `Substrate`."""
        return self._containers.get(sandbox_id)

    async def close(self) -> None:
        """End all containers, and the template."""
        self._is_closed = True
        await asyncio.gather(*(container.kill() for container in list(self._containers.values())))
        if self._template is not None:
            self._template.close()
            self._template = None

    @property
    def template_pid(self) -> int:
        """Of the process that all containers die with; -1 where there is none."""
        return -1 if self._template is None else self._template.pid

    async def _warm(self) -> WarmTemplate:
        async with self._starting:
            if self._is_closed:
                raise SandboxUnavailableError("sandbox: the substrate is closed; make a new one")
            if self._template is not None and self._template.died.done():
                self._template.close()
                self._template = None
            if self._template is None:
                template = WarmTemplate(self._images, first_user=self.first_user, more=self.shown())
                try:
                    await template.wait()
                except BaseException:
                    template.close()
                    raise
                self._template = template
            return self._template

    def _forget(self, uid: int, container: "Container") -> None:
        if self._containers.pop(container.id, None) is not None:
            self._users.append(uid)


class Container(Instance):
    """One container. Made by `ContainerSubstrate.create`."""

    pace = 1
    """How many times as long as on the host things take in it."""

    def __init__(
        self, sandbox_id: str, spec: SandboxSpec, hierarchies: cgroups.Hierarchies, label: str, forget: Any
    ) -> None:
        """Nothing runs yet; see `start`."""
        memory_bytes, processes = self.size(spec)
        make_group = functools.partial(cgroups.Group, hierarchies, label, sandbox_id, memory_bytes, processes)
        super().__init__(sandbox_id, spec, make_group, forget)
        self._is_memory_limited = hierarchies.memory is not None

    def size(self, spec: SandboxSpec) -> tuple[int, int]:
        """Bytes and processes that its control group may have."""
        limits = spec.limits
        return limits.memory_bytes + limits.disk_bytes, limits.processes + SPARE_PROCESSES

    async def start(
        self, template: WarmTemplate, request: Mapping[str, Any], codes: list[bytes], snapshot: bytes
    ) -> None:
        """Fork it and wait until it is up. Called once, by the substrate."""
        limits = self.spec.limits
        ours, inside = socket.socketpair()
        given = [inside.detach()]
        try:
            more = self.attach(given)
            if snapshot:
                given.append(os.memfd_create("snapshot", os.MFD_CLOEXEC))
                write_all(given[-1], snapshot)
            given += self._group.open_procs()
            asked = {"disk_bytes": limits.disk_bytes, "files": limits.files, "has_snapshot": bool(snapshot)}
            await self._receive(template.make({**request, **asked, **more}, given))
        except BaseException:
            ours.close()
            raise
        finally:
            for descriptor in given:
                os.close(descriptor)
        told = {**msgspec.to_builtins(limits), "is_group_limited": self._is_memory_limited, "pace": self.pace}
        try:
            await self._greet(ours, [({"limits": told, "tools": list(self._tools)}, codes)], _SETUP_TIMEOUT_S)
        except (SandboxGoneError, TimeoutError):
            said = self.said(template)
            raise SandboxUnavailableError(f"sandbox: a container did not come up: {said}") from None

    def attach(self, given: list[int]) -> Mapping[str, Any]:
        """Add what it is handed besides; what is asked of the template besides."""
        return {}

    def said(self, template: WarmTemplate) -> str:
        """What it has said last, where it did not come up."""
        return template.said()

    async def is_fresh(self) -> bool:
        """See `Instance`."""
        return await super().is_fresh() and len(self._group.processes()) <= _OWN_PROCESSES
