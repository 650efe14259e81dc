"""Configuration of tasks: a union told apart by `type`. One class a kind of task; its file beside this one says what
the fields do. What every kind has is in `TaskOptions`.
"""

import itertools
import posixpath
from typing import Annotated, Any, Literal

import msgspec

from rollforward.model.messages import ReasoningEffort
from rollforward.rl.judge.config import ModelJudge, Rubric
from rollforward.rl.tasks.evens import Evens
from rollforward.rl.tasks.reward_config import (
    Reward,
    RewardPart,
    RubricReward,
    UnitTestReward,
    compares_with_answer,
    correct_from,
    reward_parts,
    unit_test_reward,
)
from rollforward.sandbox.config import KeptSubstrate, ToolConfig


class LengthPenalty(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """DAPO's soft punishment of long completions, added to the reward: 0 up to the budget less the buffer, then falling
    linearly to -1 at the budget.
    """

    buffer_tokens: Annotated[int, msgspec.Meta(ge=1)]
    """Tokens before the end of the budget in which the punishment grows."""


class TaskOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What every kind of task has: how its questions are put, how far a completion may go, and which tools it has."""

    name: Annotated[str, msgspec.Meta(pattern=r"^[a-z0-9][a-z0-9_-]*$")]
    """The task's name in the run; metrics carry it."""
    effort: ReasoningEffort = "non-think"
    """How long the model may reason: chooses the opener of its turns and the text at the head of the prompt. Give the
    task its own max_new_tokens with it.
    """
    max_new_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    """Tokens that a completion may have, all its turns together. null: the run's."""
    length_penalty: LengthPenalty | None = None
    """Punishment of completions near the budget; rewards are then between -1 and 1. Evaluations know none."""
    tools: tuple[ToolConfig, ...] = ()
    """Functions that the model may call. A turn that ends with calls is answered with their results and another turn
    follows.
    """
    max_turns: Annotated[int, msgspec.Meta(ge=2)] = 4
    """Turns that a completion with tools may have, the last one included."""
    max_observation_tokens: Annotated[int, msgspec.Meta(ge=32)] = 256
    """Tokens that the answer to one turn's calls may have; longer results are cut."""
    list_tools: bool = True
    """Whether the prompt lists the tools, in DeepSeek's words (about 1000 characters and the schemas). A model that SFT
    taught the calls needs no list.
    """
    max_calls_per_turn: Annotated[int, msgspec.Meta(ge=1)] = 16
    """Calls that one turn may have. Of a turn with more none is made, and the model is told so."""
    substrate: Literal["function", "container", "microvm", "fullvm"] = "function"
    """Where tools run. `function`: every call in a process of its own, and nothing is kept between two. `container`: in
    a sandbox that the completion keeps from its first call to its last, files and all (`sandbox.container`). `microvm`
    and `fullvm`: likewise, in a virtual machine with a kernel of its own; what is said of `container` holds for them.
    """
    isolation: Literal["namespaces", "gvisor"] = "namespaces"
    """(`container`, and no other) What stands between commands and this machine's kernel. `namespaces`: what that
    kernel itself keeps apart. `gvisor`: a kernel of the sandbox's own, which is a process, where gVisor's `runsc` is
    found (`sandbox.container.runsc`); it takes longer, to begin and for each system call.
    """
    image: str = "host"
    """(`container`) What the sandbox is made of, where a question does not say so itself: `host` or a name of
    `sandbox.container.images`.
    """
    prepare: tuple[tuple[str, ...], ...] = ()
    """(`container`) Commands, each a program and its arguments, that run in /workspace before the first call: once for
    all completions of a step whose sandboxes begin alike, each of which then goes on from the state that they left. One
    that does not end with status 0 is a failure of the data.
    """
    submission: tuple[str, ...] = ()
    """(`container`) Files that are taken out of the sandbox at the end for the reward: paths relative to /workspace, or
    absolute, no patterns. Those that are not there are left out, and so is what cannot be taken: a directory, a device,
    a path that passes a link, a file that the sandbox's own user may not read. `answers.jsonl` says which and why.
    """
    max_submission_bytes: Annotated[int, msgspec.Meta(ge=1, le=64 << 20)] = 1 << 20
    """(`container`) What they may have together. They are taken in their order; one that makes it more is left out."""
    max_tool_s: Annotated[float, msgspec.Meta(gt=0.0)] | None = None
    """(`container`) Seconds that all calls of a completion may take together. When they are used up, every further call
    is answered with that instead of being made, and the completion counts as a timeout, which is scored and trained.
    """

    def __post_init__(self) -> None:
        """Refuse what cannot go together. A subclass that defines its own checks calls this one."""
        names = [tool.name for tool in self.tools]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(
                    f"task {self.name}: {names.count(name)} tools are named {name!r}; a call names one. Rename all but"
                    " one"
                )
        if self.length_penalty is not None and self.max_new_tokens is not None:
            self.check_length_penalty(self.max_new_tokens)
        self._check_substrate()

    @property
    def keeps_sandbox(self) -> bool:
        """Whether its completions keep a sandbox of their own."""
        return self.substrate != "function"

    @property
    def kept_substrate(self) -> KeptSubstrate:
        """What isolates the sandboxes that its completions keep, and those in which these are judged."""
        if self.isolation == "gvisor":
            return "gvisor"
        return "container" if self.substrate == "function" else self.substrate

    def _check_substrate(self) -> None:
        if self.keeps_sandbox and not self.tools:
            raise ValueError(
                f"task {self.name}: substrate is {self.substrate}, but the task has no tools, so that nothing could be"
                " done in its sandbox. Set tools, or leave substrate out"
            )
        if self.isolation != "namespaces" and self.substrate != "container":
            raise ValueError(
                f"task {self.name}: isolation is {self.isolation}, but substrate is {self.substrate}; it is containers"
                " that are isolated in more than one way. Set substrate=container, or leave isolation out"
            )
        if not self.keeps_sandbox and self.submission:
            raise ValueError(
                f"task {self.name}: submission is {', '.join(self.submission)}, but nothing is kept between calls where"
                " substrate is function. Set substrate=container"
            )
        if self.prepare and not self.keeps_sandbox:
            raise ValueError(
                f"task {self.name}: prepare has commands, but nothing is kept that they could change where substrate is"
                " function. Set substrate=container"
            )
        if not all(words and words[0] for words in self.prepare):
            raise ValueError(f"task {self.name}: prepare has a command without a program. Name it, or leave it out")
        for path in self.submission:
            inside = posixpath.normpath(posixpath.join("/workspace", path))
            if not path or "\0" in path or ".." in path.split("/") or inside in ("/", "/workspace"):
                raise ValueError(
                    f"task {self.name}: submission has {path!r}; it must be the path of a file, without `..`. Name it"
                    " from /workspace or absolutely"
                )

    @property
    def scored_at_once(self) -> int:
        """Completions that are judged at one time; more than one where that is waiting for other processes."""
        return 1

    @property
    def reward_parts(self) -> tuple[RewardPart, ...]:
        """What its reward is put together from, after its verifiers have spoken: judges and counted tokens too. None
        where a verifier alone gives the score."""
        return ()

    @property
    def correct_from(self) -> float:
        """Score from which an answer counts as right in an evaluation, where it is put together."""
        return 1.0

    @property
    def judges(self) -> tuple[ModelJudge, ...]:
        """Models that its reward asks, the policy itself not counted."""
        asked = [part.reward.judge for part in self.reward_parts if isinstance(part.reward, RubricReward)]
        return tuple(dict.fromkeys(judge for judge in asked if isinstance(judge, ModelJudge)))

    def budget(self, run_max_new_tokens: int) -> int:
        """Tokens that a completion may have, where the run gives `run_max_new_tokens`."""
        return run_max_new_tokens if self.max_new_tokens is None else self.max_new_tokens

    @property
    def max_observed_tokens(self) -> int:
        """Tokens that all results of one completion may have together."""
        return (self.max_turns - 1) * self.max_observation_tokens if self.tools else 0

    def check_length_penalty(self, budget: int) -> None:
        """Refuse a buffer that is longer than the budget.

        Raises:
            ValueError: it is.
        """
        if self.length_penalty is not None and self.length_penalty.buffer_tokens > budget:
            raise ValueError(
                f"task {self.name}: length_penalty.buffer_tokens is {self.length_penalty.buffer_tokens}, but a"
                f" completion has at most {budget} tokens, so that every one would be punished. Set it to {budget} or"
                " less"
            )


class Shown(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """For which questions of reasoning-gym a demonstration is."""

    where: dict[str, int | float | str | bool] = {}
    """Values that the question's metadata must have, such as `num_digits: 2`. Empty: every question."""
    share: Annotated[float, msgspec.Meta(gt=0.0, le=1.0)] = 1.0
    """Share of those questions that are shown so; the others go on to the next demonstration. A model that saw both can
    find out by reinforcement what pays.
    """


class CallDemonstration(Shown, frozen=True, kw_only=True, tag_field="type", tag="call"):
    """SFT shows a question of reasoning-gym answered with a tool: the assistant calls it with one argument taken from
    the question's metadata, reads the right answer as its result, and gives it.

    The tool is not run; that it returns the right answer's text for this argument is for you to make sure.
    """

    tool: str
    """Name of one of the task's tools."""
    argument: str
    """Name of its parameter."""
    metadata: str
    """Key of the question's metadata with the argument's value; `expression` for chain_sum."""


class TextDemonstration(Shown, frozen=True, kw_only=True, tag_field="type", tag="text"):
    """SFT shows a fixed text in place of the right answer, such as one that declines."""

    text: Annotated[str, msgspec.Meta(min_length=1)]
    """What the assistant says."""


Demonstration = CallDemonstration | TextDemonstration
"""What SFT learns instead of the bare answer, told apart by `type`."""


class ReasoningGymConfig(TaskOptions, frozen=True, kw_only=True, tag_field="type", tag="reasoning_gym"):
    """A dataset of the reasoning-gym library with the library's own verifier (`reasoning_gym.py`)."""

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
    demonstrate: tuple[Demonstration, ...] = ()
    """What SFT learns: for each question the first of these that is for it and takes it, else the bare answer."""

    def __post_init__(self) -> None:
        """Refuse a demonstration with a tool that the task has not."""
        super().__post_init__()
        have = [tool.name for tool in self.tools]
        for shown in self.demonstrate:
            if isinstance(shown, CallDemonstration) and shown.tool not in have:
                raise ValueError(
                    f"task {self.name}: demonstrate.tool is {shown.tool!r}; it must be one of the task's tools, which"
                    f" are {', '.join(have) or 'none'}. Add it to tools"
                )


class DatasetConfig(TaskOptions, frozen=True, kw_only=True, tag_field="type", tag="dataset"):
    """Questions and answers from a file of yours (`dataset.py`)."""

    path: str | Evens
    """A .jsonl file (one object a line) or a .parquet file, one question a row; or, for a trial, rows that are made
    here: `{type: evens}`."""
    reward: Reward
    """How an answer, or what was left in the sandbox, is judged."""
    question_column: str = "question"
    """Column with the question: a text, or a list of messages, each with `role` and `content`."""
    answer_column: str | None = "answer"
    """Column with the right answer, a text or a whole number. SFT learns it word for word. null: there is none, and the
    reward compares with nothing.
    """
    messages_column: str | None = None
    """Column with what SFT learns instead of the bare answer: a list of messages of the roles assistant and tool, the
    last one an assistant's. An assistant's may have `tool_calls`, each with the `name` of one of `tools` and
    `arguments` (a text that is a JSON object); a tool's follow it in the order of the calls. null: SFT learns the bare
    answer.
    """
    files_column: str | None = None
    """Column with the files that a completion's sandbox begins with (`substrate: container`): an object, text by path
    relative to /workspace, or a text that is such an object as JSON. null: none.
    """
    tests_column: str | None = None
    """Column with the hidden tests of a reward of type unit_tests: a list of objects with `argv` (or `script`), and if
    need be `stdin`, `files`, `stdout`, `compare` (stripped or exact), `exit_code`, `any_exit` and `timeout_s`; or a
    text that is such a list as JSON.
    """
    system_prompt: str | None = None
    """A system message in front of every question."""
    heldout_path: str | Evens | None = None
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
        """Refuse a verifier without anything to compare with, and one column with two meanings."""
        super().__post_init__()
        if self.answer_column is None and compares_with_answer(self.reward):
            raise ValueError(
                f"task {self.name}: answer_column is null, but the reward compares with a right answer. Name the"
                " column, or choose a reward of type python, pattern, unit_tests or rubric"
            )
        self._check_sandbox_columns()
        columns = {
            "question_column": self.question_column,
            "answer_column": self.answer_column,
            "messages_column": self.messages_column,
            "files_column": self.files_column,
            "tests_column": self.tests_column,
        }
        for (first, left), (second, right) in itertools.combinations(columns.items(), 2):
            if left is not None and left == right:
                raise ValueError(
                    f"task {self.name}: {first} and {second} are both {left!r}; one would stand in the other. Name two"
                    " columns"
                )

    @property
    def scored_at_once(self) -> int:
        """Completions that are judged at one time."""
        tests = unit_test_reward(self.reward)
        return 1 if tests is None else tests.at_once

    @property
    def reward_parts(self) -> tuple[RewardPart, ...]:
        """What its reward is put together from, after its verifiers have spoken."""
        return reward_parts(self.reward)

    @property
    def correct_from(self) -> float:
        """Score from which an answer counts as right in an evaluation."""
        return correct_from(self.reward)

    def _check_sandbox_columns(self) -> None:
        tests = unit_test_reward(self.reward)
        if (tests is not None) != (self.tests_column is not None):
            raise ValueError(
                f"task {self.name}: tests_column is {self.tests_column!r}, and the reward is"
                f" {'' if tests is not None else 'not '}of type unit_tests; one needs the other. Set both or neither"
            )
        if tests is not None:
            _check_unit_tests(self)
        if self.files_column is not None and not self.keeps_sandbox:
            raise ValueError(
                f"task {self.name}: files_column is {self.files_column!r}, but where substrate is function nothing is"
                " kept that could hold files. Set substrate=container"
            )


class ErrandsConfig(TaskOptions, frozen=True, kw_only=True, tag_field="type", tag="errands"):
    """Small errands in a workspace of files, made here (`errands.py`): find a formula in the file that the question
    names, and submit it, or twice it. Hidden tests put numbers in.
    """

    substrate: Literal["function", "container", "microvm", "fullvm"] = "container"
    tools: tuple[ToolConfig, ...] = (ToolConfig(name="read_file"), ToolConfig(name="submit"))
    submission: tuple[str, ...] = ("answer.txt",)
    max_submission_bytes: Annotated[int, msgspec.Meta(ge=1, le=64 << 20)] = 4096
    notes: Annotated[int, msgspec.Meta(ge=1, le=32)] = 3
    """Files of a workspace."""
    twice_share: Annotated[float, msgspec.Meta(ge=0.0, le=1.0)] = 0.5
    """Share of questions that ask for twice the formula."""
    guess_share: Annotated[float, msgspec.Meta(ge=0.0, le=1.0)] = 0.0
    """Share of questions of which SFT is shown a guess, submitted without a look into the file. A model that saw both
    can find out by reinforcement what pays.
    """
    tests: Annotated[int, msgspec.Meta(ge=1, le=16)] = 2
    """Hidden tests of a question."""
    reward: UnitTestReward = UnitTestReward(partial_credit=False)
    """How they become a score."""
    seed: Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)] = 0
    """Chooses the errands; accuracies are comparable only at the same seed."""
    train_size: Annotated[int, msgspec.Meta(ge=1, le=1 << 24)] = 65536
    """Errands to train on in one epoch; with several tasks also the task's share in the mixture."""
    heldout_size: Annotated[int, msgspec.Meta(ge=1, le=10_000)] = 200
    """Errands, all different, that are kept for evaluation."""

    def __post_init__(self) -> None:
        """Refuse what an errand cannot be done with."""
        super().__post_init__()
        have = [tool.name for tool in self.tools]
        for name in ("read_file", "submit"):
            if name not in have:
                raise ValueError(
                    f"task {self.name}: tools are {', '.join(have) or 'none'}; an errand needs read_file and submit."
                    " Leave tools out, or add to them"
                )
        if "answer.txt" not in self.submission:
            raise ValueError(
                f"task {self.name}: submission is {', '.join(self.submission) or 'empty'}; an errand is judged by"
                " answer.txt, which submit writes. Leave submission out, or add it"
            )
        _check_unit_tests(self)

    @property
    def scored_at_once(self) -> int:
        """Completions that are judged at one time."""
        return self.reward.at_once


