"""Proves: an accelerator is given up only where a boot with it fails and one with the next does not, whatever else
goes wrong; few states are kept, the last ones asked for; none of their descriptors is left open; and what was killed
and does not end is buried while its substrate lives.

Emulators are scripted here; that real ones boot, wait and go on is proven in test_machines.py, and how a boot fails in
test_machine_boots.py.
"""

import asyncio
import errno
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from rollforward.sandbox import burials, cgroups, instance, vm, vm_cache, vm_state
from rollforward.sandbox.errors import SandboxUnavailableError
from rollforward.sandbox.images import Images
from rollforward.sandbox.microvm import MicroVm, MicroVmSubstrate
from rollforward.sandbox.types import SandboxSpec
from rollforward.sandbox.vm import Layout
from rollforward.sandbox.vm_machine import BootError
from rollforward.sandbox.vm_state import State, Whole
from tests.helpers.containers import SMALL

SPEC = SandboxSpec(substrate="microvm", limits=SMALL)


class ScriptedVm(MicroVm):
    """Boots by script."""

    async def boot(self, template: Any, boot: "Scripted") -> State:
        boot.booted.append(self.layout.accelerator)
        if (error := boot.fails(self.layout.accelerator)) is not None:
            raise error
        await boot.may.wait()
        boot.state = State(vm_state.file_of([b"memory"]), vm_state.file_of([b"devices"]))
        return boot.state


class Scripted(MicroVmSubstrate):
    """Its machines boot by script; everything else is real."""

    def __init__(self, fails: Callable[[str], Exception | None] = lambda _: None) -> None:
        super().__init__(Images({}), label=f"test-{os.getpid()}", max_sandboxes=2)
        self.fails, self.booted, self.may = fails, list[str](), asyncio.Event()
        self.may.set()
        self.state = State(-1, -1)
        self._boot = self  # type: ignore[assignment] # a machine is told by whom it boots
        self.template: Any = SimpleNamespace(died=asyncio.get_running_loop().create_future())

    @property
    def accelerators(self) -> list[str]:
        return self._accelerators

    def layout(self, spec: SandboxSpec, accelerator: str) -> Layout:
        return Layout("/bin/true", accelerator, vm.guest_bytes(spec), (), "")

    def new(self, sandbox_id: str, spec: SandboxSpec, layout: Layout, make_group: Any, forget: Any) -> MicroVm:
        return ScriptedVm(sandbox_id, spec, layout, make_group, forget)

    async def _warm(self) -> Any:
        return self.template

    async def ask(self, spec: SandboxSpec = SPEC) -> State:
        return (await self._state(self.template, spec))[1]


@pytest.fixture(autouse=True)
def _machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vm_cache, "CACHE", tmp_path / "cache")
    monkeypatch.setattr(vm, "accelerators", lambda: ["kvm", "tcg"])


def open_files() -> set[str]:
    """Files without a name that this process has open, but for directories that it holds."""
    names = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
    return {name for name in names if "memfd" in (os.readlink(name) if os.path.lexists(name) else "")}


def larger(number: int) -> SandboxSpec:
    limits = msgspec.structs.replace(SMALL, memory_bytes=SMALL.memory_bytes + number * (64 << 20))
    return msgspec.structs.replace(SPEC, limits=limits)


NOT_BOOTED = BootError("sandbox: a machine did not boot")


def test_an_accelerator_that_boots_nothing_is_given_up() -> None:
    async def go() -> None:
        substrate = Scripted(lambda accelerator: NOT_BOOTED if accelerator == "kvm" else None)
        vm_state.close_all(await substrate.ask())
        assert substrate.booted == ["kvm", "tcg"]
        assert substrate.accelerators == ["tcg"]
        substrate.fails = lambda _: NOT_BOOTED
        with pytest.raises(SandboxUnavailableError, match="did not boot"):
            await substrate.ask(larger(1))
        assert substrate.accelerators == ["tcg"]
        await substrate.close()

    asyncio.run(go())


def test_where_none_boots_a_state_it_is_no_accelerators_doing() -> None:
    async def go() -> None:
        substrate = Scripted(lambda _: NOT_BOOTED)
        with pytest.raises(SandboxUnavailableError, match="did not boot"):
            await substrate.ask()
        assert substrate.booted == ["kvm", "tcg"]
        substrate.fails = lambda _: None
        vm_state.close_all(await substrate.ask())
        assert substrate.booted == ["kvm", "tcg", "kvm"]
        assert substrate.accelerators == ["kvm", "tcg"]
        await substrate.close()

    asyncio.run(go())


TROUBLE: dict[str, Exception] = {
    "memory": SandboxUnavailableError("sandbox: a machine's memory cannot be copied: Cannot allocate memory"),
    "disk": OSError(errno.ENOSPC, "No space left on device"),
    "file": FileNotFoundError(errno.ENOENT, "No such file or directory"),
}


