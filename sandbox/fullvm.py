"""The full VM substrate: each sandbox is a virtual machine like a PC, with a disk of its own.

The machine is QEMU's `q35`: firmware, PCI, and disks on it. What a sandbox writes lies on a disk, not in memory: a
qcow2 overlay over an empty ext4 of the sandbox's size, in a file without a name. In the same file is the machine's
state (savevm), so that memory and disk are always of one instant: a sandbox begins as a copy of the disk of a machine
that has booted and waits, and is loaded (loadvm); a snapshot of it is that file. What it does not isolate is what
microVMs do not (`microvm.py`), but for these:

- More devices are emulated than a microVM has, whose code may have flaws: firmware, PCI, the chips of a PC.
- No memory is shared: each has all of its own, some 200 MiB, and is some tenths of a second slower to make.
"""

import asyncio
import contextlib
import fcntl
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from rollforward.sandbox import vm, vm_cache, vm_image, vm_state
from rollforward.sandbox.errors import SandboxUnavailableError
from rollforward.sandbox.files import write_all
from rollforward.sandbox.images import Images
from rollforward.sandbox.qcow2 import empty_disk
from rollforward.sandbox.types import SandboxSpec
from rollforward.sandbox.vm import Given, Layout
from rollforward.sandbox.vm_machine import Machine, Wires
from rollforward.sandbox.vm_monitor import Monitor
from rollforward.sandbox.vm_substrate import MachineSubstrate
from rollforward.sandbox.warm_template import WarmTemplate

_PRIVATE: Final = "private"
_TAG: Final = "state"
_FICLONE: Final = 0x4004_9409
_LEAST_BYTES: Final = 1 << 20
_BLOCK_BYTES: Final = 4096
_BYTES_OF_A_FILE: Final = 1024
"""A disk has no place for more files than one for so many bytes."""
_COPY_BYTES: Final = 1 << 26
_MAX_DISKS: Final = 24


class FullVm(Machine):
    """One full VM. Made by `FullVmSubstrate.create`."""

    _disk = -1
    """Descriptor of the file with its disk and its state."""
    base = ""
    """Path of the disk that it lies over."""

    async def boot(self, template: WarmTemplate, boot: vm_image.Boot) -> int:
        """Boot it until it waits to be woken; a descriptor of the file with its disk and its state.

        Raises:
            SandboxUnavailableError: it does not come up in time.
        """
        self._disk = nameless_file()
        write_all(self._disk, empty_disk(self.layout.private_disk[0]))
        console = vm_state.memory_file(0)
        opened = vm.files_as([str(boot.kernel), str(boot.initial)])
        try:
            given = Given()
            more = vm.boot_arguments(self.layout, given, opened[0], opened[1], console)
            wires = await self._start(template, given, more)
            try:
                await self.booted(wires.keeper)
                await self._save(Monitor(wires.monitor))
            except SandboxUnavailableError as error:
                said = vm_state.last_line(console) or self.said(template)
                raise SandboxUnavailableError(f"{error} ({self.layout.accelerator}): {said}") from None
            finally:
                wires.close()
            return os.dup(self._disk)
        finally:
            vm_state.close_all([*opened, console])

    async def begin(self, template: WarmTemplate, state: int, codes: list[bytes], snapshot: bytes) -> None:
        """Be a sandbox that begins with a state. Called once, by the substrate."""
        self._disk = nameless_file()
        await asyncio.to_thread(copy_file, state, self._disk)
        await self.wake(await self._load(template), template, codes, snapshot)

    async def prepare(self, template: WarmTemplate, state: int, codes: list[bytes]) -> int:
        """Be a sandbox that begins with a state, until it waits for its first command; the state that it is in then.

        Raises:
            SandboxUnavailableError: it does not come to that, or would not be as new.
        """
        await self.begin(template, state, codes, b"")
        await self.rehearse()
        assert self._monitor is not None
        await self._monitor.job("snapshot-delete", tag=_TAG, devices=[_PRIVATE])
        await self._save(self._monitor)
        return os.dup(self._disk)

    async def fork(self, template: WarmTemplate, state: int) -> None:
        """Be a sandbox that goes on from what `prepare` has made. Called once, by the substrate."""
        self._disk = nameless_file()
        await asyncio.to_thread(copy_file, state, self._disk)
        await self.rejoin(await self._load(template), template)

    async def go_on(self, template: WarmTemplate, data: bytes) -> None:
        """Be a sandbox that goes on. Called once, by the substrate."""
        self._disk = nameless_file()
        for start in range(0, len(data), _COPY_BYTES):
            write_all(self._disk, data[start : start + _COPY_BYTES], offset=start)
        await self.rejoin(await self._load(template), template)

    async def take(self, monitor: Monitor, max_bytes: int) -> bytes:
        """See `Machine`."""
        await monitor.job("snapshot-delete", tag=_TAG, devices=[_PRIVATE])
        await self._save(monitor)
        return vm_state.content(self._disk, max_bytes)

    async def kill(self) -> None:
        """See `Instance`."""
        await super().kill()
        if self.is_gone and self._disk >= 0:
            os.close(self._disk)
            self._disk = -1

    async def _save(self, monitor: Monitor) -> None:
        await monitor.job("snapshot-save", tag=_TAG, vmstate=_PRIVATE, devices=[_PRIVATE])

    async def _load(self, template: WarmTemplate) -> Wires:
        return await self._start(template, Given(), ["-chardev", "null,id=console", "-loadvm", _TAG])

    async def _start(self, template: WarmTemplate, given: Given, more: Sequence[str]) -> Wires:
        wires = Wires()
        opened = vm.files_as([self.base, *(disk.path for disk in self.layout.disks)])
        try:
            command = vm.common_arguments(self.layout)
            command += ["-machine", "q35,sata=off,smbus=off,usb=off,vmport=off"]
            command += vm.port_arguments(given, wires.sockets(), "virtio-serial-pci")
            command += vm.disk_arguments(self.layout, given, opened[1:], "virtio-blk-pci")
            base = f"driver=raw,node-name=base,read-only=on,file.driver=file,file.filename={given.path(opened[0])}"
            file = f"file.driver=file,file.locking=off,file.filename={given.path(self._disk)}"
            command += ["-blockdev", f"{base},file.locking=off"]
            command += ["-blockdev", f"driver=qcow2,node-name={_PRIVATE},backing=base,cache.no-flush=on,{file}"]
            command += ["-device", f"virtio-blk-pci,drive={_PRIVATE},serial={_PRIVATE}"]
            with wires:
                await self.launch(template, [*command, *more], given)
        finally:
            vm_state.close_all(opened)
        return wires


