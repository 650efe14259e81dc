"""Kernel and memory image of the guests: made from this machine's Python and Debian's cloud kernel, kept by content.

    sandbox/vm_kernel.py --> kernel, drivers        } --> one initial RAM file system --> vm.py boots it once
    a rehearsal's imports and mapped libraries      }

Everything lies below `CACHE`; nothing is installed, nothing needs root. The product is not in the image: it comes on a
disk, so that an edit of it costs no boot.
"""

import hashlib
import importlib.util
import io
import json
import os
import py_compile
import shutil
import struct
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from rollforward.sandbox import vm_kernel
from rollforward.sandbox.errors import SandboxUnavailableError
from rollforward.sandbox.vm_cpio import Entry, write_cpio
from tests.helpers.source import ROOT

CACHE = Path.home() / ".cache" / "rollforward" / "vm"

_DRIVERS = ("virtio_ring", "virtio", "virtio_pci_modern_dev", "virtio_pci_legacy_dev", "virtio_pci", "virtio_blk")
_OURS = ("rollforward", "tests")
_UNCHECKED = struct.pack("<IQ", 1, 0)
_KEEP_UNUSED_S = 86400.0


class Kernel(NamedTuple):
    """A kernel with the drivers of the guests' disks."""

    image: Path
    """For qemu's -kernel."""
    drivers: tuple[Path, ...]
    """In the order in which they are to be loaded."""


class Program(NamedTuple):
    """What a guest runs, and what it needs of this machine's Python."""

    archive: bytes
    """A tar of our modules, compiled."""
    modules: tuple[tuple[str, str | None], ...]
    """Other modules that it imports, with their files."""
    libraries: tuple[str, ...]
    """Files that were mapped."""
    path: tuple[str, ...]
    """Where it looked for modules."""


def tool(name: str, package: str) -> str:
    """The path of a tool, or a skip that names its Debian package."""
    found = shutil.which(name) or shutil.which(name, path="/usr/sbin:/sbin")
    if found is None:
        pytest.skip(f"{name} is not installed (Debian package {package})")
    return found


def find_kernel() -> Kernel:
    """The kernel of virtual machines, downloaded once, or a skip that says what is missing."""
    try:
        found = vm_kernel.find_kernel()
    except SandboxUnavailableError as error:
        pytest.skip(str(error))
    return Kernel(found.image, tuple(path for path in found.modules if path.stem in _DRIVERS))


