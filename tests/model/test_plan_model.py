"""Proves that the sizes which plan states are those of files that were really written, and that mini computes.

Sizes of the cache are compared in test_cache.py, of a learner's tensors in test_plan.py.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec
import pytest
import torch

from rollforward.model.checkpoint import write_checkpoint
from rollforward.model.config import ModelConfig, preset
from rollforward.model.init import fresh_params
from rollforward.model.plan_config import PlanRun
from rollforward.model.plan_model import DtypeRow, make_plan
from rollforward.model.plan_traffic import make_sync_plan, shard_sizes
from rollforward.model.precision import PackedTensor
from rollforward.model.shapes import TensorSpec, param_specs, scale_shape, stored_form, tensor_specs
from rollforward.model.transformer import Model
from tests.helpers.tiny import random_params, random_tokens


def _shards(directory: Path) -> list[list[tuple[str, int]]]:
    """(dtype, data bytes) of every entry, file by file, from the headers and nothing else."""
    found: list[list[tuple[str, int]]] = []
    for file in sorted(directory.glob("*.safetensors")):
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            header = json.loads(stream.read(length))
        header.pop("__metadata__", None)
        entries = [(entry["dtype"], entry["data_offsets"][1] - entry["data_offsets"][0]) for entry in header.values()]
        assert 8 + length + sum(size for _, size in entries) == file.stat().st_size, "a file is its header and data"
        found.append(entries)
    return found


def _rows(shards: list[list[tuple[str, int]]]) -> list[DtypeRow]:
    sizes: dict[str, list[int]] = {}
    for dtype, size in (entry for entries in shards for entry in entries):
        sizes.setdefault(dtype, []).append(size)
    rows = [
        DtypeRow(dtype=dtype, num_tensors=len(each), num_bytes=sum(each))  # pyright: ignore[reportArgumentType]
        for dtype, each in sizes.items()
    ]
    return sorted(rows, key=lambda row: -row.num_bytes)


def test_a_written_tiny_checkpoint_has_the_bytes_that_are_planned(tmp_path: Path) -> None:
    config, shard_bytes = preset("tiny"), 60_000
    write_checkpoint(tmp_path / "model", config, random_params(config), max_shard_bytes=shard_bytes)
    shards = _shards(tmp_path / "model")
    assert _rows(shards) == list(make_plan(config).dtypes)
    planned = shard_sizes([stored_form(spec) for spec in tensor_specs(config)], shard_bytes)
    assert len(planned) > 10
    assert [sum(size for _, size in entries) for entries in shards] == planned


class _Zeros(Mapping[str, PackedTensor]):
    """Published zeros of every tensor, made when they are asked for."""

    def __init__(self, config: ModelConfig) -> None:
        self._specs = {spec.name: spec for spec in param_specs(config)}
        self._table_K = torch.arange(config.num_experts_per_tok)

    def __getitem__(self, name: str) -> PackedTensor:
        spec = self._specs[name]
        if spec.format == "int64":
            return PackedTensor(format="int64", data=self._table_K.repeat(spec.shape[0], 1))
        if spec.format in ("bf16", "fp32"):
            dtype = torch.bfloat16 if spec.format == "bf16" else torch.float32
            return PackedTensor(format=spec.format, data=torch.zeros(spec.shape, dtype=dtype))
        return self._quantised(spec)

    def _quantised(self, spec: TensorSpec) -> PackedTensor:
        *leading, columns = spec.shape
        scale = torch.full(scale_shape(spec.shape, spec.format), 127, dtype=torch.uint8)
        if spec.format == "mxfp4":
            return PackedTensor(format="mxfp4", data=torch.zeros(*leading, columns // 2, dtype=torch.int8), scale=scale)
        data = torch.zeros(spec.shape, dtype=torch.uint8).view(torch.float8_e4m3fn)
        return PackedTensor(format="fp8", data=data, scale=scale)

    def __iter__(self) -> Iterator[str]:
        return iter(self._specs)

    def __len__(self) -> int:
        return len(self._specs)


def test_a_written_mini_checkpoint_has_the_bytes_that_are_planned(tmp_path: Path) -> None:
    """1.4 GB on the disk, removed at the end."""
    config, run = preset("mini"), PlanRun(model="mini")
    run = msgspec.structs.replace(run, sync=msgspec.structs.replace(run.sync, shard_bytes=200 * 10**6))
    directory = tmp_path / "model"
    try:
        write_checkpoint(directory, config, _Zeros(config), max_shard_bytes=run.sync.shard_bytes)
        shards = _shards(directory)
    finally:
        for file in tmp_path.rglob("*.safetensors"):
            file.unlink()
    assert _rows(shards) == list(make_plan(config).dtypes)
    sync = make_sync_plan(config, run)
    sizes = [sum(size for _, size in entries) for entries in shards]
    assert (sum(sizes), len(sizes), max(sizes)) == (sync.num_bytes, sync.num_shards, sync.largest_shard)


@pytest.mark.slow
def test_layers_of_mini_compute() -> None:
    """One layer of each kind, with few experts and words: every width is mini's."""
    config = msgspec.structs.replace(
        preset("mini"), num_hidden_layers=3, compress_ratios=(0, 4, 128, 0), n_routed_experts=8, vocab_size=512
    )
    model = Model(config, fresh_params(config, seed=0), precision="native")
    logits_BTV = model.logits(random_tokens(config, (1, 130)))
    assert logits_BTV.shape == (1, 130, 512)
    assert bool(torch.isfinite(logits_BTV).all())
