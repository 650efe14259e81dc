"""Index records of a forward: every visible key is the right token of the right sequence, at its absolute place.

The property tests rebuild from the rules of the specification (section 3) which token stands in every row that an index
may point to, and compare. Not proven here: arithmetic on what is gathered (parity/).
"""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollforward.model.errors import ModelInputError
from rollforward.model.segments import Segment, SegmentBatch

TILE = 64
NOBODY = (-1, -1)

segment_lists = st.lists(
    st.tuples(st.one_of(st.integers(0, 12), st.integers(0, 300)), st.one_of(st.integers(1, 5), st.integers(1, 150))),
    min_size=1,
    max_size=4,
)


def make_batch(pieces: list[tuple[int, int]], window: int, has_cache: bool, blocks: int = 0) -> SegmentBatch:
    segments = []
    for index, (start, length) in enumerate(pieces):
        own = tuple(range(1 + index * blocks, 1 + (index + 1) * blocks))
        if has_cache:
            segments.append(Segment(start=start, length=length, slot=len(pieces) - index, blocks=own))
        else:
            segments.append(Segment(start=0, length=length))
    return SegmentBatch(segments, window=window)


def pool_labels(batch: SegmentBatch, ring: int) -> list[tuple[int, int]]:
    """Name (segment, position) of every row of [new tokens | ring rows | one empty row], as a cache would hold them."""
    labels = [(int(s), int(p)) for s, p in zip(batch.segment_T, batch.position_T, strict=True)]
    if batch.has_cache:
        for index, segment in enumerate(batch.segments):
            rows = [NOBODY] * ring
            for position in range(max(0, segment.start - ring), segment.start):
                rows[position % ring] = (index, position)
            labels += rows
    return [*labels, NOBODY]


def queries(batch: SegmentBatch):
    """Yield (group, query, segment, position) of every real query and check that the layout holds each token once."""
    seen = []
    for group in range(batch.query_GQ.shape[0]):
        for query in range(batch.query_GQ.shape[1]):
            token = int(batch.query_GQ[group, query])
            if token < batch.num_tokens:
                seen.append(token)
                assert int(batch.row_T[token]) == group * batch.query_GQ.shape[1] + query
                yield group, query, int(batch.segment_T[token]), int(batch.position_T[token])
    assert sorted(seen) == list(range(batch.num_tokens))


@given(pieces=segment_lists, window=st.sampled_from([1, 2, 10, 16, 64, 65, 128]), has_cache=st.booleans())
def test_window_keys_are_the_last_w_tokens(pieces, window, has_cache):
    batch = make_batch(pieces, window, has_cache)
    labels = pool_labels(batch, window)
    index = batch.window_index
    assert index.key_GS.shape[1] % TILE == 0
    for group, query, segment, position in queries(batch):
        columns = index.visible_GQS[group, query].nonzero().flatten().tolist()
        got = [labels[int(index.key_GS[group, column])] for column in columns]
        assert got == [(segment, p) for p in range(max(0, position - window + 1), position + 1)]
        # A key's place in its tile is its position's, so that the order of sums is the position's alone.
        assert [column % TILE for column in columns] == [p % TILE for _, p in got]
    for group in range(index.key_GS.shape[0]):
        absent = batch.query_GQ[group] == batch.num_tokens
        assert not bool(index.visible_GQS[group, absent].any())  # absent queries see nothing
        stale = [row for row in index.key_GS[group].tolist() if labels[row] == NOBODY]
        assert set(stale) <= {len(labels) - 1}  # a ring row that holds no token of the sequence is not even gathered


