"""Virtual machines as both of their substrates have them: an emulator that is shut in, a guest's agent, kept states.

    boot      an emulator boots kernel and initial file system until the first process (`inside/machine.py`) waits
    state     its memory and its devices, sealed files without a name: kept by the supervisor, shared by all
    sandbox   an emulator that maps the memory privately, takes up the devices, and is woken: what it changes is its own

An emulator is QEMU. It is made as containers are (`inside/emulator.py`), so it is nobody on the host, in namespaces and
control groups of its own, and ends when the supervisor does.
"""

import asyncio
import contextlib
import ctypes
import functools
import mmap
import os
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from rollforward.sandbox import cgroups
from rollforward.sandbox.agent_link import Answer
from rollforward.sandbox.container import SPARE_PROCESSES
from rollforward.sandbox.errors import SandboxGoneError, SandboxUnavailableError
from rollforward.sandbox.images import host_directories
from rollforward.sandbox.inside import emulator, frames
from rollforward.sandbox.inside.files import PART_BYTES
from rollforward.sandbox.instance import Instance
from rollforward.sandbox.types import SandboxSpec
from rollforward.sandbox.vm_cache import digest
from rollforward.sandbox.vm_state import close_all
from rollforward.sandbox.warm_template import FIRST_USER, USERS, WarmTemplate

MIB: Final = 1 << 20
FIRST_MACHINE_USER: Final = FIRST_USER + USERS
_GUEST_BYTES: Final = 160 * MIB
"""Memory of a guest beside what its sandbox may use: kernel, first process, agent."""
_STEP_BYTES: Final = 64 * MIB
_EMULATOR_BYTES: Final = 192 * MIB
_EMULATOR_THREADS: Final = 48
_SETUP_TIMEOUT_S: Final = 60.0
_BOOT_S: Final = {"kvm": 20.0, "tcg": 180.0}
_ENTROPY_BYTES: Final = 64
_TSC_S: Final = 0.05
_PACE: Final = 60
"""How many times as long things take where a processor is emulated."""


class Layout(NamedTuple):
    """Which machine: states of equal ones are the same state."""

    program: str
    """QEMU."""
    accelerator: str
    """kvm or tcg."""
    memory_bytes: int
    disks: tuple[tuple[str, str], ...]
    """(serial, path) of each read-only disk."""
    boot_key: str
    """Stands for kernel and initial file system."""

    def key(self) -> str:
        """Stands for it: a state goes on where it was saved, on this QEMU, and with KVM on this processor."""
        said = subprocess.run([self.program, "--version"], capture_output=True, check=False).stdout
        cpu = ""
        if self.accelerator == "kvm":
            lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
            cpu = str(sorted({line for line in lines if line.startswith(("model", "flags", "microcode"))}))
        disks = [(serial, os.stat(path).st_size, os.stat(path).st_mtime_ns) for serial, path in self.disks]
        return digest(self, said, cpu, disks)


def find_qemu() -> str:
    """Path of QEMU.

    Raises:
        SandboxUnavailableError: it is not there.
    """
    found = shutil.which("qemu-system-x86_64")
    if found is None:
        raise SandboxUnavailableError(
            "sandbox: virtual machines need QEMU, which is not on PATH. Install it (Debian: apt-get install"
            " qemu-system-x86), or choose substrate=container"
        )
    return os.path.realpath(found)


def accelerators() -> list[str]:
    """What may run machines here, the best first. That the first can is known when it has booted one."""
    with contextlib.suppress(OSError):
        has_virtualization = {"vmx", "svm"} & set(Path("/proc/cpuinfo").read_text(encoding="utf-8").split())
        if has_virtualization and os.access("/dev/kvm", os.R_OK | os.W_OK):
            return ["kvm", "tcg"]
    return ["tcg"]


def guest_bytes(spec: SandboxSpec) -> int:
    """Memory of the machine of a sandbox; few sizes, so that many share a state."""
    limits = spec.limits
    # Its files lie in memory, and a snapshot beside them until it is unpacked.
    needed = limits.memory_bytes + 2 * limits.disk_bytes + _GUEST_BYTES
    return -(-needed // _STEP_BYTES) * _STEP_BYTES


@functools.cache
def tsc_khz() -> int:
    """Rate of this processor's time stamp counter, which an emulated one shows too and could not find out by itself."""
    with mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC) as page:
        page.write(bytes.fromhex("0f31 48c1e220 4809d0 c3"))  # rdtsc; shl rdx, 32; or rax, rdx; ret
        cell = ctypes.c_char.from_buffer(page)
        read = ctypes.CFUNCTYPE(ctypes.c_uint64)(ctypes.addressof(cell))
        begin_ns, begin = time.monotonic_ns(), read()
        time.sleep(_TSC_S)
        end_ns, end = time.monotonic_ns(), read()
        del cell
    return (end - begin) * 1_000_000 // (end_ns - begin_ns)


def files_as(paths: Sequence[str]) -> list[int]:
    """Descriptors to read these files by."""
    opened: list[int] = []
    try:
        opened.extend(os.open(path, os.O_RDONLY | os.O_CLOEXEC) for path in paths)
    except OSError as error:
        close_all(opened)
        raise SandboxUnavailableError(f"sandbox: {error.filename}: {error.strerror}. Make it readable") from None
    return opened


