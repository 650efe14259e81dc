"""Frames that verify but make no sense where they stand: each is a finding, fails its requests, and stops nothing.

No honest writer produces them, so the segments here are made by hand.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from rollforward.rollout.types import Request, RequestId, SamplingParams, StopReason
from rollforward.rollout.wal_files import segment_name
from rollforward.rollout.wal_records import (
    CloseRecord,
    ObserveRecord,
    OpenRecord,
    StepRecord,
    WalRecord,
    encode_record,
)
from rollforward.rollout.wal_recovery import RecoveredLog, recover
from rollforward.rollout.wal_scan import ProblemKind
from rollforward.sandbox.codec import SegmentHeader, encode_frame, encode_segment_header, frame_seed

NO_TOKENS = np.zeros(0, np.int32)


def identity(member: int) -> RequestId:
    return RequestId(0, 0, member)


def opened(member: int, slot: int) -> OpenRecord:
    request = Request(
        id=identity(member),
        prompt_ids=np.array([1], np.int32),
        seed=member,
        sampling=SamplingParams(max_new_tokens=50),
        policy_version=1,
    )
    return OpenRecord(slot=slot, request=request)


def step(slot: int, token: int) -> StepRecord:
    row = np.array([token], np.int32)
    return StepRecord(
        slots=np.array([slot], np.uint16), token_ids=row, logprobs=row.astype(np.float32), policy_version=1
    )


def close(member: int, slot: int, num_tokens: int) -> CloseRecord:
    return CloseRecord(slot=slot, id=identity(member), stop_reason=StopReason.EOS, num_tokens=num_tokens)


def observe(member: int, slot: int, after_tokens: int, ordinal: int = 0) -> ObserveRecord:
    return ObserveRecord(
        slot=slot,
        id=identity(member),
        ordinal=ordinal,
        after_tokens=after_tokens,
        token_ids=NO_TOKENS,
        command_position=0,
    )


def recover_frames(directory: Path, frames: Sequence[tuple[int, int, bytes]]) -> RecoveredLog:
    """Recovers a log of one segment with these (type, flags, payload)."""
    header = SegmentHeader(kind="TOKN", stream="e", epoch=1, segment=0, first_seq=1, tail_crc=0)
    data = encode_segment_header(header)
    for seq, (frame_type, flags, payload) in enumerate(frames, start=1):
        data += encode_frame(
            frame_type=frame_type, flags=flags, seq=seq, batch_seq=seq, payload=payload, seed=frame_seed("e", 1)
        )[0]
    (directory / segment_name(1, 0)).write_bytes(data)
    return recover(directory)


def recover_records(directory: Path, records: list[WalRecord]) -> RecoveredLog:
    return recover_frames(directory, [encode_record(record) for record in records])


@pytest.mark.parametrize(
    ("bad", "failed", "says"),
    [
        (close(0, 5, 3), {0}, "closed with 3 tokens, log has 2"),
        (close(7, 5, 2), {0}, "names s0-p0-m7"),
        (close(7, 9, 2), {7}, "without OPEN"),
        (close(7, 65_535, 2), {7}, "without OPEN"),
        (close(0, 70_000, 2), {0, 1}, "slots are 0"),
        (observe(0, 5, 1), {0}, "after 1 tokens, log has 2"),
        (observe(0, 5, 2, ordinal=1), {0}, "observation 1"),
        (opened(2, 5), {0}, "bound again"),
        (opened(2, 65_535), {0, 1}, "slots are 0"),
        (opened(2, -1), {0, 1}, "slots are 0"),
        (step(9, 1), set(), "no OPEN bound"),
    ],
)
def test_a_record_in_the_wrong_place_fails_its_requests(
    tmp_path: Path, bad: WalRecord, failed: set[int], says: str
) -> None:
    before = [opened(0, 5), step(5, 10), opened(1, 6), step(5, 11), step(6, 20)]
    log = recover_records(tmp_path, [*before, bad, step(6, 21)])
    assert {found.member for found in log.failed} == failed
    (problem,) = log.problems
    assert problem.kind is ProblemKind.BAD_RECORD
    assert says in problem.detail
    assert {found.member for found in problem.requests} == failed
    if 1 not in failed:
        assert log.requests[identity(1)].token_ids.tolist() == [20, 21]


def unknown_type(kind: int, payload: bytes) -> tuple[int, int, bytes]:
    del kind
    return 99, 0, payload


def unknown_flags(kind: int, payload: bytes) -> tuple[int, int, bytes]:
    return kind, 0x80, payload


def short_payload(kind: int, payload: bytes) -> tuple[int, int, bytes]:
    return kind, 0, payload[:-4]


@pytest.mark.parametrize("spoil", [unknown_type, unknown_flags, short_payload])
@pytest.mark.parametrize("record", [step(5, 10), observe(0, 5, 0), close(0, 5, 0), opened(3, 8)])
def test_a_record_that_cannot_be_read_fails_what_was_open(
    tmp_path: Path, record: WalRecord, spoil: Callable[[int, bytes], tuple[int, int, bytes]]
) -> None:
    kind, _, payload = encode_record(record)
    log = recover_frames(tmp_path, [encode_record(opened(0, 5)), spoil(kind, payload), encode_record(step(5, 11))])
    assert set(log.failed) == {identity(0)}
    assert [problem.kind for problem in log.problems] == [ProblemKind.BAD_RECORD]
    assert log.requests[identity(0)].token_ids.tolist() == []


def test_a_close_without_slot_needs_no_opening_in_its_epoch(tmp_path: Path) -> None:
    log = recover_records(tmp_path, [opened(0, 5), step(5, 10), close(0, 65_535, 1)])
    assert log.problems == ()
    assert log.requests[identity(0)].is_finished
