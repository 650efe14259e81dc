"""What an agent (`agent.py`) knows of a command or call that runs: its process, its pipes, what it has written."""

import os
import resource
import time
from typing import Final

from rollforward.sandbox.inside import command, frames
from rollforward.sandbox.inside.answers import MAX_ANSWER_BYTES

CHUNK_BYTES: Final = 1 << 16
"""Read or written at a time."""
_PARENT: Final = 1
_TIMES: Final = slice(11, 15)
_BURIED: Final = slice(13, 15)
"""Places in /proc/PID/stat behind the name. Of times: of itself and of what it has waited for; of the latter alone."""


class Kept:
    """The first and last bytes of a stream, and how many there were."""

    def __init__(self, most: int) -> None:
        """So many bytes are kept, half of them from each end."""
        self._first, self._last = most - most // 2, most // 2
        self._head, self._tail = bytearray(), bytearray()
        self.total = 0

    def add(self, data: bytes) -> None:
        """Take what comes next."""
        self.total += len(data)
        room = self._first - len(self._head)
        if room > 0:
            self._head += data[:room]
            data = data[room:]
        self._tail += data
        if len(self._tail) > 2 * self._last + CHUNK_BYTES:
            del self._tail[: len(self._tail) - self._last]

    def value(self) -> bytes:
        """What is kept of it."""
        return bytes(self._head + self._tail[max(len(self._tail) - self._last, 0) :])


class Running:
    """A command or call that runs: its process, and this side's ends of what it writes and reads."""

    def __init__(
        self,
        request: frames.Head,
        process: command.Process,
        stdin: bytes,
        output_bytes: int,
        start: float | None = None,
    ) -> None:
        """See `attach` for a command.

        Args:
            request: which its process has been given.
            process: runs it.
            stdin: a command's input.
            output_bytes: as many are kept of its output, and of its errors.
            start: when it began; now, if that is not said.
        """
        self.request = request
        self.process = process
        self.channel = process.channel.fileno()
        self.is_call = request["op"] == "call"
        self.start = time.monotonic() if start is None else start
        self.end = self.start + request["wall_s"]
        self.is_over = False
        self.used_s = 0.0
        self.is_answered = False
        self.stdin_bytes = memoryview(stdin)
        self.report_bytes = MAX_ANSWER_BYTES + 1 if self.is_call else 1 << 16
        self.report = Kept(2 * self.report_bytes)
        self.output, self.errors = Kept(output_bytes), Kept(output_bytes)
        self.stdin = self.stdout = self.stderr = -1
        self.kept = {self.channel: self.report}

    def attach(self, stdin: int, stdout: int, stderr: int) -> None:
        """Take this side's ends of a command's pipes."""
        self.stdin, self.stdout, self.stderr = stdin, stdout, stderr
        self.kept |= {stdout: self.output, stderr: self.errors}

    def has_said_too_much(self) -> bool:
        """Whether its process has said more than any may, and is to be ended."""
        return self.report.total > self.report_bytes

    def has_reported(self) -> bool:
        """Whether a command's process has said all that it says of it."""
        return not self.is_call and self.process.is_ready and self.report.total >= command.REPORT.size

    def kill(self) -> None:
        """End it and all that it has started."""
        self.process.kill()

    def stop(self) -> None:
        """End it because its time is over. What it and what it has started have used is looked up before: of what is
        killed together with the first of its namespace the kernel tells nobody."""
        self.is_over = True
        self.used_s = _used_s(self.process.pid)
        self.kill()

    def cpu_s(self, used: resource.struct_rusage) -> float:
        """Its computing time.

        Args:
            used: what its process has used over all its commands, as its parent is told.
        """
        seconds = self.used_s if self.is_over else used.ru_utime + used.ru_stime
        return max(seconds - self.process.buried_s, 0.0)


def _used_s(pid: int) -> float:
    """Computing time of all that has come of a process, buried or still there, and none of its own."""
    ticks: dict[int, int] = {}
    children: dict[int, list[int]] = {}
    try:
        names = [name for name in os.listdir("/proc") if name.isdecimal()]
    except OSError:  # the sandbox has no memory for that, and an end that is due does not wait for it
        names = []
    for name in names:
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                stat = file.read().rpartition(b")")[2].split()
        except OSError:  # likewise; or it has ended meanwhile
            continue
        children.setdefault(int(stat[_PARENT]), []).append(int(name))
        ticks[int(name)] = sum(map(int, stat[_BURIED if int(name) == pid else _TIMES]))
    family = [pid]
    for one in family:
        family += children.get(one, [])
    return sum(ticks.get(one, 0) for one in family) / os.sysconf("SC_CLK_TCK")


def make_pipes() -> tuple[tuple[int, int], list[int]]:
    """This side's ends of a command's output and errors, which never have this process wait, and the command's."""
    stdout, output_end = os.pipe2(os.O_CLOEXEC)
    try:
        stderr, errors_end = os.pipe2(os.O_CLOEXEC)
    except OSError:
        os.close(stdout)
        os.close(output_end)
        raise
    os.set_blocking(stdout, False)
    os.set_blocking(stderr, False)
    return (stdout, stderr), [output_end, errors_end]
