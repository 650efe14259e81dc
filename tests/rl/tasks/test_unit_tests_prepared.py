"""Proves, in real sandboxes: hidden tests of a task with `prepare` run on the very state that the completion began with
and what it submitted, and on nothing else of it, in containers and in machines: what it took away stays away, what it
put elsewhere is there; the state costs tests no room; a state that is gone is no 0, what a policy spoilt is.
"""

import asyncio
import io
import secrets
import tarfile
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rollforward.rl.tasks.grader import Grader
from rollforward.rl.tasks.reward_config import UnitTestReward
from rollforward.rl.tasks.types import Score, ScoreReason, Unscored
from rollforward.rl.tasks.unit_tests import UnitTest, UnitTestJudge
from rollforward.rollout.types import FailureType
from rollforward.rollout.workspace import BegunWith, Submission, Workspace
from rollforward.sandbox.client import SandboxClient
from rollforward.sandbox.config import ContainerConfig, KeptSubstrate, Limits
from rollforward.sandbox.homes import supervisor_id
from rollforward.sandbox.launch import LocalTransport
from rollforward.sandbox.prepared import Preparation, read_prepared
from rollforward.sandbox.types import SandboxSpec, SnapshotKind
from tests.helpers.machines import need_machines

MIB = 1 << 20
CONFIG = ContainerConfig(
    trusted_code=True,
    limits=Limits(wall_s=20.0, memory_bytes=128 * MIB, disk_bytes=4 * MIB, processes=32, files=64),
    create_timeout_s=120.0,
)
FILES = {"solve.py": b"old", "data/in.txt": b"7", "more.txt": b"more"}
DECLARED = ("solve.py", "more.txt", "/workspace/new.txt", "data/in.txt")
COMMANDS = (
    ("sh", "-c", "od -An -N8 -tx8 /dev/urandom > noise; mkdir lib; echo 'x = 5' > lib/five.py; cat solve.py > was"),
    ("sh", "-c", "for i in $(seq 50); do echo > lib/$i; done; head -c 3000000 /dev/zero > lib/big"),
)
PREPARED = Workspace(files=FILES, prepare=COMMANDS)

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def name() -> str:
    return supervisor_id("tests of prepared unit tests", secrets.token_hex(8))


@pytest.fixture(scope="module")
def grader(name: str) -> Generator[Grader]:
    grader = Grader(CONFIG, [LocalTransport(name, CONFIG)])
    yield grader
    grader.close()


def begun(
    name: str, directory: Path, workspace: Workspace = PREPARED, substrate: KeptSubstrate = "container"
) -> BegunWith:
    """What a completion of this workspace begins with."""
    spec = SandboxSpec(substrate=substrate, image=workspace.image, limits=CONFIG.limits)

    async def prepare() -> BegunWith:
        async with SandboxClient([LocalTransport(name, CONFIG)], CONFIG, owner="a completion") as client:
            preparation = Preparation(
                client,
                directory,
                spec=spec,
                files=workspace.files,
                commands=workspace.prepare,
                config=CONFIG,
                sync=False,
            )
            return BegunWith(directory=str(directory), record=await preparation.record())

    return asyncio.run(asyncio.wait_for(prepare(), 240))


SHAPES = (
    (
        "sh",
        "-c",
        "mkdir lib kept shut; echo > lib/five.py; echo > deep; echo locked > kept/locked; chmod 444 kept/locked",
    ),
    (
        "sh",
        "-c",
        "echo > kept/runs; chmod 755 kept/runs; printf shut > shut/in.txt; chmod 444 shut/in.txt; chmod 555 shut",
    ),
)


@pytest.fixture(scope="module")
def shapes(name: str, tmp_path_factory: pytest.TempPathFactory) -> BegunWith:
    """A state with directories, files and rights in the way."""
    workspace = msgspec.structs.replace(PREPARED, prepare=SHAPES)
    return begun(name, tmp_path_factory.mktemp("shapes") / "prepared", workspace)


