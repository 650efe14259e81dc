"""Judging as a task: prompts are what a judge is asked about answers of known worth, and a verdict is worth how near it
is to that.

    row (question, answer, label) --judge_messages--> prompt --> verdict --read_verdict, label--> score

The same prompts, keys and reading as where a model judges for a reward (`rl/judge/`), so that what is learned here is
used there. Here, where judging is what the policy does, a verdict that cannot be read is its own failure and worth 0.

Held-out rows are those of the questions with the smallest hashes, so no question is on both sides.
"""

import hashlib
import random
from typing import Any, cast

import msgspec
import numpy as np

from rollforward.model.messages import Message
from rollforward.rl.errors import TaskError
from rollforward.rl.judge.config import Criterion, PassFail, Points, Probability, Rubric
from rollforward.rl.judge.prompt import (
    conversation_text,
    criteria_order,
    judge_messages,
    quoting_key,
    spoken_answer,
    verdict_text,
)
from rollforward.rl.judge.types import Judgement, Opinion, Verdict, VerdictFailure, VerdictProblem
from rollforward.rl.judge.verdict import read_value, read_verdict, worth
from rollforward.rl.shuffle import derive_key
from rollforward.rl.tasks.config import JudgeConfig
from rollforward.rl.tasks.indexed_rows import IndexedRows
from rollforward.rl.tasks.rows import Row, open_rows
from rollforward.rl.tasks.types import Example, Score, ScoreReason, Split, check_index
from rollforward.rollout.workspace import Submission


class _Case(msgspec.Struct, frozen=True, kw_only=True):
    """What is behind one example."""

    question: str
    answer: str
    label: tuple[float, ...]
    key: str
    order: tuple[int, ...]
    rationale: str | None
    guess: tuple[float, ...] | None


class JudgeTask:
    """Implements `Task`. Immutable after it is built; pickles as its configuration.

    Args:
        config: the file, its columns and the rubric.

    Raises:
        TaskError: a file, a column, a row or a label is not as configured, or there are too few rows.
    """

    def __init__(self, config: JudgeConfig) -> None:
        """Check every row and choose the held-out ones."""
        self._config = config
        self._owner = f"task {config.name}"
        opened = open_rows(
            config.path,
            question_column=config.question_column,
            answer_column=config.answer_column,
            label_column=config.label_column,
            rationale_column=config.rationale_column,
            owner=self._owner,
        )
        self._rows = IndexedRows(opened, str(config.path), seed=config.seed, owner=self._owner)
        digest = hashlib.blake2b(f"{config.name}/{msgspec.json.encode(config.rubric)!r}/".encode(), digest_size=16)
        for index, row in enumerate(self._rows.scan()):
            label = self._label(row, index)
            digest.update(msgspec.json.encode((row.messages, row.answer, label, row.rationale)) + b"\n")
        hashes = self._rows.hashes
        self._heldout_rows = np.argsort(hashes, kind="stable")[: config.heldout_size]
        self._train_rows = np.flatnonzero(~np.isin(hashes, hashes[self._heldout_rows]))
        if self._train_rows.size == 0 or self._heldout_rows.size < config.heldout_size:
            num_questions = np.unique(hashes).size
            raise TaskError(
                f"{self._owner}: {config.path} has {hashes.size} rows of {num_questions} questions; heldout_size"
                f" is {config.heldout_size}, and another question must be left to train on. Lower heldout_size, or add"
                " questions"
            )
        digest.update(np.ascontiguousarray(self._heldout_rows).astype("<i8").tobytes())
        self._fingerprint = digest.hexdigest()

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as the configuration."""
        return JudgeTask, (self._config,)

    @property
    def name(self) -> str:
        """The task's name in the run."""
        return self._config.name

    @property
    def options(self) -> JudgeConfig:
        """Its effort and budget."""
        return self._config

    @property
    def fingerprint(self) -> str:
        """Hex digest of the rubric and the rows, and which of them are held out."""
        return self._fingerprint

    def size(self, split: Split) -> int:
        """Number of examples of a split."""
        return int((self._train_rows if split == "train" else self._heldout_rows).size)

    def example(self, index: int, split: Split = "train") -> Example:
        """The example at `index` of a split.

        Raises:
            IndexError: `index` is outside the split.
            TaskError: the file is no longer the one that was checked.
        """
        case, rubric = self._case(index, split), self._config.rubric
        verdict = verdict_text(rubric, case.label, key=case.key, order=case.order)
        return Example(
            task=self.name,
            split=split,
            index=index,
            messages=judge_messages(rubric, case.question, case.answer, key=case.key, order=case.order),
            answer=verdict,
            effort=self._config.effort,
            demonstration=self._demonstration(case, verdict),
        )

    def score(self, example: Example, text: str, submission: Submission | None = None) -> Score:
        """Judge a verdict by the label; see `Task.score`.

        One minus the squared distance from the label, the mean over the criteria by weight: 1 or 0 where a criterion is
        pass or fail, and a proper score where it is a probability, which pays most for the honest one.
        """
        case, rubric = self._case(example.index, example.split), self._config.rubric
        said = _read(text, example, rubric, case.key)
        truth = worth(case.label, rubric)
        values = () if isinstance(said, VerdictFailure) else (worth(said.values, rubric),)
        opinion = Opinion(
            part=self.name,
            judgements=(Judgement(number=0, order=case.order, said=said),),
            worth=values,
            answer_chars=len(case.answer),
            truth=truth,
        )
        if isinstance(said, VerdictFailure):
            reason = ScoreReason.EMPTY if not text.strip() else ScoreReason.UNREADABLE
            return Score(value=0.0, reason=reason, opinions=(opinion,))
        return Score(
            value=nearness(said.values, case.label, rubric),
            reason=ScoreReason.CORRECT if agrees(said.values, case.label, rubric) else ScoreReason.WRONG,
            opinions=(opinion,),
        )

    def _demonstration(self, case: _Case, verdict: str) -> tuple[Message] | None:
        """What SFT shows in place of the bare verdict."""
        if case.guess is not None:
            guess = verdict_text(self._config.rubric, case.guess, key=case.key, order=case.order)
            return (Message(role="assistant", content=guess),)
        if case.rationale is None:
            return None
        if self._config.effort == "non-think":
            return (Message(role="assistant", content=f"{case.rationale} {verdict}"),)
        return (Message(role="assistant", content=verdict, reasoning=case.rationale),)

    def _case(self, index: int, split: Split) -> _Case:
        check_index(self, index, split)
        number = int((self._train_rows if split == "train" else self._heldout_rows)[index])
        row = self._rows.row(number)
        question, answer = conversation_text(row.messages), row.answer or ""
        seed = derive_key("judge task", self._config.seed, self.name, split, index)
        return _Case(
            question=question,
            answer=answer,
            label=self._label(row, number),
            key=quoting_key(seed, question, answer),
            order=criteria_order(self._config.rubric, seed),
            rationale=row.rationale,
            guess=self._guess(derive_key("judge guess", seed)),
        )

    def _guess(self, seed: int) -> tuple[float, ...] | None:
        """A verdict that says nothing of the answer, where SFT is shown one."""
        source = random.Random(seed)
        if source.random() >= self._config.guess_share:
            return None
        bounds = [criterion.scale.bounds for criterion in self._config.rubric.criteria]
        return tuple(float(source.randint(int(lowest), int(highest))) for lowest, highest in bounds)

    def _label(self, row: Row, index: int) -> tuple[float, ...]:
        """The truth by criterion."""
        criteria = self._config.rubric.criteria
        label = row.label
        by_name = {criteria[0].name: label} if len(criteria) == 1 and not isinstance(label, dict) else label
        names = {criterion.name for criterion in criteria}
        if not isinstance(by_name, dict) or {*cast("dict[str, Any]", by_name)} != names:
            raise self._bad_label(index, label, f"it must have a value for each of {', '.join(sorted(names))}")
        stated = cast("dict[str, Any]", by_name)
        values = [_true_value(stated[criterion.name], criterion) for criterion in criteria]
        for value, criterion in zip(values, criteria, strict=True):
            if value is None:
                raise self._bad_label(index, label, f"it is no value of the scale of {criterion.name}")
        return tuple(value for value in values if value is not None)

    def _bad_label(self, index: int, label: object, rule: str) -> TaskError:
        shown = repr(label)[:60]
        return TaskError(
            f"{self._owner}: {self._config.path}, row {index + 1}: column {self._config.label_column!r} is {shown};"
            f" {rule}. Correct the row or leave it out"
        )


