"""Proves: rows that are made here are a function of seed and position, even in half of them whether or not words to the
judge follow, and are read like a file's, by a task that asks and by one that judges; SFT is shown as many verdicts by
chance as it shall be; a pattern is matched by whole answers alone, in bounded time.
"""

import random
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rollforward.model.tokenizer import ASSISTANT, BOS, END_THINK, EOS, THINK, USER
from rollforward.rl.errors import TaskError
from rollforward.rl.judge.config import Criterion, Rubric
from rollforward.rl.judge.types import Verdict
from rollforward.rl.judge.verdict import read_verdict
from rollforward.rl.tasks.config import TaskConfig
from rollforward.rl.tasks.evens import ATTACKS, Evens, attacked
from rollforward.rl.tasks.judge import JudgeTask
from rollforward.rl.tasks.registry import build_task
from rollforward.rl.tasks.rows import open_rows
from rollforward.rl.tasks.types import Score, ScoreReason

RUBRIC: dict[str, Any] = {"criteria": [{"name": "even", "text": "The number is even."}]}


def judging(**changes: Any) -> JudgeTask:
    values = {"type": "judge", "name": "judging", "path": {"type": "evens", "rows": 400}, "rubric": RUBRIC}
    task = build_task(msgspec.convert(values | changes, TaskConfig))
    assert isinstance(task, JudgeTask)
    return task


def test_rows_are_a_function_of_seed_and_position() -> None:
    some, other = Evens(rows=300, seed=3), Evens(rows=300, seed=4)
    rows = [some.values(index) for index in range(300)]
    assert rows == [Evens(rows=2000, seed=3).values(index) for index in range(300)]
    assert len({row["question"] for row in rows}) == 300
    assert rows != [other.values(index) for index in range(300)]
    assert all(row["label"] == (int(row["answer"]) % 2 == 0) for row in rows)
    assert 120 <= sum(row["label"] for row in rows) <= 180


def test_words_to_the_judge_follow_as_often_as_they_shall_and_change_nothing_else() -> None:
    plain, half = (Evens(rows=1000, attack_share=share) for share in (0.0, 0.5))
    talking = 0
    for index in range(1000):
        row, bare = half.values(index), plain.values(index)
        assert (row["question"], row["label"]) == (bare["question"], bare["label"])
        assert row["answer"].startswith(bare["answer"])
        talking += row["answer"] != bare["answer"]
    assert 450 <= talking <= 550
    everyone = Evens(rows=500, attack_share=1.0)
    assert all(not everyone.values(index)["answer"].isdecimal() for index in range(500))


def test_attacks_spell_the_encodings_own_control_tokens() -> None:
    said = " ".join(ATTACKS)
    assert all(token in said for token in (BOS, EOS, USER, ASSISTANT, THINK, END_THINK))
    found = {attacked("7", random.Random(seed)) for seed in range(400)}
    assert all(text.startswith(("7 ", "7\n")) for text in found)
    assert not any("1234" in text for text in found)


def test_a_column_that_rows_have_not_is_named() -> None:
    with pytest.raises(
        TaskError, match=r"task mine: 40 rows of type evens: there is no column 'lable'; the nearest is"
    ):
        open_rows(
            Evens(rows=40), question_column="question", answer_column="answer", label_column="lable", owner="task mine"
        )
    opened = open_rows(Evens(rows=40), question_column="question", answer_column=None, owner="task mine")
    rows = list(opened.scan())
    assert rows == [opened.row(index) for index in range(40)]
    assert rows[0].answer is None


@pytest.mark.parametrize("changes", [{"rows": 1}, {"rows": 10_001}, {"attack_share": 1.1}, {"row": 5}])
def test_rows_that_cannot_be_made_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"type": "evens"} | changes, Evens)


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_sft_is_shown_so_many_verdicts_by_chance(share: float) -> None:
    """Half of those by chance are right. What is right, and what a verdict is worth, does not change."""
    task, known = judging(guess_share=share), judging()
    right = 0
    for index in range(task.size("train")):
        example = task.example(index)
        assert example.answer is not None
        assert example.answer == known.example(index).answer
        assert task.score(example, example.answer).value == 1.0
        shown = example.answer if example.demonstration is None else example.demonstration[-1].content
        key = example.messages[1].content.rpartition("</answer ")[2].partition(">")[0]
        said = read_verdict(shown, Rubric(criteria=(Criterion(name="even", text="x"),)), key)
        assert isinstance(said, Verdict)
        right += shown == example.answer
        assert task.example(index) == example
    assert abs(right / task.size("train") - (1 - share / 2)) <= 0.1
    assert {task.example(index).demonstration is None for index in range(200)} == (
        {True} if share == 0 else {False} if share == 1 else {True, False}
    )


def test_chance_says_any_value_of_a_scale(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(f'{{"question": "{n}?", "answer": {n}, "label": 3}}\n' for n in range(300)))
    scale = {"type": "points", "lowest": 0}
    rubric = {"criteria": [{"name": "even", "text": "x", "scale": scale}]}
    points = judging(rubric=rubric, path=str(path), guess_share=1.0)
    shown = [points.example(index).demonstration for index in range(100)]
    assert {one[0].content.partition(": ")[2][0] for one in shown if one is not None} == {*"012345"}


def pattern_task(pattern: str, **changes: Any) -> Any:
    values = {
        "type": "dataset",
        "name": "evens",
        "path": {"type": "evens", "rows": 40},
        "heldout_size": 10,
        "answer_column": None,
        "reward": {"type": "pattern", "pattern": pattern, **changes},
    }
    return build_task(msgspec.convert(values, TaskConfig))


def test_a_pattern_matches_the_whole_answer() -> None:
    task = pattern_task("[0-9]?[02468]")
    example = task.example(0)
    for text, value in (("42", 1.0), (" 8\n", 1.0), ("41", 0.0), ("142", 0.0), ("42 pass", 0.0), ("4\n2", 0.0)):
        score = task.score(example, text)
        assert isinstance(score, Score)
        assert score.value == value, text
    assert task.score(example, " ").reason is ScoreReason.EMPTY
    assert task.score(example, "2" * 5000).reason is ScoreReason.TOO_LONG


def test_a_text_that_a_pattern_is_never_done_with_is_worth_nothing() -> None:
    task = pattern_task("(a+)+b", timeout_s=2.0)
    assert task.score(task.example(0), "a" * 40) == Score(value=0.0, reason=ScoreReason.TIMEOUT)
    assert task.score(task.example(0), "aaab").value == 1.0


def test_what_is_no_pattern_is_refused() -> None:
    with pytest.raises(msgspec.ValidationError, match=r"pattern is '\[0-9', which is no regular expression: .*Correct"):
        pattern_task("[0-9")
