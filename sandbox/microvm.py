"""The microVM substrate: each sandbox is a virtual machine of few devices, forked from one that has booted.

The machine is QEMU's `microvm`: no PCI, no display, no network device; a processor, memory, a serial line, disks that
are read-only, and one port, to the agent that containers have too (`inside/agent.py`). All of a kind go on from one
state (`vm.py`), and change only what is their own. Processors run in hardware (KVM) where a boot with it has come to
its end in time, and are emulated (TCG) elsewhere; `platform` of a sandbox says which. What it does not isolate:

- The emulator is a process of the host, and what it does for its devices can have flaws. It is nobody there, sees /usr
  alone, has no network, no capability and few system calls; whoever gets out of the machine is in there.
- Inside, the guest's kernel stands between a command and the agent. Who takes it over can answer in the agent's place:
  make results up, or say that memory ran out, or end the sandbox. It gets nobody else's sandbox, and none of the host.
- Memory and processors are shared by timing, and with TCG nothing defends against what a processor speculates.
- Computing time: an emulator computes as much as one processor, until the command's deadline.
- The image `host` shows this machine's Python and its usual programs, not all of /usr.
- Two sandboxes of one state begin with the same memory: addresses of the guest's kernel are no secret between them.
  Random numbers, clock and identity are each one's own.
"""

import asyncio
import os
import socket
from collections.abc import Sequence
from typing import Final

from rollforward.sandbox import cgroups, vm, vm_image, vm_kernel, vm_state
from rollforward.sandbox.errors import SandboxUnavailableError
from rollforward.sandbox.host import HostReport, probe
from rollforward.sandbox.images import Images
from rollforward.sandbox.instance import tool_code
from rollforward.sandbox.types import SandboxSpec
from rollforward.sandbox.vm import MIB, Given, Layout, Machine
from rollforward.sandbox.vm_cache import found, prepared
from rollforward.sandbox.vm_monitor import Monitor
from rollforward.sandbox.vm_state import State
from rollforward.sandbox.warm_template import USERS, WarmTemplate

SYSTEM: Final = "system"
_KERNEL_ARGUMENTS: Final = (
    "console=ttyS0 quiet panic=-1 reboot=t rdinit=/init mitigations=off random.trust_cpu=on"
    " apparmor=0 audit=0 PYTHONHASHSEED=0"
)
_SANDBOX: Final = "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny"
_CONSOLE_BYTES: Final = 4096
_MAX_LAYERS: Final = 5
"""The machine has eight places for devices."""


