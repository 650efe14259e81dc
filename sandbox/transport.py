"""Carries questions to a supervisor and answers back: the protocol, and the one over the supervisor's socket.

Not here: the one over a Ray actor (`placement.py`), what is asked (`wire.py`), and what may be asked again
(`client.py`).
"""

import asyncio
import contextlib
from pathlib import Path
from typing import Protocol

from rollforward.sandbox import wire
from rollforward.sandbox.errors import SandboxConnectionError


class Transport(Protocol):
    """Carries a question to one supervisor and its answer back. It can be pickled; it serves one event loop."""

    async def ask(self, operation: str, payload: wire.Data) -> wire.Data:
        """Returns the answer (see `wire`).

        Raises:
            SandboxConnectionError: there is none; what was asked may have happened.
        """
        ...

    async def close(self) -> None:
        """Let go of the connection. Who waits is told `SandboxConnectionError`; a later question connects again."""
        ...


class SocketTransport:
    """Straight to a supervisor's socket. Questions share a connection and are answered as they are done."""

    def __init__(self, path: Path) -> None:
        """Keep where the socket is; the first question connects."""
        self._path = path
        self._connection: _Connection | None = None
        self._connecting = asyncio.Lock()

    def __reduce__(self) -> tuple[type["SocketTransport"], tuple[Path]]:
        return SocketTransport, (self._path,)

    async def ask(self, operation: str, payload: wire.Data) -> wire.Data:
        """See `Transport`."""
        async with self._connecting:
            if self._connection is None or self._connection.is_lost:
                self._connection = await _Connection.open(self._path)
        return await self._connection.ask(operation, payload)

    async def close(self) -> None:
        """See `Transport`."""
        async with self._connecting:
            if self._connection is not None:
                await self._connection.close()
                self._connection = None


class _Connection:
    """One connection, from its making to its loss."""

    def __init__(self, path: Path, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._path, self._reader, self._frames = path, reader, wire.FrameWriter(writer)
        self._waiting: dict[int, asyncio.Future[wire.Data]] = {}
        self._number = 0
        self.is_lost = False
        self._reading = asyncio.create_task(self._read())

    @classmethod
    async def open(cls, path: Path) -> "_Connection":
        try:
            with wire.short_path(path) as short:
                reader, writer = await asyncio.open_unix_connection(short, limit=wire.PART_BYTES)
        except OSError as error:
            raise SandboxConnectionError(
                f"no sandbox supervisor answers at {path} ({error.strerror}); start one, or ask its actor"
            ) from None
        return cls(path, reader, writer)

    async def ask(self, operation: str, payload: wire.Data) -> wire.Data:
        self._number += 1
        number, answer = self._number, asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        try:
            if self.is_lost:
                raise self._loss()
            with contextlib.suppress(OSError):  # the reader finds the loss too, and tells everybody
                await self._frames.write(number, operation, data=payload)
            return await answer
        finally:
            self._waiting.pop(number, None)

    async def close(self) -> None:
        self._reading.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)

    async def _read(self) -> None:
        try:
            while True:
                self._heard(*await wire.read_frame(self._reader, tuple[int, memoryview]))
        except (OSError, EOFError, SandboxConnectionError):
            pass
        finally:
            self.is_lost = True
            for waiting in self._waiting.values():
                if not waiting.done():
                    waiting.set_exception(self._loss())
            self._frames.close()

    def _heard(self, named: list[int], answer: wire.Data) -> None:
        if (waiting := self._waiting.get(named[0])) is not None and not waiting.done():
            waiting.set_result(answer)

    def _loss(self) -> SandboxConnectionError:
        return SandboxConnectionError(
            f"the sandbox supervisor at {self._path} went away before it answered; what was asked may have happened"
        )
