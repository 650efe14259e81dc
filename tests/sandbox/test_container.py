"""Proves: a container keeps its files between commands; every way in which a command or call can end has its status,
and what it does cannot look like a failure of the platform; nothing is left of a container.

Does not prove: what a command can reach (test_container_isolation.py, test_attacks.py).
"""

import asyncio
import errno
import os
import resource
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest

from rollforward.sandbox.cgroups import Hierarchies
from rollforward.sandbox.config import Limits
from rollforward.sandbox.container import Container
from rollforward.sandbox.errors import GoneCause, SandboxKeyError, SandboxUnavailableError
from rollforward.sandbox.inside.agent import Agent
from rollforward.sandbox.outcomes import Table
from rollforward.sandbox.types import Call, CallStatus, ExecRequest, ExecResult, ExecStatus
from rollforward.sandbox.warm_template import WarmTemplate
from tests.helpers.containers import SMALL, World
from tests.helpers.sandboxes import descendants, is_gone, tools_in, wait_for
from tests.helpers.supervisors import groups


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with World(tools_in(tmp_path_factory.mktemp("tools"))) as world:
        yield world


@pytest.fixture
def container(world: World) -> Iterator[Container]:
    container = world.create()
    yield container
    world.do(container.kill())


# ---- Commands


def test_files_stay_from_one_command_to_the_next_and_calls_see_them(world: World, container: Container) -> None:
    assert world.sh(container, "echo one > file; mkdir -p a/b; echo $((1 + 1))").stdout == b"2\n"
    assert world.sh(container, "cat file").stdout == b"one\n"
    assert world.call(container, "run", code="answer = open('file').read() + os.getcwd()").text == "one\n/workspace"
    assert world.call(container, "calculator", expression="6 * 7").text == "42"


@pytest.mark.parametrize(
    ("script", "status", "code"),
    [
        ("true", ExecStatus.OK, 0),
        ("exit 3", ExecStatus.EXIT, 3),
        ("kill -9 $$", ExecStatus.EXIT, -9),
        ("kill -TERM $$", ExecStatus.EXIT, -15),
        ("kill -SEGV $$", ExecStatus.EXIT, -11),
        ("kill -9 -1; exit 5", ExecStatus.EXIT, 5),  # all but itself and the process around it
        ("kill -9 1; exit 4", ExecStatus.EXIT, 4),
        ("ulimit -t 1; ulimit -n 10; exit 6", ExecStatus.EXIT, 6),
        ("while :; do :; done", ExecStatus.TIMEOUT, -24),
    ],
)
def test_how_a_command_ends(world: World, script: str, status: ExecStatus, code: int) -> None:
    container = world.create(Limits(cpu_s=1.0, memory_bytes=128 << 20, processes=32))
    result = world.sh(container, script)
    assert (result.status, result.exit_code, result.detail) == (status, code, "")
    assert world.sh(container, "echo well").stdout == b"well\n"


def test_programs_that_cannot_be_started(world: World, container: Container) -> None:
    assert world.do(container.exec(ExecRequest(argv=("nope",)))).exit_code == 127
    result = world.do(container.exec(ExecRequest(argv=("/etc/passwd",))))
    assert (result.status, result.exit_code, result.stderr) == (
        ExecStatus.EXIT,
        126,
        b"/etc/passwd: Permission denied\n",
    )
    assert world.sh(container, "true", cwd="/nope").exit_code == 127
    assert world.do(container.exec(ExecRequest(argv=("a\0b",)))).exit_code == 126
    assert world.do(container.exec(ExecRequest(argv=()))).status == ExecStatus.INFRA


