"""Proves: a judge task asks what a judge is asked, knows the truth from its file, pays a verdict for being near it, and
keeps held-out questions apart; a wrong file is an error with row and way out.
"""

import json
import pickle
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from rollforward.rl.errors import TaskError
from rollforward.rl.judge.config import Criterion, Points, Probability, Rubric
from rollforward.rl.judge.types import Verdict, VerdictFailure, VerdictProblem
from rollforward.rl.judge.verdict import read_verdict
from rollforward.rl.tasks.config import TaskConfig
from rollforward.rl.tasks.judge import JudgeTask, agrees, nearness
from rollforward.rl.tasks.registry import build_task
from rollforward.rl.tasks.types import ScoreReason
from tests.helpers.judging import write_evens

RIGHT: dict[str, Any] = {"criteria": [{"name": "right", "text": "It is even."}]}


def judge_task(path: Path, rubric: dict[str, Any] | None = None, **changes: Any) -> JudgeTask:
    values = {"type": "judge", "name": "judging", "path": str(path), "rubric": rubric or RIGHT, "heldout_size": 10}
    task = build_task(msgspec.convert(values | changes, TaskConfig))
    assert isinstance(task, JudgeTask)
    return task


def rows_file(directory: Path, *labels: object, question: str = "{} + 1 =") -> Path:
    rows = [{"question": question.format(n), "answer": n + 1, "label": label} for n, label in enumerate(labels)]
    path = directory / "rows.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    return path


@pytest.fixture
def evens(tmp_path: Path) -> Path:
    return write_evens(tmp_path / "evens.jsonl", count=60, seed=0)


def test_an_example_asks_for_a_verdict_and_shows_the_true_one(evens: Path) -> None:
    task = judge_task(evens)
    rows = {row["question"]: row for row in map(json.loads, evens.read_text().splitlines())}
    seen: list[bool] = []
    for split, count in (("train", task.size("train")), ("heldout", 10)):
        for index in range(count):
            example = task.example(index, split)  # type: ignore[arg-type]
            question, *_, fence, template = example.messages[1].content.split("\n")
            key = fence.removeprefix("</answer ").removesuffix(">")
            assert key in template
            assert f"<answer {key}>\n{rows[question]['answer']}\n</answer {key}>" in example.messages[1].content
            assert example.answer is not None
            said = read_verdict(example.answer, Rubric(criteria=(Criterion(name="right", text="x"),)), key)
            assert said == Verdict(values=(float(rows[question]["label"]),))
            seen.append(rows[question]["label"])
            assert task.score(example, example.answer).value == 1.0
            assert task.score(example, example.answer).reason is ScoreReason.CORRECT
    assert len(seen) == 60
    assert {*seen} == {True, False}


def test_the_other_verdict_is_worth_nothing_and_so_is_none(evens: Path) -> None:
    task = judge_task(evens)
    example = task.example(3)
    assert example.answer is not None
    other = (
        example.answer.replace("pass", "FAIL") if "pass" in example.answer else example.answer.replace("fail", "pass")
    )
    wrong = task.score(example, other)
    assert (wrong.value, wrong.reason) == (0.0, ScoreReason.WRONG)
    unreadable = task.score(example, "I can't say.")
    assert (unreadable.value, unreadable.reason, unreadable.failure) == (0.0, ScoreReason.UNREADABLE, None)
    assert task.score(example, " ").reason is ScoreReason.EMPTY
    (opinion,) = unreadable.opinions
    assert opinion.failures == (VerdictFailure(kind=VerdictProblem.NO_OBJECT),)
    assert wrong.opinions[0].truth == 1.0 - wrong.opinions[0].worth[0]


def test_reasoning_that_never_ends_is_no_verdict(evens: Path) -> None:
    task = judge_task(evens, effort="high")
    example = task.example(0)
    assert example.answer is not None
    (opinion,) = task.score(example, "<think>" + example.answer).opinions
    assert opinion.failures[0].kind is VerdictProblem.UNCLOSED_THINKING
    assert task.score(example, "<think>so</think>" + example.answer).value == 1.0


def test_nearness_by_hand() -> None:
    rubric = Rubric(
        criteria=(
            Criterion(name="sure", text="x", scale=Probability()),
            Criterion(name="clear", text="x", scale=Points(lowest=0, highest=10), weight=3.0),
        )
    )
    assert nearness((0.8, 10.0), (1.0, 10.0), rubric) == pytest.approx((0.96 + 3) / 4)
    assert nearness((0.0, 0.0), (1.0, 10.0), rubric) == 0.0
    assert nearness((1.0, 5.0), (1.0, 10.0), rubric) == pytest.approx(1 - 0.75 * 0.25)
    assert agrees((0.8, 3.0), (1.0, 3.0), rubric)
    assert not agrees((0.8, 3.0), (0.0, 3.0), rubric)
    assert not agrees((0.8, 4.0), (1.0, 3.0), rubric)


