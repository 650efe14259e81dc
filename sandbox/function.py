"""The function substrate: each call is a process forked from a warm one inside bubblewrap.

What it isolates is said by `bubblewrap.py` (files, users, environment, network) and `inside/zygote.py` (one call from
the next and from everything that outlives it). What it does not:

- The kernel is the host's. A flaw in a system call that an unprivileged process may make is a way out; micro-VMs are
  for code that looks for one. A call sees the kernel's version and the clock, and can measure the load.
- CPU time: a call may keep as many cores busy as it has processes, until its deadline.
- Memory is limited by process, so that a call can hold `max_processes * memory_bytes + tmp_bytes`.
- Locks on files: the kernel counts their memory to nobody; what of them a call can take is bounded by its deadline.
- Where the host's user is not root, processes in the sandbox are that user's: its `kill` reaches them.
- /usr and this Python can be read, by nobody in particular: no secret belongs there.
- The tools' own code: a file is imported in the warm process, before any call, by whoever configured it.

A text of the model is a value here and never code, whatever it looks like: only a tool may decide to run it.
"""

import asyncio
import contextlib
import queue
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import Final, Self

import msgspec

from rollforward.sandbox.bubblewrap import spawn, unavailable
from rollforward.sandbox.config import SandboxConfig, ToolConfig
from rollforward.sandbox.errors import SandboxClosedError, SandboxUnavailableError, ToolError
from rollforward.sandbox.inside import zygote
from rollforward.sandbox.inside.answers import MAX_ANSWER_BYTES
from rollforward.sandbox.results import encode_call, failed, no_answer, out_of_time, read_answer
from rollforward.sandbox.toolset import load_tool, tool_path, tool_source
from rollforward.sandbox.types import Call, CallResult, CallStatus

_ATTEMPTS: Final = 2
"""Processes that a call may lose before it is INFRA."""
_GRACE_S: Final = 30.0
"""The warm process has this long after a call's deadline to say so, on a busy machine; then it is lost."""


class _LostError(Exception):
    """The warm process, or the call's in it, failed or was killed. Make the call again of a new one."""


class _Warm:
    """One warm process. Belongs to the thread that made it and dies with it; any thread may kill it."""

    def __init__(self, setup: bytes, tools: Sequence[ToolConfig], start_timeout_s: float) -> None:
        with contextlib.ExitStack() as stack:
            errors = stack.enter_context(tempfile.TemporaryFile())
            self._channel, inside = socket.socketpair()
            stack.enter_context(self._channel)
            with inside:
                self._process = spawn(zygote.__name__, inside, errors)
            stack.callback(_end, self._process, self._channel)
            try:
                self._check_start(*self._exchange(setup, start_timeout_s), tools)
            except _LostError as error:
                _end(self._process, self._channel)
                raise unavailable(errors, f"the warm process did not come up: {error}") from None
            self._close = stack.pop_all().close

    def _check_start(self, outcome: bytes, said: bytes, tools: Sequence[ToolConfig]) -> None:
        text = said.decode("utf-8", "replace")
        if outcome == zygote.Outcome.BAD_TOOL:
            name, _, exception = text.partition("\n")
            path = next(tool_path(tool) for tool in tools if tool.name == name)
            raise ToolError(
                f"tool {name}: importing {path} in the sandbox raised {exception}. Correct the file; it sees the"
                " standard library and no other module or file"
            )
        if outcome != zygote.Outcome.ANSWER or b'"ok"' not in said:
            raise _LostError(f"a first call of nothing failed: {text}")

    def call(self, payload: bytes, timeout_s: float, max_chars: int) -> tuple[bytes, bytes]:
        """Make one call; an `Outcome` and what it says.

        Raises:
            _LostError: the process is gone, or did not answer in time.
        """
        return self._exchange(zygote.CALL.pack(timeout_s, max_chars) + payload, timeout_s + _GRACE_S)

    def kill(self) -> None:
        """End its processes; a call that runs is lost."""
        self._process.kill()

    def end(self) -> None:
        """End its processes and wait for that."""
        self._close()

    def _exchange(self, message: bytes, timeout_s: float) -> tuple[bytes, bytes]:
        end = time.monotonic() + timeout_s
        try:
            self._channel.settimeout(timeout_s)
            self._channel.sendall(zygote.LENGTH.pack(len(message)) + message)
            size = zygote.LENGTH.unpack(self._receive(zygote.LENGTH.size, end))[0]
            if not 0 < size <= MAX_ANSWER_BYTES + (1 << 17):
                raise _LostError(f"a message of {size} bytes")
            said = self._receive(size, end)
        except TimeoutError:
            raise _LostError(f"no answer within {timeout_s:g} s") from None
        except OSError as error:
            raise _LostError(f"{type(error).__name__}: {error.strerror}") from None
        return said[:1], said[1:]

    def _receive(self, size: int, end: float) -> bytes:
        data = bytearray()
        while len(data) < size:
            self._channel.settimeout(max(end - time.monotonic(), 1e-3))
            chunk = self._channel.recv(size - len(data))
            if not chunk:
                raise _LostError("it ended")
            data += chunk
        return bytes(data)


def _end(process: subprocess.Popen[bytes], channel: socket.socket) -> None:
    """Kill bubblewrap, with which everything in it dies, and wait until nobody inside holds the socket."""
    process.kill()
    process.wait()
    channel.settimeout(_GRACE_S)
    with contextlib.suppress(OSError):
        while channel.recv(1 << 16):
            pass


