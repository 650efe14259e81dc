"""Proves that the stream of prompts is a function of its cursor: wherever it is interrupted, it goes on the same."""

from collections import Counter

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollforward.model.messages import Message
from rollforward.rl.errors import CursorError
from rollforward.rl.prompts import DataCursor, PromptSource
from rollforward.rl.tasks.config import TaskOptions
from rollforward.rl.tasks.types import Example, Score, ScoreReason, Split
from rollforward.rollout.workspace import Submission


class Numbers:
    """A task that asks its own index."""

    def __init__(self, name: str, size: int) -> None:
        self.name = name
        self.options = TaskOptions(name=name)
        self.fingerprint = f"{name} {size}"
        self._size = size

    def size(self, split: Split) -> int:
        return self._size

    def example(self, index: int, split: Split = "train") -> Example:
        assert 0 <= index < self._size
        message = Message(role="user", content=str(index))
        return Example(task=self.name, split=split, index=index, messages=(message,), answer=str(index))

    def score(self, example: Example, text: str, submission: Submission | None = None) -> Score:
        return Score(value=0.0, reason=ScoreReason.WRONG)


TASKS = (Numbers("a", 7), Numbers("b", 13))


def drawn(counts: list[int], *, seed: int = 5) -> list[tuple[str, int]]:
    """Draw step by step, each step in a new source with the cursor of a checkpoint."""
    saved = msgspec.json.encode(PromptSource(TASKS, seed=seed).start())
    names: list[tuple[str, int]] = []
    for count in counts:
        source = PromptSource(TASKS, seed=seed)
        examples, cursor = source.draw(msgspec.json.decode(saved, type=DataCursor), count)
        saved = msgspec.json.encode(cursor)
        names += [(example.task, example.index) for example in examples]
    return names


def test_an_epoch_holds_every_prompt_once_and_the_next_one_too_in_another_order() -> None:
    names = drawn([60])
    everything = {("a", index) for index in range(7)} | {("b", index) for index in range(13)}
    epochs = [names[:20], names[20:40], names[40:]]
    for epoch in epochs:
        assert Counter(epoch) == Counter(everything)
    assert epochs[0] != epochs[1] != epochs[2]


@given(st.lists(st.integers(0, 9), max_size=12))
def test_wherever_it_is_interrupted_the_stream_goes_on(counts: list[int]) -> None:
    assert drawn(counts) == drawn([sum(counts)])


def test_a_step_that_is_killed_before_its_checkpoint_draws_the_same_again() -> None:
    source = PromptSource(TASKS, seed=5)
    _, cursor = source.draw(source.start(), 17)
    assert source.draw(cursor, 8) == source.draw(cursor, 8) == PromptSource(TASKS, seed=5).draw(cursor, 8)


def test_another_seed_gives_another_order() -> None:
    assert drawn([20], seed=5) != drawn([20], seed=6)


def test_a_cursor_of_other_data_is_refused() -> None:
    cursor = PromptSource(TASKS, seed=5).start()
    for other in (PromptSource(TASKS, seed=6), PromptSource(TASKS[:1], seed=5), PromptSource(TASKS[::-1], seed=5)):
        with pytest.raises(CursorError, match="belongs to the stream"):
            other.draw(cursor, 1)


@pytest.mark.parametrize("place", [{"epoch": -1}, {"position": -1}, {"position": 20}])
def test_a_damaged_cursor_is_refused(place: dict[str, int]) -> None:
    source = PromptSource(TASKS, seed=5)
    with pytest.raises(CursorError, match="a pass has 20 examples"):
        source.draw(msgspec.structs.replace(source.start(), **place), 1)
