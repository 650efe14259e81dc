"""Proves: the tree's bounds cover each leaf once, in order and evenly; sums have the bits of a plain recursion on any
number of ranks, with few partial sums alive; and what is no leaf is refused.

Not here: the same between processes (test_collectives.py).
"""

import math

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from rollforward.model.errors import ConfigError, TrainerError
from rollforward.model.gradient_tree import TreeSum, join_subtrees, subtree_bounds
from tests.helpers.bits import different_bits
from tests.helpers.gradients import adversarial_leaf, recursive_sum


def summed(leaves: list[Tensor]) -> Tensor | None:
    tree = TreeSum(len(leaves))
    for leaf in leaves:
        tree.add(leaf.clone())
    return tree.total()


def scalars(*values: float) -> list[Tensor]:
    return [torch.tensor([float(value)]) for value in values]


@pytest.mark.parametrize(
    ("num_leaves", "num_ranks", "bounds"),
    [
        (0, 1, ((0, 0),)),
        (0, 4, ((0, 0),) * 4),
        (1, 2, ((0, 1), (1, 1))),
        (3, 2, ((0, 2), (2, 3))),
        (5, 4, ((0, 2), (2, 3), (3, 4), (4, 5))),
        (6, 4, ((0, 2), (2, 3), (3, 5), (5, 6))),
        (5, 8, ((0, 1), (1, 2), (2, 3), (3, 3), (3, 4), (4, 4), (4, 5), (5, 5))),
    ],
)
def test_bounds_by_hand(num_leaves: int, num_ranks: int, bounds: tuple[tuple[int, int], ...]) -> None:
    assert subtree_bounds(num_leaves, num_ranks) == bounds


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8, 16, 64])
def test_bounds_cover_each_leaf_once_in_order_and_evenly(num_ranks: int) -> None:
    for num_leaves in (*range(70), 1000, 4097):
        bounds = subtree_bounds(num_leaves, num_ranks)
        assert len(bounds) == num_ranks
        assert [leaf for start, stop in bounds for leaf in range(start, stop)] == list(range(num_leaves))
        sizes = [stop - start for start, stop in bounds]
        assert max(sizes) - min(sizes) <= 1
        assert sizes[0] == max(sizes)
        finer = subtree_bounds(num_leaves, 2 * num_ranks)
        assert bounds == tuple((left[0], right[1]) for left, right in zip(finer[::2], finer[1::2], strict=True))


@pytest.mark.parametrize("num_ranks", [-4, 0, 3, 6, 12])
def test_ranks_that_are_no_level_of_the_tree_are_refused(num_ranks: int) -> None:
    with pytest.raises(ConfigError, match=f"learner_ranks is {num_ranks}; .* power of two. Set learner_ranks="):
        subtree_bounds(8, num_ranks)


def test_the_way_out_of_three_ranks_is_two_or_four() -> None:
    with pytest.raises(ConfigError, match="Set learner_ranks=2 or learner_ranks=4"):
        subtree_bounds(8, 3)


def test_a_negative_number_of_leaves_is_refused() -> None:
    with pytest.raises(TrainerError, match="num_leaves is -1"):
        subtree_bounds(-1, 2)
    with pytest.raises(TrainerError, match="num_leaves is -1"):
        TreeSum(-1)


def test_sums_by_hand() -> None:
    """1e8 swallows a 1 in float32, so each order has its own result."""
    assert summed(scalars(1e8, 1, -1e8, 1)) == 0  # (1e8 + 1) + (-1e8 + 1); from left to right it is 1
    assert summed(scalars(1e8, -1e8, 1)) == 1  # (a + b) + c; a + (b + c) is 0
    assert summed(scalars(1e8, 1, -1e8, 1, -1)) == 0  # ((a + b) + c) + (d + e)
    assert summed(scalars(1, 1e8, -1e8, 5, 2)) == 7  # ((1 + 1e8) - 1e8) + (5 + 2)


