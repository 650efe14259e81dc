"""Proves: files and hidden tests of a user's rows come back as they were written, from both formats, whether as values
or as JSON; bad ones are errors that name file, row, column and the way out, before anything starts.
"""

import json
from pathlib import Path
from typing import Any

import msgspec
import pyarrow
import pyarrow.parquet
import pytest

from rollforward.rl.errors import TaskError
from rollforward.rl.tasks.config import TaskConfig
from rollforward.rl.tasks.dataset import DatasetTask
from rollforward.rl.tasks.registry import build_task
from rollforward.rl.tasks.types import ScoreReason
from rollforward.rl.tasks.unit_tests import UnitTest
from rollforward.rollout.workspace import Workspace

FILES = {"solve.py": "def double(x):\n    return x\n", "data/in.txt": "7"}
TESTS = [
    {"argv": ["python3", "solve.py"], "stdin": "3\n", "stdout": "6", "files": {"more.txt": "ü"}},
    {"script": "import solve\nassert solve.double(2) == 4", "timeout_s": 2.5},
]
CALL = {"name": "submit", "arguments": "{}"}
TURNS = [{"role": "assistant", "content": "", "tool_calls": [CALL]}]
PARSED = (
    UnitTest(argv=("python3", "solve.py"), stdin="3\n", stdout="6", files={"more.txt": "ü"}),
    UnitTest(script="import solve\nassert solve.double(2) == 4", timeout_s=2.5),
)


def row(number: int, **changes: Any) -> dict[str, Any]:
    return {"question": f"Mend {number}.", "files": FILES, "tests": TESTS, "turns": TURNS} | changes


def built(path: Path, **changes: Any) -> DatasetTask:
    fields: dict[str, Any] = {
        "type": "dataset",
        "name": "mine",
        "path": str(path),
        "reward": {"type": "unit_tests"},
        "answer_column": None,
        "files_column": "files",
        "tests_column": "tests",
        "messages_column": "turns",
        "substrate": "container",
        "tools": [{"name": "submit"}, {"name": "read_file"}],
        "submission": ["solve.py"],
        "heldout_size": 1,
    }
    task = build_task(msgspec.convert(fields | changes, TaskConfig))
    assert isinstance(task, DatasetTask)
    return task


def jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(one) + "\n" for one in rows))
    return path


def parquet(path: Path, rows: list[dict[str, Any]]) -> Path:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


def check(task: DatasetTask, num_rows: int) -> None:
    assert task.size("train") == num_rows - 1
    for split, size in (("train", num_rows - 1), ("heldout", 1)):
        for index in range(size):
            example = task.example(index, split)  # type: ignore[arg-type]
            assert example.workspace == Workspace(files={path: text.encode() for path, text in FILES.items()})
            assert task._row(index, split).tests == PARSED  # type: ignore[arg-type]
            assert example.demonstration is not None
            assert example.demonstration[-1].tool_calls[0].name == "submit"
            assert task.score(example, "done").reason is ScoreReason.EMPTY  # type: ignore[union-attr]


def test_values_and_json_in_both_formats(tmp_path: Path) -> None:
    plain = [row(number) for number in range(4)]
    as_json = [row(number, files=json.dumps(FILES), tests=json.dumps(TESTS)) for number in range(4)]
    check(built(jsonl(tmp_path / "a.jsonl", plain)), 4)
    check(built(jsonl(tmp_path / "b.jsonl", as_json)), 4)
    check(built(parquet(tmp_path / "a.parquet", plain)), 4)
    check(built(parquet(tmp_path / "b.parquet", as_json)), 4)
    maps = pyarrow.array([list(FILES.items())] * 4, pyarrow.map_(pyarrow.string(), pyarrow.string()))
    table = pyarrow.Table.from_pylist(as_json).set_column(1, "files", maps)
    pyarrow.parquet.write_table(table, tmp_path / "c.parquet")
    check(built(tmp_path / "c.parquet"), 4)