def test_input_environment_and_bytes_are_exact(world: World, container: Container) -> None:
    data = bytes(range(256)) * 8
    result = world.do(container.exec(ExecRequest(argv=("cat",), stdin=data)))
    assert (result.stdout, result.stdout_bytes, result.is_truncated) == (data, 2048, False)
    assert world.sh(container, "cat; echo end").stdout == b"end\n"
    assert world.sh(container, "read line; echo $line", stdin=b"a\n" * (1 << 20)).stdout == b"a\n"
    env = world.do(container.exec(ExecRequest(argv=("env",), env={"X": "y z", "HOME": "/tmp"}))).text()
    assert sorted(line.split("=")[0] for line in env.splitlines()) == ["HOME", "LANG", "PATH", "TERM", "USER", "X"]
    assert world.do(container.exec(ExecRequest(argv=("printf", "%s", "\udcff")))).stdout == b"\xff"
    assert world.sh(container, "echo out; echo err >&2; pwd", cwd="/tmp").stdout == b"out\n/tmp\n"


def test_a_flood_keeps_its_ends_and_its_length(world: World, container: Container) -> None:
    script = "printf begin; head -c 3000000 /dev/zero; printf end; yes >&2"
    result = world.sh(container, script, wall_s=4.0)
    assert (result.status, result.stdout_bytes, len(result.stdout)) == (ExecStatus.TIMEOUT, 3_000_008, 4096)
    assert result.stdout.startswith(b"begin\0")
    assert result.stdout.endswith(b"\0end")
    assert result.is_truncated
    assert len(result.stderr) == 4096 < result.stderr_bytes


def test_a_command_ends_with_its_leader_and_takes_everything_along(world: World, container: Container) -> None:
    start = time.monotonic()
    daemon = "import os, time\nif os.fork() == 0:\n  os.setsid()\n  if os.fork() == 0: time.sleep(99)\n  os._exit(0)"
    assert world.python(container, daemon).status == ExecStatus.OK
    assert world.sh(container, "sleep 99 & setsid sleep 98 & (trap '' TERM; sleep 97) & echo on").stdout == b"on\n"
    assert time.monotonic() - start < 30
    wait_for(lambda: all(b"sleep" not in _command(pid) for pid in descendants(container.pid)))
    wait_for(lambda: world.do(container.is_fresh()))


def _command(pid: int) -> bytes:
    try:
        return open(f"/proc/{pid}/cmdline", "rb").read()
    except OSError:
        return b""


def test_a_deadline_kills(world: World, container: Container) -> None:
    script = "trap '' TERM INT HUP; echo before; sleep 60 & wait; sleep 60"
    result = world.sh(container, script, wall_s=1.0)
    assert (result.status, result.exit_code, result.stdout) == (ExecStatus.TIMEOUT, None, b"before\n")
    assert 1.0 <= result.seconds < 40
    assert world.sh(container, "flock -n lock echo free").stdout == b"free\n"


def test_memory_is_the_containers_and_its_end_is_typed(world: World, container: Container) -> None:
    hog = "x = [bytearray(b'x' * (1 << 20)) for _ in range(1024)]"
    result = world.python(container, hog)
    assert (result.status, result.exit_code) == (ExecStatus.OOM, -9)
    many = f'for i in 1 2 3 4 5 6; do python3 -c "import time; {hog[:-5]}40)]; time.sleep(9)" & done; wait; exit 1'
    assert world.sh(container, many).status == ExecStatus.OOM
    assert world.sh(container, "echo well").stdout == b"well\n"
    assert not container.died.done()


def test_room_for_files_ends_typed(world: World, container: Container) -> None:
    result = world.sh(container, "head -c 9000000 /dev/zero > big")
    assert result.status == ExecStatus.DISK_FULL
    assert world.sh(container, "rm big; head -c 3000000 /dev/zero > /dev/shm/x && echo fits").stdout == b"fits\n"
    assert world.sh(container, "head -c 3000000 /dev/zero > /tmp//y").status == ExecStatus.DISK_FULL
    assert world.sh(container, "rm /tmp//y /dev/shm/x; i=0; while : > f$i; do i=$((i+1)); done; exit 1").status in (
        ExecStatus.DISK_FULL,
    )
    assert world.sh(container, "rm f*; exit 1").status == ExecStatus.EXIT


