"""Retention: what checkpoints cover leaves the log, and nothing else ever does, whoever dies while it leaves.

The law: a request of a step that may be asked for again reads as in a log from which nothing was removed, sequence
numbers go on, and a log without damage has no findings.
"""

import os
import shutil
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import numpy as np
import pytest

from rollforward.rollout.errors import WalFencedError, WalUsageError
from rollforward.rollout.types import FailureType, Request, RequestId, SamplingParams, StopReason
from rollforward.rollout.wal import WalWriter, open_log
from rollforward.rollout.wal_files import RETIRED_NAME
from rollforward.rollout.wal_mirror import mirror_directory
from rollforward.rollout.wal_records import WalConfig
from rollforward.rollout.wal_recovery import RecoveredLog, recover
from rollforward.rollout.wal_retention import Retirement
from rollforward.rollout.wal_scan import ProblemKind
from rollforward.rollout.wal_verb import summarise
from rollforward.sandbox.codec import encode_segment_header, parse_segment_header

STREAM = "engine-0"
MEMBERS = 2
CONFIG = WalConfig(level="process", segment_bytes=4096, keep_bytes=0, stall_timeout_s=10.0)


class Died(BaseException):
    """The process ends here; nothing that would clean up runs."""


def request(step: int, member: int) -> Request:
    return Request(
        id=RequestId(step, 0, member),
        prompt_ids=np.full(300, step, np.int32),
        seed=member,
        sampling=SamplingParams(max_new_tokens=50),
        policy_version=step,
    )


def tokens_of(step: int, member: int) -> list[int]:
    return [1000 * step + 100 * member + index for index in range(3 + member)]


def start(root: Path, wanted: WalConfig = CONFIG) -> tuple[WalWriter, RecoveredLog]:
    return open_log(root / "wal" / STREAM, stream=STREAM, config=wanted, sync=lambda descriptor: None)


def mirrored(root: Path) -> WalConfig:
    return msgspec.structs.replace(CONFIG, level="cluster", mirror_dir=str(root / "mirror"), mirror_same_device=True)


def homes(root: Path, wanted: WalConfig = CONFIG) -> list[Path]:
    home = root / "wal" / STREAM
    mirror = mirror_directory(wanted, home, makes=False)
    return [home] if mirror is None else [home, mirror]


def sample(writer: WalWriter, step: int) -> None:
    """One step of the loop: every request opened, drawn and closed; all durable."""
    for member in range(MEMBERS):
        writer.append_open(request(step, member), slot=member)
    for member in range(MEMBERS):
        for token in tokens_of(step, member):
            row = np.array([member], np.uint16), np.array([token], np.int32), np.zeros(1, np.float32)
            writer.append_step(*row, policy_version=step)
        writer.wait_durable(writer.append_close(member, StopReason.EOS))


def names(home: Path) -> list[str]:
    return sorted(path.name for path in home.glob("*.wal"))


def assert_right(log: RecoveredLog, *, first_step: int, end_step: int) -> None:
    """Everything of the steps asked for is there, nothing that is there is wrong, and there are no findings."""
    held = {identity: found.token_ids.tolist() for identity, found in log.requests.items()}
    assert (log.problems, log.failed) == ((), {})
    assert held == {identity: tokens_of(identity.step, identity.member) for identity in held}
    assert all(found.is_finished for found in log.requests.values())
    wanted = {RequestId(step, 0, member) for step in range(first_step, end_step) for member in range(MEMBERS)}
    assert wanted <= set(held)


def test_steady_state_holds_what_checkpoints_do_not_cover(tmp_path: Path) -> None:
    writer, _ = start(tmp_path)
    sizes: list[int] = []
    removed = 0
    for step in range(12):
        sample(writer, step)
        # The checkpoint of step + 1 and the one before it are kept.
        done = writer.retire(step)
        assert done.kept_because is None
        removed += done.num_segments
        sizes.append(sum(path.stat().st_size for path in homes(tmp_path)[0].glob("*.wal")))
        log = recover(homes(tmp_path)[0])
        assert_right(log, first_step=step, end_step=step + 1)
        assert min(identity.step for identity in log.requests) >= step - 1
    assert removed >= 10
    assert len(set(sizes[3:])) == 1
    last_seq = writer.durable_seq
    writer.close()
    again, log = start(tmp_path)
    assert log.was_sealed
    assert log.scan.next_seq == last_seq + 2
    sample(again, 12)
    again.close()
    assert_right(recover(homes(tmp_path)[0]), first_step=11, end_step=13)
    summary = summarise(homes(tmp_path)[0])
    assert summary.damaged == 0
    assert summary.retired > 50
    assert summary.records + summary.retired == recover(homes(tmp_path)[0]).scan.next_seq - 1


