"""Virtual machines as both of their substrates have them: an emulator that is shut in, a guest's agent, kept states.

    boot      an emulator boots kernel and initial file system until the first process (`inside/machine.py`) waits
    state     its memory, devices and disk, sealed files without a name: kept by the supervisor, shared by all
    sandbox   an emulator that maps the memory privately, takes up the devices, copies the disk, and is woken: what it
              changes is its own (`vm_forked.py`)

An emulator is QEMU. It is made as containers are (`inside/emulator.py`), so it is nobody on the host, in namespaces and
control groups of its own, and ends when the supervisor does.
"""

import contextlib
import ctypes
import functools
import mmap
import os
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

from rollforward.sandbox import qcow2
from rollforward.sandbox.errors import SandboxUnavailableError
from rollforward.sandbox.inside import emulator
from rollforward.sandbox.programs import run_program
from rollforward.sandbox.refusals import refusals
from rollforward.sandbox.types import SandboxSpec
from rollforward.sandbox.vm_cache import digest
from rollforward.sandbox.vm_state import closing_all
from rollforward.sandbox.warm_template import FIRST_USER, USERS

MIB: Final = 1 << 20
FIRST_MACHINE_USER: Final = FIRST_USER + USERS
_GUEST_BYTES: Final = 160 * MIB
"""Memory of a guest beside what its sandbox may use: kernel, first process, agent."""
_STEP_BYTES: Final = 64 * MIB
_SHARE_OF_TABLES: Final = 256
_DEVICES_BYTES: Final = 64 * MIB
_FORM: Final = 2
"""Of what is saved: another one goes on in no machine of this."""
_VERSION_S: Final = 60.0
_TSC_S: Final = 0.05
_CODE_MIB: Final = 64
"""For code that is translated."""
_SANDBOX: Final = "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny"
_KERNEL_ARGUMENTS: Final = (
    "console=ttyS0 quiet panic=-1 reboot=t rdinit=/init mitigations=off random.trust_cpu=on audit=0 psi=0"
    " lsm=landlock PYTHONHASHSEED=0"
)
_EMULATED_CPU: Final = "max,la57=off,erms=off,fsrm=off,smap=off"
_EMULATED_ARGUMENTS: Final = (
    "norandmaps tsc=reliable clearcpuid=rep_good init_on_alloc=0 hardened_usercopy=off randomize_kstack_offset=off"
)
"""What costs an emulated processor most and shields no host: addresses that change, for which all code would be
translated again; string instructions, which it repeats one by one; a second view of memory (smap); and memory that a
kernel clears or checks against its own flaws."""


class Disk(NamedTuple):
    """A disk of a machine."""

    serial: str
    """What the guest knows it by."""
    path: str
    digest: str
    """Stands for its bytes."""


class Layout(NamedTuple):
    """Which machine: states of equal ones are the same state."""

    program: str
    """QEMU."""
    accelerator: str
    """kvm or tcg."""
    memory_bytes: int
    disks: tuple["Disk", ...]
    """Those that it cannot write."""
    boot_key: str
    """Stands for kernel and initial file system."""
    private_disk: tuple[int, int] = (0, 0)
    """Bytes and files of the one that it can write; 0 where there is none."""
    private_digest: str = ""
    """Stands for the bytes of that which it lies over."""

    def max_file_bytes(self) -> int:
        """The longest file that its emulator needs to write: its disk, or what is saved of its memory and devices."""
        saved = self.memory_bytes + self.memory_bytes // _SHARE_OF_TABLES + _DEVICES_BYTES
        return max(saved, qcow2.max_file_bytes(self.private_disk[0]))

    def key(self) -> str:
        """Stands for it: a state goes on where it was saved, on this QEMU, and with KVM on this processor."""
        said = _version(self.program, os.stat(self.program).st_mtime_ns)
        cpu = ""
        if self.accelerator == "kvm":
            lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
            cpu = str(sorted({line for line in lines if line.startswith(("model", "flags", "microcode"))}))
        disks = [(disk.serial, disk.digest) for disk in self.disks]
        private = (*self.private_disk, self.private_digest)
        hardware = (self.accelerator, self.memory_bytes, disks, private)
        return digest(_FORM, said, cpu, _KERNEL_ARGUMENTS, _EMULATED_ARGUMENTS, _EMULATED_CPU, self.boot_key, hardware)


@functools.lru_cache(maxsize=8)
def _version(program: str, _: int) -> bytes:
    return run_program("QEMU", [program, "--version"], within_s=_VERSION_S).output


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
    """Descriptors to read these files by.

    Raises:
        SandboxUnavailableError: one cannot be opened.
    """
    with closing_all() as opened:
        for path in paths:
            with refusals(f"{path} cannot be read"):
                opened.append(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
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


def common_arguments(layout: Layout) -> list[str]:
    """QEMU, and what every machine is told."""
    command = [layout.program, "-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"]
    command += ["-sandbox", _SANDBOX, "-smp", "1", "-m", f"{layout.memory_bytes // MIB}M", "-serial", "chardev:console"]
    if layout.accelerator == "kvm":
        return [*command, "-accel", "kvm", "-cpu", "host"]
    return [*command, "-accel", f"tcg,thread=single,tb-size={_CODE_MIB}", "-cpu", _EMULATED_CPU]


def port_arguments(given: Given, sockets: Sequence[tuple[str, int]], device: str) -> list[str]:
    """The ports to the guest, and the emulator's own control.

    Args:
        given: what it is handed.
        sockets: name and descriptor of each port and, last, of the monitor.
        device: of virtio-serial, on the machine's bus.
    """
    command = ["-device", f"{device},max_ports={len(sockets)}"]
    for name, descriptor in sockets:
        command += ["-chardev", f"socket,id={name},fd={given.number(descriptor)}"]
    for number, (name, _) in enumerate(sockets[:-1], 1):
        command += ["-device", f"virtserialport,chardev={name},name={name},nr={number}"]
    return [*command, "-mon", f"chardev={sockets[-1][0]},mode=control"]


def disk_arguments(layout: Layout, given: Given, disks: Sequence[int], device: str) -> list[str]:
    """The disks that it cannot write, by descriptors in the order of the layout."""
    command: list[str] = []
    for number, (disk, descriptor) in enumerate(zip(layout.disks, disks, strict=True)):
        file = f"file.driver=file,file.locking=off,file.filename={given.path(descriptor)}"
        command += ["-blockdev", f"driver=raw,node-name=disk{number},read-only=on,{file}"]
        command += ["-device", f"{device},drive=disk{number},serial={disk.serial}"]
    return command


def boot_arguments(layout: Layout, given: Given, kernel: int, initial: int, console: int) -> list[str]:
    """What a machine is told that boots."""
    told = _KERNEL_ARGUMENTS
    if layout.accelerator == "tcg":
        told += f" {_EMULATED_ARGUMENTS} tsc_early_khz={tsc_khz()}"
    command = ["-kernel", given.path(kernel), "-initrd", given.path(initial), "-append", told]
    return [*command, "-chardev", f"file,id=console,append=on,path={given.path(console)}"]
