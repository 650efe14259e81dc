"""A sandbox as whoever made it sees it: a process that an agent answers for, its control group, its death.

What every substrate has in common lives here: commands and calls with keys, files, snapshots as a tar, limits told to
the agent, results, and an end that leaves nothing. How the process comes to be, and what isolates it, is the
substrate's (`substrate.py` names them).
"""

import asyncio
import contextlib
import functools
import marshal
import os
import signal
import socket
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from types import CodeType
from typing import Any, Final, Self

from rollforward.sandbox import cgroups
from rollforward.sandbox.agent_link import AgentLink, Answer, Parts
from rollforward.sandbox.config import ToolConfig
from rollforward.sandbox.errors import GoneCause, SandboxFileError, SandboxGoneError, SandboxUnavailableError, ToolError
from rollforward.sandbox.inside import frames, program
from rollforward.sandbox.inside.files import PART_BYTES
from rollforward.sandbox.outcomes import (
    NonsenseError,
    Table,
    call_result,
    exec_result,
    gone_call,
    gone_exec,
    hello,
    refusal,
)
from rollforward.sandbox.results import encode_call, failed
from rollforward.sandbox.toolset import tool_path, tool_source
from rollforward.sandbox.types import (
    Call,
    CallResult,
    CallStatus,
    ExecRequest,
    ExecResult,
    ExecStatus,
    SandboxSpec,
    SnapshotKind,
)
from rollforward.sandbox.warm_template import host_pid

_KILL_TIMEOUT_S: Final = 10.0
_REMOVE_TRIES: Final = 100
"""After it, five seconds long."""
_GRACE_S: Final = 40.0
"""The agent has this long after a command's deadline to say how it ended, on a busy machine; then it is lost."""
_LAST_WORDS_S: Final = 1.0
_FILES_S: Final = 120.0
_FILE_BYTES_PER_S: Final = 1 << 18
"""A question about files may take this long, and longer by what its answer's bytes take; then the agent is lost."""
_MAX_STDIN_BYTES: Final = 64 << 20
_MAX_ARGUMENT_BYTES: Final = 1 << 20
_MAX_PROGRAM_BYTES: Final = 8 << 20
"""Of a command's arguments and environment: more than the kernel takes, and little for the agent to hear of."""


