"""Proves: sandboxes of every substrate whose owners, supervisors, guards and insides are killed at random leave nothing
once a lease has passed: no process, mount, control group, file, socket or shared memory, and no descriptor in a
supervisor that lived through it.

Does not prove: that a machine that loses its power leaves nothing; what there is of them lies in memory, but for the
small files of a home, which the next supervisor removes.
"""

import asyncio
import contextlib
import os
import random
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import pytest

from rollforward.sandbox.homes import homes_root
from tests.bench.bench_container import say
from tests.helpers.containers import GVISOR
from tests.helpers.leaks import Household, descriptors
from tests.helpers.machines import MachineWorld
from tests.helpers.owner_main import LIMITS, spec
from tests.helpers.sandboxes import descendants
from tests.helpers.supervisors import Stage, command, owner_process, pids

LEASE_S: Final = 1.5
GONE_S: Final = 60.0
"""For everything to go after it, on a busy machine."""
HAND: Final = 16
"""Sandboxes that an owner makes if it lives long enough."""
STANDSTILL_S: Final = 20.0
MIX: Final = {"container": 700, "function": 150, "microvm": 120, "fullvm": 30} | dict.fromkeys(GVISOR, 60)
VICTIMS: Final = {
    ("owner",): 0.5,
    ("inside",): 0.2,
    ("supervisor",): 0.1,
    ("guard",): 0.08,
    ("guard", "supervisor"): 0.12,
}
KEPT_SUPERVISOR: Final = {("owner",): 0.7, ("inside",): 0.3}


class Soak:
    """Owners of sandboxes, killed and replaced until so many of each kind were made."""

    def __init__(
        self, stage: Stage, household: Household, seed: int, *, num_owners: int, tell: Callable[[str], None]
    ) -> None:
        self._stage, self._household, self._chance, self._tell = stage, household, random.Random(seed), tell
        self._owners: list[subprocess.Popen[str]] = []
        self._readers: list[threading.Thread] = []
        self._done: set[subprocess.Popen[str]] = set()
        self._num_owners, self._num_started, self._begin_s = num_owners, 0, time.monotonic()
        self.mark = f"31{int(stage.name, 16) % 10**9:09d}"
        self.made: Counter[str] = Counter()
        self.lost: Counter[str] = Counter()
        self.kills: Counter[str] = Counter()
        self.broken: list[int] = []

    async def run(self, quotas: Mapping[str, int], victims: Mapping[tuple[str, ...], float]) -> None:
        """Make so many more, and kill somebody after every few."""
        wanted = self.made + Counter(quotas)
        while missing := wanted - self.made:
            while len(self._owners) < self._num_owners:
                self._start(missing)
            is_still = not await self._pace()
            (names,) = self._chance.choices(list(victims), list(victims.values()))
            # Where nobody goes on they wait for room, which is given when an owner goes; others may be slow just now.
            names = ("owner",) if is_still else names
            self._strike(names)
            for owner in [owner for owner in self._owners if owner in self._done]:
                self._kill(owner)
            self._household.reap(but={owner.pid for owner in self._owners})
            self._tell(
                f"{time.monotonic() - self._begin_s:6.0f} s: made {dict(self.made)}, killed {dict(self.kills)},"
                f" lost {dict(self.lost)}"
            )
        for owner in tuple(self._owners):
            self._kill(owner)

    def _start(self, missing: Mapping[str, int]) -> None:
        self._num_started += 1
        kinds = self._chance.choices(list(missing), list(missing.values()), k=HAND)
        owner = owner_process(self._stage, f"owner-{self._num_started}", kinds, LEASE_S, self.mark)
        self._owners.append(owner)
        reader = threading.Thread(target=self._read, args=(owner,), daemon=True)
        reader.start()
        self._readers.append(reader)

    def _read(self, owner: "subprocess.Popen[str]") -> None:
        assert owner.stdout is not None
        with owner.stdout as said:
            for line in said:
                match line.split():
                    case ["done"]:
                        self._done.add(owner)
                    case ["lost", error, *_]:
                        self.lost[error] += 1
                    case [kind, _]:
                        self.made[kind] += 1

    async def _pace(self) -> bool:
        """Wait until a few more were made, and a moment longer: whoever is making the next is at any point of that.

        Returns:
            False where none were.
        """
        before = self.made.total()
        enough = before + self._chance.randint(1, 10)
        end_s = time.monotonic() + STANDSTILL_S
        while self.made.total() < enough and not self._done.issuperset(self._owners) and time.monotonic() < end_s:
            await asyncio.sleep(0.02)
        await asyncio.sleep(self._chance.uniform(0.0, 0.3))
        return self.made.total() > before

    def _strike(self, names: Sequence[str]) -> None:
        if names == ("owner",):
            self._kill(self._chance.choice(self._owners))
            return
        pid = self._stage.home.holder()
        if pid is None:
            return
        with contextlib.suppress(OSError, AssertionError):  # it may be ending or starting just now
            self._stage.look()
            inside = sorted(descendants(pid))
            victims = {"supervisor": pid, "guard": self._stage.guard()}
            victims["inside"] = self._chance.choice(inside) if inside else None
            for name, victim in ((name, victims[name]) for name in names):
                if victim is not None:
                    os.kill(victim, signal.SIGKILL)
                    self.kills[name] += 1

    def _kill(self, owner: "subprocess.Popen[str]") -> None:
        self._owners.remove(owner)
        if owner.poll() is not None:
            self.broken.append(owner.returncode)
        else:
            os.killpg(owner.pid, signal.SIGKILL)
            owner.wait()
            self.kills["owner"] += 1

    def end(self) -> None:
        for owner in tuple(self._owners):
            self._kill(owner)
        for reader in self._readers:
            reader.join()


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    made = Stage(tmp_path, monkeypatch)
    yield made
    made.end()


