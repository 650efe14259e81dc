"""What a launch costs the host: bound, as an operator of torch, and as an op; and what of it is the driver's.

    python -m tests.bench.bench_launch

Needs a GPU of compute capability 9.0 and a C compiler. Prints microseconds of a call, the median of 15 times 300 calls:
all of it, inside cuLaunchKernel, inside cuTensorMapEncodeTiled, and the rest, which is ours. Operators make their
output: `empty` is that alone; but for it they do no more than the bound launch without maps. `add_` is torch's smallest
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
from torch import Tensor

from rollforward.kernels import dispatch
from rollforward.kernels.loss import vocab_sweep
from rollforward.kernels.operators import operator
from rollforward.kernels.quant import mxfp4_sweep
from rollforward.kernels.quant.mxfp4 import mxfp4_dequantise

CALLS, ROUNDS, V, D, TOKENS = 300, 15, 512, 256, 8
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
        f"{name:34} {statistics.median(plain):6.2f}  cuLaunchKernel {launch:.2f}  cuTensorMapEncodeTiled {maps:.2f}"
        f"  rest {rest:.2f}\n"
    )


def operators(launch: Callable[..., None]) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    """A launch as an operator without and with a gradient, which is of a tensor that gives the output's shape alone."""

    def run(words: Tensor, scale: Tensor, like: Tensor) -> Tensor:
        numbers = torch.empty_like(like)
        launch(words, scale, numbers)
        return numbers

    def shapes(words: Tensor, scale: Tensor, like: Tensor) -> Tensor:
        del words, scale
        return torch.empty_like(like)

    arguments = "(Tensor words, Tensor scale, Tensor like) -> Tensor"
    with_gradient = operator(
        f"bench_with_gradient{arguments}",
        run,
        shapes,
        save=lambda ctx, inputs, output: None,
        gradients=lambda ctx, grad: (None, None, grad),
    )
    return operator(f"bench_without_gradient{arguments}", run, shapes), with_gradient


def main() -> None:
    clock = ctypes.CDLL(os.environ[LIBRARY])
    grad = dispatch.program("loss.vocab_tile", "hidden_grad", V=V, D=D, tile_d=vocab_sweep.TILE_D, pitch=V)
    unpack = next(one for one in mxfp4_sweep.programs(128, 128) if dict(one.constants) == {"bf16": False})
    dispatch.warm([grad, unpack], jobs=2)
    hidden_grad, dequantise = dispatch.bind(grad), dispatch.bind(unpack)
    logits_grad, head = (torch.randn(size, device="cuda").bfloat16() for size in ((TOKENS, V), (V, D)))
    grad_hidden = torch.empty(TOKENS, D, device="cuda")
    packed = torch.randint(-128, 128, (TOKENS, 16), device="cuda", dtype=torch.int8)
    scale = torch.full((TOKENS, 1), 127, device="cuda", dtype=torch.uint8)
    words, flat, numbers = packed.view(torch.uint16), scale.view(-1), torch.empty(TOKENS, 32, device="cuda")
    leaf, (without_gradient, with_gradient) = torch.zeros_like(numbers, requires_grad=True), operators(dequantise)
    one = torch.zeros(1, device="cuda")
    show("bound, no maps", lambda: dequantise(words, flat, numbers), clock)
    show("bound, two maps", lambda: hidden_grad(logits_grad, head, grad_hidden), clock)
    show("add_", lambda: one.add_(1), clock)
    show("empty", lambda: torch.empty_like(numbers), clock)
    show("operator", lambda: without_gradient(words, flat, numbers), clock)
    show("operator with a gradient, unused", lambda: with_gradient(words, flat, numbers), clock)
    show("operator with a gradient", lambda: with_gradient(words, flat, leaf), clock)
    dispatch.choose({"mxfp4": "tile"})
    show("mxfp4_dequantise", lambda: mxfp4_dequantise(packed, scale), clock)


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
