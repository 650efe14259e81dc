"""Which sequences have a cache, and what the next forward computes of them.

    fresh --opened--> running <------------------- preempted (tokens only)
                      |  |  |--blocks run out------>    ^
             closed <-+  |                              | its answer came
                         +--of a turn that calls--> parked (tokens only, a tool works)

A sequence gets blocks for the tokens that it has when it starts, and more as it grows. Where blocks run out, running
sequences are preempted, the youngest first: slot and blocks go back, tokens stay, and the cache is computed again when
there is room. Those that wait for a tool are preempted by the same rule. Age is the order of opening and never changes.

Why everything ends: (1) Of those that can run, the oldest is never preempted for another, and alone it fits, because a
request that could not is refused. So every step computes at least one token of it. (2) It stays the oldest until it
draws, unless an older one comes back: one whose answer came, or which was preempted; neither can happen more often than
there are sequences before something is drawn or answered. (3) What is drawn and answered stays and is bounded.
(4) Preempted ones start before fresh ones, so at most max_batch_requests are open and each has a slot when it starts.

Members of a group have the same prompt: one (the leader) computes it, the others (followers) take over its whole blocks
and copy the rest. A prefill stops at its last whole block, where a prefix is kept for whoever comes later with the same
beginning: members that wait, further turns and preempted sequences, other prompts. Prefixes are those of one weight
version. None of this changes a bit: a token's values do not depend on chunks, company or where its past lies.

Not here: slots and blocks (pool.py), the forward (forward.py), the log, tools and drawing (local.py).
"""

from bisect import insort
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf

import msgspec

from rollforward.rollout.config import RolloutConfig
from rollforward.rollout.engine.forward import Chunk, ForwardRunner
from rollforward.rollout.engine.kv_store import KvState, import_sequence
from rollforward.rollout.engine.pool import CachePool, Prefix, prefix_digests
from rollforward.rollout.engine.sequence import Sequence
from rollforward.rollout.errors import EngineError, EngineInputError
from rollforward.rollout.types import Request


class CacheStats(msgspec.Struct, frozen=True, kw_only=True):
    """What happened to caches since the engine was built."""

    preemptions: int = 0
    """Times that a sequence gave its cache back before its end."""
    computed_tokens: int = 0
    """Tokens that a forward computed."""
    prefix_hits: int = 0
    """Sequences that started behind a kept prefix."""
    prefix_tokens: int = 0
    """Tokens that they did not compute."""