@pytest.mark.parametrize("keep_bytes", [None, 1 << 30, 20_000])
def test_nothing_leaves_below_the_size_that_is_kept(tmp_path: Path, keep_bytes: int | None) -> None:
    writer, _ = start(tmp_path, msgspec.structs.replace(CONFIG, keep_bytes=keep_bytes))
    removed = 0
    for step in range(30):
        sample(writer, step)
        size = sum(path.stat().st_size for path in homes(tmp_path)[0].glob("*.wal"))
        now = writer.retire(step).num_segments
        assert not now or size > 20_000
        removed += now
        assert size < 30_000 or keep_bytes != 20_000
    assert (removed > 0) == (keep_bytes == 20_000)
    writer.abandon()


def test_nothing_leaves_while_a_request_is_open(tmp_path: Path) -> None:
    writer, _ = start(tmp_path)
    for step in range(3):
        sample(writer, step)
        writer.retire(0)
    # Durable first: the writer thread may begin a segment with it.
    writer.wait_durable(writer.append_open(request(3, 0), slot=0))
    before = names(homes(tmp_path)[0])
    assert writer.retire(3) == Retirement(kept_because="1 requests are open")
    assert names(homes(tmp_path)[0]) == before
    writer.append_close(0, StopReason.EOS)
    assert writer.retire(3).num_segments > 0
    writer.abandon()


@pytest.mark.parametrize("how", ["goes on", "is closed"])
def test_a_request_on_both_sides_of_a_cut_holds_the_log_together(tmp_path: Path, how: str) -> None:
    writer, _ = start(tmp_path)
    sample(writer, 0)
    writer.append_open(request(1, 0), slot=5)
    row = np.array([5], np.uint16), np.array([tokens_of(1, 0)[0]], np.int32), np.zeros(1, np.float32)
    writer.wait_durable(writer.append_step(*row, policy_version=1))
    writer.abandon()
    writer, log = start(tmp_path)
    identity = RequestId(1, 0, 0)
    assert log.requests[identity].is_unfinished
    sample(writer, 2)
    assert writer.retire(0).num_segments == 0
    if how == "goes on":
        writer.append_open(request(1, 0), slot=5, resumed_tokens=1)
        for token in tokens_of(1, 0)[1:]:
            row = np.array([5], np.uint16), np.array([token], np.int32), np.zeros(1, np.float32)
            writer.append_step(*row, policy_version=1)
        writer.append_close(5, StopReason.EOS)
    else:
        writer.append_close_recovered(identity, StopReason.EOS, num_tokens=1, failure=FailureType.INFRA)
    sample(writer, 3)
    # Everything is covered, but the cut before the request's second part cannot be used; this call makes another one.
    assert writer.retire(9).num_segments == 0
    held = recover(homes(tmp_path)[0])
    assert held.problems == ()
    assert held.requests[identity].num_openings == (2 if how == "goes on" else 1)
    sample(writer, 4)
    assert writer.retire(9).num_segments > 0
    writer.close()
    assert_right(recover(homes(tmp_path)[0]), first_step=4, end_step=5)


def test_cuts_need_a_covering_checkpoint_also_for_what_was_recovered(tmp_path: Path) -> None:
    writer, _ = start(tmp_path)
    for step in range(6):
        sample(writer, step)
    writer.close()
    writer, _ = start(tmp_path)
    # The run went on from an older checkpoint: step 3 is asked for again and answered from the log.
    writer.retire(3)
    sample(writer, 6)
    assert writer.retire(5).num_segments == 0
    assert writer.retire(6).num_segments > 0
    writer.close()
    assert_right(recover(homes(tmp_path)[0]), first_step=6, end_step=7)


