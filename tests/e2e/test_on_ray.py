"""Proves: the commands that a user types work on real Ray, and SIGKILL of a whole run in the middle changes no weight.

Sizes are small; `make train` is the same with the tiny recipe's numbers. Not here: what the loop does (tests/rl).
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from rollforward.rollout.weights import read_published
from tests.helpers.runs import TASK

RECIPE = """
summary: "a few steps"
runs:
  - name: sft
    verb: sft
    config:
      start: {{type: fresh, preset: tiny, tokenizer: {{vocab_size: 384, num_conversations: 200}}}}
      tasks: &tasks [{task}]
      optim: {{lr: 2.0e-3}}
      steps: 6
      micro_batch_tokens: 256
      max_prompt_tokens: 40
      max_answer_tokens: 8
      eval: {{prompts: 8, every_steps: 6}}
      checkpoint_every_steps: 2
      tracker: {{mode: disabled}}
  - name: grpo
    verb: train
    config:
      model_dir: ${{run_dir:sft}}/model
      tasks: *tasks
      optim: {{lr: 1.0e-3}}
      sampling: {{max_new_tokens: 6}}
      steps: 6
      prompts_per_step: 4
      micro_batch_tokens: 256
      max_prompt_tokens: 40
      eval: {{prompts: 8, every_steps: 3}}
      checkpoint_every_steps: 2
      tracker: {{mode: disabled}}
"""


def _command(recipe: Path, run_dir: Path) -> list[str]:
    code = "import sys; from rollforward.conf.cli import main; sys.exit(main())"
    return [sys.executable, "-c", code, "train", f"recipe={recipe}", f"run_dir={run_dir}"]


def _recipe(directory: Path) -> Path:
    path = directory / "few.yaml"
    path.write_text(RECIPE.format(task=json.dumps(TASK)))
    return path


def _finish(recipe: Path, run_dir: Path) -> dict[str, Any]:
    done = subprocess.run(_command(recipe, run_dir), capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "DeepSpeed" not in done.stdout, "standard output holds results, not what libraries print"
    assert "Token authentication" not in done.stderr
    told = re.findall(r"^  (model|answers|metrics|token log) +(\S.*)$", done.stdout, re.MULTILINE)
    assert len(told) >= 4, done.stdout
    assert [path for _, path in told if not Path(path).exists()] == []
    return json.loads(done.stdout.strip().splitlines()[-1])


def _weights(run_dir: Path) -> dict[str, str]:
    return read_published(run_dir / "grpo" / "model")[0].tensors


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, dict[str, Any]]:
    directory = tmp_path_factory.mktemp("e2e")
    recipe = _recipe(directory)
    return recipe, directory / "run", _finish(recipe, directory / "run")


@pytest.mark.timeout(300)
def test_sft_then_grpo_on_ray(finished: tuple[Path, Path, dict[str, Any]]) -> None:
    recipe, run_dir, result = finished
    assert result["rollout_probs_diff_max"] == 0.0
    assert result["steps"] == 6
    assert result["tokens"] > 0
    assert set(result["tasks"]["chain_sum"]) == {"eval_before", "eval_after"}
    for name in ("model/config.json", "model/tokenizer.json", "metrics.jsonl", "wal/engine-0", "eval_000006.json"):
        assert (run_dir / "grpo" / name).exists(), name
    before = _weights(run_dir)
    again = subprocess.run(_command(recipe, run_dir), capture_output=True, text=True, timeout=60, check=False)
    assert again.returncode == 0
    assert again.stderr.count("was finished earlier, kept") == 2
    assert _weights(run_dir) == before


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("after_step", [1, 3, 4])
def test_a_killed_run_ends_with_the_same_weights(
    finished: tuple[Path, Path, dict[str, Any]], tmp_path: Path, after_step: int
) -> None:
    """The driver and everything that it started get SIGKILL a moment after a step was logged, in the middle of the
    next."""
    recipe, run_dir, _ = finished
    process = subprocess.Popen(
        _command(recipe, tmp_path / "run"), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    metrics = tmp_path / "run" / "grpo" / "metrics.jsonl"
    deadline_s = time.monotonic() + 240
    while not metrics.exists() or len(metrics.read_text().splitlines()) < after_step:
        assert process.poll() is None
        assert time.monotonic() < deadline_s
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    _finish(recipe, tmp_path / "run")
    assert _weights(tmp_path / "run") == _weights(run_dir)
