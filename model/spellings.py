"""The names that tensors of a DeepSeek-V4 checkpoint go by: DeepSeek's own, those that its converter accepts, and
transformers'.

All code but this knows the official ones. A name is translated part by part between its dots, so a part never changes
inside another word; one that is not known here is left as it is, and refused later under its own name.

Also here: transformers' fused experts, whose rows are those of the official matrices one after another, so that an
official matrix is a run of bytes of a fused tensor.

Sources: official convert.py; transformers 5.23, conversion_mapping.py and what its `save_pretrained` writes.
"""

from collections.abc import Iterator
from typing import Literal

import msgspec

Layout = Literal["official", "transformers"]
"""How a checkpoint's tensors are named and stored."""

_PARTS = {
    "self_attn": "attn",
    "mlp": "ffn",
    "embed_tokens": "embed",
    "lm_head": "head",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "weight_scale_inv": "scale",
    "e_score_correction_bias": "bias",
    "up_proj": "w3",
    "down_proj": "w2",
    "sinks": "attn_sink",
    "position_bias": "ape",
    "q_a_proj": "wq_a",
    "q_a_norm": "q_norm",
    "q_b_proj": "wq_b",
    "kv_proj": "wkv",
    "o_a_proj": "wo_a",
    "o_b_proj": "wo_b",
}
"""A part of a name -> the official one, wherever it stands."""

_HYPER_CONNECTIONS = {"attn_hc": "hc_attn", "ffn_hc": "hc_ffn", "hc_head": "hc_head"}
"""Modules whose parameters are officially named with an underscore instead of a dot."""

_FUSED = {"gate_up_proj": ("w1", "w3"), "down_proj": ("w2",)}
"""Last part of transformers' fused experts -> the official matrices that it holds of each expert, in order."""

_TRUNK = {"embed": "embed_tokens", "norm": "norm"}

_TO_TRANSFORMERS = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "hc_attn_fn": "attn_hc.fn",
    "hc_attn_base": "attn_hc.base",
    "hc_attn_scale": "attn_hc.scale",
    "hc_ffn_fn": "ffn_hc.fn",
    "hc_ffn_base": "ffn_hc.base",
    "hc_ffn_scale": "ffn_hc.scale",
}

_TO_TRANSFORMERS_ATTENTION = {
    "attn_sink": "sinks",
    "wq_a": "q_a_proj",
    "q_norm": "q_a_norm",
    "wq_b": "q_b_proj",
    "wkv": "kv_proj",
    "wo_a": "o_a_proj",
    "wo_b": "o_b_proj",
}

_TO_TRANSFORMERS_COMPRESSOR = {"wkv": "kv_proj", "wgate": "gate_proj", "ape": "position_bias", "norm": "kv_norm"}