class JudgeConfig(TaskOptions, frozen=True, kw_only=True, tag_field="type", tag="judge"):
    """Judging, as something to learn: answers of which a file of yours knows what a rubric makes of them
    (`judge.py`). The prompt is what a judge is asked, the answer a verdict, and the reward how near it is to the label.
    """

    path: str | Evens
    """A .jsonl file (one object a line) or a .parquet file, one answered question a row; or, for a trial, rows that are
    made here: `{type: evens}`."""
    rubric: Rubric
    """What is looked at. A reward of type rubric with the same criteria asks the same."""
    question_column: str = "question"
    """Column with the question: a text, or a list of messages, each with `role` and `content`."""
    answer_column: str = "answer"
    """Column with the answer that is judged, a text or a whole number."""
    label_column: str = "label"
    """Column with the truth: a value of the criterion's scale, or, where there are several criteria, an object with one
    for each. `pass`, true and 1 are the same, and so are `fail`, false and 0; a probability's truth is one of these, or
    a number between 0 and 1."""
    rationale_column: str | None = None
    """Column with what SFT shows before the verdict: why it is so. It is the reasoning of the turn in a thinking mode,
    else text in front. null: SFT shows the bare verdict."""
    guess_share: Annotated[float, msgspec.Meta(ge=0.0, le=1.0)] = 0.0
    """Share of rows of which SFT is shown a verdict by chance. A model that learned from such what verdicts look like
    can find out by reinforcement which are right.
    """
    heldout_size: Annotated[int, msgspec.Meta(ge=1, le=100_000)] = 200
    """Rows that are kept for evaluation. No question is among them and among those to learn from."""
    seed: Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)] = 0
    """Chooses the held-out questions, by a hash of their text, and the keys of all."""

    def __post_init__(self) -> None:
        """Refuse one column with two meanings, and tools."""
        super().__post_init__()
        named = (self.question_column, self.answer_column, self.label_column, self.rationale_column)
        columns = [column for column in named if column is not None]
        if len({*columns}) < len(columns):
            raise ValueError(
                f"task {self.name}: question, answer, label and rationale stand in the columns {', '.join(columns)};"
                " each needs one of its own. Name others"
            )
        if self.tools:
            raise ValueError(f"task {self.name} judges and has tools; a verdict is one turn without calls. Drop tools")


