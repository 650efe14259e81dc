"""transformers' spelling of a DeepSeek-V4 config.json, to and from the official one.

transformers names layer kinds instead of ratios and groups the rotary settings by layer kind. Without the list of kinds
it assumes one that is neither Flash's nor Pro's, so here the list is needed.

Imports neither torch nor transformers. Source: transformers 5.23, configuration_deepseek_v4.py.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import msgspec

from rollforward.model.config import (
    CompressRates,
    LayerKind,
    ModelConfig,
    config_json,
    load_model_config,
    parse_model_config,
)
from rollforward.model.errors import ConfigError

_KIND_OF_TYPE: dict[str, LayerKind] = {
    "sliding_attention": "window",
    "compressed_sparse_attention": "csa",
    "heavily_compressed_attention": "hca",
}
_TYPE_OF_KIND = {kind: name for name, kind in _KIND_OF_TYPE.items()}

_OWN_KEYS = ("layer_types", "mlp_layer_types", "rope_parameters", "partial_rotary_factor")

_INERT = {"mlp_bias": False, "router_jitter_noise": 0.0}
"""Keys of transformers' alone, with the one value that leaves the model as it is."""

_FIX = "Compare it with what transformers writes for the model."


def load_spelled_config(directory: Path) -> ModelConfig:
    """Read a folder's config.json, in official or in transformers' spelling.

    Raises:
        ConfigError: it is absent, damaged or refused.
    """
    file = directory / "config.json"
    try:
        raw = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError):
        return load_model_config(directory)  # which says what is wrong
    if not isinstance(raw, dict) or not any(key in raw for key in _OWN_KEYS):
        return load_model_config(directory)
    try:
        return parse_model_config(official_config(cast("dict[str, Any]", raw)))
    except ConfigError as error:
        raise type(error)(f"{file}: {error}") from error


