"""Proves: nothing outlives the command or call that started it, nothing holds one up, and whoever asks a sandbox that
is gone, going, or asked by many at once gets an answer.

Does not prove: what is left after the host's own processes are killed (test_supervisor_kills.py).
"""

import asyncio
import os
from pathlib import Path

import pytest

from rollforward.sandbox.errors import SandboxGoneError, SandboxKeyError
from rollforward.sandbox.types import Call, CallStatus, ExecRequest, ExecStatus
from tests.helpers.attacks import LIMITS, InContainer, Way, answer, everywhere, harmless, python
from tests.helpers.containers import World
from tests.helpers.sandboxes import descendants, is_gone, wait_for

DAEMONS = {
    "two forks": "if os.fork() == 0:\n  os.setsid()\n  if os.fork() == 0: time.sleep(60)\n  os._exit(0)",
    "one that ignores signals": "if os.fork() == 0:\n  for s in (1, 2, 15, 17): signal.signal(s, signal.SIG_IGN)\n"
    "  os.setsid(); time.sleep(60)",
    "one that is stopped": "p = os.fork()\nif p == 0: time.sleep(60)\nos.kill(p, 19)",
    "one that starts others": "if os.fork() == 0:\n  while True:\n"
    "    try: os._exit(0) if os.fork() else None\n    except OSError: pass",
    "the dead": "for _ in range(3):\n  if os.fork() == 0: os._exit(0)",
    "one that holds the streams": "if os.fork() == 0:\n  os.setsid(); os.dup2(1, 9); os.dup2(2, 8); time.sleep(60)",
    "one that waits for its child": "if os.fork() == 0:\n  libc.vfork() or time.sleep(60)",
}


def is_alone(way: InContainer) -> bool:
    """Whether nothing runs but the process of the next command, which waits ready."""
    if way.is_gvisor:  # on the host there is its kernel, which has processes of its own for them
        verified, _ = way.world.do(way.container._answer({"op": "verify"}, within_s=60.0))
        return verified["fault"] == ""
    return len(descendants(way.container.pid)) <= 1


@pytest.mark.parametrize("kind", DAEMONS)
def test_what_it_starts_ends_with_it(way: Way, kind: str) -> None:
    harmless(way, DAEMONS[kind])
    if isinstance(way, InContainer):
        wait_for(lambda: is_alone(way))
    else:
        assert answer(way, "answer = [os.getpid(), threading.active_count()]") == [1, 1]


def test_a_daemon_that_holds_the_output_holds_up_nobody(world: World, command: InContainer) -> None:
    for script in ("sleep 60 & echo done", "(setsid sleep 60 >&2 &) ; echo done", "nohup sleep 60 & disown; echo done"):
        result = world.do(command.container.exec(ExecRequest(argv=("bash", "-c", script))))
        assert (result.status, result.stdout) == (ExecStatus.OK, b"done\n")
        said = world.call(command.container, "bash", command=script)
        assert (said.status, said.text) == (CallStatus.OK, "done\n")


def test_who_ignores_signals_is_killed_at_the_deadline_and_lets_go_of_locks(world: World, command: InContainer) -> None:
    hold = "import fcntl, signal, time\nfor s in (1, 2, 15, 17): signal.signal(s, signal.SIG_IGN)\n"
    hold += "f = open('/home//lock', 'w'); fcntl.flock(f, 2); fcntl.lockf(f, 2); print('held', flush=True)\n"
    hold += "while True: time.sleep(1)"
    result = world.do(command.container.exec(python(hold, wall_s=4.0)))
    assert (result.status, result.stdout) == (ExecStatus.TIMEOUT, b"held\n")
    assert world.sh(command.container, "flock -n /home//lock echo free").stdout == b"free\n"


def test_sleeping_calls_end_at_their_deadline(inside: InContainer, function: Way) -> None:
    assert inside.world.call(inside.container, "nap", seconds=60).status == CallStatus.TIMEOUT
    assert answer(function, "answer = 1") == 1


def test_input_is_at_its_end_and_bytes_are_exact(world: World, command: InContainer) -> None:
    assert world.sh(command.container, "read x || echo end").stdout == b"end\n"
    data = bytes(range(256)) * 20
    assert world.sh(command.container, "cat", stdin=data).stdout == data
    assert world.sh(command.container, "cat >&2", stdin=data).stderr == data
    flood = world.sh(command.container, "exec 0<&-; echo closed", stdin=bytes(1 << 20))
    assert flood.stdout == b"closed\n"
    assert world.sh(command.container, "sleep 0.1; wc -c", stdin=bytes(1 << 20)).stdout.strip() == b"1048576"


@everywhere
def test_who_asks_one_that_is_gone_is_told(world: World) -> None:
    container = world.create(LIMITS)
    world.do(container.kill())
    world.do(container.kill())
    assert world.sh(container, "true").status == ExecStatus.SANDBOX_DEAD
    assert world.call(container, "run", code="answer = 1").status == CallStatus.INFRA
    for asked in (
        container.upload({"x": b""}),
        container.download(["x"], max_bytes=1),
        container.snapshot(max_bytes=1),
    ):
        with pytest.raises(SandboxGoneError):
            world.do(asked)  # type: ignore[arg-type]