@contextmanager
def dying(at: int, is_done: bool) -> Generator[list[str]]:
    """Ends the process before or after the operation number `at` on names or on what is durable."""
    calls: list[str] = []
    originals: dict[str, Callable[..., object]] = {name: getattr(os, name) for name in ("replace", "unlink", "fsync")}

    def wrap(name: str) -> Callable[..., object]:
        def call(*args: object, **kwargs: object) -> object:
            calls.append(name)
            if len(calls) - 1 != at:
                return originals[name](*args, **kwargs)
            if is_done:
                originals[name](*args, **kwargs)
            raise Died

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in originals:
            patch.setattr(os, name, wrap(name))
        yield calls


@pytest.mark.parametrize("has_mirror", [False, True], ids=["one copy", "two copies"])
def test_death_at_every_operation_of_a_retirement(tmp_path: Path, has_mirror: bool) -> None:
    at = 0
    seen: set[str] = set()
    while True:
        for is_done in (False, True):
            root = tmp_path / f"{at}-{is_done}"
            wanted = mirrored(root) if has_mirror else CONFIG
            writer, _ = start(root, wanted)
            for step in range(5):
                sample(writer, step)
                if step in (1, 2):
                    writer.retire(0)
            last_seq = writer.durable_seq
            with dying(at, is_done) as calls:
                try:
                    assert writer.retire(4).num_segments >= 2
                    has_died = False
                except Died:
                    has_died = True
            writer.abandon()
            seen |= set(calls)
            kept = homes(root, wanted)
            assert_right(recover(kept[0], mirror=kept[1] if has_mirror else None), first_step=4, end_step=5)
            writer, log = start(root, wanted)
            assert log.scan.next_seq == last_seq + 1
            assert_right(log, first_step=4, end_step=5)
            sample(writer, 5)
            writer.close()
            for home in kept:
                assert_right(recover(home), first_step=4, end_step=6)
                assert not list(home.glob("*.tmp"))
                # Wherever the mark was written the old segments are gone now.
                assert (0 in {identity.step for identity in recover(home).requests}) != (home / RETIRED_NAME).exists()
        if not has_died:
            break
        at += 1
    assert seen == {"replace", "unlink", "fsync"}
    assert at >= 6


@pytest.mark.parametrize("lost", [0, 1], ids=["directory", "mirror"])
def test_either_copy_alone_brings_both_back(tmp_path: Path, lost: int) -> None:
    wanted = mirrored(tmp_path)
    writer, _ = start(tmp_path, wanted)
    for step in range(6):
        sample(writer, step)
        writer.retire(step)
    writer.close()
    both = homes(tmp_path, wanted)
    left = names(both[1 - lost])
    shutil.rmtree(both[lost])
    writer, log = start(tmp_path, wanted)
    assert_right(msgspec.structs.replace(log, problems=()), first_step=5, end_step=6)
    assert {problem.kind for problem in log.problems} <= {ProblemKind.HEALED}
    writer.close()
    assert names(both[0]) == names(both[1])
    assert set(left) < set(names(both[0]))
    assert [summarise(home).damaged for home in both] == [0, 0]


def retired_log(root: Path) -> tuple[Path, int]:
    """A log that was cut and closed, and the number of its next record."""
    writer, _ = start(root)
    for step in range(4):
        sample(writer, step)
        writer.retire(step)
    writer.close()
    return homes(root)[0], recover(homes(root)[0]).scan.next_seq


def test_a_damaged_mark_is_a_finding_and_costs_nothing(tmp_path: Path) -> None:
    home, next_seq = retired_log(tmp_path)
    good = (home / RETIRED_NAME).read_bytes()
    bad = [good[:size] for size in range(len(good))]
    bad += [good[:index] + bytes([good[index] ^ 1 << index % 8]) + good[index + 1 :] for index in range(len(good))]
    for content in bad:
        (home / RETIRED_NAME).write_bytes(content)
        log = recover(home)
        assert [problem.kind for problem in log.problems] == [ProblemKind.DAMAGED_MARK], content
        assert_right(msgspec.structs.replace(log, problems=()), first_step=3, end_step=4)
        assert (log.scan.next_seq, log.scan.lost_frames) == (next_seq, 0)
    start(tmp_path)[0].close()
    assert (home / RETIRED_NAME).read_bytes() == good
    assert_right(recover(home), first_step=3, end_step=4)


