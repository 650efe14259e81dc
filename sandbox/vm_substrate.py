"""What both substrates of virtual machines do: keep a template of emulators, boot or load states, make machines of
them.
"""

import asyncio
import contextlib
import functools
from abc import abstractmethod
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable
from typing import Final, Generic, TypeVar

from rollforward.sandbox import cgroups, vm, vm_cache, vm_image, vm_kernel, vm_state
from rollforward.sandbox.burials import Burials
from rollforward.sandbox.errors import SandboxUnavailableError
from rollforward.sandbox.host import HostReport, probe
from rollforward.sandbox.images import Images
from rollforward.sandbox.instance import tool_code
from rollforward.sandbox.refusals import refusals
from rollforward.sandbox.types import SandboxSpec
from rollforward.sandbox.unbroken import in_thread, left_alone
from rollforward.sandbox.vm import Disk, Layout
from rollforward.sandbox.vm_forked import ForkedMachine
from rollforward.sandbox.vm_machine import SYSTEM, BootError, saved_whole, spec_key
from rollforward.sandbox.vm_state import State, Whole, close_all, share
from rollforward.sandbox.warm_template import USERS, WarmTemplate

_MAX_STATES: Final = 4
"""States that a supervisor keeps, of layouts that have booted, and as many of kinds of sandboxes; the last ones asked
for."""

MachineT = TypeVar("MachineT", bound=ForkedMachine)
KeyT = TypeVar("KeyT")


