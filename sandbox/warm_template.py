"""The warm process that containers are forked from, seen from the host: starting it, asking it, noticing its end."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Final

from rollforward.sandbox.bubblewrap import spawn, unavailable
from rollforward.sandbox.errors import SandboxUnavailableError
from rollforward.sandbox.images import Images, host_directories
from rollforward.sandbox.inside import template, zygote

FIRST_USER: Final = 1_900_000_000
"""Where the host's user is root, the template is this user and each container's commands are one of those after it:
numbers that no system gives to anybody."""
USERS: Final = 65536
_START_TIMEOUT_S: Final = 60.0
_ASK_TIMEOUT_S: Final = 30.0
_END_S: Final = 5.0
_SAID_BYTES: Final = 1 << 12


class WarmTemplate:
    """A running template. Belongs to the event loop, and to the thread that made it, with which it dies."""

    def __init__(self, images: Images, *, first_user: int = FIRST_USER, more: Sequence[str] = ()) -> None:
        """Start it.

        Args:
            images: what it shows.
            first_user: where the host's user is root, its user; those of what it makes are the next ones.
            more: further options of bubblewrap.

        Raises:
            SandboxUnavailableError: bubblewrap is missing or could not make the namespaces.
        """
        self._loop = asyncio.get_running_loop()
        self._asking = asyncio.Lock()
        self._answer: asyncio.Future[tuple[bytes, list[int]]] | None = None
        self._due = 0  # answers still to come, in the order of their questions; but for the last, nobody waits for them
        self.died: asyncio.Future[None] = self._loop.create_future()
        is_many = os.geteuid() == 0
        uid = first_user if is_many else zygote.SANDBOX_ID
        setup = {"uid": uid, "is_many": is_many, "binds": host_directories()}
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115, closed by close
        self._channel, inside = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with contextlib.ExitStack() as stack:
            stack.callback(self._errors.close)
            stack.callback(self._channel.close)
            with inside:
                self._process = spawn(
                    template.__name__,
                    inside,
                    self._errors,
                    users=(uid, USERS),
                    more=[*images.options(), *more],
                    argument=json.dumps(setup),
                    prefix=images.prefix(),
                )
            stack.pop_all()
        self._channel.setblocking(False)
        self._loop.add_reader(self._channel.fileno(), self._hear)

    @property
    def pid(self) -> int:
        """Of bubblewrap, with which it dies."""
        return self._process.pid

    async def wait(self) -> None:
        """Wait until it is up.

        Raises:
            SandboxUnavailableError: it does not come up; it is gone then.
        """
        try:
            await self._receive(_START_TIMEOUT_S)
        except SandboxUnavailableError:
            raise unavailable(self._errors, "the template of containers did not come up") from None

    async def make(self, request: Mapping[str, Any], descriptors: list[int]) -> int:
        """Have a container forked; a pidfd of its first process.

        Raises:
            SandboxUnavailableError: it was not, or the template is gone.
        """
        async with self._asking:
            if self.died.done():
                raise SandboxUnavailableError("sandbox: the template of containers is gone; ask again")
            try:
                os.close(os.dup(self._channel.fileno()))  # a pidfd that there is no room for would be lost
                socket.send_fds(self._channel, [json.dumps(request).encode()], descriptors)
            except OSError as error:
                raise SandboxUnavailableError(f"sandbox: the template of containers: {error.strerror}") from None
            message, found = await self._receive(_ASK_TIMEOUT_S)
        if error := json.loads(message)["error"]:
            raise SandboxUnavailableError(f"sandbox: making a container failed: {error}")
        if len(found) != 1:
            raise SandboxUnavailableError("sandbox: a container was made and lost: too many files are open (ulimit -n)")
        return found[0]

    def close(self) -> None:
        """Kill it, and with it every container that it has made; returns when all are gone, or as good as that."""
        self._end()
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # it waits in the kernel for something, killed as it is
            self._process.wait(_END_S)
        self._errors.close()

    def said(self) -> str:
        """What it, or a container that did not come up, has said last."""
        errors = self._errors.fileno()
        start = max(os.fstat(errors).st_size - _SAID_BYTES, 0)  # read without a seek: its writers are where this one is
        return os.pread(errors, _SAID_BYTES, start).decode("utf-8", "replace").strip() or "it said nothing"

    async def _receive(self, timeout_s: float) -> tuple[bytes, list[int]]:
        if self.died.done():
            raise SandboxUnavailableError("sandbox: the template of containers is gone; ask again")
        self._answer = self._loop.create_future()
        self._due += 1
        try:
            return await asyncio.wait_for(self._answer, timeout_s)
        except TimeoutError:
            self._end()  # an answer that comes now would be taken for that to the next question
            self._process.kill()
            raise SandboxUnavailableError("sandbox: the template of containers does not answer") from None
        finally:
            self._answer = None

    def _hear(self) -> None:
        try:
            message, descriptors, _, _ = socket.recv_fds(self._channel, 1 << 16, 4)
        except BlockingIOError:
            return
        except OSError:
            message, descriptors = b"", []
        if not message:
            self._end()
            return
        self._due -= 1
        if self._answer is not None and not self._answer.done() and not self._due:
            self._answer.set_result((message, descriptors))
            return
        for pidfd in descriptors:  # of what nobody waits for any more
            with contextlib.suppress(OSError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            os.close(pidfd)

    def _end(self) -> None:
        if self.died.done():
            return
        self.died.set_result(None)
        self._loop.remove_reader(self._channel.fileno())
        self._channel.close()
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(SandboxUnavailableError("sandbox: the template of containers has ended"))


def host_pid(pidfd: int) -> int:
    """The pid here of the process that a pidfd names; -1 where it is gone."""
    for line in Path(f"/proc/self/fdinfo/{pidfd}").read_text().splitlines():
        key, _, value = line.partition(":")
        if key == "Pid":
            return int(value)
    return -1
