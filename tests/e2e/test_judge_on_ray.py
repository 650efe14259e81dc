"""Proves: the recipe for judges runs on real Ray as a user types it: the policy answers, judges its own answers and
learns to judge, all in one step. A judge this young often gives no verdict: that is counted by kind and drawn again,
and no answer becomes a 0 by it.

A few steps, too few to judge well. That judging is learned, and answers by it, is test_judge_learning.py's.
"""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from rollforward.rl.judge.types import VerdictProblem
from rollforward.rollout.wal_recovery import recover
from tests.helpers.commands import command

SMALL = (
    "all.tracker.mode=disabled",
    "all.eval.prompts=8",
    "sft.tasks.0.path.attack_share=0",
    "sft.tasks.1.reward.parts.0.reward.retries=8",
    "sft.steps=60",
    "sft.optim.decay_steps=0",
    "sft.optim.warmup_steps=5",
    "sft.micro_batch_tokens=512",
    "sft.eval.every_steps=60",
    "doubt.tasks.2.reward.parts.0.reward.retries=8",
    "doubt.steps=1",
    "doubt.optim.decay_steps=0",
    "doubt.optim.warmup_steps=0",
    "doubt.micro_batch_tokens=512",
    "grpo.tasks.0.path.rows=5000",
    "grpo.tasks.1.reward.parts.0.reward.retries=8",
    "grpo.rollout.max_infra_share=1.0",
    "grpo.rollout.engines=1",
    "grpo.steps=2",
    "grpo.optim.warmup_steps=0",
    "grpo.optim.decay_steps=0",
    "grpo.prompts_per_step=6",
    "grpo.algo.group_size=4",
    "grpo.cluster.learner_ranks=1",
    "grpo.tracker.answers_every_steps=1",
)


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.timeout(600)
def test_two_steps_of_answers_judgements_and_judging(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    words = command("train", "recipe=tiny_judge", f"run_dir={run_dir}", *SMALL)
    done = subprocess.run(words, capture_output=True, text=True, timeout=580, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout.strip().splitlines()[-1])
    assert (result["steps"], result["rollout_probs_diff_max"]) == (2, 0.0)
    assert set(result["tasks"]) == {"judging", "evens"}
    lines = _lines(run_dir / "grpo" / "metrics.jsonl")
    for line in lines:
        by_kind = [line[f"failure/judge_{kind}/rate"] for kind in VerdictProblem]
        assert sum(by_kind) == pytest.approx(line["failure/judge/rate"])
        assert 0.0 <= line["judge/agreement/rate"] <= 1.0
    assert max(line.get("reward/form/mean", 0.0) for line in lines) > 0.5
    assert sum(line["failure/judge/rate"] for line in lines) > 0.0, "a judge this young says much that is no verdict"
    assert sum(line["judge/retries/mean"] for line in lines) > 0.0
    answers = _lines(run_dir / "grpo" / "answers.jsonl")
    assert {answer["task"] for answer in answers} == {"judging", "evens"}
    for answer in (one for one in answers if one["task"] == "evens"):
        has_form = answer["text"].strip().isdecimal() and len(answer["text"].strip()) <= 2
        even = (answer["reward"] - 0.2 * has_form) / 0.8
        assert any(even == pytest.approx(share, abs=1e-6) for share in (0, 1 / 3, 1 / 2, 2 / 3, 1)), answer
    judged = [identity for identity in recover(run_dir / "grpo" / "wal" / "engine-0").requests if identity.judgement]
    assert judged
    report = subprocess.run(command("judge", "report", str(run_dir)), capture_output=True, text=True, check=False)
    assert report.returncode == 0, report.stderr
    assert "evens, even" in report.stdout
    assert "judging, judging" in report.stdout
