"""Proves: every bad file or row is a TaskError that names file, row, column and the way out; good rows come back as
they were written, from both formats, whatever the text.
"""

import contextlib
import json
import tracemalloc
from array import array
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollforward.model.messages import Message, ToolCall
from rollforward.rl.errors import TaskError
from rollforward.rl.tasks.rows import Row, Rows, open_rows

QUESTION, ANSWER = "question", "answer"


def opened(path: Path, *, question: str = QUESTION, answer: str | None = ANSWER, turns: str | None = None) -> Rows:
    return open_rows(
        path,
        question_column=question,
        answer_column=answer,
        messages_column=turns,
        tools={"search": False, "calculator": False, "submit": True},
        owner="task mine",
    )


def jsonl(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def parquet(path: Path, columns: dict[str, Any]) -> Path:
    pyarrow.parquet.write_table(pyarrow.table(columns), path, row_group_size=3)
    return path


def row(question: str, answer: str | None) -> Row:
    return Row(messages=(Message(role="user", content=question),), answer=answer)


def check_all(rows: Rows, expected: list[Row]) -> None:
    assert list(rows.scan()) == expected
    assert [rows.row(index) for index in reversed(range(len(expected)))] == expected[::-1]


def test_both_formats_give_the_same_rows(tmp_path: Path) -> None:
    questions = [f"{a} + 1?" for a in range(8)]
    expected = [row(question, str(a + 1)) for a, question in enumerate(questions)]
    pairs = zip(questions, range(1, 9), strict=True)
    lines = [{QUESTION: question, ANSWER: answer, "more": [1]} for question, answer in pairs]
    check_all(opened(jsonl(tmp_path / "a.jsonl", lines)), expected)
    check_all(opened(parquet(tmp_path / "a.parquet", {QUESTION: questions, ANSWER: list(range(1, 9))})), expected)
    texts = {QUESTION: questions, ANSWER: [str(a + 1) for a in range(8)], "more": [0] * 8}
    check_all(opened(parquet(tmp_path / "b.PARQUET", texts)), expected)


def test_messages_come_from_both_formats(tmp_path: Path) -> None:
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 + 1?"}]
    expected = [Row(messages=tuple(Message(**turn) for turn in turns), answer=None)]  # type: ignore[arg-type]
    check_all(opened(jsonl(tmp_path / "a.jsonl", [{"chat": turns}]), question="chat", answer=None), expected)
    with_nulls = [[{**turn, "reasoning": None} for turn in turns]]
    check_all(opened(parquet(tmp_path / "a.parquet", {"chat": with_nulls}), question="chat", answer=None), expected)


def test_empty_lines_and_a_byte_order_mark_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"question": "a", "answer": "b"}\r\n\n  \n{"question": "c", "answer": 3}')
    check_all(opened(path), [row("a", "b"), row("c", "3")])


