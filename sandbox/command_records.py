"""Records of a command log, their payload bytes, and what a sequence of them means.

Frame types of the log and their payloads (msgpack arrays; frames and checksums are `codec.py`'s):

    OPENED   a sandbox is held: attempt, its id, its instance, what it is made of
    PUT      files that are written into it before the first command
    START    a command is about to be sent: key, digest of the request, the request
    END      its result; with this record durable it may be handed out
    GET      files that were taken out of it, at the end
    UNKNOWN  whether a command ran cannot be known: the last record but CLOSED
    FAILED   the platform, or its data, failed the trajectory between commands: likewise
    CLOSED   the last record

One command at a time, so the log orders everything that happened in the sandbox. `CommandHistory` takes records in
order, says what may come next, and refuses a sequence that no writer writes.

Here: frozen records, pure encode and decode, the state machine. Not here: files (`command_log.py`), sandboxes
(`session.py`).
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any, Final, cast

import msgspec

from rollforward.sandbox.blobs import Stored
from rollforward.sandbox.errors import CommandDivergenceError, CommandLogDamagedError, GoneCause
from rollforward.sandbox.toolset import tool_source
from rollforward.sandbox.types import Call, CallStatus, SandboxSpec

COMMAND_LOG_KIND: Final = "CMND"
"""Kind of a command log in its header."""

FIRST_SEQ: Final = 1
"""Sequence number of a log's first record; 0 is the position of a log that has none."""

_DIGEST_BYTES: Final = 16
_KEY = re.compile(r"t(0|[1-9][0-9]{0,8})c(0|[1-9][0-9]{0,8})")


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


