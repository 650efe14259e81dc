"""Proves: slots and blocks have the owners that they are counted for, block 0 is never handed out, what is given back
or only kept can be taken again, and every violation of that is named.

Not here: that a shared block holds the right tokens (test_kv_cache.py).
"""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollforward.rollout.engine.pool import CachePool, Prefix, prefix_digests
from rollforward.rollout.errors import EngineError

NUM_BLOCKS = 8


@given(st.lists(st.integers(1, 130), max_size=40), st.randoms(use_true_random=False))
def test_owners_are_disjoint_under_any_order(sizes: list[int], random: Any) -> None:
    pool = CachePool(num_slots=4, num_blocks=9, block_tokens=32)
    owned: list[tuple[int, tuple[int, ...]]] = []
    for size in sizes:
        if pool.can_acquire(size):
            slot, blocks = pool.acquire(size)
            assert len(blocks) == -(-size // 32)
            assert 0 not in blocks
            owned.append((slot, blocks))
        elif owned:
            pool.release(owned.pop(random.randrange(len(owned)))[0])
        pool.check_integrity()
        slots = [slot for slot, _ in owned]
        blocks = [block for _, held in owned for block in held]
        assert len(set(slots)) == len(slots) <= 4
        assert len(set(blocks)) == len(blocks) <= 8
    for slot, _ in owned:
        pool.release(slot)
    assert pool.can_acquire(8 * 32)
    assert not pool.can_acquire(8 * 32 + 1)


@settings(max_examples=200)
@given(st.lists(st.sampled_from(["start", "grow", "keep", "end"]), max_size=60), st.randoms(use_true_random=False))
def test_sequences_and_prefixes_share_blocks_under_any_order(actions: list[str], random: Any) -> None:
    """Sequences are beginnings of two texts. A model beside the pool says who holds what: a block is shared exactly
    when the pool said so, what sequences hold never goes, and all the rest can be taken."""
    pool = CachePool(num_slots=3, num_blocks=NUM_BLOCKS + 1, block_tokens=4, num_snapshots=2)
    texts = [list(range(28)), [*range(8), *range(100, 120)]]
    running: dict[int, tuple[int, tuple[int, ...]]] = {}  # slot -> text, blocks
    for action in actions:
        slot = random.choice(list(running)) if running else None
        if action == "start":
            text, length = random.randrange(2), random.randrange(1, 28)
            prefix = pool.find(_digests(texts[text][: length - 1]))
            shared = () if prefix is None else prefix.blocks
            if pool.can_acquire(length, shared):
                slot, blocks = pool.acquire(length, shared)
                assert blocks[: len(shared)] == shared
                assert not set(blocks[len(shared) :]) & {b for _, held in running.values() for b in held}
                running[slot] = text, blocks
        elif slot is None:
            continue
        elif action == "grow" and pool.num_available:
            text, blocks = running[slot]
            running[slot] = text, pool.grow(slot, 4 * len(blocks) + 1)
            assert running[slot][1][:-1] == blocks
        elif action == "keep":
            text, blocks = running[slot]
            whole = min(len(blocks), 7)
            pool.keep(_digests(texts[text][: 4 * whole])[-1], blocks[:whole], None)
        elif action == "end":
            pool.release(slot)
            del running[slot]
        pool.check_integrity()
        held = {block for _, blocks in running.values() for block in blocks}
        assert pool.num_available == NUM_BLOCKS - len(held)
        assert {slot: pool.blocks_of(slot) for slot in running} == {s: blocks for s, (_, blocks) in running.items()}
    for slot in running:
        pool.release(slot)
    assert len(pool.acquire(4 * NUM_BLOCKS)[1]) == NUM_BLOCKS
    pool.check_integrity()


def _digests(token_ids: list[int], salt: bytes = b"") -> list[bytes]:
    return prefix_digests(token_ids, block_tokens=4, salt=salt)


def test_the_least_recently_used_prefix_goes_first_and_only_when_memory_is_needed() -> None:
    pool = CachePool(num_slots=2, num_blocks=7, block_tokens=4, num_snapshots=3)
    kept: list[Prefix] = []
    for first in (0, 50, 90):
        slot, blocks = pool.acquire(8)
        digest = _digests([first] * 8)[-1]
        assert pool.keep(digest, blocks, None) in (2, 3, 4)
        assert pool.keep(digest, blocks, None) is None, "it is kept already"
        pool.release(slot)
        found = pool.find([digest])
        assert found is not None
        kept.append(found)
    assert pool.num_available == 6
    assert pool.find(_digests([0] * 9)) is kept[0]  # the longest beginning, now the most recently used
    pool.acquire(4)
    assert pool.find(_digests([50] * 8)) is None
    assert pool.find(_digests([90] * 8)) is kept[2]
    assert pool.find(_digests([0] * 8)) is kept[0]
    pool.acquire(5, ())
    assert pool.find(_digests([90] * 8)) is None
    pool.forget()
    assert pool.find(_digests([0] * 8)) is None
    pool.check_integrity()


def test_a_digest_is_of_all_tokens_before_and_of_the_salt() -> None:
    ones = _digests([1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert len(ones) == 2
    assert _digests([1, 2, 3, 4]) == ones[:1]
    for other in (_digests([0, 2, 3, 4, 5, 6, 7, 8]), _digests([1, 2, 3, 4, 5, 6, 7, 8], b"weights 2")):
        assert not set(other) & set(ones)
    assert _digests([1, 2, 3]) == []


def test_taking_what_is_not_free_is_an_error_with_numbers() -> None:
    pool = CachePool(num_slots=1, num_blocks=3, block_tokens=32)
    with pytest.raises(EngineError, match="needs a slot and 3 blocks; 1 slots and 2 of 2 blocks are free"):
        pool.acquire(65)
    slot, _ = pool.acquire(32)
    with pytest.raises(EngineError, match="slot 0 needs 2 more blocks for 65 tokens; 1 are free"):
        pool.grow(slot, 65)
    pool.check_integrity()


def _damaged(damage: Callable[[Any], None]) -> CachePool:
    pool = CachePool(num_slots=3, num_blocks=9, block_tokens=4, num_snapshots=2)
    slot, blocks = pool.acquire(10)
    pool.keep(b"x", blocks[:2], None)
    other, _ = pool.acquire(12, blocks[:2])
    assert (slot, other, blocks) == (0, 1, (1, 2, 3))
    pool.check_integrity()
    damage(pool)
    return pool


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda pool: pool._free_slots.append(0), "slot 0 is free and owned at once"),
        (lambda pool: pool._free_slots.clear(), "slot 2 is lost"),
        (lambda pool: pool._free_snapshots.append(3), "snapshot slot 3 is free and owned at once"),
        (lambda pool: pool._free_blocks.append(3), "block 3 is free and owned at once"),
        (lambda pool: pool._free_blocks.remove(7), "block 7 is lost"),
        (lambda pool: pool._tables.update({1: (1, 2, 0)}), "block 0 is in use or free"),
        (lambda pool: pool._free_blocks.append(0), "block 0 is in use or free"),
        (lambda pool: pool._tables.update({1: (1, 2, 3)}), "block 4 is lost"),
        (lambda pool: pool._tables.update({1: (1, 3, 4)}), "block 2 counts 2 sequences and 1 prefixes; 1 and 1"),
        (lambda pool: pool._tables.update({1: (2, 1, 4)}), "block 2 is number 1 of one owner and 0 of another"),
        (lambda pool: pool._owners.__setitem__(2, 1), "block 2 counts 1 sequences and 1 prefixes; 2 and 1 hold it"),
        (lambda pool: pool._keepers.__setitem__(1, 0), "block 1 counts 2 sequences and 0 prefixes; 2 and 1 hold it"),
        (lambda pool: setattr(pool, "_num_available", 5), "5 blocks count as available, 4 are"),
    ],
)
def test_every_violation_is_named(damage: Callable[[Any], None], message: str) -> None:
    with pytest.raises(EngineError, match=message):
        _damaged(damage).check_integrity()
