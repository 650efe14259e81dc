"""Proves: the table of attacks (cases.toml) names every known case and every attack that is tested, each with a
verdict; what is not held is said where the substrate says what it promises, and untrusted code is refused where limits
are missing.
"""

import ast
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from rollforward.rl.tasks import unit_tests
from rollforward.sandbox import container, fullvm, function, gvisor, host, microvm
from rollforward.sandbox.cgroups import Hierarchies
from rollforward.sandbox.errors import SandboxUnavailableError
from tests.helpers.source import ROOT

HERE = Path(__file__).parent
CASES: list[dict[str, Any]] = tomllib.loads((HERE / "cases.toml").read_text(encoding="utf-8"))["case"]
KNOWN = {*range(1, 8), *range(9, 15), *range(16, 20), *range(21, 24), 25, 26, 28, 29, 30, 32, *range(34, 38)}
"""Numbers of the known cases; the others are not of this project's platforms."""
SAID = {
    "function": [function],
    "container": [container, unit_tests],
    "gvisor": [gvisor, container, unit_tests],
    "machine": [microvm, fullvm, unit_tests],
}


def proofs_in(path: Path) -> list[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return [
        n.name for n in tree.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef) and n.name[:5] == "test_"
    ]


ATTACKS = [name for path in sorted(HERE.glob("test_attack_*.py")) if path != Path(__file__) for name in proofs_in(path)]


def test_every_known_case_and_fifteen_more_are_there() -> None:
    numbers = Counter(case["a5"] for case in CASES)
    assert set(numbers) - {0} == KNOWN
    assert sum(case["a5"] == 0 and bool(case["tests"]) for case in CASES) >= 15


def test_every_attack_is_of_a_case_and_every_test_is_there() -> None:
    named = {name for case in CASES for name in case["tests"]}
    assert sorted(set(ATTACKS) - named) == []
    assert len(ATTACKS) == len(set(ATTACKS))
    for name in named - set(ATTACKS):
        path, _, function_name = name.partition("::")
        assert function_name in proofs_in(ROOT / path), name


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["what"][:40])
def test_each_case_has_its_verdicts(case: dict[str, Any]) -> None:
    for way, modules in SAID.items():
        like = way if way in case else "container"
        match case[like]:
            case "held":
                assert case["tests"]
            case "stated":
                texts = " ".join(" ".join(str(module.__doc__).split()) for module in modules)
                assert case[f"{like}_says"] in texts
            case verdict:
                assert verdict == "none"
                assert case["why"]


def test_code_that_nobody_trusts_is_refused_where_a_limit_is_missing() -> None:
    report = host.probe(Hierarchies(None, None, None))
    assert len(report.missing) == 2
    with pytest.raises(SandboxUnavailableError, match="trusted_code"):
        report.check(trusted_code=False)
    report.check(trusted_code=True)
