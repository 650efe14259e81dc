"""Who owns which state slot and which cache blocks of a replica, and which whole blocks are kept for others.

A **slot** is one sequence's fixed-size state. A **block** holds the compressed entries of ``block_tokens`` tokens; a
sequence takes blocks as it grows. A block whose tokens are all there is never written again, so sequences with the same
beginning share it: a block is counted once for every owner. Blocks behind the last whole one have one owner, so nothing
is ever copied on write.

A **prefix** is a beginning that ends with a whole block, kept for sequences to come: its blocks, and a snapshot of the
state there (window and compressor rings), without which no sequence could go on behind it. Snapshots have slots of
their own. A prefix is found by a digest of all its tokens and of what else its values depend on; what only prefixes
hold counts as available and is dropped, least recently used first, when a sequence needs it.

Not here: the tensors (model/cache.py), who waits for memory (scheduler.py).
"""

import hashlib
import math
from collections import Counter
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np

from rollforward.rollout.errors import EngineError
from rollforward.rollout.types import Int16Array


@dataclass(frozen=True, eq=False)
class Prefix:
    """A beginning of sequences that is in the cache."""

    slot: int
    """Where the snapshot of its state lies."""
    blocks: tuple[int, ...]
    """Its blocks, all whole."""
    routes: Int16Array | None
    """[blocks * block_tokens, L, K]. Experts that its tokens visited, where they were recorded."""


