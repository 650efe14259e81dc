"""What a bound launch costs the host, and what of it is the driver's.

    python -m tests.bench.bench_launch

Needs a GPU of compute capability 9.0 and a C compiler. Prints microseconds of a call, the median of 15 times 300 calls:
all of it, inside cuLaunchKernel, inside cuTensorMapEncodeTiled, and the rest, which is ours. `add_` is torch's smallest
call, for comparison.
"""

import ctypes
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from rollforward.kernels import dispatch
from rollforward.kernels.mhc import mix_sweep

CALLS, ROUNDS, TOKENS, WIDTH = 300, 15, 8, 512
LIBRARY = "LAUNCH_CLOCK"
"""Set in the process that has the clock before its driver."""


def call_us(call: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(CALLS):
        call()
    spent = time.perf_counter() - start
    torch.cuda.synchronize()
    return spent / CALLS * 1e6


def show(name: str, call: Callable[[], object], clock: ctypes.CDLL) -> None:
    plain, clocked, driver = [], [], []
    taken = (ctypes.c_double * 2)()
    for turn in range(ROUNDS + 3):
        clock.launch_clock(0)
        without = call_us(call)
        clock.launch_clock(1)
        clock.launch_clock_take(taken)
        total = call_us(call)
        clock.launch_clock_take(taken)
        if turn >= 3:
            plain.append(without)
            clocked.append(total)
            driver.append([one / CALLS / 1e3 for one in taken])
    launch, maps = (statistics.median(one) for one in zip(*driver, strict=True))
    rest = statistics.median(clocked) - launch - maps
    sys.stdout.write(
        f"{name:10} {statistics.median(plain):.2f}  cuLaunchKernel {launch:.2f}  cuTensorMapEncodeTiled {maps:.2f}"
        f"  rest {rest:.2f}\n"
    )


def main() -> None:
    clock = ctypes.CDLL(os.environ[LIBRARY])
    dispatch.warm(mix_sweep.programs(WIDTH, 20), jobs=8)
    programs = {one.function: dispatch.bind(one) for one in mix_sweep.programs(WIDTH, 20)}
    x = torch.randn(TOKENS, 4 * WIDTH, device="cuda").bfloat16()
    f, streams = torch.randn(TOKENS, WIDTH, device="cuda").bfloat16(), torch.empty_like(x)
    weights = torch.rand(TOKENS, 32, device="cuda")
    fn, sums = mix_sweep.halves(torch.randn(24, 4 * WIDTH, device="cuda")), mix_sweep.slices(x)
    one = torch.zeros(1, device="cuda")
    show("no maps", lambda: programs["leave"](f, x, weights, streams), clock)
    show("two maps", lambda: programs["project"](x, fn, sums), clock)
    show("add_", lambda: one.add_(1), clock)


if __name__ == "__main__":
    if LIBRARY in os.environ:
        main()
    else:
        source = Path(__file__).with_name("launch_clock.c")
        with tempfile.TemporaryDirectory() as place:
            library = f"{place}/launch_clock.so"
            subprocess.run(["cc", "-shared", "-fPIC", "-O2", "-o", library, str(source), "-ldl"], check=True)
            environment = {**os.environ, "LD_PRELOAD": library, LIBRARY: library}
            subprocess.run([sys.executable, "-m", "tests.bench.bench_launch"], check=True, env=environment)
