"""Proves: of every task the first members of the first group are shown, as asked, answered and rewarded; and a loop
that is killed and goes on keeps its W&B run, drops none of its steps and appends its answers.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import wandb

from rollforward.model.metrics import Metric
from rollforward.rl.answers import ANSWERS_NAME, Answer, sampled_answers, table_columns, table_row
from rollforward.rl.batch import TrajectoryRow
from rollforward.rl.checkpoints import latest_checkpoint
from rollforward.rl.learner import Learner
from rollforward.rl.packing import MicroBatchPlan
from rollforward.rollout.types import FailureType, RequestId, StopReason
from rollforward.rollout.workspace import Submission
from tests.helpers.runs import build_controller, small_run, write_model


class _Encoder:
    """Text of a completion: its identity in words."""

    def transcript(self, completion: Any) -> str:
        return f"text of {completion.id}"


class _Named:
    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)


def _row(prompt: int, member: int, task: str) -> TrajectoryRow:
    return TrajectoryRow(
        id=RequestId(5, prompt, member),
        task=task,
        reward=member / 4,
        advantage=member / 4 - 0.5,
        token_weight=0.1,
        segment_lengths=(9,),
        num_trained_tokens=4,
        num_turns=2,
        stop_reason=StopReason.LENGTH,
        failure=FailureType.TIMEOUT if member == 0 else None,
        policy_version=5,
    )


def test_the_first_trained_group_of_every_task() -> None:
    """Prompt 0 was lost to a failure; groups have six members."""
    tasks = ["sums", "sums", "words", "sums", "words"]
    rows = [_row(prompt, member, tasks[prompt]) for prompt in range(1, 5) for member in range(6)]
    examples: list[Any] = [_Named(messages=(_Named(content="rules"), _Named(content=f"q{i}"))) for i in range(5)]
    submissions = {2: Submission(problem="'a' is no regular file"), 3: Submission()}  # of the others nothing is kept
    completions: list[Any] = [
        _Named(id=RequestId(5, prompt, member), submission=submissions.get(prompt))
        for prompt in range(5)
        for member in range(6)
    ]
    shown = sampled_answers(rows, examples, completions[::-1], _Encoder())  # type: ignore[arg-type]
    assert [(one.task, one.prompt, one.member) for one in shown] == [
        *[("sums", 1, member) for member in range(4)],
        *[("words", 2, member) for member in range(4)],
    ]
    assert shown[4] == Answer(
        task="words",
        prompt=2,
        member=0,
        question="q2",
        text=f"text of {RequestId(5, 2, 0)}",
        reward=0.0,
        advantage=-0.5,
        num_turns=2,
        num_tokens=4,
        stop_reason="length",
        failure="timeout",
        left_out="'a' is no regular file",
    )
    assert shown[0].left_out == ""
    assert dict(zip(table_columns(), table_row(shown[4]), strict=True))["failure"] == "timeout"


class _Kill:
    """A learner whose process ends before its n-th update."""

    def __init__(self, learner: Learner, dies_at: int) -> None:
        self._learner, self._left = learner, dies_at

    def update(self, step_dir: Path, plans: Sequence[MicroBatchPlan]) -> tuple[Metric, ...]:
        self._left -= 1
        if self._left == 0:
            raise KeyboardInterrupt
        return self._learner.update(step_dir, plans)

    def __getattr__(self, name: str) -> object:
        return getattr(self._learner, name)


class _Wandb:
    """W&B of one process."""

    step = 0

    def __init__(self, log: list[tuple[int, dict[str, Any]]]) -> None:
        self._log = log

    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        pass

    def log(self, record: dict[str, Any], step: int) -> None:
        self._log.append((step, record))


def test_a_killed_loop_keeps_its_wandb_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checkpoint after step 2, killed in step 4: step 3 is logged twice."""
    ids: list[str] = []
    log: list[tuple[int, dict[str, Any]]] = []

    def init(**arguments: Any) -> _Wandb:
        ids.append(arguments["id"])
        return _Wandb(log)

    monkeypatch.setattr(wandb, "init", init)
    run = small_run(
        tmp_path / "run",
        write_model(tmp_path / "tiny"),
        steps=4,
        prompts_per_step=2,
        checkpoint_every_steps=2,
        eval={"prompts": 1, "every_steps": 4},
        tracker={"mode": "offline", "answers_every_steps": 3},
    )
    controller, learner, rollout = build_controller(run)
    controller._stages._learner = _Kill(learner, 4)  # type: ignore[attr-defined]
    with pytest.raises(KeyboardInterrupt):
        controller.run()
    for replica in rollout.replicas:
        replica._log.abandon()
    found = latest_checkpoint(tmp_path / "run" / "checkpoints")
    assert found is not None
    assert found[1].tracker is not None
    assert (found[1].step, found[1].tracker.next_step, found[1].tracker.wandb_id) == (2, 2, ids[0])
    (tmp_path / "run" / "wandb_id.txt").unlink()
    controller, _, rollout = build_controller(run)
    controller.run()
    rollout.close()
    assert ids == [ids[0]] * 2
    assert [(step, record["train/step"], record["attempt"]) for step, record in log] == [
        (0, 1, 0),
        (1, 2, 0),
        (2, 3, 0),
        (3, 3, 1),
        (4, 4, 1),
    ]
    answers = [json.loads(line) for line in (tmp_path / "run" / ANSWERS_NAME).read_text().splitlines()]
    assert [(one["step"], one["attempt"]) for one in answers] == [(3, 0)] * 2 + [(3, 1)] * 2 + [(4, 1)] * 2
    again = [{**one, "attempt": 0} for one in answers[2:4]]
    assert again == answers[:2], "the same answers, drawn once"
    assert len(log[2][1]["answers"].data) == 2
