"""The log's writer in one process: durable before published, group commit, back-pressure, fencing, failure of the disk.

Does not prove what survives a kill (test_wal_crash.py) or bad bytes (test_wal_recovery.py).
"""

import errno
import os
import pickle
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from rollforward.rollout import errors
from rollforward.rollout.errors import WalFencedError, WalLockedError, WalStalledError, WalUsageError, WalWriteError
from rollforward.rollout.types import FailureType, Request, RequestId, SamplingParams, StopReason
from rollforward.rollout.wal import WalWriter, open_log
from rollforward.rollout.wal_records import WalConfig
from rollforward.rollout.wal_recovery import RecoveredLog, recover

PROCESS = WalConfig(level="process")
NODE = WalConfig(level="node", stall_timeout_s=10.0)


def request(member: int, version: int = 1) -> Request:
    return Request(
        id=RequestId(0, 0, member),
        prompt_ids=np.array([5, 6, member], np.int32),
        seed=2**64 - 1 - member,
        sampling=SamplingParams(max_new_tokens=100),
        policy_version=version,
    )


def start(
    directory: Path, config: WalConfig = PROCESS, *, takeover: bool = False, sync: Callable[[int], None] = os.fdatasync
) -> tuple[WalWriter, RecoveredLog]:
    return open_log(directory, stream="engine-0", config=config, takeover=takeover, sync=sync)


def step(writer: WalWriter, rows: dict[int, int], version: int = 1) -> int:
    """Appends one step; rows maps slot to token, the log-prob is -token / 8."""
    token_ids = np.array(list(rows.values()), np.int32)
    logprobs = (-token_ids / 8).astype(np.float32)
    return writer.append_step(np.array(list(rows), np.uint16), token_ids, logprobs, policy_version=version)


def tokens(log: RecoveredLog, member: int) -> list[int]:
    return log.requests[RequestId(0, 0, member)].token_ids.tolist()


class GatedSync:
    """A device whose syncs return only when told to."""

    def __init__(self) -> None:
        self.entered = threading.Semaphore(0)
        self.gate = threading.Semaphore(0)
        self.is_open = True
        self.calls = 0

    def __call__(self, descriptor: int) -> None:
        self.calls += 1
        if not self.is_open:
            self.entered.release()
            assert self.gate.acquire(timeout=20)
        os.fdatasync(descriptor)


def test_every_record_comes_back(tmp_path: Path) -> None:
    writer, empty = start(tmp_path / "deep" / "wal", NODE)
    assert (empty.requests, empty.problems, empty.scan.next_seq) == ({}, (), 1)
    with writer:
        seqs = [
            writer.append_version(1),
            writer.append_open(request(0), slot=9),
            writer.append_open(request(1), slot=65_534),
            step(writer, {65_534: 30, 9: 20}),
            writer.append_observe(9, np.array([1, 2], np.int32), command_position=7),
            writer.append_version(2),
            step(writer, {9: 21, 65_534: 31}, version=2),
            writer.append_kv_saved(65_534, manifest="kv/1", fingerprint="f"),
            writer.append_close(9, StopReason.EOS),
            writer.append_open(request(2, version=2), slot=9),
            step(writer, {9: 40}, version=2),
            writer.append_close(9, StopReason.ABORTED, failure=FailureType.TIMEOUT),
        ]
    assert seqs == list(range(1, 13))
    log = recover(tmp_path / "deep" / "wal")
    assert (log.problems, log.failed, log.was_sealed, log.num_tokens) == ((), {}, True, 5)
    assert log.versions == ((1, 1), (6, 2))
    first, second, third = log.requests.values()
    assert first.request == request(0)
    assert first.token_ids.tolist() == [20, 21]
    assert first.behavior_logprobs.tolist() == [-2.5, -2.625]
    assert [(span.first_token, span.policy_version) for span in first.version_spans] == [(0, 1), (1, 2)]
    ids, is_sampled = first.sequence()
    assert ids.tolist() == [5, 6, 0, 20, 1, 2, 21]
    assert is_sampled.tolist() == [False, False, False, True, False, False, True]
    assert ids.dtype == np.int32
    assert is_sampled.dtype == np.bool_
    assert first.observations[0].command_position == 7
    assert first.is_finished
    assert first.close is not None
    assert first.close.stop_reason is StopReason.EOS
    assert second.is_unfinished
    assert second.kv is not None
    assert (second.kv.manifest, second.kv.num_tokens) == ("kv/1", 2)
    assert third.close is not None
    assert third.close.failure is FailureType.TIMEOUT
    assert [(span.first_token, span.policy_version) for span in third.version_spans] == [(0, 2)]


