"""RMS normalisation: values, gradients, bits.

Not proven here: where the model normalises (parity/test_oracle.py).
"""

import pytest
import torch

from rollforward.kernels.norm.rms_norm import rms_norm
from tests.helpers.bits import different_bits, torch_threads


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def test_values_by_hand():
    # mean square of (3, 4, 0, 5) is 12.5; with eps 0.25 the divisor is sqrt(12.75).
    x = torch.tensor([[3.0, 4.0, 0.0, 5.0]])
    weight = torch.tensor([1.0, -2.0, 7.0, 0.5])
    expected = torch.tensor([[3.0, -8.0, 0.0, 2.5]]) / 12.75**0.5
    torch.testing.assert_close(rms_norm(x, weight, eps=0.25), expected)
    torch.testing.assert_close(rms_norm(x, None, eps=0.25), x / 12.75**0.5)


def test_zero_rows_stay_zero_and_give_finite_gradients():
    x = torch.zeros(2, 5, requires_grad=True)
    y = rms_norm(x, torch.ones(5), eps=1e-6)
    assert torch.equal(y, torch.zeros(2, 5))
    y.sum().backward()
    torch.testing.assert_close(x.grad, torch.full((2, 5), 1000.0))


def test_no_rows():
    assert rms_norm(torch.zeros(0, 8), torch.ones(8), eps=1e-6).shape == (0, 8)


@pytest.mark.parametrize("width", [1, 7, 64, 100])
def test_gradients_in_float64(width):
    x = normal(2, 3, width, dtype=torch.float64).requires_grad_(True)
    weight = normal(width, seed=1, dtype=torch.float64).requires_grad_(True)
    assert torch.autograd.gradcheck(lambda x, w: rms_norm(x, w, eps=1e-2), (x, weight))
    assert torch.autograd.gradcheck(lambda x: rms_norm(x, None, eps=1e-2), (x,))


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("width", [48, 80, 128, 130])
def test_bits_belong_to_the_row(threads, width):
    x, weight = normal(300, width), normal(width, seed=1)
    with torch_threads(threads):
        whole = rms_norm(x, weight, eps=1e-6)
        for rows in (slice(0, 1), slice(3, 5), slice(100, 117), slice(299, 300)):
            assert different_bits(rms_norm(x[rows].clone(), weight, eps=1e-6), whole[rows]) == 0
        assert different_bits(rms_norm(x.t().contiguous().t(), weight, eps=1e-6), whole) == 0
        by_head = rms_norm(x.view(100, 3, width), None, eps=1e-6).view(300, width)
        assert different_bits(by_head, rms_norm(x, None, eps=1e-6)) == 0
        assert different_bits(rms_norm(x.clone().requires_grad_(True), weight, eps=1e-6), whole) == 0


def test_gradient_repeats():
    x, weight = normal(200, 96).requires_grad_(True), normal(96, seed=1).requires_grad_(True)
    runs = [torch.autograd.grad(rms_norm(x, weight, eps=1e-6).pow(3).sum(), (x, weight)) for _ in range(10)]
    assert all(different_bits(run[part], runs[0][part]) == 0 for run in runs for part in (0, 1))