@pytest.mark.parametrize("trouble", ["room", "cache", "load", "cancelled", *TROUBLE])
def test_whatever_else_goes_wrong_is_told_and_leaves_accelerators_and_descriptors(
    monkeypatch: pytest.MonkeyPatch, trouble: str
) -> None:
    def fail(*_: object) -> Any:
        raise SandboxUnavailableError("sandbox: no room in the cache")

    async def go() -> None:
        substrate = Scripted(lambda _: TROUBLE.get(trouble))
        before = open_files()
        with monkeypatch.context() as patch:
            if trouble == "room":
                for number in range(2):
                    substrate.make(f"m-{number}", SPEC, substrate.layout(SPEC, "kvm"))
            elif trouble == "cache":
                patch.setattr(vm_cache, "prepared", fail)
            elif trouble == "load":
                patch.setattr(vm_cache, "found", lambda *_: Path("/nowhere"))
            elif trouble == "cancelled":
                substrate.may.clear()
                asyncio.get_running_loop().call_later(0.1, asyncio.current_task().cancel)  # type: ignore[union-attr]
            with pytest.raises(asyncio.CancelledError if trouble == "cancelled" else SandboxUnavailableError):
                await substrate.create("m", SPEC)
        assert "tcg" not in substrate.booted
        assert substrate.accelerators == ["kvm", "tcg"]
        assert open_files() == before
        await substrate.close()

    asyncio.run(go())


def test_one_that_is_closed_while_it_boots_a_state_keeps_none() -> None:
    async def go() -> None:
        substrate, before = Scripted(), open_files()
        substrate.may.clear()
        asking = asyncio.ensure_future(substrate.ask())
        while not substrate.booted:
            await asyncio.sleep(0.001)
        await substrate.close()
        substrate.may.set()
        with pytest.raises(SandboxUnavailableError, match="closed"):
            await asking
        assert substrate.accelerators == ["kvm", "tcg"]
        with pytest.raises(SandboxUnavailableError, match="closed"):
            substrate.make("m", SPEC, substrate.layout(SPEC, "tcg"))
        assert open_files() == before

    asyncio.run(go())


def test_what_does_not_end_is_buried_when_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(instance, "_REMOVE_TRIES", 2)
    monkeypatch.setattr(burials, "_AGAIN_S", 0.01)
    remove, is_stuck = cgroups.Group.remove, True

    async def go() -> None:
        nonlocal is_stuck
        monkeypatch.setattr(cgroups.Group, "remove", lambda group: not is_stuck and remove(group))
        substrate = Scripted()
        vm_state.close_all(await substrate.ask())
        left = substrate.left("boot-1")
        assert left is not None
        await asyncio.sleep(0.05)
        assert substrate.left("boot-1") is left, "its user is nobody else's"
        is_stuck = False
        async with asyncio.timeout(5.0):
            while substrate.left("boot-1") is not None:
                await asyncio.sleep(0.01)
        assert [path for path in left.cgroup if path.exists()] == []
        for number in range(2):  # there is room again
            substrate.make(f"m-{number}", SPEC, substrate.layout(SPEC, "kvm"))
        await substrate.close()

    asyncio.run(go())


def test_one_that_cannot_begin_leaves_no_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    async def go() -> None:
        substrate = Scripted()
        machine = substrate.make("m", SPEC, substrate.layout(SPEC, "tcg"))
        absent: Any = SimpleNamespace(kernel=Path("/nowhere/kernel"), initial=Path("/nowhere/initial"))
        devices = memoryview(b"devices")
        saved = Whole(runs=[], memory=memoryview(b""), devices=devices, disk=memoryview(b""))
        before = open_files()
        with pytest.raises(SandboxUnavailableError, match="/nowhere/kernel cannot be read: No such file"):
            await MicroVm.boot(machine, substrate.template, absent)
        assert open_files() == before
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", full)
            with pytest.raises(SandboxUnavailableError, match="Make room"):
                await machine.go_on(substrate.template, saved)
        assert open_files() == before
        await substrate.close()

    asyncio.run(go())


def test_whoever_is_cancelled_while_a_state_is_kept_leaves_no_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    async def go() -> None:
        substrate, started, end = Scripted(), asyncio.Event(), asyncio.Event()
        loop, before = asyncio.get_running_loop(), open_files()
        read: list[bytes] = []

        def slow(kind: str, key: str, make: Callable[[Path], None]) -> None:
            loop.call_soon_threadsafe(started.set)
            asyncio.run_coroutine_threadsafe(end.wait(), loop).result()
            read.extend(vm_state.content(substrate.state.devices, 99))

        monkeypatch.setattr(vm_cache, "prepared", slow)
        asking = asyncio.ensure_future(substrate.ask())
        await started.wait()
        asking.cancel()
        loop.call_later(0.05, end.set)
        with pytest.raises(asyncio.CancelledError):
            await asking
        assert read == [b"devices"], "its descriptors were open as long as they were read"
        assert open_files() == before
        await substrate.close()

    asyncio.run(go())


def test_the_last_states_are_kept_and_those_that_were_handed_out_stay() -> None:
    async def go() -> None:
        before = open_files()
        substrate = Scripted()
        given = [await substrate.ask(larger(number)) for number in range(5)]
        assert len(open_files() - before) == 2 * (5 + 4)
        vm_state.close_all(await substrate.ask(larger(1)))
        assert len(substrate.booted) == 5, "it is kept"
        vm_state.close_all(await substrate.ask(larger(0)))
        assert len(substrate.booted) == 5, "let go, and in the user's cache"
        assert [vm_state.content(state.devices, 99) for state in given] == [[b"devices"]] * 5
        for state in given:
            vm_state.close_all(state)
        await substrate.close()
        assert open_files() == before

    asyncio.run(go())
