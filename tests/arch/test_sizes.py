"""Proves: no file of 500 lines and no function of 60 statements, unless a comment says why (`# Long because ...`)."""

import ast
import re

from tests.helpers.source import Module, modules, parse

MAX_LINES = 500
MAX_STATEMENTS = 60
EXCUSE = re.compile(r"# Long because \w+")


def faults(module: Module) -> list[str]:
    found: list[str] = []
    lines = module.text.splitlines()
    if len(lines) >= MAX_LINES and not any(EXCUSE.match(line) for line in lines):
        found.append(f"{module.path} has {len(lines)} lines")
    for node in ast.walk(module.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            statements = sum(isinstance(inner, ast.stmt) for inner in ast.walk(node)) - 1
            inside = "\n".join(lines[node.lineno - 1 : node.end_lineno])
            if statements >= MAX_STATEMENTS and not EXCUSE.search(inside):
                found.append(f"{module.path}:{node.lineno} {node.name} has {statements} statements")
    return found


def test_files_and_functions_are_small() -> None:
    assert [fault for module in modules() for fault in faults(module)] == []


def test_a_planted_long_function_is_found() -> None:
    body = "\n".join(f"    x = {i}" for i in range(MAX_STATEMENTS))
    assert faults(parse("rl/x.py", f"def f():\n{body}"))
    assert not faults(parse("rl/x.py", f"def f():\n    # Long because it is a table.\n{body}"))
    assert faults(parse("rl/x.py", "\n" * MAX_LINES))
