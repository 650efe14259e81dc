"""The order in which a step's gradients are added: one tree over its micro-batches that no number of ranks changes.

A node over n leaves has the first ceil(n/2) of them as its left child and the rest as its right one; its sum is
left + right, and a child without leaves is skipped, not added as zero (so -0.0 stays -0.0). With a power of two of
ranks, rank r owns the r-th node of depth log2(ranks): below it sums alone, above it pairs of neighbours join
(``collectives.py``), and the bits are those of one rank. They must be: Newton-Schulz makes 1e-3 in an update of 1e-7
in a gradient.

    5 leaves            01234
                     012     34
                   01  2    3  4      4 ranks: (0, 2) (2, 3) (3, 4) (4, 5)
                  0 1

Here: bounds and sums in one process. Not here: what passes between ranks.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from rollforward.model.errors import ConfigError, TrainerError


def subtree_bounds(num_leaves: int, num_ranks: int) -> tuple[tuple[int, int], ...]:
    """Return the leaves of each rank's subtree as (start, stop).

    Args:
        num_leaves: micro-batches of the whole step, at least 0.
        num_ranks: ranks of the learner, a power of two.

    Raises:
        ConfigError: the ranks are no power of two: the tree has no level of that many nodes.

    Invariants: the bounds cover all leaves in order, their lengths differ by one at most, rank 0 has no fewer than
        others.
    Example: subtree_bounds(5, 4) is ((0, 2), (2, 3), (3, 4), (4, 5)); subtree_bounds(1, 2) is ((0, 1), (1, 1)).
    """
    check_power_of_two(num_ranks)
    if num_leaves < 0:
        raise TrainerError(f"num_leaves is {num_leaves}; a step has 0 or more micro-batches. Pass their number")
    nodes = [(0, num_leaves)]
    while len(nodes) < num_ranks:
        nodes = [child for start, stop in nodes for child in _children(start, stop)]
    return tuple(nodes)


def check_power_of_two(num_ranks: int) -> None:
    """Refuse a number of ranks that owns no level of the tree.

    Raises:
        ConfigError: it is no power of two.
    """
    if num_ranks < 1 or num_ranks & (num_ranks - 1):
        below = 1 << (max(num_ranks, 1).bit_length() - 1)
        raise ConfigError(
            f"learner_ranks is {num_ranks}; gradients are added in a binary tree of which each rank owns a subtree, so"
            f" it must be a power of two. Set learner_ranks={below} or learner_ranks={2 * below}"
        )


def _children(start: int, stop: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """The left child has the odd leaf."""
    middle = start + (stop - start + 1) // 2
    return (start, middle), (middle, stop)


class TreeSum:
    """The sum of one subtree's leaves, which come one by one and in order.

    Holds the sums of finished left children: between two leaves at most max(1, floor(log2(num_leaves))), one more
    while a leaf is being added. ``add`` pushes a leaf and joins every node that it completes; ``total`` ends it.

    Example: of 3 leaves, add(a) holds [a], add(b) holds [a + b], add(c) holds [(a + b) + c].
    """

    def __init__(self, num_leaves: int) -> None:
        """Start without a leaf.

        Args:
            num_leaves: of the subtree, at least 0.
        """
        if num_leaves < 0:
            raise TrainerError(f"num_leaves is {num_leaves}; a subtree has 0 or more leaves. Pass stop - start")
        self._num_leaves = num_leaves
        self._num_added = 0
        self._partial: list[Tensor] = []

    def add(self, leaf: Tensor) -> None:
        """Add the next leaf.

        Args:
            leaf: float32, of the first one's shape. It belongs to the sum from here on, which writes into it.

        Raises:
            TrainerError: there are enough leaves already, or this is not one: another shape or dtype, or the memory of
                an earlier leaf that is still waiting for its sibling.
        """
        if self._num_added == self._num_leaves:
            raise TrainerError(
                f"a leaf came after all {self._num_leaves} of this subtree. Make a TreeSum of more leaves"
            )
        leaf = leaf.detach()
        self._check(leaf)
        self._partial.append(leaf)
        for _ in range(_joins_after(self._num_added, self._num_leaves)):
            right = self._partial.pop()
            self._partial[-1].add_(right)
        self._num_added += 1

    def _check(self, leaf: Tensor) -> None:
        if leaf.dtype != torch.float32:
            raise TrainerError(f"a leaf is {leaf.dtype}; gradients are added in float32. Convert it with .float()")
        for earlier in self._partial:
            if leaf.shape != earlier.shape:
                raise TrainerError(
                    f"a leaf has shape {tuple(leaf.shape)}, the one before {tuple(earlier.shape)}; all leaves of a sum"
                    " have one shape. Flatten the same tensors for each"
                )
            if leaf.numel() and leaf.data_ptr() == earlier.data_ptr():
                raise TrainerError(
                    "a leaf lies in the memory of an earlier one, which the sum took over and still needs. Give every"
                    " leaf memory of its own"
                )

    def total(self) -> Tensor | None:
        """Return the sum, or None of no leaves.

        Raises:
            TrainerError: leaves are missing.
        """
        if self._num_added < self._num_leaves:
            raise TrainerError(
                f"total() came after {self._num_added} of {self._num_leaves} leaves; a sum is whole or worthless. Add"
                " the others first"
            )
        return self._partial[0] if self._partial else None


def _joins_after(index: int, num_leaves: int) -> int:
    """How many nodes a leaf completes: those that end with it."""
    start, stop, joins = 0, num_leaves, 0
    while stop - start > 1:
        joins += stop == index + 1
        left, right = _children(start, stop)
        start, stop = left if index < left[1] else right
    return joins


def join_subtrees(totals: Sequence[Tensor | None]) -> Tensor | None:
    """Add the sums of all ranks' subtrees, a level of the tree at a time.

    Args:
        totals: by rank, a power of two of them; None of a rank without leaves. They are written into.

    Returns:
        The whole step's sum, in the memory of one of them; None where no rank has leaves.

    Example: of a, b, c, None it is (a + b) + c.
    """
    check_power_of_two(len(totals))
    while len(totals) > 1:
        totals = [_join(left, right) for left, right in zip(totals[::2], totals[1::2], strict=True)]
    return totals[0]


def _join(left: Tensor | None, right: Tensor | None) -> Tensor | None:
    if left is None or right is None:
        return right if left is None else left
    return left.add_(right)
