"""Routes and kept sets in the token log: bytes by hand, recovery over restarts, and a request whose column is missing.

Here a request's experts are a function of the position, so that any mistake of place is a wrong value.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollforward.rollout.errors import WalUsageError
from rollforward.rollout.types import Int16Array, KeptSets, Request, RequestId, SamplingParams, StopReason, ToolUse
from rollforward.rollout.wal import WalWriter, open_log
from rollforward.rollout.wal_columns import Ragged, RaggedColumn
from rollforward.rollout.wal_files import segment_name
from rollforward.rollout.wal_records import (
    OpenRecord,
    RecordType,
    WalConfig,
    decode_record,
    encode_record,
)
from rollforward.rollout.wal_recovery import RecoveredLog, RecoveredRequest, recover
from rollforward.rollout.wal_scan import ProblemKind
from rollforward.rollout.wal_step import KEPT_FLAG, ROUTES_FLAG, StepRecord, StepRoutes
from rollforward.sandbox.codec import SEGMENT_HEADER_BYTES, frame_seed, scan_frames

PROCESS = WalConfig(level="process")
LAYERS, SLOTS = 3, 2


def identity(member: int) -> RequestId:
    return RequestId(0, 0, member)


def request(member: int, *, prompt: int = 4, routes: bool = True, top_k: int = 5) -> Request:
    return Request(
        id=identity(member),
        prompt_ids=np.arange(prompt, dtype=np.int32),
        seed=member,
        sampling=SamplingParams(max_new_tokens=50, top_k=top_k),
        policy_version=1,
        tools=ToolUse(task="sum", max_turns=3, max_observation_tokens=9),
        record_routes=routes,
    )


def experts(member: int, first: int, last: int) -> Int16Array:
    """Routes of positions [first, last) of a member's sequence."""
    position = np.arange(first, last).reshape(-1, 1, 1)
    cell = np.arange(LAYERS * SLOTS).reshape(LAYERS, SLOTS)
    return ((position * 31 + cell * 7 + member * 3) % 200).astype(np.int16)


class Row:
    """One row of a step: a slot's token, the positions that it brings and its kept set."""

    def __init__(self, slot: int, token: int, routes: Int16Array | None = None, kept: Sequence[int] = ()) -> None:
        self.slot = slot
        self.token = token
        self.routes = np.zeros((0, LAYERS, SLOTS), np.int16) if routes is None else routes
        self.kept = kept


def step_record(rows: Sequence[Row], *, has_routes: bool = True, has_kept: bool = True) -> StepRecord:
    routes = StepRoutes(
        counts_N=np.array([len(row.routes) for row in rows], np.int32),
        routes_PLK=np.concatenate([row.routes for row in rows]),
    )
    kept = KeptSets(
        counts_T=np.array([len(row.kept) for row in rows], np.int32),
        token_ids=np.array([token for row in rows for token in row.kept], np.int32),
    )
    return StepRecord(
        slots=np.array([row.slot for row in rows], np.uint16),
        token_ids=np.array([row.token for row in rows], np.int32),
        logprobs=np.array([-row.token for row in rows], np.float32),
        policy_version=1,
        routes=routes if has_routes else None,
        kept=kept if has_kept else None,
    )


def append(writer: WalWriter, *rows: Row, **columns: bool) -> int:
    record = step_record(rows, **columns)
    return writer.append_step(
        record.slots,
        record.token_ids,
        record.logprobs,
        policy_version=1,
        routes=record.routes,
        kept=record.kept,
    )


def start(directory: Path) -> tuple[WalWriter, RecoveredLog]:
    return open_log(directory, stream="e", config=PROCESS)


def one(log: RecoveredLog, member: int = 0) -> RecoveredRequest:
    return log.requests[identity(member)]


def assert_whole(found: RecoveredRequest, num_positions: int) -> None:
    assert found.damage is None
    assert found.routes is not None
    expected = experts(found.request.id.member, 0, num_positions)
    assert (found.routes.dtype, found.routes.shape) == (expected.dtype, expected.shape)
    assert found.routes.tolist() == expected.tolist()
    mask = found.sequence()[1]
    if mask.any():
        assert num_positions == np.flatnonzero(mask)[-1], "all positions before the newest sampled token"


