"""Functions of tools: importing them, calling one, and what is said of how that ended."""

import json
import sys
from collections.abc import Callable
from types import CodeType, ModuleType
from typing import Any, Final

from rollforward.sandbox.inside.system import write_all

Tools = dict[str, Callable[..., Any]]
"""Functions by name."""

MAX_ANSWER_BYTES: Final = 1 << 23
"""A call's process may say this much; the most characters that a tool may answer fit, however JSON escapes them."""
ENTERED: Final = b"+"
"""First byte of what a process says, once it has shut itself in: nobody else's code has run before."""


def import_tool(name: str, source: str | CodeType) -> Callable[..., Any]:
    """The function of a tool's file. Runs the file."""
    module = ModuleType(f"tool_{name}")
    sys.modules[module.__name__] = module
    code = compile(source, f"{name}.py", "exec") if isinstance(source, str) else source
    exec(code, module.__dict__)
    return module.__dict__[name]


def describe(error: BaseException) -> str:
    """The exception as a caller is told it."""
    try:
        return f"{type(error).__name__}: {error}"
    except BaseException:  # noqa: BLE001, its __str__ is the tool's
        return type(error).__name__


def answer(tools: Tools, request: bytes, max_chars: int) -> bytes:
    """Make the call. Whatever it raises is an answer, SystemExit too.

    Args:
        tools: functions by name.
        request: {"tool": name, "arguments": {...}}, JSON.
        max_chars: a longer answer loses its middle.

    Returns:
        {"status", "text", "truncated", "total_bytes"}, JSON.
    """
    try:
        try:
            call = json.loads(request)
            status, text = "ok", _as_text(tools[call["tool"]](**call["arguments"]))
        except MemoryError:
            raise
        except BaseException as error:  # noqa: BLE001, the code is a tool's
            status, text = "error", describe(error)
        return _pack(status, text, max_chars)
    except MemoryError:
        return _pack("oom", "", max_chars)


def say_answer(descriptor: int, tools: Tools, request: bytes, max_chars: int) -> None:
    """Say that the process is shut in, make the call, and say its answer."""
    write_all(descriptor, ENTERED)
    write_all(descriptor, answer(tools, request, max_chars))


def _shorten(text: str, max_chars: int) -> str:
    if len(text) <= max_chars:
        return text
    mark = f"\n[... {len(text) - max_chars} characters left out ...]\n"
    kept = max(max_chars - len(mark), 0)
    return text[: kept - kept // 2] + mark + text[len(text) - kept // 2 :]


def _as_text(value: object) -> str:
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _pack(status: str, text: str, max_chars: int) -> bytes:
    text = text.encode("utf-8", "replace").decode()
    said = {
        "status": status,
        "text": _shorten(text, max_chars),
        "truncated": len(text) > max_chars,
        "total_bytes": len(text.encode()),
    }
    return json.dumps(said, ensure_ascii=False).encode()
