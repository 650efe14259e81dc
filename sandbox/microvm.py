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
- Commands of one sandbox from each other: they are one user and share files and the loopback network.
- Where the host's user is not root, the emulator is that user, and sees no file of his but this Python.
- The image `host` shows this machine's Python and its usual programs, not all of /usr.
- Two sandboxes of one state begin with the same memory: addresses of the guest's kernel are no secret between them.
  Random numbers, clock and identity are each one's own.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from rollforward.sandbox import vm, vm_image, vm_state
from rollforward.sandbox.errors import SandboxUnavailableError
from rollforward.sandbox.types import SandboxSpec
from rollforward.sandbox.vm import MIB, Given, Layout
from rollforward.sandbox.vm_machine import Machine, Wires
from rollforward.sandbox.vm_monitor import Monitor
from rollforward.sandbox.vm_state import State
from rollforward.sandbox.vm_substrate import MachineSubstrate
from rollforward.sandbox.warm_template import WarmTemplate

_MAX_DISKS: Final = 7
"""The machine has eight places for devices."""


class MicroVm(Machine):
    """One microVM. Made by `MicroVmSubstrate.create`."""

    async def boot(self, template: WarmTemplate, boot: vm_image.Boot) -> State:
        """Boot it until it waits to be woken; its state.

        Raises:
            SandboxUnavailableError: it does not come up in time.
        """
        memory, devices = vm_state.memory_file(self.layout.memory_bytes), vm_state.memory_file(0)
        console = vm_state.memory_file(0)
        opened = vm.files_as([str(boot.kernel), str(boot.initial), *(disk.path for disk in self.layout.disks)])
        wires, given = Wires(), Given()
        try:
            command = self._command(
                given, wires, f"memory-backend-file,mem-path={given.path(memory)},share=on", opened[2:]
            )
            command += vm.boot_arguments(self.layout, given, opened[0], opened[1], console)
            with wires:
                await self.launch(template, command, given)
            try:
                await self.booted(wires.keeper)
            except SandboxUnavailableError as error:
                said = vm_state.last_line(console) or self.said(template)
                raise SandboxUnavailableError(f"{error} ({self.layout.accelerator}): {said}") from None
            monitor = Monitor(wires.monitor)
            await monitor.ignore_shared_memory()
            await monitor.migrate(devices)  # it runs to the last moment, so what begins with it runs at once
            await self.kill()
            vm_state.seal(memory)
            vm_state.seal(devices)
        except BaseException:
            vm_state.close_all([memory, devices])
            raise
        finally:
            wires.close()
            vm_state.close_all([*opened, console])
        return State(memory, devices)

    async def begin(self, template: WarmTemplate, state: State, codes: list[bytes], snapshot: bytes) -> None:
        """Be a sandbox that begins with a state. Called once, by the substrate."""
        given = Given()
        memory = f"memory-backend-file,mem-path={given.path(state.memory)},share=off"
        wires = await self._start(template, given, memory, vm_state.again(state.devices))
        await self.wake(wires, template, codes, snapshot)

    async def prepare(self, template: WarmTemplate, state: State, codes: list[bytes]) -> State:
        """Be a sandbox that begins with a state, until it waits for its first command; the state that it is in then.

        Raises:
            SandboxUnavailableError: it does not come to that, or would not be as new.
        """
        memory, devices = vm_state.copy(state.memory, self.layout.memory_bytes), vm_state.memory_file(0)
        try:
            given = Given()
            shared = f"memory-backend-file,mem-path={given.path(memory)},share=on"
            wires = await self._start(template, given, shared, vm_state.again(state.devices))
            await self.wake(wires, template, codes, b"")
            await self.rehearse()
            assert self._monitor is not None
            await self._monitor.migrate(devices)
            await self.kill()
            vm_state.seal(memory)
            vm_state.seal(devices)
        except BaseException:
            vm_state.close_all([memory, devices])
            raise
        return State(memory, devices)

    async def fork(self, template: WarmTemplate, state: State) -> None:
        """Be a sandbox that goes on from what `prepare` has made. Called once, by the substrate."""
        given = Given()
        private = f"memory-backend-file,mem-path={given.path(state.memory)},share=off"
        wires = await self._start(template, given, private, vm_state.again(state.devices))
        await self.rejoin(wires, template)

    async def go_on(self, template: WarmTemplate, data: bytes) -> None:
        """Be a sandbox that goes on. Called once, by the substrate."""
        wires = await self._start(template, Given(), "memory-backend-ram", vm_state.file_of(data))
        assert self._monitor is not None
        with self.telling(template):
            await self._monitor.wait_until_loaded()
            await self._monitor.ask("cont")
        await self.rejoin(wires, template)

    async def take(self, monitor: Monitor, max_bytes: int) -> bytes:
        """See `Machine`."""
        stream = vm_state.memory_file(0)
        try:
            await monitor.migrate(stream)
            return vm_state.content(stream, max_bytes)
        finally:
            vm_state.close_all([stream])

    async def _start(self, template: WarmTemplate, given: Given, memory: str, stream: int) -> Wires:
        """Start an emulator that takes up a state; `stream` is closed."""
        opened = [stream]
        wires = Wires()
        try:
            opened += vm.files_as([disk.path for disk in self.layout.disks])
            command = self._command(given, wires, memory, opened[1:])
            command += ["-chardev", "null,id=console", "-incoming", "defer"]
            number = given.number(stream)
            with wires:
                await self.launch(template, command, given)
            self._monitor = Monitor(wires.monitor)
            with self.telling(template):
                await self._monitor.ignore_shared_memory()
                await self._monitor.ask("migrate-incoming", uri=f"fd:{number}")
        except BaseException:
            wires.close()
            raise
        finally:
            vm_state.close_all(opened)
        return wires

    def _command(self, given: Given, wires: Wires, memory: str, disks: Sequence[int]) -> list[str]:
        """QEMU and those of its arguments that a machine has whenever it runs."""
        size = self.layout.memory_bytes // MIB
        command = vm.common_arguments(self.layout)
        command += ["-machine", "microvm,acpi=on,memory-backend=ram"]
        command += ["-object", f"{memory},id=ram,size={size}M"]
        command += vm.port_arguments(given, wires.sockets(), "virtio-serial-device")
        return command + vm.disk_arguments(self.layout, given, disks, "virtio-blk-device")