def test_a_fork_bomb_stops_at_its_limit_and_the_container_lives(world: World, container: Container) -> None:
    bomb = "import os, time\nn = 0\ntry:\n  while n < 500:\n    if os.fork() == 0: time.sleep(60)\n    n += 1\n"
    result = world.python(container, bomb + "except OSError as e: print(n < 40, e.errno)")
    assert result.stdout == b"True 11\n", result
    assert world.sh(container, "echo well").stdout == b"well\n"


def test_sixty_four_commands_at_once_keep_their_outputs_apart(world: World) -> None:
    container = world.create(Limits(memory_bytes=512 << 20, processes=512))

    async def all_of_them() -> list[ExecResult]:
        scripts = [f"for i in 1 2 3; do echo {n} $i; done; echo {n} >> log; exit {n % 3}" for n in range(64)]
        return await asyncio.gather(*(container.exec(ExecRequest(argv=("sh", "-c", s))) for s in scripts))

    results = world.do(all_of_them())
    assert [r.stdout.decode() for r in results] == [f"{n} 1\n{n} 2\n{n} 3\n" for n in range(64)]
    assert [r.exit_code for r in results] == [n % 3 for n in range(64)]
    assert world.sh(container, "wc -l < log").stdout.strip() == b"64"


@pytest.mark.parametrize("num_pipes", [0, 1, 2])
def test_an_agent_that_gets_no_pipe_keeps_none_of_the_others(monkeypatch: pytest.MonkeyPatch, num_pipes: int) -> None:
    made, make = list[int](), os.pipe2

    def pipe2(flags: int) -> tuple[int, int]:
        if len(made) == 2 * num_pipes:
            raise OSError(errno.EMFILE, "Too many open files")
        made.extend(make(flags))
        return made[-2], made[-1]

    monkeypatch.setattr(os, "pipe2", pipe2)
    room: Any = None  # nothing is dispatched
    with pytest.raises(OSError, match="Too many"):
        Agent(-1, room)._start({"op": "exec", "wall_s": 1.0}, b"input")
    assert len(made) == 2 * num_pipes
    for descriptor in made:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)


def test_a_key_runs_once(world: World, container: Container) -> None:
    request = ExecRequest(argv=("sh", "-c", "sleep 0.3; echo x >> log; wc -l < log"))

    async def twice() -> list[ExecResult]:
        first = asyncio.create_task(container.exec(request, "t0c0"))
        await asyncio.sleep(0.05)
        first.cancel()
        return list(await asyncio.gather(*(container.exec(request, "t0c0") for _ in range(3))))

    assert {result.stdout for result in world.do(twice())} == {b"1\n"}
    assert world.do(container.exec(request, "t0c1")).stdout == b"2\n"
    with pytest.raises(SandboxKeyError):
        world.do(container.exec(ExecRequest(argv=("true",)), "t0c0"))
    call = Call(tool="run", arguments={"code": "open('log', 'a').write('x\\n'); answer = 'done'"})
    assert world.do(container.call(call, "t1c0")) == world.do(container.call(call, "t1c0"))
    assert world.sh(container, "wc -l < log").stdout == b"3\n"


def test_old_results_are_forgotten_and_not_run_again() -> None:
    runs: list[int] = []

    async def fill() -> list[ExecResult]:
        table = Table()

        async def run(number: int) -> ExecResult:
            runs.append(number)
            return ExecResult(status=ExecStatus.OK, stdout=bytes(1 << 20))

        forgotten = ExecResult(status=ExecStatus.INFRA)
        asked = [ExecRequest(argv=(str(number),)) for number in range(40)]
        for number, request in enumerate(asked):
            await table.get(str(number), request, lambda number=number: run(number), forgotten)
        return [await table.get(str(n), asked[n], lambda: run(-1), forgotten) for n in (0, 39)]

    first, last = asyncio.run(fill())
    assert (first.status, last.status, runs) == (ExecStatus.INFRA, ExecStatus.OK, list(range(40)))


