"""Proves: a microVM, and a full VM, is a sandbox like any other, on the command's side (exits, output, input,
deadlines, memory, files, tools, snapshots) and on the host's (what its emulator is and sees, an end that leaves
nothing); and machines of one state differ in all that must differ.
"""

import asyncio
import contextlib
import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from rollforward.sandbox.errors import GoneCause, SandboxFileError, SandboxGoneError, SandboxUnavailableError
from rollforward.sandbox.instance import Instance
from rollforward.sandbox.types import CallStatus, ExecRequest, ExecStatus
from tests.helpers.containers import SMALL
from tests.helpers.machines import MachineWorld
from tests.helpers.sandboxes import is_gone, tools_in

pytestmark = pytest.mark.timeout(300)
MIB = 1 << 20
SMALL_BUT_ONE = msgspec.structs.replace(SMALL, output_bytes=4097)


@pytest.fixture(scope="module", params=["microvm", "fullvm"])
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[MachineWorld]:
    with MachineWorld(request.param, tools_in(tmp_path_factory.mktemp("tools"))) as world:
        yield world


@pytest.fixture(scope="module")
def machine(world: MachineWorld) -> Instance:
    return world.create()


def test_a_command_runs_with_its_output_its_input_and_its_status(world: MachineWorld, machine: Instance) -> None:
    result = world.do(machine.exec(ExecRequest(argv=("sh", "-c", "cat; echo oops >&2; exit 3"), stdin=b"\0\xffin")))
    assert (result.status, result.exit_code) == (ExecStatus.EXIT, 3)
    assert (result.stdout, result.stderr) == (b"\0\xffin", b"oops\n")
    assert world.sh(machine, "id -u; pwd; echo $HOME; uname -n").stdout == b"1000\n/workspace\n/home\nsandbox\n"


def test_the_first_process_of_a_new_one_is_the_same_for_commands_and_calls(world: MachineWorld) -> None:
    for _ in range(2):
        assert world.sh(world.create(), "echo $$").stdout == b"2\n"
        machine = world.create()
        code = "answer = str(subprocess.Popen(['true']).pid)"
        assert [world.call(machine, "run", code=code).text for _ in range(2)] == ["2", "2"]


def test_a_command_is_found_by_its_own_path_and_has_all_that_it_is_given(
    world: MachineWorld, machine: Instance
) -> None:
    world.do(machine.upload({"found": b"#!/bin/sh\necho found\n"}))
    assert world.sh(machine, "chmod 755 found").status == ExecStatus.OK
    found = world.do(machine.exec(ExecRequest(argv=("found",), env={"PATH": "/nowhere:/workspace"})))
    assert (found.status, found.stdout) == (ExecStatus.OK, b"found\n")
    absent = world.do(machine.exec(ExecRequest(argv=("found",))))  # whose PATH is not the last one's
    assert (absent.exit_code, absent.stderr) == (127, b"found: No such file or directory\n")
    refused = world.do(machine.exec(ExecRequest(argv=("tmp",), env={"PATH": "/"})))
    assert refused.exit_code == 126
    long = "x" * 100_000  # more than is read at a time
    said = world.do(machine.exec(ExecRequest(argv=("sh", "-c", "echo ${#0} ${#A}; wc -c", long), env={"A": long})))
    assert said.stdout == b"100000 100000\n0\n"
    unread = world.do(machine.exec(ExecRequest(argv=("true",), stdin=bytes(4 * MIB), wall_s=60.0)))
    assert unread.status == ExecStatus.OK
    world.sh(machine, "rm found")


def test_a_deadline_kills_and_the_machine_goes_on(world: MachineWorld, machine: Instance) -> None:
    result = world.sh(machine, "sleep 100 & while :; do :; done", wall_s=1.0)
    assert result.status == ExecStatus.TIMEOUT
    assert world.sh(machine, "echo well").stdout == b"well\n"


