"""The kernel of virtual machines: Debian's cloud kernel and the drivers of their devices, downloaded once by apt.

Nothing is installed and nothing needs root: `apt-get download` proves the package by apt's own keys, and files are
taken out of it. A machine without apt or network is given the package as a file, or the directory of one that has it.
"""

import re
import shutil
import tarfile
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple

from rollforward.sandbox.errors import SandboxUnavailableError
from rollforward.sandbox.programs import Done, HangsError, run_program
from rollforward.sandbox.vm_cache import CACHE, digest, prepared

PACKAGE: Final = "linux-image-cloud-amd64"
_DRIVERS: Final = (
    *("virtio/virtio_ring", "virtio/virtio", "virtio/virtio_mmio", "virtio/virtio_pci_modern_dev"),
    *("virtio/virtio_pci_legacy_dev", "virtio/virtio_pci", "char/virtio_console", "block/virtio_blk"),
)
_MODULES: Final = (*(f"drivers/{name}" for name in _DRIVERS), *("lib/libcrc32c", "fs/overlayfs/overlay"))
"""In the order in which they are to be loaded."""
_FILE_SYSTEMS: Final = ("fs/erofs/erofs", "fs/squashfs/squashfs")
_NAME: Final = re.compile(r"linux-image-[0-9.]+-[0-9]+-cloud-amd64")


class Kernel(NamedTuple):
    """A kernel and drivers."""

    image: Path
    """For qemu's -kernel."""
    modules: tuple[Path, ...]
    """In the order in which they are to be loaded."""
    version: str
    """As in the package's name."""


def find_kernel() -> Kernel:
    """The kernel, downloaded if this user has none.

    Raises:
        SandboxUnavailableError: it cannot be; the message has ways out.
    """
    key = digest(PACKAGE, _MODULES, _FILE_SYSTEMS)
    home = prepared("kernel", key, lambda scratch: _fill(scratch, f"kernel-{key}"))
    names = (*_MODULES, *_FILE_SYSTEMS)
    (image,) = home.glob("vmlinuz-*")
    return Kernel(image, tuple(home / f"{name.rpartition('/')[2]}.ko" for name in names), image.name[8:])


def _fill(scratch: Path, name: str) -> None:
    if shutil.which("dpkg-deb") is None:
        raise _unavailable("dpkg-deb is not there", name)
    given = sorted(CACHE.glob("linux-image-*-cloud-amd64_*.deb"))
    package = given[-1] if given else _download(scratch, name)
    wanted = {f"/kernel/{module}.ko": module.rpartition("/")[2] for module in (*_MODULES, *_FILE_SYSTEMS)}
    try:
        _take_out(package, wanted, scratch)
    except (tarfile.TarError, EOFError, ValueError) as error:
        raise _unavailable(f"{package.name} is damaged ({error})", name) from None
    absent = [module for module in wanted.values() if not (scratch / f"{module}.ko").exists()]
    if absent or len(list(scratch.glob("vmlinuz-*"))) != 1:
        raise _unavailable(f"{package.name} lacks the kernel or {', '.join(absent) or 'nothing else'}", name)
    if not given:
        package.unlink()


def _take_out(package: Path, wanted: Mapping[str, str], scratch: Path) -> None:
    """Have kernel and modules of a package in a directory."""
    with tempfile.TemporaryFile(dir=scratch) as unpacked:
        done = run_program("dpkg-deb", ["dpkg-deb", "--fsys-tarfile", str(package)], output=unpacked)
        if done.code:
            raise ValueError(done.said)
        unpacked.seek(0)
        with tarfile.open(fileobj=unpacked, mode="r|") as archive:
            for member in archive:
                data = archive.extractfile(member) if member.isfile() else None
                if data is None:
                    continue
                if "/boot/vmlinuz-" in member.name:
                    (scratch / Path(member.name).name).write_bytes(data.read())
                for end, module in wanted.items():
                    if member.name.endswith((end, f"{end}.xz")):
                        (scratch / f"{module}.ko").write_bytes(_plain(member.name, data.read()))


def _plain(name: str, data: bytes) -> bytes:
    if not name.endswith(".xz"):
        return data
    import lzma

    try:
        return lzma.decompress(data)
    except lzma.LZMAError as error:
        raise ValueError(f"{name}: {error}") from None


def _download(scratch: Path, name: str) -> Path:
    for tool in ("apt-get", "apt-cache"):
        if shutil.which(tool) is None:
            raise _unavailable(f"{tool} is not there", name)
    found = _NAME.search(_said(["apt-cache", "depends", PACKAGE], scratch, name).output.decode())
    if found is None:
        raise _unavailable(f"apt knows no package {PACKAGE}", name)
    got = _said(["apt-get", "download", found.group()], scratch, name)
    packages = list(scratch.glob("*.deb"))
    if got.code or len(packages) != 1:
        said = [line for line in got.errors.splitlines() if line.startswith("E:")]
        raise _unavailable(f"apt-get download {found.group()} failed: {said[-1] if said else got.said}", name)
    return packages[0]


def _said(command: list[str], where: Path, name: str) -> Done:
    try:
        return run_program(command[0], command, cwd=where)
    except HangsError as error:
        raise _unavailable(str(error).removeprefix("sandbox: "), name) from None


def _unavailable(what: str, name: str) -> SandboxUnavailableError:
    return SandboxUnavailableError(
        f"sandbox: virtual machines need Debian's cloud kernel, and {what}. Run `apt-get update` and try again; without"
        f" network put the package file linux-image-*-cloud-amd64_*.deb of Debian, or the directory {name} of a machine"
        f" that has it, into {CACHE}"
    )
