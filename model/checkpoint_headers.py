"""Headers of a checkpoint's files, checked against the shape table before any data is read.

Every unknown, missing, duplicate, mis-shaped or wrongly typed tensor is an error that names it. Each tensor's format
follows from its dtype in the file, not from the configuration.

What does not live here: reading and writing data (`checkpoint.py`), names and shapes (`shapes.py`).
"""

import json
import re
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path

import msgspec
from safetensors import SafetensorError, safe_open

from rollforward.model.config import ModelConfig
from rollforward.model.errors import CheckpointError, UnsupportedVariantError
from rollforward.model.shapes import TensorFormat, TensorSpec, param_specs, scale_name, scale_shape, unstacked

INDEX_NAME = "model.safetensors.index.json"
"""File that maps tensor names to shards."""

FORMAT_OF_DTYPE: dict[str, TensorFormat] = {
    "I8": "mxfp4",
    "F8_E4M3": "fp8",
    "BF16": "bf16",
    "F32": "fp32",
    "I64": "int64",
}
"""The format that an element type in a file stands for."""

ACCEPTED_DTYPES: dict[TensorFormat, tuple[str, ...]] = {
    "mxfp4": ("I8", "F8_E4M3", "BF16", "F32"),
    "fp8": ("F8_E4M3", "BF16", "F32"),
    "bf16": ("BF16", "F32"),
    "fp32": ("F32", "BF16"),
    "int64": ("I64",),
}
"""Dtypes that a file may hold for a tensor of each published format."""

_VARIANT_PARTS = {
    "markov": "V4-Flash-0731 / V4-Pro-0813: a DSpark drafter stands where MTP was",
    "main_proj": "V4-Flash-0731 / V4-Pro-0813: a DSpark drafter stands where MTP was",
    "bias_vl": "V4-Flash-Vision-Exp: it routes image tokens with a second gate bias",
    "engram": "V4.1: another architecture with engram tables",
}


class StoredEntry(msgspec.Struct, frozen=True, kw_only=True):
    """Where one stored tensor lies, from a file's header."""

    file: Path
    """The safetensors file."""
    dtype: str
    """Element type as safetensors spells it."""
    shape: tuple[int, ...]
    """Shape in the file."""


def scan_checkpoint(directory: Path) -> dict[str, StoredEntry]:
    """Read the headers of a checkpoint's files, no data.

    Args:
        directory: folder with one `*.safetensors` file, or shards and an index.

    Returns:
        Official tensor name -> entry.

    Raises:
        CheckpointError: no or several files without an index, a damaged index or header, a tensor in two shards, a
            tensor that the index and the shards do not agree on.
    """
    index_file = directory / INDEX_NAME
    listed = _read_index(index_file) if index_file.is_file() else None
    if listed is not None:
        files = sorted({directory / name for name in listed.values()})
    else:
        files = sorted(directory.glob("*.safetensors"))
        if len(files) != 1:
            raise CheckpointError(
                f"{directory} holds {len(files)} .safetensors files and no {INDEX_NAME}; "
                "a checkpoint is one file, or shards with an index. Give the folder of a complete checkpoint."
            )
    entries: dict[str, StoredEntry] = {}
    for file in files:
        for name, entry in _read_header(file):
            if name in entries:
                raise CheckpointError(
                    f"{name} lies in both {entries[name].file.name} and {file.name}; "
                    "a tensor belongs to one shard. Remove the stale file."
                )
            entries[name] = entry
    if listed is not None:
        for name, file_name in listed.items():
            if name not in entries or entries[name].file.name != file_name:
                raise CheckpointError(
                    f"{name} is not in {file_name}, where {INDEX_NAME} puts it. Fetch that shard again."
                )
        unlisted = [name for name in entries if name not in listed]
        if unlisted:
            raise CheckpointError(
                f"{name_some(unlisted)} lie in shards of {directory} but not in {INDEX_NAME}. Fetch the index again."
            )
    return entries


def _read_index(file: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(file.read_bytes())["weight_map"]
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}. Check the folder.") from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{file} is no index with a weight_map ({error!r}). Fetch it again.") from error
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{file}: weight_map must be a non-empty object. Fetch it again.")
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or shard != Path(shard).name or not shard.endswith(".safetensors"):
            raise CheckpointError(f"{file}: {name} lies in {shard!r}, which is no shard name. Fetch the index again.")
    return weight_map


