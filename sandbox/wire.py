"""What a client and a supervisor say to each other: frames, questions, answers, and errors that keep their type.

    frame     length u32, little-endian | that many bytes
    question  frame of msgpack [number, operation, payload]
    answer    frame of msgpack [number, answer];   answer = 0x00 | result   or   0x01 | Refusal

Payloads and results are opaque to whoever carries them (a socket, a Ray actor). Texts that a model wrote may hold half
characters, and numbers more than 64 bits, which msgpack has not: arguments travel as JSON in ASCII, command lines and
paths as bytes, from which the same text is made again.

They may be long: a snapshot of a machine has hundreds of MiB. So a payload is encoded once, its frame is written and
read in parts, and what is read is decoded where it lies.
"""

import asyncio
import contextlib
import json
import os
import re
import struct
from collections.abc import Generator, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any, Final, TypeAlias, TypeVar

import msgspec

from rollforward.sandbox import errors, types
from rollforward.sandbox.config import ContainerConfig
from rollforward.sandbox.errors import (
    GoneCause,
    SandboxConnectionError,
    SandboxError,
    SandboxGoneError,
    SandboxIdentityError,
)
from rollforward.sandbox.types import Call, CallResult, ExecRequest, ExecResult, SandboxSpec

MAX_FRAME_BYTES: Final = 1 << 30
"""Longest frame; a length beyond it is no frame of ours."""

PART_BYTES: Final = 1 << 20
"""A frame is written, and read, in parts of so many bytes."""

READY: Final = b"ready"
"""What a supervisor says to whoever started it when it answers."""
TAKEN: Final = b"taken"
"""... when another one has its home. Anything else that it says is a refusal."""

_IDENTITY: Final = re.compile(r"[a-z0-9-]{1,64}")
_LENGTH: Final = struct.Struct("<I")
_BYTES: Final = struct.Struct(">BI")
_BYTES_FOLLOW: Final = 0xC6
"""Of msgpack, and so many (32 bits)."""
_NO_BYTES: Final = msgspec.msgpack.encode(b"")
_RESULT, _REFUSAL = b"\0", b"\1"

Data: TypeAlias = bytes | bytearray

_T = TypeVar("_T")
_ENCODER: Final = msgspec.msgpack.Encoder()


class Operation(StrEnum):
    """What can be asked of a supervisor."""

    CONFIGURE = "configure"
    CREATE = "create"
    ADOPT = "adopt"
    RENEW = "renew"
    LIST = "list"
    STATS = "stats"
    EXEC = "exec"
    CALL = "call"
    UPLOAD = "upload"
    DOWNLOAD = "download"
    SNAPSHOT = "snapshot"
    PAUSE = "pause"
    RESUME = "resume"
    FORK = "fork"
    CLOSE = "close"


class Configure(msgspec.Struct, frozen=True, kw_only=True):
    """Take over settings; `images` of a live supervisor stay what they are."""

    config: ContainerConfig


class Create(msgspec.Struct, frozen=True, kw_only=True):
    """Make a sandbox, or say what there is under this identity."""

    sandbox_id: str
    owner: str
    spec: SandboxSpec
    sources: dict[str, str]
    """Python source of each tool of the spec: its file lies where the client is."""
    snapshot: types.Snapshot | None
    timeout_s: float


