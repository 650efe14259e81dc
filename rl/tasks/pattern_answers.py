"""Regular expressions, to be called in a process of its own (`rewards.py`).

Nothing of this project is imported: the process that runs this knows only the file.
"""

import re


def matches(question: str, answer: str | None, text: str) -> float:
    """1.0 where a pattern matches all of `text`, else 0.0.

    Args:
        question: not looked at.
        answer: the pattern.
        text: what the model answered.
    """
    return float(re.fullmatch(answer or "", text) is not None)
