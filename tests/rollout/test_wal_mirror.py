"""Level `cluster`: nothing is durable before both copies are, and what one copy loses the other one gives back.

The law: with at least one good copy of every byte nothing is lost and nothing fails, whatever happened to the other;
what is bad in both is the damage that a log without a mirror would have. The loss of a machine is stood for by the loss
of a directory.
"""

import errno
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest

from rollforward.rollout.errors import WalFencedError, WalLockedError, WalUsageError, WalWriteError
from rollforward.rollout.types import Request, RequestId, SamplingParams, StopReason
from rollforward.rollout.wal import WalWriter, open_log
from rollforward.rollout.wal_mirror import mirror_directory
from rollforward.rollout.wal_records import WalConfig
from rollforward.rollout.wal_recovery import RecoveredLog, recover
from rollforward.rollout.wal_scan import ProblemKind
from rollforward.sandbox.codec import SEGMENT_HEADER_BYTES, frame_seed, scan_frames

STREAM = "engine-0"
TRUTH = {0: list(range(100, 130)), 1: list(range(200, 230))}


def request(member: int, prompt_tokens: int = 1) -> Request:
    return Request(
        id=RequestId(0, 0, member),
        prompt_ids=np.full(prompt_tokens, member, np.int32),
        seed=member,
        sampling=SamplingParams(max_new_tokens=50),
        policy_version=1,
    )


def config(root: Path, **changes: object) -> WalConfig:
    base = WalConfig(level="cluster", mirror_dir=str(root / "mirror"), mirror_same_device=True, stall_timeout_s=10.0)
    return msgspec.convert(msgspec.to_builtins(base) | changes, WalConfig)


def start(
    root: Path, wanted: WalConfig | None = None, *, sync: Callable[[int], None] = os.fdatasync
) -> tuple[WalWriter, RecoveredLog]:
    return open_log(root / "wal" / STREAM, stream=STREAM, config=wanted or config(root), sync=sync)


def homes(root: Path) -> tuple[Path, Path]:
    home = root / "wal" / STREAM
    mirror = mirror_directory(config(root), home)
    assert mirror is not None
    return home, mirror


def step(writer: WalWriter, rows: dict[int, int]) -> int:
    token_ids = np.array(list(rows.values()), np.int32)
    return writer.append_step(
        np.array(list(rows), np.uint16), token_ids, -token_ids.astype(np.float32), policy_version=1
    )


def write_log(root: Path, *, is_closed: bool = True, is_long: bool = False) -> tuple[Path, Path]:
    """Writes TRUTH, one commit a step; request 1 is finished. A long one has segments. Returns both directories."""
    writer, _ = start(root, config(root, segment_bytes=4096))
    for member in TRUTH:
        writer.append_open(request(member, 700 if is_long else 1), slot=member)
    for rows in zip(*TRUTH.values(), strict=True):
        writer.wait_durable(step(writer, dict(enumerate(rows))))
    writer.wait_durable(writer.append_close(1, StopReason.EOS))
    writer.close() if is_closed else writer.abandon()
    return homes(root)


def segments(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.glob("*.wal")}


def assert_whole(log: RecoveredLog) -> None:
    assert (log.failed, log.scan.lost_frames) == ({}, 0)
    assert {found.member: log.requests[found].token_ids.tolist() for found in log.requests} == TRUTH
    assert [held.is_finished for held in log.requests.values()] == [False, True]


def assert_heals(root: Path, kinds: set[ProblemKind]) -> None:
    """What either copy holds is there; after an opening both hold it and nothing is wrong with them."""
    home, mirror = homes(root)
    log = recover(home, mirror=mirror)
    assert_whole(log)
    assert {problem.kind for problem in log.problems} == kinds
    writer, again = start(root)
    assert_whole(again)
    # The claim has written EPOCH anew by then.
    assert {problem.kind for problem in again.problems} == kinds - {ProblemKind.DAMAGED_EPOCH_FILE}
    writer.close()
    assert segments(home) == segments(mirror)
    for alone in (recover(home), recover(mirror), recover(home, mirror=mirror)):
        assert_whole(alone)
        assert (alone.problems, alone.scan.torn_bytes, alone.scan.duplicate_frames) == ((), 0, 0)


def test_both_copies_hold_the_same_bytes_over_rotations(tmp_path: Path) -> None:
    home, mirror = write_log(tmp_path, is_long=True)
    assert segments(home) == segments(mirror)
    assert len(segments(home)) > 1
    assert_heals(tmp_path, set())


@pytest.mark.parametrize("late", [0, 1])
def test_nothing_is_durable_before_both_copies_are(tmp_path: Path, late: int) -> None:
    gate, entered = threading.Event(), threading.Event()
    gate.set()

    def sync(descriptor: int) -> None:
        if Path(os.readlink(f"/proc/self/fd/{descriptor}")).is_relative_to(homes(tmp_path)[late]) and not gate.is_set():
            entered.set()
            assert gate.wait(20)
        os.fdatasync(descriptor)

    writer, _ = start(tmp_path, sync=sync)
    gate.clear()
    seq = writer.append_open(request(0), slot=0)
    assert entered.wait(10)
    other = homes(tmp_path)[1 - late]
    while not recover(other).requests:
        pass
    assert writer.durable_seq < seq
    gate.set()
    writer.wait_durable(seq)
    writer.close()


