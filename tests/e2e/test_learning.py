"""Proves: on three seeds the tiny recipe learns both tasks, and learns nothing where rewards are shuffled.

Half an hour on two cores. Each test prints its row of docs/benchmarks.md (`make soak ARGS="-k learning -s"`). Held-out
questions are the same for all seeds, 200 of each task, answered greedily.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from rollforward.conf.recipe import load_recipe
from tests.helpers.commands import command

SEEDS = (0, 1, 2)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("learning")


def _run(*words: str) -> dict[str, Any]:
    done = subprocess.run(command("train", *words), capture_output=True, text=True, timeout=1700, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


def _row(title: str, result: dict[str, Any]) -> None:
    cells = [f"{one['eval_before']:.3f} -> {one['eval_after']:.3f}" for one in result["tasks"].values()]
    sys.stdout.write("\n| " + " | ".join([title, *cells]) + " |\n")


@pytest.mark.parametrize("seed", SEEDS)
def test_both_tasks_are_learned(seed: int, base: Path) -> None:
    result = _run("recipe=tiny", f"run_dir={base / str(seed)}", f"all.seed={seed}", f"sft.start.seed={seed}")
    _row(f"seed {seed}", result)
    assert result["rollout_probs_diff_max"] == 0.0
    assert len(result["tasks"]) == 2
    for name, accuracy in result["tasks"].items():
        assert 0.15 <= accuracy["eval_before"] <= 0.55, name
        assert accuracy["eval_after"] >= 0.5, name
        assert accuracy["eval_after"] - accuracy["eval_before"] >= 0.25, name


@pytest.mark.parametrize("seed", SEEDS)
def test_shuffled_rewards_teach_nothing(seed: int, base: Path, tmp_path: Path) -> None:
    model_dir = base / str(seed) / "sft" / "model"
    assert model_dir.exists(), "starts from what test_both_tasks_are_learned left; run both"
    grpo = next(run for run in load_recipe("tiny").runs if run.verb == "train")
    settings = {**grpo.config, "model_dir": str(model_dir), "seed": seed, "shuffle_rewards": True}
    recipe = {"summary": "the negative control", "runs": [{"name": "shuffled", "verb": "train", "config": settings}]}
    (tmp_path / "shuffled.yaml").write_text(yaml.safe_dump(recipe))
    result = _run(f"recipe={tmp_path / 'shuffled.yaml'}", f"run_dir={tmp_path / 'run'}")
    _row(f"seed {seed}, rewards shuffled", result)
    for name, accuracy in result["tasks"].items():
        assert abs(accuracy["eval_after"] - accuracy["eval_before"]) <= 0.08, name
