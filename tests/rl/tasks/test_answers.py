"""Proves what is taken for the answer in a text, and that every text gives an answer or a reason."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollforward.rl.tasks.answers import ANSWER_CLOSE, ANSWER_OPEN, read_answer
from rollforward.rl.tasks.types import ScoreReason


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("12", "12"),
        (" 12\n", "12"),
        ("12, <answer>16</answer>", "16"),
        ("<answer>1</answer> no, <answer> 2 </answer>!", "2"),
        ("<answer>16", "16"),
        ("16</answer>", "16</answer>"),
        ("<think>4 or 5</think>5", "5"),
        ("<think>a</think>b</think>c", "c"),
        ("</think>5", "5"),
        ("<think><answer>4</answer></think>5", "5"),
    ],
)
def test_where_the_answer_is(text: str, answer: str) -> None:
    assert read_answer(text, 100) == (answer, None)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", ScoreReason.EMPTY),
        (" \n", ScoreReason.EMPTY),
        ("5<answer></answer>", ScoreReason.EMPTY),
        ("<think>5</think>", ScoreReason.EMPTY),
        ("<think>5", ScoreReason.UNCLOSED_THINKING),
        ("1" * 101, ScoreReason.TOO_LONG),
    ],
)
def test_why_there_is_no_answer(text: str, reason: ScoreReason) -> None:
    assert read_answer(text, 100) == ("", reason)


@given(st.lists(st.sampled_from(["<think>", "</think>", ANSWER_OPEN, ANSWER_CLOSE, "5", " ", "\n", "\0"])).map("".join))
def test_every_text_gives_an_answer_or_a_reason(text: str) -> None:
    answer, reason = read_answer(text, 20)
    assert (reason is None) == bool(answer)


@given(st.text(alphabet=st.characters(exclude_characters="<"), min_size=1).filter(lambda text: text.strip() == text))
def test_a_tagged_answer_is_found_again(answer: str) -> None:
    assert read_answer(f"steps {ANSWER_OPEN}{answer}{ANSWER_CLOSE}", 10_000) == (answer, None)
