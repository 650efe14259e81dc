"""Proves that tasks of reasoning-gym have disjoint splits, repeat in every process, judge tolerantly, refuse helpfully.

Does not prove that the library's verifiers are right. Importing the library takes some seconds, once for the module.
"""

import os
import subprocess
import sys
from typing import Any

import msgspec
import pytest

from rollforward.model.messages import Message, ToolCall
from rollforward.rl.conversations import solved_messages
from rollforward.rl.errors import TaskError
from rollforward.rl.tasks.config import (
    CallDemonstration,
    ReasoningGymConfig,
    TaskConfig,
    TextDemonstration,
    identity_bytes,
)
from rollforward.rl.tasks.registry import build_task, build_tasks
from rollforward.rl.tasks.types import ScoreReason, Task
from rollforward.sandbox.config import ToolConfig

SUMS: dict[str, Any] = {"min_terms": 3, "max_terms": 3, "min_digits": 1, "max_digits": 1}


def config(**changes: Any) -> ReasoningGymConfig:
    fields: dict[str, Any] = {"name": "sums", "dataset": "chain_sum", "params": SUMS, "train_size": 2000}
    return ReasoningGymConfig(**(fields | changes))


@pytest.fixture(scope="module")
def task() -> Task:
    return build_task(config())


def questions(task: Task, split: Any) -> list[str]:
    return [task.example(index, split).messages[-1].content for index in range(task.size(split))]


def test_no_question_is_in_both_splits(task: Task) -> None:
    heldout = questions(task, "heldout")
    assert len(set(heldout)) == len(heldout) == 200
    assert not set(heldout) & set(questions(task, "train"))


def test_the_splits_stay_disjoint_where_questions_are_scarce() -> None:
    """220 different questions, 120 of them held out: without replacement about half of the draws would collide."""
    scarce = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    task = build_task(config(params=scarce, heldout_size=120))
    train, heldout = set(questions(task, "train")), set(questions(task, "heldout"))
    assert len(heldout) == 120
    assert not heldout & train
    assert len(train) == 200 - 120


def test_more_heldout_questions_than_there_are_is_an_error() -> None:
    with pytest.raises(TaskError, match=r"gave 200 distinct questions, fewer than heldout_size = 201\. Lower it"):
        build_task(config(params=SUMS | {"min_terms": 2, "max_terms": 2}, heldout_size=201))


def test_all_questions_held_out_is_an_error() -> None:
    task = build_task(config(params=SUMS | {"min_terms": 2, "max_terms": 2}, heldout_size=200))
    with pytest.raises(TaskError, match="hardly more distinct questions than heldout_size = 200"):
        task.example(0)


def test_another_seed_gives_other_questions(task: Task) -> None:
    other = build_task(config(seed=1))
    assert questions(other, "heldout") != questions(task, "heldout")
    assert other.fingerprint != task.fingerprint
    assert build_task(config()).fingerprint == task.fingerprint


ASK_IN_A_NEW_PROCESS = """
from rollforward.rl.tasks.config import ReasoningGymConfig
from rollforward.rl.tasks.registry import build_task
task = build_task(ReasoningGymConfig(name="sums", dataset="chain_sum", params=%r, train_size=2000))
print(task.fingerprint, [task.example(i, s).messages[0].content for s in ("train", "heldout") for i in range(20)])
"""


def test_a_new_process_asks_the_same_questions(task: Task) -> None:
    output = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", ASK_IN_A_NEW_PROCESS % SUMS],
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONHASHSEED": "7"},
    ).stdout
    asked = [questions(task, split)[index] for split in ("train", "heldout") for index in range(20)]
    assert output.strip() == f"{task.fingerprint} {asked}"


def test_an_index_outside_the_split_is_an_error(task: Task) -> None:
    for index, split in ((2000, "train"), (200, "heldout"), (-1, "heldout")):
        with pytest.raises(IndexError, match="outside the"):
            task.example(index, split)  # type: ignore[arg-type]


def test_the_right_answer_scores_one(task: Task) -> None:
    for split in ("train", "heldout"):
        for index in range(50):
            example = task.example(index, split)
            assert example.answer is not None
            for text in (example.answer, f" {example.answer}\n", f"<answer>{example.answer}.0</answer>"):
                score = task.score(example, text)
                assert (score.value, score.reason, score.is_correct) == (1.0, ScoreReason.CORRECT, True)


