"""Proves: how a boot fails is told apart: by its accelerator, which another one may do better, or by something else.
Emulators here are processes made as real ones are, that say and do what those do; the last test has the real one, with
KVM, which this machine may have or not.
"""

import asyncio
import os
import signal
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from rollforward.sandbox import vm, vm_machine
from rollforward.sandbox.bubblewrap import interpreter
from rollforward.sandbox.errors import SandboxUnavailableError
from rollforward.sandbox.microvm import MicroVm
from rollforward.sandbox.types import ExecStatus, SandboxSpec
from rollforward.sandbox.vm_machine import BootError
from tests.helpers.containers import SMALL
from tests.helpers.machines import MachineWorld

pytestmark = pytest.mark.timeout(300)
SPEC = SandboxSpec(substrate="microvm", limits=SMALL)
SAID = "import sys; print({said!r}, file=sys.stderr); sys.exit(1)"
ABORTED = (
    "qemu-system-x86_64: error: failed to set MSR 0x10a to 0x0\n"
    "qemu-system-x86_64: ../target/i386/kvm/kvm.c:2893: kvm_buf_set_msrs: Assertion `ret == cpu->n' failed."
)
LIVES = "import time; time.sleep(600)"
GREEDY = "x = []\nwhile True: x.append(bytearray(b'x') * (64 << 20))"


class Scripted(MicroVm):
    """Its emulator is a script."""

    script = ""

    def hardware(self, *_: Any) -> Sequence[str]:  # type: ignore[override]
        return [interpreter(), "-PsSB", "-c", self.script]


@pytest.fixture(scope="module")
def world() -> Iterator[MachineWorld]:
    with MachineWorld("microvm") as world:
        yield world


def boot(world: MachineWorld, script: str, meanwhile: Any = None) -> SandboxUnavailableError:
    """How it fails."""
    substrate = world.substrate
    world.number += 1

    async def go() -> None:
        template = await substrate._warm()
        machine = substrate.make(f"b-{world.number}", SPEC, substrate.layout(SPEC, "kvm"))
        machine.__class__ = Scripted
        machine.script = script  # type: ignore[attr-defined]
        booting = asyncio.ensure_future(machine.boot(template, substrate.booted_with))
        try:
            if meanwhile is not None:
                while machine.pid < 0:
                    await asyncio.sleep(0.005)
                await meanwhile(machine, template)
            await booting
        finally:
            await machine.kill()

    with pytest.raises(SandboxUnavailableError) as raised:
        world.do(go())
    return raised.value


@pytest.mark.parametrize(
    "script",
    [
        pytest.param("pass", id="without a word"),
        pytest.param(SAID.format(said="qemu: failed to initialize kvm: Device or resource busy"), id="busy"),
        pytest.param(SAID.format(said=ABORTED), id="aborted"),
        pytest.param(SAID.format(said="qemu: warning: host doesn't support requested feature"), id="with a warning"),
        pytest.param(LIVES, id="not in time"),
    ],
)
def test_a_boot_that_its_accelerator_does_not_bring_to_an_end(
    world: MachineWorld, monkeypatch: pytest.MonkeyPatch, script: str
) -> None:
    if script == LIVES:
        monkeypatch.setitem(vm_machine._BOOT_S, "kvm", 0.5)
    assert isinstance(boot(world, script), BootError)


@pytest.mark.parametrize(
    "said",
    [
        "qemu: cannot set up guest memory 'ram': Cannot allocate memory",
        "qemu: kvm_init_vcpu failed: Cannot allocate memory",
        "qemu: ioctl(KVM_CREATE_VM) failed: 24 Too many open files",
        "qemu: -blockdev driver=raw: Could not open '/proc/self/fd/9': Permission denied",
    ],
)
def test_a_boot_that_lacks_something_is_not_its_accelerators_doing(world: MachineWorld, said: str) -> None:
    error = boot(world, SAID.format(said=said))
    assert not isinstance(error, BootError)
    assert said in str(error)


def test_a_boot_that_is_broken_off_is_not_its_accelerators_doing(world: MachineWorld) -> None:
    async def close(machine: Scripted, _: object) -> None:
        await machine.kill()

    async def end(_: Scripted, template: Any) -> None:
        os.kill(template.pid, signal.SIGKILL)

    for meanwhile in (close, end):
        assert not isinstance(boot(world, LIVES, meanwhile), BootError)


def test_a_boot_that_has_no_memory_left_is_not_its_accelerators_doing(world: MachineWorld) -> None:
    if world.substrate._hierarchies.memory is None:
        pytest.skip("control groups do not limit memory here")
    assert not isinstance(boot(world, GREEDY), BootError)


def test_where_the_real_one_cannot_use_kvm_it_does_without(monkeypatch: pytest.MonkeyPatch) -> None:
    if vm.accelerators()[0] == "kvm":
        pytest.skip("this machine has what KVM needs")
    monkeypatch.setattr(vm, "accelerators", lambda: ["kvm", "tcg"])
    with MachineWorld("microvm") as world:
        machine = world.create()
        assert machine.platform == "microvm (tcg)"
        assert world.sh(machine, "true").status == ExecStatus.OK
        assert world.substrate._accelerators == ["tcg"]
