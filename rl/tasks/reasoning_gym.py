"""Questions and verifiers of the reasoning-gym library as a task.

The library makes item i of a dataset from Random(seed + i). Held-out questions are the first distinct texts of one
range of seeds, the questions to train on come from another range, and any whose text is held out is replaced by the
next candidate: no text is in both.

Importing the library takes some seconds, so it happens when the first task is built and in no other place.
"""

import dataclasses
import difflib
import hashlib
import math
import warnings
from collections.abc import Iterable
from typing import Any, Final

import msgspec

from rollforward.model.messages import Message, ToolCall
from rollforward.rl.errors import TaskError
from rollforward.rl.shuffle import derive_key
from rollforward.rl.tasks.answers import read_answer
from rollforward.rl.tasks.config import (
    CallDemonstration,
    Demonstration,
    ReasoningGymConfig,
    TextDemonstration,
    identity_bytes,
)
from rollforward.rl.tasks.tools import load_toolset
from rollforward.rl.tasks.types import Example, Score, ScoreReason, Split, check_index
from rollforward.rollout.workspace import Submission

_CANDIDATES_PER_EXAMPLE: Final = 32
_RESERVED_PARAMS: Final = {"seed": "seed", "size": "train_size"}
_VERIFIER_ERRORS: Final = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RecursionError,
    SyntaxError,
    TypeError,
    ValueError,
)
"""What the library's verifiers raise on text that they did not foresee."""


class ReasoningGymTask:
    """One dataset of reasoning-gym, split into questions to train on and held-out ones. Immutable after it is built.

    Args:
        config: which dataset and how much of it.

    Raises:
        TaskError: no such dataset or parameter (the message has the nearest), a value that the library refuses, or too
            few distinct questions; or a demonstration that the questions or the tool do not allow.
        ToolError: a tool cannot be offered.
    """

    def __init__(self, config: ReasoningGymConfig) -> None:
        """Import the library, make the two datasets and choose the held-out questions."""
        self._config = config
        self._tools = load_toolset(config)
        num_train_items = config.train_size * _CANDIDATES_PER_EXAMPLE
        num_heldout_items = config.heldout_size * _CANDIDATES_PER_EXAMPLE
        first_seed = derive_key("reasoning_gym", config.dataset, config.seed) >> 33  # 31 bits: some datasets take 32
        self._train_items: Any = _create_dataset(config, seed=first_seed + num_heldout_items, size=num_train_items)
        self._heldout_items: Any = _create_dataset(config, seed=first_seed, size=num_heldout_items)
        self._heldout_indices, self._heldout_questions = self._choose_heldout(num_heldout_items)
        digest = hashlib.blake2b(identity_bytes(config), digest_size=16)
        for question in sorted(self._heldout_questions):
            digest.update(question.encode("utf-8") + b"\0")
        digest.update(self._tools.digest)
        self._check_demonstrations()
        self._fingerprint = digest.hexdigest()

    @property
    def name(self) -> str:
        """The task's name in the run."""
        return self._config.name

    @property
    def options(self) -> ReasoningGymConfig:
        """Its effort, budget and tools."""
        return self._config

    @property
    def fingerprint(self) -> str:
        """Hex digest of the configuration, the tools and the held-out questions."""
        return self._fingerprint

    def size(self, split: Split) -> int:
        """Number of examples of a split."""
        return self._config.train_size if split == "train" else self._config.heldout_size

    def example(self, index: int, split: Split = "train") -> Example:
        """The example at `index` of a split.

        Raises:
            IndexError: `index` is outside the split.
            TaskError: all candidates for this training example are held out: the dataset has too few distinct
                questions.
        """
        item = self._item(index, split)
        answer = item["answer"]
        return Example(
            task=self.name,
            split=split,
            index=index,
            messages=(Message(role="user", content=item["question"]),),
            answer=None if answer is None else str(answer),
            effort=self._config.effort,
            tools=self._tools.listed,
            demonstration=self._demonstration(index, item),
        )

    def score(self, example: Example, text: str, submission: Submission | None = None) -> Score:
        """Judge an answer by the library's verifier; see `Task.score`."""
        answer, failure = read_answer(text, self._config.max_answer_chars)
        if failure is not None:
            return Score(value=0.0, reason=failure)
        item = self._item(example.index, example.split)  # not below: no question is the task's failure, not a 0
        try:
            value = float(self._train_items.score_answer(answer, item))
        except _VERIFIER_ERRORS:
            return Score(value=0.0, reason=ScoreReason.UNREADABLE)
        if not math.isfinite(value):
            return Score(value=0.0, reason=ScoreReason.UNREADABLE)
        if value >= 1.0:
            return Score(value=1.0, reason=ScoreReason.CORRECT)
        if value <= 0.0:
            return Score(value=0.0, reason=ScoreReason.WRONG)
        return Score(value=value if self._config.partial_credit else 0.0, reason=ScoreReason.PARTIAL)

    def _item(self, index: int, split: Split) -> dict[str, Any]:
        """The library's item behind an example."""
        check_index(self, index, split)
        if split == "heldout":
            return self._heldout_items[self._heldout_indices[index]]
        for candidate in range(_CANDIDATES_PER_EXAMPLE):
            item = self._train_items[index + candidate * self._config.train_size]
            if item["question"] not in self._heldout_questions:
                return item
        raise TaskError(
            f"task {self.name}: {_CANDIDATES_PER_EXAMPLE} questions in a row are held out, so {self._config.dataset} "
            "has hardly more distinct questions "
            f"than heldout_size = {self._config.heldout_size}. Lower it, or widen the dataset's params."
        )

    def _check_demonstrations(self) -> None:
        """Refuse a parameter that the tool has not, and metadata that the questions have not."""
        metadata = self._item(0, "heldout")["metadata"]
        for shown in self._config.demonstrate:
            keys = list(shown.where)
            if isinstance(shown, CallDemonstration):
                known = next(one.parameters for one in self._tools.specs if one.name == shown.tool)["properties"]
                if shown.argument not in known:
                    raise TaskError(
                        f"task {self.name}: demonstrate.argument is {shown.argument!r}, which {shown.tool} does not"
                        f" take. {_nearest(shown.argument, known)}"
                    )
                keys.append(shown.metadata)
            for key in keys:
                if key not in metadata:
                    raise TaskError(
                        f"task {self.name}: questions of {self._config.dataset} have no metadata {key!r}."
                        f" {_nearest(key, metadata)}"
                    )

    def _demonstration(self, index: int, item: dict[str, Any]) -> tuple[Message, ...] | None:
        """What SFT shows, or None for the bare answer. Each demonstration draws for itself."""
        if item["answer"] is None:
            return None
        for place, shown in enumerate(self._config.demonstrate):
            is_for_it = all(item["metadata"][key] == value for key, value in shown.where.items())
            if is_for_it and derive_key("demonstrate", self.name, place, index) < shown.share * 2**64:
                return _shown_turns(shown, item)
        return None

    def _choose_heldout(self, num_items: int) -> tuple[tuple[int, ...], frozenset[str]]:
        """The first items whose questions differ from all before them, and those questions."""
        first_index_of: dict[str, int] = {}
        for index in range(num_items):
            try:
                question = self._heldout_items[index]["question"]
            except _VERIFIER_ERRORS as error:
                raise TaskError(
                    f"task {self.name}: {self._config.dataset} cannot make a question with params "
                    f"{self._config.params} ({error!r}). Check their types and ranges."
                ) from error
            first_index_of.setdefault(question, index)
            if len(first_index_of) == self._config.heldout_size:
                return tuple(first_index_of.values()), frozenset(first_index_of)
        raise TaskError(
            f"task {self.name}: {num_items} draws of {self._config.dataset} gave {len(first_index_of)} distinct "
            "questions, fewer than heldout_size = "
            f"{self._config.heldout_size}. Lower it, or widen the dataset's params."
        )


