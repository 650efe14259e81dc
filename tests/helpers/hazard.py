"""How often responses end, by position; a reading of lengths that is too fine for a run's own instruments."""

import numpy as np
import numpy.typing as npt

from rollforward.rollout.bias import Int64Array
from rollforward.rollout.types import BoolArray


def hazard_by_position(
    lengths_N: npt.NDArray[np.integer], is_end_N: BoolArray, edges_K: npt.NDArray[np.integer]
) -> tuple[Int64Array, Int64Array]:
    """Return how often the policy ended its response in each bucket of positions, and how often it could have.

    Args:
        lengths_N: [N] sampled tokens of each attempt, however it was over.
        is_end_N: [N] bool. True where its last token ended it; a truncation is no end.
        edges_K: [K + 1] ascending positions from 0; bucket k holds positions edges[k] <= p < edges[k + 1].

    Returns:
        ([K] ends, [K] tokens drawn); their quotient is the hazard.

    Example: lengths [2, 3], the first ended, edges [0, 2, 4]: ends [1, 0], drawn [4, 1].
    """
    lengths_N, edges_K = np.asarray(lengths_N, np.int64), np.asarray(edges_K, np.int64)
    ends_K = np.histogram(lengths_N[np.asarray(is_end_N, np.bool_)] - 1, bins=edges_K - 0.5)[0]
    drawn_K = np.clip(lengths_N[:, None] - edges_K[:-1], 0, np.diff(edges_K)).sum(0)
    return ends_K.astype(np.int64), drawn_K
