"""Proves: splits of a user's file are disjoint by text and do not depend on the order of rows; a changed file, too few
questions and a wrong configuration are errors with the way out.

Rows and formats are in test_rows.py, what answers are worth in test_rewards.py.
"""

import json
import pickle
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollforward.model.messages import Message, ToolCall
from rollforward.rl.errors import TaskError
from rollforward.rl.tasks.config import DatasetConfig, TaskConfig
from rollforward.rl.tasks.registry import build_task
from rollforward.rl.tasks.reward_config import ExactReward, PythonReward
from rollforward.rl.tasks.types import Task
from rollforward.sandbox.config import ToolConfig
from rollforward.sandbox.errors import ToolError


def write(path: Path, questions: list[str]) -> Path:
    path.write_text("".join(json.dumps({"question": q, "answer": f"A{q}"}) + "\n" for q in questions))
    return path


def config(path: Path, **changes: Any) -> DatasetConfig:
    fields: dict[str, Any] = {"name": "mine", "path": str(path), "reward": ExactReward(), "heldout_size": 3}
    return DatasetConfig(**(fields | changes))


def asked(task: Task, split: Any) -> list[str]:
    return [task.example(index, split).messages[-1].content for index in range(task.size(split))]


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(numbers=st.lists(st.integers(0, 12), min_size=1, max_size=40), seed=st.integers(0, 3))
def test_no_text_is_in_both_splits_and_order_has_no_say(tmp_path: Path, numbers: list[int], seed: int) -> None:
    questions = [f"{number}?" for number in numbers]
    path = write(tmp_path / "a.jsonl", questions)
    if len(set(questions)) < 4:
        with pytest.raises(TaskError, match=f"has {len(set(questions))} distinct questions; it must have at least 4"):
            build_task(config(path, seed=seed))
        return
    task = build_task(config(path, seed=seed))
    heldout, train = asked(task, "heldout"), asked(task, "train")
    assert len(set(heldout)) == len(heldout) == 3
    assert sorted(train) == sorted(q for q in questions if q not in heldout)
    backwards = build_task(config(write(tmp_path / "b.jsonl", questions[::-1]), seed=seed))
    assert asked(backwards, "heldout") == heldout
    assert [task.example(i).answer for i in range(task.size("train"))] == [f"A{q}" for q in train]
    assert [task.example(i, "heldout").answer for i in range(3)] == [f"A{q}" for q in heldout]


def test_copies_that_differ_in_white_space_stay_on_one_side(tmp_path: Path) -> None:
    questions = [text for n in range(20) for text in (f"what is {n}?", f"  what  is\n{n}? ")]
    task = build_task(config(write(tmp_path / "a.jsonl", questions), heldout_size=10))
    words = {split: {" ".join(q.split()) for q in asked(task, split)} for split in ("train", "heldout")}
    assert not words["train"] & words["heldout"]
    assert (task.size("train"), len(words["heldout"])) == (20, 10)


def test_another_seed_holds_out_other_questions(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [f"{n}?" for n in range(100)])
    first, again, other = (build_task(config(path, seed=seed)) for seed in (0, 0, 1))
    assert asked(first, "heldout") == asked(again, "heldout") != asked(other, "heldout")
    assert first.fingerprint == again.fingerprint != other.fingerprint


def test_a_second_file_is_held_out_and_its_questions_are_not_trained(tmp_path: Path) -> None:
    path = write(tmp_path / "train.jsonl", [f"{n}?" for n in range(10)])
    second = write(tmp_path / "test.jsonl", ["7?", " 8?", "77?", "78?", "7?"])
    task = build_task(config(path, heldout_path=str(second)))
    assert set(asked(task, "heldout")) < {"7?", " 8?", "77?", "78?"}
    assert asked(task, "train") == [f"{n}?" for n in (0, 1, 2, 3, 4, 5, 6, 9)]
    with pytest.raises(
        TaskError, match=r"test\.jsonl has 4 distinct questions; it must have at least 5 \(heldout_size"
    ):
        build_task(config(path, heldout_path=str(second), heldout_size=5))
    with pytest.raises(TaskError, match=r"every question of .* is also in .*train\.jsonl"):
        build_task(config(path, heldout_path=str(path)))


def test_the_fingerprint_is_of_the_content_wherever_it_lies(tmp_path: Path) -> None:
    questions = [f"{n}?" for n in range(10)]
    path = write(tmp_path / "a.jsonl", questions)
    task = build_task(config(path))
    assert build_task(config(write(tmp_path / "b.jsonl", questions))).fingerprint == task.fingerprint
    assert build_task(config(path, system_prompt="Be brief.")).fingerprint != task.fingerprint
    path.write_text(path.read_text().replace("A3?", "A33"))
    assert build_task(config(path)).fingerprint != task.fingerprint


def test_a_file_that_changes_in_a_run_is_noticed(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [f"{n}?" for n in range(10)])
    task = build_task(config(path))
    good = path.read_text()
    for text in (good.replace("?", "!"), good[:40], "", good.replace("{", "[")):
        path.write_text(text)
        with pytest.raises(TaskError, match="has changed since the run began"):
            task.example(task.size("train") - 1)
    path.write_text(good)
    task.example(task.size("train") - 1)


