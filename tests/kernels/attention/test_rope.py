"""Rotary embedding: YaRN check values, pairing, inverse, tables, gradient.

Not proven here: which layer uses which base (model/test_rope.py, parity/test_oracle.py).
"""

import math

import pytest
import torch

from rollforward.kernels.attention.rope import rope, rope_frequencies, rope_tables
from tests.helpers.bits import different_bits

YARN_VALUES = {
    0: 1.0,
    1: 6.87656045e-1,
    14: 5.28685655e-3,
    15: 3.63553851e-3,
    16: 2.26562493e-3,
    20: 2.96977785e-4,
    24: 1.95312532e-5,
    25: 5.37231244e-6,
    31: 5.68052940e-7,
}


def released_frequencies() -> torch.Tensor:
    return rope_frequencies(64, 160000.0, factor=16, beta_fast=32, beta_slow=1, original_positions=65536)


def test_yarn_check_values():
    frequencies = released_frequencies()
    assert frequencies.shape == (32,)
    for pair, value in YARN_VALUES.items():
        assert frequencies[pair].item() == pytest.approx(value, rel=1e-6)


def test_the_ramp_leaves_fast_pairs_and_divides_slow_ones():
    plain, yarn = rope_frequencies(64, 160000.0), released_frequencies()
    assert torch.equal(yarn[:16], plain[:16])
    torch.testing.assert_close(yarn[25:], plain[25:] / 16, rtol=1e-6, atol=0)
    assert ((yarn < plain) & (yarn > plain / 16))[16:25].all()


def test_plain_frequencies():
    frequencies = rope_frequencies(8, 10000.0)
    torch.testing.assert_close(frequencies, torch.tensor([1.0, 0.1, 0.01, 0.001]), rtol=1e-6, atol=0)


def test_pairs_are_interleaved_and_only_the_tail_rotates():
    # A quarter turn of pair 0, nothing for pair 1: (2, 3) -> (-3, 2).
    cos, sin = torch.tensor([0.0, 1.0]), torch.tensor([1.0, 0.0])
    x = torch.tensor([9.0, 8.0, 2.0, 3.0, 4.0, 5.0])
    assert torch.equal(rope(x, cos, sin), torch.tensor([9.0, 8.0, -3.0, 2.0, 4.0, 5.0]))
    assert torch.equal(rope(x, cos, sin, inverse=True), torch.tensor([9.0, 8.0, 3.0, -2.0, 4.0, 5.0]))


def test_position_zero_is_the_identity_bit_for_bit():
    x = torch.randn(3, 80, generator=torch.Generator().manual_seed(0))
    cos, sin = rope_tables(released_frequencies(), torch.zeros(3, dtype=torch.int64))
    assert different_bits(rope(x, cos, sin), x) == 0


def test_inverse_undoes_and_lengths_are_kept():
    x = torch.randn(50, 96, generator=torch.Generator().manual_seed(1))
    cos, sin = rope_tables(released_frequencies(), torch.arange(50) * 977)
    turned = rope(x, cos, sin)
    torch.testing.assert_close(turned[:, 32:].norm(dim=1), x[:, 32:].norm(dim=1))  # amplitude 1, also under YaRN
    torch.testing.assert_close(rope(turned, cos, sin, inverse=True), x, rtol=1e-5, atol=1e-6)


def test_products_depend_on_the_distance_alone():
    frequencies = rope_frequencies(16, 10000.0)
    q, k = torch.randn(2, 16, generator=torch.Generator().manual_seed(2), dtype=torch.float64)

    def product(query: int, key: int) -> torch.Tensor:
        cos, sin = rope_tables(frequencies, torch.tensor([query, key]))
        return rope(q, cos[0].double(), sin[0].double()) @ rope(k, cos[1].double(), sin[1].double())

    torch.testing.assert_close(product(17, 5), product(112, 100), rtol=1e-5, atol=1e-5)
    assert (product(17, 5) - product(5, 17)).abs() > 1e-3


def test_tables_at_a_million_use_the_float32_angle():
    position = torch.tensor([1_000_000, 1_048_575])
    cos, sin = rope_tables(released_frequencies(), position)
    for row in range(2):
        for pair in (0, 1, 15, 31):
            angle = float(torch.tensor(float(position[row]), dtype=torch.float32) * released_frequencies()[pair])
            assert cos[row, pair].item() == pytest.approx(math.cos(angle), abs=1e-7)
            assert sin[row, pair].item() == pytest.approx(math.sin(angle), abs=1e-7)


def test_gradient_in_float64_and_back_to_zero():
    x = torch.randn(3, 2, 7, generator=torch.Generator().manual_seed(3), dtype=torch.float64).requires_grad_(True)
    cos, sin = rope_tables(rope_frequencies(4, 100.0), torch.tensor([[0], [3], [11]]))
    assert torch.autograd.gradcheck(lambda y: rope(y, cos.double(), sin.double()), (x,))
    assert torch.autograd.gradcheck(lambda y: rope(y, cos.double(), sin.double(), inverse=True), (x,))


def test_bits_belong_to_the_row():
    x = torch.randn(101, 4, 80, generator=torch.Generator().manual_seed(4))
    cos, sin = rope_tables(rope_frequencies(16, 10000.0), torch.arange(101))
    whole = rope(x, cos.unsqueeze(1), sin.unsqueeze(1))
    for rows in (slice(0, 1), slice(7, 10), slice(100, 101)):
        assert different_bits(rope(x[rows].clone(), cos[rows].unsqueeze(1), sin[rows].unsqueeze(1)), whole[rows]) == 0
    assert rope(x[:0], cos[:0].unsqueeze(1), sin[:0].unsqueeze(1)).shape == (0, 4, 80)
