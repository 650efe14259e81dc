"""A virtual machine that begins as a copy of a state: booted or prepared here, or saved anywhere.

boot, prepare    an emulator whose memory is a file that is shared with it: of it come devices and disk alone
begin, fork      an emulator that maps such a file privately, and is handed a disk of its own with what was written
take             the pages of its own memory, the devices, and the disk, as one record
go_on            a file is filled with these pages while an emulator comes up, and then it is a fork
"""

import asyncio
import os
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

from rollforward.sandbox import vm, vm_cache, vm_image, vm_state
from rollforward.sandbox.errors import SandboxUnavailableError
from rollforward.sandbox.files import last_line, write_all
from rollforward.sandbox.vm import MIB, Given
from rollforward.sandbox.vm_machine import Machine, Wires
from rollforward.sandbox.vm_monitor import Monitor
from rollforward.sandbox.vm_state import State, Whole
from rollforward.sandbox.vm_stream import BLOCK
from rollforward.sandbox.warm_template import WarmTemplate

_T = TypeVar("_T")
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
            SandboxUnavailableError: it does not come up in time.
        """
        opened, wires = vm.files_as([str(boot.kernel), str(boot.initial)]), Wires()
        memory, console = vm_state.memory_file(self.layout.memory_bytes), vm_state.memory_file(0)
        try:
            given = Given()
            more = vm.boot_arguments(self.layout, given, opened[0], opened[1], console)
            await self._start(template, wires, given, more, (memory, "on"), self.new_disk())
            try:
                await self.booted(wires.keeper)
            except SandboxUnavailableError as error:
                said = last_line(console) or self.said(template)
                raise SandboxUnavailableError(f"{error} ({self.layout.accelerator}): {said}") from None
            monitor = Monitor(wires.monitor)
            await monitor.ignore_shared_memory()
            return await self._end_as_state(monitor, memory)
        except BaseException:
            os.close(memory)
            raise
        finally:
            wires.close()
            vm_state.close_all([*opened, console])

    async def begin(self, template: WarmTemplate, state: State, codes: list[bytes], snapshot: bytes) -> None:
        """Be a sandbox that begins with a state. Called once, by the substrate."""
        await self.wake(await self._take_up(template, state, "off"), template, codes, snapshot)

    async def prepare(self, template: WarmTemplate, state: State, codes: list[bytes]) -> State:
        """Be a sandbox that begins with a state, until it waits for its first command; the state that it is in then.

        Raises:
            SandboxUnavailableError: it does not come to that, or would not be as new.
        """
        memory = vm_state.copy(state.memory, self.layout.memory_bytes)
        try:
            await self.wake(await self._take_up(template, state._replace(memory=memory), "on"), template, codes, b"")
            await self.rehearse()
            assert self._monitor is not None
            async with self.quiet():
                return await self._end_as_state(self._monitor, memory)
        except BaseException:
            os.close(memory)
            raise

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
        devices, memory = vm_state.file_of(saved.devices), vm_state.memory_file(size)
        filling = asyncio.create_task(_in_thread(lambda: vm_state.fill(memory, saved, size)))
        try:
            wires = await self._come_up(template, (memory, "off"), devices, saved.disk, filling)
            assert self._monitor is not None
            with self.telling(template):
                await self._monitor.wait_until_loaded()
                await self._monitor.ask("cont")
        finally:
            await asyncio.gather(filling, return_exceptions=True)
            vm_state.close_all([memory, devices])
        await self.rejoin(wires, template)

    async def take(self, monitor: Monitor, max_bytes: int) -> Whole:
        """See `Machine`."""
        stream = vm_state.memory_file(0)
        disk = os.dup(self._disk) if self._disk >= 0 else -1  # whoever kills it meanwhile closes the other one
        try:
            await monitor.hurry()
            await monitor.migrate(stream)
            return await _in_thread(lambda: vm_state.whole(stream, disk, max_bytes))
        finally:
            vm_state.close_all([stream, disk])

    async def kill(self) -> None:
        """See `Instance`."""
        await super().kill()
        if self.is_gone and self._disk >= 0:
            os.close(self._disk)
            self._disk = -1

    async def _end_as_state(self, monitor: Monitor, memory: int) -> State:
        """Kill it; the state that it was in, whose memory is a file that it shares."""
        devices = vm_state.memory_file(0)
        disk = -1
        try:
            await monitor.migrate(devices)  # it runs to the last moment, so what begins with it runs at once
            if self._disk >= 0:
                disk = vm_state.file_of(vm_state.content(self._disk, _MAX_DISK_BYTES))
            await self.kill()
            return vm_state.sealed(State(memory, devices, disk))
        except BaseException:
            vm_state.close_all([devices, disk])
            raise

    def _make_disk(self, data: bytes | memoryview) -> None:
        self._disk = nameless_file(data)

    async def _take_up(self, template: WarmTemplate, state: State, share: str) -> Wires:
        disk = memoryview(vm_state.content(state.disk, _MAX_DISK_BYTES) if state.disk >= 0 else b"")
        return await self._come_up(template, (state.memory, share), state.devices, disk)

    async def _come_up(
        self,
        template: WarmTemplate,
        memory: tuple[int, str],
        devices: int,
        disk: memoryview,
        filling: "asyncio.Task[None] | None" = None,
    ) -> Wires:
        """Start an emulator that takes up a state, once its memory is filled."""
        wires, given, stream = Wires(), Given(), vm_state.again(devices)
        try:
            number = given.number(stream)
            await self._start(
                template, wires, given, ["-chardev", "null,id=console", "-incoming", "defer"], memory, disk
            )
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
        disk: bytes | memoryview,
    ) -> None:
        """Start an emulator; of `memory`: a descriptor, and whether what it writes there is seen by others."""
        if disk:
            await _in_thread(lambda: self._make_disk(disk))
        opened = vm.files_as(self.files())
        try:
            command = self.hardware(given, wires, opened, self._disk)
            path, share, size = given.path(memory[0]), memory[1], self.layout.memory_bytes // MIB
            command += ["-object", f"memory-backend-file,id={BLOCK},mem-path={path},share={share},size={size}M"]
            with wires:
                await self.launch(template, [*command, *more], given)
        finally:
            vm_state.close_all(opened)


def nameless_file(data: bytes | memoryview) -> int:
    """A descriptor of a file on disk that is gone with the last who has it open; an emulator may write it.

    Args:
        data: what it holds.

    Raises:
        SandboxUnavailableError: there is no room.
    """
    descriptor = -1
    try:
        descriptor = os.open(vm_cache.CACHE, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
        os.fchmod(descriptor, 0o666)
        write_all(descriptor, data)
    except OSError as error:
        vm_state.close_all([descriptor])
        raise SandboxUnavailableError(f"sandbox: a disk cannot be made in {vm_cache.CACHE}: {error.strerror}") from None
    return descriptor


async def _in_thread(work: Callable[[], _T]) -> _T:
    """Have a thread do something; whoever is cancelled meanwhile waits for its end, and so may close what it reads."""
    working = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        return await asyncio.shield(working)
    except BaseException:
        await asyncio.wait([working])
        raise
