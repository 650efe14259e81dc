"""Does again, in a fresh sandbox, what a trajectory did in its own, and compares what comes out.

A check of how far a log can be believed and repeated, not a way to recover: what differs from run to run by nature (see
MASKS, and what the caller adds) is masked before texts are compared, and whatever is left is told. Process ids in calls
are the same again, since each call has a process of its own; those in commands (`exec`), of which a trajectory has
none, depend on how many the process around them has led.

    log --commands in order--> fresh sandbox --results--> same | masked | differs | lost;  unknown: it had no result

Here: the comparison. Not here: what a sandbox is asked and how (`session.py`), words and tables
(rollout/sandbox_verb.py).
"""

import re
import secrets
import tempfile
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Final

import msgspec

from rollforward.sandbox.blobs import BlobStore
from rollforward.sandbox.client import SandboxClient
from rollforward.sandbox.command_history import LoggedCommand
from rollforward.sandbox.command_log import SNAPSHOTS_NAME, LogView, log_name
from rollforward.sandbox.command_records import SnapshotRecord, decode_call, path_text, spec_digest
from rollforward.sandbox.config import ContainerConfig
from rollforward.sandbox.errors import CommandLogDamagedError
from rollforward.sandbox.session import Session
from rollforward.sandbox.types import Call, CallStatus

_HEX: Final = "[0-9a-fA-F]"
MASKS: Final[dict[str, str]] = {
    "uuid": rf"\b{_HEX}{{8}}(?:-{_HEX}{{4}}){{3}}-{_HEX}{{12}}\b",
    "date": r"\b(?:(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun),? +)?(?:\d{1,2} )?"
    r"(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)\w* +\d{1,2}(?:,? +\d{4})?\b|\b\d{4}-\d\d-\d\d(?=T|\b)",
    "time": r"(?<!\d)(?:\d{1,2}:\d\d:\d\d(?:[.,]\d+)?|\d\d:\d\d)(?!\d)(?: ?[AP]M\b)?(?:Z\b|[+-]\d\d:?\d\d\b)?",
    "epoch": r"\b1[6-9]\d{8}(?:\d{3}){0,3}(?:\.\d+)?\b",
    "duration": r"\b\d+(?:\.\d+)?(?:e-\d+)? ?(?:ns|us|µs|ms|s|sec|secs|seconds?|minutes?)\b|\b\d+m\d+(?:\.\d+)?s\b",
    "address": rf"\b0x{_HEX}{{6,16}}\b",
    "temporary": r"\btmp(?:[a-z0-9_]{8}|\.[A-Za-z0-9]{6,})\b",
    "pid": r"(?i:\b(?:pid|ppid|process)\b\W{0,3})\d+|^\[\d+\][ +-]*\d+",
}
"""What differs from run to run by nature: name -> regular expression. Applied in this order, after the caller's."""

_SHOWN_CHARS: Final = 60


class Masks:
    """Texts with what differs by nature replaced by its name."""

    def __init__(self, patterns: Sequence[str] = ()) -> None:
        """Add regular expressions to MASKS.

        Raises:
            ValueError: one is none.
        """
        own: list[tuple[str, str]] = [("masked", pattern) for pattern in patterns]
        self._compiled: list[tuple[str, re.Pattern[str]]] = []
        for name, pattern in [*own, *MASKS.items()]:
            try:
                self._compiled.append((f"<{name}>", re.compile(pattern, re.MULTILINE)))
            except (re.error, RecursionError, OverflowError) as error:
                raise ValueError(f"mask {pattern!r} is no regular expression: {error}") from None

    def __call__(self, text: str) -> str:
        """The text with every match replaced."""
        for name, pattern in self._compiled:
            text = pattern.sub(name, text)
        return text


class Verdict(StrEnum):
    """How a command done again compares with the first time."""

    SAME = "same"
    """Bit for bit."""
    MASKED = "masked"
    """But for what differs by nature."""
    DIFFERS = "differs"
    """It is another result."""
    UNKNOWN = "unknown"
    """The log has no result for it; it was not done again."""
    LOST = "lost"
    """The sandbox of the replay failed; nothing after it was done."""


class ReplayedStep(msgspec.Struct, frozen=True, kw_only=True):
    """A command, or the collection of files at the end, done again."""

    key: str
    """Key of the command; `files` for the collection."""
    what: str
    """Tool and arguments, shortened."""
    status: str
    """Status then, or `-` where there is none."""
    verdict: Verdict
    """How it compares."""
    difference: str = ""
    """Where and how it differs, or why it was lost."""


class Replayed(msgspec.Struct, frozen=True, kw_only=True):
    """A trajectory done again."""

    trajectory: str
    """Whose."""
    steps: tuple[ReplayedStep, ...]
    """In order."""
    notes: tuple[str, ...] = ()
    """What is not as it was for the whole of it."""

    @property
    def diverged(self) -> int:
        """Steps that differ or were lost."""
        return sum(step.verdict in (Verdict.DIFFERS, Verdict.LOST) for step in self.steps)


