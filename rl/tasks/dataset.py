"""A user's questions and answers from a file as a task.

Held-out questions are those with the smallest hashes of their text: which ones they are depends on the texts and the
seed alone, not on the order of the rows, and all rows with one text are on one side. Rows are checked once, when the
task is built, and read from the file when they are asked for (`rows.py`); in memory are 8 to 32 bytes a row.

Not here: how answers are judged (`rewards.py`).
"""

import hashlib
from typing import Any

import msgspec
import numpy as np

from rollforward.model.messages import Message
from rollforward.model.tokenizer import END_THINK
from rollforward.rl.errors import TaskError
from rollforward.rl.judge.prompt import conversation_text, spoken_answer
from rollforward.rl.tasks.config import DatasetConfig
from rollforward.rl.tasks.evens import Evens
from rollforward.rl.tasks.grader import Grader
from rollforward.rl.tasks.indexed_rows import IndexedRows
from rollforward.rl.tasks.reward_config import (
    AnswerReward,
    PartReward,
    Reward,
    RewardPart,
    RubricReward,
    UnitTestReward,
    unit_test_reward,
)
from rollforward.rl.tasks.rewards import Judge, build_judge
from rollforward.rl.tasks.rows import Row, open_rows
from rollforward.rl.tasks.tools import load_toolset
from rollforward.rl.tasks.types import (
    Example,
    PartScore,
    Pending,
    Score,
    ScoreReason,
    Split,
    Unscored,
    check_index,
    workspace_of,
)
from rollforward.rl.tasks.unit_tests import UnitTestJudge
from rollforward.rollout.workspace import Submission, Workspace
from rollforward.sandbox.config import ContainerConfig


