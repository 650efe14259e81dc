"""Calls as bytes, and what their processes say of themselves as results: what cannot be is not believed."""

import json
from collections.abc import Collection
from typing import Final

import msgspec

from rollforward.sandbox.types import Call, CallResult, CallStatus

OOM_TEXT: Final = "the sandbox ran out of memory and is gone"
"""What a model is told by the call that did it, and by all later ones."""


class _Answer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a call's process says. Code of the tool may have written it."""

    status: CallStatus
    text: str
    truncated: bool
    total_bytes: int


def encode_call(call: Call, names: Collection[str], max_bytes: int) -> tuple[str, bytes]:
    """Why a call is refused, or nothing and its bytes.

    Args:
        call: what is asked.
        names: tools that there are.
        max_bytes: the most that its arguments may have.
    """
    if call.tool not in names:
        return f"there is no tool {call.tool!r}; there are {', '.join(sorted(names)) or 'none'}", b""
    try:
        # Not msgspec, which refuses integers beyond 64 bits and half characters.
        text = json.dumps({"tool": call.tool, "arguments": call.arguments}, ensure_ascii=False)
        payload = text.encode("utf-8", "surrogatepass")
    except (TypeError, ValueError, RecursionError):
        return "the arguments are no JSON", b""
    return (f"the arguments have more than {max_bytes} bytes", b"") if len(payload) > max_bytes else ("", payload)


def read_answer(said: bytes, max_chars: int, memory_bytes: int) -> CallResult:
    """The result that a call's process tells, or KILLED where it tells none that can be."""
    try:
        answer = msgspec.json.decode(said, type=_Answer)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return no_answer("its answer is broken")
    if answer.status == CallStatus.OOM:
        return out_of_memory(memory_bytes)
    if answer.status not in (CallStatus.OK, CallStatus.ERROR) or len(answer.text) > max_chars:
        return no_answer("its answer is forged")
    return CallResult(
        status=answer.status, text=answer.text, truncated=answer.truncated, total_bytes=answer.total_bytes
    )


def no_answer(detail: str) -> CallResult:
    """The result of a call whose process says nothing that can be believed."""
    return failed(CallStatus.KILLED, "the call ended without an answer", detail)


def out_of_memory(memory_bytes: int) -> CallResult:
    """The result of a call that asked for more memory than it has."""
    return failed(CallStatus.OOM, f"a call has at most {memory_bytes >> 20} MiB of memory")


def out_of_time(seconds: float) -> CallResult:
    """The result of a call that was killed at its deadline."""
    return failed(CallStatus.TIMEOUT, f"no answer within {seconds:g} s")


def failed(status: CallStatus, text: str, detail: str = "") -> CallResult:
    """A result that says no more than that."""
    return CallResult(status=status, text=text, total_bytes=len(text.encode("utf-8", "replace")), detail=detail)
