"""Compilation of TileLang programs for one GPU target; needs no GPU."""

import importlib
import re
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

import tilelang
from tilelang.language import PrimFunc


def build(program: PrimFunc, target: str, path: Path) -> None:
    """Compile a program for a CUDA architecture and write it as a library that tvm_ffi loads.

    Exact division and logarithms: programs that want a fast exponential say so.
    """
    tilelang.compile(program, target={"kind": "cuda", "arch": target}).export_library(str(path))


class MachineCode(NamedTuple):
    """What a program takes of a multiprocessor, and how it is launched."""

    registers: int
    """Of a thread."""
    spilled_bytes: int
    """Written to memory and read again for want of registers, by a thread."""
    products: int
    """Warpgroup products in its code."""
    threads: int
    """Of a block."""
    shared_bytes: int
    """Of a block."""
    cooperative: bool
    """Whether the driver starts all blocks at once, and refuses a launch that has more than are resident together."""


def report(wanted: object, target: str) -> MachineCode:
    """Return what a `dispatch.Program` becomes on a CUDA architecture."""
    function = getattr(importlib.import_module(f"rollforward.kernels.{wanted.module}"), wanted.function)
    kernel = tilelang.compile(function(**dict(wanted.constants)), target={"kind": "cuda", "arch": target})
    root = Path(tilelang.__file__).parent
    with tempfile.TemporaryDirectory() as place:
        (Path(place) / "kernel.cu").write_text(kernel.get_kernel_source())
        command = [
            *(str(Path(tilelang.env.CUDA_HOME) / "bin" / "nvcc"), "-cubin", "-O3", "-std=c++20", f"-arch={target}"),
            *(f"-I{root / 'src'}", f"-I{root / '3rdparty' / 'cutlass' / 'include'}", "-DENABLE_BF16", "--keep"),
            *("--keep-dir", place, "-Xptxas", "-v", "-o", f"{place}/kernel.cubin", f"{place}/kernel.cu"),
        ]
        told = subprocess.run(command, check=True, capture_output=True, text=True).stderr
        products = (Path(place) / "kernel.ptx").read_text().count("wgmma.mma_async")
        kernel.export_library(f"{place}/kernel.so")
        cooperative = b"use_cooperative_launch" in (Path(place) / "kernel.so").read_bytes()
    # The host ends its list of a launch's numbers with a block's three sizes and its dynamic memory, if it has some.
    numbers = [int(found) for found in re.findall(r"v_int64\) = \(+int64_t\)(\d+)\)+;", kernel.get_host_source())]
    *_, threads, _, _, dynamic = numbers if numbers[-1] > 1 else (*numbers, 0)
    static = max([0, *(int(found) for found in re.findall(r"(\d+) bytes smem", told))])
    return MachineCode(
        registers=max(int(found) for found in re.findall(r"Used (\d+) registers", told)),
        spilled_bytes=sum(int(found) for found in re.findall(r"(\d+) bytes spill", told)),
        products=products,
        threads=threads,
        shared_bytes=static + dynamic,
        cooperative=cooperative,
    )
