"""Processes that a container's agent forks, one for each command or call: how they shut themselves in.

Each is PID 1 of its own PID namespace, in a mount namespace with a fresh /proc. It is made before it is needed, shuts
itself in, and waits for requests. For a command it stays between: it starts the command, waits, ends everything else
that is left and buries it, and reports; nothing inside can kill it or look into it. When it has reported, its namespace
is as empty as before, and it may take another command. A call is its last request: it runs the function itself, so that
only its end is the end of all it has started.
"""

import contextlib
import errno
import gc
import marshal
import math
import os
import resource
import signal
import socket
import struct
from typing import Any, Final

from rollforward.sandbox.inside import frames, native, program, root, system
from rollforward.sandbox.inside.answers import Tools, say_answer
from rollforward.sandbox.inside.seccomp import Filter

READY: Final = b"."
"""What a process says first, when it has shut itself in. What it says before is why it could not."""
REPORT: Final = struct.Struct("<?idd")
"""What is reported of a command: whether the process takes another one, the exit code as of
`os.waitstatus_to_exitcode`, seconds of computing time, and those of all that the process has buried so far."""
_CHANNEL: Final = 3
_STREAMS: Final = 3
_RIGHTS_BYTES: Final = socket.CMSG_SPACE(_STREAMS * struct.calcsize("i"))
_CHUNK_BYTES: Final = 1 << 16
_MAX_USES: Final = 64
_MAX_OWN_CPU_S: Final = 0.25
"""A process that has computed for so long takes no further command: its limit of computing time is the commands'."""
_NOT_FOUND, _NOT_EXECUTABLE = 127, 126
SPARE_PROCESSES: Final = 4
"""The user may have so many more: those that wait for a command, or for their own end after one."""
_MAX_SIGNALS: Final = 1024


class Process:
    """A forked process and this side's end of the socket between."""

    def __init__(self, pid: int, pidfd: int, channel: socket.socket) -> None:
        """It has had no request."""
        self.pid = pid
        self.pidfd = pidfd
        self.channel = channel
        self.is_ready = False
        """Whether it has said so."""
        self.buried_s = 0.0
        """Computing time of the commands that it has reported, and of what they left."""

    def send(self, request: frames.Head, blob: bytes, descriptors: list[int]) -> None:
        """Give it a request.

        Args:
            request: what to do.
            blob: the call, or the command's `program`.
            descriptors: for a command its input, if it has one, its output and its errors; they stay open.

        Raises:
            OSError: it is gone, and nothing has run.
        """
        is_call = request["op"] == "call"
        data = b"c" + marshal.dumps((blob, request["max_chars"])) if is_call else b"x" + blob
        message = frames.LENGTH.pack(len(data)) + data
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack(f"{len(descriptors)}i", *descriptors))]
        sent = self.channel.sendmsg([message], rights if descriptors else [])
        if sent < len(message):
            self.channel.sendall(message[sent:])

    def read(self) -> bytes:
        """What it has said meanwhile, without its being ready; nothing at its end.

        Raises:
            BlockingIOError: it has said nothing.
            OSError: it ended before it had read its request.
        """
        said = self.channel.recv(_CHUNK_BYTES, socket.MSG_DONTWAIT)
        return self.ready(said) or (self.channel.recv(_CHUNK_BYTES, socket.MSG_DONTWAIT) if said else said)

    def ready(self, said: bytes) -> bytes:
        """What it has said but that it is ready."""
        if not self.is_ready and said.startswith(READY):
            self.is_ready = True
            return said[len(READY) :]
        return said

    def kill(self) -> None:
        """Kill it, and with it all that it has started. It has not been waited for, so its number is its own."""
        os.kill(self.pid, signal.SIGKILL)

    def discard(self) -> str:
        """End it where it has had no request that reached it; what it has said."""
        self.kill()
        os.waitpid(self.pid, 0)
        try:
            said = self.read()
        except OSError:
            said = b""
        self.channel.close()
        os.close(self.pidfd)
        return said.decode("utf-8", "replace")


