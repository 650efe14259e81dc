"""Proves that every admissible config.json is read, and that anything else is a typed error that names the field."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollforward.model.config import (
    CompressRates,
    ModelConfig,
    config_json,
    load_model_config,
    parse_model_config,
    preset,
    resolve_model,
)
from rollforward.model.errors import ConfigError, UnsupportedVariantError
from rollforward.model.shapes import param_specs


def official(name: str = "flash") -> dict[str, Any]:
    """Return a preset's config.json with the keys that official files have and the computation ignores."""
    return {**config_json(preset(name)), "transformers_version": "4.57.1", "use_cache": True}  # pyright: ignore[reportArgumentType]


def test_flash_and_pro_are_the_released_models() -> None:
    flash, pro = preset("flash"), preset("pro")
    assert (flash.num_hidden_layers, flash.hidden_size, flash.num_attention_heads, flash.q_lora_rank) == (
        43,
        4096,
        64,
        1024,
    )
    assert (pro.num_hidden_layers, pro.hidden_size, pro.num_attention_heads, pro.q_lora_rank) == (61, 7168, 128, 1536)
    assert (flash.o_groups, pro.o_groups) == (8, 16)
    assert (flash.moe_intermediate_size, pro.moe_intermediate_size) == (2048, 3072)
    assert (flash.n_routed_experts, pro.n_routed_experts) == (256, 384)
    assert (flash.index_topk, pro.index_topk) == (512, 1024)
    assert (flash.routed_scaling_factor, pro.routed_scaling_factor) == (1.5, 2.5)
    assert flash.compress_rope_theta == 160000, "40000 is the placeholder of the reference's dataclass"
    kinds = [flash.layer_kind(layer) for layer in range(44)]
    assert kinds[:2] == ["window", "window"]
    assert kinds[43] == "window"
    assert all(kinds[layer] == "csa" for layer in range(2, 43, 2))
    assert all(kinds[layer] == "hca" for layer in range(3, 42, 2))
    kinds = [pro.layer_kind(layer) for layer in range(62)]
    assert [layer for layer, kind in enumerate(kinds) if kind == "hca"] == [0, 1, *range(3, 60, 2)]
    assert [layer for layer, kind in enumerate(kinds) if kind == "csa"] == [*range(2, 61, 2)]
    assert kinds[61] == "window"
    assert [flash.is_hash_layer(layer) for layer in (0, 2, 3, 43)] == [True, True, False, False]
    assert flash.nope_head_dim == 448


def test_tiny_has_every_kind_of_layer() -> None:
    tiny = preset("tiny")
    assert [tiny.layer_kind(layer) for layer in range(5)] == ["window", "csa", "hca", "csa", "window"]
    assert tiny.is_hash_layer(0)
    assert not tiny.is_hash_layer(1)


def test_mini_has_the_mechanisms_of_flash() -> None:
    """Whatever a mechanism, a cache row or a kernel's tile is made of is Flash's; the rest is smaller."""
    mini, flash = preset("mini"), preset("flash")
    shrunk = {"hidden_size", "num_hidden_layers", "q_lora_rank", "o_lora_rank", "moe_intermediate_size"}
    shrunk |= {"n_routed_experts", "compress_ratios"}
    differing = {name for name in ModelConfig.__struct_fields__ if getattr(mini, name) != getattr(flash, name)}
    assert differing == shrunk
    kinds = [mini.layer_kind(layer) for layer in range(10)]
    assert kinds == ["window", "window", "csa", "hca", "csa", "hca", "csa", "hca", "csa", "window"]
    routes = {(mini.layer_kind(layer), mini.is_hash_layer(layer)) for layer in range(10)}
    assert {("window", True), ("csa", True), ("csa", False), ("hca", False), ("window", False)} == routes


