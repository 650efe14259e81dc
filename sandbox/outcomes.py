"""What became of commands and calls in a container, as results; and the table that lets each run once."""

import asyncio
import hashlib
import json
import signal
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from typing import Annotated, Any, Final, TypeVar

import msgspec

from rollforward.sandbox.config import Limits, ToolConfig
from rollforward.sandbox.errors import GoneCause, SandboxKeyError
from rollforward.sandbox.inside import frames
from rollforward.sandbox.inside.answers import MAX_ANSWER_BYTES
from rollforward.sandbox.inside.zygote import Outcome, outcome
from rollforward.sandbox.results import OOM_TEXT, failed, no_answer, out_of_memory, out_of_time, read_answer
from rollforward.sandbox.types import CallResult, CallStatus, ExecResult, ExecStatus

_R = TypeVar("_R")
_SaidT = TypeVar("_SaidT", bound=msgspec.Struct)

_MAX_RESULTS: Final = 1024
_MAX_RESULT_BYTES: Final = 32 << 20
_MAX_CHARS: Final = 1 << 14
"""Of what an agent says for people."""

_Seconds = Annotated[float, msgspec.Meta(ge=0.0, le=1e9)]
_Bytes = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]
_Code = Annotated[int, msgspec.Meta(ge=-64, le=255)]


class NonsenseError(Exception):
    """An agent's answer is none that an agent gives: somebody else speaks in its place. The sandbox is lost."""


class _Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """What any answer may say."""

    error: str = ""
    file_error: str = ""
    not_run: str = ""


class _Hello(msgspec.Struct, frozen=True, kw_only=True):
    """What an agent says once it is up, or why it is not."""

    kind: str
    error: str


class _Ended(msgspec.Struct, frozen=True, kw_only=True):
    """What an agent says of a call that has ended."""

    is_over: bool
    code: _Code
    seconds: _Seconds
    cpu_s: _Seconds


class _EndedCommand(_Ended, frozen=True, kw_only=True):
    """What an agent says of a command that has ended."""

    is_full: bool
    stdout_bytes: _Bytes
    stderr_bytes: _Bytes
    leader: _Code | None = None
    leader_cpu_s: _Seconds | None = None


class Table:
    """Results by key: a command whose key was seen before is not run again.

    It holds the newest results, so many and so many bytes of them; of an older one only that it was there. It lies here
    and not in the sandbox because it lives no longer there: a sandbox ends with this process.
    """

    def __init__(self) -> None:
        self._known: dict[str, bytes] = {}
        self._tasks: OrderedDict[str, asyncio.Task[Any]] = OrderedDict()
        self._bytes = 0

    def is_empty(self) -> bool:
        """Whether no command has had a key."""
        return not self._known

    async def get(
        self, key: str | None, request: msgspec.Struct, run: Callable[[], Coroutine[Any, Any, _R]], forgotten: _R
    ) -> _R:
        """The result of the request, which is run if its key is new. Whoever cancels this does not end it.

        Args:
            key: None: it is run.
            request: what the key stands for.
            run: runs it.
            forgotten: what is said where it has run and its result is not held any more.

        Raises:
            SandboxKeyError: the key is another request's.
        """
        if key is None:
            return await asyncio.shield(asyncio.create_task(run()))
        digest = request_hash(request)
        if key not in self._known:
            self._known[key] = digest
            self._tasks[key] = asyncio.create_task(run())
            self._tasks[key].add_done_callback(lambda task: self._count(task, 1))
        if self._known[key] != digest:
            raise SandboxKeyError(f"key {key!r} was given to another command. Give each its own key")
        if key not in self._tasks:
            return forgotten
        try:
            return await asyncio.shield(self._tasks[key])
        finally:
            self._shorten()

    def _count(self, task: asyncio.Task[Any], sign: int) -> None:
        if not task.cancelled() and task.exception() is None:
            result = task.result()
            is_command = isinstance(result, ExecResult)
            size = len(result.stdout) + len(result.stderr) if is_command else len(result.text)
            self._bytes += sign * size

    def _shorten(self) -> None:
        for key in list(self._tasks):
            if len(self._tasks) <= _MAX_RESULTS and self._bytes <= _MAX_RESULT_BYTES:
                break
            if self._tasks[key].done():
                self._count(self._tasks.pop(key), -1)


def request_hash(request: msgspec.Struct) -> bytes:
    """Sixteen bytes that two requests have in common only if they are equal."""
    # Not msgpack, which has no half characters and no integers beyond 64 bits; a model writes both.
    fields = msgspec.to_builtins(request, builtin_types=(bytes,))
    data = json.dumps([type(request).__name__, fields], sort_keys=True, default=bytes.hex)
    return hashlib.blake2b(data.encode("ascii"), digest_size=16).digest()


