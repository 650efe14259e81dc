"""Processes that a container's agent forks, one for each command or call: how they shut themselves in.

Each is PID 1 of its own PID namespace, in a mount namespace with a fresh /proc. It is made before it is needed, shuts
itself in, and waits for its one request. For a command it stays between: it starts the command as PID 2, waits, ends
everything else that is left, and reports; nothing inside can kill it or look into it. For a call it runs the function
itself, so that only its end is the end of all it has started.
"""

import contextlib
import errno
import json
import math
import os
import resource
import signal
from typing import Any, Final

from rollforward.sandbox.inside import frames, root, system
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
_REPORT, _REQUEST = 3, 4
_NOT_FOUND, _NOT_EXECUTABLE = 127, 126
SPARE_PROCESSES: Final = 4
"""The user may have so many more: those that wait for a command, or for their own end after one."""
_MAX_SIGNALS: Final = 1024


class Process:
    """A forked process and this side's ends of its pipes."""

    def __init__(self, pid: int, pidfd: int, ends: list[int]) -> None:
        """Ends are those of the report, its output, its errors, its input and its request."""
        self.pid = pid
        self.pidfd = pidfd
        self.report, self.stdout, self.stderr, self.stdin, self.request = ends

    def send(self, request: frames.Head, blob: bytes) -> None:
        """Give it its request; once.

        Raises:
            OSError: it is gone, and nothing has run.
        """
        try:
            system.write_all(self.request, frames.pack(request, blob))
        finally:
            os.close(self.request)
            self.request = -1

    def discard(self) -> None:
        """End it where it has had no request that reached it."""
        signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        for descriptor in (self.report, self.stdout, self.stderr, self.stdin, self.request, self.pidfd):
            if descriptor >= 0:
                os.close(descriptor)


