"""Records of a command log and their payload bytes.

Frame types of the log and their payloads (msgpack arrays; frames and checksums are `codec.py`'s):

    OPENED   a sandbox is held: attempt, its id, its instance, what it is made of
    PUT      files that are written into it before the first command
    START    a command is about to be sent: key, digest of the request, the request
    END      its result; with this record durable it may be handed out
    GET      files that were taken out of it, at the end
    UNKNOWN  whether a command ran cannot be known: the last record but CLOSED
    FAILED   the platform, or its data, failed the trajectory between commands: likewise
    CLOSED   the last record
    SNAPSHOT its sandbox's state at this place of the log is kept: what one that is lost can be restored to

Here: frozen records, pure encode and decode. Not here: what a sequence of them means (`command_history.py`), files
(`command_log.py`), sandboxes (`session.py`).
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any, Final, cast

import msgspec

from rollforward.sandbox.blobs import Stored
from rollforward.sandbox.errors import CommandLogDamagedError, GoneCause
from rollforward.sandbox.toolset import tool_source
from rollforward.sandbox.types import Call, CallStatus, SandboxSpec, SnapshotKind

COMMAND_LOG_KIND: Final = "CMND"
"""Kind of a command log in its header."""

FIRST_SEQ: Final = 1
"""Sequence number of a log's first record; 0 is the position of a log that has none."""

_DIGEST_BYTES: Final = 16


class RecordType(IntEnum):
    """Frame types of the command log. 0 is never used: zeros are not a frame."""

    OPENED = 1
    PUT = 2
    START = 3
    END = 4
    GET = 5
    UNKNOWN = 6
    FAILED = 7
    CLOSED = 8
    SNAPSHOT = 9


