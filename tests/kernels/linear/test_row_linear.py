"""Row-invariant products: values, gradients, and bits under every way to cut a batch.

Not proven here: other machines' GEMMs; the contract is per machine type.
"""

import pytest
import torch

from rollforward.kernels.errors import ShapeError
from rollforward.kernels.linear.row_linear import row_linear, tile_matmul
from tests.helpers.bits import different_bits, torch_threads


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def test_values_by_hand():
    x_TK = torch.tensor([[1.0, 2.0], [0.0, -1.0], [3.0, 0.5]])
    w_NK = torch.tensor([[1.0, 10.0], [2.0, 0.0], [0.0, 4.0]])
    expected = torch.tensor([[21.0, 2.0, 8.0], [-10.0, 0.0, -4.0], [8.0, 6.0, 2.0]])
    assert torch.equal(row_linear(x_TK, w_NK), expected)


@pytest.mark.parametrize("rows", [0, 1, 15, 16, 17, 33])
def test_any_number_of_rows(rows):
    x_TK, w_NK = normal(rows, 48), normal(24, 48, seed=1)
    x_TK.requires_grad_(True)
    w_NK.requires_grad_(True)
    y_TN = row_linear(x_TK, w_NK)
    assert y_TN.shape == (rows, 24)
    torch.testing.assert_close(y_TN, x_TK @ w_NK.t())
    y_TN.sum().backward()
    assert x_TK.grad.shape == x_TK.shape
    torch.testing.assert_close(w_NK.grad, x_TK.detach().sum(0).expand(24, -1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(
    ("width", "outputs"), [(48, 8), (128, 320), (33, 7), (512, 4), (128, 1), (80, 512), (4096, 24)]
)
def test_bits_do_not_depend_on_the_batch(threads, width, outputs):
    x_TK, w_NK = normal(150, width), normal(outputs, width, seed=1)
    with torch_threads(threads):
        whole = row_linear(x_TK, w_NK)
        for rows in (1, 2, 3, 5, 11, 16, 17, 100):
            for start in (0, 1, 7, 16, 45):
                part = row_linear(x_TK[start : start + rows].clone(), w_NK)
                assert different_bits(part, whole[start : start + rows]) == 0, (rows, start)


def test_one_thread_equals_two():
    x_TK, w_NK = normal(70, 128), normal(320, 128, seed=1)
    with torch_threads(1):
        one = row_linear(x_TK, w_NK)
    with torch_threads(2):
        two = row_linear(x_TK, w_NK)
    assert different_bits(one, two) == 0


def test_bits_do_not_depend_on_strides_grad_mode_or_neighbours():
    x_TK, w_NK = normal(40, 96), normal(20, 96, seed=1)
    plain = row_linear(x_TK, w_NK)
    assert different_bits(row_linear(x_TK.t().contiguous().t(), w_NK), plain) == 0
    assert different_bits(row_linear(normal(40, 200)[:, :96].copy_(x_TK), w_NK), plain) == 0
    assert different_bits(row_linear(x_TK, w_NK.clone().requires_grad_(True)), plain) == 0
    dirty = x_TK.clone()
    dirty[[0, 2, 17, 39]] = torch.tensor([torch.nan, torch.inf, -1e38, 1e-42]).unsqueeze(1)
    clean_rows = [row for row in range(40) if row not in (0, 2, 17, 39)]
    assert different_bits(row_linear(dirty, w_NK)[clean_rows], plain[clean_rows]) == 0


def test_gradients_in_float64():
    x_TK = normal(19, 5, dtype=torch.float64).requires_grad_(True)
    w_NK = normal(4, 5, seed=1, dtype=torch.float64).requires_grad_(True)
    assert torch.autograd.gradcheck(row_linear, (x_TK, w_NK))


def test_gradient_is_computed_only_where_it_is_needed():
    x_TK, w_NK = normal(5, 8), normal(3, 8, seed=1).requires_grad_(True)
    row_linear(x_TK, w_NK).sum().backward()
    assert x_TK.grad is None
    assert w_NK.grad is not None


def test_tile_matmul_value_gradient_and_bits():
    a_GRK = normal(3, 70, 48)
    b_GKN = normal(3, 48, 64, seed=1)
    whole = tile_matmul(a_GRK, b_GKN)
    torch.testing.assert_close(whole, a_GRK @ b_GKN, rtol=1e-5, atol=1e-5)
    assert torch.autograd.gradcheck(
        tile_matmul,
        (
            normal(2, 17, 3, dtype=torch.float64).requires_grad_(True),
            normal(2, 3, 5, seed=1, dtype=torch.float64).requires_grad_(True),
        ),
    )
    for threads in (1, 2):
        with torch_threads(threads):
            for rows in (1, 4, 15, 16, 33):
                for start in (0, 5, 32):
                    part = tile_matmul(a_GRK[1:2, start : start + rows], b_GKN[1:2])
                    assert different_bits(part, whole[1:2, start : start + rows]) == 0, (threads, rows, start)


def test_tile_matmul_bits_do_not_depend_on_the_number_of_keys():
    # One query alone sees one tile of keys, in a longer batch several: the logits of the first tile must be the same.
    q_GRK, keys_GKN = normal(1, 8, 80), normal(1, 320, 80, seed=1)
    for threads in (1, 2):
        with torch_threads(threads):
            whole = tile_matmul(q_GRK, keys_GKN.transpose(1, 2))
            for keys in (64, 128, 192, 256):
                part = tile_matmul(q_GRK, keys_GKN[:, :keys].transpose(1, 2))
                assert different_bits(part, whole[..., :keys]) == 0, (threads, keys)


def test_weight_gradient_repeats():
    x_TK, w_NK = normal(300, 64), normal(96, 64, seed=1).requires_grad_(True)
    gradients = [torch.autograd.grad(row_linear(x_TK, w_NK).square().sum(), w_NK)[0] for _ in range(10)]
    assert all(different_bits(gradient, gradients[0]) == 0 for gradient in gradients)


def test_widths_that_disagree_are_an_error():
    with pytest.raises(ShapeError, match="K"):
        row_linear(normal(3, 8), normal(4, 9))
    with pytest.raises(ShapeError, match="G"):
        tile_matmul(normal(2, 3, 8), normal(1, 8, 4))
