"""Whether the lengths that training sees are the lengths that the policy writes.

    attempts (all that was begun, to where each came) --Kaplan-Meier--> natural mean length --+
                                                                                              +--> shift, z, alarm
    delivered (what training gets) ---------------------------------------> delivered mean ---+

A system that begins interrupted requests again, or drops them, delivers y with probability q(y) ~ pi(y) S(L(y)), where
S is the chance to live that long: a length penalty that nobody asked for. Here requests go on from the log, so q = pi
whatever is killed. These instruments watch that it stays so.

What an attempt is, for the estimate:

| what happened                          | length                  | counts as                                         |
|----------------------------------------|-------------------------|---------------------------------------------------|
| end of sequence                        | tokens drawn            | an end                                            |
| budget or turns used up, agent timeout | tokens drawn            | over, by rules that are the same on every machine |
| ended by the platform, or unfinished   | tokens drawn so far     | censored: it would have gone on                   |
| given up after `rollout.max_attempts`  | longest of its attempts | censored, and dropped                             |
| replaced, its tokens drawn again alike | -                       | nothing: the same draws, seen twice, are one      |
| replaced, other tokens were drawn      | tokens that it had      | censored: draws of its own, as in a restart       |
| over, but the platform could not score | tokens drawn            | over, and dropped                                 |
| the prompt was at fault (`data`)       | -                       | nothing: its whole group is without meaning       |

The natural mean is the area under the estimated survival, up to the longest attempt. Where that one is censored, what
would have followed is not counted: a bias is understated then, never invented. Truncated responses end where they were
cut, so both means are those of the length within the budget.

What can drop a response today: an infra failure alone (damage without an attempt left, a sandbox lost for good, no
score); each is counted with its length in `bias/dropped`. Nothing is dropped by age. The loop is synchronous: weights
are published when nothing is in flight, so every response has staleness 0, and the next step's prompts start when this
one's responses are over. A schedule that lets rollouts cross a publication has to pace itself at the start: admit a new
request only while (requests begun and not trained) fits the staleness allowed, and let what is begun end, for a cap on
age drops the long ones. Should a hard cap be wanted all the same, it ends its victims as `infra` failures with the
tokens they have; then they are censored attempts here, and counted in `bias/dropped` with the rest.

Here: records and pure functions, numpy alone. Not here: what of a step is counted (rl/metrics.py), what the log tells
of a request (rollout/interruptions.py).

Letters: N attempts, J distinct lengths of attempts that are over.
"""

import math

import msgspec
import numpy as np
import numpy.typing as npt

from rollforward.rollout.types import BoolArray

Float64Array = npt.NDArray[np.float64]
Int64Array = npt.NDArray[np.int64]

NOT_DELIVERED = -1
"""Stands for the length of a response that training does not get."""

_ROUNDING = 1e-9


