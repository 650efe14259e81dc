"""Who owns which state slot and which cache blocks of a replica.

Slots are one per sequence in flight, blocks cover ``block_tokens`` tokens each. A sequence gets all blocks that its
budget may need when it is admitted, so that a running sequence never waits for memory.

Not here: the tensors (model/cache.py).
"""

import math

from rollforward.rollout.errors import EngineError


class CachePool:
    """Free lists of slots and blocks. One process, one thread.

    A slot or block is free or owned by one sequence; ``acquire`` and ``release`` move them.
    """

    def __init__(self, *, num_slots: int, num_blocks: int, block_tokens: int) -> None:
        """Start with everything free but block 0, which stands for absent entries and is never handed out."""
        self._block_tokens = block_tokens
        self._num_blocks = num_blocks
        self._free_slots = list(range(num_slots - 1, -1, -1))
        self._free_blocks = list(range(num_blocks - 1, 0, -1))

    def blocks_for(self, tokens: int) -> int:
        """Return how many blocks a sequence of ``tokens`` tokens needs."""
        return math.ceil(tokens / self._block_tokens)

    def can_acquire(self, tokens: int) -> bool:
        """Whether a slot and enough blocks for ``tokens`` tokens are free."""
        return bool(self._free_slots) and self.blocks_for(tokens) <= len(self._free_blocks)

    def acquire(self, tokens: int) -> tuple[int, tuple[int, ...]]:
        """Take a slot and the blocks for ``tokens`` tokens.

        Raises:
            EngineError: when they are not free; ask ``can_acquire`` first.
        """
        if not self.can_acquire(tokens):
            raise EngineError(
                f"a sequence of {tokens} tokens needs a slot and {self.blocks_for(tokens)} blocks; "
                f"{len(self._free_slots)} slots and {len(self._free_blocks)} of {self._num_blocks - 1} blocks are free"
            )
        return self._free_slots.pop(), tuple(self._free_blocks.pop() for _ in range(self.blocks_for(tokens)))

    def release(self, slot: int, blocks: tuple[int, ...]) -> None:
        """Give a slot and its blocks back."""
        self._free_slots.append(slot)
        self._free_blocks.extend(reversed(blocks))
