"""The conversation with a container's agent, seen from the host: questions, parts of answers, answers."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncGenerator, Callable
from typing import Final, Self

from rollforward.sandbox.errors import SandboxGoneError
from rollforward.sandbox.inside import frames

Answer = tuple[frames.Head, list[bytes]]
"""What an agent says: its JSON and its bytes."""

_MAX_HEAD_BYTES: Final = 2 << 20
"""Of the JSON of a message: an error that a whole report of a command's process is quoted in has less."""
_MAX_WORDS: Final = 1 << 16
_MAX_STRAYS: Final = 1 << 17
"""Messages between two answers that somebody waits for: parts for one who has gone away, answers to a machine's
ancestor."""
_LEAST_PART_BYTES: Final = 256
"""Parts of a file or a tar have as many bytes or more, one with the next."""
_SPARE_PARTS: Final = 16
_HOLD: Final[frames.Head] = {"op": "hold"}
GO_ON: Final[frames.Head] = {"op": "go on"}
"""What an agent waits for that has been asked to hold."""


class Parts:
    """What comes before an answer, so many bytes at most: files, each of parts in their order."""

    def __init__(self, most: int, num_files: int = 1) -> None:
        """Expect so many bytes of so many files."""
        self.most = self._left = most
        self._num_files = num_files
        self._parts_left = num_files + most // _LEAST_PART_BYTES + _SPARE_PARTS
        self.found: dict[int, bytearray] = {}

    def add(self, head: frames.Head, blobs: list[bytes]) -> None:
        """Keep one.

        Raises:
            ValueError: there are too many bytes or parts, or it belongs to no file that was asked for.
        """
        (data,) = blobs
        self._left -= len(data)
        self._parts_left -= 1
        if self._left < 0 or self._parts_left < 0:
            raise ValueError("more than was asked for")
        index = head.get("index", 0)
        if type(index) is not int or not 0 <= index < self._num_files:
            raise ValueError("a part of nothing that was asked for")
        self.found.setdefault(index, bytearray()).extend(data)


class AgentLink:
    """One end of a control socket. The agent is not trusted: what makes no sense is reported to `on_nonsense`."""

    def __init__(
        self,
        writer: asyncio.StreamWriter,
        reader: asyncio.StreamReader,
        on_nonsense: Callable[[], None],
        max_bytes: int,
        first: int,
    ) -> None:
        """See `open`."""
        self._max_bytes = max_bytes
        self._writer = writer
        self._waiting: dict[int, asyncio.Future[Answer]] = {}
        self._parts: dict[int, Parts] = {}
        self._next = first
        self._strays = 0
        self._quiet = asyncio.Lock()
        """Held by whoever has it quiet."""
        self._on_nonsense = on_nonsense
        self.last_words = ""
        self._end: SandboxGoneError | None = None
        self.hello = self._expect()
        self._listening = asyncio.create_task(self._listen(reader))

    @classmethod
    async def open(
        cls,
        control: socket.socket,
        on_nonsense: Callable[[], None],
        *,
        max_bytes: int = frames.MAX_BYTES,
        first: int = 0,
    ) -> Self:
        """Listen.

        Args:
            control: the socket; taken over.
            on_nonsense: called once, when the agent has said what makes no sense or has ended; nobody listens any more.
            max_bytes: a longer message is nonsense.
            first: number of the first question; of an agent that comes up 0, by which it says `hello` unasked.
        """
        reader, writer = await asyncio.open_unix_connection(sock=control, limit=1 << 20)
        return cls(writer, reader, on_nonsense, max_bytes, first)

    def tell(self, head: frames.Head, *blobs: bytes) -> None:
        """Say something that has no answer."""
        self._writer.write(frames.pack(head, *blobs))

    async def ask(self, head: frames.Head, *blobs: bytes, parts: Parts | None = None) -> Answer:
        """Ask, and wait for the answer; what comes before it is added to `parts`.

        Raises:
            SandboxGoneError: the container is gone before the answer came.
        """
        async with self._quiet:
            pass  # nobody has it quiet
        return await self._ask(head, *blobs, parts=parts)

    @contextlib.asynccontextmanager
    async def quiet(self) -> AsyncGenerator[None]:
        """Nothing is under way in either direction until the end of this: the agent has heard all that was said before,
        and has said what it was about to.

        Raises:
            SandboxGoneError: the container is gone before that.
        """
        async with self._quiet:
            try:
                await self._ask(_HOLD)
                yield
            finally:  # who goes away before the answer too: the agent would take the next question for this
                self.tell(GO_ON)

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

    async def _ask(self, head: frames.Head, *blobs: bytes, parts: Parts | None = None) -> Answer:
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
                self._hear(*frames.unpack(await reader.readexactly(size), max_head_bytes=_MAX_HEAD_BYTES))
                await asyncio.sleep(0)  # what has come already is read without a pause, and there may always be more
        except (asyncio.IncompleteReadError, ConnectionError, ValueError, KeyError, TypeError):
            self._on_nonsense()

    def _hear(self, head: frames.Head, blobs: list[bytes]) -> None:
        """Give a message to whoever waits for it.

        Raises:
            ValueError, KeyError, TypeError: it makes no sense.
        """
        number = head["id"]
        if type(number) is not int:
            raise ValueError("a message of no question")
        self._strays += 1
        if self._strays > _MAX_STRAYS:
            raise ValueError("too much that nobody waits for")
        if number < 0:
            self.last_words = str(head["last_words"])[:_MAX_WORDS]
        elif head.get("more"):
            if (parts := self._parts.get(number)) is not None:
                parts.add(head, blobs)
                self._strays = 0
        elif (future := self._waiting.pop(number, None)) is not None and not future.done():
            future.set_result((head, blobs))
            self._strays = 0