# ---- Calls


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("1 / 0", CallStatus.ERROR),
        ("raise SystemExit(3)", CallStatus.ERROR),
        ("os._exit(0)", CallStatus.KILLED),
        ("os.abort()", CallStatus.KILLED),
        ("ctypes.string_at(0)", CallStatus.KILLED),
        ("os.kill(1, 9); answer = 'alive'", CallStatus.OK),
        ("os.kill(-1, 9)", CallStatus.ERROR),
        ("[os.write(n, b'l') for n in range(3, 4)]; os._exit(1)", CallStatus.KILLED),
        ("[os.write(3, bytes(1 << 20)) for _ in range(32)]", CallStatus.KILLED),
        ("os.close(3)", CallStatus.KILLED),
        ("x = [bytearray(b'x' * (1 << 20)) for _ in range(1024)]", CallStatus.OOM),
        ("resource.setrlimit(resource.RLIMIT_CPU, (1, 1))", CallStatus.ERROR),
        ("while True: pass", CallStatus.TIMEOUT),
    ],
)
def test_how_a_call_ends(world: World, code: str, status: CallStatus) -> None:
    container = world.create(Limits(cpu_s=1.0, memory_bytes=128 << 20, processes=32))
    result = world.call(container, "run", code=code)
    assert result.status == status, result
    assert world.call(container, "echo", value={"value": "well"}).text == "well"


def test_calls_that_are_refused_or_late(world: World, container: Container) -> None:
    assert world.call(container, "abacus").text == "there is no tool 'abacus'; there are calculator, echo, nap, run"
    assert world.call(container, "nap", seconds=60).text == "no answer within 0.5 s"
    assert len(world.call(container, "echo", value={"value": "x" * 999}).text) == 200
    shell = "answer = subprocess.run('echo $PPID; id -u', shell=True, capture_output=True, text=True).stdout"
    assert world.call(container, "run", code=shell).text == "1\n1000\n"


# ---- The end


def test_a_killed_container_is_gone_with_all_that_belonged_to_it(world: World) -> None:
    container = world.create()
    pid, groups = container.pid, container.cgroup
    assert not is_gone(pid)
    assert groups
    world.do(container.kill())
    world.do(container.kill())
    assert is_gone(pid)
    assert [path for path in groups if path.exists()] == []
    assert container.died.result() == GoneCause.CLOSED
    assert world.sh(container, "true").status == ExecStatus.SANDBOX_DEAD
    assert world.call(container, "calculator", expression="1").status == CallStatus.INFRA


@pytest.mark.parametrize(("by", "cause"), [("owner", GoneCause.CLOSED), ("machine", GoneCause.LOST)])
def test_the_end_of_a_container_under_a_command_is_typed(world: World, by: str, cause: GoneCause) -> None:
    container = world.create()

    async def ended() -> tuple[ExecResult, CallStatus]:
        running = asyncio.create_task(container.exec(ExecRequest(argv=("sleep", "60"))))
        calling = asyncio.create_task(container.call(Call(tool="run", arguments={"code": "time.sleep(60)"})))
        await asyncio.sleep(0.2)
        if by == "owner":
            await container.kill()
        else:
            os.kill(container.pid, signal.SIGKILL)
        return await running, (await calling).status

    result, call = world.do(ended())
    assert container.died.result() == cause
    assert result.status == (ExecStatus.KILLED if by == "owner" else ExecStatus.INFRA)
    assert ("unknown outcome" in result.detail) == (by == "machine")
    assert call == CallStatus.INFRA
    world.do(container.kill())
    assert [path for path in container.cgroup if path.exists()] == []


def test_a_dead_template_is_replaced_and_its_containers_are_lost(world: World) -> None:
    with World(list(world.tools)) as other:
        container = other.create()
        template = other.substrate.template_pid
        os.kill(template, signal.SIGKILL)
        other.do(asyncio.wait_for(asyncio.shield(container.died), 60))
        assert container.died.result() == GoneCause.LOST
        assert other.sh(other.create(), "echo on").stdout == b"on\n"
        assert other.substrate.template_pid != template


def test_limits_of_one_are_not_those_of_another(world: World, container: Container) -> None:
    other = world.create(SMALL)
    assert world.sh(container, "head -c 9000000 /dev/zero > big; echo secret > /tmp//s").status in (
        ExecStatus.OK,
        ExecStatus.DISK_FULL,
    )
    assert world.sh(other, "ls -A /tmp /workspace /dev/shm /home").stdout.split() == [
        b"/dev/shm:",
        b"/home:",
        b"/tmp:",
        b"/workspace:",
    ]
    assert world.sh(other, "head -c 3000000 /dev/zero > big && echo fits").stdout == b"fits\n"


