"""Proves, over the whole loop in one process: a run whose platform loses long responses more often than short ones says
so, as a metric and to its user, while one that only is interrupted, and goes on from its log, says nothing.

The model is untrained; ends of turns and the marker of calls stand out among its tokens, so that lengths and numbers of
turns differ. Which sizes of bias are found with how many responses is in tests/faults/test_length_law.py.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from rollforward.rl.tasks.types import Example, Score, Unscored
from rollforward.rollout.engine.local import LocalEngine
from rollforward.rollout.environment import Environment, Observation, failed_observation
from rollforward.rollout.types import FailureType, Int32Array, Request, RequestId
from rollforward.rollout.wal_recovery import recover
from rollforward.rollout.workspace import Submission
from tests.helpers.crashes import CrashError, crash_at
from tests.helpers.runs import TASK, HashScored, build_controller, small_run, write_calling_model

CHANGES: dict[str, Any] = {
    "tasks": [{**TASK, "tools": [{"name": "calculator"}], "max_observation_tokens": 96, "list_tools": False}],
    "algo": {"type": "grpo", "group_size": 4},
    "sampling": {"max_new_tokens": 20, "top_p": 0.95},
    "optim": {"type": "adamw", "lr": 1e-6},  # the law of lengths stays
    "micro_batch_tokens": 2048,
    "steps": 2,
    "prompts_per_step": 8,
    "eval": {"prompts": 1, "every_steps": 2},
    "rollout": {"threads": 1, "wal": {"level": "process"}, "bias_alarm_z": 2.0, "max_infra_share": 1.0},
}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_calling_model(tmp_path_factory.mktemp("models") / "plain")


class _Fragile:
    """Tools whose sandbox is lost before it answers a second time."""

    def __init__(self, environment: Environment) -> None:
        self._environment = environment
        self._lost: set[RequestId] = set()

    def begin(self, request: Request, turn_ids: Int32Array, *, turn: int, attempt: int = 0, position: int = 0) -> None:
        if turn > 1 and not request.id.is_eval:
            self._lost.add(request.id)
        self._environment.begin(request, turn_ids, turn=turn, attempt=attempt, position=position)

    def collect(self, *, block: bool) -> list[Observation]:
        answers = self._environment.collect(block=block)
        return [failed_observation(one.id, "it is gone") if one.id in self._lost else one for one in answers]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._environment, name)


class _ScoresShortOnes(HashScored):
    """A reward that gives up on long texts."""

    def score(self, example: Example, text: str, submission: Submission | None = None) -> Score | Unscored:  # type: ignore[override]
        score = super().score(example, text)
        is_lost = len(text) > 40 and example.split == "train"
        return Unscored(failure=FailureType.INFRA, detail="out of memory") if is_lost else score


def _run(run_dir: Path, model_dir: Path, *, fault: str | None = None, crash_after: int | None = None) -> None:
    controller, _, rollout = build_controller(small_run(run_dir, model_dir, **CHANGES))
    if fault == "sandbox":
        for replica in rollout.replicas:
            engine = replica._engine
            assert isinstance(engine, LocalEngine)
            assert engine._environment is not None
            engine._environment = _Fragile(engine._environment)
    elif fault == "reward":
        tasks: dict[str, Any] = controller._tasks
        controller._tasks = {name: _ScoresShortOnes(task._task) for name, task in tasks.items()}
    if crash_after is None:
        controller.run()
        rollout.close()
        return
    crash_at(rollout.replicas[0]._log, crash_after)
    with pytest.raises(CrashError):
        controller.run()
    rollout.replicas[0]._log.abandon()


def _lines(run_dir: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("fault", ["sandbox", pytest.param("reward", marks=pytest.mark.slow)])
def test_a_run_that_loses_long_responses_says_so(
    model_dir: Path, tmp_path: Path, fault: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those that call twice, at which the sandbox is lost, and those of many characters."""
    _run(tmp_path / "run", model_dir, fault=fault)
    lines = _lines(tmp_path / "run")
    assert sum(line["bias/dropped"] for line in lines) > 5
    assert all(line["bias/delivered_length_mean"] < line["bias/natural_length_mean"] for line in lines)
    assert lines[-1]["bias/length_z"] < -2
    assert lines[-1]["bias/alarm"] == 1.0
    told = [text for text in capsys.readouterr().err.splitlines() if "LENGTH BIAS" in text]
    assert len(told) == 1, "once, when it begins"
    first = next(int(line["step"]) for line in lines if line["bias/alarm"])
    assert told[0].startswith(f"step {first}: LENGTH BIAS: the ")
    assert "shorter than the Kaplan-Meier estimate" in told[0]
    assert "alarm beyond rollout.bias_alarm_z=2)" in told[0]
    has_partial = fault == "sandbox"
    held = recover(tmp_path / "run" / "wal" / "engine-0").requests.values()
    lost = [one for one in held if one.close is not None and one.close.failure is FailureType.INFRA]
    assert bool(lost) == has_partial, "the log has what the platform ended, and as over what it could not score"


def test_a_run_that_is_interrupted_and_goes_on_says_nothing(
    model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for crash_after in (70, 60, None):
        _run(tmp_path / "run", model_dir, crash_after=crash_after)
    lines = _lines(tmp_path / "run")
    assert lines[0]["bias/interrupted/rate"] > 0.5
    assert lines[0]["bias/interruptions"] > 1
    assert [(line["bias/length_z"], line["bias/alarm"], line["bias/dropped"]) for line in lines] == [(0, 0, 0)] * 2
    assert all(line["bias/attempts"] == 32 for line in lines)
    assert "LENGTH BIAS" not in capsys.readouterr().err