@pytest.fixture(scope="module")
def state(name: str, tmp_path_factory: pytest.TempPathFactory) -> BegunWith:
    return begun(name, tmp_path_factory.mktemp("step") / "prepared")


def judged(
    grader: Grader,
    state: BegunWith | None,
    files: dict[str, str],
    *tests: dict[str, Any],
    workspace: Workspace = PREPARED,
    declared: Sequence[str] = DECLARED,
    substrate: KeptSubstrate = "container",
) -> Score | Unscored:
    reward = UnitTestReward(timeout_s=10.0)
    submission = Submission(files={path: text.encode() for path, text in files.items()}, begun_with=state)
    judge = UnitTestJudge(reward, grader, owner="task mine", substrate=substrate)
    told = msgspec.convert(tests, tuple[UnitTest, ...])
    return judge(submission, told, declared=declared, workspace=workspace)


def noise_of(state: BegunWith) -> str:
    """The random number of a state, from its own bytes."""
    return noise_in(read_prepared(Path(state.directory), state.record).data)


def noise_in(tar: bytes) -> str:
    with tarfile.open(fileobj=io.BytesIO(tar)) as archive:
        (member,) = [one for one in archive.getmembers() if one.name.endswith("/noise")]
        file = archive.extractfile(member)
        assert file is not None
        return file.read().decode().strip()


def value(score: Score | Unscored) -> float:
    assert isinstance(score, Score), score
    return score.value


RUN = {"argv": ["python3", "solve.py"], "stdout": "10"}
USES = {"solve.py": "import sys\nsys.path.insert(0, 'lib')\nimport five\nprint(2 * five.x)"}


def test_tests_run_on_the_very_state_that_the_completion_began_with(grader: Grader, state: BegunWith) -> None:
    same = {"argv": ["cat", "noise"], "stdout": noise_of(state)}
    was = {"argv": ["cat", "was", "data/in.txt"], "stdout": "old7"}
    given = USES | {"data/in.txt": "7", "more.txt": "other"}
    assert judged(grader, state, given, RUN, same, was) == Score(value=1.0, reason=ScoreReason.CORRECT)
    # Submitted files are in place of the state's.
    assert judged(grader, state, given, {"argv": ["cat", "more.txt"], "stdout": "other"}).value == 1.0  # type: ignore[union-attr]
    # Without `prepare` there is nothing but them.
    bare = msgspec.structs.replace(PREPARED, prepare=())
    assert judged(grader, None, given, RUN, same, workspace=bare).value == 0.0  # type: ignore[union-attr]


def test_what_a_completion_took_away_stays_away(grader: Grader, state: BegunWith) -> None:
    listed = {"argv": ["sh", "-c", "ls more.txt data/in.txt new.txt was"], "any_exit": True, "stdout": "was"}
    assert judged(grader, state, USES, listed).value == 1.0  # type: ignore[union-attr]
    # What is not declared is the state's.
    listed["stdout"] = "data/in.txt\nmore.txt\nwas"
    assert judged(grader, state, USES, listed, declared=["solve.py"]).value == 1.0  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "left",
    [
        {"lib": "file", "solve.py": ""},
        {"deep/er/x": "x"},
        {"kept/locked": "mine", "kept/runs": "#!/bin/sh"},
    ],
    ids=["a file for a directory", "directories for a file", "a file for one that nobody may write"],
)
def test_what_was_submitted_takes_the_place_of_whatever_the_state_has_there(
    grader: Grader, shapes: BegunWith, left: dict[str, str]
) -> None:
    """The tests judge it, so an answer that is worth nothing is a 0 like any other."""
    workspace = msgspec.structs.replace(PREPARED, prepare=SHAPES)
    told: dict[str, Any] = {"workspace": workspace, "declared": list(left)}
    shown = {"argv": ["cat", *left], "stdout": "".join(left.values())}
    assert judged(grader, shapes, left, shown, **told) == Score(value=1.0, reason=ScoreReason.CORRECT)
    assert judged(grader, shapes, left, RUN, **told) == Score(value=0.0, reason=ScoreReason.WRONG)
    if "kept/runs" in left:  # what was in nobody's way is written into, and still runs
        assert value(judged(grader, shapes, left, {"argv": ["kept/runs"]}, **told)) == 1.0