class MachineSubstrate(Generic[MachineT]):
    """Makes virtual machines. Belongs to one event loop, whose thread must live as long as they shall.

    Args:
        images: what they can be made of.
        label: part of the names of control groups.
        max_sandboxes: at one time.
    """

    kind = ""
    """Names what it keeps in the user's cache."""

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
        self._program = ""
        self._states: OrderedDict[Layout, State] = OrderedDict()
        self._prepared: OrderedDict[tuple[Layout, str], State] = OrderedDict()
        self._starting, self._booting, self._preparing = asyncio.Lock(), asyncio.Lock(), asyncio.Lock()
        self._machines: dict[str, MachineT] = {}
        self._accelerators = vm.accelerators()
        self._number = 0
        self._burials = Burials()
        self._is_closed = False

    async def start(self) -> HostReport:
        """See `Substrate`."""
        with refusals("machines cannot be made"):
            self._program = vm.find_qemu()
            self._boot = await left_alone(lambda: vm_image.build(vm_kernel.find_kernel()))
            await self._warm()
            return probe(self._hierarchies)

    async def create(
        self, sandbox_id: str, spec: SandboxSpec, *, snapshot: bytes | None = None, saved: bytes | None = None
    ) -> MachineT:
        """See `Substrate`.

        Args:
            sandbox_id: see `Substrate`.
            spec: likewise.
            snapshot: likewise.
            saved: a whole machine to go on with, which `Machine.save` gave.
        """
        codes = [tool_code(tool) for tool in spec.tools]
        if sandbox_id in self._machines:
            raise ValueError(f"there is a machine {sandbox_id!r}; kill it first")
        with refusals("a machine cannot be made"):
            template = await self._warm()
            if saved is not None:
                layout, whole = await self._saved(saved, spec)
                async with self._making(sandbox_id, spec, layout) as machine:
                    await machine.go_on(template, whole)
                return machine
            layout, state = await self._state(template, spec)
            try:
                async with self._making(sandbox_id, spec, layout) as machine:
                    if snapshot:
                        await machine.begin(template, state, codes, snapshot)
                    else:
                        prepared = await self._prepare(machine, template, state, codes)
                        try:
                            await machine.fork(template, prepared)
                        finally:
                            close_all(prepared)
            finally:
                close_all(state)
            return machine

    def left(self, sandbox_id: str) -> MachineT | None:
        """See `Substrate`."""
        return self._machines.get(sandbox_id)

    async def close(self) -> None:
        """See `Substrate`."""
        self._is_closed = True
        await self._burials.close()
        await asyncio.gather(*(machine.kill() for machine in list(self._machines.values())))
        if self._template is not None:
            self._template.close()
            self._template = None
        for state in (*self._states.values(), *self._prepared.values()):
            close_all(state)
        self._states.clear()
        self._prepared.clear()

    @abstractmethod
    def layout(self, spec: SandboxSpec, accelerator: str) -> Layout:
        """Which machine a sandbox is. May take a while."""
        raise NotImplementedError

    @abstractmethod
    def new(self, sandbox_id: str, spec: SandboxSpec, layout: Layout, make_group: object, forget: object) -> MachineT:
        """A machine that nothing runs of yet; arguments as of `Machine`."""
        raise NotImplementedError

    def disks(self, image: str) -> tuple[Disk, ...]:
        """A machine's disks that it cannot write: the system's, and an image's layers, the lowest first."""
        assert self._boot is not None
        layers = enumerate(self._images.layers(image))
        store = self._images.store
        found = [Disk(f"layer{n}", str(store.layer_file(layer)), layer.digest) for n, layer in layers]
        return (Disk(SYSTEM, str(self._boot.system), self._boot.system_digest), *found)

    @property
    def booted_with(self) -> vm_image.Boot:
        """Kernel and initial file system; there once it is started."""
        assert self._boot is not None
        return self._boot

    @property
    def program(self) -> str:
        """Path of the emulator; there once it is started."""
        return self._program

    async def _warm(self) -> WarmTemplate:
        async with self._starting:
            self._check_open()
            if self._template is not None and self._template.died.done():
                self._template.close()
                self._template = None
            if self._template is None:
                more = ("--dev-bind-try", "/dev/kvm", "/dev/kvm") if "kvm" in self._accelerators else ()
                template = WarmTemplate(self._images, first_user=vm.FIRST_MACHINE_USER, more=more)
                try:
                    await template.wait()
                except BaseException:
                    template.close()
                    raise
                self._template = template
            return self._template

    def _check_open(self) -> None:
        if self._is_closed:
            raise SandboxUnavailableError("sandbox: the substrate is closed; make a new one")

    def make(self, sandbox_id: str, spec: SandboxSpec, layout: Layout) -> MachineT:
        """A machine with a user and a control group, that nothing runs of yet; it is in the substrate's care.

        Raises:
            SandboxUnavailableError: there is no room for it, or the substrate is closed.
        """
        self._check_open()
        if not self._users:
            raise SandboxUnavailableError("sandbox: there is no room for another machine; kill one first")
        uid = self._users.pop()

        def forget(machine: ForkedMachine) -> None:
            if self._machines.pop(machine.id, None) is not None:
                self._users.append(uid)

        make_group: Callable[[int, int], cgroups.Group] = functools.partial(
            cgroups.Group, self._hierarchies, self._label, sandbox_id
        )
        try:
            machine = self.new(sandbox_id, spec, layout, make_group, forget)
        except BaseException:
            self._users.append(uid)
            raise
        machine.uid = uid
        self._machines[sandbox_id] = machine
        return machine

    @contextlib.asynccontextmanager
    async def _making(self, sandbox_id: str, spec: SandboxSpec, layout: Layout) -> AsyncGenerator[MachineT]:
        """A machine that nothing runs of yet; killed where it comes to nothing."""
        machine = self.make(sandbox_id, spec, layout)
        machine.platform = f"{spec.substrate} ({layout.accelerator})"
        try:
            yield machine
        except BaseException:
            await machine.kill()
            raise

    async def _saved(self, saved: bytes, spec: SandboxSpec) -> tuple[Layout, Whole]:
        """A saved machine, and as which it goes on; nothing is booted for that.

        Raises:
            SandboxFileError: it is none, or goes on here as none.
        """
        ways = self._accelerators
        return saved_whole(saved, spec, [await asyncio.to_thread(self.layout, spec, way) for way in ways])

    async def _prepare(self, like: MachineT, template: WarmTemplate, state: State, codes: list[bytes]) -> State:
        """The state that sandboxes like this one are forked from, made if there is none yet; the caller releases it."""
        key = like.layout, spec_key(like.spec)
        async with self._preparing:
            if key not in self._prepared:
                machine = self.make(f"prepare-{like.id}", like.spec, like.layout)
                try:
                    self._keep(self._prepared, key, await machine.prepare(template, state, codes))
                finally:
                    await self._burials.end(machine)
            return self._latest(self._prepared, key)

    async def _state(self, template: WarmTemplate, spec: SandboxSpec) -> tuple[Layout, State]:
        """The state that machines of a spec go on from, made if there is none yet; the caller releases it. An
        accelerator that has not booted it is given up for good once another one has: it is there, and does not work.
        """
        async with self._booting:
            for number, accelerator in enumerate(self._accelerators, 1):
                layout = await asyncio.to_thread(self.layout, spec, accelerator)
                try:
                    if layout not in self._states:
                        self._keep(self._states, layout, await self._kept(template, layout, spec))
                except BootError:
                    if number == len(self._accelerators):
                        raise
                    continue
                self._accelerators = self._accelerators[number - 1 :]
                return layout, self._latest(self._states, layout)
            raise AssertionError("there is an accelerator, and the last one boots a state or is an error")

    async def _kept(self, template: WarmTemplate, layout: Layout, spec: SandboxSpec) -> State:
        """The state of this user's cache, booted if there is none."""
        assert self._boot is not None
        key = layout.key()
        if (home := await asyncio.to_thread(vm_cache.found, self.kind, key)) is not None:
            return await asyncio.to_thread(vm_state.load, home, layout.memory_bytes)
        self._number += 1
        machine = self.make(f"boot-{self._number}", spec, layout)
        try:
            state = await machine.boot(template, self._boot)
        finally:
            await self._burials.end(machine)
        try:
            await in_thread(lambda: vm_cache.prepared(self.kind, key, lambda scratch: vm_state.keep(state, scratch)))
        except BaseException:
            close_all(state)
            raise
        return state

    def _keep(self, states: OrderedDict[KeyT, State], key: KeyT, state: State) -> None:
        """Have a state that was made, unless there is nobody left who would close it."""
        if self._is_closed:
            close_all(state)
        self._check_open()
        states[key] = state

    def _latest(self, states: OrderedDict[KeyT, State], key: KeyT) -> State:
        """A state that is kept, shared; those that were asked for longest ago are let go."""
        states.move_to_end(key)
        while len(states) > _MAX_STATES:
            close_all(states.popitem(last=False)[1])
        return share(states[key])
