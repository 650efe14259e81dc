"""Leaves of a gradient that betray the order of their addition, and the tree as a plain recursion."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

_MAGNITUDES = (1e8, 1.0, 1e-8, 1e37, 1e-40, -0.0)


def adversarial_leaf(leaf: int, num_elements: int) -> Tensor:
    """Return float32 of magnitudes from 1e-41 (denormal) to 1e38 and signed zeros; a function of the leaf.

    An element has mostly one magnitude in all leaves, so that each rounding of a sum shows in the result.
    """
    generator = np.random.default_rng(1000 + leaf)
    usual = np.resize(_MAGNITUDES, num_elements)
    scale = np.where(generator.uniform(size=num_elements) < 0.2, generator.choice(_MAGNITUDES, num_elements), usual)
    factor = 2.0 ** generator.uniform(-3, 3, num_elements) * generator.choice([-1.0, 1.0], num_elements)
    return torch.from_numpy((scale * factor).astype(np.float32))


def recursive_sum(leaves: Sequence[Tensor]) -> Tensor | None:
    """Return the tree's sum as its definition says it; new memory, None of no leaves."""
    if len(leaves) <= 1:
        return leaves[0].clone() if leaves else None
    middle = (len(leaves) + 1) // 2
    left, right = recursive_sum(leaves[:middle]), recursive_sum(leaves[middle:])
    assert left is not None
    return left if right is None else left + right
