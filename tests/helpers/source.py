"""The product's source as syntax trees, for tests/arch."""

import ast
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("conf", "distill", "kernels", "model", "rl", "rollout", "sandbox")


class Module(NamedTuple):
    """One source file of the product."""

    path: str
    """Relative to the repository, with forward slashes: `rl/losses/grpo.py`."""
    text: str
    tree: ast.Module

    @property
    def folder(self) -> str:
        """Top-level folder."""
        return self.path.split("/")[0]


def parse(path: str, text: str) -> Module:
    """A module from source text; tests plant violations with it."""
    return Module(path, text, ast.parse(text, path))


@functools.cache
def modules() -> tuple[Module, ...]:
    """Every Python file of the product's folders."""
    files = sorted(file for folder in FOLDERS for file in (ROOT / folder).rglob("*.py"))
    return tuple(parse(file.relative_to(ROOT).as_posix(), file.read_text(encoding="utf-8")) for file in files)


class Import(NamedTuple):
    """One imported module."""

    name: str
    """Dotted, with the imported name appended where it may itself be a module: `from a import b` gives `a.b`."""
    line: int
    is_lazy: bool
    """Not carried out when the module is imported: inside a function or under TYPE_CHECKING."""


def imports(module: Module) -> Iterator[Import]:
    """Every import statement, also inside functions and under TYPE_CHECKING."""
    lazy = {
        id(inner)
        for node in ast.walk(module.tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        or (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING" and not node.orelse)
        for inner in ast.walk(node)
    }
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, node.lineno, id(node) in lazy)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                yield Import(
                    f"{node.module}.{alias.name}" if node.level == 0 else "." * node.level,
                    node.lineno,
                    id(node) in lazy,
                )
