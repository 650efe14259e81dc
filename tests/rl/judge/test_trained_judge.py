"""Proves: with a tiny model that was taught to judge, and real engines: its agreement with the truth is reported; a run
in which the policy answers, judges itself, is judged by another model and learns judging, all at once, ends with the
same weights whatever the number of engines and wherever it was interrupted.

That attacks gain nothing is in `test_attacks.py`.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rollforward.conf import cli
from rollforward.rl.controller import RunOutcome
from rollforward.rl.evaluation import TaskAccuracy
from rollforward.rollout.replica import Replica
from rollforward.rollout.types import Completion, Request
from rollforward.rollout.wal_recovery import recover
from rollforward.rollout.weights import read_published, version_directory
from tests.helpers.crashes import CrashError, crash_at
from tests.helpers.judging import train_judge
from tests.helpers.runs import LocalRollout, build_controller, small_run

CRITERIA = [{"name": "right", "text": "The number is even."}]
WAL = {"level": "process"}


class Taught:
    """A model and its tasks."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(exist_ok=True)
        self.judging: dict[str, Any] = {
            "type": "judge",
            "name": "judging",
            "path": {"type": "evens", "rows": 4000},
            "rubric": {"criteria": CRITERIA},
            "heldout_size": 200,
            "max_new_tokens": 24,
        }
        self.rubric: dict[str, Any] = {
            "type": "rubric",
            "criteria": CRITERIA,
            "judgements": 2,
            "retries": 2,
            "max_verdict_tokens": 24,
            "audit": {"type": "pattern", "pattern": "[0-9]*[02468]"},
        }
        self.evens: dict[str, Any] = {
            "type": "dataset",
            "name": "evens",
            "path": {"type": "evens", "rows": 700, "seed": 1},
            "reward": self.rubric,
            "heldout_size": 200,
            "max_new_tokens": 4,
        }
        judge_dir = train_judge(directory / "judge", [self.judging], steps=130)
        self.judging["path"] = {"type": "evens", "rows": 700, "seed": 2}
        both = [self.judging, self.evens]
        self.model_dir = train_judge(directory / "both", both, steps=40, start=judge_dir, lr=3e-3)


@pytest.fixture(scope="module")
def taught(tmp_path_factory: pytest.TempPathFactory) -> Taught:
    return Taught(tmp_path_factory.mktemp("taught"))


def _eval_file(directory: Path, taught: Taught) -> Path:
    """A recipe of one run of `eval`, with what the policy answers judged by itself, and by another model."""
    named = {"type": "model", "model_dir": str(taught.model_dir), "precision": "fp32"}
    config = {
        "model_dir": str(taught.model_dir),
        "tasks": [
            taught.judging,
            taught.evens,
            {**taught.evens, "name": "evens_by_model", "reward": {**taught.rubric, "judge": named}},
        ],
        "sampling": {"max_new_tokens": 24, "temperature": 1.0},
        "prompts": 60,
        "max_prompt_tokens": 128,
        "precision": "fp32",
        "rollout": {"threads": 1, "wal": WAL},
    }
    recipe = {"summary": "judges", "runs": [{"name": "heldout", "verb": "eval", "config": config}]}
    file = directory / "judges.yaml"
    file.write_text(json.dumps(recipe))  # which is YAML
    return file


def test_agreement_with_the_truth_is_reported(
    taught: Taught, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["eval", f"recipe={_eval_file(tmp_path, taught)}", f"run_dir={tmp_path / 'run'}"]) == 0
    shown = capsys.readouterr().out
    assert "evens/rubric agreement" in shown
    found = msgspec.json.decode((tmp_path / "run" / "heldout" / "eval.json").read_bytes(), type=list[TaskAccuracy])
    judging, by_itself, by_model = (one.calibrations[0] for one in found)
    for one in (judging, by_itself, by_model):
        assert one.agreement is not None
        assert one.kappa is not None
        assert one.agreement >= 0.9
        assert one.kappa >= 0.8
        assert one.known >= 50
    assert (judging.part, by_itself.part) == ("judging", "rubric")
    assert by_itself.judgements >= 2 * by_itself.known
    assert judging.judgements == 60
    logs = {path.name for path in (tmp_path / "run" / "heldout" / "wal").iterdir()}
    assert {"eval", "judge-0-0"} <= logs
    assert cli.main(["judge", "report", str(tmp_path / "run"), "json=true"]) == 0
    assert len(json.loads(capsys.readouterr().out)) == 3


def _changes(taught: Taught) -> dict[str, Any]:
    """Both kinds of task in one run: the policy judges itself, and another model judges a part."""
    named = {**taught.rubric, "judge": {"type": "model", "model_dir": str(taught.model_dir), "precision": "fp32"}}
    parts = [
        {"name": "own", "weight": 0.5, "reward": taught.rubric},
        {"name": "other", "weight": 0.5, "reward": named},
        {"name": "length", "weight": 0.1, "reward": {"type": "length", "free_tokens": 2, "max_tokens": 6}},
    ]
    composite = {**taught.evens, "reward": {"type": "composite", "parts": parts}}
    return {
        "tasks": [{**taught.judging, "heldout_size": 20}, {**composite, "heldout_size": 20}],
        "sampling": {"max_new_tokens": 24},
        "micro_batch_tokens": 1024,
        "max_prompt_tokens": 128,
        "precision": "fp32",
        "steps": 2,
        "prompts_per_step": 5,
        "optim": {"type": "adamw", "lr": 1e-3},
        "eval": {"prompts": 4, "every_steps": 2},
        "checkpoint_every_steps": 1,
    }


