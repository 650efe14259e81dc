"""Which tokens one forward computes, and where each of them finds its keys.

A ``Segment`` is a run of consecutive tokens of one sequence. Decode is many segments of one token, a prefill chunk is
one longer segment, packed training is segments that start at 0 without a cache: one arithmetic serves all of them,
because everything that depends on the arrangement is an index computed here.

Reductions over keys run in absolute tiles of 64 (a token's tile is its position // 64, an entry's its index // 64), so
a query's order of sums is a function of its own position alone. Queries are multiplied in groups of up to 16 of one
sequence, which share their key tiles; a row's bits do not depend on its group.

Here: index records, in numpy, computed once per forward and copied to the device that reads them. Not here: storage
(``cache.py``), arithmetic (``attention.py``).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from rollforward.kernels.rowwise import SUM_TILE
from rollforward.model.errors import ModelInputError

_QUERY_BLOCK = 16
"""Positions whose queries form one group. Small, because every group is padded to the largest one: a short sequence
beside a long one would else be multiplied at the long one's size."""


@dataclass(frozen=True, kw_only=True)
class Segment:
    """A run of consecutive tokens of one sequence."""

    start: int
    """Position of the first token; > 0 needs a cache that holds everything before it."""
    length: int
    """Number of tokens, >= 1."""
    slot: int = -1
    """State slot of the sequence in the cache; -1 without a cache."""
    blocks: tuple[int, ...] = ()
    """Cache blocks of the sequence in order; they cover start + length tokens."""

    @property
    def end(self) -> int:
        """Position after the last token."""
        return self.start + self.length


@dataclass(frozen=True, kw_only=True)
class WindowIndex:
    """Keys of the sliding window, per query group."""

    key_GS: Tensor
    """int64 [G, S]: row of the pool [new tokens | ring rows, W per segment | one zero row]."""
    visible_GQS: Tensor
    """bool [G, Q, S]: True where the query may read the key."""


@dataclass(frozen=True, kw_only=True)
class EntryIndex:
    """Compressed entries of one ratio: which raw rows make the new ones, and which ones each query group may read."""

    raw_EL: Tensor
    """int64 [E, L]: row of the pool [new tokens | ring rows, L per segment | one absent row] of every slot of an
    entry."""
    position_E: Tensor
    """int64 [E]: position of the first token of the entry's (current) window, for RoPE."""
    ordinal_E: Tensor
    """int64 [E]: index of the entry in its sequence."""
    segment_E: Tensor
    """int64 [E]: segment that the entry belongs to."""
    key_GS: Tensor
    """int64 [G, S]: without a cache the row of [new entries | zero row], with one the row of the flattened blocks."""
    visible_GQS: Tensor
    """bool [G, Q, S]: True where causality allows the entry: (s + 1) * ratio - 1 <= position."""


