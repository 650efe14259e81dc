"""What an owner finds at a log's end and beside it: segments of which nothing is left, torn writes within zeros,
folders, and another writer of the same epoch.

The law is that of test_wal_recovery.py: what was acknowledged is whole or failed and counted, and nothing raises at the
start; only a second owner does.
"""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from rollforward.rollout.errors import WalFencedError, WalUsageError
from rollforward.rollout.types import Request, RequestId, SamplingParams, StopReason
from rollforward.rollout.wal import WalWriter, open_log
from rollforward.rollout.wal_files import EpochClaim, segment_name
from rollforward.rollout.wal_mirror import mirror_directory
from rollforward.rollout.wal_records import WalConfig
from rollforward.rollout.wal_recovery import RecoveredLog, recover
from rollforward.rollout.wal_scan import ProblemKind
from rollforward.rollout.wal_verb import summarise
from rollforward.sandbox.codec import ROOM_ALIGNMENT_BYTES, SEGMENT_HEADER_BYTES, frame_seed, scan_frames

STREAM = "engine-0"
NODE = WalConfig(level="node", segment_bytes=4096, stall_timeout_s=10.0)
TOKENS = list(range(100, 240))
DONE, OPEN = RequestId(0, 0, 0), RequestId(0, 0, 1)


def request(identity: RequestId) -> Request:
    return Request(
        id=identity,
        prompt_ids=np.array([identity.member], np.int32),
        seed=identity.member,
        sampling=SamplingParams(max_new_tokens=500),
        policy_version=1,
    )


def start(directory: Path, config: WalConfig = NODE) -> tuple[WalWriter, RecoveredLog]:
    return open_log(directory, stream=STREAM, config=config, sync=lambda descriptor: None)


def draw(writer: WalWriter, slot: int, token: int) -> int:
    row = np.array([slot], np.uint16), np.array([token], np.int32), np.zeros(1, np.float32)
    return writer.append_step(*row, policy_version=1)


def write_log(directory: Path, config: WalConfig = NODE) -> list[Path]:
    """One request that is over after a token, one in flight over several segments, each token acknowledged. Returns the
    segments."""
    writer, _ = start(directory, config)
    for slot, identity in enumerate((DONE, OPEN)):
        writer.append_open(request(identity), slot=slot)
    draw(writer, 0, 7)
    writer.append_close(0, StopReason.EOS)
    for token in TOKENS:
        writer.wait_durable(draw(writer, 1, token))
    writer.abandon()
    return sorted(directory.glob("*.wal"))


def spoil(path: Path, how: str) -> None:
    match how:
        case "zeros":
            path.write_bytes(bytes(path.stat().st_size))
        case "empty":
            path.write_bytes(b"")
        case "no header":
            # All of its frames are damaged too.
            path.write_bytes(bytes(byte ^ 0x55 for byte in path.read_bytes()))
        case _:
            path.unlink()
            path.mkdir()


@pytest.mark.parametrize("how", ["zeros", "empty", "no header", "unreadable"])
@pytest.mark.parametrize("num_spoilt", [1, 2])
def test_a_last_segment_of_which_nothing_is_left_fails_what_was_open(tmp_path: Path, how: str, num_spoilt: int) -> None:
    """It had acknowledged tokens; nothing in the log says how many, so none of them may be taken for never drawn."""
    segments = write_log(tmp_path)
    assert len(segments) > 2
    for path in segments[-num_spoilt:]:
        spoil(path, how)
    log = recover(tmp_path)
    held = log.requests[OPEN].token_ids.tolist()
    assert 0 < len(held) < len(TOKENS)
    assert held == TOKENS[: len(held)]
    assert set(log.failed) == {OPEN}
    assert segments[-num_spoilt].name in log.failed[OPEN]
    assert log.requests[DONE].is_finished
    kinds = [ProblemKind.UNREADABLE if how == "unreadable" else ProblemKind.DAMAGED_BYTES] * num_spoilt
    assert [problem.kind for problem in log.problems] == [*kinds, ProblemKind.LOST_FRAMES]
    assert summarise(tmp_path).damaged == num_spoilt + 1
    writer, again = start(tmp_path)
    assert set(again.failed) == {OPEN}
    writer.append_open(request(OPEN), slot=0, attempt=1)
    writer.wait_durable(draw(writer, 0, TOKENS[0]))
    writer.close()
    after = recover(tmp_path)
    assert (after.requests[OPEN].attempt, after.failed) == (1, {})
    assert after.requests[OPEN].token_ids.tolist() == TOKENS[:1]


def test_a_whole_epoch_of_which_nothing_is_left_fails_what_may_have_gone_on_in_it(tmp_path: Path) -> None:
    write_log(tmp_path)
    writer, _ = start(tmp_path)
    writer.append_open(request(OPEN), slot=0, resumed_tokens=len(TOKENS))
    writer.wait_durable(draw(writer, 0, 999))
    writer.abandon()
    (path,) = tmp_path.glob("00000002-*.wal")
    spoil(path, "zeros")
    log = recover(tmp_path)
    assert set(log.failed) == {OPEN}
    assert log.requests[DONE].is_finished