class SurvivalCurve(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Kaplan-Meier estimate of P(length > t), a step function that is 1 before the first of `lengths_J`."""

    lengths_J: Int64Array
    """[J] int64, ascending. Lengths at which an attempt was over."""
    at_risk_J: Int64Array
    """[J] int64. Attempts that were at least that long, censored ones too."""
    over_J: Int64Array
    """[J] int64. Attempts that were over there."""
    survival_J: Float64Array
    """[J] float64. P(length > lengths_J)."""
    longest: int
    """Longest attempt, over or censored; nothing is known beyond."""


class NaturalLength(msgspec.Struct, frozen=True, kw_only=True):
    """The mean length that the policy would write if nothing were interrupted."""

    mean: float
    """Tokens, up to the horizon."""
    variance: float
    """Greenwood's variance of the mean."""
    num_attempts: int
    """Attempts that it rests on."""


class LengthBias(msgspec.Struct, frozen=True, kw_only=True):
    """How far the mean of what is delivered is from the natural one, on one set of attempts."""

    natural: NaturalLength
    """Estimate over all attempts."""
    delivered_mean: float
    """Mean tokens of what is delivered; NaN where nothing is."""
    num_delivered: int
    """Responses delivered."""
    shift: float
    """Delivered minus natural mean; 0 where nothing is delivered."""
    shift_variance: float
    """Variance of the shift. Both means come from the same attempts, so it is far below the sum of theirs: 0 where
    every attempt is delivered at its full length."""

    @property
    def z(self) -> float:
        """Shift in standard deviations."""
        return _z(self.shift, self.shift_variance)


class BiasTotals(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A run's evidence so far: the shifts of its steps, each weighted by what it delivered. By steps because the policy
    changes between them: one estimate over all would take its progress for survival."""

    num_attempts: int = 0
    """Attempts."""
    num_delivered: int = 0
    """Responses that training got."""
    num_dropped: int = 0
    """Responses that it did not get because of an infra failure."""
    num_drawn_differently: int = 0
    """Replaced attempts whose tokens the next attempt did not draw again."""
    delivered_tokens: float = 0.0
    """Sampled tokens of what was delivered."""
    shift_tokens: float = 0.0
    """Sum over steps of shift times responses delivered."""
    shift_variance: float = 0.0
    """Variance of that sum."""

    @property
    def z(self) -> float:
        """Shift over the run in standard deviations; negative where training sees too short responses."""
        return _z(self.shift_tokens, self.shift_variance)


def kaplan_meier(lengths_N: npt.NDArray[np.integer], is_censored_N: BoolArray) -> SurvivalCurve:
    """Return the survival of response lengths over all attempts.

        S(t) = product over lengths l <= t of (1 - over(l) / at_risk(l))

    Args:
        lengths_N: [N] integers >= 0, N >= 1. Sampled tokens of each attempt.
        is_censored_N: [N] bool. True where the attempt would have gone on. One that was censored at l had token l and
            did not end with it, so it is at risk at l.

    Raises:
        ValueError: shapes differ, no attempt, or a negative length.

    Source: Kaplan and Meier 1958.
    Example: lengths [3, 5, 7, 7], the 5 censored: S = 3/4 from 3 on, 0 from 7 on.
    """
    lengths_N = np.asarray(lengths_N, np.int64)
    is_censored_N = np.asarray(is_censored_N, np.bool_)
    if lengths_N.ndim != 1 or lengths_N.shape != is_censored_N.shape or not lengths_N.size or lengths_N.min() < 0:
        raise ValueError(
            f"attempts have lengths {list(lengths_N.shape)} and is_censored {list(is_censored_N.shape)}, the smallest"
            f" length {lengths_N.min(initial=0)}; give at least one attempt, one flag each, and lengths >= 0"
        )
    lengths_J, over_J = np.unique(lengths_N[~is_censored_N], return_counts=True)
    at_risk_J = lengths_N.size - np.searchsorted(np.sort(lengths_N), lengths_J, side="left")
    return SurvivalCurve(
        lengths_J=lengths_J,
        at_risk_J=at_risk_J,
        over_J=over_J,
        survival_J=np.cumprod(1 - over_J / at_risk_J, dtype=np.float64),
        longest=int(lengths_N.max()),
    )


def natural_mean(
    lengths_N: npt.NDArray[np.integer], is_censored_N: BoolArray, *, horizon_tokens: int | None = None
) -> NaturalLength:
    """Return the restricted mean of the survival and its variance.

        mean = integral of S from 0 to h;  variance = sum over j of A_j^2 over_j / (at_risk_j (at_risk_j - over_j)),
        A_j the area under S beyond lengths_j

    Args:
        lengths_N, is_censored_N: see ``kaplan_meier``.
        horizon_tokens: h; None, or more than that, for the longest attempt.

    Source: Greenwood's formula for the restricted mean.
    Example: lengths [3, 5, 7, 7], the 5 censored: 3 * 1 + 4 * 3/4 = 6, variance 3^2 * 1 / (4 * 3) = 0.75.
    """
    curve = kaplan_meier(lengths_N, is_censored_N)
    mean, area_J = _areas(curve, horizon_tokens)
    left_J = curve.at_risk_J - curve.over_J
    terms_J = np.where(left_J > 0, area_J**2 * curve.over_J / (curve.at_risk_J * np.maximum(left_J, 1)), 0.0)
    return NaturalLength(mean=mean, variance=float(terms_J.sum()), num_attempts=len(lengths_N))


def length_bias(
    lengths_N: npt.NDArray[np.integer], is_censored_N: BoolArray, delivered_N: npt.NDArray[np.integer]
) -> LengthBias:
    """Return how far the mean of what is delivered is from the natural mean over all attempts.

    The variance is that of the difference, by influence: attempt i moves the delivered mean by phi_i / N and the
    natural one by psi_i / N, so the shift has the variance sum (phi_i - psi_i)^2 / N^2. Attempts must be independent;
    members of a group and requests of one machine are so but for the prompt and the moment of its end.

    Args:
        lengths_N, is_censored_N: see ``kaplan_meier``.
        delivered_N: [N] integers. Length at which the attempt is delivered, or NOT_DELIVERED.

    Example: lengths [3, 5], the 5 censored and not delivered: natural mean 3 + 2 * 1/2 = 4, delivered mean 3, shift -1.
    """
    natural = natural_mean(lengths_N, is_censored_N)
    delivered_N = np.asarray(delivered_N, np.int64)
    if delivered_N.shape != np.shape(lengths_N):
        raise ValueError(f"{delivered_N.size} delivered lengths for {np.size(lengths_N)} attempts; give one each")
    is_delivered_N = delivered_N != NOT_DELIVERED
    num_delivered = int(is_delivered_N.sum())
    if not num_delivered:
        return LengthBias(natural=natural, delivered_mean=math.nan, num_delivered=0, shift=0.0, shift_variance=0.0)
    delivered_mean = float(delivered_N[is_delivered_N].mean())
    phi_N = np.where(is_delivered_N, delivered_N - delivered_mean, 0.0) * (natural.num_attempts / num_delivered)
    difference_N = phi_N - _influence(np.asarray(lengths_N, np.int64), np.asarray(is_censored_N, np.bool_))
    shift = delivered_mean - natural.mean
    # Where both means are one number computed in two ways, what is left is rounding.
    smallest = _ROUNDING * max(1.0, natural.mean)
    variance = float((difference_N**2).sum()) / natural.num_attempts**2
    return LengthBias(
        natural=natural,
        delivered_mean=delivered_mean,
        num_delivered=num_delivered,
        shift=shift if abs(shift) > smallest else 0.0,
        shift_variance=variance if variance > smallest**2 else 0.0,
    )


def with_step(
    totals: BiasTotals, step: LengthBias, *, num_dropped: int = 0, num_drawn_differently: int = 0
) -> BiasTotals:
    """Return a run's totals with another step's attempts."""
    delivered = step.num_delivered
    return BiasTotals(
        num_attempts=totals.num_attempts + step.natural.num_attempts,
        num_delivered=totals.num_delivered + delivered,
        num_dropped=totals.num_dropped + num_dropped,
        num_drawn_differently=totals.num_drawn_differently + num_drawn_differently,
        delivered_tokens=totals.delivered_tokens + (delivered * step.delivered_mean if delivered else 0.0),
        shift_tokens=totals.shift_tokens + delivered * step.shift,
        shift_variance=totals.shift_variance + delivered**2 * step.shift_variance,
    )


def alarm_text(totals: BiasTotals, threshold: float) -> str | None:
    """Return what a person is told where the shift is beyond the threshold, or None.

    Args:
        totals: of the run.
        threshold: standard deviations, > 0.
    """
    if abs(totals.z) <= threshold:
        return None
    shift, mean = totals.shift_tokens / totals.num_delivered, totals.delivered_tokens / totals.num_delivered
    word = "shorter" if shift < 0 else "longer"
    return (
        f"LENGTH BIAS: the {totals.num_delivered} responses that training got average {mean:.1f} tokens,"
        f" {abs(shift):.2f} {word} than the Kaplan-Meier estimate over all {totals.num_attempts} attempts, censored"
        f" ones included (z {totals.z:.1f}, alarm beyond rollout.bias_alarm_z={threshold:g})."
        f" {totals.num_dropped} responses were dropped and {totals.num_drawn_differently} attempts were drawn again to"
        " other tokens. Usual causes: infra failures that hit long responses (tool time-outs, sandboxes or nodes that"
        " do not live as long: failure/infra/rate, bias/dropped_length); requests begun again instead of resumed"
        " (bias/interrupted/begun_again, resume/begun_again, damage named at start-up); an engine that publishes before"
        " its log is durable. Look at bias/* in metrics.jsonl and at the replicas' token logs. The run goes on; what it"
        " learns about length is in doubt"
    )


def _areas(curve: SurvivalCurve, horizon_tokens: int | None) -> tuple[float, Float64Array]:
    """The area under the curve up to the horizon, and the part of it beyond each of its lengths."""
    horizon = curve.longest if horizon_tokens is None else min(horizon_tokens, curve.longest)
    starts = np.minimum(np.concatenate(([0], curve.lengths_J, [horizon])), horizon)
    parts = np.concatenate(([1.0], curve.survival_J)) * np.diff(starts)
    beyond = np.cumsum(parts[::-1])[::-1]
    return float(beyond[0]), beyond[1:]


def _influence(lengths_N: Int64Array, is_censored_N: BoolArray) -> Float64Array:
    """N times the derivative of the natural mean by each attempt's weight; [N] float64 that adds up to 0.

    Without censoring it is length minus mean.
    """
    curve = kaplan_meier(lengths_N, is_censored_N)
    if not curve.lengths_J.size:
        return np.zeros(len(lengths_N))
    _, area_J = _areas(curve, None)
    hazard_J = curve.over_J / curve.at_risk_J
    # Where all that are left end, nothing lies beyond.
    slope_J = np.where(hazard_J < 1, area_J / (np.where(hazard_J < 1, 1 - hazard_J, 1.0) * curve.at_risk_J), 0.0)
    lived_J = np.concatenate(([0.0], np.cumsum(slope_J * hazard_J)))
    influence_N = lived_J[np.searchsorted(curve.lengths_J, lengths_N, side="right")]
    over = ~is_censored_N
    influence_N[over] -= slope_J[np.searchsorted(curve.lengths_J, lengths_N[over])]
    return influence_N * len(lengths_N)


def _z(shift: float, variance: float) -> float:
    if shift == 0.0:
        return 0.0
    return math.copysign(math.inf, shift) if variance == 0.0 else shift / math.sqrt(variance)