class SegmentBatch:
    """The segments of one forward and every index derived from them.

    Immutable. Tokens of all segments lie flat, in the order of the segments.
    """

    def __init__(self, segments: Sequence[Segment], *, window: int, device: torch.device | str = "cpu") -> None:
        """Check the segments and lay their tokens out.

        Args:
            segments: at least one; each of length >= 1. All have a cache slot or none has.
            window: sliding_window, in tokens.
            device: where the indices are read.

        Raises:
            ModelInputError: for an empty batch, a length < 1, a start > 0 without a cache, segments with and without a
                slot in one batch, a slot used twice, or block 0, which stands for absent entries.
        """
        if not segments:
            raise ModelInputError("no segment was given; a forward needs at least one token")
        for index, segment in enumerate(segments):
            if segment.length < 1 or segment.start < 0:
                raise ModelInputError(
                    f"segment {index} has start {segment.start} and length {segment.length}; "
                    "the rule is start >= 0 and length >= 1. Leave out sequences without new tokens."
                )
            if segment.slot < 0 and segment.start > 0:
                raise ModelInputError(
                    f"segment {index} starts at {segment.start} without a cache slot; "
                    "tokens before it are unknown. Give the slot that holds them, or start at 0."
                )
        self.segments = tuple(segments)
        self.window, self.device = window, torch.device(device)
        self.has_cache = self.segments[0].slot >= 0
        if any((segment.slot >= 0) != self.has_cache for segment in self.segments):
            raise ModelInputError("some segments have a cache slot and some have none; use one kind per forward")
        if self.has_cache:
            self._check_owners()
        self._start = np.array([segment.start for segment in self.segments])
        self._length = np.array([segment.length for segment in self.segments])
        self._end = self._start + self._length
        self._offset = np.concatenate(([0], np.cumsum(self._length)))
        self._build_groups()

    def on(self, device: torch.device) -> "SegmentBatch":
        """Return this batch with its indices on a device; itself where they are there."""
        return self if device == self.device else SegmentBatch(self.segments, window=self.window, device=device)

    def _index(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(values).to(self.device)

    def _check_owners(self) -> None:
        slots = [segment.slot for segment in self.segments]
        if len(set(slots)) != len(slots):
            twice = next(slot for slot in slots if slots.count(slot) > 1)
            raise ModelInputError(
                f"slot {twice} belongs to {slots.count(twice)} segments; a sequence has one segment per forward. "
                "Join its tokens into one segment."
            )
        for index, segment in enumerate(self.segments):
            if min(segment.blocks, default=1) < 1:
                raise ModelInputError(
                    f"segment {index} has blocks {segment.blocks}; block 0 stands for absent entries and belongs to "
                    "no sequence. Give it blocks >= 1."
                )

    def _check_blocks(self, needed_B: np.ndarray) -> None:
        for index, (segment, needed) in enumerate(zip(self.segments, needed_B, strict=True)):
            if len(segment.blocks) < needed:
                raise ModelInputError(
                    f"segment {index} ends at {segment.end} with {len(segment.blocks)} cache blocks; its entries need "
                    f"{needed}. Give the sequence blocks for all of its tokens."
                )

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all segments."""
        return int(self._offset[-1])

    @cached_property
    def segment_T(self) -> Tensor:
        """int64 [T]: the segment of every token."""
        return self._index(self._segment)

    @cached_property
    def position_T(self) -> Tensor:
        """int64 [T]: the position of every token in its own sequence."""
        return self._index(self._position)

    @cached_property
    def last_token_B(self) -> Tensor:
        """int64 [B]: index of the last token of every segment."""
        return self._index(self._offset[1:] - 1)

    @cached_property
    def slot_B(self) -> Tensor:
        """int64 [B]: cache slot of every segment."""
        return self._index(self._slot)

    @property
    def _slot(self) -> np.ndarray:
        return np.array([segment.slot for segment in self.segments])

    def _build_groups(self) -> None:
        """Group queries by (segment, absolute block of positions): the members of a group share their key tiles."""
        self._segment = segment = np.repeat(np.arange(len(self.segments)), self._length)
        self._position = np.arange(self.num_tokens) - self._offset[segment] + self._start[segment]
        block = self._position // _QUERY_BLOCK
        new_group = np.ones(self.num_tokens, dtype=bool)
        new_group[1:] = (segment[1:] != segment[:-1]) | (block[1:] != block[:-1])
        group_T = np.cumsum(new_group) - 1
        first_T = np.flatnonzero(new_group)
        self._group_segment = segment[first_T]
        self._group_tile = block[first_T] * _QUERY_BLOCK // SUM_TILE
        rank_T = np.arange(self.num_tokens) - first_T[group_T]
        num_queries = int(rank_T.max()) + 1
        query_GQ = np.full((len(first_T), num_queries), self.num_tokens)
        query_GQ[group_T, rank_T] = np.arange(self.num_tokens)
        padded_position = np.concatenate((self._position, [-1]))
        self._query_position_GQ = padded_position[query_GQ]
        self.query_GQ = self._index(query_GQ)
        self.row_T = self._index(group_T * num_queries + rank_T)

    @cached_property
    def window_index(self) -> WindowIndex:
        """Window keys: the absolute tiles that hold positions t - W + 1 .. t of the group's queries."""
        num_tiles = (self.window - 2) // SUM_TILE + 2
        first_tile = self._group_tile - num_tiles + 1
        used = max(1, int(min(num_tiles, (self._group_tile + 1).max())))
        first_tile = first_tile + (num_tiles - used)
        position_GS = first_tile[:, None] * SUM_TILE + np.arange(used * SUM_TILE)
        segment_G1 = self._group_segment[:, None]
        start, end = self._start[segment_G1], self._end[segment_G1]
        new_row = self._offset[segment_G1] + position_GS - start
        ring_row = self.num_tokens + segment_G1 * self.window + position_GS % self.window
        zero_row = self.num_tokens + (len(self.segments) * self.window if self.has_cache else 0)
        in_ring = (position_GS >= np.maximum(start - self.window, 0)) & (position_GS < start)
        key_GS = np.where((position_GS >= start) & (position_GS < end), new_row, np.where(in_ring, ring_row, zero_row))
        query = self._query_position_GQ[:, :, None]
        key = position_GS[:, None, :]
        visible = (key >= 0) & (key <= query) & (key > query - self.window)
        return WindowIndex(key_GS=self._index(key_GS), visible_GQS=self._index(visible))

    def entry_index(self, ratio: int, *, overlap: bool, entries_per_block: int = 0) -> EntryIndex:
        """Index the entries of a compression ratio.

        Args:
            ratio: tokens per entry, m.
            overlap: True for CSA, whose entry also reads the window before its own (L = 2m), False for HCA (L = m).
            entries_per_block: entries that one cache block holds; 0 without a cache.

        Returns:
            The record; E may be 0 and S may be 0.

        Raises:
            ModelInputError: a segment has too few blocks for its entries.
        """
        first, last = self._start // ratio, self._end // ratio
        if entries_per_block:
            self._check_blocks(-(-last // entries_per_block))
        count = last - first
        segment_E = np.repeat(np.arange(len(self.segments)), count)
        ordinal_E = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count) + first[segment_E]
        slots = 2 * ratio if overlap else ratio
        position_EL = (ordinal_E * ratio + ratio - slots)[:, None] + np.arange(slots)
        start = self._start[segment_E][:, None]
        new_row = self._offset[segment_E][:, None] + position_EL - start
        ring_row = self.num_tokens + segment_E[:, None] * slots + position_EL % slots
        absent_row = self.num_tokens + (len(self.segments) * slots if self.has_cache else 0)
        raw_EL = np.where(position_EL >= start, new_row, np.where(position_EL >= 0, ring_row, absent_row))
        ordinal_S = np.arange(-(-int(last.max()) // SUM_TILE) * SUM_TILE)
        group_last = last[self._group_segment][:, None]
        key_GS = self._entry_keys(ordinal_S, group_last, first, count, entries_per_block)
        visible = (ordinal_S + 1) * ratio - 1 <= self._query_position_GQ[:, :, None]
        return EntryIndex(
            raw_EL=self._index(raw_EL),
            position_E=self._index(ordinal_E * ratio),
            ordinal_E=self._index(ordinal_E),
            segment_E=self._index(segment_E),
            key_GS=self._index(key_GS),
            visible_GQS=self._index(visible),
        )

    def _entry_keys(
        self, ordinal_S: np.ndarray, group_last: np.ndarray, first: np.ndarray, count: np.ndarray, per_block: int
    ) -> np.ndarray:
        if not self.has_cache:
            base = (np.cumsum(count) - count)[self._group_segment][:, None]
            return np.where(ordinal_S < group_last, base + ordinal_S, int(count.sum()))
        table = self._block_table()[self._group_segment]
        block = np.minimum(ordinal_S // per_block, table.shape[1] - 1)
        return np.where(ordinal_S < group_last, table[:, block] * per_block + ordinal_S % per_block, 0)

    def _block_table(self) -> np.ndarray:
        width = max(1, max(len(segment.blocks) for segment in self.segments))
        table = np.zeros((len(self.segments), width), dtype=np.int64)
        for row, segment in enumerate(self.segments):
            table[row, : len(segment.blocks)] = segment.blocks
        return table

    def entry_rows(self, index: EntryIndex, entries_per_block: int) -> Tensor:
        """Return the row in the flattened blocks where each new entry is stored. int64 [E]."""
        table = self._block_table()
        ordinal = index.ordinal_E.numpy(force=True)
        block = table[index.segment_E.numpy(force=True), ordinal // entries_per_block]
        return self._index(block * entries_per_block + ordinal % entries_per_block)

    def ring_rows(self, size: int) -> tuple[Tensor, Tensor]:
        """Return (token index, row in the flattened rings) of the last ``size`` tokens of every segment. int64 each."""
        kept = np.flatnonzero(self._position >= self._end[self._segment] - size)
        slot = self._slot[self._segment[kept]]
        return self._index(kept), self._index(slot * size + self._position[kept] % size)