def _finish(run_dir: Path, taught: Taught, **changes: Any) -> tuple[RunOutcome, dict[str, str]]:
    run = small_run(run_dir, taught.model_dir, **_changes(taught) | changes)
    controller, _, rollout = build_controller(run, hash_scored=False)
    outcome = controller.run()
    rollout.close()
    return outcome, read_published(version_directory(run_dir / "weights", run.steps))[0].tensors


@pytest.fixture(scope="module")
def undisturbed(taught: Taught, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, RunOutcome, dict[str, str]]:
    run_dir = tmp_path_factory.mktemp("undisturbed") / "run"
    return run_dir, *_finish(run_dir, taught)


def test_answers_and_judging_are_learned_in_one_run(undisturbed: tuple[Path, RunOutcome, dict[str, str]]) -> None:
    run_dir, outcome, _ = undisturbed
    assert outcome.rollout_probs_diff_max == 0.0
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        for name in ("reward/own/mean", "reward/other/mean", "judge/agreement/rate"):
            assert 0.0 <= line[name] <= 1.0, name
        assert -1.0 <= line["reward/length/mean"] <= 0.0
        assert line["failure/judge/rate"] < 0.5
        assert line["failure/infra/rate"] == 0.0
    assert max(line["judge/agreement/rate"] for line in lines) >= 0.8
    held = recover(run_dir / "wal" / "engine-0").requests
    own = sorted(str(identity) for identity in held if identity.judgement)
    assert own
    assert all(request.is_finished for request in held.values())
    # The other model's judgements have numbers behind those that the first may have.
    judged = recover(run_dir / "wal" / "judge-0-0").requests
    assert {identity.judgement for identity in judged} >= {5, 6}
    assert not judged.keys() & held.keys()


def test_the_number_of_engines_changes_nothing(
    undisturbed: tuple[Path, RunOutcome, dict[str, str]], taught: Taught, tmp_path: Path
) -> None:
    engines = {"threads": 1, "engines": 2, "max_batch_requests": 3, "wal": WAL}
    assert _finish(tmp_path / "run", taught, rollout=engines) == undisturbed[1:]


def _dies(rollout: LocalRollout, whose: str, at_record: int) -> Replica:
    """Let a replica's process end at a record of the first judgements of a training step; return it."""
    assert rollout.judges is not None
    replica = rollout.replicas[0] if whose == "policy" else rollout.judges._served[0][1]._replica  # type: ignore[attr-defined]
    generate = replica.generate

    def generate_until(requests: Sequence[Request]) -> list[Completion]:
        if any(request.id.judgement and not request.id.is_eval for request in requests):
            crash_at(replica._log, at_record)
        return generate(requests)

    replica.generate = generate_until  # type: ignore[method-assign]
    return replica


@pytest.mark.parametrize(("whose", "at_record"), [("policy", 14), ("model", 14)])
def test_a_run_that_dies_while_it_judges_ends_with_the_same_weights(
    undisturbed: tuple[Path, RunOutcome, dict[str, str]], taught: Taught, tmp_path: Path, whose: str, at_record: int
) -> None:
    """What was judged by then is answered from the log, the rest goes on."""
    run = small_run(tmp_path / "run", taught.model_dir, **_changes(taught))
    controller, _, rollout = build_controller(run, hash_scored=False)
    assert rollout.judges is not None
    replica = _dies(rollout, whose, at_record)
    with pytest.raises(CrashError):
        controller.run()
    for one in (*rollout.replicas, rollout.judges._served[0][1]._replica):  # type: ignore[attr-defined]
        one._log.abandon()
    logged = recover(tmp_path / "run" / "wal" / replica.name)
    judged = [held for identity, held in logged.requests.items() if identity.judgement and not identity.is_eval]
    assert any(held.is_unfinished for held in judged)
    assert _finish(tmp_path / "run", taught) == undisturbed[1:]
    whole = recover(tmp_path / "run" / "wal" / replica.name)
    assert whole.requests.keys() == recover(undisturbed[0] / "wal" / replica.name).requests.keys()
    assert max(held.num_openings for held in whole.requests.values()) == 2


@pytest.mark.slow
def test_a_policy_learns_what_the_rubric_asks_for(taught: Taught, tmp_path: Path) -> None:
    """From the word of a judge alone; whether numbers are even is asked of a pattern, for comparison. Prints its row of
    docs/benchmarks.md."""
    named = {"type": "model", "model_dir": str(taught.model_dir), "precision": "fp32"}
    run = small_run(
        tmp_path / "run",
        taught.model_dir,
        tasks=[{**taught.evens, "reward": {**taught.rubric, "judge": named}}],
        algo={"type": "grpo", "group_size": 8, "kl_beta": 0.02},
        optim={"type": "adamw", "lr": 1e-3, "eps": 0.01},
        sampling={"max_new_tokens": 4},
        steps=15,
        prompts_per_step=12,
        micro_batch_tokens=2048,
        max_prompt_tokens=128,
        precision="fp32",
        eval={"prompts": 60, "every_steps": 15, "temperature": 1.0},
        checkpoint_every_steps=15,
    )
    controller, _, rollout = build_controller(run, hash_scored=False)
    outcome = controller.run()
    rollout.close()
    before, after = (one[0].calibrations[0] for one in (outcome.before, outcome.after))
    assert before.true_mean is not None
    assert after.true_mean is not None
    sys.stdout.write(f"\n| even numbers | {before.true_mean:.3f} -> {after.true_mean:.3f} |\n")
    assert before.true_mean <= 0.65
    assert after.true_mean >= 0.85
