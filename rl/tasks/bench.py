"""The sandbox that the hidden tests of one submission run in, replaced when a test has made it unusable.

    nothing, or the state that `prepare` left --> what was not submitted out, what was submitted in --> tests

The state is the very one that the completion began with, and a submitted file takes the place of whatever it
has there. What cannot be made so again was the completion's doing, so it is never left without a score.
"""

import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Final

import msgspec

from rollforward.rollout.workspace import Submission, Workspace
from rollforward.sandbox.client import Sandbox, SandboxClient
from rollforward.sandbox.config import Limits
from rollforward.sandbox.errors import (
    CommandLogError,
    SandboxBusyError,
    SandboxConnectionError,
    SandboxFileError,
    SandboxGoneError,
    SandboxUnavailableError,
)
from rollforward.sandbox.prepared import read_prepared
from rollforward.sandbox.types import ExecRequest, ExecResult, ExecStatus, SandboxSpec, Snapshot
from rollforward.sandbox.unbroken import in_thread

_BLOCK_BYTES: Final = 4096
"""A file takes whole blocks."""
_MEMBER_BYTES: Final = 512
"""What a file has at least in a state, which is a tar."""
_LOST: Final = (SandboxBusyError, SandboxConnectionError, SandboxGoneError, SandboxUnavailableError)
_INFRA: Final = (ExecStatus.INFRA, ExecStatus.SANDBOX_DEAD, ExecStatus.KILLED)


class BenchLostError(Exception):
    """The platform failed a test; all of them may be run again."""


class UnfitError(Exception):
    """A test's files go into no sandbox, whatever was submitted; the message says why."""


class SpoiltError(Exception):
    """A test cannot be run because of what was submitted: the policy's doing. The message says why."""


