"""Proves: the commands that a user types work on real Ray; after SIGKILL of the driver in mid-step nothing of the run
is left alive, and `resume` ends with the weights and the W&B run that it would have had.

Sizes are small; `make train` is the same with the tiny recipe's numbers. Not here: what the loop does (tests/rl).
"""

import json
import re
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from rollforward.rollout.weights import read_published
from tests.helpers.commands import command, write_recipe


def _finish(*words: str) -> dict[str, Any]:
    done = subprocess.run(command(*words), capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "DeepSpeed" not in done.stdout, "standard output holds results, not what libraries print"
    assert "Token authentication" not in done.stderr
    told = re.findall(
        r"^  (model|held-out answers|sampled answers|metrics|token log|W&B) +(\S.*)$", done.stdout, re.MULTILINE
    )
    assert len(told) >= 5, done.stdout
    assert [path for _, path in told if not Path(path).exists()] == []
    return json.loads(done.stdout.strip().splitlines()[-1])


def _weights(run_dir: Path) -> dict[str, str]:
    return read_published(run_dir / "grpo" / "model")[0].tensors


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, dict[str, Any]]:
    directory = tmp_path_factory.mktemp("e2e")
    recipe = write_recipe(directory)
    return recipe, directory / "run", _finish("train", f"recipe={recipe}", f"run_dir={directory / 'run'}")


@pytest.mark.timeout(300)
def test_sft_then_grpo_on_ray(finished: tuple[Path, Path, dict[str, Any]]) -> None:
    _, run_dir, result = finished
    assert result["rollout_probs_diff_max"] == 0.0
    assert result["steps"] == 6
    assert result["tokens"] > 0
    assert set(result["tasks"]["chain_sum"]) == {"eval_before", "eval_after"}
    for name in ("model/config.json", "model/tokenizer.json", "metrics.jsonl", "wal/engine-0", "eval_000006.json"):
        assert (run_dir / "grpo" / name).exists(), name
    before = _weights(run_dir)
    again = subprocess.run(command("resume", str(run_dir)), capture_output=True, text=True, timeout=60, check=False)
    assert again.returncode == 0
    assert again.stderr.count("was finished earlier, kept") == 2
    assert _weights(run_dir) == before


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("after_step", [1, 3, 4])
def test_a_killed_run_ends_with_the_same_weights_and_wandb_run(
    finished: tuple[Path, Path, dict[str, Any]], tmp_path: Path, after_step: int
) -> None:
    """The driver alone gets SIGKILL a moment after a step was logged, in the middle of the next."""
    _, undisturbed, _ = finished
    run_dir = tmp_path / "run"
    recipe = write_recipe(tmp_path, wandb="offline")
    driver = subprocess.Popen(
        command("train", f"recipe={recipe}", f"run_dir={run_dir}"), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    metrics = run_dir / "grpo" / "metrics.jsonl"
    deadline_s = time.monotonic() + 240
    while not metrics.exists() or len(metrics.read_text().splitlines()) < after_step:
        assert driver.poll() is None
        assert time.monotonic() < deadline_s
        time.sleep(0.02)
    family = psutil.Process(driver.pid).children(recursive=True)
    assert len(family) > 4, "Ray's processes and the actors"
    names = {process.pid: process.name() for process in family}
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    recipe.unlink()
    _, alive = psutil.wait_procs(family, timeout=30)
    left = {names[process.pid] for process in alive}
    assert left <= {"ray::DashboardAgent", "ray::RuntimeEnvAgent"}, "two of Ray's, which notice it after a minute"
    _finish("resume", str(run_dir))
    assert psutil.wait_procs(alive, timeout=120)[1] == []
    assert _weights(run_dir) == _weights(undisturbed)
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert {line["step"] for line in lines} == set(range(1, 7))
    assert {line["attempt"] for line in lines} == {0, 1}
    assert [line["wandb_step"] for line in lines] == list(range(len(lines))), "W&B drops a step that goes back"
    offline = [path.name for path in (run_dir / "grpo" / "wandb").glob("offline-run-*")]
    assert len(offline) == 2
    assert len({name.rpartition("-")[2] for name in offline}) == 1, offline