@pytest.fixture
def prepared() -> None:
    """Kernel, disks and states of machines are there, so that no supervisor is killed before it has made them."""
    for substrate in ("microvm", "fullvm"):
        with MachineWorld(substrate) as world:
            world.create(LIMITS)


async def nothing_is_left(stage: Stage, household: Household, soak: Soak) -> None:
    # The last supervisor and its guard were killed together perhaps: what they left, the next one removes.
    async with stage.client("look", lease_s=LEASE_S) as client:
        await client.stats()
        stage.look()
    await stage.gone(LEASE_S + GONE_S)
    assert [command(pid) for pid in pids() if soak.mark in command(pid)] == []
    said = {path.name: path.read_text(errors="replace") for path in homes_root().iterdir()}
    assert said == {}, soak.kills  # no log of one that crashed either
    homes_root().rmdir()
    await household.settled(GONE_S)


async def a_kept_supervisor(stage: Stage, soak: Soak, quotas: Mapping[str, int]) -> None:
    """One lives through all of that, and has no more open than before."""
    async with stage.client("survivor", lease_s=LEASE_S) as client:
        for kind in [kind for kind in quotas if kind != "function"]:
            sandbox = await client.create(f"first-{kind}", spec(kind))
            await sandbox.close()
        survivor = stage.supervisor()
        before = await at_rest(stage, survivor)
        await soak.run(quotas, KEPT_SUPERVISOR)
        assert await at_rest(stage, survivor) - before == Counter()
        assert stage.supervisor() == survivor


async def at_rest(stage: Stage, supervisor: int) -> Counter[str]:
    """Descriptors of a supervisor in which there is no sandbox, a warm one neither."""

    async def busy() -> list[str]:
        async with stage.client("look", lease_s=LEASE_S) as client:
            stats = await client.stats()
        counts = {"held": stats.held, "warm": stats.warm, "ending": stats.ending, "stuck": stats.stuck}
        return [f"{number} {name}" for name, number in counts.items() if number]

    end_s = time.monotonic() + LEASE_S + GONE_S
    while found := await busy():
        assert time.monotonic() < end_s, found
        await asyncio.sleep(0.1)
    found = None
    while found != (found := descriptors(supervisor)):  # it lets go of the connection that asked
        await asyncio.sleep(1.0)
    return found


def soaked(
    stage: Stage,
    quotas: Mapping[str, int],
    kept_quotas: Mapping[str, int] | None = None,
    *,
    seed: int,
    num_owners: int,
    tell: Callable[[str], None] = lambda line: None,
) -> Soak:
    """What was made and killed, of which nothing is left.

    Args:
        stage: where.
        quotas: how many of each kind, while anybody may be killed.
        kept_quotas: how many more, while one supervisor lives on; None: no such part.
        seed: says who is killed, after how many.
        num_owners: at one time.
        tell: hears how far it is.
    """

    async def run(household: Household, soak: Soak) -> None:
        await soak.run(quotas, VICTIMS)
        await nothing_is_left(stage, household, soak)
        if kept_quotas is not None:
            await a_kept_supervisor(stage, soak, kept_quotas)
            await nothing_is_left(stage, household, soak)

    with Household(stage.folder) as household:
        soak = Soak(stage, household, seed, num_owners=num_owners, tell=tell)
        try:
            asyncio.run(run(household, soak))
        finally:
            soak.end()
        assert household.own_descriptors() == Counter()
    assert soak.broken == []
    assert soak.made >= Counter(quotas) + Counter(kept_quotas or {})
    return soak


def test_sixty_sandboxes_of_owners_that_are_killed_leave_nothing(stage: Stage) -> None:
    done = soaked(stage, {"container": 45, "function": 15}, seed=7, num_owners=4)
    assert done.kills["owner"] >= 3


@pytest.mark.timeout(600)
def test_twenty_with_machines_among_them_leave_nothing(stage: Stage, prepared: None) -> None:
    soaked(
        stage,
        {"container": 4, "function": 2, "microvm": 4, "fullvm": 2},
        {"container": 4, "microvm": 3, "fullvm": 1},
        seed=11,
        num_owners=2,
    )


@pytest.mark.slow
@pytest.mark.timeout(6000)
def test_a_thousand_of_all_substrates_leave_nothing(
    stage: Stage, prepared: None, capsys: pytest.CaptureFixture[str]
) -> None:
    told = time.monotonic()

    def tell(line: str) -> None:
        nonlocal told
        if time.monotonic() - told > 15.0:
            told = time.monotonic()
            with capsys.disabled():
                say(line)

    kept = {kind: number // 4 for kind, number in MIX.items()}
    killed = {kind: number - kept[kind] for kind, number in MIX.items()}
    done = soaked(stage, killed, kept, seed=3, num_owners=6, tell=tell)
    with capsys.disabled():
        say(f"made {dict(done.made)}, killed {dict(done.kills)}, lost on the way {dict(done.lost)}: nothing is left")
    assert done.made.total() >= 1000
    assert min(done.kills[name] for name in ("owner", "supervisor", "guard", "inside")) >= 8, done.kills


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [1, 2])
def test_a_thousand_sandboxes_of_owners_that_are_killed_leave_nothing(stage: Stage, seed: int) -> None:
    done = soaked(stage, {"container": 500}, seed=seed, num_owners=8)
    assert min(done.kills[name] for name in ("owner", "supervisor", "guard", "inside")) >= 4, done.kills