@pytest.mark.parametrize("name", ["flash", "pro", "mini"])
def test_sizes_fit_the_kernels(name: str) -> None:
    """The tiles that a GPU kernel is built of: none of a released model's, or of mini's, is ragged."""
    config = preset(name)  # pyright: ignore[reportArgumentType]
    for spec in param_specs(config):
        if spec.format in ("fp8", "mxfp4"):
            assert [side % 128 for side in spec.shape[-2:]] == [0, 0], f"{spec.name}: FP8 blocks, activation groups"
    assert (config.head_dim, config.nope_head_dim) == (512, 448), "a cache entry of 584 bytes"
    assert config.num_attention_heads % 64 == 0, "the rows of an attention tile"
    assert config.num_attention_heads * config.head_dim // config.o_groups == 4096, "a group's input"
    assert (config.index_n_heads, config.index_head_dim) == (64, 128), "an index tile"
    assert config.index_topk % 64 == config.sliding_window % 64 == 0, "tiles of keys"
    assert config.hc_mult * config.hidden_size % 2048 == 0, "fixed splits of the stream mix"
    assert config.n_routed_experts % 64 == config.vocab_size % 256 == 0, "tiles of gate and head"


@pytest.mark.parametrize("name", ["flash", "pro", "mini", "tiny"])
def test_config_json_round_trips(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(official(name)))
    assert load_model_config(tmp_path) == preset(name)  # pyright: ignore[reportArgumentType]
    assert load_model_config(tmp_path / "config.json") == resolve_model(name)
    assert resolve_model(str(tmp_path)) == resolve_model(name)


def test_compress_rates_are_written_only_when_they_differ() -> None:
    assert "compress_rates" not in config_json(preset("flash"))
    assert config_json(preset("tiny"))["compress_rates"]["heavily_compressed_attention"] == 32


def test_absent_formats_default_to_the_official_ones() -> None:
    raw = official()
    del raw["expert_dtype"], raw["quantization_config"]
    assert parse_model_config(raw) == preset("flash")
    assert parse_model_config({**raw, "expert_dtype": None, "quantization_config": None}) == preset("flash")
    assert parse_model_config({**raw, "expert_dtype": "fp8"}).expert_dtype == "fp8"


def test_rope_scaling_as_transformers_rewrites_it() -> None:
    raw = official()
    raw["rope_scaling"] |= {"rope_type": "yarn", "rope_theta": raw["rope_theta"]}
    assert parse_model_config(raw) == preset("flash")
    raw["rope_scaling"]["rope_theta"] = 40000
    with pytest.raises(ConfigError, match=r"rope_scaling\.rope_theta is 40000"):
        parse_model_config(raw)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hiden_size": 3}, "hiden_size is no field.*Did you mean hidden_size"),
        ({"hidden_size": "4096"}, r"Expected `int`, got `str` - at `\$.hidden_size`"),
        ({"hidden_size": True}, "hidden_size"),
        ({"hidden_size": 4096.5}, "hidden_size"),
        ({"hidden_size": 100}, "hidden_size is 100; expert weights have groups of 32"),
        ({"num_hidden_layers": 42}, "compress_ratios is 'a list of 44'; it needs .* = 43 entries"),
        ({"compress_ratios": [0, 3] + [0] * 42}, r"compress_ratios\[1\] is 3; an entry is 0 .*, 4 \(CSA\) or 128"),
        ({"compress_ratios": [0] * 43 + [4]}, "the MTP layer is window only"),
        ({"qk_rope_head_dim": 63}, "come in pairs"),
        ({"qk_rope_head_dim": 512}, "below head_dim"),
        ({"o_groups": 7}, "o_groups is 7; it must divide"),
        ({"index_head_dim": 96}, "power of two"),
        ({"num_experts_per_tok": 257}, "there are n_routed_experts = 256"),
        ({"num_hash_layers": 44}, "num_hash_layers is 44"),
        ({"eos_token_id": 129280}, "below vocab_size"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings is True"),
        ({"norm_topk_prob": False}, "norm_topk_prob is False"),
        ({"n_shared_experts": 2}, "n_shared_experts is 2"),
        ({"scoring_func": "sigmoid"}, "scoring_func"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"model_type": "deepseek_v3"}, "model_type is 'deepseek_v3'"),
        ({"layer_types": []}, "transformers' spelling; .* rollforward convert from=DIR to=NEW_DIR"),
        ({"rms_norm_eps": 0}, "rms_norm_eps"),
        ({"rope_theta": float("nan")}, "rope_theta"),
        ({"rope_theta": float("inf")}, "rope_theta"),
        ({"rope_theta": 10**400}, "rope_theta"),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, "rope_scaling"),
        ({"num_nextn_predict_layers": 3}, "num_nextn_predict_layers"),
        ({"compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 4}}, "must differ"),
    ],
)
def test_broken_rules_name_field_value_rule_and_way_out(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        parse_model_config({**official(), **change})
    assert not isinstance(caught.value, UnsupportedVariantError)


def test_missing_key_is_named() -> None:
    raw = official()
    del raw["sliding_window"]
    with pytest.raises(ConfigError, match="sliding_window"):
        parse_model_config(raw)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dspark_block_size": 5}, "DSpark"),
        ({"n_mtp_layers": 3}, "DSpark"),
        ({"vision_config": {}}, "Vision"),
        ({"image_token_id": 129279}, "Vision"),
        ({"engram_layers": [1]}, "V4.1"),
        ({"model_type": "deepseek_v4_1"}, "relative of deepseek_v4"),
    ],
)
def test_relatives_are_refused_by_name(change: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnsupportedVariantError, match=reason):
        parse_model_config({**official(), **change})


