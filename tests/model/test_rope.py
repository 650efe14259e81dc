"""Rotary tables of a model: which layers use which base, and that growing keeps bits.

Not proven here: the frequencies' values (kernels/attention/test_rope.py).
"""

import msgspec
import torch

from rollforward.kernels.attention.rope import rope_frequencies
from rollforward.model.config import preset
from rollforward.model.rope import TABLE_STEP, rope_table
from tests.helpers.bits import different_bits


def angle_of_pair(table, pair: int) -> float:
    cos, sin = table.at(torch.tensor([1]))
    return float(torch.atan2(sin[0, pair], cos[0, pair]))


def test_released_bases():
    config = preset("flash")
    window, compressed = rope_table(config, compressed=False), rope_table(config, compressed=True)
    assert abs(angle_of_pair(window, 1) - 10000 ** (-1 / 32)) < 1e-6
    assert abs(angle_of_pair(window, 31) / 10000 ** (-31 / 32) - 1) < 1e-6  # no YaRN
    assert abs(angle_of_pair(compressed, 1) - 6.87656045e-1) < 1e-6
    assert abs(angle_of_pair(compressed, 31) / 5.68052940e-7 - 1) < 1e-6


def test_without_scaling_the_compressed_base_is_plain():
    config = msgspec.structs.replace(preset("flash"), rope_scaling=None)
    cos, _ = rope_table(config, compressed=True).at(torch.tensor([7]))
    expected = torch.cos((7 * rope_frequencies(64, 160000.0)).double()).float()
    assert different_bits(cos[0], expected) == 0


def test_amplitude_is_one():
    cos, sin = rope_table(preset("pro"), compressed=True).at(torch.tensor([0, 12345, 100_000]))
    torch.testing.assert_close(cos.square() + sin.square(), torch.ones(3, 32))


def test_growing_step_by_step_keeps_bits():
    config = preset("tiny")
    whole, stepwise = rope_table(config, compressed=True), rope_table(config, compressed=True)
    position = torch.tensor([0, 5, TABLE_STEP - 1, TABLE_STEP, 3 * TABLE_STEP + 17])
    expected = whole.at(position)
    rows = [stepwise.at(position[index : index + 1]) for index in range(len(position))]
    for part in (0, 1):
        assert different_bits(torch.cat([row[part] for row in rows]), expected[part]) == 0


def test_any_shape_and_no_positions():
    table = rope_table(preset("tiny"), compressed=False)
    cos, sin = table.at(torch.tensor([[3, 4], [5, 6]]))
    assert cos.shape == sin.shape == (2, 2, 8)
    assert table.at(torch.zeros(0, dtype=torch.int64))[0].shape == (0, 8)
