"""Proves: conversion keeps every value; canonical checkpoints keep every byte too, also through transformers' names;
transformers itself loads what is written for it.
"""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from rollforward.conf.cli import main as command
from rollforward.model.checkpoint import iter_checkpoint, iter_stored, read_checkpoint, read_packed, write_checkpoint
from rollforward.model.checkpoint_headers import INDEX_NAME, scan_checkpoint
from rollforward.model.config import ModelConfig, config_json, load_model_config, preset
from rollforward.model.convert import canonical, convert_checkpoint, num_differing, repacked
from rollforward.model.errors import CheckpointError
from rollforward.model.precision import PackedTensor, pack_published, unpack_published
from rollforward.model.shapes import TensorSpec, param_specs, stored_tensors, tensor_specs
from tests.model.test_checkpoint import random_masters

CONFIG = msgspec.structs.replace(
    preset("tiny"),
    vocab_size=16,
    hidden_size=160,  # blocks of 128 that end in the middle
    moe_intermediate_size=64,
    n_routed_experts=4,
    compress_ratios=(0, 4, 32, 4, 0),
)
SHARD = 100_000


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As a learner publishes: packed from masters, which is not canonical where the largest value was rounded down."""
    folder = tmp_path_factory.mktemp("convert") / "published"
    files = {"tokenizer.json": b"{}", "encoding.json": b'{"encoding": "v4-0424"}'}
    write_checkpoint(folder, CONFIG, random_masters(CONFIG), max_shard_bytes=SHARD, extra_files=files)
    return folder


@pytest.fixture(scope="module")
def canonical_model(published: Path) -> Path:
    """The same with canonical bytes."""
    convert_checkpoint(published, published.with_name("canonical"), max_shard_bytes=SHARD)
    return published.with_name("canonical")


def assert_same_values(one: Path, other: Path, config: ModelConfig = CONFIG) -> None:
    values = read_checkpoint(other, config)
    for name, value in read_checkpoint(one, config).items():
        assert torch.equal(value, values[name]), name


def assert_same_files(one: Path, other: Path) -> None:
    assert {file.name: file.read_bytes() for file in one.iterdir()} == {
        file.name: file.read_bytes() for file in other.iterdir()
    }


def test_import_changes_bytes_once_and_no_value(published: Path, canonical_model: Path, tmp_path: Path) -> None:
    assert_same_values(published, canonical_model)
    report = convert_checkpoint(canonical_model, tmp_path / "again", max_shard_bytes=SHARD)
    assert_same_files(canonical_model, tmp_path / "again")
    assert (report.changed_tensors, report.changed_bytes, report.repacked_tensors, report.kept_tensors) == (0, 0, 0, 0)
    report = convert_checkpoint(published, tmp_path / "once", max_shard_bytes=SHARD)
    assert report.changed_bytes > report.changed_tensors > 0
    differing = 0
    for (_, before), (_, after) in zip(
        iter_stored(published, CONFIG), iter_stored(canonical_model, CONFIG), strict=True
    ):
        differing += num_differing(before, after)
    assert report.changed_bytes == differing
    assert report.tensors == len(tensor_specs(CONFIG))
    assert report.read_bytes == report.written_bytes == sum(one.num_bytes for one in stored_tensors(CONFIG))


def test_through_transformers_names_and_back_is_byte_for_byte(canonical_model: Path, tmp_path: Path) -> None:
    report = convert_checkpoint(canonical_model, tmp_path / "tf", layout="transformers", max_shard_bytes=SHARD)
    assert report.changed_bytes == report.kept_tensors == 0
    assert report.repacked_tensors > 0
    back = convert_checkpoint(tmp_path / "tf", tmp_path / "back", max_shard_bytes=SHARD)
    assert back.repacked_tensors == report.repacked_tensors
    assert_same_files(canonical_model, tmp_path / "back")


def test_transformers_loads_its_layout(canonical_model: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    target = tmp_path / "tf"
    convert_checkpoint(canonical_model, target, layout="transformers", max_shard_bytes=SHARD)
    model, info = AutoModelForCausalLM.from_pretrained(target, output_loading_info=True, dtype=torch.float32)
    assert {key: list(found) for key, found in info.items() if found} == {}
    state, values = model.state_dict(), read_checkpoint(canonical_model)
    gate_up = state["model.layers.1.mlp.experts.gate_up_proj"]
    assert torch.equal(gate_up[:, :64], values["layers.1.ffn.experts.w1.weight"])
    assert torch.equal(gate_up[:, 64:], values["layers.1.ffn.experts.w3.weight"])
    assert torch.equal(state["model.layers.1.mlp.experts.down_proj"], values["layers.1.ffn.experts.w2.weight"])
    indexer = state["model.layers.1.self_attn.compressor.indexer.q_b_proj.weight"]
    assert torch.equal(indexer, values["layers.1.attn.indexer.wq_b.weight"])
    assert torch.equal(state["model.layers.0.mlp.gate.tid2eid"], values["layers.0.ffn.gate.tid2eid"])


def test_what_travels_with_the_weights(published: Path, canonical_model: Path) -> None:
    for name in ("tokenizer.json", "encoding.json"):
        assert (canonical_model / name).read_bytes() == (published / name).read_bytes()
    assert load_model_config(canonical_model) == CONFIG


def test_plain_weights_stay_plain_where_packing_would_round_them(tmp_path: Path) -> None:
    masters = random_masters(CONFIG)
    write_checkpoint(tmp_path / "plain", CONFIG, masters, precision="fp32")
    report = convert_checkpoint(tmp_path / "plain", tmp_path / "official")
    assert report.kept_tensors > 0
    assert all(torch.equal(value, masters[name]) for name, value in read_checkpoint(tmp_path / "official").items())


def test_transformers_layout_of_plain_fp32_keeps_every_value(tmp_path: Path) -> None:
    masters = random_masters(CONFIG)
    write_checkpoint(tmp_path / "plain", CONFIG, masters, precision="fp32")
    convert_checkpoint(tmp_path / "plain", tmp_path / "tf", layout="transformers", max_shard_bytes=SHARD)
    convert_checkpoint(tmp_path / "tf", tmp_path / "back", max_shard_bytes=SHARD)
    assert all(torch.equal(value, masters[name]) for name, value in read_checkpoint(tmp_path / "back").items())


def _respelled(published: Path, target: Path, spell: Any) -> Path:
    tensors: dict[str, torch.Tensor] = {}
    for shard in published.glob("*.safetensors"):
        tensors.update(load_file(shard))
    target.mkdir()
    save_file(spell(tensors), target / "model.safetensors")
    (target / "config.json").write_bytes((published / "config.json").read_bytes())
    return target


def test_the_same_tensor_in_two_spellings_is_refused(published: Path, tmp_path: Path) -> None:
    twice = _respelled(published, tmp_path / "twice", lambda t: t | {"model.norm.weight": t["norm.weight"].clone()})
    with pytest.raises(CheckpointError, match=r"norm\.weight stands there twice, as (model\.)?norm\.weight and as"):
        read_checkpoint(twice)
    experts = torch.zeros(4, 160, 64, dtype=torch.bfloat16)
    fused = _respelled(published, tmp_path / "fused", lambda t: t | {"model.layers.0.mlp.experts.down_proj": experts})
    with pytest.raises(CheckpointError, match=r"layers\.0\.ffn\.experts\.\d\.w2\.weight stands there twice"):
        scan_checkpoint(fused)


@pytest.mark.parametrize("tensor_format", ["mxfp4", "fp8", "bf16", "fp32"])
@pytest.mark.parametrize("shape", [(64,), (5, 32), (128, 128), (300, 96), (2, 130, 160)])
def test_canonical_is_exact_and_idempotent(tensor_format: Any, shape: tuple[int, ...]) -> None:
    if tensor_format in ("mxfp4", "fp8") and len(shape) == 1:
        return
    generator = torch.Generator().manual_seed(3)
    master = torch.randn(shape, generator=generator) * torch.randn(shape, generator=generator).exp()
    spec = TensorSpec(name="w", shape=shape, format=tensor_format, trained=True)
    packed = pack_published(spec, master)
    if packed.scale is not None:  # not canonical: the same values, said with larger scales
        value = unpack_published(packed)
        packed = PackedTensor(format=tensor_format, data=packed.data, scale=packed.scale + 1)
        assert torch.equal(unpack_published(packed), 2 * value)
    once = canonical(packed)
    assert torch.equal(unpack_published(once), unpack_published(packed))
    assert num_differing(once, canonical(once)) == 0
    direct = pack_published(spec, unpack_published(packed))
    assert num_differing(once, direct) == 0, "rows taken together change nothing"


def test_what_canonical_bytes_cannot_say_keeps_its_own() -> None:
    data = torch.full((128, 64), 0x11, dtype=torch.int8)  # 0.5 everywhere
    scale = torch.full((128, 4), 127, dtype=torch.uint8)
    scale[0, 0] = 127 - 40  # a group far below the block's largest, which publishing would raise and round
    packed = PackedTensor(format="mxfp4", data=data, scale=scale)
    assert canonical(packed) is packed
    assert repacked(packed, "bf16") is not None
    assert repacked(packed, "fp8") is None
    tid2eid = PackedTensor(format="int64", data=torch.tensor([[383, 257]]))
    assert repacked(tid2eid, "bf16") is None
    assert canonical(tid2eid) is tid2eid
    huge = PackedTensor(format="fp32", data=torch.full((2, 32), 3.4e38))
    assert repacked(huge, "bf16") is None


def test_values_that_bf16_has_not_stop_the_other_layout(tmp_path: Path) -> None:
    config = msgspec.structs.replace(CONFIG, expert_dtype="fp8")
    write_checkpoint(tmp_path / "a", config, random_masters(config))
    shard = next((tmp_path / "a").glob("*.safetensors"))
    tensors = load_file(shard)
    name = "layers.0.attn.wkv"
    tensors[f"{name}.weight"] = torch.full((80, 160), 1, dtype=torch.uint8).view(torch.float8_e4m3fn)  # 2^-9
    tensors[f"{name}.scale"] = torch.zeros(1, 2, dtype=torch.uint8).view(torch.float8_e8m0fnu)  # 2^-127
    save_file(tensors, shard)
    with pytest.raises(CheckpointError, match=r"layers\.0\.attn\.wkv\.weight holds values that bf16 has not"):
        convert_checkpoint(tmp_path / "a", tmp_path / "tf", layout="transformers")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a"]
    assert convert_checkpoint(tmp_path / "a", tmp_path / "b").kept_tensors == 1
    assert_same_values(tmp_path / "a", tmp_path / "b", config)


def test_stacked_and_single_experts_are_the_same_bytes(published: Path) -> None:
    stored = iter_stored(published, CONFIG)
    for param, packed in iter_checkpoint(published, CONFIG):
        experts = packed.data.unbind() if ".experts." in param.name else [packed.data]
        for data in experts:
            assert torch.equal(next(stored)[1].data.view(-1).view(torch.uint8), data.reshape(-1).view(torch.uint8))
    assert next(stored, None) is None


def test_the_command(published: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["convert", f"from={published}", f"to={tmp_path / 'to'}"]
    assert command(words) == 0
    told = capsys.readouterr().out
    assert "bytes of" in told
    assert json.loads(told.splitlines()[-1])["changed_bytes"] > 0
    assert set(read_packed(tmp_path / "to")) == {spec.name for spec in param_specs(CONFIG)}
    assert command(words) == 2
    assert "exists; a checkpoint is never overwritten" in capsys.readouterr().err
    assert command([*words[:2], f"to={tmp_path / 'tf'}", "layout=transformers"]) == 0
    index = json.loads((tmp_path / "tf" / INDEX_NAME).read_text())["weight_map"]
    assert "model.layers.0.mlp.experts.gate_up_proj" in index
    assert command(["convert", f"from={tmp_path / 'absent'}", f"to={tmp_path / 'x'}"]) == 2
    assert "holds 0 .safetensors files" in capsys.readouterr().err


def test_what_config_json_says_wrongly_is_told(published: Path, tmp_path: Path) -> None:
    wrong = _respelled(published, tmp_path / "wrong", lambda tensors: tensors)
    raw = config_json(CONFIG) | {"expert_dtype": "fp8"}
    (wrong / "config.json").write_text(json.dumps(raw))
    report = convert_checkpoint(wrong, tmp_path / "right")
    assert report.notes == ("experts are stored in fp4, so expert_dtype is fp4, not fp8",)
    assert load_model_config(tmp_path / "right") == CONFIG