@pytest.mark.parametrize("turns", [1, 2, 3, 5, 8, 13])
def test_a_container_that_is_given_up_while_it_is_made_answers_for_no_other(world: World, turns: int) -> None:
    before = set(descendants(os.getpid()))

    async def one_after_another() -> Container:
        given_up = asyncio.ensure_future(world.substrate.create("given-up", world.spec()))
        for _ in range(turns):
            await asyncio.sleep(0)
        given_up.cancel()
        await asyncio.wait([given_up])
        if not given_up.cancelled():  # it was made already
            await given_up.result().kill()
        return await world.substrate.create("next", world.spec())

    container = world.do(one_after_another())
    running = asyncio.ensure_future(container.exec(ExecRequest(argv=("sleep", "60"))), loop=world.loop)
    world.do(_runs(container, b"sleep"))
    world.do(container.kill())
    world.do(asyncio.wait([running]))
    assert running.exception() is not None or running.result().status != ExecStatus.OK
    wait_for(lambda: set(descendants(os.getpid())) <= before)


def test_a_substrate_that_ends_while_the_first_process_of_one_is_made_ends_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = set(descendants(os.getpid()))
    other = World([])
    make, is_made = WarmTemplate.make, asyncio.Event()

    async def late(self: WarmTemplate, *asked: Any) -> int:
        pidfd = await make(self, *asked)
        is_made.set()
        await asyncio.sleep(0.2)  # and whoever ends it is here by now
        return pidfd

    async def both() -> None:
        making = asyncio.create_task(other.substrate.create("c", other.spec()))
        await is_made.wait()
        container = other.substrate.left("c")
        assert container is not None
        await other.substrate.close()
        assert container.is_gone
        assert container.died.result() == GoneCause.CLOSED
        assert is_gone(container.pid)
        await asyncio.wait([making], timeout=20)
        assert making.done(), "it waits for what does not come up any more"
        assert isinstance(making.exception(), SandboxUnavailableError)

    monkeypatch.setattr(WarmTemplate, "make", late)
    other.do(both())
    assert groups(other.label) == []
    wait_for(lambda: set(descendants(os.getpid())) <= before)
    other.loop.close()


async def _runs(container: Container, program: bytes) -> None:
    """Wait until a process of it does."""
    while not any(program in _command(pid) for pid in descendants(container.pid)):
        await asyncio.sleep(0.01)


async def _has_no_files_but(before: list[str]) -> None:
    """Wait until this process has no further ones open."""
    while not set(os.listdir("/proc/self/fd")) <= set(before):
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("has_groups", [True, False])
def test_one_for_which_too_few_files_can_be_opened_is_refused_and_leaves_nothing(has_groups: bool) -> None:
    with World([], hierarchies=None if has_groups else Hierarchies(None, None, None)) as world:
        world.do(world.create().kill())
        there, told, made = set(descendants(world.substrate.template_pid)), list[str](), None
        for room in range(12):
            before = os.listdir("/proc/self/fd")
            end = max(map(int, before)) + 1
            soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.setrlimit(resource.RLIMIT_NOFILE, (end + room, hard))
            taken = [os.dup(0) for _ in range(end - len(before))]  # numbers below the highest that are free
            try:
                made = world.create()
            except SandboxUnavailableError as error:
                told.append(str(error))
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
                for descriptor in taken:
                    os.close(descriptor)
            if made is not None:
                break
            world.do(_has_no_files_but(before))
            wait_for(lambda: set(descendants(world.substrate.template_pid)) <= there)
            assert world.substrate.left(f"c-{world.number}") is None
        assert made is not None
        assert len(told) > 1
        assert all("Too many open files" in text for text in told), told
        assert world.sh(made, "echo well").stdout == b"well\n"
        world.do(made.kill())