class Given:
    """Descriptors that an emulator is handed, and what it knows them by."""

    def __init__(self) -> None:
        self.descriptors: list[int] = []

    def number(self, descriptor: int) -> int:
        """Hand it a descriptor; its number there."""
        self.descriptors.append(descriptor)
        return emulator.FIRST + len(self.descriptors) - 1

    def path(self, descriptor: int) -> str:
        """Hand it a descriptor; a path there by which the file is opened."""
        return f"/proc/self/fd/{self.number(descriptor)}"


class Machine(Instance):
    """One virtual machine. Made by a substrate's `create`."""

    def __init__(
        self, sandbox_id: str, spec: SandboxSpec, hierarchies: cgroups.Hierarchies, label: str, forget: Any
    ) -> None:
        """Nothing runs yet; see `launch`."""
        host_bytes = guest_bytes(spec) + _EMULATOR_BYTES
        make_group = functools.partial(cgroups.Group, hierarchies, label, sandbox_id, host_bytes, _EMULATOR_THREADS)
        super().__init__(sandbox_id, spec, make_group, forget)
        self._told_ooms = 0

    async def launch(self, template: WarmTemplate, command: Sequence[str], given: Given, uid: int) -> None:
        """Start its emulator.

        Args:
            template: makes it.
            command: path and arguments.
            given: what it is handed; closed by whoever opened it.
            uid: its user on the host, where that is root's to say.

        Raises:
            SandboxUnavailableError: it cannot be made.
        """
        groups = self._group.open_procs()
        try:
            request = {
                "program": list(command),
                "keep": len(given.descriptors),
                "binds": host_directories(),
                "uid": uid,
            }
            self._watch(await template.make(request, [*given.descriptors, *groups]))
        finally:
            close_all(groups)

    async def wake(
        self, template: WarmTemplate, control: socket.socket, image: Sequence[str], codes: list[bytes], snapshot: bytes
    ) -> None:
        """Make a machine that waits this sandbox's.

        Args:
            template: for what its emulator has said, where it fails.
            control: its agent's socket; taken over.
            image: serials of the image's disks, the highest layer first.
            codes: of the tools.
            snapshot: files to begin with.
        """
        try:
            await self._greet(control, self._told(image, codes, snapshot), _SETUP_TIMEOUT_S)
        except (SandboxGoneError, TimeoutError):
            raise SandboxUnavailableError(f"sandbox: a machine did not come up: {template.said()}") from None

    def _told(self, image: Sequence[str], codes: list[bytes], snapshot: bytes) -> Iterator[Answer]:
        limits = self.spec.limits
        parts = [snapshot[start : start + PART_BYTES] for start in range(0, len(snapshot), PART_BYTES)]
        wake = {
            "entropy": secrets.token_hex(_ENTROPY_BYTES),
            "unix_ns": time.time_ns(),
            "image": list(image),
            "disk_bytes": limits.disk_bytes,
            "files": limits.files,
            "memory_bytes": limits.memory_bytes + limits.disk_bytes,
            "processes": limits.processes + SPARE_PROCESSES,
            "snapshot_parts": len(parts),
        }
        yield wake, []
        for part in parts:
            yield {}, [part]
        told = {**msgspec.to_builtins(limits), "is_group_limited": True, "pace": _PACE}
        yield {"limits": told, "tools": list(self._tools)}, codes

    def _oom_kills(self) -> int:
        """Those that the guest's kernel tells of, and its emulator's own."""
        last = self._link.last_words if self._link is not None else ""
        if last.isdecimal() and len(last) < 10:
            self._told_ooms = max(self._told_ooms, int(last))
        return self._told_ooms + super()._oom_kills()

    def _hear_ooms(self, head: frames.Head) -> None:
        if type(count := head.get("ooms")) is int:
            self._told_ooms = max(self._told_ooms, count)


async def hello(control: socket.socket, within_s: float) -> frames.Head:
    """What a machine says when it waits to be woken.

    Raises:
        SandboxUnavailableError: it says nothing of the kind in time.
    """
    control.setblocking(False)
    loop, data = asyncio.get_running_loop(), b""
    try:
        async with asyncio.timeout(within_s):
            while len(data) < frames.LENGTH.size or len(data) < frames.LENGTH.size + frames.LENGTH.unpack_from(data)[0]:
                chunk = await loop.sock_recv(control, 1 << 12)
                if not chunk:
                    raise SandboxUnavailableError("sandbox: a machine ended while it booted")
                data += chunk
        head, _ = frames.unpack(data[frames.LENGTH.size :])
    except SandboxUnavailableError:
        raise
    except TimeoutError:
        raise SandboxUnavailableError(f"sandbox: a machine has not booted within {within_s:g} s") from None
    except ValueError as error:
        raise SandboxUnavailableError(f"sandbox: a machine that booted said {error}") from None
    return head


def boot_limit_s(accelerator: str) -> float:
    """Seconds that a boot may take before it counts as none."""
    return _BOOT_S[accelerator]