@st.composite
def rows(draw: st.DrawFn) -> list[Row]:
    count = draw(st.integers(0, 5))
    high = draw(st.sampled_from([1, 255, 256, 32_767]))
    return [
        Row(
            slot,
            draw(st.integers(-1, 2**31 - 1)),
            np.full((draw(st.integers(0, 3)), LAYERS, SLOTS), draw(st.integers(0, high)), np.int16),
            sorted(draw(st.sets(st.integers(0, 2**31 - 1), max_size=4))),
        )
        for slot in range(count)
    ]


@given(st.lists(rows(), min_size=1, max_size=1), st.booleans(), st.booleans())
@settings(max_examples=80)
def test_steps_with_columns_round_trip_bit_for_bit(drawn: list[list[Row]], has_routes: bool, has_kept: bool) -> None:
    if not drawn[0]:
        return
    record = step_record(drawn[0], has_routes=has_routes, has_kept=has_kept)
    encoded = encode_record(record)
    assert encoded.frame_type == RecordType.STEP
    assert encoded.flags == (ROUTES_FLAG if has_routes else 0) | (KEPT_FLAG if has_kept else 0)
    assert len(encoded.payload) % 4 == 0
    decoded = decode_record(*encoded)
    assert isinstance(decoded, StepRecord)
    assert (decoded.routes, decoded.kept) == (record.routes, record.kept)
    for name in ("slots", "token_ids", "logprobs"):
        assert getattr(decoded, name).tobytes() == getattr(record, name).tobytes()


def test_the_layout_of_both_columns() -> None:
    """Slots 1 and 2; one brings a position with experts [[7, 8]], two are drawn from {3, 9} and from all."""
    record = StepRecord(
        slots=np.array([1, 2], np.uint16),
        token_ids=np.array([9, 4], np.int32),
        logprobs=np.zeros(2, np.float32),
        policy_version=5,
        routes=StepRoutes(counts_N=np.array([0, 1], np.int32), routes_PLK=np.array([[[7, 8]]], np.int16)),
        kept=KeptSets(counts_T=np.array([2, 0], np.int32), token_ids=np.array([3, 9], np.int32)),
    )
    columns = "02000000 05000000 0100 0200 09000000 04000000 00000000 00000000"
    routes = "0100 0200 01000000 00000000 01000000 07 08 0000"
    kept = "02000000 00000000 03000000 09000000"
    assert encode_record(record).payload == bytes.fromhex(columns + routes + kept)
    wide = msgspec.structs.replace(
        record, routes=StepRoutes(counts_N=np.array([0, 1], np.int32), routes_PLK=np.array([[[7, 256]]], np.int16))
    )
    routes = "0100 0200 02000000 00000000 01000000 0700 0001"
    assert encode_record(wide).payload == bytes.fromhex(columns + routes + kept)


@given(st.binary(max_size=5), st.integers(0, 200), st.integers(0, 3))
def test_damaged_columns_give_a_record_or_a_typed_error(noise: bytes, position: int, flags: int) -> None:
    payload = encode_record(step_record([Row(0, 5, experts(0, 0, 4), [1, 5]), Row(1, 6, experts(1, 0, 2))])).payload
    position %= len(payload)
    try:
        decode_record(RecordType.STEP, flags, payload[:position] + noise + payload[position + 1 :])
    except WalUsageError:
        return


@pytest.mark.parametrize("flags", [4, 0x80, 7])
def test_unknown_flag_bits_of_a_step_are_refused(flags: int) -> None:
    payload = encode_record(step_record([Row(0, 5, experts(0, 0, 4), [5])])).payload
    with pytest.raises(WalUsageError, match="this version knows flags 0x3"):
        decode_record(RecordType.STEP, flags, payload)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"routes": StepRoutes(counts_N=np.ones(2, np.int32), routes_PLK=experts(0, 0, 2))}, "2 routes counts"),
        ({"routes": StepRoutes(counts_N=np.ones(1, np.int32), routes_PLK=experts(0, 0, 2))}, "add up to 1 for 2"),
        ({"routes": StepRoutes(counts_N=np.ones(1, np.int64), routes_PLK=experts(0, 0, 1))}, "routes counts is int64"),
        ({"routes": StepRoutes(counts_N=np.ones(1, np.int32), routes_PLK=experts(0, 0, 1) - np.int16(100))}, "-1"),
        (
            {"routes": StepRoutes(counts_N=np.ones(1, np.int32), routes_PLK=np.zeros((1, 2), np.int16))},
            r"int16\[1, 2\]",
        ),
        (
            {"kept": KeptSets(counts_T=np.array([1, 1], np.int32), token_ids=np.array([1, 2], np.int32))},
            "2 kept counts",
        ),
        ({"kept": KeptSets(counts_T=np.array([1], np.int32), token_ids=np.array([1], np.int64))}, "kept.token_ids"),
    ],
)
def test_columns_that_do_not_fit_are_refused(changed: dict[str, Any], says: str) -> None:
    good = step_record([Row(0, 5, experts(0, 0, 4), [5])])
    with pytest.raises(WalUsageError, match=says):
        encode_record(msgspec.structs.replace(good, **changed))


