"""Messages between the host and an agent: a JSON object and some strings of bytes.

length of the rest u32 | length of the JSON u32 | JSON, in which "blobs" are the lengths of the bytes | the bytes
"""

import json
import struct
from typing import Any, Final

LENGTH: Final = struct.Struct("<I")
"""In front of every message, and of its JSON."""
MAX_BYTES: Final = 1 << 30
"""A message is shorter."""

Head = dict[str, Any]
"""The JSON object."""


def pack(head: Head, *blobs: bytes) -> bytes:
    """The message with its length in front."""
    text = json.dumps({**head, "blobs": [len(blob) for blob in blobs]}).encode()
    size = LENGTH.size + len(text) + sum(map(len, blobs))
    return b"".join((LENGTH.pack(size), LENGTH.pack(len(text)), text, *blobs))


def unpack(data: bytes) -> tuple[Head, list[bytes]]:
    """The parts of a message without its length.

    Raises:
        ValueError: it is none.
    """
    try:
        (size,) = LENGTH.unpack_from(data)
        head = json.loads(data[LENGTH.size : LENGTH.size + size])
        start, blobs = LENGTH.size + size, list[bytes]()
        for length in head["blobs"]:
            blobs.append(data[start : start + length])
            start += length
        is_whole = start == len(data) and all(length >= 0 for length in head["blobs"])
    except (struct.error, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"no message: {type(error).__name__}") from None
    if not is_whole:
        raise ValueError("no message: its lengths do not add up")
    return head, blobs