def test_nothing_is_published_before_the_sync_returns(tmp_path: Path) -> None:
    sync = GatedSync()
    writer, _ = start(tmp_path, NODE, sync=sync)
    sync.is_open = False
    seq = writer.append_open(request(0), slot=0)
    assert sync.entered.acquire(timeout=10)
    assert writer.durable_seq < seq
    with pytest.raises(WalStalledError, match="not durable"):
        writer.wait_durable(seq, timeout_s=0.01)
    sync.gate.release()
    writer.wait_durable(seq)
    assert writer.durable_seq == seq
    sync.is_open = True
    writer.close()


def test_what_queues_during_a_sync_is_one_commit(tmp_path: Path) -> None:
    sync = GatedSync()
    writer, _ = start(tmp_path, NODE, sync=sync)
    sync.is_open = False
    writer.append_open(request(0), slot=0)
    assert sync.entered.acquire(timeout=10)
    last = [step(writer, {0: token}) for token in range(50)][-1]
    sync.is_open = True
    sync.gate.release()
    writer.wait_durable(last)
    assert writer.stats().commits == 2
    assert writer.stats().frames == 51
    writer.close()
    assert tokens(recover(tmp_path), 0) == list(range(50))


def test_a_queue_that_stays_full_is_an_error_and_drops_nothing(tmp_path: Path) -> None:
    sync = GatedSync()
    config = WalConfig(level="node", queue_bytes=4096, stall_timeout_s=1.0)
    writer, _ = start(tmp_path, config, sync=sync)
    sync.is_open = False
    writer.append_open(request(0), slot=0)
    assert sync.entered.acquire(timeout=10)

    def fill() -> Iterator[int]:
        for token in range(10_000):
            yield step(writer, {0: token})

    accepted: list[int] = []
    with pytest.raises(WalStalledError, match="4096 bytes stayed full"):
        accepted.extend(fill())
    done = len(accepted)
    assert 0 < done < 100
    sync.is_open = True
    sync.gate.release()
    writer.wait_durable(accepted[-1], timeout_s=60)
    writer.wait_durable(step(writer, {0: done}), timeout_s=60)
    assert writer.stats().backpressure_s > 0.9
    writer.close()
    assert tokens(recover(tmp_path), 0) == list(range(done + 1))


def test_a_full_queue_holds_the_appender_back_until_there_is_room(tmp_path: Path) -> None:
    sync = GatedSync()
    writer, _ = start(tmp_path, WalConfig(level="node", queue_bytes=4096), sync=sync)
    sync.is_open = False
    writer.append_open(request(0), slot=0)
    assert sync.entered.acquire(timeout=10)
    threading.Timer(0.05, lambda: (setattr(sync, "is_open", True), sync.gate.release())).start()
    for token in range(100):
        step(writer, {0: token})
    assert sync.is_open, "so many do not fit"
    assert writer.stats().backpressure_s > 0
    writer.close()
    assert tokens(recover(tmp_path), 0) == list(range(100))


def test_sequence_numbers_and_epochs_grow_over_restarts(tmp_path: Path) -> None:
    seen: list[int] = []
    for life in range(4):
        writer, log = start(tmp_path)
        resumed = len(tokens(log, 0)) if log.requests else 0
        assert resumed == 2 * life
        assert log.problems == ()
        assert writer.epoch == life + 1
        seen.append(writer.append_open(request(0), slot=life, resumed_tokens=resumed))
        seen += [step(writer, {life: 10 * life + i}) for i in range(2)]
        writer.wait_durable(seen[-1])
        writer.abandon() if life % 2 else writer.close()
    assert seen == sorted(set(seen))
    log = recover(tmp_path)
    assert tokens(log, 0) == [0, 1, 10, 11, 20, 21, 30, 31]
    assert log.requests[RequestId(0, 0, 0)].num_openings == 4


@pytest.mark.parametrize("is_preallocated", [True, False])
def test_segments_rotate_without_a_seam(tmp_path: Path, is_preallocated: bool) -> None:
    config = WalConfig(level="node", segment_bytes=4096, preallocate=is_preallocated)
    writer, _ = start(tmp_path, config)
    with writer:
        writer.append_open(request(0), slot=0)
        for token in range(300):
            writer.wait_durable(step(writer, {0: token}))
    sizes = [path.stat().st_size for path in sorted(tmp_path.glob("*.wal"))]
    assert len(sizes) == writer.stats().segments > 3
    assert max(sizes) <= 4096
    log = recover(tmp_path)
    assert (log.problems, log.scan.torn_bytes, log.scan.num_segments) == ((), 0, len(sizes))
    assert tokens(log, 0) == list(range(300))


