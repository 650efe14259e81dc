"""Proves: the four kinds of file are not mixed: records, math, machines, actors.

Kind is visible from the name. Records: types.py, config.py, *_config.py, errors.py. Math: losses/, advantage.py,
kernels/. Actors: actors.py. Everything else may be a machine, and is not examined here.
"""

import ast
import fnmatch

import pytest

from tests.helpers.source import Module, imports, modules, parse

RECORDS = ("*/types.py", "*/config.py", "*/*_config.py", "*/errors.py")
MATH = ("*/losses/*.py", "rl/advantage.py", "kernels/*.py")
NOT_MATH = ("kernels/dispatch.py", "kernels/*_tile.py", "kernels/bench.py")
OUTSIDE_WORLD = (
    "threading",
    "asyncio",
    "socket",
    "subprocess",
    "ray",
    "multiprocessing",
    "sqlite3",
    "requests",
    "pathlib",
    "time",
)
MUTATING = (ast.Global, ast.Nonlocal)


def is_kind(module: Module, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatch(module.path, pattern) for pattern in patterns)


def _world_faults(module: Module, banned: tuple[str, ...], kind: str) -> list[str]:
    return [
        f"{module.path}:{i.line} {kind} imports {i.name}" for i in imports(module) if i.name.split(".")[0] in banned
    ]


def record_faults(module: Module) -> list[str]:
    """Records are frozen: no attribute is assigned after the fact, no class keeps state, nothing outside is touched."""
    banned = tuple(name for name in OUTSIDE_WORLD if name not in ("pathlib", "time"))
    found = _world_faults(module, banned, "record")
    for node in ast.walk(module.tree):
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AugAssign) else []
        )
        if any(isinstance(t, ast.Attribute) for t in targets) and not module.path.endswith("errors.py"):
            found.append(f"{module.path}:{node.lineno} assigns an attribute; records are frozen")
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "open":
            found.append(f"{module.path}:{node.lineno} opens a file")
        is_frozen = isinstance(node, ast.ClassDef) and any(ast.unparse(k) == "frozen=True" for k in node.keywords)
        if isinstance(node, ast.ClassDef) and _is_root(node) and not is_frozen:
            found.append(f"{module.path}:{node.lineno} {node.name} is not frozen")
    return found


def _is_root(node: ast.ClassDef) -> bool:
    """Derives from msgspec.Struct itself; eq=False marks a base whose records freeze themselves."""
    return any(ast.unparse(base).endswith("Struct") for base in node.bases) and not any(
        k.arg == "eq" for k in node.keywords
    )


def math_faults(module: Module) -> list[str]:
    """Math has no state and touches nothing but its arguments."""
    found = _world_faults(module, OUTSIDE_WORLD, "math")
    for node in ast.walk(module.tree):
        if isinstance(node, MUTATING):
            found.append(f"{module.path}:{node.lineno} assigns a global or a closure's name")
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in ("open", "print", "input")
        ):
            found.append(f"{module.path}:{node.lineno} calls {node.func.id}")
    return found


def actor_faults(module: Module) -> list[str]:
    """Each method of an actor is one call: one statement after the docstring, but in __init__.

    A class beside the actors (handles as their caller sees them) may split, call and gather: three statements in a row.
    """
    found: list[str] = []
    for cls in (node for node in module.tree.body if isinstance(node, ast.ClassDef)):
        most = 1 if cls.name.endswith("Actor") else 3
        for method in (node for node in cls.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)):
            body = method.body[1:] if ast.get_docstring(method) is not None else method.body
            control = [n for n in ast.walk(method) if isinstance(n, ast.If | ast.For | ast.While | ast.Try | ast.With)]
            if control or (len(body) > most and method.name != "__init__"):
                place = f"{module.path}:{method.lineno} {cls.name}.{method.name}"
                found.append(f"{place} has logic; a method of an actor is one call")
    return found


def test_records_are_frozen_and_touch_nothing() -> None:
    assert [f for module in modules() if is_kind(module, RECORDS) for f in record_faults(module)] == []


def test_math_is_pure() -> None:
    assert [
        f
        for module in modules()
        if is_kind(module, MATH) and not is_kind(module, NOT_MATH)
        for f in math_faults(module)
    ] == []


def test_actors_have_no_logic() -> None:
    assert [f for module in modules() if module.path.endswith("actors.py") for f in actor_faults(module)] == []


@pytest.mark.parametrize(
    "text",
    [
        "import msgspec\nclass A(msgspec.Struct, kw_only=True):\n    x: int",
        "class A:\n    def f(self):\n        self.x = 1",
        "import threading",
        "def f(p):\n    return open(p)",
    ],
)
def test_a_planted_fault_in_a_record_is_found(text: str) -> None:
    assert record_faults(parse("rl/types.py", text))


@pytest.mark.parametrize("text", ["import time", "N = 0\ndef f():\n    global N\n    N = 1", "def f(x):\n    print(x)"])
def test_a_planted_fault_in_math_is_found(text: str) -> None:
    assert math_faults(parse("rl/losses/x.py", text))


@pytest.mark.parametrize(
    "body",
    [
        "        if x:\n            return 1\n",
        "        self.m.a()\n        return self.m.b()\n",
        "        for y in x:\n            y()\n",
    ],
)
def test_a_planted_fault_in_an_actor_is_found(body: str) -> None:
    assert actor_faults(parse("rl/actors.py", f"class AActor:\n    def f(self, x):\n{body}"))
    assert not actor_faults(
        parse("rl/actors.py", 'class AActor:\n    def f(self, x):\n        """Doc."""\n        return self.m.f(x)\n')
    )
