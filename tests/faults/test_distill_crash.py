"""Proves: a real `rollforward distill` that loses a rank to SIGKILL while teachers score or in the loss, or is killed
as a whole between teachers, goes on with `resume` to the weights of a run that nobody disturbed, and does not score
again what was finished.

Points within a step without Ray are in tests/distill/test_interrupted_runs.py.
"""

import contextlib
import json
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import psutil
import pytest

from rollforward.distill.hidden_cache import HIDDEN_NAME
from rollforward.rollout.weights import read_published
from tests.helpers.commands import command
from tests.helpers.distill_runs import finish_distill, small_distill, write_models

TEACHERS = {"a": {"tasks": ["chain_sum"]}, "b": {"tasks": ["other"]}, "c": {"tasks": ["chain_sum", "other"]}}
NUM_SHARDS = 24
"""Of a step: twelve trajectories, each of two teachers and in a micro-batch of its own."""
WAIT_S = 240.0


class Models(NamedTuple):
    """Where the models are, and the weights of a run that nobody disturbed: on one rank, without Ray."""

    root: Path
    undisturbed: dict[str, str]


def _settings(root: Path, run_dir: Path) -> Any:
    named = {name: {"model_dir": str(root / name)} | fields for name, fields in TEACHERS.items()}
    return small_distill(
        run_dir,
        root / "student",
        named,
        steps=2,
        prompts_per_step=12,
        max_prompt_tokens=12,
        micro_batch_tokens=18,
        eval={"prompts": 1, "every_steps": 100},
        cluster={"learner_ranks": 2, "learner_threads": 1},
        optim={"type": "hybrid_muon", "lr": 3e-3},
    )


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    root = tmp_path_factory.mktemp("models")
    write_models(root, "student", *TEACHERS)
    alone = {"learner_ranks": 1, "learner_threads": 1}
    run = _settings(root, root / "undisturbed")
    _, tensors = finish_distill(msgspec.structs.replace(run, cluster=type(run.cluster)(**alone)))
    return Models(root, tensors)


def _recipe(models: Models, directory: Path) -> Path:
    """The same run as a recipe."""
    config = msgspec.to_builtins(_settings(models.root, directory))
    del config["run_dir"]
    path = directory / "merge.yaml"
    path.write_text(json.dumps({"summary": "a merge", "runs": [{"name": "opd", "verb": "distill", "config": config}]}))
    return path


class _Life:
    """One process of the command, from its start to its end, and what it left."""

    def __init__(self, root: Path, *words: str) -> None:
        self.run_dir = root / "run" / "opd"
        self._log = root / "log.txt"
        with self._log.open("a") as log:
            self.driver = subprocess.Popen(command(*words), stdout=log, stderr=log)

    def told(self) -> str:
        return self._log.read_text()[-4000:]

    def shards(self, step: int) -> set[str]:
        return {path.name for path in (self.run_dir / HIDDEN_NAME / f"step_{step:06d}").glob("*.arrow")}

    def wait_for(self, reached: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + WAIT_S
        while not reached():
            assert self.driver.poll() is None, self.told()
            assert time.monotonic() < deadline_s, self.told()
            time.sleep(0.005)

    def family(self) -> dict[psutil.Process, str]:
        """The command's processes and their titles."""
        titles: dict[psutil.Process, str] = {}
        for process in psutil.Process(self.driver.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):  # it has ended by now
                titles[process] = " ".join(process.cmdline())
        return titles

    def kill_rank(self) -> None:
        """SIGKILL to one of the two; the command says so and ends by itself."""
        family = self.family()
        ranks = [process for process, title in family.items() if "DistillActor" in title]
        assert len(ranks) == 2, family
        ranks[1].kill()
        assert self.driver.wait(timeout=120) not in (0, -9)
        assert "resume" in self.told()
        _wait_for_end(family)

    def kill_command(self) -> None:
        """SIGKILL to the command and to its actors: left alone, they would first end what they are at."""
        family = self.family()
        self.driver.kill()
        for process, title in family.items():
            if "Actor" in title:
                with contextlib.suppress(psutil.Error):
                    process.kill()
        self.driver.wait(timeout=60)
        _wait_for_end(family)


def _wait_for_end(family: dict[psutil.Process, str]) -> None:
    """Nobody is left who writes into the run; some helpers of Ray's need a minute."""
    workers = [process for process, title in family.items() if "Actor" in title]
    assert workers
    assert psutil.wait_procs(workers, timeout=60)[1] == []


def _hits(run_dir: Path) -> list[tuple[int, float]]:
    """Step and shards that were there already, by line of the metrics."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line["opd/cache_hits"]) for line in lines]


def _resume(root: Path, models: Models, *words: str) -> None:
    done = subprocess.run(
        command("resume", str(root / "run"), *words), capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout.strip().splitlines()[-1])
    assert (result["steps"], result["rollout_probs_diff_max"]) == (2, 0.0)
    run_dir = root / "run" / "opd"
    assert read_published(run_dir / "model")[0].tensors == models.undisturbed
    assert list((run_dir / HIDDEN_NAME).iterdir()) == []


@pytest.mark.timeout(600)
def test_a_rank_killed_while_teachers_score_costs_no_bit_and_no_finished_score(models: Models, tmp_path: Path) -> None:
    life = _Life(tmp_path, "distill", f"recipe={_recipe(models, tmp_path)}", f"run_dir={tmp_path / 'run'}")
    life.wait_for(lambda: len(life.shards(0)) >= 5)
    life.kill_rank()
    left = life.shards(0)
    assert 5 <= len(left) < NUM_SHARDS, "killed too late; let it have more to score"
    _resume(tmp_path, models)
    assert _hits(life.run_dir) == [(1, len(left)), (2, 0)]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("num_ranks", [1, 4])
def test_a_rank_killed_in_the_loss_and_the_command_killed_while_teachers_score_cost_no_bit(
    models: Models, tmp_path: Path, num_ranks: int
) -> None:
    """One after the other in one run, which goes on and ends on another number of ranks."""
    life = _Life(tmp_path, "distill", f"recipe={_recipe(models, tmp_path)}", f"run_dir={tmp_path / 'run'}")
    life.wait_for(lambda: len(life.shards(0)) == NUM_SHARDS)
    life.kill_rank()
    assert len(life.shards(0)) == NUM_SHARDS
    life = _Life(tmp_path, "resume", str(tmp_path / "run"))
    # Plans lie by teacher; on a quiet machine the kill itself takes as long as many of them.
    life.wait_for(lambda: len(life.shards(1)) >= NUM_SHARDS // 4)
    life.kill_command()
    left = life.shards(1)
    assert 0 < len(left) < NUM_SHARDS, "killed too late; let it have more to score"
    _resume(tmp_path, models, f"cluster.learner_ranks={num_ranks}")
    assert _hits(life.run_dir) == [(1, NUM_SHARDS), (2, len(left))]