def _shown_turns(shown: Demonstration, item: dict[str, Any]) -> tuple[Message, ...]:
    """The turns of a demonstration."""
    if isinstance(shown, TextDemonstration):
        return (Message(role="assistant", content=shown.text),)
    arguments = msgspec.json.encode({shown.argument: item["metadata"][shown.metadata]}).decode()
    answer = str(item["answer"])
    return (
        Message(role="assistant", content="", tool_calls=(ToolCall(name=shown.tool, arguments=arguments),)),
        Message(role="tool", content=answer),
        Message(role="assistant", content=answer),
    )


def _create_dataset(config: ReasoningGymConfig, *, seed: int, size: int) -> object:
    """Make the library's dataset, with every wrong name or value turned into a TaskError that has the way out."""
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", SyntaxWarning
        )  # from a dependency of the library, when its files are first compiled
        from reasoning_gym.factory import DATASETS
    if config.dataset not in DATASETS:
        raise TaskError(
            f"task {config.name}: reasoning-gym has no dataset {config.dataset!r}. {_nearest(config.dataset, DATASETS)}"
        )
    dataset_class, config_class = DATASETS[config.dataset]
    known = {field.name for field in dataclasses.fields(config_class)}
    for param in config.params:
        if param in _RESERVED_PARAMS:
            raise TaskError(
                f"task {config.name}: params.{param} is chosen by the task, for disjoint splits. Set "
                f"{_RESERVED_PARAMS[param]} beside params."
            )
        if param not in known:
            raise TaskError(
                f"task {config.name}: {config.dataset} has no parameter {param!r}. "
                f"{_nearest(param, known - set(_RESERVED_PARAMS))}"
            )
    try:
        return dataset_class(config_class(**config.params, seed=seed, size=size))
    except _VERIFIER_ERRORS as error:
        raise TaskError(
            f"task {config.name}: {config.dataset} refuses params {config.params}: {error or type(error).__name__}. "
            "Change the value it names."
        ) from error


def _nearest(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    return f"Nearest: {', '.join(close)}." if close else f"It has: {', '.join(sorted(known))}."
