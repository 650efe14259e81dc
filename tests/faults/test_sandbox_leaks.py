"""Proves: sandboxes whose owners, supervisors and guards are killed at random leave nothing: no process, no mount, no
control group, no file, no socket, once a lease has passed.

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
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollforward.sandbox.config import Limits
from rollforward.sandbox.homes import homes_root
from tests.helpers.machines import MachineWorld
from tests.helpers.supervisors import Stage, command, mount_count, owner_process, pids

LEASE_S = 1.5


class Soak:
    """Owners of sandboxes, killed and replaced until so many sandboxes were made."""

    def __init__(self, stage: Stage, seed: int, *, num_owners: int, mark: str, machines: float) -> None:
        self._machines = machines
        self._stage, self._chance, self._mark = stage, random.Random(seed), mark
        self._owners: list[subprocess.Popen[str]] = []
        self._readers: list[threading.Thread] = []
        self._num_owners, self._num_started = num_owners, 0
        self.made: list[str] = []
        self.lost: list[str] = []
        self.kills = {"owner": 0, "supervisor": 0, "guard": 0}

    async def run(self, count: int) -> None:
        while len(self.made) < count:
            while len(self._owners) < self._num_owners:
                self._start()
            # Machines take longer to make: who is killed at once makes none.
            await asyncio.sleep(self._chance.uniform(0.05, 0.4) * (8.0 if self._machines else 1.0))
            self._strike()
        for owner in self._owners:
            self._kill(owner)

    def _start(self) -> None:
        self._num_started += 1
        owner = owner_process(
            self._stage, f"owner-{self._num_started}", 40, LEASE_S, self._mark, machines=self._machines
        )
        self._owners.append(owner)
        reader = threading.Thread(target=self._read, args=(owner,), daemon=True)
        reader.start()
        self._readers.append(reader)

    def _read(self, owner: "subprocess.Popen[str]") -> None:
        assert owner.stdout is not None
        with owner.stdout as said:
            for line in said:
                (self.lost if line.startswith("lost") else self.made).append(line.strip())

    def _strike(self) -> None:
        """Kill somebody, an owner mostly."""
        chance = self._chance.random()
        if chance < 0.35:
            owner = self._chance.choice(self._owners)
            self._owners.remove(owner)
            self._kill(owner)
            self.kills["owner"] += 1
        elif chance < 0.43 and (pid := self._stage.home.holder()) is not None:
            names = self._chance.choice((("supervisor",), ("guard",), ("guard", "supervisor")))
            with contextlib.suppress(OSError, AssertionError):  # it may be ending or starting just now
                self._stage.look()
                victims = {"supervisor": pid, "guard": self._stage.guard()}
                for name, victim in ((name, victims[name]) for name in names):
                    if victim is not None:
                        os.kill(victim, signal.SIGKILL)
                        self.kills[name] += 1

    def _kill(self, owner: "subprocess.Popen[str]") -> None:
        os.killpg(owner.pid, signal.SIGKILL)
        owner.wait()

    def end(self) -> None:
        for owner in self._owners:
            if owner.poll() is None:
                self._kill(owner)
        for reader in self._readers:
            reader.join(timeout=30)


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    made = Stage(tmp_path, monkeypatch)
    yield made
    made.end()


@pytest.fixture
def prepared() -> None:
    """Kernel, disks and states of machines are there, so that no supervisor is killed before it has made them."""
    limits = Limits(memory_bytes=64 << 20, disk_bytes=4 << 20)
    for substrate in ("microvm", "fullvm"):
        with MachineWorld(substrate) as world:
            world.create(limits)


async def soak(stage: Stage, count: int, *, seed: int, num_owners: int, machines: float = 0.0) -> Soak:
    mark = f"31{int(stage.name, 16) % 10**9:09d}"
    mounts = mount_count()
    running = Soak(stage, seed, num_owners=num_owners, mark=mark, machines=machines)
    try:
        await running.run(count)
    finally:
        running.end()
    if stage.home.holder() is None:
        # The last supervisor and its guard were killed together perhaps: what they left, the next one removes.
        await stage.up(lease_s=LEASE_S)
    stage.look()
    await stage.gone(LEASE_S + 15.0)
    assert [command(pid) for pid in pids() if mark in command(pid)] == []
    assert mount_count() <= mounts
    assert os.listdir(homes_root()) == []
    return running


def test_sixty_sandboxes_of_owners_that_are_killed_leave_nothing(stage: Stage) -> None:
    done = asyncio.run(soak(stage, 60, seed=7, num_owners=4))
    assert len(done.made) >= 60
    assert done.kills["owner"] >= 3


@pytest.mark.timeout(600)
def test_twenty_with_machines_among_them_leave_nothing(stage: Stage, prepared: None) -> None:
    done = asyncio.run(soak(stage, 20, seed=11, num_owners=2, machines=0.5))
    assert len(done.made) >= 20


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_a_thousand_with_machines_among_them_leave_nothing(stage: Stage, prepared: None) -> None:
    done = asyncio.run(soak(stage, 1000, seed=3, num_owners=8, machines=0.1))
    assert len(done.made) >= 1000
    assert all(done.kills.values()), done.kills


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [1, 2])
def test_a_thousand_sandboxes_of_owners_that_are_killed_leave_nothing(stage: Stage, seed: int) -> None:
    done = asyncio.run(soak(stage, 500, seed=seed, num_owners=8))
    assert len(done.made) >= 500
    assert all(done.kills.values()), done.kills
