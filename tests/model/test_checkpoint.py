"""Proves that checkpoints round-trip in the official layout and that a damaged one is a typed error naming the tensor.

What it does not prove: that the values make a model (tests/parity).
"""

import errno
import json
import os
import random
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from rollforward.model.checkpoint import (
    read_checkpoint,
    read_packed,
    write_checkpoint,
    write_stored,
)
from rollforward.model.checkpoint_headers import INDEX_NAME, scan_checkpoint
from rollforward.model.checkpoint_writer import CheckpointWriter
from rollforward.model.config import ModelConfig, config_json, preset
from rollforward.model.errors import CheckpointError, ConfigError, UnsupportedVariantError
from rollforward.model.precision import PackedTensor, pack_published, published_value
from rollforward.model.shapes import param_specs, stored_form, stored_tensors, tensor_specs, unstacked

CONFIG = msgspec.structs.replace(
    preset("tiny"),
    vocab_size=16,
    hidden_size=64,
    moe_intermediate_size=32,
    n_routed_experts=4,
    num_hidden_layers=3,
    compress_ratios=(0, 4, 32, 0),
)
W1 = "layers.0.ffn.experts.2.w1.weight"
WKV = "layers.1.attn.wkv.weight"
TID2EID = "layers.0.ffn.gate.tid2eid"


def random_masters(config: ModelConfig, seed: int = 0) -> dict[str, torch.Tensor]:
    """Return canonical FP32 masters (and integer tables) of a model."""
    generator = torch.Generator().manual_seed(seed)
    named: dict[str, torch.Tensor] = {}
    for spec in param_specs(config):
        if spec.format == "int64":
            rows = [torch.randperm(config.n_routed_experts, generator=generator) for _ in range(spec.shape[0])]
            named[spec.name] = torch.stack(rows)[:, : spec.shape[1]].contiguous()
        else:
            named[spec.name] = torch.randn(spec.shape, generator=generator)
    return named


def plain_file(folder: Path, config: ModelConfig, masters: dict[str, torch.Tensor]) -> Path:
    """Write one plain FP32 file with official names, as the oracle's dump is, and its config.json."""
    tensors: dict[str, torch.Tensor] = {}
    for spec in param_specs(config):
        parts = unstacked(spec)
        values = [masters[spec.name]] if len(parts) == 1 else list(masters[spec.name])
        tensors.update({part.name: value.clone() for part, value in zip(parts, values, strict=True)})
    save_file(tensors, folder / "oracle.safetensors")
    (folder / "config.json").write_text(json.dumps(config_json(config)))
    return folder


@pytest.fixture(scope="module")
def masters() -> dict[str, torch.Tensor]:
    """Masters of CONFIG."""
    return random_masters(CONFIG)


