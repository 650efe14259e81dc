"""The log codec against an enemy: every truncation, every flipped bit, foreign bytes.

Proves that no bad byte is returned as
a frame and that every byte is accounted for; does not prove anything about files or durability.
"""

import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollforward.sandbox.codec import (
    FRAME_HEADER_BYTES,
    SEGMENT_HEADER_BYTES,
    SEGMENT_MAGIC,
    HeaderFault,
    SegmentHeader,
    encode_frame,
    encode_segment_header,
    frame_seed,
    parse_segment_header,
    scan_frames,
)
from rollforward.sandbox.errors import CodecUsageError, SandboxError

SEED = frame_seed("engine-0", 3)
HEADER = SegmentHeader(kind="TOKN", stream="engine-0", epoch=3, segment=2, first_seq=17, tail_crc=0xDEADBEEF)


def frame(
    seq: int, payload: bytes, *, frame_type: int = 2, flags: int = 0, batch_seq: int = 1, seed: int = SEED
) -> bytes:
    return encode_frame(frame_type=frame_type, flags=flags, seq=seq, batch_seq=batch_seq, payload=payload, seed=seed)[0]


def flipped(data: bytes, bit: int) -> bytes:
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << (bit % 8)
    return bytes(changed)


def assert_accounted(data: bytes, offset: int, seed: int = SEED) -> list[tuple[int, bytes]]:
    """Checks that frames, damage and tear tile the buffer; returns (seq, payload) of the frames."""
    scan = scan_frames(data, offset=offset, seed=seed)
    frame_bytes = sum(found.end - found.start for found in scan.frames)
    damaged_bytes = sum(part.end - part.start for part in scan.damaged)
    assert frame_bytes + damaged_bytes + scan.torn_bytes + scan.room_bytes == len(data) - offset
    assert scan.end + scan.torn_bytes + scan.room_bytes == len(data)
    return [(found.seq, found.payload) for found in scan.frames]