def test_long_output_loses_its_middle(world: MachineWorld, machine: Instance) -> None:
    result = world.sh(machine, "echo first; head -c 3000000 /dev/zero; echo last")
    assert result.status == ExecStatus.OK
    assert result.stdout_bytes == 3_000_011
    assert len(result.stdout) == machine.spec.limits.output_bytes
    assert result.stdout.startswith(b"first\n")
    assert result.stdout.endswith(b"last\n")


def test_out_of_memory_is_the_commands_own(world: MachineWorld, machine: Instance) -> None:
    result = world.python(machine, "x = []\nwhile True: x.append(bytearray(8 << 20))")
    assert result.status == ExecStatus.OOM
    assert world.sh(machine, "echo well").stdout == b"well\n"
    assert not machine.died.done()


def test_files_go_in_and_out_and_have_one_size(world: MachineWorld, machine: Instance) -> None:
    data = os.urandom(3 * MIB // 2)
    world.do(machine.upload({"d/x": data, "d/y": b""}))
    assert world.do(machine.download(["d/x", "d/y", "absent"], max_bytes=4 * MIB)) == {"d/x": data, "d/y": b""}
    with pytest.raises(SandboxFileError):
        world.do(machine.upload({"/etc/passwd": b"x"}))
    full = world.sh(machine, "head -c 9000000 /dev/zero > big")
    assert full.status == ExecStatus.DISK_FULL
    world.sh(machine, "rm -r big d d/y")


def test_a_tool_is_called_and_a_key_runs_once(world: MachineWorld, machine: Instance) -> None:
    called = world.call(machine, "run", code="answer = str(6 * 7)")
    assert (called.status, called.text) == (CallStatus.OK, "42")
    request = ExecRequest(argv=("sh", "-c", "echo x >> count; wc -l < count"))
    assert [world.do(machine.exec(request, key="k")).stdout for _ in range(2)] == [b"1\n"] * 2
    world.sh(machine, "rm count")


def test_files_of_one_are_anothers_beginning(world: MachineWorld) -> None:
    first = world.create()
    world.sh(first, "mkdir d; echo kept > d/f; ln -s f d/l; head -c 2000000 /dev/urandom > big; md5sum big > sum")
    snapshot = world.do(first.snapshot(max_bytes=8 * MIB))
    world.do(first.kill())
    second = world.create(snapshot=snapshot)
    assert world.sh(second, "cat d/l && md5sum -c sum").stdout == b"kept\nbig: OK\n"
    world.do(second.kill())


def test_a_fresh_one_is_as_new_and_a_used_one_is_not(world: MachineWorld) -> None:
    machine = world.create()
    assert world.do(machine.is_fresh())
    world.sh(machine, "touch x")
    assert not world.do(machine.is_fresh())
    world.do(machine.kill())


def test_machines_of_one_state_differ_in_what_must_differ(world: MachineWorld) -> None:
    script = "head -c 16 /dev/urandom | md5sum; cat /proc/sys/kernel/random/uuid; date +%s"
    machines = [world.create() for _ in range(2)]
    said = [world.sh(machine, script).stdout.split() for machine in machines]
    assert said[0][0] != said[1][0]
    assert said[0][2] != said[1][2]
    assert abs(int(said[0][3]) - time.time()) < 30
    world.sh(machines[0], "echo mine > x")
    assert world.sh(machines[1], "cat x").status == ExecStatus.EXIT
    for machine in machines:
        world.do(machine.kill())


COUNTER = "i=0; while :; do i=$((i+1)); echo $i > new; mv new count; sleep 0.1; done"


def test_a_saved_machine_goes_on_with_its_processes_wherever_it_is(world: MachineWorld) -> None:
    first = world.create()
    entropy = "head -c 16 /dev/urandom | md5sum"
    world.sh(first, "echo kept > file")
    running = world.loop.create_task(first.exec(ExecRequest(argv=("sh", "-c", COUNTER), wall_s=100.0)))
    while not int(world.sh(first, "cat count || echo 0").stdout):
        pass
    saved = world.do(first.save(max_bytes=1 << 30))
    later = int(world.sh(first, "sleep 0.5; cat count").stdout)
    world.do(first.kill())
    assert world.do(_wait(running)).status == ExecStatus.KILLED
    again = [world.create(saved=saved) for _ in range(2)]
    counts = [int(world.sh(machine, "cat count").stdout) for machine in again]
    assert all(0 < count < later + 100 for count in counts), (counts, later)
    for machine, count in zip(again, counts, strict=True):
        assert int(world.sh(machine, "sleep 0.5; cat count").stdout) > count
        assert world.sh(machine, "cat file").stdout == b"kept\n"
        assert abs(int(world.sh(machine, "date +%s").stdout) - time.time()) < 10
        assert world.sh(machine, "true").status == ExecStatus.OK
    assert world.sh(again[0], entropy).stdout != world.sh(again[1], entropy).stdout
    world.sh(again[0], "echo mine > x")
    assert world.sh(again[1], "cat x").status == ExecStatus.EXIT
    for machine in again:
        world.do(machine.kill())


def test_a_snapshot_of_a_machine_goes_on_as_nothing_else(world: MachineWorld) -> None:
    first = world.create()
    saved = world.do(first.save(max_bytes=1 << 30))
    with pytest.raises(SandboxFileError, match="more than"):
        world.do(first.save(max_bytes=1000))
    assert world.sh(first, "echo well").stdout == b"well\n"
    world.do(first.kill())
    with pytest.raises(SandboxFileError, match="limits"):
        world.create(SMALL_BUT_ONE, saved=saved)
    with pytest.raises(SandboxFileError, match="none of a machine"):
        world.create(saved=saved[:1000])


def test_who_kills_one_and_goes_away_leaves_nothing_open(world: MachineWorld) -> None:
    """A call that is cancelled does not see the end, which somebody else finds."""
    world.do(world.create().kill())
    before = _open_files()

    async def killed(machine: Instance) -> None:
        killing = asyncio.create_task(machine.kill())
        await asyncio.sleep(0)
        killing.cancel()
        while not machine.is_gone:
            await asyncio.sleep(0.01)

    for _ in range(3):
        world.do(killed(world.create()))
    assert _open_files() - before == Counter()


def _open_files() -> Counter[str]:
    found = Counter[str]()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found[os.readlink(f"/proc/self/fd/{name}").partition("[")[0]] += 1
    return found


def test_one_that_is_paused_stands_still_and_goes_on_in_time(world: MachineWorld, machine: Instance) -> None:
    busy = COUNTER.replace("; sleep 0.1", "")
    running = world.loop.create_task(machine.exec(ExecRequest(argv=("sh", "-c", busy), wall_s=3.0)))
    while not int(world.sh(machine, "cat count || echo 0").stdout):
        pass
    world.do(machine.pause())
    ticks = cpu_ticks(machine.pid)
    time.sleep(1.0)
    assert cpu_ticks(machine.pid) - ticks <= 1  # nor does its emulator, whose own timers may be many
    world.do(machine.resume())
    assert abs(int(world.sh(machine, "date +%s").stdout) - time.time()) < 5
    assert world.do(_wait(running)).status == ExecStatus.TIMEOUT
    world.sh(machine, "rm count")


def cpu_ticks(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    return int(fields[11]) + int(fields[12])


def test_the_emulator_is_nobody_alone_and_without_rights(world: MachineWorld, machine: Instance) -> None:
    proc = Path(f"/proc/{machine.pid}")
    status = dict(line.split(":\t", 1) for line in (proc / "status").read_text().splitlines() if ":\t" in line)
    assert "qemu" in (proc / "cmdline").read_text()
    if os.geteuid() == 0:
        assert int(status["Uid"].split()[0]) > 1_900_000_000
    assert (int(status["CapEff"], 16), int(status["CapPrm"], 16)) == (0, 0)
    assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")
    for space in ("pid", "net", "mnt", "ipc", "uts", "user"):
        assert os.readlink(proc / "ns" / space) != os.readlink(f"/proc/self/ns/{space}")
    assert (proc / "environ").read_bytes() == b""
    assert sorted(set(os.listdir(proc / "root")) - {"usr", "bin", "lib", "lib64", "lib32", "libx32", "sbin"}) == [
        *("dev", "etc", "home", "proc", "root", "run", "tmp", "var", "workspace")
    ]
    devices = {line.split(":")[0].strip() for line in (proc / "net/dev").read_text().splitlines()[2:]}
    assert devices == {"lo"}


def test_what_an_emulator_says_is_its_own_and_has_an_end(world: MachineWorld, machine: Instance) -> None:
    errors = Path(f"/proc/{machine.pid}/fd/2")
    assert "memfd:errors" in os.readlink(errors)
    with errors.open("r+b", buffering=0) as file:
        assert file.seek(0, os.SEEK_END) <= MIB
        with pytest.raises(PermissionError):
            file.write(b"x")


@pytest.mark.parametrize("world", ["microvm"], indirect=True)  # full VMs share none
def test_the_state_that_all_share_cannot_be_written_by_one(world: MachineWorld, machine: Instance) -> None:
    shared = [path for path in Path(f"/proc/{machine.pid}/fd").iterdir() if "memfd:machine" in os.readlink(path)]
    assert shared
    for path in shared:
        with path.open("r+b", buffering=0) as file, pytest.raises(PermissionError):
            file.write(b"x")


def test_a_killed_machine_leaves_nothing(world: MachineWorld) -> None:
    machine = world.create()
    groups, pid = machine.cgroup, machine.pid
    world.do(machine.kill())
    assert world.do(machine.exec(ExecRequest(argv=("true",)))).status == ExecStatus.SANDBOX_DEAD
    assert is_gone(pid)
    assert [path for path in groups if path.exists()] == []
    assert world.do_died(machine) == GoneCause.CLOSED


def test_an_emulator_that_dies_is_a_lost_sandbox(world: MachineWorld) -> None:
    machine = world.create()
    running = world.loop.create_task(machine.exec(ExecRequest(argv=("sleep", "30"))))
    world.sh(machine, "true")
    os.kill(machine.pid, signal.SIGKILL)
    assert world.do_died(machine) == GoneCause.LOST
    assert world.do(_wait(running)).status == ExecStatus.INFRA
    with pytest.raises(SandboxGoneError):
        world.do(machine.upload({"x": b""}))
    world.do(machine.kill())


async def _wait(running: object) -> object:
    return await running  # type: ignore[misc]


def test_an_image_that_is_not_there_is_said(world: MachineWorld) -> None:
    with pytest.raises(SandboxUnavailableError, match="nowhere"):
        world.create(image="nowhere")


@pytest.mark.parametrize("substrate", ["microvm", "fullvm"])
def test_layers_are_stacked_and_belong_to_nobody_inside(substrate: str, tmp_path: Path) -> None:
    for name, text in (("low", "low"), ("high", "high")):
        (tmp_path / name / "data").mkdir(parents=True)
        (tmp_path / name / "data/both").write_text(text, encoding="utf-8")
        (tmp_path / name / f"data/{name}").write_text(name, encoding="utf-8")
    images = {"stacked": (str(tmp_path / "low"), str(tmp_path / "high"))}
    with MachineWorld(substrate, tools_in(tmp_path), images) as world:
        machine = world.create(image="stacked")
        paths = ["/data/both", "/data/low", "/data/high"]
        found = world.do(machine.download(paths, max_bytes=MIB))
        assert found == {"/data/both": b"high", "/data/low": b"low", "/data/high": b"high"}
        with pytest.raises(SandboxFileError):
            world.do(machine.upload({"/data/both": b"mine"}))
        seen = world.call(
            machine, "run", code="answer = str([os.path.exists('/usr/bin/python3'), os.listdir('/data')])"
        )
        assert seen.status == CallStatus.OK, seen
        assert "False" in seen.text
        world.do(machine.upload({"own": b"x"}))
        again = world.create(image="stacked", snapshot=world.do(machine.snapshot(max_bytes=MIB)))
        assert world.do(again.download(["own", "/data/both"], max_bytes=MIB)) == {"own": b"x", "/data/both": b"high"}
