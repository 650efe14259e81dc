"""Compression of a window of raw key-values into one entry, in plain torch."""

import torch
from torch import Tensor

from rollforward.kernels.rowwise import tree_sum


def pool_window_ref(kv_ELe: Tensor, score_ELe: Tensor) -> Tensor:
    """Return sum_l softmax_l(score) kv, per channel over the L slots of a window. [E, L, e] -> [E, e].

    Absent slots hold score -inf and value 0; at least one slot of a window is present.
    """
    weight = torch.exp(score_ELe - score_ELe.amax(1, keepdim=True))
    return tree_sum(weight * kv_ELe, 1) / tree_sum(weight, 1)