class Room:
    """What every process of the container is shut in with."""

    def __init__(self, limits: dict[str, Any], masked: list[str], tools: Tools) -> None:
        """Limits are those of the sandbox, with "is_group_limited": whether cgroups count memory."""
        self.limits = limits
        self._masked = masked
        self._tools = tools
        self._filter = Filter(sockets=True, own_limits=True)
        self._of_calls = Filter(sockets=True, own_limits=False)

    def prepare(self) -> Process:
        """Fork a process that shuts itself in and waits for its request.

        Raises:
            OSError: there is no room for it.
        """
        ours, theirs = list[int](), list[int]()
        try:
            for index in range(5):
                read, write = os.pipe2(os.O_CLOEXEC)
                is_to_us = index < 3
                ours.append(read if is_to_us else write)
                theirs.append(write if is_to_us else read)
            pid, pidfd = system.fork(system.NEWPID | system.NEWNS)
        except OSError:
            for descriptor in (*ours, *theirs):
                os.close(descriptor)
            raise
        if pid == 0:
            self._run(theirs)
        for descriptor in theirs:
            os.close(descriptor)
        for descriptor in ours[:-1]:
            os.set_blocking(descriptor, False)
        return Process(pid, pidfd, ours)

    def _run(self, pipes: list[int]) -> None:
        """All that the process does. Never returns."""
        status = 1
        try:
            try:
                self._enter(pipes)
                request, call = _receive()
            except (OSError, ValueError) as error:
                os.write(_REPORT, str(error).encode())
            else:
                if request["op"] == "call":
                    self._call(call, request["max_chars"])
                else:
                    _lead(request)
                status = 0
        finally:
            os._exit(status)  # not through exit handlers and threads, which may never end

    def _enter(self, pipes: list[int]) -> None:
        os.setsid()
        report, out, err, source, request = pipes
        for target, descriptor in enumerate((source, out, err, report, request)):
            os.dup2(descriptor, target, inheritable=target < _REPORT)
        os.closerange(_REQUEST + 1, 1 << 16)
        proc = system.MS_NOSUID | system.MS_NODEV | system.MS_NOEXEC
        system.mount("proc", "/proc", "proc", proc)
        for path in self._masked:
            system.mount("/dev/null", path, flags=system.MS_BIND)
        system.set_dumpable(True)  # whose files in /proc are its own
        with open("/proc/self/oom_score_adj", "wb", buffering=0) as file:
            file.write(b"1000")  # before the agent; and nobody takes it back
        system.mount("", "/proc", flags=proc | system.MS_REMOUNT | system.MS_BIND | system.MS_RDONLY)
        for number in (signal.SIGINT, signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
        self._limit()
        system.become(root.USER, 0)
        system.set_dumpable(False)
        self._filter.install()

    def _limit(self) -> None:
        limits = self.limits
        seconds = math.ceil(limits["cpu_s"])
        values = {
            resource.RLIMIT_CPU: (seconds, seconds + 1),
            resource.RLIMIT_FSIZE: (limits["disk_bytes"],) * 2,
            resource.RLIMIT_NOFILE: (1024, 1024),
            resource.RLIMIT_NPROC: (limits["processes"] + SPARE_PROCESSES,) * 2,
            resource.RLIMIT_CORE: (1, 1),  # 0 would not keep a core from the program in the host's core_pattern
            resource.RLIMIT_SIGPENDING: (_MAX_SIGNALS,) * 2,  # they count to the host's user too
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

    def _call(self, call: bytes, max_chars: int) -> None:
        null = os.open("/dev/null", os.O_RDWR)
        for descriptor in range(_REPORT):
            os.dup2(null, descriptor)
        os.close(null)
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)  # as Python has it
        self._of_calls.install()
        with contextlib.suppress(OSError):  # an earlier one may have forbidden it, which is no failure of the platform
            os.chdir("/workspace")
        say_answer(_REPORT, self._tools, call, max_chars)


def _receive() -> tuple[frames.Head, bytes]:
    try:
        (size,) = frames.LENGTH.unpack(system.read_exactly(_REQUEST, frames.LENGTH.size))
        head, (blob,) = frames.unpack(system.read_exactly(_REQUEST, size))
    except EOFError:
        os._exit(0)  # nobody wants it
    os.close(_REQUEST)
    return head, blob


def _lead(request: dict[str, Any]) -> None:
    """Start the command, wait for it, end all that it has left, and report."""
    environment = {**_ENVIRONMENT, **request["env"]}
    os.write(_REPORT, ENTERED)
    try:
        os.chdir(os.fsencode(request["cwd"]))
        pid = _spawn([os.fsencode(argument) for argument in request["argv"]], environment)
    except (OSError, ValueError) as error:
        is_absent = isinstance(error, OSError) and error.errno in (errno.ENOENT, errno.ENOTDIR)
        reason = getattr(error, "strerror", None) or error
        os.write(2, f"{request['argv'][0]}: {reason}\n".encode("utf-8", "replace"))
        os.write(_REPORT, json.dumps({"leader": _NOT_FOUND if is_absent else _NOT_EXECUTABLE}).encode())
        return
    for descriptor in range(_REPORT):
        os.close(descriptor)
    status, usage = 0, resource.getrusage(resource.RUSAGE_CHILDREN)
    done = -1
    while done != pid:
        done, status, usage = os.wait4(-1, 0)
    with contextlib.suppress(ProcessLookupError):
        os.kill(-1, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        while True:
            os.wait4(-1, 0)
    said = {"leader": os.waitstatus_to_exitcode(status), "leader_cpu_s": usage.ru_utime + usage.ru_stime}
    os.write(_REPORT, json.dumps(said).encode())


def _spawn(argv: list[bytes], environment: dict[str, str]) -> int:
    reset = [signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT]
    if b"/" in argv[0]:
        return os.posix_spawn(argv[0], argv, environment, setsid=True, setsigdef=reset)
    number = errno.ENOENT
    for directory in environment["PATH"].split(":"):
        path = os.path.join(os.fsencode(directory or "."), argv[0])
        # Looked at first: a start that fails has used up a process number, which commands can see.
        if os.access(path, os.X_OK) and not os.path.isdir(path):
            return os.posix_spawn(path, argv, environment, setsid=True, setsigdef=reset)
        if os.path.exists(path):
            number = errno.EACCES
    raise OSError(number, os.strerror(number))
