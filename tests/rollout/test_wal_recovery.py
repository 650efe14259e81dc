"""Recovery against an enemy: truncations, flipped bits, lost, doubled, foreign and fenced segments.

The law in every case: a recovered request that is not marked failed holds a prefix of the truth (all of it where
everything was acknowledged), what is missing is counted, and nothing raises. Power cuts are not proven here.
"""

import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest

from rollforward.rollout.types import FailureType, Request, RequestId, SamplingParams, StopReason
from rollforward.rollout.wal import WalWriter, open_log
from rollforward.rollout.wal_files import segment_name
from rollforward.rollout.wal_records import RecordType, WalConfig
from rollforward.rollout.wal_recovery import RecoveredLog, RecoveredRequest, recover
from rollforward.rollout.wal_scan import ProblemKind
from rollforward.sandbox.codec import (
    SEGMENT_HEADER_BYTES,
    SegmentHeader,
    encode_segment_header,
    frame_seed,
    scan_frames,
)

PROCESS = WalConfig(level="process")
SEGMENTED = WalConfig(level="process", segment_bytes=4096)
STREAM = "engine-0"


def identity(member: int) -> RequestId:
    return RequestId(3, 1, member)


def request(member: int, seed: int = 11, version: int = 1) -> Request:
    return Request(
        id=identity(member),
        prompt_ids=np.array([member], np.int32),
        seed=seed,
        sampling=SamplingParams(max_new_tokens=50),
        policy_version=version,
    )


def start(directory: Path, config: WalConfig = PROCESS) -> tuple[WalWriter, RecoveredLog]:
    return open_log(directory, stream=STREAM, config=config)


def step(writer: WalWriter, rows: dict[int, int]) -> int:
    """Appends one step; rows maps slot to token, the log-prob is -token."""
    token_ids = np.array(list(rows.values()), np.int32)
    return writer.append_step(
        np.array(list(rows), np.uint16), token_ids, -token_ids.astype(np.float32), policy_version=1
    )


def commit(writer: WalWriter, seq: int) -> None:
    """Ends a group commit after `seq`."""
    writer.wait_durable(seq)


def write_small_log(directory: Path, *, is_sealed: bool) -> dict[int, list[int]]:
    """Writes a log of one segment in 8 commits; returns the truth, tokens by member."""
    writer, _ = start(directory)
    commit(writer, writer.append_open(request(0), slot=1))
    commit(writer, writer.append_open(request(1), slot=0))
    commit(writer, step(writer, {0: 10, 1: 20}))
    commit(writer, writer.append_close(0, StopReason.EOS))
    commit(writer, writer.append_open(request(2), slot=0))
    commit(writer, writer.append_observe(1, np.array([7], np.int32)))
    commit(writer, step(writer, {0: 30, 1: 21}))
    commit(writer, step(writer, {1: 22}))
    writer.close() if is_sealed else writer.abandon()
    return {0: [20, 21, 22], 1: [10], 2: [30]}


def only_segment(directory: Path) -> Path:
    (path,) = directory.glob("*.wal")
    return path


def frame_ends(data: bytes, epoch: int = 1) -> list[int]:
    return [
        frame.end for frame in scan_frames(data, offset=SEGMENT_HEADER_BYTES, seed=frame_seed(STREAM, epoch)).frames
    ]


def tokens(log: RecoveredLog) -> dict[int, list[int]]:
    return {found.member: log.requests[found].token_ids.tolist() for found in log.requests if found not in log.failed}


def assert_prefixes(log: RecoveredLog, truth: dict[int, list[int]]) -> None:
    """Checks that what is not marked failed is a prefix of the truth, with its own log-probs."""
    for found, recovered in log.requests.items():
        if found in log.failed:
            assert recovered.damage is not None
            assert not recovered.is_finished
            assert not recovered.is_unfinished
            continue
        got = recovered.token_ids.tolist()
        assert got == truth[found.member][: len(got)]
        assert recovered.behavior_logprobs.tolist() == [-float(token) for token in got]
        if recovered.close is not None:
            assert got == truth[found.member]


def is_accounted(log: RecoveredLog) -> bool:
    scan = log.scan
    return bool(log.problems or scan.torn_bytes or scan.damaged_bytes or scan.lost_frames)


