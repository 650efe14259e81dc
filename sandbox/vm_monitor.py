"""An emulator's control socket (QMP): questions and answers, and files that are handed over."""

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncGenerator
from typing import Any, Final

from rollforward.sandbox.errors import SandboxUnavailableError

_LOOK_S: Final = 0.005
_ANSWER_S: Final = 60.0
_LONG_S: Final = 300.0
_MAX_BYTES_PER_S: Final = 1 << 40
_MAX_LINE_BYTES: Final = 1 << 20
_MAX_REASON: Final = 2000
_MAX_LINES: Final = 1024
_MAX_BYTES: Final = 4 << 20
"""Of an answer and all lines before it: a greeting, events, answers to questions whose asker has gone away."""


class MonitorLostError(SandboxUnavailableError):
    """An emulator has ended, or does not answer, or says what makes no sense: its machine is lost."""


class Monitor:
    """One end of the socket. Belongs to an event loop; one question at a time. The emulator is not trusted."""

    def __init__(self, control: socket.socket) -> None:
        """Take the socket over."""
        control.setblocking(False)
        self._control = control
        self._heard = b""
        self._asking = asyncio.Lock()
        self._is_greeted = False
        self._num_questions = self._num_files = 0

    async def ask(self, command: str, *, file: int = -1, **arguments: Any) -> Any:
        """Ask, and return the answer.

        Args:
            command: of QMP, such as "query-status".
            file: a descriptor that goes with it; -1: none.
            arguments: its arguments, with "_" for "-".

        Raises:
            MonitorLostError: the emulator is gone, or as good as that.
            SandboxUnavailableError: it refused it.
        """
        async with self._asking:
            if not self._is_greeted:
                self._is_greeted = True
                await self._exchange({"execute": "qmp_capabilities"}, -1)  # its greeting is passed over
            named = {name.replace("_", "-"): value for name, value in arguments.items()}
            return await self._exchange({"execute": command, "arguments": named}, file)

    async def ignore_shared_memory(self) -> None:
        """States hold no memory that lies in a file that others share: see `vm_forked.py`."""
        capability = {"capability": "x-ignore-shared", "state": True}
        await self.ask("migrate-set-capabilities", capabilities=[capability])

    async def hurry(self) -> None:
        """States are written as fast as can be, where QEMU would keep to what a network takes."""
        await self.ask("migrate-set-parameters", max_bandwidth=_MAX_BYTES_PER_S)

    async def migrate(self, file: int) -> None:
        """Write the state of a stopped machine to a file.

        Raises:
            SandboxUnavailableError: it cannot be written.
        """
        self._num_files += 1
        name = f"state{self._num_files}"
        await self.ask("getfd", file=file, fdname=name)
        await self.ask("migrate", uri=f"fd:{name}")
        try:
            async with _bounded():
                await self._wait_for_migration()
        except MonitorLostError:
            raise
        except BaseException:  # it would go on writing, and refuse to write another state meanwhile
            with contextlib.suppress(SandboxUnavailableError):
                await self.ask("migrate_cancel")
            raise

    async def _wait_for_migration(self) -> None:
        while (status := _status(state := await self.ask("query-migrate"))) != "completed":
            if status in ("failed", "cancelled"):
                raise SandboxUnavailableError(
                    f"sandbox: saving a machine failed: {str(state.get('error-desc', 'no reason'))[:_MAX_REASON]}. Make"
                    " room: it is written into memory"
                )
            await asyncio.sleep(_LOOK_S)

    async def wait_until_loaded(self) -> None:
        """Wait until a machine has taken up the state that it was started with."""
        async with _bounded():
            while _status(await self.ask("query-status")) == "inmigrate":
                await asyncio.sleep(_LOOK_S)

    def close(self) -> None:
        """Let the socket go."""
        self._control.close()

    async def _exchange(self, question: dict[str, Any], file: int) -> Any:
        self._num_questions += 1
        question = {**question, "id": self._num_questions}
        data = json.dumps(question).encode()
        try:
            async with asyncio.timeout(_ANSWER_S):
                if file >= 0:
                    data = data[socket.send_fds(self._control, [data], [file]) :]
                await asyncio.get_running_loop().sock_sendall(self._control, data)
                answer = await self._answer(question["id"])
        except (OSError, ValueError, RecursionError) as error:
            why = str(error) or f"not within {_ANSWER_S:g} s"
            raise MonitorLostError(f"sandbox: an emulator does not answer: {why}") from None
        if "return" not in answer:
            error = answer.get("error")
            why = error.get("desc") if isinstance(error, dict) else error
            raise SandboxUnavailableError(f"sandbox: {question['execute']}: {str(why)[:_MAX_REASON]}")
        return answer["return"]

    async def _answer(self, number: int) -> dict[str, Any]:
        num_bytes = 0
        for _ in range(_MAX_LINES):
            line = await self._line()
            num_bytes += len(line)
            if num_bytes > _MAX_BYTES:
                break
            answer = json.loads(line)
            if not isinstance(answer, dict):
                raise ValueError("it says what is no object")
            if answer.get("id") == number:
                return answer
        raise ValueError("it says other things, and no end of them")

    async def _line(self) -> bytes:
        while b"\n" not in self._heard:
            chunk = await asyncio.get_running_loop().sock_recv(self._control, 1 << 16)
            if not chunk:
                raise OSError("it is gone")
            if len(self._heard) > _MAX_LINE_BYTES:
                raise OSError("its line does not end")
            self._heard += chunk
        line, _, self._heard = self._heard.partition(b"\n")
        await asyncio.sleep(0)  # what has come already is read without a pause, and there may always be more
        return line


def _status(answer: Any) -> str:
    """The status that an answer tells.

    Raises:
        MonitorLostError: it tells none.
    """
    status = answer.get("status") if isinstance(answer, dict) else None
    if not isinstance(status, str):
        raise MonitorLostError("sandbox: an emulator's answer tells no status")
    return status


@contextlib.asynccontextmanager
async def _bounded() -> AsyncGenerator[None]:
    """For what writes or reads all of a machine.

    Raises:
        SandboxUnavailableError: it took too long.
    """
    try:
        async with asyncio.timeout(_LONG_S):
            yield
    except TimeoutError:
        raise SandboxUnavailableError(f"sandbox: an emulator has not done its work within {_LONG_S:g} s") from None
