"""Length bias: survival, natural mean and its variance by hand and against what they are estimates of; the claims about
restarts in closed form; evidence over steps. Whether a real log shows it is in faults/test_length_law.py."""

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from rollforward.rollout.bias import (
    NOT_DELIVERED,
    BiasTotals,
    LengthBias,
    alarm_text,
    kaplan_meier,
    length_bias,
    natural_mean,
    with_step,
)
from tests.helpers.hazard import hazard_by_position

from_here = 0
BY_HAND = np.array([3, 5, 7, 7]), np.array([False, True, False, False])


def _restart_law(pi_L: npt.NDArray[Any], survive_L: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Delivered law where an interrupted request is drawn anew until one is through, over lengths."""
    weight_L = pi_L * survive_L
    return weight_L / weight_L.sum()


def test_survival_by_hand() -> None:
    curve = kaplan_meier(*BY_HAND)
    assert curve.lengths_J.tolist() == [3, 7]
    assert curve.at_risk_J.tolist() == [4, 2]
    assert curve.over_J.tolist() == [1, 2]
    assert curve.survival_J.tolist() == [0.75, 0.0]


@pytest.mark.parametrize(
    ("horizon", "mean", "variance"), [(None, 6.0, 0.75), (5, 4.5, 2**2 * 0.75**2 / 12), (2, 2.0, 0)]
)
def test_natural_mean_by_hand(horizon: int | None, mean: float, variance: float) -> None:
    """3 * 1 + 4 * 3/4; beyond the 3 lies an area of 3 (1.5 up to 5)."""
    found = natural_mean(*BY_HAND, horizon_tokens=horizon)
    assert (found.mean, found.variance, found.num_attempts) == (mean, variance, 4)


def test_an_attempt_censored_where_another_ends_is_at_risk_there() -> None:
    assert kaplan_meier(np.array([4, 4]), np.array([True, False])).at_risk_J.tolist() == [2]


def test_without_censoring_the_estimate_is_the_mean_and_nothing_is_uncertain() -> None:
    lengths_N = np.random.default_rng(1).integers(0, 3000, 500)
    whole = np.zeros(500, np.bool_)
    found = length_bias(lengths_N, whole, lengths_N)
    assert found.natural.mean == pytest.approx(lengths_N.mean(), rel=1e-12)
    assert found.natural.variance == pytest.approx(lengths_N.var() / 500, rel=1e-12)
    assert (found.shift, found.shift_variance, found.z) == (0.0, 0.0, 0.0)


def test_nothing_known_and_nothing_delivered() -> None:
    found = length_bias(np.array([5, 0]), np.array([True, True]), np.full(2, NOT_DELIVERED))
    assert (found.natural.mean, found.num_delivered, found.shift, found.z) == (5.0, 0, 0.0, 0.0)
    assert math.isnan(found.delivered_mean)


def test_a_shift_that_cannot_be_chance() -> None:
    """Every response arrives without its last token."""
    lengths_N = np.array([4, 6, 8])
    found = length_bias(lengths_N, np.zeros(3, np.bool_), lengths_N - 1)
    assert (found.shift, found.shift_variance, found.z) == (-1.0, 0.0, -math.inf)


@pytest.mark.parametrize(("lengths", "is_censored"), [([], []), ([1, 2], [True]), ([-1], [False]), ([[1]], [[False]])])
def test_attempts_without_meaning_are_refused(lengths: list[int], is_censored: list[bool]) -> None:
    with pytest.raises(ValueError, match="at least one attempt"):
        kaplan_meier(np.array(lengths, np.int64), np.array(is_censored, np.bool_))


def test_delivered_lengths_belong_to_attempts() -> None:
    with pytest.raises(ValueError, match="1 delivered lengths for 4 attempts"):
        length_bias(*BY_HAND, np.array([3]))


def test_greenwood_is_the_variance_by_influence() -> None:
    """Both are derivatives of one functional: with nothing delivered but one attempt of length 0 the shift is minus the
    natural mean plus a constant."""
    generator = np.random.default_rng(2)
    lengths_N, is_censored_N = generator.integers(1, 60, 300), generator.random(300) < 0.4
    delivered_N = np.full(300, NOT_DELIVERED)
    delivered_N[0] = 0
    found = length_bias(lengths_N, is_censored_N, delivered_N)
    assert found.shift_variance == pytest.approx(found.natural.variance, rel=1e-9)


def test_the_estimate_finds_what_was_hidden() -> None:
    """The natural mean of a law whose draws are cut at random, and z of the estimate over 300 repetitions."""
    generator = np.random.default_rng(3)
    z = np.empty(300)
    for one in range(len(z)):
        lengths_N = generator.geometric(0.01, 400)
        ends_N = generator.geometric(0.005, 400)
        found = natural_mean(np.minimum(lengths_N, ends_N), ends_N < lengths_N)
        z[one] = (found.mean - 100) / math.sqrt(found.variance)
    assert abs(z.mean()) < 0.25
    assert 0.85 < z.std() < 1.15


def test_z_is_standard_where_responses_are_lost_whatever_their_length() -> None:
    generator = np.random.default_rng(4)
    z = np.empty(300)
    for one in range(len(z)):
        lengths_N = np.ceil(generator.lognormal(5, 1, 300)).astype(np.int64)
        delivered_N = np.where(generator.random(300) < 0.3, NOT_DELIVERED, lengths_N)
        z[one] = length_bias(lengths_N, np.zeros(300, np.bool_), delivered_N).z
    assert abs(z.mean()) < 0.2
    assert 0.85 < z.std() < 1.15
    assert np.abs(z).max() < 4


def test_restart_and_discard_are_one_law_by_enumeration() -> None:
    """pi = (1/2, 1/4, 1/4) on lengths 1, 2, 3; each token survives with probability 1/2, so S = (1/2, 1/4, 1/8) and Z =
    11/32. Attempts: the first is through with pi S, else the whole begins again."""
    pi_L, survive_L = np.array([0.5, 0.25, 0.25]), 0.5 ** np.array([1.0, 2.0, 3.0])
    law_L = _restart_law(pi_L, survive_L)
    assert law_L.tolist() == [8 / 11, 2 / 11, 1 / 11]
    through_L, fails = pi_L * survive_L, 1 - float(pi_L @ survive_L)
    by_attempts_L = sum(through_L * fails**attempt for attempt in range(200))
    assert law_L == pytest.approx(by_attempts_L, rel=1e-12)


def test_restart_shortens_by_a_covariance() -> None:
    generator = np.random.default_rng(5)
    lengths_L = np.arange(1, 40)
    for _ in range(50):
        pi_L = generator.dirichlet(np.ones(39))
        survive_L = np.cumprod(generator.uniform(0.5, 1, 39))
        law_L = _restart_law(pi_L, survive_L)
        mean, z = pi_L @ lengths_L, pi_L @ survive_L
        covariance = pi_L @ (lengths_L * survive_L) - mean * z
        assert law_L @ lengths_L == pytest.approx(mean + covariance / z)
        assert covariance < 0


def test_restart_is_a_length_penalty() -> None:
    """At a constant rate of interruptions its law maximises -rate * E[length] - KL(law || pi)."""
    generator = np.random.default_rng(6)
    lengths_L, rate = np.arange(1, 30), 0.07
    pi_L = generator.dirichlet(np.ones(29))

    def objective(law_L: npt.NDArray[Any]) -> float:
        return float(-rate * (law_L @ lengths_L) - law_L @ np.log(law_L / pi_L))

    best_L = _restart_law(pi_L, np.exp(-rate * lengths_L))
    assert objective(best_L) == pytest.approx(math.log(pi_L @ np.exp(-rate * lengths_L)))
    for _ in range(200):
        other_L = best_L * np.exp(generator.normal(0, 0.1, 29))
        assert objective(other_L / other_L.sum()) < objective(best_L)


@pytest.mark.parametrize(("interval", "mean", "shift"), [(50_000, 4309, -0.107), (20_000, 3758, -0.220)])
def test_censored_attempts_tell_the_natural_mean_of_a_restarting_fleet(
    interval: int, mean: float, shift: float
) -> None:
    """Lognormal lengths (median 3,000, cut at 32,768, mean 4,819): what is delivered has the mean of the restart law,
    what all attempts tell is the mean of the policy."""
    generator = np.random.default_rng(7)
    lengths_N = np.minimum(np.ceil(generator.lognormal(math.log(3000), 1, 300_000)), 32_768).astype(np.int64)
    ends_N = np.ceil(generator.exponential(interval, len(lengths_N))).astype(np.int64)
    is_censored_N = ends_N < lengths_N
    seen_N = np.minimum(lengths_N, ends_N)
    found = length_bias(seen_N, is_censored_N, np.where(is_censored_N, NOT_DELIVERED, seen_N))
    assert found.delivered_mean == pytest.approx(mean, rel=0.01)
    assert found.natural.mean == pytest.approx(4819, rel=0.01)
    assert found.shift / found.natural.mean == pytest.approx(shift, abs=0.006)
    assert found.z < -20


def test_hazard_by_hand() -> None:
    ends_K, drawn_K = hazard_by_position(
        np.array([2, 3, 5, 0]), np.array([True, False, True, False]), np.array([0, 2, 4, 8])
    )
    assert ends_K.tolist() == [1, 0, 1]
    assert drawn_K.tolist() == [6, 3, 1]
    ends_K, drawn_K = hazard_by_position(np.array([9]), np.array([True]), np.array([0, 8]))
    assert (ends_K.tolist(), drawn_K.tolist()) == ([0], [8])


def _step(shift: float, variance: float, delivered: int) -> LengthBias:
    return LengthBias(
        natural=natural_mean(np.full(delivered, 10), np.zeros(delivered, np.bool_)),
        delivered_mean=10.0 + shift,
        num_delivered=delivered,
        shift=shift,
        shift_variance=variance,
    )


def test_evidence_adds_up_over_steps() -> None:
    """(4 * -1 + 12 * -2) / sqrt(16 * 0.25 + 144 * 0.5) = -28 / sqrt(76)."""
    totals = with_step(BiasTotals(), _step(-1.0, 0.25, 4), num_dropped=1)
    totals = with_step(totals, _step(-2.0, 0.5, 12), num_drawn_differently=3)
    assert totals.z == pytest.approx(-28 / math.sqrt(76))
    assert (totals.num_attempts, totals.num_delivered, totals.num_dropped, totals.num_drawn_differently) == (
        16,
        16,
        1,
        3,
    )
    assert totals.delivered_tokens == 4 * 9 + 12 * 8


def test_a_step_without_evidence_changes_nothing() -> None:
    nothing = length_bias(np.array([0]), np.array([True]), np.array([NOT_DELIVERED]))
    assert with_step(BiasTotals(), nothing).z == 0.0


def test_the_alarm_names_numbers_causes_and_places() -> None:
    totals = with_step(BiasTotals(), _step(-2.0, 0.16, 100), num_dropped=9)
    assert alarm_text(totals, 5.0) is None
    text = alarm_text(totals, 4.9)
    assert text is not None
    for part in ("100 responses", "8.0 tokens", "2.00 shorter", "z -5.0", "rollout.bias_alarm_z=4.9", "9 responses"):
        assert part in text
    longer = alarm_text(with_step(BiasTotals(), _step(2.0, 0.16, 100)), 4.9)
    assert longer is not None
    assert "2.00 longer" in longer