def example_with_answer(task: Task, answer: str) -> Any:
    return next(task.example(i) for i in range(task.size("train")) if task.example(i).answer == answer)


@pytest.mark.parametrize(
    ("text", "value", "reason"),
    [
        ("8", 0.0, ScoreReason.WRONG),
        ("-7", 0.5, ScoreReason.PARTIAL),
        ("", 0.0, ScoreReason.EMPTY),
        ("<think>7", 0.0, ScoreReason.UNCLOSED_THINKING),
        ("6" * 5000, 0.0, ScoreReason.TOO_LONG),
        ("<｜User｜>\0\ufffd", 0.0, ScoreReason.WRONG),
    ],
)
def test_other_answers_score_less_and_say_why(task: Task, text: str, value: float, reason: ScoreReason) -> None:
    score = task.score(example_with_answer(task, "7"), text)
    assert (score.value, score.reason, score.is_correct) == (value, reason, False)


def test_without_partial_credit_only_full_marks_count() -> None:
    task = build_task(config(partial_credit=False))
    example = example_with_answer(task, "7")
    assert task.score(example, "-7") == msgspec.structs.replace(task.score(example, "8"), reason=ScoreReason.PARTIAL)
    assert task.score(example, "7").value == 1.0


class Raises:
    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index]

    def score_answer(self, answer: str, entry: Any) -> float:
        return {"nan": float("nan")}[answer]


