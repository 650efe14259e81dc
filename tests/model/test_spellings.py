"""Proves: every tensor of a model is found under each of its names, and no two share one.

The names of transformers are those of its own model, built here. Does not prove that values survive (test_convert.py).
"""

import msgspec
import pytest

from rollforward.model.config import parse_model_config, preset
from rollforward.model.config_transformers import official_config, transformers_config
from rollforward.model.errors import ConfigError
from rollforward.model.shapes import is_stacked_expert, param_specs, stored_tensors, tensor_specs
from rollforward.model.spellings import fused_parts, official_name, transformers_name

CONFIG = preset("tiny")

# The official converter's input (its replacements backwards), official -> other.
CONVERTER = {
    "attn": "self_attn",
    "ffn": "mlp",
    "scale": "weight_scale_inv",
    "bias": "e_score_correction_bias",
    "embed": "embed_tokens",
    "head": "lm_head",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "w1": "gate_proj",
    "w2": "down_proj",
    "w3": "up_proj",
}


@pytest.mark.parametrize("model", ["tiny", "flash", "pro"])
def test_official_names_are_left_as_they_are(model) -> None:
    config = preset(model)
    if model != "tiny":
        config = msgspec.structs.replace(config, n_routed_experts=6)
    assert all(official_name(stored.name) == stored.name for stored in stored_tensors(config))


@pytest.mark.parametrize("prefix", ["", "model."])
def test_the_converters_spellings(prefix) -> None:
    for stored in stored_tensors(CONFIG):
        spelled = prefix + ".".join(CONVERTER.get(part, part) for part in stored.name.split("."))
        assert official_name(spelled) == stored.name, spelled


def test_transformers_names_are_those_of_its_model() -> None:
    from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

    raw = transformers_config(CONFIG)
    model = DeepseekV4ForCausalLM(DeepseekV4Config(**raw))
    theirs = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items() if "inv_freq" not in name}
    ours = {transformers_name(spec.name) for spec in param_specs(CONFIG) if not spec.name.startswith("mtp.")}
    assert ours == set(theirs)
    # And back: each name leads to the official tensors, once.
    back: list[str] = []
    for name, shape in theirs.items():
        parts = fused_parts(name, shape)
        back += [part.name for part in parts] or [official_name(name)]
    assert sorted(back) == sorted(spec.name for spec in tensor_specs(CONFIG) if not spec.name.startswith("mtp."))
    shapes = {spec.name: spec.shape for spec in tensor_specs(CONFIG)}
    for name, shape in theirs.items():
        for part in fused_parts(name, shape):
            assert part.shape == shapes[part.name]


def test_fused_rows_are_gate_then_up_of_one_expert_after_another() -> None:
    parts = fused_parts("model.layers.3.mlp.experts.gate_up_proj", (2, 6, 4))
    assert [(part.name, part.start_rows, part.shape) for part in parts] == [
        ("layers.3.ffn.experts.0.w1.weight", 0, (3, 4)),
        ("layers.3.ffn.experts.0.w3.weight", 3, (3, 4)),
        ("layers.3.ffn.experts.1.w1.weight", 6, (3, 4)),
        ("layers.3.ffn.experts.1.w3.weight", 9, (3, 4)),
    ]
    for name, shape in (
        ("model.layers.3.mlp.experts.gate_up_proj", (2, 5, 4)),
        ("model.layers.3.mlp.experts.gate_up_proj", (6, 4)),
        ("model.layers.3.mlp.shared_experts.down_proj", (2, 6, 4)),
        ("gate_up_proj", (2, 6, 4)),
    ):
        assert fused_parts(name, shape) == ()


@pytest.mark.parametrize(
    "name", ["", ".", "model", "model.", "a..b", "norm", "hc_head", "layers", "indexer.compressor"]
)
def test_odd_names_are_no_error(name) -> None:
    assert isinstance(official_name(name), str)


@pytest.mark.parametrize("model", ["tiny", "flash", "pro"])
def test_configurations_survive_both_spellings(model) -> None:
    config = preset(model)
    assert parse_model_config(official_config(transformers_config(config))) == config
    without = msgspec.structs.replace(
        config, num_nextn_predict_layers=0, compress_ratios=config.compress_ratios[:-1], rope_scaling=None
    )
    assert parse_model_config(official_config(transformers_config(without))) == without


def test_transformers_reads_the_configuration_alike() -> None:
    from transformers import DeepseekV4Config

    for model in ("tiny", "flash", "pro"):
        config = preset(model)
        theirs = DeepseekV4Config(**transformers_config(config))
        assert theirs.qk_rope_head_dim == config.qk_rope_head_dim
        assert parse_model_config(official_config(theirs.to_diff_dict())) == config


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layer_types": None}, "layer_types is None; which layer is of which kind cannot be told"),
        ({"layer_types": ["full_attention"] * 4}, "layer_types is 'full_attention'; a layer is one of"),
        ({"layer_types": ["sliding_attention"] * 3}, "compress_ratios"),
        ({"mlp_layer_types": ["moe", "hash_moe", "moe", "moe"]}, "hash_moe layers come first"),
        ({"mlp_bias": True}, "mlp_bias is True"),
        ({"rope_parameters": {"main": {}}}, "it holds main and compress"),
        ({"rope_theta": 5.0}, "rope_theta is 5.0; rope_parameters says 10000.0"),
        ({"num_nextn_predict_layers": 3}, "there are 0 or 1 MTP modules"),
        ({"compress_rates": {"compressed_sparse_attention": "x"}}, "compress_rates"),
    ],
)
def test_a_wrong_configuration_of_transformers_is_refused(change, message) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_model_config(official_config(transformers_config(CONFIG) | change))


def test_a_rotary_amplitude_is_refused() -> None:
    raw = transformers_config(CONFIG)
    raw["rope_parameters"]["compress"]["attention_factor"] = 1.277
    with pytest.raises(ConfigError, match=r"attention_factor is 1\.277; DeepSeek-V4 does not scale"):
        official_config(raw)


def test_stacked_names_share_a_name_with_nothing_but_their_fused_half() -> None:
    names = [transformers_name(spec.name) for spec in param_specs(CONFIG)]
    fused = [transformers_name(spec.name) for spec in param_specs(CONFIG) if is_stacked_expert(spec.name)]
    assert len(names) - len(set(names)) == sum(name.endswith("gate_up_proj") for name in set(fused))
