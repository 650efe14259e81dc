"""How good judges are, where the truth is known: agreement, calibration, consistency, and what else moves a verdict.

Pure functions of opinions; an evaluation makes them (`rl/evaluation.py`), `rollforward judge report` shows them
(`report_verb.py`). What a judge says of an answer is the mean of what its verdicts are worth, 0 to 1, taken as the
probability that the answer is good; it says `good` from above one half. Truths are 0 to 1 as well, good from one half
on. A number that cannot be computed, for want of truths, verdicts or variance, is None and never 0.
"""

import math
from collections import Counter
from collections.abc import Sequence

import msgspec

from rollforward.rl.judge.config import Rubric
from rollforward.rl.judge.metrics import is_agreed, mean_worth
from rollforward.rl.judge.types import Opinion, Verdict

NUM_BINS = 10
"""Bins of equal width in which stated and true shares are compared."""


class ReliabilityBin(msgspec.Struct, frozen=True, kw_only=True):
    """Answers of which a judge says about the same."""

    lowest: float
    """Of what it says."""
    highest: float
    """Of what it says; the last bin holds it too."""
    answers: int
    """In the bin."""
    said: float | None
    """Mean of what it says of them."""
    true: float | None
    """Mean of the truth."""


class Confusion(msgspec.Struct, frozen=True, kw_only=True):
    """Answers by truth and by what a judge says; what lies on one half is said to be bad."""

    good_said_good: int = 0
    """Rightly praised."""
    good_said_bad: int = 0
    """Wrongly refused."""
    bad_said_good: int = 0
    """Wrongly praised: what a policy would exploit."""
    bad_said_bad: int = 0
    """Rightly refused."""