@pytest.mark.parametrize("bad", [0, 1])
@pytest.mark.parametrize("is_write", [False, True])
def test_a_failure_of_either_copy_ends_the_writer_and_is_not_tried_again(
    tmp_path: Path, bad: int, is_write: bool
) -> None:
    calls: list[bool] = []
    failing = threading.Event()

    def sync(descriptor: int) -> None:
        is_bad = Path(os.readlink(f"/proc/self/fd/{descriptor}")).is_relative_to(homes(tmp_path)[bad])
        if failing.is_set():
            calls.append(is_bad)
            if is_bad:
                raise OSError(errno.EIO, "emulated")
        os.fdatasync(descriptor)

    writer, _ = start(tmp_path, sync=sync)
    durable = writer.append_open(request(0), slot=0)
    writer.wait_durable(durable)
    segment = next(homes(tmp_path)[bad].glob("*.wal"))
    if is_write:
        for link in Path("/proc/self/fd").iterdir():
            if link.exists() and os.path.samestat(link.stat(), segment.stat()):
                reader = os.open(segment, os.O_RDONLY)
                os.dup2(reader, int(link.name))
                os.close(reader)
    else:
        failing.set()
    lost = step(writer, {0: 1})
    with pytest.raises(WalWriteError, match=str(segment)):
        writer.wait_durable(lost)
    with pytest.raises(WalWriteError):
        step(writer, {0: 2})
    writer.abandon()
    assert writer.durable_seq == durable
    assert calls.count(True) == (0 if is_write else 1)


