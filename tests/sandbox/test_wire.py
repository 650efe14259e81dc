"""Proves: frames arrive whole and in order, whoever goes away while one is written; what is no frame is told apart, and
takes no memory by what it says of itself; and what is long (files, a snapshot) is copied once on either side.
"""

import asyncio
import os
import socket
import tracemalloc
from collections.abc import AsyncGenerator, Awaitable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest

from rollforward.sandbox import wire
from rollforward.sandbox.config import Limits
from rollforward.sandbox.errors import SandboxConnectionError
from rollforward.sandbox.types import SandboxSpec
from tests.helpers.supervisors import Stage, on_loop, sh

pytestmark = pytest.mark.timeout(120)
MIB = 1 << 20
KIND = tuple[int, memoryview]
T = TypeVar("T")


@asynccontextmanager
async def connected() -> AsyncGenerator[tuple[wire.FrameWriter, asyncio.StreamReader, asyncio.StreamWriter]]:
    """One end that writes frames, and another one, with its own writer."""
    one, other = socket.socketpair()
    _, writer = await asyncio.open_unix_connection(sock=one)
    reader, end = await asyncio.open_unix_connection(sock=other, limit=wire.PART_BYTES)
    frames = wire.FrameWriter(writer)
    try:
        yield frames, reader, end
    finally:
        frames.close()
        end.close()


@on_loop
async def test_frames_of_any_length_arrive_as_they_are_and_in_order() -> None:
    sizes = (0, 1, 31, 255, 1 << 16, wire.PART_BYTES - 1, wire.PART_BYTES, wire.PART_BYTES + 1, 5 * wire.PART_BYTES)
    async with connected() as (frames, reader, _):
        datas = [os.urandom(size) for size in sizes]
        writing = asyncio.gather(*(frames.write(n, data=data) for n, data in enumerate(datas)))
        for number, data in enumerate(datas):
            named, found = await wire.read_frame(reader, KIND)
            assert (named, found) == ([number], data)
        await writing


@on_loop
async def test_a_frame_is_written_to_its_end_whoever_goes_away_meanwhile() -> None:
    async with connected() as (frames, reader, _):
        first, second = os.urandom(8 * MIB), b"next"
        writing = [asyncio.create_task(frames.write(n, data=data)) for n, data in enumerate((first, second))]
        await asyncio.sleep(0.05)
        assert not writing[0].done(), "it is not in the middle of it"
        for task in writing:
            task.cancel()
        assert [type(end) for end in await asyncio.gather(*writing, return_exceptions=True)] == [
            asyncio.CancelledError
        ] * 2
        for number, data in enumerate((first, second)):
            assert await wire.read_frame(reader, KIND) == ([number], data)


@on_loop
async def test_what_was_not_written_is_let_go_with_the_connection() -> None:
    async with connected() as (frames, _, _):
        writing = [asyncio.create_task(frames.write(0, data=bytes(8 * MIB))) for _ in range(2)]
        await asyncio.sleep(0.05)
        frames.close()
        async with asyncio.timeout(5.0):
            ends = await asyncio.gather(*writing, return_exceptions=True)
        assert [type(end) for end in ends] == [ConnectionResetError] * 2


@on_loop
async def test_one_that_is_too_long_is_refused_before_it_is_begun(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(wire, "MAX_FRAME_BYTES", 1000)
    async with connected() as (frames, reader, _):
        with pytest.raises(SandboxConnectionError, match=r"one has at most 1000\. Ask for less"):
            await frames.write(1, data=bytes(1000))
        await frames.write(2, data=b"after it")
        assert await wire.read_frame(reader, KIND) == ([2], b"after it")


@pytest.mark.parametrize(
    ("noise", "error"),
    [
        (b"\xff\xff\xff\xff", EOFError),
        (b"\4\0", EOFError),
        (b"\4\0\0\0abc", EOFError),
        (b"\4\0\0\0abcd", SandboxConnectionError),
        (b"\3\0\0\0\x92\1\2", SandboxConnectionError),  # [1, 2]
        (b"\5\0\0\0\x92\1\xc4\0\0", SandboxConnectionError),  # [1, b""], and something after it
        (b"\0\0\0\0", SandboxConnectionError),
    ],
)
@on_loop
async def test_what_is_no_frame_is_told_apart(noise: bytes, error: type[Exception]) -> None:
    async with connected() as (_, reader, end):
        end.transport.abort()
        reader = asyncio.StreamReader()
        reader.feed_data(noise)
        reader.feed_eof()
        with pytest.raises(error):
            await wire.read_frame(reader, KIND)


@on_loop
async def test_what_says_that_it_is_long_takes_no_memory_before_it_comes() -> None:
    reader = asyncio.StreamReader()
    tracemalloc.start()
    try:
        reader.feed_data(wire.MAX_FRAME_BYTES.to_bytes(4, "little") + bytes(MIB))
        reading = asyncio.create_task(wire.read_frame(reader, KIND))
        await asyncio.sleep(0.05)
        reader.feed_eof()
        with pytest.raises(EOFError, match="ends after"):
            await reading
        assert tracemalloc.get_traced_memory()[1] < 8 * MIB
    finally:
        tracemalloc.stop()


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    made = Stage(tmp_path, monkeypatch)
    yield made
    made.end()


@on_loop
async def test_what_is_long_is_copied_once_on_either_side(stage: Stage) -> None:
    """What it takes beside what is handed in or out: that once more, and what the sandbox itself is asked for by."""
    size = 96 * MIB
    spec = SandboxSpec(limits=Limits(disk_bytes=256 * MIB, memory_bytes=64 * MIB))

    async def peaks(work: Awaitable[T]) -> tuple[T, float, float]:
        """What it gives, and by how many times the size this process and the supervisor grew meanwhile at most."""
        pids = os.getpid(), stage.supervisor()
        for pid in pids:
            Path(f"/proc/{pid}/clear_refs").write_text("5")  # VmHWM begins anew
        before = [_memory(pid, "VmRSS") for pid in pids]
        found = await work
        grown = [(_memory(pid, "VmHWM") - begin) / size for pid, begin in zip(pids, before, strict=True)]
        return found, grown[0], grown[1]

    async with stage.client() as client:
        sandbox = await client.create("a", spec)
        assert (await sh(sandbox, f"head -c {size} /dev/urandom > file; md5sum file")).exit_code == 0
        found, here, there = await peaks(sandbox.download(["file"], max_bytes=size))
        assert (here < 2.3, there < 2.3) == (True, True), (here, there)
        _, here, there = await peaks(sandbox.upload(found))
        assert (here < 1.3, there < 2.3) == (True, True), (here, there)
        del found
        taken, here, there = await peaks(sandbox.snapshot(max_bytes=2 * size))
        assert (here < 2.3, there < 2.3) == (True, True), (here, there)
        other, here, there = await peaks(client.create("b", spec, snapshot=taken))
        assert (here < 1.3, there < 2.3) == (True, True), (here, there)
        said = [(await sh(one, "md5sum file")).text() for one in (sandbox, other)]
        assert said[0] == said[1] != ""


def _memory(pid: int, name: str) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:"))