def test_every_truncation_of_the_last_two_records_is_cut(tmp_path: Path) -> None:
    write_small_log(tmp_path / "log", is_sealed=False)
    data = only_segment(tmp_path / "log").read_bytes()
    ends = frame_ends(data)
    expected = {-3: [20], -2: [20, 21], -1: [20, 21, 22]}
    for length in range(ends[-3], len(data) + 1):
        directory = tmp_path / f"cut-{length}"
        shutil.copytree(tmp_path / "log", directory)
        path = only_segment(directory)
        path.write_bytes(data[:length])
        keep = max(i for i in (-3, -2, -1) if ends[i] <= length)
        log = recover(directory)
        assert (log.problems, log.failed, log.scan.torn_bytes) == ((), {}, length - ends[keep])
        assert tokens(log)[0] == expected[keep]
        assert path.stat().st_size == length
        writer, repaired = start(directory)
        assert tokens(repaired) == tokens(log)
        assert path.stat().st_size == ends[keep]
        assert writer.append_version(2) == log.scan.next_seq
        writer.close()
        again = recover(directory)
        assert (tokens(again), again.problems, again.scan.torn_bytes) == (tokens(log), (), 0)
        shutil.rmtree(directory)


@pytest.mark.parametrize("is_sealed", [True, False])
def test_every_flipped_bit_is_caught(tmp_path: Path, is_sealed: bool) -> None:
    truth = write_small_log(tmp_path, is_sealed=is_sealed)
    path = only_segment(tmp_path)
    data = path.read_bytes()
    last_start = frame_ends(data)[-2]
    third_open = slice(*frame_ends(data)[3:5])
    outcomes: set[str] = set()
    # Without the seal only the last frame has another meaning, so only it is tried again.
    for bit in range(0 if is_sealed else 8 * last_start, 8 * len(data)):
        # In place: truncating and rewriting a file makes ext4 flush it at every close.
        descriptor = os.open(path, os.O_WRONLY)
        os.pwrite(descriptor, bytes([data[bit // 8] ^ 1 << (bit % 8)]), bit // 8)
        log = recover(tmp_path)
        os.pwrite(descriptor, data[bit // 8 : bit // 8 + 1], bit // 8)
        os.close(descriptor)
        assert is_accounted(log), bit
        assert_prefixes(log, truth)
        if bit // 8 < last_start:
            # Acknowledged: whole or failed, never shorter.
            assert all(got == truth[member] for member, got in tokens(log).items()), bit
            known = {*tokens(log), *(found.member for found in log.failed)}
            if third_open.start <= bit // 8 < third_open.stop:
                # Nothing names a request whose OPEN is lost and which never closed; its tokens are reported by slot.
                assert known == {0, 1}
                assert any("which no OPEN bound" in problem.detail for problem in log.problems)
            else:
                assert known == set(truth), bit
        else:
            assert (log.failed, log.scan.damaged_bytes) == ({}, 0), bit
        outcomes.add("failed" if log.failed else "torn" if log.scan.torn_bytes else "whole")
    assert outcomes == ({"failed", "torn", "whole"} if is_sealed else {"torn"})


def test_every_flipped_bit_of_a_segment_header_is_caught_and_the_next_writer_goes_on(tmp_path: Path) -> None:
    """Of the first, a middle and the last segment of one writer, its checksum included. A request whose records lie in
    other segments alone is whole; every other one is whole or failed, never shorter. Nothing is raised, also not by the
    next opening, whose records are read back."""
    writer, _ = start(tmp_path / "log", SEGMENTED)
    truth: dict[int, list[int]] = {}
    home_of: dict[int, set[str]] = {}
    for member in range(5):
        long = msgspec.structs.replace(request(member), prompt_ids=np.full(700, member, np.int32))
        commit(writer, writer.append_open(long, slot=0))
        first = max(path.name for path in (tmp_path / "log").glob("*.wal"))
        truth[member] = [100 * member + index for index in range(12)]
        for token in truth[member]:
            commit(writer, step(writer, {0: token}))
        commit(writer, writer.append_close(0, StopReason.EOS))
        home_of[member] = {first, max(path.name for path in (tmp_path / "log").glob("*.wal"))}
    writer.close()
    paths = sorted((tmp_path / "log").glob("*.wal"))
    assert len(paths) >= 4
    for path in (paths[0], paths[len(paths) // 2], paths[-1]):
        data = path.read_bytes()
        for bit in range(8 * SEGMENT_HEADER_BYTES):
            descriptor = os.open(path, os.O_WRONLY)
            os.pwrite(descriptor, bytes([data[bit // 8] ^ 1 << (bit % 8)]), bit // 8)
            log = recover(tmp_path / "log")
            if bit % 80 == 79:
                shutil.copytree(tmp_path / "log", tmp_path / "next")
            os.pwrite(descriptor, data[bit // 8 : bit // 8 + 1], bit // 8)
            os.close(descriptor)
            assert is_accounted(log), (path.name, bit)
            assert any(path.name in problem.where for problem in log.problems), (path.name, bit)
            assert_prefixes(log, truth)
            known = {*tokens(log), *(found.member for found in log.failed)}
            elsewhere = {member for member, homes in home_of.items() if path.name not in homes}
            assert elsewhere
            assert elsewhere <= set(tokens(log)), (path.name, bit)
            assert all(got == truth[member] for member, got in tokens(log).items()), (path.name, bit)
            assert known <= set(truth)
            if bit % 80 == 79:
                writer, again = start(tmp_path / "next", SEGMENTED)
                assert tokens(again) == tokens(log)
                commit(writer, writer.append_open(request(20), slot=0))
                commit(writer, step(writer, {0: 7}))
                writer.abandon()
                assert tokens(recover(tmp_path / "next"))[20] == [7]
                shutil.rmtree(tmp_path / "next")


def test_damage_fails_the_requests_that_were_open_and_no_others(tmp_path: Path) -> None:
    truth = write_small_log(tmp_path, is_sealed=True)
    path = only_segment(tmp_path)
    data = bytearray(path.read_bytes())
    start_of_step, end_of_step = frame_ends(bytes(data))[5:7]
    assert end_of_step - start_of_step == 64
    data[start_of_step + 40] ^= 1
    path.write_bytes(data)
    writer, log = start(tmp_path)
    assert set(log.failed) == {identity(0), identity(2)}
    assert log.requests[identity(1)].is_finished
    assert tokens(log) == {1: truth[1]}
    assert log.scan.lost_frames == 1
    assert log.scan.damaged_bytes == 64
    kinds = [problem.kind for problem in log.problems]
    assert kinds.count(ProblemKind.LOST_FRAMES) == 1
    assert kinds.count(ProblemKind.DAMAGED_BYTES) == 1
    for found in log.failed:
        count = len(log.requests[found].token_ids)
        writer.append_close_recovered(found, StopReason.ABORTED, num_tokens=count, failure=FailureType.INFRA)
    writer.close()
    after = recover(tmp_path)
    assert set(after.failed) == set(log.failed)
    close = after.requests[identity(0)].close
    assert close is not None
    assert close.failure is FailureType.INFRA


def test_a_lost_open_is_named_by_its_close(tmp_path: Path) -> None:
    writer, _ = start(tmp_path)
    commit(writer, writer.append_open(request(0), slot=0))
    commit(writer, step(writer, {0: 1}))
    commit(writer, writer.append_close(0, StopReason.EOS))
    writer.close()
    path = only_segment(tmp_path)
    data = bytearray(path.read_bytes())
    data[SEGMENT_HEADER_BYTES + 33] ^= 4
    path.write_bytes(data)
    log = recover(tmp_path)
    assert log.requests == {}
    assert set(log.failed) == {identity(0)}


class _Gate:
    """Holds the first sync that comes after `close`, so that what follows queues into one commit."""

    def __init__(self) -> None:
        self.opened = threading.Event()
        self.opened.set()
        self.entered = threading.Event()

    def __call__(self, descriptor: int) -> None:
        del descriptor
        self.entered.set()
        assert self.opened.wait(10)


@pytest.mark.parametrize("has_later_commit", [False, True])
def test_a_hole_in_the_last_commit_is_a_tear_and_before_it_is_damage(tmp_path: Path, has_later_commit: bool) -> None:
    gate = _Gate()
    writer, _ = open_log(tmp_path, stream=STREAM, config=WalConfig(), sync=gate)
    writer.wait_durable(writer.append_open(request(0), slot=0))
    gate.entered.clear()
    gate.opened.clear()
    step(writer, {0: 1})
    assert gate.entered.wait(10)
    last = [step(writer, {0: token}) for token in (2, 3, 4)][-1]
    gate.opened.set()
    writer.wait_durable(last)
    if has_later_commit:
        writer.wait_durable(step(writer, {0: 5}))
    writer.abandon()
    path = only_segment(tmp_path)
    data = bytearray(path.read_bytes())
    ends = frame_ends(bytes(data))
    hole = slice(ends[1], ends[2])
    data[hole] = bytes(hole.stop - hole.start)
    path.write_bytes(data)
    log = recover(tmp_path)
    recovered = log.requests[identity(0)]
    assert recovered.token_ids.tolist() == [1]
    if has_later_commit:
        assert (log.scan.lost_frames, log.scan.torn_frames, set(log.failed)) == (1, 0, {identity(0)})
    else:
        assert (log.scan.lost_frames, log.scan.torn_frames, log.failed) == (0, 2, {})
        assert log.scan.torn_bytes == ends[-1] - ends[1]
        assert recovered.is_unfinished


def write_segments(directory: Path) -> list[int]:
    """Writes one request over several segments; returns its tokens."""
    writer, _ = start(directory, WalConfig(level="process", segment_bytes=4096))
    commit(writer, writer.append_open(request(0), slot=0))
    for token in range(200):
        commit(writer, step(writer, {0: token}))
    writer.close()
    return list(range(200))


def lose_middle(directory: Path) -> None:
    (directory / segment_name(1, 1)).unlink()


def lose_first(directory: Path) -> None:
    (directory / segment_name(1, 0)).unlink()


def shorten_middle(directory: Path) -> None:
    path = directory / segment_name(1, 1)
    path.write_bytes(path.read_bytes()[: frame_ends(path.read_bytes())[-3]])


def empty_middle(directory: Path) -> None:
    (directory / segment_name(1, 1)).write_bytes(b"")


@pytest.mark.parametrize("fault", [lose_middle, lose_first, shorten_middle, empty_middle])
def test_a_lost_part_before_the_end_is_damage(tmp_path: Path, fault: Callable[[Path], None]) -> None:
    write_segments(tmp_path)
    fault(tmp_path)
    writer, log = start(tmp_path)
    writer.close()
    assert log.scan.lost_frames > 0
    assert set(log.failed) == {identity(0)} or (fault is lose_first and not log.requests and log.problems)
    assert log.scan.torn_bytes == 0


def copy_one(directory: Path) -> None:
    shutil.copy(directory / segment_name(1, 1), directory / segment_name(1, 7))


def copy_all(directory: Path) -> None:
    for path in sorted(directory.glob("*.wal")):
        shutil.copy(path, directory / f"copy-of-{path.name}")


def swap_names(directory: Path) -> None:
    first, second = directory / segment_name(1, 0), directory / segment_name(1, 2)
    spare = directory / "spare"
    first.rename(spare)
    second.rename(first)
    spare.rename(second)


def heal_from_a_copy(directory: Path) -> None:
    path = directory / segment_name(1, 1)
    shutil.copy(path, directory / "other-copy.wal")
    data = bytearray(path.read_bytes())
    data[500] ^= 1
    path.write_bytes(data)


def damage_header(directory: Path) -> None:
    path = directory / segment_name(1, 1)
    data = bytearray(path.read_bytes())
    data[3] ^= 255
    data[30] ^= 255
    path.write_bytes(data)


def damage_epoch_file(directory: Path) -> None:
    (directory / "EPOCH").write_bytes(b"\xff" * 80)


def leave_foreign_files(directory: Path) -> None:
    (directory / "empty.wal").write_bytes(b"")
    (directory / "notes.txt").write_text("not a segment")
    (directory / segment_name(9, 0)).write_bytes(bytes(5000))
    other = SegmentHeader(kind="TOKN", stream="engine-9", epoch=4, segment=0, first_seq=1, tail_crc=0)
    (directory / segment_name(4, 0)).write_bytes(encode_segment_header(other))
    commands = SegmentHeader(kind="CMND", stream=STREAM, epoch=4, segment=0, first_seq=1, tail_crc=0)
    (directory / segment_name(4, 1)).write_bytes(encode_segment_header(commands))
    (directory / "sub").mkdir()
    (directory / "half.wal.123.tmp").write_bytes(b"half")


@pytest.mark.parametrize(
    ("fault", "kinds"),
    [
        (copy_one, set()),
        (copy_all, set()),
        (swap_names, set()),
        (heal_from_a_copy, {ProblemKind.DAMAGED_BYTES}),
        (damage_header, {ProblemKind.DAMAGED_HEADER}),
        (damage_epoch_file, {ProblemKind.DAMAGED_EPOCH_FILE}),
        (leave_foreign_files, {ProblemKind.FOREIGN_FILE, ProblemKind.FOREIGN_STREAM, ProblemKind.UNREADABLE}),
    ],
)
def test_faults_that_cost_nothing(tmp_path: Path, fault: Callable[[Path], None], kinds: set[ProblemKind]) -> None:
    truth = write_segments(tmp_path)
    fault(tmp_path)
    log = recover(tmp_path)
    assert {problem.kind for problem in log.problems} == kinds
    assert (tokens(log), log.failed, log.scan.lost_frames, log.scan.torn_bytes) == ({0: truth}, {}, 0, 0)
    assert (log.scan.duplicate_frames > 0) == (fault in (copy_one, copy_all, heal_from_a_copy))
    writer, again = start(tmp_path)
    assert tokens(again) == {0: truth}
    writer.append_open(request(0), slot=0, resumed_tokens=200)
    step(writer, {0: 200})
    writer.close()
    assert tokens(recover(tmp_path)) == {0: [*truth, 200]}


def test_two_different_records_of_one_seq_are_not_believed(tmp_path: Path) -> None:
    for name, token in (("one", 5), ("two", 6)):
        writer, _ = start(tmp_path / name)
        commit(writer, writer.append_open(request(0), slot=0))
        commit(writer, step(writer, {0: token}))
        writer.close()
    shutil.copy(only_segment(tmp_path / "two"), tmp_path / "one" / "other.wal")
    log = recover(tmp_path / "one")
    assert ProblemKind.CONFLICT in {problem.kind for problem in log.problems}
    assert set(log.failed) == {identity(0)}


def test_a_segment_of_another_history_is_noticed(tmp_path: Path) -> None:
    for name, first in (("one", 5), ("two", 6)):
        writer, _ = start(tmp_path / name, WalConfig(level="process", segment_bytes=4096))
        commit(writer, writer.append_open(request(0), slot=0))
        for token in range(first, first + 100):
            commit(writer, step(writer, {0: token}))
        writer.close()
    shutil.copy(tmp_path / "two" / segment_name(1, 0), tmp_path / "one" / segment_name(1, 0))
    log = recover(tmp_path / "one")
    assert {problem.kind for problem in log.problems} == {ProblemKind.BROKEN_CHAIN}
    assert set(log.failed) == {identity(0)}


def test_requests_that_lost_frames_may_have_reopened_fail_too(tmp_path: Path) -> None:
    writer, _ = start(tmp_path)
    writer.append_open(request(0), slot=0)
    writer.append_open(request(1), slot=1)
    commit(writer, writer.append_close(1, StopReason.EOS))
    writer.abandon()
    writer, _ = start(tmp_path)
    commit(writer, writer.append_open(request(0), slot=0))
    commit(writer, step(writer, {0: 1}))
    writer.close()
    path = tmp_path / segment_name(2, 0)
    data = bytearray(path.read_bytes())
    data[SEGMENT_HEADER_BYTES + 40] ^= 1
    path.write_bytes(data)
    log = recover(tmp_path)
    assert set(log.failed) == {identity(0)}
    assert log.requests[identity(1)].is_finished


def test_a_missing_directory_is_an_empty_log(tmp_path: Path) -> None:
    log = recover(tmp_path / "absent")
    assert (log.requests, log.problems, log.scan.next_seq, log.was_sealed) == ({}, (), 1, False)
    assert not (tmp_path / "absent").exists()


def replay(tmp_path: Path, *lives: Callable[[WalWriter], object]) -> RecoveredLog:
    for life in lives:
        writer, _ = start(tmp_path)
        life(writer)
        writer.close()
    return recover(tmp_path)


def live(
    rows: list[int],
    *,
    resumed: int = 0,
    seed: int = 11,
    attempt: int = 0,
    observe: int | None = None,
    seen: int = 0,
    version: int = 1,
) -> Callable[[WalWriter], object]:
    """One life of a writer: opens request 0, maybe observes, samples `rows`."""

    def run(writer: WalWriter) -> None:
        writer.append_open(
            request(0, seed, version), slot=0, attempt=attempt, resumed_tokens=resumed, resumed_observations=seen
        )
        if observe is not None:
            writer.append_observe(0, np.array([observe], np.int32))
        for token in rows:
            step(writer, {0: token})

    return run


def one(log: RecoveredLog) -> RecoveredRequest:
    return log.requests[identity(0)]


def test_equal_repetitions_are_ignored(tmp_path: Path) -> None:
    log = replay(tmp_path, live([1, 2, 3]), live([2, 3, 4], resumed=1), live([1, 2]), live([], resumed=4))
    assert (log.problems, log.failed) == ((), {})
    assert one(log).token_ids.tolist() == [1, 2, 3, 4]
    assert one(log).num_openings == 4


def test_equal_observations_are_ignored(tmp_path: Path) -> None:
    log = replay(tmp_path, live([1], observe=8), live([1], observe=8), live([], resumed=1, seen=1, observe=9))
    assert log.problems == ()
    assert one(log).sequence()[0].tolist() == [0, 8, 1, 9]


@pytest.mark.parametrize(
    ("lives", "says"),
    [
        ([live([1, 2, 3]), live([2, 9], resumed=1)], "token 2 was logged twice"),
        ([live([1, 2]), live([5], resumed=3)], "resumed at token 3"),
        ([live([1, 2]), live([3], resumed=2, seed=12)], "another prompt, seed"),
        ([live([1], observe=8), live([1], observe=7)], "observation was logged twice"),
        ([live([1]), live([2], resumed=1, seen=1)], "observation 1"),
        ([live([1], resumed=4)], "before that is gone"),
    ],
)
def test_contradictions_fail_the_request(tmp_path: Path, lives: list[Callable[[WalWriter], object]], says: str) -> None:
    log = replay(tmp_path, *lives)
    assert says in log.failed[identity(0)]
    assert [(problem.kind, problem.requests) for problem in log.problems] == [(ProblemKind.CONFLICT, (identity(0),))]
    assert one(log).damage == log.failed[identity(0)]


def test_a_log_prob_that_changed_fails_the_request(tmp_path: Path) -> None:
    def life(logprob: float) -> Callable[[WalWriter], object]:
        def run(writer: WalWriter) -> None:
            writer.append_open(request(0), slot=0)
            row = np.zeros(1, np.uint16), np.array([4], np.int32), np.array([logprob], np.float32)
            writer.append_step(*row, policy_version=1)

        return run

    assert replay(tmp_path / "same", life(-0.5), life(-0.5)).failed == {}
    log = replay(tmp_path / "other", life(-0.5), life(float(np.nextafter(np.float32(-0.5), np.float32(0)))))
    assert "token 0 was logged twice" in log.failed[identity(0)]


def test_attempts_are_kept_apart(tmp_path: Path) -> None:
    log = replay(tmp_path, live([1, 2]), live([9], attempt=1), live([8], attempt=1, resumed=1))
    assert one(log).token_ids.tolist() == [9, 8]
    assert (one(log).attempt, log.problems) == (1, ())
    assert [earlier.token_ids.tolist() for earlier in log.earlier_attempts] == [[1, 2]]


def test_versions_are_known_per_token_over_restarts(tmp_path: Path) -> None:
    log = replay(tmp_path, live([1, 2]), live([], resumed=2, version=5))
    assert [(span.first_token, span.policy_version) for span in one(log).version_spans] == [(0, 1), (2, 5)]
    log = replay(tmp_path, live([3], resumed=2))
    assert [(span.first_token, span.policy_version) for span in one(log).version_spans] == [(0, 1)]


def test_seals_are_the_last_frame_of_an_orderly_log(tmp_path: Path) -> None:
    write_small_log(tmp_path, is_sealed=True)
    data = only_segment(tmp_path).read_bytes()
    last = scan_frames(data, offset=SEGMENT_HEADER_BYTES, seed=frame_seed(STREAM, 1)).frames[-1]
    assert last.frame_type == RecordType.SEAL
    assert last.batch_seq == last.seq
