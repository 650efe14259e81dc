"""Ray wrapper of a sandbox supervisor. No logic: a method is one call.

An actor holds a connection and nothing else: sandboxes belong to the supervisor, a process outside Ray that outlives
it. Ray starts an actor again that died (`max_restarts`), which finds the supervisor; it repeats no question, because
only who asks knows what is safe to repeat (`client.py`).
"""

from typing import Any

import ray

from rollforward.sandbox import wire
from rollforward.sandbox.config import ContainerConfig
from rollforward.sandbox.launch import LocalTransport

# As many questions as there may be sandboxes, and those that wait.
_OPTIONS: dict[str, Any] = {"max_restarts": -1, "max_task_retries": 0, "max_concurrency": 1 << 16}


@ray.remote(**_OPTIONS)
class SandboxActor:
    """A way to a supervisor on the actor's node."""

    def __init__(self, name: str, config: ContainerConfig) -> None:
        """Name the supervisor; the first question starts it, if there is none."""
        self._transport = LocalTransport(name, config)

    async def start(self) -> tuple[str, ...]:
        """See ``LocalTransport.start``."""
        return await self._transport.start()

    async def ask(self, operation: str, payload: wire.Data) -> wire.Data:
        """See ``LocalTransport.ask``."""
        return await self._transport.ask(operation, payload)
