"""The microVM substrate: each sandbox is a virtual machine of few devices, forked from one that has booted.

The machine is QEMU's `microvm`: no PCI, no display, no network device; a processor, memory, a serial line, disks that
are read-only, and one port, to the agent that containers have too (`inside/agent.py`). All of a kind go on from one
state (`vm.py`), and change only what is their own. Processors run in hardware (KVM) where a boot with it has come to
its end in time, and are emulated (TCG) elsewhere; `platform` of a sandbox says which. What it does not isolate:

- The emulator is a process of the host, and what it does for its devices can have flaws. It is nobody there, sees /usr
  alone, has no network, no capability and few system calls; whoever gets out of the machine is in there.
- Inside, the guest's kernel stands between a command and the agent. Who takes it over can answer in the agent's place:
  make results up, or say that memory ran out, or end the sandbox. It gets nobody else's sandbox, and none of the host.
- Computing time: an emulator computes as much as one processor, until the command's deadline.
- Timing: who shares the processor can be measured, and under TCG nothing defends against what a processor speculates.
- Under TCG the guest's kernel is without what would shield it from its own flaws and is dear there: addresses that
  change, memory that is cleared first, accesses to a user's memory that are refused but where they are meant.
- Commands of one sandbox from each other: they are one user and share files and the loopback network.
- Where the host's user is not root, the emulator is that user. It sees no file of his but this Python and what it is
  handed to read, the disks of the user's cache: those whoever is in there could write to, which every supervisor that
  starts later finds out by their digests.
- The image `host` shows this machine's Python and its usual programs, not all of /usr.
- Two sandboxes of one state begin with the same memory: addresses of the guest's kernel are no secret between them.
  Random numbers, clock and identity are each one's own.
"""

from collections.abc import Sequence
from typing import Any, Final

from rollforward.sandbox import vm
from rollforward.sandbox.errors import SandboxUnavailableError
from rollforward.sandbox.types import SandboxSpec
from rollforward.sandbox.vm import Given, Layout
from rollforward.sandbox.vm_forked import ForkedMachine
from rollforward.sandbox.vm_machine import Wires
from rollforward.sandbox.vm_stream import BLOCK
from rollforward.sandbox.vm_substrate import MachineSubstrate

_MAX_DISKS: Final = 7
"""The machine has eight places for devices."""


class MicroVm(ForkedMachine):
    """One microVM. Made by `MicroVmSubstrate.create`."""

    def hardware(self, given: Given, wires: Wires, files: Sequence[int], disk: int) -> list[str]:
        """See `ForkedMachine`."""
        command = vm.common_arguments(self.layout)
        command += ["-machine", f"microvm,acpi=on,memory-backend={BLOCK}"]
        command += vm.port_arguments(given, wires.sockets(), "virtio-serial-device")
        return command + vm.disk_arguments(self.layout, given, files, "virtio-blk-device")


class MicroVmSubstrate(MachineSubstrate[MicroVm]):
    """Makes microVMs; see `MachineSubstrate`."""

    kind = "microvm"

    def layout(self, spec: SandboxSpec, accelerator: str) -> Layout:
        """See `MachineSubstrate`."""
        disks = self.disks(spec.image)
        if len(disks) > _MAX_DISKS:
            raise SandboxUnavailableError(
                f"image {spec.image!r} has {len(disks) - 1} layers, and a microVM has room for {_MAX_DISKS - 1}. Merge"
                " some"
            )
        return Layout(self.program, accelerator, vm.guest_bytes(spec), disks, self.booted_with.key)

    def new(self, sandbox_id: str, spec: SandboxSpec, layout: Layout, make_group: Any, forget: Any) -> MicroVm:
        """See `MachineSubstrate`."""
        return MicroVm(sandbox_id, spec, layout, make_group, forget)