def test_an_open_keeps_what_was_asked_and_old_ones_stay_readable() -> None:
    record = OpenRecord(slot=3, request=request(0))
    encoded = encode_record(record)
    assert decode_record(*encoded) == record
    plain = msgspec.structs.replace(record, request=msgspec.structs.replace(request(0, routes=False), tools=None))
    payload = encode_record(plain).payload
    meta_bytes = int.from_bytes(payload[:4], "little")
    meta = msgspec.msgpack.decode(payload[8 : 8 + meta_bytes])
    old = msgspec.msgpack.encode(meta[:-2])
    tokens = payload[8 + meta_bytes + -meta_bytes % 4 :]
    head = len(old).to_bytes(4, "little") + payload[4:8]
    assert decode_record(RecordType.OPEN, 0, head + old + bytes(-len(old) % 4) + tokens) == plain


def two_turns(writer: WalWriter) -> None:
    """Prompt of 4; tokens 10 11 | observed 3 tokens | 12. Member 1 asks for nothing and shares the steps."""
    writer.append_open(request(0), slot=5)
    writer.append_open(request(1, routes=False, top_k=0), slot=2)
    append(writer, Row(2, 20), Row(5, 10, experts(0, 0, 4), [3, 10]))
    append(writer, Row(5, 11, experts(0, 4, 5)), Row(2, 21))
    writer.append_observe(5, np.array([7, 7, 7], np.int32))
    append(writer, Row(2, 22), has_routes=False, has_kept=False)
    append(writer, Row(2, 23), Row(5, 12, experts(0, 5, 9), [12]))


def test_recovery_returns_both_columns_by_token(tmp_path: Path) -> None:
    writer, _ = start(tmp_path)
    two_turns(writer)
    writer.close()
    log = recover(tmp_path)
    assert (log.problems, log.failed) == ((), {})
    found = one(log)
    assert found.token_ids.tolist() == [10, 11, 12]
    assert found.kept == KeptSets(counts_T=np.array([2, 0, 1], np.int32), token_ids=np.array([3, 10, 12], np.int32))
    assert_whole(found, 9)
    assert (one(log, 1).routes, one(log, 1).kept) == (None, None)
    assert one(log, 1).token_ids.tolist() == [20, 21, 22, 23]


def test_columns_of_several_lives_join_at_the_resumed_token(tmp_path: Path) -> None:
    """A life may repeat tokens; the positions end one before the newest token, whoever logged them."""
    writer, _ = start(tmp_path)
    two_turns(writer)
    writer.close()
    writer, _ = start(tmp_path)
    writer.append_open(request(0), slot=0, resumed_tokens=2, resumed_observations=1)
    append(writer, Row(0, 12, experts(0, 5, 9), [12]))
    append(writer, Row(0, 13, experts(0, 9, 10), [1, 13]))
    writer.close()
    writer, _ = start(tmp_path)
    writer.append_open(request(0), slot=1, resumed_tokens=4, resumed_observations=1)
    append(writer, Row(1, 14, experts(0, 10, 11)))
    writer.append_close(1, StopReason.LENGTH)
    writer.close()
    log = recover(tmp_path)
    assert log.problems == ()
    found = one(log)
    assert found.is_finished
    assert found.num_openings == 3
    assert found.token_ids.tolist() == [10, 11, 12, 13, 14]
    assert found.kept is not None
    assert found.kept.counts_T.tolist() == [2, 0, 1, 2, 0]
    assert found.kept.token_ids.tolist() == [3, 10, 12, 1, 13]
    assert_whole(found, len(found.sequence()[0]) - 1)


def test_a_request_without_a_token_has_no_routes_yet(tmp_path: Path) -> None:
    writer, _ = start(tmp_path)
    writer.append_open(request(0), slot=0)
    writer.close()
    found = one(recover(tmp_path))
    assert found.is_unfinished
    assert found.routes is None
    assert found.kept is not None
    assert found.kept.counts_T.size == 0


Life = Callable[[WalWriter], object]


