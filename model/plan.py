"""`rollforward plan`: what a model weighs, from the shape table alone, before anything is allocated.

What lives here: the schema of the verb, pure functions that return records, and their rendering as text.
What does not: shapes (`shapes.py`). This module imports neither torch nor ray.
"""

import msgspec

from rollforward.conf import console
from rollforward.model.config import ModelConfig, resolve_model
from rollforward.model.shapes import StoredDtype, TensorSpec, is_stacked_expert, param_specs, stored_tensors

KV_GROUP = 64
"""Non-rotary dimensions of a cache entry that share one scale byte."""

_SCALE_ALIGNMENT = 8
"""Scale bytes of a cache entry are padded to this."""

_FP32_BYTES = 4


class PlanRun(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Configuration of `rollforward plan`."""

    model: str
    """flash, pro, tiny, or a folder with a config.json."""


class DtypeRow(msgspec.Struct, frozen=True, kw_only=True):
    """What a checkpoint holds of one element type."""

    dtype: StoredDtype
    """As safetensors spells it."""
    num_tensors: int
    """Entries in the files."""
    num_bytes: int
    """Their data."""


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
    kv_bytes_per_token: float
    """Compressed entries and index keys, averaged over a long context."""
    window_bytes_per_sequence: int
    """Sliding windows of all layers."""
    state_bytes_per_sequence: int
    """Compressor states, FP32."""

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
    return config.nope_head_dim + 2 * config.qk_rope_head_dim + -(-num_scales // _SCALE_ALIGNMENT) * _SCALE_ALIGNMENT


def index_key_bytes(config: ModelConfig) -> int:
    """Return the bytes of one indexer key: packed E2M1 and a scale byte per 32."""
    return config.index_head_dim // 2 + config.index_head_dim // 32


def kv_bytes_per_token(config: ModelConfig) -> float:
    """Return the cache growth per token of a long sequence, MTP not counted.

    Each CSA layer adds (entry + index key) / ratio, each HCA layer entry / ratio.
    """
    total = 0.0
    for layer in range(config.num_hidden_layers):
        kind, ratio = config.layer_kind(layer), config.compress_ratios[layer]
        if kind != "window":
            total += (kv_entry_bytes(config) + (index_key_bytes(config) if kind == "csa" else 0)) / ratio
    return total


def state_bytes_per_sequence(config: ModelConfig) -> int:
    """Return the FP32 compressor state of a sequence: value and score for every slot of an open window.

    An overlapping (CSA) compressor keeps two windows of doubled columns, for its entries and for its index keys.
    """
    total = 0
    for layer in range(config.num_hidden_layers):
        kind, ratio = config.layer_kind(layer), config.compress_ratios[layer]
        if kind == "csa":
            total += 2 * (2 * ratio) * 2 * (config.head_dim + config.index_head_dim) * _FP32_BYTES
        elif kind == "hca":
            total += 2 * ratio * config.head_dim * _FP32_BYTES
    return total


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
        kv_bytes_per_token=kv_bytes_per_token(config),
        window_bytes_per_sequence=config.num_hidden_layers * config.sliding_window * kv_entry_bytes(config),
        state_bytes_per_sequence=state_bytes_per_sequence(config),
    )


def _activated(spec: TensorSpec, config: ModelConfig) -> int:
    if is_stacked_expert(spec.name):
        return spec.num_elements // config.n_routed_experts * config.num_experts_per_tok
    return spec.num_elements


def render_plan(model: str, plan: Plan) -> str:
    """Return the plan as text, one fact a line."""
    lines = [f"model {model}", f"{'dtype':<10}{'tensors':>10}{'bytes':>20}"]
    lines += [f"{row.dtype:<10}{row.num_tensors:>10,}{row.num_bytes:>20,}" for row in plan.dtypes]
    lines += [
        f"{'total':<10}{plan.num_tensors:>10,}{plan.num_bytes:>20,}",
        f"parameters {plan.num_parameters:,} + MTP {plan.num_mtp_parameters:,}",
        f"activated per token {plan.num_activated_parameters:,}, trained by RL {plan.num_trained_parameters:,}",
        f"KV cache {plan.kv_bytes_per_token:,.1f} bytes per token",
        f"windows {plan.window_bytes_per_sequence:,} bytes per sequence",
        f"compressor state {plan.state_bytes_per_sequence:,} bytes per sequence",
    ]
    return "\n".join(lines)


def main(config: PlanRun) -> int:
    """Write the plan of config.model to standard output and return the exit status 0.

    Raises:
        ConfigError: the model is unknown or its config.json is refused.
    """
    console.result(render_plan(config.model, make_plan(resolve_model(config.model))))
    return 0
