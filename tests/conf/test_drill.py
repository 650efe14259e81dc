"""Proves: what `rollforward drill` is asked for is checked and composed before anything is written: the recipe is
shortened, the user's settings go before that, kinds fit the recipe.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rollforward.conf.cli import main
from rollforward.conf.drill import plan_drill
from rollforward.conf.errors import ConfigError, UsageError
from rollforward.conf.jobs import plan_jobs
from tests.helpers.commands import write_recipe


def _planned(*words: str) -> Any:
    (job,) = plan_drill(words)
    return job.config


def test_the_recipe_is_shortened_and_given_settings_go_before(tmp_path: Path) -> None:
    config = _planned("recipe=tiny", f"run_dir={tmp_path}", "drill.kills=3", "drill.steps=2", "grpo.optim.lr=1e-4")
    assert (config.drill.kills, config.drill.kinds, config.run_dir) == (
        3,
        ("engine", "driver", "learner", "sandbox"),
        str(tmp_path),
    )
    jobs = plan_jobs("train", ["recipe=tiny", f"run_dir={tmp_path}", *config.settings])
    sft: Any = jobs[0].config
    grpo: Any = jobs[1].config
    assert (sft.steps, sft.eval.prompts, sft.checkpoint_every_steps, sft.tracker.mode) == (2, 4, 1, "disabled")
    assert (grpo.steps, grpo.eval.prompts, grpo.prompts_per_step, grpo.optim.lr) == (2, 4, 4, 1e-4)
    longer = _planned("recipe=tiny", "grpo.eval.prompts=9", "rollout.engines=1", "drill.seed=4")
    grpo = plan_jobs("train", ["recipe=tiny", *longer.settings])[1].config
    assert (grpo.steps, grpo.eval.prompts, grpo.rollout.engines, longer.drill.seed) == (4, 9, 1, 4)
    assert not list(tmp_path.iterdir())


def test_a_drills_logs_keep_everything(tmp_path: Path) -> None:
    """What has left a log would count as lost, and as a difference from the undisturbed run."""
    recipe = write_recipe(tmp_path)
    wal = "rollout: {wal: {keep_bytes: 4096, segment_bytes: 4096}}"
    recipe.write_text(recipe.read_text().replace("      sampling: ", f"      {wal}\n      sampling: "))
    kept: list[tuple[int | None, int]] = []
    for settings in ([], _planned(f"recipe={recipe}", "grpo.rollout.engines=1").settings):
        config: Any = plan_jobs("train", [f"recipe={recipe}", *settings])[-1].config
        kept.append((config.rollout.wal.keep_bytes, config.rollout.wal.segment_bytes))
    assert kept == [(4096, 4096), (None, 4096)]
    for words in (["rollout.wal.keep_bytes=0"], ["grpo.rollout.wal.keep_bytes=4096"]):
        with pytest.raises(UsageError, match=r"rollout\.wal\.keep_bytes is (0|4096); .* Leave it out"):
            _planned(f"recipe={recipe}", *words)


def test_a_drill_inside_a_ray_job_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its runs would join the job's cluster."""
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")
    with pytest.raises(UsageError, match="this is a Ray job"):
        _planned("recipe=tiny")


def test_a_recipe_without_tools_has_no_sandbox_to_kill(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path)
    assert _planned(f"recipe={recipe}").drill.kinds == ("engine", "driver", "learner")
    assert _planned(f"recipe={recipe}", "drill.kinds=[driver]").drill.kinds == ("driver",)
    with pytest.raises(UsageError, match="no task of the recipe has tools"):
        _planned(f"recipe={recipe}", "drill.kinds=[engine,sandbox]")


@pytest.mark.parametrize(
    ("words", "error", "message"),
    [
        (["drill.kills=3"], UsageError, "drill needs a recipe"),
        (["recipe=tinny"], UsageError, "Did you mean recipe=tiny"),
        (["recipe=tiny", "drill.kills=0"], ConfigError, r"drill.kills is 0"),
        (["recipe=tiny", "drill.steps=7"], ConfigError, r"drill.steps is 7"),
        (["recipe=tiny", "drill.kinds=[gpu]"], ConfigError, "drill.kinds"),
        (["recipe=tiny", "drill.kinds=[]"], ConfigError, "drill.kinds is empty"),
        (["recipe=tiny", "drill.moments=[]"], ConfigError, "drill.moments is empty"),
        (["recipe=tiny", "drill.moments=[lunch]"], ConfigError, "drill.moments"),
        (["recipe=tiny", "drill.kill=3"], ConfigError, "drill.kill is not a setting. Did you mean drill.kills"),
        (["recipe=tiny", "grpo.stepz=3"], ConfigError, "stepz is not a setting"),
        (["recipe=tiny", "cluster.address=auto"], UsageError, "cluster.address is auto"),
    ],
)
def test_a_mistake_is_told(words: list[str], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        plan_drill(words)


def test_help_and_the_printed_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["drill", "--help"]) == 0
    assert "drill.kills=6" in capsys.readouterr().out
    assert main(["drill", "recipe=tiny", f"run_dir={tmp_path / 'x'}", "--cfg", "job"]) == 0
    assert "recipe: tiny" in capsys.readouterr().out
    assert main(["drill"]) == 2
    assert not list(tmp_path.iterdir())


def test_planning_costs_neither_torch_nor_ray() -> None:
    program = (
        "import sys, json; from rollforward.conf.drill import plan_drill; plan_drill(['recipe=tiny']);"
        " print(json.dumps([name for name in ('torch', 'ray') if name in sys.modules]))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == []
