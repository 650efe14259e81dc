"""Proves: a machine's migration stream, written here by hand, is taken apart into the pages of its memory and all the
rest, and put into a file again; one that is damaged anywhere, or has no end, is an error of one kind, and soon.
"""

import asyncio
import os
import random
import struct
import time
import tracemalloc
from array import array
from collections.abc import Callable, Iterator

import msgspec
import pytest

from rollforward.sandbox import vm_state, vm_stream
from rollforward.sandbox.errors import SandboxFileError, SandboxUnavailableError
from rollforward.sandbox.unbroken import in_thread
from rollforward.sandbox.vm_state import Saved, Whole

PAGE = 4096
A, B, C = (bytes([letter]) * PAGE for letter in b"abc")
HEAD = b"QEVM\0\0\0\3" + b"\7\0\0\0\3q35"
MARK = struct.pack(">I", 2)
FOOTER = b"\x7e" + MARK
DEVICES = b"\4\0\0\0\5" + b"\3cpu" + bytes(8) + b"registers" + b"\x7e\0\0\0\5" + b"\0" + b'{"devices": []}'


def word(address: int, flags: int) -> bytes:
    return struct.pack(">Q", address | flags)


def named(name: str) -> bytes:
    return bytes([len(name)]) + name.encode()


STOP = word(0, 0x10)
START = (
    b"\1" + MARK + named("ram") + struct.pack(">II", 0, 4) + word(7 * PAGE, 4)
    + named("ram") + word(5 * PAGE, 0) + word(0, 0)
    + named("rom") + word(2 * PAGE, 0) + word(0xFFFC0000, 0)
    + STOP + FOOTER
)  # fmt: skip
FIRST = (
    b"\2" + MARK
    + word(0, 8) + named("ram") + A
    + word(PAGE, 0x22) + b"\0"
    + word(2 * PAGE, 0x28) + B
    + word(3 * PAGE, 0x28) + C
    + word(0, 8) + named("rom") + C
    + STOP + FOOTER
)  # fmt: skip
LAST = (
    b"\3" + MARK
    + word(PAGE, 0x22) + b"\0"  # of the block that the part before has ended with
    + word(2 * PAGE, 8) + named("ram") + A  # written to meanwhile
    + word(3 * PAGE, 0x22) + b"\0"
    + word(4 * PAGE, 0x28) + B
    + STOP + FOOTER
)  # fmt: skip
MEMORY = 5 * PAGE
STREAM = HEAD + START + FIRST + LAST + DEVICES
REST = (
    HEAD + START
    + b"\2" + MARK + word(0, 8) + named("rom") + C + STOP + FOOTER
    + b"\3" + MARK + word(PAGE, 2) + named("rom") + b"\0" + STOP + FOOTER
    + DEVICES
)  # fmt: skip


def test_pages_of_the_memory_are_put_aside_and_the_rest_stays_a_stream() -> None:
    rest, places = vm_stream.part(STREAM, MEMORY)
    found = [STREAM[place : place + PAGE] if place else b"" for place in places]
    assert found == [A, b"", A, b"", B]
    assert rest == REST
    assert vm_stream.part(rest, MEMORY) == (REST, array("Q", [0] * 5))


def test_one_that_ends_too_early_or_says_something_else_is_no_stream() -> None:
    for end in (*range(200), *range(200, len(STREAM) - len(DEVICES) + 1, 97)):
        with pytest.raises(ValueError, match=r"."):
            vm_stream.part(STREAM[:end], MEMORY)
    for was, now in (
        (FOOTER, b"\x7f" + MARK),
        (b"\2" + MARK, b"\2\0\0\0\3"),
        (word(2 * PAGE, 0x28), word(2 * PAGE, 0x68)),  # compressed
        (word(2 * PAGE, 0x28), word(2 * PAGE, 0x20)),
        (word(7 * PAGE, 4), word(6 * PAGE, 4)),
        (word(7 * PAGE, 4), word(7 * PAGE, 8)),
        (word(0, 8) + named("ram"), word(0, 0x28)),  # of no block yet
    ):
        assert was in STREAM
        with pytest.raises(ValueError, match=r"."):
            vm_stream.part(STREAM.replace(was, now, 1), MEMORY)


def test_whatever_is_damaged_is_no_other_error() -> None:
    places = [place for place in range(len(STREAM)) if STREAM[place : place + 1] not in (b"a", b"b", b"c")]
    num_refused = 0
    for place in places:
        damaged = bytearray(STREAM)
        damaged[place] ^= 1 << random.randrange(8)
        try:
            vm_stream.part(bytes(damaged), MEMORY)
        except ValueError:
            num_refused += 1
    assert num_refused > len(places) // 4


@pytest.mark.parametrize(
    "endless",
    [
        b"\2" + MARK + word(0, 2) + b"\xff" + bytes(255) + b"\0" + (word(0, 0x22) + b"\0") * (1 << 18) + STOP + FOOTER,
        (b"\2" + MARK + STOP + FOOTER) * (1 << 17),
    ],
    ids=["pages", "parts"],
)
def test_what_an_emulator_says_takes_up_no_many_times_its_bytes(endless: bytes) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="no end"):
            vm_stream.part(HEAD + START + endless + DEVICES, MEMORY)
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()


NOTHING = memoryview(b"")
WHOSE = Saved(machine="m", spec="s", whole=Whole(runs=[], memory=NOTHING, devices=NOTHING, disk=NOTHING))


