"""Which form of an op runs, and the compiled programs of the TileLang forms.

A process says once which ops run in which form (`choose`); an op asks (`is_tile`), and a form that is not there is an
error, never another form. Programs are compiled by `warm` into a directory that processes share, and loaded by `bind`
without TileLang's compiler; in production nothing is compiled: a program that is not there is an error.

A program's name is the digest of what it depends on: the source of its file, which imports nothing of ours
(tests/arch), its constants, the compiler's version and the target.
"""

import ctypes
import functools
import hashlib
import importlib
import importlib.metadata
import importlib.util
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch

from rollforward.kernels.errors import BackendError, ProgramMissingError

REFERENCE, TILE = "reference", "tile"
"""Forms of an op: plain torch, and TileLang for sm_90a."""

TILE_OPS = {
    "linear_logprob": "loss.linear_logprob",
    "mix": "mhc.mix",
    "mxfp4": "quant.mxfp4",
    "reverse_kl": "loss.reverse_kl",
}
"""Ops that have a TileLang form -> their module (docs/kernels.md)."""

TARGET = "sm_90a"
CACHE_VARIABLE = "ROLLFORWARD_KERNEL_CACHE"

_chosen: dict[str, str] = {}


class Program(NamedTuple):
    """One TileLang program: a function of a `*_tile.py` and the constants that it is called with."""

    module: str
    """The file's module, without `rollforward.kernels.`: loss.vocab_tile."""
    function: str
    constants: tuple[tuple[str, int | bool], ...]

    def __str__(self) -> str:
        return f"{self.module}.{self.function}({', '.join(f'{name}={value}' for name, value in self.constants)})"


def program(module: str, function: str, **constants: int | bool) -> Program:
    """Return the record of a program; the order of the constants does not matter."""
    return Program(module, function, tuple(sorted(constants.items())))


def choose(backends: Mapping[str, str]) -> None:
    """Say for this process in which form ops run; an op that is not named keeps its reference.

    Args:
        backends: op -> "reference" or "tile".

    Raises:
        BackendError: an op or form that does not exist, or a form that this machine cannot run. Nothing is chosen then.
    """
    for op, form in backends.items():
        if form not in (REFERENCE, TILE) or (form == TILE and op not in TILE_OPS):
            raise BackendError(
                f"kernels: {op} is to run as {form}; forms are {REFERENCE} and, for {', '.join(TILE_OPS)}, {TILE}."
            )
        if form == TILE:
            check_device(op)
    _chosen.clear()
    _chosen.update(backends)


def is_tile(op: str) -> bool:
    """Whether this process runs the op in its TileLang form."""
    return _chosen.get(op) == TILE


def check_device(op: str) -> None:
    """Raise BackendError unless programs for sm_90a run here."""
    if not torch.cuda.is_available():
        raise BackendError(f"kernels: {op} is to run as {TILE}, and this machine has no CUDA device. Use {REFERENCE}.")
    capability = torch.cuda.get_device_capability()
    if capability != (9, 0):
        raise BackendError(
            f"kernels: {op} is to run as {TILE}, which is built for {TARGET}; this device has compute capability"
            f" {capability[0]}.{capability[1]}. Use {REFERENCE}."
        )


def cache_directory() -> Path:
    """Where compiled programs lie: $ROLLFORWARD_KERNEL_CACHE, or rollforward/kernels of the user's cache."""
    if place := os.environ.get(CACHE_VARIABLE):
        return Path(place)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rollforward" / "kernels"


@functools.cache
def path_of(wanted: Program) -> Path:
    """Return the file of a program, which need not exist."""
    found = importlib.util.find_spec(f"rollforward.kernels.{wanted.module}")
    if found is None or found.origin is None:
        raise AssertionError(f"{wanted}: there is no such module")
    versions = [f"{name} {importlib.metadata.version(name)}" for name in ("tilelang", "apache-tvm-ffi")]
    digest = hashlib.sha256("\n".join([Path(found.origin).read_text(), str(wanted), TARGET, *versions]).encode())
    return cache_directory() / f"{wanted.function}-{digest.hexdigest()[:24]}.so"


@functools.cache
def bind(wanted: Program) -> Callable[..., None]:
    """Return the launcher of a compiled program.

    Call it with the program's arguments, raw: contiguous tensors of one GPU, one of them first, and numbers. It
    launches there, on torch's current stream of that GPU, waits for nothing and allocates nothing; the current device
    stays what it is. A host that binds once pays about a microsecond a call.

    Raises:
        ProgramMissingError: the program is not compiled.
    """
    path = path_of(wanted)
    if not path.is_file():
        raise ProgramMissingError(
            f"kernels: {wanted} is not among the compiled programs in {path.parent}. Compile the model's programs once:"
            " rollforward kernels warm model=NAME. Nothing is compiled while a model runs."
        )
    launch = _load(path)[f"{wanted.function}_kernel"]
    return launch if torch.cuda.device_count() < 2 else _keeps_device(launch)


def _keeps_device(launch: Callable[..., None]) -> Callable[..., None]:
    """A launcher that leaves the current device as it was: the program makes its tensors' current, and leaves it so."""

    def run(first: torch.Tensor, *others: Any) -> None:
        number = first.get_device()
        if number == torch.cuda.current_device():
            launch(first, *others)
        else:
            with torch.cuda.device(number):
                launch(first, *others)

    return run


def warm(programs: Iterable[Program], *, jobs: int) -> tuple[int, int]:
    """Compile the programs that are not there yet, at most `jobs` at a time; needs no GPU.

    Returns:
        number compiled, and number that were there.

    Invariants: each file appears whole or not at all, so processes may warm one directory at the same time.
    """
    wanted = sorted(set(programs))
    missing = [one for one in wanted if not path_of(one).is_file()]
    if missing:
        importlib.import_module("rollforward.kernels.build_tile")  # once, not in every thread
        cache_directory().mkdir(parents=True, exist_ok=True)
        with ThreadPoolExecutor(jobs) as pool:
            list(pool.map(_compile, missing))
    return len(missing), len(wanted) - len(missing)


def _compile(wanted: Program) -> None:
    build = importlib.import_module("rollforward.kernels.build_tile").build
    function = getattr(importlib.import_module(f"rollforward.kernels.{wanted.module}"), wanted.function)
    path = path_of(wanted)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".") as place:
        new = Path(place) / path.name
        build(function(**dict(wanted.constants)), TARGET, new)
        new.replace(path)


@functools.cache
def _load_runtime() -> Any:
    """What programs call at run time: the launcher's library and TileLang's, without its Python (seconds)."""
    found = importlib.util.find_spec("tilelang")
    if found is None or found.origin is None:
        raise BackendError("kernels: tilelang is not installed; the tile forms need the extra `tile`.")
    runtime = importlib.import_module("tvm_ffi")
    libraries = Path(found.origin).parent / "lib"
    for name in ("libtvm_runtime.so", "libtilelang.so"):
        ctypes.CDLL(str(libraries / name), ctypes.RTLD_GLOBAL)
    return runtime


def _load(path: Path) -> Any:
    return _load_runtime().load_module(str(path))