_TO_TRANSFORMERS_FFN = {"bias": "e_score_correction_bias", "w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}


def official_name(name: str) -> str:
    """Return the official name of a tensor that may be spelled otherwise; an unknown one comes back as far as it is
    known.

    Example: `model.layers.3.self_attn.compressor.indexer.kv_proj.weight` ->
        `layers.3.attn.indexer.compressor.wkv.weight`
    """
    parts = name.split(".")
    if parts[0] == "model" and len(parts) > 1:
        del parts[0]
    in_compressor = "compressor" in parts
    # The same word is an expert's matrix and a compressor's, the same norm the attention's and a compressor's.
    gate = "wgate" if in_compressor else "w1"
    parts = [gate if part == "gate_proj" else _PARTS.get(part, part) for part in parts]
    if in_compressor:
        parts = ["norm" if part == "kv_norm" else part for part in parts]
    elif parts[-3:] == ["attn", "norm", "weight"]:
        parts[-2] = "kv_norm"  # transformers' save_pretrained writes it so
    if "indexer" in parts and in_compressor:
        parts = _official_indexer(parts)
    return ".".join(_joined(parts))


def _official_indexer(parts: list[str]) -> list[str]:
    """transformers has the indexer inside the compressor, and the indexer's compressor unnamed inside it."""
    at = parts.index("indexer")
    if parts[at - 1] != "compressor":
        return parts
    before, after = parts[: at - 1], parts[at + 1 :]
    if after[:1] == ["scorer"]:
        return [*before, "indexer", *after[1:]]
    if after[:1] == ["wq_b"]:
        return [*before, "indexer", *after]
    return [*before, "indexer", "compressor", *after]


def _joined(parts: list[str]) -> Iterator[str]:
    """`attn_hc`, `fn` -> `hc_attn_fn`."""
    index = 0
    while index < len(parts):
        official = _HYPER_CONNECTIONS.get(parts[index])
        if official is not None and index + 2 == len(parts):
            yield f"{official}_{parts[index + 1].removeprefix('hc_')}"
            return
        yield parts[index]
        index += 1


class FusedPart(msgspec.Struct, frozen=True, kw_only=True):
    """One official matrix inside a fused tensor."""

    name: str
    """Official name."""
    start_rows: int
    """Rows of the fused tensor, counted through all its experts, before the matrix."""
    shape: tuple[int, int]
    """Rows and columns."""


def fused_parts(name: str, shape: tuple[int, ...]) -> tuple[FusedPart, ...]:
    """Return the official matrices inside one of transformers' fused experts, in the order of their bytes.

    Args:
        name: as it stands in the file.
        shape: [E, rows, columns].

    Returns:
        Empty where the name is not of fused experts, or the shape cannot be.
    """
    module, _, last = name.rpartition(".")
    matrices = _FUSED.get(last)
    if matrices is None or not module.endswith(".experts") or len(shape) != 3 or shape[1] % len(matrices):
        return ()
    prefix, rows = official_name(module), shape[1] // len(matrices)
    return tuple(
        FusedPart(
            name=f"{prefix}.{expert}.{matrix}.weight",
            start_rows=expert * shape[1] + index * rows,
            shape=(rows, shape[2]),
        )
        for expert in range(shape[0])
        for index, matrix in enumerate(matrices)
    )


def transformers_name(name: str) -> str:
    """Return what transformers calls a tensor, of which the name may be canonical.

    The experts' w1 and w3 have one name together. transformers has no MTP module and ignores tensors named `mtp.`, so
    those keep their official names.

    Example: `layers.3.attn.indexer.wq_b.weight` -> `model.layers.3.self_attn.compressor.indexer.q_b_proj.weight`;
        `layers.3.ffn.experts.w3.weight` -> `model.layers.3.mlp.experts.gate_up_proj`
    """
    parts = name.split(".")
    if parts[0] == "mtp":
        return name
    if parts[0] == "head":
        return "lm_head.weight"
    if parts[0].startswith("hc_head_"):
        return "model.hc_head." + parts[0].removeprefix("hc_head_").join(("hc_", ""))
    if parts[0] != "layers":
        return ".".join(["model", _TRUNK[parts[0]], *parts[1:]])
    layer, module, *rest = parts[1:]
    if module == "attn":
        inside = ["self_attn", *_transformers_attention(rest)]
    elif module == "ffn":
        inside = ["mlp", *_transformers_ffn(rest)]
    else:
        inside = [_TO_TRANSFORMERS[module], *rest]
    return ".".join(["model", "layers", layer, *inside])


def _transformers_attention(rest: list[str]) -> list[str]:
    first, *others = rest
    if first == "compressor":
        return ["compressor", _TO_TRANSFORMERS_COMPRESSOR[others[0]], *others[1:]]
    if first != "indexer":
        return [_TO_TRANSFORMERS_ATTENTION.get(first, first), *others]
    if others[0] == "compressor":
        return ["compressor", "indexer", _TO_TRANSFORMERS_COMPRESSOR[others[1]], *others[2:]]
    inner = {"wq_b": ["q_b_proj"], "weights_proj": ["scorer", "weights_proj"]}[others[0]]
    return ["compressor", "indexer", *inner, *others[1:]]


def _transformers_ffn(rest: list[str]) -> list[str]:
    if rest[0] == "experts":
        matrix = rest[-2]
        return ["experts", next(fused for fused, held in _FUSED.items() if matrix in held)]
    return [_TO_TRANSFORMERS_FFN.get(part, part) if rest[0] != "gate" or part == "bias" else part for part in rest]