class Bench:
    """Runs the tests of one submission, in order, in as few sandboxes as they leave usable."""

    def __init__(
        self,
        client: SandboxClient,
        spec: SandboxSpec,
        *,
        submission: Submission,
        declared: Sequence[str],
        workspace: Workspace,
    ) -> None:
        """Nothing is asked yet.

        Args:
            client: makes sandboxes.
            spec: of the sandbox, without room for what it begins with.
            submission: what is tested.
            declared: paths that a submission can have.
            workspace: what the completion's sandbox began with.
        """
        self._client = client
        self._spec, self._submission, self._workspace = spec, submission, workspace
        self._absent = [path for path in declared if path not in submission.files] if workspace.prepare else []
        self._snapshot: Snapshot | None = None
        self._sandbox: Sandbox | None = None
        self._num_run = 0  # in this sandbox

    async def open(self) -> None:
        """Find what its sandboxes begin with.

        Raises:
            BenchLostError: it is not there.
        """
        if self._workspace.prepare:
            self._snapshot = await self._prepared()
        state = b"" if self._snapshot is None else self._snapshot.data
        self._spec = msgspec.structs.replace(self._spec, limits=_with_room(self._spec.limits, self._submission, state))

    async def run(self, files: Mapping[str, bytes], request: ExecRequest) -> ExecResult:
        """Put a test's files there and run its command.

        Raises:
            BenchLostError: the platform failed.
            UnfitError: the files do not go into a fresh sandbox.
            SpoiltError: the submission does not, or they do not beside it.
        """
        try:
            while (result := await self._attempt(files, request)) is None:
                pass
        except _LOST as error:
            raise BenchLostError(str(error)) from error
        return result

    async def close(self) -> None:
        """Let go of the sandbox; a lease ends what cannot be told so."""
        sandbox, self._sandbox, self._num_run = self._sandbox, None, 0
        if sandbox is not None:
            try:
                await sandbox.close()
            except _LOST:
                return

    async def _prepared(self) -> Snapshot:
        """The state that the completion began with."""
        begun = self._submission.begun_with
        if begun is None:
            raise BenchLostError("nobody knows the prepared state that the completion began with")
        try:
            return await in_thread(lambda: read_prepared(Path(begun.directory), begun.record))
        except CommandLogError as error:
            raise BenchLostError(str(error)) from error

    async def _attempt(self, files: Mapping[str, bytes], request: ExecRequest) -> ExecResult | None:
        """None: a used sandbox did not take the test, which did not run; the next attempt has a fresh one."""
        was_used = self._num_run > 0
        try:
            if self._sandbox is None:
                await self._make()
            assert self._sandbox is not None
            if files:
                await self._sandbox.upload(files)
            self._num_run += 1
            result = await self._sandbox.exec(request, key=f"t{self._num_run}c0")
        except SpoiltError:
            await self.close()
            raise
        except SandboxFileError as error:
            await self.close()
            if not was_used:
                await self._see_that_they_fit(files)
                raise SpoiltError(f"a test's files do not go beside what was submitted: {error}") from error
            return None
        except SandboxGoneError:  # before the command reached it
            if not was_used:
                raise
            await self.close()
            return None
        if result.status in _INFRA:
            raise BenchLostError(result.detail or str(result.status))
        return result

    async def _make(self) -> None:
        """A sandbox with the submission in it."""
        self._sandbox = sandbox = await self._fresh()
        if self._absent:
            # What a completion took away must not come back with the state that it began with.
            await self._remove(sandbox, self._absent, key="t0c0")
        for number, (path, data) in enumerate(self._submission.files.items(), 1):
            try:
                await sandbox.upload({path: data})
            except SandboxFileError:
                if not await _has(sandbox, path, data):
                    await self._replace(sandbox, path, data, number)

    async def _fresh(self) -> Sandbox:
        return await self._client.create(f"tests-{secrets.token_hex(12)}", self._spec, snapshot=self._snapshot)

    async def _replace(self, sandbox: Sandbox, path: str, data: bytes, number: int) -> None:
        """Put a file where the state has a directory, a link or a file that nobody may write, or one above it that is
        no directory."""
        above = [str(one) for one in PurePosixPath(path).parents if one.name]
        if above:  # directories stay, which is an exit status of its own
            await sandbox.exec(ExecRequest(argv=("rm", "-f", "--", *above)), key=f"t0c{2 * number - 1}")
        await self._remove(sandbox, [path], key=f"t0c{2 * number}")
        try:
            await sandbox.upload({path: data})
        except SandboxFileError as error:
            raise SpoiltError(f"what was submitted does not go where it was: {error}") from error

    async def _remove(self, sandbox: Sandbox, paths: Sequence[str], *, key: str) -> None:
        result = await sandbox.exec(ExecRequest(argv=("rm", "-rf", "--", *paths)), key=key)
        if result.status is ExecStatus.EXIT:
            said = result.stderr.decode("utf-8", "replace").strip()
            raise SpoiltError(f"what the completion took away cannot be removed: {said}")
        if result.status is not ExecStatus.OK:
            raise BenchLostError(result.detail or str(result.status))

    async def _see_that_they_fit(self, files: Mapping[str, bytes]) -> None:
        """Put a test's files into a sandbox without the submission.

        Raises:
            UnfitError: that fails too, so it is the data's doing.
        """
        self._sandbox = await self._fresh()
        try:
            await self._sandbox.upload(files)
        except SandboxFileError as error:
            raise UnfitError(f"files cannot be put into a fresh sandbox: {error}") from error
        finally:
            await self.close()


async def _has(sandbox: Sandbox, path: str, data: bytes) -> bool:
    """Whether the very file is there."""
    try:
        return (await sandbox.download([path], max_bytes=len(data))).get(path) == data
    except SandboxFileError:
        return False


def _with_room(limits: Limits, submission: Submission, state: bytes) -> Limits:
    """Limits with room for what tests begin with beside what they give, so that nothing is so large that a test does
    not fit.

    Rounded up to powers of two: sandboxes that are kept ready are of few kinds.
    """
    files = submission.files
    blocks = sum(-(-len(data) // _BLOCK_BYTES) for data in [*files.values(), state])
    names = sum(path.count("/") + 1 for path in files) + len(state) // _MEMBER_BYTES
    return msgspec.structs.replace(
        limits,
        disk_bytes=limits.disk_bytes + _BLOCK_BYTES * _power_of_two(blocks),
        files=limits.files + _power_of_two(names),
    )


def _power_of_two(least: int) -> int:
    return 1 << max((least - 1).bit_length(), 4)
