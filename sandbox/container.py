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
import contextlib
import functools
import marshal
import os
import signal
import socket
from collections.abc import Mapping, Sequence
from types import CodeType
from typing import Any, Final

import msgspec

from rollforward.sandbox import cgroups, host
from rollforward.sandbox.agent_link import AgentLink, Answer, Parts
from rollforward.sandbox.config import ToolConfig
from rollforward.sandbox.errors import GoneCause, SandboxFileError, SandboxGoneError, SandboxUnavailableError, ToolError
from rollforward.sandbox.images import Images
from rollforward.sandbox.inside import frames, system
from rollforward.sandbox.inside.files import PART_BYTES
from rollforward.sandbox.outcomes import Table, call_result, exec_result, gone_call, gone_exec
from rollforward.sandbox.results import encode_call, failed
from rollforward.sandbox.toolset import tool_path, tool_source
from rollforward.sandbox.types import Call, CallResult, CallStatus, ExecRequest, ExecResult, ExecStatus, SandboxSpec
from rollforward.sandbox.warm_template import FIRST_USER, USERS, WarmTemplate, host_pid

_KILL_TIMEOUT_S: Final = 10.0
_REMOVE_TRIES: Final = 100
"""After it, five seconds long."""
_GRACE_S: Final = 40.0
"""The agent has this long after a command's deadline to say how it ended, on a busy machine; then it is lost."""
_OWN_PROCESSES: Final = 2
"""The agent, and the process that waits for the next command."""
_LAST_WORDS_S: Final = 1.0
_SETUP_TIMEOUT_S: Final = 60.0
_SPARE_PROCESSES: Final = 80
"""Beyond the limit: the agent and the processes around commands, so that no command can keep the agent from forking."""
_MAX_STDIN_BYTES: Final = 64 << 20
_MAX_ARGUMENT_BYTES: Final = 1 << 20
_MAX_PROGRAM_BYTES: Final = 8 << 20
"""Of a command's arguments and environment: more than the kernel takes, and little for the agent to hear of."""


class ContainerSubstrate:
    """Makes containers. Belongs to one event loop, whose thread must live as long as they shall.

    Args:
        images: directories by image, the lowest first.
        label: part of the names of control groups; letters, digits, '-' and '_'.
        max_sandboxes: at one time.
        hierarchies: control groups to use; None: those that there are.
    """

    def __init__(
        self,
        images: Mapping[str, tuple[str, ...]],
        *,
        label: str,
        max_sandboxes: int,
        hierarchies: cgroups.Hierarchies | None = None,
    ) -> None:
        self._images = Images(images)
        self._label = cgroups.check_label(label)
        if not 0 < max_sandboxes < USERS:
            raise ValueError(f"max_sandboxes is {max_sandboxes}; it must be 1 to {USERS - 1}")
        self._hierarchies = cgroups.find() if hierarchies is None else hierarchies
        self._users = list(range(FIRST_USER + max_sandboxes, FIRST_USER, -1))
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
        return host.probe(self._hierarchies)

    async def create(self, sandbox_id: str, spec: SandboxSpec, *, snapshot: bytes | None = None) -> "Container":
        """Make a container.

        Raises:
            SandboxUnavailableError: it cannot be made; nothing is left of it.
            ToolError: a tool of the spec cannot be imported.
            SandboxFileError: the snapshot is none, or does not fit.
        """
        image = self._images.request(spec.image)
        codes = [_code(tool, tool_source(tool)) for tool in spec.tools]
        if sandbox_id in self._containers:
            raise ValueError(f"there is a container {sandbox_id!r}; kill it first")
        if not self._users:
            raise SandboxUnavailableError("sandbox: there is no room for another container; kill one first")
        template = await self._warm()
        uid = self._users.pop()
        container = Container(sandbox_id, spec, self._hierarchies, self._label, functools.partial(self._forget, uid))
        self._containers[sandbox_id] = container
        try:
            await container.start(template, {**image, "uid": uid}, codes, snapshot or b"")
        except BaseException:
            await container.kill()
            raise
        return container

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
                template = WarmTemplate(self._images)
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