class OpenedRecord(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A sandbox was made, or found alive by a successor."""

    epoch: int
    """How often a writer got hold of a sandbox, this time included: from 1."""
    attempt: int
    """Number of the sandbox among those of the trajectory, from 0; another one only where no command was sent yet."""
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
    """Path and content of those that were there, ordered by path."""
    problem: str = ""
    """Why there are none, by the doing of what ran in the sandbox; empty where nothing was wrong."""


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


CommandRecord = (
    OpenedRecord | PutRecord | StartRecord | EndRecord | GetRecord | UnknownRecord | FailedRecord | ClosedRecord
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
}
_TYPES: Final = {cls: record_type for record_type, cls in _CLASSES.items()}
_ENCODER: Final = msgspec.msgpack.Encoder(order="deterministic")
_DECODERS: Final = {kind: msgspec.msgpack.Decoder(cls) for kind, cls in _CLASSES.items()}


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


class LoggedCommand(msgspec.Struct, frozen=True, kw_only=True):
    """A command that the log knows."""

    seq: int
    """Sequence number of its START."""
    start: StartRecord
    """What was asked."""
    end: EndRecord | None = None
    """How it ended; None where that is not known."""
    end_seq: int = 0
    """Sequence number of the END; 0 where there is none."""


class CommandHistory:
    """What a log says so far. States, by what may come next:

    nothing -> held (OPENED) -> running (START) -> held (END) ... -> collected (GET) -> closed (CLOSED)
    any but closed -> failed (UNKNOWN, FAILED) -> closed

    Not thread-safe; `apply` alone changes it.
    """

    def __init__(self) -> None:
        self.next_seq = FIRST_SEQ
        self.opened: OpenedRecord | None = None
        self.put: PutRecord | None = None
        self.commands: dict[str, LoggedCommand] = {}
        self.running: LoggedCommand | None = None
        self.collected: GetRecord | None = None
        self.collected_seq = 0
        self.gone: GoneCause | None = None
        self.failure = ""
        self.is_unknown = self.is_data_fault = False
        self.is_closed = False

    @property
    def position(self) -> int:
        """Sequence number of the last record, 0 where there is none."""
        return self.next_seq - 1

    @property
    def is_going_on(self) -> bool:
        """Whether there is a sandbox that may be needed again."""
        return self.opened is not None and self.gone is None and not self.failure and not self.is_closed

    def check_next(self, key: str) -> None:
        """Checks that a command with a new key may come next.

        Raises:
            CommandDivergenceError: the log says that the trajectory went another way.

        """
        place = _place(key)
        last = next(reversed(self.commands.values()), None)
        if place is None:
            raise CommandDivergenceError(f"command key is {key!r}; it must read t<turn>c<index>, such as t0c0")
        if self.running is not None:
            raise CommandDivergenceError(
                f"{key} is asked for while {self.running.start.key} has no result: nobody can have gone on from there"
            )
        if last is not None and place <= (_place(last.start.key) or place):
            raise CommandDivergenceError(f"{key} is asked for and is not in the log, which goes on to {last.start.key}")
        if self.collected is not None:
            raise CommandDivergenceError(f"{key} is asked for after the files were collected, which ends a trajectory")

    def check(self, seq: int, record: CommandRecord) -> None:
        """Checks that a record may come next.

        Raises:
            CommandLogDamagedError: no writer writes it here.

        """
        fault = self._fault(seq, record)
        if fault:
            kind = _TYPES[type(record)].name
            raise CommandLogDamagedError(f"record {seq} ({kind}) cannot stand where it does: {fault}")

    def apply(self, seq: int, record: CommandRecord) -> None:
        """Takes the next record.

        Raises:
            CommandLogDamagedError: no writer writes it here; the state is as before.

        """
        self.check(seq, record)
        match record:
            case OpenedRecord():
                self.opened = record
            case PutRecord():
                self.put = record
            case StartRecord():
                self.running = self.commands[record.key] = LoggedCommand(seq=seq, start=record)
            case EndRecord():
                assert self.running is not None, "checked"
                ended = msgspec.structs.replace(self.running, end=record, end_seq=seq)
                self.commands[ended.start.key] = ended
                self.running, self.gone = None, record.gone
            case GetRecord():
                self.collected, self.collected_seq = record, seq
            case UnknownRecord() | FailedRecord():
                self.failure = record.detail or "no reason was recorded"
                self.is_unknown = isinstance(record, UnknownRecord)
                self.is_data_fault = isinstance(record, FailedRecord) and record.is_data_fault
            case ClosedRecord():
                self.is_closed = True
        self.next_seq = seq + 1

    def _fault(self, seq: int, record: CommandRecord) -> str:
        """Why the record may not come next; empty where it may."""
        if seq != self.next_seq:
            return f"the record before it is {self.position}"
        if self.is_closed:
            return "the log was closed before it"
        if isinstance(record, ClosedRecord):
            return ""
        if self.failure:
            return "the trajectory had failed before it"
        if isinstance(record, FailedRecord):
            return ""
        if isinstance(record, OpenedRecord):
            return self._opened_fault(record)
        if self.opened is None:
            return "no sandbox was opened before it"
        match record:
            case PutRecord():
                is_late = self.put or self.commands or self.collected
                return "files were put before, or the sandbox was used" if is_late else ""
            case StartRecord():
                return self._start_fault(record)
            case EndRecord() | UnknownRecord():
                running = None if self.running is None else self.running.seq
                if record.start != running:
                    return f"it ends command {record.start}, and what runs is {running or 'none'}"
                return "it ends as infra" if isinstance(record, EndRecord) and record.status is CallStatus.INFRA else ""
            case GetRecord():
                return "a command runs, or files were collected before" if self.running or self.collected else ""

    def _opened_fault(self, record: OpenedRecord) -> str:
        before = self.opened
        if self.collected is not None or self.gone is not None:
            return "the sandbox was needed no more"
        if record.epoch != (1 if before is None else before.epoch + 1):
            return f"its epoch is {record.epoch}"
        if before is None:
            return ""
        if (before.spec_digest, before.files_digest) != (record.spec_digest, record.files_digest):
            return "it is made of something else"
        is_same = (before.attempt, before.sandbox_id, before.instance) == (
            record.attempt,
            record.sandbox_id,
            record.instance,
        )
        if self.commands and not is_same:
            return "it is another sandbox than the one in which commands ran"
        return "its attempt is smaller" if record.attempt < before.attempt else ""

    def _start_fault(self, record: StartRecord) -> str:
        if record.key in self.commands:
            return f"{record.key} was sent before"
        try:
            self.check_next(record.key)
        except CommandDivergenceError as error:
            return str(error)
        return ""


def _place(key: str) -> tuple[int, int] | None:
    match = _KEY.fullmatch(key)
    return (int(match[1]), int(match[2])) if match else None
