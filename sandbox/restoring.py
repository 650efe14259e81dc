"""A trajectory's sandbox with all in it that its log says: kept, restored and brought up to date.

    caught_up   the sandbox that there is; or another one in its place, with the commands after its beginning done again
    keep        its state beside the log, and a SNAPSHOT in it

Not here: whether one that is gone may be replaced (`tenancy.py`), the order of calls (`session.py`).
"""

from rollforward.sandbox.client import Sandbox
from rollforward.sandbox.command_history import LoggedCommand
from rollforward.sandbox.command_log import CommandLog
from rollforward.sandbox.command_records import SnapshotRecord, decode_call
from rollforward.sandbox.errors import GoneCause, SandboxGoneError
from rollforward.sandbox.tenancy import LostError, Tenancy
from rollforward.sandbox.types import CallStatus
from rollforward.sandbox.unbroken import in_thread


async def caught_up(log: CommandLog, tenancy: Tenancy) -> Sandbox | None:
    """The sandbox, with all in it that the log says; None where it ran out of memory.

    Raises:
        LostError: there is none, or commands that were done again ended otherwise.
        SandboxError: as `Tenancy.ready`.
    """
    if tenancy.history.gone is not None:
        return None
    while True:
        try:
            sandbox = await tenancy.ready()
        except SandboxGoneError as gone:
            if gone.cause is GoneCause.OOM:
                return None
            raise
        try:
            for command in tenancy.history.redo:
                await _redo(log, tenancy, sandbox, command)
        except SandboxGoneError as gone:
            if not tenancy.lose(gone):
                raise LostError(f"restored, and lost again while commands were done again: {gone}") from None
        else:
            return sandbox


async def keep(log: CommandLog, tenancy: Tenancy, *, max_bytes: int) -> None:
    """Keeps the sandbox's state, in place of the one before. No command runs.

    Raises:
        LostError: it ran out of memory, or as `caught_up`.
        SandboxFileError: the state has more bytes.
        SandboxError: as `caught_up`, and as the log says.
    """
    sandbox = await caught_up(log, tenancy)
    if sandbox is None:
        raise LostError("the sandbox ran out of memory")
    taken = await tenancy.patiently(lambda: sandbox.snapshot(max_bytes=max_bytes))
    stored = await in_thread(lambda: log.snapshots.put(taken.data))
    await tenancy.append(SnapshotRecord(taken.kind, taken.image, stored))
    await in_thread(lambda: log.snapshots.keep_only(stored))


async def _redo(log: CommandLog, tenancy: Tenancy, sandbox: Sandbox, command: LoggedCommand) -> None:
    """Does a command again whose effects were lost. Asked again in the same sandbox it runs once.

    Raises:
        LostError: it ends otherwise than the log says.
        SandboxGoneError: the sandbox is gone.
    """
    end, key = command.end, command.start.key
    assert end is not None, "only commands that ended are done again"
    call = decode_call(command.start)
    result = await tenancy.patiently(lambda: sandbox.call(call, key=key))
    if result.status in (CallStatus.OOM, CallStatus.KILLED, CallStatus.INFRA):
        await tenancy.check_alive(sandbox)
    text = await in_thread(lambda: log.blobs.get(end.text))
    told = (end.status, text, end.truncated, end.total_bytes)
    found = (result.status, result.text.encode("utf-8", "surrogatepass"), result.truncated, result.total_bytes)
    if told != found:
        raise LostError(
            f"the sandbox was lost and restored, and {key}, done again, does not end as it did: it was"
            f" {end.status.value} with {end.total_bytes} bytes, and is {result.status.value} with {result.total_bytes}"
        )
