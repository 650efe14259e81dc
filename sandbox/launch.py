"""Finds the supervisor of a home or starts one, and asks it: whoever holds a `LocalTransport` need not know which."""

import asyncio
import contextlib
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from typing import IO, Final

import msgspec

from rollforward.sandbox import wire
from rollforward.sandbox.config import ContainerConfig
from rollforward.sandbox.errors import SandboxConnectionError, SandboxUnavailableError
from rollforward.sandbox.files import last_line
from rollforward.sandbox.homes import Home
from rollforward.sandbox.images import Images
from rollforward.sandbox.transport import SocketTransport
from rollforward.sandbox.wire import Operation

_START_S: Final = 60.0
"""A supervisor answers so long after it was started, on a busy machine."""
_SLOW_S: Final = 20.0
"""Who is not answered for so long connects anew, and so looks whether the supervisor stands still."""
_HUNG_S: Final = 60.0
"""One that takes a connection and does not answer for so long is ended, with all its sandboxes: it must be dead, and
not merely on a busy machine."""
_QUICK: Final = frozenset((Operation.ADOPT, Operation.RENEW, Operation.LIST, Operation.STATS, Operation.CLOSE))
"""Questions that are answered at once; clients ask one three times a lease, so that a standstill is noticed."""
_LOOK_S: Final = 0.02
"""Between two looks for a supervisor that somebody else is starting or that is ending."""


class LocalTransport:
    """A `Transport` to the supervisor of one home on this machine, started if there is none.

    A supervisor that dies is replaced by whoever asks next; its sandboxes are gone then.
    """

    def __init__(self, name: str, config: ContainerConfig) -> None:
        """Name the home; nothing is started.

        Args:
            name: `homes.supervisor_id` of whom it serves.
            config: a supervisor that lives takes it over, but its images.
        """
        self._name, self._config = name, config
        self._socket: SocketTransport | None = None
        self._starting = asyncio.Lock()

    def __reduce__(self) -> tuple[type["LocalTransport"], tuple[str, ContainerConfig]]:
        return LocalTransport, (self._name, self._config)

    async def start(self) -> tuple[str, ...]:
        """Find the supervisor or start it, and return what this machine cannot enforce.

        Raises:
            SandboxUnavailableError: it cannot be started, or this machine lacks what untrusted code needs.
            SandboxConnectionError: it does not answer.
        """
        async with self._starting:
            self._socket, missing = await _find_or_start(Home.of(self._name), self._config)
            return missing

    async def ask(self, operation: str, payload: wire.Data) -> wire.Data:
        """See `Transport`."""
        try:
            connected = await self._connected()
        except SandboxUnavailableError as error:
            return wire.refusal(error)
        try:
            async with asyncio.timeout(_SLOW_S if operation in _QUICK else None):
                return await connected.ask(operation, payload)
        except (SandboxConnectionError, TimeoutError) as error:
            # Whoever asks next looks whether it stands still, and replaces it then.
            if self._socket is connected:
                self._socket = None
            if isinstance(error, SandboxConnectionError):
                raise
            await connected.close()
            raise SandboxConnectionError(
                f"the sandbox supervisor {self._name} did not answer {operation} in {_SLOW_S:g} s"
            ) from None

    async def close(self) -> None:
        """See `Transport`. The supervisor lives on while it is needed."""
        async with self._starting:
            if self._socket is not None:
                await self._socket.close()
                self._socket = None

    async def _connected(self) -> SocketTransport:
        async with self._starting:
            if self._socket is None:
                self._socket, _ = await _find_or_start(Home.of(self._name), self._config)
            return self._socket


async def _find_or_start(home: Home, config: ContainerConfig) -> tuple[SocketTransport, tuple[str, ...]]:
    """A connection to the supervisor of a home, and what it says that its machine cannot enforce."""
    question = wire.encode(wire.Configure(config=config))
    end_s = time.monotonic() + _HUNG_S + _START_S
    while True:
        transport = SocketTransport(home.socket)
        try:
            async with asyncio.timeout(_HUNG_S):
                answer = await transport.ask(Operation.CONFIGURE, question)
            return transport, wire.result(answer, tuple[str, ...])
        except TimeoutError:
            await transport.close()
            _end(home)
        except SandboxConnectionError:
            await transport.close()
        except BaseException:
            await transport.close()  # a refusal: nobody gets the connection, which would keep the supervisor alive
            raise
        if time.monotonic() > end_s:
            raise SandboxConnectionError(
                f"no sandbox supervisor answers at {home.socket} within {_HUNG_S + _START_S:g} s; {home.log} may say"
                f" why, or that of one that crashed, {home.crash_log}: {home.last_words() or 'there is none'}"
            )
        if home.holder() is None:
            began_s = time.monotonic()
            await asyncio.to_thread(_make_layers, config)
            end_s += time.monotonic() - began_s  # which may be longer than any start
            await asyncio.to_thread(_start, home, config, end_s)
        else:
            await asyncio.sleep(_LOOK_S)


def _make_layers(config: ContainerConfig) -> None:
    """Have the layers of all images in this machine's store, from which a supervisor takes them at once.

    Raises:
        SandboxUnavailableError: one cannot be made.
    """
    if config.images:
        Images(config.images, config.layers).store.close()


def _start(home: Home, config: ContainerConfig, end_s: float) -> None:
    """Start a supervisor and wait until it answers or has ended.

    Raises:
        SandboxUnavailableError: it ended, and says why.
    """
    read_end, write_end = os.pipe()
    with open(read_end, "rb", buffering=0) as said, tempfile.TemporaryFile() as errors:
        try:
            command = [sys.executable, "-m", "rollforward.sandbox.supervisor", home.name]
            process = subprocess.Popen(
                [*command, msgspec.json.encode(config).decode(), str(write_end)],
                stdin=subprocess.DEVNULL,
                stdout=errors,
                stderr=errors,
                cwd="/",
                start_new_session=True,
                pass_fds=(write_end,),
            )
        finally:
            os.close(write_end)
        try:
            process.wait(max(end_s - time.monotonic(), 0.0))
        except subprocess.TimeoutExpired:  # it has not even left this process
            process.kill()
        outcome = _read(said, end_s)
        if outcome in (wire.READY, wire.TAKEN):
            return
        if outcome:
            wire.result(outcome, type(None))
        raise SandboxUnavailableError(
            f"a sandbox supervisor did not come up: {last_line(errors.fileno()) or 'it said nothing'}"
        )


def _read(said: IO[bytes], end_s: float) -> bytes:
    """All that is said until the end of it or of the time."""
    data = b""
    poll = select.poll()  # not select, which knows descriptors below 1024 only
    poll.register(said, select.POLLIN)
    while poll.poll(max(end_s - time.monotonic(), 0.0) * 1000):
        chunk = said.read(1 << 16)
        if not chunk:
            break
        data += chunk
    return data


def _end(home: Home) -> None:
    """Kill a supervisor that hangs; its guard cleans up."""
    holder = home.holder()
    if holder is not None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(holder, signal.SIGKILL)
