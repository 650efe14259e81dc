"""The shape table: every tensor of a model by its official name, with shape, published format and whether RL trains it.

What lives here: logical tensors (`tensor_specs`), what a checkpoint stores for them (`stored_tensors`), and the same
with experts stacked (`param_specs`), which is the name space of all code but the checkpoint reader and writer.
What does not: values (`checkpoint.py`), packing (`precision.py`). This module imports neither torch nor ray.

Letters: V vocabulary, D hidden size, N heads, H head width, E experts, F expert width, K experts per token, M streams.
Source: official model.py and the released index files; both models' tensor and byte counts are tests.
"""

from collections.abc import Iterator
from math import prod
from typing import Literal

import msgspec

from rollforward.model.config import ModelConfig

TensorFormat = Literal["mxfp4", "fp8", "bf16", "fp32", "int64"]
"""Published formats. mxfp4: E2M1 in groups of 32; fp8: E4M3 in blocks of 128x128; both with E8M0 scales."""

StoredDtype = Literal["I8", "F8_E4M3", "F8_E8M0", "BF16", "F32", "I64"]
"""Element types as safetensors spells them."""

EXPERT_MATRICES = ("w1", "w2", "w3")
"""Gate, down and up projection of an expert."""

DTYPE_BYTES: dict[StoredDtype, int] = {"I8": 1, "F8_E4M3": 1, "F8_E8M0": 1, "BF16": 2, "F32": 4, "I64": 8}
"""Bytes of an element."""

_PLAIN_DTYPE: dict[TensorFormat, StoredDtype] = {"bf16": "BF16", "fp32": "F32", "int64": "I64"}


class TensorSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One logical tensor."""

    name: str
    """Official name, or the canonical one where experts are stacked."""
    shape: tuple[int, ...]
    """Logical shape: elements, not packed bytes."""
    format: TensorFormat
    """Published format."""
    trained: bool
    """Whether RL updates it; gate bias, tid2eid, indexer and MTP are frozen."""

    @property
    def num_elements(self) -> int:
        """Product of the shape."""
        return prod(self.shape)


class StoredTensor(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of a checkpoint file."""

    name: str
    """Official name; scales end in `.scale`."""
    shape: tuple[int, ...]
    """Shape in the file: packed FP4 has half the columns."""
    dtype: StoredDtype
    """Element type in the file."""

    @property
    def num_bytes(self) -> int:
        """Size of the data."""
        return prod(self.shape) * DTYPE_BYTES[self.dtype]


def scale_name(weight_name: str) -> str:
    """Return the name of a quantised weight's scale: `X.weight` -> `X.scale`."""
    return weight_name.removesuffix("weight") + "scale"