@pytest.mark.parametrize("name", ["00000009-000000.wal", "00000001-000077.wal", "other.wal"])
def test_a_file_with_a_name_that_continues_nothing_is_foreign(tmp_path: Path, name: str) -> None:
    write_log(tmp_path)
    (tmp_path / name).write_bytes(bytes(500))
    log = recover(tmp_path)
    assert ([problem.kind for problem in log.problems], log.failed) == ([ProblemKind.FOREIGN_FILE], {})
    for _ in range(2):
        writer, log = start(tmp_path)
        assert (log.failed, log.requests[OPEN].token_ids.tolist()) == ({}, TOKENS)
        writer.append_open(request(OPEN), slot=0, resumed_tokens=len(TOKENS))
        writer.close()


def test_with_a_second_copy_a_last_segment_comes_back(tmp_path: Path) -> None:
    config = WalConfig(
        level="cluster", segment_bytes=4096, mirror_dir=str(tmp_path / "mirror"), mirror_same_device=True
    )
    home = tmp_path / "wal" / STREAM
    mirror = mirror_directory(config, home)
    assert mirror is not None
    segments = write_log(home, config)
    spoil(segments[-1], "zeros")
    log = recover(home, mirror=mirror)
    assert (log.failed, log.requests[OPEN].token_ids.tolist()) == ({}, TOKENS)
    spoil(mirror / segments[-1].name, "empty")
    assert set(recover(home, mirror=mirror).failed) == {OPEN}


def test_every_torn_write_within_zeros_is_cut(tmp_path: Path) -> None:
    """What a crash leaves of the last two records where the room was filled before; every length of them, and a page of
    the write that came before the others."""
    path = write_log(tmp_path / "log")[-1]
    data = path.read_bytes()
    frames = scan_frames(data, offset=SEGMENT_HEADER_BYTES, seed=frame_seed(STREAM, 1)).frames
    (before, first), last = (frame.end for frame in frames[-3:-1]), frames[-1].end
    assert len(data) % ROOM_ALIGNMENT_BYTES == 0
    assert last < len(data)
    for length in range(before, last + 1):
        torn = data[:length].ljust(len(data), b"\0")
        path.write_bytes(torn)
        log = recover(path.parent)
        # A record that ends in zeros is whole without them.
        end = next(end for end in (last, first, before) if torn[:end] == data[:end])
        num_cut = (before, first, last)[::-1].index(end)
        assert (log.problems, log.failed) == ((), {})
        assert log.requests[OPEN].token_ids.tolist() == TOKENS[: len(TOKENS) - num_cut]
        # Zeros at the end of a torn record are not to be told from room.
        assert log.scan.torn_bytes == len(data[end:length].rstrip(b"\0"))
        assert log.scan.torn_bytes + log.scan.room_bytes == len(data) - end
    path.write_bytes(data[:first] + bytes(16) + data[first + 16 :])
    log = recover(path.parent)
    assert (log.problems, log.scan.torn_bytes) == ((), len(data[first:last].rstrip(b"\0")))
    assert log.requests[OPEN].token_ids.tolist() == TOKENS[:-1]
    writer, again = start(path.parent)
    assert again.requests[OPEN].token_ids.tolist() == TOKENS[:-1]
    writer.close()
    assert path.stat().st_size == first


