"""The first process of a container: runs commands and calls for the host, each in a process that is shut in.

Its control socket speaks `frames.py`:

    host -> here    first the set-up: {"limits", "tools": [names]} and their code; then requests: {"id", "op", ...}
    here -> host    {"id": 0, "error", "kind"}: the container is up, or why not; then an answer for each request, before
                    which there may be parts of it, with "more"

It is forked from the template and never executes anything: it has this machine's Python in memory and needs none in the
image. No command can reach it: commands live in PID namespaces below its own, hold none of its descriptors, and where
the host's user is root are of another user. It never looks at what a command makes but as bytes.
"""

import contextlib
import fcntl
import gc
import marshal
import os
import resource
import select
import socket
import struct
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Final

from rollforward.sandbox.inside import command, files, frames, hearing, native, root, snapshots, system
from rollforward.sandbox.inside.answers import Tools, describe, import_tool
from rollforward.sandbox.inside.running import CHUNK_BYTES, Running, make_pipes

_RIGHTS: Final = (
    system.CAP_SYS_ADMIN
    | system.CAP_SETUID
    | system.CAP_SETGID
    | system.CAP_KILL
    | system.CAP_DAC_OVERRIDE
    | system.CAP_CHOWN
    | system.CAP_FOWNER
)
_CONTROL: Final = 3
_SNAPSHOT: Final = 4
_EVENTS: Final = 5
"""Of the control group that it is in: where the host's kernel is not this one, nobody else could tell of it."""
_LAST_READS: Final = 64
"""Reads of a pipe whose writers should be gone; one may have been handed to another command, which goes on."""
_SHORT_S: Final = 0.005
"""A command that takes longer may not be the next one's predecessor: another process is made."""
_RETRY_S: Final = 0.1
_MAX_ENDING: Final = command.SPARE_PROCESSES // 2
_BURY_MS: Final = 1000
_KILL_GRACE_S: Final = 10.0
_FIRST_FREE: Final = 16
"""Descriptors from here on are in nobody's way while a container comes up."""
_SIOCSIFFLAGS, _IFF_UP = 0x8914, 1


class _SetupError(Exception):
    """The container cannot be; `args` are the kind and the reason."""