class MicroVmSubstrate(MachineSubstrate[MicroVm, State]):
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

    async def boot(self, machine: MicroVm, template: WarmTemplate, boot: vm_image.Boot) -> State:
        """See `MachineSubstrate`."""
        return await machine.boot(template, boot)

    def keep(self, state: State, home: Path) -> None:
        """See `MachineSubstrate`."""
        vm_state.keep(state, home)

    def load(self, home: Path, layout: Layout) -> State:
        """See `MachineSubstrate`."""
        return vm_state.load(home, layout.memory_bytes)

    def release(self, state: State) -> None:
        """See `MachineSubstrate`."""
        vm_state.close_all(state)

    async def begin(
        self, machine: MicroVm, template: WarmTemplate, state: State, codes: list[bytes], snapshot: bytes
    ) -> None:
        """See `MachineSubstrate`."""
        await machine.begin(template, state, codes, snapshot)

    async def prepare(self, machine: MicroVm, template: WarmTemplate, state: State, codes: list[bytes]) -> State:
        """See `MachineSubstrate`."""
        return await machine.prepare(template, state, codes)

    async def fork(self, machine: MicroVm, template: WarmTemplate, state: State) -> None:
        """See `MachineSubstrate`."""
        await machine.fork(template, state)

    def share(self, state: State) -> State:
        """See `MachineSubstrate`."""
        return State(*map(os.dup, state))

    async def go_on(self, machine: MicroVm, template: WarmTemplate, data: bytes) -> None:
        """See `MachineSubstrate`."""
        await machine.go_on(template, data)
