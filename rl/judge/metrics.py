"""Metrics of rewards that are put together, `reward/*`, and of judging, `judge/*` and `failure/judge*`, of the answers
of a step. Every one says what it counts.
"""

import statistics
from collections.abc import Sequence

from rollforward.model.metrics import Metric
from rollforward.rl.judge.types import Opinion, VerdictProblem
from rollforward.rl.tasks.types import PartScore, Score, Unscored


def reward_metrics(scores: Sequence[Score | Unscored]) -> tuple[Metric, ...]:
    """Return the mean of each part of a reward, over answers in which it has a value, and the share in which it failed,
    over all that have the part.

    `reward/NAME/mean` is before the part's weight. Parts of one name in several tasks count as one.
    """
    parts: dict[str, list[PartScore]] = {}
    for score in scores:
        for part in score.parts:
            parts.setdefault(part.name, []).append(part)
    metrics: list[Metric] = []
    for name, ones in parts.items():
        values = [one.value for one in ones if one.value is not None]
        failed = [one.failure is not None and one.failure.is_excluded for one in ones]
        metrics += [
            Metric(
                name=f"reward/{name}/mean", numerator=float(sum(values)), denominator=float(len(values)), per="answer"
            ),
            _share(f"failure/reward_{name}/rate", failed, per="answer"),
        ]
    return tuple(metrics)


def judge_metrics(scores: Sequence[Score | Unscored]) -> tuple[Metric, ...]:
    """Return what judges did in a step: how often they gave a verdict and why not, what that cost, how far verdicts of
    one answer are apart, and how near they are to the truth where it is known.

    A task that trains judging counts as well: there the policy's own answers are the judgements.
    """
    opinions = [opinion for score in scores for opinion in score.opinions]
    if not opinions:
        return ()
    problems = [one.kind for opinion in opinions for one in opinion.failures]
    num_judgements = sum(len(opinion.judgements) for opinion in opinions)
    known = [(opinion, opinion.truth) for opinion in opinions if opinion.worth and opinion.truth is not None]
    spreads = [statistics.pstdev(opinion.worth) for opinion in opinions if len(opinion.worth) > 1]
    return (
        _mean("judge/worth/mean", [value for opinion in opinions for value in opinion.worth], per="verdict"),
        _mean("judge/judgements/mean", [float(len(opinion.judgements)) for opinion in opinions], per="answer"),
        _mean("judge/retries/mean", [float(opinion.num_retries) for opinion in opinions], per="answer"),
        _mean("judge/spread/mean", spreads, per="answer"),
        _share("judge/agreement/rate", [is_agreed(opinion, truth) for opinion, truth in known], per="answer"),
        _mean("judge/brier/mean", [(mean_worth(opinion) - truth) ** 2 for opinion, truth in known], per="answer"),
        Metric(
            name="failure/judge/rate",
            numerator=float(len(problems)),
            denominator=float(num_judgements),
            per="judgement",
        ),
        *(
            Metric(
                name=f"failure/judge_{kind}/rate",
                numerator=float(problems.count(kind)),
                denominator=float(num_judgements),
                per="judgement",
            )
            for kind in VerdictProblem
        ),
        _share("failure/judge_no_opinion/rate", [not opinion.worth for opinion in opinions], per="answer"),
    )


def mean_worth(opinion: Opinion) -> float:
    """Return what the verdicts of an answer are worth in the mean; it has at least one."""
    return sum(opinion.worth) / len(opinion.worth)


def is_agreed(opinion: Opinion, truth: float) -> bool:
    """Whether the verdicts of an answer in the mean lie on the truth's side of one half; on one half they lie on
    neither."""
    mean = mean_worth(opinion)
    return mean != 0.5 and (mean > 0.5) == (truth >= 0.5)


def _mean(name: str, values: Sequence[float], *, per: str) -> Metric:
    return Metric(name=name, numerator=float(sum(values)), denominator=float(len(values)), per=per)


def _share(name: str, hits: Sequence[bool], *, per: str) -> Metric:
    return Metric(name=name, numerator=float(sum(hits)), denominator=float(len(hits)), per=per)
