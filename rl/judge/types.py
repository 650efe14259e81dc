"""Records of judging: what one judgement said or why it said nothing, and all judgements of an answer together."""

from enum import StrEnum

import msgspec


class VerdictProblem(StrEnum):
    """Why a judgement gives no verdict."""

    LOST = "lost"
    """The platform failed while it was drawn."""
    CUT_SHORT = "cut_short"
    """Its tokens were used up before its end."""
    UNCLOSED_THINKING = "unclosed_thinking"
    """Its reasoning never ended."""
    CONTROL_TOKEN = "control_token"
    """A control token or a call of a tool stands in it."""
    NO_OBJECT = "no_object"
    """No complete JSON object stands in it."""
    NO_KEY = "no_key"
    """No complete object in it has the key of its question."""
    UNKNOWN_CRITERION = "unknown_criterion"
    """Its object has an entry that the rubric does not know."""
    MISSING_CRITERION = "missing_criterion"
    """Its object lacks an entry of the rubric."""
    NOT_A_VALUE = "not_a_value"
    """An entry is not what its scale is made of: a text, null, NaN, half a point."""
    OUT_OF_SCALE = "out_of_scale"
    """An entry is a number beyond its scale."""
    CONTRADICTION = "contradiction"
    """An entry stands twice with two values."""


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What a judge says of one answer."""

    values: tuple[float, ...]
    """By criterion, in the rubric's order and on its scales; pass is 1, fail 0."""


class VerdictFailure(msgspec.Struct, frozen=True, kw_only=True):
    """That a judgement gives no verdict."""

    kind: VerdictProblem
    """Why."""
    detail: str = ""
    """What was wrong, for a person."""


class Judgement(msgspec.Struct, frozen=True, kw_only=True):
    """One judgement of one answer."""

    number: int
    """Which of the answer's judgements, as in its request's identity; 0 where the answer itself is the judgement."""
    order: tuple[int, ...]
    """Criteria in the order in which the judge read them."""
    said: Verdict | VerdictFailure
    """What came of it."""


class Opinion(msgspec.Struct, frozen=True, kw_only=True):
    """All that was judged of one answer by one rubric."""

    part: str
    """Name of the reward's part, or of the task that trains judging."""
    judgements: tuple[Judgement, ...]
    """In their order; those that gave no verdict too."""
    worth: tuple[float, ...]
    """What each verdict is worth, 0 to 1, in the order of the judgements that gave one."""
    answer_chars: int
    """Length of the judged answer."""
    truth: float | None = None
    """What a perfect judge's verdict would be worth, 0 to 1; None where nobody knows."""
    num_retries: int = 0
    """Judgements that were asked for in place of failed ones."""

    @property
    def verdicts(self) -> tuple[Verdict, ...]:
        """Those that were given."""
        return tuple(one.said for one in self.judgements if isinstance(one.said, Verdict))

    @property
    def failures(self) -> tuple[VerdictFailure, ...]:
        """Why the others were not."""
        return tuple(one.said for one in self.judgements if isinstance(one.said, VerdictFailure))