class MicroVmSubstrate:
    """Makes microVMs. Belongs to one event loop, whose thread must live as long as they shall.

    Args:
        images: what they can be made of.
        label: likewise.
        max_sandboxes: likewise.
    """

    def __init__(self, images: Images, *, label: str, max_sandboxes: int) -> None:
        self._images = images
        self._label = cgroups.check_label(label)
        if not 0 < max_sandboxes < USERS:
            raise ValueError(f"max_sandboxes is {max_sandboxes}; it must be 1 to {USERS - 1}")
        self._hierarchies = cgroups.find()
        first = vm.FIRST_MACHINE_USER
        self._users = list(range(first + max_sandboxes, first, -1))
        self._template: WarmTemplate | None = None
        self._boot: vm_image.Boot | None = None
        self._states: dict[Layout, State] = {}
        self._starting = asyncio.Lock()
        self._booting = asyncio.Lock()
        self._machines: dict[str, Machine] = {}
        self._accelerators = vm.accelerators()
        self._number = 0
        self._is_closed = False

    async def start(self) -> HostReport:
        """See `Substrate`."""
        self._program = vm.find_qemu()
        self._boot = await asyncio.to_thread(lambda: vm_image.build(vm_kernel.find_kernel()))
        await self._warm()
        return probe(self._hierarchies)

    async def create(self, sandbox_id: str, spec: SandboxSpec, *, snapshot: bytes | None = None) -> "MicroVm":
        """See `Substrate`."""
        codes = [tool_code(tool) for tool in spec.tools]
        if sandbox_id in self._machines:
            raise ValueError(f"there is a machine {sandbox_id!r}; kill it first")
        template = await self._warm()
        layout, state = await self._state(template, spec)
        machine = self._machine(sandbox_id, spec)
        try:
            await machine.go_on(template, layout, state, codes, snapshot or b"")
        except BaseException:
            await machine.kill()
            raise
        return machine

    async def close(self) -> None:
        """See `Substrate`."""
        self._is_closed = True
        await asyncio.gather(*(machine.kill() for machine in list(self._machines.values())))
        if self._template is not None:
            self._template.close()
            self._template = None
        for state in self._states.values():
            vm_state.close_all(state)
        self._states.clear()

    async def _warm(self) -> WarmTemplate:
        async with self._starting:
            if self._is_closed:
                raise SandboxUnavailableError("sandbox: the substrate is closed; make a new one")
            if self._template is not None and self._template.died.done():
                self._template.close()
                self._template = None
            if self._template is None:
                more = ("--dev-bind", "/dev/kvm", "/dev/kvm") if "kvm" in self._accelerators else ()
                template = WarmTemplate(self._images, first_user=vm.FIRST_MACHINE_USER, more=more)
                try:
                    await template.wait()
                except BaseException:
                    template.close()
                    raise
                self._template = template
            return self._template

    def _machine(self, sandbox_id: str, spec: SandboxSpec) -> "MicroVm":
        if not self._users:
            raise SandboxUnavailableError("sandbox: there is no room for another machine; kill one first")
        uid = self._users.pop()

        def forget(machine: Machine) -> None:
            if self._machines.pop(machine.id, None) is not None:
                self._users.append(uid)

        machine = MicroVm(sandbox_id, spec, self._hierarchies, self._label, forget)
        machine.uid = uid
        self._machines[sandbox_id] = machine
        return machine

    async def _state(self, template: WarmTemplate, spec: SandboxSpec) -> tuple[Layout, State]:
        """The state that machines of a spec go on from, made if there is none yet."""
        async with self._booting:
            assert self._boot is not None
            disks = await asyncio.to_thread(self._disks, spec.image)
            while True:
                name = self._accelerators[0]
                layout = Layout(self._program, name, vm.guest_bytes(spec), disks, self._boot.key)
                if layout in self._states:
                    return layout, self._states[layout]
                try:
                    self._states[layout] = await self._kept(template, layout, spec)
                except SandboxUnavailableError:
                    if len(self._accelerators) == 1:
                        raise
                    self._accelerators = self._accelerators[1:]  # it is there and does not work: it never does

    async def _kept(self, template: WarmTemplate, layout: Layout, spec: SandboxSpec) -> State:
        """The state of this user's cache, booted if there is none."""
        key = layout.key()
        if (home := await asyncio.to_thread(found, "state", key)) is not None:
            return await asyncio.to_thread(vm_state.load, home, layout.memory_bytes)
        state = await self._boot_one(template, layout, spec)
        await asyncio.to_thread(prepared, "state", key, lambda scratch: vm_state.keep(state, scratch))
        return state

    async def _boot_one(self, template: WarmTemplate, layout: Layout, spec: SandboxSpec) -> State:
        assert self._boot is not None
        self._number += 1
        machine = self._machine(f"boot-{self._number}", spec)
        try:
            return await machine.boot(template, layout, self._boot)
        finally:
            await machine.kill()

    def _disks(self, image: str) -> tuple[tuple[str, str], ...]:
        """Serials and paths of a machine's disks: the system's, and an image's layers, the lowest first."""
        assert self._boot is not None
        layers = self._images.layers(image)
        if len(layers) > _MAX_LAYERS:
            raise SandboxUnavailableError(
                f"image {image!r} has {len(layers)} layers, and a microVM has room for {_MAX_LAYERS}. Merge some"
            )
        found = [(f"layer{n}", str(self._images.store.layer_file(layer))) for n, layer in enumerate(layers)]
        return ((SYSTEM, str(self._boot.system)), *found)


