"""Proves: slots and blocks are never shared, block 0 is never handed out, and what is given back can be taken again."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollforward.rollout.engine.pool import CachePool
from rollforward.rollout.errors import EngineError


@given(st.lists(st.integers(1, 130), max_size=40), st.randoms(use_true_random=False))
def test_owners_are_disjoint_under_any_order(sizes: list[int], random: object) -> None:
    pool = CachePool(num_slots=4, num_blocks=9, block_tokens=32)
    owned: list[tuple[int, tuple[int, ...]]] = []
    for size in sizes:
        if pool.can_acquire(size):
            slot, blocks = pool.acquire(size)
            assert len(blocks) == -(-size // 32)
            assert 0 not in blocks
            owned.append((slot, blocks))
        elif owned:
            pool.release(*owned.pop(random.randrange(len(owned))))  # type: ignore[attr-defined]
        slots = [slot for slot, _ in owned]
        blocks = [block for _, held in owned for block in held]
        assert len(set(slots)) == len(slots) <= 4
        assert len(set(blocks)) == len(blocks) <= 8
    for held in owned:
        pool.release(*held)
    assert pool.can_acquire(8 * 32)
    assert not pool.can_acquire(8 * 32 + 1)


def test_taking_what_is_not_free_is_an_error_with_numbers() -> None:
    pool = CachePool(num_slots=1, num_blocks=3, block_tokens=32)
    with pytest.raises(EngineError, match="needs a slot and 3 blocks; 1 slots and 2 of 2 blocks are free"):
        pool.acquire(65)
