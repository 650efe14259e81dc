"""Worked answers: the steps of a solution, for datasets of which the steps are known.

SFT learns to say what a demonstration says. With steps in a share of the demonstrations the model learns two ways to
answer the same question, at once or step by step, and reinforcement finds out which of them pays.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final


def chain_sum_steps(item: Mapping[str, Any]) -> tuple[str, ...]:
    """The running totals of a chain sum, but the last, which is the answer.

    Example: 9 + 3 - 1 + 5 gives ("12", "11").
    """
    first, *rest = item["metadata"]["expression"].split()
    total = int(first)
    totals: list[str] = []
    for operator, term in zip(rest[::2], rest[1::2], strict=True):
        total += int(term) if operator == "+" else -int(term)
        totals.append(str(total))
    return tuple(totals[:-1])


Steps = Callable[[Mapping[str, Any]], tuple[str, ...]]
"""From an item of the library to what a worked answer writes before the answer."""

STEPS: Final[dict[str, Steps]] = {"chain_sum": chain_sum_steps}
"""The steps of each dataset, by its name in reasoning-gym. A new one is a function and a line here."""