def nearness(values: tuple[float, ...], label: tuple[float, ...], rubric: Rubric) -> float:
    """Return one minus the squared distance of a verdict from the truth, by weight.

    Args:
        values, label: by criterion, on its scale.

    Returns:
        0 to 1; 1 where they are equal.
    Example: a probability of 0.8 where the truth is 1 gives 0.96, where it is 0 gives 0.36.
    """
    squares: list[float] = []
    for value, truth, criterion in zip(values, label, rubric.criteria, strict=True):
        lowest, highest = criterion.scale.bounds
        squares.append(criterion.weight * ((value - truth) / (highest - lowest)) ** 2)
    total = sum(criterion.weight for criterion in rubric.criteria)
    return max(0.0, 1.0 - sum(squares) / total)


def agrees(values: tuple[float, ...], label: tuple[float, ...], rubric: Rubric) -> bool:
    """Whether a verdict says of every criterion what the truth is: the same value, and of a probability the same side
    of one half."""
    return all(
        (value >= 0.5) == (truth >= 0.5) if isinstance(criterion.scale, Probability) else value == truth
        for value, truth, criterion in zip(values, label, rubric.criteria, strict=True)
    )


def _read(text: str, example: Example, rubric: Rubric, key: str) -> Verdict | VerdictFailure:
    said = spoken_answer(text, example.effort)
    if not said and example.effort != "non-think":
        return VerdictFailure(kind=VerdictProblem.UNCLOSED_THINKING)
    return read_verdict(said, rubric, key)


def _true_value(label: object, criterion: Criterion) -> float | None:
    """A label on the criterion's scale; None where it is none."""
    if isinstance(label, bool) and isinstance(criterion.scale, Points):
        return None
    stated = str(label).lower() if isinstance(label, bool | int | float | str) else ""
    if isinstance(criterion.scale, Probability):
        met = read_value(stated, Criterion(name=criterion.name, text=criterion.text, scale=PassFail()))
        if not isinstance(met, VerdictFailure):
            return met
    value = read_value(stated, criterion)
    return None if isinstance(value, VerdictFailure) else value