def test_a_verifier_that_cannot_read_the_answer_makes_no_exception() -> None:
    task: Any = build_task(config())
    task._train_items = Raises(task._train_items)
    for text in ("nan", "anything else"):
        assert task.score(task.example(0), text).reason is ScoreReason.UNREADABLE


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dataset": "chain_sums"}, "no dataset 'chain_sums'. Nearest: chain_sum"),
        ({"params": {"min_term": 2}}, "chain_sum has no parameter 'min_term'. Nearest: min_terms"),
        ({"params": {"seed": 2}}, "params.seed is chosen by the task, for disjoint splits. Set seed beside params"),
        ({"params": {"size": 2}}, "Set train_size beside params"),
        ({"params": {"min_terms": 5, "max_terms": 2}}, "max_terms must be >= min_terms"),
        ({"params": {"min_terms": "two"}}, "refuses params {'min_terms': 'two'}"),
        ({"params": {"min_terms": 2.5}}, "Check their types and ranges"),
    ],
)
def test_wrong_names_and_values_are_errors_with_the_way_out(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(TaskError) as caught:
        build_task(config(**changes))
    assert message in str(caught.value)
    assert "task sums: " in str(caught.value)


def test_tasks_have_different_names_and_there_is_one() -> None:
    with pytest.raises(TaskError, match="tasks is empty"):
        build_tasks([])
    with pytest.raises(TaskError, match="2 tasks are named 'sums'"):
        build_tasks([config(), config(seed=1)])


def test_a_configuration_is_told_apart_by_its_type() -> None:
    document: dict[str, Any] = {"type": "reasoning_gym", "name": "sums", "dataset": "gcd"}
    assert msgspec.convert(document, TaskConfig) == ReasoningGymConfig(name="sums", dataset="gcd")
    for change in ({"type": "gym"}, {"datasets": "gcd"}, {"heldout_size": 0}, {"name": "A b"}):
        with pytest.raises(msgspec.ValidationError):
            msgspec.convert(document | change, TaskConfig)


@pytest.mark.parametrize("dataset", ["spell_backward", "gcd", "basic_arithmetic", "number_sorting", "pool_matrix"])
def test_other_datasets_work_by_name(dataset: str) -> None:
    task = build_task(ReasoningGymConfig(name=dataset, dataset=dataset, train_size=100, heldout_size=20))
    assert not set(questions(task, "heldout")) & set(questions(task, "train"))
    for index in range(20):
        example = task.example(index, "heldout")
        assert task.score(example, str(example.answer)).is_correct
        assert not task.score(example, "no idea").is_correct


SHOWN = CallDemonstration(tool="calculator", argument="expression", metadata="expression")
CALCULATOR = (ToolConfig(name="calculator"),)


def test_a_demonstration_calls_the_tool_with_the_questions_metadata() -> None:
    task = build_task(config(tools=CALCULATOR, demonstrate=(SHOWN,), effort="high", heldout_size=5))
    example = task.example(7)
    expression = example.messages[-1].content.removesuffix(" =").rpartition(": ")[2]
    assert example.answer is not None
    assert example.answer == str(eval(expression))
    call = ToolCall(name="calculator", arguments=msgspec.json.encode({"expression": expression}).decode())
    assert example.demonstration == (
        Message(role="assistant", content="", tool_calls=(call,)),
        Message(role="tool", content=example.answer),
        Message(role="assistant", content=example.answer),
    )
    assert (example.effort, [one.name for one in example.tools]) == ("high", ["calculator"])
    assert build_task(config(heldout_size=5)).example(7).demonstration is None


def test_the_first_demonstration_for_a_question_decides() -> None:
    declines = TextDemonstration(text="I do not know.", where={"num_terms": 3})
    params = {"min_terms": 2, "max_terms": 3}
    task = build_task(config(params=params, tools=CALCULATOR, demonstrate=(declines, SHOWN), heldout_size=5))
    kinds: set[tuple[int, str]] = set()
    for index in range(40):
        example = task.example(index)
        terms = len(example.messages[-1].content.rpartition(": ")[2].split()) // 2
        assert example.demonstration is not None
        kinds.add((terms, example.demonstration[0].content or example.demonstration[0].tool_calls[0].name))
    assert kinds == {(2, "calculator"), (3, "I do not know.")}
    with pytest.raises(TaskError, match=r"no metadata 'num_trms'.*num_terms"):
        build_task(config(demonstrate=(msgspec.structs.replace(declines, where={"num_trms": 3}),), heldout_size=5))


def test_a_share_of_the_questions_is_shown_with_the_tool() -> None:
    task = build_task(
        config(tools=CALCULATOR, demonstrate=(msgspec.structs.replace(SHOWN, share=0.3),), heldout_size=5)
    )
    shown = [task.example(index).demonstration is not None for index in range(1000)]
    assert 250 < sum(shown) < 350
    assert shown[:50] == [task.example(index).demonstration is not None for index in range(50)]
    declines = TextDemonstration(text="I do not know.", share=0.3)
    declining = build_task(config(demonstrate=(declines,), heldout_size=5))
    assert [declining.example(index).demonstration is not None for index in range(1000)] == shown
    assert solved_messages(declining.example(shown.index(True)))[-1].content == "I do not know."
    mixed = build_task(config(tools=CALCULATOR, demonstrate=(declines, SHOWN), heldout_size=5))
    assert {len(mixed.example(index).demonstration or ()) for index in range(50)} == {1, 3}
    answered = next(task.example(index) for index in range(1000) if not shown[index])
    assert solved_messages(answered)[-1].content == answered.answer


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"argument": "expresion"},
            r"demonstrate\.argument is 'expresion', which calculator does not take.*expression",
        ),
        ({"metadata": "expr"}, r"questions of chain_sum have no metadata 'expr'\. Nearest: expression"),
    ],
)
def test_a_demonstration_that_cannot_be_shown_is_an_error(changes: dict[str, str], message: str) -> None:
    shown = msgspec.structs.replace(SHOWN, **changes)
    with pytest.raises(TaskError, match=message):
        build_task(config(tools=CALCULATOR, demonstrate=(shown,), heldout_size=5))


def test_settings_that_came_later_change_the_order_of_no_question_where_they_are_not_used() -> None:
    """Published numbers hang on the order; a new setting with its default must not change it."""
    plain = ReasoningGymConfig(name="sums", dataset="chain_sum", params={"b": 1, "a": 2}, train_size=10)
    assert identity_bytes(plain) == (
        b'{"type":"reasoning_gym","name":"sums","effort":"non-think","max_new_tokens":null,"length_penalty":null,'
        b'"tools":[],"max_turns":4,"max_observation_tokens":256,"list_tools":true,"dataset":"chain_sum",'
        b'"params":{"a":2,"b":1},"seed":0,"train_size":10,"heldout_size":200,"partial_credit":true,'
        b'"max_answer_chars":4096,"demonstrate":[]}'
    )
    assert b'"max_calls_per_turn":3' in identity_bytes(msgspec.structs.replace(plain, max_calls_per_turn=3))
