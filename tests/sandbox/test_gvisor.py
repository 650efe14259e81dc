"""Proves: what containers promise they promise under gVisor too, where that is found; whoever is killed, nothing of it
is left; and where it is not there or does not work, whoever wants it is told before there is a sandbox.

Does not prove: that nothing gets out (attacks/).
"""

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollforward.sandbox import cgroups, gvisor
from rollforward.sandbox.config import KeptSubstrate, Limits, ToolConfig
from rollforward.sandbox.container import Container
from rollforward.sandbox.errors import SandboxFileError, SandboxUnavailableError
from rollforward.sandbox.gvisor import GVisorSubstrate
from rollforward.sandbox.images import Images
from rollforward.sandbox.types import ExecRequest, ExecStatus, SandboxSpec
from tests.helpers.containers import GVISOR, SMALL, World
from tests.helpers.sandboxes import descendants, is_gone, tools_in, wait_for
from tests.helpers.supervisors import Stage, command, groups, on_loop, sh, until_begun

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module", params=["container", *GVISOR])
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    shipped = [ToolConfig(name=name, timeout_s=20.0) for name in ("bash", "python")]
    with World([*tools_in(tmp_path_factory.mktemp("tools")), *shipped], substrate=request.param) as made:
        yield made


@pytest.fixture(scope="module")
def container(world: World) -> Container:
    return world.create()


async def begun(container: Container) -> None:
    """Wait until a command has made the file `begun`."""
    while not await container.download(["begun"], max_bytes=9):
        await asyncio.sleep(0.01)


def substrate(**settings: str) -> GVisorSubstrate:
    return GVisorSubstrate(Images({}), label=f"test-{os.getpid()}", max_sandboxes=4, **settings)


async def refused(made: GVisorSubstrate) -> str:
    """Why it does not start; nothing of it is left."""
    try:
        with pytest.raises(SandboxUnavailableError) as caught:
            await made.start()
        return str(caught.value)
    finally:
        await made.close()
        assert made.template_pid == -1
        assert [
            p for parent in cgroups.find().parents() for p in parent.glob(f"rollforward.test-{os.getpid()}.*")
        ] == []


@on_loop
async def test_where_there_is_no_runsc_it_is_said_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "runsc").write_text("no program")
    said = await refused(substrate(runsc=str(tmp_path / "runsc")))
    assert str(tmp_path / "runsc") in said
    assert "Debian 13: apt-get install runsc" in said
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "no runsc on PATH" in await refused(substrate())
    monkeypatch.setattr(os, "geteuid", lambda: 1234)
    assert "the user here is 1234" in await refused(substrate())


@on_loop
async def test_where_runsc_does_not_work_it_is_said_why(tmp_path: Path) -> None:
    program = tmp_path / "runsc"
    program.write_text("#!/bin/sh\necho no $0 for $4 >&2; seq 9999 >&2; exit 3\n")
    program.chmod(0o755)
    said = await refused(substrate(runsc=str(program)))
    assert str(program) in said
    assert "ptrace" in said
    assert "systrap" in said
    assert "no /runsc for" in said
    assert "leave isolation=gvisor out" in said
    assert len(said) < 1500