@pytest.mark.parametrize(
    ("misuse", "says"),
    [
        (lambda w: w.append_open(request(1), slot=3), "held by s0-p0-m0"),
        (lambda w: w.append_open(request(1), slot=65_535), "out of range"),
        (lambda w: w.append_open(request(1), slot=-1), "out of range"),
        (lambda w: step(w, {3: 1, 4: 1}), "slots [4], which are not open"),
        (lambda w: step(w, {}), "no rows"),
        (lambda w: w.append_step(np.array([3, 3], np.uint16), *rows(2), policy_version=1), "twice"),
        (lambda w: w.append_step(np.array([3], np.uint16), *rows(2), policy_version=1), "lengths 1"),
        (lambda w: w.append_observe(4, np.zeros(1, np.int32)), "slot 4 is not open"),
        (lambda w: w.append_kv_saved(4, manifest="", fingerprint=""), "slot 4 is not open"),
        (lambda w: w.append_close(4, StopReason.EOS), "slot 4 is not open"),
        (lambda w: w.append_observe(3, np.zeros(1, np.int64).view()), "must be int32[n]"),
        (lambda w: w.append_version(2**32), "2**32"),
        (lambda w: w.wait_durable(99), "never submitted"),
    ],
)
def test_misuse_is_refused_and_appends_nothing(
    tmp_path: Path, misuse: Callable[[WalWriter], object], says: str
) -> None:
    writer, _ = start(tmp_path)
    with writer:
        writer.append_open(request(0), slot=3)
        with pytest.raises(WalUsageError) as caught:
            misuse(writer)
        assert says in str(caught.value)
        assert step(writer, {3: 1}) == 2
    log = recover(tmp_path)
    assert (tokens(log, 0), log.problems) == ([1], ())


def test_an_unchanged_batch_is_counted_and_a_changed_one_is_checked_again(tmp_path: Path) -> None:
    """Steps of the same slots skip the checks; every other record in between must see the true counts."""
    writer, _ = start(tmp_path)
    with writer:
        writer.append_open(request(0), slot=3)
        writer.append_open(request(1), slot=4)
        for token in range(3):
            step(writer, {3: token, 4: token})
        writer.append_observe(3, np.array([9], np.int32))
        for token in range(3, 5):
            step(writer, {3: token, 4: token})
        writer.append_kv_saved(4, manifest="kv", fingerprint="f")
        step(writer, {3: 5, 4: 5})
        writer.append_close(4, StopReason.EOS)
        with pytest.raises(WalUsageError, match="not open"):
            step(writer, {3: 6, 4: 6})
        step(writer, {3: 6})
        reused = np.array([3], np.uint16)
        writer.append_step(reused, *rows(1), policy_version=1)
        reused[0] = 4
        with pytest.raises(WalUsageError, match="not open"):
            writer.append_step(reused, *rows(1), policy_version=1)
        writer.append_open(request(2), slot=4)
        step(writer, {3: 8, 4: 0})
        writer.append_close(3, StopReason.EOS)
    log = recover(tmp_path)
    assert (log.problems, log.failed) == ((), {})
    first, second, third = log.requests.values()
    assert (first.observations[0].after_tokens, len(first.token_ids)) == (3, 9)
    assert first.close is not None
    assert second.close is not None
    assert second.kv is not None
    assert (first.close.num_tokens, second.close.num_tokens, second.kv.num_tokens) == (9, 6, 5)
    assert third.token_ids.tolist() == [0]


def rows(count: int) -> tuple[np.ndarray, np.ndarray]:
    return np.zeros(count, np.int32), np.zeros(count, np.float32)


def test_a_second_writer_is_refused_and_a_takeover_fences_the_first(tmp_path: Path) -> None:
    zombie, _ = start(tmp_path)
    zombie.append_open(request(0), slot=0)
    zombie.wait_durable(step(zombie, {0: 1}))
    with pytest.raises(WalLockedError, match="takeover"):
        start(tmp_path)
    heir, log = start(tmp_path, takeover=True)
    assert (tokens(log, 0), heir.epoch) == ([1], 2)
    heir.append_open(request(0), slot=0, resumed_tokens=1)
    heir.wait_durable(step(heir, {0: 2}))
    late = step(zombie, {0: 666})
    with pytest.raises(WalFencedError, match="epoch 1"):
        zombie.wait_durable(late)
    assert zombie.durable_seq < late
    with pytest.raises(WalFencedError):
        step(zombie, {0: 667})
    with pytest.raises(WalFencedError):
        zombie.close()
    heir.close()
    after = recover(tmp_path)
    assert (tokens(after, 0), after.problems, after.scan.fenced_frames) == ([1, 2], (), 1)
    again, _ = start(tmp_path)
    again.close()


def test_a_directory_keeps_its_stream(tmp_path: Path) -> None:
    start(tmp_path)[0].close()
    with pytest.raises(WalUsageError, match="belongs to stream 'engine-0'"):
        open_log(tmp_path, stream="engine-1", config=PROCESS)
    start(tmp_path)[0].close()


