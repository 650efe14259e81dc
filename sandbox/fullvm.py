"""The full VM substrate: each sandbox is a virtual machine like a PC, with a disk of its own.

The machine is QEMU's `q35`: firmware, PCI, and disks on it. What a sandbox writes lies on a disk, not in memory: a
qcow2 overlay over an empty ext4 of the sandbox's size, in a file without a name. A sandbox begins as a copy of a
machine that waits: its memory is shared with others until it writes to it, as a microVM's is, and its disk is a copy. A
snapshot of it is memory, devices and disk of one instant. What it does not isolate is what microVMs do not
(`microvm.py`), but for this:

- More devices are emulated than a microVM has, whose code may have flaws: firmware, PCI, the chips of a PC.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from rollforward.sandbox import vm, vm_cache, vm_image
from rollforward.sandbox.errors import SandboxUnavailableError
from rollforward.sandbox.images import Images
from rollforward.sandbox.qcow2 import MAX_BYTES, empty_disk
from rollforward.sandbox.types import SandboxSpec
from rollforward.sandbox.vm import Given, Layout
from rollforward.sandbox.vm_forked import ForkedMachine
from rollforward.sandbox.vm_machine import Wires
from rollforward.sandbox.vm_stream import BLOCK
from rollforward.sandbox.vm_substrate import MachineSubstrate

_PRIVATE: Final = "private"
_LEAST_BYTES: Final = 1 << 20
_BLOCK_BYTES: Final = 4096
_BYTES_OF_A_FILE: Final = 1024
"""A disk has no place for more files than one for so many bytes."""
_MAX_DISKS: Final = 24


class FullVm(ForkedMachine):
    """One full VM. Made by `FullVmSubstrate.create`."""

    base = ""
    """Path of the disk that its own lies over."""

    def new_disk(self) -> bytes:
        """See `ForkedMachine`."""
        return empty_disk(self.layout.private_disk[0])

    def files(self) -> list[str]:
        """See `ForkedMachine`."""
        return [*super().files(), self.base]

    def hardware(self, given: Given, wires: Wires, files: Sequence[int], disk: int) -> list[str]:
        """See `ForkedMachine`."""
        command = vm.common_arguments(self.layout)
        command += ["-machine", f"q35,sata=off,smbus=off,usb=off,vmport=off,memory-backend={BLOCK}"]
        command += vm.port_arguments(given, wires.sockets(), "virtio-serial-pci")
        command += vm.disk_arguments(self.layout, given, files[:-1], "virtio-blk-pci")
        base = f"driver=raw,node-name=base,read-only=on,file.driver=file,file.filename={given.path(files[-1])}"
        file = f"file.driver=file,file.locking=off,file.filename={given.path(disk)}"
        command += ["-blockdev", f"{base},file.locking=off"]
        command += ["-blockdev", f"driver=qcow2,node-name={_PRIVATE},backing=base,cache.no-flush=on,{file}"]
        return [*command, "-device", f"virtio-blk-pci,drive={_PRIVATE},serial={_PRIVATE}"]


class FullVmSubstrate(MachineSubstrate[FullVm]):
    """Makes full VMs; see `MachineSubstrate`."""

    kind = "fullvm"

    def __init__(self, images: Images, *, label: str, max_sandboxes: int) -> None:
        super().__init__(images, label=label, max_sandboxes=max_sandboxes)
        self._bases: dict[tuple[int, int], Path] = {}

    def layout(self, spec: SandboxSpec, accelerator: str) -> Layout:
        """See `MachineSubstrate`."""
        disks = self.disks(spec.image)
        if len(disks) > _MAX_DISKS:
            raise SandboxUnavailableError(
                f"image {spec.image!r} has {len(disks) - 1} layers, and a full VM has room for {_MAX_DISKS - 1}. Merge"
                " some"
            )
        size = -(-max(spec.limits.disk_bytes, _LEAST_BYTES) // _BLOCK_BYTES) * _BLOCK_BYTES
        if size > MAX_BYTES:
            raise SandboxUnavailableError(
                f"limits.disk_bytes is {spec.limits.disk_bytes}, and a full VM's disk has at most {MAX_BYTES}. Lower it"
            )
        private = (size, min(spec.limits.files, size // _BYTES_OF_A_FILE))
        if private not in self._bases:
            self._bases[private] = vm_image.build_empty(*private)
        beneath = vm_cache.kept_digest(self._bases[private])
        return Layout(self.program, accelerator, vm.guest_bytes(spec), disks, self.booted_with.key, private, beneath)

    def new(self, sandbox_id: str, spec: SandboxSpec, layout: Layout, make_group: Any, forget: Any) -> FullVm:
        """See `MachineSubstrate`."""
        machine = FullVm(sandbox_id, spec, layout, make_group, forget)
        machine.base = str(self._bases[layout.private_disk])
        return machine
