"""Sandboxes for verifiers: many threads ask, one event loop in a thread of its own asks the supervisors.

A process has one for all its tasks. Nothing is opened before the first submission is judged: the run's sandbox actors
start later than its tasks are built.
"""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from rollforward.rl.errors import RewardError
from rollforward.sandbox.client import SandboxClient, Transport
from rollforward.sandbox.config import ContainerConfig

_T = TypeVar("_T")

Work = Callable[[SandboxClient, ContainerConfig], Coroutine[Any, Any, _T]]
"""What is to be done with the client, on its loop."""


class Grader:
    """Runs what needs sandboxes for threads that have no event loop.

    States: without a client, then, from the first question on, with one, until `close`.
    """

    def __init__(self, config: ContainerConfig, transports: Sequence[Transport] = ()) -> None:
        """Keep whom to ask. Nothing is asked yet.

        Args:
            config: limits and patience.
            transports: to the supervisors; used by nobody else. None: `connect` brings them before the first question.
        """
        self._config, self._transports = config, tuple(transports)
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._client: SandboxClient | None = None

    def connect(self, transports: Sequence[Transport]) -> None:
        """Say whom to ask from the next first question on; used by nobody else."""
        self._transports = tuple(transports)

    def run(self, work: Work[_T]) -> _T:
        """Do some work with the client and wait for its result. From any thread.

        Raises:
            RewardError: nobody has said where sandboxes are.
        """
        with self._lock:
            loop = self._started()
        return asyncio.run_coroutine_threadsafe(self._with_client(work), loop).result()

    def close(self) -> None:
        """Let go of the client; what is still being judged is cancelled. A later question opens another one."""
        with self._lock:
            loop, self._loop = self._loop, None
            if loop is None:
                return
            asyncio.run_coroutine_threadsafe(self._end(), loop).result()
            loop.call_soon_threadsafe(loop.stop)

    def _started(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            if not self._transports:
                raise RewardError(
                    "a reward of type unit_tests runs tests in sandboxes, and there are none here. Judge in a run of"
                    " train, sft or eval"
                )
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=_serve, args=(self._loop,), name="grader", daemon=True).start()
        return self._loop

    async def _with_client(self, work: Work[_T]) -> _T:
        if self._client is None:
            self._client = SandboxClient(self._transports, self._config, owner="tests")
        return await work(self._client, self._config)

    async def _end(self) -> None:
        judging = asyncio.all_tasks() - {asyncio.current_task()}
        client, self._client = self._client, None
        for task in judging:
            task.cancel()
        await asyncio.gather(*judging, return_exceptions=True)  # each lets go of its sandbox
        if client is not None:
            await client.close()


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    loop.run_forever()
    loop.close()
