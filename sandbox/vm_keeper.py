"""A guest's first process (`inside/machine.py`), seen from the host: it is told things, and answers some of them.

Its answers have no numbers: each is the next one's after its question. So whoever goes away before an answer, or gets
none in time, leaves one that nobody may ask any more.
"""

import asyncio
import contextlib
import secrets
import socket
import time
from collections.abc import Generator
from typing import Any, Final

from rollforward.sandbox.errors import SandboxUnavailableError
from rollforward.sandbox.inside import frames

_ANSWER_S: Final = 60.0
_ENTROPY_BYTES: Final = 64
_MAX_BYTES: Final = 1 << 16
_PART_BYTES: Final = 1 << 12


class Keeper:
    """One end of its socket. Belongs to an event loop; one question at a time. The guest is not trusted."""

    def __init__(self, control: socket.socket) -> None:
        """Take the socket over."""
        control.setblocking(False)
        self._control = control
        self._is_lost = False

    async def tell(self, message: bytes) -> None:
        """Say something that has no answer.

        Raises:
            SandboxUnavailableError: it does not listen.
        """
        with self._whole():
            await self._tell(message)

    async def heard(self, within_s: float) -> frames.Head:
        """What it says next, unasked.

        Raises:
            SandboxUnavailableError: that does not come in time, or is nothing.
        """
        with self._whole():
            return await self._heard(within_s)

    async def renew(self) -> int:
        """Give it new random numbers and the time; processes that its kernel has killed for memory so far.

        Raises:
            SandboxUnavailableError: it does not answer, or did not before.
        """
        with self._whole():
            await self._tell(frames.pack({"op": "renew", **newness()}))
            count = (await self._heard(_ANSWER_S)).get("ooms")
            return count if type(count) is int else 0

    def close(self) -> None:
        """Let the socket go."""
        self._control.close()

    @contextlib.contextmanager
    def _whole(self) -> Generator[None]:
        """What comes after something that was broken off would be taken for the rest of it, or for its answer."""
        if self._is_lost:
            raise SandboxUnavailableError("sandbox: a machine has not answered before, and is not asked any more")
        try:
            yield
        except BaseException:
            self._is_lost = True
            raise

    async def _tell(self, message: bytes) -> None:
        try:
            async with asyncio.timeout(_ANSWER_S):
                await asyncio.get_running_loop().sock_sendall(self._control, message)
        except TimeoutError:
            raise SandboxUnavailableError(f"sandbox: a machine did not listen within {_ANSWER_S:g} s") from None
        except OSError:
            raise SandboxUnavailableError("sandbox: a machine ended before it listened") from None

    async def _heard(self, within_s: float) -> frames.Head:
        loop, data = asyncio.get_running_loop(), b""
        try:
            async with asyncio.timeout(within_s):
                while len(data) < frames.LENGTH.size or len(data) < frames.LENGTH.size + _length(data):
                    chunk = await loop.sock_recv(self._control, _PART_BYTES)
                    if not chunk or len(data) > _MAX_BYTES:
                        raise EOFError
                    data += chunk
            return frames.unpack(data[frames.LENGTH.size :])[0]
        except TimeoutError:
            raise SandboxUnavailableError(f"sandbox: a machine did not answer within {within_s:g} s") from None
        except (EOFError, OSError, ValueError):
            raise SandboxUnavailableError("sandbox: a machine ended before it answered") from None


def newness() -> dict[str, Any]:
    """What makes a machine another one than those that go on from the same state."""
    return {"entropy": secrets.token_hex(_ENTROPY_BYTES), "unix_ns": time.time_ns()}


def _length(data: bytes) -> int:
    return frames.LENGTH.unpack_from(data)[0]
