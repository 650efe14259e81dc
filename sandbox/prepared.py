"""States that several trajectories begin with: made once, by whoever comes first, and kept as long as the step's logs.

    files, commands --in a sandbox of its own--> its files --> every trajectory of the same beginning starts from them

    run_dir/commands/step_000012/prepared/
      1f2e...lock      held by whoever makes it; the others wait
      1f2e...state     how that ended: the snapshot, or why there is none
      9f86d0...        the snapshot itself, where it is large (`blobs.py`)

Who makes it may be killed: nobody had begun with it, and the next one makes it anew. Not here: the trajectories
(`tenancy.py`).

| how a command ended, or what happened             | what follows                                                   |
|---------------------------------------------------|----------------------------------------------------------------|
| another exit status, or no room for its files     | the data's fault, written down: the same to all                |
| out of time or memory, killed, the sandbox is     | all of it again in another sandbox, `config.attempts` times;   |
| gone, or the platform failed                      | then lost, and nothing is written down                         |
| nobody answered, or there was no room             | asked again, up to `config.attempts` times                     |
"""

import asyncio
import contextlib
import fcntl
import hashlib
import json
import os
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from rollforward.sandbox.blobs import BlobStore
from rollforward.sandbox.client import Sandbox, SandboxClient
from rollforward.sandbox.command_records import SnapshotRecord, files_digest, spec_digest
from rollforward.sandbox.config import ContainerConfig
from rollforward.sandbox.errors import (
    CommandLogWriteError,
    SandboxBusyError,
    SandboxConnectionError,
    SandboxFileError,
    SandboxGoneError,
)
from rollforward.sandbox.files import read_regular, sync_directory
from rollforward.sandbox.tenancy import LostError, UnfitFilesError
from rollforward.sandbox.types import ExecRequest, ExecStatus, SandboxSpec, Snapshot
from rollforward.sandbox.unbroken import in_thread

_MAX_STATE_BYTES: Final = 1 << 20
_LOOK_S: Final = 0.05
_SHOWN_BYTES: Final = 400
_DATA: Final = (ExecStatus.EXIT, ExecStatus.DISK_FULL)
"""How commands end that say something about the data; how busy a machine is has a say in the others."""
_PAUSE_S: Final = 1.0
"""Before something is asked again; twice as long each time."""

_T = TypeVar("_T")


class _State(msgspec.Struct, frozen=True, kw_only=True):
    """How a preparation ended."""

    record: SnapshotRecord | None
    problem: str


