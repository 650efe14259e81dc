"""Mathematical equality by the math-verify library, to be called in a process of its own (`rewards.py`).

The library reads an expression reliably where it is marked as one; in plain text it looks for the last number, so that
`2^{10}` alone reads as 2. A text without marks and without words is therefore marked here as a whole.

Nothing of this project is imported: the process that runs this knows only the file.
"""

import logging
import re
import resource
from typing import Any, Final

from math_verify import parse, verify

_MARKS: Final = ("\\boxed", "$", "\\(", "\\[", "\\begin")
_WORD: Final = re.compile(r"(?<![\\a-zA-Z])[a-zA-Z]{3,}")
_MAX_MEMORY_BYTES: Final = 4 << 30
"""Of address space; an answer such as 9**9**9**9 would take all that there is before its deadline."""

logging.disable(logging.WARNING)  # it warns that its own time limits are off
resource.setrlimit(resource.RLIMIT_AS, (_MAX_MEMORY_BYTES, resource.getrlimit(resource.RLIMIT_AS)[1]))


def equality(question: str, answer: str | None, text: str) -> float | None:
    """1.0 where `text` is `answer`, or mathematically equal to it, 0.0 where it is not, None where it cannot be read.

    Args:
        question: not looked at.
        answer: the right answer alone, or a text in which it is marked.
        text: what the model answered.

    Raises:
        ValueError: `answer` cannot be read.
    """
    if text == (answer or "").strip():
        return 1.0
    right = _expressions(_marked(answer or "", always=True))
    if not right:
        raise ValueError(f"the right answer {answer!r} cannot be read as mathematics")
    try:
        given = _expressions(_marked(text, always=False))
        return float(verify(right, given, timeout_seconds=None)) if given else None
    except (MemoryError, RecursionError):
        return None


def _expressions(text: str) -> list[Any]:
    return parse(text, parsing_timeout=None)  # pyright: ignore[reportArgumentType], None is what it documents


def _marked(text: str, *, always: bool) -> str:
    if any(mark in text for mark in _MARKS) or (not always and _WORD.search(text)):
        return text
    return f"\\boxed{{{text}}}"


equality("", "1", "2")  # the library compiles its grammar at first use, which is not the first answer's time