class Scheduler:
    """Owns the cache of an engine. One thread.

    States of a sequence: see the module. ``reserve`` comes before the first ``enqueue``.
    """

    def __init__(
        self,
        config: RolloutConfig,
        forward: ForwardRunner,
        *,
        block_tokens: int,
        restore: Callable[[Sequence], KvState | None] = lambda _: None,
    ) -> None:
        """Own nothing yet.

        Args:
            config: limits.
            forward: whose storage is shared out.
            block_tokens: tokens of a block.
            restore: gives what an earlier process saved of a sequence that starts.
        """
        self._config = config
        self._forward = forward
        self._block_tokens = block_tokens
        self._restore = restore
        self._pool = CachePool(num_slots=0, num_blocks=1, block_tokens=block_tokens)
        self._capacity = 0
        self._salt = b""
        self._fresh: deque[Sequence] = deque()
        self._running: list[Sequence] = []  # the last three: oldest first
        self._preempted: list[Sequence] = []
        self._parked: list[Sequence] = []
        self._next_age = 0
        self._free_log_slots: list[int] = list(range(config.max_batch_requests - 1, -1, -1))
        self._stats = CacheStats()

    @property
    def has_work(self) -> bool:
        """Whether any sequence is not closed."""
        return bool(self._fresh or self._running or self._preempted or self._parked)

    @property
    def opened(self) -> list[Sequence]:
        """Sequences that are open in the log."""
        return [*self._running, *self._preempted, *self._parked]

    @property
    def can_run(self) -> bool:
        """Whether the next forward has anything to compute."""
        return any(sequence.can_run for sequence in self._running)

    @property
    def stats(self) -> CacheStats:
        """Counters since the engine was built."""
        return self._stats

    def check(self, request: Request) -> None:
        """Refuse a request that would not fit if it were alone.

        Raises:
            EngineInputError: it may need more blocks than there are.
        """
        limit, needed = self._config.cache_blocks, self._pool.blocks_for(request.max_tokens)
        if limit is not None and needed > limit:
            raise EngineInputError(
                f"request {request.id} may reach {request.max_tokens} tokens, which take {needed} cache blocks of"
                f" {self._block_tokens} tokens; rollout.cache_blocks = {limit}. Set it to {needed} or more, lower"
                " sampling.max_new_tokens, or shorten the prompt"
            )

    def reserve(self, longest: int) -> None:
        """Make the cache large enough for requests of ``longest`` tokens; only while nothing is open."""
        limit, num_slots = self._config.cache_blocks, self._config.max_batch_requests
        capacity = num_slots * self._pool.blocks_for(longest) if limit is None else limit
        if capacity <= self._capacity:
            return
        # As many snapshots as sequences: every one may have left a prefix.
        num_snapshots = num_slots if self._config.prefix_sharing else 0
        self._pool = CachePool(
            num_slots=num_slots,
            num_blocks=1 + capacity,
            block_tokens=self._block_tokens,
            num_snapshots=num_snapshots,
        )
        self._forward.allocate(num_slots=num_slots + num_snapshots, num_blocks=1 + capacity)
        self._capacity = capacity

    def use_version(self, policy_version: int) -> None:
        """Forget what other weights computed; only while nothing is open."""
        self._pool.forget()
        self._salt = f"weights {policy_version}".encode()

    def enqueue(self, sequence: Sequence) -> None:
        """Add a sequence that is not open."""
        self._fresh.append(sequence)

    def resume_preempted(self) -> None:
        """Give preempted sequences a cache again, the oldest first, while there is room."""
        while self._preempted and self._has_room(self._preempted[0]):
            self._start(self._preempted.pop(0))

    def next_fresh(self) -> Sequence | None:
        """Take the next sequence that may be opened now, with its place in the log; None where there is none.

        The caller opens it and then calls ``enter`` or ``close``.
        """
        if not self._fresh or self._preempted or not self._free_log_slots or not self._has_room(self._fresh[0]):
            return None
        sequence = self._fresh.popleft()
        sequence.age, sequence.log_slot = self._next_age, self._free_log_slots.pop()
        self._next_age += 1
        return sequence

    def enter(self, sequence: Sequence) -> None:
        """Give a sequence that was opened its cache; one that waits for a tool gets it with the answer."""
        if sequence.is_observing:
            insort(self._parked, sequence, key=_age)
        else:
            self._start(sequence)

    def observing(self) -> list[Sequence]:
        """Return the sequences that wait for a tool."""
        return [sequence for sequence in self._running if sequence.is_observing] + self._parked

    def observed(self, sequence: Sequence) -> None:
        """Take note that a sequence has its answer."""
        if sequence in self._parked:
            self._parked.remove(sequence)
            insort(self._preempted, sequence, key=_age)

    def close(self, sequence: Sequence) -> None:
        """Take back what a sequence that is over holds, its place in the log too."""
        self._free_log_slots.append(sequence.log_slot)
        if sequence.slot >= 0:
            self._pool.release(sequence.slot)
        for place in (self._running, self._preempted, self._parked):
            if sequence in place:
                place.remove(sequence)
        sequence.slot, sequence.blocks = -1, ()

    def plan(self) -> list[Chunk]:
        """Return what the next forward computes, with blocks for it: of every sequence that decodes its token, and at
        most prefill_chunk_tokens of the others. Preempts where blocks run out."""
        decoding: list[Chunk] = []
        filling: list[Chunk] = []
        budget = self._config.prefill_chunk_tokens
        oldest: Sequence | None = None
        for sequence in [sequence for sequence in self._running if sequence.can_run]:
            if sequence.slot < 0:
                continue  # an older one took its blocks
            oldest = oldest or sequence
            length = 1 if sequence.num_missing == 1 else min(budget, self._until_boundary(sequence))
            if length == 0 or not self._grow(sequence, length, may_give=sequence is not oldest):
                continue
            if sequence.num_missing == 1:
                decoding.append(Chunk(sequence, length))
            else:
                filling.append(Chunk(sequence, length))
                budget -= length
        chunks = decoding + filling
        self._count(computed_tokens=sum(chunk.length for chunk in chunks))
        return chunks

    def computed(self, chunks: SequenceOf[Chunk]) -> None:
        """Keep the prefixes that a forward completed."""
        for sequence, _ in chunks:
            if self._config.prefix_sharing and sequence.num_cached == self._boundary(sequence) > 0:
                self._keep(sequence)

    def release_followers(self, leader: Sequence) -> list[Sequence]:
        """Give the followers of a sequence that computed its last token its cache, and return them."""
        followers, leader.followers = leader.followers, []
        if not followers:
            return []
        num_shared = self._num_shared(leader)
        for follower in followers:
            follower.blocks = self._pool.join(follower.slot, leader.blocks[:num_shared])
            follower.is_following = False
        self._forward.copy(leader, followers, num_shared=num_shared)
        return followers

    def check_integrity(self) -> None:
        """Compare what the pool owns with what sequences hold, and their tokens in shared blocks.

        Raises:
            EngineError: names the first violation; a bug of the engine.
        """
        self._pool.check_integrity()
        holders: dict[int, tuple[int, ...]] = {}
        log_slots = [sequence.log_slot for sequence in self.opened] + self._free_log_slots
        if sorted(log_slots) != list(range(self._config.max_batch_requests)):
            raise EngineError(f"log slots are {sorted(log_slots)}; each is free or of one open sequence")
        for sequence in self.opened:
            _check_place(sequence, sequence in self._running, self._pool.blocks_of(sequence.slot), self._block_tokens)
            if sequence.is_following:
                continue
            for number, block in enumerate(sequence.blocks):
                end = (number + 1) * self._block_tokens
                tokens = tuple(sequence.token_ids[:end]) if sequence.num_cached >= end else (-1, sequence.age)
                if holders.setdefault(block, tokens) != tokens:
                    raise EngineError(
                        f"block {block} is shared by sequences whose tokens differ, {sequence.request.id}"
                    )

    def _until_boundary(self, sequence: Sequence) -> int:
        """Tokens of a prefill up to where a prefix is kept, or to its end."""
        ahead = self._boundary(sequence) - sequence.num_cached
        return ahead if self._config.prefix_sharing and ahead > 0 else sequence.num_missing

    def _boundary(self, sequence: Sequence) -> int:
        """End of the last whole block before the last token, whose logits are needed."""
        return (len(sequence.token_ids) - 1) // self._block_tokens * self._block_tokens

    def _num_shared(self, sequence: Sequence) -> int:
        return len(sequence.token_ids) // self._block_tokens if self._config.prefix_sharing else 0

    def _digests(self, sequence: Sequence) -> list[bytes]:
        salt = self._salt + (b", routes" if sequence.request.record_routes else b"")
        tokens = sequence.token_ids[: self._boundary(sequence)]
        return prefix_digests(tokens, block_tokens=self._block_tokens, salt=salt)

    def _keep(self, sequence: Sequence) -> None:
        num_blocks = sequence.num_cached // self._block_tokens
        routes = None if sequence.routes is None else sequence.routes.first(sequence.num_cached)
        digest = self._digests(sequence)[num_blocks - 1]
        snapshot = self._pool.keep(digest, sequence.blocks[:num_blocks], routes)
        if snapshot is not None:
            self._forward.copy_state(sequence.slot, snapshot)

    def _find_leader(self, sequence: Sequence) -> Sequence | None:
        """Return who computes the same tokens now."""
        key = _leader_key(sequence)
        for other in self._running:
            is_filling = other.can_run and (other.num_missing > 1 or other.num_cached == 0)
            if is_filling and len(other.token_ids) == len(sequence.token_ids) and _leader_key(other) == key:
                return other
        return None

    def _has_room(self, sequence: Sequence) -> bool:
        """Whether a sequence may start: there are blocks for its tokens and the next one. Where nothing can run,
        those that wait for a tool make room."""
        while not self._fits(sequence):
            victim = None if self.can_run else self._youngest(None)
            if victim is None:
                return False
            self._preempt(victim)
        return True

    def _fits(self, sequence: Sequence) -> bool:
        wanted = min(len(sequence.token_ids) + 1, sequence.request.max_tokens)
        leader = self._find_leader(sequence)
        if leader is not None:
            return self._pool.can_acquire(wanted - self._num_shared(leader) * self._block_tokens)
        return self._pool.can_acquire(wanted, self._shared_blocks(self._find_prefix(sequence)))

    def _start(self, sequence: Sequence) -> None:
        """Give a sequence that fits slot and blocks, and what of its tokens is in a cache already."""
        leader = self._find_leader(sequence)
        num_tokens = len(sequence.token_ids)
        if leader is not None:
            own = num_tokens - self._num_shared(leader) * self._block_tokens
            sequence.slot, sequence.blocks = self._pool.acquire(own)
            sequence.is_following = True
            leader.followers.append(sequence)
        elif self._pool.can_acquire(num_tokens) and (saved := self._restore(sequence)) is not None:
            sequence.slot, sequence.blocks = self._pool.acquire(num_tokens)
            import_sequence(self._forward.storage, sequence.slot, sequence.blocks, saved.planes)
            sequence.num_cached = saved.num_cached
        else:
            self._start_behind(self._find_prefix(sequence), sequence)
        insort(self._running, sequence, key=_age)

    def _start_behind(self, prefix: Prefix | None, sequence: Sequence) -> None:
        shared = self._shared_blocks(prefix)
        sequence.slot, sequence.blocks = self._pool.acquire(len(sequence.token_ids), shared)
        if prefix is None:
            return
        self._forward.copy_state(prefix.slot, sequence.slot)
        sequence.num_cached = len(shared) * self._block_tokens
        if sequence.routes is not None:
            assert prefix.routes is not None, "its digest says so"
            sequence.routes.record(0, prefix.routes)
        self._count(prefix_hits=1, prefix_tokens=sequence.num_cached)

    def _find_prefix(self, sequence: Sequence) -> Prefix | None:
        return self._pool.find(self._digests(sequence)) if self._config.prefix_sharing else None

    def _shared_blocks(self, prefix: Prefix | None) -> tuple[int, ...]:
        return () if prefix is None else prefix.blocks

    def _grow(self, sequence: Sequence, length: int, *, may_give: bool) -> bool:
        """Get blocks for the next tokens of a sequence; preempt others, or it where none is younger. Return whether it
        has them."""
        tokens = sequence.num_cached + length
        while self._pool.blocks_for(tokens) - len(sequence.blocks) > self._pool.num_available:
            victim = self._youngest(None if may_give else sequence)
            if victim is None:
                raise EngineError(
                    f"no block is left for {sequence.request.id} at {tokens} tokens, though nobody else has any;"
                    " a bug of the engine"
                )
            self._preempt(victim)
            if victim is sequence:
                return False
        sequence.blocks = self._pool.grow(sequence.slot, tokens)
        return True

    def _youngest(self, spared: Sequence | None) -> Sequence | None:
        """Return the youngest sequence that holds blocks and is not the spared one."""
        return next((one for one in reversed(self._running) if one is not spared and one.blocks), None)

    def _preempt(self, sequence: Sequence) -> None:
        """Take a sequence's cache; its tokens stay. Its followers have nobody to wait for, so they go too."""
        followers, sequence.followers = sequence.followers, []
        for follower in followers:
            follower.is_following = False
            self._preempt(follower)
        if sequence.is_following:
            sequence.is_following = False
            leader = next(one for one in self._running if sequence in one.followers)
            leader.followers.remove(sequence)
        self._pool.release(sequence.slot)
        sequence.slot, sequence.blocks, sequence.num_cached = -1, (), 0
        self._running.remove(sequence)
        insort(self._parked if sequence.is_observing else self._preempted, sequence, key=_age)
        self._count(preemptions=1)

    def _count(self, **more: int) -> None:
        stats = self._stats
        self._stats = msgspec.structs.replace(stats, **{name: getattr(stats, name) + n for name, n in more.items()})


def _age(sequence: Sequence) -> int:
    return sequence.age


def _leader_key(sequence: Sequence) -> tuple[bool, tuple[int, ...]]:
    return sequence.request.record_routes, tuple(sequence.token_ids)


def _check_place(sequence: Sequence, is_running: bool, owned: tuple[int, ...] | None, block_tokens: int) -> None:
    name = sequence.request.id
    if not is_running:
        if (sequence.slot, sequence.blocks, sequence.num_cached) != (-1, (), 0):
            raise EngineError(f"{name} has no cache, but slot {sequence.slot} and blocks {sequence.blocks}")
    elif owned != sequence.blocks:
        raise EngineError(f"{name} has blocks {sequence.blocks}; slot {sequence.slot} owns {owned}")
    elif sequence.num_cached > len(sequence.blocks) * block_tokens:
        raise EngineError(f"{name} has {sequence.num_cached} tokens in {len(sequence.blocks)} blocks")
    elif (len(sequence.blocks) - 1) * block_tokens >= len(sequence.token_ids):
        raise EngineError(f"{name} has {len(sequence.blocks)} blocks for {len(sequence.token_ids)} tokens")
