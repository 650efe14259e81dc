"""Code that means harm, run the ways in which a policy's code runs, and on the host without any defence."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec
import pytest

from rollforward.sandbox.config import Limits, SandboxConfig, ToolConfig
from rollforward.sandbox.function import FunctionSandbox
from rollforward.sandbox.instance import Instance
from rollforward.sandbox.types import Call, ExecRequest
from tests.helpers.containers import GVISOR, World
from tests.helpers.machines import MachineWorld
from tests.helpers.sandboxes import tools_in

LIMITS = Limits(
    wall_s=20.0, cpu_s=20.0, memory_bytes=128 << 20, processes=24, disk_bytes=4 << 20, files=512, output_bytes=8192
)
CALLS = SandboxConfig(workers=1, memory_bytes=256 << 20, max_processes=4, tmp_bytes=1 << 20)
SECRET = "ROLLFORWARD_ATTACK_SECRET"
HARMLESS = ("ok", "error", "exit", "timeout", "oom", "killed", "disk_full")
"""Ends that are the policy's own; every other one is called the platform's failure and is not punished."""

_IMPORTS = "import ctypes, errno, fcntl, json, os, resource, signal, socket, struct, subprocess, sys, threading, time\n"
_SYSCALLS = '''
libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long
IS_X86 = os.uname().machine == "x86_64"
def call(number, *arguments):
    """The name of the error of a system call, or its result as "worked"."""
    number = number if isinstance(number, int) else number[0 if IS_X86 else 1]
    ctypes.set_errno(0)
    result = libc.syscall(ctypes.c_long(number), *[a if isinstance(a, bytes) else ctypes.c_long(a) for a in arguments])
    return "worked" if result >= 0 else errno.errorcode[ctypes.get_errno()]
def error_of(function, *arguments):
    """The name of the error of a function, or "worked"."""
    try:
        function(*arguments)
    except OSError as error:
        return errno.errorcode.get(error.errno, str(error.errno))
    return "worked"
'''


everywhere = pytest.mark.parametrize(
    "world", ["container", *GVISOR, "microvm", "fullvm"], indirect=True, scope="module"
)
"""For a test of what a world makes: in machines too, and under gVisor where that is found."""


class Ended(msgspec.Struct, frozen=True, kw_only=True):
    """How the code ended, whichever way it ran."""

    status: str
    """Of a `CallStatus` or an `ExecStatus`."""
    text: str
    """What it said."""
    detail: str = ""
    """What the logs are told."""


class Way(Protocol):
    """A way in which a policy's code runs."""

    name: str
    """function, call (in a container or machine) or command (likewise)."""
    is_slow: bool
    """Whether processors or system calls are emulated there."""
    is_gvisor: bool
    """Whether gVisor answers system calls: what is memory of its kernel only is bounded by memory."""

    def run(self, code: str) -> Ended:
        """Run Python code; a JSON value that it puts into `answer` is its text."""
        ...


class InFunction:
    """Inside the process of a call of the function substrate."""

    name, is_slow, is_gvisor = "function", False, False

    def __init__(self, sandbox: FunctionSandbox) -> None:
        self.sandbox = sandbox

    def run(self, code: str) -> Ended:
        result = self.sandbox.submit(_call(code)).result(timeout=60)
        return Ended(status=result.status, text=result.text, detail=result.detail)


class InContainer:
    """Inside the process of a call of a container or machine, or as a command of it; one that is gone is replaced."""

    def __init__(self, world: World | MachineWorld, *, is_call: bool, limits: Limits = LIMITS) -> None:
        self.world, self.is_call, self.limits = world, is_call, limits
        self.is_slow = world.name != "container"
        self.is_gvisor = world.name == "gvisor"
        self.is_on_disk = isinstance(world, MachineWorld) and world.name == "fullvm"
        self.name = "call" if is_call else "command"
        self._container: Instance | None = None

    @property
    def container(self) -> Instance:
        if self._container is None or self._container.died.done():
            self._container = self.world.create(self.limits)
        return self._container

    def run(self, code: str) -> Ended:
        if self.is_call:
            called = self.world.do(self.container.call(_call(code)))
            return Ended(status=called.status, text=called.text, detail=called.detail)
        program = f"{_IMPORTS}{_SYSCALLS}answer = ''\n{code}\nprint(json.dumps(answer))"
        result = self.world.do(self.container.exec(ExecRequest(argv=("python3", "-c", program))))
        text = (result.stdout or result.stderr).decode("utf-8", "replace")
        return Ended(status=result.status, text=text, detail=result.detail)

    def renew(self) -> None:
        """Have another container next."""
        if self._container is not None:
            self.world.do(self._container.kill())
            self._container = None


def _call(code: str) -> Call:
    return Call(
        tool="run", arguments={"code": f"{_IMPORTS}{_SYSCALLS}answer = ''\n{code}\nanswer = json.dumps(answer)"}
    )


def answer(way: Way, code: str) -> Any:
    """The JSON value that the code's `answer` is."""
    ended = way.run(code)
    assert ended.status == "ok", ended
    return json.loads(ended.text)


def harmless(way: Way, code: str) -> Ended:
    """How the code ended, which was not as if the platform had failed; and the next code runs."""
    ended = way.run(code)
    assert ended.status in HARMLESS, ended
    again = way.run("answer = 1")
    assert (again.status, again.text.strip()) == ("ok", "1"), (ended, again)
    return ended


def on_host(code: str, *, seconds: float = 20.0) -> Any:
    """The same without any defence: what the attack would do."""
    program = f"{_IMPORTS}{_SYSCALLS}{code}\nprint(json.dumps(answer))"
    done = subprocess.run(
        [sys.executable, "-S", "-c", program], capture_output=True, timeout=seconds, check=True, text=True
    )
    return json.loads(done.stdout)


def attacked_tools(folder: Path) -> Sequence[ToolConfig]:
    """A tool that runs a policy's code in its own process, one that naps, and the shipped ones that run programs."""
    return [*tools_in(folder), *(ToolConfig(name=name, timeout_s=20.0) for name in ("bash", "python"))]


def victim() -> subprocess.Popen[bytes]:
    """A process of the host that nobody inside may reach."""
    return subprocess.Popen(["sleep", "600"], env={**os.environ, SECRET: "canary"})


def python(code: str, wall_s: float = 20.0) -> ExecRequest:
    """A command that runs Python code."""
    return ExecRequest(argv=("python3", "-c", code), wall_s=wall_s)


async def status_of(running: "asyncio.Future[Any]") -> str:
    """How a command ended that was asked for earlier."""
    return str((await running).status)
