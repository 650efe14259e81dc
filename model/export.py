"""A trained model as a checkpoint in the official layout: trained tensors as they were published, the others byte for
byte as in the checkpoint that training started from.

Publishing packs every tensor anew, which keeps values but not bytes. What training never touched should be the same
bytes again, so that it can be compared with the release that it came from. Values are compared while copying: weights
that did not start from the checkpoint named are refused.

What does not live here: which weights of a run are exported, and where it started (`rl/export.py`).
"""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import msgspec
import torch

from rollforward.model.checkpoint import read_stored, write_stored
from rollforward.model.checkpoint_headers import (
    FORMAT_OF_DTYPE,
    check_entries,
    load_checkpoint_config,
    scan_checkpoint,
)
from rollforward.model.checkpoint_writer import MAX_SHARD_BYTES, CheckpointWriter, check_target, json_bytes
from rollforward.model.config import config_json
from rollforward.model.errors import CheckpointError
from rollforward.model.precision import PackedTensor, pack_published, unpack_published
from rollforward.model.safetensors_stream import TensorReader
from rollforward.model.shapes import TensorSpec, stored_form, tensor_specs


class ExportReport(msgspec.Struct, frozen=True, kw_only=True):
    """What an export wrote; scales are not counted as tensors."""

    trained_tensors: int
    """As they were published."""
    copied_tensors: int
    """Not trained, byte for byte from the checkpoint that training started from."""
    published_tensors: int
    """Not trained, but as published: the checkpoint has them in another format, or balancing changed them."""
    plain_tensors: int
    """Without the scales of the official layout, since they were trained in FP32."""
    written_bytes: int
    """Data and scales."""


def export_checkpoint(
    weights: Path, base: Path, target: Path, *, files: Mapping[str, bytes], max_shard_bytes: int = MAX_SHARD_BYTES
) -> ExportReport:
    """Write trained weights, whole or not at all.

    Args:
        weights: a published model. base: the checkpoint that its training started from.
        target: must not exist, its parent must. files: what else the folder holds. max_shard_bytes: see
            `CheckpointWriter`.

    Raises:
        ConfigError, CheckpointError: one of the two is refused or they do not belong together; the target cannot be
            written.
    """
    check_target(target)
    config = load_checkpoint_config(weights)
    if (base_config := load_checkpoint_config(base)) != config:
        wrong = [name for name in config.__struct_fields__ if getattr(config, name) != getattr(base_config, name)]
        raise CheckpointError(f"{weights} and {base} differ in {', '.join(wrong)} of config.json. {_NOT_ITS_START}")
    entries, base_entries = scan_checkpoint(weights), scan_checkpoint(base)
    check_entries(entries, config)
    check_entries(base_entries, config)
    specs = [
        msgspec.structs.replace(spec, format=FORMAT_OF_DTYPE[entries[spec.name].dtype]) for spec in tensor_specs(config)
    ]
    counts: Counter[str] = Counter()
    with (
        TensorReader() as reader,
        CheckpointWriter(target, [stored_form(spec) for spec in specs], max_shard_bytes=max_shard_bytes) as writer,
    ):
        for spec in specs:
            packed = read_stored(reader, entries, spec, config)
            kind = "trained"
            if not spec.trained:
                start = read_stored(reader, base_entries, spec, config)
                kind, packed = _untrained(spec, packed, start)
            write_stored(writer, spec, packed)
            counts[kind] += 1
            counts["bytes"] += packed.num_bytes
        writer.publish({**files, "config.json": json_bytes(config_json(config))})
    published = {spec.name: spec.format for spec in tensor_specs(config)}
    return ExportReport(
        trained_tensors=counts["trained"],
        copied_tensors=counts["copied"],
        published_tensors=counts["published"],
        plain_tensors=sum(
            published[spec.name] in ("mxfp4", "fp8") and spec.format not in ("mxfp4", "fp8") for spec in specs
        ),
        written_bytes=counts["bytes"],
    )


_NOT_ITS_START = "The weights were not trained from this checkpoint; name the one that the run started from: base=DIR"


def _untrained(spec: TensorSpec, published: PackedTensor, start: PackedTensor) -> tuple[str, PackedTensor]:
    """What is written of a tensor that no gradient reaches, and from where.

    Raises:
        CheckpointError: it has other values than where training started.
    """
    value = unpack_published(published)
    if start.format == published.format:
        if torch.equal(unpack_published(start), value):
            return "copied", start
    elif start.format != "int64" and _is_rounded(spec, start, value):
        return "published", published
    if spec.name.endswith(".gate.bias"):  # moved by balancing
        return "published", published
    raise CheckpointError(
        f"{spec.name} has other values than in the checkpoint to copy it from,"
        f" although it is not trained. {_NOT_ITS_START}"
    )


def _is_rounded(spec: TensorSpec, start: PackedTensor, value: torch.Tensor) -> bool:
    """Whether the published value is what packing the value at the start gives."""
    return torch.equal(unpack_published(pack_published(spec, unpack_published(start))), value)
