"""The metric record: a number that knows its denominator, so that parts merge without means of means.

Whoever measures makes `Metric`s over its own part (a micro-batch, a rank, an update); `merge_metrics` joins parts in
any grouping and `metric_values` gives the numbers to log. What the RL metrics are is in `rl/metrics.py`.
"""

import math
from collections.abc import Iterable
from typing import Literal

import msgspec

Reduction = Literal["mean", "sum", "max", "min"]


class Metric(msgspec.Struct, frozen=True, kw_only=True):
    """One measured quantity over one part of the work.

    Example: 3 clipped of 40 tokens is Metric(name="actor/pg_clipfrac", numerator=3, denominator=40, per="token").
    """

    name: str
    """Name in the log, such as `actor/pg_loss`."""
    numerator: float
    """Sum of what is averaged (mean), the sum (sum), or the extreme so far (max, min)."""
    denominator: float
    """Number (or weight) of the `per` units that were seen; 0 means that nothing was."""
    per: str
    """Unit of the denominator, in the singular: token, trajectory, group, step, token_weight."""
    reduction: Reduction = "mean"
    """How two parts join."""

    @property
    def value(self) -> float:
        """The number to log; NaN where nothing was seen."""
        if self.denominator == 0:
            return math.nan
        return self.numerator / self.denominator if self.reduction == "mean" else self.numerator


def merge_metrics(metrics: Iterable[Metric]) -> tuple[Metric, ...]:
    """Join metrics of the same name, over micro-batches, ranks or updates.

    Sums are exact before one rounding, so neither the order of the parts nor which rank saw them changes the result.

    Returns:
        One metric a name, in the order of first appearance.

    Raises:
        ValueError: two parts of one name differ in `per` or `reduction`.
    """
    parts: dict[str, list[Metric]] = {}
    for metric in metrics:
        parts.setdefault(metric.name, []).append(metric)
    return tuple(_merge(group) for group in parts.values())


def metric_values(metrics: Iterable[Metric]) -> dict[str, float]:
    """Return name to number for what was seen at all; names whose denominator is 0 are absent, never 0 or NaN."""
    return {metric.name: metric.value for metric in merge_metrics(metrics) if metric.denominator != 0}


def _merge(parts: list[Metric]) -> Metric:
    first = parts[0]
    for part in parts[1:]:
        if (part.per, part.reduction) != (first.per, first.reduction):
            raise ValueError(
                f"metric {first.name} is {first.reduction} per {first.per} in one part and {part.reduction} per"
                f" {part.per} in another; one name has one meaning. Rename one of them"
            )
    seen = [part for part in parts if part.denominator != 0]
    numerators = [part.numerator for part in seen]
    if first.reduction in ("mean", "sum"):
        numerator = _exact_sum(numerators)
    elif any(math.isnan(value) for value in numerators):
        numerator = math.nan
    else:
        extreme = max if first.reduction == "max" else min
        numerator = extreme(numerators, default=0.0)
    denominator = _exact_sum([part.denominator for part in seen])
    return msgspec.structs.replace(first, numerator=numerator, denominator=denominator)


def _exact_sum(values: list[float]) -> float:
    """Correctly rounded sum; a plain one where a value is not finite (fsum refuses inf - inf)."""
    return math.fsum(values) if all(map(math.isfinite, values)) else sum(values)
