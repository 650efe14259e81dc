"""Entry point of `rollforward convert`, and what import and export share: canonical bytes, and layouts.

    headers --> format of each tensor in the target --> one tensor at a time: read, packed anew, written

Bytes of quantised weights are not unique: a group may have a larger scale and smaller codes for the same values.
Canonical bytes are what packing the values gives. A tensor is packed anew only where that keeps every value; otherwise
its bytes, or its plain values, stay as they are, and that is said.

Memory is bounded by one stored tensor and a few rows of it as numbers.
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch

from rollforward.conf import console
from rollforward.kernels.errors import NonFiniteError
from rollforward.model.checkpoint import read_stored, write_stored
from rollforward.model.checkpoint_headers import (
    FORMAT_OF_DTYPE,
    check_entries,
    corrected_config,
    naming,
    scan_checkpoint,
)
from rollforward.model.checkpoint_writer import MAX_SHARD_BYTES, CheckpointWriter, check_target, json_bytes
from rollforward.model.config import ModelConfig, config_json
from rollforward.model.config_transformers import load_spelled_config, transformers_config
from rollforward.model.convert_config import ConvertRun
from rollforward.model.errors import CheckpointError
from rollforward.model.precision import PackedTensor, pack_published, unpack_published
from rollforward.model.safetensors_stream import StoredEntry, TensorReader
from rollforward.model.shapes import (
    StoredTensor,
    TensorFormat,
    TensorSpec,
    is_stacked_expert,
    param_specs,
    scale_name,
    stored_form,
    unstacked,
)
from rollforward.model.spellings import Layout, transformers_name

COMPANIONS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "generation_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "encoding.json",
)
"""Files of a model directory that travel with its weights as they are."""

_BLOCK_ROWS = 128
"""Blocks of quantised weights end at multiples of this many rows."""

_CHUNK_ELEMENTS = 2**17
"""About how many elements are numbers at a time."""


class ConvertReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a conversion did."""

    tensors: int
    """Official tensors read, scales not counted."""
    read_bytes: int
    """Their data and scales in the source."""
    written_bytes: int
    """Data and scales in the target."""
    changed_tensors: int
    """Tensors that have the same format in the target, but other bytes for the same values."""
    changed_bytes: int
    """Bytes of these that differ, scales included."""
    repacked_tensors: int
    """Tensors that have another format in the target, with the same values."""
    kept_tensors: int
    """Tensors that could not be given canonical bytes, or their published format, without changing a value: as they
    were."""
    notes: tuple[str, ...] = ()
    """What the configuration said wrongly, a sentence each."""


_COUNTED = tuple(name for name in ConvertReport.__struct_fields__ if name != "notes")


def canonical(packed: PackedTensor) -> PackedTensor:
    """Return pack(unpack(packed)): the same values in the bytes that publishing gives them.

    Args:
        packed: [..., R, K] of any format.

    Returns:
        The canonical bytes; `packed` itself where these would have other values, which takes scales of one block that
        lie more than 14 binades apart, or below what packing uses.

    Invariants: idempotent byte for byte; every value stays equal (-0.0 may become 0.0).
    """
    return repacked(packed, packed.format) or packed


def repacked(packed: PackedTensor, tensor_format: TensorFormat) -> PackedTensor | None:
    """Return the same values in another format, or None where some value would change.

    Args:
        packed: [..., R, K] of any format. tensor_format: the wanted one.

    Invariants: a few blocks are numbers at a time.
    """
    if "int64" in (packed.format, tensor_format):
        return packed if packed.format == tensor_format else None
    if packed.format == tensor_format and tensor_format in ("bf16", "fp32"):
        return packed
    if packed.data.ndim == 1:
        return _repacked_part(packed, tensor_format)
    parts: list[PackedTensor] = []
    for part in _row_parts(packed):
        new = _repacked_part(part, tensor_format)
        if new is None:
            return None
        parts.append(new)
    scales = [part.scale for part in parts if part.scale is not None]
    return PackedTensor(
        format=tensor_format,
        data=torch.cat([part.data.view(torch.uint8) for part in parts], dim=-2).view(parts[0].data.dtype),
        scale=torch.cat(scales, dim=-2) if scales else None,
    )


