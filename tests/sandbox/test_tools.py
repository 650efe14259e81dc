"""Proves: the shipped tools do in a directory what their docstrings say, bound what they return, and say what a model
must know to go on. Does not prove: that they are shut in (tests/sandbox/test_container.py).
"""

import os
import time
from pathlib import Path

import pytest

from rollforward.sandbox.arguments import refuse_call
from rollforward.sandbox.config import ToolConfig
from rollforward.sandbox.errors import ToolError
from rollforward.sandbox.tools.bash import bash
from rollforward.sandbox.tools.edit_file import edit_file
from rollforward.sandbox.tools.python import python
from rollforward.sandbox.tools.read_file import read_file
from rollforward.sandbox.tools.submit import submit
from rollforward.sandbox.tools.write_file import write_file
from rollforward.sandbox.toolset import load_tool
from rollforward.sandbox.types import Call

SHIPPED = ("bash", "calculator", "edit_file", "python", "read_file", "submit", "write_file")


@pytest.fixture(autouse=True)
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_every_shipped_tool_can_be_offered_and_submit_alone_is_final() -> None:
    specs = [load_tool(ToolConfig(name=name)) for name in SHIPPED]
    assert [spec.name for spec in specs if spec.is_final] == ["submit"]


@pytest.mark.parametrize(
    ("line", "is_final"), [("FINAL = True", True), ("FINAL: bool = True", True), ("FINAL = False", False)]
)
def test_a_tool_of_ones_own_is_final_where_its_file_says_so(workspace: Path, line: str, is_final: bool) -> None:
    (workspace / "mine.py").write_text(f"{line}\n\ndef done() -> str:\n    'Ends.'\n    return ''\n")
    assert load_tool(ToolConfig(name="done", file=str(workspace / "mine.py"))).is_final is is_final


def test_another_value_of_final_is_refused(workspace: Path) -> None:
    (workspace / "mine.py").write_text("FINAL = 1\n\ndef done() -> str:\n    'Ends.'\n    return ''\n")
    with pytest.raises(ToolError, match="sets FINAL to something else than True or False"):
        load_tool(ToolConfig(name="done", file=str(workspace / "mine.py")))


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("echo a; echo b >&2", "a\nb\n"),
        ("printf x; exit 3", "x\n[exit status 3]"),
        ("kill -9 $$", "[killed by SIGKILL]"),
        ("read line || echo no input", "no input\n"),
        ("printf '\\xff'", "\ufffd"),
        ("true", ""),
        ("no_such_program_here", "bash: line 1: no_such_program_here: command not found\n[exit status 127]"),
    ],
)
def test_bash(command: str, said: str) -> None:
    assert bash(command) == said


def test_bash_waits_for_the_command_and_for_nothing_that_it_leaves_in_the_background() -> None:
    start_s = time.monotonic()
    assert bash("sleep 20 & echo done") == "done\n"
    assert time.monotonic() - start_s < 15


def test_bash_bounds_what_it_keeps() -> None:
    said = bash("head -c 5000000 /dev/zero | tr '\\0' x; echo end")
    assert len(said) < (1 << 20) + 100
    assert said.startswith("xxx")
    assert said.endswith("xend\n")
    assert "3951428 bytes left out" in said


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("print(1)\n2 + 3", "1\n5\n"),
        ("x = 4\nx", "4\n"),
        ("None", ""),
        ("import sys\nsys.exit(2)", "[exit status 2]\n"),
        ("raise SystemExit", ""),
        ("import sys\nprint('e', file=sys.stderr)", "e\n"),
        (
            "def f(n):\n    return n if n < 2 else f(n - 1) + f(n - 2)\nprint([f(n) for n in range(8)])",
            "[0, 1, 1, 2, 3, 5, 8, 13]\n",
        ),
        ("", ""),
    ],
)
def test_python(code: str, said: str) -> None:
    assert python(code) == said


def test_python_tells_errors_from_the_program_on() -> None:
    said = python("print('before')\ndef f():\n    return 1 / 0\nf()")
    assert said.startswith('before\nTraceback (most recent call last):\n  File "<program>", line 4')
    assert said.endswith("ZeroDivisionError: division by zero\n")
    assert "tools" not in said
    assert "SyntaxError" in python("def f(:")


def test_python_bounds_what_it_keeps() -> None:
    said = python("for i in range(600_000):\n    print(i)")
    assert said.startswith("0\n1\n")
    assert said.endswith("599999\n")
    assert "characters left out" in said
    assert len(said) < (1 << 20) + 100
    assert len(python("print('x' * 5_000_000)")) < (1 << 20) + 100


