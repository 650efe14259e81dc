"""A virtual machine that begins as a copy of a state: booted or prepared here, or saved anywhere.

boot, prepare    an emulator whose memory is a file that is shared with it: of it come devices and disk alone
begin, fork      an emulator that maps such a file privately, and is handed a disk of its own with what was written
take             the pages of its own memory, the devices, and the disk, as one record
go_on            a file is filled with these pages while an emulator comes up, and then it is a fork
"""

import asyncio
import contextlib
import os
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import Final

from rollforward.sandbox import vm, vm_cache, vm_image, vm_state
from rollforward.sandbox.errors import SandboxGoneError, SandboxUnavailableError
from rollforward.sandbox.refusals import refusals
from rollforward.sandbox.unbroken import in_thread, to_its_end
from rollforward.sandbox.vm import MIB, Given
from rollforward.sandbox.vm_keeper import Keeper
from rollforward.sandbox.vm_machine import BootError, Machine, Wires
from rollforward.sandbox.vm_monitor import Monitor
from rollforward.sandbox.vm_state import State, Whole
from rollforward.sandbox.vm_stream import BLOCK
from rollforward.sandbox.warm_template import WarmTemplate

_MAX_DISK_BYTES: Final = 1 << 30
"""What is written to a disk before it is a sandbox's is far less."""


