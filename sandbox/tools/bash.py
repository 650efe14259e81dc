"""A shell for a model."""

import os
import select
import signal
import subprocess
import threading
from typing import IO

_MAX_BYTES = 1 << 20
_CHUNK_BYTES = 1 << 16


def bash(command: str) -> str:
    """Run a command with bash in /workspace and return what it prints, standard error among it. Files stay; variables,
    the directory and processes in the background do not."""
    process = subprocess.Popen(
        ["bash", "-c", command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    assert process.stdout is not None
    with process.stdout:
        said = _read(process.stdout, process).decode("utf-8", "replace")
    code = process.wait()
    if code == 0:
        return said
    end = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
    gap = "" if not said or said.endswith("\n") else "\n"
    return f"{said}{gap}[{end}]"


def _read(stream: IO[bytes], process: subprocess.Popen[bytes]) -> bytes:
    """What the command says until it ends, its middle left out where that is much. What it leaves in the background may
    hold the stream for ever and is not waited for."""
    head, tail, left_out = bytearray(), bytearray(), 0
    descriptor = stream.fileno()
    ended = _end_of(process)
    try:
        while True:
            ready, _, _ = select.select([descriptor, ended], [], [])
            chunk = os.read(descriptor, _CHUNK_BYTES) if descriptor in ready else b""
            if not chunk:
                break
            room = _MAX_BYTES // 2 - len(head)
            head += chunk[:room]
            tail += chunk[max(room, 0) :]
            if (excess := len(tail) - _MAX_BYTES // 2) > 0:
                del tail[:excess]
                left_out += excess
    finally:
        os.close(ended)
    mark = f"\n[... {left_out} bytes left out ...]\n".encode() if left_out else b""
    return bytes(head + mark + tail)


def _end_of(process: subprocess.Popen[bytes]) -> int:
    """A descriptor that can be read when the command has ended."""
    try:
        return os.pidfd_open(process.pid)
    except OSError:  # gVisor has none
        ended, told = os.pipe()
        threading.Thread(target=lambda: (process.wait(), os.close(told)), daemon=True).start()
        return ended
