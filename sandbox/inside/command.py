"""Processes that a container's agent forks, one for each command or call: how they shut themselves in.

Each is PID 1 of its own PID namespace, in a mount namespace with a fresh /proc. Its end is the end of all it has
started. For a command it stays between: it starts the command as PID 2, waits, reports and ends, and nothing inside can
kill it. For a call it runs the function itself.
"""

import errno
import json
import math
import os
import resource
import signal
from typing import Any, Final, NamedTuple

from rollforward.sandbox.inside import root, system
from rollforward.sandbox.inside.answers import ENTERED, Tools, say_answer
from rollforward.sandbox.inside.seccomp import Filter

_PATH: Final = "/usr/local/bin:/usr/bin:/bin:/usr/local/sbin:/usr/sbin:/sbin"
_ENVIRONMENT: Final = {
    "PATH": _PATH,
    "HOME": "/home",
    "USER": "user",
    "LANG": "C.UTF-8",
    "TERM": "dumb",
}
_REPORT: Final = 3
_NOT_FOUND, _NOT_EXECUTABLE = 127, 126


class Process(NamedTuple):
    """A forked process and this side's ends of its pipes; -1 where there is none."""

    pid: int
    pidfd: int
    report: int
    stdin: int
    stdout: int
    stderr: int
    stdin_bytes: bytes


class Room:
    """What every process of the container is shut in with."""

    def __init__(self, limits: dict[str, Any], masked: list[str]) -> None:
        """Limits are those of the sandbox, with "is_group_limited": whether cgroups count memory."""
        self.limits = limits
        self._masked = masked
        self._commands = Filter(sockets=True, own_limits=True)
        self._calls = Filter(sockets=True, own_limits=False)

    def start(self, request: dict[str, Any], blob: bytes, tools: Tools) -> Process:
        """Fork.

        Raises:
            OSError: there is no room for a process; nothing has run.
        """
        is_call = request["op"] == "call"
        ours, theirs = list[int](), list[int]()
        try:
            for _ in range(1 if is_call else 3):
                read, write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
                ours.append(read)
                theirs.append(write)
            stdin = -1
            if blob and not is_call:
                read, stdin = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
                ours.append(stdin)
                theirs.append(read)
            pid, pidfd = system.fork(system.NEWPID | system.NEWNS)
        except OSError:
            for descriptor in (*ours, *theirs):
                os.close(descriptor)
            raise
        if pid == 0:
            self._run(request, blob, tools, theirs)
        for descriptor in theirs:
            os.close(descriptor)
        if is_call:
            return Process(pid, pidfd, ours[0], -1, -1, -1, b"")
        return Process(pid, pidfd, ours[0], stdin, ours[1], ours[2], blob)

    def _run(self, request: dict[str, Any], blob: bytes, tools: Tools, pipes: list[int]) -> None:
        """All that the process does. Never returns."""
        status = 1
        try:
            is_call = request["op"] == "call"
            try:
                self._enter(request, pipes, self._calls if is_call else self._commands)
            except (OSError, ValueError) as error:
                os.write(_REPORT, str(error).encode())
            else:
                if is_call:
                    os.chdir("/workspace")
                    say_answer(_REPORT, tools, blob, request["max_chars"])
                else:
                    _lead(request)
                status = 0
        finally:
            os._exit(status)  # not through exit handlers and threads, which may never end

    def _enter(self, request: dict[str, Any], pipes: list[int], calls: Filter) -> None:
        os.setsid()
        os.set_blocking(pipes[0], True)
        report, *rest = (os.dup(pipe) if pipe <= _REPORT else pipe for pipe in pipes)
        out, err, source = (*rest, -1, -1, -1)[:3]
        null = os.open("/dev/null", os.O_RDWR)
        for target, descriptor in enumerate((source, out, err)):
            if descriptor >= 0:
                os.set_blocking(descriptor, True)
            os.dup2(descriptor if descriptor >= 0 else null, target)
        os.dup2(report, _REPORT, inheritable=False)
        os.closerange(_REPORT + 1, 1 << 16)
        proc = system.MS_NOSUID | system.MS_NODEV | system.MS_NOEXEC
        system.mount("proc", "/proc", "proc", proc)
        for path in self._masked:
            system.mount("/dev/null", path, flags=system.MS_BIND)
        system.set_dumpable(True)  # whose files in /proc are its own
        with open("/proc/self/oom_score_adj", "wb", buffering=0) as file:
            file.write(b"1000")  # before the agent
        for number in (signal.SIGINT, signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
        self._limit(request)
        system.become(root.USER, 0)
        system.set_dumpable(False)
        calls.install()

    def _limit(self, request: dict[str, Any]) -> None:
        limits = self.limits
        seconds = math.ceil(limits["cpu_s"])
        values = {
            resource.RLIMIT_CPU: (seconds, seconds + 1),
            resource.RLIMIT_FSIZE: (limits["disk_bytes"],) * 2,
            resource.RLIMIT_NOFILE: (1024, 1024),
            resource.RLIMIT_NPROC: (limits["processes"],) * 2,
            resource.RLIMIT_CORE: (0, 0),
            resource.RLIMIT_MEMLOCK: (0, 0),
            resource.RLIMIT_MSGQUEUE: (0, 0),
        }
        if not limits["is_group_limited"]:
            values[resource.RLIMIT_AS] = (limits["memory_bytes"],) * 2
        for name, (soft, hard) in values.items():
            most = resource.getrlimit(name)[1]
            if most != resource.RLIM_INFINITY:
                soft, hard = min(soft, most), min(hard, most)
            resource.setrlimit(name, (soft, hard))


def _lead(request: dict[str, Any]) -> None:
    """Start the command, wait for it, and report."""
    environment = {**_ENVIRONMENT, **request["env"]}
    os.write(_REPORT, ENTERED)
    try:
        os.chdir(os.fsencode(request["cwd"]))
        pid = _spawn([os.fsencode(argument) for argument in request["argv"]], environment)
    except (OSError, ValueError) as error:
        is_absent = isinstance(error, OSError) and error.errno in (errno.ENOENT, errno.ENOTDIR)
        os.write(2, f"{request['argv'][0]}: {getattr(error, 'strerror', None) or error}\n".encode("utf-8", "replace"))
        os.write(_REPORT, json.dumps({"leader": _NOT_FOUND if is_absent else _NOT_EXECUTABLE}).encode())
        return
    while True:
        done, status, usage = os.wait4(-1, 0)
        if done == pid:
            break
    said = {"leader": os.waitstatus_to_exitcode(status), "leader_cpu_s": usage.ru_utime + usage.ru_stime}
    os.write(_REPORT, json.dumps(said).encode())


def _spawn(argv: list[bytes], environment: dict[str, str]) -> int:
    reset = [signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT]
    if b"/" in argv[0]:
        return os.posix_spawn(argv[0], argv, environment, setsid=True, setsigdef=reset)
    failure: OSError = FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
    for directory in environment["PATH"].split(":"):
        path = os.path.join(os.fsencode(directory or "."), argv[0])
        try:
            return os.posix_spawn(path, argv, environment, setsid=True, setsigdef=reset)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            failure = error
    raise failure