def exec_result(head: frames.Head, blobs: list[bytes], limits: Limits, has_oom: bool) -> ExecResult:
    """What an agent's answer says of a command.

    Args:
        head: the answer.
        blobs: output and errors.
        limits: the sandbox's.
        has_oom: whether the kernel has killed a process of the sandbox for memory meanwhile.

    Raises:
        NonsenseError: it is no such answer.
    """
    if said := refusal(head):
        return ExecResult(status=ExecStatus.INFRA, detail=said)
    if said := _told(head, _Refusal).not_run:
        status = ExecStatus.OOM if has_oom else ExecStatus.INFRA
        return ExecResult(status=status, detail=f"did not run: {_shown(said)}")
    told = _told(head, _EndedCommand)
    _check(len(blobs) == 2)
    out, err = blobs
    _check(len(out) <= min(limits.output_bytes, told.stdout_bytes))
    _check(len(err) <= min(limits.output_bytes, told.stderr_bytes))
    leader, cpu_s = told.leader, told.cpu_s if told.leader_cpu_s is None else told.leader_cpu_s
    detail = ""
    if told.is_over:
        status, leader = ExecStatus.TIMEOUT, None
    elif leader == 0:
        status = ExecStatus.OK
    elif has_oom:
        status = ExecStatus.OOM
    elif leader is None and cpu_s < limits.cpu_s:  # who leaves it many dead to bury can use up its time
        status, detail = ExecStatus.INFRA, "ran; the process around it was killed from outside"
    elif leader == -signal.SIGXCPU or cpu_s >= limits.cpu_s:
        status = ExecStatus.TIMEOUT
    else:
        status = ExecStatus.DISK_FULL if told.is_full else ExecStatus.EXIT
    return ExecResult(
        status=status,
        exit_code=leader,
        stdout=out,
        stderr=err,
        stdout_bytes=told.stdout_bytes,
        stderr_bytes=told.stderr_bytes,
        seconds=told.seconds,
        cpu_s=cpu_s,
        detail=detail,
    )


def call_result(head: frames.Head, blobs: list[bytes], tool: ToolConfig, limits: Limits, has_oom: bool) -> CallResult:
    """What an agent's answer says of a call; arguments and errors as of `exec_result`."""
    if said := refusal(head):
        return failed(CallStatus.INFRA, "", said)
    told = _told(head, _Ended)
    _check(len(blobs) == 1 and len(blobs[0]) <= MAX_ANSWER_BYTES + 1)
    kind, said = outcome(blobs[0], told.code, told.is_over)
    detail = said[:_MAX_CHARS].decode("utf-8", "replace")
    if kind == Outcome.ANSWER:
        result = read_answer(said, tool.max_output_chars, limits.memory_bytes)
    elif kind == Outcome.TIMEOUT:
        result = out_of_time(tool.timeout_s)
    elif has_oom:
        result = out_of_memory(limits.memory_bytes)
    elif kind == Outcome.KILLED:
        result = no_answer(detail)
    elif told.code == -signal.SIGKILL and told.cpu_s >= limits.cpu_s:
        result = failed(CallStatus.TIMEOUT, f"no answer within {limits.cpu_s:g} s of computing")
    else:
        result = failed(CallStatus.INFRA, "", detail)
    return msgspec.structs.replace(result, seconds=told.seconds)


def refusal(head: frames.Head) -> str:
    """Why an agent has not done what it was asked, or nothing.

    Raises:
        NonsenseError: it is no answer.
    """
    told = _told(head, _Refusal)
    return _shown(told.file_error or told.error)


def hello(head: frames.Head) -> tuple[str, str]:
    """What kept an agent from coming up, its kind and the reason; two empty strings where it has come up."""
    try:
        told = _told(head, _Hello)
    except NonsenseError:
        return "infra", "what its agent says makes no sense"
    return told.kind, _shown(told.error)


def _told(head: frames.Head, kind: type[_SaidT]) -> _SaidT:
    try:
        return msgspec.convert(head, kind)
    except ValueError as error:  # half a character in a name is none of msgspec's own
        raise NonsenseError(str(error)) from None


def _check(is_sound: bool) -> None:
    if not is_sound:
        raise NonsenseError("its bytes are not those that it tells of")


def _shown(text: str) -> str:
    return text[:_MAX_CHARS].encode("utf-8", "replace").decode()


def gone_exec(cause: GoneCause, *, has_run: bool) -> ExecResult:
    """The result of a command whose sandbox is gone: before it, or under it."""
    if not has_run:
        return ExecResult(status=ExecStatus.SANDBOX_DEAD, detail=f"did not run: the sandbox is gone: {cause.value}")
    match cause:
        case GoneCause.OOM:
            return ExecResult(status=ExecStatus.OOM, detail="the sandbox is gone")
        case GoneCause.LOST:
            return ExecResult(status=ExecStatus.INFRA, detail="unknown outcome: the sandbox was lost under it")
        case _:
            return ExecResult(status=ExecStatus.KILLED, detail=f"the sandbox was ended under it: {cause.value}")


def gone_call(cause: GoneCause, *, has_run: bool) -> CallResult:
    """The result of a call whose sandbox is gone: before it, or under it."""
    if cause == GoneCause.OOM:
        return failed(CallStatus.OOM, OOM_TEXT)
    what = "unknown outcome: the sandbox was ended under it" if has_run else "did not run: the sandbox is gone"
    return failed(CallStatus.INFRA, "", f"{what}: {cause.value}")
