"""Messages between the host and an agent: a JSON object and some strings of bytes.

length of the rest u32 | length of the JSON u32 | JSON, in which "blobs" are the lengths of the bytes | the bytes

A command, of which there are many and which machine code reads (`native.cc`), has no JSON:

length of the rest u32 | u32 of ones | question u64 | seconds of wall time f64 | length of input u32 | input | program
"""

import json
import struct
from typing import Any, Final

LENGTH: Final = struct.Struct("<I")
"""In front of every message, and of its JSON."""
MAX_BYTES: Final = 1 << 30
"""A message is shorter."""
_COMMAND: Final = struct.Struct("<IQdI")
_NO_JSON: Final = 0xFFFF_FFFF
_MAX_BLOBS: Final = 4096
_ENCODE: Final = json.JSONEncoder(check_circular=False).encode
_DECODE: Final = json.JSONDecoder().raw_decode

Head = dict[str, Any]
"""The JSON object."""


def pack(head: Head, *blobs: bytes) -> bytes:
    """The message with its length in front."""
    if head.get("op") == "exec":
        stdin, program = blobs
        told = _COMMAND.pack(_NO_JSON, head["id"], head["wall_s"], len(stdin))
        return b"".join((LENGTH.pack(len(told) + len(stdin) + len(program)), told, stdin, program))
    text = _ENCODE({**head, "blobs": [*map(len, blobs)]}).encode()
    size = LENGTH.size + len(text) + sum(map(len, blobs))
    return b"".join((LENGTH.pack(size), LENGTH.pack(len(text)), text, *blobs))


def unpack(data: bytes, *, max_head_bytes: int = MAX_BYTES) -> tuple[Head, list[bytes]]:
    """The parts of a message without its length.

    Args:
        data: the message.
        max_head_bytes: of its JSON, which takes up many times as much once it is read.

    Raises:
        ValueError: it is none.
    """
    try:
        (size,) = LENGTH.unpack_from(data)
        if size == _NO_JSON:
            _, number, wall_s, stdin_bytes = _COMMAND.unpack_from(data)
            rest = data[_COMMAND.size :]
            if stdin_bytes > len(rest):
                raise ValueError("no message: its input has more bytes than it")
            return {"op": "exec", "id": number, "wall_s": wall_s}, [rest[:stdin_bytes], rest[stdin_bytes:]]
        if size > max_head_bytes:
            raise ValueError(f"no message: its JSON has {size} bytes")
        text = data[LENGTH.size : LENGTH.size + size].decode()
        head, end = _DECODE(text)
        if end != len(text):
            raise ValueError("no message: its JSON has more behind it")
        lengths = head["blobs"]
    except (struct.error, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"no message: {type(error).__name__}") from None
    # Before anything is cut out: lengths that overlap would make gigabytes of a short message.
    is_sound = isinstance(lengths, list) and all(type(length) is int and length >= 0 for length in lengths)
    start = LENGTH.size + size
    if not is_sound or len(lengths) > _MAX_BLOBS or sum(lengths) != len(data) - start:
        raise ValueError("no message: its lengths do not add up")
    blobs: list[bytes] = []
    for length in lengths:
        blobs.append(data[start : start + length])
        start += length
    return head, blobs
