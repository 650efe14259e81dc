"""Compilation of TileLang programs for one GPU target; needs no GPU."""

from pathlib import Path

import tilelang
from tilelang.language import PrimFunc


def build(program: PrimFunc, target: str, path: Path) -> None:
    """Compile a program for a CUDA architecture and write it as a library that tvm_ffi loads.

    Exact division and logarithms: programs that want a fast exponential say so.
    """
    tilelang.compile(program, target={"kind": "cuda", "arch": target}).export_library(str(path))


def source(program: PrimFunc, target: str) -> str:
    """Return the CUDA source that a program becomes."""
    return tilelang.compile(program, target={"kind": "cuda", "arch": target}).get_kernel_source()
