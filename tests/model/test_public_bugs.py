"""Loading bugs of public DeepSeek-V4 implementations, one test each, named test_<project>_<number>_<what>; O2 and O8
are of our specification's own list. Proves that none of them can happen here, at the place where it happened there.

Bugs of chat are in test_public_bugs_chat.py; of attention and caches in tests/parity.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from rollforward.kernels.quant.mxfp4 import mxfp4_dequantise, mxfp4_to_fp8
from rollforward.model.checkpoint import read_checkpoint, read_packed, write_checkpoint
from rollforward.model.checkpoint_headers import load_checkpoint_config
from rollforward.model.config import config_json, load_model_config, parse_model_config, preset
from rollforward.model.config_transformers import official_config, transformers_config
from rollforward.model.convert import convert_checkpoint
from rollforward.model.errors import CheckpointError, ConfigError, ModelInputError, UnsupportedVariantError
from rollforward.model.precision import PackedTensor, published_value, unpack_published
from rollforward.model.shapes import param_specs, stored_tensors
from rollforward.model.transformer import Model, load_model
from tests.helpers.tiny import random_params, random_tokens, tiny_config
from tests.model.test_checkpoint import random_masters

CONFIG = msgspec.structs.replace(
    preset("tiny"),
    vocab_size=64,
    hidden_size=64,
    moe_intermediate_size=32,
    n_routed_experts=4,
    num_hidden_layers=2,
    compress_ratios=(0, 4, 0),
)
# As many experts as Pro has: ids that BF16 rounds, 383 to 384, odd ones above 256 to their neighbours.
MANY = msgspec.structs.replace(
    CONFIG, n_routed_experts=384, num_hidden_layers=1, compress_ratios=(0,), num_nextn_predict_layers=0
)
TABLE = torch.tensor([[383, 257], [381, 0]] * 32)
EDIT = Callable[[dict[str, torch.Tensor]], Any]


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bugs") / "published"
    write_checkpoint(folder, CONFIG, random_masters(CONFIG))
    return folder


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plain checkpoint of MANY with TABLE."""
    folder = tmp_path_factory.mktemp("many") / "plain"
    masters = random_masters(MANY) | {"layers.0.ffn.gate.tid2eid": TABLE}
    write_checkpoint(folder, MANY, masters, precision="fp32")
    return folder


@pytest.fixture
def edited(published: Path, tmp_path: Path) -> Callable[..., Path]:
    """A function that copies the checkpoint into `tmp_path/edited` after an edit of tensors and configuration."""

    def edit(change: EDIT | None = None, **raw: Any) -> Path:
        tensors: dict[str, torch.Tensor] = {}
        for shard in published.glob("*.safetensors"):
            tensors.update(load_file(shard))
        if change is not None:
            change(tensors)
        folder = tmp_path / "edited"
        folder.mkdir()
        save_file(tensors, folder / "model.safetensors")
        config = {key: value for key, value in (config_json(CONFIG) | raw).items() if value is not ...}
        (folder / "config.json").write_text(json.dumps(config))
        return folder

    return edit


def _to_fp8_experts(tensors: dict[str, torch.Tensor]) -> None:
    """The lossless conversion of DeepSeek's converter, expert by expert."""
    for name in [name for name in tensors if ".ffn.experts." in name and name.endswith(".weight")]:
        scale = name.replace("weight", "scale")
        payload, block_scale, clamped = mxfp4_to_fp8(tensors[name], tensors[scale].view(torch.uint8))
        assert clamped == 0
        tensors[name], tensors[scale] = payload, block_scale.view(torch.float8_e8m0fnu)


def _dense_fp8(tensors: dict[str, torch.Tensor]) -> list[str]:
    return [name for name, one in tensors.items() if one.dtype == torch.float8_e4m3fn]


