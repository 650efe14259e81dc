"""Headers of a checkpoint's files, checked against the shape table before any data is read.

Every unknown, missing, duplicate, mis-shaped or wrongly typed tensor is an error that names it. Each tensor's format
follows from its dtype in the file, not from the configuration. Names are official here, however files spell them.

What does not live here: data (`checkpoint.py`), a file's own header (`safetensors_stream.py`), other
spellings of names (`spellings.py`), names and shapes (`shapes.py`).
"""

import json
import re
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import Literal

import msgspec

from rollforward.conf import console
from rollforward.model.config import ModelConfig, load_model_config
from rollforward.model.errors import CheckpointError, ConfigError, UnsupportedVariantError
from rollforward.model.safetensors_stream import TORCH_DTYPE, StoredEntry, read_header
from rollforward.model.shapes import (
    TensorFormat,
    TensorSpec,
    is_stacked_expert,
    param_specs,
    scale_name,
    scale_shape,
    unstacked,
)
from rollforward.model.spellings import fused_parts, official_name

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

SCALE_DTYPES: dict[TensorFormat, tuple[str, ...]] = {"mxfp4": ("F8_E8M0",), "fp8": ("F8_E8M0", "F32")}
"""Dtypes of the scales of each format. Base checkpoints have FP8 scales as numbers, which must be powers of two."""

_DSPARK = "V4-Flash-0731 / V4-Pro-0813: a DSpark drafter stands where MTP was"

PLACEHOLDER_COMPRESS_THETA = 40000.0
"""The default of `ModelArgs` in the official inference code, which several ports took for the model's."""

_LATER_STAGES = ("mtp.1.", "mtp.2.")
"""MTP has one stage, DSpark three."""

_EXPERT_DTYPES: dict[str, Literal["fp4", "fp8"]] = {"I8": "fp4", "F8_E4M3": "fp8"}

_VARIANT_PARTS = {
    "markov": _DSPARK,
    "main_proj": _DSPARK,
    "main_norm": _DSPARK,
    "bias_vl": "V4-Flash-Vision-Exp: it routes image tokens with a second gate bias",
    "engram": "V4.1: another architecture with engram tables",
}


