"""Metrics of length bias, `bias/*`: whether the responses that training gets are as long as the policy writes them.

What counts as an attempt, and why, is the table in `rollout/bias.py`. Here: from a step's groups, and what the logs of
the replicas tell of them, to attempts and metrics. Not here: the estimates.
"""

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from rollforward.model.metrics import Metric
from rollforward.rl.metrics import distribution
from rollforward.rollout.bias import NOT_DELIVERED, BiasTotals, LengthBias, alarm_text, length_bias, with_step
from rollforward.rollout.interruptions import CameBack, Interruption, tokens_digest
from rollforward.rollout.replica import LogStats
from rollforward.rollout.types import FailureType, Group, Int32Array, RequestId, StopReason, Trajectory


class StepBias(msgspec.Struct, frozen=True, kw_only=True):
    """What one step adds to the evidence."""

    totals: BiasTotals
    """The run's, this step included."""
    metrics: tuple[Metric, ...]
    """Of this step; z and alarm are the run's."""
    alarm: str | None
    """What a person is told, in the step in which the alarm begins."""


def bias_of_step(groups: Sequence[Group], stats: Sequence[LogStats], before: BiasTotals, *, alarm_z: float) -> StepBias:
    """Return metrics and evidence of a step.

    Args:
        groups: all that was sampled in it.
        stats: of every replica, after the step's sampling.
        before: the run's totals before it.
        alarm_z: `rollout.bias_alarm_z`.
    """
    members = [one for group in groups for one in group.trajectories if one.failure is not FailureType.DATA]
    asked = {one.id for one in members}
    history: dict[RequestId, list[Interruption]] = {}
    for one in stats:
        for interruption in one.interruptions:
            if interruption.id in asked:
                history.setdefault(interruption.id, []).append(interruption)
    attempts = _Attempts()
    for trajectory in members:
        attempts.add(trajectory, history.get(trajectory.id, ()))
    totals = before
    metrics = [*_interrupted_metrics(history, stats, len(members)), *_dropped_metrics(attempts.dropped, len(members))]
    if attempts.lengths:
        step = length_bias(np.array(attempts.lengths), np.array(attempts.is_censored), np.array(attempts.delivered))
        totals = with_step(
            before, step, num_dropped=len(attempts.dropped), num_drawn_differently=attempts.num_drawn_differently
        )
        metrics += _length_metrics(step, len(members))
    alarm = alarm_text(totals, alarm_z)
    metrics += [
        Metric(
            name="bias/length_z",
            numerator=float(np.clip(totals.z, -_LARGEST_Z, _LARGEST_Z)),
            denominator=1.0,
            per="run",
        ),
        Metric(name="bias/alarm", numerator=float(alarm is not None), denominator=1.0, per="run"),
    ]
    is_new = alarm is not None and alarm_text(before, alarm_z) is None
    return StepBias(totals=totals, metrics=tuple(metrics), alarm=alarm if is_new else None)


_LARGEST_Z = 1e6


class _Attempts:
    """Columns of the attempts of a step."""

    def __init__(self) -> None:
        self.lengths: list[int] = []
        self.is_censored: list[bool] = []
        self.delivered: list[int] = []
        self.dropped: list[int] = []
        self.num_drawn_differently = 0

    def add(self, trajectory: Trajectory, history: Sequence[Interruption]) -> None:
        """Take a trajectory and its replaced attempts."""
        token_ids = _sampled_ids(trajectory)
        length, is_censored = len(token_ids), trajectory.is_excluded and trajectory.stop_reason is StopReason.ABORTED
        replaced = [attempt for one in history for attempt in one.replaced]
        if any(one.came_back is CameBack.GIVEN_UP for one in history):
            # The attempts share a seed, so the longest has seen what the others saw.
            length = max((attempt.num_tokens for attempt in replaced), default=0)
        else:
            different = [one.num_tokens for one in replaced if tokens_digest(token_ids[: one.num_tokens]) != one.digest]
            self.num_drawn_differently += len(different)
            for num_tokens in different:
                self._append(num_tokens, is_censored=True, delivered=NOT_DELIVERED)
        if trajectory.is_excluded:
            self.dropped.append(length)
        self._append(length, is_censored, NOT_DELIVERED if trajectory.is_excluded else length)

    def _append(self, length: int, is_censored: bool, delivered: int) -> None:
        self.lengths.append(length)
        self.is_censored.append(is_censored)
        self.delivered.append(delivered)


def _sampled_ids(trajectory: Trajectory) -> Int32Array:
    return np.concatenate([one.token_ids_T[one.trained_mask_T] for one in trajectory.segments])


def _interrupted_metrics(
    history: Mapping[RequestId, Sequence[Interruption]], stats: Sequence[LogStats], num_requests: int
) -> list[Metric]:
    """Requests that were interrupted, by how they came back, and how often each was."""
    times = [sum(one.times for one in interruptions) for interruptions in history.values()]
    counts = {way: sum(one.came_back is way for ones in history.values() for one in ones) for way in CameBack}
    # What a replica restores from saved key-values was in flight when it was opened, all of it in one step.
    num_kv = sum(
        min(
            one.resumed.kv_restored,
            sum(each.id in history and each.came_back is CameBack.RESUMED for each in one.interruptions),
        )
        for one in stats
    )
    by_way = {
        "rate": len(times),
        "log": counts[CameBack.RESUMED] - num_kv,
        "kv": num_kv,
        "begun_again": counts[CameBack.BEGUN_AGAIN],
        "given_up": counts[CameBack.GIVEN_UP],
        "answered": counts[CameBack.ANSWERED],
    }
    return [
        *(
            Metric(
                name=f"bias/interrupted/{way}", numerator=float(count), denominator=float(num_requests), per="request"
            )
            for way, count in by_way.items()
        ),
        Metric(name="bias/interruptions", numerator=float(sum(times)), denominator=float(num_requests), per="request"),
    ]


def _dropped_metrics(dropped: Sequence[int], num_requests: int) -> list[Metric]:
    """How many responses training does not get because of an infra failure, and the tokens that they had."""
    return [
        Metric(
            name="bias/dropped",
            numerator=float(len(dropped)),
            denominator=float(num_requests),
            per="request",
            reduction="sum",
        ),
        *distribution("bias/dropped_length", dropped, per="response"),
    ]


def _length_metrics(step: LengthBias, num_requests: int) -> list[Metric]:
    num_attempts, num_delivered = step.natural.num_attempts, step.num_delivered
    return [
        Metric(
            name="bias/attempts",
            numerator=float(num_attempts),
            denominator=float(num_requests),
            per="request",
            reduction="sum",
        ),
        Metric(
            name="bias/natural_length_mean",
            numerator=step.natural.mean * num_attempts,
            denominator=float(num_attempts),
            per="attempt",
        ),
        Metric(
            name="bias/delivered_length_mean",
            numerator=step.delivered_mean * num_delivered if num_delivered else 0.0,
            denominator=float(num_delivered),
            per="trajectory",
        ),
    ]
