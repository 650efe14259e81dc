"""Proves: completions whose sandboxes are held by an actor of their own sample the same bits and leave the same files
when that actor is killed inside calls, and when the replica dies and a successor asks the same actor.
"""

import os
import secrets
import signal
import tempfile
import threading
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.exceptions import RayActorError

from rollforward.rollout.actors import AgentActor
from rollforward.rollout.agents import LocalAccess
from rollforward.rollout.placement import ActorAccess
from rollforward.rollout.types import Completion
from rollforward.sandbox.command_log import read_log
from rollforward.sandbox.homes import Home
from tests.helpers import agents
from tests.helpers.crashes import CrashError, crash_at
from tests.helpers.sandboxes import wait_for

SUPERVISOR = secrets.token_hex(8)
"""Of no other process: control groups are the whole machine's."""


@pytest.fixture(scope="module")
def place() -> Generator[Path]:
    """A cluster, and a directory in which the supervisor has its home too."""
    made = tempfile.TemporaryDirectory(prefix="rf-", ignore_cleanup_errors=True)
    with made as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", folder)
        patch.setattr(tempfile, "tempdir", folder)
        ray.init(num_cpus=1, include_dashboard=False, configure_logging=False, log_to_driver=False)
        try:
            agents.publish(Path(folder) / "weights")
            yield Path(folder)
        finally:
            ray.shutdown()
            if (pid := Home.of(SUPERVISOR).holder()) is not None:
                os.kill(pid, signal.SIGTERM)
                wait_for(lambda: Home.of(SUPERVISOR).holder() is None)


def run_in(place: Path, name: str) -> Path:
    run_dir = place / name
    run_dir.mkdir()
    (run_dir / "weights").symlink_to(place / "weights")
    return run_dir


@pytest.fixture(scope="module")
def undisturbed(place: Path) -> list[Completion]:
    run_dir = run_in(place, "undisturbed")
    return agents.sample(run_dir, LocalAccess(settings=agents.settings(run_dir, SUPERVISOR)))


def actor_access(run_dir: Path) -> tuple[ActorAccess, Any]:
    settings = agents.settings(run_dir, SUPERVISOR)
    actor: Any = AgentActor.options(num_cpus=0).remote(settings, "agents-0")  # pyright: ignore[reportAttributeAccessIssue]
    return ActorAccess([actor]), actor


def pid_of(actor: Any) -> int | None:
    """None while it is not up."""
    try:
        return ray.get(actor.__ray_call__.remote(lambda _: os.getpid()))
    except RayActorError:
        return None


def test_an_actor_that_is_killed_inside_calls_comes_back_and_every_call_ran_once(
    place: Path, undisturbed: list[Completion]
) -> None:
    run_dir = run_in(place, "killed")
    access, actor = actor_access(run_dir)
    over, killed = threading.Event(), list[int]()

    def kill() -> None:
        hit: set[tuple[str, int]] = set()
        while len(killed) < 2 and not over.wait(0.02):
            views = [read_log(path) for path in run_dir.glob("commands/*/*.log")]
            now = {(one.trajectory, one.history.running.seq) for one in views if one.history.running is not None}
            if now - hit and (pid := pid_of(actor)) is not None:  # None: it is being started again
                hit |= now
                killed.append(pid)
                os.kill(pid, signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        found = agents.sample(run_dir, access, delay_s=0.4)
    finally:
        over.set()
        killer.join()
    assert len(killed) == 2
    assert found == undisturbed


def test_an_actor_outlives_the_replica_that_asked_it(place: Path, undisturbed: list[Completion]) -> None:
    run_dir = run_in(place, "outlived")
    access, actor = actor_access(run_dir)
    before = pid_of(actor)
    replica = agents.open_replica(run_dir, access)
    crash_at(replica._log, 28)  # pyright: ignore[reportPrivateUsage]
    with pytest.raises(CrashError):
        replica.generate(agents.requests())
    replica._log.abandon()  # pyright: ignore[reportPrivateUsage]
    replica._environment.close()  # type: ignore[union-attr]  # pyright: ignore[reportPrivateUsage]
    assert agents.sample(run_dir, access) == undisturbed
    assert pid_of(actor) == before
