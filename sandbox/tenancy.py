"""The sandbox of one trajectory: found again or made, filled with its first files, ended; its command log says which.

A sandbox is recorded (OPENED) before anything is asked of it. Until a command was sent, one that is gone is replaced
under the next attempt, up to `config.attempts` without any progress; after that its files are part of the trajectory,
and it can only be restored:

| the sandbox is gone, and since its last snapshot  | on_lost: fail | on_lost: restore                               |
|---------------------------------------------------|---------------|------------------------------------------------|
| no command was sent                               | restored      | restored                                       |
| commands were sent, or there is no snapshot       | lost          | restored; they are done again (`restoring.py`) |
| it ran out of memory, by a command                | gone          | gone: the policy's doing                       |

Not here: commands and their results (`session.py`).
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Final, Protocol, TypeVar

from rollforward.sandbox.blobs import Stored
from rollforward.sandbox.client import Sandbox, SandboxClient
from rollforward.sandbox.command_history import CommandHistory
from rollforward.sandbox.command_log import CommandLog
from rollforward.sandbox.command_records import (
    CommandRecord,
    OpenedRecord,
    PutRecord,
    SnapshotRecord,
    files_digest,
    path_bytes,
    spec_digest,
)
from rollforward.sandbox.config import ContainerConfig
from rollforward.sandbox.errors import (
    CommandDivergenceError,
    CommandLogDamagedError,
    CommandLogError,
    CommandLogLockedError,
    GoneCause,
    SandboxBusyError,
    SandboxConnectionError,
    SandboxError,
    SandboxFileError,
    SandboxGoneError,
)
from rollforward.sandbox.types import SandboxSpec, Snapshot
from rollforward.sandbox.unbroken import in_thread

_PAUSE_S: Final = 1.0
"""Before something is asked again of whom the client could not reach; twice as long each time."""

_LOCK_WAIT_S: Final = 10.0
"""A predecessor that was killed gives its lock back when the kernel has ended it."""
_LOCK_PAUSE_S: Final = 0.02

_T = TypeVar("_T")


class LostError(Exception):
    """The trajectory cannot go on; the message says why. Never leaves a session."""


class UnfitFilesError(LostError):
    """The files that the trajectory begins with cannot be in a sandbox: the fault of whoever wrote them down."""


class Beginning(Protocol):
    """A state that trajectories begin with, which may have to be made first."""

    @property
    def digest(self) -> bytes:
        """Of what it is made of."""
        ...

    async def record(self) -> SnapshotRecord:
        """The state.

        Raises:
            UnfitFilesError: there is none, for anybody.
            LostError, SandboxError: the platform failed.
        """
        ...


class Tenancy:
    """What a session holds of its sandbox. One event loop, one question at a time; the session sees to that."""

    def __init__(
        self,
        client: SandboxClient,
        log: CommandLog,
        *,
        sandbox_id: str,
        spec: SandboxSpec,
        files: Mapping[str, bytes],
        config: ContainerConfig,
        begin: SnapshotRecord | Beginning | None = None,
    ) -> None:
        """Keep what a sandbox is made of; nothing is asked yet.

        Raises:
            ToolError: the file of a tool cannot be read.
        """
        self._client = client
        self._log = log
        self._sandbox_id = sandbox_id
        self._spec = spec
        self._files = dict(files)
        self._begin = begin
        self._config = config
        self._spec_digest, self._files_digest = spec_digest(spec), files_digest(files)
        if begin is not None and not isinstance(begin, SnapshotRecord):
            self._files, self._files_digest = {}, begin.digest
        self._sandbox: Sandbox | None = None
        self._first_attempt = 0
        self.num_created = 0
        """Sandboxes that were made."""
        self.num_asked_again = 0
        """Questions that were asked again because nobody had answered."""
        self.num_restored = 0
        """Sandboxes that took the place of one in which commands had run."""

    @property
    def history(self) -> CommandHistory:
        """What the log says."""
        return self._log.history

    def check_log(self, known_position: int) -> None:
        """Compares what the log says with what this life was given.

        Raises:
            CommandLogDamagedError: it ends before a position that somebody holds.
            CommandDivergenceError: the trajectory began with something else.
        """
        if self.history.position < known_position:
            raise CommandLogDamagedError(
                f"command log {self._log.path} ends at record {self.history.position}, and record {known_position} was"
                " durable once: what came between is lost."
            )
        history = self.history
        is_begun = history.begin is not None or history.opened is not None
        is_known = self._begin is None or isinstance(self._begin, SnapshotRecord)
        if is_begun and (history.begin != self._begin if is_known else history.begin is None):
            raise CommandDivergenceError(
                f"command log {self._log.path}: the state that it begins with is not the one with which the trajectory"
                " began. Go on with what it began with."
            )
        opened = history.opened
        if opened is None:
            return
        for what, before, now in (
            ("the sandbox's image, limits or tools", opened.spec_digest, self._spec_digest),
            ("the files that it begins with", opened.files_digest, self._files_digest),
        ):
            if before != now:
                raise CommandDivergenceError(
                    f"command log {self._log.path}: {what} are not those with which the trajectory began"
                    f" ({before.hex()}, now {now.hex()}). Go on with what it began with."
                )

    async def ready(self) -> Sandbox:
        """The sandbox, found or made, with its files in it.

        Raises:
            SandboxGoneError: it ran out of memory.
            LostError: there is none, and none may be made.
            SandboxError: as the client and the log say.
        """
        if self._sandbox is None:
            await self.find()
        while self._sandbox is None:
            await self._create()
        return self._sandbox

    async def find(self) -> None:
        """Takes over the sandbox of the log. Where it is gone, and another may take its place, `ready` makes that.

        Raises:
            SandboxGoneError, LostError, SandboxError: as `ready`.
        """
        opened = self.history.opened
        if opened is None or self._sandbox is not None:
            return
        try:
            sandbox = await self.patiently(lambda: self._client.adopt(opened.sandbox_id, instance=opened.instance))
            if sandbox.instance != opened.instance:
                raise SandboxGoneError(
                    f"sandbox {opened.sandbox_id} is instance {sandbox.instance}, and the one that was used was"
                    f" {opened.instance}: its files are gone",
                    GoneCause.LOST,
                )
            if self.history.redo and self._files and not self.history.snapshot_seq:
                # Whether its files were written before commands were done again in it cannot be told.
                await sandbox.close()
                return
            await self._hold(sandbox, opened.attempt)
        except SandboxGoneError as gone:
            if not self.lose(gone):
                raise lost(gone) from None

    def lose(self, gone: SandboxGoneError) -> bool:
        """Takes note that the sandbox is gone; whether `ready` may make one that takes its place."""
        self._sandbox = None
        history = self.history
        if not history.commands:
            return True
        if gone.cause is GoneCause.OOM:
            return False
        return self.may_restore or (history.snapshot is not None and history.is_as_kept)

    @property
    def may_restore(self) -> bool:
        """Whether commands may be done again in another sandbox."""
        return self._config.on_lost == "restore"

    async def end(self) -> None:
        """Ends the sandbox, also one that a predecessor left. Where nobody can be told its lease ends it."""
        opened = self.history.opened
        with contextlib.suppress(SandboxError):
            if self._sandbox is None and opened is not None:
                self._sandbox = await self._client.adopt(opened.sandbox_id, instance=opened.instance)
            if self._sandbox is not None:
                await self._sandbox.close()
        self._sandbox = None

    async def check_alive(self, sandbox: Sandbox) -> None:
        """Asks whether a sandbox is there; nobody's answer counts as yes.

        Raises:
            SandboxGoneError: it is not.
        """
        with contextlib.suppress(SandboxConnectionError):
            await self._client.adopt(sandbox.id)

    async def append(self, record: CommandRecord) -> int:
        """Writes a record; see `CommandLog.append`."""
        return await in_thread(lambda: self._log.append(record))

    async def store(self, files: Mapping[str, bytes]) -> tuple[tuple[bytes, Stored], ...]:
        """Returns what a record keeps of files; see `BlobStore.put`."""
        return await in_thread(
            lambda: tuple((path_bytes(path), self._log.blobs.put(files[path])) for path in sorted(files))
        )

    async def patiently(self, ask: Callable[[], Awaitable[_T]]) -> _T:
        """Asks something that is safe to repeat, again where nobody answered or there was no room."""
        for attempt in range(self._config.attempts - 1):
            try:
                return await ask()
            except (SandboxConnectionError, SandboxBusyError):
                self.num_asked_again += 1
                await asyncio.sleep(_PAUSE_S * 2**attempt)
        return await ask()

    async def _create(self) -> None:
        """Makes a sandbox under the next attempt; none is held after it where that one is gone already."""
        if self._begin is not None and self.history.snapshot is None:
            begin = self._begin
            await self.append(begin if isinstance(begin, SnapshotRecord) else await begin.record())
        history = self.history
        opened = history.opened
        attempt = max(self._first_attempt, 0 if opened is None else opened.attempt + 1)
        without_progress = attempt - history.settled_attempt - bool(history.commands)
        if without_progress >= self._config.attempts:
            raise LostError(
                f"{without_progress} sandboxes of this trajectory were lost before a command reached them;"
                f" sandbox.container.attempts={self._config.attempts} allows no more"
            )
        sandbox_id = f"{self._sandbox_id}-a{attempt}"
        snapshot = await self._kept()
        try:
            sandbox = await self.patiently(lambda: self._client.create(sandbox_id, self._spec, snapshot=snapshot))
        except asyncio.CancelledError:
            # The client closes what it was about to get.
            self._first_attempt = attempt + 1
            raise
        self.num_created += 1
        try:
            with contextlib.suppress(SandboxGoneError):
                await self._hold(sandbox, attempt)
        except CommandLogError:
            # No record leads to it, and the client would keep it alive as long as the process lives.
            with contextlib.suppress(SandboxError):
                await sandbox.close()
            raise

    async def _hold(self, sandbox: Sandbox, attempt: int) -> None:
        """Records that a sandbox is held, and fills it where no command was sent yet: it may be half filled."""
        history, before = self.history, self.history.opened
        epoch = 1 if before is None else before.epoch + 1
        digests = self._spec_digest, self._files_digest
        is_other = before is not None and before.instance != sandbox.instance
        restored = history.snapshot_seq if is_other and history.commands else None
        await self.append(OpenedRecord(epoch, attempt, sandbox.id, sandbox.instance, self._spec, *digests, restored))
        self.num_restored += restored is not None
        is_unfilled = not history.commands or restored is not None
        if self._files and is_unfilled and history.snapshot is None:
            if self.history.put is None:
                await self.append(PutRecord(await self.store(self._files)))
            try:
                await self.patiently(lambda: sandbox.upload(self._files))
            except SandboxFileError as error:
                raise UnfitFilesError(f"the files that the sandbox begins with cannot be written: {error}") from None
        self._sandbox = sandbox

    async def _kept(self) -> Snapshot | None:
        """The last state that the log keeps; None where it keeps none."""
        record = self.history.snapshot
        if record is None:
            return None
        store = self._log.prepared if record.is_shared else self._log.snapshots
        data = await in_thread(lambda: store.get(record.data))
        return Snapshot(kind=record.kind, image=record.image, data=data)


def lost(gone: SandboxGoneError) -> Exception:
    """What a sandbox that is gone means for a trajectory whose commands ran in it."""
    return gone if gone.cause is GoneCause.OOM else LostError(f"{gone} ({gone.cause.value})")


async def open_log(path: Path, sync: bool) -> CommandLog:
    """The log, once a predecessor that is ending has given it back.

    Raises:
        CommandLogError: see `CommandLog.open`.
    """
    for _ in range(round(_LOCK_WAIT_S / _LOCK_PAUSE_S)):
        with contextlib.suppress(CommandLogLockedError):
            return await _open_now(path, sync)
        await asyncio.sleep(_LOCK_PAUSE_S)
    return await _open_now(path, sync)


async def _open_now(path: Path, sync: bool) -> CommandLog:
    opened: list[CommandLog] = []
    try:
        await in_thread(lambda: opened.append(CommandLog.open(path, sync=sync)))
    except asyncio.CancelledError:
        for log in opened:  # nobody gets it, and its lock would keep out every successor while this process lives
            log.close()
        raise
    return opened[0]
