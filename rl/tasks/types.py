"""Records that every task speaks in, and the protocol that it offers to the rest of the loop.

Not here: the tasks (one file each), their configuration (`config.py`), the list of them (`registry.py`).
"""

from enum import StrEnum
from typing import Literal, Protocol

import msgspec

from rollforward.model.messages import Message, ReasoningEffort
from rollforward.rl.judge.types import Opinion
from rollforward.rl.tasks.config import TaskOptions
from rollforward.rollout.types import FailureType
from rollforward.rollout.workspace import Submission, Workspace
from rollforward.sandbox.types import ToolSpec

Split = Literal["train", "heldout"]
"""Which questions: those that are trained on, or those that are kept to measure with. No text of a question is in both.
"""


class ScoreReason(StrEnum):
    """Why an answer got its score."""

    CORRECT = "correct"
    """The verifier gave full marks; a sum of rewards reached what counts as right; a verdict agrees with the truth."""
    PARTIAL = "partial"
    """The verifier gave some marks; they count only where the task says so."""
    WRONG = "wrong"
    """The verifier read the answer and gave nothing."""
    EMPTY = "empty"
    """There was no text to read."""
    TOO_LONG = "too_long"
    """The text is longer than any answer of the task; it was not read."""
    UNCLOSED_THINKING = "unclosed_thinking"
    """The reasoning never ended, so that there is no answer behind it."""
    UNREADABLE = "unreadable"
    """The verifier could not read the answer."""
    TIMEOUT = "timeout"
    """The verifier computed until its deadline without an end."""


class Example(msgspec.Struct, frozen=True, kw_only=True):
    """One question. Its name (task, split, index) is enough to make it again in any process."""

    task: str
    """Name of the task in the run."""
    split: Split
    """Which questions it is one of."""
    index: int
    """Position in the split."""
    messages: tuple[Message, ...]
    """What the model is asked."""
    answer: str | None
    """A right answer, to learn from; None where the task has only a verifier."""
    effort: ReasoningEffort = "non-think"
    """How long the model may reason."""
    tools: tuple[ToolSpec, ...] = ()
    """Tools that the prompt lists; the task may have others."""
    demonstration: tuple[Message, ...] | None = None
    """Turns to learn from instead of the bare answer: messages of the assistant, the last one too, and of tools."""
    workspace: Workspace | None = None
    """What the sandbox of a completion begins with, where the task's substrate is `container`; None: an empty one of
    the task's image."""


def check_index(task: "Task", index: int, split: Split) -> None:
    """Refuse a position at which a task has no example.

    Raises:
        IndexError: `index` is outside the split.
    """
    if not 0 <= index < task.size(split):
        raise IndexError(f"task {task.name}: index {index} is outside the {split} split, 0 ... {task.size(split) - 1}")


def workspace_of(example: Example, options: TaskOptions) -> Workspace:
    """Return what the sandbox of a completion begins with, where it keeps one: with what `prepare` left."""
    workspace = Workspace(image=options.image) if example.workspace is None else example.workspace
    return msgspec.structs.replace(workspace, prepare=options.prepare) if options.prepare else workspace


class PartScore(msgspec.Struct, frozen=True, kw_only=True):
    """What one part of a reward says about one answer."""

    name: str
    """Name of the part."""
    weight: float
    """Its factor in the sum."""
    value: float | None = None
    """0 to 1, a punishment -1 to 0; None where nobody has spoken yet, or it failed."""
    failure: FailureType | None = None
    """`infra` or `data` where it has no value, `timeout` where that is why it is 0; else None."""
    detail: str = ""
    """What failed, for a person."""


class Score(msgspec.Struct, frozen=True, kw_only=True):
    """What a verifier, a judge, or several of both say about one answer."""

    value: float
    """The reward, 0 to 1, with punishments down to less than 0. 0.0 is a score like any other."""
    reason: ScoreReason
    """Why."""
    parts: tuple[PartScore, ...] = ()
    """What it is put together from, in the order of the configuration; empty where a verifier alone gave it."""
    opinions: tuple[Opinion, ...] = ()
    """What judges said; of a task that trains judging, what the policy said."""

    @property
    def is_correct(self) -> bool:
        """Whether the answer counts as right in an evaluation."""
        return self.reason is ScoreReason.CORRECT

    @property
    def failure(self) -> FailureType | None:
        """`timeout` where the deadline ended the verifier, or that of a part, which is trained and counted; else
        None."""
        is_late = self.reason is ScoreReason.TIMEOUT or any(part.failure is FailureType.TIMEOUT for part in self.parts)
        return FailureType.TIMEOUT if is_late else None


class Unscored(msgspec.Struct, frozen=True, kw_only=True):
    """Why an answer has no score: something failed that says nothing about the policy. Never a 0."""

    failure: FailureType
    """`infra` or `data`, the two that are left out of baseline, loss and accuracy."""
    detail: str
    """What happened, for a person."""
    parts: tuple[PartScore, ...] = ()
    """Parts of the reward, those that have a value too; empty where it has none."""
    opinions: tuple[Opinion, ...] = ()
    """What judges said."""

    def __post_init__(self) -> None:
        """Refuse a failure that is scored."""
        if not self.failure.is_excluded:
            raise ValueError(f"an answer without a score has failure {self.failure}; only infra and data have none")


class Pending(msgspec.Struct, frozen=True, kw_only=True):
    """An answer of which verifiers have said what they can, while judges, or who counts tokens, have yet to speak.
    `rl/judge/scoring.py` makes a score of it."""

    parts: tuple[PartScore, ...]
    """Of the task's reward, in its order; a part of which somebody has yet to speak has neither value nor failure."""
    question: str
    """What was asked, for a judge."""
    answer: str
    """What is judged; empty where there is nothing to judge."""
    empty: ScoreReason | None = None
    """Why there is nothing to judge: every judge's part is then 0 for this reason. None where there is."""
    truths: tuple[float | None, ...] = ()
    """By part: what a verifier says of an answer that a judge has yet to see, for comparison; None where none does."""


class Task(Protocol):
    """Questions with a verifier. Implementations are deterministic: the same configuration gives the same examples in
    every process.
    """

    @property
    def name(self) -> str:
        """The task's name in the run; metrics carry it."""
        ...

    @property
    def options(self) -> TaskOptions:
        """Its effort, budget and tools."""
        ...

    @property
    def fingerprint(self) -> str:
        """Hex digest of the configuration, the tools and the held-out questions; a resumed run compares it."""
        ...

    def size(self, split: Split) -> int:
        """Number of examples of a split, at least 1."""
        ...

    def example(self, index: int, split: Split = "train") -> Example:
        """The example at `index`, 0 ... size(split) - 1."""
        ...

    def score(self, example: Example, text: str, submission: Submission | None = None) -> Score | Unscored | Pending:
        """Judge what the model answered, from any thread. Never raises for anything that `text` and `submission` may
        hold; never evaluates it in this process.

        Args:
            example: what was asked.
            text: the last turn.
            submission: what the completion left in its sandbox; None where it kept none.

        Raises:
            RewardError: the user's own verifier breaks its contract.
        """
        ...
