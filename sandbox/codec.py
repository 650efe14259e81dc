"""The one binary log codec: frames and segment headers, for the token log (rollout/wal.py) and for command logs.

A log is a directory of segments. A segment is one header followed by frames; all integers are little-endian:

    header  magic 8s | format u16 | header_bytes u16 | kind 4s | stream 32s
            | epoch u64 | segment u64 | first_seq u64 | tail_crc u32 | crc u32
    frame   magic u32 | type u8 | flags u8 | header_bytes u16 | seq u64 | batch_seq u64 | payload_bytes u32 | crc u32
            | payload | 0..7 zeros

Every frame starts on a multiple of 8 bytes. Its crc (CRC-32C) runs over the stream's identity and epoch (`frame_seed`),
the frame's header, the payload and the padding, so that a frame of another stream or of a fenced epoch does not verify,
and so that no bit of a segment is outside some checksum.

`batch_seq` is the first seq of the group commit that wrote the frame. A writer starts a commit only after the one
before it is on disk, so one good frame with batch_seq = b proves that everything below b had been acknowledged: a
reader can tell a torn last write (nobody was told) from damage (somebody was).

Here: bytes to records and back, never an exception on bad bytes when reading. Not here: files, directories, threads,
durability (rollout/wal.py) and the meaning of payloads (rollout/wal_records.py).
"""

import struct
from enum import StrEnum
from typing import NamedTuple

import google_crc32c
import msgspec

from rollforward.sandbox.errors import CodecUsageError

FORMAT_VERSION = 1
"""Version of everything in this file; a reader refuses any other."""

FRAME_ALIGNMENT_BYTES = 8
"""Frames start on multiples of this offset, so a reader that lost its place has few offsets to try."""

FRAME_HEADER_BYTES = 32
"""Size of a frame's header; payload follows."""

ROOM_ALIGNMENT_BYTES = 4096
"""A segment that is filled with zeros before it is used has a multiple of this size. Other zeros at the end of one are
bytes that were lost."""

SEGMENT_HEADER_BYTES = 80
"""Size of a segment's header; the first frame follows."""

MAX_PAYLOAD_BYTES = 1 << 28
"""Largest payload of one frame (256 MiB): a damaged length beyond it is recognised without a checksum."""

SEGMENT_MAGIC = b"RLFWDSEG"
"""First bytes of every segment."""

# Negative as an int32 and NaN as a float32: no token id and no log-prob in a payload looks like the start of a frame.
_FRAME_MAGIC = 0xFFD7_A10C
_FRAME_MAGIC_BYTES = _FRAME_MAGIC.to_bytes(4, "little")
_FRAME = struct.Struct("<IBBHQQII")
_FRAME_CHECKED = struct.Struct("<IBBHQQI")
_SEGMENT_CHECKED = struct.Struct("<8sHH4s32sQQQI")
_SEGMENT = struct.Struct("<8sHH4s32sQQQII")
_STREAM_BYTES = 32


class SegmentHeader(msgspec.Struct, frozen=True, kw_only=True):
    """What the first bytes of a segment say."""

    kind: str
    """Four ASCII characters naming the log that owns the segment, such as "TOKN"."""
    stream: str
    """Identity of the writer's stream (an engine replica, a sandbox); 1 to 32 bytes of UTF-8 without NUL."""
    epoch: int
    """Fencing token of the writer, u64; grows by every opening of the stream."""
    segment: int
    """Number of the segment within its epoch, from 0."""
    first_seq: int
    """Sequence number of the first frame, u64. Everything below it was durable when the segment was made."""
    tail_crc: int
    """crc of the frame with seq first_seq - 1, or 0 when there is none: chains segments."""


class HeaderFault(StrEnum):
    """Why bytes are not a usable segment header."""

    EMPTY = "empty"
    """No bytes at all."""
    FOREIGN = "foreign"
    """Too short or without the magic: not written by this codec, or its first bytes are gone."""
    DAMAGED = "damaged"
    """The magic is there, the checksum is wrong."""
    UNSUPPORTED = "unsupported"
    """Intact, but of a format version that this code cannot read."""


