"""Advantages of a group against its own mean. Pure functions of rewards; which members count is decided in
`rl/batch.py`.

Letters: G members of a group.
"""

import math
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from rollforward.rl.errors import BatchError
from rollforward.rollout.types import BoolArray

STD_EPSILON = 1e-6
"""Added to the standard deviation before dividing by it."""


def group_advantages(
    rewards_G: npt.NDArray[np.float64], included_mask_G: BoolArray, *, divide_by_std: bool = False
) -> npt.NDArray[np.float64]:
    """Return each member's reward minus the mean of the included ones.

    A_i = R_i - mean_j R_j, evaluated exactly and rounded once, so that equal rewards give exactly 0.0 and the order of
    members does not matter. With `divide_by_std`: A_i / (std + 1e-6), std with n - 1 in the denominator.

    Args:
        rewards_G: [G] float64, G >= 2. Excluded members may hold anything, NaN too. 0.0 is a reward.
        included_mask_G: [G] bool. True where the member counts; excluded ones are not in the mean.
        divide_by_std: False is DeepSeek-V3.2's form, True the original GRPO's.

    Returns:
        [G] float64. 0.0 for excluded members and for a single included one.

    Raises:
        BatchError: a group of one, lengths that differ, or a reward that counts and is not finite.

    Source: DeepSeek-V3.2 (no division), DeepSeekMath (division).
    Example: rewards [1, 0, 0, 1] give [0.5, -0.5, -0.5, 0.5].
    """
    if rewards_G.shape != included_mask_G.shape or rewards_G.ndim != 1:
        raise BatchError(f"rewards_G is {rewards_G.shape}, included_mask_G {included_mask_G.shape}; both must be [G]")
    if rewards_G.size < 2:
        raise BatchError(
            f"the group has {rewards_G.size} member; a group baseline needs at least 2. Set algo.group_size"
        )
    rewards = [float(reward) for reward in rewards_G[included_mask_G]]
    if not all(map(math.isfinite, rewards)):
        raise BatchError(
            f"rewards are {rewards}; each must be finite. Return a number from the verifier or a failure type"
        )
    advantages_G = np.zeros(rewards_G.shape, dtype=np.float64)
    if len(rewards) < 2:
        return advantages_G
    exact = [Fraction(reward) for reward in rewards]
    mean = sum(exact) / len(exact)
    centred = [reward - mean for reward in exact]
    scale = 1.0
    if divide_by_std:
        variance = sum(value * value for value in centred) / (len(centred) - 1)
        scale = math.sqrt(variance) + STD_EPSILON
    advantages_G[included_mask_G] = [float(value) / scale for value in centred]
    return advantages_G