def _read_header(file: Path) -> list[tuple[str, StoredEntry]]:
    try:
        with safe_open(file, framework="pt") as handle:
            names: list[str] = handle.keys()
            slices = [(name, handle.get_slice(name)) for name in names]
            return [
                (name, StoredEntry(file=file, dtype=part.get_dtype(), shape=tuple(part.get_shape())))
                for name, part in slices
            ]
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file} is damaged or absent: {error}. Fetch it again.") from error


def check_entries(entries: Mapping[str, StoredEntry], config: ModelConfig) -> None:
    """Compare headers with the model's shape table.

    Args:
        entries: from `scan_checkpoint`.
        config: the model.

    Raises:
        UnsupportedVariantError: names that only a relative of V4 has.
        CheckpointError: unknown names (with the nearest valid one), missing tensors, a wrong shape or dtype, a
            quantised weight without its scale, a scale without a quantised weight.
    """
    missing: list[str] = []
    known: set[str] = set()
    for param in param_specs(config):
        for spec in unstacked(param):
            known.add(spec.name)
            entry = entries.get(spec.name)
            if entry is None:
                missing.append(spec.name)
                continue
            tensor_format = _check_entry(spec, entry)
            known.add(scale_name(spec.name))
            _check_scale(spec, tensor_format, entries.get(scale_name(spec.name)))
    unknown = [name for name in entries if name not in known]
    if unknown:
        _raise_unknown(unknown, known)
    if missing:
        raise CheckpointError(
            f"{name_some(missing)} of {len(known)} tensors are missing. "
            "Fetch the whole checkpoint, or give its own config.json."
        )


def _check_entry(spec: TensorSpec, entry: StoredEntry) -> TensorFormat:
    if entry.dtype not in ACCEPTED_DTYPES[spec.format]:
        raise CheckpointError(
            f"{spec.name} is {entry.dtype} in {entry.file.name}; {spec.format} tensors may be stored as "
            f"{', '.join(ACCEPTED_DTYPES[spec.format])}. Convert it to the official layout."
        )
    tensor_format = FORMAT_OF_DTYPE[entry.dtype]
    expected = spec.shape if tensor_format != "mxfp4" else (*spec.shape[:-1], spec.shape[-1] // 2)
    if entry.shape != expected:
        raise CheckpointError(
            f"{spec.name} is {list(entry.shape)} {entry.dtype} in {entry.file.name}; the configuration gives "
            f"{list(expected)}. Give the checkpoint's own config.json."
        )
    return tensor_format


def _check_scale(spec: TensorSpec, tensor_format: TensorFormat, scale: StoredEntry | None) -> None:
    name = scale_name(spec.name)
    is_quantised = tensor_format in ("mxfp4", "fp8")
    if scale is None:
        if is_quantised:
            raise CheckpointError(f"{spec.name} is {tensor_format} but {name} is missing. Fetch the whole checkpoint.")
        return
    if not is_quantised:
        raise CheckpointError(
            f"{name} scales nothing: {spec.name} is stored plain, as {tensor_format}. Drop the scale."
        )
    if scale.dtype != "F8_E8M0":
        raise CheckpointError(
            f"{name} is {scale.dtype}; scales are F8_E8M0 bytes (powers of two). Convert it to the official layout."
        )
    expected = scale_shape(spec.shape, tensor_format)
    if scale.shape != expected:
        raise CheckpointError(f"{name} is {list(scale.shape)}; {spec.name} needs {list(expected)}. Fetch it again.")


def _raise_unknown(unknown: list[str], known: set[str]) -> None:
    for name in unknown:
        for part, reason in _VARIANT_PARTS.items():
            if part in name:
                raise UnsupportedVariantError(f"{name}: this is {reason}. Use a V4-Flash or V4-Pro checkpoint.")
    patterns = {
        re.sub(r"\d+", "N", name) for name in known if not name.startswith("mtp.") or unknown[0].startswith("mtp.")
    }
    near = get_close_matches(re.sub(r"\d+", "N", unknown[0]), sorted(patterns), n=1, cutoff=0.0)
    raise CheckpointError(
        f"{name_some(unknown)} are no tensors of this configuration; the nearest names are like {near[0]}. "
        "Give the checkpoint's own config.json, or the official layout."
    )


def name_some(names: Iterable[str]) -> str:
    """Return, for a message, the number of names and the first five of them."""
    listed = list(names)
    return f"{len(listed)} ({', '.join(listed[:5])}{', ...' if len(listed) > 5 else ''})"