def test_vllm_43416_scale_bytes_are_exponents_and_never_numbers(edited: Any, published: Path) -> None:
    """E8M0 bytes were copied into an FP32 tensor as the numbers 0 to 255."""
    expected = read_checkpoint(published)

    def as_numbers(tensors: dict[str, torch.Tensor]) -> None:
        for name in _dense_fp8(tensors):
            scale = name.replace("weight", "scale")
            tensors[scale] = torch.exp2(tensors[scale].view(torch.uint8).float() - 127)

    found = read_checkpoint(edited(as_numbers))
    assert all(torch.equal(found[name], value) for name, value in expected.items()), "a base checkpoint's scales"


def test_vllm_43416_scales_that_are_no_powers_of_two_are_refused(edited: Any) -> None:
    def bytes_as_numbers(tensors: dict[str, torch.Tensor]) -> None:
        for name in _dense_fp8(tensors):
            scale = name.replace("weight", "scale")
            tensors[scale] = tensors[scale].view(torch.uint8).float()

    with pytest.raises(CheckpointError, match=r"scale holds 1\d\d\.0; scales that are stored as numbers must"):
        read_checkpoint(edited(bytes_as_numbers))


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf"), 2.0**-127, 1.5, 2.0**-149])
def test_vllm_43416_no_number_slips_through_as_a_scale(edited: Any, value: float) -> None:
    name = "layers.0.attn.wkv.scale"
    folder = edited(lambda tensors: tensors.update({name: torch.full(tensors[name].shape, value)}))
    with pytest.raises(CheckpointError, match=rf"{name} holds "):
        read_checkpoint(folder)


