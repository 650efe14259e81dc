"""Cost of the token log: `pytest tests/bench/bench_wal.py -m benchmark`.

Prints numbers; asserts only that the work was done.

Floors (reference page B3, columnar, 2,048 requests): 10.1 bytes per token; decode thread 0.05 to 0.12 ms per step with
a writer thread; 10 M tokens recovered in 0.3 to 0.5 s.
"""

import contextlib
import os
import sqlite3
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pyarrow as pa
import pytest

from rollforward.rollout.types import Request, RequestId, SamplingParams
from rollforward.rollout.wal import WalWriter, open_log
from rollforward.rollout.wal_records import WalConfig
from rollforward.rollout.wal_recovery import recover

pytestmark = pytest.mark.benchmark

NUM_REQUESTS = 2048
STEP_S = 0.02


def say(capsys: pytest.CaptureFixture[str], line: str) -> None:
    with capsys.disabled():
        sys.stdout.write(f"\n{line}\n")


def open_requests(writer: WalWriter, count: int) -> None:
    for slot in range(count):
        request = Request(
            id=RequestId(0, slot, 0),
            prompt_ids=np.arange(200, dtype=np.int32),
            seed=slot,
            sampling=SamplingParams(max_new_tokens=1 << 20),
            policy_version=1,
        )
        writer.append_open(request, slot=slot)


def work(seconds: float) -> None:
    """Multiplies matrices, as a decode step on the host does."""
    factor = np.full((256, 256), 0.5, np.float32)
    end_s = time.perf_counter() + seconds
    while time.perf_counter() < end_s:
        np.matmul(factor, factor)


@pytest.mark.parametrize("step", [time.sleep, work])
@pytest.mark.parametrize("sync_s", [0.0, 0.03])
def test_decode_thread_cost(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], sync_s: float, step: Callable[[float], None]
) -> None:
    """A 20 ms decode step with one append of 2,048 rows. Asleep, as a host waiting for its device, its core goes idle
    on a quiet machine, and waking up is part of what the clock shows."""

    def sync(descriptor: int) -> None:
        os.fdatasync(descriptor)
        time.sleep(sync_s)

    writer, _ = open_log(tmp_path, stream="bench", config=WalConfig(), sync=sync)
    open_requests(writer, NUM_REQUESTS)
    writer.wait_durable(writer.append_version(1))
    slots = np.random.default_rng(0).permutation(NUM_REQUESTS).astype(np.uint16)
    token_ids = np.arange(NUM_REQUESTS, dtype=np.int32)
    logprobs = np.full(NUM_REQUESTS, -0.5, np.float32)
    num_steps = 300
    costs_s, cpu_s = np.zeros(num_steps), np.zeros(num_steps)
    lags = np.zeros(num_steps)
    seq = 0
    bytes_before = writer.stats().bytes_written
    for index in range(num_steps):
        started, started_cpu = time.perf_counter(), time.thread_time()
        seq = writer.append_step(slots, token_ids, logprobs, policy_version=1)
        costs_s[index] = time.perf_counter() - started
        cpu_s[index] = time.thread_time() - started_cpu
        lags[index] = seq - writer.durable_seq
        step(STEP_S)
    writer.wait_durable(seq)
    step_bytes = writer.stats().bytes_written - bytes_before
    p50_ms, p99_ms = np.percentile(costs_s * 1e3, [50, 99])
    say(
        capsys,
        f"wal decode thread, {NUM_REQUESTS} requests, {step.__name__}, sync +{sync_s * 1e3:.0f} ms: "
        f"p50 {p50_ms:.3f} ms, p99 {p99_ms:.3f} ms per step (of its own time "
        f"{np.percentile(cpu_s, 50) * 1e3:.3f} and {np.percentile(cpu_s, 99) * 1e3:.3f} ms); "
        f"lag {lags.mean():.1f} steps (max {lags.max():.0f}); "
        f"{step_bytes / num_steps / NUM_REQUESTS:.2f} bytes per token",
    )
    writer.close()
    assert recover(tmp_path).num_tokens == num_steps * NUM_REQUESTS


@pytest.mark.parametrize("extra_sync_s", [0.0, 0.005])
@pytest.mark.parametrize("kind", ["grows", "zeros", "two copies"])
def test_commits_one_after_the_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str, extra_sync_s: float
) -> None:
    """A commit for every step, waited for: what growing files, segments of zeros, and a second copy cost. Two copies
    that were synced one after the other would take twice the time of one."""

    def sync(descriptor: int) -> None:
        os.fdatasync(descriptor)
        if extra_sync_s:
            time.sleep(extra_sync_s)

    base = WalConfig(preallocate=kind != "grows")
    mirror = {"level": "cluster", "mirror_dir": str(tmp_path / "mirror"), "mirror_same_device": True}
    config = msgspec.structs.replace(base, **mirror) if kind == "two copies" else base
    writer, _ = open_log(tmp_path / "run" / "wal" / "bench", stream="bench", config=config, sync=sync)
    costs_s: list[float] = []
    with writer:
        open_requests(writer, 256)
        writer.wait_durable(writer.append_version(1))
        rows = np.arange(256, dtype=np.uint16), np.arange(256, dtype=np.int32), np.zeros(256, np.float32)
        for _ in range(500 if not extra_sync_s else 100):
            started = time.perf_counter()
            writer.wait_durable(writer.append_step(*rows, policy_version=1))
            costs_s.append(time.perf_counter() - started)
    p50_ms, p99_ms = np.percentile(np.array(costs_s) * 1e3, [50, 99])
    say(
        capsys,
        f"wal commit, 256 requests, {kind}, sync +{extra_sync_s * 1e3:.0f} ms: "
        f"p50 {p50_ms:.3f} ms, p99 {p99_ms:.3f} ms",
    )


