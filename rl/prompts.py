"""The endless stream of prompts to train on, and its place in a checkpoint.

The stream is a function of (tasks, seed, cursor): `PromptSource.draw` changes nothing and returns the cursor behind
what it gave. Whoever owns the cursor writes it into the checkpoint when the prompts are consumed, so that a run killed
at any instant draws the same prompts again and none twice. An epoch is one pass over the training examples of all tasks
together, in an order of its own.

Not here: what a prompt is in tokens (`model/encoding.py`), how many make a step (`rl/controller.py`).
"""

from collections.abc import Iterator, Sequence

import msgspec

from rollforward.rl.errors import CursorError
from rollforward.rl.shuffle import Permutation, derive_key
from rollforward.rl.tasks.config import DatasetConfig, JudgeConfig
from rollforward.rl.tasks.types import Example, Split, Task

_SPREAD_ROWS = 20_000
"""Of a file, which may hold anything: encoding so many takes a few seconds."""
_SPREAD_MADE = 2_000
"""Of questions that are made by one rule, whose lengths differ little."""


class DataCursor(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The next example of a stream. Belongs in the checkpoint."""

    source: str
    """Fingerprint of the stream: its tasks with their held-out questions, their order and the seed."""
    epoch: int
    """Complete passes over the examples."""
    position: int
    """Examples of this pass that are consumed."""


def spread_examples(task: Task, split: Split) -> Iterator[Example]:
    """Examples to look at before a run begins: all, or of a large split as many as cost seconds, evenly spaced."""
    size = task.size(split)
    count = min(size, spread_limit(task))
    return (task.example(index * size // count, split) for index in range(count))


def spread_limit(task: Task) -> int:
    """The most examples of a split that ``spread_examples`` gives."""
    return _SPREAD_ROWS if isinstance(task.options, DatasetConfig | JudgeConfig) else _SPREAD_MADE


class ExampleOrder:
    """A seeded, endless order of the training examples of several tasks. Immutable.

    Args:
        tasks: at least one; a task's share is its size.
        seed: chooses the order.
        purpose: a word that keeps streams with the same seed apart, such as `prompts`.
    """

    def __init__(self, tasks: Sequence[Task], *, seed: int, purpose: str) -> None:
        """Count the examples and derive the fingerprint."""
        self._tasks = tuple(tasks)
        self._sizes = tuple(task.size("train") for task in self._tasks)
        self._size = sum(self._sizes)
        self._key = derive_key(purpose, seed, *(task.fingerprint for task in self._tasks))
        self._permutation = (0, self._epoch_permutation(0))

    def start(self) -> DataCursor:
        """The cursor of a run that has consumed nothing."""
        return DataCursor(source=f"{self._key:016x}", epoch=0, position=0)

    def example(self, cursor: DataCursor) -> Example:
        """The example that `cursor` points at.

        Raises:
            CursorError: the cursor is of another stream or outside the pass.
        """
        self._check(cursor)
        epoch, permutation = self._permutation
        if epoch != cursor.epoch:
            permutation = self._epoch_permutation(cursor.epoch)
            self._permutation = (cursor.epoch, permutation)  # a cache; its value is a function of the epoch
        index = permutation(cursor.position)
        for task, size in zip(self._tasks, self._sizes, strict=True):
            if index < size:
                return task.example(index, "train")
            index -= size
        raise AssertionError("a permutation gave an index beyond its size")

    def next(self, cursor: DataCursor) -> DataCursor:
        """The cursor behind one more example."""
        if cursor.position + 1 < self._size:
            return DataCursor(source=cursor.source, epoch=cursor.epoch, position=cursor.position + 1)
        return DataCursor(source=cursor.source, epoch=cursor.epoch + 1, position=0)

    def _epoch_permutation(self, epoch: int) -> Permutation:
        return Permutation(self._size, derive_key("epoch", self._key, epoch))

    def _check(self, cursor: DataCursor) -> None:
        if cursor.source != f"{self._key:016x}":
            raise CursorError(
                f"the data cursor belongs to the stream {cursor.source}, but tasks and seed of this run make "
                f"{self._key:016x}; prompts would be "
                "repeated and left out. Resume with the tasks and the seed of the checkpoint, or start a new run."
            )
        if not (cursor.epoch >= 0 and 0 <= cursor.position < self._size):
            raise CursorError(
                f"the data cursor is at epoch {cursor.epoch}, position {cursor.position}; a pass has {self._size} "
                "examples. The checkpoint is damaged: "
                "take the one before."
            )


class PromptSource:
    """Prompts to train on. Immutable: the same cursor gives the same prompts in any process, as often as it is asked.

    Args:
        tasks: at least one; a task's share of the prompts is its share of the training examples.
        seed: the run's seed.
    """

    def __init__(self, tasks: Sequence[Task], *, seed: int) -> None:
        """Fix the order."""
        self._order = ExampleOrder(tasks, seed=seed, purpose="prompts")

    def start(self) -> DataCursor:
        """The cursor of a run that has consumed nothing."""
        return self._order.start()

    def draw(self, cursor: DataCursor, count: int) -> tuple[tuple[Example, ...], DataCursor]:
        """The next `count` examples and the cursor behind them.

        Raises:
            CursorError: the cursor is of another stream: the tasks or the seed have changed.
        """
        examples: list[Example] = []
        for _ in range(count):
            examples.append(self._order.example(cursor))
            cursor = self._order.next(cursor)
        return tuple(examples), cursor