def test_block_size_of_a_relative_is_refused() -> None:
    raw = official()
    raw["quantization_config"]["weight_block_size"] = [32, 32]
    with pytest.raises(ConfigError, match=r"\[32, 32\].*V4\.1"):
        parse_model_config(raw)


def test_rules_hold_for_direct_construction() -> None:
    with pytest.raises(ConfigError, match="compress_ratios"):
        msgspec.structs.replace(preset("tiny"), compress_ratios=(0, 4, 128, 4, 0))
    other = msgspec.structs.replace(
        preset("tiny"),
        compress_ratios=(0, 2, 8, 2, 0),
        compress_rates=CompressRates(compressed_sparse_attention=2, heavily_compressed_attention=8),
    )
    assert [other.layer_kind(layer) for layer in range(4)] == ["window", "csa", "hca", "csa"]


@pytest.mark.parametrize("contents", [b"", b"[]", b"3", b"{", b"\xff\xfe", b"[" * 100_000, b'{"a": 1}'])
def test_files_that_are_no_config(contents: bytes, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(contents)
    with pytest.raises(ConfigError, match=r"config\.json"):
        load_model_config(tmp_path)


def test_absent_files_and_unknown_models(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load_model_config(tmp_path)
    with pytest.raises(ConfigError, match="Did you mean flash"):
        resolve_model("flsh")
    with pytest.raises(ConfigError, match="presets are flash, pro, mini, tiny"):
        preset("huge")  # pyright: ignore[reportArgumentType]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=300)
@given(key=st.sampled_from(sorted(official())), value=JSON, dropped=st.sampled_from(sorted(official())))
def test_any_json_value_anywhere_is_a_config_or_a_typed_error(key: str, value: object, dropped: str) -> None:
    raw = official("tiny")
    raw.pop(dropped, None)
    try:
        config = parse_model_config({**raw, key: value})
    except ConfigError:
        return
    assert parse_model_config(config_json(config)) == config


@settings(max_examples=100)
@given(raw=st.dictionaries(st.sampled_from(sorted(official())) | st.text(max_size=8), JSON, max_size=8))
def test_any_json_object_is_a_typed_error(raw: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        parse_model_config(raw)


def test_schema_modules_import_neither_torch_nor_ray() -> None:
    modules = "rollforward.model.config, rollforward.model.shapes, rollforward.model.plan"
    code = f"import sys, {modules}; print(sorted({{'torch', 'ray'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_runs_settings_are_no_models_and_its_model_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"run_dir": str(tmp_path), "seed": 0}))
    with pytest.raises(ConfigError, match=rf"holds the settings of a run, not of a model.* name {tmp_path}/model\.$"):
        load_model_config(tmp_path)