@everywhere
@pytest.mark.parametrize("how", ["kill", "SIGKILL"])
def test_who_is_asked_while_it_goes_answers(world: World, how: str) -> None:
    container = world.create(LIMITS)
    pid, groups = container.pid, container.cgroup

    async def both() -> None:
        running = [asyncio.create_task(container.exec(python("import time; time.sleep(60)"))) for _ in range(4)]
        running.append(asyncio.create_task(container.exec(python("print(1, flush=True); import time; time.sleep(60)"))))
        await asyncio.sleep(0.2)
        if how == "kill":
            await asyncio.gather(container.kill(), container.kill())
            wanted = {ExecStatus.KILLED, ExecStatus.SANDBOX_DEAD}
        else:
            os.kill(pid, 9)
            wanted = {ExecStatus.INFRA}
        assert {(await task).status for task in running} <= wanted
        await container.kill()

    world.do(both())
    assert is_gone(pid)
    assert [path for path in groups if path.exists()] == []
    assert descendants(pid) == []


@everywhere
def test_a_key_stands_for_one_command_however_often_and_by_whom_it_is_asked(world: World) -> None:
    container = world.create(LIMITS)
    once = python("import os, time; time.sleep(0.2); open('n', 'a').write('x'); print(os.path.getsize('n'))")

    async def asked() -> None:
        results = await asyncio.gather(*(container.exec(once, key="k") for _ in range(8)))
        assert {result.stdout for result in results} == {b"1\n"}
        impatient = asyncio.create_task(container.exec(once, key="l"))
        await asyncio.sleep(0.05)
        impatient.cancel()
        await asyncio.gather(impatient, return_exceptions=True)
        assert (await container.exec(once, key="l")).stdout == b"2\n"
        for other in (python("print(2)"), python("print(1)", wall_s=9.0)):
            with pytest.raises(SandboxKeyError):
                await container.exec(other, key="k")
        with pytest.raises(SandboxKeyError):
            await container.call(Call(tool="run", arguments={"code": "answer = 1"}), key="k")

    world.do(asked())
    world.do(container.kill())


def test_a_command_finds_nothing_of_what_another_was_told(world: World, command: InContainer) -> None:
    """A hidden test's input lies in the agent and in the processes around commands; none of it in a later command."""
    words = ["hidden", "-word-", "4711"]
    told = world.do(command.container.exec(ExecRequest(argv=("cat",), stdin="".join(words).encode() * 50)))
    assert told.stdout
    code = f"""
word = ''.join({words!r}).encode()
answer = []
for path in [f'/proc/{{p}}/mem' for p in os.listdir('/proc') if p.isdigit() and p != str(os.getpid())]:
    try:
        with open(path.replace('mem', 'maps')) as maps, open(path, 'rb', 0) as mem:
            for line in maps:
                low, high = (int(n, 16) for n in line.split()[0].split('-'))
                if ' rw' in line and high - low < 64 << 20:
                    mem.seek(low)
                    if word * 2 in mem.read(high - low): answer.append(path)
    except OSError: pass
"""
    assert answer(command, code) == []


def test_a_command_slows_none_after_it(world: World, command: InContainer) -> None:
    """Short commands, which one process around them leads one after the other, and which is of the same user."""

    container = command.container

    async def asked() -> list[bytes]:
        # Of the user 0, which stands for the caller's.
        programs = [("renice", "-n", "19", "-u", "0"), ("ionice", "-c", "3", "-u", "0"), ("nice",), ("ionice",)]
        results = [await container.exec(ExecRequest(argv=argv)) for argv in programs]
        return [result.stdout.split(b":")[0].strip() for result in results[2:]]

    for _ in range(4):
        assert world.do(asked()) == [b"0", b"none"]
    assert harmless(command, "os.setpriority(os.PRIO_PGRP, 0, 1)\nos.nice(1)").status == "ok"


def test_a_command_leaves_the_next_one_no_place_and_no_path(world: World, command: InContainer) -> None:
    """Short commands again; a call, which may be the next request of their process, is one of that process itself."""
    container = command.container
    say = Call(tool="bash", arguments={"command": "env; pwd"})
    alone = world.do(world.create(LIMITS).call(say)).text

    async def asked() -> tuple[bytes, str]:
        await container.exec(ExecRequest(argv=("true",), env={"PATH": "/usr/bin:/nowhere"}, cwd="/usr"))
        below = await container.exec(ExecRequest(argv=("pwd",), cwd="workspace"))
        await container.exec(ExecRequest(argv=("true",), env={"PATH": "/usr/bin:/nowhere"}, cwd="/usr"))
        return below.stdout, (await container.call(say)).text

    for _ in range(4):
        assert world.do(asked()) == (b"/workspace\n", alone)


@everywhere
def test_no_mount_or_process_is_left_on_the_host(world: World) -> None:
    mounts = set(Path("/proc/self/mountinfo").read_text().splitlines())
    containers = [world.create(LIMITS) for _ in range(4)]
    for container in containers:
        world.sh(container, "sleep 60 & sleep 0.01")
    pids = [pid for container in containers for pid in (container.pid, *descendants(container.pid))]
    for container in containers:
        world.do(container.kill())
    wait_for(lambda: all(is_gone(pid) for pid in pids))
    # What another test mounts meanwhile goes with it.
    wait_for(lambda: set(Path("/proc/self/mountinfo").read_text().splitlines()) <= mounts)
