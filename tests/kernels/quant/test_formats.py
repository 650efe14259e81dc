"""Proves the bit-level helpers against exact rational arithmetic: grids, ceiling scales, E8M0, nibbles.

What it does not prove: the policies of the quantisers (their own tests).
"""

import itertools
import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollforward.kernels.quant import formats
from rollforward.kernels.quant.formats import E2M1, E2M1_VALUES, E4M3, FloatFormat

E4M3_VALUES = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).to(torch.float64).tolist()
GRIDS = [(E2M1, list(E2M1_VALUES[:8])), (E4M3, E4M3_VALUES)]


def nearest(grid: list[float], value: float) -> float:
    """Return the grid value nearest to |value| with its sign; a tie goes to the even code."""
    exact = abs(Fraction(value))
    best = min(range(len(grid)), key=lambda code: (abs(Fraction(grid[code]) - exact), code % 2))
    return math.copysign(grid[best], value)


@pytest.mark.parametrize(("grid", "values"), GRIDS, ids=["e2m1", "e4m3"])
def test_grid_values_ties_and_neighbours_round_exactly(grid: FloatFormat, values: list[float]) -> None:
    inputs: list[float] = []
    for low, high in itertools.pairwise(values):
        middle = torch.tensor([(low + high) / 2], dtype=torch.float32)
        inputs += [low, high, middle.item()]
        inputs += [torch.nextafter(middle, torch.tensor([end])).item() for end in (0.0, 1e9)]
    inputs += [-value for value in inputs]
    got = formats.round_to_grid(grid, torch.tensor(inputs, dtype=torch.float32)).tolist()
    assert got == [nearest(values, value) for value in inputs]


@pytest.mark.parametrize(("grid", "values"), GRIDS, ids=["e2m1", "e4m3"])
@given(value=st.floats(width=32, min_value=-6, max_value=6))
def test_rounding_of_any_float(grid: FloatFormat, values: list[float], value: float) -> None:
    assert formats.round_to_grid(grid, torch.tensor([value])).item() == nearest(values, value)


def test_zero_is_positive_and_non_finite_becomes_nan() -> None:
    zeros = formats.round_to_grid(E4M3, torch.tensor([-0.0, -1e-30]))
    assert torch.equal(torch.signbit(zeros), torch.tensor([False, False]))
    assert formats.round_to_grid(E2M1, torch.tensor([math.nan, math.inf, -math.inf])).isnan().all()


def test_e4m3_cast_of_torch_is_nearest_even() -> None:
    """The cast is used to store payloads; the grid rounding and it must agree on every code and every tie."""
    values = torch.tensor(E4M3_VALUES, dtype=torch.float32)
    ties = (values[1:] + values[:-1]) / 2
    inputs = torch.cat(
        [values, ties, torch.nextafter(ties, torch.tensor(0.0)), torch.nextafter(ties, torch.tensor(1e9))]
    )
    assert torch.equal(inputs.to(torch.float8_e4m3fn).to(torch.float32), formats.round_to_grid(E4M3, inputs))


@pytest.mark.parametrize("grid", [E2M1, E4M3], ids=["e2m1", "e4m3"])
def test_ceil_scale_around_every_power_of_two(grid: FloatFormat) -> None:
    """amax = max x 2^k gives exactly 2^k, one ulp more gives 2^(k+1), one ulp less stays."""
    exponents = range(-126, grid.max_scale_byte - 127)
    amax = torch.tensor([grid.max_value * 2.0**k for k in exponents], dtype=torch.float32)
    expected = torch.tensor([k + 127 for k in exponents], dtype=torch.int32)
    above, below = torch.nextafter(amax, torch.tensor(math.inf)), torch.nextafter(amax, torch.tensor(0.0))
    assert torch.equal(formats.ceil_scale_bytes(grid, amax), expected)
    assert torch.equal(formats.ceil_scale_bytes(grid, above), expected + 1)
    assert torch.equal(formats.ceil_scale_bytes(grid, below), expected)


@pytest.mark.parametrize("grid", [E2M1, E4M3], ids=["e2m1", "e4m3"])
@given(amax=st.floats(width=32, min_value=0, max_value=2.0**127))
def test_ceil_scale_is_the_smallest_that_does_not_saturate(grid: FloatFormat, amax: float) -> None:
    byte = int(formats.ceil_scale_bytes(grid, torch.tensor([amax])))
    scale = Fraction(2) ** (byte - 127)
    assert Fraction(amax) <= Fraction(grid.max_value) * scale
    assert byte == 1 or Fraction(amax) > Fraction(grid.max_value) * scale / 2


def test_e8m0_decodes_every_byte() -> None:
    values = formats.e8m0_decode(torch.arange(256).to(torch.uint8))
    assert values[:255].tolist() == [2.0 ** (byte - 127) for byte in range(255)]
    assert values[255].isnan()
    torch_values = torch.arange(255).to(torch.uint8).view(torch.float8_e8m0fnu).to(torch.float32)
    assert torch.equal(values[:255], torch_values)


def test_e2m1_codes_and_nibble_order() -> None:
    codes = torch.arange(16).to(torch.uint8)
    values = formats.e2m1_decode(codes)
    assert values.tolist() == list(E2M1_VALUES)
    assert torch.signbit(values[8])
    assert torch.equal(formats.e2m1_encode(values), codes)
    packed = formats.pack_nibbles(torch.tensor([1, 2, 15, 8], dtype=torch.uint8))
    assert packed.view(torch.uint8).tolist() == [0x21, 0x8F], "the low nibble is the even index"
    every_byte = torch.arange(256).to(torch.uint8).view(torch.int8)
    assert torch.equal(formats.pack_nibbles(formats.unpack_nibbles(every_byte)), every_byte)