def test_a_sum_of_negative_zeros_keeps_its_sign() -> None:
    for num_leaves in range(1, 9):
        total = summed(scalars(*[-0.0] * num_leaves))
        assert total is not None
        assert torch.signbit(total).all()
        for num_ranks in (1, 2, 4, 8, 16):
            bounds = subtree_bounds(num_leaves, num_ranks)
            joined = join_subtrees([summed(scalars(*[-0.0] * (stop - start))) for start, stop in bounds])
            assert joined is not None
            assert torch.signbit(joined).all()


def test_sums_have_the_bits_of_the_recursion_on_any_number_of_ranks() -> None:
    for num_leaves in (*range(34), 63, 64, 65, 100):
        leaves = [adversarial_leaf(leaf, 41) for leaf in range(num_leaves)]
        expected = recursive_sum(leaves)
        for num_ranks in (1, 2, 4, 8, 32):
            joined = join_subtrees([summed(leaves[a:b]) for a, b in subtree_bounds(num_leaves, num_ranks)])
            if expected is None:
                assert joined is None
            else:
                assert joined is not None
                assert different_bits(joined, expected) == 0, (num_leaves, num_ranks)


def test_the_adversarial_leaves_tell_orders_apart() -> None:
    """Or the test above would prove nothing."""
    leaves = [adversarial_leaf(leaf, 400) for leaf in range(5)]
    expected = recursive_sum(leaves)
    assert expected is not None
    one_by_one = leaves[0] + leaves[1] + leaves[2] + leaves[3] + leaves[4]
    assert different_bits(one_by_one, expected) > 30
    other_split = (leaves[0] + leaves[1]) + ((leaves[2] + leaves[3]) + leaves[4])
    assert different_bits(other_split, expected) > 30


@pytest.mark.parametrize("num_leaves", [1, 2, 3, 5, 8, 13, 64, 100])
def test_few_partial_sums_are_alive(num_leaves: int) -> None:
    tree = TreeSum(num_leaves)
    storages = []
    most = max(1, math.floor(math.log2(num_leaves)))
    reached = 0
    for leaf in range(num_leaves):
        gradient = adversarial_leaf(leaf, 3)
        storages.append(StorageWeakRef(gradient.untyped_storage()))
        tree.add(gradient)
        del gradient
        alive = sum(not storage.expired() for storage in storages)
        reached = max(reached, alive)
    assert reached == most
    assert sum(not storage.expired() for storage in storages) == 1


def test_a_sum_is_made_in_the_memory_of_its_first_leaf_without_autograd() -> None:
    tree = TreeSum(2)
    first = torch.nn.Parameter(torch.ones(3))
    tree.add(first)
    tree.add(torch.full((3,), 2.0))
    total = tree.total()
    assert total is not None
    assert not total.requires_grad
    assert total.tolist() == [3.0, 3.0, 3.0]
    assert total.data_ptr() == first.data_ptr()


def test_no_leaves_have_no_sum() -> None:
    assert TreeSum(0).total() is None
    assert join_subtrees([None, None]) is None


def test_what_is_no_leaf_is_refused() -> None:
    tree = TreeSum(3)
    with pytest.raises(TrainerError, match=r"a leaf is torch\.bfloat16; gradients are added in float32"):
        tree.add(torch.zeros(2, dtype=torch.bfloat16))
    leaf = torch.zeros(2)
    tree.add(leaf)
    with pytest.raises(TrainerError, match=r"shape \(1,\), the one before \(2,\)"):  # torch would broadcast it
        tree.add(torch.zeros(1))
    with pytest.raises(TrainerError, match="memory of an earlier one"):
        tree.add(leaf)
    with pytest.raises(TrainerError, match="after 1 of 3 leaves"):
        tree.total()
    tree.add(torch.ones(2))
    tree.add(torch.ones(2))
    assert tree.total().tolist() == [2.0, 2.0]  # pyright: ignore[reportOptionalMemberAccess]
    with pytest.raises(TrainerError, match="after all 3"):
        tree.add(torch.ones(2))


def test_leaves_without_elements_are_added() -> None:
    total = summed([torch.zeros(0)] * 3)
    assert total is not None
    assert total.shape == (0,)
