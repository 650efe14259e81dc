"""Proves: `train` of a recipe that names a goal ends with that run, of whatever verb, with the settings that address
each run; a goal that is no run is refused; `distill` is a command like others.
"""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from rollforward.conf import cli
from rollforward.conf.errors import ConfigError, UsageError
from rollforward.conf.jobs import Job, plan_jobs
from rollforward.conf.recipe import load_recipe, recipe_names
from rollforward.distill.config import DistillRun

RECIPE = """
summary: "experts and a student"
{goal}
runs:
  - name: expert
    verb: train
    config: &run
      model_dir: models/sft
      tasks: [{{type: reasoning_gym, name: sum, dataset: chain_sum}}]
      optim: {{type: adamw, lr: 1.0e-3}}
      sampling: {{max_new_tokens: 8}}
      steps: 6
      prompts_per_step: 4
      micro_batch_tokens: 1024
  - name: student
    verb: distill
    config:
      <<: *run
      teachers: {{sums: {{model_dir: "${{run_dir:expert}}/model", tasks: [sum]}}}}
  - name: later_expert
    verb: train
    config: *run
  - name: heldout
    verb: eval
    config:
      model_dir: ${{run_dir:student}}/model
      tasks: [{{type: reasoning_gym, name: sum, dataset: chain_sum}}]
      sampling: {{max_new_tokens: 8, temperature: 0.0}}
"""


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    path = tmp_path / "pipeline.yaml"
    path.write_text(RECIPE.format(goal="goal: student"))
    return f"recipe={path}"


def _any(config: object) -> Any:
    """A configuration of some verb."""
    return config


def _names(jobs: list[Job]) -> list[str]:
    return [job.name for job in jobs]


def test_train_ends_with_the_goal_and_other_verbs_with_their_own_last_run(recipe: str, tmp_path: Path) -> None:
    assert _names(plan_jobs("train", [recipe])) == ["expert", "student"]
    assert _names(plan_jobs("distill", [recipe])) == ["expert", "student"]
    assert _names(plan_jobs("eval", [recipe])) == ["expert", "student", "later_expert", "heldout"]
    without = tmp_path / "without.yaml"
    without.write_text(RECIPE.format(goal=""))
    assert _names(plan_jobs("train", [f"recipe={without}"])) == ["expert", "student", "later_expert"]


def test_the_student_learns_from_the_run_that_it_names(recipe: str, tmp_path: Path) -> None:
    job = plan_jobs("train", [recipe, f"run_dir={tmp_path / 'out'}"])[-1]
    assert isinstance(job.config, DistillRun)
    assert job.verb == "distill"
    assert job.config.teachers["sums"].model_dir == f"{tmp_path}/out/expert/model"
    assert job.run_dir == tmp_path / "out" / "student"


def test_overrides_reach_the_run_that_they_address(recipe: str) -> None:
    """Those without a name are for the runs of the verb on the command line, so of `train` not for the goal."""
    words = [recipe, "steps=2", "student.samples_per_prompt=3", "all.seed=5", "student.teachers.sums.weight=2.0"]
    expert, student = (_any(job.config) for job in plan_jobs("train", words))
    assert (expert.steps, expert.seed) == (2, 5)
    assert (student.steps, student.seed, student.samples_per_prompt) == (6, 5, 3)
    assert student.teachers["sums"].weight == 2.0
    expert, student = (_any(job.config) for job in plan_jobs("distill", [recipe, "steps=2"]))
    assert (expert.steps, student.steps) == (6, 2)


def test_what_comes_after_the_goal_is_said_with_the_same_settings(recipe: str, tmp_path: Path) -> None:
    words = [recipe, f"run_dir={tmp_path / 'out'}", "steps=2", "student.seed=7"]
    jobs = plan_jobs("train", words)
    assert jobs[-1].then is not None
    command, verb, *settings = shlex.split(jobs[-1].then)
    assert (command, verb) == ("rollforward", "train")
    again = plan_jobs("eval", settings)
    assert [job.config for job in again[:2]] == [job.config for job in jobs]


@pytest.mark.parametrize("goal", ["heldouts", "distill", "''"])
def test_a_goal_that_is_no_run_is_refused(tmp_path: Path, goal: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(RECIPE.format(goal=f"goal: {goal}"))
    for verb in ("train", "eval"):
        with pytest.raises(
            (ConfigError, UsageError),
            match=rf"bad\.yaml: goal is .*{goal.strip(chr(39))}.* name of a run: expert, student, later_expert",
        ):
            plan_jobs(verb, [f"recipe={path}"])


def test_a_goal_needs_no_run_of_train(tmp_path: Path) -> None:
    """A pipeline from models that are there already."""
    path = tmp_path / "merge.yaml"
    text = RECIPE.format(goal="goal: student").replace("verb: train", "verb: distill")
    path.write_text(text.replace("config: &run\n", "config: &run\n      teachers: {a: {model_dir: m, tasks: [sum]}}\n"))
    assert [job.verb for job in plan_jobs("train", [f"recipe={path}"])] == ["distill", "distill"]


def test_distill_is_a_command_like_others(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    assert re.search(r"^  distill +merge teachers into a model by distillation", capsys.readouterr().out, re.MULTILINE)
    assert cli.main(["distill", "--help"]) == 0
    told = capsys.readouterr().out
    for key in ("teachers.NAME.model_dir", "routing", "loss.type", "loss.beta", "teacher_cache.max_hidden_gib"):
        assert key in told, key
    assert "algo" not in told.replace("`algo.", "").replace("(algo.", "")
    assert cli.main(["distil"]) == 2
    assert "Did you mean distill?" in capsys.readouterr().err


def test_a_shipped_pipeline_ends_with_its_goal() -> None:
    goals = {name: recipe.goal for name in recipe_names() if (recipe := load_recipe(name)).goal is not None}
    for name, goal in goals.items():
        assert plan_jobs("train", [f"recipe={name}"])[-1].name == goal
