"""Proves: on three seeds the tiny recipe for agents learns to use the tools of a sandbox, by hidden tests; and with the
sandboxes of a fifth of its completions killed it learns the same, those left out and counted.

Twenty minutes on two cores. Each test prints its row of docs/benchmarks.md (`make soak ARGS="-k agent_learning -s"`).
One model comes out of SFT; seeds are of reinforcement. Pass rates are sampled as in training, on the same 200 held-out
errands.
"""

import json
import statistics
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from rollforward.conf.recipe import load_recipe
from tests.helpers.commands import command

SEEDS = (0, 1, 2)
SHARE = 0.2
HELDOUT = 200

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("agents")


def _run(*words: str) -> dict[str, Any]:
    done = subprocess.run(command(*words), capture_output=True, text=True, timeout=1700, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


@cache
def _model(base: Path) -> Path:
    """What SFT makes."""
    _run("sft", "recipe=tiny_agent", f"run_dir={base / 'sft'}")
    return base / "sft" / "sft" / "model"


@cache
def _curve(base: Path, seed: int, share: float) -> tuple[list[float], float]:
    """Pass rates at the start and at every evaluation; share of all completions that were left out as infra."""
    grpo = next(run for run in load_recipe("tiny_agent").runs if run.verb == "train")
    settings = {**grpo.config, "model_dir": str(_model(base)), "seed": seed}
    name = f"seed-{seed}-{share}"
    recipe = {"summary": "one seed", "runs": [{"name": "grpo", "verb": "train", "config": settings}]}
    (base / f"{name}.yaml").write_text(yaml.safe_dump(recipe))
    result = _run(
        "train",
        f"recipe={base / f'{name}.yaml'}",
        f"run_dir={base / name}",
        f"sandbox.container.inject_failures={share}",
    )
    assert result["rollout_probs_diff_max"] == 0.0
    lines = [json.loads(line) for line in (base / name / "grpo" / "metrics.jsonl").read_text().splitlines()]
    evaluated = [line["val-core/errands/acc/mean@1"] for line in lines if "val-core/errands/acc/mean@1" in line]
    curve = [result["tasks"]["errands"]["eval_before"], *evaluated]
    lost = statistics.mean(line["failure/infra/rate"] for line in lines)
    cells = " | ".join(f"{rate:.3f}" for rate in curve)
    sys.stdout.write(f"\n| {seed} | {share:.0%} | {cells} | {lost:.1%} |\n")
    return curve, lost


@pytest.mark.parametrize("seed", SEEDS)
def test_the_tools_are_learned(seed: int, base: Path) -> None:
    curve, lost = _curve(base, seed, 0.0)
    assert 0.2 <= curve[0] <= 0.6
    assert curve[-1] - curve[0] >= 0.2
    assert lost == 0.0


def test_killed_sandboxes_do_not_change_the_curve(base: Path) -> None:
    """At every evaluation the mean of three disturbed seeds is within two standard deviations of three clean ones; with
    three of them a deviation below the error of one evaluation is luck, so that is the least."""
    clean = [_curve(base, seed, 0.0)[0] for seed in SEEDS]
    disturbed = [_curve(base, seed, SHARE) for seed in SEEDS]
    assert all(SHARE / 2 <= lost <= SHARE * 1.3 for _, lost in disturbed)
    for point, rates in enumerate(zip(*clean, strict=True)):
        mean = statistics.mean(rates)
        deviation = max(statistics.stdev(rates), (mean * (1 - mean) / HELDOUT) ** 0.5)
        difference = statistics.mean(curve[point] for curve, _ in disturbed) - mean
        sys.stdout.write(f"\nevaluation {point}: {difference:+.3f}, two deviations are {2 * deviation:.3f}\n")
        assert abs(difference) <= 2 * deviation, point
