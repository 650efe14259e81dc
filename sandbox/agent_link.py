"""The conversation with a container's agent, seen from the host: questions, parts of answers, answers."""

import asyncio
import contextlib
import socket
from collections.abc import Callable
from typing import Self

from rollforward.sandbox.errors import SandboxGoneError
from rollforward.sandbox.inside import frames

Answer = tuple[frames.Head, list[bytes]]
"""What an agent says: its JSON and its bytes."""


class Parts:
    """What comes before an answer, so many bytes at most."""

    def __init__(self, most: int) -> None:
        self._left = most
        self.found: list[tuple[frames.Head, bytes]] = []

    def add(self, head: frames.Head, blobs: list[bytes]) -> None:
        """Keep one.

        Raises:
            ValueError: there are too many bytes.
        """
        (data,) = blobs
        self._left -= len(data)
        if self._left < 0:
            raise ValueError("more bytes than were asked for")
        self.found.append((head, data))


class AgentLink:
    """One end of a control socket. The agent is not trusted: what makes no sense is reported to `on_nonsense`."""

    def __init__(
        self,
        writer: asyncio.StreamWriter,
        reader: asyncio.StreamReader,
        on_nonsense: Callable[[], None],
        max_bytes: int,
    ) -> None:
        """See `open`."""
        self._max_bytes = max_bytes
        self._writer = writer
        self._waiting: dict[int, asyncio.Future[Answer]] = {}
        self._parts: dict[int, Parts] = {}
        self._next = 0
        self._on_nonsense = on_nonsense
        self.last_words = ""
        self._end: SandboxGoneError | None = None
        self.hello = self._expect()
        self._listening = asyncio.create_task(self._listen(reader))

    @classmethod
    async def open(
        cls, control: socket.socket, on_nonsense: Callable[[], None], *, max_bytes: int = frames.MAX_BYTES
    ) -> Self:
        """Listen. `hello` will be what the agent says unasked, once it is up; a longer message is nonsense."""
        reader, writer = await asyncio.open_unix_connection(sock=control, limit=1 << 20)
        return cls(writer, reader, on_nonsense, max_bytes)

    def tell(self, head: frames.Head, *blobs: bytes) -> None:
        """Say something that has no answer."""
        self._writer.write(frames.pack(head, *blobs))

    async def ask(self, head: frames.Head, *blobs: bytes, parts: Parts | None = None) -> Answer:
        """Ask, and wait for the answer; what comes before it is added to `parts`.

        Raises:
            SandboxGoneError: the container is gone before the answer came.
        """
        if self._end is not None:
            raise self._end
        number = self._next
        future = self._expect()
        if parts is not None:
            self._parts[number] = parts
        try:
            with contextlib.suppress(ConnectionError):
                self._writer.write(frames.pack({**head, "id": number}, *blobs))
                await self._writer.drain()
            return await future
        finally:
            self._parts.pop(number, None)
            self._waiting.pop(number, None)

    async def drain(self, timeout_s: float) -> None:
        """Hear what the agent has said before its end, once that has come."""
        await asyncio.wait([self._listening], timeout=timeout_s)

    def end(self, error: SandboxGoneError) -> None:
        """Fail whoever waits, and whoever asks from now on."""
        self._end = error
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(error)
        self._waiting.clear()
        self._listening.cancel()
        self._writer.close()

    def _expect(self) -> asyncio.Future[Answer]:
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting[self._next] = future
        self._next += 1
        return future

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                (size,) = frames.LENGTH.unpack(await reader.readexactly(frames.LENGTH.size))
                if size > self._max_bytes:
                    raise ValueError(f"a message of {size} bytes")
                head, blobs = frames.unpack(await reader.readexactly(size))
                if head.get("more"):
                    if (parts := self._parts.get(head["id"])) is not None:
                        parts.add(head, blobs)
                    continue
                if head["id"] < 0:
                    self.last_words = str(head["last_words"])
                    continue
                future = self._waiting.pop(head["id"], None)
                if future is not None and not future.done():
                    future.set_result((head, blobs))
        except (asyncio.IncompleteReadError, ConnectionError, ValueError, KeyError, TypeError):
            self._on_nonsense()