def test_a_missing_mark_or_segment_is_a_loss_that_is_counted(tmp_path: Path) -> None:
    home, next_seq = retired_log(tmp_path)
    mark = parse_segment_header((home / RETIRED_NAME).read_bytes())
    assert not isinstance(mark, str)
    shutil.copytree(home, tmp_path / "no-mark")
    (tmp_path / "no-mark" / RETIRED_NAME).unlink()
    log = recover(tmp_path / "no-mark")
    assert log.scan.lost_frames == mark.first_seq - 1
    assert log.failed == {}
    assert RequestId(3, 0, 0) in log.requests
    first, *others = sorted(home.glob("*.wal"))
    assert others
    first.unlink()
    log = recover(home)
    assert log.scan.lost_frames > 0
    assert log.scan.next_seq == next_seq
    for path in others:
        path.unlink()
    assert recover(home).scan.next_seq == mark.first_seq


def test_a_mark_of_another_log_or_of_the_future_is_not_used(tmp_path: Path) -> None:
    home, _ = retired_log(tmp_path)
    good = (home / RETIRED_NAME).read_bytes()
    mark = parse_segment_header(good)
    assert not isinstance(mark, str)
    for foreign in (msgspec.structs.replace(mark, stream="engine-1"), msgspec.structs.replace(mark, kind="EPOC")):
        far = msgspec.structs.replace(foreign, epoch=99, segment=99, first_seq=10**6)
        (home / RETIRED_NAME).write_bytes(encode_segment_header(far))
        log = recover(home)
        assert [problem.kind for problem in log.problems] == [ProblemKind.DAMAGED_MARK]
        assert_right(msgspec.structs.replace(log, problems=()), first_step=3, end_step=4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rollforward.sandbox.codec.FORMAT_VERSION", 2)
        newer = encode_segment_header(mark)
    (home / RETIRED_NAME).write_bytes(newer)
    with pytest.raises(WalUsageError, match="RETIRED has a newer format"):
        start(tmp_path)


def test_who_was_fenced_removes_nothing(tmp_path: Path) -> None:
    old, _ = start(tmp_path)
    for step in range(3):
        sample(old, step)
        old.retire(0)
    writer, _ = open_log(homes(tmp_path)[0], stream=STREAM, config=CONFIG, takeover=True)
    before = names(homes(tmp_path)[0])
    with pytest.raises(WalFencedError):
        old.retire(2)
    assert names(homes(tmp_path)[0]) == before
    assert not (homes(tmp_path)[0] / RETIRED_NAME).exists()
    old.abandon()
    writer.close()
    assert_right(recover(homes(tmp_path)[0]), first_step=0, end_step=3)


def test_a_directory_that_cannot_be_written_costs_only_the_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, _ = start(tmp_path)
    for step in range(3):
        sample(writer, step)
        writer.retire(0)

    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        done = writer.retire(2)
    assert done.num_segments == 0
    assert "No space left" in (done.kept_because or "")
    sample(writer, 3)
    assert writer.retire(3).num_segments > 0
    writer.close()
    assert_right(recover(homes(tmp_path)[0]), first_step=3, end_step=4)


def test_a_reader_of_a_live_log_sees_no_loss(tmp_path: Path) -> None:
    writer, _ = start(tmp_path)
    is_over = threading.Event()

    def write() -> None:
        for step in range(20):
            sample(writer, step)
            writer.retire(step)
        is_over.set()

    thread = threading.Thread(target=write)
    thread.start()
    num_reads = 0
    while not is_over.is_set():
        log = recover(homes(tmp_path)[0])
        assert (log.problems, log.failed) == ((), {})
        num_reads += 1
    thread.join()
    writer.close()
    assert num_reads > 0