@on_loop
async def test_a_runsc_that_hangs_is_waited_for_so_long(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(gvisor, "_PROBE_S", 0.5)
    program = tmp_path / "runsc"
    program.write_text("#!/bin/sh\nexec sleep 1000\n")
    program.chmod(0o755)
    start_s = time.monotonic()
    assert "no answer within 0.5 s" in await refused(substrate(runsc=str(program)))
    assert time.monotonic() - start_s < 100.0


def test_commands_end_and_speak_as_they_do(world: World, container: Container) -> None:
    result = world.sh(container, "echo out; echo err >&2; exit 7")
    assert (result.status, result.exit_code, result.stdout, result.stderr) == (ExecStatus.EXIT, 7, b"out\n", b"err\n")
    assert world.sh(container, "kill -9 $$").exit_code == -9
    assert world.sh(container, "cat", stdin=bytes(range(256)) * 999).stdout[:256] == bytes(range(256))
    for program, code in (("nowhere", 127), ("/etc", 126)):
        assert world.do(container.exec(ExecRequest(argv=(program,)))).exit_code == code
    assert world.sh(container, "sleep 60", wall_s=0.5).status == ExecStatus.TIMEOUT
    assert world.sh(container, "sleep 60 & exec 2>&-; echo well").stdout == b"well\n"
    listed = world.sh(container, "ls -la / /bin /dev /proc/self /workspace && id -u && pwd && echo $HOME")
    assert (listed.status, listed.stderr) == (ExecStatus.OK, b"")
    assert listed.stdout.endswith(b"1000\n/workspace\n/home\n")


def test_pids_are_those_that_proc_shows(world: World, container: Container) -> None:
    result = world.sh(
        container, "sleep 60 & test -d /proc/$! && until pkill -x sleep; do sleep 0.1; done; wait $!; echo $?"
    )
    assert result.stdout == b"143\n"
    looked = world.sh(container, "cat /proc/1/mem; ls /proc/1/root/program; tr '\\0' ' ' < /proc/1/environ")
    assert looked.stdout in (b"", b"PYTHONHASHSEED=0 HOME=/ ")


def test_the_kernel_is_another_one(world: World, container: Container) -> None:
    is_the_hosts = world.sh(container, "uname -rv").text().strip() == f"{os.uname().release} {os.uname().version}"
    assert is_the_hosts == (world.name == "container")
    assert container.platform == world.name


def test_calls_answer_as_they_do(world: World, container: Container) -> None:
    assert world.call(container, "run", code="answer = 6 * 7").text == "42"
    assert world.call(container, "run", code="import os; os._exit(3)").status == "killed"
    assert world.call(container, "nap", seconds=60).status == "timeout"
    assert world.call(container, "bash", command="sleep 60 & echo $((6 * 7)); exit 3").text == "42\n[exit status 3]"
    assert world.call(container, "python", code="print(6 * 7)").text.strip() == "42"
    assert "42" in world.call(container, "calculator", expression="6 * 7").text
    assert world.call(container, "run", code="answer = 1").text == "1"


def test_a_key_runs_once_and_many_at_once_answer_each(world: World, container: Container) -> None:
    async def ask() -> None:
        twice = ExecRequest(argv=("sh", "-c", "echo x >> twice; wc -l < twice"))
        results = await asyncio.gather(*(container.exec(twice, key="k") for _ in range(3)))
        assert {result.stdout.strip() for result in results} == {b"1"}
        script = (
            "exec 9> lock; flock 9; n=$(cat count 2>/dev/null || echo 0); sleep 0.02; echo $((n + 1)) > count; echo $0"
        )
        asked = [container.exec(ExecRequest(argv=("sh", "-c", script, str(n)))) for n in range(12)]
        assert [result.stdout for result in await asyncio.gather(*asked)] == [b"%d\n" % n for n in range(12)]

    world.do(ask())
    assert world.sh(container, "cat count").stdout == b"12\n"


def test_files_go_in_and_come_out(world: World, container: Container) -> None:
    big = os.urandom(3 << 20)
    world.do(container.upload({"d/e/big": big, "/home//x": b"x"}))
    assert (
        world.sh(container, "sha256sum < d/e/big; cat /home//x; echo more >> /home//x; rm -r d").status == ExecStatus.OK
    )
    assert world.do(container.download(["/home//x", "d/e/big"], max_bytes=1 << 20)) == {"/home//x": b"xmore\n"}
    for round_number in range(5):  # nobody keeps what was there before
        world.do(container.upload({"turn": b"%d" % round_number * (round_number + 1)}))
        assert world.sh(container, "cat turn; printf y > turn").text() == str(round_number) * (round_number + 1)
        assert world.do(container.download(["turn"], max_bytes=9)) == {"turn": b"y"}
    with pytest.raises(SandboxFileError):
        world.do(container.download(["/dev/null"], max_bytes=9))


def test_a_snapshot_has_what_was_written(world: World) -> None:
    first = world.create()
    world.do(first.upload({"/tmp//said": b"once", "d/gone": b"x"}))
    script = "mkdir -m 700 e; printf own > e/own; ln -s said /tmp//link; rm d/gone; chmod 750 d"
    script += "; echo x > /dev/shm/x; mkfifo p"
    assert world.sh(first, script).status == ExecStatus.OK
    taken = world.do(first.snapshot(max_bytes=1 << 20))
    second = world.create(snapshot=taken)
    shown = world.sh(second, "cat /tmp//link e/own; stat -c '%a %U %n' d e; ls d /dev/shm; echo more > e/own")
    assert (shown.text(), shown.stderr) == ("onceown750 user d\n700 user e\n/dev/shm:\n\nd:\n", b"")
    with pytest.raises(SandboxFileError):
        world.do(first.snapshot(max_bytes=99))
    with pytest.raises(SandboxFileError):
        world.create(snapshot=b"no snapshot" * 999)


def test_limits_end_what_goes_beyond(world: World) -> None:
    made = world.create(Limits(wall_s=30.0, memory_bytes=96 << 20, processes=16, disk_bytes=1 << 20, files=128))
    assert world.sh(made, "dd if=/dev/zero of=big bs=1M count=8 2>/dev/null").status == ExecStatus.DISK_FULL
    assert world.sh(made, "rm big; for i in $(seq 300); do : > f$i || exit 1; done").status == ExecStatus.DISK_FULL
    assert world.python(made, "import time\nwhile True: pass", wall_s=0.5).status == ExecStatus.TIMEOUT
    world.sh(made, "rm -f f*")
    assert world.sh(made, "for i in $(seq 40); do sleep 5 & done; echo never").status == ExecStatus.EXIT
    assert world.python(made, "x = []\nwhile True: x.append(bytearray(4 << 20))").status == ExecStatus.OOM
    world.do(made.kill())


def test_only_one_that_is_as_new_is_fresh(world: World) -> None:
    made = world.create()
    wait_for(lambda: world.do(made.is_fresh()))
    for dirty, clean in (
        ("touch /tmp//x", "rm /tmp//x"),
        ("touch /dev/shm/x", "rm /dev/shm/x"),
        ("chmod 700 /home", "chmod 755 /home"),
    ):
        assert world.sh(made, dirty).status == ExecStatus.OK
        assert not world.do(made.is_fresh())
        assert world.sh(made, clean).status == ExecStatus.OK
        wait_for(lambda: world.do(made.is_fresh()))
    world.do(made.kill())


def test_what_is_paused_stands_still(world: World) -> None:
    made = world.create()

    async def pause() -> None:
        script = "touch begun; while :; do echo; sleep 0.01; done | head -n 100"
        running = asyncio.create_task(made.exec(ExecRequest(argv=("sh", "-c", script))))
        await begun(made)
        await made.pause()
        await asyncio.sleep(2.0)
        assert not running.done()
        await made.resume()
        assert (await running).stdout_bytes == 100

    world.do(pause())
    world.do(made.kill())


@pytest.mark.parametrize("which", [0, 1, 2, -1])
def test_whichever_of_its_processes_is_killed_nothing_is_left(world: World, which: int) -> None:
    made = world.create(SMALL)
    world.do(made.exec(ExecRequest(argv=("true",))))
    running = world.loop.create_task(made.exec(ExecRequest(argv=("sh", "-c", "touch begun; sleep 60; true"))))
    world.do(begun(made))
    pids = [made.pid, *descendants(made.pid)]
    os.kill(pids[which], signal.SIGKILL)
    if which == 0:
        world.do(asyncio.wait_for(asyncio.shield(made.died), 60.0))
        assert world.do(running).status == ExecStatus.INFRA
        assert [pid for pid in pids if not is_gone(pid)] == []
    paths = made.cgroup
    world.do(made.kill())
    world.do(running)
    assert [pid for pid in pids if not is_gone(pid)] == []
    assert [path for path in paths if path.exists()] == []


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    made = Stage(tmp_path, monkeypatch)
    yield made
    made.end()
    assert made.left() == []


@pytest.mark.parametrize("name", ["container", *GVISOR])
@pytest.mark.parametrize("has_guard", [True, False])
@on_loop
async def test_of_a_killed_supervisor_nothing_is_left(stage: Stage, has_guard: bool, name: KeptSubstrate) -> None:
    async with stage.client() as client:
        sandbox = await client.create("a", SandboxSpec(substrate=name))
        assert (await sh(sandbox, "echo well")).text() == "well\n"
        running = asyncio.create_task(
            sh(sandbox, "setsid sleep 1000 & touch begun; sleep 1000", key="t0c0", wall_s=1000.0)
        )
        await until_begun(sandbox)
        assert [info.platform for info in await client.list()] == [name]
        stage.look()
        assert name == "container" or any("runsc" in command(pid) for pid in stage.seen)
        guard = stage.guard()
        assert guard is not None
        if not has_guard:
            os.kill(guard, signal.SIGKILL)
        os.kill(stage.supervisor(), signal.SIGKILL)
        wait_for(lambda: not stage.alive())
        running.cancel()
    if has_guard:
        await stage.gone()
        return
    async with stage.client() as client:  # whoever comes next cleans up
        await client.list()
        stage.look()
        assert groups(stage.name) == []
