"""What virtual machines boot: the system disk and the initial file system, made from this machine's programs once.

The system disk holds this Python with its standard library and the programs that shell scripts expect (`PROGRAMS`),
with the libraries that they are linked to. It is the image `host` of virtual machines, whose container namesake shows
all of /usr, and the agent's own world in every machine. The initial file system holds kernel modules, the interpreter,
and what `inside/machine.py` imports before it has a disk.
"""

import importlib.util
import json
import os
import platform
import shutil
import struct
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from rollforward.sandbox.bubblewrap import PROGRAMS as AGENT_PROGRAMS
from rollforward.sandbox.bubblewrap import find_bubblewrap, interpreter
from rollforward.sandbox.errors import SandboxUnavailableError
from rollforward.sandbox.programs import run_program
from rollforward.sandbox.vm_cache import digest, file_digest, kept_digest, prepared
from rollforward.sandbox.vm_cpio import Entry, write_cpio
from rollforward.sandbox.vm_kernel import Kernel

PROGRAMS: Final = (
    "sh dash bash awk mawk gawk sed grep egrep fgrep find xargs diff cmp patch tar gzip gunzip zcat bzip2 xz make "
    "which [ arch base32 base64 basename cat chgrp chmod chown cksum comm cp csplit cut date dd df dir dirname du "
    "echo env expand expr factor false fmt fold groups head hostid id install join link ln logname ls md5sum mkdir "
    "mkfifo mknod mktemp mv nice nl nohup nproc numfmt od paste pathchk pr printenv printf ptx pwd readlink "
    "realpath rm rmdir sha1sum sha256sum sha512sum shred shuf sleep sort split stat stdbuf stty sum sync tac tail "
    "tee test timeout touch tr true truncate tsort tty uname unexpand uniq unlink users vdir wc who whoami yes "
    "hostname ps kill pgrep pkill free uptime setsid flock getopt more less col column hexdump rev script file bc "
    "dc ed perl git su mount umount passwd newgrp chsh chfn unshare nsenter"
)
"""Programs with a blank between them; those that this machine has are on the system disk."""
_LEFT_OUT: Final = (
    "test",
    "idlelib",
    "tkinter",
    "turtledemo",
    "ensurepip",
    "site-packages",
    "dist-packages",
    "lib2to3",
)
_NATIVE: Final = ("-O2", "-fPIC", "-shared", "-std=c++17", "-fno-exceptions", "-fno-rtti", "-nodefaultlibs")
_SAID_CHARS: Final = 300
_FORMAT_S: Final = 3600.0
_UNCHECKED: Final = struct.pack("<IQ", 1, 0)
_ROOM: Final = 1.08
_SPARE_BYTES: Final = 4 << 20
_BLOCK_BYTES: Final = 4096
_OWN_FILES: Final = 32
_UUID: Final = "726f6c6c-666f-4277-8172-640000000000"
_TIME: Final = "1700000000"


class Boot(NamedTuple):
    """What an emulator is given."""

    kernel: Path
    initial: Path
    """The initial file system, for qemu's -initrd."""
    system: Path
    """The system disk."""
    system_digest: str
    """Stands for its bytes."""
    key: str
    """Stands for kernel and initial file system."""


def build(kernel: Kernel) -> Boot:
    """The files of virtual machines, made where they are not kept yet.

    Raises:
        SandboxUnavailableError: they cannot be made here.
    """
    system = build_system()
    imports = _imports()
    sources = [*sorted(AGENT_PROGRAMS.glob("*.py")), build_native()]
    key = digest("2", kernel.version, _stamps([*imports, *kernel.modules]), [(p.name, file_digest(p)) for p in sources])

    def make(scratch: Path) -> None:
        with (scratch / "initial").open("wb") as out:
            write_cpio(out, dict(_entries(kernel, imports, sources)))

    initial = prepared("initial", key, make) / "initial"
    booted = digest(kernel.version, kept_digest(initial))
    return Boot(kernel.image, initial, system, kept_digest(system), booted)