def main(request: dict[str, Any], descriptors: list[int]) -> None:
    """Come up and serve until the host closes the socket."""
    control, *others = [fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, _FIRST_FREE) for descriptor in descriptors]
    kept = {_CONTROL: control}
    kept |= {_SNAPSHOT: others.pop(0)} if request["has_snapshot"] else {}
    kept |= {_EVENTS: others.pop(0)} if request.get("has_events") else {}
    for descriptor in others:
        os.write(descriptor, b"0")
    for place in range(_CONTROL, _FIRST_FREE):
        if place in kept:
            os.dup2(kept[place], place, inheritable=False)
        else:
            with contextlib.suppress(OSError):
                os.close(place)
    os.closerange(_FIRST_FREE, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    serve(lambda: _come_up(request))


def serve(come_up: Callable[[], "Agent"]) -> None:
    """Come up, say so or why not, and serve until the host closes the socket."""
    null = os.open("/dev/null", os.O_RDWR)
    for descriptor in range(3):
        os.dup2(null, descriptor)
    os.close(null)
    try:
        agent = come_up()
    except _SetupError as error:
        _say({"id": 0, "kind": error.args[0], "error": error.args[1]})
    except Exception as error:  # noqa: BLE001, the host must hear of it, and there is nobody else who could tell
        _say({"id": 0, "kind": "infra", "error": describe(error)})
    else:
        _say({"id": 0, "kind": "", "error": ""})
        try:
            agent.serve()
        except Exception:  # noqa: BLE001, as above
            _say({"id": -1, "last_words": traceback.format_exc()})


def _come_up(request: dict[str, Any]) -> "Agent":
    setup, codes = hearing.receive(_CONTROL)
    os.umask(0o022)
    socket.sethostname("sandbox")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as lo:
        fcntl.ioctl(lo, _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", _IFF_UP))
    masked = root.masked()
    tools = load_tools(setup["tools"], codes)
    upper = root.build(request, _restore if request["has_snapshot"] else lambda _: None)
    system.keep_capabilities(_RIGHTS if os.getuid() == 0 else _RIGHTS & ~(system.CAP_SETUID | system.CAP_SETGID))
    system.set_dumpable(False)
    gc.freeze()
    return Agent(upper, command.Room(setup["limits"], masked, tools), _EVENTS if request.get("has_events") else -1)


def load_tools(names: list[str], codes: list[bytes]) -> Tools:
    """Import the tools of a set-up."""
    tools: Tools = {}
    for name, code in zip(names, codes, strict=True):
        try:
            tools[name] = import_tool(name, marshal.loads(code))
        except BaseException as error:  # noqa: BLE001, the code is the operator's
            raise _SetupError("tool", f"{name}\n{describe(error)}") from None
    return tools


def _restore(upper: int) -> None:
    """Not by way of the socket: a file of the host's is not this container's memory."""
    with open(_SNAPSHOT, "rb") as file:
        try:
            snapshots.restore(upper, file)
        except files.FileError as error:
            raise _SetupError("snapshot", str(error)) from None


def _say(head: frames.Head, *blobs: bytes) -> None:
    system.write_all(_CONTROL, frames.pack(head, *blobs))


class Agent:
    """Serves the host; see the module."""

    def __init__(self, upper: int, room: command.Room, events: int = -1) -> None:
        self._upper = upper
        self._room = room
        self._events = events
        self._closing: list[int] = []
        self._spare: command.Process | None = None
        self._spare_at = 0.0
        self._pipes: tuple[tuple[int, int], list[int]] | None = None
        """Those of the next command, made while nobody waits."""
        self._running: dict[int, Running] = {}
        self._owners: dict[int, Running] = {}
        self._streams: deque[tuple[frames.Head, Iterator[tuple[frames.Head, bytes]]]] = deque()
        self._asked: deque[tuple[frames.Head, list[bytes]]] = deque()
        self._poller = select.poll()
        self._poller.register(_CONTROL, select.POLLIN)

    def serve(self) -> None:
        """Answer requests and look after what runs, for ever."""
        while True:
            if self._spare is None and time.monotonic() >= self._spare_at:
                self._spare_at = time.monotonic() + _RETRY_S
                with contextlib.suppress(OSError):  # the next command tries again, and is told
                    self._spare = self._room.prepare()
            if native.is_loaded() and self._spare is not None and not (self._running or self._streams):
                self._attend(self._spare)
            else:
                self._poll()
            while self._closing:  # only now: an event of this round must not be taken for that of a later descriptor
                os.close(self._closing.pop())
            now = time.monotonic()
            for running in list(self._running.values()):
                if now >= running.end and not running.is_over:
                    running.stop()
                elif now >= running.end + _KILL_GRACE_S and not running.is_answered:
                    self._answer(running.request, {"error": "ran; its processes cannot be killed"})
                    running.is_answered = True
            if self._streams:
                self._send_part()

    def _poll(self) -> None:
        if self._pipes is None and not self._running:
            with contextlib.suppress(OSError):  # the next command tries again, and is told
                self._pipes = make_pipes()
        for descriptor, event in self._poller.poll(self._wait_ms()):
            if descriptor == _CONTROL:
                self._take_all(hearing.receive_all(_CONTROL))
            elif (running := self._owners.get(descriptor)) is not None:
                self._look(running, descriptor, event)

    def _wait_ms(self) -> float | None:
        if self._streams:
            return 0
        waited = [running for running in self._running.values() if not running.is_answered]
        ends = [running.end + _KILL_GRACE_S * running.is_over for running in waited]
        if self._spare is None:
            ends.append(self._spare_at)
        return max(1000 * (min(ends) - time.monotonic()), 0) + 1 if ends else None

    def _send_part(self) -> None:
        """Send one part of the answer whose turn it is."""
        request, parts = self._streams.popleft()
        try:
            head, data = next(parts)
        except StopIteration:
            self._answer(request, {})
        except files.FileError as error:
            self._answer(request, {"file_error": str(error)})
        except OSError as error:
            self._answer(request, {"file_error": str(error.strerror)})
        else:
            self._answer(request, {**head, "more": True}, data)
            self._streams.append((request, parts))

    def _answer(self, request: frames.Head, head: frames.Head, *blobs: bytes) -> None:
        _say({"id": request["id"], **head}, *blobs)

    def _take_all(self, asked: list[tuple[frames.Head, list[bytes]]]) -> None:
        """Take requests, and those that come with the end of a pause."""
        self._asked.extend(asked)
        while self._asked:
            self._take(*self._asked.popleft())

    def _take(self, request: frames.Head, blobs: list[bytes]) -> None:
        try:
            match request["op"]:
                case "exec" | "call":
                    self._start(request, *blobs)
                case "upload":
                    files.upload(request, blobs[0])
                    self._answer(request, {})
                case "download":
                    self._streams.append((request, files.download(request)))
                case "snapshot":
                    taken = snapshots.take(self._upper, request["max_bytes"])
                    self._streams.append((request, (({}, data) for data in taken)))
                case "verify":
                    self._answer(request, {"fault": self._fault()})
                case "hold":
                    self._answer(request, {})
                    if not self._asked:  # until the next it says nothing, and between two messages it may be saved
                        self._asked.extend(hearing.receive_all(_CONTROL))
                    self._asked.popleft()
                case operation:
                    self._answer(request, {"error": f"there is no operation {operation}"})
        except files.FileError as error:
            self._answer(request, {"file_error": str(error)})
        except (OSError, MemoryError) as error:
            has_run = "" if request["op"] not in ("exec", "call") else "did not run: "
            self._answer(request, {"error": has_run + describe(error)})

    def _fault(self) -> str:
        """Why this container is not as good as new, or nothing."""
        if self._running:
            return f"{len(self._running)} commands run"
        return self.change({os.getpid()} | ({self._spare.pid} if self._spare else set()))

    def change(self, own: set[int]) -> str:
        """What differs from a fresh container where nothing runs, or nothing; `own` are processes that are its own."""
        return files.first_change(self._upper, own)

    def _start(self, request: frames.Head, blob: bytes, program: bytes = b"") -> None:
        """Give a process a command (the blob is its standard input) or a call (it is the call)."""
        if self._running:
            self._bury()
        if request["op"] == "call":
            running = Running(request, self._dispatch(request, blob, []), b"", 0)
        else:
            (stdout, stderr), theirs = self._pipes or make_pipes()
            self._pipes = None
            ours = [-1, stdout, stderr]
            try:
                if blob:  # it has no pipe where there is nothing to say
                    stdin, ours[0] = os.pipe2(os.O_CLOEXEC)
                    os.set_blocking(ours[0], False)
                    theirs.insert(0, stdin)
                process = self._dispatch(request, program, theirs)
            except OSError:
                for descriptor in ours:
                    if descriptor >= 0:
                        os.close(descriptor)
                raise
            finally:
                for descriptor in theirs:
                    os.close(descriptor)
            running = Running(request, process, blob, self._room.limits["output_bytes"])
            running.attach(*ours)
        self._look_after(running)

    def _look_after(self, running: Running) -> None:
        # A call is the last request of its process; after a command the next one may have it, if that is short.
        self._spare_at = 0.0 if running.is_call else running.start + _SHORT_S * self._room.pace
        self._running[running.process.pid] = running
        for descriptor in (running.channel, running.process.pidfd):
            self._watch(running, descriptor, select.POLLIN)
        if not running.is_call:
            self._watch(running, running.stdout, select.POLLIN)
            self._watch(running, running.stderr, select.POLLIN)
        if running.stdin >= 0:
            self._watch(running, running.stdin, select.POLLOUT)

    def _watch(self, running: Running, descriptor: int, events: int) -> None:
        self._owners[descriptor] = running
        self._poller.register(descriptor, events)

    def _attend(self, process: command.Process) -> None:
        """Have machine code answer commands until there is something else; its `_start` and what follows on it."""
        room = min(self._room.limits["output_bytes"], native.CHUNK_BYTES)
        channel = process.channel.fileno()
        short_s = _SHORT_S * self._room.pace
        around = native.Round(
            _CONTROL, channel, self._upper, self._events, process.is_ready, room, short_s, process.buried_s
        )
        state = native.attend(around)
        message = around.message()
        process.is_ready, process.buried_s = bool(around.is_ready), around.buried_s
        if state == native.OTHER:
            self._take_all([hearing.receive_rest(_CONTROL, message, around.size)])
            return
        self._spare = None
        request, _ = frames.unpack(message)
        running = Running(request, process, b"", self._room.limits["output_bytes"], around.start_s)
        if state == native.ENDED:
            running.is_answered = True
            self._closing.append(process.channel.detach())
            self._running[process.pid] = running
            self._watch(running, process.pidfd, select.POLLIN)
            return
        running.attach(-1, *around.streams)
        self._look_after(running)
        said = around.said()
        said[0] = process.ready(said[0])
        for kept, data in zip((running.report, running.output, running.errors), said, strict=True):
            kept.add(data)
        if running.has_reported():
            self._conclude(running, {"code": 0, "cpu_s": 0.0})
            self._keep(running)

    def _bury(self) -> None:
        """Wait for the end of processes whose command has been answered, but for a few: they count to the user's."""
        ending = [running for running in self._running.values() if running.is_answered]
        for running in ending[: -_MAX_ENDING or None]:
            poller = select.poll()
            poller.register(running.process.pidfd, select.POLLIN)
            if poller.poll(_BURY_MS):
                self._finish(running)

    def _dispatch(self, request: frames.Head, blob: bytes, descriptors: list[int]) -> command.Process:
        if self._spare is not None:
            process, self._spare = self._spare, None
            try:
                process.send(request, blob, descriptors)
            except OSError:
                process.discard()  # killed for memory that others used
            else:
                return process
        process = self._room.prepare()
        try:
            process.send(request, blob, descriptors)
        except OSError as error:
            raise OSError(error.errno, process.discard() or error.strerror) from None
        return process

    def _look(self, running: Running, descriptor: int, event: int) -> None:
        process = running.process
        if descriptor == process.pidfd:
            self._finish(running)
        elif descriptor == running.stdin:
            self._feed(running, event)
        elif self._read(running, descriptor) and descriptor == running.channel:
            if running.has_said_too_much():
                running.kill()
            elif running.has_reported() and not running.is_answered:
                # Nothing of it is left but the process around it, whose end nobody has to wait for.
                self._conclude(running, {"code": 0, "cpu_s": 0.0})
                self._keep(running)

    def _keep(self, running: Running) -> None:
        """Have a process wait for the next command, if none does and it can."""
        process = running.process
        stays, _, _, process.buried_s = command.REPORT.unpack(running.report.value())
        if self._spare is None and stays and not running.is_over:
            self._spare = process
            self._forget(running, running.channel)
            self._forget(running, process.pidfd)
            del self._running[process.pid]
        else:
            self._close(running, running.channel)  # which it waits at: it ends

    def _read(self, running: Running, descriptor: int) -> bool:
        """Read what there is; False where there is nothing more."""
        try:
            is_channel = descriptor == running.channel
            chunk = running.process.read() if is_channel else os.read(descriptor, CHUNK_BYTES)
        except BlockingIOError:
            return False
        except ConnectionResetError:  # it ended before it had read its request; what it has said comes next
            return True
        if chunk:
            running.kept[descriptor].add(chunk)
        else:
            self._close(running, descriptor)
        return bool(chunk)

    def _feed(self, running: Running, event: int) -> None:
        try:
            done = 0 if event & select.POLLERR else os.write(running.stdin, running.stdin_bytes[:CHUNK_BYTES])
        except BlockingIOError:
            return
        except OSError:
            done = 0
        running.stdin_bytes = running.stdin_bytes[done:]
        if done == 0 or not running.stdin_bytes:
            self._close(running, running.stdin)

    def _close(self, running: Running, descriptor: int) -> None:
        if self._forget(running, descriptor):
            if descriptor == running.channel:
                running.process.channel.detach()
            self._closing.append(descriptor)

    def _forget(self, running: Running, descriptor: int) -> bool:
        """Whether it was watched."""
        if self._owners.get(descriptor) is not running:
            return False
        del self._owners[descriptor]
        self._poller.unregister(descriptor)
        return True

    def _finish(self, running: Running) -> None:
        """Its first process has ended, and with it all that it had started."""
        process = running.process
        _, status, usage = os.wait4(process.pid, 0)
        if not running.is_answered:
            self._conclude(running, {"code": os.waitstatus_to_exitcode(status), "cpu_s": running.cpu_s(usage)})
        self._close(running, running.channel)
        self._close(running, process.pidfd)
        del self._running[process.pid]

    def _conclude(self, running: Running, used: frames.Head) -> None:
        """Read what is left, and answer."""
        request = running.request
        for descriptor in list(running.kept):
            if descriptor == running.channel and running.has_reported():
                continue
            for _ in range(_LAST_READS):
                if self._owners.get(descriptor) is not running or not self._read(running, descriptor):
                    break
        for descriptor in (running.stdin, running.stdout, running.stderr):
            self._close(running, descriptor)
        running.is_answered = True
        head = {
            "id": request["id"],
            **used,
            "is_over": running.is_over,
            "seconds": time.monotonic() - running.start,
            "is_full": files.is_full(self._upper),
        }
        if self._events >= 0:
            head["ooms"] = system.oom_kills(self._events)
        report = running.report.value()
        if running.is_call:
            _say(head, report[: running.report_bytes])
            return
        out, err = running.output, running.errors
        head["stdout_bytes"], head["stderr_bytes"] = out.total, err.total
        if not running.process.is_ready:
            head["not_run"] = report.decode("utf-8", "replace")
        elif len(report) >= command.REPORT.size:  # what the process around a command said of it
            _, head["leader"], head["leader_cpu_s"], _ = command.REPORT.unpack(report)
        _say(head, out.value(), err.value())
