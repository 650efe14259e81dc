"""Proves: every public module, class, function and method of the product is documented and fully annotated.

Public is what has no leading underscore, in a module that has none. Does not prove that the words are true.
"""

import ast
from collections.abc import Iterator

import pytest

from tests.helpers.source import Module, modules, parse

Function = ast.FunctionDef | ast.AsyncFunctionDef


def _public(node: ast.ClassDef | ast.Module) -> Iterator[Function | ast.ClassDef]:
    for child in node.body:
        if isinstance(child, Function | ast.ClassDef) and not child.name.startswith("_"):
            yield child
            if isinstance(child, ast.ClassDef):
                yield from _public(child)
        elif isinstance(child, Function) and child.name in ("__init__", "__call__"):
            yield child


def _unannotated(function: Function) -> list[str]:
    arguments = function.args
    named = [*arguments.posonlyargs, *arguments.args]
    if named and named[0].arg in ("self", "cls", "ctx"):
        named = named[1:]
    every = [*named, *arguments.kwonlyargs, *filter(None, (arguments.vararg, arguments.kwarg))]
    missing = [argument.arg for argument in every if argument.annotation is None]
    return missing + (["return"] if function.returns is None else [])


def _overloaded(function: Function) -> bool:
    return any(ast.unparse(decorator).endswith(("overload", ".setter")) for decorator in function.decorator_list)


def faults(module: Module) -> list[str]:
    found: list[str] = []
    name = module.path.rsplit("/", 1)[-1]
    if ast.get_docstring(module.tree) is None:
        found.append(f"{module.path} has no docstring")
    if name.startswith("_") and name != "__init__.py":
        return found
    for node in _public(module.tree):
        place = f"{module.path}:{node.lineno} {node.name}"
        if (
            ast.get_docstring(node) is None
            and not node.name.startswith("__")
            and not (isinstance(node, Function) and _overloaded(node))
        ):
            found.append(f"{place} has no docstring")
        if isinstance(node, Function) and (missing := _unannotated(node)):
            found.append(f"{place} lacks annotations: {', '.join(missing)}")
    return found


def test_every_public_name_is_annotated_and_documented() -> None:
    assert [fault for module in modules() for fault in faults(module)] == []


@pytest.mark.parametrize(
    "text",
    [
        "def f() -> None:\n    pass",
        '"""M."""\ndef f() -> None:\n    pass',
        '"""M."""\ndef f(x) -> None:\n    """F."""',
        '"""M."""\ndef f(x: int):\n    """F."""',
        '"""M."""\nclass A:\n    """A."""\n    def f(self) -> None:\n        pass',
        '"""M."""\nclass A:\n    """A."""\n    def __init__(self, x) -> None:\n        pass',
        '"""M."""\nclass A:\n    x: int',
    ],
)
def test_a_planted_fault_is_found(text: str) -> None:
    assert faults(parse("rl/x.py", text))
