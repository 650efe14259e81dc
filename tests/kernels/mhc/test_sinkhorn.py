"""Sinkhorn: the fixed vector of the model specification, its gradient, its bits.

Not proven here: how the logits come about (test_mix.py).
"""

import pytest
import torch

from rollforward.kernels.mhc.sinkhorn import sinkhorn
from tests.helpers.bits import different_bits, torch_threads

START = [[0.0, 1, 2, 3], [3, 0, 1, 2], [-1, 4, 0, 0], [2, 2, -3, 1]]
RESULT = [
    [0.015347, 0.016586, 0.528466, 0.439601],
    [0.459731, 0.009101, 0.289964, 0.241204],
    [0.013065, 0.770800, 0.165490, 0.050643],
    [0.511856, 0.203512, 0.016079, 0.268552],
]


def plain_sinkhorn(m_MMT: torch.Tensor, iters: int, eps: float) -> torch.Tensor:
    """Write the released order out with library functions, for autograd."""
    current = torch.softmax(m_MMT, dim=1) + eps
    current = current / (current.sum(0, keepdim=True) + eps)
    for _ in range(iters - 1):
        current = current / (current.sum(1, keepdim=True) + eps)
        current = current / (current.sum(0, keepdim=True) + eps)
    return current


def test_fixed_vector():
    comb = sinkhorn(torch.tensor(START).unsqueeze(-1), iters=20, eps=1e-6).squeeze(-1)
    torch.testing.assert_close(comb, torch.tensor(RESULT), rtol=0, atol=6e-7)


def test_one_pass_by_hand():
    # softmax of equal logits is 1/2 everywhere, and the first pass is over columns.
    comb = sinkhorn(torch.zeros(2, 2, 1), iters=1, eps=0.25)
    torch.testing.assert_close(comb, torch.full((2, 2, 1), 0.75 / 1.75))


def test_last_pass_is_over_columns():
    logits = torch.randn(4, 4, 9, generator=torch.Generator().manual_seed(1)) * 3
    comb = sinkhorn(logits, iters=2, eps=1e-6)
    torch.testing.assert_close(comb.sum(0), torch.ones(4, 9), rtol=0, atol=3e-6)
    assert (comb.sum(1) - 1).abs().max() > 1e-2


def test_extreme_logits_give_no_nan():
    logits = torch.full((4, 4, 1), -1e4)
    logits[0, 0], logits[3, 2] = 1e4, 3e4
    comb = sinkhorn(logits.requires_grad_(True), iters=20, eps=1e-6)
    assert torch.isfinite(comb).all()
    assert torch.isfinite(torch.autograd.grad(comb.square().sum(), logits)[0]).all()


@pytest.mark.parametrize("iters", [1, 2, 20])
def test_gradient_in_float64(iters):
    logits = torch.randn(4, 4, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64).requires_grad_(True)
    assert torch.autograd.gradcheck(lambda m: sinkhorn(m, iters=iters, eps=1e-2), (logits,))
    weight = torch.randn(4, 4, 3, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    ours = torch.autograd.grad((sinkhorn(logits, iters=iters, eps=1e-6) * weight).sum(), logits)[0]
    plain = torch.autograd.grad((plain_sinkhorn(logits, iters, 1e-6) * weight).sum(), logits)[0]
    torch.testing.assert_close(ours, plain, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("threads", [1, 2])
def test_bits_belong_to_the_token(threads):
    logits = torch.randn(4, 4, 101, generator=torch.Generator().manual_seed(4)) * 2
    with torch_threads(threads):
        whole = sinkhorn(logits, iters=20, eps=1e-6)
        for tokens in (slice(0, 1), slice(7, 8), slice(5, 22), slice(100, 101)):
            assert different_bits(sinkhorn(logits[..., tokens].clone(), iters=20, eps=1e-6), whole[..., tokens]) == 0
        assert sinkhorn(logits[..., :0], iters=20, eps=1e-6).shape == (4, 4, 0)