class ForkedMachine(Machine):
    """One of either kind. Made by a substrate's `create`."""

    _disk = -1
    """Descriptor of the file of the disk that it can write; -1: it has none."""

    @abstractmethod
    def hardware(self, given: Given, wires: Wires, files: Sequence[int], disk: int) -> list[str]:
        """QEMU and those of its arguments that a machine has whenever it runs, but for its memory, the object `ram`.

        Args:
            given: what it is handed.
            wires: its sockets.
            files: descriptors of `files`.
            disk: of the disk that it can write; -1: none.
        """
        raise NotImplementedError

    def files(self) -> list[str]:
        """Paths of what it reads: the layout's disks, in their order."""
        return [disk.path for disk in self.layout.disks]

    def new_disk(self) -> bytes:
        """What the file of the disk that it can write holds before it boots; nothing: it has none."""
        return b""

    async def boot(self, template: WarmTemplate, boot: vm_image.Boot) -> State:
        """Boot it until it waits to be woken; its state.

        Raises:
            BootError: see `booted`.
            SandboxUnavailableError: it does not come up.
        """
        with contextlib.ExitStack() as stack:
            opened = vm.files_as([str(boot.kernel), str(boot.initial)])
            stack.callback(vm_state.close_all, opened)
            console = vm_state.memory_file(0)
            stack.callback(os.close, console)
            wires = Wires()
            stack.callback(wires.close)
            with vm_state.closing_all() as kept:
                kept.append(vm_state.memory_file(self.layout.memory_bytes))
                given = Given()
                more = vm.boot_arguments(self.layout, given, opened[0], opened[1], console)
                await self._start(template, wires, given, more, (kept[0], "on"), [self.new_disk()])
                await self.booted(Keeper(wires.keeper), template, console)
                try:
                    monitor = Monitor(wires.monitor)
                    await monitor.ignore_shared_memory()
                    return await self._end_as_state(monitor, kept[0])
                except SandboxUnavailableError as error:
                    if self.is_its_accelerators(f"{error} {self._words()}"):
                        raise BootError(str(error)) from None
                    raise

    async def begin(self, template: WarmTemplate, state: State, codes: list[bytes], snapshot: bytes) -> None:
        """Be a sandbox that begins with a state. Called once, by the substrate."""
        await self.wake(await self._take_up(template, state, "off"), template, codes, snapshot)

    async def prepare(self, template: WarmTemplate, state: State, codes: list[bytes]) -> State:
        """Be a sandbox that begins with a state, until it waits for its first command; the state that it is in then.

        Raises:
            SandboxUnavailableError: it does not come to that, or would not be as new.
        """
        with vm_state.closing_all() as kept:
            kept.append(await in_thread(lambda: vm_state.copy(state.memory, self.layout.memory_bytes)))
            begin = state._replace(memory=kept[0])
            await self.wake(await self._take_up(template, begin, "on"), template, codes, b"")
            try:
                await self.rehearse()
                assert self._monitor is not None
                async with self.quiet():
                    return await self._end_as_state(self._monitor, kept[0])
            except SandboxGoneError as error:
                raise SandboxUnavailableError(
                    f"sandbox: a machine ended while it was prepared ({error.cause.value}): {self.said(template)}"
                ) from None

    async def fork(self, template: WarmTemplate, state: State) -> None:
        """Be a sandbox that goes on from what `prepare` has made. Called once, by the substrate."""
        await self.rejoin(await self._take_up(template, state, "off"), template)

    async def go_on(self, template: WarmTemplate, saved: Whole) -> None:
        """Be a sandbox that goes on. Called once, by the substrate.

        Raises:
            SandboxFileError: what was saved is no such machine.
            SandboxUnavailableError: it does not go on.
        """
        size = self.layout.memory_bytes
        with contextlib.ExitStack() as stack:
            devices = vm_state.file_of([saved.devices])
            stack.callback(os.close, devices)
            memory = vm_state.memory_file(size)
            stack.callback(os.close, memory)
            filling = asyncio.create_task(in_thread(lambda: vm_state.fill(memory, saved, size)))
            try:
                wires = await self._come_up(template, (memory, "off"), devices, [saved.disk], filling)
                assert self._monitor is not None
                with self.telling(template):
                    await self._monitor.wait_until_loaded()
                    await self._monitor.ask("cont")
            finally:
                await to_its_end(asyncio.gather(filling, return_exceptions=True))
        await self.rejoin(wires, template)

    async def take(self, monitor: Monitor, stream: int, max_bytes: int) -> list[bytes]:
        """See `Machine`."""
        disk = os.dup(self._disk) if self._disk >= 0 else -1  # whoever kills it meanwhile closes the other one
        try:
            await monitor.hurry()
            await monitor.migrate(stream)
            vm_state.check_size(os.fstat(stream).st_size, max_bytes)
            return await in_thread(lambda: vm_state.content(disk, max_bytes)) if disk >= 0 else []
        finally:
            vm_state.close_all([disk])

    def _let_go(self) -> None:
        """See `Instance`."""
        super()._let_go()
        if self._disk >= 0:
            os.close(self._disk)
            self._disk = -1

    async def _end_as_state(self, monitor: Monitor, memory: int) -> State:
        """Kill it; the state that it was in, whose memory is a file that it shares."""
        with vm_state.closing_all() as kept:
            kept.append(vm_state.memory_file(0))
            await monitor.migrate(kept[0])  # it runs to the last moment, so what begins with it runs at once
            if self._disk >= 0:
                written = await in_thread(lambda: vm_state.content(self._disk, _MAX_DISK_BYTES))
                kept.append(vm_state.file_of(written))
            await self.kill()
            return vm_state.sealed(State(memory, *kept))

    def _make_disk(self, parts: Iterable[bytes | memoryview]) -> None:
        self._disk = nameless_file(parts)

    async def _take_up(self, template: WarmTemplate, state: State, share: str) -> Wires:
        disk = await in_thread(lambda: vm_state.content(state.disk, _MAX_DISK_BYTES)) if state.disk >= 0 else []
        return await self._come_up(template, (state.memory, share), state.devices, disk)

    async def _come_up(
        self,
        template: WarmTemplate,
        memory: tuple[int, str],
        devices: int,
        disk: Sequence[bytes | memoryview],
        filling: "asyncio.Task[None] | None" = None,
    ) -> Wires:
        """Start an emulator that takes up a state, once its memory is filled."""
        stream = vm_state.again(devices)
        try:
            wires, given = Wires(), Given()
            try:
                number = given.number(stream)
                more = ["-chardev", "null,id=console", "-incoming", "defer"]
                await self._start(template, wires, given, more, memory, disk)
                self._monitor = Monitor(wires.monitor)
                with self.telling(template):
                    await self._monitor.ignore_shared_memory()
                    if filling is not None:
                        await asyncio.shield(filling)
                    await self._monitor.ask("migrate-incoming", uri=f"fd:{number}")
            except BaseException:
                wires.close()
                raise
        finally:
            os.close(stream)
        return wires

    async def _start(
        self,
        template: WarmTemplate,
        wires: Wires,
        given: Given,
        more: Sequence[str],
        memory: tuple[int, str],
        disk: Sequence[bytes | memoryview],
    ) -> None:
        """Start an emulator; of `memory`: a descriptor, and whether what it writes there is seen by others."""
        if any(map(len, disk)):
            await in_thread(lambda: self._make_disk(disk))
        opened = vm.files_as(self.files())
        try:
            command = self.hardware(given, wires, opened, self._disk)
            path, share, size = given.path(memory[0]), memory[1], self.layout.memory_bytes // MIB
            command += ["-object", f"memory-backend-file,id={BLOCK},mem-path={path},share={share},size={size}M"]
            with wires:
                await self.launch(template, [*command, *more], given)
        finally:
            vm_state.close_all(opened)


def nameless_file(parts: Iterable[bytes | memoryview]) -> int:
    """A descriptor of a file on disk that is gone with the last who has it open; an emulator may write it.

    Args:
        parts: what it holds.

    Raises:
        SandboxUnavailableError: there is no room.
    """
    with refusals(f"a disk cannot be made in {vm_cache.CACHE}"), vm_state.closing_all() as opened:
        opened.append(os.open(vm_cache.CACHE, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600))
        os.fchmod(opened[0], 0o666)
        vm_state.write_parts(opened[0], parts)
    return opened[0]
