"""Rotary tables of a model: which frequencies a layer uses, and cosines and sines by position."""

import torch
from torch import Tensor

from rollforward.kernels.attention.rope import rope_frequencies, rope_tables
from rollforward.model.config import ModelConfig

TABLE_STEP = 1024
"""Positions computed at once; a fixed step keeps an entry's bits independent of how far the table has grown."""


class RopeTable:
    """Cosines and sines of one base, grown on demand in fixed steps: made on the CPU, so that they have the same bits
    wherever they are read. Not thread-safe while growing."""

    def __init__(self, frequencies_P: Tensor) -> None:
        """Start with an empty table for the given angles per position, [P] float32."""
        self._frequencies = frequencies_P
        self._cos = self._sin = torch.empty(0, frequencies_P.shape[0])
        self._copies: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def at(self, position: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and sin at int64 positions >= 0, [..., P] float32 each, on the device of the positions."""
        needed = int(position.max()) + 1 if position.numel() else 0
        if needed > self._cos.shape[0]:
            starts = range(self._cos.shape[0], needed, TABLE_STEP)
            steps = [
                rope_tables(self._frequencies, torch.arange(start, start + TABLE_STEP, device="cpu"))
                for start in starts
            ]
            self._cos = torch.cat((self._cos, *(cos for cos, _ in steps)))
            self._sin = torch.cat((self._sin, *(sin for _, sin in steps)))
            self._copies = {}
        if position.device not in self._copies:
            self._copies[position.device] = self._cos.to(position.device), self._sin.to(position.device)
        cos, sin = self._copies[position.device]
        return cos[position], sin[position]


def rope_table(config: ModelConfig, *, compressed: bool) -> RopeTable:
    """Return the table of a layer kind.

    Window-only layers and MTP use rope_theta without YaRN; every layer with a compressor uses compress_rope_theta with
    YaRN for everything in it (query, window keys, entries, output, indexer).
    """
    if not compressed:
        return RopeTable(rope_frequencies(config.qk_rope_head_dim, config.rope_theta))
    scaling = config.rope_scaling
    if scaling is None:
        return RopeTable(rope_frequencies(config.qk_rope_head_dim, config.compress_rope_theta))
    frequencies = rope_frequencies(
        config.qk_rope_head_dim,
        config.compress_rope_theta,
        factor=scaling.factor,
        beta_fast=scaling.beta_fast,
        beta_slow=scaling.beta_slow,
        original_positions=scaling.original_max_position_embeddings,
    )
    return RopeTable(frequencies)
