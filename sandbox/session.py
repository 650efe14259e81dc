"""One trajectory's use of its sandbox: the command log and the sandbox behind it, as one thing that survives.

    call --in the log--> its result from there, the sandbox is not touched
         --not there---> START durable -> the sandbox -> END durable -> the result

Whoever comes after a preemption opens the same log and makes the same calls. A call that has an END is answered from
the log. One that has a START and no END is asked for again, with its key, of the very sandbox that it was sent to: that
one knows whether it ran, runs or was never seen, and runs it once. Where that sandbox is gone nobody knows, so the log
says UNKNOWN, the trajectory has failed as infra, and nothing of it ever runs again.

| the sandbox is gone            | then                                                                      |
|--------------------------------|---------------------------------------------------------------------------|
| before the first command       | another one under the next attempt: nothing was lost                      |
| out of memory, by a command    | that command and all later ones have the status OOM: the policy's doing   |
| with a snapshot of all of it   | another one begins with that snapshot: nothing was lost                   |
| otherwise, on_lost=restore     | another one begins with the last snapshot, or like the first did; the     |
|                                | commands after that are done again and must end as the log says           |
| otherwise                      | INFRA; the trajectory says nothing about the policy                       |

A command whose outcome is unknown left nothing behind when its sandbox is gone, so that a restored one may run it; what
the policy has been told stays what the log says, and where the commands done again tell another story the trajectory
has failed. Of a container a snapshot holds the files (not /dev/shm) and no process; between two commands it has none.

Files to begin with that fit into no sandbox end it like that too; `is_data_fault` says so: another one would not help.

Within a sandbox a command runs at most once; what a command does outside of one (it has no network) is not covered. Not
here: the bytes of the log (`command_log.py`), which sandbox it is (`tenancy.py`), leases (`supervisor.py`).
"""

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol, Self

from rollforward.sandbox.client import Sandbox, SandboxClient
from rollforward.sandbox.collecting import read_taken, take
from rollforward.sandbox.command_history import CommandHistory, LoggedCommand
from rollforward.sandbox.command_log import CommandLog
from rollforward.sandbox.command_records import (
    ClosedRecord,
    EndRecord,
    FailedRecord,
    GetRecord,
    SnapshotRecord,
    StartRecord,
    UnknownRecord,
    encode_call,
    path_bytes,
    paths_digest,
)
from rollforward.sandbox.config import ContainerConfig
from rollforward.sandbox.errors import (
    CommandDivergenceError,
    CommandLogError,
    GoneCause,
    SandboxError,
    SandboxGoneError,
    ToolError,
)
from rollforward.sandbox.restoring import caught_up, keep
from rollforward.sandbox.results import OOM_TEXT
from rollforward.sandbox.tenancy import Beginning, LostError, Tenancy, UnfitFilesError, lost, open_log
from rollforward.sandbox.types import Call, CallResult, CallStatus, Collected, SandboxSpec, SessionResult
from rollforward.sandbox.unbroken import in_thread


class Saboteur(Protocol):
    """Does harm to a sandbox, for a drill."""

    async def __call__(self, key: str, sandbox: Sandbox) -> None:
        """Called with each command whose START is durable and that is about to be sent."""
        ...