def official_config(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the official spelling of a config.json that transformers wrote.

    Args:
        raw: the decoded object, with at least `layer_types` and `mlp_layer_types`.

    Raises:
        ConfigError: a list of layers is absent or names an unknown kind; the two rotary settings do not fit the model.
    """
    fields = {key: value for key, value in raw.items() if key not in _OWN_KEYS}
    for key, only in _INERT.items():
        _require(fields.pop(key, only) == only, key, raw.get(key), f"DeepSeek-V4 is defined for {only} only")
    rates = _rates(fields)
    fields["compress_rates"] = msgspec.to_builtins(rates)
    ratio_of = {
        "window": 0,
        "csa": rates.compressed_sparse_attention,
        "hca": rates.heavily_compressed_attention,
    }
    kinds = [_kind(name) for name in _list(raw, "layer_types")]
    num_mtp = fields.get("num_nextn_predict_layers", 1)
    _require(num_mtp in (0, 1), "num_nextn_predict_layers", num_mtp, "there are 0 or 1 MTP modules")
    fields["compress_ratios"] = [ratio_of[kind] for kind in kinds] + [0] * num_mtp
    fields["num_hash_layers"] = _num_hash_layers(_list(raw, "mlp_layer_types"))
    _take_rope(fields, raw.get("rope_parameters"))
    if "qk_rope_head_dim" not in fields and {"partial_rotary_factor", "head_dim"} <= raw.keys():
        fields["qk_rope_head_dim"] = int(raw["head_dim"] * raw["partial_rotary_factor"])
    quantisation = fields.get("quantization_config")
    if isinstance(quantisation, dict) and "expert_dtype" in quantisation:
        fields["quantization_config"] = {key: one for key, one in quantisation.items() if key != "expert_dtype"}
        fields.setdefault("expert_dtype", quantisation["expert_dtype"])
    return fields


def _require(holds: bool, key: str, value: object, rule: str) -> None:
    if not holds:
        raise ConfigError(f"{key} is {value!r}; {rule}. {_FIX}")


def _list(raw: Mapping[str, Any], key: str) -> list[object]:
    value = raw.get(key)
    _require(isinstance(value, list), key, value, "which layer is of which kind cannot be told without it")
    return cast("list[object]", value)


def _kind(name: object) -> LayerKind:
    known = ", ".join(_KIND_OF_TYPE)
    _require(isinstance(name, str) and name in _KIND_OF_TYPE, "layer_types", name, f"a layer is one of {known}")
    return _KIND_OF_TYPE[cast("str", name)]


def _rates(fields: dict[str, Any]) -> CompressRates:
    """Ratios of the two kinds; removes the older spelling of them."""
    rates = dict(fields.get("compress_rates") or {})
    for old, kind in (
        ("compress_rate_csa", "compressed_sparse_attention"),
        ("compress_rate_hca", "heavily_compressed_attention"),
    ):
        if (rate := fields.pop(old, None)) is not None:
            rates[kind] = rate
    try:
        return msgspec.convert(rates, CompressRates)
    except msgspec.ValidationError as error:
        raise ConfigError(f"compress_rates is {rates!r}: {error}. {_FIX}") from error


def _num_hash_layers(names: list[object]) -> int:
    count = names.count("hash_moe")
    expected = ["hash_moe"] * count + ["moe"] * (len(names) - count)
    _require(names == expected, "mlp_layer_types", names, "hash_moe layers come first, the others are moe")
    return count


def _take_rope(fields: dict[str, Any], parameters: object) -> None:
    """Move the rotary settings of both layer kinds to their official keys."""
    if parameters is None:
        return
    given = cast("dict[str, Any]", parameters) if isinstance(parameters, dict) else {}
    main, compress = given.get("main"), given.get("compress")
    if not isinstance(main, dict) or not isinstance(compress, dict):
        raise ConfigError(f"rope_parameters is {parameters!r}; it holds main and compress. {_FIX}")
    kind = main.get("rope_type", "default")
    _require(kind == "default", "rope_parameters.main.rope_type", kind, "window layers have plain frequencies")
    for key, theta in (("rope_theta", main.get("rope_theta")), ("compress_rope_theta", compress.get("rope_theta"))):
        _require(fields.get(key) in (None, theta), key, fields.get(key), f"rope_parameters says {theta!r}")
        if theta is not None:
            fields[key] = theta
    fields.pop("rope_scaling", None)
    if compress.get("rope_type", "default") == "default":
        return
    factor = compress.get("attention_factor", 1.0)
    _require(
        factor == 1.0, "rope_parameters.compress.attention_factor", factor, "DeepSeek-V4 does not scale rotary values"
    )
    keys = ("factor", "beta_fast", "beta_slow", "original_max_position_embeddings")
    fields["rope_scaling"] = {"type": compress["rope_type"], **{key: compress[key] for key in keys if key in compress}}


def transformers_config(config: ModelConfig) -> dict[str, Any]:
    """Return the config.json with which transformers builds the model from plain weights."""
    raw = config_json(config)
    for key in (
        "compress_ratios",
        "num_hash_layers",
        "rope_scaling",
        "quantization_config",
        "expert_dtype",
        "topk_method",
    ):
        raw.pop(key)
    factor = config.qk_rope_head_dim / config.head_dim
    while int(config.head_dim * factor) < config.qk_rope_head_dim:  # transformers cuts the product off
        factor = math.nextafter(factor, 1.0)
    layers = range(config.num_hidden_layers)
    rope = {"partial_rotary_factor": factor}
    compress: dict[str, Any] = {**rope, "rope_theta": config.compress_rope_theta, "rope_type": "default"}
    if config.rope_scaling is not None:
        compress |= {"rope_type": "yarn", "attention_factor": 1.0, **msgspec.to_builtins(config.rope_scaling)}
    return raw | {
        "compress_rates": msgspec.to_builtins(config.compress_rates),
        "layer_types": [_TYPE_OF_KIND[config.layer_kind(layer)] for layer in layers],
        "mlp_layer_types": ["hash_moe" if config.is_hash_layer(layer) else "moe" for layer in layers],
        "partial_rotary_factor": factor,
        "rope_parameters": {
            "main": {**rope, "rope_theta": config.rope_theta, "rope_type": "default"},
            "compress": compress,
        },
    }