@pytest.fixture(scope="module")
def published(masters: dict[str, torch.Tensor], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A published checkpoint of several shards; not to be modified."""
    folder = tmp_path_factory.mktemp("checkpoint") / "published"
    write_checkpoint(folder, CONFIG, masters, max_shard_bytes=60_000, extra_files={"tokenizer.json": b"{}"})
    return folder


@pytest.fixture
def editable(published: Path, tmp_path: Path) -> Callable[[Callable[[dict[str, torch.Tensor]], Any]], Path]:
    """A function that copies the published checkpoint into one file after an edit of its tensors."""

    def edit(change: Callable[[dict[str, torch.Tensor]], Any]) -> Path:
        tensors: dict[str, torch.Tensor] = {}
        for shard in published.glob("*.safetensors"):
            tensors.update(load_file(shard))
        change(tensors)
        save_file(tensors, tmp_path / "model.safetensors")
        (tmp_path / "config.json").write_bytes((published / "config.json").read_bytes())
        return tmp_path

    return edit


def test_written_layout_is_the_shape_table(published: Path) -> None:
    entries = scan_checkpoint(published)
    assert {(name, entry.shape, entry.dtype) for name, entry in entries.items()} == {
        (tensor.name, tensor.shape, tensor.dtype) for tensor in stored_tensors(CONFIG)
    }
    index = json.loads((published / INDEX_NAME).read_text())
    assert index["metadata"]["total_size"] == sum(tensor.num_bytes for tensor in stored_tensors(CONFIG))
    assert len(set(index["weight_map"].values())) > 2, "the test wants several shards"
    assert (published / "tokenizer.json").read_bytes() == b"{}"
    for shard in published.glob("*.safetensors"):
        assert shard.stat().st_size < 80_000


def test_values_are_the_published_ones(published: Path, masters: dict[str, torch.Tensor]) -> None:
    values = read_checkpoint(published)
    assert set(values) == set(masters)
    for spec in param_specs(CONFIG):
        expected = published_value(spec.format, masters[spec.name])
        assert torch.equal(values[spec.name], expected), spec.name
        assert values[spec.name].dtype == (torch.int64 if spec.format == "int64" else torch.float32)


def test_packed_bytes_round_trip_identically(published: Path, tmp_path: Path) -> None:
    packed = read_packed(published)
    formats = {spec.name: spec.format for spec in param_specs(CONFIG)}
    assert {name: tensor.format for name, tensor in packed.items()} == formats
    write_checkpoint(tmp_path / "again", CONFIG, packed, max_shard_bytes=60_000)
    for file in published.iterdir():
        if file.name != "tokenizer.json":
            assert (tmp_path / "again" / file.name).read_bytes() == file.read_bytes(), file.name


def test_plain_files_are_read_as_they_are(masters: dict[str, torch.Tensor], tmp_path: Path) -> None:
    values = read_checkpoint(plain_file(tmp_path, CONFIG, masters))
    assert all(torch.equal(values[name], master) for name, master in masters.items())
    assert {tensor.format for tensor in read_packed(tmp_path, CONFIG).values()} == {"fp32", "int64"}


def test_fp32_precision_keeps_masters(masters: dict[str, torch.Tensor], tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "plain", CONFIG, masters, precision="fp32")
    values = read_checkpoint(tmp_path / "plain")
    assert all(torch.equal(values[name], master) for name, master in masters.items())


def test_bf16_and_fp8_stand_in_for_other_formats(editable: Any, masters: dict[str, torch.Tensor]) -> None:
    def to_bf16(tensors: dict[str, torch.Tensor]) -> None:
        del tensors[WKV.replace("weight", "scale")]
        tensors[WKV] = masters[WKV].to(torch.bfloat16)
        tensors["layers.1.attn.attn_sink"] = tensors["layers.1.attn.attn_sink"].to(torch.bfloat16)
        for expert in range(4):
            name = f"layers.0.ffn.experts.{expert}.w1.weight"
            tensors[name] = torch.ones(32, 64).to(torch.float8_e4m3fn)
            tensors[name.replace("weight", "scale")] = torch.full((1, 1), 128, dtype=torch.uint8).view(
                torch.float8_e8m0fnu
            )

    folder = editable(to_bf16)
    values = read_checkpoint(folder)
    assert torch.equal(values[WKV], masters[WKV].to(torch.bfloat16).to(torch.float32))
    assert values["layers.0.ffn.experts.w1.weight"].unique().tolist() == [2.0]
    assert read_packed(folder)["layers.0.ffn.experts.w1.weight"].format == "fp8"


def _drop(*names: str) -> Callable[[dict[str, torch.Tensor]], Any]:
    return lambda tensors: [tensors.pop(name) for name in names]


def _set(name: str, value: torch.Tensor) -> Callable[[dict[str, torch.Tensor]], Any]:
    return lambda tensors: tensors.update({name: value})


SCALE = W1.replace("weight", "scale")
E8M0 = torch.float8_e8m0fnu


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_drop("norm.weight"), r"1 \(norm\.weight\).* missing"),
        (_drop(SCALE), rf"{W1} is mxfp4 but {SCALE} is missing"),
        (_set(SCALE, torch.ones(32, 2)), rf"{SCALE} is F32; scales are F8_E8M0"),
        (
            _set(SCALE, torch.full((32, 3), 127, dtype=torch.uint8).view(E8M0)),
            rf"{SCALE} is \[32, 3\].*needs \[32, 2\]",
        ),
        (_set(SCALE, torch.full((32, 2), 255, dtype=torch.uint8).view(E8M0)), "holds byte 255, NaN"),
        (_set(SCALE, torch.full((32, 2), 253, dtype=torch.uint8).view(E8M0)), r"byte 253, an overflow.*0\.\.252"),
        (_set(W1, torch.zeros(32, 64)), rf"{SCALE} scales nothing"),
        (_set(W1, torch.zeros(32, 33, dtype=torch.int8)), rf"{W1} is \[32, 33\] I8.*gives \[32, 32\]"),
        (_set(W1, torch.zeros(32, 32, dtype=torch.uint8)), rf"{W1} is U8"),
        (_set(WKV, torch.zeros(80, 64, dtype=torch.int8)), rf"{WKV} is I8"),
        (_set("norm.weight", torch.zeros(63)), r"norm\.weight is \[63\]"),
        (_set("norm.weight", torch.zeros(64, dtype=torch.float16)), r"norm\.weight is F16"),
        (_set("norm.weight", torch.full((64,), float("nan"))), r"norm\.weight holds a value that is not finite"),
        (_set(WKV, torch.full((80, 64), 0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn)), f"{WKV} holds a value"),
        (
            _set("layers.1.attn.wkw.weight", torch.zeros(1)),
            r"wkw\.weight\) are no tensors.*layers\.N\.attn\.wkv\.weight",
        ),
        (_set("norm.scale", torch.zeros(1)), r"norm\.scale scales nothing"),
        (_set(TID2EID, torch.zeros(16, 2, dtype=torch.int32)), rf"{TID2EID} is I32"),
        (_set(TID2EID, torch.zeros(16, 2, dtype=torch.int64)), f"{TID2EID} names an expert twice for token 0"),
        (_set(TID2EID, torch.tensor([[0, 4]] * 16)), rf"{TID2EID} holds ids from 0 to 4; experts are 0\.\.3"),
        (_set(TID2EID, torch.tensor([[0, -1]] * 16)), "ids from -1"),
    ],
)
def test_every_fault_names_the_tensor_and_the_folder(
    editable: Any, change: Callable[[dict[str, torch.Tensor]], Any], message: str
) -> None:
    folder = editable(change)
    with pytest.raises(CheckpointError, match=message) as caught:
        read_checkpoint(folder)
    assert str(caught.value).startswith(f"{folder}: ")
    assert str(caught.value).count(str(folder)) == 1


def test_mixed_expert_formats_are_refused(editable: Any) -> None:
    folder = editable(lambda tensors: (_drop(SCALE)(tensors), _set(W1, torch.zeros(32, 64))(tensors)))
    with pytest.raises(
        CheckpointError, match=r"layers\.0\.ffn\.experts\.w1\.weight: experts are stored as fp32, mxfp4"
    ):
        read_checkpoint(folder)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("mtp.2.markov_head.markov_w1", "DSpark"),
        ("mtp.0.main_proj.weight", "DSpark"),
        ("layers.1.ffn.gate.bias_vl", "Vision"),
        ("layers.1.engram.table", r"V4\.1"),
    ],
)
def test_relatives_are_refused_by_their_tensors(editable: Any, name: str, reason: str) -> None:
    folder = editable(_set(name, torch.zeros(1)))
    with pytest.raises(UnsupportedVariantError, match=rf"^{folder}: {name}.*{reason}"):
        read_checkpoint(folder)


def _copy(published: Path, target: Path) -> Path:
    for file in published.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    return target


def test_index_and_shards_must_agree(published: Path, tmp_path: Path) -> None:
    folder = _copy(published, tmp_path)
    index = json.loads((folder / INDEX_NAME).read_text())

    def read_with(weight_map: dict[str, Any]) -> None:
        (folder / INDEX_NAME).write_text(json.dumps({"weight_map": weight_map}))
        read_checkpoint(folder)

    weight_map, (first, second, *_) = index["weight_map"], sorted(set(index["weight_map"].values()))
    read_with(weight_map)
    moved = next(name for name, file in weight_map.items() if file == first)
    for broken, message in (
        ({**weight_map, moved: second}, f"{moved} is not in {folder}/{second}"),
        ({name: file for name, file in weight_map.items() if name != moved}, f"{moved}.* not in {INDEX_NAME}"),
        ({**weight_map, "ghost": first}, f"ghost is not in {folder}/{first}"),
        ({**weight_map, moved: "absent.safetensors"}, r"absent\.safetensors is damaged or absent"),
        ({**weight_map, moved: "../" + first}, "no shard name"),
        ({**weight_map, moved: 3}, "no shard name"),
        ({}, "non-empty"),
    ):
        with pytest.raises(CheckpointError, match=message):
            read_with(broken)
    duplicate = load_file(folder / second) | {moved: load_file(folder / first)[moved]}
    save_file(duplicate, folder / second)
    with pytest.raises(CheckpointError, match=f"{moved} lies in both {first} and {second} of {folder}"):
        read_with(weight_map)
    for contents in (b"", b"[]", b"{}", b"\xff", b"[" * 100_000):
        (folder / INDEX_NAME).write_bytes(contents)
        with pytest.raises(CheckpointError, match="Fetch it again"):
            read_checkpoint(folder)


def test_number_of_files_without_an_index(published: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"holds 0 \.safetensors files"):
        read_checkpoint(tmp_path, CONFIG)
    folder = _copy(published, tmp_path)
    (folder / INDEX_NAME).unlink()
    with pytest.raises(CheckpointError, match="and no model"):
        read_checkpoint(folder)


def test_shards_without_config(published: Path, tmp_path: Path) -> None:
    (_copy(published, tmp_path) / "config.json").unlink()
    with pytest.raises(ConfigError, match="cannot be read"):
        read_checkpoint(tmp_path)
    assert set(read_checkpoint(tmp_path, CONFIG)) == {spec.name for spec in param_specs(CONFIG)}


SMALL = msgspec.structs.replace(
    CONFIG, num_hidden_layers=1, compress_ratios=(0,), num_nextn_predict_layers=0, n_routed_experts=2, vocab_size=4
)


@pytest.fixture(scope="module")
def small_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A one-layer checkpoint to be damaged; the fuzz tests rewrite it."""
    folder = tmp_path_factory.mktemp("fuzz") / "small"
    write_checkpoint(folder, SMALL, random_masters(SMALL))
    return next(folder.glob("*.safetensors"))


@pytest.fixture(scope="module")
def small_bytes(small_file: Path) -> bytes:
    """Its undamaged contents."""
    return small_file.read_bytes()


def _read_damaged(file: Path, contents: bytes) -> bool:
    """Return whether the damaged file was still readable; anything but a CheckpointError is a failure of the test."""
    file.write_bytes(contents)
    try:
        read_checkpoint(file.parent)
    except CheckpointError:
        return False
    return True


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_truncation_is_a_typed_error(small_file: Path, small_bytes: bytes, data: st.DataObject) -> None:
    header_end = 8 + struct.unpack("<Q", small_bytes[:8])[0]
    length = data.draw(st.one_of(st.integers(0, 20), st.integers(0, header_end), st.integers(0, len(small_bytes) - 1)))
    assert not _read_damaged(small_file, small_bytes[:length])


@settings(max_examples=150)
@given(seed=st.integers(0, 2**32), count=st.integers(1, 4))
def test_any_damage_to_the_header_is_a_typed_error_or_harmless(
    small_file: Path, small_bytes: bytes, seed: int, count: int
) -> None:
    rng, header_end = random.Random(seed), 8 + struct.unpack("<Q", small_bytes[:8])[0]
    damaged = bytearray(small_bytes)
    for _ in range(count):
        damaged[rng.randrange(header_end)] = rng.choice(b'0123456789{}[]",:xEF\x00\xff')
    _read_damaged(small_file, bytes(damaged))


@settings(max_examples=60)
@given(seed=st.integers(0, 2**32))
def test_any_edit_of_header_entries_is_a_typed_error(small_file: Path, small_bytes: bytes, seed: int) -> None:
    """Entries renamed, dropped, doubled, with another dtype, shape or offset: never silently read."""
    rng, size = random.Random(seed), struct.unpack("<Q", small_bytes[:8])[0]
    header: dict[str, Any] = json.loads(small_bytes[8 : 8 + size])
    name = rng.choice([key for key in header if key != "__metadata__"])
    entry = header[name]
    edit = rng.randrange(5)
    if edit == 0:
        header[name + "x"] = header.pop(name)
    elif edit == 1:
        del header[name]
    elif edit == 2:
        entry["dtype"] = rng.choice(
            sorted({"I8", "U8", "F32", "BF16", "F16", "I64", "F8_E8M0", "F8_E5M2", "X"} - {entry["dtype"]})
        )
    elif edit == 3:
        entry["shape"] = rng.choice([[], [0], [*entry["shape"], 2], [-1], [2**62], "3", None])
    else:
        entry["data_offsets"] = rng.choice([[0, 0], [5, 3], [0, 2**63], [-1, 4], [1.5, 2], None])
    encoded = json.dumps(header).encode()
    assert not _read_damaged(small_file, struct.pack("<Q", len(encoded)) + encoded + small_bytes[8 + size :])


def test_existing_targets_are_never_overwritten(published: Path, masters: dict[str, torch.Tensor]) -> None:
    before = sorted(published.iterdir())
    with pytest.raises(CheckpointError, match="never overwritten"):
        write_checkpoint(published, CONFIG, masters)
    assert sorted(published.iterdir()) == before


def test_wrong_tensors_are_refused_before_anything_is_written(masters: dict[str, torch.Tensor], tmp_path: Path) -> None:
    target = tmp_path / "target"
    for name, value, message in (
        ("norm.weight", None, r"missing: 1 \(norm\.weight\)"),
        ("ghost", torch.zeros(1), r"unknown: 1 \(ghost\)"),
        ("norm.weight", torch.zeros(63), r"norm\.weight is \[63\]"),
        ("norm.weight", torch.zeros(64, dtype=torch.bfloat16), "never cast"),
        (TID2EID, masters[TID2EID].to(torch.int32), "never cast"),
        ("norm.weight", PackedTensor(format="int64", data=torch.zeros(64, dtype=torch.int64)), "cannot be stored so"),
    ):
        named = {**masters, name: value}
        if value is None:
            del named[name]
        with pytest.raises(CheckpointError, match=message):
            write_checkpoint(target, CONFIG, named)  # pyright: ignore[reportArgumentType]
        assert not target.exists()


@pytest.mark.parametrize(
    ("number", "way_out"),
    [
        (errno.ENOSPC, "Make room there"),
        (errno.EROFS, "Let this user write there, or name another place"),
        (errno.EIO, "See what stands there and look at the device"),
    ],
)
def test_a_failing_disk_publishes_nothing_and_is_told_with_what_to_do(
    masters: dict[str, torch.Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, way_out: str
) -> None:
    calls: list[int] = []

    def failing_fsync(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) == 3:
            raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", failing_fsync)
    target = tmp_path / "target"
    said = rf"cannot be written: \[Errno {number}\] .*\. {way_out}.*; nothing was published$"
    with pytest.raises(CheckpointError, match=said):
        write_checkpoint(target, CONFIG, masters, max_shard_bytes=60_000)
    assert list(tmp_path.iterdir()) == [], "a full disk is not kept full"


def test_what_a_killed_writer_left_is_replaced(masters: dict[str, torch.Tensor], tmp_path: Path) -> None:
    leftover = tmp_path / ".target.partial"
    leftover.mkdir()
    (leftover / "model-00001-of-00001.safetensors").write_bytes(b"half")
    (leftover / "deep").mkdir()
    write_checkpoint(tmp_path / "target", CONFIG, masters)
    assert not leftover.exists()
    assert set(read_checkpoint(tmp_path / "target")) == set(masters)


def test_a_file_that_the_disk_cuts_off_publishes_nothing(tmp_path: Path) -> None:
    """RLIMIT_FSIZE: the write that would pass the limit fails, as one on a full disk does."""
    code = """
import resource, signal, sys
from pathlib import Path
from rollforward.model.checkpoint import write_checkpoint
from rollforward.model.errors import CheckpointError
from tests.model.test_checkpoint import SMALL, random_masters
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
for limit in (0, 7, 4096, 20_000):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    try:
        write_checkpoint(Path(sys.argv[1]), SMALL, random_masters(SMALL))
    except CheckpointError as error:
        sys.stderr.write(f"{error}\\n")
"""
    command = [sys.executable, "-c", code, str(tmp_path / "target")]
    told = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    assert told.count("nothing was published") == 4, told
    assert told.count("File too large") == 4
    assert list(tmp_path.iterdir()) == []


def test_two_writers_of_one_target_never_publish_a_mixture(tmp_path: Path) -> None:
    target, groups = tmp_path / "target", [stored_form(spec) for spec in tensor_specs(SMALL)]
    small = random_masters(SMALL)

    def write_all(writer: CheckpointWriter) -> None:
        for param in param_specs(SMALL):
            parts = unstacked(param)
            for part, value in zip(parts, [small[param.name]] if len(parts) == 1 else small[param.name], strict=True):
                write_stored(writer, part, pack_published(part, value))

    with CheckpointWriter(target, groups) as first, CheckpointWriter(target, groups) as second:
        write_all(first)
        with pytest.raises(CheckpointError, match="File exists"):
            write_all(second)
        with pytest.raises(CheckpointError, match="replaced by another process"):
            first.publish({})
    assert not target.exists()
