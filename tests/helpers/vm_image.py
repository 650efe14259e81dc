"""Kernel and memory image of the guests: made from this machine's Python and Debian's cloud kernel, kept by content.

    apt-get download --> kernel, drivers            } --> one initial RAM file system --> vm.py boots it once
    a rehearsal's imports and mapped libraries      }

Everything lies below `CACHE`; nothing is installed, nothing needs root. The product is not in the image: it comes on a
disk, so that an edit of it costs no boot.
"""

import hashlib
import importlib.util
import io
import json
import lzma
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

from tests.helpers.source import ROOT

CACHE = Path.home() / ".cache" / "rollforward" / "vm"

_PACKAGE = "linux-image-cloud-amd64"
_DRIVERS = (
    "virtio/virtio_ring",
    "virtio/virtio",
    "virtio/virtio_pci_modern_dev",
    "virtio/virtio_pci_legacy_dev",
    "virtio/virtio_pci",
    "block/virtio_blk",
)
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
    """Debian's cloud kernel, downloaded once."""
    home = CACHE / "kernel"
    if not home.is_dir():
        tool("apt-get", "apt")
        tool("dpkg-deb", "dpkg")
        with _scratch("kernel") as scratch:
            _fetch(scratch)
            _publish(scratch, home)
    drivers: list[Path] = []
    for name in _DRIVERS:
        drivers += home.glob(f"**/kernel/drivers/{name}.ko*")
    (image,) = home.glob("boot/vmlinuz-*")
    return Kernel(image, tuple(drivers))


def _fetch(scratch: Path) -> None:
    listed = subprocess.run(["apt-cache", "depends", _PACKAGE], capture_output=True, text=True, check=False)
    names = [line.split()[-1] for line in listed.stdout.splitlines() if "Depends: linux-image-" in line]
    if not names:
        pytest.skip(f"apt knows no package {_PACKAGE} (run apt-get update; Debian has it)")
    got = subprocess.run(["apt-get", "download", names[0]], cwd=scratch, capture_output=True, text=True, check=False)
    if got.returncode:
        pytest.skip(f"apt-get download {names[0]} failed (run apt-get update): {got.stderr.strip()[-300:]}")
    (package,) = scratch.glob("*.deb")
    # The drivers alone: the others are 80 MB.
    subprocess.run(f"dpkg-deb --fsys-tarfile {package.name} > all.tar", shell=True, cwd=scratch, check=True)
    with tarfile.open(scratch / "all.tar") as archive:
        for member in archive:
            wanted = any(f"/drivers/{name}.ko" in member.name for name in _DRIVERS) or "/boot/vmlinuz-" in member.name
            # The package's own path below the scratch directory; what may lie elsewhere is not wanted.
            if member.isfile() and wanted and (data := archive.extractfile(member)) is not None:
                target = scratch / member.name
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(data.read())
    (scratch / "all.tar").unlink()
    package.unlink()


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
        key.update(f"{name}\0{entries[name].key}\0".encode())
    home = CACHE / f"image-{key.hexdigest()}"
    if not home.is_dir():
        with _scratch("image") as scratch:
            shutil.copyfile(kernel.image, scratch / "kernel")
            with (scratch / "initrd").open("wb") as out:
                _write_cpio(out, entries)
            _publish(scratch, home)
    os.utime(home)
    # Each is some 350 MB with its saved state.
    for other in CACHE.glob("image-*"):
        if time.time() - other.stat().st_mtime > _KEEP_UNUSED_S:
            shutil.rmtree(other, ignore_errors=True)
    return home


class _Entry(NamedTuple):
    """A file or link of the image."""

    content: Path | bytes
    """Where it is copied from, or what it holds or points to."""
    mode: int

    @property
    def key(self) -> str:
        data = self.content if isinstance(self.content, bytes) else self.content.read_bytes()
        return f"{self.mode:o} {hashlib.blake2b(data, digest_size=16).hexdigest()}"


def _entries(kernel: Kernel, program: Program) -> Iterator[tuple[str, _Entry]]:
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
    yield "/init", _Entry(init.encode(), 0o100755)
    yield "/manifest.json", _Entry(json.dumps(manifest).encode(), 0o100644)
    yield str(interpreter), _Entry(interpreter, 0o100755)
    for number, driver in enumerate(kernel.drivers):
        data = lzma.decompress(driver.read_bytes()) if driver.suffix == ".xz" else driver.read_bytes()
        yield f"/drivers/{number}-{driver.name.partition('.')[0]}.ko", _Entry(data, 0o100644)
    for _, file in program.modules:
        if file is not None and Path(file).is_file():
            yield file, _Entry(Path(file), 0o100644)
            bytecode = Path(importlib.util.cache_from_source(file)) if file.endswith(".py") else None
            if bytecode is not None and bytecode.is_file():
                # Not to be compared with the source, which has another time there: PEP 552's unchecked form.
                data = bytecode.read_bytes()
                yield str(bytecode), _Entry(data[:4] + _UNCHECKED + data[16:], 0o100644)
    for file in program.libraries:
        path = Path(file)
        yield file, _Entry(path, 0o100755)
        # The names that the loader looks for.
        for link in path.parent.iterdir():
            if link.is_symlink() and link.resolve() == path:
                yield str(link), _Entry(path.name.encode(), 0o120777)
    for loader in Path("/lib64").glob("ld-linux*"):
        yield str(loader.parent.resolve() / loader.name), _Entry(loader.resolve(), 0o100755)
    for link in ("/lib", "/lib64"):
        if Path(link).is_symlink():
            yield link, _Entry(os.readlink(link).encode(), 0o120777)
    if Path("/etc/ld.so.cache").is_file():
        yield "/etc/ld.so.cache", _Entry(Path("/etc/ld.so.cache"), 0o100644)


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


def _write_cpio(out: Any, entries: dict[str, _Entry]) -> None:
    """Writes the kernel's format of initial file systems ("newc": see its Documentation, early-userspace)."""
    parents = {str(parent) for name in entries for parent in Path(name).parents} - {"/"}
    folders = {name: _Entry(b"", 0o040755) for name in sorted(parents) if name not in entries}
    everything = [*folders.items(), *entries.items(), ("/TRAILER!!!", _Entry(b"", 0))]
    for number, (name, entry) in enumerate(everything, 1):
        data = entry.content if isinstance(entry.content, bytes) else entry.content.read_bytes()
        packed = name.removeprefix("/").encode() + b"\0"
        fields = (number, entry.mode, 0, 0, 1, 0, len(data), 0, 0, 0, 0, len(packed), 0)
        header = b"070701" + b"".join(b"%08X" % field for field in fields)
        out.write(header + packed + bytes(-(len(header) + len(packed)) % 4) + data + bytes(-len(data) % 4))


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