def test_vllm_42970_expert_dtype_is_what_the_tensors_are(
    edited: Any, published: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`expert_dtype` is absent from some configurations, and base checkpoints have FP8 experts."""
    folder = edited(_to_fp8_experts, expert_dtype=...)
    assert load_model_config(folder).expert_dtype == "fp4", "what is absent is the default"
    assert load_checkpoint_config(folder).expert_dtype == "fp8"
    assert "experts are stored in fp8, so expert_dtype is fp8, not fp4" in capsys.readouterr().err
    expected, packed = read_checkpoint(published), read_packed(folder)
    assert {one.format for name, one in packed.items() if ".experts." in name} == {"fp8"}
    assert all(torch.equal(unpack_published(one), expected[name]) for name, one in packed.items())


@pytest.mark.parametrize("stated", ["fp8", None, ...])
def test_vllm_42970_a_wrong_or_empty_expert_dtype_changes_no_value(edited: Any, published: Path, stated: Any) -> None:
    folder = edited(expert_dtype=stated)
    assert load_checkpoint_config(folder, is_announced=False).expert_dtype == "fp4"
    expected = read_checkpoint(published)
    for config in (None, load_model_config(folder)):
        found = read_checkpoint(folder, config)
        assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_vllm_50844_ids_beyond_the_table_are_refused() -> None:
    """Padding ids beyond the vocabulary gathered from outside the table of experts."""
    config = tiny_config()
    model = Model(config, random_params(config), precision="native")
    for bad in (config.vocab_size, -1, 2**40):
        tokens = random_tokens(config, (1, 4))
        tokens[0, 2] = bad
        with pytest.raises(ModelInputError, match="the rule is 0 <= id < vocab_size"):
            model.logits(tokens)


def test_vllm_50844_the_table_has_a_row_for_every_id(edited: Any) -> None:
    name = "layers.0.ffn.gate.tid2eid"
    folder = edited(lambda tensors: tensors.update({name: tensors[name][:-1].clone()}))
    with pytest.raises(CheckpointError, match=rf"{name} is \[63, 2\]"):
        read_checkpoint(folder)


@pytest.mark.parametrize(
    "name",
    [
        "mtp.0.main_proj.weight",
        "mtp.0.main_norm.weight",
        "mtp.2.markov_head.markov_w1.weight",
        "mtp.1.attn.wkv.weight",
        "model.mtp.2.ffn.gate.weight",
    ],
)
def test_vllm_52111_a_dspark_drafter_is_no_mtp(edited: Any, name: str) -> None:
    """Its configuration still says num_nextn_predict_layers = 1, so its tensors must tell."""

    def dspark(tensors: dict[str, torch.Tensor]) -> None:
        for part in ("enorm", "hnorm", "e_proj", "h_proj"):
            for kind in ("weight", "scale"):
                tensors.pop(f"mtp.0.{part}.{kind}", None)
        tensors[name] = torch.zeros(1)

    folder = edited(dspark)
    assert load_model_config(folder).num_nextn_predict_layers == 1
    for read in (read_checkpoint, load_checkpoint_config):
        with pytest.raises(UnsupportedVariantError, match="DSpark drafter stands where MTP was"):
            read(folder)
    with pytest.raises(UnsupportedVariantError, match=r"mtp\."):
        convert_checkpoint(folder, folder.with_name("to"))


@pytest.mark.parametrize(
    ("key", "reason"),
    [
        ("dspark_block_size", "DSpark"),
        ("dspark_noise_token_id", "DSpark"),
        ("n_mtp_layers", "DSpark"),
        ("engram_vocab_size", r"V4\.1"),
        ("vision_config", "Vision"),
        ("image_token_id", "Vision"),
    ],
)
def test_vllm_52111_relatives_are_refused_by_their_configuration(edited: Any, key: str, reason: str) -> None:
    with pytest.raises(UnsupportedVariantError, match=f"{key}.*{reason}"):
        load_checkpoint_config(edited(**{key: 5}))


def test_vllm_52111_unknown_relatives_are_refused_too(edited: Any) -> None:
    with pytest.raises(UnsupportedVariantError, match="deepseek_v41"):
        load_checkpoint_config(edited(model_type="deepseek_v41"))


def test_vllm_52111_other_block_sizes_are_refused(published: Path) -> None:
    raw = config_json(CONFIG)
    raw["quantization_config"] = raw["quantization_config"] | {"weight_block_size": [32, 32]}
    with pytest.raises(ConfigError, match=r"V4\.1: \[32, 32\]"):
        parse_model_config(raw)


@pytest.mark.parametrize(
    ("dtype", "said"),
    [(torch.uint8, "U8"), (torch.float8_e5m2, "F8_E5M2"), (torch.float16, "F16"), (torch.int64, "I64")],
)
def test_atom_713_an_unknown_expert_format_is_refused_and_never_replaced(edited: Any, dtype: Any, said: str) -> None:
    """A silent fallback of the MoE gave half of the accuracy."""
    name = "layers.1.ffn.experts.3.w2.weight"
    folder = edited(lambda tensors: tensors.update({name: torch.zeros(64, 16, dtype=dtype)}))
    for read in (read_checkpoint, lambda place: load_model(place, precision="native")):
        with pytest.raises(CheckpointError, match=f"{name} is {said} in"):
            read(folder)


def test_primus_930_the_placeholder_theta_is_refused(edited: Any) -> None:
    """The official inference code's default of 40000 was taken for the model's rotary base of compressed layers."""
    with pytest.raises(ConfigError, match=r"compress_rope_theta is 40000, a placeholder.*160000"):
        load_checkpoint_config(edited(compress_rope_theta=40000))


def test_primus_930_an_absent_theta_is_the_released_one(edited: Any) -> None:
    assert load_checkpoint_config(edited(compress_rope_theta=...)).compress_rope_theta == 160000.0
    assert preset("flash").compress_rope_theta == preset("pro").compress_rope_theta == 160000.0


def test_primus_930_the_arguments_of_the_inference_code_are_no_configuration() -> None:
    arguments = {"dim": 4096, "n_layers": 7, "rope_factor": 40, "original_seq_len": 0, "compress_rope_theta": 40000}
    with pytest.raises(ConfigError, match="dim is no field of a DeepSeek-V4"):
        parse_model_config(arguments)


def test_verl_ascend_recipe_126_tid2eid_is_an_integer_through_every_cast_and_save(many: Path, tmp_path: Path) -> None:
    """A cast of the whole model to BF16 made 384, which is out of range, of 383, and moved odd ids above 256."""
    name = "layers.0.ffn.gate.tid2eid"
    assert not torch.equal(TABLE.to(torch.bfloat16).to(torch.int64), TABLE), "BF16 has not these ids"
    convert_checkpoint(many, tmp_path / "tf", layout="transformers")
    convert_checkpoint(tmp_path / "tf", tmp_path / "back")
    write_checkpoint(tmp_path / "packed", MANY, read_checkpoint(many, MANY))
    for folder in (many, tmp_path / "back", tmp_path / "packed"):
        found = read_checkpoint(folder)[name]
        assert found.dtype == torch.int64
        assert torch.equal(found, TABLE)
    raw = load_file(next((tmp_path / "tf").glob("*.safetensors")))["model.layers.0.mlp.gate.tid2eid"]
    assert raw.dtype == torch.int64
    assert torch.equal(raw, TABLE)
    assert published_value("int64", TABLE) is TABLE


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int32])
def test_mbridge_159_a_table_that_was_cast_is_refused(edited: Any, dtype: Any) -> None:
    name = "layers.0.ffn.gate.tid2eid"
    with pytest.raises(CheckpointError, match=rf"{name} is (BF16|F32|I32) in .*may be stored as I64"):
        read_checkpoint(edited(lambda tensors: tensors.update({name: tensors[name].to(dtype)})))


def test_mbridge_159_a_table_that_was_cast_and_cast_back_is_refused(many: Path, tmp_path: Path) -> None:
    name = "layers.0.ffn.gate.tid2eid"
    tensors = load_file(next(many.glob("*.safetensors")))
    tensors[name] = tensors[name].bfloat16().long()
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"{name} holds ids from 0 to 384; experts are 0\.\.383"):
        read_checkpoint(tmp_path, MANY)


def test_miles_2717_mxfp4_to_fp8_is_exact_for_every_code_and_scale(tmp_path: Path) -> None:
    """Through files: a base checkpoint that was converted from FP4 has the same values."""
    config = msgspec.structs.replace(CONFIG, n_routed_experts=2, num_hash_layers=0)
    write_checkpoint(tmp_path / "fp4", config, random_masters(config))
    packed = read_packed(tmp_path / "fp4")
    codes = torch.arange(256, dtype=torch.uint8).view(torch.int8)
    originals: dict[str, PackedTensor] = {}
    for name in [name for name in packed if ".ffn.experts." in name]:
        one = packed[name]
        assert one.scale is not None
        data = codes.repeat(-(-one.data.numel() // 256))[: one.data.numel()].view(one.data.shape)
        scale = (torch.arange(one.scale.numel()) % 15 + 113).to(torch.uint8).view(one.scale.shape)  # 14 binades
        payload, block_scale, clamped = mxfp4_to_fp8(data.contiguous(), scale)
        assert clamped == 0
        packed[name] = PackedTensor(format="fp8", data=payload, scale=block_scale)
        originals[name] = PackedTensor(format="mxfp4", data=data.contiguous(), scale=scale)
    write_checkpoint(tmp_path / "fp8", msgspec.structs.replace(config, expert_dtype="fp8"), packed)
    found = read_checkpoint(tmp_path / "fp8")
    for name, fp4 in originals.items():
        assert fp4.scale is not None
        assert torch.equal(found[name], mxfp4_dequantise(fp4.data, fp4.scale)), name


def test_ds4_411_the_mtp_layer_never_borrows_a_ratio() -> None:
    """It took layer 1's, which is right for Flash, whose layer 1 has none, and wrong for Pro, where it is 128."""
    pro = preset("pro")
    assert (pro.layer_kind(1), pro.layer_kind(pro.num_hidden_layers)) == ("hca", "window")
    small = msgspec.structs.replace(pro, n_routed_experts=6)
    assert any(one.name.startswith("layers.1.attn.compressor") for one in stored_tensors(small))
    assert not any(one.name.startswith("mtp.") and "compressor" in one.name for one in stored_tensors(small))
    raw = config_json(pro)
    with pytest.raises(ConfigError, match=r"it needs num_hidden_layers .* = 62 entries, MTP last"):
        parse_model_config(raw | {"compress_ratios": raw["compress_ratios"][:-1]})
    with pytest.raises(ConfigError, match=r"compress_ratios\[61\] is 128; the MTP layer is window only"):
        parse_model_config(raw | {"compress_ratios": [*raw["compress_ratios"][:-1], 128]})


def test_ds4_411_a_pro_like_checkpoint_loads_its_mtp_layer(tmp_path: Path) -> None:
    config = msgspec.structs.replace(CONFIG, compress_ratios=(32, 32, 0))
    masters = random_masters(config)
    write_checkpoint(tmp_path / "pro", config, masters)
    found = read_checkpoint(tmp_path / "pro")
    wkv = next(spec for spec in param_specs(config) if spec.name == "mtp.0.attn.wkv.weight")
    assert torch.equal(found[wkv.name], published_value(wkv.format, masters[wkv.name]))
    extra = torch.zeros(1)
    shard = next((tmp_path / "pro").glob("*.safetensors"))
    save_file(load_file(shard) | {"mtp.0.attn.compressor.ape": extra}, shard)
    (tmp_path / "pro" / "model.safetensors.index.json").unlink()
    with pytest.raises(CheckpointError, match=r"mtp\.0\.attn\.compressor\.ape\) are no tensors"):
        read_checkpoint(tmp_path / "pro")


def test_own_o2_what_transformers_saves_is_read_whole(tmp_path: Path) -> None:
    """Its save_pretrained writes neither its own names nor the official ones: `model.layers.0.attn.norm.weight` is the
    norm of the keys, `model.embed_tokens` and `model.hc_head.hc_fn` keep theirs."""
    from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

    model = DeepseekV4ForCausalLM(DeepseekV4Config(**transformers_config(CONFIG)))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if tensor.is_floating_point():
                tensor.copy_(torch.randn(tensor.shape, generator=generator))
            elif name.endswith("tid2eid"):
                tensor.copy_(torch.tensor([[3, 1]] * 64))
    model.save_pretrained(tmp_path / "saved")
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    assert "model.layers.0.attn.norm.weight" in saved, "the bug is still there"
    report = convert_checkpoint(tmp_path / "saved", tmp_path / "official")
    assert any("MTP" in note for note in report.notes)
    values, state = read_checkpoint(tmp_path / "official"), model.state_dict()
    for ours, theirs in (
        ("layers.0.attn.kv_norm.weight", "model.layers.0.self_attn.kv_norm.weight"),
        ("layers.1.attn.compressor.norm.weight", "model.layers.1.self_attn.compressor.kv_norm.weight"),
        ("layers.1.attn.indexer.compressor.norm.weight", "model.layers.1.self_attn.compressor.indexer.kv_norm.weight"),
        ("embed.weight", "model.embed_tokens.weight"),
        ("head.weight", "lm_head.weight"),
        ("norm.weight", "model.norm.weight"),
        ("hc_head_fn", "model.hc_head.hc_fn"),
        ("layers.1.ffn.experts.w2.weight", "model.layers.1.mlp.experts.down_proj"),
        ("layers.0.ffn.gate.tid2eid", "model.layers.0.mlp.gate.tid2eid"),
        ("layers.1.ffn.gate.bias", "model.layers.1.mlp.gate.e_score_correction_bias"),
    ):
        assert torch.equal(values[ours], state[theirs]), ours


def test_own_o8_layer_kinds_are_never_assumed() -> None:
    """transformers' DeepseekV4Config() without them is HCA, HCA, HCA, CSA, ..., which is no released model."""
    raw = config_json(preset("flash"))
    del raw["compress_ratios"]
    with pytest.raises(ConfigError, match="compress_ratios"):
        parse_model_config(raw)
    theirs = transformers_config(preset("flash"))
    for key in ("layer_types", "mlp_layer_types"):
        with pytest.raises(ConfigError, match=f"{key} is None; which layer is of which kind cannot be told"):
            official_config({name: value for name, value in theirs.items() if name != key})
    with pytest.raises(ConfigError, match="layer_types is transformers' spelling"):
        parse_model_config(theirs)
