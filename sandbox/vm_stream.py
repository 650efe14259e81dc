"""A machine's migration stream (QEMU's docs/devel/migration), taken apart: pages of its memory, and all the rest.

    "QEVM" | version | what describes the machine | sections: a kind, a number, content, and an end with the number

One section, `ram`, comes in parts. It begins with the blocks of memory there are and goes on with pages: 64 bits of an
address and, in the lowest twelve, flags; the name of the block unless it is the last page's; the page, unless it is
empty. A stream without the pages of a block leaves an emulator's block as it was: so its memory can be a file that is
there already, where a stream would be read page by page.
"""

import mmap
import struct
from typing import Final, NamedTuple

BLOCK: Final = "ram"
"""Name of the block with the machine's memory."""
PAGE_BYTES: Final = 4096
_RAM: Final = b"\3ram" + struct.pack(">II", 0, 4)
"""Name, instance and version of the section."""
_START, _PART, _END, _FOOTER = 1, 2, 3, 0x7E
_EMPTY, _SIZES, _PAGE, _STOP, _SAME = 0x02, 0x04, 0x08, 0x10, 0x20
_WORD: Final = struct.Struct(">Q")
_NUMBER: Final = struct.Struct(">I")
_MAX_PIECES: Final = 1 << 17
"""Of the rest: of firmware there are few pages, and whatever is a piece takes up many times the bytes that tell it."""


class Parted(NamedTuple):
    """A stream taken apart."""

    rest: bytes
    """The stream without pages of `BLOCK`."""
    pages: dict[int, memoryview]
    """Those that are not empty, by address. They lie in the stream."""


def part(stream: bytes | mmap.mmap) -> Parted:
    """Take a stream apart.

    Raises:
        ValueError: it is none, or one of a form that is not known here.
    """
    if (name := stream.find(_RAM)) <= _NUMBER.size:
        raise ValueError("it has no memory")
    try:
        return _part(memoryview(stream), name)
    except (struct.error, IndexError) as error:
        raise ValueError(f"it ends too early ({error})") from None


def _part(view: memoryview, name: int) -> Parted:
    number = bytes(view[name - _NUMBER.size : name])  # of the section
    if view[name - _NUMBER.size - 1] != _START:
        raise ValueError("its memory does not begin where it is named")
    here = _footer(view, _blocks(view, name + len(_RAM)), number)
    rest, pages, block = [view[:here]], dict[int, memoryview](), b""
    while view[here] in (_PART, _END):
        begin, here = here, here + 1 + _NUMBER.size
        if bytes(view[begin + 1 : here]) != number:
            raise ValueError("something else than memory comes in parts")
        rest.append(view[begin:here])
        here, block = _pages(view, here, block, rest, pages)
        here = _footer(view, here, number)
        rest.append(view[here - 1 - _NUMBER.size : here])
    return Parted(b"".join((*rest, view[here:])), pages)


def _blocks(view: memoryview, here: int) -> int:
    """Pass over the blocks of memory that there are."""
    (total,) = _WORD.unpack_from(view, here)
    here += _WORD.size
    if total % PAGE_BYTES != _SIZES:
        raise ValueError("its memory does not begin with sizes")
    total -= _SIZES
    while total > 0:
        here += 1 + view[here]
        total -= _WORD.unpack_from(view, here)[0]
        here += 2 * _WORD.size  # the second is where it lies, told since memory that is shared may be left out
    if total < 0 or _WORD.unpack_from(view, here)[0] != _STOP:
        raise ValueError("sizes of its memory do not add up")
    return here + _WORD.size


def _pages(
    view: memoryview, here: int, block: bytes, rest: list[memoryview], pages: dict[int, memoryview]
) -> tuple[int, bytes]:
    """Put aside the pages of the block that a part has, and keep those of others; the block of the last page."""
    while True:
        (word,) = _WORD.unpack_from(view, here)
        here += _WORD.size
        flags = word % PAGE_BYTES
        if len(rest) > _MAX_PIECES:
            raise ValueError("there is no end of what is not its memory")
        if flags == _STOP:
            rest.append(view[here - _WORD.size : here])
            return here, block
        if not flags & _SAME:
            block = bytes(view[here : here + 1 + view[here]])
            here += len(block)
        size = {_PAGE: PAGE_BYTES, _EMPTY: 1}.get(flags & ~_SAME, 0)
        if not size or not block or here + size > len(view):
            raise ValueError(f"a page with flags {flags:#x}")
        content = view[here : here + size]
        here += size
        if block[1:] != BLOCK.encode():
            rest += [memoryview(_WORD.pack(word & ~_SAME) + block), content]
        elif size == PAGE_BYTES:
            pages[word - flags] = content
        else:
            pages.pop(word - flags, None)


def _footer(view: memoryview, here: int, number: bytes) -> int:
    """Pass over the end of a section."""
    stop = here + 1 + _NUMBER.size
    if bytes(view[here:stop]) != bytes((_FOOTER,)) + number:
        raise ValueError("a section of it does not end")
    return stop