class Container:
    """One container: it comes up, is asked, and is gone when `died` has a cause. Made by `ContainerSubstrate.create`.

    Attributes:
        pid: of its first process, on this host.
        died: why it is gone, once it is.
    """

    def __init__(
        self, sandbox_id: str, spec: SandboxSpec, hierarchies: cgroups.Hierarchies, label: str, forget: Any
    ) -> None:
        self.id = sandbox_id
        self.spec = spec
        self.pid = -1
        self.died: asyncio.Future[GoneCause] = asyncio.get_running_loop().create_future()
        limits = spec.limits
        self._forget = forget
        self._tools = {tool.name: tool for tool in spec.tools}
        self._is_memory_limited = hierarchies.memory is not None
        try:
            self._group = cgroups.Group(
                hierarchies,
                label,
                sandbox_id,
                limits.memory_bytes + limits.disk_bytes,
                limits.processes + _SPARE_PROCESSES,
            )
        except OSError as error:
            raise SandboxUnavailableError(f"sandbox: making its control group failed: {error}") from None
        self._pidfd = -1
        self._is_dead = self._is_gone = False
        self._burying: asyncio.Task[None] | None = None
        self._link: AgentLink | None = None
        self._is_closing = False
        self._ooms = 0
        self._killing: asyncio.Task[None] | None = None
        self._table = Table()

    @property
    def cgroup(self) -> tuple[Any, ...]:
        """Directories of its control groups."""
        return self._group.paths

    @property
    def is_gone(self) -> bool:
        """Whether a `kill` has left no process and no group of it. Until then nobody else gets its name or its user."""
        return self._is_gone

    async def start(
        self, template: WarmTemplate, request: Mapping[str, Any], codes: Sequence[bytes], snapshot: bytes
    ) -> None:
        """Fork it and wait until it is up. Called once, by the substrate."""
        limits = self.spec.limits
        ours, inside = socket.socketpair()
        given: list[int] = []
        try:
            with inside:
                if snapshot:
                    given.append(_as_file(snapshot))
                given += self._group.open_procs()
                asked = {"disk_bytes": limits.disk_bytes, "files": limits.files, "has_snapshot": bool(snapshot)}
                self._pidfd = await template.make({**request, **asked}, [inside.fileno(), *given])
        except BaseException:
            ours.close()
            raise
        finally:
            for descriptor in given:
                os.close(descriptor)
        self.pid = host_pid(self._pidfd)
        asyncio.get_running_loop().add_reader(self._pidfd, self._on_death)
        self._link = link = await AgentLink.open(ours, self._signal)
        told = {**msgspec.to_builtins(limits), "is_group_limited": self._is_memory_limited}
        link.tell({"limits": told, "tools": list(self._tools)}, *codes)
        try:
            head, _ = await asyncio.wait_for(link.hello, _SETUP_TIMEOUT_S)
        except (SandboxGoneError, TimeoutError):
            raise SandboxUnavailableError(f"sandbox: a container did not come up: {template.said()}") from None
        _check_hello(head, self._tools)

    async def exec(self, request: ExecRequest, key: str | None = None) -> ExecResult:
        """Run a command. With a key it runs once, however often it is asked for.

        Raises:
            SandboxKeyError: the key is another command's.
        """
        forgotten = ExecResult(status=ExecStatus.INFRA, detail="ran; its result is not held any more")
        return await self._table.get(key, request, lambda: self._exec(request), forgotten)

    async def call(self, call: Call, key: str | None = None) -> CallResult:
        """Call a tool. With a key it runs once, however often it is asked for.

        Raises:
            SandboxKeyError: the key is another command's.
        """
        forgotten = failed(CallStatus.INFRA, "", "ran; its result is not held any more")
        return await self._table.get(key, call, lambda: self._call(call), forgotten)

    async def upload(self, files: Mapping[str, bytes]) -> None:
        """Write files; what is there is overwritten.

        Args:
            files: bytes by path, absolute or below /workspace.

        Raises:
            SandboxFileError: one cannot be written; those before it are.
            SandboxGoneError: the container is gone.
        """
        for path, data in files.items():
            for offset in range(0, max(len(data), 1), PART_BYTES):
                part = data[offset : offset + PART_BYTES]
                await self._files({"op": "upload", "path": path, "offset": offset}, part)

    async def download(self, paths: Sequence[str], *, max_bytes: int) -> dict[str, bytes]:
        """Read regular files; those that are absent are left out.

        Args:
            paths: absolute or below /workspace.
            max_bytes: of all together.

        Raises:
            SandboxFileError: one is no regular file, its path passes a link, or there are more bytes.
            SandboxGoneError: the container is gone.
        """
        names = list(paths)
        parts = await self._files({"op": "download", "paths": names, "max_bytes": max_bytes}, most=max_bytes)
        found: dict[str, bytearray] = {}
        for head, data in parts:
            found.setdefault(names[head["index"]], bytearray()).extend(data)
        return {path: bytes(data) for path, data in found.items()}

    async def snapshot(self, *, max_bytes: int) -> bytes:
        """All files that differ from the image's, as an uncompressed tar (`inside/snapshots.py`).

        Raises:
            SandboxFileError: it has more bytes.
            SandboxGoneError: the container is gone.
        """
        parts = await self._files({"op": "snapshot", "max_bytes": max_bytes}, most=max_bytes)
        return b"".join(data for _, data in parts)

    async def is_fresh(self) -> bool:
        """Whether it is as it was when it had just been made: no process, no file, no command that it remembers.

        Raises:
            SandboxGoneError: the container is gone.
        """
        head, _ = await self._asked().ask({"op": "verify"})
        return head.get("fault") == "" and self._table.is_empty() and len(self._group.processes()) <= _OWN_PROCESSES

    async def kill(self) -> None:
        """End it and all that belongs to it. May be called again, and by several.

        What does not end in time, since a process waits in the kernel for something, is not `is_gone` after it; to call
        it again tries again, and does not wait.
        """
        if self._killing is None:
            self._is_closing = True
            self._killing = asyncio.create_task(self._end())
        await asyncio.shield(self._killing)
        self._finish()

    async def _exec(self, request: ExecRequest) -> ExecResult:
        limits = self.spec.limits
        before = self._group.oom_kills()
        asked = {
            "op": "exec",
            "argv": request.argv,
            "env": request.env,
            "cwd": request.cwd,
            "wall_s": limits.wall_s if request.wall_s is None else request.wall_s,
        }
        if len(request.stdin) > _MAX_STDIN_BYTES or not request.argv:
            detail = f"did not run: it has no program, or more than {_MAX_STDIN_BYTES} bytes of input"
            return ExecResult(status=ExecStatus.INFRA, detail=detail)
        if sum(map(len, (*request.argv, *request.env, *request.env.values(), request.cwd))) > _MAX_PROGRAM_BYTES:
            said = b"argument list too long\n"
            return ExecResult(status=ExecStatus.EXIT, exit_code=126, stderr=said, stderr_bytes=len(said))
        if self.died.done():
            return gone_exec(self.died.result(), has_run=False)
        try:
            head, blobs = await self._run(asked, request.stdin)
        except SandboxGoneError as error:
            return gone_exec(error.cause, has_run=True)
        return exec_result(head, blobs, limits, self._has_oom_since(before))

    async def _call(self, call: Call) -> CallResult:
        refused, payload = encode_call(call, self._tools, _MAX_ARGUMENT_BYTES)
        if refused:
            return failed(CallStatus.ERROR, refused)
        tool = self._tools[call.tool]
        before = self._group.oom_kills()
        asked = {"op": "call", "wall_s": tool.timeout_s, "max_chars": tool.max_output_chars}
        if self.died.done():
            return gone_call(self.died.result(), has_run=False)
        try:
            head, blobs = await self._run(asked, payload)
        except SandboxGoneError as error:
            return gone_call(error.cause, has_run=True)
        return call_result(head, blobs, tool, self.spec.limits, self._has_oom_since(before))

    async def _run(self, head: frames.Head, blob: bytes) -> Answer:
        """Ask for a command, and end a container whose agent forgets the deadline."""
        asking = asyncio.create_task(self._asked().ask(head, blob))
        done, _ = await asyncio.wait([asking], timeout=head["wall_s"] + _GRACE_S)
        if not done:
            self._signal()
        return await asking

    def _has_oom_since(self, before: int) -> bool:
        self._ooms = max(self._ooms, self._group.oom_kills())
        return self._ooms > before

    def _asked(self) -> AgentLink:
        if self.died.done() or self._link is None:
            raise _gone(self.id, self.died.result() if self.died.done() else GoneCause.LOST)
        return self._link

    async def _files(self, head: frames.Head, *blobs: bytes, most: int = 0) -> list[tuple[frames.Head, bytes]]:
        """Ask about files; the parts of the answer."""
        parts = Parts(most)
        answer, _ = await self._asked().ask(head, *blobs, parts=parts)
        for name in ("file_error", "error"):
            if said := answer.get(name):
                raise SandboxFileError(f"sandbox {self.id}: {said}")
        return parts.found

    def _signal(self) -> None:
        if self._pidfd >= 0 and not self._is_dead:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def _on_death(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._is_dead = True
        self._burying = asyncio.create_task(self._bury())

    async def _bury(self) -> None:
        """Hear what it has said last, and say why it is gone."""
        if self._link is not None:
            await self._link.drain(_LAST_WORDS_S)
        if self._is_closing:
            cause = GoneCause.CLOSED
        else:
            cause = GoneCause.OOM if self._group.oom_kills() > self._ooms else GoneCause.LOST
        self.died.set_result(cause)
        if self._link is not None:
            self._link.end(_gone(self.id, cause))
        if self._killing is not None and self._killing.done():
            self._finish()  # too late for who killed it

    async def _end(self) -> None:
        if self._pidfd < 0:
            if not self.died.done():
                self.died.set_result(GoneCause.CLOSED)
        else:
            self._group.kill()
            self._signal()
            await asyncio.wait([self.died], timeout=_KILL_TIMEOUT_S)
        for attempt in range(_REMOVE_TRIES):
            if self._finish():
                break
            await asyncio.sleep(0.001 * (attempt + 1))

    def _finish(self) -> bool:
        """Let go of its name and its user if nothing of it is left, or else kill it again; whether nothing is."""
        if self._is_gone:
            return True
        self._is_gone = (self._pidfd < 0 or self._is_dead) and self._group.remove()
        if self._is_gone:
            self._forget(self)
        else:
            self._group.kill()
            self._signal()
        return self._is_gone


def _as_file(data: bytes) -> int:
    """A descriptor of a file with these bytes, which has no name."""
    descriptor = os.memfd_create("snapshot", os.MFD_CLOEXEC)
    system.write_all(descriptor, data)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def _gone(sandbox_id: str, cause: GoneCause) -> SandboxGoneError:
    return SandboxGoneError(f"sandbox {sandbox_id} is gone: {cause.value}; make a new one", cause)


def _check_hello(head: frames.Head, tools: Mapping[str, ToolConfig]) -> None:
    match head["kind"]:
        case "":
            return
        case "tool":
            name, _, exception = head["error"].partition("\n")
            raise ToolError(
                f"tool {name}: importing {tool_path(tools[name])} in the sandbox raised {exception}. Correct the file;"
                " it sees the standard library and no other module or file"
            )
        case "snapshot":
            raise SandboxFileError(f"sandbox: the snapshot cannot be restored: {head['error']}")
        case _:
            raise SandboxUnavailableError(f"sandbox: a container did not come up: {head['error']}")


@functools.lru_cache(maxsize=256)
def _compiled(name: str, source: str) -> bytes:
    code: CodeType = compile(source, f"{name}.py", "exec", dont_inherit=True)
    return marshal.dumps(code)


def _code(tool: ToolConfig, source: str) -> bytes:
    try:
        return _compiled(tool.name, source)
    except (SyntaxError, ValueError) as error:
        raise ToolError(f"tool {tool.name}: {tool_path(tool)} is no Python: {error}. Correct it") from None