@pytest.mark.parametrize("honest", [0.0, 0.1, 0.5, 0.73, 1.0])
def test_the_honest_probability_pays_most(honest: float) -> None:
    rubric = Rubric(criteria=(Criterion(name="sure", text="x", scale=Probability()),))
    stated = np.linspace(0, 1, 1001)
    paid = [
        honest * nearness((p,), (1.0,), rubric) + (1 - honest) * nearness((p,), (0.0,), rubric) for p in stated.tolist()
    ]
    assert stated[int(np.argmax(paid))] == pytest.approx(honest, abs=1e-3)


@pytest.mark.parametrize(
    ("scale", "label", "value"),
    [
        ({"type": "pass_fail"}, True, 1.0),
        ({"type": "pass_fail"}, "Fail", 0.0),
        ({"type": "pass_fail"}, 1, 1.0),
        ({"type": "points"}, 4, 4.0),
        ({"type": "points"}, "5", 5.0),
        ({"type": "probability"}, False, 0.0),
        ({"type": "probability"}, "pass", 1.0),
        ({"type": "probability"}, 0.25, 0.25),
        ({"type": "probability"}, {"right": 0.25}, 0.25),
    ],
)
def test_labels_are_read_on_their_scale(tmp_path: Path, scale: dict[str, str], label: object, value: float) -> None:
    rubric = {"criteria": [{"name": "right", "text": "x", "scale": scale}]}
    task = judge_task(rows_file(tmp_path, *[label] * 4), rubric, heldout_size=1)
    example = task.example(0)
    assert example.answer is not None
    key = example.messages[1].content.split("</answer ")[1].split(">")[0]
    assert read_verdict(example.answer, task.options.rubric, key) == Verdict(values=(value,))


@pytest.mark.parametrize(
    ("scale", "label"),
    [
        ({"type": "pass_fail"}, "good"),
        ({"type": "pass_fail"}, None),
        ({"type": "pass_fail"}, 0.5),
        ({"type": "points"}, 6),
        ({"type": "points"}, 2.5),
        ({"type": "points"}, True),
        ({"type": "probability"}, 1.5),
        ({"type": "probability"}, [1]),
        ({"type": "probability"}, {"wrong": 1}),
        ({"type": "probability"}, {"right": 1, "more": 1}),
    ],
)
def test_a_label_beyond_its_scale_is_an_error_with_its_row(
    tmp_path: Path, scale: dict[str, str], label: object
) -> None:
    rubric = {"criteria": [{"name": "right", "text": "x", "scale": scale}]}
    path = rows_file(tmp_path, *[1, 1, label, 1])
    with pytest.raises(TaskError, match=r"row 3: column 'label'.*Correct the row"):
        judge_task(path, rubric, heldout_size=1)


def test_an_absent_column_names_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=r"no column 'labels'; the nearest is 'label'. Set label_column"):
        judge_task(rows_file(tmp_path, 1, 1), label_column="labels")


def test_no_question_is_on_both_sides_whatever_its_answers(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    rows = [{"question": f"{n} + 1", "answer": n + wrong, "label": wrong == 1} for wrong in (1, 2, 3) for n in range(9)]
    path.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    task = judge_task(path, heldout_size=7)
    asked = {
        split: {task.example(i, split).messages[1].content.split("\n")[0] for i in range(task.size(split))}  # type: ignore[arg-type]
        for split in ("train", "heldout")
    }
    assert not asked["train"] & asked["heldout"]
    assert task.size("heldout") == 7
    assert task.size("train") == 27 - 9  # three questions are held out, two of the last one's rows are left out


def test_too_few_questions_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="heldout_size is 4"):
        judge_task(rows_file(tmp_path, 1, 1, 1, 1), heldout_size=4)


def test_a_task_is_the_same_in_every_process_and_knows_a_changed_file(evens: Path) -> None:
    task = judge_task(evens)
    again = pickle.loads(pickle.dumps(task))
    assert again.fingerprint == task.fingerprint
    assert [again.example(i) for i in range(9)] == [task.example(i) for i in range(9)]
    assert judge_task(evens, seed=1).example(0) != task.example(0)
    other: dict[str, Any] = {"criteria": [{"name": "right", "text": "It is no sum."}]}
    assert judge_task(evens, other).fingerprint != task.fingerprint
    lines = evens.read_text().splitlines()
    evens.write_text("\n".join(line.replace("An even", "An odd") for line in lines))
    with pytest.raises(TaskError, match="has changed since the run began"):
        task.example(0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"answer_column": "label"}, "each needs one of its own"),
        ({"tools": [{"name": "calculator"}]}, "Drop tools"),
        ({"rubric": {"criteria": []}}, "length >= 1"),
        ({"rubric": {"criteria": [{"name": "key", "text": "x"}]}}, "Rename it"),
        ({"rubric": {"criteria": [{"name": "a", "text": "x"}] * 2}}, "Rename all but one"),
        ({"rubric": {"criteria": [{"name": "a", "text": "x", "weight": 0}]}}, "> 0.0"),
        ({"rubric": {"criteria": [{"name": "A b", "text": "x"}]}}, "regex"),
        ({"rubric": {"criteria": [{"name": "a", "text": "x", "scale": {"type": "points", "lowest": 5}}]}}, "Exchange"),
    ],
)
def test_a_wrong_setting_is_refused(evens: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=message):
        judge_task(evens, **changes)