def test_a_link_that_leads_nowhere_is_refused_for_good(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "absent")
    with pytest.raises(
        errors.WalRefusedError, match=r"it was not opened.*Move away what stands there, or name another"
    ):
        open_log(tmp_path / "link", stream="engine-0", config=PROCESS)


@pytest.mark.parametrize("is_preallocated", [True, False])
def test_a_failed_sync_is_final_and_never_tried_again(tmp_path: Path, is_preallocated: bool) -> None:
    calls: list[int] = []
    # The zeros, the header, OPEN, and then the step.
    failing = 3 + is_preallocated

    def sync(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) == failing:
            raise OSError(errno.EIO, "emulated")
        os.fdatasync(descriptor)

    writer, _ = start(tmp_path, msgspec.structs.replace(NODE, preallocate=is_preallocated), sync=sync)
    durable = writer.append_open(request(0), slot=0)
    writer.wait_durable(durable)
    lost = step(writer, {0: 1})
    with pytest.raises(
        WalWriteError, match=r"0\.wal: .Errno 5.*bytes are free there; durable up to seq 1,.*look at the device"
    ):
        writer.wait_durable(lost)
    for use in (lambda: step(writer, {0: 2}), lambda: writer.wait_durable(lost), writer.close):
        with pytest.raises(WalWriteError):
            use()
    writer.wait_durable(durable)
    assert (writer.durable_seq, len(calls)) == (durable, failing)
    assert isinstance(writer.error, WalWriteError)
    heir, log = start(tmp_path, NODE)
    assert tokens(log, 0) in ([], [1])
    heir.close()


def test_a_failed_write_is_final(tmp_path: Path) -> None:
    writer, _ = start(tmp_path)
    seq = writer.append_open(request(0), slot=0)
    writer.wait_durable(seq)
    segment = next(tmp_path.glob("*.wal"))
    for link in Path("/proc/self/fd").iterdir():
        if link.exists() and os.path.samestat(link.stat(), segment.stat()):
            reader = os.open(segment, os.O_RDONLY)
            os.dup2(reader, int(link.name))
            os.close(reader)
    lost = step(writer, {0: 1})
    with pytest.raises(WalWriteError, match="Errno 9"):
        writer.wait_durable(lost)
    with pytest.raises(WalWriteError):
        writer.append_version(2)
    writer.abandon()
    assert tokens(recover(tmp_path), 0) == []


@pytest.mark.parametrize("is_preallocated", [True, False])
def test_a_write_that_the_kernel_takes_in_parts_is_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_preallocated: bool
) -> None:
    """Every write takes 13 bytes at most, as a signal or a nearly full device may have it."""
    pwrite, write = os.pwrite, os.write
    monkeypatch.setattr(os, "pwrite", lambda descriptor, data, at: pwrite(descriptor, data[:13], at))
    monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:13]))
    config = WalConfig(level="node", segment_bytes=4096, preallocate=is_preallocated)
    writer, _ = start(tmp_path, config)
    with writer:
        writer.append_open(request(0), slot=0)
        for token in range(100):
            step(writer, {0: token})
    log = recover(tmp_path)
    assert (log.problems, log.scan.torn_bytes, log.was_sealed) == ((), 0, True)
    assert tokens(log, 0) == list(range(100))


def test_leaving_by_an_exception_drops_what_is_queued(tmp_path: Path) -> None:
    writer, _ = start(tmp_path)
    writer.wait_durable(writer.append_open(request(0), slot=0))
    with pytest.raises(KeyError), writer:
        raise KeyError
    assert not recover(tmp_path).was_sealed
    with pytest.raises(WalUsageError, match="closed"):
        step(writer, {0: 1})
    writer.abandon()


def test_threads_keep_their_own_order(tmp_path: Path) -> None:
    writer, _ = start(tmp_path, WalConfig(level="process", queue_bytes=4096))

    def work(slot: int) -> None:
        writer.append_open(request(slot), slot=slot)
        for token in range(200):
            step(writer, {slot: token})
        writer.append_close(slot, StopReason.LENGTH)

    with writer:
        threads = [threading.Thread(target=work, args=(slot,)) for slot in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    log = recover(tmp_path)
    assert log.problems == ()
    assert [tokens(log, member) for member in range(4)] == [list(range(200))] * 4


@pytest.mark.parametrize(
    "value",
    [{"level": "cluster"}, {"segment_bytes": 1}, {"queue_bytes": 1}, {"stall_timeout_s": 0.0}, {"levle": "node"}],
)
def test_wrong_configuration_is_an_error(value: dict[str, object]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(value, WalConfig)


def test_errors_pickle() -> None:
    for kind in (WalUsageError, WalWriteError, errors.WalRefusedError, WalFencedError, WalLockedError, WalStalledError):
        error = pickle.loads(pickle.dumps(kind("what happened")))
        assert type(error) is kind
        assert isinstance(error, errors.RolloutError)
        assert str(error) == "what happened"
