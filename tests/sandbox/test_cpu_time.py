"""Proves: what a command is said to have computed is its own, however it ended and whatever its process has run before.

Commands say themselves what they have computed, so that a busy machine makes no difference.
"""

import asyncio
import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from rollforward.sandbox.container import Container
from rollforward.sandbox.types import Call, ExecRequest, ExecStatus
from tests.helpers.containers import GVISOR, SMALL, World
from tests.helpers.machines import MachineWorld
from tests.helpers.sandboxes import descendants, tools_in, wait_for

pytestmark = pytest.mark.timeout(300)

SHORT = {"container": 5000, "gvisor": 1000, "microvm": 300, "fullvm": 300}
"""Rounds of a loop that a command has, of some ms where it runs."""
PACE = 40
"""A command on the host may take so many times as long, or a busy machine would have a process for each."""
SLACK_S = {"container": 0.1, "gvisor": 0.3, "microvm": 0.6, "fullvm": 0.6}
"""What a command computes before it says something and after it has said the last, and ticks of ten ms in which the
kernel counts. A machine that is emulated takes for computing what its processor waits for the host's."""
KINDS = ("container", *GVISOR, "microvm", pytest.param("fullvm", marks=pytest.mark.slow))


@pytest.fixture(scope="module", params=KINDS)
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World | MachineWorld]:
    tools = tools_in(tmp_path_factory.mktemp("tools"))
    kind = request.param
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Container, "pace", PACE)
        with MachineWorld(kind, tools) if kind in ("microvm", "fullvm") else World(tools, substrate=kind) as made:
            yield made


def loop(world: World | MachineWorld, times: int) -> str:
    """What a shell computes for so many times as long as a short command does."""
    return f"i=0; while [ $i -lt {times * SHORT[world.name]} ]; do i=$((i+1)); done"


def run_many(world: World | MachineWorld, sandbox: object) -> float:
    """Seconds that many short commands have computed."""
    return sum(world.sh(sandbox, loop(world, 1)).cpu_s for _ in range(60))  # type: ignore[arg-type]


@pytest.mark.parametrize("has_run", [False, True])
@pytest.mark.parametrize("script", ["{}", "sh -c '{}'; true", "(sh -c '{}' & ); sleep 100"])
def test_a_command_that_is_killed_at_its_deadline_has_computed_what_it_says(
    world: World | MachineWorld, script: str, has_run: bool
) -> None:
    """Alone, below a shell that waits for it, and beside one whose parent has gone: it says again and again what its
    shell has computed, as a user and in the kernel."""
    own_s, wall_s = 0.0, 1.0
    while own_s < 0.3:  # it may have to wait for a processor
        sandbox = world.create(msgspec.structs.replace(SMALL, output_bytes=1 << 16))
        if has_run:
            run_many(world, sandbox)
        result = world.sh(sandbox, script.format(f"while :; do times; {loop(world, 4)}; done"), wall_s=wall_s)
        assert result.status == ExecStatus.TIMEOUT
        of_shell = result.stdout.decode().split("\n")[:-1:2]  # each other line is of what it has waited for
        own_s = sum(float(one.removeprefix("0m").removesuffix("s")) for one in " ".join(of_shell[-1:]).split())
        assert own_s - 0.05 <= result.cpu_s <= own_s + SLACK_S[world.name]
        world.do(sandbox.kill())
        wall_s *= 2


def test_a_command_that_sleeps_to_its_deadline_has_computed_nothing(world: World | MachineWorld) -> None:
    sandbox = world.create()
    run_many(world, sandbox)
    result = world.sh(sandbox, "sleep 100", wall_s=0.5)
    assert (result.status, result.cpu_s < SLACK_S[world.name]) == (ExecStatus.TIMEOUT, True), result
    world.do(sandbox.kill())


def test_a_command_that_ends_has_computed_what_it_waited_for(world: World | MachineWorld) -> None:
    sandbox = world.create()
    code = "import time\nend = time.process_time() + 0.4\nwhile (now := time.process_time()) < end: pass\nprint(now)"
    for script in ("exec python3 -c '{}'", "python3 -c '{}'; true"):
        result = world.sh(sandbox, script.format(code), wall_s=60.0)
        assert result.status == ExecStatus.OK
        assert abs(result.cpu_s - float(result.stdout)) < SLACK_S[world.name]
    world.do(sandbox.kill())


@pytest.mark.parametrize("is_call", [False, True])
def test_what_ran_before_does_not_make_the_platforms_failure_the_commands(
    tmp_path: Path, is_call: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process around it is killed from outside, as one is that has used up what may be computed."""
    call = Call(tool="run", arguments={"code": "subprocess.run(['sleep', '100'])"})
    monkeypatch.setattr(Container, "pace", PACE)
    with World(tools_in(tmp_path)) as world:
        container = world.create(msgspec.structs.replace(SMALL, cpu_s=0.1))
        assert run_many(world, container) > 0.15

        async def killed() -> str:
            asked = container.call(call) if is_call else container.exec(ExecRequest(argv=("sleep", "100")))
            asking = asyncio.create_task(asked)
            os.kill(await asyncio.to_thread(_around_sleep, container.pid), signal.SIGKILL)
            return (await asking).status

        assert world.do(killed()) == "infra"


def _around_sleep(pid: int) -> int:
    """The process below one that waits for a program which sleeps, once there is one."""
    found: list[int] = []

    def is_there() -> bool:
        below = {one: descendants(one)[:1] for one in descendants(pid)}
        with contextlib.suppress(OSError):
            found[:] = [one for one, child in below.items() if child and _program(child[0]) == b"sleep"]
        return bool(found)

    wait_for(is_there)
    return found[0]


def _program(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes().partition(b"\0")[0]
