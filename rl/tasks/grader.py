"""Sandboxes for verifiers: many threads ask, one event loop in a thread of its own asks the supervisors.

A process has one for all its tasks. Nothing is opened before the first submission is judged: the run's sandbox actors
start later than its tasks are built.
"""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from rollforward.rl.errors import RewardError
from rollforward.sandbox.client import SandboxClient
from rollforward.sandbox.config import ContainerConfig

_T = TypeVar("_T")

OpenClient = Callable[[], SandboxClient]
"""Makes the client, on the loop that will use it."""


class Grader:
    """Runs what needs sandboxes for threads that have no event loop.

    States: without a client, then, from the first question on, with one; `close` ends it. `connect` says how the client
    is made and must come before the first question.
    """

    def __init__(self, config: ContainerConfig, open_client: OpenClient | None = None) -> None:
        """Keep what is needed later."""
        self._config, self._open_client = config, open_client
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._client: SandboxClient | None = None

    def connect(self, open_client: OpenClient) -> None:
        """Say how the client is made; the first question makes it."""
        self._open_client = open_client

    def run(self, work: Callable[[SandboxClient, ContainerConfig], Coroutine[Any, Any, _T]]) -> _T:
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
            if self._open_client is None:
                raise RewardError(
                    "a reward of type unit_tests runs tests in sandboxes, and this command has none. Use train, sft or"
                    " eval"
                )
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=self._loop.run_forever, name="grader", daemon=True).start()
        return self._loop

    async def _with_client(self, work: Callable[[SandboxClient, ContainerConfig], Coroutine[Any, Any, _T]]) -> _T:
        if self._client is None:
            assert self._open_client is not None
            self._client = self._open_client()
        return await work(self._client, self._config)

    async def _end(self) -> None:
        this = asyncio.current_task()
        others = [task for task in asyncio.all_tasks() if task is not this]
        client, self._client = self._client, None
        if client is not None:
            await client.close()
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
