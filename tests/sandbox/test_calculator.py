"""Proves: the calculator evaluates arithmetic, refuses all else, and stays small whatever it is asked."""

import pytest

from rollforward.sandbox.tools.calculator import calculator


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("1 + 2 * 3", "7"),
        (" -(2 - 5) // 2 ", "1"),
        ("7 / 2", "3.5"),
        ("-7 % 3", "2"),
        ("2 ** 10", "1024"),
        ("2 ** -1", "0.5"),
        ("round(abs(-2.55), 1) + max(1, 2) - min(3, 4)", "1.5"),
        ("10 ** 400 // 10 ** 399", "10"),
    ],
)
def test_values(expression: str, value: str) -> None:
    assert calculator(expression) == value


@pytest.mark.parametrize(
    "expression",
    [
        "__import__('os')",
        "'a' * 3",
        "True + 1",
        "x",
        "[1][0]",
        "(1).real",
        "max(*[1])",
        "1 if 2 else 3",
        "1j",
        "1 << 9",
    ],
)
def test_what_is_no_arithmetic_is_refused(expression: str) -> None:
    with pytest.raises(ValueError, match="is not arithmetic"):
        calculator(expression)


@pytest.mark.parametrize("expression", ["9 ** 9 ** 9", "2 ** 4097", "(2 ** 4000) * (2 ** 4000)", "2.0 ** 5000"])
def test_what_would_grow_is_refused(expression: str) -> None:
    with pytest.raises(OverflowError):
        calculator(expression)


def test_what_is_long_complex_or_wrong_is_refused() -> None:
    with pytest.raises(ValueError, match="characters"):
        calculator("1+" * 3000 + "1")
    with pytest.raises(ValueError, match="complex"):
        calculator("(-8) ** 0.5")
    with pytest.raises(SyntaxError):
        calculator("1 +")
    with pytest.raises(ZeroDivisionError):
        calculator("1 / 0")