class DatasetTask:
    """A file of questions, split into those to train on and held-out ones. Immutable after it is built; pickles as its
    configuration, so the process that unpickles it reads and checks the file again.

    Args:
        config: the file, its columns and the reward.
        grader: has the sandboxes of hidden tests; None: there are none.

    Raises:
        TaskError: a file, a column or a row is not as configured, or there are too few distinct questions.
        RewardError: the reward's function cannot be called.
        ToolError: a tool cannot be offered.
    """

    def __init__(self, config: DatasetConfig, grader: Grader | None = None) -> None:
        """Check every row, choose the held-out questions, start the reward's process if it has one."""
        self._config = config
        self._owner = f"task {config.name}"
        self._tools = load_toolset(config)
        digest = hashlib.blake2b(f"{config.name}/{config.system_prompt!r}/".encode(), digest_size=16)
        digest.update(self._tools.digest)
        self._train = self._indexed(config.path, digest)
        if config.heldout_path is None:
            self._heldout = self._train
            minimum, rule = config.heldout_size + 1, "heldout_size + 1, so that one is left to train on"
        else:
            self._heldout = self._indexed(config.heldout_path, digest)
            minimum, rule = config.heldout_size, "heldout_size"
        distinct, first_rows = np.unique(self._heldout.hashes, return_index=True)
        if distinct.size < minimum:
            raise TaskError(
                f"{self._owner}: {self._heldout.place} has {distinct.size} distinct questions; it must have at least"
                f" {minimum} ({rule}). Lower heldout_size, or add questions"
            )
        self._heldout_rows = first_rows[: config.heldout_size]
        heldout_hashes = distinct[: config.heldout_size] if config.heldout_path is None else distinct
        self._train_rows = np.flatnonzero(~np.isin(self._train.hashes, heldout_hashes))
        if self._train_rows.size == 0:
            raise TaskError(
                f"{self._owner}: every question of {config.path} is also in {config.heldout_path}, so none is left to"
                " train on. Name files with different questions"
            )
        digest.update(np.ascontiguousarray(heldout_hashes).tobytes())
        self._fingerprint = digest.hexdigest()
        tests = unit_test_reward(config.reward)
        if tests is not None:
            self._test_judge = UnitTestJudge(
                tests, grader or Grader(ContainerConfig()), owner=self._owner, substrate=config.kept_substrate
            )
        self._judges = {name: self._build_judge(reward) for name, reward in self._verifiers().items()}

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as the configuration."""
        return DatasetTask, (self._config,)

    @property
    def name(self) -> str:
        """The task's name in the run."""
        return self._config.name

    @property
    def options(self) -> DatasetConfig:
        """Its effort, budget and tools."""
        return self._config

    @property
    def fingerprint(self) -> str:
        """Hex digest of the tools, the rows of the files and the held-out questions, wherever the files lie."""
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
        row = self._row(index, split)
        messages = row.messages
        if self._config.system_prompt is not None:
            messages = (Message(role="system", content=self._config.system_prompt), *messages)
        return Example(
            task=self.name,
            split=split,
            index=index,
            messages=messages,
            answer=row.answer,
            effort=self._config.effort,
            tools=self._tools.listed,
            demonstration=row.demonstration,
            workspace=self._workspace(row),
        )

    def score(self, example: Example, text: str, submission: Submission | None = None) -> Score | Unscored | Pending:
        """Judge an answer by the configured reward, as far as no judge is needed; see `Task.score`."""
        parts = self._config.reward_parts
        if not parts:
            said = self._verified("", self._config.reward, example, text, submission)
            assert said is not None, "a reward without parts is a verifier"
            return said
        answer, empty = _judged_text(example, text)
        scored: list[PartScore] = []
        truths: list[float | None] = []
        for part in parts:
            said = self._verified(part.name, part.reward, example, text, submission)
            truth = None
            if isinstance(part.reward, RubricReward):
                # What a verifier says of it is no part of the reward.
                truth, said = said.value if isinstance(said, Score) else None, None
            scored.append(_part_score(part, said))
            truths.append(truth)
        question = conversation_text(example.messages)
        return Pending(parts=tuple(scored), question=question, answer=answer, empty=empty, truths=tuple(truths))

    def _verified(
        self, name: str, reward: Reward | PartReward, example: Example, text: str, submission: Submission | None
    ) -> Score | Unscored | None:
        """What the verifier of a part says, or the one that audits it; None where there is none."""
        if isinstance(reward, UnitTestReward):
            tests = self._row(example.index, example.split).tests
            workspace = workspace_of(example, self._config)
            return self._test_judge(submission, tests, declared=self._config.submission, workspace=workspace)
        judge = self._judges.get(name)
        return None if judge is None else judge(example.messages[-1].content, example.answer, text)

    def _verifiers(self) -> dict[str, AnswerReward]:
        """Verifiers of what the model said, by part; the one of a reward without parts has no name."""
        parts = self._config.reward_parts
        found = {part.name: part.reward for part in parts} if parts else {"": self._config.reward}
        audited = {name: one.audit if isinstance(one, RubricReward) else one for name, one in found.items()}
        return {name: one for name, one in audited.items() if isinstance(one, AnswerReward)}

    def _build_judge(self, reward: AnswerReward) -> Judge:
        return build_judge(reward, max_answer_chars=self._config.max_answer_chars, owner=self._owner)

    def _indexed(self, source: str | Evens, digest: Any) -> IndexedRows:
        """The rows of a file, every one checked; `digest` takes in all of them."""
        config = self._config
        opened = open_rows(
            source,
            question_column=config.question_column,
            answer_column=config.answer_column,
            messages_column=config.messages_column,
            files_column=config.files_column,
            tests_column=config.tests_column,
            tools={spec.name: spec.is_final for spec in self._tools.specs},
            owner=self._owner,
        )
        rows = IndexedRows(opened, str(source), seed=config.seed, owner=self._owner)
        for index, row in enumerate(rows.scan()):
            if config.system_prompt is not None and row.messages[0].role == "system":
                raise TaskError(
                    f"{self._owner}: {source}, row {index + 1}: the messages begin with a system message, and"
                    f" system_prompt is {config.system_prompt!r}; there is one system message. Set system_prompt=null"
                    " or take the row's away"
                )
            said = (row.messages, row.answer, row.demonstration)
            if row.files is not None or row.tests:
                said = (*said, row.files, row.tests)
            digest.update(msgspec.json.encode(said) + b"\n")
        return rows

    def _row(self, index: int, split: Split) -> Row:
        check_index(self, index, split)
        if split == "train":
            return self._train.row(int(self._train_rows[index]))
        return self._heldout.row(int(self._heldout_rows[index]))

    def _workspace(self, row: Row) -> Workspace | None:
        if not self._config.keeps_sandbox:
            return None
        files = {path: text.encode() for path, text in (row.files or {}).items()}
        return Workspace(files=files, image=self._config.image)


def _judged_text(example: Example, text: str) -> tuple[str, ScoreReason | None]:
    """What a judge sees of an answer, or why there is nothing to see."""
    answer = spoken_answer(text, example.effort)
    if answer:
        return answer, None
    is_unclosed = example.effort != "non-think" and END_THINK not in text
    return "", ScoreReason.UNCLOSED_THINKING if is_unclosed else ScoreReason.EMPTY


def _part_score(part: RewardPart, said: Score | Unscored | None) -> PartScore:
    empty = PartScore(name=part.name, weight=part.weight)
    match said:
        case Score():
            return msgspec.structs.replace(empty, value=said.value, failure=said.failure)
        case Unscored():
            return msgspec.structs.replace(empty, failure=said.failure, detail=said.detail)
        case None:
            return empty