class MicroVm(Machine):
    """One microVM. Made by `MicroVmSubstrate.create`."""

    uid = -1

    async def boot(self, template: WarmTemplate, layout: Layout, boot: vm_image.Boot) -> State:
        """Boot it until it waits to be woken, and keep that state; the machine is of no further use.

        Raises:
            SandboxUnavailableError: it does not come up in time.
        """
        memory, devices = vm_state.memory_file(layout.memory_bytes), vm_state.memory_file(0)
        console = vm_state.memory_file(0)
        opened = vm.files_as([str(boot.kernel), str(boot.initial)])
        agent, agent_end = socket.socketpair()
        control, control_end = socket.socketpair()
        try:
            given = Given()
            command = self._command(layout, given, agent_end, control_end, memory, is_shared=True)
            kernel, initial = opened
            tsc = f" tsc=reliable tsc_early_khz={vm.tsc_khz()}" if layout.accelerator == "tcg" else ""
            command += ["-kernel", given.path(kernel), "-initrd", given.path(initial)]
            command += ["-append", _KERNEL_ARGUMENTS + tsc]
            command += ["-chardev", f"file,id=console,append=on,path={given.path(console)}"]
            with agent_end, control_end:
                await self.launch(template, command, given, self.uid)
            try:
                await vm.hello(agent, vm.boot_limit_s(layout.accelerator))
            except SandboxUnavailableError as error:
                said = _last_line(console) or template.said()
                raise SandboxUnavailableError(f"{error} ({layout.accelerator}): {said}") from None
            monitor = Monitor(control)
            await monitor.ignore_shared_memory()
            await monitor.migrate(devices)
            await self.kill()
            vm_state.seal(memory)
            vm_state.seal(devices)
        except BaseException:
            vm_state.close_all([memory, devices])
            raise
        finally:
            agent.close()
            control.close()
            vm_state.close_all([*opened, console, *self._opened])
        return State(memory, devices)

    async def go_on(
        self, template: WarmTemplate, layout: Layout, state: State, codes: list[bytes], snapshot: bytes
    ) -> None:
        """Be a sandbox that begins with a state. Called once, by the substrate."""
        self.platform = f"microvm ({layout.accelerator})"
        agent, agent_end = socket.socketpair()
        control, control_end = socket.socketpair()
        devices = vm_state.again(state.devices)
        try:
            given = Given()
            command = self._command(layout, given, agent_end, control_end, state.memory, is_shared=False)
            command += ["-chardev", "null,id=console", "-incoming", "defer"]
            number = given.number(devices)
            with agent_end, control_end:
                await self.launch(template, command, given, self.uid)
        except BaseException:
            agent.close()
            control.close()
            raise
        finally:
            vm_state.close_all([devices, *self._opened])
        self._monitor = Monitor(control)
        await self._monitor.ignore_shared_memory()
        await self._monitor.ask("migrate-incoming", uri=f"fd:{number}")
        layers = [serial for serial, _ in reversed(layout.disks) if serial != SYSTEM] or [SYSTEM]
        await self.wake(template, agent, layers, codes, snapshot)

    def _command(
        self,
        layout: Layout,
        given: Given,
        agent: socket.socket,
        control: socket.socket,
        memory: int,
        *,
        is_shared: bool,
    ) -> list[str]:
        """QEMU and those of its arguments that a machine has whenever it runs."""
        share = "on" if is_shared else "off"
        size = layout.memory_bytes // MIB
        command = [layout.program, "-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"]
        command += ["-sandbox", _SANDBOX]
        command += ["-machine", "microvm,acpi=on,memory-backend=ram", "-smp", "1", "-m", f"{size}M"]
        command += ["-object", f"memory-backend-file,id=ram,size={size}M,mem-path={given.path(memory)},share={share}"]
        if layout.accelerator == "kvm":
            command += ["-accel", "kvm", "-cpu", "host"]
        else:
            command += ["-accel", "tcg,thread=single,tb-size=64", "-cpu", "max,la57=off"]
        command += ["-serial", "chardev:console", "-device", "virtio-serial-device,max_ports=2"]
        command += ["-chardev", f"socket,id=agent,fd={given.number(agent.fileno())}"]
        command += ["-device", "virtserialport,chardev=agent,name=agent"]
        command += ["-chardev", f"socket,id=monitor,fd={given.number(control.fileno())}"]
        command += ["-mon", "chardev=monitor,mode=control"]
        self._opened = vm.files_as([path for _, path in layout.disks])
        for number, ((serial, _), disk) in enumerate(zip(layout.disks, self._opened, strict=True)):
            file = f"file.driver=file,file.locking=off,file.filename={given.path(disk)}"
            command += ["-blockdev", f"driver=raw,node-name=disk{number},read-only=on,{file}"]
            command += ["-device", f"virtio-blk-device,drive=disk{number},serial={serial}"]
        return command


def _last_line(console: int) -> str:
    """What a machine's console has said last."""
    size = os.fstat(console).st_size
    data = os.pread(console, _CONSOLE_BYTES, max(size - _CONSOLE_BYTES, 0)).decode("utf-8", "replace")
    lines: Sequence[str] = [line.strip() for line in data.splitlines() if line.strip()]
    return lines[-1] if lines else ""
