"""Proves: what a model is told about a tool is read from its source, which never runs here, and mistakes are named.

Does not prove: that the tools work (test_function.py, test_calculator.py).
"""

from pathlib import Path

import pytest

from rollforward.sandbox.config import ToolConfig
from rollforward.sandbox.errors import ToolError
from rollforward.sandbox.toolset import load_tool


def load(tmp_path: Path, source: str, name: str = "f") -> object:
    file = tmp_path / "mine.py"
    file.write_text(source, encoding="utf-8")
    return load_tool(ToolConfig(name=name, file=str(file))).parameters


def test_a_shipped_tool() -> None:
    spec = load_tool(ToolConfig(name="calculator"))
    assert spec.name == "calculator"
    assert spec.description.startswith("Evaluate an arithmetic expression")
    assert spec.parameters == {
        "type": "object",
        "properties": {"expression": {"type": "string"}},
        "required": ["expression"],
    }


def test_every_annotation_that_json_has(tmp_path: Path) -> None:
    source = (
        "raise SystemExit('it ran')\n"
        "def f(a: str, b: int, c: float = 1.5, d: bool = False, *, e: list, g: dict = {'k': [1]},\n"
        "      h: list[list[int]] = [], i: dict[str, float] = {}) -> str:\n"
        "    '''Does it.\n\n    Twice.'''\n"
    )
    assert load(tmp_path, source) == {
        "type": "object",
        "properties": {
            "a": {"type": "string"},
            "b": {"type": "integer"},
            "c": {"type": "number", "default": 1.5},
            "d": {"type": "boolean", "default": False},
            "e": {"type": "array"},
            "g": {"type": "object", "default": {"k": [1]}},
            "h": {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}, "default": []},
            "i": {"type": "object", "additionalProperties": {"type": "number"}, "default": {}},
        },
        "required": ["a", "b", "e"],
    }


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("def f(:", "is no Python: invalid syntax (line 1). Correct it"),
        ("x = '\0'", "no Python"),
        ("def g(a: int):\n    'Doc.'", "has no function 'f'; it has g"),
        ("class C:\n    def f(self):\n        'Doc.'", "it has none"),
        ("async def f():\n    'Doc.'", "async"),
        ("def f(a: int): pass", "no docstring"),
        ("def f(a):\n    'Doc.'", "parameter a of f() has no annotation"),
        ("def f(a: set):\n    'Doc.'", "annotation set"),
        ("def f(a: dict[int, str]):\n    'Doc.'", "annotation dict[int, str]"),
        ("def f(a: list[bytes]):\n    'Doc.'", "annotation list[bytes]"),
        ("def f(a: int | None):\n    'Doc.'", "annotation int | None"),
        ("def f(*a: int):\n    'Doc.'", "a call names every argument"),
        ("def f(**a: int):\n    'Doc.'", "a call names every argument"),
        ("def f(a: int, /):\n    'Doc.'", "a call names every argument"),
        ("def f(a: int = g()):\n    'Doc.'", "default of parameter a of f() is g()"),
        ("def f(a: list = (1, 2)):\n    'Doc.'", "JSON literal"),
        ("def f(a: dict = {1: 2}):\n    'Doc.'", "JSON literal"),
    ],
)
def test_a_mistake_names_file_function_and_rule(tmp_path: Path, source: str, says: str) -> None:
    with pytest.raises(ToolError) as error:
        load(tmp_path, source)
    assert says in str(error.value)
    assert f"tool f: {tmp_path / 'mine.py'}" in str(error.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(
        ToolError, match=r"^tool abacus: there is no shipped tool of this name; there are bash, calculator"
    ):
        load_tool(ToolConfig(name="abacus"))
    with pytest.raises(ToolError, match="No such file"):
        load_tool(ToolConfig(name="f", file=str(tmp_path / "none.py")))
    (tmp_path / "latin.py").write_bytes(b"def f():\n    '\xe9'")
    with pytest.raises(ToolError, match="not UTF-8 at byte 14"):
        load_tool(ToolConfig(name="f", file=str(tmp_path / "latin.py")))
    (tmp_path / "large.py").write_bytes(b"#" * ((1 << 20) + 1))
    with pytest.raises(ToolError, match="at most"):
        load_tool(ToolConfig(name="f", file=str(tmp_path / "large.py")))
