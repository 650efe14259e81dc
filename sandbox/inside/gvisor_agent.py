"""The agent in a container that gVisor isolates: the first process that its kernel starts (`gvisor.py` has it started).

It is an agent like any other (`agent.py`), on a kernel that has less than Linux. Of what may be missing there:

- A pidfd. The end of a process is told by SIGCHLD, whose handler looks which of them it was, and makes an event of it;
  a child is killed by its number, which is its own until it has been waited for.
- openat2, and attributes of files. Files are looked after outside (`gvisor.py`).
- The immunity of a PID namespace's first process: there whoever is the same user kills it. So it is another user, who
  only waits: for a second process, which does what the first one does elsewhere (`command.py`), and whose death is its
  commands' doing.
- Attributes of links: it is a bad descriptor to ask for one, of which `ls` complains, so the filter answers.
- Some limits, of things that are memory of this kernel and of nobody else.
"""

import fcntl
import gc
import os
import resource
import signal
from collections.abc import Iterable
from typing import Any, Final

from rollforward.sandbox.inside import agent, command, frames, hearing, system
from rollforward.sandbox.inside.answers import Tools
from rollforward.sandbox.inside.gvisor import SANDBOX, SHARED
from rollforward.sandbox.inside.seccomp import Filter

_NODES: Final = (("null", 3), ("zero", 5), ("full", 7), ("random", 8), ("urandom", 9))
_STREAMS: Final = (("fd", ""), ("stdin", "/0"), ("stdout", "/1"), ("stderr", "/2"))
_CONTROL: Final = 3
"""Where an agent has its socket."""
_FAR: Final = 64
_KILLED: Final = 137
"""Exit status of the first process of a namespace whose second was killed."""
_ABSENT: Final = (resource.RLIMIT_SIGPENDING, resource.RLIMIT_MSGQUEUE)


def main() -> None:
    """Come up and serve until the host closes the socket, which is standard input."""
    os.dup2(fcntl.fcntl(0, fcntl.F_DUPFD_CLOEXEC, _FAR), _CONTROL, inheritable=False)
    os.closerange(_CONTROL + 1, 2 * _FAR)
    agent.serve(_come_up)


def _come_up() -> agent.Agent:
    setup, codes = hearing.receive(_CONTROL)
    os.umask(0o022)
    _make_devices(f"{SANDBOX}/dev")
    tools = agent.load_tools(setup["tools"], codes)
    os.chroot(SANDBOX)
    os.chdir("/")
    gc.collect()
    gc.freeze()
    return GVisorAgent(os.open("/", os.O_RDONLY | os.O_DIRECTORY), GVisorRoom(setup["limits"], tools))


def _make_devices(place: str) -> None:
    system.mount("tmpfs", place, "tmpfs", system.MS_NOSUID, "mode=755,size=64k")
    for name, minor in _NODES:
        os.mknod(f"{place}/{name}", 0o20666, os.makedev(1, minor))
        os.chmod(f"{place}/{name}", 0o666)
    for name, end in _STREAMS:
        os.symlink(f"/proc/self/fd{end}", f"{place}/{name}")
    os.mkdir(f"{place}/shm")
    system.bind(SHARED, f"{place}/shm")


class GVisorAgent(agent.Agent):
    """See the module."""

    def change(self, own: set[int]) -> str:
        """See `Agent`; files are looked at outside."""
        others = {int(name) for name in os.listdir("/proc") if name.isdecimal()} - own
        others = {pid for pid in others if _parent(pid) not in own - {os.getpid()}}  # but the second ones
        if others:
            return f"{len(others)} processes beside the agent"
        return "/dev/shm has files" if os.listdir("/dev/shm") else ""

    def _conclude(self, running: Any, used: frames.Head) -> None:
        """See `Agent`; a command that has killed the process around it has ended by a signal of its own doing."""
        if used["code"] == _KILLED and not running.is_call:
            used = {**used, "leader": -signal.SIGKILL}
        super()._conclude(running, used)


def _parent(pid: int) -> int:
    """The process that a process was started by; 0 where it has ended."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[1])
    except (OSError, IndexError):
        return 0


class GVisorRoom(command.Room):
    """What every process of the container is shut in with; see the module."""

    def __init__(self, limits: dict[str, Any], tools: Tools) -> None:
        """Limits are as of `Room`."""
        super().__init__(limits, [], tools)
        self._filter = Filter(sockets=True, own_limits=True, link_attributes=False)
        self._events: dict[int, int] = {}  # by pid of a process whose end has not been seen
        signal.signal(signal.SIGCHLD, lambda *_: self._see_ends(list(self._events)))

    def prepare(self) -> command.Process:
        """See `Room`."""
        process = super().prepare()
        process.pidfd = self._events[process.pid] = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._see_ends([process.pid])  # it may have ended before anyone was to be told
        return process

    def fork(self) -> tuple[int, int]:
        """See `Room`."""
        pid, pidfd = system.fork(system.NEWPID | system.NEWNS, has_pidfd=False)
        if pid == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        return pid, pidfd

    def bounds(self) -> dict[int, tuple[int, ...]]:
        """See `Room`."""
        return {name: bound for name, bound in super().bounds().items() if name not in _ABSENT}

    def _run(self, channel: int) -> None:
        """See `Room`."""
        pid = os.fork()
        if pid == 0:
            system.adopt_orphans()
            super()._run(channel)
        os.closerange(_CONTROL, 1 << 16)
        system.keep_capabilities(0)
        done, status, usage = os.wait4(-1, 0)
        while done != pid:
            done, status, usage = os.wait4(-1, 0)
        code = os.waitstatus_to_exitcode(status)
        if code == -signal.SIGKILL and usage.ru_utime + usage.ru_stime >= self.limits["cpu_s"]:
            os.kill(os.getpid(), signal.SIGKILL)  # by the limit of computing time, which an agent knows by this
        os._exit(_KILLED if code < 0 else code)

    def _see_ends(self, pids: Iterable[int]) -> None:
        """Tell of those that have ended."""
        for pid in pids:
            try:
                has_ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
            except ChildProcessError:  # it was discarded
                self._events.pop(pid, None)
                continue
            if has_ended and (event := self._events.pop(pid, None)) is not None:
                os.eventfd_write(event, 1)
