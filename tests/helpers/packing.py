"""Micro-batches of a step in memory: what a learner reads from the files of `rl/samples.py`, without files."""

from collections.abc import Sequence

from rollforward.rl.batch import PackedBatch, StepBatch, concatenate
from rollforward.rl.packing import MicroBatchPlan, plan_micro_batches


def gather(batch: StepBatch, plans: Sequence[MicroBatchPlan]) -> tuple[PackedBatch, ...]:
    """The micro-batches of some plans."""
    return tuple(concatenate([batch.trajectories[row] for row in plan.rows]) for plan in plans)


def micro_batches(batch: StepBatch, max_tokens: int) -> tuple[PackedBatch, ...]:
    """All micro-batches of a step."""
    return gather(batch, plan_micro_batches(batch.rows, max_tokens))