def scale_shape(shape: tuple[int, ...], tensor_format: TensorFormat) -> tuple[int, ...]:
    """Return the shape of the scales of a quantised [..., R, K] tensor."""
    *leading, rows, columns = shape
    if tensor_format == "mxfp4":
        return (*leading, rows, columns // 32)
    return (*leading, -(-rows // 128), -(-columns // 128))


def is_stacked_expert(name: str) -> bool:
    """Return whether a canonical name stands for the stacked matrices of all routed experts of a layer."""
    return ".ffn.experts." in name


def expert_name(stacked: str, expert: int) -> str:
    """Return the official name of one expert's matrix.

    Example: `layers.3.ffn.experts.w1.weight`, 5 -> `layers.3.ffn.experts.5.w1.weight`
    """
    return stacked.replace(".experts.", f".experts.{expert}.")


def _mix(prefix: str, rows: int, num_scales: int, config: ModelConfig) -> Iterator[TensorSpec]:
    width = config.hc_mult * config.hidden_size
    for part, shape in (("fn", (rows, width)), ("base", (rows,)), ("scale", (num_scales,))):
        yield TensorSpec(name=f"{prefix}_{part}", shape=shape, format="fp32", trained=True)


def _plain(name: str, *shape: int, trained: bool = True, dtype: TensorFormat = "bf16") -> TensorSpec:
    return TensorSpec(name=name, shape=shape, format=dtype, trained=trained)


def _compressor(prefix: str, ratio: int, width: int, *, overlap: bool, config: ModelConfig) -> Iterator[TensorSpec]:
    columns = width * (2 if overlap else 1)
    yield _plain(f"{prefix}.wkv.weight", columns, config.hidden_size)
    yield _plain(f"{prefix}.wgate.weight", columns, config.hidden_size)
    yield _plain(f"{prefix}.ape", ratio, columns, dtype="fp32")
    yield _plain(f"{prefix}.norm.weight", width)


def _attention(prefix: str, layer: int, config: ModelConfig) -> Iterator[TensorSpec]:
    hidden, heads, width = config.hidden_size, config.num_attention_heads, config.head_dim
    kind, ratio = config.layer_kind(layer), config.compress_ratios[layer]
    yield _plain(f"{prefix}.attn_sink", heads, dtype="fp32")
    yield _plain(f"{prefix}.wq_a.weight", config.q_lora_rank, hidden, dtype="fp8")
    yield _plain(f"{prefix}.q_norm.weight", config.q_lora_rank)
    yield _plain(f"{prefix}.wq_b.weight", heads * width, config.q_lora_rank, dtype="fp8")
    yield _plain(f"{prefix}.wkv.weight", width, hidden, dtype="fp8")
    yield _plain(f"{prefix}.kv_norm.weight", width)
    latent = config.o_groups * config.o_lora_rank
    yield _plain(f"{prefix}.wo_a.weight", latent, heads * width // config.o_groups, dtype="fp8")
    yield _plain(f"{prefix}.wo_b.weight", hidden, latent, dtype="fp8")
    if kind != "window":
        yield from _compressor(f"{prefix}.compressor", ratio, width, overlap=kind == "csa", config=config)
    if kind == "csa":
        index_heads, index_width = config.index_n_heads, config.index_head_dim
        yield _plain(f"{prefix}.indexer.wq_b.weight", index_heads * index_width, config.q_lora_rank, dtype="fp8")
        yield _plain(f"{prefix}.indexer.weights_proj.weight", index_heads, hidden)
        yield from _compressor(f"{prefix}.indexer.compressor", ratio, index_width, overlap=True, config=config)


def _moe(prefix: str, layer: int, config: ModelConfig) -> Iterator[TensorSpec]:
    hidden, experts, width = config.hidden_size, config.n_routed_experts, config.moe_intermediate_size
    yield _plain(f"{prefix}.gate.weight", experts, hidden)
    if config.is_hash_layer(layer):
        yield _plain(f"{prefix}.gate.tid2eid", config.vocab_size, config.num_experts_per_tok, dtype="int64")
    else:
        yield _plain(f"{prefix}.gate.bias", experts, dtype="fp32")
    shapes = {"w1": (width, hidden), "w2": (hidden, width), "w3": (width, hidden)}
    expert_format: TensorFormat = "mxfp4" if config.expert_dtype == "fp4" else "fp8"
    for matrix in EXPERT_MATRICES:
        yield _plain(f"{prefix}.experts.{matrix}.weight", experts, *shapes[matrix], dtype=expert_format)
    for matrix in EXPERT_MATRICES:
        yield _plain(f"{prefix}.shared_experts.{matrix}.weight", *shapes[matrix], dtype="fp8")


def _block(prefix: str, layer: int, config: ModelConfig) -> Iterator[TensorSpec]:
    mix_rows = (2 + config.hc_mult) * config.hc_mult
    yield from _mix(f"{prefix}.hc_attn", mix_rows, 3, config)
    yield from _mix(f"{prefix}.hc_ffn", mix_rows, 3, config)
    yield _plain(f"{prefix}.attn_norm.weight", config.hidden_size)
    yield _plain(f"{prefix}.ffn_norm.weight", config.hidden_size)
    yield from _attention(f"{prefix}.attn", layer, config)
    yield from _moe(f"{prefix}.ffn", layer, config)


def _mtp(prefix: str, layer: int, config: ModelConfig) -> Iterator[TensorSpec]:
    yield from _block(prefix, layer, config)
    for name in ("e_proj", "h_proj"):
        yield _plain(f"{prefix}.{name}.weight", config.hidden_size, config.hidden_size, dtype="fp8")
    for name in ("enorm", "hnorm", "norm"):
        yield _plain(f"{prefix}.{name}.weight", config.hidden_size)
    yield from _mix(f"{prefix}.hc_head", config.hc_mult, 1, config)


def _is_frozen(name: str) -> bool:
    return name.startswith("mtp.") or ".indexer." in name or name.endswith((".gate.bias", ".gate.tid2eid"))


def param_specs(config: ModelConfig) -> tuple[TensorSpec, ...]:
    """Return the canonical tensors: official names, except that a layer's routed experts are one stacked tensor.

    Args:
        config: the model.

    Returns:
        Specs in a fixed order: embedding, layers, final mix, norm, head, MTP. `layers.N.ffn.experts.w1.weight` and w3
        are [E, F, D], w2 is [E, D, F].
    """
    specs = [_plain("embed.weight", config.vocab_size, config.hidden_size)]
    for layer in range(config.num_hidden_layers):
        specs.extend(_block(f"layers.{layer}", layer, config))
    specs.extend(_mix("hc_head", config.hc_mult, 1, config))
    specs.append(_plain("norm.weight", config.hidden_size))
    specs.append(_plain("head.weight", config.vocab_size, config.hidden_size))
    for module in range(config.num_nextn_predict_layers):
        specs.extend(_mtp(f"mtp.{module}", config.num_hidden_layers + module, config))
    return tuple(msgspec.structs.replace(spec, trained=False) if _is_frozen(spec.name) else spec for spec in specs)


def tensor_specs(config: ModelConfig) -> tuple[TensorSpec, ...]:
    """Return the logical tensors under official names, one per expert matrix."""
    return tuple(spec for param in param_specs(config) for spec in unstacked(param))


def unstacked(spec: TensorSpec) -> tuple[TensorSpec, ...]:
    """Return the official tensors of a canonical one: itself, or one for each expert."""
    if not is_stacked_expert(spec.name):
        return (spec,)
    experts, *shape = spec.shape
    return tuple(
        TensorSpec(name=expert_name(spec.name, expert), shape=tuple(shape), format=spec.format, trained=spec.trained)
        for expert in range(experts)
    )


def stored_form(spec: TensorSpec) -> tuple[StoredTensor, ...]:
    """Return what a checkpoint holds for an official tensor: its data, then its scale if it is quantised."""
    if spec.format == "mxfp4":
        packed = (*spec.shape[:-1], spec.shape[-1] // 2)
        data = StoredTensor(name=spec.name, shape=packed, dtype="I8")
    elif spec.format == "fp8":
        data = StoredTensor(name=spec.name, shape=spec.shape, dtype="F8_E4M3")
    else:
        return (StoredTensor(name=spec.name, shape=spec.shape, dtype=_PLAIN_DTYPE[spec.format]),)
    scale = StoredTensor(name=scale_name(spec.name), shape=scale_shape(spec.shape, spec.format), dtype="F8_E8M0")
    return data, scale


def stored_tensors(config: ModelConfig) -> tuple[StoredTensor, ...]:
    """Return every entry of the model's checkpoint in the official layout, scales included.

    Example: Flash has 69,187 entries of 159,609,485,896 bytes, Pro 145,116 of 864,704,792,696.
    """
    return tuple(stored for spec in tensor_specs(config) for stored in stored_form(spec))
