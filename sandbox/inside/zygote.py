"""The program inside the sandbox: imports the tools once, then answers each call from a process forked for it.

`bubblewrap.py` starts it for `function.py`, as PID 1 of its own namespaces; it needs nothing but the standard library.
Standard input is a socket to the host. A message there is its length in four bytes,
little-endian, and then:

    host -> here    first {"tools": {name: source}, "limits": {...}}, JSON; afterwards calls:
                    seconds f64 | most characters u32 | {"tool": name, "arguments": {...}}, JSON
    here -> host    one byte, an `Outcome`, and the bytes that it says

This process holds CAP_SYS_ADMIN in its user namespace, to make a call's namespaces. It therefore never looks into a
call: the call's process does, after it has given up every capability. What a call can reach of what outlives it:
nothing. It has a PID namespace of its own, whose end kills all it has started; a /tmp of its own on a root that is
read-only; no /proc; no System V or POSIX IPC, keys, or memfds, whose contents outlive processes or count to nobody; and
no sockets (seccomp), because an AF_VSOCK one would not care about the network namespace.
"""

import gc
import json
import math
import os
import resource
import select
import signal
import struct
import time
from typing import Final

from rollforward.sandbox.inside import system
from rollforward.sandbox.inside.answers import ENTERED, MAX_ANSWER_BYTES, Tools, describe, import_tool, say_answer
from rollforward.sandbox.inside.seccomp import Filter

LENGTH: Final = struct.Struct("<I")
"""In front of every message."""
CALL: Final = struct.Struct("<dI")
"""In front of every call: seconds that it has, and characters that its answer may have."""
SANDBOX_ID: Final = 65534
"""User and group of everything in the sandbox, and outside too where the host is root."""


class Outcome:
    """First byte of a message to the host."""

    ANSWER = b"a"
    """The call's process answered: JSON {"status", "text", "truncated", "total_bytes"}, not to be trusted."""
    TIMEOUT = b"t"
    """It was killed at the deadline."""
    KILLED = b"k"
    """It ended without an answer by its own doing; how."""
    LOST = b"l"
    """The sandbox failed it: its process could not be made, or was killed from outside; how."""
    BAD_TOOL = b"b"
    """Instead of the first answer: importing a tool raised; its name, a line feed, the exception."""


_SOCKET: Final = 0


def _limit(limits: dict[str, int], seconds: float) -> None:
    values = {
        resource.RLIMIT_AS: limits["memory_bytes"],
        # Never reached before the deadline: it ends what nobody is left to end.
        resource.RLIMIT_CPU: math.ceil(seconds * limits["max_processes"]) + 1,
        resource.RLIMIT_FSIZE: limits["tmp_bytes"],
        resource.RLIMIT_NOFILE: 64,
        resource.RLIMIT_NPROC: limits["max_processes"] + 1,  # counted in the user namespace: the zygote is one
        resource.RLIMIT_CORE: 1,  # 0 would not keep a core from the program in the host's core_pattern
        resource.RLIMIT_SIGPENDING: 256,  # they count to the host's user too
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
    }
    for name, value in values.items():
        hard = resource.getrlimit(name)[1]
        most = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(name, (most, most))