def write_arrow(directory: Path, num_steps: int, rows: tuple[np.ndarray, ...]) -> None:
    names = ["slot", "token", "logprob"]
    batch = pa.record_batch([pa.array(column) for column in rows], names=names)
    with (directory / "log").open("wb") as file, pa.ipc.new_stream(file, batch.schema) as stream:
        for _ in range(num_steps):
            stream.write_batch(pa.record_batch([pa.array(column) for column in rows], names=names))
            file.flush()
            os.fdatasync(file.fileno())


def read_arrow(directory: Path) -> int:
    with (directory / "log").open("rb") as file:
        return sum(batch.num_rows for batch in pa.ipc.open_stream(file))


def write_sqlite(directory: Path, num_steps: int, rows: tuple[np.ndarray, ...]) -> None:
    with contextlib.closing(sqlite3.connect(directory / "log", isolation_level=None)) as base:
        base.execute("pragma journal_mode=wal")
        base.execute("pragma synchronous=full")
        base.execute("create table step(seq integer primary key, slots blob, tokens blob, logprobs blob)")
        for seq in range(num_steps):
            base.execute("insert into step values(?, ?, ?, ?)", (seq, *(column.tobytes() for column in rows)))


def read_sqlite(directory: Path) -> int:
    with contextlib.closing(sqlite3.connect(directory / "log")) as base:
        return sum(len(np.frombuffer(row[0], np.int32)) for row in base.execute("select tokens from step order by seq"))


def write_wal(directory: Path, num_steps: int, rows: tuple[np.ndarray, ...]) -> None:
    writer, _ = open_log(directory / "log", stream="bench", config=WalConfig())
    with writer:
        open_requests(writer, NUM_REQUESTS)
        for _ in range(num_steps):
            writer.wait_durable(writer.append_step(*rows, policy_version=1))


@pytest.mark.parametrize(
    ("name", "write", "read"),
    [
        ("this log", write_wal, lambda directory: recover(directory / "log").num_tokens),
        ("pyarrow IPC, a batch a step", write_arrow, read_arrow),
        ("sqlite, a blob a column and step", write_sqlite, read_sqlite),
    ],
)
def test_beside_other_formats(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    name: str,
    write: Callable[[Path, int, tuple[np.ndarray, ...]], None],
    read: Callable[[Path], int],
) -> None:
    """2,048 requests, every step durable before the next; then read back (the others: no checksums, no requests)."""
    num_steps = 500
    rows = (
        np.arange(NUM_REQUESTS, dtype=np.uint16),
        np.arange(NUM_REQUESTS, dtype=np.int32),
        np.full(NUM_REQUESTS, -0.5, np.float32),
    )
    started = time.perf_counter()
    write(tmp_path, num_steps, rows)
    write_s = time.perf_counter() - started
    size = sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
    started = time.perf_counter()
    assert read(tmp_path) == num_steps * NUM_REQUESTS
    read_s = time.perf_counter() - started
    num_tokens = num_steps * NUM_REQUESTS
    say(
        capsys,
        f"{name}: {write_s / num_steps * 1e3:.2f} ms per durable step, {num_tokens / write_s / 1e3:,.0f} ktok/s,"
        f" {size / num_tokens:.1f} bytes per token, read {num_tokens:,} tokens in {read_s:.3f} s",
    )


@pytest.mark.parametrize("num_requests", [64, 256, NUM_REQUESTS])
def test_recovery_of_ten_million_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str], num_requests: int) -> None:
    """Write as fast as the disk takes it, then recover from the page cache; best of three."""
    num_steps = 10_000_000 // num_requests
    slots = np.arange(num_requests, dtype=np.uint16)
    logprobs = np.full(num_requests, -0.5, np.float32)
    started = time.perf_counter()
    writer, _ = open_log(tmp_path, stream="bench", config=WalConfig())
    with writer:
        open_requests(writer, num_requests)
        for index in range(num_steps):
            writer.append_step(slots, np.full(num_requests, index, np.int32), logprobs, policy_version=1)
    write_s = time.perf_counter() - started
    times_s: list[float] = []
    cpu_s: list[float] = []
    log = recover(tmp_path)
    for _ in range(3):
        started, started_cpu = time.perf_counter(), time.thread_time()
        log = recover(tmp_path)
        times_s.append(time.perf_counter() - started)
        cpu_s.append(time.thread_time() - started_cpu)
        assert log.num_tokens == num_steps * num_requests
        assert not log.problems
    size_mib = sum(path.stat().st_size for path in tmp_path.glob("*.wal")) / 2**20
    say(
        capsys,
        f"wal recovery of {log.num_tokens:,} tokens, {num_requests} a step: {min(times_s):.2f} s warm "
        f"(of its own time {min(cpu_s):.2f} s) "
        f"({size_mib:.0f} MiB, {writer.stats().commits} commits, written in {write_s:.2f} s)",
    )
