"""Files of a container as its agent reads and writes them, beside whatever runs there."""

import os
from collections.abc import Callable
from typing import Any, Final

from rollforward.sandbox.inside import root


class FileError(Exception):
    """A file cannot be read or written; the reason is for the caller."""


def is_full(upper: int) -> bool:
    """Whether there is no room for another page, or another file."""
    room = os.fstatvfs(upper)
    return room.f_bavail < 1 or room.f_favail < 1


def first_change(upper: int) -> str:
    """What differs from a fresh container, or nothing."""
    raise NotImplementedError


def restore(upper: int, snapshot: bytes) -> None:
    """Unpack a snapshot into the empty private layer."""
    if snapshot:
        raise FileError("not yet")


OPERATIONS: Final[dict[str, Callable[[int, dict[str, Any], list[bytes]], tuple[dict[str, Any], list[bytes]]]]] = {}
_ = root