def _enter(answers: int, limits: dict[str, int], seconds: float, calls: Filter) -> None:
    """Shut a call's process in. Afterwards it holds three descriptors of /dev/null and `answers`."""
    os.setsid()  # a signal to its process group crosses namespaces; this one has nobody else in it
    null = os.open("/dev/null", os.O_RDWR)
    for descriptor in range(3):
        os.dup2(null, descriptor)
    os.closerange(3, answers)
    os.closerange(answers + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    options = f"size={limits['tmp_bytes']},nr_inodes=1024,mode=700,uid={SANDBOX_ID},gid={SANDBOX_ID}"
    system.mount("tmpfs", "/tmp", "tmpfs", system.MS_NOSUID | system.MS_NODEV, options)
    os.chdir("/tmp")
    _limit(limits, seconds)
    system.keep_capabilities(0)
    calls.install()


class Zygote:
    """The warm process: its tools, the limits of a call, and how to make one."""

    def __init__(self, tools: Tools, limits: dict[str, int]) -> None:
        self._tools = tools
        self._limits = limits
        self._calls = Filter(sockets=False, own_limits=False)

    def call(self, request: bytes, seconds: float, max_chars: int) -> tuple[bytes, bytes]:
        """Make one call, wait until it and all it has started are gone, and return an `Outcome` and what it says."""
        end = time.monotonic() + seconds
        answers, write_end = os.pipe()
        try:
            pid, process = system.fork(system.NEWPID | system.NEWNS)
        except OSError as error:
            os.close(answers)
            os.close(write_end)
            return Outcome.LOST, str(error).encode()
        if pid == 0:
            self._run(write_end, request, seconds, max_chars)
        os.close(write_end)
        try:
            said = _listen(answers, process, end)
        finally:
            os.kill(pid, signal.SIGKILL)
            _, status = os.waitpid(pid, 0)  # returns when the whole PID namespace is gone
            os.close(process)
            os.close(answers)
        return outcome(said, os.waitstatus_to_exitcode(status), time.monotonic() >= end)

    def _run(self, answers: int, request: bytes, seconds: float, max_chars: int) -> None:
        """All that a call's process does. Never returns."""
        status = 1
        try:
            try:
                _enter(answers, self._limits, seconds, self._calls)
            except (OSError, ValueError) as error:
                system.write_all(answers, str(error).encode())
            else:
                say_answer(answers, self._tools, request, max_chars)
                status = 0
        finally:
            os._exit(status)  # not through exit handlers and threads, which may never end


def _listen(answers: int, process: int, end: float) -> bytes:
    """What the process says until it ends, or the clock reaches `end`, or it has said too much."""
    said = bytearray()
    poller = select.poll()
    poller.register(answers, select.POLLIN)
    poller.register(process, select.POLLIN)
    while (left := end - time.monotonic()) > 0 and len(said) <= MAX_ANSWER_BYTES:
        ready = [descriptor for descriptor, _ in poller.poll(math.ceil(1000 * left))]
        if answers in ready:
            chunk = os.read(answers, 1 << 16)
            said += chunk
            if not chunk:
                poller.unregister(answers)
        elif process in ready:
            break
    return bytes(said)


def outcome(said: bytes, exit_code: int, is_over: bool) -> tuple[bytes, bytes]:
    """What became of a call's process.

    Args:
        said: all that it said.
        exit_code: as of `os.waitstatus_to_exitcode`; -SIGKILL where it was killed because it had not ended.
        is_over: whether its deadline is over.

    Returns:
        An `Outcome` and what it says.
    """
    if not said.startswith(ENTERED):
        return Outcome.LOST, said or f"exit code {exit_code} before the call began".encode()
    if exit_code == 0:
        return Outcome.ANSWER, said[1:]
    if exit_code != -signal.SIGKILL:
        return Outcome.KILLED, (f"signal {-exit_code}" if exit_code < 0 else f"exit status {exit_code}").encode()
    if is_over:
        return Outcome.TIMEOUT, b""
    if len(said) > MAX_ANSWER_BYTES:
        return Outcome.KILLED, b"its answer did not end"
    # PID 1 of a namespace cannot be killed from inside it: it was the kernel, out of memory, or an administrator.
    return Outcome.LOST, b"killed from outside"


def _read(size: int) -> bytes:
    try:
        return system.read_exactly(_SOCKET, size)
    except EOFError:
        os._exit(0)  # the host has closed, or is gone


def _receive() -> bytes:
    return _read(LENGTH.unpack(_read(LENGTH.size))[0])


def _send(outcome: bytes, payload: bytes) -> None:
    system.write_all(_SOCKET, LENGTH.pack(len(payload) + 1) + outcome + payload)


def _drop() -> None:
    """Become nobody, with CAP_SYS_ADMIN in this user namespace and no other capability."""
    os.closerange(3, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    system.become(SANDBOX_ID, system.CAP_SYS_ADMIN)
    system.die_with_parent()
    null = os.open("/dev/null", os.O_RDWR)
    os.dup2(null, 1)
    os.dup2(null, 2)
    os.close(null)


def main() -> None:
    """Serve calls until the host closes the socket."""
    _drop()
    setup = json.loads(_receive())
    tools: Tools = {"": lambda: ""}
    for name, source in setup["tools"].items():
        try:
            tools[name] = import_tool(name, source)
        except BaseException as error:  # noqa: BLE001, the code is the operator's
            _send(Outcome.BAD_TOOL, f"{name}\n{describe(error)}".encode("utf-8", "replace"))
            return
    gc.collect()
    gc.freeze()  # a collection in a call would touch, and so copy, every page of the tools
    zygote = Zygote(tools, setup["limits"])
    # A first call of nothing proves that calls can be shut in, before anyone relies on it.
    _send(*zygote.call(b'{"tool": "", "arguments": {}}', 60.0, 0))
    while True:
        call = _receive()
        seconds, max_chars = CALL.unpack_from(call)
        _send(*zygote.call(call[CALL.size :], seconds, max_chars))