def crc32c_by_bits(data: bytes) -> int:
    """CRC-32C from its definition: reflected polynomial 0x82F63B78, all ones before and after."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def test_layout_is_the_documented_one() -> None:
    data, crc = encode_frame(frame_type=6, flags=5, seq=0x0102, batch_seq=0x0101, payload=b"abc", seed=SEED)
    checked = bytes.fromhex("0ca1d7ff 06 05 2000 0201000000000000 0101000000000000 03000000")
    assert data[:28] == checked
    assert data[32:] == b"abc" + bytes(5)
    identity = b"engine-0" + (3).to_bytes(8, "little")
    assert crc == crc32c_by_bits(identity + checked + data[32:]) == int.from_bytes(data[28:32], "little")
    assert crc32c_by_bits(b"123456789") == 0xE3069283
    header = encode_segment_header(HEADER)
    assert header[:16] == SEGMENT_MAGIC + bytes.fromhex("0100 5000") + b"TOKN"
    assert int.from_bytes(header[76:], "little") == crc32c_by_bits(header[:76])


@given(
    st.lists(st.tuples(st.integers(0, 255), st.integers(0, 255), st.binary(max_size=50)), max_size=8),
    st.binary(max_size=32).map(lambda data: data[: len(data) // 8 * 8]),
)
def test_frames_round_trip(parts: list[tuple[int, int, bytes]], before: bytes) -> None:
    data = before + b"".join(frame(9 + i, part[2], frame_type=part[0], flags=part[1]) for i, part in enumerate(parts))
    scan = scan_frames(data, offset=len(before), seed=SEED)
    assert [(found.frame_type, found.flags, found.payload) for found in scan.frames] == parts
    assert [found.seq for found in scan.frames] == list(range(9, 9 + len(parts)))
    assert all(found.start % 8 == 0 and found.batch_seq == 1 for found in scan.frames)
    assert (scan.damaged, scan.torn_bytes, scan.end) == ((), 0, len(data))


@given(st.binary(max_size=300), st.integers(0, 4))
def test_arbitrary_bytes_never_raise(data: bytes, offset_words: int) -> None:
    assert assert_accounted(data, min(8 * offset_words, len(data) // 8 * 8)) == []
    assert isinstance(parse_segment_header(data), HeaderFault)
    assert isinstance(parse_segment_header(SEGMENT_MAGIC + data), HeaderFault)


@settings(max_examples=50)
@given(st.binary(min_size=1, max_size=64))
def test_frames_after_garbage_are_found(garbage: bytes) -> None:
    padded = garbage + bytes(-len(garbage) % 8)
    data = frame(1, b"one") + padded + frame(2, b"two")
    assert assert_accounted(data, 0) == [(1, b"one"), (2, b"two")]
    assert scan_frames(data, offset=0, seed=SEED).damaged[0] == (40, 40 + len(padded))


def test_every_truncation_leaves_whole_frames_only() -> None:
    frames = [frame(1, b""), frame(2, b"x" * 9), frame(3, b"y" * 16)]
    data = b"".join(frames)
    ends = [sum(map(len, frames[: i + 1])) for i in range(3)]
    for length in range(len(data) + 1):
        found = assert_accounted(data[:length], 0)
        assert len(found) == sum(end <= length for end in ends)
        assert scan_frames(data[:length], offset=0, seed=SEED).damaged == ()


def test_every_flipped_bit_removes_exactly_its_frame() -> None:
    frames = [frame(1, b"a" * 5), frame(2, b"b" * 16), frame(3, b"")]
    data = b"".join(frames)
    ends = [sum(map(len, frames[: i + 1])) for i in range(3)]
    for bit in range(8 * len(data)):
        hit = next(i for i, end in enumerate(ends) if bit // 8 < end)
        expected = [seq for seq in (1, 2, 3) if seq != hit + 1]
        assert [seq for seq, _ in assert_accounted(flipped(data, bit), 0)] == expected, bit


def test_frames_of_another_epoch_or_stream_do_not_verify() -> None:
    data = frame(1, b"stale") + frame(2, b"stale")
    assert assert_accounted(data, 0, frame_seed("engine-0", 4)) == []
    assert assert_accounted(data, 0, frame_seed("engine-1", 3)) == []


def test_zeros_are_no_frame() -> None:
    scan = scan_frames(frame(1, b"abc") + bytes(64), offset=0, seed=SEED)
    assert (len(scan.frames), scan.damaged, scan.torn_bytes, scan.room_bytes) == (1, (), 64, 0)
    prepared = (frame(1, b"abc") + b"torn").ljust(8192, b"\0")
    scan = scan_frames(prepared, offset=0, seed=SEED)
    assert (len(scan.frames), scan.damaged, scan.torn_bytes, scan.room_bytes) == (1, (), 4, 8192 - 44)
    assert assert_accounted(bytes(64) + frame(1, b"abc"), 0) == [(1, b"abc")]


def test_segment_header_round_trip_and_faults() -> None:
    data = encode_segment_header(HEADER)
    assert len(data) == SEGMENT_HEADER_BYTES
    assert parse_segment_header(data + b"frames") == HEADER
    assert parse_segment_header(b"") is HeaderFault.EMPTY
    assert all(parse_segment_header(data[:length]) is HeaderFault.FOREIGN for length in range(1, len(data)))
    for bit in range(8 * len(data)):
        expected = HeaderFault.FOREIGN if bit < 64 else HeaderFault.DAMAGED
        assert parse_segment_header(flipped(data, bit)) is expected
    newer = data[:8] + b"\x02\x00" + data[10:76]
    assert parse_segment_header(newer + crc32c_by_bits(newer).to_bytes(4, "little")) is HeaderFault.UNSUPPORTED


@pytest.mark.parametrize(
    ("kind", "stream", "epoch"), [("TOK", "e", 1), ("TOKN", "", 1), ("TOKN", "e" * 33, 1), ("TOKN", "e", 1 << 64)]
)
def test_a_header_that_does_not_fit_is_refused(kind: str, stream: str, epoch: int) -> None:
    with pytest.raises(CodecUsageError):
        encode_segment_header(SegmentHeader(kind=kind, stream=stream, epoch=epoch, segment=0, first_seq=1, tail_crc=0))


def test_a_frame_that_does_not_fit_is_refused() -> None:
    with pytest.raises(CodecUsageError, match="seq -1"):
        frame(-1, b"")
    with pytest.raises(CodecUsageError, match="at most"):
        frame(1, bytes((1 << 28) + 1))
    assert len(frame(1, b"")) == FRAME_HEADER_BYTES


def test_errors_pickle() -> None:
    error = pickle.loads(pickle.dumps(CodecUsageError("x")))
    assert isinstance(error, SandboxError)
    assert isinstance(error, ValueError)