def test_python_imports_what_lies_in_the_workspace() -> None:
    write_file("helper_of_test.py", "VALUE = 7\n")
    assert python("import helper_of_test\nhelper_of_test.VALUE") == "7\n"


def test_files(workspace: Path) -> None:
    assert write_file("a/b.txt", "one\ntwo\nthrée\n") == "wrote 15 bytes to a/b.txt"
    assert (workspace / "a/b.txt").read_bytes() == "one\ntwo\nthrée\n".encode()
    assert read_file("a/b.txt") == "one\ntwo\nthrée\n"
    assert read_file("a/b.txt", first_line=2, num_lines=1) == "two\n"
    assert read_file("a/b.txt", first_line=9) == ""
    assert edit_file("a/b.txt", "two", "2") == "edited a/b.txt, line 2"
    assert read_file("a/b.txt") == "one\n2\nthrée\n"
    with pytest.raises(IsADirectoryError, match=r"a is a directory with b\.txt"):
        read_file("a")
    with pytest.raises(FileNotFoundError):
        read_file("nothing")
    with pytest.raises(ValueError, match="lines count from 1"):
        read_file("a/b.txt", first_line=0)


def test_an_edit_that_is_not_clear_changes_nothing(workspace: Path) -> None:
    (workspace / "f").write_bytes(b"x = 1\ny\nx = 1\n\xff")
    with pytest.raises(ValueError, match="old stands 2 times in f, in lines 1, 3"):
        edit_file("f", "x = 1", "x = 2")
    with pytest.raises(ValueError, match="does not stand in f"):
        edit_file("f", "x = 3", "x = 2")
    with pytest.raises(ValueError, match="old is empty"):
        edit_file("f", "", "x = 2")
    assert (workspace / "f").read_bytes() == b"x = 1\ny\nx = 1\n\xff"
    edit_file("f", "y\n", "z\n")
    assert (workspace / "f").read_bytes() == b"x = 1\nz\nx = 1\n\xff"


def test_submit(workspace: Path) -> None:
    assert submit() == ""
    assert os.listdir(workspace) == []
    submit("42")
    assert (workspace / "answer.txt").read_text() == "42"


SOURCE = """
def f(a: str, b: int, c: float = 1.5, d: bool = False, e: list[int] = [], g: dict[str, float] = {}, h: dict = {}):
    'Does it.'
"""


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"a": "x", "b": 1}, None),
        ({"a": "x", "b": 1, "c": 2, "d": True, "e": [1, 2], "g": {"k": 1}, "h": {"k": [None]}}, None),
        ({"a": "x", "b": 10**40}, None),
        ({"a": "x"}, "parameter b of f is missing; it takes a, b, c, d, e, g, h"),
        ({"a": "x", "b": 1, "z": 1}, "f has no parameter 'z'; it takes a, b, c, d, e, g, h"),
        ({"a": "x", "b": "1"}, 'parameter b of f is a string; it must be an integer (string="false")'),
        ({"a": "x", "b": 1.0}, "parameter b of f is a number; it must be an integer"),
        ({"a": "x", "b": True}, "parameter b of f is true or false; it must be an integer"),
        ({"a": None, "b": 1}, "parameter a of f is null; it must be a string"),
        ({"a": "x", "b": 1, "c": True}, "parameter c of f is true or false; it must be a number"),
        ({"a": "x", "b": 1, "e": [1, 2.5]}, "item 1 of parameter e of f is a number; it must be an integer"),
        ({"a": "x", "b": 1, "g": {"k": []}}, "entry 'k' of parameter g of f is a list; it must be a number"),
        ({"a": "x", "b": 1, "h": []}, "parameter h of f is a list; it must be an object"),
    ],
)  # fmt: skip
def test_arguments_are_checked_against_the_schema(
    workspace: Path, arguments: dict[str, object], problem: str | None
) -> None:
    (workspace / "mine.py").write_text(SOURCE)
    tools = {"f": load_tool(ToolConfig(name="f", file=str(workspace / "mine.py")))}
    assert refuse_call(Call(tool="f", arguments=arguments), tools) == problem


def test_a_tool_that_there_is_not_is_refused_with_those_that_there_are() -> None:
    tools = {name: load_tool(ToolConfig(name=name)) for name in ("submit", "bash")}
    assert (
        refuse_call(Call(tool="compass", arguments={}), tools) == "there is no tool 'compass'; there are bash, submit"
    )