def rehearse(module: str) -> Program:
    """Runs a module's rehearsal on this machine and returns what it took."""
    with _scratch("rehearsal") as scratch:
        start = (
            "import runpy, sys, types; t = sys.modules['tests'] = types.ModuleType('tests')\n"
            "t.__path__ = [sys.argv.pop(1)]; import tests.helpers.vm_init\n"
            f"runpy.run_module({module!r}, run_name='__main__', alter_sys=True)"
        )
        done = subprocess.run(
            [sys.executable, "-c", start, str(ROOT / "tests"), str(scratch)],
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
    took: dict[str, Any] = json.loads(done.stdout)
    files: dict[str, str | None] = took["modules"]
    files[module] = str(ROOT.joinpath(*module.split(".")).with_suffix(".py"))
    ours = {name: Path(file) for name, file in files.items() if file and name.split(".")[0] in _OURS}
    others = tuple((name, file) for name, file in files.items() if name.split(".")[0] not in _OURS)
    libraries = tuple(file for file in took["libraries"] if Path(file).is_file())
    return Program(_archive(ours), others, libraries, tuple(filter(None, took["path"])))


def build_image(kernel: Kernel, program: Program) -> Path:
    """Returns a directory with kernel and initrd of a guest; made where its like is not kept yet."""
    entries = dict(_entries(kernel, program))
    key = hashlib.blake2b(kernel.image.read_bytes(), digest_size=16)
    for name in sorted(name for name in entries if not name.endswith(".pyc")):
        key.update(f"{name}\0{_stamp(entries[name])}\0".encode())
    home = CACHE / f"image-{key.hexdigest()}"
    if not home.is_dir():
        with _scratch("image") as scratch:
            shutil.copyfile(kernel.image, scratch / "kernel")
            with (scratch / "initrd").open("wb") as out:
                write_cpio(out, entries)
            _publish(scratch, home)
    os.utime(home)
    # Each is some 350 MB with its saved state.
    for other in CACHE.glob("image-*"):
        if time.time() - other.stat().st_mtime > _KEEP_UNUSED_S:
            shutil.rmtree(other, ignore_errors=True)
    return home


def _stamp(entry: Entry) -> str:
    """Stands for an entry."""
    return f"{entry.mode:o} {hashlib.blake2b(entry.data, digest_size=16).hexdigest()}"


def _entries(kernel: Kernel, program: Program) -> Iterator[tuple[str, Entry]]:
    """(absolute name, entry) of everything in the image; files of this machine keep their places."""
    interpreter = Path(sys.executable).resolve()
    # Set-up's own import hooks are of this machine alone.
    modules = sorted(name for name, _ in program.modules if not name.startswith(("_distutils", "__")))
    init = f"#!{interpreter} -IS\n{(ROOT / 'tests/helpers/vm_init.py').read_text(encoding='utf-8')}"
    manifest = {
        "modules": modules,
        "path": [
            entry for entry in sys.path if Path(entry).is_dir() and not Path(entry).is_relative_to(ROOT / "tests")
        ],
        "environment": {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
    }
    yield "/init", Entry(init.encode(), 0o100755)
    yield "/manifest.json", Entry(json.dumps(manifest).encode(), 0o100644)
    yield str(interpreter), Entry(interpreter, 0o100755)
    for number, driver in enumerate(kernel.drivers):
        yield f"/drivers/{number}-{driver.name}", Entry(driver, 0o100644)
    for _, file in program.modules:
        if file is not None and Path(file).is_file():
            yield file, Entry(Path(file), 0o100644)
            bytecode = Path(importlib.util.cache_from_source(file)) if file.endswith(".py") else None
            if bytecode is not None and bytecode.is_file():
                # Not to be compared with the source, which has another time there: PEP 552's unchecked form.
                data = bytecode.read_bytes()
                yield str(bytecode), Entry(data[:4] + _UNCHECKED + data[16:], 0o100644)
    for file in program.libraries:
        path = Path(file)
        yield file, Entry(path, 0o100755)
        # The names that the loader looks for.
        for link in path.parent.iterdir():
            if link.is_symlink() and link.resolve() == path:
                yield str(link), Entry(path.name.encode(), 0o120777)
    for loader in Path("/lib64").glob("ld-linux*"):
        yield str(loader.parent.resolve() / loader.name), Entry(loader.resolve(), 0o100755)
    for link in ("/lib", "/lib64"):
        if Path(link).is_symlink():
            yield link, Entry(os.readlink(link).encode(), 0o120777)
    if Path("/etc/ld.so.cache").is_file():
        yield "/etc/ld.so.cache", Entry(Path("/etc/ld.so.cache"), 0o100644)


def _archive(ours: dict[str, Path]) -> bytes:
    """A tar of our modules under their import names, with their bytecode."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive, _scratch("compile") as scratch:
        for name, file in sorted(ours.items()):
            place = name.replace(".", "/") + ("/__init__.py" if file.name == "__init__.py" else ".py")
            archive.add(file, place)
            compiled = scratch / "compiled"
            mode = py_compile.PycInvalidationMode.UNCHECKED_HASH
            py_compile.compile(
                str(file), str(compiled), dfile=f"/program/{place}", doraise=True, invalidation_mode=mode
            )
            cached = Path(place)
            archive.add(
                compiled, str(cached.parent / "__pycache__" / f"{cached.stem}.{sys.implementation.cache_tag}.pyc")
            )
    return buffer.getvalue()


class _scratch:  # noqa: N801 - used like a function
    """A folder below the cache that is removed at the end, if it is still there."""

    def __init__(self, purpose: str) -> None:
        self._path = CACHE / f".{purpose}-{os.getpid()}"

    def __enter__(self) -> Path:
        shutil.rmtree(self._path, ignore_errors=True)
        self._path.mkdir(parents=True)
        return self._path

    def __exit__(self, *error: object) -> None:
        shutil.rmtree(self._path, ignore_errors=True)


def _publish(scratch: Path, home: Path) -> None:
    """Gives a finished folder its name; another process may have been first."""
    try:
        scratch.rename(home)
    except OSError:
        if not home.is_dir():
            raise