def test_a_flipped_bit_in_the_room_costs_nothing(tmp_path: Path) -> None:
    path = write_log(tmp_path)[-1]
    data = path.read_bytes()
    end = scan_frames(data, offset=SEGMENT_HEADER_BYTES, seed=frame_seed(STREAM, 1)).end
    for bit in range(8 * end, 8 * len(data), 41):
        # In place: truncating and rewriting a file makes ext4 flush it at every close.
        with path.open("r+b") as file:
            file.seek(bit // 8)
            file.write(bytes([1 << bit % 8]))
        log = recover(tmp_path)
        with path.open("r+b") as file:
            file.seek(bit // 8)
            file.write(b"\0")
        assert (log.failed, log.requests[OPEN].token_ids.tolist()) == ({}, TOKENS)
        assert log.scan.torn_bytes == bit // 8 + 1 - end, "counted as what a torn write left"


def test_folders_in_the_way_stop_nothing(tmp_path: Path) -> None:
    write_log(tmp_path)
    for name in ("notes.tmp", "notes", "00000001-000077.wal.tmp"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("mine")
    writer, log = start(tmp_path)
    writer.close()
    assert log.failed == {}
    assert (tmp_path / "notes.tmp" / "file").exists()


def test_who_finds_that_another_began_the_epoch_touches_nothing(tmp_path: Path) -> None:
    """Two take over at one moment and get one epoch. The slower one sees a write of the other half done, and would cut
    it; what the other acknowledges then would be gone."""
    writer, _ = start(tmp_path)
    writer.append_open(request(OPEN), slot=0)
    writer.wait_durable(draw(writer, 0, 1))
    (path,) = tmp_path.glob("*.wal")
    data = path.read_bytes()
    end = scan_frames(data, offset=SEGMENT_HEADER_BYTES, seed=frame_seed(STREAM, 1)).end
    (tmp_path / "prepared.wal.1.tmp").write_bytes(bytes(4096))
    path.write_bytes(data[:end] + b"half of a record" + data[end + 16 :])
    before = {one.name: one.read_bytes() for one in tmp_path.iterdir()}
    with pytest.raises(WalFencedError, match="begun by another writer of epoch 1"):
        recover(tmp_path, stream=STREAM, repair=True)
    assert {one.name: one.read_bytes() for one in tmp_path.iterdir()} == before
    writer.abandon()
    claim = EpochClaim.claim(tmp_path, stream=STREAM, takeover=False)
    recover(tmp_path, stream=STREAM, repair=True)
    assert path.stat().st_size == end
    claim.release()


def make_sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)


@pytest.mark.parametrize(
    "make",
    [
        os.mkfifo,
        lambda path: path.symlink_to("/dev/zero"),
        lambda path: path.symlink_to("nowhere"),
        lambda path: path.symlink_to(path.name),
        make_sparse,
        Path.mkdir,
    ],
    ids=["fifo", "device", "dangling", "loop", "sparse", "directory"],
)
def test_what_is_no_file_under_a_segments_name_is_counted_and_neither_waited_for_nor_read(
    tmp_path: Path, make: Callable[[Path], object]
) -> None:
    segments = write_log(tmp_path)
    make(tmp_path / segment_name(1, len(segments)))
    assert summarise(tmp_path).damaged == 2
    writer, log = start(tmp_path)
    writer.close()
    assert [problem.kind for problem in log.problems] == [ProblemKind.UNREADABLE, ProblemKind.LOST_FRAMES]
    assert list(log.failed) == [OPEN]
    assert log.requests[DONE].is_finished


@pytest.mark.parametrize("name", ["EPOCH", "RETIRED"])
def test_a_pipe_in_place_of_a_small_file_is_not_waited_for(tmp_path: Path, name: str) -> None:
    write_log(tmp_path)
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    assert summarise(tmp_path).tokens == 1 + len(TOKENS)
    with pytest.raises(WalUsageError, match=f"{name} is no regular file, and the log needs that name; move it away"):
        start(tmp_path)


@pytest.mark.parametrize("name", ["LOCK", "EPOCH", "EPOCH.tmp", "RETIRED", "RETIRED.tmp"])
def test_a_directory_in_place_of_a_small_file_is_told_in_a_sentence(tmp_path: Path, name: str) -> None:
    write_log(tmp_path)
    (tmp_path / name).unlink(missing_ok=True)
    (tmp_path / name).mkdir()
    with pytest.raises(WalUsageError, match=f"{name} is no regular file, and the log needs that name; move it away"):
        start(tmp_path)
    (tmp_path / name).rmdir()
    writer, log = start(tmp_path)
    writer.close()
    assert log.requests[OPEN].token_ids.tolist() == TOKENS


def test_a_file_in_place_of_the_directory_is_told_in_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "engine-0").write_text("a file")
    with pytest.raises(WalUsageError, match="is no directory; move away what is there"):
        start(tmp_path / "engine-0")


def test_numbers_that_no_header_can_hold_are_somebody_elses_names(tmp_path: Path) -> None:
    write_log(tmp_path)
    for name in ("99999999999999999999-000000.wal", "00000001-99999999999999999999.wal"):
        (tmp_path / name).write_bytes(b"x" * 200)
    for epoch in (2, 3):
        writer, log = start(tmp_path)
        assert (writer.epoch, log.failed) == (epoch, {})
        writer.close()


def test_a_segment_in_whose_place_another_logs_lies_is_counted(tmp_path: Path) -> None:
    ours, theirs = tmp_path / STREAM, tmp_path / "engine-1"
    big = WalConfig(level="process")
    (segment,) = write_log(ours, big)
    writer, _ = open_log(theirs, stream="engine-1", config=big)
    writer.close()
    shutil.copy(theirs / segment.name, segment)
    assert summarise(ours).damaged > 0
    writer, log = start(ours)
    writer.close()
    assert {problem.kind for problem in log.problems} >= {ProblemKind.FOREIGN_STREAM, ProblemKind.DAMAGED_BYTES}
    # Where the own one lies under another name, nothing is lost.
    shutil.rmtree(ours)
    (segment,) = write_log(ours, big)
    segment.rename(ours / "renamed.wal")
    shutil.copy(theirs / segment.name, segment)
    assert summarise(ours).damaged == 0
    assert summarise(ours).tokens == 1 + len(TOKENS)
