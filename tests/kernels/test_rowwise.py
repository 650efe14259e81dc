"""Elementwise forms and sums: values, and that a row's bits are its own.

Not proven here: products (linear/), the whole model (parity/test_bit_contract.py).
"""

import math

import pytest
import torch

from rollforward.kernels.rowwise import row_sum, sigmoid, silu, softplus, take_rows, tree_sum
from tests.helpers.bits import different_bits, torch_threads

EDGE_VALUES = [-200.0, -88.0, -20.0, -1.0, -0.0, 0.0, 1e-30, 0.5, 20.0, 88.0, 200.0]


@pytest.mark.parametrize(
    ("ours", "plain"),
    [
        (sigmoid, lambda v: 1 / (1 + math.exp(-v))),
        (softplus, lambda v: v + math.log1p(math.exp(-v)) if v > 0 else math.log1p(math.exp(v))),
        (silu, lambda v: v / (1 + math.exp(-v))),
    ],
)
def test_values(ours, plain):
    expected = torch.tensor([plain(value) for value in EDGE_VALUES], dtype=torch.float64)
    got = ours(torch.tensor(EDGE_VALUES))
    torch.testing.assert_close(got.double(), expected, rtol=3e-7, atol=1e-37)


@pytest.mark.parametrize("function", [sigmoid, softplus, silu])
def test_saturates_without_nan_in_value_and_gradient(function):
    x = torch.tensor([-1e4, -104.0, 104.0, 1e4], requires_grad=True)
    value = function(x)
    value.sum().backward()
    assert torch.isfinite(value).all()
    assert torch.isfinite(x.grad).all()


@pytest.mark.parametrize("function", [sigmoid, softplus, silu])
@pytest.mark.parametrize("threads", [1, 2])
def test_elementwise_bits_do_not_depend_on_place_in_the_vector(function, threads):
    # Lengths that leave every vector tail, at every offset: the library's own sigmoid differs here.
    x = torch.randn(97, generator=torch.Generator().manual_seed(0)) * 6
    with torch_threads(threads):
        whole = function(x)
        for start in range(0, 40, 3):
            for length in (1, 2, 3, 7, 8, 15, 17, 31):
                assert different_bits(function(x[start : start + length]), whole[start : start + length]) == 0


def test_row_sum_adds_tiles_from_left_to_right():
    # 2^24 swallows a 1 that follows it, and keeps ones that were added up before.
    x = torch.zeros(1, 192)
    x[0, 0], x[0, 64], x[0, 128] = 2.0**24, 1.0, 1.0
    assert row_sum(x).item() == 2.0**24
    assert row_sum(x.flip(1)).item() == 2.0**24 + 2


@pytest.mark.parametrize("width", [1, 5, 63, 64, 65, 130, 512])
def test_row_sum_value_and_padding(width):
    x = torch.randn(3, width, generator=torch.Generator().manual_seed(width))
    total = row_sum(x)
    assert total.shape == (3, 1)
    torch.testing.assert_close(total[:, 0].double(), x.double().sum(-1), rtol=1e-5, atol=1e-5)
    for padding in (1, 3, 64, 200):
        assert different_bits(row_sum(torch.nn.functional.pad(x, (0, padding))), total) == 0


@pytest.mark.parametrize("threads", [1, 2])
def test_row_sum_bits_belong_to_the_row(threads):
    x = torch.randn(600, 200, generator=torch.Generator().manual_seed(1))
    with torch_threads(threads):
        total = row_sum(x)
        for rows in (slice(0, 1), slice(5, 6), slice(17, 40), slice(599, 600)):
            assert different_bits(row_sum(x[rows]), total[rows]) == 0
        assert different_bits(row_sum(x.t().contiguous().t()), total) == 0
        whole_tiles = x[:, :128].contiguous()  # needs no padding, which would make it contiguous
        assert different_bits(row_sum(whole_tiles.t().contiguous().t()), row_sum(whole_tiles)) == 0


@pytest.mark.parametrize("length", [1, 2, 3, 8, 12, 32])
def test_tree_sum_value_along_any_dimension(length):
    x = torch.randn(length, 3, 5, generator=torch.Generator().manual_seed(length))
    torch.testing.assert_close(tree_sum(x, 0), x.sum(0))
    torch.testing.assert_close(tree_sum(x.permute(1, 0, 2), 1), x.sum(0))


@pytest.mark.parametrize("threads", [1, 2])
def test_tree_sum_bits_do_not_depend_on_the_other_dimensions(threads):
    x = torch.randn(9, 40, 13, generator=torch.Generator().manual_seed(4))
    with torch_threads(threads):
        total = tree_sum(x, 0)
        for part in (slice(0, 1), slice(3, 20), slice(39, 40)):
            assert different_bits(tree_sum(x[:, part], 0), total[part]) == 0
            assert different_bits(tree_sum(x[:, part].permute(1, 0, 2), 1), total[part]) == 0


def test_take_rows_gathers_and_its_gradient_repeats():
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(50, 33, generator=generator, requires_grad=True)
    index = torch.randint(0, 4, (20_000, 3), generator=generator)  # every row many times
    weight = torch.randn(20_000, 3, 33, generator=generator)
    assert different_bits(take_rows(x, index), x[index]) == 0
    gradients = []
    with torch_threads(2):
        for _ in range(10):
            (gradient,) = torch.autograd.grad((take_rows(x, index) * weight).sum(), x)
            gradients.append(gradient)
    assert all(different_bits(gradient, gradients[0]) == 0 for gradient in gradients)
    expected = torch.zeros(50, 33, dtype=torch.float64)
    for row in range(4):
        expected[row] = weight.double()[index == row].sum(0)
    torch.testing.assert_close(gradients[0].double(), expected, rtol=1e-3, atol=1e-2)


def test_take_rows_takes_an_empty_index():
    assert take_rows(torch.ones(3, 2), torch.zeros(0, 5, dtype=torch.int64)).shape == (0, 5, 2)
