"""Proves: completions whose replica is told to leave, or killed, with every sandbox and supervisor it used, sample the
same bits and leave the same files when another replica goes on with another supervisor.

Everything is real: engines, command logs, supervisors, Ray actors. Sandboxes are containers, so what survives is files;
machines are in the tests of their substrate.
"""

import os
import secrets
import signal
import tempfile
import threading
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import ray

from rollforward.rollout.actors import AgentActor
from rollforward.rollout.agents import LocalAccess
from rollforward.rollout.environment import SandboxCounts
from rollforward.rollout.errors import PausedError
from rollforward.rollout.placement import ActorAccess
from rollforward.rollout.replica import Replica
from rollforward.rollout.types import Completion, Request
from rollforward.rollout.workspace import BegunWith, Workspace
from rollforward.sandbox.command_log import read_log
from rollforward.sandbox.homes import Home
from tests.helpers import agents
from tests.helpers.crashes import CrashError, crash_at
from tests.helpers.sandboxes import wait_for

FIRST, SECOND, THIRD = (secrets.token_hex(8) for _ in range(3))
"""Of no other process: control groups are the whole machine's."""


@pytest.fixture(scope="module")
def place() -> Generator[Path]:
    """A directory in which supervisors have their homes too."""
    made = tempfile.TemporaryDirectory(prefix="rf-", ignore_cleanup_errors=True)
    with made as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", folder)
        patch.setattr(tempfile, "tempdir", folder)
        agents.publish(Path(folder) / "weights")
        try:
            yield Path(folder)
        finally:
            ray.shutdown()
            for name in (FIRST, SECOND, THIRD):
                kill(name, signal.SIGTERM)


def kill(supervisor: str, number: signal.Signals = signal.SIGKILL) -> None:
    """End a supervisor with all its sandboxes."""
    home = Home.of(supervisor)
    if (pid := home.holder()) is not None:
        os.kill(pid, number)
    wait_for(lambda: not home.path.exists())


def run_in(place: Path, name: str) -> Path:
    run_dir = place / name
    run_dir.mkdir()
    (run_dir / "weights").symlink_to(place / "weights")
    return run_dir


@pytest.fixture(scope="module")
def undisturbed(place: Path) -> list[Completion]:
    run_dir = run_in(place, "undisturbed")
    return agents.sample(run_dir, LocalAccess(settings=agents.settings(run_dir, FIRST)))


def local(run_dir: Path, supervisor: str, **container: Any) -> LocalAccess:
    return LocalAccess(settings=agents.settings(run_dir, supervisor, **container))


def drained(run_dir: Path, access: Any, after_commands: int) -> None:
    """A replica that is told to leave when so many commands have ended."""
    replica = agents.open_replica(run_dir, access)
    errors: list[BaseException] = []

    def generate() -> None:
        try:
            replica.generate(agents.requests())
        except BaseException as error:  # noqa: BLE001, looked at below
            errors.append(error)

    generating = threading.Thread(target=generate)
    generating.start()
    wait_for(lambda: ended(run_dir) >= after_commands, 120)
    replica.drain(30.0)
    generating.join()
    assert [type(error) for error in errors] == [PausedError]


def ended(run_dir: Path) -> int:
    views = [read_log(path) for path in run_dir.glob("commands/*/*.log")]
    return sum(command.end is not None for view in views for command in view.history.commands.values())


def gone_on(
    run_dir: Path, access: Any, requests: Callable[[], list[Request]] = agents.requests
) -> tuple[list[Completion], SandboxCounts]:
    replica = agents.open_replica(run_dir, access)
    try:
        return replica.generate(requests()), replica.log_stats().sandbox
    finally:
        replica.close()


@pytest.mark.parametrize("after_commands", [2, 7])
@pytest.mark.parametrize("settings", [{"snapshots": "drain"}, {"snapshots": "turn", "on_lost": "restore"}])
def test_a_replica_that_leaves_takes_its_sandboxes_along(
    place: Path, undisturbed: list[Completion], settings: dict[str, Any], after_commands: int
) -> None:
    run_dir = run_in(place, f"drained-{settings['snapshots']}-{after_commands}")
    drained(run_dir, local(run_dir, SECOND, **settings), after_commands)
    going_on = [view for path in run_dir.glob("commands/*/*.log") if (view := read_log(path)).history.is_going_on]
    used = [view for view in going_on if view.history.commands]
    assert used
    assert all(view.history.snapshot is not None and view.history.is_as_kept for view in used)
    kill(SECOND)
    completions, counts = gone_on(run_dir, local(run_dir, THIRD, **settings))
    assert [one.detail for one in completions if one.failure] == []
    assert completions == undisturbed
    assert counts.restored >= 1
    assert (counts.failed, counts.unknown) == (0, 0)
    assert not list(run_dir.glob("commands/*/snapshots/*/*")), "they went with their completions"


