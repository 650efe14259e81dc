"""Merging of metrics: means by denominators, extremes, absent parts."""

import math
import random

import pytest

from rollforward.model.metrics import Metric, merge_metrics, metric_values


def _metric(numerator: float, denominator: float, reduction: str = "mean", **changes: str) -> Metric:
    fields = {"name": "a/b", "per": "token", **changes}
    return Metric(numerator=numerator, denominator=denominator, reduction=reduction, **fields)  # type: ignore[arg-type]


def test_a_mean_is_over_all_units_and_not_a_mean_of_means() -> None:
    """3 of 4 and 1 of 100: 4/104, where the mean of means would be 0.38."""
    assert metric_values([_metric(3, 4), _metric(1, 100)]) == {"a/b": 4 / 104}


@pytest.mark.parametrize(("reduction", "expected"), [("sum", -1.0), ("max", 2.0), ("min", -4.0)])
def test_other_reductions(reduction: str, expected: float) -> None:
    parts = [_metric(2.0, 1, reduction), _metric(-4.0, 1, reduction), _metric(1.0, 1, reduction)]
    assert metric_values(parts) == {"a/b": expected}


@pytest.mark.parametrize("reduction", ["max", "min"])
def test_extremes_ignore_parts_that_saw_nothing_and_keep_nan(reduction: str) -> None:
    assert metric_values([_metric(0.0, 0, reduction), _metric(5.0, 1, reduction)]) == {"a/b": 5.0}
    assert metric_values([_metric(-5.0, 1, reduction), _metric(0.0, 0, reduction)]) == {"a/b": -5.0}
    for parts in (
        [_metric(math.nan, 1, reduction), _metric(5.0, 1, reduction)],
        [_metric(5.0, 1, reduction), _metric(math.nan, 1, reduction)],
    ):
        assert math.isnan(metric_values(parts)["a/b"])


def test_what_nobody_saw_is_absent() -> None:
    assert metric_values([_metric(0.0, 0)]) == {}
    assert math.isnan(_metric(0.0, 0).value)


def test_merging_in_any_order_and_grouping_gives_the_same_bits() -> None:
    generator = random.Random(0)
    parts = [_metric(generator.uniform(-1, 1) * 10 ** generator.randint(-8, 8), generator.random()) for _ in range(200)]
    whole = merge_metrics(parts)
    generator.shuffle(parts)
    assert merge_metrics(parts) == whole


def test_infinities_of_both_signs_merge_to_nan() -> None:
    assert math.isnan(metric_values([_metric(math.inf, 1), _metric(-math.inf, 1)])["a/b"])


def test_names_keep_the_order_of_first_appearance() -> None:
    parts = [_metric(1, 1, name="z"), _metric(1, 1, name="a"), _metric(1, 1, name="z")]
    assert list(metric_values(parts)) == ["z", "a"]


@pytest.mark.parametrize("changes", [{"per": "trajectory"}, {"reduction": "sum"}])
def test_one_name_with_two_meanings_is_refused(changes: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="one name has one meaning"):
        merge_metrics([_metric(1, 1), _metric(1, 1, **changes)])