def _row_parts(packed: PackedTensor) -> Iterator[PackedTensor]:
    rows = packed.data.shape[-2]
    row_elements = max(packed.data.numel() // max(rows, 1), 1)
    step = max(_CHUNK_ELEMENTS // (row_elements * _BLOCK_ROWS), 1) * _BLOCK_ROWS
    for start in range(0, rows, step):
        scale = packed.scale
        if scale is not None and packed.format == "fp8":
            scale = scale[..., start // _BLOCK_ROWS : -(-(start + step) // _BLOCK_ROWS), :]
        elif scale is not None:
            scale = scale[..., start : start + step, :]
        yield PackedTensor(format=packed.format, data=packed.data[..., start : start + step, :], scale=scale)


def _repacked_part(packed: PackedTensor, tensor_format: TensorFormat) -> PackedTensor | None:
    value = unpack_published(packed)
    spec = TensorSpec(name="values", shape=tuple(value.shape), format=tensor_format, trained=False)
    try:
        new = pack_published(spec, value)
    except NonFiniteError:  # beyond the range of the wanted format
        return None
    return new if torch.equal(unpack_published(new), value) else None


def convert_checkpoint(
    source: Path,
    target: Path,
    *,
    layout: Layout = "official",
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> ConvertReport:
    """Write a checkpoint in a layout, whole or not at all, with its configuration and its tokenizer.

    Args:
        source: a model directory in any layout that is read. target: must not exist, its parent must.
        layout: the target's. max_shard_bytes: see `CheckpointWriter`.

    Raises:
        ConfigError, CheckpointError: the source is refused, or the target cannot be written.
    """
    check_target(target)
    entries = scan_checkpoint(source)
    with naming(entries):
        config, notes = _source_config(source, entries)
    check_entries(entries, config)
    with TensorReader() as reader:
        converter = _Converter(reader, entries, config, layout)
        with CheckpointWriter(target, converter.groups(), max_shard_bytes=max_shard_bytes) as writer:
            converter.write(writer)
            raw = config_json(config) if layout == "official" else transformers_config(config)
            writer.publish({**companion_files(source), "config.json": json_bytes(raw)})
    return msgspec.structs.replace(converter.report(), notes=notes)


def companion_files(directory: Path) -> dict[str, bytes]:
    """Return the contents of a model directory's COMPANIONS that it has.

    Raises:
        CheckpointError: one cannot be read.
    """
    try:
        return {name: (directory / name).read_bytes() for name in COMPANIONS if (directory / name).is_file()}
    except OSError as error:
        raise CheckpointError(f"{error.filename} cannot be read: {error.strerror}. Check the folder.") from error


def _source_config(source: Path, entries: Mapping[str, StoredEntry]) -> tuple[ModelConfig, tuple[str, ...]]:
    config, notes = corrected_config(entries, load_spelled_config(source))
    if config.num_nextn_predict_layers and not any(name.startswith("mtp.") for name in entries):
        config = msgspec.structs.replace(
            config, num_nextn_predict_layers=0, compress_ratios=config.compress_ratios[: config.num_hidden_layers]
        )
        notes = (*notes, "there are no tensors of an MTP module, so num_nextn_predict_layers is 0, not 1")
    return config, notes


class _Converter:
    """One conversion: what is written, then the writing, then the count of what was done."""

    def __init__(
        self, reader: TensorReader, entries: Mapping[str, StoredEntry], config: ModelConfig, layout: Layout
    ) -> None:
        self._reader, self._entries, self._config, self._layout = reader, entries, config, layout
        self._params = param_specs(config)
        self._formats = {param.name: self._target_format(param) for param in self._params}
        self._counts: Counter[str] = Counter()

    def _found_format(self, spec: TensorSpec) -> TensorFormat:
        return FORMAT_OF_DTYPE[self._entries[spec.name].dtype]

    def _read(self, spec: TensorSpec) -> PackedTensor:
        return read_stored(self._reader, self._entries, spec, self._config)

    def _target_format(self, param: TensorSpec) -> TensorFormat:
        """transformers has no scales. The official layout has published formats, if they hold a plain tensor's values:
        to know, it is read; once more when it is written, since it may not fit in memory."""
        parts = unstacked(param)
        found = self._found_format(parts[0])
        if self._layout == "transformers":
            return "bf16" if found in ("mxfp4", "fp8") else found
        if found in (param.format, "mxfp4", "fp8", "int64"):
            return found
        return param.format if all(repacked(self._read(part), param.format) is not None for part in parts) else found

    def groups(self) -> list[tuple[StoredTensor, ...]]:
        """What the target holds; tensors of a group lie in one shard."""
        stored = [self._stored(param) for param in self._params]
        if self._layout == "official":
            return [stored_form(part) for param in stored for part in unstacked(param)]
        tensors: dict[str, StoredTensor] = {}
        for param in stored:
            parts = unstacked(param) if param.name.startswith("mtp.") else (param,)
            for part in parts:
                name = transformers_name(part.name)
                plain = stored_form(part)[0]
                shape = plain.shape
                if (before := tensors.get(name)) is not None:  # gate and up projection, one below the other
                    if before.dtype != plain.dtype:
                        raise CheckpointError(
                            f"{name} would hold {before.dtype} and {plain.dtype}: {part.name} is stored otherwise than"
                            " its neighbour. Convert the checkpoint to the official layout first."
                        )
                    shape = (shape[0], before.shape[1] + shape[1], shape[2])
                tensors[name] = msgspec.structs.replace(plain, name=name, shape=shape)
        return [(one,) for one in tensors.values()]

    def _stored(self, param: TensorSpec) -> TensorSpec:
        return msgspec.structs.replace(param, format=self._formats[param.name])

    def write(self, writer: CheckpointWriter) -> None:
        """Write every tensor of `groups`."""
        for param in self._params:
            for index, spec in enumerate(unstacked(self._stored(param))):
                found = self._read(spec)
                new = self._packed(spec, param.format, found)
                self._count(spec, found, new)
                if self._layout == "official" or spec.name.startswith("mtp."):
                    write_stored(writer, spec, new)
                else:
                    writer.write(transformers_name(spec.name), new.data, _start_bytes(param.name, index, new.data))

    def _packed(self, spec: TensorSpec, published: TensorFormat, found: PackedTensor) -> PackedTensor:
        new = repacked(found, spec.format)
        if new is None and found.format != spec.format:
            raise CheckpointError(
                f"{spec.name} holds values that {spec.format} has not, so the {self._layout} layout would change them."
                " Keep it in its layout."
            )
        if new is None or (self._layout == "official" and spec.format not in (published, "mxfp4", "fp8")):
            self._counts["kept_tensors"] += 1
        return found if new is None else new

    def _count(self, spec: TensorSpec, found: PackedTensor, new: PackedTensor) -> None:
        counts = self._counts
        counts["tensors"] += 1
        counts["read_bytes"] += self._entries[spec.name].num_bytes
        counts["written_bytes"] += new.num_bytes
        if found.scale is not None:
            counts["read_bytes"] += self._entries[scale_name(spec.name)].num_bytes
        if new.format != found.format:
            counts["repacked_tensors"] += 1
            return
        changed = num_differing(found, new)
        counts["changed_bytes"] += changed
        counts["changed_tensors"] += changed > 0

    def report(self) -> ConvertReport:
        """What `write` did."""
        return msgspec.convert({name: self._counts[name] for name in _COUNTED}, ConvertReport)


def _start_bytes(param_name: str, expert: int, data: torch.Tensor) -> int:
    """Where an expert's matrix begins in transformers' fused tensor."""
    if not is_stacked_expert(param_name):
        return 0
    if ".w2." in param_name:
        return expert * data.nbytes
    return (2 * expert + (".w3." in param_name)) * data.nbytes


def num_differing(before: PackedTensor, after: PackedTensor) -> int:
    """Return how many bytes of data and scales differ between tensors of one format and shape."""
    if before is after:
        return 0
    differing = _differing(before.data, after.data)
    if before.scale is not None and after.scale is not None:
        differing += _differing(before.scale, after.scale)
    return differing


def _differing(before: torch.Tensor, after: torch.Tensor) -> int:
    pairs = zip(
        before.contiguous().view(-1).view(torch.uint8).split(_CHUNK_ELEMENTS),
        after.contiguous().view(-1).view(torch.uint8).split(_CHUNK_ELEMENTS),
        strict=True,
    )
    return sum(int((one != other).sum()) for one, other in pairs)


def main(run: ConvertRun) -> int:
    """Convert, and say what was done. Returns 0."""
    target = Path(run.target)
    report = convert_checkpoint(Path(run.source), target, layout=run.layout, max_shard_bytes=run.max_shard_bytes)
    for note in report.notes:
        console.say(f"{Path(run.source) / 'config.json'}: {note}")
    console.summary(f"converted to the {run.layout} layout", {"model": target, **report_rows(report)})
    result: dict[str, Any] = {"model": str(target), **msgspec.to_builtins(report)}
    console.result(json.dumps(result))
    return 0


def report_rows(report: ConvertReport) -> dict[str, str]:
    """Return the report in words, for a summary."""
    rows = {
        "read": f"{report.tensors:,} tensors, {report.read_bytes:,} bytes",
        "written": f"{report.written_bytes:,} bytes",
        "canonical": f"{report.changed_bytes:,} bytes of {report.changed_tensors:,} tensors changed, no value",
    }
    if report.repacked_tensors:
        rows["other format"] = f"{report.repacked_tensors:,} tensors, no value changed"
    if report.kept_tensors:
        rows["kept"] = f"{report.kept_tensors:,} tensors, whose values the layout's own form would change"
    return rows