def test_what_cannot_be_made_as_it_was_is_a_0(grader: Grader, shapes: BegunWith) -> None:
    """A completion may let itself write where the state that it began with does not."""
    workspace = msgspec.structs.replace(PREPARED, prepare=SHAPES)
    lost = Score(value=0.0, reason=ScoreReason.WRONG)
    there = {"argv": ["cat", "shut/in.txt"], "stdout": "shut"}
    told: dict[str, Any] = {"workspace": workspace, "declared": ["shut/in.txt", "solve.py"]}
    assert judged(grader, shapes, {"shut/in.txt": "open", "solve.py": ""}, {"argv": ["true"]}, **told) == lost
    assert judged(grader, shapes, {"solve.py": ""}, {"argv": ["true"]}, **told) == lost
    # One that left the file alone has done nothing.
    assert value(judged(grader, shapes, {"shut/in.txt": "shut", "solve.py": ""}, there, **told)) == 1.0


def test_each_fresh_sandbox_begins_so(grader: Grader, state: BegunWith) -> None:
    """A test that makes its sandbox unusable is followed by another one, with the state."""
    harm = {"argv": ["sh", "-c", "rm -rf lib noise; ln -s /etc in.txt; kill -9 -1"], "stdout": "never"}
    after = {"argv": ["sh", "-c", "cat in.txt; ls more.txt; python3 solve.py"], "files": {"in.txt": "in "}}
    score = judged(grader, state, USES, harm, after | {"any_exit": True, "stdout": "in 10"})
    assert score.value == 0.5, "the second one passes"  # type: ignore[union-attr]


def test_the_state_costs_tests_no_room(grader: Grader, state: BegunWith) -> None:
    """It has three of the four MiB and most of the files."""
    fill = {"argv": ["sh", "-c", "head -c 3500000 /dev/zero > more && for i in $(seq 50); do echo > x$i; done"]}
    assert judged(grader, state, USES, fill).value == 1.0  # type: ignore[union-attr]


def test_a_state_that_is_gone_is_no_0(grader: Grader, state: BegunWith, tmp_path: Path) -> None:
    elsewhere = msgspec.structs.replace(state, directory=str(tmp_path))
    for lost in (elsewhere, None):
        unscored = judged(grader, lost, USES, RUN)
        assert isinstance(unscored, Unscored)
        assert unscored.failure is FailureType.INFRA
        assert "failed as infra 3 times" in unscored.detail


def test_many_are_judged_at_one_time(grader: Grader, state: BegunWith) -> None:
    with ThreadPoolExecutor(8) as pool:
        scores = list(pool.map(lambda _: judged(grader, state, USES, RUN), range(24)))
    assert scores == [Score(value=1.0, reason=ScoreReason.CORRECT)] * 24


def test_of_a_machine_the_state_is_its_files_and_fits_into_other_limits(
    grader: Grader, name: str, tmp_path: Path
) -> None:
    """What the tests may use up, and the tools that they lack, are not those of the completion's machine."""
    need_machines()
    commands = (("sh", "-c", "od -An -N8 -tx8 /dev/urandom > noise; echo 'x = 5' > five.py"),)
    workspace = Workspace(files=FILES, prepare=commands)
    state = begun(name, tmp_path / "prepared", workspace, "microvm")
    assert state.record.kind is SnapshotKind.FILES
    same = {"argv": ["cat", "noise"], "stdout": noise_of(state)}
    away = {"argv": ["sh", "-c", "test -s solve.py && test ! -e more.txt"]}
    files = {"solve.py": "import five\nprint(2 * five.x)"}
    score = judged(grader, state, files, RUN, same, away, workspace=workspace, substrate="microvm")
    assert score == Score(value=1.0, reason=ScoreReason.CORRECT)