class Room:
    """What every process of the container is shut in with."""

    def __init__(self, limits: dict[str, Any], masked: list[str], tools: Tools) -> None:
        """Limits are those of the sandbox, with "is_group_limited": whether cgroups count memory, and "pace": how
        many times as long as on the host things take here.
        """
        self.limits = limits
        self.pace = limits.get("pace", 1)
        self.own_cpu_s = min(_MAX_OWN_CPU_S * self.pace, max(_MAX_OWN_CPU_S, limits["cpu_s"] / 10))
        self._masked = masked
        self._tools = tools
        self._filter = Filter(sockets=True, own_limits=True)
        self._of_calls = Filter(sockets=True, own_limits=False)

    def prepare(self) -> Process:
        """Fork a process that shuts itself in and waits for a request.

        Raises:
            OSError: there is no room for it.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                pid, pidfd = self.fork()
            except OSError:
                ours.close()
                raise
            if pid == 0:
                self._run(theirs.fileno())
        return Process(pid, pidfd, ours)

    def fork(self) -> tuple[int, int]:
        """Fork a process that is first in its own PID namespace: `system.fork`."""
        return system.fork(system.NEWPID | system.NEWNS)

    def _run(self, channel: int) -> None:
        """All that the process does. Never returns."""
        status = 1
        try:
            try:
                self._enter(channel)
            except (OSError, ValueError) as error:
                os.write(_CHANNEL, str(error).encode())
            else:
                os.write(_CHANNEL, READY)
                self._serve()
                status = 0
        finally:
            os._exit(status)  # not through exit handlers and threads, which may never end

    def _serve(self) -> None:
        lead = native.lead if native.is_loaded() else lead_many
        if request := lead(_CHANNEL, _MAX_USES, self.own_cpu_s):
            self._call(*marshal.loads(memoryview(request)[1:]))

    def _enter(self, channel: int) -> None:
        os.setsid()
        if channel != _CHANNEL:
            os.dup2(channel, _CHANNEL, inheritable=False)
        os.closerange(_CHANNEL + 1, 1 << 16)
        self._see()
        # The image's: the agent's own lies on a mount that has no place any more.
        null = os.open("/dev/null", os.O_RDWR)
        for descriptor in range(_STREAMS):
            os.dup2(null, descriptor)
        os.close(null)
        for number in (signal.SIGINT, signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
        with contextlib.suppress(OSError):  # not every kernel has it
            # The agent, which wakes this process, goes on first, and sleeps: one change of processes in place of three.
            os.sched_setscheduler(0, os.SCHED_BATCH | os.SCHED_RESET_ON_FORK, os.sched_param(0))
        self._limit()
        system.become(root.USER, 0)
        system.set_dumpable(False)
        self._filter.install()

    def _see(self) -> None:
        """See the processes of its own namespace in /proc, and nothing there that tells of the host."""
        proc = system.MS_NOSUID | system.MS_NODEV | system.MS_NOEXEC
        system.mount("proc", "/proc", "proc", proc)
        for path in self._masked:
            system.mount("/dev/null", path, flags=system.MS_BIND)
        system.set_dumpable(True)  # whose files in /proc are its own
        with open("/proc/self/oom_score_adj", "wb", buffering=0) as file:
            file.write(b"1000")  # before the agent; and nobody takes it back
        system.mount("", "/proc", flags=proc | system.MS_REMOUNT | system.MS_BIND | system.MS_RDONLY)

    def bounds(self) -> dict[int, tuple[int, ...]]:
        """What a process may use up, by the name of a limit: soft and hard."""
        limits = self.limits
        seconds = math.ceil(limits["cpu_s"])
        values: dict[int, tuple[int, ...]] = {
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
        return values

    def _limit(self) -> None:
        for name, (soft, hard) in self.bounds().items():
            most = resource.getrlimit(name)[1]
            if most != resource.RLIM_INFINITY:
                soft, hard = min(soft, most), min(hard, most)
            resource.setrlimit(name, (soft, hard))

    def _call(self, call: bytes, max_chars: int) -> None:
        gc.enable()
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)  # as Python has it
        self._of_calls.install()
        with contextlib.suppress(OSError):  # an earlier one may have forbidden it, which is no failure of the platform
            os.chdir("/workspace")
        say_answer(_CHANNEL, self._tools, call, max_chars)


def _receive(channel: socket.socket) -> tuple[bytes, list[int]]:
    try:
        data, told, _, _ = channel.recvmsg(_CHUNK_BYTES, _RIGHTS_BYTES, socket.MSG_CMSG_CLOEXEC)
        descriptors = [descriptor for _, _, rights in told for (descriptor,) in struct.iter_unpack("i", rights)]
        if len(data) < frames.LENGTH.size:
            data += system.read_exactly(_CHANNEL, frames.LENGTH.size - len(data)) if data else b""
        missing = frames.LENGTH.size + frames.LENGTH.unpack_from(data)[0] - len(data)
        if missing:
            data += system.read_exactly(_CHANNEL, missing)
    except (EOFError, struct.error):
        os._exit(0)  # nobody wants it any more
    return data[frames.LENGTH.size :], descriptors


def lead_many(number: int, uses: int, own_cpu_s: float) -> bytes:
    """See `native.lead`."""
    channel = socket.socket(fileno=os.dup(number))
    used_s = 0.0
    for left in reversed(range(uses)):
        request, descriptors = _receive(channel)
        if not request.startswith(b"x"):
            return request
        stays = left > 0 and used_s < own_cpu_s
        _lead(request, descriptors, stays)
        for descriptor in descriptors:
            os.close(descriptor)
        if not stays:
            break
        own = resource.getrusage(resource.RUSAGE_SELF)
        used_s = own.ru_utime + own.ru_stime
    return b""


def _lead(request: bytes, descriptors: list[int], stays: bool) -> None:
    """Start the command, wait for it, end and bury all that it has left, and report.

    Its descriptors stay open here meanwhile: the agent, which would be told of their end, has one thing to wait for.
    """
    told = program.unpack(request[1:])
    used_s = 0.0
    try:
        pid = _spawn(told, descriptors)
    except OSError as error:
        is_absent = error.errno in (errno.ENOENT, errno.ENOTDIR)
        os.write(descriptors[-1], b"%b: %b\n" % (told.name, str(error.strerror).encode()))
        pid, code = -1, _NOT_FOUND if is_absent else _NOT_EXECUTABLE
    else:
        done, status, usage = os.wait4(-1, 0)
        while done != pid:
            done, status, usage = os.wait4(-1, 0)
        code, used_s = os.waitstatus_to_exitcode(status), usage.ru_utime + usage.ru_stime
    with contextlib.suppress(ProcessLookupError):
        os.kill(-1, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        while True:
            os.wait4(-1, 0)
    os.chdir("/")  # from where the next one starts, whatever this one's directory was
    buried = resource.getrusage(resource.RUSAGE_CHILDREN)
    os.write(_CHANNEL, REPORT.pack(stays, code, used_s, buried.ru_utime + buried.ru_stime))


def _spawn(told: program.Program, descriptors: list[int]) -> int:
    """Start a program, in its directory and a session of its own, which is found as a shell would find it."""
    if not told.argv:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
    os.chdir(told.directory)
    if not told.name:  # of which Python would say something else
        raise OSError(errno.ENOENT, os.strerror(errno.ENOENT))
    actions: list[Any] = [
        (os.POSIX_SPAWN_DUP2, descriptor, place)
        for place, descriptor in enumerate(descriptors, _STREAMS - len(descriptors))
    ]
    if len(descriptors) < _STREAMS:
        actions.append((os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0))
    system.look_in(told.environment[b"PATH"])
    try:
        return os.posix_spawnp(told.name, told.argv, told.environment, file_actions=actions, setsid=True)
    finally:
        os.unsetenv("PATH")  # a call, which this process may take next, would hand it on
