"""What every sandbox can do for its caller."""

from typing import Protocol

from rollforward.sandbox.types import Call, CallResult


class SandboxClient(Protocol):
    """Runs tools for a model.

    A call is a function of its arguments: it finds nothing that an earlier call has left behind and leaves nothing. So
    every call is safe to make again, whether its result was lost or it never began.
    """

    async def call(self, call: Call) -> CallResult:
        """Make a call and wait for its result. Calls of several tasks run at once as far as the sandbox has workers.

        Returns:
            How it ended; whatever the tool or its caller did is a status, not an exception. INFRA after the sandbox
            itself has failed and a second attempt has too.

        Raises:
            SandboxClosedError: the sandbox is closed, or was before the call ended.
        """
        ...

    async def close(self) -> None:
        """End every process. Calls that wait or run raise SandboxClosedError. Safe to repeat."""
        ...
