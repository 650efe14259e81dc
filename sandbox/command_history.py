"""What the records of a command log say in their order.

One command at a time, so the log orders everything that happened in the sandbox. `CommandHistory` takes records in
order, says what may come next, and refuses a sequence that no writer writes.

Not here: the records (`command_records.py`), files (`command_log.py`).
"""

import re

import msgspec

from rollforward.sandbox.command_records import (
    FIRST_SEQ,
    ClosedRecord,
    CommandRecord,
    EndRecord,
    FailedRecord,
    GetRecord,
    OpenedRecord,
    PutRecord,
    SnapshotRecord,
    StartRecord,
    UnknownRecord,
    record_name,
)
from rollforward.sandbox.errors import CommandDivergenceError, CommandLogDamagedError, GoneCause
from rollforward.sandbox.types import CallStatus

_KEY = re.compile(r"t(0|[1-9][0-9]{0,8})c(0|[1-9][0-9]{0,8})")


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

    nothing (-> begun, SNAPSHOT) -> held (OPENED) -> running (START) -> held (END) ... -> collected (GET) -> closed
    held -> held (SNAPSHOT); held or running -> the same (OPENED, by a successor or in a restored sandbox)
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
        self.begin: SnapshotRecord | None = None
        self.snapshot: SnapshotRecord | None = None
        self.snapshot_seq = 0
        self.redo: tuple[LoggedCommand, ...] = ()
        self.settled_attempt = 0

    @property
    def position(self) -> int:
        """Sequence number of the last record, 0 where there is none."""
        return self.next_seq - 1

    @property
    def is_going_on(self) -> bool:
        """Whether there is a sandbox that may be needed again."""
        return self.opened is not None and self.gone is None and not self.failure and not self.is_closed

    @property
    def is_as_kept(self) -> bool:
        """Whether no command was sent since the last SNAPSHOT, or none at all."""
        last = next(reversed(self.commands.values()), None)
        return last is None or last.seq < self.snapshot_seq

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
            kind = record_name(record)
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
                if record.restored is not None:
                    ended = [one for one in self.commands.values() if one.end is not None]
                    self.redo = tuple(one for one in ended if one.seq > record.restored)
            case PutRecord():
                self.put = record
            case SnapshotRecord():
                if self.opened is None:
                    self.begin = record
                self.snapshot, self.snapshot_seq = record, seq
                self._settle()
            case StartRecord():
                self.running = self.commands[record.key] = LoggedCommand(seq=seq, start=record)
                self._settle()
            case EndRecord():
                assert self.running is not None, "checked"
                ended = msgspec.structs.replace(self.running, end=record, end_seq=seq)
                self.commands[ended.start.key] = ended
                self.running, self.gone = None, record.gone
                self._settle()
            case GetRecord():
                self.collected, self.collected_seq = record, seq
                self._settle()
            case UnknownRecord() | FailedRecord():
                self.failure = record.detail or "no reason was recorded"
                self.is_unknown = isinstance(record, UnknownRecord)
                self.is_data_fault = isinstance(record, FailedRecord) and record.is_data_fault
            case ClosedRecord():
                self.is_closed = True
        self.next_seq = seq + 1

    def _settle(self) -> None:
        """The sandbox that is held has all that the log says in it, and got somewhere."""
        self.redo = ()
        self.settled_attempt = 0 if self.opened is None else self.opened.attempt

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
        if isinstance(record, SnapshotRecord) and seq == FIRST_SEQ:
            return ""
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
            case GetRecord() | SnapshotRecord():
                return "a command runs, or files were collected before" if self.running or self.collected else ""

    def _opened_fault(self, record: OpenedRecord) -> str:
        before = self.opened
        if self.collected is not None or self.gone is not None:
            return "the sandbox was needed no more"
        if record.epoch != (1 if before is None else before.epoch + 1):
            return f"its epoch is {record.epoch}"
        if record.restored is not None and not self.commands:
            return "no command had run, and so nothing was restored"
        if before is None:
            return ""
        if (before.spec_digest, before.files_digest) != (record.spec_digest, record.files_digest):
            return "it is made of something else"
        is_same = (before.attempt, before.sandbox_id, before.instance) == (
            record.attempt,
            record.sandbox_id,
            record.instance,
        )
        if is_same and record.restored is not None:
            return "it is the sandbox that was held before, and so nothing was restored"
        if self.commands and not is_same and record.restored != self.snapshot_seq:
            return "it is another sandbox than the one in which commands ran, and was not restored to the last snapshot"
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
