"""Configuration of tasks: a union told apart by `type`. One class a kind of task; its file beside this one says what
the fields do.
"""

from typing import Annotated, Any

import msgspec


class ReasoningGymConfig(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="reasoning_gym"
):
    """A dataset of the reasoning-gym library with the library's own verifier (`reasoning_gym.py`)."""

    name: Annotated[str, msgspec.Meta(pattern=r"^[a-z0-9][a-z0-9_-]*$")]
    """The task's name in the run; metrics carry it."""
    dataset: str
    """Name of the dataset in reasoning-gym, such as `chain_sum`."""
    params: dict[str, Any] = {}
    """Parameters of the dataset, by the library's names; what is left out has the library's default."""
    seed: Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)] = 0
    """Chooses the questions. Another seed also gives other held-out questions, so accuracies are comparable only at the
    same seed.
    """
    train_size: Annotated[int, msgspec.Meta(ge=1, le=1 << 24)] = 65536
    """Examples to train on in one epoch; texts may repeat among them. With several tasks it is also the task's share in
    the mixture.
    """
    heldout_size: Annotated[int, msgspec.Meta(ge=1, le=100_000)] = 200
    """Questions, all different, that are kept for evaluation."""
    partial_credit: bool = True
    """Whether a reward may lie between 0 and 1 where the verifier gives it. Many of the library's verifiers pay for a
    wrong answer that contains the right one, which a policy learns to exploit; False rewards full marks only.
    """
    max_answer_chars: Annotated[int, msgspec.Meta(ge=1)] = 4096
    """A longer answer scores 0 without being read, which bounds the verifier's time."""


class ExactReward(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="exact"):
    """1 where the answer is the right one's text, 0 elsewhere; runs of white space count as one space."""

    ignore_case: bool = False
    """Whether capital and small letters are the same."""


class MathReward(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="math_verify"
):
    """1 where the answer is mathematically equal to the right one, by the math-verify library, 0 elsewhere.

    The column of right answers holds the final answer alone, as LaTeX or plain text, or a text with it in `\\boxed{}`.
    """

    timeout_s: Annotated[float, msgspec.Meta(gt=0.0, le=3600.0)] = 5.0
    """Seconds for one answer; its process is ended when they are over."""


class PythonReward(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="python"
):
    """A function of yours, `def score(question: str, answer: str | None, text: str) -> float`, in its own process.

    `text` is everything that the model said, `answer` the right one, `question` the last message of the prompt. The
    value is 0 to 1; 1 counts as right in an evaluation.
    """

    file: str
    """Python file with the function. Modules beside it can be imported."""
    function: str = "score"
    """Its name in the file."""
    timeout_s: Annotated[float, msgspec.Meta(gt=0.0, le=3600.0)] = 5.0
    """Seconds for one call; the process is ended when they are over. A call that computed until then scores 0; one that
    waited, for another machine or for a core, has no score.
    """
    start_timeout_s: Annotated[float, msgspec.Meta(gt=0.0, le=3600.0)] = 120.0
    """Seconds for starting the process and importing the file."""


Reward = ExactReward | MathReward | PythonReward
"""Any verifier of a dataset's answers. A new kind joins here and in `rewards.py`."""


class DatasetConfig(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="dataset"
):
    """Questions and answers from a file of yours (`dataset.py`)."""

    name: Annotated[str, msgspec.Meta(pattern=r"^[a-z0-9][a-z0-9_-]*$")]
    """The task's name in the run; metrics carry it."""
    path: str
    """A .jsonl file (one object a line) or a .parquet file, one question a row."""
    reward: Reward
    """How an answer is judged."""
    question_column: str = "question"
    """Column with the question: a text, or a list of messages, each with `role` and `content`."""
    answer_column: str | None = "answer"
    """Column with the right answer, a text or a whole number. SFT learns it word for word. null: there is none, and the
    reward must be of type python.
    """
    system_prompt: str | None = None
    """A system message in front of every question."""
    heldout_path: str | None = None
    """A second file with the same columns to evaluate on; its questions are left out of `path`. null: they are taken
    out of `path`.
    """
    heldout_size: Annotated[int, msgspec.Meta(ge=1, le=100_000)] = 200
    """Questions, all different, that are kept for evaluation."""
    seed: Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)] = 0
    """Chooses the held-out questions, by a hash of their text: the order of the rows has no say."""
    max_answer_chars: Annotated[int, msgspec.Meta(ge=1)] = 4096
    """A longer answer scores 0 without being read. A Python reward gets any text."""

    def __post_init__(self) -> None:
        """Refuse a verifier without anything to compare with."""
        if self.answer_column is None and not isinstance(self.reward, PythonReward):
            raise ValueError(
                f"task {self.name}: answer_column is null, but the reward compares with a right answer. Name the"
                " column, or choose a reward of type python"
            )
        if self.answer_column == self.question_column:
            raise ValueError(
                f"task {self.name}: question_column and answer_column are both {self.answer_column!r}; the answer would"
                " stand in the question. Name two columns"
            )


TaskConfig = ReasoningGymConfig | DatasetConfig
"""Any task, told apart by `type`. A new kind joins here and in `registry.py`."""
