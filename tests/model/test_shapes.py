"""Proves the shape table against the released index files: counts, bytes, dtype census, and selected rows."""

from collections import Counter
from functools import cache

import pytest

from rollforward.model.config import ModelConfig, PresetName, preset
from rollforward.model.shapes import (
    StoredTensor,
    expert_name,
    param_specs,
    scale_name,
    scale_shape,
    stored_tensors,
    tensor_specs,
    unstacked,
)


@cache
def table(name: PresetName) -> dict[str, StoredTensor]:
    """Return a preset's checkpoint entries by name; built once, Pro has 145,116."""
    return {tensor.name: tensor for tensor in stored_tensors(preset(name))}


@pytest.fixture(scope="module", params=["flash", "pro", "tiny"])
def config(request: pytest.FixtureRequest) -> ModelConfig:
    """Each preset in turn."""
    return preset(request.param)


@pytest.mark.parametrize(
    ("name", "count", "size"), [("flash", 69_187, 159_609_485_896), ("pro", 145_116, 864_704_792_696)]
)
def test_released_counts_and_bytes(name: PresetName, count: int, size: int) -> None:
    stored = stored_tensors(preset(name))
    assert len(table(name)) == len(stored) == count
    assert sum(tensor.num_bytes for tensor in stored) == size


def test_dtype_census_of_flash() -> None:
    census = Counter(tensor.dtype for tensor in table("flash").values())
    assert census == {"BF16": 433, "F32": 417, "F8_E4M3": 375, "F8_E8M0": 34_167, "I64": 3, "I8": 33_792}


@pytest.mark.parametrize(
    ("name", "flash", "pro"),
    [
        ("embed.weight", ((129280, 4096), "BF16"), ((129280, 7168), "BF16")),
        ("hc_head_fn", ((4, 16384), "F32"), ((4, 28672), "F32")),
        ("layers.0.hc_attn_fn", ((24, 16384), "F32"), ((24, 28672), "F32")),
        ("layers.5.hc_ffn_scale", ((3,), "F32"), ((3,), "F32")),
        ("layers.9.attn.attn_sink", ((64,), "F32"), ((128,), "F32")),
        ("layers.9.attn.wq_b.scale", ((256, 8), "F8_E8M0"), ((512, 12), "F8_E8M0")),
        ("layers.9.attn.wo_a.weight", ((8192, 4096), "F8_E4M3"), ((16384, 4096), "F8_E4M3")),
        ("layers.9.attn.wo_b.scale", ((32, 64), "F8_E8M0"), ((56, 128), "F8_E8M0")),
        ("layers.2.attn.compressor.wkv.weight", ((1024, 4096), "BF16"), ((1024, 7168), "BF16")),
        ("layers.3.attn.compressor.ape", ((128, 512), "F32"), ((128, 512), "F32")),
        ("layers.2.attn.compressor.ape", ((4, 1024), "F32"), ((4, 1024), "F32")),
        ("layers.2.attn.indexer.wq_b.scale", ((64, 8), "F8_E8M0"), ((64, 12), "F8_E8M0")),
        ("layers.2.attn.indexer.compressor.wgate.weight", ((256, 4096), "BF16"), ((256, 7168), "BF16")),
        ("layers.2.attn.indexer.compressor.norm.weight", ((128,), "BF16"), ((128,), "BF16")),
        ("layers.2.ffn.gate.tid2eid", ((129280, 6), "I64"), ((129280, 6), "I64")),
        ("layers.3.ffn.gate.bias", ((256,), "F32"), ((384,), "F32")),
        ("layers.3.ffn.experts.7.w1.weight", ((2048, 2048), "I8"), ((3072, 3584), "I8")),
        ("layers.3.ffn.experts.7.w2.scale", ((4096, 64), "F8_E8M0"), ((7168, 96), "F8_E8M0")),
        ("layers.3.ffn.shared_experts.w2.scale", ((32, 16), "F8_E8M0"), ((56, 24), "F8_E8M0")),
        ("mtp.0.e_proj.scale", ((32, 32), "F8_E8M0"), ((56, 56), "F8_E8M0")),
        ("mtp.0.norm.weight", ((4096,), "BF16"), ((7168,), "BF16")),
        ("mtp.0.ffn.gate.bias", ((256,), "F32"), ((384,), "F32")),
    ],
)
def test_rows_of_the_released_tables(name: str, flash: tuple[object, str], pro: tuple[object, str]) -> None:
    assert (table("flash")[name].shape, table("flash")[name].dtype) == flash
    assert (table("pro")[name].shape, table("pro")[name].dtype) == pro


def test_layer_kinds_decide_which_tensors_exist() -> None:
    names = {spec.name for spec in tensor_specs(preset("flash"))}
    assert "layers.0.attn.compressor.ape" not in names
    assert "layers.3.attn.indexer.wq_b.weight" not in names
    assert "layers.2.ffn.gate.bias" not in names
    assert "layers.3.ffn.gate.tid2eid" not in names
    assert not any(name.startswith("mtp.0.") and ("compressor" in name or "embed" in name) for name in names)


def test_stacked_and_official_names_are_the_same_tensors(config: ModelConfig) -> None:
    params, officials = param_specs(config), tensor_specs(config)
    assert sum(spec.num_elements for spec in params) == sum(spec.num_elements for spec in officials)
    assert len({spec.name for spec in params}) == len(params)
    stacked = next(spec for spec in params if spec.name == "layers.3.ffn.experts.w2.weight")
    assert stacked.shape == (config.n_routed_experts, config.hidden_size, config.moe_intermediate_size)
    parts = unstacked(stacked)
    assert parts[5].name == expert_name(stacked.name, 5) == "layers.3.ffn.experts.5.w2.weight"
    assert {spec.shape for spec in parts} == {stacked.shape[1:]}


def test_frozen_tensors(config: ModelConfig) -> None:
    frozen = {spec.name for spec in param_specs(config) if not spec.trained}
    for spec in param_specs(config):
        expected = (
            spec.name.startswith("mtp.")
            or ".indexer." in spec.name
            or ".gate.bias" in spec.name
            or "tid2eid" in spec.name
        )
        assert (spec.name in frozen) == expected
    assert "layers.1.attn.attn_sink" not in frozen
    assert "layers.1.ffn.gate.weight" not in frozen


def test_scales() -> None:
    assert scale_name("layers.0.attn.wkv.weight") == "layers.0.attn.wkv.scale"
    assert scale_shape((8, 64, 128), "mxfp4") == (8, 64, 4)
    assert scale_shape((320, 64), "fp8") == (3, 1)