def test_a_machine_as_one_record_fills_a_file_with_its_memory() -> None:
    stream, memory = vm_state.file_of([STREAM]), vm_state.memory_file(MEMORY)
    record = vm_state.packed(WHOSE, stream, [b"di", b"sk"], MEMORY, 1 << 20)
    saved = msgspec.msgpack.decode(record, type=Saved)
    found = saved.whole
    assert (saved.machine, saved.spec) == ("m", "s")
    assert found.runs == [(0, PAGE), (2 * PAGE, PAGE), (4 * PAGE, PAGE)]
    assert (bytes(found.memory), bytes(found.devices), bytes(found.disk)) == (A + A + B, REST, b"disk")
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(saved)) == msgspec.msgpack.decode(record), (
        "in any other writing"
    )
    vm_state.fill(memory, found, MEMORY)
    assert os.pread(memory, 9 * PAGE, 0) == A + bytes(PAGE) + A + bytes(PAGE) + B
    vm_state.packed(WHOSE, stream, [b"disk"], MEMORY, len(record))
    with pytest.raises(SandboxFileError, match=f"has {len(record)} bytes, more than {len(record) - 1}"):
        vm_state.packed(WHOSE, stream, [b"disk"], MEMORY, len(record) - 1)
    for wrong in (b"", b"QEVM", STREAM[:-200]):
        other = vm_state.file_of([wrong])
        with pytest.raises(SandboxUnavailableError, match="has not saved"):
            vm_state.packed(WHOSE, other, [], MEMORY, 1 << 20)
        os.close(other)
    with pytest.raises(SandboxUnavailableError, match="has not saved"):
        vm_state.packed(WHOSE, stream, [], MEMORY - PAGE, 1 << 20)
    vm_state.close_all([stream, memory])


def test_memory_of_one_record_is_all_of_it_or_nothing() -> None:
    for full in (0, 5):
        pages = b"".join(
            word(number * PAGE, 0x28 if number else 8) + b"\3ram" * (not number) + A for number in range(full)
        )
        stream = vm_state.file_of([HEAD + START + b"\3" + MARK + pages + STOP + FOOTER + DEVICES])
        found = msgspec.msgpack.decode(vm_state.packed(WHOSE, stream, [], MEMORY, 1 << 20), type=Saved).whole
        assert found.runs == ([(0, MEMORY)] if full else [])
        assert (bytes(found.memory), bytes(found.disk)) == (A * full, b"")
        os.close(stream)


HOSTILE: dict[str, Callable[[int], Iterator[bytes]]] = {
    "empty pages": lambda size: _repeated(FIRST_PAGE, word(0, 0x22) + b"\0", size),
    "pages": lambda size: _repeated(FIRST_PAGE, word(PAGE, 0x28) + A, size),
    "pages of another block": lambda size: _repeated(b"\2" + MARK + word(0, 8) + b"\3rom" + A, word(0, 0x28) + A, size),
    "names": lambda size: _repeated(b"\2" + MARK, word(0, 2) + b"\3ram\0", size),
    "parts": lambda size: _repeated(b"", b"\2" + MARK + STOP + FOOTER, size),
    "devices": lambda size: _repeated(DEVICES, bytes(PAGE), size),
    "no memory": lambda size: _repeated(b"", b"\3ram", size),
}
FIRST_PAGE = b"\2" + MARK + word(0, 2) + b"\3ram\0"


def _repeated(begin: bytes, piece: bytes, size: int) -> Iterator[bytes]:
    yield begin
    for _ in range(size // (len(piece) * (1 << 12)) + 1):
        yield piece * (1 << 12)


@pytest.mark.parametrize("name", HOSTILE)
def test_a_stream_without_end_holds_up_nobody(name: str) -> None:
    begin = HEAD + START if name != "no memory" else b""
    stream = vm_state.file_of([begin, *HOSTILE[name](256 << 20)])
    longest_s = 0.0

    async def go() -> None:
        nonlocal longest_s
        packing = asyncio.ensure_future(in_thread(lambda: vm_state.packed(WHOSE, stream, [], 64 << 20, 1 << 30)))
        while not packing.done():
            start_s = time.perf_counter()
            await asyncio.sleep(0.001)
            longest_s = max(longest_s, time.perf_counter() - start_s)
        with pytest.raises(SandboxUnavailableError, match="has not saved"):
            await packing

    start_s = time.process_time()
    asyncio.run(go())
    assert time.process_time() - start_s < 5.0
    assert longest_s < 0.5
    os.close(stream)


@pytest.mark.parametrize(
    "runs", [[(-PAGE, PAGE)], [(5 * PAGE, PAGE)], [(0, 6 * PAGE)], [(0, -1)], [(0, 0)], [(0, PAGE), (PAGE, 3 * PAGE)]]
)
def test_memory_that_is_not_of_the_machine_is_refused(runs: list[tuple[int, int]]) -> None:
    memory = vm_state.memory_file(5 * PAGE)
    found = Whole(runs=runs, memory=memoryview(A + B), devices=NOTHING, disk=NOTHING)
    with pytest.raises(SandboxFileError, match="none of a machine"):
        vm_state.fill(memory, found, 5 * PAGE)
    assert os.fstat(memory).st_size == 5 * PAGE
    os.close(memory)


def test_the_file_of_a_state_gets_no_shorter_under_who_reads_it() -> None:
    stream = vm_state.file_of([STREAM])
    with pytest.raises(PermissionError):
        os.ftruncate(stream, 0)
    os.close(stream)
