"""Machine code (`native.cc`) for what stands between the host and a short command, where Python's own time counts.

An emulated processor needs milliseconds for the Python of an agent and of the process around a command. A machine loads
the library once, before anything is forked; where it is not loaded, `agent.py` and `command.py` do the same.
"""

import ctypes
from typing import Any, Final

CHUNK_BYTES: Final = 1 << 16
"""What is read at most of a message or a stream."""
OTHER, RUNNING, ENDED = range(3)
"""Why `attend` returns."""

_library: Any = None
_frame: Final = ctypes.create_string_buffer(CHUNK_BYTES)
_bytes: Final = ctypes.create_string_buffer(3 * CHUNK_BYTES)


class Round(ctypes.Structure):
    """What an agent has at hand when it waits for a command, and how far that has come.

    The former: descriptors of the host's socket, of the socket to a process that waits, of the private layer and of
    memory.events (or -1); whether the process has said that it is ready; bytes of a stream that are kept; seconds after
    which a command is a long one; computing time of all that the process has buried, which is kept up. The latter: the
    command's streams, for reading; how much has been read of the process, and of those; the size of the message, and
    how much of it has been read; when the command began.
    """

    _fields_ = (
        *((name, ctypes.c_int) for name in ("control", "channel", "upper", "events", "is_ready", "room")),
        ("short_s", ctypes.c_double),
        ("buried_s", ctypes.c_double),
        ("streams", ctypes.c_int * 2),
        ("sizes", ctypes.c_int * 3),
        ("size", ctypes.c_uint32),
        ("have", ctypes.c_uint32),
        ("start_s", ctypes.c_double),
    )

    def message(self) -> bytes:
        """What has been read of the host's message, without its length."""
        return ctypes.string_at(_frame, self.have)

    def said(self) -> list[bytes]:
        """What has been read of the process, of the command's output, and of its errors."""
        return [ctypes.string_at(ctypes.byref(_bytes, i * CHUNK_BYTES), self.sizes[i]) for i in range(3)]


def load(path: str) -> None:
    """Load the library, for this process and all that it forks."""
    global _library
    _library = ctypes.CDLL(path)
    _library.lead.restype = ctypes.c_int64
    _library.lead.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_double, ctypes.POINTER(ctypes.c_void_p))


def is_loaded() -> bool:
    """Whether it is."""
    return _library is not None


def lead(channel: int, uses: int, own_cpu_s: float) -> bytes:
    """Run commands, one after another, as `command.lead_many` does; ends the process where nobody wants it any more.

    Args:
        channel: socket to the agent.
        uses: so many at most.
        own_cpu_s: computing time of this process after which it takes no further one.

    Returns:
        The request that is no command; nothing where it takes no further one.
    """
    call = ctypes.c_void_p()
    size: int = _library.lead(channel, uses, own_cpu_s, ctypes.byref(call))
    return ctypes.string_at(call.value, size) if size and call.value else b""


def attend(around: Round) -> int:
    """Answer commands without input, one after another, as long as they are short and one comes at a time; ends the
    process where the host has closed.

    Returns:
        OTHER: there is a message that is something else, of which at least the first four bytes have been read.
        RUNNING: a command that is not over has been given to the process. ENDED: the process takes no further one.
    """
    return int(_library.attend(ctypes.byref(around), _frame, _bytes))
