"""Records of calls: what is asked of a sandbox and what comes back. Their bytes are `function.py`'s affair."""

from enum import StrEnum
from typing import Any

import msgspec


class ToolSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What a model is told about a tool."""

    name: str
    """Name to call it by."""
    description: str
    """What it does, in prose."""
    parameters: dict[str, Any]
    """JSON schema of its arguments, of type object."""


class CallStatus(StrEnum):
    """How a call ended. Every status but INFRA is the caller's own doing and an answer to it."""

    OK = "ok"
    """The function returned."""
    ERROR = "error"
    """The function raised, or the call named no tool or had arguments that it does not take."""
    TIMEOUT = "timeout"
    """It was killed at its deadline."""
    OOM = "oom"
    """It asked for more memory than a call has."""
    KILLED = "killed"
    """Its process ended without an answer: it left, crashed, or was killed by something that it did."""
    INFRA = "infra"
    """The sandbox failed, more than once. The call says nothing about who made it and must never be scored."""


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """One call of a tool."""

    tool: str
    """Name of the tool."""
    arguments: dict[str, Any]
    """Keyword arguments, values as JSON has them."""


class CallResult(msgspec.Struct, frozen=True, kw_only=True):
    """How a call ended and what it said."""

    status: CallStatus
    """How it ended."""
    text: str
    """What the caller is told: the answer, or why there is none. The same for every run of a call that ends the same
    way: no times, no paths, no process ids. Empty where status is INFRA.
    """
    truncated: bool = False
    """Whether the middle of the text was left out."""
    total_bytes: int = 0
    """UTF-8 bytes of the text before that."""
    seconds: float = 0.0
    """Wall time from the start of the call to its result, without waiting for a worker."""
    detail: str = ""
    """For logs, never for the caller: the cause of a KILLED or INFRA."""
