"""What a command is started with, as bytes: written by the host, read by the process around the command.

u32 number of arguments | u32 number of strings | the strings, a NUL behind each: directory, arguments, environment
"""

import struct
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

_PATH: Final = "/usr/local/bin:/usr/bin:/bin:/usr/local/sbin:/usr/sbin:/sbin"
_ENVIRONMENT: Final = {"PATH": _PATH, "HOME": "/home", "USER": "user", "LANG": "C.UTF-8", "TERM": "dumb"}
_COUNTS: Final = struct.Struct("<II")


class Program(NamedTuple):
    """A command, as far as it is its program's."""

    name: bytes
    """Its first argument."""
    argv: list[bytes]
    """Empty where no program can be given what this one is to be given."""
    environment: dict[bytes, bytes]
    directory: bytes


def pack(argv: Sequence[str], environment: Mapping[str, str], directory: str) -> bytes:
    """The bytes of a command.

    Args:
        argv: program and arguments.
        environment: variables beside those that every command has.
        directory: where it starts.
    """
    variables = {**_ENVIRONMENT, **environment}
    strings = [directory, *argv, *(f"{name}={value}" for name, value in variables.items())]
    # Where a string has a NUL there are more than are said to be: no program can be given them.
    number = len(strings) if all(name and "=" not in name for name in environment) else 0
    text = "\0".join((*strings, ""))
    try:
        data = text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        number, data = 0, text.encode("utf-8", "replace")
    return _COUNTS.pack(len(argv), number) + data


def unpack(data: bytes) -> Program:
    """The command."""
    arguments, number = _COUNTS.unpack_from(data)
    directory, *strings, _ = data[_COUNTS.size :].split(b"\0")
    if number != 1 + len(strings):
        return Program(strings[0], [], {}, directory)
    variables = (variable.split(b"=", 1) for variable in strings[arguments:])
    return Program(strings[0], strings[:arguments], dict(variables), directory)