class Frame(NamedTuple):
    """One verified frame. A tuple, not a Struct: a recovery makes tens of thousands of them."""

    frame_type: int
    """Meaning of the payload, u8; its owner defines the values."""
    flags: int
    """Optional parts of the payload, u8; its owner defines the bits."""
    seq: int
    """Sequence number, u64, unique within the stream and growing by 1."""
    batch_seq: int
    """First seq of the group commit; every seq below it was durable before this frame was written."""
    crc: int
    """The frame's checksum, u32; equal frames have equal ones."""
    start: int
    """Offset of the frame's header in the buffer, bytes."""
    end: int
    """Offset after the frame's padding, bytes."""
    payload: bytes
    """The payload without padding."""


class ByteRange(NamedTuple):
    """Bytes [start, end) of a buffer."""

    start: int
    """First byte."""
    end: int
    """One past the last byte."""


class FrameScan(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a buffer holds: good frames, and where the bytes are not frames."""

    frames: tuple[Frame, ...]
    """Verified frames in buffer order."""
    damaged: tuple[ByteRange, ...]
    """Bytes between the start and the last good frame that are not good frames."""
    torn_bytes: int
    """Bytes after the last good frame, without room: a write that was cut short, or a damaged last frame."""
    room_bytes: int
    """Zeros at the end of a buffer that has a prepared size, a multiple of ROOM_ALIGNMENT_BYTES: room for frames that
    were never written."""
    end: int
    """Offset after the last good frame; where a repair truncates."""


def frame_seed(stream: str, epoch: int) -> int:
    """Returns the CRC-32C state, u32, that every frame of one stream and one epoch starts from.

    Args:
        stream: identity as in SegmentHeader.stream.
        epoch: u64.

    """
    return google_crc32c.value(stream.encode() + epoch.to_bytes(8, "little"))


def encode_frame(
    *, frame_type: int, flags: int, seq: int, batch_seq: int, payload: bytes, seed: int
) -> tuple[bytes, int]:
    """Returns the frame's bytes and its crc.

    Args:
        frame_type: u8.
        flags: u8.
        seq: u64.
        batch_seq: u64, at most seq.
        payload: 0 to MAX_PAYLOAD_BYTES bytes.
        seed: `frame_seed` of the stream and epoch.

    Returns:
        (header + payload + padding, a multiple of 8 bytes; the crc as u32, for the next segment's tail_crc).

    Raises:
        CodecUsageError: the payload is larger than MAX_PAYLOAD_BYTES, or a number does not fit its field.

    Invariants: deterministic, pure.

    """
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise CodecUsageError(
            f"payload is {len(payload)} bytes; one frame holds at most {MAX_PAYLOAD_BYTES}."
            " Split the record or store a reference."
        )
    try:
        checked = _FRAME_CHECKED.pack(_FRAME_MAGIC, frame_type, flags, FRAME_HEADER_BYTES, seq, batch_seq, len(payload))
    except struct.error as error:
        raise CodecUsageError(
            f"frame fields (type {frame_type}, flags {flags}, seq {seq}, batch_seq {batch_seq}) do not fit"
            f" u8, u8, u64, u64: {error}."
        ) from None
    body = payload + bytes(-len(payload) % FRAME_ALIGNMENT_BYTES)
    crc = google_crc32c.extend(google_crc32c.extend(seed, checked), body)
    return b"".join((checked, crc.to_bytes(4, "little"), body)), crc


def scan_frames(data: bytes, *, offset: int, seed: int) -> FrameScan:
    """Returns every frame of `data` that verifies, and where the other bytes lie.

    After bytes that are no frame the scan goes on at the next aligned magic whose checksum verifies.

    Args:
        data: a segment's bytes.
        offset: where the first frame starts, a multiple of 8 within `data`.
        seed: `frame_seed` of the stream and epoch; frames of others do not verify.

    Returns:
        FrameScan; frames, damaged, torn and room bytes cover data[offset:] exactly.

    Invariants: deterministic; never raises on any bytes; O(len(data)) unless a buffer is full of forged magics.

    """
    frames: list[Frame] = []
    damaged: list[ByteRange] = []
    position = good_end = offset
    while position + FRAME_HEADER_BYTES <= len(data):
        frame = _frame_at(data, position, seed)
        if frame is None:
            position = _next_magic(data, position + FRAME_ALIGNMENT_BYTES)
            continue
        if position > good_end:
            damaged.append(ByteRange(good_end, position))
        frames.append(frame)
        position = good_end = frame.end
    is_prepared = len(data) % ROOM_ALIGNMENT_BYTES == 0
    torn_bytes = len(data[good_end:].rstrip(b"\0")) if is_prepared else len(data) - good_end
    return FrameScan(
        frames=tuple(frames),
        damaged=tuple(damaged),
        torn_bytes=torn_bytes,
        room_bytes=len(data) - good_end - torn_bytes,
        end=good_end,
    )


def encode_segment_header(header: SegmentHeader) -> bytes:
    """Returns the SEGMENT_HEADER_BYTES bytes that start a segment.

    Raises:
        CodecUsageError: kind or stream does not fit its field, or a number is out of range.

    """
    kind, stream = header.kind.encode(), header.stream.encode()
    if len(kind) != 4:
        raise CodecUsageError(f"segment kind is {header.kind!r}; it has exactly four ASCII characters.")
    if not 0 < len(stream) <= _STREAM_BYTES or b"\0" in stream:
        raise CodecUsageError(
            f"stream name is {header.stream!r}; it has 1 to {_STREAM_BYTES} bytes of UTF-8 and no NUL. Shorten it."
        )
    try:
        checked = _SEGMENT_CHECKED.pack(
            SEGMENT_MAGIC,
            FORMAT_VERSION,
            SEGMENT_HEADER_BYTES,
            kind,
            stream,
            header.epoch,
            header.segment,
            header.first_seq,
            header.tail_crc,
        )
    except struct.error as error:
        raise CodecUsageError(f"segment header {header} has a number out of its range: {error}.") from None
    return checked + google_crc32c.value(checked).to_bytes(4, "little")


def parse_segment_header(data: bytes) -> SegmentHeader | HeaderFault:
    """Returns the header at the start of `data`, or why there is none.

    Invariants: never raises on any bytes.
    """
    if not data:
        return HeaderFault.EMPTY
    if len(data) < SEGMENT_HEADER_BYTES or not data.startswith(SEGMENT_MAGIC):
        return HeaderFault.FOREIGN
    _, version, _, kind, stream, epoch, segment, first_seq, tail_crc, crc = _SEGMENT.unpack_from(data)
    if google_crc32c.value(data[: _SEGMENT_CHECKED.size]) != crc:
        return HeaderFault.DAMAGED
    if version != FORMAT_VERSION:
        return HeaderFault.UNSUPPORTED
    try:
        return SegmentHeader(
            kind=kind.decode(),
            stream=stream.rstrip(b"\0").decode(),
            epoch=epoch,
            segment=segment,
            first_seq=first_seq,
            tail_crc=tail_crc,
        )
    except UnicodeDecodeError:
        return HeaderFault.DAMAGED


def _frame_at(data: bytes, position: int, seed: int) -> Frame | None:
    """Returns the frame whose header starts at `position`, or None when the bytes there do not verify."""
    magic, frame_type, flags, header_bytes, seq, batch_seq, payload_bytes, crc = _FRAME.unpack_from(data, position)
    if magic != _FRAME_MAGIC or header_bytes != FRAME_HEADER_BYTES or payload_bytes > MAX_PAYLOAD_BYTES:
        return None
    start = position + FRAME_HEADER_BYTES
    end = start + payload_bytes + -payload_bytes % FRAME_ALIGNMENT_BYTES
    if end > len(data):
        return None
    body = data[start:end]
    checked = data[position : position + _FRAME_CHECKED.size]
    if google_crc32c.extend(google_crc32c.extend(seed, checked), body) != crc:
        return None
    payload = body if len(body) == payload_bytes else body[:payload_bytes]
    return Frame(frame_type, flags, seq, batch_seq, crc, position, end, payload)


def _next_magic(data: bytes, position: int) -> int:
    """Returns the first aligned offset >= position where a frame magic stands, or len(data)."""
    while True:
        found = data.find(_FRAME_MAGIC_BYTES, position)
        if found < 0:
            return len(data)
        if found % FRAME_ALIGNMENT_BYTES == 0:
            return found
        position = found + 1
