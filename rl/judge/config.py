"""Schema of judging by rubric: what is judged, on which scales, by whom, and how several judgements become one number.

What a reward does with it is in `rl/tasks/reward_config.py`; the task that trains judging is in `rl/tasks/config.py`.
"""

from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec

from rollforward.model.messages import ReasoningEffort
from rollforward.model.train_config import Precision

KEY_NAME: Final = "key"
"""Name of a verdict's entry that repeats the key of its question; no criterion has it."""


class PassFail(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="pass_fail"
):
    """Met or not: `"pass"` or `"fail"`. Worth 1 or 0."""

    @property
    def bounds(self) -> tuple[float, float]:
        """Lowest and highest value."""
        return 0.0, 1.0


class Points(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="points"):
    """A whole number; worth 0 at the lowest, 1 at the highest, in between in proportion."""

    lowest: Annotated[int, msgspec.Meta(ge=-1_000_000, le=1_000_000)] = 1
    """Worst value."""
    highest: Annotated[int, msgspec.Meta(ge=-1_000_000, le=1_000_000)] = 5
    """Best value."""

    def __post_init__(self) -> None:
        """Refuse a scale without two values."""
        if self.lowest >= self.highest:
            raise ValueError(
                f"points go from {self.lowest} to {self.highest}; the highest must be above the lowest. Exchange them"
            )

    @property
    def bounds(self) -> tuple[float, float]:
        """Lowest and highest value."""
        return float(self.lowest), float(self.highest)


class Probability(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="probability"
):
    """How likely it is that the criterion is met, a number from 0 to 1, which it is worth."""

    @property
    def bounds(self) -> tuple[float, float]:
        """Lowest and highest value."""
        return 0.0, 1.0


Scale = PassFail | Points | Probability
"""What a judge may say of one criterion, told apart by `type`."""


class Criterion(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One thing that a judge looks at."""

    name: Annotated[str, msgspec.Meta(pattern=r"^[a-z][a-z0-9_]{0,63}$")]
    """What the verdict calls it."""
    text: Annotated[str, msgspec.Meta(min_length=1)]
    """What it demands, in words for the judge."""
    scale: Scale = PassFail()
    """What may be said of it."""
    weight: Annotated[float, msgspec.Meta(gt=0.0, le=1e6)] = 1.0
    """Its share in the score, relative to the others'."""


class Rubric(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What answers are judged by."""

    criteria: Annotated[tuple[Criterion, ...], msgspec.Meta(min_length=1)]
    """Looked at one by one; a verdict has an entry for each."""
    preamble: str = ""
    """What the judge must know besides, before the criteria."""

    def __post_init__(self) -> None:
        """Refuse names that a verdict could not tell apart."""
        names = [criterion.name for criterion in self.criteria]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(
                    f"{names.count(name)} criteria are named {name!r}; a verdict has one entry each. Rename all but one"
                )
        if KEY_NAME in names:
            raise ValueError(f"a criterion is named {KEY_NAME!r}, which is the entry of a verdict's key. Rename it")

    @property
    def is_pass_fail(self) -> bool:
        """Whether every criterion is met or not."""
        return all(isinstance(criterion.scale, PassFail) for criterion in self.criteria)


class ActorJudge(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="actor"):
    """The policy judges its own answers: the engines' current weights."""


class ModelJudge(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="model"):
    """A model directory whose weights stay as they are, served by engines of its own."""

    model_dir: str
    """The model in the official layout, with its tokenizer."""
    engines: Annotated[int, msgspec.Meta(ge=1)] = 1
    """Engine replicas; no number changes a verdict. `eval` and `sft` have one."""
    precision: Precision = "native"
    """Number formats of its forward pass."""


Judge = ActorJudge | ModelJudge
"""Who judges, told apart by `type`."""


def located(judge: Judge) -> Judge:
    """Return the judge with its directory spelled in the one way, so that however a task spells it, it is one judge."""
    if isinstance(judge, ActorJudge):
        return judge
    return msgspec.structs.replace(judge, model_dir=str(Path(judge.model_dir).resolve()))


class Panel(Rubric, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A rubric, who judges by it, and how often."""

    judge: Judge = ActorJudge()
    """Who judges."""
    judgements: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 3
    """Judgements of each answer, every one drawn by a seed of its own."""
    retries: Annotated[int, msgspec.Meta(ge=0, le=1024)] = 2
    """Further judgements that an answer may have in place of those that give no verdict."""
    min_valid: Annotated[int, msgspec.Meta(ge=1)] = 1
    """Verdicts without which an answer has no score; it then counts as a failure of the platform."""
    aggregate: Literal["mean", "majority"] = "mean"
    """How verdicts become one: the mean of what they are worth, or, where every criterion is pass or fail, a criterion
    is met where more than half of them say so."""
    effort: ReasoningEffort = "non-think"
    """How long the judge may reason before its verdict."""
    max_verdict_tokens: Annotated[int, msgspec.Meta(ge=1)] = 256
    """Tokens that a judgement may have, its reasoning included; one that is cut gives no verdict."""
    temperature: Annotated[float, msgspec.Meta(ge=0.0)] = 1.0
    """How judgements are drawn; at 0 all judgements of an answer are nearly the same."""
    correct_from: Annotated[float, msgspec.Meta(gt=0.0, le=1.0)] = 1.0
    """Score from which an answer counts as right in an evaluation."""

    def __post_init__(self) -> None:
        """Refuse what no judgements could fulfil."""
        super().__post_init__()
        if self.min_valid > self.judgements:
            raise ValueError(
                f"min_valid is {self.min_valid}, but an answer has {self.judgements} judgements. Set min_valid to that"
                " or less, or judgements higher"
            )
        if self.aggregate == "majority" and not self.is_pass_fail:
            raise ValueError(
                "aggregate is majority, but not every criterion is pass or fail, and there is no majority of numbers."
                " Set aggregate=mean"
            )