class Calibration(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a judge from one evaluation."""

    part: str
    """Name of the reward's part, or of the task that trains judging."""
    answers: int
    """That were judged."""
    without_opinion: int
    """Of these, how many got no verdict at all."""
    judgements: int
    """That were asked for."""
    problems: dict[str, int]
    """Judgements that gave no verdict, by kind; kinds that did not happen are absent."""
    known: int
    """Answers with a verdict whose truth is known: what the next numbers are about."""
    agreement: float | None
    """Share of them whose verdict lies on the truth's side."""
    kappa: float | None
    """Cohen's: agreement beyond that of chance with the same shares of good answers; 0 is chance, 1 perfect."""
    confusion: Confusion
    """Them by truth and verdict."""
    said_mean: float | None
    """Mean of what the judge says."""
    true_mean: float | None
    """Mean of the truth."""
    brier: float | None
    """Mean squared distance of both; always saying the true mean has the truth's variance."""
    ece: float | None
    """Expected calibration error: distance of the two means of a bin, weighted by its answers."""
    bins: tuple[ReliabilityBin, ...]
    """What was said against what was true."""
    consistency: float | None
    """Over answers with several verdicts: share of pairs of them that lie on the same side."""
    spread: float | None
    """Over the same: mean deviation of what their verdicts are worth."""
    length_correlation: float | None
    """Of what is said with the answer's length in characters, over all answers with a verdict."""
    verbosity_bias: float | None
    """Of what is said beyond the truth with the length: above 0, longer answers are praised more than they should."""
    position_bias: float | None
    """Where there are several criteria: mean value of one that the judge reads first less that of one it reads last,
    both 0 to 1."""


def calibrate(part: str, opinions: Sequence[Opinion], rubric: Rubric) -> Calibration:
    """Return what opinions tell of the judge.

    Args:
        part: name of what was judged by.
        opinions: one for each answer.
        rubric: by which they were made.
    """
    problems = Counter(str(one.kind) for opinion in opinions for one in opinion.failures)
    with_verdict = [opinion for opinion in opinions if opinion.worth]
    known = [(opinion, opinion.truth) for opinion in with_verdict if opinion.truth is not None]
    said = [mean_worth(opinion) for opinion, _ in known]
    true = [truth for _, truth in known]
    confusion = _confusion(said, true)
    bins = _bins(said, true)
    lengths = [float(opinion.answer_chars) for opinion in with_verdict]
    excess = [stated - truth for stated, truth in zip(said, true, strict=True)]
    several = [opinion for opinion in with_verdict if len(opinion.worth) > 1]
    return Calibration(
        part=part,
        answers=len(opinions),
        without_opinion=len(opinions) - len(with_verdict),
        judgements=sum(len(opinion.judgements) for opinion in opinions),
        problems=dict(sorted(problems.items())),
        known=len(known),
        agreement=_mean([float(is_agreed(opinion, truth)) for opinion, truth in known]),
        kappa=_kappa(confusion),
        confusion=confusion,
        said_mean=_mean(said),
        true_mean=_mean(true),
        brier=_mean([value**2 for value in excess]),
        ece=_mean_gap(bins),
        bins=bins,
        consistency=_mean([_same_side(opinion.worth) for opinion in several]),
        spread=_mean([_deviation(opinion.worth) for opinion in several]),
        length_correlation=correlation(lengths, [mean_worth(opinion) for opinion in with_verdict]),
        verbosity_bias=correlation([float(opinion.answer_chars) for opinion, _ in known], excess),
        position_bias=_position_bias(opinions, rubric),
    )


def correlation(left: Sequence[float], right: Sequence[float]) -> float | None:
    """Return Pearson's correlation of two columns; None where one of them does not vary."""
    if len(left) < 2:
        return None
    mean_left, mean_right = math.fsum(left) / len(left), math.fsum(right) / len(right)
    pairs = [(one - mean_left, other - mean_right) for one, other in zip(left, right, strict=True)]
    squares = math.fsum(one * one for one, _ in pairs) * math.fsum(other * other for _, other in pairs)
    if not squares > 0.0:
        return None
    return max(-1.0, min(1.0, math.fsum(one * other for one, other in pairs) / math.sqrt(squares)))


def _confusion(said: Sequence[float], true: Sequence[float]) -> Confusion:
    counts = Counter((truth >= 0.5, stated > 0.5) for stated, truth in zip(said, true, strict=True))
    return Confusion(
        good_said_good=counts[True, True],
        good_said_bad=counts[True, False],
        bad_said_good=counts[False, True],
        bad_said_bad=counts[False, False],
    )


def _kappa(confusion: Confusion) -> float | None:
    total = sum(msgspec.structs.astuple(confusion))
    if total == 0:
        return None
    good, said_good = (
        confusion.good_said_good + confusion.good_said_bad,
        confusion.good_said_good + confusion.bad_said_good,
    )
    by_chance = (good * said_good + (total - good) * (total - said_good)) / total**2
    if by_chance >= 1.0:
        return None  # all answers are of one kind, and all are said to be
    return ((confusion.good_said_good + confusion.bad_said_bad) / total - by_chance) / (1.0 - by_chance)


def _bins(said: Sequence[float], true: Sequence[float]) -> tuple[ReliabilityBin, ...]:
    by_bin: dict[int, list[tuple[float, float]]] = {}
    for stated, truth in zip(said, true, strict=True):
        by_bin.setdefault(min(int(stated * NUM_BINS), NUM_BINS - 1), []).append((stated, truth))
    return tuple(
        ReliabilityBin(
            lowest=index / NUM_BINS,
            highest=(index + 1) / NUM_BINS,
            answers=len(by_bin.get(index, ())),
            said=_mean([stated for stated, _ in by_bin.get(index, ())]),
            true=_mean([truth for _, truth in by_bin.get(index, ())]),
        )
        for index in range(NUM_BINS)
    )


def _mean_gap(bins: Sequence[ReliabilityBin]) -> float | None:
    total = sum(one.answers for one in bins)
    gaps = [one.answers * abs(one.said - one.true) for one in bins if one.said is not None and one.true is not None]
    return math.fsum(gaps) / total if total else None


def _same_side(worth: Sequence[float]) -> float:
    """Share of pairs of verdicts on the same side of one half."""
    good, total = sum(value > 0.5 for value in worth), len(worth)
    bad = total - good
    return (good * (good - 1) + bad * (bad - 1)) / (total * (total - 1))


def _deviation(worth: Sequence[float]) -> float:
    mean = math.fsum(worth) / len(worth)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in worth) / len(worth))


def _position_bias(opinions: Sequence[Opinion], rubric: Rubric) -> float | None:
    """Differences are taken within a criterion, so that a hard one that chance put last more often says nothing."""
    if len(rubric.criteria) < 2:
        return None
    gaps: list[float] = []
    for index, criterion in enumerate(rubric.criteria):
        lowest, highest = criterion.scale.bounds
        by_place: dict[int, list[float]] = {}
        for judgement in (one for opinion in opinions for one in opinion.judgements):
            if isinstance(judgement.said, Verdict):
                value = (judgement.said.values[index] - lowest) / (highest - lowest)
                by_place.setdefault(judgement.order.index(index), []).append(value)
        first, last = _mean(by_place.get(0, ())), _mean(by_place.get(len(rubric.criteria) - 1, ()))
        if first is not None and last is not None:
            gaps.append(first - last)
    return _mean(gaps)


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None