class Instance:
    """One sandbox: it comes up, is asked, and is gone when `died` has a cause. Substrates make them by `create`.

    Attributes:
        pid: of its first process, on this host.
        died: why it is gone, once it is.
    """

    platform = "container"
    """What isolates it, for people."""
    max_message_bytes = 64 << 20
    """What its agent says at once is shorter: twice the output that a command may have. Who has taken over its kernel
    could say anything."""
    snapshot_kind = SnapshotKind.FILES
    """What `save` holds."""

    def __init__(
        self,
        sandbox_id: str,
        spec: SandboxSpec,
        make_group: Callable[[], cgroups.Group],
        forget: Callable[[Self], None],
    ) -> None:
        """Make its control group; nothing runs yet.

        Args:
            sandbox_id: its name, unlike that of any other of this substrate.
            spec: what it is made of.
            make_group: makes its control group.
            forget: called once, when nothing of it is left.

        Raises:
            SandboxUnavailableError: the control group cannot be made.
        """
        self.id = sandbox_id
        self.spec = spec
        self.pid = -1
        self.died: asyncio.Future[GoneCause] = asyncio.get_running_loop().create_future()
        self._forget = forget
        self._tools = {tool.name: tool for tool in spec.tools}
        try:
            self._group = make_group()
        except OSError as error:
            raise SandboxUnavailableError(f"sandbox: making its control group failed: {error}") from None
        self._pidfd = -1
        self._coming: asyncio.Future[None] | None = None
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

    async def _receive(self, making: Awaitable[int]) -> None:
        """Wait for its first process, which is being made, and watch it. Who ends it meanwhile waits for that too: it
        would outlive its name, its user and its group."""
        self._coming = asyncio.get_running_loop().create_future()
        try:
            self._watch(await making)
        finally:
            self._coming.set_result(None)

    def _watch(self, pidfd: int) -> None:
        """Its first process is there; from here on its end is noticed."""
        self._pidfd = pidfd
        asyncio.get_running_loop().add_reader(pidfd, self._on_death)  # first: whatever fails after it, that is noticed
        self.pid = host_pid(pidfd)
        if self._is_closing:
            self._signal()

    async def _greet(self, control: socket.socket, told: Iterable[Answer], within_s: float) -> None:
        """Tell its agent what it is, message by message, and wait until that is up.

        Raises:
            SandboxGoneError, TimeoutError: it does not come up.
            SandboxError: it says why not.
        """
        self._link = link = await AgentLink.open(control, self._signal, max_bytes=self.max_message_bytes)
        if self.died.done():  # meanwhile, so that nobody has told the link
            error = gone_error(self.id, self.died.result())
            link.end(error)
            raise error
        for head, blobs in told:
            link.tell(head, *blobs)
        head, _ = await asyncio.wait_for(link.hello, within_s)
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
            SandboxGoneError: it is gone.
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
            SandboxGoneError: it is gone.
        """
        names = list(paths)
        parts = Parts(max_bytes, len(names))
        found = await self._files({"op": "download", "paths": names, "max_bytes": max_bytes}, parts=parts)
        return {names[index]: bytes(data) for index, data in found.items()}

    async def snapshot(self, *, max_bytes: int) -> bytes:
        """All files that differ from the image's, as an uncompressed tar (`inside/snapshots.py`).

        Raises:
            SandboxFileError: it has more bytes.
            SandboxGoneError: it is gone.
        """
        found = await self._files({"op": "snapshot", "max_bytes": max_bytes}, parts=Parts(max_bytes))
        return bytes(found.get(0, b""))

    async def save(self, *, max_bytes: int) -> bytes:
        """The most of its state that this substrate can keep, between commands: bytes of a snapshot of `snapshot_kind`.

        Raises:
            SandboxFileError: it has more bytes.
            SandboxGoneError: it is gone.
        """
        return await self.snapshot(max_bytes=max_bytes)

    async def pause(self) -> None:
        """Have nothing of it run until `resume`. Not while a command does: its deadline would go on.

        Raises:
            SandboxUnavailableError: this machine cannot.
        """
        try:
            await asyncio.to_thread(self._group.freeze, True)
        except OSError as error:
            raise SandboxUnavailableError(
                f"sandbox {self.id} cannot be paused: {error.strerror or error}. Pausing needs control groups of"
                " version 2 that can be written"
            ) from None

    async def resume(self) -> None:
        """Go on after a `pause`."""
        with contextlib.suppress(OSError):  # it is gone, which the next question finds out
            await asyncio.to_thread(self._group.freeze, False)

    async def is_fresh(self) -> bool:
        """Whether it is as it was when it had just been made: no process, no file, no command that it remembers.

        Raises:
            SandboxGoneError: it is gone.
        """
        head, _ = await self._answer({"op": "verify"}, within_s=_FILES_S)
        return head.get("fault") == "" and self._table.is_empty()

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
        before = self._oom_kills()
        wall_s = limits.wall_s if request.wall_s is None else request.wall_s
        asked = {"op": "exec", "wall_s": wall_s}
        if len(request.stdin) > _MAX_STDIN_BYTES or not request.argv:
            detail = f"did not run: it has no program, or more than {_MAX_STDIN_BYTES} bytes of input"
            return ExecResult(status=ExecStatus.INFRA, detail=detail)
        if sum(map(len, (*request.argv, *request.env, *request.env.values(), request.cwd))) > _MAX_PROGRAM_BYTES:
            said = b"argument list too long\n"
            return ExecResult(status=ExecStatus.EXIT, exit_code=126, stderr=said, stderr_bytes=len(said))
        if self.died.done():
            return gone_exec(self.died.result(), has_run=False)
        try:
            told = program.pack(request.argv, request.env, request.cwd)
            head, blobs = await self._answer(asked, request.stdin, told, within_s=wall_s + _GRACE_S)
            return exec_result(head, blobs, limits, self._has_oom_since(before, head))
        except SandboxGoneError as error:
            return gone_exec(error.cause, has_run=True)
        except NonsenseError:
            return gone_exec(await self._lose(), has_run=True)

    async def _call(self, call: Call) -> CallResult:
        refused, payload = encode_call(call, self._tools, _MAX_ARGUMENT_BYTES)
        if refused:
            return failed(CallStatus.ERROR, refused)
        tool = self._tools[call.tool]
        before = self._oom_kills()
        asked = {"op": "call", "wall_s": tool.timeout_s, "max_chars": tool.max_output_chars}
        if self.died.done():
            return gone_call(self.died.result(), has_run=False)
        try:
            head, blobs = await self._answer(asked, payload, within_s=tool.timeout_s + _GRACE_S)
            return call_result(head, blobs, tool, self.spec.limits, self._has_oom_since(before, head))
        except SandboxGoneError as error:
            return gone_call(error.cause, has_run=True)
        except NonsenseError:
            return gone_call(await self._lose(), has_run=True)

    async def _answer(self, head: frames.Head, *blobs: bytes, within_s: float, parts: Parts | None = None) -> Answer:
        """Ask, and end a sandbox whose agent does not answer in time."""
        asking = asyncio.create_task(self._asked(head["op"]).ask(head, *blobs, parts=parts))
        try:
            done, _ = await asyncio.wait([asking], timeout=within_s)
            if not done:
                self._signal()
            return await asking
        finally:
            asking.cancel()

    async def _lose(self) -> GoneCause:
        """End it, since its agent says what makes no sense; why it is gone."""
        self._signal()
        await asyncio.wait([self.died], timeout=_KILL_TIMEOUT_S)
        return self.died.result() if self.died.done() else GoneCause.LOST

    def _has_oom_since(self, before: int, head: frames.Head) -> bool:
        self._hear_ooms(head)
        self._ooms = max(self._ooms, self._oom_kills())
        return self._ooms > before

    def _oom_kills(self) -> int:
        """Processes of it that were killed because there was no memory, as far as that is known here."""
        return self._group.oom_kills()

    def _hear_ooms(self, head: frames.Head) -> None:
        """Take in what an answer says of such."""

    def _asked(self, operation: str = "") -> AgentLink:
        """Who is asked for that."""
        if self.died.done() or self._link is None:
            raise gone_error(self.id, self.died.result() if self.died.done() else GoneCause.LOST)
        return self._link

    async def _files(self, head: frames.Head, *blobs: bytes, parts: Parts | None = None) -> dict[int, bytearray]:
        """Ask about files; what the parts of the answer hold."""
        parts = parts or Parts(0)
        within_s = _FILES_S + parts.most / _FILE_BYTES_PER_S
        answer, _ = await self._answer(head, *blobs, within_s=within_s, parts=parts)
        try:
            said = refusal(answer)
        except NonsenseError:
            raise gone_error(self.id, await self._lose()) from None
        if said:
            raise SandboxFileError(f"sandbox {self.id}: {said}")
        return parts.found

    def _signal(self, number: signal.Signals = signal.SIGKILL) -> None:
        if self._pidfd >= 0 and not self._is_dead:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)

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
            cause = GoneCause.OOM if self._oom_kills() > self._ooms else GoneCause.LOST
        self.died.set_result(cause)
        if self._link is not None:
            self._link.end(gone_error(self.id, cause))
        if self._killing is not None and self._killing.done():
            self._finish()  # too late for who killed it

    async def _end(self) -> None:
        if self._coming is not None:
            await asyncio.wait([self._coming], timeout=_KILL_TIMEOUT_S)
        if self._pidfd < 0:
            if not self._is_coming and not self.died.done():
                self.died.set_result(GoneCause.CLOSED)
        else:
            self._group.kill()
            self._signal()
            await asyncio.wait([self.died], timeout=_KILL_TIMEOUT_S)
        for attempt in range(_REMOVE_TRIES):
            if self._finish():
                break
            await asyncio.sleep(0.001 * (attempt + 1))

    @property
    def _is_coming(self) -> bool:
        """Whether its first process is being made."""
        return self._coming is not None and not self._coming.done()

    def _let_go(self) -> None:
        """Close what it had open, whoever has found it gone. Nobody waits there: its processes have ended."""

    def _finish(self) -> bool:
        """Let go of its name and its user if nothing of it is left, or else kill it again; whether nothing is."""
        if self._is_gone:
            return True
        has_process = self._is_coming or (self._pidfd >= 0 and not self._is_dead)
        self._is_gone = not has_process and self._group.remove()
        if self._is_gone:
            self._let_go()
            self._forget(self)
        else:
            self._group.kill()
            self._signal()
        return self._is_gone


def gone_error(sandbox_id: str, cause: GoneCause) -> SandboxGoneError:
    """What whoever asks a sandbox is told that is gone."""
    return SandboxGoneError(f"sandbox {sandbox_id} is gone: {cause.value}; make a new one", cause)


def _check_hello(head: frames.Head, tools: Mapping[str, ToolConfig]) -> None:
    kind, said = hello(head)
    name, _, exception = said.partition("\n")
    match kind:
        case "":
            return
        case "tool" if name in tools:
            raise ToolError(
                f"tool {name}: importing {tool_path(tools[name])} in the sandbox raised {exception}. Correct the file;"
                " it sees the standard library and no other module or file"
            )
        case "snapshot":
            raise SandboxFileError(f"sandbox: the snapshot cannot be restored: {said}")
        case _:
            raise SandboxUnavailableError(f"sandbox: one did not come up: {said}")


@functools.lru_cache(maxsize=256)
def _compiled(name: str, source: str) -> bytes:
    code: CodeType = compile(source, f"{name}.py", "exec", dont_inherit=True)
    return marshal.dumps(code)


def tool_code(tool: ToolConfig) -> bytes:
    """The compiled code of a tool, for an agent that runs this very Python.

    Raises:
        ToolError: its file cannot be read, or is no Python.
    """
    source = tool_source(tool)
    try:
        return _compiled(tool.name, source)
    except (SyntaxError, ValueError) as error:
        raise ToolError(f"tool {tool.name}: {tool_path(tool)} is no Python: {error}. Correct it") from None
