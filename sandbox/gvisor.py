"""Containers that gVisor isolates: the same as those of `container.py`, but a kernel of their own answers their calls.

That kernel is a process of the host (`runsc`, looked for on PATH or named by `sandbox.container.runsc`). It runs in the
namespaces that a container has, as nobody, beside a process that looks after the files (`inside/gvisor.py`); the agent
and the commands run on it (`inside/gvisor_agent.py`). What is otherwise than in a container:

- Not isolated: whoever takes gVisor's kernel over is in a container like that of `container.py`, without its filter of
  system calls but with gVisor's own; the rest of what is said there holds too, timing and the tools' own code included.
- Memory: a sandbox that has none left ends as a whole, for on the host it is one process's. Timers, signals, pipes and
  sockets with a name are memory of gVisor's kernel, which counts, and nothing else bounds their number.
- Pipes and sockets with a name are in that kernel only: they are neither taken out nor in a snapshot.
- Eight commands run at a time, further ones wait. A command can end the process around it, and so itself.
- It takes longer: most of a second until one is up, so that some are kept warm, and more for each system call.
- A snapshot holds files, as a container's; there is none of what runs.
- Where the host's user is not root it is refused.
"""

import asyncio
import fcntl
import os
import shutil
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from rollforward.sandbox import cgroups
from rollforward.sandbox.agent_link import AgentLink
from rollforward.sandbox.bubblewrap import interpreter
from rollforward.sandbox.burials import Burials
from rollforward.sandbox.container import Container, ContainerSubstrate
from rollforward.sandbox.errors import SandboxGoneError, SandboxUnavailableError
from rollforward.sandbox.host import HostReport
from rollforward.sandbox.images import Images, host_directories
from rollforward.sandbox.instance import Instance, gone_error
from rollforward.sandbox.types import Call, CallResult, ExecRequest, ExecResult, ExecStatus, SandboxSpec
from rollforward.sandbox.warm_template import FIRST_USER, USERS, WarmTemplate

_PLATFORMS: Final = ("ptrace", "systrap")
"""How gVisor gets hold of system calls, the first that works here: what waits uses the least of a processor under
ptrace, and there may be releases without it."""
_OPTIONS: Final = (
    "--rootless",
    "--network=none",
    "--ignore-cgroups",
    "--file-access-mounts=shared",
    "--directfs=false",
)
_PROBE_S: Final = 60.0
_AT_ONCE: Final = 8
"""Commands that run at a time: each has two processes of the agent's around it, which have memory of their own."""
_OWN_BYTES: Final = 256 << 20
"""What gVisor and the agent have of memory, with as many commands."""
_THREADS: Final = 512
_THREADS_PER_PROCESS: Final = 64
"""Of the host, at most: under ptrace many of its threads know many processes."""
_PACE: Final = 20
_ERROR_BYTES: Final = 1 << 14
_LINE_CHARS: Final = 400
_SHOWN: Final = "/runsc"
"""Where the template sees a program that does not lie below /usr."""
_OF_FILES: Final = ("upload", "download", "snapshot")
_WAY_OUT: Final = (
    "Install it (Debian 13: apt-get install runsc), name its path in sandbox.container.runsc, or leave isolation=gvisor"
    " out"
)


def find_runsc(named: str = "") -> str:
    """Path of the program.

    Args:
        named: what the settings say; empty: look for it on PATH.

    Raises:
        SandboxUnavailableError: it is not there.
    """
    found = shutil.which(named or "runsc")
    if found is None:
        what = f"sandbox.container.runsc is {named!r}, which is no program" if named else "there is no runsc on PATH"
        raise SandboxUnavailableError(f"sandbox: isolation=gvisor needs gVisor, and {what}. {_WAY_OUT}")
    return os.path.realpath(found)


