"""Ends what is nobody's sandbox: machines that states are made of, probes. The pool does so with sandboxes."""

import asyncio
from typing import Final

from rollforward.sandbox.instance import Instance

_AGAIN_S: Final = 1.0


class Burials:
    """Those that were killed and are not gone yet. Belongs to an event loop."""

    def __init__(self) -> None:
        """There are none."""
        self._burying: set[asyncio.Task[None]] = set()

    async def end(self, instance: Instance) -> None:
        """Kill one. What does not end in time is killed again and again until nothing of it is left."""
        try:
            await instance.kill()
        finally:
            if not instance.is_gone:
                task = asyncio.create_task(self._bury(instance))
                self._burying.add(task)
                task.add_done_callback(self._burying.discard)

    async def close(self) -> None:
        """Try no more."""
        for task in self._burying:
            task.cancel()
        await asyncio.gather(*self._burying, return_exceptions=True)

    async def _bury(self, instance: Instance) -> None:
        while True:
            await asyncio.sleep(_AGAIN_S)
            await instance.kill()  # which closes what it had open, even where it is gone by now
            if instance.is_gone:
                return