def test_one_text_with_other_files_is_another_question(tmp_path: Path) -> None:
    rows = [row(0, files=FILES | {"data/in.txt": str(number)}) for number in range(5)]
    task = built(jsonl(tmp_path / "a.jsonl", rows), heldout_size=2)
    heldout = {str(task.example(index, "heldout").workspace) for index in range(2)}
    assert len(heldout) == 2
    assert not heldout & {str(task.example(index).workspace) for index in range(3)}
    with pytest.raises(TaskError, match="has 1 distinct questions"):
        built(jsonl(tmp_path / "b.jsonl", [row(0)] * 5))


def test_other_tests_are_another_fingerprint(tmp_path: Path) -> None:
    first = built(jsonl(tmp_path / "a.jsonl", [row(0), row(1)])).fingerprint
    changed = [row(0), row(1, tests=[TESTS[0] | {"stdout": "7"}])]
    assert built(jsonl(tmp_path / "b.jsonl", changed)).fingerprint != first
    assert built(jsonl(tmp_path / "c.jsonl", [row(0), row(1)])).fingerprint == first


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"files": ["solve.py"]}, r"a\.jsonl, row 2: column 'files' is no files: .*object of texts by path"),
        ({"files": {"a": 1}}, r"column 'files' is no files: Expected `str`, got `int`"),
        ({"files": "{"}, r"column 'files' is no files"),
        ({"files": None}, r"column 'files' is no files"),
        ({"files": {"../a": ""}}, r"column 'files' has a file '\.\./a'; its name must be a path without `\.\.`"),
        ({"files": {"a\0b": ""}}, r"column 'files' has a file"),
        ({"files": {"": ""}}, r"column 'files' has a file ''"),
        ({"files": {"a/": ""}}, r"column 'files' has a file 'a/'"),
        ({"tests": []}, r"a\.jsonl, row 2: column 'tests' is no hidden tests: there must be at least one test"),
        ({"tests": [{}]}, r"a test has either `argv`, a command, or `script`, Python source"),
        ({"tests": [{"argv": ["a"], "script": "1"}]}, r"a test has either `argv`"),
        ({"tests": [{"argv": ["a"], "expected": "1"}]}, r"unknown field `expected`"),
        ({"tests": [{"argv": "a"}]}, r"Expected `array`, got `str`"),
        ({"tests": [{"argv": ["a\0"]}]}, r"no word of it holds a NUL"),
        ({"tests": [{"argv": [""]}]}, r"argv begins with a program"),
        ({"tests": [{"argv": ["a"], "timeout_s": 0}]}, r"Expected `float` > 0\.0"),
        ({"tests": [{"script": "1", "stdout": "1"}]}, r"a script reads nothing and is judged by its end"),
        ({"tests": "[" * 100_000}, r"column 'tests' is no hidden tests"),
        ({"turns": [TURNS[0] | {"tool_calls": [{"name": "read_file", "arguments": "{}"}]}]}, r"nothing answers"),
    ],
)
def test_bad_files_and_tests_are_named_with_the_way_out(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(TaskError, match=message):
        built(jsonl(tmp_path / "a.jsonl", [row(0), row(1, **changes), row(2)]))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tests_column": None}, r"tests_column is None, and the reward is of type unit_tests; one needs the other"),
        ({"reward": {"type": "exact"}, "answer_column": "turns"}, r"the reward is not of type unit_tests"),
        ({"submission": []}, r"reward\.type is unit_tests, but submission is empty"),
        ({"substrate": "function", "submission": []}, r"submission is empty.*Set substrate=container"),
        (
            {
                "reward": {"type": "python", "file": "a.py"},
                "tests_column": None,
                "substrate": "function",
                "submission": [],
            },
            r"files_column is 'files', but where substrate is function nothing is kept",
        ),
        ({"files_column": "tests"}, r"files_column and tests_column are both 'tests'"),
        ({"files_column": "fles"}, r"there is no column 'fles'; the nearest is 'files'\. Set files_column"),
    ],
)
def test_settings_that_do_not_go_together(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    path = jsonl(tmp_path / "a.jsonl", [row(0), row(1)])
    with pytest.raises((msgspec.ValidationError, TaskError), match=message):
        built(path, **changes)