class Placed(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to Create and Adopt."""

    instance: str
    spec: SandboxSpec
    load: int
    """Sandboxes held and waited for there, for the client's next choice."""


class Adopt(msgspec.Struct, frozen=True, kw_only=True):
    """Become the owner of what there is."""

    sandbox_id: str
    owner: str


class Renew(msgspec.Struct, frozen=True, kw_only=True):
    """A sign of life. The answer is a list of those that are not there."""

    held: dict[str, str]
    """sandbox id -> instance."""


class Which(msgspec.Struct, frozen=True, kw_only=True):
    """One incarnation of a sandbox."""

    sandbox_id: str
    instance: str


class Exec(msgspec.Struct, frozen=True, kw_only=True):
    """Run a command; its texts as bytes."""

    which: Which
    key: str | None
    argv: tuple[bytes, ...]
    stdin: bytes
    env: dict[bytes, bytes]
    cwd: bytes
    wall_s: float | None

    @classmethod
    def of(cls, which: Which, request: ExecRequest, key: str | None) -> "Exec":
        """A request on its way."""
        return cls(
            which=which,
            key=key,
            argv=tuple(_bytes(argument) for argument in request.argv),
            stdin=request.stdin,
            env={_bytes(name): _bytes(value) for name, value in request.env.items()},
            cwd=_bytes(request.cwd),
            wall_s=request.wall_s,
        )

    def request(self) -> ExecRequest:
        """The request as it was."""
        return ExecRequest(
            argv=tuple(_text(argument) for argument in self.argv),
            stdin=self.stdin,
            env={_text(name): _text(value) for name, value in self.env.items()},
            cwd=_text(self.cwd),
            wall_s=self.wall_s,
        )


class Invoke(msgspec.Struct, frozen=True, kw_only=True):
    """Call a tool; its arguments as JSON in ASCII."""

    which: Which
    key: str | None
    tool: bytes
    arguments: bytes

    @classmethod
    def of(cls, which: Which, call: Call, key: str | None) -> "Invoke":
        """A call on its way.

        Raises:
            TypeError, ValueError, RecursionError: the arguments are no JSON.
        """
        arguments = json.dumps(call.arguments).encode("ascii")
        return cls(which=which, key=key, tool=_bytes(call.tool), arguments=arguments)

    def call(self) -> Call:
        """The call as it was."""
        return Call(tool=_text(self.tool), arguments=json.loads(self.arguments))


class Upload(msgspec.Struct, frozen=True, kw_only=True):
    """Write files."""

    which: Which
    files: dict[bytes, bytes]


class Download(msgspec.Struct, frozen=True, kw_only=True):
    """Read files."""

    which: Which
    paths: tuple[bytes, ...]
    max_bytes: int


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """Take a snapshot, as full as the substrate can, or of files alone."""

    which: Which
    max_bytes: int
    files_only: bool = False


class Fork(msgspec.Struct, frozen=True, kw_only=True):
    """Make a sandbox that begins as another one of this supervisor is now. The answer is `Placed`."""

    which: Which
    sandbox_id: str
    owner: str
    max_bytes: int
    timeout_s: float


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """An error on its way."""

    kind: str
    message: str
    cause: GoneCause | None = None


def check_identity(sandbox_id: str) -> None:
    """Refuse what cannot name a sandbox.

    Raises:
        SandboxIdentityError: it has other characters, or none, or too many.
    """
    if _IDENTITY.fullmatch(sandbox_id) is None:
        raise SandboxIdentityError(
            f"a sandbox is called {sandbox_id[:80]!r}; its identity has 1 to 64 of a-z, 0-9 and -. Choose another"
        )


def encode(value: object) -> bytes:
    """Bytes of a payload or a result. Half characters in texts for people become `?`."""
    return msgspec.msgpack.encode(_whole(value))


def decode(data: Data | memoryview, kind: type[_T]) -> _T:
    """A payload or a result.

    Raises:
        SandboxConnectionError: the bytes are none; who sent them is of another version.
    """
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise SandboxConnectionError(
            f"a message to or from a supervisor is no {getattr(kind, '__name__', kind)} ({error}); client and"
            " supervisor are of different versions. End the older one; its sandboxes end with it"
        ) from None


def answer(result: object) -> bytearray:
    """An answer that holds a result."""
    return _after(_RESULT, result)


def refusal(error: Exception) -> bytearray:
    """An answer that holds an error, as the nearest of its kinds that everybody knows; what is no SandboxError becomes
    one of the connection."""
    known = (kind.__name__ for kind in type(error).__mro__ if getattr(errors, kind.__name__, None) is kind)
    kind = next(known, SandboxConnectionError.__name__)
    message = (
        str(error) if isinstance(error, SandboxError) else f"the supervisor failed: {type(error).__name__}: {error}"
    )
    cause = error.cause if isinstance(error, SandboxGoneError) else None
    return _after(_REFUSAL, Refusal(kind=kind, message=_shown(message), cause=cause))


def result(data: Data, kind: type[_T]) -> _T:
    """The result that an answer holds.

    Raises:
        SandboxError: the one that it holds instead, with its type.
    """
    if data[:1] == _RESULT:
        return decode(memoryview(data)[1:], kind)
    refused = decode(memoryview(data)[1:], Refusal)
    error = getattr(errors, refused.kind, SandboxConnectionError)
    if error is SandboxGoneError:
        raise SandboxGoneError(refused.message, refused.cause or GoneCause.LOST)
    raise error(refused.message)


def encode_paths(paths: Sequence[str]) -> tuple[bytes, ...]:
    """Paths as bytes."""
    return tuple(_bytes(path) for path in paths)


def encode_files(files: Mapping[str, bytes]) -> dict[bytes, bytes]:
    """Files by path."""
    return {_bytes(path): bytes(data) for path, data in files.items()}


def decode_paths(paths: Sequence[bytes]) -> tuple[str, ...]:
    """The paths as they were."""
    return tuple(_text(path) for path in paths)


def decode_files(files: Mapping[bytes, bytes]) -> dict[str, bytes]:
    """The files as they were."""
    return {_text(path): data for path, data in files.items()}


class FrameWriter:
    """Writes frames, one after the other. A frame that was begun is written to its end, whoever goes away meanwhile."""

    def __init__(self, stream: asyncio.StreamWriter) -> None:
        """Take a stream over."""
        self._stream = stream
        self._turn = asyncio.Lock()
        self._writing: set[asyncio.Task[None]] = set()

    async def write(self, *named: Any, data: Data) -> None:
        """Write a frame of msgpack: these values, and the data last.

        Raises:
            SandboxConnectionError: it would be longer than MAX_FRAME_BYTES.
            OSError: the peer is gone.
        """
        head = msgspec.msgpack.encode((*named, b""))[: -len(_NO_BYTES)] + _BYTES.pack(_BYTES_FOLLOW, len(data))
        if (size := len(head) + len(data)) > MAX_FRAME_BYTES:
            raise SandboxConnectionError(
                f"a message of {size} bytes; one has at most {MAX_FRAME_BYTES}. Ask for less at once"
            )
        writing = asyncio.create_task(self._write(_LENGTH.pack(size) + head, data))
        self._writing.add(writing)
        writing.add_done_callback(self._written)
        await asyncio.wait([writing])
        if writing.cancelled():  # by `close`: whoever waits here was not
            raise ConnectionResetError("the connection was closed meanwhile")
        writing.result()

    def _written(self, writing: asyncio.Task[None]) -> None:
        self._writing.discard(writing)
        if not writing.cancelled():
            writing.exception()  # looked at, where nobody waits for it any more

    def close(self) -> None:
        """Write no more, and let the stream go."""
        for writing in self._writing:
            writing.cancel()
        self._stream.close()

    async def _write(self, head: bytes, data: Data) -> None:
        async with self._turn:
            with memoryview(data) as view:
                # In parts: the stream keeps a copy of what the kernel does not take at once.
                self._stream.write(head + view[:PART_BYTES])
                await self._stream.drain()
                for start in range(PART_BYTES, len(data), PART_BYTES):
                    self._stream.write(view[start : start + PART_BYTES])
                    await self._stream.drain()


async def read_frame(reader: asyncio.StreamReader, kind: Any) -> tuple[list[Any], bytearray]:
    """The next frame: the values before its data, and that.

    Args:
        reader: where it comes from.
        kind: of what it holds; a tuple whose last one is a memoryview.

    Raises:
        EOFError: there is none, it is cut short, or the peer speaks something else.
        SandboxConnectionError: it is of another kind.
        OSError: the kernel's.
    """
    size = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))[0]
    if size > MAX_FRAME_BYTES:
        raise EOFError(f"a frame of {size} bytes")
    data = bytearray()  # grows as it comes: a peer that only says that there is much gets no memory for it
    while len(data) < size:
        part = await reader.read(min(size - len(data), PART_BYTES))
        if not part:
            raise EOFError(f"a frame of {size} bytes ends after {len(data)}")
        data += part
    *named, last = decode(data, kind)
    begin = len(data) - len(last)
    last.release()
    del data[:begin]  # which moves no byte
    return named, data


def _after(begin: bytes, value: object) -> bytearray:
    """These bytes, and then those of a value."""
    data = bytearray(begin)
    _ENCODER.encode_into(_whole(value), data, len(begin))
    return data


def _whole(value: object) -> object:
    if isinstance(value, CallResult):
        return msgspec.structs.replace(value, text=_shown(value.text), detail=_shown(value.detail))
    if isinstance(value, ExecResult):
        return msgspec.structs.replace(value, detail=_shown(value.detail))
    return value


def _shown(text: str) -> str:
    return text.encode("utf-8", "replace").decode()


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _text(data: bytes) -> str:
    return data.decode("utf-8", "surrogatepass")


@contextlib.contextmanager
def short_path(path: Path) -> Generator[str]:
    """A name of the socket that fits a socket address (107 bytes), however long its path is.

    Raises:
        OSError: the directory cannot be opened.
    """
    descriptor = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{descriptor}/{path.name}"
    finally:
        os.close(descriptor)
