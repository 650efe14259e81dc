"""Cost of the token log: `pytest tests/bench/bench_wal.py -m benchmark`.

Prints numbers; asserts only that the work was done.

Floors (reference page B3, columnar, 2,048 requests): 10.1 bytes per token; decode thread 0.05 to 0.12 ms per step with
a writer thread; 10 M tokens recovered in 0.3 to 0.5 s.
"""

import os
import sys
import time
from pathlib import Path

import numpy as np
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


@pytest.mark.parametrize("sync_s", [0.0, 0.03])
def test_decode_thread_cost(tmp_path: Path, capsys: pytest.CaptureFixture[str], sync_s: float) -> None:
    """A 20 ms decode step (asleep, as a host waiting for its device) with one append of 2,048 rows."""

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
    costs_s = np.zeros(num_steps)
    lags = np.zeros(num_steps)
    seq = 0
    bytes_before = writer.stats().bytes_written
    for index in range(num_steps):
        started = time.perf_counter()
        seq = writer.append_step(slots, token_ids, logprobs, policy_version=1)
        costs_s[index] = time.perf_counter() - started
        lags[index] = seq - writer.durable_seq
        time.sleep(STEP_S)
    writer.wait_durable(seq)
    step_bytes = writer.stats().bytes_written - bytes_before
    p50_ms, p99_ms = np.percentile(costs_s * 1e3, [50, 99])
    say(
        capsys,
        f"wal decode thread, {NUM_REQUESTS} requests, sync +{sync_s * 1e3:.0f} ms: "
        f"p50 {p50_ms:.3f} ms, p99 {p99_ms:.3f} ms per step; "
        f"lag {lags.mean():.1f} steps (max {lags.max():.0f}); "
        f"{step_bytes / num_steps / NUM_REQUESTS:.2f} bytes per token",
    )
    writer.close()
    assert recover(tmp_path).num_tokens == num_steps * NUM_REQUESTS


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
    log = recover(tmp_path)
    for _ in range(3):
        started = time.perf_counter()
        log = recover(tmp_path)
        times_s.append(time.perf_counter() - started)
        assert log.num_tokens == num_steps * num_requests
        assert not log.problems
    size_mib = sum(path.stat().st_size for path in tmp_path.glob("*.wal")) / 2**20
    say(
        capsys,
        f"wal recovery of {log.num_tokens:,} tokens, {num_requests} a step: {min(times_s):.2f} s warm "
        f"({size_mib:.0f} MiB, {writer.stats().commits} commits, written in {write_s:.2f} s)",
    )
