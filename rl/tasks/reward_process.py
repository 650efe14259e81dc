"""A function of a file in a process of its own: started once, ended at a deadline, started again after its death.

States: running <-> none. `call` starts the process where there is none; a death, a deadline or an interrupted call
leaves none. One call at a time: threads wait for each other, and a deadline counts from the call's own beginning.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import Final

import msgspec

from rollforward.rl.errors import RewardError
from rollforward.rl.tasks import reward_worker
from rollforward.rl.tasks.reward_worker import Call, Raised, Ready, Refused, Reply, Value, clean

__all__ = ["Deadline", "Died", "Raised", "Result", "RewardProcess", "Value"]

_ATTEMPTS: Final = 2
"""Processes that one call may cost by their death: one that was ended from outside says nothing about the call."""


class Deadline(msgspec.Struct, frozen=True):
    """The call had no result in time; its process was ended."""

    timeout_s: float
    """Seconds that it had."""
    cpu_s: float
    """Seconds of processor time that it used of them."""


class Died(msgspec.Struct, frozen=True):
    """The process ended by itself, or was ended by others, on every attempt."""

    detail: str
    """How."""


Result = Value | Raised | Deadline | Died
"""What a call comes to."""


class _Running:
    """One process and this side of its socket; ended, with its children, when nothing refers to it any more."""

    def __init__(self, path: Path, function: str) -> None:
        channel, theirs = socket.socketpair()
        with theirs:
            # -P: the script's own folder has a types.py, and the current one may have modules of any name.
            command = [sys.executable, "-P", reward_worker.__file__, str(theirs.fileno()), str(path), function]
            try:
                process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=2, pass_fds=(theirs.fileno(),), start_new_session=True
                )
            except BaseException:
                channel.close()
                raise
        self._process, self._channel = process, channel
        self.end = weakref.finalize(self, _end, process, channel)

    def exchange(self, record: Call | None, deadline_s: float) -> Reply | None:
        """Send a record, if there is one, and wait for the reply; None where the process is dead.

        Raises:
            TimeoutError: no reply at `deadline_s` of the monotonic clock.
        """
        try:
            self._wait_until(deadline_s)
            if record is not None:
                reward_worker.send(self._channel, record)
            self._wait_until(deadline_s)
            payload = reward_worker.receive(self._channel)
        except ConnectionError:
            return None
        return None if payload is None else msgspec.json.decode(payload, type=Reply)

    def cpu_s(self) -> float:
        """Processor time that the process has used since its start, seconds; 0 where it is gone."""
        try:
            fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return 0.0
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def how_it_ended(self) -> str:
        """End it and say how it ended, for a person."""
        try:
            status = self._process.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            status = 0  # it closed its socket and lives on
        self.end()
        if status >= 0:
            return f"the process ended with exit status {status}"
        return f"the process was ended by {signal.Signals(-status).name}"

    def _wait_until(self, deadline_s: float) -> None:
        left_s = deadline_s - time.monotonic()
        if left_s <= 0.0:
            raise TimeoutError
        self._channel.settimeout(left_s)


class RewardProcess:
    """Calls one function of one file from any thread.

    Args:
        path: the Python file.
        function: its name in the file.
        timeout_s: seconds for a call.
        start_timeout_s: seconds for start and import.
        owner: begins every error message, such as `task sums`.

    Raises:
        RewardError: no such file or function, it cannot be called with (question, answer, text), or importing it
            failed or took too long.
    """

    def __init__(self, path: Path, function: str, *, timeout_s: float, start_timeout_s: float, owner: str) -> None:
        """Start the process and wait until the function is imported."""
        self._path, self._function = path.resolve(), function
        self._timeout_s, self._start_timeout_s, self._owner = timeout_s, start_timeout_s, owner
        self._lock = threading.Lock()
        self._running: _Running | None = None
        self._digest: str | None = None
        if not path.is_file() or path.suffix != ".py":
            raise self._fault("there is no such Python file. Correct reward.file")
        if (died := self._start()) is not None:
            raise self._fault(f"importing it failed: {died.detail}. Correct the file, or raise reward.start_timeout_s")

    def call(self, question: str, answer: str | None, text: str) -> Result:
        """Call the function and wait for its result, at most the deadline and the starts that it needs.

        Raises:
            RewardError: the process had to be started again and the file has changed.
        """
        call = Call(clean(question), None if answer is None else clean(answer), clean(text), self._timeout_s)
        with self._lock:
            result: Result = Died("never started")
            for _ in range(_ATTEMPTS):
                result = self._attempt(call)
                if not isinstance(result, Died):
                    break
            return result

    def close(self) -> None:
        """End the process. A later call starts it again."""
        with self._lock:
            self._stop()

    def _attempt(self, call: Call) -> Result:
        if self._running is None and (died := self._start()) is not None:
            return died
        running = self._running
        assert running is not None
        cpu_before_s = running.cpu_s()
        try:
            reply = running.exchange(call, time.monotonic() + self._timeout_s)
        except TimeoutError:
            cpu_s = running.cpu_s() - cpu_before_s
            self._stop()
            return Deadline(self._timeout_s, cpu_s)
        except BaseException:  # interrupted: the reply that is still to come belongs to no later call
            self._stop()
            raise
        if reply is None:
            self._running = None
            return Died(running.how_it_ended())
        assert isinstance(reply, Value | Raised)
        return reply

    def _start(self) -> Died | None:
        """Start the process; returns how it failed where a later start may not.

        Raises:
            RewardError: the function cannot be called, or the file is another than at the first start.
        """
        try:
            running = _Running(self._path, self._function)
        except OSError as error:
            return Died(f"no process could be started: {error}")
        try:
            reply = running.exchange(None, time.monotonic() + self._start_timeout_s)
        except TimeoutError:
            running.end()
            return Died(f"it was not imported within {self._start_timeout_s:g} s")
        if reply is None:
            return Died(running.how_it_ended())
        if isinstance(reply, Refused):
            raise self._fault(reply.detail)
        assert isinstance(reply, Ready)
        if self._digest not in (None, reply.digest):
            raise self._fault(
                "it has changed since the run began; rewards would mean two things in one run. Put it back and go on,"
                " or start a new run"
            )
        self._digest, self._running = reply.digest, running
        return None

    def _stop(self) -> None:
        if self._running is not None:
            self._running.end()
            self._running = None

    def _fault(self, what: str) -> RewardError:
        return RewardError(f"{self._owner}: reward file {self._path}: {what}")


def _end(process: subprocess.Popen[bytes], channel: socket.socket) -> None:
    """End a process and what it has started."""
    channel.close()
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
