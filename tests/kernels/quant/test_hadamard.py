"""Proves the Hadamard rotation: Sylvester order, scale, involution, gradient, row invariance."""

import pytest
import torch

from rollforward.kernels.errors import ShapeError
from rollforward.kernels.quant.hadamard import hadamard


def sylvester(size: int) -> torch.Tensor:
    """Return the n x n matrix by its recursive definition, float64."""
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while matrix.shape[0] < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)], 0)
    return matrix


@pytest.mark.parametrize("size", [1, 2, 4, 32, 128])
def test_equals_the_matrix_in_sylvester_order(size: int) -> None:
    got = hadamard(torch.eye(size)).to(torch.float64)
    assert torch.allclose(got, sylvester(size) / size**0.5, rtol=1e-7, atol=0)


def test_twice_is_the_identity_and_rows_are_alone() -> None:
    x = torch.randn(3, 5, 128, generator=torch.Generator().manual_seed(0))
    once = hadamard(x)
    assert torch.allclose(hadamard(once), x, rtol=0, atol=1e-5)
    assert torch.equal(hadamard(x[1, 2]), once[1, 2])
    assert torch.equal(hadamard(x[2:, 1:4]), once[2:, 1:4])
    bf16 = x.to(torch.bfloat16)
    assert torch.equal(hadamard(bf16), hadamard(bf16.to(torch.float32)).to(torch.bfloat16))


def test_gradient_is_the_transform_itself() -> None:
    x = torch.randn(2, 32, requires_grad=True)
    upstream = torch.randn(2, 32)
    hadamard(x).backward(upstream)
    assert x.grad is not None
    assert torch.equal(x.grad, hadamard(upstream))


def test_size_must_be_a_power_of_two() -> None:
    with pytest.raises(ShapeError, match="power of two"):
        hadamard(torch.zeros(2, 12))