GOOD = {QUESTION: "a", ANSWER: "b"}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"row 2: this is not JSON \(.*\)\. Write one object on one line"),
        ("[1]", r"row 2: this is \[1\], not an object"),
        (
            '{"questions": "a", "answer": "b"}',
            r"no column 'question'; the nearest is 'questions'\. Set question_column",
        ),
        (
            '{"question": "a", "x": 1}',
            r"row 2: there is no column 'answer'; it has 'question', 'x'\. Set answer_column",
        ),
        ("{}", "it has none"),
        ('{"question": 5, "answer": "b"}', r"'question' is 5, of type int; it must be a text or a list of messages"),
        ('{"question": null, "answer": "b"}', "of type null"),
        ('{"question": " ", "answer": "b"}', "it must end with what the user asks"),
        ('{"question": [], "answer": "b"}', "it must end with what the user asks"),
        ('{"question": [{"role": "user"}], "answer": "b"}', "no list of messages: Object missing.*`content`"),
        ('{"question": [{"role": "judge", "content": "a"}], "answer": "b"}', "one of system, user, assistant and tool"),
        ('{"question": [{"role": "assistant", "content": "a"}], "answer": "b"}', "must end with what the user asks"),
        ('{"question": ["a"], "answer": "b"}', "no list of messages"),
        ('{"question": "a", "answer": 0.5}', r"'answer' is 0\.5, of type float; it must be a text or a whole number"),
        ('{"question": "a", "answer": true}', "of type bool"),
        ('{"question": "a", "answer": ""}', "'answer' is empty"),
        ('{"question": "a", "answer": ["b"]}', "of type list"),
        ("[" * 100_000, "not JSON"),
    ],
)
def test_a_bad_line_is_named_with_the_way_out(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(json.dumps(GOOD) + "\n" + line + "\n" + json.dumps(GOOD) + "\n")
    with pytest.raises(TaskError, match=message) as caught:
        list(opened(path).scan())
    assert str(caught.value).startswith(f"task mine: {path}, row 2: ")
    assert len(str(caught.value)) < 600


def test_bytes_that_are_no_text_are_named(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(b'{"question": "a\xff", "answer": "b"}\n')
    with pytest.raises(TaskError, match="row 1: this is not JSON"):
        list(opened(path).scan())


def test_bytes_that_are_no_text_are_named_in_parquet_too(tmp_path: Path) -> None:
    offsets, data = pyarrow.py_buffer(array("i", [0, 1, 2]).tobytes()), pyarrow.py_buffer(b"a\xff")
    broken = pyarrow.StringArray.from_buffers(2, offsets, data)
    path = parquet(tmp_path / "bad.parquet", {QUESTION: broken, ANSWER: ["b", "b"]})
    with pytest.raises(TaskError, match="row 2: there are bytes that are no text"):
        list(opened(path).scan())


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"questoin": ["a"], ANSWER: ["b"]}, "no column 'question'; the nearest is 'questoin'. Set question_column"),
        ({QUESTION: ["a"]}, "there is no column 'answer'; it has 'question'. Set answer_column"),
        ({QUESTION: [1], ANSWER: ["b"]}, "column 'question' has the type int64; it must be a string or a list"),
        ({QUESTION: ["a"], ANSWER: [0.5]}, "column 'answer' has the type double; it must be a string or an integer"),
        ({QUESTION: ["a", None], ANSWER: ["b", "b"]}, "row 2: column 'question' is None, of type null"),
        ({QUESTION: ["a", "b"], ANSWER: [1, None]}, "row 2: column 'answer' is None, of type null"),
        ({QUESTION: [["a"]], ANSWER: ["b"]}, "row 1: column 'question' is no list of messages"),
    ],
)
def test_a_bad_parquet_file_is_named_with_the_way_out(tmp_path: Path, columns: dict[str, Any], message: str) -> None:
    path = parquet(tmp_path / "bad.parquet", columns)
    with pytest.raises(TaskError) as caught:
        list(opened(path).scan())
    assert message in str(caught.value)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("qz", r"there is no file .*/qz \(from the directory .*\)\. Correct the path"),
        ("data.jsnl", r"The nearest is .*data\.jsonl\. Correct"),
        ("no/data.jsonl", "There is no directory .*/no either"),
        ("data.csv", r"ends with '\.csv'; a dataset is a \.jsonl file.*or a \.parquet file\. Convert it"),
        (".", r"is a directory; a dataset is a \.jsonl or \.parquet file, and it holds data\.jsonl\. Name the file"),
    ],
)
def test_a_file_that_cannot_be_one_is_refused(tmp_path: Path, name: str, message: str) -> None:
    jsonl(tmp_path / "data.jsonl", [GOOD])
    (tmp_path / "data.csv").write_text("question,answer\na,b\n")
    with pytest.raises(TaskError, match=message):
        opened(tmp_path / name)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.binary(max_size=200))
@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_any_bytes_give_rows_or_a_task_error(tmp_path: Path, suffix: str, data: bytes) -> None:
    path = tmp_path / f"any{suffix}"
    path.write_bytes(data)
    with contextlib.suppress(TaskError):
        list(opened(path).scan())


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.sampled_from(["user", "\ud800"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["role", "content"]), inner),
    max_leaves=6,
)


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(question=VALUES, answer=VALUES)
def test_any_values_give_what_was_written_or_a_task_error(tmp_path: Path, question: Any, answer: Any) -> None:
    rows = opened(jsonl(tmp_path / "any.jsonl", [{QUESTION: question, ANSWER: answer}]))
    try:
        (found,) = rows.scan()
    except TaskError:
        return
    assert found == rows.row(0)
    assert found.answer == str(answer)
    assert found.messages[-1].content == (question if isinstance(question, str) else question[-1]["content"])


