"""Latency and memory of virtual machines: `python -m tests.bench.bench_machines [--kind fullvm]` (or `pytest ... -m
benchmark`).

Prints numbers; asserts only that the work was done. Computing time is the emulator's own, which other work on the
machine touches less than wall time. Floors (reference page A3.1, A3.3) under emulation: a fork of a template 195 ms, 29
MiB private; a static program by an agent in C 3.3 ms, a linked one in a full VM 23 ms; restoring a full VM 426 ms.
"""

import argparse
import asyncio
import os
import time
from pathlib import Path
from typing import Any

import pytest

from rollforward.sandbox.config import Limits, ToolConfig
from rollforward.sandbox.fullvm import FullVmSubstrate
from rollforward.sandbox.images import Images
from rollforward.sandbox.instance import Instance
from rollforward.sandbox.microvm import MicroVmSubstrate
from rollforward.sandbox.types import Call, CallStatus, ExecRequest, ExecStatus, SandboxSpec
from tests.bench.bench_container import say, timed, told

pytestmark = pytest.mark.benchmark

LIMITS = Limits(memory_bytes=128 << 20, disk_bytes=16 << 20, wall_s=300.0, cpu_s=300.0)
CALL = Call(tool="calculator", arguments={"expression": "12 * 34 + 56"})
SUBSTRATES = {"microvm": MicroVmSubstrate, "fullvm": FullVmSubstrate}
TICK_MS = 1000 / os.sysconf("SC_CLK_TCK")


def computed_ms(machine: Instance) -> float:
    fields = Path(f"/proc/{machine.pid}/stat").read_text(encoding="ascii").rpartition(") ")[2].split()
    return TICK_MS * (int(fields[11]) + int(fields[12]))


def private_mib(machine: Instance) -> float:
    lines = Path(f"/proc/{machine.pid}/smaps_rollup").read_text(encoding="ascii").splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private")) / 1024


async def repeated(name: str, machine: Instance, number: int, what: Any) -> None:
    times: list[float] = []
    for _ in range(number // 4):
        await what()
    before = computed_ms(machine)
    for _ in range(number):
        await timed(times, what)
    told(name, times)
    say(f"{'':<28} computed {(computed_ms(machine) - before) / number:.1f} ms each")


async def measure(kind: str, number: int, many: int) -> None:
    substrate = SUBSTRATES[kind](Images({}), label=f"bench-{os.getpid()}", max_sandboxes=many + 16)
    spec = SandboxSpec(substrate=kind, limits=LIMITS, tools=(ToolConfig(name="calculator"),))  # type: ignore[arg-type]

    async def run(machine: Instance, *argv: str) -> None:
        result = await machine.exec(ExecRequest(argv=argv))
        assert result.status == ExecStatus.OK, result

    async def call(machine: Instance) -> None:
        assert (await machine.call(CALL)).status == CallStatus.OK

    try:
        start = time.perf_counter()
        await substrate.start()
        machine = await substrate.create("first", spec)
        say(f"{machine.platform}: first one after {time.perf_counter() - start:.1f} s")
        forks: list[float] = []
        machines: list[Instance] = []
        for index in range(8):
            start = time.perf_counter()
            machines.append(await substrate.create(f"m{index}", spec))
            forks.append(time.perf_counter() - start)
        told("made", forks)
        say(f"{'':<28} computed {computed_ms(machines[-1]):.0f} ms, private {private_mib(machines[-1]):.1f} MiB")
        await repeated("exec true", machine, number, lambda: run(machine, "true"))
        await repeated("exec sh -c :", machine, number, lambda: run(machine, "sh", "-c", ":"))
        await repeated("exec python3 -c pass", machine, max(number // 8, 4), lambda: run(machine, "python3", "-c", ""))
        await repeated("call", machine, number, lambda: call(machine))
        say(f"{'':<28} private after all that {private_mib(machine):.1f} MiB")
        start = time.perf_counter()
        saved = await machine.save(max_bytes=1 << 30)
        say(f"{'saved whole':<28} {1e3 * (time.perf_counter() - start):.0f} ms, {len(saved) / (1 << 20):.0f} MiB")
        restored: list[float] = []
        answered: list[float] = []
        for index in range(3):
            start = time.perf_counter()
            again = await substrate.create(f"again{index}", spec, saved=saved)
            restored.append(time.perf_counter() - start)
            await run(again, "true")
            answered.append(time.perf_counter() - start)
            say(f"{'':<28} computed {computed_ms(again):.0f} ms until its first command was done")
        told("restored whole", restored)
        told("... and its first command", answered)
        start = time.perf_counter()
        group = await asyncio.gather(*(substrate.create(f"g{index}", spec) for index in range(many)))
        seconds = time.perf_counter() - start
        await asyncio.gather(*(run(machine, "true") for machine in group))
        private = sum(map(private_mib, group)) / many
        say(f"{many} at once: made in {seconds:.1f} s, {many / seconds:.1f}/s; private {private:.1f} MiB each, in use")
        start = time.perf_counter()
    finally:
        await substrate.close()
    say(f"closed in {time.perf_counter() - start:.1f} s")


@pytest.mark.parametrize("kind", list(SUBSTRATES))
def test_machines(capsys: pytest.CaptureFixture[str], kind: str) -> None:
    with capsys.disabled():
        asyncio.run(measure(kind, 40, 8))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--kind", choices=list(SUBSTRATES), default="microvm")
    parser.add_argument("--number", type=int, default=100)
    parser.add_argument("--many", type=int, default=30)
    options = parser.parse_args()
    asyncio.run(measure(options.kind, options.number, options.many))
