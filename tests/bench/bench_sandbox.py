"""Latency of sandboxed calls: `pytest tests/bench/bench_sandbox.py -m benchmark`.

Prints numbers; asserts only that the work was done.

Floor (reference page A3.1): a forked call in a warm bubblewrap zygote 1.26 ms, 95th percentile 1.41 ms; the zygote
comes up in 39 ms.
"""

import sys
import time

import pytest

from rollforward.sandbox.config import SandboxConfig, ToolConfig
from rollforward.sandbox.function import FunctionSandbox
from rollforward.sandbox.types import Call, CallStatus

pytestmark = pytest.mark.benchmark

CALL = Call(tool="calculator", arguments={"expression": "12 * 34 + 56"})


def say(capsys: pytest.CaptureFixture[str], line: str) -> None:
    with capsys.disabled():
        sys.stdout.write(f"\n{line}\n")


def test_a_warm_call(capsys: pytest.CaptureFixture[str]) -> None:
    start = time.perf_counter()
    with FunctionSandbox(SandboxConfig(workers=1), [ToolConfig(name="calculator")]) as sandbox:
        ready_s = time.perf_counter() - start
        times: list[float] = []
        for _ in range(1000):
            start = time.perf_counter()
            assert sandbox.submit(CALL).result().status == CallStatus.OK
            times.append(time.perf_counter() - start)
        times.sort()
        say(
            capsys,
            f"ready {1e3 * ready_s:.0f} ms | warm call p50 {1e3 * times[500]:.2f} ms, p95 {1e3 * times[950]:.2f} ms",
        )


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_calls_in_a_second(capsys: pytest.CaptureFixture[str], workers: int) -> None:
    with FunctionSandbox(SandboxConfig(workers=workers), [ToolConfig(name="calculator")]) as sandbox:
        start = time.perf_counter()
        futures = [sandbox.submit(CALL) for _ in range(1000)]
        assert {future.result().text for future in futures} == {"464"}
        say(capsys, f"{workers} workers: {1000 / (time.perf_counter() - start):.0f} calls/s")
