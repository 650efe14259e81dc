"""Compilation of TileLang programs for one GPU target; needs no GPU."""

import importlib
import re
import subprocess
import tempfile
from pathlib import Path

import tilelang
from tilelang.language import PrimFunc


def build(program: PrimFunc, target: str, path: Path) -> None:
    """Compile a program for a CUDA architecture and write it as a library that tvm_ffi loads.

    Exact division and logarithms: programs that want a fast exponential say so.
    """
    tilelang.compile(program, target={"kind": "cuda", "arch": target}).export_library(str(path))


def report(wanted: object, target: str) -> tuple[int, int, int]:
    """Return registers a thread, bytes spilled and warpgroup products of a `dispatch.Program`'s machine code."""
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
    registers = max(int(found) for found in re.findall(r"Used (\d+) registers", told))
    spilled = sum(int(found) for found in re.findall(r"(\d+) bytes spill", told))
    return registers, spilled, products
