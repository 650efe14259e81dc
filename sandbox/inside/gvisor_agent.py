"""The agent in a container that gVisor isolates: the first process that its kernel starts (`gvisor.py` has it started).

It is an agent like any other (`agent.py`), on a kernel that has less than Linux. Of what may be missing there:

- A pidfd. The end of a process is told by SIGCHLD, whose handler looks which of them it was, and makes an event of it;
  a child is killed by its number, which is its own until it has been waited for.
- openat2, and attributes of files. Files are looked after outside (`gvisor.py`).
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

from rollforward.sandbox.inside import agent, command, system
from rollforward.sandbox.inside.answers import Tools
from rollforward.sandbox.inside.gvisor import SANDBOX, SHARED
from rollforward.sandbox.inside.seccomp import Filter

_NODES: Final = (("null", 3), ("zero", 5), ("full", 7), ("random", 8), ("urandom", 9))
_STREAMS: Final = (("fd", ""), ("stdin", "/0"), ("stdout", "/1"), ("stderr", "/2"))
_CONTROL: Final = 3
"""Where an agent has its socket."""
_FAR: Final = 64
_ABSENT: Final = (resource.RLIMIT_SIGPENDING, resource.RLIMIT_MSGQUEUE)


def main() -> None:
    """Come up and serve until the host closes the socket, which is standard input."""
    os.dup2(fcntl.fcntl(0, fcntl.F_DUPFD_CLOEXEC, _FAR), _CONTROL, inheritable=False)
    os.closerange(_CONTROL + 1, 2 * _FAR)
    agent.serve(_come_up)


def _come_up() -> agent.Agent:
    setup, codes = agent.receive(_CONTROL)
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
        return f"{len(others)} processes beside the agent" if others else ""


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
        event = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._events[process.pid] = event
        self._see_ends([process.pid])  # it may have ended before anyone was to be told
        return command.Process(process.pid, event, process.channel)

    def fork(self) -> tuple[int, int]:
        """See `Room`."""
        pid, pidfd = system.fork(system.NEWPID | system.NEWNS, has_pidfd=False)
        if pid == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        return pid, pidfd

    def bounds(self) -> dict[int, tuple[int, int]]:
        """See `Room`."""
        return {name: bound for name, bound in super().bounds().items() if name not in _ABSENT}

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