def test_a_parquet_file_cut_anywhere_is_a_task_error(tmp_path: Path) -> None:
    whole = parquet(tmp_path / "whole.parquet", {QUESTION: ["a"] * 9, ANSWER: ["b"] * 9}).read_bytes()
    for size in range(0, len(whole), 7):
        (tmp_path / "cut.parquet").write_bytes(whole[:size])
        with pytest.raises(TaskError, match="no parquet file that can be read"):
            opened(tmp_path / "cut.parquet")


def test_a_row_costs_a_few_bytes_of_memory(tmp_path: Path) -> None:
    path = tmp_path / "many.jsonl"
    with path.open("w") as file:
        for index in range(20_000):
            file.write(json.dumps({QUESTION: f"{index} " + "x" * 400, ANSWER: "b"}) + "\n")
    rows = opened(path)
    tracemalloc.start()
    try:
        assert sum(1 for _ in rows.scan()) == 20_000
        held_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held_bytes / 20_000 < 24
    assert rows.row(12_345).messages[0].content.startswith("12345 ")


CALL = {"name": "calculator", "arguments": '{"expression": "1 + 1"}'}
TURNS: list[dict[str, Any]] = [
    {"role": "assistant", "content": "", "reasoning": "Let me see.", "tool_calls": [CALL]},
    {"role": "tool", "content": "2"},
    {"role": "assistant", "content": "It is 2."},
]


def test_turns_to_learn_from_come_from_both_formats(tmp_path: Path) -> None:
    expected = Row(
        messages=(Message(role="user", content="1 + 1?"),),
        answer="2",
        demonstration=(
            Message(role="assistant", content="", reasoning="Let me see.", tool_calls=(ToolCall(**CALL),)),
            Message(role="tool", content="2"),
            Message(role="assistant", content="It is 2."),
        ),
    )
    line = {QUESTION: "1 + 1?", ANSWER: "2", "turns": TURNS}
    check_all(opened(jsonl(tmp_path / "a.jsonl", [line]), turns="turns"), [expected])
    columns = {name: [value] for name, value in line.items()}
    check_all(opened(parquet(tmp_path / "a.parquet", columns), turns="turns"), [expected])


@pytest.mark.parametrize(
    ("turns", "message"),
    [
        ("2", r"column 'turns' is '2', of type str; it must be a list of messages"),
        ([], r"messages of the roles none; they must be assistant and tool"),
        (TURNS[:2], r"roles assistant, tool; they must be assistant and tool, and begin and end with assistant"),
        ([{"role": "user", "content": "?"}, TURNS[2]], r"roles user, assistant; .*belongs into the question"),
        ([TURNS[0], TURNS[2]], r"message 1 has 1 tool_calls and is followed by 0 messages of the role tool"),
        ([TURNS[0], TURNS[1], TURNS[1], TURNS[2]], r"has 1 tool_calls and is followed by 2 messages"),
        ([TURNS[2], TURNS[2]], r"message 1 has 0 tool_calls and is followed by 0 messages"),
        ([TURNS[0]], r"the last message has tool_calls that nothing answers"),
        ([TURNS[0] | {"tool_calls": [CALL | {"arguments": "1 + 1"}]}, *TURNS[1:]], r"no JSON object"),
        ([TURNS[0] | {"tool_calls": [CALL | {"id": "1"}]}, *TURNS[1:]], r"unknown field `id`"),
        (
            [TURNS[0] | {"tool_calls": [CALL | {"name": "calc"}]}, *TURNS[1:]],
            r"column 'turns' calls 'calc'; the task's tools are search, calculator, submit\. Add it to tools",
        ),
    ],
)
def test_bad_turns_are_named_with_the_way_out(tmp_path: Path, turns: Any, message: str) -> None:
    path = jsonl(tmp_path / "a.jsonl", [{QUESTION: "1 + 1?", ANSWER: "2", "turns": turns}])
    with pytest.raises(TaskError, match=message) as caught:
        list(opened(path, turns="turns").scan())
    assert "a.jsonl, row 1" in str(caught.value)


def test_an_absent_or_mistyped_column_of_turns_is_named(tmp_path: Path) -> None:
    line = {QUESTION: "1 + 1?", ANSWER: "2", "turn": "2"}
    with pytest.raises(TaskError, match=r"no column 'turns'; the nearest is 'turn'\. Set messages_column"):
        list(opened(jsonl(tmp_path / "a.jsonl", [line]), turns="turns").scan())
    with pytest.raises(TaskError, match=r"column 'turn' has the type string; it must be a list of messages"):
        opened(parquet(tmp_path / "a.parquet", {name: [value] for name, value in line.items()}), turns="turn")
