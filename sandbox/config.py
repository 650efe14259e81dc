"""Schema of the sandbox: which functions a model may call, and what one call may use up. Read by `sandbox/`."""

from typing import Annotated, Literal

import msgspec

_MIB = 1 << 20


class ToolConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A Python function that a model may call; it runs in the sandbox and nowhere else.

    Its docstring is what the model reads about it, its annotations (str, int, float, bool, list, dict, and lists of
    these) and defaults are its parameters. What it returns is the answer: a text, or a value that is written as JSON.
    """

    name: Annotated[str, msgspec.Meta(pattern=r"^[a-zA-Z_][a-zA-Z0-9_]{0,63}$")]
    """Name of the function, which is the name that the model calls it by."""
    file: str | None = None
    """Python file with the function; it may import the standard library. null: the shipped tool of that name
    (`sandbox/tools/<name>.py`).
    """
    timeout_s: Annotated[float, msgspec.Meta(gt=0.0, le=3600.0)] = 5.0
    """Seconds of wall time for one call; then it is killed, and the model is told so."""
    max_output_chars: Annotated[int, msgspec.Meta(ge=64, le=1 << 20)] = 2000
    """A longer answer loses its middle."""


class SandboxConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where tools run and what one call may use up."""

    substrate: Literal["function"] = "function"
    """How calls are isolated: `function` is a process forked from a warm one inside bubblewrap (`function.py`)."""
    workers: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 2
    """Calls that run at once in each replica; each has a warm process of its own. The rest wait."""
    memory_bytes: Annotated[int, msgspec.Meta(ge=64 * _MIB)] = 512 * _MIB
    """Address space of each process of a call, the interpreter included."""
    max_processes: Annotated[int, msgspec.Meta(ge=1, le=4096)] = 4
    """Processes and threads of a call, its own included."""
    tmp_bytes: Annotated[int, msgspec.Meta(ge=4096)] = 16 * _MIB
    """Size of a call's /tmp, the only place where it can write."""
    max_argument_bytes: Annotated[int, msgspec.Meta(ge=64, le=64 * _MIB)] = 64 << 10
    """Arguments that are longer as JSON are refused, and the model is told so."""
    start_timeout_s: Annotated[float, msgspec.Meta(gt=0.0, le=3600.0)] = 120.0
    """Seconds in which a warm process must be ready, its tools imported."""