async def replay(
    client: SandboxClient,
    view: LogView,
    blobs: BlobStore,
    *,
    config: ContainerConfig,
    masks: Masks,
    begin: bytes = b"",
) -> Replayed:
    """Does a trajectory's commands again and compares.

    Args:
        client: makes the fresh sandbox.
        view: the log, as `read_log` sees it.
        blobs: beside it.
        config: patience.
        masks: what may differ.
        begin: the state that it began with, where its log says so.

    Raises:
        CommandLogDamagedError: the log or a blob of it cannot be believed.
        ToolError: the file of a tool is not there any more.

    Invariants: the log, its blobs and its sandbox are left as they are.

    """
    if view.damage:
        raise CommandLogDamagedError(view.damage)
    history = view.history
    if history.opened is None:
        return Replayed(trajectory=view.trajectory, steps=())
    spec = history.opened.spec
    notes: list[str] = []
    if spec_digest(spec) != history.opened.spec_digest:
        names = ", ".join(tool.name for tool in spec.tools)
        notes.append(f"the text of a tool ({names}) is not what it was")
    put = () if history.put is None else history.put.files
    files = {path_text(path): blobs.get(stored) for path, stored in put}
    steps: list[ReplayedStep] = []
    with tempfile.TemporaryDirectory() as scratch:
        record = history.begin
        if record is not None:
            store = BlobStore(Path(scratch) / SNAPSHOTS_NAME / view.trajectory, sync=False)
            record = SnapshotRecord(record.kind, record.image, store.put(begin))
        session = await Session.open(
            client,
            log_path=Path(scratch) / log_name(view.trajectory),
            sandbox_id=f"replay-{secrets.token_hex(8)}",
            spec=msgspec.structs.replace(spec, labels={**spec.labels, "replay": view.trajectory}),
            files=files,
            config=config,
            sync=False,
            begin=record,
        )
        try:
            for command in history.commands.values():
                steps.append(await _again(session, command, blobs, masks))
                if steps[-1].verdict is Verdict.LOST:
                    break
            else:
                if history.collected is not None:
                    steps.append(await _collected_again(session, view, blobs, masks))
        finally:
            await session.close()
    return Replayed(trajectory=view.trajectory, steps=tuple(steps), notes=tuple(notes))


async def _again(session: Session, command: LoggedCommand, blobs: BlobStore, masks: Masks) -> ReplayedStep:
    key, call, end = command.start.key, decode_call(command.start), command.end
    what = _shown_call(call)
    if end is None:
        return ReplayedStep(key=key, what=what, status="-", verdict=Verdict.UNKNOWN)
    before = blobs.get(end.text).decode("utf-8", "surrogatepass")
    result = (await session.call(key, call)).result
    verdict, difference = Verdict.DIFFERS, ""
    if result.status is CallStatus.INFRA:
        verdict, difference = Verdict.LOST, result.detail
    elif result.status is not end.status:
        difference = f"status {end.status.value} is now {result.status.value}"
    else:
        verdict, difference = _compare(before, result.text, masks)
    return ReplayedStep(key=key, what=what, status=end.status.value, verdict=verdict, difference=difference)


async def _collected_again(session: Session, view: LogView, blobs: BlobStore, masks: Masks) -> ReplayedStep:
    record = view.history.collected
    assert record is not None, "the caller looked"
    paths = [path_text(path) for path in record.paths]
    collected = await session.collect(paths, max_bytes=record.max_bytes)
    before = {path_text(path): blobs.get(stored) for path, stored in record.files}
    status, what = "problem" if record.problem else "ok", _shortened(", ".join(paths))
    verdict, difference = _compare(record.problem, collected.problem, masks)
    if collected.failure:
        verdict, difference = Verdict.LOST, collected.failure
    elif verdict is not Verdict.DIFFERS and before.keys() != collected.files.keys():
        verdict = Verdict.DIFFERS
        difference = f"there were {', '.join(before) or 'none'}; now there are {', '.join(collected.files) or 'none'}"
    elif verdict is not Verdict.DIFFERS:
        for path, data in before.items():
            one, where = _compare(_text(data), _text(collected.files[path]), masks)
            if one is not Verdict.SAME:
                verdict, difference = one, f"{path}: {where}" if where else ""
            if one is Verdict.DIFFERS:
                break
    return ReplayedStep(key="files", what=what, status=status, verdict=verdict, difference=difference)


def _compare(before: str, now: str, masks: Masks) -> tuple[Verdict, str]:
    if before == now:
        return Verdict.SAME, ""
    masked_before, masked_now = masks(before), masks(now)
    if masked_before == masked_now:
        return Verdict.MASKED, ""
    lines_before, lines_now = masked_before.split("\n"), masked_now.split("\n")
    number = next(
        (n for n, (a, b) in enumerate(zip(lines_before, lines_now, strict=False)) if a != b),
        min(len(lines_before), len(lines_now)),
    )
    was, is_now = ([*lines, "(the end)"][number] for lines in (lines_before, lines_now))
    return Verdict.DIFFERS, f"line {number + 1} was {_shortened(repr(was))}, is now {_shortened(repr(is_now))}"


def _text(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")


def _shown_call(call: Call) -> str:
    arguments = ", ".join(f"{name}={value!r}" for name, value in call.arguments.items())
    return _shortened(f"{call.tool}({arguments})")


def one_line(text: str) -> str:
    """A text, whoever wrote it, as one line that can be printed."""
    return "".join(character if character.isprintable() else "?" for character in text)


def _shortened(text: str) -> str:
    shown = one_line(text)
    return shown if len(shown) <= _SHOWN_CHARS else shown[: _SHOWN_CHARS - 3] + "..."