def _first(writer: WalWriter) -> None:
    writer.append_open(request(0), slot=0)
    append(writer, Row(0, 10, experts(0, 0, 4), [10]))
    append(writer, Row(0, 11, experts(0, 4, 5), [11]))


def _again(last: Int16Array, kept: Sequence[int]) -> Life:
    def life(writer: WalWriter) -> None:
        writer.append_open(request(0), slot=0, resumed_tokens=1)
        append(writer, Row(0, 11, last, kept))

    return life


def _short(counts: Sequence[tuple[int, int]]) -> Life:
    def life(writer: WalWriter) -> None:
        writer.append_open(request(0), slot=0)
        for token, (begin, end) in enumerate(counts):
            append(writer, Row(0, token, experts(0, begin, end)))

    return life


@pytest.mark.parametrize(
    ("lives", "says"),
    [
        ([_first, _again(experts(0, 4, 5), [11])], None),
        ([_first, _again(experts(1, 4, 5), [11])], "routes of tokens 1..1 was logged twice"),
        ([_first, _again(experts(0, 4, 5), [9, 11])], "a kept set of tokens 1..1 was logged twice"),
        ([_short([(0, 4), (4, 5), (5, 6)])], None),
        ([_short([(0, 3), (4, 5)])], "token 0 brought routes of 3 positions; 4 became known"),
        ([_short([(0, 4), (4, 4)])], "token 1 brought routes of 0 positions; 1 became known"),
        ([_short([(0, 4), (4, 6)])], "token 1 brought routes of 2 positions; 1 became known"),
    ],
)
def test_columns_that_contradict_the_tokens_fail_the_request(
    tmp_path: Path, lives: list[Life], says: str | None
) -> None:
    for life in lives:
        writer, _ = start(tmp_path)
        life(writer)
        writer.close()
    log = recover(tmp_path)
    if says is None:
        assert log.failed == {}
        return
    assert says in log.failed[identity(0)]
    assert [problem.kind for problem in log.problems] == [ProblemKind.CONFLICT]


@pytest.mark.parametrize("columns", [{"has_routes": False}, {"has_kept": False}])
def test_a_column_that_was_asked_for_is_demanded_by_the_writer(tmp_path: Path, columns: dict[str, bool]) -> None:
    writer, _ = start(tmp_path)
    writer.append_open(request(0), slot=7)
    writer.append_open(request(1, routes=False, top_k=0), slot=8)
    before = writer.append_version(2)
    with pytest.raises(WalUsageError, match=r"no column for what slots \[7\] asked for"):
        append(writer, Row(8, 1), Row(7, 10, experts(0, 0, 4), [10]), **columns)
    append(writer, Row(8, 1), has_routes=False, has_kept=False)
    writer.append_close(7, StopReason.LENGTH)
    writer.append_open(request(2, routes=False, top_k=0), slot=7)
    assert append(writer, Row(7, 1), has_routes=False, has_kept=False) == before + 4
    writer.close()


@pytest.mark.parametrize("flags", [0, ROUTES_FLAG, KEPT_FLAG])
def test_a_logged_step_without_its_column_fails_the_requests_that_asked(tmp_path: Path, flags: int) -> None:
    """No writer of ours makes such a log; here the step is encoded without looking at who asked."""
    writer, _ = start(tmp_path)
    writer.append_open(request(0), slot=0)
    writer.append_open(request(1, routes=False, top_k=0), slot=1)
    append(writer, Row(0, 10, experts(0, 0, 4), [10]), Row(1, 20))
    record = step_record(
        [Row(0, 11, experts(0, 4, 5), [11]), Row(1, 21)],
        has_routes=bool(flags & ROUTES_FLAG),
        has_kept=bool(flags & KEPT_FLAG),
    )
    writer._committer.submit(*encode_record(record))
    writer.close()
    log = recover(tmp_path)
    assert set(log.failed) == {identity(0)}
    assert "STEP without the routes or kept sets" in log.failed[identity(0)]
    assert [problem.kind for problem in log.problems] == [ProblemKind.BAD_RECORD]
    assert one(log, 1).token_ids.tolist() == [20, 21]


def test_routes_of_another_model_in_one_log_fail_what_is_open(tmp_path: Path) -> None:
    writer, _ = start(tmp_path)
    writer.append_open(request(0), slot=0)
    append(writer, Row(0, 10, experts(0, 0, 4), [10]))
    routes = StepRoutes(counts_N=np.ones(1, np.int32), routes_PLK=np.zeros((1, LAYERS + 1, SLOTS), np.int16))
    record = msgspec.structs.replace(step_record([Row(0, 11, None, [11])]), routes=routes)
    writer._committer.submit(*encode_record(record))
    writer.close()
    log = recover(tmp_path)
    assert "STEP has values of shape [4, 2]" in log.failed[identity(0)]
    assert one(log).token_ids.tolist() == [10]


