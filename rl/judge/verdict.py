"""Reads a verdict in what a judge said. Pure: any text gives a verdict that stands in it, or the reason why none does.

A verdict is one flat JSON object with an entry for every criterion and the key of the question, such as

    The sum is 7, so it is right. {"right": "pass", "key": "5081"}

Tolerant of form: text around it, code fences, white space, commas before a closing brace, numbers and truth values as
text. Strict in meaning: what is not stated is never made up. The key stands in no answer (`prompt.py` sees to that), so
an object that a judge quotes from the answer is not taken for its own; for the same reason it counts only where its
digits stand as they are, without an escape. Of several objects with the key the last one counts, whatever is wrong with
it.
"""

import math
import re
from collections.abc import Sequence
from typing import Final

from rollforward.rl.judge.config import KEY_NAME, Criterion, PassFail, Points, Rubric
from rollforward.rl.judge.types import Verdict, VerdictFailure, VerdictProblem

_SPACE: Final = re.compile(r"\s*+")
_STRING: Final = re.compile(r'"((?:[^"\\]++|\\.)*+)"', re.DOTALL)  # possessive: an open one is tried in one way
_SCALAR: Final = re.compile(r"[A-Za-z0-9.+-]++")
_NUMBER: Final = re.compile(r"[+-]?[0-9]{1,30}(?:\.[0-9]{0,30})?(?:[eE][+-]?[0-9]{1,3})?")
_PASS: Final = frozenset({"pass", "true", "yes", "1"})
_FAIL: Final = frozenset({"fail", "false", "no", "0"})
_MAX_SHOWN_CHARS: Final = 40

_Entries = list[tuple[str, str]]
"""Names and values of an object as they stand in the text, without quotation marks."""


def read_verdict(text: str, rubric: Rubric, key: str) -> Verdict | VerdictFailure:
    """Find the verdict in a text.

    Args:
        text: anything.
        rubric: names the entries and their scales.
        key: of the question, digits.

    Returns:
        The verdict, or why there is none.

    Invariants: never raises; time linear in the text; a verdict's values are those of one object in the text that holds
    the key.
    Example: '{"right": "pass", "key": "5081"}' with one pass-or-fail criterion `right` gives Verdict(values=(1.0,)).
    """
    objects = _objects(text)
    if not objects:
        return VerdictFailure(kind=VerdictProblem.NO_OBJECT)
    signed = [entries for entries in objects if (KEY_NAME, key) in entries]
    if not signed:
        return VerdictFailure(kind=VerdictProblem.NO_KEY, detail=f"none of {len(objects)} objects has the key")
    stated: dict[str, str] = {}
    for name, value in signed[-1]:
        if stated.setdefault(name, value) != value:
            return _failure(VerdictProblem.CONTRADICTION, f"{name} is {stated[name]} and {value}")
    known = {criterion.name for criterion in rubric.criteria} | {KEY_NAME}
    if unknown := [name for name in stated if name not in known]:
        return _failure(VerdictProblem.UNKNOWN_CRITERION, unknown[0])
    values: list[float] = []
    for criterion in rubric.criteria:
        if criterion.name not in stated:
            return _failure(VerdictProblem.MISSING_CRITERION, criterion.name)
        value = read_value(stated[criterion.name], criterion)
        if isinstance(value, VerdictFailure):
            return value
        values.append(value)
    return Verdict(values=tuple(values))


def read_value(stated: str, criterion: Criterion) -> float | VerdictFailure:
    """What a stated value means on the criterion's scale; as `read_verdict`, for one entry."""
    word = stated.strip()
    if isinstance(criterion.scale, PassFail) and word.lower() in _PASS | _FAIL:
        return float(word.lower() in _PASS)
    if isinstance(criterion.scale, PassFail) or _NUMBER.fullmatch(word) is None:
        return _failure(VerdictProblem.NOT_A_VALUE, f"{criterion.name} is {word}")
    number = float(word)
    lowest, highest = criterion.scale.bounds
    if not lowest <= number <= highest:  # an overflowing exponent is infinite
        return _failure(VerdictProblem.OUT_OF_SCALE, f"{criterion.name} is {word}")
    if isinstance(criterion.scale, Points) and math.floor(number) != number:
        return _failure(VerdictProblem.NOT_A_VALUE, f"{criterion.name} is {word}, no whole number")
    return number + 0.0  # -0 is 0


def worth(values: Sequence[float], rubric: Rubric) -> float:
    """Return what values on the criteria's scales are worth together: the mean of their places between worst and best,
    by weight.

    Args:
        values: by criterion, in the rubric's order.

    Returns:
        0 to 1; exactly 1 where all are best, exactly 0 where all are worst.
    Example: 3 of 1 to 5 with weight 1, and pass with weight 3, are worth 0.875.
    """
    weights = [criterion.weight for criterion in rubric.criteria]
    terms: list[float] = []
    for value, criterion in zip(values, rubric.criteria, strict=True):
        lowest, highest = criterion.scale.bounds
        terms.append(criterion.weight * ((value - lowest) / (highest - lowest)))
    return min(1.0, math.fsum(terms) / math.fsum(weights))


def _failure(kind: VerdictProblem, detail: str) -> VerdictFailure:
    shown = detail if len(detail) <= _MAX_SHOWN_CHARS else f"{detail[:_MAX_SHOWN_CHARS]}..."
    return VerdictFailure(kind=kind, detail=shown)


def _objects(text: str) -> list[_Entries]:
    """The complete flat objects of a text, in order; one within another's text is not looked for."""
    found: list[_Entries] = []
    start = text.find("{")
    while start >= 0:
        parsed = _object(text, start)
        end = start + 1
        if parsed is not None:
            entries, end = parsed
            found.append(entries)
        start = text.find("{", end)
    return found


def _object(text: str, start: int) -> tuple[_Entries, int] | None:
    """The object that begins at a brace and the place behind it; None where none does."""
    entries: _Entries = []
    place = _after_space(text, start + 1)
    while not text.startswith("}", place):
        name = _STRING.match(text, place)
        if name is None:
            return None
        place = _after_space(text, name.end())
        if not text.startswith(":", place):
            return None
        place = _after_space(text, place + 1)
        value = _STRING.match(text, place) or _SCALAR.match(text, place)
        if value is None:
            return None
        entries.append((name[1], value[1] if value.re is _STRING else value[0]))
        place = _after_space(text, value.end())
        if text.startswith(",", place):
            place = _after_space(text, place + 1)
        elif not text.startswith("}", place):
            return None
    return entries, place + 1


def _after_space(text: str, place: int) -> int:
    space = _SPACE.match(text, place)
    return place if space is None else space.end()
