"""Proves FP8 blocks and groups against exact arithmetic, the published vector, and row invariance."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from rollforward.kernels.errors import DtypeError, NonFiniteError, ShapeError
from rollforward.kernels.quant.formats import E4M3
from rollforward.kernels.quant.fp8 import (
    fake_quant_fp8_block,
    fake_quant_fp8_group,
    fp8_block_dequantise,
    fp8_block_quantise,
    fp8_group_dequantise,
    fp8_group_quantise,
)

GRID = [Fraction(v) for v in torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).to(torch.float64).tolist()]
FLOATS = st.floats(width=32, min_value=-(2.0**127), max_value=2.0**127)


def quantise_exactly(values: np.ndarray, floor: float) -> np.ndarray:
    """Quantise one group with rationals: ceiling scale of max(amax, floor), nearest even."""
    flat = [Fraction(float(value)) for value in values.ravel()]
    amax = max(max(map(abs, flat)), Fraction(float(np.float32(floor))))
    exponent = -126
    while 448 * Fraction(2) ** exponent < amax:
        exponent += 1
    scale, out = Fraction(2) ** exponent, []
    for value in flat:
        code = min(range(127), key=lambda c: (abs(GRID[c] - abs(value) / scale), c % 2))
        out.append(math.copysign(float(GRID[code] * scale), value))
    return np.array(out, dtype=np.float32).reshape(values.shape)


def test_published_vector() -> None:
    x = torch.zeros(1, 64)
    x[0, :4] = torch.tensor([1.0, -0.3, 0.017, 2.7])
    payload, scale = fp8_group_quantise(x, 64)
    assert scale.tolist() == [[120]], "2^-7"
    assert fp8_group_dequantise(payload, scale, 64)[0, :5].tolist() == [1.0, -0.3125, 0.017578125, 2.75, 0.0]


def test_activation_floor() -> None:
    x = torch.full((1, 128), 1e-6)
    assert int(fp8_group_quantise(x)[1]) == 127 - 22, "2^ceil(log2(1e-4 / 448)) = 2^-22"
    assert int(fp8_group_quantise(torch.zeros(1, 128))[1]) == 127 - 22
    assert int(fp8_group_quantise(x, floor=1e-6)[1]) < 127 - 22


@settings(max_examples=40)
@given(x=npst.arrays(np.float32, (2, 8), elements=FLOATS), floor=st.sampled_from([1e-4, 1e-20]))
def test_any_group_equals_exact_arithmetic(x: np.ndarray, floor: float) -> None:
    expected = np.concatenate([quantise_exactly(row, floor)[None] for row in x])
    assert np.array_equal(fake_quant_fp8_group(torch.from_numpy(x), 8, floor).numpy(), expected)


@settings(max_examples=30)
@given(w=npst.arrays(np.float32, (3, 5), elements=FLOATS))
def test_any_block_equals_exact_arithmetic(w: np.ndarray) -> None:
    assert np.array_equal(fake_quant_fp8_block(torch.from_numpy(w)).numpy(), quantise_exactly(w, 0.0))


@settings(max_examples=40)
@given(
    seed=st.integers(0, 2**32),
    rows=st.integers(1, 300),
    columns=st.integers(1, 300),
    spread=st.sampled_from([0.0, 15.0]),
)
def test_packed_form_is_the_fake_quantised_value(seed: int, rows: int, columns: int, spread: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    w = torch.randn(rows, columns, generator=generator)
    w *= torch.exp2(spread * torch.randn(rows, columns, generator=generator))
    value = fake_quant_fp8_block(w)
    payload, scale = fp8_block_quantise(w)
    assert payload.dtype == torch.float8_e4m3fn
    assert scale.shape == (-(-rows // 128), -(-columns // 128))
    assert torch.equal(fp8_block_dequantise(payload, scale), value)
    assert torch.equal(fake_quant_fp8_block(value), value), "requantising keeps the value"
    for group in (64, 128):
        assert torch.equal(fp8_group_dequantise(*fp8_group_quantise(w, group), group), fake_quant_fp8_group(w, group))


def test_blocks_are_independent_and_partial_at_the_edges() -> None:
    w = torch.randn(2, 200, 130, generator=torch.Generator().manual_seed(0))
    w[:, 128:] *= 1e3
    value = fake_quant_fp8_block(w)
    for rows in (slice(0, 128), slice(128, 200)):
        for columns in (slice(0, 128), slice(128, 130)):
            assert torch.equal(value[1, rows, columns], fake_quant_fp8_block(w[1, rows, columns]))


def test_every_code_under_every_scale_survives() -> None:
    """126 positive codes and their negatives x scale bytes 1..246; 448 in each block pins the scale."""
    codes = torch.tensor([code for code in range(256) if code & 0x7F != 0x7F and code != 0x80], dtype=torch.uint8)
    payload = codes.view(torch.float8_e4m3fn).expand(246, 1, -1)
    scale = torch.arange(1, 247).to(torch.uint8).reshape(246, 1, 1).expand(246, 1, 2)
    values = fp8_block_dequantise(payload, scale)
    expected = torch.exp2(torch.arange(1, 247) - 127.0).reshape(-1, 1, 1) * codes.view(torch.float8_e4m3fn).float()
    assert torch.equal(values, expected)
    positive = values[..., :127].contiguous()
    assert positive[126, 0, -1].item() == 448.0
    payload_again, scale_again = fp8_block_quantise(positive)
    assert torch.equal(scale_again, scale[..., :1])
    assert torch.equal(payload_again.view(torch.uint8), codes[:127].expand(246, 1, 127))


@pytest.mark.parametrize("exponent", [-126, -60, 0, 60, 118])
def test_block_scale_at_448_times_a_power_of_two(exponent: int) -> None:
    amax = torch.tensor([[448 * 2.0**exponent]])
    above, below = torch.nextafter(amax, torch.tensor(math.inf)), torch.nextafter(amax, torch.tensor(0.0))
    chosen = [int(fp8_block_quantise(value)[1]) for value in (below, amax, above)]
    assert chosen == [127 + exponent, 127 + exponent, 128 + exponent]


def test_zero_blocks_have_the_canonical_scale() -> None:
    payload, scale = fp8_block_quantise(torch.zeros(3, 3))
    assert int(scale) == 127
    assert payload.view(torch.uint8).unique().tolist() == [0]
    payload, scale = fp8_block_quantise(torch.full((3, 3), -(2.0**-149)))
    assert int(scale) == 127
    assert payload.view(torch.uint8).unique().tolist() == [0]
    assert fake_quant_fp8_block(torch.full((1, 1), 2.0**-135)).item() == 2.0**-135


def test_rows_do_not_see_each_other() -> None:
    x = torch.randn(33, 200, generator=torch.Generator().manual_seed(1)) * 10
    whole = fake_quant_fp8_group(x, 64)
    for row in (0, 7, 32):
        assert torch.equal(fake_quant_fp8_group(x[row : row + 1], 64)[0], whole[row])
        assert torch.equal(fake_quant_fp8_group(x[row], 64), whole[row])
    assert torch.equal(fake_quant_fp8_group(x[:, :64], 64), whole[:, :64])
    assert torch.equal(fake_quant_fp8_group(x[:, 192:], 64), whole[:, 192:]), "the last group is partial"
    x.requires_grad_()
    assert torch.equal(fake_quant_fp8_group(x, 64).detach(), whole)


def test_bf16_inputs_keep_their_dtype_exactly() -> None:
    x = torch.randn(5, 128, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)
    got = fake_quant_fp8_group(x)
    assert got.dtype == torch.bfloat16
    assert torch.equal(got.to(torch.float32), fake_quant_fp8_group(x.to(torch.float32)))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_non_finite_values(bad: float) -> None:
    w = torch.zeros(130, 4)
    w[129, 2] = bad
    for op in (fp8_block_quantise, fake_quant_fp8_block):
        with pytest.raises(NonFiniteError, match=r"at \[129, 2\]"):
            op(w)
    assert not fake_quant_fp8_group(w)[129].isfinite().all(), "activations carry it on to the loss"
    assert fake_quant_fp8_group(w)[:129].isfinite().all()
    assert fake_quant_fp8_block(torch.full((1, 1), E4M3.max_weight)).isfinite().all()


@pytest.mark.parametrize("fake_quant", [fake_quant_fp8_block, fake_quant_fp8_group])
def test_gradient_is_the_identity_and_nothing_is_saved(fake_quant: type) -> None:
    w = torch.randn(4, 64, requires_grad=True)
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        value = fake_quant(w)
    assert not saved
    upstream = torch.randn(4, 64)
    value.backward(upstream)
    assert w.grad is not None
    assert torch.equal(w.grad, upstream)


def test_wrong_shapes_and_dtypes() -> None:
    with pytest.raises(ShapeError, match="has 1 dimensions"):
        fp8_block_quantise(torch.zeros(128))
    with pytest.raises(DtypeError, match="takes float32"):
        fake_quant_fp8_block(torch.zeros(2, 64, dtype=torch.bfloat16))
    with pytest.raises(ShapeError, match="group is 0"):
        fake_quant_fp8_group(torch.zeros(2, 64), 0)
    payload = torch.zeros(129, 64).to(torch.float8_e4m3fn)
    with pytest.raises(ShapeError, match="1 is not 2"):
        fp8_block_dequantise(payload, torch.zeros(1, 1, dtype=torch.uint8))
    with pytest.raises(ShapeError, match="2 is not 1"):
        fp8_group_dequantise(payload, torch.zeros(129, 2, dtype=torch.uint8))


def test_empty_batches() -> None:
    assert fake_quant_fp8_group(torch.zeros(0, 128)).shape == (0, 128)