def build_system() -> Path:
    """The system disk, which is the image `host` of virtual machines: a read-only ext4.

    Raises:
        SandboxUnavailableError: it cannot be made.
    """
    programs = {name: Path(found) for name in PROGRAMS.split() if (found := shutil.which(name)) is not None}
    key = digest(_prefix(), sys.version, _stamps(programs.values()), _LEFT_OUT, "1")

    def make(scratch: Path) -> None:
        tree = scratch / "tree"
        _lay_out(tree, programs)
        make_disk(tree, scratch / "disk")
        shutil.rmtree(tree)

    return prepared("system", key, make) / "disk"


def build_native() -> Path:
    """The library of `inside/native.py`.

    Raises:
        SandboxUnavailableError: it cannot be made.
    """
    source = AGENT_PROGRAMS / "native.cc"

    def make(scratch: Path) -> None:
        compiler = shutil.which("g++")
        if compiler is None:
            raise SandboxUnavailableError(
                "sandbox: virtual machines need g++, which is not there. Install it (Debian: apt-get install g++)"
            )
        command = [compiler, *_NATIVE, str(source), "-lc", "-o", str(scratch / "native.so")]
        done = run_program("g++", command)
        if done.code:
            raise SandboxUnavailableError(f"sandbox: {source} cannot be compiled: {done.errors[:_SAID_CHARS]}")

    return prepared("native", digest(file_digest(source), _NATIVE, platform.machine()), make) / "native.so"


def build_empty(size: int, files: int) -> Path:
    """An empty disk of so many bytes, with room for so many files.

    Raises:
        SandboxUnavailableError: it cannot be made.
    """

    def make(scratch: Path) -> None:
        with (scratch / "disk").open("wb") as file:
            file.truncate(size)
        _format(scratch / "disk", files + _OWN_FILES, ())

    return prepared("empty", digest(size, files, _UUID), make) / "disk"