class CachePool:
    """Free lists, owners and kept prefixes. One process, one thread.

    A block is free, or owned by sequences, by prefixes or by both. ``acquire``, ``grow``, ``join`` and ``release`` move
    slots and blocks of sequences, ``keep``, ``find`` and ``forget`` prefixes.
    """

    def __init__(self, *, num_slots: int, num_blocks: int, block_tokens: int, num_snapshots: int = 0) -> None:
        """Start with everything free but block 0, which stands for absent entries and is never handed out.

        Args:
            num_slots: sequences that may have a cache at once; slots 0 .. num_slots - 1.
            num_blocks: block 0 included.
            block_tokens: tokens of a block.
            num_snapshots: prefixes that may be kept; their slots follow those of sequences.
        """
        self._block_tokens = block_tokens
        self._num_slots, self._num_blocks, self._num_snapshots = num_slots, num_blocks, num_snapshots
        self._free_slots = list(range(num_slots - 1, -1, -1))
        self._free_snapshots = list(range(num_slots + num_snapshots - 1, num_slots - 1, -1))
        self._free_blocks = list(range(num_blocks - 1, 0, -1))
        self._tables: dict[int, tuple[int, ...]] = {}
        self._prefixes: dict[bytes, Prefix] = {}  # least recently used first
        self._owners = [0] * num_blocks
        self._keepers = [0] * num_blocks
        self._num_available = num_blocks - 1

    @property
    def num_available(self) -> int:
        """Blocks that no sequence owns: free ones, and those that only prefixes hold."""
        return self._num_available

    def blocks_for(self, tokens: int) -> int:
        """Return how many blocks a sequence of ``tokens`` tokens needs."""
        return math.ceil(tokens / self._block_tokens)

    def can_acquire(self, tokens: int, shared: SequenceOf[int] = ()) -> bool:
        """Whether a slot and blocks for ``tokens`` tokens are available, of which ``shared`` are kept blocks."""
        missing = self.blocks_for(tokens) - len(shared)
        return bool(self._free_slots) and missing <= self._num_available - self._num_idle(shared)

    def acquire(self, tokens: int, shared: SequenceOf[int] = ()) -> tuple[int, tuple[int, ...]]:
        """Take a slot, the ``shared`` blocks of a prefix, and blocks for the rest of ``tokens`` tokens.

        Raises:
            EngineError: when they are not available; ask ``can_acquire`` first.
        """
        if not self.can_acquire(tokens, shared):
            raise EngineError(
                f"a sequence of {tokens} tokens needs a slot and {self.blocks_for(tokens) - len(shared)} blocks; "
                f"{len(self._free_slots)} slots and {self._num_available} of {self._num_blocks - 1} blocks are free"
            )
        slot = self._free_slots.pop()
        for block in shared:
            self._own(block)
        self._tables[slot] = (*shared, *self._take(self.blocks_for(tokens) - len(shared)))
        return slot, self._tables[slot]

    def grow(self, slot: int, tokens: int) -> tuple[int, ...]:
        """Take what is missing for ``tokens`` tokens, and return the sequence's blocks.

        Raises:
            EngineError: not enough blocks are available; ``num_available`` says how many are.
        """
        missing = self.blocks_for(tokens) - len(self._tables[slot])
        if missing > self._num_available:
            raise EngineError(
                f"slot {slot} needs {missing} more blocks for {tokens} tokens; {self._num_available} are free"
            )
        self._tables[slot] += self._take(max(0, missing))
        return self._tables[slot]

    def join(self, slot: int, shared: SequenceOf[int]) -> tuple[int, ...]:
        """Put another sequence's whole blocks before a slot's own, and return the sequence's blocks."""
        for block in shared:
            self._own(block)
        self._tables[slot] = (*shared, *self._tables[slot])
        return self._tables[slot]

    def release(self, slot: int) -> None:
        """Give a slot and its blocks back; what prefixes or other sequences hold stays as it is."""
        for block in reversed(self._tables.pop(slot)):
            self._owners[block] -= 1
            if self._owners[block] == 0:
                self._num_available += 1
                self._free_unless_held(block)
        self._free_slots.append(slot)

    def find(self, digests: SequenceOf[bytes]) -> Prefix | None:
        """Return the longest prefix that is kept, from the digests of a sequence's beginnings, shortest first."""
        for digest in reversed(digests):
            prefix = self._prefixes.pop(digest, None)
            if prefix is not None:
                self._prefixes[digest] = prefix
                return prefix
        return None

    def keep(self, digest: bytes, blocks: tuple[int, ...], routes: Int16Array | None) -> int | None:
        """Keep a prefix for others and return the slot to which its state is to be copied.

        Args:
            digest: of the prefix.
            blocks: of a sequence that owns them, all whole.
            routes: of its tokens.

        Returns:
            A slot, or None where it is kept already or no snapshot has room.
        """
        if self.find([digest]) is not None or self._num_snapshots == 0:
            return None
        if not self._free_snapshots:
            self._drop_oldest()
        for block in blocks:
            self._keepers[block] += 1
        prefix = Prefix(self._free_snapshots.pop(), blocks, routes)
        self._prefixes[digest] = prefix
        return prefix.slot

    def forget(self) -> None:
        """Drop every prefix: its values no longer are what the model says."""
        while self._prefixes:
            self._drop_oldest()

    def blocks_of(self, slot: int) -> tuple[int, ...] | None:
        """Return a slot's blocks; None where no sequence owns it."""
        return self._tables.get(slot)

    def check_integrity(self) -> None:
        """Count everything again.

        Raises:
            EngineError: names the first slot or block that is neither free nor owned, or both; whose owners are not as
                many as its count; block 0 in use; or a shared block that is not at one place of all its owners.
        """
        for name, free, used, expected in (
            ("slot", self._free_slots, list(self._tables), range(self._num_slots)),
            (
                "snapshot slot",
                self._free_snapshots,
                [prefix.slot for prefix in self._prefixes.values()],
                range(self._num_slots, self._num_slots + self._num_snapshots),
            ),
        ):
            _require_once(name, [*free, *used], list(expected))
        tables, kept = list(self._tables.values()), [prefix.blocks for prefix in self._prefixes.values()]
        owners = Counter(block for table in tables for block in table)
        keepers = Counter(block for table in kept for block in table)
        _require_once(
            "block", [*self._free_blocks, *(owners.keys() | keepers.keys())], list(range(1, self._num_blocks))
        )
        for block in range(self._num_blocks):
            if (self._owners[block], self._keepers[block]) != (owners[block], keepers[block]):
                raise EngineError(
                    f"block {block} counts {self._owners[block]} sequences and {self._keepers[block]} prefixes;"
                    f" {owners[block]} and {keepers[block]} hold it"
                )
        available = sum(count == 0 for count in self._owners[1:])
        if available != self._num_available:
            raise EngineError(f"{self._num_available} blocks count as available, {available} are")
        place: dict[int, int] = {}
        for table in (*tables, *kept):
            for index, block in enumerate(table):
                if place.setdefault(block, index) != index:
                    raise EngineError(f"block {block} is number {place[block]} of one owner and {index} of another")

    def _num_idle(self, blocks: SequenceOf[int]) -> int:
        return sum(self._owners[block] == 0 for block in blocks)

    def _own(self, block: int) -> None:
        self._num_available -= self._owners[block] == 0
        self._owners[block] += 1

    def _take(self, count: int) -> tuple[int, ...]:
        taken: list[int] = []
        for _ in range(count):
            while not self._free_blocks:
                self._drop_oldest()
            block = self._free_blocks.pop()
            self._own(block)
            taken.append(block)
        return tuple(taken)

    def _drop_oldest(self) -> None:
        prefix = self._prefixes.pop(next(iter(self._prefixes)))
        self._free_snapshots.append(prefix.slot)
        for block in reversed(prefix.blocks):
            self._keepers[block] -= 1
            self._free_unless_held(block)

    def _free_unless_held(self, block: int) -> None:
        if self._owners[block] == 0 and self._keepers[block] == 0:
            self._free_blocks.append(block)


def prefix_digests(token_ids: SequenceOf[int], *, block_tokens: int, salt: bytes) -> list[bytes]:
    """Return a digest of each beginning that ends with a whole block, shortest first.

    Args:
        token_ids: the sequence.
        block_tokens: tokens of a block.
        salt: what else the cached values depend on: the weight version, and whether routes are known.
    """
    tokens = np.array(token_ids, dtype="<i4")
    digests: list[bytes] = []
    digest = salt
    for end in range(block_tokens, len(tokens) + 1, block_tokens):
        digest = hashlib.blake2b(digest + tokens[end - block_tokens : end].tobytes(), digest_size=32).digest()
        digests.append(digest)
    return digests


def _require_once(name: str, found: list[int], expected: list[int]) -> None:
    counts, known = Counter(found), set(expected)
    for number in sorted(counts.keys() | known):
        times = counts[number]
        if number not in known:
            raise EngineError(f"{name} {number} is in use or free; it is not one of the pool's")
        if times != 1:
            raise EngineError(f"{name} {number} is free and owned at once" if times else f"{name} {number} is lost")
