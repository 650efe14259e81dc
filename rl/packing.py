"""Which trajectories share a forward pass: decided on light rows alone, before anyone touches a token.

Pure functions of a step's rows. What a plan's numbers stand for is read in `rl/samples.py`.
"""

from collections.abc import Sequence

import msgspec

from rollforward.rl.batch import TrajectoryRow
from rollforward.rl.errors import BatchError


class MicroBatchPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The trajectories of one forward and backward pass."""

    rows: tuple[int, ...]
    """Their positions among the rows of the step, at least one, in training order."""


def plan_micro_batches(rows: Sequence[TrajectoryRow], max_tokens: int) -> tuple[MicroBatchPlan, ...]:
    """Pack trajectories, in training order, into micro-batches of at most `max_tokens` tokens.

    A trajectory is never divided, all its segments included, so that what is decided per sequence (off-policy masking,
    sequence ratios) is decided within one forward pass.

    Args:
        rows: of the whole step, at least one.
        max_tokens: tokens of a micro-batch, prompts included.

    Returns:
        At least one plan; a new one begins where the next trajectory doesn't fit any more.

    Raises:
        BatchError: a trajectory alone is larger than `max_tokens`.
    """
    packs: list[list[int]] = [[]]
    used = 0
    for index, row in enumerate(rows):
        if row.num_tokens > max_tokens:
            raise BatchError(
                f"trajectory {row.id} has {row.num_tokens} tokens; a micro-batch holds {max_tokens} and a trajectory"
                " is never divided. Raise micro_batch_tokens or lower sampling.max_new_tokens"
            )
        if packs[-1] and used + row.num_tokens > max_tokens:
            packs.append([])
            used = 0
        packs[-1].append(index)
        used += row.num_tokens
    return tuple(MicroBatchPlan(rows=tuple(pack)) for pack in packs)