def make_disk(tree: Path, disk: Path) -> None:
    """A read-only ext4 with what a directory holds, all of it root's.

    Raises:
        SandboxUnavailableError: mke2fs is missing or fails.
    """
    count, size = 0, 0
    for path in tree.rglob("*"):
        count += 1
        size += -(-path.lstat().st_size // _BLOCK_BYTES) * _BLOCK_BYTES if not path.is_symlink() else 0
    with disk.open("wb") as file:
        file.truncate((int(_ROOM * (size + 256 * count)) + _SPARE_BYTES) // _BLOCK_BYTES * _BLOCK_BYTES)
    _format(disk, count + _OWN_FILES, ("-d", str(tree)))


def _format(disk: Path, files: int, more: Sequence[str]) -> None:
    """Make a file an ext4."""
    mke2fs = shutil.which("mke2fs") or shutil.which("mke2fs", path="/usr/sbin:/sbin")
    if mke2fs is None:
        raise SandboxUnavailableError(
            "sandbox: virtual machines need mke2fs, which is not there. Install it (Debian: apt-get install e2fsprogs)"
        )
    # As root of a user namespace of its own: files of whoever runs this are root's inside.
    command = [find_bubblewrap(), "--unshare-user", "--uid", "0", "--gid", "0", "--ro-bind", "/", "/", "--dev", "/dev"]
    command += ["--bind", str(disk.parent), str(disk.parent), mke2fs, "-q", "-F", "-t", "ext4", "-m", "0", *more]
    command += ["-O", "^has_journal,^resize_inode", "-b", str(_BLOCK_BYTES), "-I", "256", "-N", str(files)]
    command += ["-U", _UUID, "-E", f"hash_seed={_UUID},lazy_itable_init=0,nodiscard"]
    same = {"E2FSPROGS_FAKE_TIME": _TIME, "SOURCE_DATE_EPOCH": _TIME}  # of equal trees equal disks, if files allow it
    done = run_program("mke2fs", [*command, str(disk)], within_s=_FORMAT_S, env=same)
    if done.code:
        raise SandboxUnavailableError(f"sandbox: mke2fs failed: {done.said}")


def _prefix() -> Path:
    return Path(os.path.realpath(sys.base_prefix))


def _library() -> Path:
    return _prefix() / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}"


def _stamps(paths: object) -> list[tuple[str, int, int]]:
    """What changes when a file does."""
    found: list[tuple[str, int, int]] = []
    for path in sorted(map(str, paths)):  # type: ignore[call-overload]
        status = os.stat(path)
        found.append((path, status.st_size, status.st_mtime_ns))
    return found


def _lay_out(tree: Path, programs: dict[str, Path]) -> None:
    """What the system disk holds."""
    for name in ("usr/bin", "etc", "tmp"):
        (tree / name).mkdir(parents=True)
    for name in ("bin", "lib", "lib64", "sbin", "lib32", "libx32"):
        if os.path.islink(f"/{name}"):
            (tree / name).symlink_to(os.readlink(f"/{name}"))
            (tree / os.readlink(f"/{name}")).mkdir(parents=True, exist_ok=True)
    python = Path(interpreter())
    _copy(python, tree)
    shutil.copytree(
        _library(),
        tree / str(_library())[1:],
        symlinks=True,
        dirs_exist_ok=True,
        ignore=lambda _, names: [n for n in names if n in _LEFT_OUT or n.startswith("config-") or ".opt-" in n],
    )
    for name, path in programs.items():
        _copy(path, tree)
        place = tree / "usr/bin" / name
        if not place.exists() and not place.is_symlink():
            place.symlink_to(os.path.realpath(path))
    for name in ("python3", "python"):
        place = tree / "usr/bin" / name
        place.unlink(missing_ok=True)
        place.symlink_to(python)
    extensions = [str(path) for path in (_library() / "lib-dynload").glob("*.so")]
    for library in _libraries([str(python), *map(str, programs.values()), *extensions]):
        _copy(Path(library), tree)
    for name in ("ld.so.cache", "localtime"):
        if os.path.exists(f"/etc/{name}"):
            shutil.copyfile(f"/etc/{name}", tree / "etc" / name)
    for name in ("alternatives",):
        if os.path.isdir(f"/etc/{name}"):
            shutil.copytree(f"/etc/{name}", tree / "etc" / name, symlinks=True)


def _copy(path: Path, tree: Path) -> None:
    """Copy a file to its own place below another root, with the links by which it is reached."""
    real = Path(os.path.realpath(path))
    for source in {path.parent.resolve() / path.name, real}:
        target = tree / str(source)[1:]
        if target.exists() or target.is_symlink():
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_symlink():
            target.symlink_to(real)
        else:
            shutil.copy2(source, target)


def _libraries(programs: list[str]) -> list[str]:
    """Shared libraries of programs, by the system's own `ldd`."""
    said = run_program("ldd", ["ldd", *programs]).output.decode()
    found = set[str]()
    for line in said.splitlines():
        words = line.split()
        if line.startswith(("\t", " ")):
            found.update(word for word in words if word.startswith("/") and os.path.isfile(word))
    return sorted(found)


def _imports() -> list[Path]:
    """Files of what the machine's first process imports, and is linked to, before it has a disk."""
    script = (
        "import sys, json; sys.path.insert(0, sys.argv[1]); import rollforward.sandbox.inside.machine\n"
        "files = [m.__file__ for m in sys.modules.values() if getattr(m, '__file__', None)]\n"
        "maps = [l.split()[-1] for l in open('/proc/self/maps') if '/' in l]\n"
        "print(json.dumps([files, maps]))"
    )
    # Under the names that the guest knows it by: not those of this environment.
    program = AGENT_PROGRAMS.parent.parent.parent
    command = [interpreter(), "-PsSB", "-c", _NAMES + script, str(program), str(AGENT_PROGRAMS)]
    done = run_program(command[0], command, env={"PYTHONHASHSEED": "0"})
    if done.code:
        raise SandboxUnavailableError(f"sandbox: looking for the agent's modules failed: {done.said[-_SAID_CHARS:]}")
    files, maps = json.loads(done.output)
    own = str(AGENT_PROGRAMS)
    found = {os.path.realpath(file) for file in (*files, *maps) if not file.startswith(own) and os.path.isfile(file)}
    return sorted(map(Path, found))


_NAMES: Final = (
    "import sys, types\n"
    "for n in ('rollforward', 'rollforward.sandbox'):\n"
    "    sys.modules[n] = types.ModuleType(n); sys.modules[n].__path__ = []\n"
    "sys.modules['rollforward.sandbox'].__path__ = [sys.argv[2].rpartition('/')[0]]\n"
)


def _entries(kernel: Kernel, imports: list[Path], sources: list[Path]) -> Iterator[tuple[str, Entry]]:
    """(absolute name, entry) of everything in it; files of this machine keep their places."""
    python = interpreter()
    start = "import sys; sys.path.insert(0, '/program'); from rollforward.sandbox.inside.machine import main; main()"
    manifest = {"modules": [path.name for path in kernel.modules], "prefix": str(_prefix())}
    yield "/init", Entry(f"#!{python} -PsSB\n{start}\n".encode(), 0o100755)
    yield "/manifest.json", Entry(json.dumps(manifest).encode(), 0o100644)
    yield python, Entry(Path(python), 0o100755)
    for path in kernel.modules:
        yield f"/drivers/{path.name}", Entry(path, 0o100644)
    for path in sources:
        place = "/program" if path.suffix == ".so" else "/program/rollforward/sandbox/inside"
        yield f"{place}/{path.name}", Entry(path, 0o100644)
    for path in imports:
        yield str(path), Entry(loaded_part(path.read_bytes()), 0o100755)
        bytecode = Path(importlib.util.cache_from_source(str(path))) if path.suffix == ".py" else None
        if bytecode is not None and bytecode.is_file():
            # Not to be compared with the source, which has another time there: PEP 552's unchecked form.
            data = bytecode.read_bytes()
            yield str(bytecode), Entry(data[:4] + _UNCHECKED + data[16:], 0o100644)
        if ".so" in path.name:
            for link in path.parent.iterdir():  # the names that the loader looks for
                if link.is_symlink() and link.resolve() == path:
                    yield str(link), Entry(path.name.encode(), 0o120777)
    for loader in Path("/lib64").glob("ld-linux*"):
        yield f"{loader.parent.resolve()}/{loader.name}", Entry(loader.resolve(), 0o100755)
    for link in ("/lib", "/lib64"):
        if os.path.islink(link):
            yield link, Entry(os.readlink(link).encode(), 0o120777)
    if os.path.isfile("/etc/ld.so.cache"):
        yield "/etc/ld.so.cache", Entry(Path("/etc/ld.so.cache"), 0o100644)


def loaded_part(data: bytes) -> bytes:
    """Of a 64-bit ELF file what a loader reads, without the sections for debuggers behind it; other bytes as they are.

    The initial file system lies in memory, in every state of every machine.
    """
    if data[:6] != b"\x7fELF\x02\x01":
        return data
    start, size, count = (*struct.unpack_from("<Q", data, 32), *struct.unpack_from("<HH", data, 54))
    ends = [64, start + size * count]
    for number in range(count):
        _, _, offset, _, _, length = struct.unpack_from("<IIQQQQ", data, start + size * number)
        ends.append(offset + length)
    header = bytearray(data[:64])
    struct.pack_into("<Q", header, 40, 0)  # where sections are described, how many there are, which one has their names
    struct.pack_into("<HH", header, 60, 0, 0)
    return bytes(header) + data[64 : max(ends)]
