"""Configuration of rewards: how an answer, or what was left in a sandbox, becomes a score. A union, told apart by
`type`.

What a verifier does is in `rewards.py` and `unit_tests.py`, what a judge does in `rl/judge/`. Tasks are in `config.py`.
"""

import math
import re
from typing import Annotated

import msgspec

from rollforward.rl.judge.config import Panel
from rollforward.sandbox.config import Limits


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


class PatternReward(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="pattern"
):
    """1 where a regular expression of Python's matches the whole answer, 0 elsewhere: a form, or a part of a composite
    reward that asks for one.
    """

    pattern: str
    """The expression, such as `[0-9]+ apples?`."""
    timeout_s: Annotated[float, msgspec.Meta(gt=0.0, le=3600.0)] = 5.0
    """Seconds for one answer; its process is ended when they are over."""

    def __post_init__(self) -> None:
        """Refuse what is no expression."""
        try:
            re.compile(self.pattern)
        except (re.error, OverflowError, RecursionError) as error:
            raise ValueError(
                f"pattern is {self.pattern!r}, which is no regular expression: {error}. Correct it"
            ) from None


class PythonReward(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="python"
):
    """A function of yours, `def score(question: str, answer: str | None, text: str) -> float`, in its own process.

    `text` is what the model said in its last turn, with `<think>` in front where the task's effort lets it reason,
    `answer` the right one, `question` the last message of the prompt. The value is 0 to 1; 1 counts as right in an
    evaluation.
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


AnswerReward = ExactReward | MathReward | PatternReward | PythonReward
"""Any verifier of what the model said. A new kind joins here and in `rewards.py`."""


class UnitTestReward(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="unit_tests"
):
    """The share of hidden tests that pass on what the completion left in its sandbox (`unit_tests.py`).

    They run in another sandbox, which has the files that the task's `submission` names and nothing else of the
    policy's. What a test compares with never enters it.
    """

    partial_credit: bool = True
    """Whether some passed tests are worth their share; false: all or nothing."""
    timeout_s: Annotated[float, msgspec.Meta(gt=0.0, le=3600.0)] = 10.0
    """Seconds of wall time for a test that names none; it has failed when they are over."""
    at_once: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 16
    """Submissions that are judged at one time."""
    limits: Limits | None = None
    """What the tests of one submission may use up, its own files not counted. null: `sandbox.container.limits`."""


class RubricReward(Panel, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="rubric"):
    """What models say of the answer by a rubric, for what no verifier can check (`rl/judge/`).

    A judgement that gives no verdict is repeated, then left out; where too few are left the answer has no score. What
    the verdicts are worth is weighted by criterion and lies between 0 and 1.
    """

    audit: AnswerReward | None = None
    """A verifier whose word is not the reward, but what verdicts are compared with in metrics and evaluations. null:
    nobody knows better than the judge."""
    max_answer_chars: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)] = 65536
    """A longer answer scores 0 without being judged."""


class LengthReward(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="length"
):
    """A punishment of long completions, 0 to -1: none up to `free_tokens`, then falling linearly to -1 at `max_tokens`
    and beyond. Of use as a part of a composite reward; it counts in evaluations too.
    """

    free_tokens: Annotated[int, msgspec.Meta(ge=0)]
    """Tokens that cost nothing, all turns together."""
    max_tokens: Annotated[int, msgspec.Meta(ge=1)]
    """Tokens that cost the whole weight."""

    def __post_init__(self) -> None:
        """Refuse a punishment without a slope."""
        if self.free_tokens >= self.max_tokens:
            raise ValueError(
                f"free_tokens is {self.free_tokens}, max_tokens {self.max_tokens}; what is free must be less. Raise"
                " max_tokens"
            )


PartReward = AnswerReward | UnitTestReward | RubricReward | LengthReward
"""What a composite reward is made of."""


class RewardPart(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One part of a composite reward."""

    name: Annotated[str, msgspec.Meta(pattern=r"^[a-z0-9][a-z0-9_-]*$")]
    """What metrics call it: `reward/NAME/mean`."""
    weight: Annotated[float, msgspec.Meta(gt=0.0, le=1e6)]
    """Its factor in the sum."""
    reward: PartReward
    """How it judges."""


class CompositeReward(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="composite"
):
    """The sum of several rewards of one answer, each times its weight. A part that has no score leaves the answer
    without one, under that part's failure.

    The weights of the parts add up to 1, punishments of length not counted, so that the sum is at most 1.
    """

    parts: Annotated[tuple[RewardPart, ...], msgspec.Meta(min_length=2)]
    """What is added."""
    correct_from: Annotated[float, msgspec.Meta(gt=0.0, le=1.0)] = 1.0
    """Sum from which an answer counts as right in an evaluation."""

    def __post_init__(self) -> None:
        """Refuse parts that metrics could not tell apart, and sums beyond 1."""
        names = [part.name for part in self.parts]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(
                    f"{names.count(name)} parts are named {name!r}; metrics are told apart by the name. Rename all but"
                    " one"
                )
        if sum(isinstance(part.reward, UnitTestReward) for part in self.parts) > 1:
            raise ValueError("two parts are of type unit_tests, but a row has one column of tests. Leave one out")
        total = math.fsum(part.weight for part in self.parts if not isinstance(part.reward, LengthReward))
        if abs(total - 1.0) > 1e-6:
            raise ValueError(
                f"the weights of the parts add up to {total:g}, punishments of length not counted; they must add up to"
                f" 1, or no answer is worth that. Divide each by {total:g}"
            )


Reward = AnswerReward | UnitTestReward | RubricReward | CompositeReward
"""Any reward of a dataset's answers."""


def reward_parts(reward: Reward) -> tuple[RewardPart, ...]:
    """The parts of a reward that is put together after its verifiers have spoken; none of one that is a verifier
    alone."""
    match reward:
        case RubricReward():
            return (RewardPart(name="rubric", weight=1.0, reward=reward),)
        case CompositeReward(parts=parts):
            return parts
        case _:
            return ()


def correct_from(reward: Reward) -> float:
    """Score from which an answer counts as right in an evaluation."""
    return reward.correct_from if isinstance(reward, RubricReward | CompositeReward) else 1.0


def unit_test_reward(reward: Reward) -> UnitTestReward | None:
    """The hidden tests that a reward is, or has as a part."""
    found = [one for one in _all(reward) if isinstance(one, UnitTestReward)]
    return found[0] if found else None


def compares_with_answer(reward: Reward) -> bool:
    """Whether a reward, one of its parts, or what audits it needs a right answer to compare with."""
    audits = [one.audit for one in _all(reward) if isinstance(one, RubricReward)]
    return any(isinstance(one, ExactReward | MathReward) for one in [*_all(reward), *audits])


def _all(reward: Reward) -> tuple[PartReward, ...]:
    return tuple(part.reward for part in reward.parts) if isinstance(reward, CompositeReward) else (reward,)
