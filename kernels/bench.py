"""Speed, memory and bits of one op's TileLang form beside its peers, in one process on one GPU.

    python -m rollforward.kernels.bench OP [--peer NAME ...] [--case TEXT] [--json]

The cases of an op are in `<op>_bench.py` beside it. Inputs are random; ours and the peers take turns; a time is the
median of `REPEATS` by device events. Floors are of this device as it is now: a BF16 product and a copy, measured first.
Power and clock are those of the device while ours runs again and again, by nvidia-smi, where that is there.
"""

import argparse
import gc
import importlib
import importlib.util
import json
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rollforward.kernels import dispatch

REPEATS, WARMUPS, BIT_REPEATS = 30, 3, 10

POWER_S = 0.6
"""Seconds of work whose power is read, the last half of it."""

Outputs = dict[str, Tensor]


class Case(NamedTuple):
    """One thing to measure."""

    name: str
    flops: float
    """Least operations of a product unit."""
    bytes: float
    """Least bytes of device memory: each input read once, each output written once."""
    run: Callable[[], Outputs]
    """Our form, once; its outputs, those of rows first."""
    rows: Callable[[slice], Outputs]
    """Our form on these rows alone: the outputs that belong to rows."""
    peers: dict[str, Callable[[], object]]
    """Others that compute the same."""
    programs: list[dispatch.Program]
    times: int = 1
    """How often `run` and the peers do it in one call; their time is divided by it."""


def peer(module: str) -> ModuleType | None:
    """Return a peer's module, None where the peer is not installed."""
    if importlib.util.find_spec(module.partition(".")[0]) is None:
        return None
    return importlib.import_module(module)


def _time_us(run: Callable[[], object]) -> float:
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    run()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop) * 1e3


def _medians_us(runs: dict[str, Callable[[], object]], repeats: int = REPEATS) -> dict[str, float]:
    for run in runs.values():
        for _ in range(WARMUPS):
            run()
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            times[name].append(_time_us(run))
    return {name: statistics.median(of) for name, of in times.items()}


def device_rates() -> tuple[float, float]:
    """Return this device's rates now: BF16 products of 8192^3 in FLOP/s, and a copy in bytes/s, read and written."""
    a, b = (torch.randn(8192, 8192, device="cuda").bfloat16() for _ in range(2))
    source = torch.randn(1 << 29, device="cuda")
    target = torch.empty_like(source)
    times = _medians_us({"product": lambda: torch.mm(a, b), "copy": lambda: target.copy_(source)}, 10)
    return 2 * 8192**3 / times["product"] * 1e6, 2 * source.nbytes / times["copy"] * 1e6


def peak_bytes(run: Callable[[], object]) -> int:
    """Return the device memory that a call takes at most above what is there before it."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def power(run: Callable[[], object]) -> tuple[float, float] | None:
    """Return watts and megahertz of the device while it does this again and again, None without nvidia-smi."""
    if shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", "--query-gpu=power.draw.instant,clocks.sm", "--format=csv,noheader,nounits", "-lms", "20"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as reader:
        start = time.perf_counter()
        while time.perf_counter() - start < POWER_S:
            run()
            torch.cuda.synchronize()
        reader.terminate()
        lines = reader.communicate()[0].splitlines()
    read = [[float(number) for number in line.split(",")] for line in lines if line.count(",") == 1]
    if not read:
        return None
    watts, megahertz = zip(*read[len(read) // 2 :], strict=True)
    return statistics.median(watts), statistics.median(megahertz)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors hold the same bits, NaN included."""
    return a.shape == b.shape and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def different(a: Outputs, b: Outputs) -> list[str]:
    """Return the names of outputs whose bits differ."""
    return [name for name in b if not same_bits(a[name], b[name])]


def measure(case: Case, peers: list[str], flops_rate: float, copy_rate: float) -> dict[str, Any]:
    """Measure one case; see the keys."""
    dispatch.warm(case.programs, jobs=8)
    first = {name: one.clone() for name, one in case.run().items()}
    repeat = sorted({name for _ in range(BIT_REPEATS - 1) for name in different(first, case.run())})
    alone: list[str] = []
    spans = [slice(0, 1), slice(0, 64), slice(5, 70), slice(1, 130)]
    count = len(next(iter(first.values())))
    for span in [span for span in spans if span.stop <= count]:
        alone += different({name: one[span] for name, one in first.items()}, case.rows(span))
    del first
    peak = peak_bytes(case.run)
    runs: dict[str, Callable[[], object]] = {"ours": case.run}
    runs |= {name: run for name, run in case.peers.items() if name in peers or not peers}
    memory = {name: peak_bytes(run) for name, run in runs.items() if name != "ours"}
    times = {name: us / case.times for name, us in _medians_us(runs).items()}
    watts_megahertz = power(case.run)
    floor_us = max(case.flops / flops_rate, case.bytes / copy_rate) * 1e6  # 0: of launches alone
    ours = times["ours"]
    return {
        "case": case.name,
        "us": round(ours, 1),
        "tflops": round(case.flops / ours / 1e6, 1),
        "tbytes_per_s": round(case.bytes / ours / 1e6, 2),
        "floor_us": round(floor_us, 1),
        "of_floor": round(floor_us / ours, 3),
        "watts_and_mhz": watts_megahertz or "not read",
        "workspace_gib": round(peak / 2**30, 3),
        "repeat_bits": repeat or "equal",
        "row_bits_alone": sorted(set(alone)) or "equal",
        "peers": {
            name: {"us": round(us, 1), "ours_over_it": round(ours / us, 3), "gib": round(memory[name] / 2**30, 3)}
            for name, us in times.items()
            if name != "ours"
        },
    }


def launch_us(launch: Callable[[], object], count: int = 200) -> float:
    """Return the host's microseconds per call of something that launches little work."""
    best = float("inf")
    for _ in range(5):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(count):
            launch()
        best = min(best, (time.perf_counter() - start) / count * 1e6)
    torch.cuda.synchronize()
    return best


def main(arguments: list[str]) -> int:
    """Measure the cases of an op and print them."""
    parser = argparse.ArgumentParser(prog="python -m rollforward.kernels.bench", description=__doc__)
    parser.add_argument("op", choices=sorted(dispatch.TILE_OPS))
    parser.add_argument("--peer", action="append", default=[], help="measure these peers only; none: all")
    parser.add_argument("--case", default="", help="measure cases whose name holds this")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    options = parser.parse_args(arguments)
    dispatch.choose({options.op: dispatch.TILE})
    cases = importlib.import_module(f"rollforward.kernels.{dispatch.TILE_OPS[options.op]}_bench").cases
    flops_rate, copy_rate = device_rates()
    head: dict[str, Any] = {
        "op": options.op,
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "bf16_tflops": round(flops_rate / 1e12, 1),
        "copy_tbytes_per_s": round(copy_rate / 1e12, 2),
    }
    _print(head, options.json)
    for make in cases:
        if options.case in make.__name__:
            _print(measure(make(), options.peer, flops_rate, copy_rate), options.json)
    return 0


def _print(record: dict[str, Any], as_json: bool) -> None:
    text = json.dumps(record) if as_json else "  ".join(f"{key} {value}" for key, value in record.items())
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
