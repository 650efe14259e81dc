"""Group advantages: by hand, exactly zero for equal rewards, exclusions. Does not prove which failures are excluded."""

import math
import statistics

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollforward.rl.advantage import group_advantages
from rollforward.rl.errors import BatchError

finite = st.floats(-1e6, 1e6, allow_nan=False)


def _advantages(
    rewards: list[float], included: list[bool] | None = None, *, divide_by_std: bool = False
) -> npt.NDArray[np.float64]:
    mask_G = np.array([True] * len(rewards) if included is None else included)
    return group_advantages(np.array(rewards, dtype=np.float64), mask_G, divide_by_std=divide_by_std)


def test_worked_by_hand() -> None:
    """Mean of 1, 0, 0, 2 is 3/4."""
    assert _advantages([1.0, 0.0, 0.0, 2.0]).tolist() == [0.25, -0.75, -0.75, 1.25]


def test_division_by_std_worked_by_hand() -> None:
    """1, 0, 0, 1: mean 1/2, squares sum to 1, n - 1 = 3, so std = sqrt(1/3) = 0.57735."""
    expected = 0.5 / (math.sqrt(1 / 3) + 1e-6)
    assert _advantages([1.0, 0.0, 0.0, 1.0], divide_by_std=True).tolist() == [expected, -expected, -expected, expected]


@given(reward=finite, size=st.integers(2, 33), divide_by_std=st.booleans())
def test_equal_rewards_give_exactly_zero(reward: float, size: int, divide_by_std: bool) -> None:
    """0.1 three times is the classic: its rounded sum divided by 3 is not 0.1."""
    assert _advantages([reward] * size, divide_by_std=divide_by_std).tolist() == [0.0] * size


@given(rewards=st.lists(finite, min_size=2, max_size=16), data=st.data())
def test_order_of_members_changes_no_bit(rewards: list[float], data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(len(rewards))))
    shuffled = _advantages([rewards[i] for i in order])
    assert shuffled.tolist() == _advantages(rewards)[list(order)].tolist()


@given(rewards=st.lists(finite, min_size=2, max_size=16))
def test_agrees_with_the_plain_formula(rewards: list[float]) -> None:
    scale = max(1.0, *(abs(reward) for reward in rewards))
    plain = np.array(rewards) - np.mean(rewards)
    assert np.allclose(_advantages(rewards), plain, rtol=0, atol=1e-12 * scale)
    std = statistics.stdev(rewards)
    assert np.allclose(_advantages(rewards, divide_by_std=True) * (std + 1e-6), plain, rtol=1e-9, atol=1e-9 * scale)


def test_excluded_members_are_not_in_the_mean_and_get_zero() -> None:
    """1 and 0 remain, mean 1/2; the NaN of a lost member reaches nobody."""
    assert _advantages([1.0, math.nan, 0.0, 100.0], [True, False, True, False]).tolist() == [0.5, 0.0, -0.5, 0.0]


def test_zero_is_a_score() -> None:
    """Were 0.0 "missing", the mean would be 1 and the advantages 0."""
    assert _advantages([1.0, 0.0]).tolist() == [0.5, -0.5]


def test_a_single_included_member_has_no_baseline_and_gets_zero() -> None:
    assert _advantages([3.0, 1.0], [True, False]).tolist() == [0.0, 0.0]
    assert _advantages([3.0, 1.0], [False, False]).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("rewards", [[], [1.0]])
def test_a_group_of_one_is_refused(rewards: list[float]) -> None:
    with pytest.raises(BatchError, match="at least 2"):
        _advantages(rewards)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_reward_that_counts_must_be_finite(bad: float) -> None:
    with pytest.raises(BatchError, match="finite"):
        _advantages([1.0, bad])


def test_lengths_must_agree() -> None:
    with pytest.raises(BatchError, match="both must be"):
        _advantages([1.0, 0.0], [True])