class FunctionSandbox:
    """A `SandboxClient` of `config.workers` warm processes, for callers with an event loop (`call`) and without
    (`submit`).

    Starting it starts them, each in a thread of its own that lives as long as the sandbox does (bubblewrap dies with
    the thread that started it). A warm process that is lost is replaced. All methods may be called by any thread.

    Raises:
        ToolError: a tool cannot be offered or not be imported, or two have one name.
        SandboxUnavailableError: this machine cannot isolate calls; nothing runs with less isolation.
    """

    def __init__(self, config: SandboxConfig, tools: Sequence[ToolConfig]) -> None:
        self._config = config
        self._tools = {tool.name: tool for tool in tools}
        if len(self._tools) != len(tools):
            names = ", ".join(sorted(tool.name for tool in tools))
            raise ToolError(f"tools are {names}; a name may stand there once. Remove or rename one")
        for tool in tools:
            load_tool(tool)
        limits = {name: getattr(config, name) for name in ("memory_bytes", "max_processes", "tmp_bytes")}
        # Read once: a tool does not change because a warm process was lost.
        self._setup = msgspec.json.encode({"tools": {t.name: tool_source(t) for t in tools}, "limits": limits})
        self._lock = threading.Lock()
        self._is_closed = False
        self._waiting: queue.SimpleQueue[tuple[Call, bytes, Future[CallResult]] | None] = queue.SimpleQueue()
        self._warm: dict[int, _Warm] = {}
        started: list[Future[None]] = [Future() for _ in range(config.workers)]
        self._threads = [
            threading.Thread(target=self._work, args=(index, ready), name=f"sandbox-{index}", daemon=True)
            for index, ready in enumerate(started)
        ]
        for thread in self._threads:
            thread.start()
        try:
            for ready in started:
                ready.result()
        except BaseException:
            self.shutdown()
            raise

    def submit(self, call: Call) -> Future[CallResult]:
        """Put a call in the queue; its result comes as `SandboxClient.call` says. Calls start in this order.

        Raises:
            SandboxClosedError: the sandbox is closed.
        """
        future: Future[CallResult] = Future()
        refused, payload = encode_call(call, self._tools, self._config.max_argument_bytes)
        with self._lock:
            if self._is_closed:
                raise SandboxClosedError("the sandbox is closed; make a new one")
            if refused:
                future.set_result(failed(CallStatus.ERROR, refused))
            else:
                self._waiting.put((call, payload, future))
        return future

    async def call(self, call: Call) -> CallResult:
        """See `SandboxClient.call`. Whoever cancels it does not end a call that runs."""
        return await asyncio.wrap_future(self.submit(call))

    async def close(self) -> None:
        """See `SandboxClient.close`."""
        await asyncio.to_thread(self.shutdown)

    def shutdown(self) -> None:
        """Like `close`, for callers without an event loop."""
        with self._lock:
            self._is_closed = True
            for warm in self._warm.values():
                warm.kill()
            for _ in self._threads:
                self._waiting.put(None)
        for thread in self._threads:
            thread.join()
        while not self._waiting.empty():
            if (left := self._waiting.get()) is not None and left[2].set_running_or_notify_cancel():
                left[2].set_exception(_closed())

    def __enter__(self) -> Self:
        """The sandbox, shut down at the end of the block."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    def _work(self, index: int, ready: Future[None]) -> None:
        """Serve calls with one warm process at a time until the sandbox is closed."""
        try:
            self._replace(index)
        except BaseException as error:  # noqa: BLE001, the constructor raises it
            ready.set_exception(error)
            return
        ready.set_result(None)
        while (job := self._waiting.get()) is not None:
            call, payload, future = job
            if not future.set_running_or_notify_cancel():
                continue
            try:
                result = self._run(index, call, payload)
            except BaseException as error:  # noqa: BLE001, the caller of submit raises it
                future.set_exception(error)
            else:
                future.set_result(result)
        self._drop(index)

    def _run(self, index: int, call: Call, payload: bytes) -> CallResult:
        tool = self._tools[call.tool]
        lost = ""
        for _ in range(_ATTEMPTS):
            if self._is_closed:
                raise _closed()
            start = time.monotonic()
            try:
                if index not in self._warm:
                    self._replace(index)
                outcome, said = self._warm[index].call(payload, tool.timeout_s, tool.max_output_chars)
                result = self._result(tool, outcome, said)
            except (_LostError, SandboxUnavailableError, ToolError, OSError) as error:
                self._drop(index)
                lost = str(error)
                continue
            return msgspec.structs.replace(result, seconds=time.monotonic() - start)
        if self._is_closed:
            raise _closed()
        return failed(CallStatus.INFRA, "", lost)

    def _result(self, tool: ToolConfig, outcome: bytes, said: bytes) -> CallResult:
        """What an outcome means for the caller.

        Raises:
            _LostError: it says nothing about the call.
        """
        detail = said.decode("utf-8", "replace")
        match outcome:
            case zygote.Outcome.ANSWER:
                return read_answer(said, tool.max_output_chars, self._config.memory_bytes)
            case zygote.Outcome.TIMEOUT:
                return out_of_time(tool.timeout_s)
            case zygote.Outcome.KILLED:
                return no_answer(detail)
            case _:
                raise _LostError(detail)

    def _replace(self, index: int) -> None:
        warm = _Warm(self._setup, list(self._tools.values()), self._config.start_timeout_s)
        with self._lock:
            self._warm[index] = warm
            if self._is_closed:
                warm.kill()

    def _drop(self, index: int) -> None:
        with self._lock:
            warm = self._warm.pop(index, None)
        if warm is not None:
            warm.end()


def _closed() -> SandboxClosedError:
    return SandboxClosedError("the sandbox was closed before the call ended; make the call of a new one")