class OpenedRecord(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A sandbox was made, or found alive by a successor."""

    epoch: int
    """How often a writer got hold of a sandbox, this time included: from 1."""
    attempt: int
    """Number of the sandbox among those of the trajectory, from 0; another one only where no command was sent yet, or
    where it was restored."""
    sandbox_id: str
    """Its identity."""
    instance: str
    """Its incarnation: another one under the same identity has other files."""
    spec: SandboxSpec
    """What it is made of."""
    spec_digest: bytes
    """`spec_digest` of it: with the text of the tools, without labels."""
    files_digest: bytes
    """`files_digest` of what is written into it first."""
    restored: int | None = None
    """Where it took the place of one in which commands had run: sequence number of the SNAPSHOT that it began with, or
    0 where it began like the first. Commands after that are done again in it before anything else."""


class PutRecord(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Files that a new sandbox gets before the first command. Written once, before the first upload."""

    files: tuple[tuple[bytes, Stored], ...]
    """Path, UTF-8 with surrogates passed, and content; ordered by path."""


class StartRecord(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A command will be sent; durable before that."""

    key: str
    """Its key in the sandbox, `t{turn}c{index}`; keys grow."""
    digest: bytes
    """`EncodedCall.digest`: the same key with another one is another history."""
    request: bytes
    """`EncodedCall.request`."""


class EndRecord(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A command ended."""

    start: int
    """Sequence number of its START."""
    status: CallStatus
    """`CallResult.status`; never INFRA."""
    text: Stored
    """`CallResult.text`, UTF-8 with surrogates passed."""
    truncated: bool
    """As in CallResult."""
    total_bytes: int
    """As in CallResult."""
    seconds: float
    """As in CallResult."""
    detail: str
    """As in CallResult."""
    gone: GoneCause | None = None
    """Why the sandbox is gone after this command, by the command's own doing; None where it lives on."""


class GetRecord(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Files were taken out; no command comes after it."""

    digest: bytes
    """`paths_digest` of what was asked for."""
    paths: tuple[bytes, ...]
    """Which paths were asked for, UTF-8 with surrogates passed."""
    max_bytes: int
    """How many bytes at most."""
    files: tuple[tuple[bytes, Stored], ...]
    """Path and content of those that were there and could be taken, ordered by path."""
    problem: str = ""
    """Why some could not, or none, by the doing of what ran in the sandbox; empty where nothing was wrong."""


class UnknownRecord(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The sandbox was lost with a command of which nobody knows whether it ran."""

    start: int
    """Sequence number of its START."""
    detail: str
    """What happened."""


class FailedRecord(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The trajectory failed, and not by its own doing; nothing runs any more."""

    detail: str
    """What happened."""
    is_data_fault: bool = False
    """Whether what it begins with is at fault, and not the platform."""


class ClosedRecord(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The trajectory needs its sandbox no more."""


class SnapshotRecord(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The sandbox's state between two commands, durable before this record; or, as the first record, the state that the
    trajectory begins with.
    """

    kind: SnapshotKind
    """As in Snapshot."""
    image: str
    """As in Snapshot."""
    data: Stored
    """As in Snapshot; in the trajectory's own snapshots."""
    is_shared: bool = False
    """Whether it lies in the step's prepared states instead, for several trajectories."""


CommandRecord = (
    OpenedRecord
    | PutRecord
    | StartRecord
    | EndRecord
    | GetRecord
    | UnknownRecord
    | FailedRecord
    | ClosedRecord
    | SnapshotRecord
)

_CLASSES: Final[dict[RecordType, type[msgspec.Struct]]] = {
    RecordType.OPENED: OpenedRecord,
    RecordType.PUT: PutRecord,
    RecordType.START: StartRecord,
    RecordType.END: EndRecord,
    RecordType.GET: GetRecord,
    RecordType.UNKNOWN: UnknownRecord,
    RecordType.FAILED: FailedRecord,
    RecordType.CLOSED: ClosedRecord,
    RecordType.SNAPSHOT: SnapshotRecord,
}
_TYPES: Final = {cls: record_type for record_type, cls in _CLASSES.items()}
_ENCODER: Final = msgspec.msgpack.Encoder(order="deterministic")
_DECODERS: Final = {kind: msgspec.msgpack.Decoder(cls) for kind, cls in _CLASSES.items()}


def record_name(record: CommandRecord) -> str:
    """Returns what a record is called in texts for people, such as START."""
    return _TYPES[type(record)].name


def encode_record(record: CommandRecord) -> tuple[RecordType, bytes]:
    """Returns the record's frame type and payload."""
    return _TYPES[type(record)], _ENCODER.encode(record)


def decode_record(frame_type: int, flags: int, payload: bytes) -> CommandRecord:
    """Returns the record that a frame holds.

    Raises:
        CommandLogDamagedError: a type or flag that this code does not know, or bytes that are no such record.

    Invariants: raises nothing else, whatever the bytes are.

    """
    try:
        kind = RecordType(frame_type)
    except ValueError:
        kind = None
    if kind is None or flags:
        raise CommandLogDamagedError(f"a record has type {frame_type}, flags {flags}; this version knows no such thing")
    try:
        record = cast("CommandRecord", _DECODERS[kind].decode(payload))
        for path, _ in record.files if isinstance(record, PutRecord | GetRecord) else ():
            path_text(path)
        return record
    except (msgspec.MsgspecError, UnicodeDecodeError, ValueError, RecursionError, OverflowError) as error:
        raise CommandLogDamagedError(f"a record of type {kind.name} does not decode: {error}") from None


class EncodedCall(msgspec.Struct, frozen=True):
    """A call as the log knows it."""

    request: bytes
    """Tool and arguments as a JSON array, ASCII."""
    digest: bytes
    """BLAKE2b-128 of it."""


def encode_call(call: Call) -> EncodedCall:
    """Returns a call's bytes.

    Raises:
        ValueError: its arguments are no JSON, or are nested too deeply.

    """
    try:
        # Not msgspec, which refuses integers beyond 64 bits and half characters. Keys stay in their order: a tool may
        # show it.
        request = json.dumps([call.tool, call.arguments], separators=(",", ":")).encode("ascii")
    except (TypeError, ValueError, RecursionError):
        raise ValueError("the arguments are no JSON") from None
    return EncodedCall(request, _digest(request))


def decode_call(start: StartRecord) -> Call:
    """Returns the call that a START records.

    Raises:
        CommandLogDamagedError: it records none.

    """
    try:
        tool, arguments = msgspec.convert(json.loads(start.request), tuple[str, dict[str, Any]])
    except (ValueError, RecursionError) as error:
        raise CommandLogDamagedError(f"request of {start.key} is no call: {error}") from None
    return Call(tool=tool, arguments=arguments)


def spec_digest(spec: SandboxSpec) -> bytes:
    """Returns the digest of what a sandbox is made of: image, limits, tools and their text, without labels.

    Raises:
        ToolError: the file of a tool cannot be read.

    """
    bare = msgspec.structs.replace(spec, labels={})
    return _digest(_ENCODER.encode(bare), *(tool_source(tool).encode() for tool in spec.tools))


def files_digest(files: Mapping[str, bytes]) -> bytes:
    """Returns the digest of paths and contents."""
    return _digest(*(part for path in sorted(files) for part in (path_bytes(path), files[path])))


def paths_digest(paths: Sequence[str], max_bytes: int) -> bytes:
    """Returns the digest of a question for files."""
    return _digest(str(max_bytes).encode(), *map(path_bytes, paths))


def path_bytes(path: str) -> bytes:
    """Returns a path as records hold it."""
    return path.encode("utf-8", "surrogatepass")


def path_text(path: bytes) -> str:
    """Returns the path that a record holds."""
    return path.decode("utf-8", "surrogatepass")


def _digest(*parts: bytes) -> bytes:
    state = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for part in parts:
        state.update(len(part).to_bytes(8, "little"))
        state.update(part)
    return state.digest()
