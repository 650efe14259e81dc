"""Pooling of a window into an entry: values, absent slots, gradients, bits.

Not proven here: which tokens form a window (model/test_segments.py), roles of the halves (parity/test_oracle.py).
"""

import math

import pytest
import torch

from rollforward.kernels.attention.compress import pool_window
from tests.helpers.bits import different_bits, torch_threads


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def test_values_by_hand_per_channel():
    # Channel 0 weighs 1/4 and 3/4, channel 1 weighs both alike.
    kv = torch.tensor([[[8.0, 1.0], [4.0, 5.0]]])
    score = torch.tensor([[[0.0, 2.0], [math.log(3), 2.0]]])
    torch.testing.assert_close(pool_window(kv, score), torch.tensor([[5.0, 3.0]]))


def test_absent_slots_count_nothing_and_change_no_bit_of_their_gradient():
    kv, score = normal(3, 8, 5), normal(3, 8, 5, seed=1)
    kv[0, :4], score[0, :4] = 0.0, -torch.inf
    kv.requires_grad_(True)
    score.requires_grad_(True)
    entries = pool_window(kv, score)
    expected = (torch.softmax(score[0, 4:].detach(), 0) * kv[0, 4:].detach()).sum(0)
    torch.testing.assert_close(entries[0], expected)
    gradients = torch.autograd.grad(entries.square().sum(), (kv, score))
    assert all(torch.isfinite(gradient).all() for gradient in gradients)
    assert all(torch.equal(gradient[0, :4], torch.zeros(4, 5)) for gradient in gradients)


def test_scores_far_apart_do_not_overflow():
    score = torch.tensor([[[1e4], [-1e4], [9999.0]]])
    entry = pool_window(torch.tensor([[[1.0], [100.0], [3.0]]]), score)
    torch.testing.assert_close(entry, torch.tensor([[(1 + 3 / math.e) / (1 + 1 / math.e)]]))


@pytest.mark.parametrize("slots", [1, 6, 8, 40])
def test_equals_the_written_out_form_and_its_gradient(slots):
    kv = normal(3, slots, 4, dtype=torch.float64).requires_grad_(True)
    score = (normal(3, slots, 4, seed=1, dtype=torch.float64) * 3).requires_grad_(True)
    weight = normal(3, 4, seed=2, dtype=torch.float64)
    plain = (torch.softmax(score, 1) * kv).sum(1)
    torch.testing.assert_close(pool_window(kv, score), plain)
    ours = torch.autograd.grad((pool_window(kv, score) * weight).sum(), (kv, score))
    for got, expected in zip(ours, torch.autograd.grad((plain * weight).sum(), (kv, score)), strict=True):
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("slots", "width"), [(8, 80), (32, 80), (8, 33), (128, 16)])
def test_bits_belong_to_the_entry(threads, slots, width):
    kv, score = normal(41, slots, width), normal(41, slots, width, seed=1)
    with torch_threads(threads):
        whole = pool_window(kv, score)
        for entries in (slice(0, 1), slice(2, 5), slice(20, 41), slice(40, 41)):
            assert different_bits(pool_window(kv[entries].clone(), score[entries].clone()), whole[entries]) == 0


def test_no_entries():
    assert pool_window(torch.zeros(0, 8, 5), torch.zeros(0, 8, 5)).shape == (0, 5)