def test_rows_of_slots_that_no_open_bound_leave_the_columns_of_others_in_place(tmp_path: Path) -> None:
    writer, _ = start(tmp_path)
    writer.append_open(request(0), slot=0)
    record = step_record([Row(9, 1, experts(3, 0, 2), [8, 9]), Row(0, 10, experts(0, 0, 4), [10]), Row(8, 2)])
    writer._committer.submit(*encode_record(record))
    writer.close()
    log = recover(tmp_path)
    found = one(log)
    assert_whole(found, 4)
    assert found.kept is not None
    assert found.kept.token_ids.tolist() == [10]


def test_a_request_that_lost_its_open_is_whole_again_under_a_later_attempt(tmp_path: Path) -> None:
    writer, _ = start(tmp_path)
    writer.wait_durable(writer.append_open(request(0), slot=0))
    writer.append_observe(0, np.array([1], np.int32))
    writer.close()
    path = tmp_path / segment_name(1, 0)
    data = bytearray(path.read_bytes())
    data[SEGMENT_HEADER_BYTES + 40] ^= 1
    path.write_bytes(data)
    writer, log = start(tmp_path)
    assert set(log.failed) == {identity(0)}
    writer.append_open(request(0), slot=0, attempt=1)
    append(writer, Row(0, 10, experts(0, 0, 4), [10]))
    writer.close()
    log = recover(tmp_path)
    assert log.failed == {}
    assert one(log).attempt == 1
    assert_whole(one(log), 4)


def test_frames_carry_their_flags(tmp_path: Path) -> None:
    writer, _ = start(tmp_path)
    two_turns(writer)
    writer.close()
    data = (tmp_path / segment_name(1, 0)).read_bytes()
    frames = scan_frames(data, offset=SEGMENT_HEADER_BYTES, seed=frame_seed("e", 1)).frames
    assert [frame.flags for frame in frames if frame.frame_type == RecordType.STEP] == [3, 3, 0, 3]
    assert {frame.flags for frame in frames if frame.frame_type != RecordType.STEP} == {0}


@given(st.data())
@settings(max_examples=40)
def test_ragged_columns_come_back_in_order(data: st.DataObject) -> None:
    """Runs grow in random order; the column of each is what was added for it, whatever was filtered beside it."""
    num_runs = data.draw(st.integers(1, 4))
    truth: list[list[list[int]]] = [[] for _ in range(num_runs)]
    column = RaggedColumn()
    stamp = 0
    for _ in range(data.draw(st.integers(1, 6))):
        rows = data.draw(st.lists(st.sampled_from(range(-1, num_runs)), min_size=1, max_size=num_runs, unique=True))
        counts = np.array([data.draw(st.integers(0, 3)) for _ in rows], np.int32)
        values = np.arange(stamp, stamp + int(counts.sum()), dtype=np.int32)
        stamp += len(values)
        known = np.array(rows) >= 0
        runs = np.array([run for run in rows if run >= 0], np.int32)
        positions = np.array([len(truth[run]) for run in runs], np.int64)
        column.add(runs, positions, counts, values, known)
        for run, part in zip(rows, np.split(values, np.cumsum(counts)[:-1]), strict=True):
            if run >= 0:
                truth[run].append(part.tolist())
    sizes = np.array([len(tokens) for tokens in truth], np.int64)
    starts = np.cumsum(sizes) - sizes
    whole = column.finish(starts, int(sizes.sum()))
    assert whole is not None
    for run, begin in enumerate(starts.tolist()):
        part = whole.part(begin, begin + int(sizes[run]))
        assert part.counts_T.tolist() == [len(values) for values in truth[run]]
        assert part.values.tolist() == [value for values in truth[run] for value in values]


def test_an_empty_ragged_column_joins_with_any() -> None:
    empty = Ragged(np.zeros(0, np.int32), np.zeros((0, 1), np.int16))
    other = Ragged(np.array([2, 0], np.int32), np.zeros((2, LAYERS, SLOTS), np.int16))
    assert empty.then(other) is other
    assert other.then(empty) is other
    assert other.part(0, 1).then(other.part(1, 2)).is_same(other)
