"""Layers as images of file systems, which are attached to guests and, where the kernel can, mounted for containers.

| kind     | made by    | used by                                                                    |
|----------|------------|----------------------------------------------------------------------------|
| ext4     | mke2fs     | guests, as a block device                                                  |
| erofs    | mkfs.erofs | containers, mounted file-backed (Linux 6.12)                               |
| squashfs | mksquashfs | containers, by a loop device                                               |

Which of the last two a machine can use is found out by mounting one (`probe`); where it can use none the layers' trees
are stacked as they are, which is as right and shares memory as well. Owners in a file are root, whoever made it.
"""

import functools
import json
import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Literal, NamedTuple

from rollforward.sandbox.bubblewrap import find_bubblewrap
from rollforward.sandbox.errors import SandboxUnavailableError
from rollforward.sandbox.layers_tree import walk
from rollforward.sandbox.programs import HangsError, run_program

FileKind = Literal["ext4", "erofs", "squashfs"]

_BLOCK_BYTES: Final = 4096
_INODE_BYTES: Final = 512
_SPARE_BYTES: Final = 16 << 20
_TRIES: Final = 3
_MAKE_S: Final = 3600.0
_PROBE_S: Final = 60.0
_MIN_INODES: Final = 64
_PROGRAMS: Final[dict[FileKind, tuple[str, str]]] = {
    "ext4": ("mke2fs", "e2fsprogs"),
    "erofs": ("mkfs.erofs", "erofs-utils"),
    "squashfs": ("mksquashfs", "squashfs-tools"),
}
"""Kind -> program and the Debian package that has it."""
_PLACES: Final = ("/usr/sbin", "/sbin", "/usr/local/sbin")
"""Where such programs are when no PATH says so."""


class Mounting(NamedTuple):
    """How containers of this machine see layers."""

    kind: FileKind | None
    """Of the files that are mounted; None: the trees are stacked as directories."""
    report: str
    """The same for people, with the reason."""


def write_file(tree: Path, path: Path, kind: FileKind) -> None:
    """Write a tree as the image of a file system, which is on the device when this returns.

    Raises:
        SandboxUnavailableError: the program that does it is missing or failed.
    """
    program = find_program(kind)
    if kind == "ext4":
        _write_ext4(program, tree, path)
    elif kind == "erofs":
        _run(kind, [program, "--all-root", "-E", "force-inode-extended", str(path), str(tree)], path)
    else:
        _run(kind, [program, str(tree), str(path), "-all-root", "-noappend", "-no-progress", "-quiet"], path)
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fchmod(descriptor, 0o444)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def find_program(kind: FileKind) -> str:
    """The program that makes files of a kind.

    Raises:
        SandboxUnavailableError: it is missing.
    """
    name, package = _PROGRAMS[kind]
    found = shutil.which(name) or shutil.which(name, path=os.pathsep.join(_PLACES))
    if found is None:
        raise SandboxUnavailableError(f"sandbox: {name} is missing. Install it (Debian: apt-get install {package})")
    return found


def mounting_command(mounts: Sequence[tuple[Path, Path]], kind: FileKind) -> list[str]:
    """Words that go before a command so that it sees files mounted over directories, and nobody else does.

    Args:
        mounts: a file and the directory that it is mounted over.
        kind: of the files.
    """
    told = json.dumps([kind, [[str(file), str(directory)] for file, directory in mounts]])
    return [sys.executable, "-I", "-m", "rollforward.sandbox.layers_mount", told]


@functools.cache
def probe() -> Mounting:
    """Find out, by mounting a small file, how containers of this machine see layers. The answer stays."""
    reasons: list[str] = []
    for kind in ("erofs", "squashfs"):
        reason = _mounts(kind)
        if not reason:
            return Mounting(kind, f"{kind} files, mounted")
        reasons.append(f"{kind}: {reason}")
    return Mounting(None, f"directories ({'; '.join(reasons)})")


def _mounts(kind: FileKind) -> str:
    """Why files of a kind cannot be mounted here; empty where they can."""
    if os.geteuid() != 0:
        return "only root mounts files"
    with tempfile.TemporaryDirectory() as folder:
        tree, file, over = (Path(folder) / name for name in ("tree", "file", "over"))
        tree.mkdir()
        over.mkdir()
        (tree / "mark").write_text("seen")
        try:
            write_file(tree, file, kind)
            command = [*mounting_command([(file, over)], kind), "cat", str(over / "mark")]
            done = run_program("mounting", command, within_s=_PROBE_S)
        except (SandboxUnavailableError, OSError) as error:
            return str(error)
        return "" if done.output == b"seen" else done.said


def _write_ext4(program: str, tree: Path, path: Path) -> None:
    size, inodes = _SPARE_BYTES, _MIN_INODES
    root = os.open(tree, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for entry in walk(root):
            blocks = -(-entry.status.st_size // _BLOCK_BYTES) if not stat.S_ISCHR(entry.status.st_mode) else 0
            size += (blocks + 1) * _BLOCK_BYTES + _INODE_BYTES
            inodes += 1
    finally:
        os.close(root)
    options = ["-q", "-F", "-t", "ext4", "-b", str(_BLOCK_BYTES), "-m", "0", "-N", str(inodes)]
    options += ["-O", "^has_journal,^resize_inode", "-E", "root_owner=0:0,nodiscard", "-d", str(tree), str(path)]
    command = [program, *options]
    if os.geteuid() != 0:  # it writes down the owners that it sees
        command = [find_bubblewrap(), "--unshare-user", "--uid", "0", "--gid", "0", "--dev-bind", "/", "/", *command]
    for attempt in range(_TRIES):
        path.unlink(missing_ok=True)
        try:
            _run("ext4", [*command, f"{(size << attempt) // _BLOCK_BYTES}"], path)
        except SandboxUnavailableError as error:
            if attempt == _TRIES - 1 or isinstance(error, HangsError):
                raise
        else:
            return


def _run(kind: FileKind, command: Sequence[str], path: Path) -> None:
    name = _PROGRAMS[kind][0]
    done = run_program(name, command, within_s=_MAKE_S)
    if done.code != 0 or not path.exists():
        raise SandboxUnavailableError(
            f"sandbox: {name} failed on a layer: {done.said}. Make room, or look at the program"
        )