class Session:
    """A trajectory's sandbox with its log. One event loop; calls that are made at once happen in the order they were
    made.

    States: open -> failed (the platform failed the trajectory) -> closed (`close`) | detached (`detach`, or the process
    ends): a later opening of the log goes on. Who cancels a call leaves its outcome to the next asking, here or in a
    later opening.
    """

    def __init__(
        self, log: CommandLog | None, tenancy: Tenancy | None, *, refusal: str, saboteur: Saboteur | None
    ) -> None:
        """Use `open`."""
        self._log = log
        self._tenancy = tenancy
        self._refusal = refusal
        self._failure = ""
        self._is_data_fault = False
        self._saboteur = saboteur
        self._lock = asyncio.Lock()
        self._greeting: asyncio.Task[None] | None = None

    @classmethod
    async def open(
        cls,
        client: SandboxClient,
        *,
        log_path: Path,
        sandbox_id: str,
        spec: SandboxSpec,
        files: Mapping[str, bytes],
        config: ContainerConfig,
        sync: bool,
        saboteur: Saboteur | None = None,
        known_position: int = 0,
        begin: SnapshotRecord | Beginning | None = None,
    ) -> Self:
        """Opens a trajectory's log, a new one or one that a predecessor left. No sandbox is waited for.

        Args:
            client: makes and finds sandboxes.
            log_path: of the log, see `command_log.log_path`.
            sandbox_id: identity of the trajectory; its sandboxes are called that and `-a0`, `-a1`, ...
            spec: what the sandbox is made of.
            files: what is in it before the first command, by path.
            config: patience.
            sync: whether the log must survive a power cut.
            saboteur: of a drill.
            known_position: a `SessionResult.position` that somebody holds: a log that ends before it lost something.
            begin: a state that the sandbox begins with, `files` in it already: one that lies beside the log, or a
                `Preparation` (`prepared.py`), which is made when it is needed.

        Raises:
            ToolError: the file of a tool cannot be read.
            CodecUsageError: the log's name is longer than an identity of a log may be.

        Invariants: anything else that is wrong with the log fails the session, whose calls then say it.

        """
        try:
            log = await open_log(log_path, sync)
        except CommandLogError as error:
            return cls(None, None, refusal=str(error), saboteur=saboteur)
        refusal = ""
        try:
            tenancy = Tenancy(client, log, sandbox_id=sandbox_id, spec=spec, files=files, config=config, begin=begin)
            tenancy.check_log(known_position)
        except CommandLogError as error:
            refusal, tenancy = str(error), None
        except BaseException:
            log.close()
            raise
        session = cls(log, tenancy, refusal=refusal, saboteur=saboteur)
        if tenancy is not None and log.history.is_going_on:
            # The lease of what a predecessor left runs; whoever only answers from the log must hold it too.
            session._greeting = asyncio.create_task(session._greet(tenancy))
        return session

    @property
    def failure(self) -> str:
        """Why the trajectory has failed and says nothing about the policy; empty while it has not."""
        return self._refusal or self._failure or self._history.failure

    @property
    def is_data_fault(self) -> bool:
        """Whether it failed because the files that it begins with do not fit into a sandbox, and not by the
        platform."""
        return not self._refusal and (self._is_data_fault or self._history.is_data_fault)

    @property
    def begin(self) -> SnapshotRecord | None:
        """The state that the sandbox began with; None where it began with files alone, or has not begun."""
        return self._history.begin

    @property
    def position(self) -> int:
        """Sequence number of the last durable record."""
        return self._history.position

    @property
    def num_created(self) -> int:
        """Sandboxes that this opening made."""
        return 0 if self._tenancy is None else self._tenancy.num_created

    @property
    def num_asked_again(self) -> int:
        """Questions that this opening asked again because nobody had answered."""
        return 0 if self._tenancy is None else self._tenancy.num_asked_again

    @property
    def num_restored(self) -> int:
        """Sandboxes that this opening restored."""
        return 0 if self._tenancy is None else self._tenancy.num_restored

    async def call(self, key: str, call: Call) -> SessionResult:
        """Answers a call: from the log, or by making it.

        Args:
            key: `t{turn}c{index}`, growing; the same call has the same key in every life of the trajectory.
            call: what to do.

        Returns:
            How it ended. INFRA, with the cause in `detail`, where the platform failed; never an exception for that.

        Raises:
            ToolError: the file of a tool cannot be read.

        """
        with contextlib.suppress(SandboxError, LostError):
            # Without the lock: what the log knows does not wait for what the sandbox does.
            if (logged := await self._answer(key, call)) is not None:
                return logged
        async with self._lock:
            try:
                return await self._answer(key, call) or await self._make(key, call)
            except ToolError:
                raise
            except (SandboxError, LostError) as error:
                return await self._infra(key, error)

    async def collect(self, paths: Sequence[str], *, max_bytes: int) -> Collected:
        """Takes files out of the sandbox, once: asked again, also in a later life, the log answers.

        A path at which nothing is is left out. One that cannot be taken costs itself alone: a directory, a pipe or a
        device, one that passes a link or leaves the sandbox's own files, one that its user may not read, one with more
        bytes than those before it leave.

        Args:
            paths: absolute, or relative to /workspace; names, not patterns.
            max_bytes: of all together.

        Returns:
            The files; `problem` where what ran in the sandbox left some that cannot be taken, `failure` where the
            platform failed. No command may come after it.

        Raises:
            ToolError: the file of a tool cannot be read.

        """
        async with self._lock:
            try:
                return await self._collect(tuple(paths), max_bytes)
            except ToolError:
                raise
            except (SandboxError, LostError) as error:
                failed = await self._infra("", error)
                return Collected(
                    files={}, problem="", failure=failed.result.detail, position=failed.position, is_replayed=False
                )

    async def snapshot(self, *, max_bytes: int) -> bool:
        """Keeps the sandbox's state beside the log, durable, in place of the one before; waits for a command that runs.

        Returns:
            Whether the log's last snapshot has all that was done. False where there is nothing to keep any more, the
            state has more bytes, or the sandbox or the disk fails: the trajectory then goes on without it.
        """
        async with self._lock:
            history = self._history
            if history.collected is not None or history.running is not None or not history.is_going_on:
                return False
            if history.snapshot is not None and history.is_as_kept:
                return True
            try:
                await keep(*self._held(), max_bytes=max_bytes)
            except (SandboxError, LostError):
                return False  # the next command finds out what is wrong
            return True

    async def close(self) -> None:
        """Ends the trajectory and its sandbox; the log goes on answering. Idempotent, never fails."""
        await self._stop_greeting()
        async with self._lock:
            if self._tenancy is not None:
                if not self._history.is_closed:
                    with contextlib.suppress(CommandLogError):
                        await self._tenancy.append(ClosedRecord())
                await self._tenancy.end()
            if self._log is not None and self._history.is_closed:
                snapshots = self._log.snapshots
                await in_thread(lambda: snapshots.keep_only(None))
        await self.detach()

    async def detach(self) -> None:
        """Gives the log back and leaves the sandbox to its lease: a later opening goes on. Idempotent."""
        await self._stop_greeting()
        async with self._lock:
            if self._log is not None:
                await in_thread(self._log.close)

    @property
    def _history(self) -> CommandHistory:
        return CommandHistory() if self._log is None else self._log.history

    def _held(self) -> tuple[CommandLog, Tenancy]:
        """Log and sandbox, where the log is believed."""
        if self._log is None or self._tenancy is None:
            raise LostError(self._refusal)
        return self._log, self._tenancy

    async def _answer(self, key: str, call: Call) -> SessionResult | None:
        """What the log, or nothing but the call itself, says about it; None where it must be made."""
        log, _ = self._held()
        try:
            digest = encode_call(call).digest
        except ValueError as error:
            result = CallResult(status=CallStatus.ERROR, text=str(error), total_bytes=len(str(error)))
            return SessionResult(result=result, position=self.position, is_replayed=False)
        known = log.history.commands.get(key)
        if known is None:
            return None
        if known.start.digest != digest:
            raise CommandDivergenceError(
                f"{key} is asked for with another tool or other arguments ({digest.hex()}) than the log has"
                f" ({known.start.digest.hex()})"
            )
        if known.end is None:
            return None
        end = known.end
        text = await in_thread(lambda: log.blobs.get(end.text))
        result = CallResult(
            status=end.status,
            text=text.decode("utf-8", "surrogatepass"),
            truncated=end.truncated,
            total_bytes=end.total_bytes,
            seconds=end.seconds,
            detail=end.detail,
        )
        return SessionResult(result=result, position=known.end_seq, is_replayed=True)

    async def _make(self, key: str, call: Call) -> SessionResult:
        """Makes a call that has no result in the log."""
        log, tenancy = self._held()
        history = log.history
        if self.failure:
            raise LostError(self.failure)
        if history.is_closed:
            raise CommandDivergenceError(f"{key} is asked for after the trajectory was closed, and is not in its log")
        known = history.commands.get(key)
        if known is None:
            history.check_next(key)
        sandbox = await caught_up(log, tenancy)
        if known is None:
            encoded = encode_call(call)
            start = StartRecord(key, encoded.digest, encoded.request)
            known = LoggedCommand(seq=await tenancy.append(start), start=start)
        try:
            result = await self._run(tenancy, sandbox, key, call)
        except SandboxGoneError as gone:
            if not tenancy.lose(gone):
                raise lost(gone) from None
            return await self._make(key, call)
        data = (OOM_TEXT if result is None else result.text).encode("utf-8", "surrogatepass")
        text = await in_thread(lambda: log.blobs.put(data))
        if result is None:
            result = CallResult(status=CallStatus.OOM, text=OOM_TEXT, total_bytes=len(OOM_TEXT))
            gone = GoneCause.OOM
        else:
            gone = None
        end = EndRecord(
            start=known.seq,
            status=result.status,
            text=text,
            truncated=result.truncated,
            total_bytes=result.total_bytes,
            seconds=result.seconds,
            detail=result.detail,
            gone=gone,
        )
        return SessionResult(result=result, position=await tenancy.append(end), is_replayed=False)

    async def _run(self, tenancy: Tenancy, sandbox: Sandbox | None, key: str, call: Call) -> CallResult | None:
        """Has a command run whose START is durable; None where the sandbox ran out of memory and is gone.

        Raises:
            SandboxGoneError: it is gone for another reason; nobody knows whether the command ran, or what it left.
            LostError: it is there, and the platform failed the command.
        """
        if sandbox is None:
            return None
        if self._saboteur is not None:
            await self._saboteur(key, sandbox)
        try:
            result = await tenancy.patiently(lambda: sandbox.call(call, key=key))
            if result.status in (CallStatus.OOM, CallStatus.KILLED):
                # By itself the end of a process does not say whether the sandbox is there still.
                await tenancy.check_alive(sandbox)
        except SandboxGoneError as gone:
            if gone.cause is GoneCause.OOM:
                return None
            raise
        if result.status is CallStatus.INFRA:
            if tenancy.may_restore:
                await tenancy.check_alive(sandbox)
            raise LostError(result.detail or "the sandbox failed")
        return result

    async def _collect(self, paths: tuple[str, ...], max_bytes: int) -> Collected:
        log, tenancy = self._held()
        history = log.history
        digest = paths_digest(paths, max_bytes)
        if history.collected is not None:
            if history.collected.digest != digest:
                raise CommandDivergenceError(
                    f"files {', '.join(paths)} of at most {max_bytes} bytes are asked for, and others were collected"
                )
            return await read_taken(log, history.collected, history.collected_seq, is_replayed=True)
        if self.failure:
            raise LostError(self.failure)
        if history.is_closed or history.running is not None:
            state = "after the trajectory was closed" if history.is_closed else "while a command has no result"
            raise CommandDivergenceError(f"files are asked for {state}")
        files: dict[str, bytes] = {}
        problem = ""
        sandbox = await caught_up(log, tenancy)
        if sandbox is None:
            problem = OOM_TEXT
        else:
            try:
                files, problem = await take(tenancy, sandbox, paths, max_bytes)
            except SandboxGoneError as gone:
                if gone.cause is not GoneCause.OOM:
                    if tenancy.lose(gone):
                        return await self._collect(paths, max_bytes)
                    raise lost(gone) from None
                problem = OOM_TEXT
        stored = await tenancy.store(files)
        record = GetRecord(digest, tuple(map(path_bytes, paths)), max_bytes, stored, _shown(problem))
        return await read_taken(log, record, await tenancy.append(record), is_replayed=False)

    async def _infra(self, key: str, why: Exception) -> SessionResult:
        """Fails the trajectory for good, in the log if that can be written, and ends its sandbox."""
        history = self._history
        if not self.failure and self._tenancy is not None:
            running = history.running
            is_unknown = running is not None and running.start.key == key
            self._failure = _shown(f"unknown outcome of {key}: {why}" if is_unknown else str(why))
            self._is_data_fault = isinstance(why, UnfitFilesError)
            if not history.is_closed:
                record = (
                    UnknownRecord(running.seq, self._failure)
                    if running is not None and is_unknown
                    else FailedRecord(self._failure, self._is_data_fault)
                )
                try:
                    await self._tenancy.append(record)
                except CommandLogError:
                    # A later life of the trajectory finds the sandbox, if it comes soon, and what it knows.
                    return self._failed()
            await self._tenancy.end()
        return self._failed()

    def _failed(self) -> SessionResult:
        result = CallResult(status=CallStatus.INFRA, text="", detail=self.failure)
        return SessionResult(result=result, position=self.position, is_replayed=False)

    async def _greet(self, tenancy: Tenancy) -> None:
        """Takes over what a predecessor left, so that its lease does not run out."""
        async with self._lock:
            # The first command that needs it finds out what is wrong.
            with contextlib.suppress(SandboxError, LostError):
                await tenancy.find()

    async def _stop_greeting(self) -> None:
        if self._greeting is not None:
            self._greeting.cancel()
            await asyncio.gather(self._greeting, return_exceptions=True)
            self._greeting = None


def _shown(text: object) -> str:
    """A text for people, without half characters."""
    return str(text).encode("utf-8", "replace").decode()