def test_without_snapshots_a_lost_supervisor_fails_what_had_begun(place: Path, undisturbed: list[Completion]) -> None:
    """The control: the same way, and nothing kept."""
    run_dir = run_in(place, "control")
    drained(run_dir, local(run_dir, SECOND), 4)
    kill(SECOND)
    completions, counts = gone_on(run_dir, local(run_dir, THIRD))
    assert counts.failed > 0
    assert completions != undisturbed


@pytest.mark.parametrize("snapshots", ["never", "turn"])
def test_a_crash_in_which_everything_dies_does_commands_again_where_that_is_allowed(
    place: Path, undisturbed: list[Completion], snapshots: str
) -> None:
    run_dir = run_in(place, f"crashed-{snapshots}")
    settings = {"snapshots": snapshots, "on_lost": "restore"}
    replica = agents.open_replica(run_dir, local(run_dir, SECOND, **settings))
    crash_at(replica._log, 40)  # pyright: ignore[reportPrivateUsage]
    with pytest.raises(CrashError):
        replica.generate(agents.requests())
    abandon(replica)
    assert ended(run_dir) > 0
    kill(SECOND)
    completions, counts = gone_on(run_dir, local(run_dir, THIRD, **settings))
    assert [one.detail for one in completions if one.failure] == []
    assert completions == undisturbed
    assert (counts.failed, counts.unknown) == (0, 0)


def abandon(replica: Replica) -> None:
    replica._log.abandon()  # pyright: ignore[reportPrivateUsage]
    replica._environment.close()  # type: ignore[union-attr]  # pyright: ignore[reportPrivateUsage]


def test_another_actor_restores_what_a_killed_one_held(place: Path, undisturbed: list[Completion]) -> None:
    ray.init(num_cpus=1, include_dashboard=False, configure_logging=False, log_to_driver=False)
    run_dir = run_in(place, "actors")

    def access(supervisor: str) -> tuple[ActorAccess, Any]:
        settings = agents.settings(run_dir, supervisor, snapshots="drain")
        actor: Any = AgentActor.options(num_cpus=0).remote(settings, f"agents-{supervisor}")  # pyright: ignore[reportAttributeAccessIssue]
        return ActorAccess([actor]), actor

    first, actor = access(SECOND)
    drained(run_dir, first, 5)
    ray.kill(actor)
    kill(SECOND)
    second, _ = access(THIRD)
    completions, counts = gone_on(run_dir, second)
    assert completions == undisturbed
    assert counts.restored >= 1


def test_members_of_a_group_begin_with_one_prepared_state(place: Path) -> None:
    """Prepared by random numbers: all members, and those of another replica, see the same."""
    run_dir = run_in(place, "prepared")
    prepare = (("sh", "-c", "od -An -N8 -tx8 /dev/urandom > seen.txt"),)

    def requests() -> list[Request]:
        return [
            msgspec.structs.replace(
                one,
                workspace=(workspace := Workspace(files=agents.WORKSPACE.files, prepare=prepare)),
                tools=msgspec.structs.replace(agents.USE, workspace=workspace.digest),
            )
            for one in agents.requests()
        ]

    completions, counts = gone_on(run_dir, local(run_dir, THIRD), requests)
    assert counts.failed == 0
    submitted = [one.submission.files["seen.txt"] for one in completions if one.submission is not None]
    firsts = {data.split(b"\n")[0] for data in submitted}
    assert len(submitted) == len(completions)
    assert len(firsts) == 1
    assert firsts != {b"begin"}
    begun = [one.submission.begun_with for one in completions if one.submission is not None]
    (log, *_) = sorted(run_dir.glob("commands/*/*.log"))
    record = read_log(log).history.begin
    assert record is not None
    assert begun == [BegunWith(directory=str(log.parent / "prepared"), record=record)] * len(completions)
    kill(THIRD)
    assert gone_on(run_dir, local(run_dir, SECOND), requests)[0] == completions
