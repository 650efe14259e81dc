"""Sizes of a model from its shape table: parameters, bytes of a checkpoint, and what a sequence takes in the cache.

What lives here: records and pure functions. What does not: shapes (`shapes.py`), the cache itself (`cache.py`, which
needs torch; a test compares). This module imports neither torch nor ray.
"""

import math

import msgspec

from rollforward.model.config import ModelConfig
from rollforward.model.shapes import StoredDtype, TensorSpec, is_stacked_expert, param_specs, stored_tensors

KV_GROUP = 64
"""Non-rotary dimensions of a cache entry that share one scale byte."""

_SCALE_ALIGNMENT = 8
"""Scale bytes of a cache entry are padded to this."""

_CACHE_LINE = 64

_FP32_BYTES = 4


class DtypeRow(msgspec.Struct, frozen=True, kw_only=True):
    """What a checkpoint holds of one element type."""

    dtype: StoredDtype
    """As safetensors spells it."""
    num_tensors: int
    """Entries in the files."""
    num_bytes: int
    """Their data."""


class CachePlan(msgspec.Struct, frozen=True, kw_only=True):
    """What a sequence takes in the cache."""

    window: int
    """Sliding windows of all layers."""
    state: int
    """Raw key-values and scores that wait for their entry, FP32."""
    block: int
    """Compressed entries and index keys of one block of tokens."""
    padded_block: int
    """The same with each layer's page padded."""
    block_tokens: int
    """Tokens of a block: the least common multiple of the ratios."""

    @property
    def per_token(self) -> float:
        """Growth with every token of a long sequence, padding not counted."""
        return self.block / self.block_tokens

    @property
    def per_sequence(self) -> int:
        """What every sequence takes, however short."""
        return self.window + self.state

    def of_sequence(self, num_tokens: int) -> int:
        """Return what a sequence of so many tokens occupies, padding included."""
        return self.per_sequence + -(-num_tokens // self.block_tokens) * self.padded_block


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of one model."""

    dtypes: tuple[DtypeRow, ...]
    """By element type, largest first."""
    num_parameters: int
    """Of the trunk; token-to-expert tables are not parameters."""
    num_mtp_parameters: int
    """Of the MTP module."""
    num_activated_parameters: int
    """Of the trunk, used by one token: K of E routed experts; embedding and head count whole."""
    num_trained_parameters: int
    """Updated by RL."""
    cache: CachePlan
    """What a sequence takes in a GPU engine."""

    @property
    def num_tensors(self) -> int:
        """Entries in the files, scales included."""
        return sum(row.num_tensors for row in self.dtypes)

    @property
    def num_bytes(self) -> int:
        """Bytes of tensor data in the files."""
        return sum(row.num_bytes for row in self.dtypes)


def kv_entry_bytes(config: ModelConfig) -> int:
    """Return the bytes of one window or compressed entry: E4M3, then BF16 rotary dimensions, then padded scales."""
    num_scales = -(-config.nope_head_dim // KV_GROUP)
    return entry_payload_bytes(config) + _rounded(num_scales, _SCALE_ALIGNMENT)


def entry_payload_bytes(config: ModelConfig) -> int:
    """Return the bytes of an entry without its scales; pages of a block are padded to a multiple of this."""
    return config.nope_head_dim + 2 * config.qk_rope_head_dim


def index_key_bytes(config: ModelConfig) -> int:
    """Return the bytes of one indexer key: packed E2M1 and a scale byte per 32."""
    return config.index_head_dim // 2 + config.index_head_dim // 32


def cache_plan(config: ModelConfig, *, packed: bool = True) -> CachePlan:
    """Add up what a sequence takes, layer by layer; MTP is not counted.

    Args:
        config: the model.
        packed: in the formats of a GPU engine, else FP32 as the CPU stores them.
    """
    ratios = [ratio for ratio in config.compress_ratios[: config.num_hidden_layers] if ratio > 0]
    block_tokens = math.lcm(*ratios) if ratios else config.sliding_window
    entry = kv_entry_bytes(config) if packed else _FP32_BYTES * config.head_dim
    key = index_key_bytes(config) if packed else _FP32_BYTES * config.index_head_dim
    entry_page, key_page = (entry_payload_bytes(config), _CACHE_LINE) if packed else (1, 1)
    state = block = padded = 0
    for layer in range(config.num_hidden_layers):
        kind, ratio = config.layer_kind(layer), config.compress_ratios[layer]
        if kind == "window":
            continue
        rows = block_tokens // ratio
        block += rows * entry
        padded += _rounded(rows * entry, entry_page)
        if kind == "csa":
            # Two windows of doubled columns, value and score, for its entries and for its index keys.
            state += 2 * (2 * ratio) * 2 * (config.head_dim + config.index_head_dim) * _FP32_BYTES
            block += rows * key
            padded += _rounded(rows * key, key_page)
        else:
            state += 2 * ratio * config.head_dim * _FP32_BYTES
    window = config.num_hidden_layers * config.sliding_window * entry
    return CachePlan(window=window, state=state, block=block, padded_block=padded, block_tokens=block_tokens)


def _rounded(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def make_plan(config: ModelConfig) -> Plan:
    """Compute a model's sizes from its shape table."""
    rows: dict[StoredDtype, tuple[int, int]] = {}
    for stored in stored_tensors(config):
        count, size = rows.get(stored.dtype, (0, 0))
        rows[stored.dtype] = (count + 1, size + stored.num_bytes)
    parameters = [spec for spec in param_specs(config) if spec.format != "int64"]
    trunk = [spec for spec in parameters if not spec.name.startswith("mtp.")]
    num_trunk = sum(spec.num_elements for spec in trunk)
    return Plan(
        dtypes=tuple(
            DtypeRow(dtype=dtype, num_tensors=count, num_bytes=size)
            for dtype, (count, size) in sorted(rows.items(), key=lambda row: -row[1][1])
        ),
        num_parameters=num_trunk,
        num_mtp_parameters=sum(spec.num_elements for spec in parameters) - num_trunk,
        num_activated_parameters=sum(_activated(spec, config) for spec in trunk),
        num_trained_parameters=sum(spec.num_elements for spec in parameters if spec.trained),
        cache=cache_plan(config),
    )


def _activated(spec: TensorSpec, config: ModelConfig) -> int:
    if is_stacked_expert(spec.name):
        return spec.num_elements // config.n_routed_experts * config.num_experts_per_tok
    return spec.num_elements