class GVisorSubstrate(ContainerSubstrate):
    """Makes containers that gVisor isolates; see `ContainerSubstrate`.

    Args:
        images: see there.
        label: likewise.
        max_sandboxes: likewise.
        hierarchies: likewise.
        runsc: see `find_runsc`.
    """

    first_user = FIRST_USER + 2 * USERS

    def __init__(
        self,
        images: Images,
        *,
        label: str,
        max_sandboxes: int,
        hierarchies: cgroups.Hierarchies | None = None,
        runsc: str = "",
    ) -> None:
        super().__init__(images, label=label, max_sandboxes=max_sandboxes, hierarchies=hierarchies)
        self._named = runsc
        self._runsc: Sequence[str] = ()
        self._num_probes = 0
        self._burials = Burials()

    async def start(self) -> HostReport:
        """See `ContainerSubstrate`; a sandbox is made and asked something, to see that gVisor works here."""
        if os.geteuid() != 0:
            raise SandboxUnavailableError(
                f"sandbox: isolation=gvisor, but the user here is {os.geteuid()}; its files belong to two users, which"
                " root alone can give a sandbox. Run as root, or leave isolation=gvisor out"
            )
        program = find_runsc(self._named)
        self._runsc = (program,)
        report = await super().start()
        problems: list[str] = []
        for platform in _PLATFORMS:
            self._runsc = (program, *_OPTIONS, f"--platform={platform}")
            try:
                async with asyncio.timeout(_PROBE_S):
                    await self._try()
            except (SandboxUnavailableError, SandboxGoneError, TimeoutError) as error:
                said = str(error) or f"there was no answer within {_PROBE_S:g} s"
                problems.append(f"{platform}: {said}")
            else:
                return report
        raise SandboxUnavailableError(
            f"sandbox: isolation=gvisor, but {program} does not work on this machine ({'; '.join(problems)}). It must"
            " be of 2023 or later, and needs ptrace and user namespaces within user namespaces; start a container with"
            " `--security-opt seccomp=unconfined` for that. Name another release's path in sandbox.container.runsc, or"
            " leave isolation=gvisor out"
        )

    async def _try(self) -> None:
        self._num_probes += 1
        sandbox = await self.create(f"probe-{self._num_probes}", SandboxSpec(substrate="gvisor"))
        try:
            result = await sandbox.exec(ExecRequest(argv=("true",)))
            if result.status is not ExecStatus.OK:
                raise SandboxUnavailableError(f"a command ended with {result.status.value} {result.detail}".strip())
        finally:
            await self._burials.end(sandbox)

    async def close(self) -> None:
        """See `ContainerSubstrate`."""
        await self._burials.close()
        await super().close()

    def new(self, *arguments: Any) -> "GVisorContainer":
        """See `ContainerSubstrate`."""
        program, *options = self._runsc
        shown = program if Path(program).is_relative_to("/usr") else _SHOWN
        return GVisorContainer((shown, *options), *arguments)

    def shown(self) -> Sequence[str]:
        """See `ContainerSubstrate`."""
        program = self._runsc[0]
        if Path(program).is_relative_to("/usr"):
            return ()
        return ("--ro-bind", program, _SHOWN)


class GVisorContainer(Container):
    """One container that gVisor isolates. Made by `GVisorSubstrate.create`."""

    platform = "gvisor"
    pace = _PACE

    def __init__(self, runsc: Sequence[str], *arguments: Any) -> None:
        """Nothing runs yet.

        Args:
            runsc: its path and options.
            arguments: as of `Container`.
        """
        super().__init__(*arguments)
        self._runsc = runsc
        self._files_end: socket.socket | None = None
        self._outside: AgentLink | None = None
        self._errors = -1
        self._places = asyncio.Semaphore(_AT_ONCE)

    def size(self, spec: SandboxSpec) -> tuple[int, int]:
        """See `Container`."""
        memory_bytes, processes = super().size(spec)
        return memory_bytes + _OWN_BYTES, _THREADS + _THREADS_PER_PROCESS * processes

    def attach(self, given: list[int]) -> Mapping[str, Any]:
        """See `Container`."""
        self._files_end, inside = socket.socketpair()
        given.append(inside.detach())
        self._errors = os.memfd_create("errors", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self._errors, _ERROR_BYTES)
        fcntl.fcntl(self._errors, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
        given.append(os.dup(self._errors))
        return {"runsc": self._runsc, "python": interpreter(), "shows": host_directories()}

    async def start(self, *arguments: Any) -> None:
        """See `Container`."""
        await super().start(*arguments)
        assert self._files_end is not None
        self._outside = outside = await AgentLink.open(self._files_end, self._signal, max_bytes=self.max_message_bytes)
        outside.hello.cancel()  # who looks after files has nothing to say until it is asked
        self.died.add_done_callback(lambda died: outside.end(gone_error(self.id, died.result())))

    def said(self, template: WarmTemplate) -> str:
        """See `Container`."""
        data = os.pread(self._errors, _ERROR_BYTES, 0) if self._errors >= 0 else b""
        lines = data.strip(b"\0").decode("utf-8", "replace").strip().splitlines()
        ends = dict.fromkeys(line.strip()[:_LINE_CHARS] for line in (*lines[:1], *lines[-1:]))  # a usage lies between
        return " ... ".join(ends) or template.said()

    async def is_fresh(self) -> bool:
        """See `Instance`."""
        if self._outside is None or not await Instance.is_fresh(self):
            return False
        head, _ = await self._outside.ask({"op": "verify"})
        return head.get("fault") == ""

    async def kill(self) -> None:
        """See `Instance`."""
        await super().kill()
        if self._outside is None and self._files_end is not None:
            self._files_end.close()
        if self._errors >= 0:
            os.close(self._errors)
            self._errors = -1

    async def _exec(self, request: ExecRequest) -> ExecResult:
        async with self._places:
            return await super()._exec(request)

    async def _call(self, call: Call) -> CallResult:
        async with self._places:
            return await super()._call(call)

    def _asked(self, operation: str = "") -> AgentLink:
        """See `Instance`."""
        link = super()._asked(operation)
        return self._outside if operation in _OF_FILES and self._outside is not None else link
