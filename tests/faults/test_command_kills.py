"""SIGKILL of the process that holds a session, and of the one that carries its questions, between and inside commands.

Proves that over all lives each command runs exactly once, counted by lines that it appends to a file in its sandbox,
and that every result is the one of an undisturbed run, and the same bits in every life. What a kill of the sandbox
itself leaves is in tests/sandbox/test_session.py.
"""

import asyncio
import contextlib
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Generator
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import msgspec
import pytest
import ray
from ray.exceptions import RayError

from rollforward.sandbox.client import SandboxClient
from rollforward.sandbox.command_log import log_path, read_log
from rollforward.sandbox.homes import Home, supervisor_id
from rollforward.sandbox.placement import sandbox_actors
from rollforward.sandbox.session import Session
from rollforward.sandbox.types import Call, CallStatus
from tests.helpers import command_lives_main
from tests.helpers.trajectories import CONFIG, end, spec_in, supervised

MAIN = [sys.executable, command_lives_main.__file__]


@pytest.fixture(scope="module")
def home() -> Generator[Home]:
    with supervised() as found:
        yield found


class Child:
    """A process that says a line of JSON at each step. A context manager."""

    def __init__(self, *words: str) -> None:
        self.process = subprocess.Popen([*MAIN, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def line(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "it ended"
        return line

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            stream.close()


class Lives(Child):
    """Lives of trajectories, one at a time."""

    def __init__(self) -> None:
        super().__init__("lives")
        assert self.step()["step"] == "ready"

    def begin(self, order: dict[str, Any]) -> int:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        born = self.step()
        return int(born["pid"])

    def step(self) -> dict[str, Any]:
        found = json.loads(self.line())
        assert found["step"] != "raised", found["error"]
        return found


class Carrier:
    """The process between a session and its supervisor, replaced when it is killed."""

    def __init__(self, folder: Path, home: Home) -> None:
        self.socket = folder / "carrier"
        self._home = home
        self._child: Child | None = None
        self.start()

    def start(self) -> None:
        self._child = Child("carry", str(self.socket), str(self._home.socket))
        assert json.loads(self._child.line()) == {"step": "carrying"}

    def kill(self) -> None:
        assert self._child is not None
        self._child.__exit__(None, None, None)


class Plan(NamedTuple):
    """Commands of a trajectory, and what an undisturbed run says to them."""

    commands: list[tuple[str, dict[str, Any]]]
    texts: dict[str, str]
    effects: str


def plan_of(rng: random.Random, num_commands: int) -> Plan:
    commands: list[tuple[str, dict[str, Any]]] = []
    texts: dict[str, str] = {}
    effects = ""
    for number in range(num_commands):
        key = f"t{number // 2 + 1}c{number % 2}"
        name = f"{key}-{rng.randrange(1 << 30)}"
        pauses = {pause: rng.choice((0.0, rng.uniform(0.0, 0.02))) for pause in ("before_s", "after_s")}
        commands.append((key, {"name": name, **pauses}))
        effects += f"{name}\n"
        texts[key] = f"{number + 1} {hashlib.sha256(effects.encode()).hexdigest()}"
    return Plan(commands, texts, effects)


class Tally:
    """What was killed, and where."""

    def __init__(self) -> None:
        self.holders = self.carriers = self.inside = self.between = 0

    @property
    def kills(self) -> int:
        return self.holders + self.carriers


def check_trajectory(
    lives: Lives, carrier: Carrier, order: dict[str, Any], plan: Plan, rng: random.Random, tally: Tally, most: int
) -> None:
    """Lives a trajectory to its end through kills, and checks everything that any life was told."""
    told: dict[str, dict[str, Any]] = {}
    while True:
        pid = lives.begin(order)
        victim = rng.choice(("holder", "holder", "carrier")) if tally.kills < most else ""
        countdown, delay_s = rng.randrange(1, 8), rng.choice((0.0, rng.uniform(0.0, 0.03)))
        is_closed = False
        while (found := lives.step())["step"] != "gone":
            match found["step"]:
                case "told":
                    check_told(found, plan, told)
                case "collected":
                    assert found["failure"] == found["problem"] == ""
                    assert found["files"] == {"effects": plan.effects, "given.txt": "given"}
                case "closed":
                    is_closed = True
            countdown -= 1
            if countdown == 0 and victim:
                time.sleep(delay_s)
                if victim == "holder":
                    tally.holders += 1
                    os.kill(pid, signal.SIGKILL)
                else:
                    tally.carriers += 1
                    carrier.kill()
                    time.sleep(rng.choice((0.0, 0.05)))
                    carrier.start()
        is_killed = found["code"] == -signal.SIGKILL
        assert is_killed or (found["code"] == 0 and is_closed), found
        view = read_log(Path(order["log"]))
        assert (view.damage, view.history.failure) == ("", "")
        if is_killed:
            tally.inside += view.history.running is not None
            tally.between += view.history.running is None
        if is_closed:
            assert list(told) == [key for key, _ in plan.commands]
            assert view.history.is_closed
            return


def check_told(found: dict[str, Any], plan: Plan, told: dict[str, dict[str, Any]]) -> None:
    key, result = found["key"], found["result"]
    assert result["status"] == "ok", result
    assert result["text"] == plan.texts[key]
    assert told.setdefault(key, result) == result, "another life was told something else"


def order_of(carrier: Carrier, folder: Path, name: str, plan: Plan, *, sync: bool) -> dict[str, Any]:
    """What a life is told."""
    return {
        "socket": str(carrier.socket),
        "log": str(folder / "step_000000" / f"{name}.log"),
        "id": f"kills{os.getpid()}-{name}",
        "spec": msgspec.to_builtins(spec_in(folder)),
        "config": msgspec.to_builtins(CONFIG),
        "plan": plan.commands,
        "sync": sync,
    }


def kill_so_often(home: Home, folder: Path, *, kills: int, seed: int, sync: bool) -> Tally:
    rng, tally = random.Random(seed), Tally()
    carrier, number = Carrier(folder, home), 0
    with Lives() as lives:
        try:
            while number == 0 or tally.kills < kills:
                number += 1
                plan = plan_of(rng, num_commands=8)
                order = order_of(carrier, folder, f"{seed}-{number}", plan, sync=sync)
                check_trajectory(lives, carrier, order, plan, rng, tally, kills)
        finally:
            carrier.kill()
    return tally


def test_an_undisturbed_run_is_what_the_plan_says(home: Home, tmp_path: Path) -> None:
    """Or the comparison with the plan would prove nothing."""
    assert kill_so_often(home, tmp_path, kills=0, seed=0, sync=False).kills == 0


def test_twelve_kills(home: Home, tmp_path: Path) -> None:
    tally = kill_so_often(home, tmp_path, kills=12, seed=7, sync=False)
    assert tally.kills == 12
    assert tally.holders
    assert tally.carriers


def test_a_carrier_that_is_away_for_a_while_is_waited_for(home: Home, tmp_path: Path) -> None:
    """For longer than the client of sandboxes asks again by itself."""
    carrier, plan = Carrier(tmp_path, home), plan_of(random.Random(3), num_commands=4)
    with Lives() as lives:
        try:
            lives.begin(order_of(carrier, tmp_path, "away", plan, sync=False))
            while (found := lives.step())["step"] != "closed":
                if found == {"step": "asking", "key": "t2c0"}:
                    carrier.kill()
                    time.sleep(3.0)
                    carrier.start()
            assert found["asked_again"] >= 1
            assert lives.step() == {"step": "gone", "code": 0}
        finally:
            carrier.kill()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_two_hundred_kills(home: Home, tmp_path: Path) -> None:
    tally = kill_so_often(home, tmp_path, kills=200, seed=1, sync=True)
    assert tally.kills == 200
    assert min(tally.holders, tally.carriers, tally.inside, tally.between) > 20, vars(tally)


@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("kills", [200])
def test_kills_of_the_sandbox_actor(tmp_path: Path, kills: int) -> None:
    """Ray's own process between a session and its supervisor, killed while trajectories go on in this one."""
    run_dir = tmp_path / "run"
    ray.init(num_cpus=2, include_dashboard=False, configure_logging=False, log_to_driver=False)
    try:
        num_killed = asyncio.run(_kill_actors(run_dir, kills=kills))
    finally:
        ray.shutdown()
        end(Home.of(supervisor_id(str(run_dir), 0, [])), signal.SIGTERM)
    assert num_killed >= kills


async def _kill_actors(run_dir: Path, *, kills: int) -> int:
    (transport,), _ = sandbox_actors(CONFIG, run_dir)
    rng, number, tally = random.Random(5), 0, {"kills": 0}
    is_done = asyncio.Event()

    async def kill() -> None:
        while not is_done.is_set():
            await asyncio.sleep(rng.uniform(0.0, 1.0))
            with contextlib.suppress(RayError):
                actor_pid = await transport._actor.__ray_call__.remote(lambda _: os.getpid())
                os.kill(actor_pid, signal.SIGKILL)
                tally["kills"] += 1

    run_dir.mkdir()
    spec = spec_in(run_dir)
    async with SandboxClient([transport], CONFIG, owner="actors") as client:
        killing = asyncio.create_task(kill())
        begun_s = time.monotonic()
        while tally["kills"] < kills and time.monotonic() - begun_s < 2000:
            number += 1
            plan = plan_of(rng, num_commands=8)
            session = await Session.open(
                client,
                log_path=log_path(run_dir, f"s0-p{number}-m0"),
                sandbox_id=f"actors-{number}",
                spec=spec,
                files={},
                config=CONFIG,
                sync=False,
            )
            for key, arguments in plan.commands:
                told = await session.call(key, Call(tool="mark", arguments=arguments | {"before_s": 0.05}))
                assert (told.result.status, told.result.text) == (CallStatus.OK, plan.texts[key])
            collected = await session.collect(["effects"], max_bytes=1 << 16)
            assert collected.files == {"effects": plan.effects.encode()}
            await session.close()
        is_done.set()
        await killing
    return tally["kills"]