_LATER_OPTIONS = (
    "max_calls_per_turn",
    "substrate",
    "isolation",
    "image",
    "submission",
    "max_submission_bytes",
    "max_tool_s",
    "prepare",
)


def identity_bytes(config: TaskOptions) -> bytes:
    """JSON of the settings by which a task is told from others: its fingerprint, and with that the order of its
    questions, is made of them. Settings that came later are left out while they have their default, so that they change
    no run that does not use them.
    """
    defaults = {field.name: field.default for field in msgspec.structs.fields(TaskOptions)}
    kept = msgspec.json.decode(msgspec.json.encode(config, order="deterministic"))  # fields in their order, keys sorted
    for name in _LATER_OPTIONS:
        if getattr(config, name) == defaults[name]:
            del kept[name]
    return msgspec.json.encode(kept)


TaskConfig = ReasoningGymConfig | DatasetConfig | ErrandsConfig | JudgeConfig
"""Any task, told apart by `type`. A new kind joins here and in `registry.py`."""


def _check_unit_tests(task: TaskOptions) -> None:
    """Refuse hidden tests of nothing."""
    if not task.submission:
        raise ValueError(
            f"task {task.name}: reward.type is unit_tests, but submission is empty, so that there is nothing to test."
            " Set substrate=container, and submission to the files that the tests need"
        )
