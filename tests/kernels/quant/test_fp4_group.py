"""Proves the indexer's FP4 activations: the published vector, exact arithmetic, bytes equal to the value."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from rollforward.kernels.errors import ShapeError
from rollforward.kernels.quant.formats import E2M1_VALUES
from rollforward.kernels.quant.fp4_group import fake_quant_fp4_group, fp4_group_dequantise, fp4_group_quantise

GRID = [Fraction(value) for value in E2M1_VALUES[:8]]


def test_published_vector() -> None:
    x = torch.zeros(2, 32)
    x[1, :4] = torch.tensor([1.0, -0.3, 0.25, 2.7])
    packed, scale = fp4_group_quantise(x)
    assert scale.tolist() == [[1], [126]], "the floor 6 x 2^-126 has scale 2^-126"
    assert fp4_group_dequantise(packed, scale)[1, :5].tolist() == [1.0, -0.25, 0.25, 3.0, 0.0]


@settings(max_examples=60)
@given(x=npst.arrays(np.float32, (2, 8), elements=st.floats(width=32, min_value=-(2.0**126), max_value=2.0**126)))
def test_any_group_equals_exact_arithmetic(x: np.ndarray) -> None:
    expected = np.zeros_like(x)
    for row, values in enumerate(x):
        exact = [Fraction(float(value)) for value in values]
        exponent = -126
        while 6 * Fraction(2) ** exponent < max(map(abs, exact)):
            exponent += 1
        for column, value in enumerate(exact):
            magnitude = abs(value) / Fraction(2) ** exponent
            code = min(range(8), key=lambda c: (abs(GRID[c] - magnitude), c % 2))
            expected[row, column] = math.copysign(float(GRID[code] * Fraction(2) ** exponent), value)
    tensor = torch.from_numpy(x)
    assert np.array_equal(fake_quant_fp4_group(tensor, 8).numpy(), expected)
    assert np.array_equal(fp4_group_dequantise(*fp4_group_quantise(tensor, 8), 8).numpy(), expected)


def test_rows_and_dtypes_and_gradient() -> None:
    x = torch.randn(9, 3, 64, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    whole = fake_quant_fp4_group(x)
    assert whole.dtype == torch.bfloat16
    assert torch.equal(fake_quant_fp4_group(x[4:5, 1])[0], whole[4, 1])
    assert torch.equal(fake_quant_fp4_group(x.to(torch.float32)), whole.to(torch.float32))
    leaf = torch.randn(2, 32, requires_grad=True)
    fake_quant_fp4_group(leaf).sum().backward()
    assert leaf.grad is not None
    assert torch.equal(leaf.grad, torch.ones(2, 32))


def test_non_finite_input_becomes_nan() -> None:
    x = torch.ones(3, 32)
    x[1, 5], x[2, 6] = math.nan, math.inf
    got = fake_quant_fp4_group(x)
    assert got[0].isfinite().all()
    assert got[1, 5].isnan()
    assert got[2, 6].isnan()


def test_groups_must_be_whole() -> None:
    with pytest.raises(ShapeError, match="multiple of 32"):
        fake_quant_fp4_group(torch.zeros(2, 40))
    with pytest.raises(ShapeError, match="must be even"):
        fake_quant_fp4_group(torch.zeros(2, 9), 3)
