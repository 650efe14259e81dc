"""Places for a bounded number, given first come, first served, to those who wait no longer than they may."""

import asyncio
import contextlib
from collections import deque


class Room:
    """Places, given first come, first served."""

    def __init__(self, limit: int) -> None:
        """All are free."""
        self._limit = limit
        self._taken = 0
        self._queue: deque[asyncio.Future[None]] = deque()

    @property
    def num_waiting(self) -> int:
        """Who waits."""
        return len(self._queue)

    @property
    def taken(self) -> int:
        """Places that are not free."""
        return self._taken

    def resize(self, limit: int) -> None:
        """Have more places or fewer; those that are taken stay so."""
        self._limit = limit
        self._pass_on()

    async def take(self, within_s: float) -> None:
        """Wait for a place and take it.

        Raises:
            TimeoutError: there was none.
        """
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.append(place)
        self._pass_on()
        try:
            async with asyncio.timeout(within_s):
                await place
        except BaseException:
            if place.done() and not place.cancelled():  # it came at the last moment
                self.give()
            raise
        finally:
            with contextlib.suppress(ValueError):
                self._queue.remove(place)

    def give(self) -> None:
        """Give a place back."""
        self._taken -= 1
        self._pass_on()

    def _pass_on(self) -> None:
        while self._queue and self._taken < self._limit:
            place = self._queue.popleft()
            if not place.done():
                self._taken += 1
                place.set_result(None)