def test_the_system_prompt_comes_first(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [f"{n}?" for n in range(10)])
    task, plain = build_task(config(path, system_prompt="Be brief.")), build_task(config(path))
    for split in ("train", "heldout"):
        for index in range(3):
            (question,) = plain.example(index, split).messages
            assert task.example(index, split).messages == (Message(role="system", content="Be brief."), question)
    turns = [{"role": "system", "content": "Own."}, {"role": "user", "content": "1?"}]
    path.write_text(json.dumps({"question": turns, "answer": "1"}) + "\n")
    with pytest.raises(TaskError, match=r"row 1: the messages begin with a system message.*Set system_prompt=null"):
        build_task(config(path, system_prompt="Be brief."))


def test_an_index_outside_the_split_is_an_error(tmp_path: Path) -> None:
    task = build_task(config(write(tmp_path / "a.jsonl", [f"{n}?" for n in range(10)])))
    for index, split in ((7, "train"), (3, "heldout"), (-1, "train")):
        with pytest.raises(IndexError, match="outside the"):
            task.example(index, split)  # type: ignore[arg-type]


def test_a_task_pickles(tmp_path: Path) -> None:
    task = build_task(config(write(tmp_path / "a.jsonl", [f"{n}?" for n in range(10)])))
    again = pickle.loads(pickle.dumps(task))
    assert again.fingerprint == task.fingerprint
    assert [again.example(i) for i in range(7)] == [task.example(i) for i in range(7)]


DOCUMENT: dict[str, Any] = {"type": "dataset", "name": "mine", "path": "a.jsonl", "reward": {"type": "math_verify"}}


def test_a_configuration_is_told_apart_by_its_type() -> None:
    decoded = msgspec.convert(DOCUMENT, TaskConfig)
    assert isinstance(decoded, DatasetConfig)
    assert msgspec.json.decode(msgspec.json.encode(decoded), type=TaskConfig) == decoded
    python = DOCUMENT | {"answer_column": None, "reward": {"type": "python", "file": "r.py"}}
    assert msgspec.convert(python, TaskConfig) == DatasetConfig(
        name="mine", path="a.jsonl", answer_column=None, reward=PythonReward(file="r.py", function="score", timeout_s=5)
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"reward": {"type": "judge"}}, "Invalid value 'judge'"),
        ({"reward": {"type": "python"}}, "missing required field `file`"),
        ({"reward": {"type": "python", "file": "a.py", "timeout_s": 0}}, "timeout_s"),
        ({"columns": []}, "unknown field `columns`"),
        ({"heldout_size": 0}, "heldout_size"),
        ({"answer_column": None}, "answer_column is null, but the reward compares.*choose a reward of type python"),
        ({"answer_column": "question"}, "are both 'question'.*Name two columns"),
    ],
)
def test_a_wrong_configuration_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=message):
        msgspec.convert(DOCUMENT | changes, TaskConfig)


TOOL = '''def add(a: int, b: int = 1) -> int:
    """Adds."""
    return a + b
'''


def test_tools_of_ones_own_are_listed_in_the_prompt_unless_switched_off(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [f"{n}?" for n in range(10)])
    tool = tmp_path / "tool.py"
    tool.write_text(TOOL)
    tools = (ToolConfig(name="add", file=str(tool)),)
    task = build_task(config(path, tools=tools, effort="low"))
    example = task.example(0)
    assert [(one.name, one.description) for one in example.tools] == [("add", "Adds.")]
    assert (example.effort, task.options.max_turns) == ("low", 4)
    assert build_task(config(path, tools=tools, list_tools=False)).example(0).tools == ()
    changed = tmp_path / "changed.py"
    changed.write_text(TOOL.replace("a + b", "a - b"))
    other = build_task(config(path, tools=(ToolConfig(name="add", file=str(changed)),), effort="low"))
    assert other.fingerprint != task.fingerprint == build_task(config(path, tools=tools)).fingerprint
    with pytest.raises(ToolError, match="has no function 'sub'"):
        build_task(config(path, tools=(ToolConfig(name="sub", file=str(tool)),)))


def test_turns_of_a_row_are_what_is_learned(tmp_path: Path) -> None:
    turns = [
        {"role": "assistant", "content": "", "tool_calls": [{"name": "add", "arguments": '{"a": 1}'}]},
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": "2"},
    ]
    lines = [json.dumps({"question": f"{n}?", "answer": "2", "turns": turns}) for n in range(10)]
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(lines))
    tool = tmp_path / "tool.py"
    tool.write_text(TOOL)
    tools = (ToolConfig(name="add", file=str(tool)),)
    task = build_task(config(path, messages_column="turns", tools=tools))
    call = ToolCall(name="add", arguments='{"a": 1}')
    assert task.example(3).demonstration == (
        Message(role="assistant", content="", tool_calls=(call,)),
        Message(role="tool", content="2"),
        Message(role="assistant", content="2"),
    )
    assert build_task(config(path, tools=tools)).example(3).demonstration is None
    assert build_task(config(path, tools=tools)).fingerprint != task.fingerprint
    with pytest.raises(TaskError, match=r"row 1: column 'turns' calls 'add'; the task's tools are none\. Add it"):
        build_task(config(path, messages_column="turns"))
