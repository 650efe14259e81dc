"""A machine's migration stream (QEMU's docs/devel/migration), taken apart: pages of its memory, and all the rest.

    "QEVM" | version | what describes the machine | sections: a kind, a number, content, and an end with the number

One section, `ram`, comes in parts. It begins with the blocks of memory there are and goes on with pages: 64 bits of an
address and, in the lowest twelve, flags; the name of the block unless it is the last page's; the page, unless it is
empty. A stream without the pages of a block leaves an emulator's block as it was: so its memory can be a file that is
there already, where a stream would be read page by page.
"""

import mmap
import struct
import time
from array import array
from typing import Final, NamedTuple

BLOCK: Final = "ram"
"""Name of the block with the machine's memory."""
PAGE_BYTES: Final = 4096
_RAM: Final = b"\3ram" + struct.pack(">II", 0, 4)
"""Name, instance and version of the section."""
_MAX_BEGIN_BYTES: Final = 1 << 16
"""Of what comes before that section: the machine's name and what it can."""
_START, _PART, _END, _FOOTER = 1, 2, 3, 0x7E
_EMPTY, _SIZES, _PAGE, _STOP, _SAME = 0x02, 0x04, 0x08, 0x10, 0x20
_WORD: Final = struct.Struct(">Q")
_NUMBER: Final = struct.Struct(">I")
_MEMORY: Final = bytes((len(BLOCK),)) + BLOCK.encode()
_MAX_PIECES: Final = 1 << 17
"""Of the rest: of firmware there are few pages, and whatever is a piece takes up many times the bytes that tell it."""
_MAX_REST_BYTES: Final = 1 << 26
_TIMES: Final = 2
"""A page of a machine that stands still comes once."""
_AT_ONCE: Final = 1 << 10
"""Pages that are passed over, in a millisecond, before others may run."""


class Parted(NamedTuple):
    """A stream taken apart."""

    rest: bytes
    """The stream without pages of `BLOCK`."""
    places: "array[int]"
    """Where in the stream each page of `BLOCK` lies, in the order of their addresses; 0: it is empty."""


def part(stream: bytes | mmap.mmap, memory_bytes: int) -> Parted:
    """Take a stream apart. Other threads run meanwhile, and it comes to an end soon, whatever the stream is.

    Args:
        stream: of a machine that stood still.
        memory_bytes: of `BLOCK`.

    Raises:
        ValueError: it is none, or one of a form that is not known here.
    """
    if (name := stream.find(_RAM, 0, _MAX_BEGIN_BYTES)) <= _NUMBER.size:
        raise ValueError("it has no memory")
    try:
        with memoryview(stream) as view:
            return _Parting(view, memory_bytes // PAGE_BYTES).part(name)
    except (struct.error, IndexError) as error:
        raise ValueError(f"it ends too early, or has pages beyond its memory ({error})") from None


class _Parting:
    """What was found so far, and how much more may be."""

    def __init__(self, view: memoryview, num_pages: int) -> None:
        self._view = view
        self._places = array("Q", bytes(8 * num_pages))
        self._left = _TIMES * num_pages + _MAX_PIECES
        self._rest: list[bytes] = []
        self._rest_left = _MAX_REST_BYTES

    def part(self, name: int) -> Parted:
        """Do it.

        Args:
            name: where the section of memory is named.
        """
        view = self._view
        number = bytes(view[name - _NUMBER.size : name])  # of the section
        if view[name - _NUMBER.size - 1] != _START:
            raise ValueError("its memory does not begin where it is named")
        here = self._footer(self._blocks(name + len(_RAM)), number)
        self._keep(0, here)
        block = b""
        while view[here] in (_PART, _END):
            begin, here = here, here + 1 + _NUMBER.size
            if bytes(view[begin + 1 : here]) != number:
                raise ValueError("something else than memory comes in parts")
            self._keep(begin, here)
            here, block = self._pages(here, block)
            end = self._footer(here, number)
            self._keep(here - _WORD.size, end)
            here = end
        self._keep(here, len(view))
        return Parted(b"".join(self._rest), self._places)

    def _keep(self, begin: int, end: int) -> None:
        """Have a part of the stream be part of the rest."""
        self._count(end - begin)
        self._rest.append(bytes(self._view[begin:end]))

    def _count(self, size: int) -> None:
        """A piece of so many bytes comes to the rest."""
        self._rest_left -= size
        if len(self._rest) > _MAX_PIECES or self._rest_left < 0:
            raise ValueError("there is no end of what is not its memory")

    def _blocks(self, here: int) -> int:
        """Pass over the blocks of memory that there are."""
        view = self._view
        (total,) = _WORD.unpack_from(view, here)
        here += _WORD.size
        if total % PAGE_BYTES != _SIZES:
            raise ValueError("its memory does not begin with sizes")
        total -= _SIZES
        num_blocks = 0
        while total > 0:
            num_blocks += 1
            here += 1 + view[here]
            total -= _WORD.unpack_from(view, here)[0]
            here += 2 * _WORD.size  # the second is where it lies, told since memory that is shared may be left out
            if num_blocks > _MAX_PIECES:
                raise ValueError("there is no end of the blocks of its memory")
        if total < 0 or _WORD.unpack_from(view, here)[0] != _STOP:
            raise ValueError("sizes of its memory do not add up")
        return here + _WORD.size

    def _pages(self, here: int, block: bytes) -> tuple[int, bytes]:
        """Put aside the pages of the block that a part has, and keep those of others; the block of the last page."""
        view, places, unpack = self._view, self._places, _WORD.unpack_from
        is_memory, left = block == _MEMORY, self._left
        while left > 0:
            left -= 1
            if not left % _AT_ONCE:
                time.sleep(0)
            (word,) = unpack(view, here)
            here += _WORD.size
            flags = word % PAGE_BYTES
            if is_memory and flags == _PAGE | _SAME:
                places[word // PAGE_BYTES] = here
                here += PAGE_BYTES
            elif is_memory and flags == _EMPTY | _SAME:
                places[word // PAGE_BYTES] = 0
                here += 1
            elif flags == _STOP:
                self._left = left
                return here, block
            else:
                here, block = self._page(here, word, block)
                is_memory = block == _MEMORY
        raise ValueError("there is no end of its pages")

    def _page(self, here: int, word: int, block: bytes) -> tuple[int, bytes]:
        """Pass over a page that names its block, or is of another one than the memory; its end, and its block."""
        flags, view = word % PAGE_BYTES, self._view
        if not flags & _SAME:
            block = bytes(view[here : here + 1 + view[here]])
            here += len(block)
        size = {_PAGE: PAGE_BYTES, _EMPTY: 1}.get(flags & ~_SAME, 0)
        if not size or not block or here + size > len(view):
            raise ValueError(f"a page with flags {flags:#x}")
        if block != _MEMORY:
            begin = _WORD.pack(word & ~_SAME) + block
            self._count(len(begin))
            self._rest.append(begin)
            self._keep(here, here + size)
        else:
            self._places[word // PAGE_BYTES] = here if size == PAGE_BYTES else 0
        return here + size, block

    def _footer(self, here: int, number: bytes) -> int:
        """Pass over the end of a section."""
        stop = here + 1 + _NUMBER.size
        if bytes(self._view[here:stop]) != bytes((_FOOTER,)) + number:
            raise ValueError("a section of it does not end")
        return stop