@pytest.mark.parametrize("copy", [0, 1])
def test_a_flipped_bit_anywhere_in_one_copy_is_healed(tmp_path: Path, copy: int) -> None:
    both = write_log(tmp_path)
    (path,) = both[copy].glob("*.wal")
    data = path.read_bytes()
    other = segments(both[1 - copy])
    for bit in range(0, 8 * len(data), 13):
        descriptor = os.open(path, os.O_WRONLY)
        os.pwrite(descriptor, bytes([data[bit // 8] ^ 1 << (bit % 8)]), bit // 8)
        log = recover(both[0], mirror=both[1])
        os.pwrite(descriptor, data[bit // 8 : bit // 8 + 1], bit // 8)
        os.close(descriptor)
        assert_whole(log)
        assert (log.scan.torn_bytes, log.scan.damaged_bytes, log.was_sealed) == (0, 0, True), bit
        # A damaged last record is a torn one: nobody can tell.
        assert log.scan.stale == (path.name,)
        assert {problem.kind for problem in log.problems} <= {ProblemKind.HEALED}
    assert segments(both[1 - copy]) == other
    path.write_bytes(data[:200] + bytes([data[200] ^ 4]) + data[201:])
    assert_heals(tmp_path, {ProblemKind.HEALED})


@pytest.mark.parametrize("copy", [0, 1])
def test_every_truncation_of_the_last_two_records_of_one_copy_is_healed(tmp_path: Path, copy: int) -> None:
    both = write_log(tmp_path, is_closed=False)
    (path,) = both[copy].glob("*.wal")
    data = path.read_bytes()
    ends = [frame.end for frame in scan_frames(data, offset=SEGMENT_HEADER_BYTES, seed=frame_seed(STREAM, 1)).frames]
    for length in range(ends[-3], ends[-1]):
        path.write_bytes(data[:length])
        log = recover(both[0], mirror=both[1])
        assert_whole(log)
        assert (log.scan.torn_bytes, log.scan.damaged_bytes) == (0, 0)
        # Without the last record this is what a crash between two writes leaves; one more is a loss.
        assert bool(log.problems) == (length < ends[-2])
    assert_heals(tmp_path, set())


def flip(path: Path, *offsets: int) -> None:
    data = bytearray(path.read_bytes())
    for offset in offsets:
        data[offset] ^= 1
    path.write_bytes(data)


FAULTS: list[tuple[Callable[[Path, Path], object], set[ProblemKind]]] = [
    (lambda one, _: shutil.rmtree(one), {ProblemKind.HEALED}),
    (lambda one, _: list(map(Path.unlink, one.glob("*.wal"))), {ProblemKind.HEALED}),
    (lambda one, _: min(one.glob("*.wal")).write_bytes(b""), {ProblemKind.HEALED}),
    (lambda one, _: min(one.glob("*.wal")).write_bytes(b"foreign" * 100), {ProblemKind.HEALED}),
    (
        lambda one, other: (flip(min(one.glob("*.wal")), 300), flip(sorted(other.glob("*.wal"))[1], 100)),
        {ProblemKind.HEALED},
    ),
    (lambda one, other: (flip(min(one.glob("*.wal")), 20), flip(min(other.glob("*.wal")), 300)), {ProblemKind.HEALED}),
    (
        lambda one, other: (min(one.glob("*.wal")).unlink(), max(other.glob("*.wal")).unlink()),
        {ProblemKind.HEALED},
    ),
    (lambda one, _: flip(one / "EPOCH", 30), {ProblemKind.DAMAGED_EPOCH_FILE}),
    (lambda one, _: max(one.glob("*.wal")).open("ab").write(b"torn"), set()),
    (lambda one, _: max(one.glob("*.wal")).open("ab").write(bytes(500)), set()),
]


@pytest.mark.parametrize("is_swapped", [False, True])
@pytest.mark.parametrize(("fault", "kinds"), FAULTS)
def test_what_one_copy_lost_comes_from_the_other(
    tmp_path: Path, fault: Callable[[Path, Path], object], kinds: set[ProblemKind], is_swapped: bool
) -> None:
    both = write_log(tmp_path, is_long=True)
    assert len(segments(both[0])) > 1
    fault(*(both[::-1] if is_swapped else both))
    assert_heals(tmp_path, kinds)


def test_what_both_copies_lost_is_the_damage_of_a_log_without_a_mirror(tmp_path: Path) -> None:
    both = write_log(tmp_path)
    for home in both:
        flip(next(home.glob("*.wal")), 700)
    alone, together = recover(both[0]), recover(both[0], mirror=both[1])
    assert set(together.failed) == set(alone.failed) == {RequestId(0, 0, 0), RequestId(0, 0, 1)}
    assert (together.scan.lost_frames, together.scan.damaged_bytes) == (1, alone.scan.damaged_bytes)
    assert {problem.kind for problem in together.problems} == {ProblemKind.LOST_FRAMES, ProblemKind.DAMAGED_BYTES}


def test_copies_that_contradict_each_other_are_not_believed(tmp_path: Path) -> None:
    home, mirror = write_log(tmp_path)
    writer, _ = start(tmp_path / "another")
    writer.append_open(request(0), slot=0)
    step(writer, {0: 999})
    writer.close()
    other = homes(tmp_path / "another")[0]
    (mirror / next(mirror.glob("*.wal")).name).write_bytes(next(other.glob("*.wal")).read_bytes())
    log = recover(home, mirror=mirror)
    assert any(problem.kind is ProblemKind.CONFLICT for problem in log.problems)
    assert log.scan.stale == ()


def test_a_log_goes_on_on_another_machine_from_the_mirror_alone(tmp_path: Path) -> None:
    zombie, _ = start(tmp_path)
    zombie.append_open(request(0), slot=0)
    zombie.wait_durable(step(zombie, {0: 7}))
    elsewhere = tmp_path / "node-b" / tmp_path.name / "wal" / STREAM
    with pytest.raises(WalLockedError):
        open_log(elsewhere, stream=STREAM, config=config(tmp_path))
    heir, log = open_log(elsewhere, stream=STREAM, config=config(tmp_path), takeover=True)
    assert log.requests[RequestId(0, 0, 0)].token_ids.tolist() == [7]
    assert heir.epoch == zombie.epoch + 1
    late = step(zombie, {0: 666})
    with pytest.raises(WalFencedError, match="mirror"):
        zombie.wait_durable(late)
    heir.append_open(request(0), slot=0, resumed_tokens=1)
    heir.wait_durable(step(heir, {0: 8}))
    heir.close()
    zombie.abandon()
    after = recover(elsewhere, mirror=homes(tmp_path)[1])
    assert after.requests[RequestId(0, 0, 0)].token_ids.tolist() == [7, 8]
    assert after.failed == {}


def test_a_mirror_of_another_log_is_refused(tmp_path: Path) -> None:
    write_log(tmp_path)
    other = tmp_path / "node-b" / tmp_path.name / "wal" / STREAM
    open_log(other, stream=STREAM, config=WalConfig())[0].close()
    with pytest.raises(WalUsageError, match="two different logs"):
        open_log(other, stream=STREAM, config=config(tmp_path))


def test_a_level_and_its_directory_belong_together(tmp_path: Path) -> None:
    for value in ({"level": "cluster"}, {"level": "node", "mirror_dir": "x"}, {"mirror_dir": "x"}):
        with pytest.raises(msgspec.ValidationError, match="Set both or neither"):
            msgspec.convert(value, WalConfig)
    with pytest.raises(WalUsageError, match="same device"):
        start(tmp_path, config(tmp_path, mirror_same_device=False))
    above = (tmp_path / "wal" / STREAM).resolve().parents[2]
    with pytest.raises(WalUsageError, match="same device"):
        start(tmp_path, config(tmp_path, mirror_dir=str(above)))
    if os.stat("/dev/shm").st_dev != os.stat(tmp_path).st_dev:
        elsewhere = Path("/dev/shm") / tmp_path.name
        try:
            start(tmp_path, config(tmp_path, mirror_dir=str(elsewhere), mirror_same_device=False))[0].close()
        finally:
            shutil.rmtree(elsewhere)
