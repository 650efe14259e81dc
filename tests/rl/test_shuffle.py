"""Proves that an order is a bijection, repeats in every process and differs by key. Not how random it is."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollforward.rl.shuffle import Permutation, derive_key


@given(st.integers(1, 500), st.integers(0, 2**64 - 1))
def test_every_element_comes_once(size: int, key: int) -> None:
    permutation = Permutation(size, key)
    assert sorted(permutation(index) for index in range(size)) == list(range(size))


def test_another_key_gives_another_order() -> None:
    orders = [[Permutation(1000, key)(index) for index in range(1000)] for key in range(4)]
    for first in range(4):
        for second in range(first):
            same_place = sum(left == right for left, right in zip(orders[first], orders[second], strict=True))
            assert same_place < 10  # 1 is expected
    assert all(order != sorted(order) for order in orders)


def test_an_order_is_the_same_on_every_machine() -> None:
    """Recorded once: a cursor in an old checkpoint must point at the same prompts for ever."""
    assert derive_key("prompts", 1) == 2117232211458620599
    assert [Permutation(10, 1)(index) for index in range(10)] == [4, 5, 1, 0, 7, 9, 2, 3, 8, 6]


def test_keys_tell_their_parts_apart() -> None:
    parts = [("a", "b"), ("ab",), ("a", "b", ""), ("1",), (1,), (1, 2), (12,)]
    assert len({derive_key(*one) for one in parts}) == len(parts)


def test_positions_outside_are_errors() -> None:
    with pytest.raises(IndexError):
        Permutation(3, 1)(3)
    with pytest.raises(IndexError):
        Permutation(3, 1)(-1)
    with pytest.raises(ValueError, match="size of a permutation is 0"):
        Permutation(0, 1)
