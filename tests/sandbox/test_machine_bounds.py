"""Proves: a full VM has as many disks as it says it has room for, and one more is refused; whatever its emulator or its
guest does, no file that it writes is longer than its machine needs.
"""

import asyncio
import errno
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from rollforward.sandbox import fullvm, qcow2
from rollforward.sandbox.bubblewrap import interpreter
from rollforward.sandbox.errors import SandboxUnavailableError
from rollforward.sandbox.fullvm import FullVm
from rollforward.sandbox.types import ExecStatus, SandboxSpec
from rollforward.sandbox.vm import MIB, Given, Layout
from rollforward.sandbox.vm_forked import ForkedMachine, nameless_file
from tests.helpers.containers import SMALL
from tests.helpers.leaks import own_descriptors
from tests.helpers.machines import MachineWorld

pytestmark = pytest.mark.timeout(300)
MOST = fullvm._MAX_DISKS - 1
HOSTILE = """
import os, signal, sys, time
signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # which the first process of a namespace does not die of
for attempt in (
    lambda: os.pwrite(3, b"x", 1 << 40),
    lambda: os.ftruncate(3, 1 << 40),
    lambda: os.posix_fallocate(3, 0, 1 << 40),
    lambda: [os.write(3, bytes(1 << 20)) for _ in range(100)],
):
    try:
        attempt()
    except OSError as error:
        print(error.errno, file=sys.stderr, flush=True)
print("done", file=sys.stderr, flush=True)
time.sleep(600)
"""


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MachineWorld]:
    layers = [tmp_path_factory.mktemp(f"layer{number}") for number in range(MOST + 1)]
    for number, layer in enumerate(layers):
        (layer / "data").mkdir()
        (layer / f"data/own{number}").write_text(str(number), encoding="utf-8")
        (layer / "data/last").write_text(str(number), encoding="utf-8")
    names = tuple(map(str, layers))
    with MachineWorld("fullvm", images={"most": names[:MOST], "more": names}) as world:
        yield world


def test_a_machine_has_as_many_disks_as_it_says_and_no_more(world: MachineWorld) -> None:
    machine = world.create(image="most")
    names = [*(f"/data/own{number}" for number in range(MOST)), "/data/last"]
    found = world.do(machine.download(names, max_bytes=MIB))
    assert [int(found[name]) for name in names] == [*range(MOST), MOST - 1]
    assert isinstance(machine, ForkedMachine)
    assert len(machine.layout.disks) == fullvm._MAX_DISKS
    world.do(machine.kill())
    with pytest.raises(SandboxUnavailableError, match=f"{MOST + 1} layers, .* room for {MOST}"):
        world.create(image="more")


def test_a_disk_that_is_too_large_is_refused(world: MachineWorld) -> None:
    limits = msgspec.structs.replace(SMALL, disk_bytes=qcow2.MAX_BYTES + 1)
    with pytest.raises(SandboxUnavailableError, match=r"limits\.disk_bytes is .* at most .* Lower it"):
        world.create(limits)


def test_an_emulator_that_writes_without_end_is_stopped_by_its_limit(world: MachineWorld) -> None:
    spec = SandboxSpec(substrate="fullvm", limits=SMALL)
    layout = world.substrate.layout(spec, "tcg")._replace(memory_bytes=MIB)
    disk, given = nameless_file([]), Given()

    async def live() -> FullVm:
        assert given.number(disk) == 3
        machine = world.substrate.make("hostile", spec, layout)
        template = await world.substrate._warm()
        program = [interpreter(), "-PsSB", "-c", HOSTILE]
        await machine.launch(template, program, given)
        while "done" not in machine.said(template):
            await asyncio.sleep(0.02)
        assert machine.said(template).split() == [*[str(errno.EFBIG)] * 4, "done"]
        return machine

    machine = world.do(live())
    assert os.fstat(disk).st_size <= layout.max_file_bytes() < 80 * MIB
    world.do(machine.kill())
    os.close(disk)


def test_a_guest_that_fills_its_disk_again_and_again_makes_no_longer_file(world: MachineWorld) -> None:
    machine = world.create()
    assert isinstance(machine, ForkedMachine)
    most = qcow2.max_file_bytes(machine.layout.private_disk[0])
    assert machine.layout.private_disk[0] < most <= machine.layout.max_file_bytes()
    for number in range(3):
        filled = world.sh(machine, f"rm -f x{number - 1}; head -c 9000000 /dev/urandom > x{number}")
        assert filled.status == ExecStatus.DISK_FULL
        assert MIB < os.fstat(machine._disk).st_size <= most
    again = world.create(saved=world.do(machine.save(max_bytes=1 << 30)))
    size = int(world.sh(machine, "wc -c < x2").stdout)
    assert int(world.sh(again, "wc -c < x2").stdout) == size > MIB
    for one in (machine, again):
        world.do(one.kill())


def test_a_machine_that_would_need_a_longer_file_is_told_and_goes_on(
    world: MachineWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.do(world.create().kill())  # its kind is prepared, with the limit as it is
    monkeypatch.setattr(Layout, "max_file_bytes", lambda _: MIB)
    machine = world.create()
    with pytest.raises(SandboxUnavailableError, match="saving a machine failed"):
        world.do(machine.save(max_bytes=1 << 30))
    assert world.sh(machine, "head -c 2500000 /dev/urandom > x && sync x").status == ExecStatus.EXIT
    assert isinstance(machine, ForkedMachine)
    assert os.fstat(machine._disk).st_size <= MIB
    assert world.sh(machine, "echo well").stdout == b"well\n"
    world.do(machine.kill())


def test_a_file_of_a_disk_has_room_for_its_clusters_and_tables() -> None:
    """By hand, in clusters: 16 TiB of them would be 2^28, told by 2^15 tables, counted by 2^13 + 1 blocks."""
    cluster = 1 << 16
    assert qcow2.max_file_bytes(cluster) // cluster >= 1 + 4
    for clusters, tables, blocks in ((1 << 13, 1, 1), (1 << 20, 1 << 7, 1 << 5)):
        exact = clusters + tables + blocks + qcow2._USED_CLUSTERS
        assert exact <= qcow2.max_file_bytes(clusters * cluster) // cluster <= exact + 80


def test_a_machines_disk_is_made_where_there_is_room(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("rollforward.sandbox.vm_cache.CACHE", tmp_path / "absent")
    with pytest.raises(SandboxUnavailableError, match=r"absent: No such file"):
        nameless_file([b"x"])
    monkeypatch.setattr("rollforward.sandbox.vm_cache.CACHE", tmp_path)

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    before = own_descriptors()
    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(SandboxUnavailableError, match="No space left"):
        nameless_file([b"x"])
    assert own_descriptors() - before == Counter()
