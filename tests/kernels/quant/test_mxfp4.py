"""Proves the MXFP4 quantiser against exact arithmetic, its clamped-group policy, and the lossless path to FP8.

What it does not prove: which tensors are MXFP4 (tests/model/test_shapes.py).
"""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from rollforward.kernels.errors import DtypeError, NonFiniteError, ScaleRangeError, ShapeError
from rollforward.kernels.quant.formats import E2M1, E2M1_VALUES, pack_nibbles
from rollforward.kernels.quant.fp8 import fp8_block_dequantise
from rollforward.kernels.quant.mxfp4 import (
    fake_quant_mxfp4,
    mxfp4_canonicalise,
    mxfp4_clamped_groups,
    mxfp4_dequantise,
    mxfp4_quantise,
    mxfp4_quantise_fp8,
    mxfp4_to_fp8,
    mxfp4_to_fp8_turned,
)

GRID = [Fraction(value) for value in E2M1_VALUES[:8]]


def group_of(*values: float) -> torch.Tensor:
    """Return a [1, 32] float32 group that starts with `values`."""
    return torch.tensor([[*values, *[0.0] * (32 - len(values))]], dtype=torch.float32)


def blocks_with_scales(byte_RJ: torch.Tensor, seed: int) -> torch.Tensor:
    """Return weights whose groups each hold a 6 x 2^(byte - 127), so that exactly these scales are chosen."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, (*byte_RJ.shape, 32), generator=generator).to(torch.uint8)
    codes[..., 0] = 7
    return mxfp4_dequantise(pack_nibbles(codes.flatten(-2)), byte_RJ.to(torch.uint8))


def quantise_exactly(w_RK: np.ndarray) -> tuple[np.ndarray, int]:
    """Quantise one 128x128 block (or a part of one) with rationals; returns values and the count of clamped groups."""
    groups = w_RK.reshape(w_RK.shape[0], -1, 32)
    exponents: dict[tuple[int, int], int] = {}
    for row, column in np.ndindex(groups.shape[:2]):
        amax = max(abs(Fraction(float(value))) for value in groups[row, column])
        exponent = -126
        while Fraction(6) * Fraction(2) ** exponent < amax:
            exponent += 1
        if amax > Fraction(1, 4) * Fraction(2) ** exponent:
            exponents[row, column] = exponent
    lowest = max(exponents.values(), default=0) - 14
    values = np.zeros_like(groups)
    for (row, column), exponent in exponents.items():
        scale = Fraction(2) ** max(exponent, lowest)
        for index, value in enumerate(groups[row, column]):
            magnitude = abs(Fraction(float(value))) / scale
            code = min(range(8), key=lambda c: (abs(GRID[c] - magnitude), c % 2))
            values[row, column, index] = math.copysign(float(GRID[code] * scale), float(value))
    return values.reshape(w_RK.shape), sum(exponent < lowest for exponent in exponents.values())


def test_published_vector() -> None:
    packed, scale = mxfp4_quantise(group_of(1.0, -0.3, 0.25, 2.7))
    assert scale.tolist() == [[126]]
    assert mxfp4_dequantise(packed, scale)[0, :5].tolist() == [1.0, -0.25, 0.25, 3.0, 0.0]
    assert packed[0, :3].view(torch.uint8).tolist() == [0x94, 0x71, 0x00]


def test_every_code_under_every_scale_survives() -> None:
    """16 codes x scale bytes 1..252: dequantise is exact, and quantising the value gives the same bytes back."""
    codes = torch.arange(16).repeat(2).to(torch.uint8).expand(252, 1, 32)
    scale = torch.arange(1, 253).to(torch.uint8).reshape(252, 1, 1)
    packed = pack_nibbles(codes)
    values = mxfp4_dequantise(packed, scale)
    for byte in range(1, 253):
        expected = [value * 2.0 ** (byte - 127) for value in E2M1_VALUES]
        assert values[byte - 1, 0, :16].tolist() == expected
    packed_again, scale_again = mxfp4_quantise(values)
    assert torch.equal(scale_again, scale)
    assert torch.equal(mxfp4_dequantise(packed_again, scale_again), values)
    without_negative_zero = pack_nibbles(torch.where(codes == 8, 0, codes).to(torch.uint8))
    assert torch.equal(packed_again, without_negative_zero)


def test_smallest_scale_bytes_dequantise_exactly() -> None:
    packed, scale = pack_nibbles(torch.full((1, 32), 7, dtype=torch.uint8)), torch.zeros(1, 1, dtype=torch.uint8)
    assert mxfp4_dequantise(packed, scale)[0, 0].item() == 6 * 2.0**-127
    assert mxfp4_dequantise(packed, scale + 255).isnan().all()


@pytest.mark.parametrize("exponent", [-125, -60, -1, 0, 1, 60, 124])
def test_scale_at_six_times_a_power_of_two(exponent: int) -> None:
    amax = torch.tensor(6 * 2.0**exponent)
    above, below = torch.nextafter(amax, torch.tensor(math.inf)), torch.nextafter(amax, torch.tensor(0.0))
    bytes_chosen = [int(mxfp4_quantise(group_of(value.item()))[1]) for value in (below, amax, above)]
    assert bytes_chosen == [127 + exponent, 127 + exponent, 128 + exponent]
    assert fake_quant_mxfp4(group_of(above.item()))[0, 0].item() == amax.item(), (
        "3 x 2s: nothing is lost at the step up"
    )


def test_ties_go_to_the_even_code() -> None:
    ties = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
    got = fake_quant_mxfp4(group_of(6.0, *ties, *[-tie for tie in ties]))[0, 1:15].tolist()
    expected = [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0]
    assert got == expected + [-value for value in expected]


def test_subnormals_and_zeros() -> None:
    tiny = group_of(2.0**-127, 2.0**-128, 2.0**-149)
    assert fake_quant_mxfp4(tiny)[0, :3].tolist() == [2.0**-127, 0.0, 0.0]
    packed, scale = mxfp4_quantise(torch.zeros(3, 64))
    assert scale.unique().tolist() == [127]
    assert packed.unique().tolist() == [0]
    w = torch.zeros(2, 128)
    w[0, 0], w[1, 40] = 6.0, 6 * 2.0**-3
    assert mxfp4_quantise(w)[1].tolist() == [[127, 127, 127, 127], [127, 124, 127, 127]], (
        "zeros carry the largest scale"
    )


def test_clamped_groups_are_raised_to_the_block_bound_and_counted() -> None:
    byte_RJ = torch.full((2, 8), 140)
    byte_RJ[0, 1], byte_RJ[1, 2], byte_RJ[0, 3] = 126, 125, 100
    byte_RJ[1, 5:] = 100  # the second 128x128 block
    byte_RJ[0, 4:], byte_RJ[1, 4] = 101, 114
    w = blocks_with_scales(byte_RJ, seed=0)
    assert mxfp4_clamped_groups(w) == 2
    scale = mxfp4_quantise(w)[1].to(torch.int64)
    assert scale[0, :4].tolist() == [140, 126, 140, 140], "a group clamped to zeros carries the largest scale"
    assert scale[1, :4].tolist() == [140, 140, 126, 140]
    assert torch.equal(scale[:, 4:], byte_RJ[:, 4:]), "the other block is within its own 14 binades"
    with pytest.raises(ScaleRangeError, match="2 groups of 32"):
        mxfp4_quantise(w, strict=True)
    assert mxfp4_quantise(w[:1, :64], strict=True)[1].tolist() == [[140, 126]]


def test_blocks_reach_over_128_rows_only() -> None:
    byte_RJ = torch.full((130, 1), 120)
    byte_RJ[:128] = 140
    w = blocks_with_scales(byte_RJ, seed=1)
    assert mxfp4_clamped_groups(w) == 0, "rows 128 and 129 are a block of their own"
    assert mxfp4_clamped_groups(w[2:]) == 2
    stacked = torch.stack([w, w.flip(0)])
    assert torch.equal(fake_quant_mxfp4(stacked)[0], fake_quant_mxfp4(w))
    assert torch.equal(fake_quant_mxfp4(stacked)[1], fake_quant_mxfp4(w.flip(0)))


@settings(max_examples=60)
@given(
    w=npst.arrays(
        np.float32,
        st.sampled_from([(1, 32), (2, 64), (3, 128)]),
        elements=st.floats(width=32, min_value=-(2.0**127), max_value=2.0**127),
    )
)
def test_any_weights_equal_exact_arithmetic(w: np.ndarray) -> None:
    expected, num_clamped = quantise_exactly(w)
    tensor = torch.from_numpy(w)
    assert np.array_equal(fake_quant_mxfp4(tensor).numpy(), expected)
    assert mxfp4_clamped_groups(tensor) == num_clamped


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**32),
    spread=st.sampled_from([0.0, 2.0, 20.0]),
    rows=st.integers(1, 260),
    groups=st.integers(1, 9),
)
def test_packed_form_is_the_fake_quantised_value_and_converts_without_loss(
    seed: int, spread: float, rows: int, groups: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    w = torch.randn(rows, groups, 32, generator=generator)
    w = (w * torch.exp2(spread * torch.randn(rows, groups, 1, generator=generator))).flatten(-2)
    w = torch.where(torch.rand(w.shape, generator=generator) < 0.1, 0, w)
    value = fake_quant_mxfp4(w)
    packed, scale = mxfp4_quantise(w)
    assert torch.equal(mxfp4_dequantise(packed, scale), value)
    payload, block_scale, num_lossy = mxfp4_to_fp8(packed, scale, strict=True)
    assert num_lossy == 0
    assert block_scale.shape == (-(-rows // 128), -(-groups // 4))
    assert torch.equal(fp8_block_dequantise(payload, block_scale), value)
    assert torch.equal(fake_quant_mxfp4(value), value), "requantising keeps the value"
    canonical = mxfp4_canonicalise(packed, scale)
    assert torch.equal(mxfp4_dequantise(*canonical), value)
    assert all(map(torch.equal, mxfp4_canonicalise(*canonical), canonical)), "canonical bytes are a fixed point"


def test_lossless_conversion_holds_for_exactly_fifteen_shifts() -> None:
    """All 16 codes x all scale differences within a block, at several absolute scales."""
    codes = torch.arange(16).repeat(4).to(torch.uint8).reshape(1, 64)
    packed = pack_nibbles(codes)
    for largest in (14, 100, 127, 200, 252):
        for spread in range(15 if largest > 14 else largest + 1):
            scale = torch.tensor([[largest, largest - spread]], dtype=torch.uint8)
            payload, block_scale, num_lossy = mxfp4_to_fp8(packed, scale, strict=True)
            assert (num_lossy, int(block_scale)) == (0, largest - 6)
            assert torch.equal(fp8_block_dequantise(payload, block_scale), mxfp4_dequantise(packed, scale))
    scale = torch.tensor([[127, 112]], dtype=torch.uint8)
    payload, block_scale, num_lossy = mxfp4_to_fp8(packed, scale)
    assert num_lossy == 1
    clamped = fake_quant_mxfp4(mxfp4_dequantise(packed, scale))
    assert torch.equal(fp8_block_dequantise(payload, block_scale), clamped), "rounds as the clamped-group policy does"
    with pytest.raises(ScaleRangeError, match="1 groups"):
        mxfp4_to_fp8(packed, scale, strict=True)


@given(spread=st.integers(0, 40), seed=st.integers(0, 2**20))
def test_conversion_beyond_the_range_equals_the_clamped_quantiser(spread: int, seed: int) -> None:
    w = blocks_with_scales(torch.tensor([[150, 150 - spread, 150 - spread // 2, 149]]), seed)
    codes = torch.randint(0, 16, (1, 128), generator=torch.Generator().manual_seed(seed)).to(torch.uint8)
    codes[0, ::32] = 7
    packed = pack_nibbles(codes)
    scale = torch.tensor([[150, 150 - spread, 150 - spread // 2, 149]], dtype=torch.uint8)
    payload, block_scale, _ = mxfp4_to_fp8(packed, scale)
    assert torch.equal(fp8_block_dequantise(payload, block_scale), fake_quant_mxfp4(mxfp4_dequantise(packed, scale)))
    assert torch.equal(fake_quant_mxfp4(fake_quant_mxfp4(w)), fake_quant_mxfp4(w))


def test_conversion_skips_zero_groups_and_small_bytes() -> None:
    zeros = torch.zeros(1, 32, dtype=torch.uint8)
    packed = pack_nibbles(torch.cat([zeros + 7, zeros], dim=1))
    payload, block_scale, num_lossy = mxfp4_to_fp8(packed, torch.tensor([[100, 254]], dtype=torch.uint8))
    assert (int(block_scale), num_lossy) == (94, 0)
    assert payload[0, 32:].to(torch.float32).abs().max() == 0
    assert int(mxfp4_to_fp8(pack_nibbles(zeros), torch.tensor([[9]], dtype=torch.uint8))[1]) == 127
    for byte in range(7):
        packed, scale = pack_nibbles(zeros + 7), torch.tensor([[byte]], dtype=torch.uint8)
        payload, block_scale, _ = mxfp4_to_fp8(packed, scale, strict=True)
        assert torch.equal(fp8_block_dequantise(payload, block_scale), mxfp4_dequantise(packed, scale))
    with pytest.raises(ScaleRangeError, match="255"):
        mxfp4_to_fp8(packed, torch.tensor([[255]], dtype=torch.uint8))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 3e38])
def test_non_finite_weights_are_named(bad: float) -> None:
    w = torch.zeros(2, 3, 64)
    w[1, 2, 40] = bad
    for op in (mxfp4_quantise, fake_quant_mxfp4, mxfp4_clamped_groups):
        with pytest.raises(NonFiniteError, match=r"at \[1, 2, 40\]"):
            op(w)
    assert fake_quant_mxfp4(torch.full((1, 32), E2M1.max_weight)).isfinite().all()


def test_gradient_is_the_identity_and_nothing_is_saved() -> None:
    w = torch.randn(4, 64, requires_grad=True)
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        value = fake_quant_mxfp4(w)
    assert not saved
    assert torch.equal(value.detach(), fake_quant_mxfp4(w.detach()))
    upstream = torch.randn(4, 64)
    value.backward(upstream)
    assert w.grad is not None
    assert torch.equal(w.grad, upstream)


def test_wrong_shapes_and_dtypes() -> None:
    with pytest.raises(ShapeError, match="multiple of 32"):
        mxfp4_quantise(torch.zeros(2, 48))
    with pytest.raises(DtypeError, match="takes float32"):
        mxfp4_quantise(torch.zeros(2, 64, dtype=torch.bfloat16))
    with pytest.raises(ShapeError, match="3 is not 2"):
        mxfp4_dequantise(torch.zeros(2, 32, dtype=torch.int8), torch.zeros(2, 3, dtype=torch.uint8))
    with pytest.raises(DtypeError, match="scale is float32"):
        mxfp4_dequantise(torch.zeros(2, 32, dtype=torch.int8), torch.zeros(2, 2))


def test_input_is_not_modified_and_strides_do_not_matter() -> None:
    w = torch.randn(64, 40)
    before = w.clone()
    assert torch.equal(fake_quant_mxfp4(w.t()), fake_quant_mxfp4(w.t().contiguous()))
    assert torch.equal(w, before)


@pytest.mark.parametrize("shape", [(128, 128), (3, 200, 96), (2, 2, 256, 384)])
def test_both_formats_hold_the_same_values(shape):
    w = torch.randn(shape, generator=torch.Generator().manual_seed(3)) * torch.exp2(
        torch.arange(shape[-2]) % 9
    ).unsqueeze(1)
    both = mxfp4_quantise_fp8(w, turned=True)
    packed, scale = mxfp4_quantise(w)
    assert torch.equal(both.packed, packed)
    assert torch.equal(both.scale, scale)
    values = mxfp4_dequantise(packed, scale)
    assert torch.equal(fp8_block_dequantise(both.payload, both.block_scale), values)
    assert both.clamped_groups == mxfp4_clamped_groups(w)
    assert both.payload_turned is not None
    assert both.payload_turned.is_contiguous()
    assert torch.equal(both.payload_turned.float(), both.payload.float().mT)
    assert mxfp4_quantise_fp8(w).payload_turned is None
    payload, turned, block_scale, num_lossy = mxfp4_to_fp8_turned(packed, scale)
    assert num_lossy == 0
    assert torch.equal(payload.float(), both.payload.float())
    assert torch.equal(turned.float(), both.payload_turned.float())
    assert turned.is_contiguous()
    assert torch.equal(block_scale, both.block_scale)


def test_bfloat16_holds_every_value() -> None:
    """16 codes x all scale bytes; 6 x 2^127 is infinite in both."""
    packed = pack_nibbles(torch.arange(16).repeat(2).to(torch.uint8).expand(256, 1, 32))
    scale = torch.arange(256).to(torch.uint8).reshape(256, 1, 1)
    values, half = mxfp4_dequantise(packed, scale), mxfp4_dequantise(packed, scale, dtype=torch.bfloat16)
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.float(), values, rtol=0, atol=0, equal_nan=True)
    assert values[254, 0, [3, 4]].tolist() == [1.5 * 2.0**127, math.inf]
    with pytest.raises(DtypeError, match="gives float32 or bfloat16"):
        mxfp4_dequantise(packed, scale, dtype=torch.float16)
