"""Proves: ranks that are killed at any point of a step, or all of them in a checkpoint, cost no bit: whoever is left
ends soon, and the restart from the last whole checkpoint has the weights of a run that nobody disturbed, on the same
ranks, on one and on four.

Real processes, real SIGKILL, the product's trainer (HybridMuon, stochastic rounding, bias update) and checkpoints.
The same through `rollforward train` and Ray is in tests/faults/test_resume_elsewhere.py.
"""

import contextlib
import os
import random
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollforward.rl.checkpoints import CHECKPOINTS_NAME, latest_checkpoint
from tests.helpers.learner_main import POINTS
from tests.helpers.learners import Ended, Fault, Learners, logs, weights

KILLED = -signal.SIGKILL
SOON_S = 30.0
"""Long on a busy machine, and far below the timeout of a collective call."""


@pytest.fixture(scope="module")
def learners() -> Iterator[Learners]:
    with Learners() as started:
        yield started


@pytest.fixture(scope="module")
def undisturbed(learners: Learners, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps on one rank, with both checkpoints."""
    root = tmp_path_factory.mktemp("undisturbed")
    assert learners.run(root, num_ranks=1, steps=2).codes == [0], logs(root)
    return root


def _after_step_1(undisturbed: Path, root: Path) -> Path:
    """A directory in which the first step is done."""
    name = f"{CHECKPOINTS_NAME}/step_000001"
    shutil.copytree(undisturbed / name, root / name)
    return root


def _step(root: Path) -> int:
    """Of the checkpoint that a restart would take."""
    found = latest_checkpoint(root / CHECKPOINTS_NAME)
    assert found is not None, "a whole checkpoint was there before"
    return found[1].step


def _require_undisturbed(learners: Learners, root: Path, undisturbed: Path, *, num_ranks: int) -> None:
    """Go on to the second step and compare all weights."""
    ended = learners.run(root, num_ranks=num_ranks, steps=2)
    assert ended.codes == [0] * num_ranks, logs(root)
    expected = weights(undisturbed)
    found = weights(root)
    assert found == {step: expected[step] for step in found}
    assert _step(root) == 2


def _require_death(ended: Ended, victim: int, root: Path) -> None:
    """The victim is killed, the others end by themselves, with an error, and soon."""
    assert ended.codes[victim] == KILLED, logs(root)
    assert [code for rank, code in enumerate(ended.codes) if rank != victim] == [1] * (len(ended.codes) - 1), logs(root)
    assert ended.last_s < SOON_S


def test_a_rank_killed_in_a_step_costs_no_bit(learners: Learners, undisturbed: Path, tmp_path: Path) -> None:
    """One death after another in the second step of one run, each at another point; then the restart."""
    root = _after_step_1(undisturbed, tmp_path / "run")
    for fault in (
        Fault("forward", 1, rank=1, call=1),
        Fault("message", 1, rank=0, call=2),
        Fault("orthogonalise", 1, rank=1, call=3),
        Fault("publish", 1, rank=0, call=5),
        Fault("save", 1, rank=1),
    ):
        _require_death(learners.run(root, num_ranks=2, steps=2, fault=fault), fault.rank, root)
        assert _step(root) == 1, fault
    for num_ranks in (1, 4):
        copy = shutil.copytree(root, tmp_path / f"on {num_ranks}")
        _require_undisturbed(learners, copy, undisturbed, num_ranks=num_ranks)
    _require_undisturbed(learners, root, undisturbed, num_ranks=2)


def test_all_ranks_killed_in_a_checkpoint_leave_the_one_before(
    learners: Learners, undisturbed: Path, tmp_path: Path, seed: int
) -> None:
    """At three random bytes of what a rank writes, when all is written, and when it is read back."""
    root = _after_step_1(undisturbed, tmp_path / "run")
    files = list((root / CHECKPOINTS_NAME / "step_000001").glob("*.safetensors"))
    half = sum(file.stat().st_size for file in files) // 2
    draws = random.Random(seed)
    at_bytes = [
        Fault("byte", 1, rank=draws.randrange(2), call=draws.randrange(half // 2), everyone=True) for _ in "abc"
    ]
    others = [Fault(point, 1, everyone=True) for point in ("sync", "read back")]
    for fault in (*at_bytes, *others):
        assert learners.run(root, num_ranks=2, steps=2, fault=fault).codes == [KILLED] * 2, logs(root)
        (partial,) = (root / CHECKPOINTS_NAME).glob(".step_000002.partial")
        written = sum(file.stat().st_size for file in partial.glob("*.safetensors"))
        assert written >= fault.call if fault.point == "byte" else (partial / "state.json").exists()
        assert _step(root) == 1, fault
    _require_undisturbed(learners, root, undisturbed, num_ranks=2)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_a_rank_killed_anywhere(
    learners: Learners, undisturbed: Path, tmp_path: Path, num_ranks: int, seed: int
) -> None:
    """Every point at random calls; groups of two where four ranks allow it."""
    root = _after_step_1(undisturbed, tmp_path / "run")
    draws = random.Random(seed)
    zero_size = 2 if num_ranks == 4 else None
    for point in sorted(set(POINTS) - {"sync", "read back"}) * 2:
        fault = Fault(point, 1, rank=draws.randrange(num_ranks), call=draws.choice((0, 0, 1, 2, 4)))
        ended = learners.run(root, num_ranks=num_ranks, steps=2, fault=fault, zero_size=zero_size)
        if ended.codes == [0] * num_ranks:  # the point has fewer calls
            shutil.rmtree(root / CHECKPOINTS_NAME / "step_000002")
            continue
        _require_death(ended, fault.rank, root)
        assert _step(root) == 1, fault
    for again in (1, 2, 4):
        copy = shutil.copytree(root, tmp_path / f"on {again}")
        _require_undisturbed(learners, copy, undisturbed, num_ranks=again)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("num_ranks", [1, 4])
def test_all_ranks_killed_at_random_times(
    learners: Learners, undisturbed: Path, tmp_path: Path, num_ranks: int, seed: int
) -> None:
    """From the start of the second step's checkpoint to after its end, by somebody else's SIGKILL."""
    root = _after_step_1(undisturbed, tmp_path / "run")
    checkpoints = root / CHECKPOINTS_NAME
    draws = random.Random(seed)
    partial = checkpoints / ".step_000002.partial"
    steps: list[int] = []
    num_torn = 0
    for _ in range(20):
        pids = learners.start(root, num_ranks=num_ranks, steps=2)
        deadline_s = time.monotonic() + 120
        while not partial.exists() and time.monotonic() < deadline_s:
            time.sleep(0.0005)
        time.sleep(draws.random() * 0.1)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        learners.wait()
        steps.append(_step(root))
        num_torn += partial.exists()
        for left in (partial, checkpoints / "step_000002"):  # the next attempt is watched for its own
            shutil.rmtree(left, ignore_errors=True)
    assert set(steps) <= {1, 2}
    assert num_torn > 0, "no kill came in time; a checkpoint has become faster than 0.1 s x a random number"
    _require_undisturbed(learners, root, undisturbed, num_ranks=num_ranks)
