"""Indexer scores and stable selection: values, ties, NaN, causality, bits.

Not proven here: quantisation of scores (parity/test_native_layers.py).
"""

import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rollforward.kernels.attention.index_topk import index_scores, select_entries
from rollforward.kernels.attention.index_topk_ref import ordered_key, stable_top
from rollforward.kernels.errors import ShapeError
from tests.helpers.bits import different_bits, torch_threads

SPECIAL = [math.nan, math.inf, -math.inf, 0.0, -0.0, 1.0, -1.0, 1e-45, -1e-45, 3.4e38, -3.4e38]
scores_lists = st.lists(st.one_of(st.sampled_from(SPECIAL), st.floats(width=32)), min_size=1, max_size=20)


def select(scores: list[float], visible: list[bool], k: int) -> list[int]:
    mask = select_entries(torch.tensor([[scores]]), torch.tensor([[visible]]), k=k)
    return mask[0, 0].nonzero().flatten().tolist()


def test_scores_by_hand():
    # Heads (1, 0) and (0, 1) with weights 2 and -3; entry (5, 7) scores 10 - 21, entry (-1, 4) scores 0 - 12.
    q = torch.eye(2).view(1, 1, 2, 2)
    keys = torch.tensor([[[5.0, 7.0], [-1.0, 4.0], [-1.0, -1.0]]])
    scores = index_scores(q, keys, torch.tensor([[[2.0, -3.0]]]))
    assert torch.equal(scores, torch.tensor([[[-11.0, -12.0, 0.0]]]))


def test_scores_equal_the_written_out_form():
    generator = torch.Generator().manual_seed(0)
    q, keys = torch.randn(2, 5, 16, 32, generator=generator), torch.randn(2, 64, 32, generator=generator)
    weight = torch.randn(2, 5, 16, generator=generator)
    expected = torch.einsum("gqns,gqn->gqs", torch.relu(torch.einsum("gqnh,gsh->gqns", q, keys)), weight)
    torch.testing.assert_close(index_scores(q, keys, weight), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("threads", [1, 2])
def test_score_bits_belong_to_query_and_entry(threads):
    generator = torch.Generator().manual_seed(1)
    q, keys = torch.randn(3, 40, 16, 32, generator=generator), torch.randn(3, 192, 32, generator=generator)
    weight = torch.randn(3, 40, 16, generator=generator)
    with torch_threads(threads):
        whole = index_scores(q, keys, weight)
        for group, start, stop, entries in ((0, 0, 1, 64), (2, 39, 40, 192), (1, 3, 20, 128)):
            rows = slice(start, stop)
            part = index_scores(
                q[group : group + 1, rows], keys[group : group + 1, :entries], weight[group : group + 1, rows]
            )
            assert different_bits(part, whole[group : group + 1, rows, :entries]) == 0


def test_the_smaller_index_wins_a_tie():
    assert select([1.0, 2.0, 2.0, 2.0, 1.0], [True] * 5, 2) == [1, 2]
    assert select([0.0, -0.0, 0.0, -0.0], [True] * 4, 3) == [0, 1, 2]
    assert select([-0.0, 0.0], [True, True], 1) == [0]
    assert select([0.0] * 200, [True] * 200, 7) == list(range(7))


def test_nan_counts_as_minus_infinity():
    assert select([math.nan, -5.0, math.nan, -math.inf, 3.0], [True] * 5, 2) == [1, 4]
    assert select([math.nan, -5.0, math.nan, 3.0], [True] * 4, 3) == [0, 1, 3]


def test_what_is_not_visible_is_never_selected():
    visible = [True, True, False, False]
    for unseen in (math.nan, math.inf, 9.0):
        assert select([1.0, -math.inf, unseen, unseen], visible, 3) == [0, 1]
        assert select([math.nan, math.nan, unseen, unseen], visible, 3) == [0, 1]
    assert select([math.inf] * 4, [False] * 4, 2) == []


def test_all_visible_ones_are_selected_when_there_are_no_more_than_k():
    assert select([3.0, math.nan, -math.inf], [True] * 3, 8) == [0, 1, 2]
    assert select([3.0, 1.0, 2.0], [True] * 3, 3) == [0, 1, 2]


@settings(max_examples=150, deadline=None)
@given(scores_lists, st.integers(1, 25), st.randoms(use_true_random=False))
@example([math.nan, 0.0, -0.0], 1, None)
def test_selection_equals_a_sort(scores, k, random):
    visible = [random is None or random.random() < 0.7 for _ in scores]
    rounded = torch.tensor(scores).tolist()
    value = [-math.inf if math.isnan(score) else score for score in rounded]
    order = sorted((index for index in range(len(scores)) if visible[index]), key=lambda index: (-value[index], index))
    assert select(scores, visible, k) == sorted(order[:k])


@settings(max_examples=100, deadline=None)
@given(scores_lists)
def test_stable_top_orders_larger_first_then_smaller_index(scores):
    value = [-math.inf if math.isnan(score) else score for score in torch.tensor(scores).tolist()]
    expected = sorted(range(len(scores)), key=lambda index: (-value[index], index))
    assert stable_top(torch.tensor([scores]), len(scores))[0].tolist() == expected


def test_ordered_key_is_monotone_over_the_whole_range():
    values = torch.tensor([math.nan, -math.inf, -3.4e38, -1.0, -1e-45, 0.0, 1e-45, 1.0, 3.4e38, math.inf])
    key = ordered_key(values)
    assert key[0] == key[1]
    assert (key[2:] > key[1:-1]).all()
    assert ordered_key(torch.tensor([-0.0])) == ordered_key(torch.tensor([0.0]))


def test_no_gradient_flows():
    q = torch.randn(1, 1, 2, 4, requires_grad=True)
    scores = index_scores(q, torch.randn(1, 64, 4), torch.ones(1, 1, 2))
    assert not scores.requires_grad


def test_no_entries_and_wrong_shapes():
    empty = select_entries(torch.zeros(2, 3, 0), torch.zeros(2, 3, 0, dtype=torch.bool), k=4)
    assert empty.shape == (2, 3, 0)
    with pytest.raises(ShapeError, match="S"):
        select_entries(torch.zeros(1, 1, 4), torch.ones(1, 1, 5, dtype=torch.bool), k=2)
