"""Proves: a real `rollforward train` whose learner loses a rank to SIGKILL ends, and `resume` on another number of
ranks ends with the weights of a run that nobody disturbed.

Points within a step and within a checkpoint are in test_learner_crash.py, without Ray.
"""

import json
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from rollforward.rollout.weights import read_published
from tests.helpers.commands import command, write_recipe

# Decay moves the weights although an untrained model earns nothing; from then on the KL has a gradient.
SETTINGS = (
    "grpo.optim.type=hybrid_muon",
    "grpo.optim.lr=1e-2",
    "grpo.optim.weight_decay=0.5",
    "grpo.algo.kl_beta=0.1",
    "grpo.cluster.learner_ranks=2",
    "grpo.cluster.learner_threads=1",
)


def _weights(run_dir: Path, run: str = "grpo") -> dict[str, str]:
    return read_published(run_dir / run / "model")[0].tensors


def _finish(*words: str) -> str:
    done = subprocess.run(command(*words), capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stderr


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    directory = tmp_path_factory.mktemp("undisturbed")
    _finish("train", f"recipe={write_recipe(directory)}", f"run_dir={directory / 'run'}", *SETTINGS)
    after, before = _weights(directory / "run"), _weights(directory / "run", "sft")
    assert sum(after[name] != before[name] for name in after) > len(after) // 2, "the weights move"
    return after


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("num_ranks", [1, 4])
def test_a_run_that_lost_a_rank_goes_on_with_another_number(
    undisturbed: dict[str, str], tmp_path: Path, num_ranks: int
) -> None:
    run_dir = tmp_path / "run"
    recipe = write_recipe(tmp_path)
    with (tmp_path / "log.txt").open("w") as log:
        driver = subprocess.Popen(
            command("train", f"recipe={recipe}", f"run_dir={run_dir}", *SETTINGS), stdout=log, stderr=log
        )
    metrics = run_dir / "grpo" / "metrics.jsonl"
    deadline_s = time.monotonic() + 600
    while not metrics.exists() or len(metrics.read_text().splitlines()) < 3:
        assert driver.poll() is None, (tmp_path / "log.txt").read_text()[-3000:]
        assert time.monotonic() < deadline_s
        time.sleep(0.02)
    family = psutil.Process(driver.pid).children(recursive=True)
    ranks = [process for process in family if "LearnerActor" in " ".join(process.cmdline())]
    assert len(ranks) == 2, [process.cmdline() for process in family]
    ranks[1].kill()
    assert driver.wait(timeout=120) not in (0, -9)
    told = _finish("resume", str(run_dir), f"cluster.learner_ranks={num_ranks}")
    assert f"cluster.learner_ranks (was 2, now {num_ranks})" in told
    assert json.loads((run_dir / "grpo" / "config.json").read_text())["cluster"]["learner_ranks"] == num_ranks
    assert _weights(run_dir) == undisturbed
