"""Programs of this machine that make something for sandboxes: each ends, or is ended and named."""

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Final, NamedTuple

from rollforward.sandbox.errors import SandboxUnavailableError

_WITHIN_S: Final = 600.0
_END_S: Final = 5.0
"""A program that was killed is gone within this time, unless it waits in the kernel for something."""


class HangsError(SandboxUnavailableError):
    """A program did not come to its end in time."""


class Done(NamedTuple):
    """How a program has ended."""

    code: int
    output: bytes
    errors: str

    @property
    def said(self) -> str:
        """The last line of its errors, or else of its output, or else its status."""
        lines = (self.errors or self.output.decode("utf-8", "replace").strip()).splitlines()
        return lines[-1].strip() if lines else f"it ended with {self.code} and said nothing"


def run_program(
    name: str,
    command: Sequence[str],
    *,
    within_s: float | None = None,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    output: IO[bytes] | None = None,
) -> Done:
    """Run a program to its end, without input.

    Args:
        name: what people call it; the command may be something that starts it.
        command: path and arguments.
        within_s: it and all that it has started are killed then; None: after ten minutes.
        cwd: where it runs; None: here.
        env: its environment; None: that of this process.
        output: where its output goes; None: it is returned.

    Raises:
        SandboxUnavailableError: it could not be started.
        HangsError: it did not end in time.
    """
    within_s = _WITHIN_S if within_s is None else within_s
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE if output is None else output,
            stderr=subprocess.PIPE,
            cwd=cwd,
            env=env,
            process_group=0,
        )
    except OSError as error:
        raise SandboxUnavailableError(
            f"sandbox: {name} cannot be started: {error.strerror or error}. Install it, or look at {command[0]}"
        ) from None
    try:
        said, errors = process.communicate(timeout=within_s)
    except BaseException as error:
        _end(process)
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
        raise HangsError(
            f"sandbox: {name} has not come to its end within {within_s:g} s and was killed. Look at the disk, at what"
            " the system says (dmesg), and whether the machine is overloaded; then try again"
        ) from None
    return Done(process.returncode, said or b"", errors.decode("utf-8", "replace").strip())


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Kill it, and what it has started, which may hold its output open."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_END_S)
    for end in (process.stdout, process.stderr):
        if end is not None:
            end.close()