class Preparation:
    """One beginning of trajectories. One event loop; processes and machines share what was made by the directory."""

    def __init__(
        self,
        client: SandboxClient,
        directory: Path,
        *,
        spec: SandboxSpec,
        files: Mapping[str, bytes],
        commands: Sequence[Sequence[str]],
        config: ContainerConfig,
        sync: bool,
    ) -> None:
        """Keep what it is made of; nothing is asked yet.

        Args:
            client: makes the sandbox.
            directory: of prepared states, beside the command logs.
            spec: of the trajectories' sandboxes.
            files: what is in it before the first command.
            commands: run one after the other; each must end with exit status 0.
            config: limits and patience.
            sync: whether what was made must survive a power cut.

        Raises:
            ToolError: the file of a tool cannot be read.
        """
        self._client, self._directory, self._spec, self._config = client, directory, spec, config
        self._files, self._commands, self._sync = dict(files), [tuple(words) for words in commands], sync
        told = json.dumps(self._commands).encode("ascii")
        self.digest = hashlib.blake2b(spec_digest(spec) + files_digest(files) + told, digest_size=16).digest()
        """Of what it is made of."""

    async def record(self) -> SnapshotRecord:
        """The state, made if nobody has.

        Raises:
            UnfitFilesError: files or commands failed, for everybody.
            LostError, SandboxError: the platform failed; asked again it may not.
        """
        state = await in_thread(self._read)
        if state is None:
            async with self._alone():
                state = await in_thread(self._read) or await self._made()
        if state.record is None:
            raise UnfitFilesError(state.problem)
        return state.record

    async def _made(self) -> _State:
        for _ in range(self._config.attempts - 1):
            with contextlib.suppress(LostError, SandboxGoneError):
                return await self._make()
        return await self._make()

    async def _make(self) -> _State:
        sandbox_id = f"prepare-{self.digest.hex()[:16]}-{secrets.token_hex(8)}"
        sandbox = await self._patiently(lambda: self._client.create(sandbox_id, self._spec))
        try:
            record, problem = None, ""
            try:
                await self._patiently(lambda: sandbox.upload(self._files))
                problem = await self._run(sandbox)
                if not problem:
                    most = self._config.max_snapshot_bytes
                    # No process outlives its command: of a machine too, files are what there is (but for /dev/shm).
                    taken = await self._patiently(lambda: sandbox.snapshot(max_bytes=most, files_only=True))
                    store = BlobStore(self._directory, sync=self._sync)
                    stored = await in_thread(lambda: store.put(taken.data))
                    record = SnapshotRecord(taken.kind, taken.image, stored, is_shared=True)
            except SandboxFileError as error:
                problem = f"what the sandbox begins with does not fit: {error}"
            state = _State(record=record, problem=problem)
            await in_thread(lambda: self._write(state))
            return state
        finally:
            with contextlib.suppress(Exception):  # its lease ends it
                await sandbox.close()

    async def _run(self, sandbox: Sandbox) -> str:
        """Runs the commands; why one failed, or nothing."""
        for number, words in enumerate(self._commands):
            request, key = ExecRequest(argv=words), f"prepare{number}"
            result = await self._patiently(lambda request=request, key=key: sandbox.exec(request, key=key))
            if result.status is ExecStatus.OK:
                continue
            said = (result.stderr or result.stdout)[-_SHOWN_BYTES:].decode("utf-8", "replace").strip() or result.detail
            how = result.status.value if result.exit_code is None else f"status {result.exit_code}"
            problem = f"prepare: {json.dumps(words)} ended with {how}{f': {said}' if said else ''}"
            if result.status not in _DATA:
                raise LostError(problem)
            return problem
        return ""

    async def _patiently(self, ask: Callable[[], Awaitable[_T]]) -> _T:
        """Asks something that is safe to repeat, again where nobody answered or there was no room."""
        for attempt in range(self._config.attempts - 1):
            with contextlib.suppress(SandboxConnectionError, SandboxBusyError):
                return await ask()
            await asyncio.sleep(_PAUSE_S * 2**attempt)
        return await ask()

    @contextlib.asynccontextmanager
    async def _alone(self) -> AsyncGenerator[None]:
        """While it is open, nobody else makes it."""
        path = self._directory / f"{self.digest.hex()}.lock"
        self._directory.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        try:
            while True:
                with contextlib.suppress(BlockingIOError):
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                await asyncio.sleep(_LOOK_S)
            yield
        finally:
            os.close(descriptor)

    def _place(self) -> Path:
        return self._directory / f"{self.digest.hex()}.state"

    def _read(self) -> _State | None:
        """How it ended; None where nobody has made it, or what was written cannot be read: it is made anew."""
        try:
            return msgspec.msgpack.decode(read_regular(self._place(), max_bytes=_MAX_STATE_BYTES), type=_State)
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
            return None

    def _write(self, state: _State) -> None:
        place = self._place()
        temporary = place.with_name(f"{place.name}.{os.getpid()}.tmp")
        try:
            with temporary.open("wb") as file:
                file.write(msgspec.msgpack.encode(state))
                file.flush()
                if self._sync:
                    os.fsync(file.fileno())
            temporary.replace(place)
            if self._sync:
                sync_directory(place.parent)
        except OSError as error:
            raise CommandLogWriteError(f"{place}: {error}; make room or look at the device.") from error


def read_prepared(directory: Path, record: SnapshotRecord) -> Snapshot:
    """A state that lies in a directory of prepared states.

    Raises:
        CommandLogDamagedError: it is gone, or not what the record says.
    """
    data = BlobStore(directory, sync=False).get(record.data)
    return Snapshot(kind=record.kind, image=record.image, data=data)
