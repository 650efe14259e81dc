"""A sandbox whose tools are bent on leaving it, and where its processes are on the host."""

import contextlib
import json
import os
import time
from pathlib import Path
from typing import Any

from rollforward.sandbox.config import SandboxConfig, ToolConfig
from rollforward.sandbox.function import FunctionSandbox
from rollforward.sandbox.types import Call, CallResult, CallStatus

TOOLS = '''
import ctypes, json, os, resource, signal, socket, subprocess, sys, threading, time
state = []

def echo(value: dict) -> str:
    """Answers what it is given."""
    return value["value"]

def run(code: str) -> str:
    """Runs Python code, as a tool may choose to."""
    names = dict(globals())
    exec(code, names)
    return names.get("answer", "")

def nap(seconds: float) -> str:
    """Sleeps."""
    time.sleep(seconds)
    return "awake"
'''
LIMITS = SandboxConfig(workers=2, memory_bytes=256 << 20, max_processes=4, tmp_bytes=1 << 20)


def tools_in(folder: Path, run_timeout_s: float = 20.0) -> list[ToolConfig]:
    file = folder / "tools.py"
    file.write_text(TOOLS, encoding="utf-8")
    return [
        ToolConfig(name="echo", file=str(file), timeout_s=20.0, max_output_chars=200),
        ToolConfig(name="run", file=str(file), timeout_s=run_timeout_s),
        ToolConfig(name="nap", file=str(file), timeout_s=0.5),
        ToolConfig(name="calculator", timeout_s=20.0),
    ]


def ask(sandbox: FunctionSandbox, tool: str, **arguments: Any) -> CallResult:
    return sandbox.submit(Call(tool=tool, arguments=arguments)).result(timeout=60)


def run(sandbox: FunctionSandbox, code: str) -> CallResult:
    return ask(sandbox, "run", code=code)


def answer(sandbox: FunctionSandbox, code: str) -> Any:
    """The JSON value that the code's `answer` is."""
    result = run(sandbox, code)
    assert result.status == CallStatus.OK, result
    return json.loads(result.text)


def descendants(pid: int) -> list[int]:
    """Processes below one on this host, by any number of generations."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in task.read_text().split():
                found += [int(child), *descendants(int(child))]
    return found


def zygotes(pid: int) -> list[int]:
    """Warm processes below one: below bubblewrap is its Python."""
    return [inner for outer in descendants(pid) if _name(outer) == "bwrap" for inner in descendants(outer)[:1]]


def zygote_beside(others: list[int]) -> int:
    """The warm process of this process's that is none of the others; none may be on its way."""
    (pid,) = [pid for pid in zygotes(os.getpid()) if pid not in others]
    return pid


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] in "ZX"
    except OSError:
        return True


def wait_for(condition: Any, seconds: float = 60.0) -> None:
    """Long enough for any machine: who waits in vain has found a fault."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)