@given(
    pieces=segment_lists,
    ratio_overlap=st.sampled_from([(4, True), (6, True), (32, False), (40, False), (128, False)]),
    has_cache=st.booleans(),
)
def test_entries_read_their_windows_and_are_seen_from_their_last_token_on(pieces, ratio_overlap, has_cache):
    ratio, overlap = ratio_overlap
    per_block = 3
    blocks = -(-max(start + length for start, length in pieces) // (ratio * per_block)) if has_cache else 0
    batch = make_batch(pieces, 16, has_cache, blocks)
    slots = 2 * ratio if overlap else ratio
    index = batch.entry_index(ratio, overlap=overlap, entries_per_block=per_block if has_cache else 0)
    labels = pool_labels(batch, slots)

    made = []
    for entry in range(index.raw_EL.shape[0]):
        segment, ordinal = int(index.segment_E[entry]), int(index.ordinal_E[entry])
        made.append((segment, ordinal))
        assert int(index.position_E[entry]) == ordinal * ratio
        first = ordinal * ratio + ratio - slots
        expected = [(segment, p) if p >= 0 else NOBODY for p in range(first, first + slots)]
        assert [labels[int(row)] for row in index.raw_EL[entry]] == expected
    assert made == [
        (index_, ordinal)
        for index_, segment in enumerate(batch.segments)
        for ordinal in range(segment.start // ratio, segment.end // ratio)
    ]

    where = _entry_places(batch, index, made, per_block)
    for group, query, segment, position in queries(batch):
        columns = index.visible_GQS[group, query].nonzero().flatten().tolist()
        assert columns == [s for s in range(1000) if (s + 1) * ratio - 1 <= position]
        assert [int(index.key_GS[group, s]) for s in columns] == [where[segment, s] for s in columns]
        exists = batch.segments[segment].end // ratio
        absent = {0} if has_cache else {len(made)}
        assert set(index.key_GS[group, exists:].tolist()) <= absent  # block 0, or the zero row


def _entry_places(batch, index, made, per_block):
    """Map (segment, ordinal) to the row that key_GS must point to."""
    if not batch.has_cache:
        return {name: row for row, name in enumerate(made)}
    where = {
        (number, block * per_block + row): segment.blocks[block] * per_block + row
        for number, segment in enumerate(batch.segments)
        for block in range(len(segment.blocks))
        for row in range(per_block)
    }
    rows = batch.entry_rows(index, per_block).tolist()
    assert rows == [where[name] for name in made]
    assert all(row >= per_block for row in rows)  # block 0 is never written
    return where


@given(pieces=segment_lists, size=st.sampled_from([1, 8, 16, 40]))
def test_rings_keep_the_last_tokens(pieces, size):
    batch = make_batch(pieces, 16, has_cache=True, blocks=100)
    token, row = batch.ring_rows(size)
    written = dict(zip(row.tolist(), token.tolist(), strict=True))
    assert len(written) == len(token)  # no row twice
    offset = 0
    for segment in batch.segments:
        for position in range(max(segment.start, segment.end - size), segment.end):
            expected = offset + position - segment.start
            assert written.pop(segment.slot * size + position % size) == expected
        offset += segment.length
    assert not written


def test_keys_beyond_the_pool_are_the_empty_row():
    batch = make_batch([(0, 3)], 16, has_cache=False)
    unseen = ~batch.window_index.visible_GQS.any(1)
    assert bool((batch.window_index.key_GS[unseen] == 3).all())
    entries = batch.entry_index(4, overlap=True)
    assert entries.raw_EL.shape == (0, 8)
    assert entries.visible_GQS.shape[2] == 0


def test_layout_by_hand():
    batch = SegmentBatch([Segment(start=62, length=4, slot=1), Segment(start=0, length=2, slot=0)], window=2)
    assert batch.position_T.tolist() == [62, 63, 64, 65, 0, 1]
    assert batch.segment_T.tolist() == [0, 0, 0, 0, 1, 1]
    assert batch.last_token_B.tolist() == [3, 5]
    assert batch.slot_B.tolist() == [1, 0]
    assert batch.query_GQ.tolist() == [[0, 1], [2, 3], [4, 5]]  # a group ends where a block of 64 positions does
    assert batch.row_T.tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("segments", "message"),
    [
        ([], "at least one token"),
        ([Segment(start=0, length=0)], "length >= 1"),
        ([Segment(start=0, length=3), Segment(start=0, length=-1)], "segment 1"),
        ([Segment(start=-1, length=3, slot=0)], "start >= 0"),
        ([Segment(start=5, length=1)], "without a cache slot"),
        ([Segment(start=0, length=1, slot=0), Segment(start=0, length=1)], "one kind per forward"),
        ([Segment(start=0, length=1), Segment(start=0, length=1, slot=0)], "one kind per forward"),
        ([Segment(start=0, length=1, slot=3), Segment(start=2, length=1, slot=3)], "slot 3"),
        ([Segment(start=0, length=1, slot=3, blocks=(4, 0))], "block 0"),
    ],
)
def test_segments_that_make_no_sense_are_refused(segments, message):
    with pytest.raises(ModelInputError, match=message):
        SegmentBatch(segments, window=16)


def test_too_few_blocks_are_refused_before_anything_is_written():
    enough = SegmentBatch([Segment(start=30, length=3, slot=0, blocks=(1, 2))], window=16)
    assert enough.entry_index(4, overlap=True, entries_per_block=4).ordinal_E.tolist() == [7]
    short = SegmentBatch(
        [Segment(start=0, length=64, slot=1, blocks=(3, 4, 5, 6)), Segment(start=30, length=3, slot=0, blocks=(1,))],
        window=16,
    )
    with pytest.raises(ModelInputError, match="segment 1 ends at 33 with 1 cache blocks"):
        short.entry_index(4, overlap=True, entries_per_block=4)


def test_a_segment_is_immutable():
    with pytest.raises(AttributeError):
        Segment(start=0, length=1).length = 2
    assert Segment(start=3, length=4, slot=0).end == 7


def test_indices_are_int64_tensors():
    batch = make_batch([(5, 70)], 16, has_cache=True, blocks=40)
    index = batch.entry_index(4, overlap=True, entries_per_block=2)
    for tensor in (batch.query_GQ, batch.row_T, batch.window_index.key_GS, index.key_GS, index.raw_EL):
        assert tensor.dtype == torch.int64
    assert isinstance(batch.segment_T.numpy(), np.ndarray)