class FullVmSubstrate(MachineSubstrate[FullVm, int]):
    """Makes full VMs; see `MachineSubstrate`."""

    kind = "fullvm"

    def __init__(self, images: Images, *, label: str, max_sandboxes: int) -> None:
        super().__init__(images, label=label, max_sandboxes=max_sandboxes)
        self._bases: dict[tuple[int, int], str] = {}

    def layout(self, spec: SandboxSpec, accelerator: str) -> Layout:
        """See `MachineSubstrate`."""
        disks = self.disks(spec.image)
        if len(disks) > _MAX_DISKS:
            raise SandboxUnavailableError(
                f"image {spec.image!r} has {len(disks) - 1} layers, and a full VM has room for {_MAX_DISKS - 1}. Merge"
                " some"
            )
        size = -(-max(spec.limits.disk_bytes, _LEAST_BYTES) // _BLOCK_BYTES) * _BLOCK_BYTES
        private = (size, min(spec.limits.files, size // _BYTES_OF_A_FILE))
        if private not in self._bases:
            self._bases[private] = str(vm_image.build_empty(*private))
        return Layout(self.program, accelerator, vm.guest_bytes(spec), disks, self.booted_with.key, private)

    def new(self, sandbox_id: str, spec: SandboxSpec, layout: Layout, make_group: Any, forget: Any) -> FullVm:
        """See `MachineSubstrate`."""
        machine = FullVm(sandbox_id, spec, layout, make_group, forget)
        machine.base = self._bases[layout.private_disk]
        return machine

    async def boot(self, machine: FullVm, template: WarmTemplate, boot: vm_image.Boot) -> int:
        """See `MachineSubstrate`."""
        return await machine.boot(template, boot)

    def keep(self, state: int, home: Path) -> None:
        """See `MachineSubstrate`."""
        with (home / "disk").open("wb") as file:
            copy_file(state, file.fileno())

    def load(self, home: Path, layout: Layout) -> int:
        """See `MachineSubstrate`."""
        return vm.files_as([str(home / "disk")])[0]

    def release(self, state: int) -> None:
        """See `MachineSubstrate`."""
        os.close(state)

    async def begin(
        self, machine: FullVm, template: WarmTemplate, state: int, codes: list[bytes], snapshot: bytes
    ) -> None:
        """See `MachineSubstrate`."""
        await machine.begin(template, state, codes, snapshot)

    async def prepare(self, machine: FullVm, template: WarmTemplate, state: int, codes: list[bytes]) -> int:
        """See `MachineSubstrate`."""
        return await machine.prepare(template, state, codes)

    async def fork(self, machine: FullVm, template: WarmTemplate, state: int) -> None:
        """See `MachineSubstrate`."""
        await machine.fork(template, state)

    def share(self, state: int) -> int:
        """See `MachineSubstrate`."""
        return os.dup(state)

    async def go_on(self, machine: FullVm, template: WarmTemplate, data: bytes) -> None:
        """See `MachineSubstrate`."""
        await machine.go_on(template, data)


def nameless_file() -> int:
    """A descriptor of a file on disk that is gone with the last who has it open; an emulator may write it.

    Raises:
        SandboxUnavailableError: there is no room.
    """
    try:
        descriptor = os.open(vm_cache.CACHE, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
        os.fchmod(descriptor, 0o666)
    except OSError as error:
        raise SandboxUnavailableError(f"sandbox: a disk cannot be made in {vm_cache.CACHE}: {error.strerror}") from None
    return descriptor


def copy_file(source: int, target: int) -> None:
    """Copy a file, by sharing its blocks where the file system can; holes stay holes."""
    with contextlib.suppress(OSError):
        fcntl.ioctl(target, _FICLONE, source)
        return
    size = os.fstat(source).st_size
    os.ftruncate(target, size)
    here = 0
    while here < size:
        try:
            here = os.lseek(source, here, os.SEEK_DATA)
        except OSError:
            return  # nothing but a hole is left
        stop = os.lseek(source, here, os.SEEK_HOLE)
        while here < stop:
            here += os.copy_file_range(source, target, stop - here, here, here)
