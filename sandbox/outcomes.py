"""What became of commands and calls in a container, as results; and the table that lets each run once."""

import asyncio
import hashlib
import json
import signal
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeVar

import msgspec

from rollforward.sandbox.config import Limits, ToolConfig
from rollforward.sandbox.errors import GoneCause, SandboxKeyError
from rollforward.sandbox.inside import frames
from rollforward.sandbox.inside.zygote import Outcome, outcome
from rollforward.sandbox.results import failed, read_answer
from rollforward.sandbox.types import CallResult, CallStatus, ExecResult, ExecStatus

_R = TypeVar("_R")

_MAX_RESULTS: Final = 4096
_NO_ANSWER: Final = "the call ended without an answer"


class Table:
    """Results by key: a command whose key was seen before is not run again.

    It holds the most recent ones; of an older one only that it was there.
    """

    def __init__(self) -> None:
        self._entries: OrderedDict[str, tuple[bytes, asyncio.Task[Any]]] = OrderedDict()

    def is_empty(self) -> bool:
        """Whether no command has had a key."""
        return not self._entries

    async def get(self, key: str | None, request: msgspec.Struct, run: Callable[[], Awaitable[_R]]) -> _R:
        """The result of the request, which is run if its key is new. Whoever cancels this does not end it.

        Raises:
            SandboxKeyError: the key is another request's.
        """
        if key is None:
            return await asyncio.shield(asyncio.ensure_future(run()))
        digest = request_hash(request)
        if key not in self._entries:
            self._entries[key] = digest, asyncio.ensure_future(run())
        had, task = self._entries[key]
        if had != digest:
            raise SandboxKeyError(f"key {key!r} was given to another command. Give each its own key")
        return await asyncio.shield(task)


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
    """
    if said := head.get("error") or head.get("not_run"):
        return ExecResult(status=ExecStatus.INFRA, detail=f"did not run: {said}")
    leader, cpu_s = head.get("leader"), head.get("leader_cpu_s", head["cpu_s"])
    detail = ""
    if head["is_over"]:
        status, leader = ExecStatus.TIMEOUT, None
    elif leader == 0:
        status = ExecStatus.OK
    elif has_oom:
        status = ExecStatus.OOM
    elif leader is None:
        status, detail = ExecStatus.INFRA, "ran; the process around it was killed from outside"
    elif leader == -signal.SIGXCPU or cpu_s >= limits.cpu_s:
        status = ExecStatus.TIMEOUT
    else:
        status = ExecStatus.DISK_FULL if head["is_full"] else ExecStatus.EXIT
    out, err = blobs
    return ExecResult(
        status=status,
        exit_code=leader,
        stdout=out,
        stderr=err,
        stdout_bytes=head["stdout_bytes"],
        stderr_bytes=head["stderr_bytes"],
        seconds=head["seconds"],
        cpu_s=cpu_s,
        detail=detail,
    )


def call_result(head: frames.Head, blobs: list[bytes], tool: ToolConfig, limits: Limits, has_oom: bool) -> CallResult:
    """What an agent's answer says of a call; arguments as of `exec_result`."""
    if said := head.get("error"):
        return failed(CallStatus.INFRA, "", f"did not run: {said}")
    kind, said = outcome(blobs[0], head["code"], head["is_over"])
    detail = said.decode("utf-8", "replace")
    if kind == Outcome.ANSWER:
        result = read_answer(said, tool.max_output_chars, limits.memory_bytes)
    elif kind == Outcome.TIMEOUT:
        result = failed(CallStatus.TIMEOUT, f"no answer within {tool.timeout_s:g} s")
    elif has_oom:
        result = failed(CallStatus.OOM, f"a call has at most {limits.memory_bytes >> 20} MiB of memory")
    elif kind == Outcome.KILLED:
        result = failed(CallStatus.KILLED, _NO_ANSWER, detail)
    elif head["code"] == -signal.SIGKILL and head["cpu_s"] >= limits.cpu_s:
        result = failed(CallStatus.TIMEOUT, f"no answer within {limits.cpu_s:g} s of computing")
    else:
        result = failed(CallStatus.INFRA, "", detail)
    return msgspec.structs.replace(result, seconds=head["seconds"])


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
        return failed(CallStatus.OOM, "the sandbox ran out of memory and is gone")
    what = "unknown outcome: the sandbox was ended under it" if has_run else "did not run: the sandbox is gone"
    return failed(CallStatus.INFRA, "", f"{what}: {cause.value}")
