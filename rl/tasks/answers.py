"""Finding the answer in what a model said. Tolerant: every text gives an answer or the reason why there is none.

Not here: whether the answer is right; that is the task's verifier.
"""

from typing import Final

from rollforward.model.tokenizer import END_THINK, THINK
from rollforward.rl.tasks.types import ScoreReason

ANSWER_OPEN: Final = "<answer>"
"""Opens the part of a text that is the answer; the convention of reasoning-gym and of many others."""
ANSWER_CLOSE: Final = "</answer>"
"""Closes it."""


def read_answer(text: str, max_chars: int) -> tuple[str, ScoreReason | None]:
    """Find the answer in what a model said.

    The answer is the text behind the reasoning, if there is any; within it what the last `<answer>` tag holds, if there
    is one; without the white space around it. A tag that is not closed holds the rest.

    Args:
        text: anything.
        max_chars: a longer answer is none.

    Returns:
        The answer and None, or an empty text and why there is no answer. Never raises.

    Example: "<think>2+2</think>It is <answer> 4 </answer>." gives "4".
    """
    _, end_think, answer = text.rpartition(END_THINK)
    if not end_think and THINK in text:
        return "", ScoreReason.UNCLOSED_THINKING
    _, tag, tagged = answer.rpartition(ANSWER_OPEN)
    if tag:
        answer = tagged.partition(ANSWER_CLOSE)[0]
    answer = answer.strip()
    if not answer:
        return "", ScoreReason.EMPTY
    if len(answer) > max_chars:
        return "", ScoreReason.TOO_LONG
    return answer, None
