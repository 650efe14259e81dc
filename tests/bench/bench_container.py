"""Latency and memory of containers: `python -m tests.bench.bench_container` (or `pytest ... -m benchmark`); with
`--isolation gvisor` of those that gVisor isolates.

Prints numbers; asserts only that the work was done. Floors (reference page A3.1): bubblewrap with a Python agent 17 ms
to its first answer, a command in it 0.63 ms; a forked call 1.26 ms.
"""

import argparse
import asyncio
import os
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from rollforward.sandbox.config import Limits, ToolConfig
from rollforward.sandbox.container import Container, ContainerSubstrate
from rollforward.sandbox.gvisor import GVisorSubstrate
from rollforward.sandbox.images import Images
from rollforward.sandbox.types import Call, CallStatus, ExecRequest, ExecStatus, SandboxSpec

pytestmark = pytest.mark.benchmark

TRUE = ExecRequest(argv=("/bin/true",))
CALL = Call(tool="calculator", arguments={"expression": "12 * 34 + 56"})
SPEC = SandboxSpec(limits=Limits(), tools=(ToolConfig(name="calculator"),))


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def told(name: str, times: list[float]) -> None:
    times.sort()
    at = [1e3 * times[min(int(len(times) * share), len(times) - 1)] for share in (0.0, 0.1, 0.5, 0.95)]
    say(f"{name:<28} min {at[0]:7.2f}  p10 {at[1]:7.2f}  p50 {at[2]:7.2f}  p95 {at[3]:7.2f} ms  ({len(times)} times)")


async def timed(times: list[float], what: Callable[[], Awaitable[object]]) -> None:
    start = time.perf_counter()
    await what()
    times.append(time.perf_counter() - start)


async def run_true(container: Container) -> None:
    result = await container.exec(TRUE)
    assert result.status == ExecStatus.OK, result


async def run_call(container: Container) -> None:
    result = await container.call(CALL)
    assert result.status == CallStatus.OK, result


async def latency(substrate: ContainerSubstrate, number: int) -> None:
    container = await substrate.create("latency", SPEC)
    for name, what, pause_s in (
        ("exec /bin/true, at once", run_true, 0.0),
        ("exec /bin/true, 20 ms apart", run_true, 0.02),
        ("call, at once", run_call, 0.0),
        ("call, 20 ms apart", run_call, 0.02),
    ):
        times: list[float] = []
        for _ in range(number):
            await asyncio.sleep(pause_s)
            await timed(times, lambda what=what: what(container))
        told(name, times)
    await container.kill()


async def life(substrate: ContainerSubstrate, number: int) -> None:
    creates, firsts, ends = list[float](), list[float](), list[float]()
    for index in range(number):
        start = time.perf_counter()
        container = await substrate.create(f"life-{index}", SPEC)
        creates.append(time.perf_counter() - start)
        await run_true(container)
        firsts.append(time.perf_counter() - start)
        await timed(ends, container.kill)
    told("create", creates)
    told("create to first result", firsts)
    told("kill", ends)


def memory_used() -> int:
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return sum(1024 * int(fields[name].split()[0]) * sign for name, sign in (("MemTotal", 1), ("MemAvailable", -1)))


def proportional(pids: list[int]) -> int:
    total = 0
    for pid in pids:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                total += 1024 * int(line.split()[1])
    return total


async def density(substrate: ContainerSubstrate, number: int) -> None:
    before = memory_used()
    start = time.perf_counter()
    made = [await substrate.create(f"density-{index}", SPEC) for index in range(number)]
    created_s = time.perf_counter() - start
    await asyncio.gather(*(run_true(container) for container in made))
    await asyncio.sleep(1.0)
    pids = [int(pid) for c in made for pid in (c.cgroup[0] / "cgroup.procs").read_text().split()] if made else []
    pss, delta = proportional(pids), memory_used() - before
    say(
        f"{number} containers at once        {number / created_s:.0f} created/s, {len(pids)} processes, PSS"
        f" {pss / 2**20:.0f} MiB, host {delta / 2**20:+.0f} MiB"
    )
    start = time.perf_counter()
    await asyncio.gather(*(container.kill() for container in made))
    say(f"killed together in            {1e3 * (time.perf_counter() - start):.0f} ms")


async def main(number: int, many: int, isolation: str = "namespaces") -> None:
    kind = GVisorSubstrate if isolation == "gvisor" else ContainerSubstrate
    substrate = kind(Images({}), label=f"bench-{os.getpid()}", max_sandboxes=max(many, 1) + 8)
    start = time.perf_counter()
    await substrate.start()
    say(f"template up in {1e3 * (time.perf_counter() - start):.0f} ms; load {os.getloadavg()[0]:.1f}")
    try:
        await latency(substrate, number)
        await life(substrate, number // 2)
        if many:
            await density(substrate, many)
    finally:
        start = time.perf_counter()
        await substrate.close()
        say(f"substrate closed in {1e3 * (time.perf_counter() - start):.0f} ms")


def test_containers(capsys: pytest.CaptureFixture[str]) -> None:
    with capsys.disabled():
        asyncio.run(main(200, 100))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--number", type=int, default=400, help="times that each thing is done")
    parser.add_argument("--many", type=int, default=300, help="containers at once")
    parser.add_argument("--isolation", choices=("namespaces", "gvisor"), default="namespaces")
    arguments = parser.parse_args()
    asyncio.run(main(arguments.number, arguments.many, arguments.isolation))
