"""How a program that serves the host hears it. Where the host has closed, or is gone, the program ends."""

import os

from rollforward.sandbox.inside import frames, system
from rollforward.sandbox.inside.running import CHUNK_BYTES


def receive(control: int) -> tuple[frames.Head, list[bytes]]:
    """The next message. Ends the process where there is none."""
    try:
        (size,) = frames.LENGTH.unpack(system.read_exactly(control, frames.LENGTH.size))
    except (EOFError, OSError):
        os._exit(0)  # the host has closed, or is gone
    return receive_rest(control, b"", size)


def receive_rest(control: int, begun: bytes, size: int) -> tuple[frames.Head, list[bytes]]:
    """The message of so many bytes that begins like this. Ends the process where the rest does not come."""
    try:
        return frames.unpack(begun + system.read_exactly(control, size - len(begun)))
    except (EOFError, OSError):
        os._exit(0)  # as above


def receive_all(control: int) -> list[tuple[frames.Head, list[bytes]]]:
    """The messages that have come, one at least; the rest of one that has come in part is waited for. Ends the process
    where there is none."""
    found: list[tuple[frames.Head, list[bytes]]] = []
    start = 0
    try:
        data = os.read(control, CHUNK_BYTES)
        while not found or start < len(data):
            if (missing := start + frames.LENGTH.size - len(data)) > 0:
                data += system.read_exactly(control, missing)
            end = start + frames.LENGTH.size + frames.LENGTH.unpack_from(data, start)[0]
            if end > len(data):
                data += system.read_exactly(control, end - len(data))
            found.append(frames.unpack(data[start + frames.LENGTH.size : end]))
            start = end
    except (EOFError, OSError):
        os._exit(0)  # the host has closed, or is gone
    return found