def scan_checkpoint(directory: Path) -> dict[str, StoredEntry]:
    """Read the headers of a checkpoint's files, no data.

    Args:
        directory: folder with one `*.safetensors` file, or shards and an index.

    Returns:
        Official tensor name -> entry. The entries of transformers' fused experts are parts of one stored tensor.

    Raises:
        CheckpointError: no or several files without an index, a damaged index or header, a tensor in two shards or
            under two names, a tensor that the index and the shards do not agree on.
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
        for name, entry in read_header(file).items():
            if name in entries:
                raise CheckpointError(
                    f"{name} lies in both {entries[name].file.name} and {file.name} of {directory}; "
                    "a tensor belongs to one shard. Remove the stale file."
                )
            entries[name] = entry
    if listed is not None:
        for name, file_name in listed.items():
            if name not in entries or entries[name].file.name != file_name:
                raise CheckpointError(
                    f"{name} is not in {directory / file_name}, where {INDEX_NAME} puts it. Fetch that shard again."
                )
        unlisted = [name for name in entries if name not in listed]
        if unlisted:
            raise CheckpointError(
                f"{name_some(unlisted)} lie in shards of {directory} but not in {INDEX_NAME}. Fetch the index again."
            )
    return _official(entries)


def _official(spelled: Mapping[str, StoredEntry]) -> dict[str, StoredEntry]:
    """The same entries by official names."""
    entries: dict[str, StoredEntry] = {}
    for name, entry in spelled.items():
        for official, part in _official_parts(name, entry):
            if official in entries:
                raise CheckpointError(
                    f"{part.file.parent}: {official} stands there twice, as {entries[official].spelling} and as"
                    f" {name}; which of them holds the weights cannot be told. Remove one."
                )
            entries[official] = part
    return entries


def _official_parts(name: str, entry: StoredEntry) -> list[tuple[str, StoredEntry]]:
    parts = fused_parts(name, entry.shape) if entry.dtype in TORCH_DTYPE else ()
    if not parts:
        return [(official_name(name), entry)]
    row_bytes = entry.shape[-1] * TORCH_DTYPE[entry.dtype].itemsize
    return [
        (
            part.name,
            msgspec.structs.replace(entry, offset=entry.offset + part.start_rows * row_bytes, shape=part.shape),
        )
        for part in parts
    ]


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


@contextmanager
def naming(entries: Mapping[str, StoredEntry]) -> Generator[None]:
    """Put the folder that entries are from before what turns out to be wrong with it.

    Raises:
        CheckpointError, ConfigError: in place of one that does not name the folder.
    """
    try:
        yield
    except (CheckpointError, ConfigError) as error:
        folder = next((entry.file.parent for entry in entries.values()), None)
        if folder is None or str(folder) in str(error):
            raise
        raise type(error)(f"{folder}: {error}") from error


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
    with naming(entries):
        _check_entries(entries, config)


def _check_entries(entries: Mapping[str, StoredEntry], config: ModelConfig) -> None:
    _refuse_variants(entries)
    missing: list[str] = []
    known: set[str] = set()
    for param in param_specs(config):
        formats: set[str] = set()
        for spec in unstacked(param):
            known.add(spec.name)
            entry = entries.get(spec.name)
            if entry is None:
                missing.append(spec.name)
                continue
            tensor_format = _check_entry(spec, entry)
            formats.add(tensor_format)
            known.add(scale_name(spec.name))
            _check_scale(spec, tensor_format, entries.get(scale_name(spec.name)))
        if len(formats) > 1:
            raise CheckpointError(
                f"{param.name}: experts are stored as {', '.join(sorted(formats))}; one layer's experts share a format."
                " Convert them to one."
            )
    unknown = [name for name in entries if name not in known]
    if unknown:
        _raise_unknown([entries[name].spelling for name in unknown], unknown, known)
    if missing:
        raise CheckpointError(
            f"{name_some(missing)} of {len(known)} tensors are missing. "
            "Fetch the whole checkpoint, or give its own config.json."
        )


def load_checkpoint_config(directory: Path, *, is_announced: bool = True) -> ModelConfig:
    """Read a checkpoint's configuration and put right what its tensors say otherwise.

    Args:
        directory: the checkpoint's folder. Without tensor files the configuration is what config.json says.
        is_announced: whether to say what was put right.

    Raises:
        ConfigError: the config.json is refused. CheckpointError: a header is.
    """
    config = load_model_config(directory)
    if not any(directory.glob("*.safetensors")):
        return config
    entries = scan_checkpoint(directory)
    with naming(entries):
        corrected, notes = corrected_config(entries, config)
    if is_announced:
        for note in notes:
            console.say(f"{directory / 'config.json'}: {note}")
    return corrected


def corrected_config(entries: Mapping[str, StoredEntry], config: ModelConfig) -> tuple[ModelConfig, tuple[str, ...]]:
    """Return the configuration that a checkpoint's tensors have, and what was put right, a sentence each.

    Some configurations lack `expert_dtype`, some name the wrong one; the dtype of the experts says which it is.

    Raises:
        ConfigError: the rotary base of compressed layers is the placeholder of the official code.
    """
    if config.compress_rope_theta == PLACEHOLDER_COMPRESS_THETA:
        raise ConfigError(
            f"compress_rope_theta is {config.compress_rope_theta:g}, a placeholder in the official inference code that"
            " no model was trained with; released models have 160000. Take it from the official config.json."
        )
    _refuse_variants(entries)
    found = {
        entry.dtype
        for name, entry in entries.items()
        if is_stacked_expert(name) and name.endswith(".weight") and entry.dtype in _EXPERT_DTYPES
    }
    if len(found) != 1 or (expert_dtype := _EXPERT_DTYPES[found.pop()]) == config.expert_dtype:
        return config, ()
    note = f"experts are stored in {expert_dtype}, so expert_dtype is {expert_dtype}, not {config.expert_dtype}"
    return msgspec.structs.replace(config, expert_dtype=expert_dtype), (note,)


def _check_entry(spec: TensorSpec, entry: StoredEntry) -> TensorFormat:
    accepted = ACCEPTED_DTYPES["mxfp4" if is_stacked_expert(spec.name) else spec.format]
    if entry.dtype not in accepted:
        raise CheckpointError(
            f"{spec.name} is {entry.dtype} in {entry.file.name}; {spec.format} tensors may be stored as "
            f"{', '.join(accepted)}. Convert it to the official layout."
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
    if scale.dtype not in SCALE_DTYPES[tensor_format]:
        raise CheckpointError(
            f"{name} is {scale.dtype}; scales are F8_E8M0 bytes (powers of two). Convert it to the official layout."
        )
    expected = scale_shape(spec.shape, tensor_format)
    if scale.shape != expected:
        raise CheckpointError(f"{name} is {list(scale.shape)}; {spec.name} needs {list(expected)}. Fetch it again.")


def _refuse_variants(entries: Mapping[str, StoredEntry]) -> None:
    for name, entry in entries.items():
        for part, reason in _VARIANT_PARTS.items():
            if part in name or (reason == _DSPARK and name.startswith(_LATER_STAGES)):
                raise UnsupportedVariantError(
                    f"{entry.spelling}: this is {reason}. Use a V4-Flash or V4-Pro checkpoint."
                )


def _raise_unknown(spellings: list[str], unknown: list[str], known: set[str]) -> None:
    patterns = {
        re.sub(r"\d+", "N", name) for name in known if not name.startswith("mtp.") or unknown[0].startswith("mtp.")
    }
    near = get_close_matches(re.sub(r"\d+", "N", unknown[0]), sorted(patterns), n=1, cutoff=0.0)
    raise CheckpointError(
        f"{name_some(spellings)} are no tensors of this configuration; the nearest names are like {near[0]}. "
        "Give the checkpoint's own config.json, or the official layout."
    )


def name_some(names: Iterable[str]) -> str:
    """Return, for a message, the number of names and the first five of them."""
    listed = list(names)
    return f"{len(listed)} ({', '.join(listed[:5])}{', ...' if len(listed) > 5 else ''})"
