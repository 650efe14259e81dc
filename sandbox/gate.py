"""What a sandbox is asked passes here: one that is paused goes on first, and none is paused while it answers."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from rollforward.sandbox.errors import SandboxBusyError
from rollforward.sandbox.instance import Instance

_T = TypeVar("_T")


class Gate:
    """States of its sandbox: running -> paused (`pause`) -> running (`resume`, or a question). One event loop."""

    def __init__(self, sandbox: Instance) -> None:
        """Begin with one that runs."""
        self._sandbox = sandbox
        self._num_asking = 0
        self._is_paused = False
        self._changing = asyncio.Lock()
        self._changes: set[asyncio.Task[None]] = set()

    def check_quiet(self) -> None:
        """Refuse what may only be between two questions.

        Raises:
            SandboxBusyError: it is answering one.
        """
        if self._num_asking:
            raise SandboxBusyError(f"sandbox {self._sandbox.id} runs something; ask that between two commands")

    async def ask(self, question: Callable[[], Coroutine[Any, Any, _T]]) -> _T:
        """Ask the sandbox something."""
        self._num_asking += 1  # from here on nobody pauses it
        try:
            await self.resume()
            return await question()
        finally:
            self._num_asking -= 1

    async def pause(self) -> None:
        """Have nothing of it run. Whoever goes away meanwhile has it paused all the same.

        Raises:
            SandboxBusyError: it is answering something.
            SandboxUnavailableError: this machine cannot.
        """
        await self._to_its_end(self._pause())

    async def resume(self) -> None:
        """Have it go on. Whoever goes away meanwhile has it go on all the same."""
        if self._is_paused or self._changing.locked():
            await self._to_its_end(self._resume())

    async def _pause(self) -> None:
        async with self._changing:
            self.check_quiet()
            self._is_paused = True  # from here on it may stand still, even where this fails
            await self._sandbox.pause()

    async def _resume(self) -> None:
        async with self._changing:
            if self._is_paused:
                await self._sandbox.resume()
                self._is_paused = False

    async def _to_its_end(self, change: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(change)
        self._changes.add(task)
        task.add_done_callback(self._changes.discard)
        await asyncio.shield(task)
