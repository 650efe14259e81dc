"""Checkpoints in the official layout: reading (files -> canonical tensors) and atomic writing.

A checkpoint is a folder with `config.json` and either one `*.safetensors` file or shards with
`model.safetensors.index.json`. Tensors are read one canonical tensor at a time through memory maps; plain BF16 or FP32
is accepted wherever the official file has another float format.

What does not live here: header checks (`checkpoint_headers.py`), names and shapes (`shapes.py`), packing
(`precision.py`), building a model (`weights.py`).
"""

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from rollforward.kernels.quant.formats import E2M1, E4M3, SCALE_NAN
from rollforward.model.checkpoint_headers import (
    ACCEPTED_DTYPES,
    FORMAT_OF_DTYPE,
    INDEX_NAME,
    StoredEntry,
    check_entries,
    name_some,
    scan_checkpoint,
)
from rollforward.model.config import ModelConfig, config_json, load_model_config
from rollforward.model.errors import CheckpointError
from rollforward.model.precision import PackedTensor, pack_published, unpack_published
from rollforward.model.shapes import TensorSpec, is_stacked_expert, param_specs, scale_name, unstacked

_DTYPE_OF_FORMAT = {tensor_format: dtype for dtype, tensor_format in FORMAT_OF_DTYPE.items()}


class _Files:
    """Open memory maps of a checkpoint's files; closed by the ExitStack that is handed in."""

    def __init__(self, entries: Mapping[str, StoredEntry], stack: ExitStack) -> None:
        self._entries = entries
        self._stack = stack
        self._handles: dict[Path, Any] = {}

    def tensor(self, name: str) -> torch.Tensor:
        file = self._entries[name].file
        try:
            if file not in self._handles:
                self._handles[file] = self._stack.enter_context(safe_open(file, framework="pt"))
            return self._handles[file].get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{name} cannot be read from {file}: {error}. Fetch it again.") from error

    def packed(self, spec: TensorSpec) -> PackedTensor:
        tensor_format = FORMAT_OF_DTYPE[self._entries[spec.name].dtype]
        data = self.tensor(spec.name)
        if tensor_format not in ("mxfp4", "fp8"):
            return PackedTensor(format=tensor_format, data=data)
        return PackedTensor(format=tensor_format, data=data, scale=self.tensor(scale_name(spec.name)).view(torch.uint8))


def iter_checkpoint(directory: Path, config: ModelConfig) -> Iterator[tuple[TensorSpec, PackedTensor]]:
    """Yield every canonical tensor in its stored form, in the order of `param_specs`, one in memory at a time.

    Args:
        directory: the checkpoint's folder.
        config: its model.

    Yields:
        (spec, packed): packed.format is the format found in the file, which may be plain where spec.format is not.

    Raises:
        CheckpointError: as `scan_checkpoint` and `check_entries`; non-finite values or scales; token-to-expert tables
            with ids out of range or repeated; experts of one layer in different formats.
    """
    entries = scan_checkpoint(directory)
    check_entries(entries, config)
    with ExitStack() as stack:
        files = _Files(entries, stack)
        for param in param_specs(config):
            parts = [files.packed(spec) for spec in unstacked(param)]
            packed = _stack_experts(param, parts) if is_stacked_expert(param.name) else parts[0]
            _check_values(param, packed, config)
            yield param, packed


def _stack_experts(param: TensorSpec, parts: list[PackedTensor]) -> PackedTensor:
    formats = {part.format for part in parts}
    if len(formats) > 1:
        raise CheckpointError(
            f"{param.name}: experts are stored as {', '.join(sorted(formats))}; one layer's experts share a format. "
            "Convert them to one."
        )
    scales = [part.scale for part in parts if part.scale is not None]
    data = torch.stack([part.data.view(torch.uint8) for part in parts]).view(parts[0].data.dtype)
    return PackedTensor(format=parts[0].format, data=data, scale=torch.stack(scales) if scales else None)


def _check_values(param: TensorSpec, packed: PackedTensor, config: ModelConfig) -> None:
    data, scale = packed.data, packed.scale
    if scale is not None:
        largest, allowed = int(scale.max()), (E2M1 if packed.format == "mxfp4" else E4M3).max_scale_byte
        if largest > allowed:
            what = "NaN" if largest == SCALE_NAN else "an overflow of float32"
            raise CheckpointError(
                f"{scale_name(param.name)} holds byte {largest}, {what}; scales are 0..{allowed}. Fetch it again."
            )
    if packed.format == "fp8":
        is_finite = bool(((data.view(torch.uint8) & 0x7F) != 0x7F).all())
    else:
        is_finite = not data.is_floating_point() or bool(torch.isfinite(data).all())
    if not is_finite:
        raise CheckpointError(f"{param.name} holds a value that is not finite. Fetch it again.")
    if param.format == "int64":
        _check_expert_ids(param.name, data, config.n_routed_experts)


def _check_expert_ids(name: str, table_VK: torch.Tensor, num_experts: int) -> None:
    if int(table_VK.min()) < 0 or int(table_VK.max()) >= num_experts:
        raise CheckpointError(
            f"{name} holds ids from {int(table_VK.min())} to {int(table_VK.max())}; experts are 0..{num_experts - 1}. "
            "It was probably cast on the way; fetch it again."
        )
    ordered_VK = table_VK.sort(dim=-1).values
    repeated_V = (ordered_VK[:, 1:] == ordered_VK[:, :-1]).any(-1)
    if bool(repeated_V.any()):
        token = int(torch.nonzero(repeated_V)[0])
        raise CheckpointError(
            f"{name} names an expert twice for token {token}: {table_VK[token].tolist()}. Fetch it again."
        )


def read_packed(directory: Path, config: ModelConfig | None = None) -> dict[str, PackedTensor]:
    """Read a checkpoint and keep the stored bytes.

    Args:
        directory: the checkpoint's folder.
        config: its model; None reads the folder's config.json.

    Returns:
        Canonical name -> published bytes, experts stacked. Other tensors may be memory maps of the files: treat them as
        read-only, and never write into a checkpoint's files.

    Raises:
        CheckpointError: as `iter_checkpoint`. ConfigError: the config.json is refused.
    """
    config = load_model_config(directory) if config is None else config
    return {spec.name: packed for spec, packed in iter_checkpoint(directory, config)}


def read_checkpoint(directory: Path, config: ModelConfig | None = None) -> dict[str, torch.Tensor]:
    """Read a checkpoint as FP32 values, the masters that training starts from.

    Args:
        directory: the checkpoint's folder.
        config: its model; None reads the folder's config.json.

    Returns:
        Canonical name -> float32 tensor in its own memory (int64 for tid2eid), experts stacked.

    Raises:
        CheckpointError: as `iter_checkpoint`. ConfigError: the config.json is refused.
    """
    config = load_model_config(directory) if config is None else config
    values: dict[str, torch.Tensor] = {}
    for spec, packed in iter_checkpoint(directory, config):
        value = unpack_published(packed)
        values[spec.name] = value.clone() if value is packed.data else value
    return values


def write_checkpoint(
    directory: Path,
    config: ModelConfig,
    named: Mapping[str, PackedTensor | torch.Tensor],
    *,
    precision: Literal["published", "fp32"] = "published",
    max_shard_bytes: int = 2 * 2**30,
    extra_files: Mapping[str, bytes] | None = None,
) -> None:
    """Write a checkpoint in the official layout, whole or not at all.

    Everything is written into `.NAME.partial` beside the target, synced, and renamed; a leftover of a killed writer is
    replaced. No half-written folder ever has the target's name.

    Args:
        directory: the target; must not exist, its parent must.
        config: the model; becomes config.json.
        named: canonical name -> FP32 master (int64 for tid2eid) or published bytes, which are copied as they are. One
            entry is looked up at a time, so a lazy mapping keeps memory small.
        precision: published quantises masters to the published formats; fp32 writes every float tensor plain.
        max_shard_bytes: a shard is closed before it would exceed this; also the memory held while writing.
        extra_files: file name -> contents, for what must arrive together with the weights (tokenizer, encoding).

    Raises:
        CheckpointError: the target exists; names are missing, unknown or mis-shaped; the disk refuses.
        NonFiniteError: a master holds NaN or infinity; names the tensor.

    Invariants: the bytes depend on the arguments only.
    """
    if directory.exists():
        raise CheckpointError(
            f"{directory} exists; a checkpoint is never overwritten. Choose another name or remove it."
        )
    specs = param_specs(config)
    _check_named(specs, named)
    partial = directory.with_name(f".{directory.name}.partial")
    try:
        if partial.exists():
            shutil.rmtree(partial)
        partial.mkdir()
        writer = _ShardWriter(partial, max_shard_bytes)
        for spec in specs:
            writer.add(spec, _packed_for(spec, named[spec.name], precision))
        writer.finish()
        _write_synced(partial / "config.json", _json_bytes(config_json(config)))
        for name, contents in (extra_files or {}).items():
            _write_synced(partial / name, contents)
        sync_path(partial)
        partial.rename(directory)
        sync_path(directory.parent)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{directory} cannot be written: {error}. Check the disk; nothing was published."
        ) from error


def _check_named(specs: tuple[TensorSpec, ...], named: Mapping[str, PackedTensor | torch.Tensor]) -> None:
    names = {spec.name for spec in specs}
    missing, unknown = [name for name in names if name not in named], [name for name in named if name not in names]
    if missing or unknown:
        raise CheckpointError(
            f"missing: {name_some(sorted(missing))}; unknown: {name_some(sorted(unknown))}. "
            "Give exactly the tensors of param_specs(config)."
        )


def _packed_for(
    spec: TensorSpec, value: PackedTensor | torch.Tensor, precision: Literal["published", "fp32"]
) -> PackedTensor:
    if isinstance(value, PackedTensor):
        packed = value
        if precision == "fp32" and packed.format != "int64":
            packed = PackedTensor(format="fp32", data=unpack_published(packed))
    else:
        expected = torch.int64 if spec.format == "int64" else torch.float32
        if value.dtype != expected:
            raise CheckpointError(f"{spec.name} is {value.dtype}; it must be {expected}, and is never cast here.")
        plain = precision == "fp32" and spec.format != "int64"
        packed = pack_published(msgspec.structs.replace(spec, format="fp32") if plain else spec, value)
    columns = packed.data.shape[-1] * (2 if packed.format == "mxfp4" else 1)
    if (*packed.data.shape[:-1], columns) != spec.shape:
        raise CheckpointError(f"{spec.name} is {list(packed.data.shape)}; the configuration gives {list(spec.shape)}.")
    if _DTYPE_OF_FORMAT[packed.format] not in ACCEPTED_DTYPES[spec.format]:
        raise CheckpointError(f"{spec.name} is given as {packed.format}; a {spec.format} tensor cannot be stored so.")
    return packed


class _ShardWriter:
    """Collects stored tensors and writes a shard whenever the next one would not fit; `finish` writes the index."""

    def __init__(self, directory: Path, max_shard_bytes: int) -> None:
        self._directory = directory
        self._max_shard_bytes = max_shard_bytes
        self._pending: dict[str, torch.Tensor] = {}
        self._pending_bytes = 0
        self._shards: list[list[str]] = []
        self._total_bytes = 0

    def add(self, spec: TensorSpec, packed: PackedTensor) -> None:
        data = packed.data.detach().cpu()
        scale = None if packed.scale is None else packed.scale.cpu().view(torch.float8_e8m0fnu)
        if not is_stacked_expert(spec.name):
            self._add_stored(spec.name, data, scale)
            return
        for expert, part in enumerate(unstacked(spec)):
            self._add_stored(part.name, data[expert], None if scale is None else scale[expert])

    def _add_stored(self, name: str, data: torch.Tensor, scale: torch.Tensor | None) -> None:
        size = data.nbytes + (0 if scale is None else scale.nbytes)
        if self._pending and self._pending_bytes + size > self._max_shard_bytes:
            self._flush()
        self._pending[name] = data.contiguous()
        if scale is not None:
            self._pending[scale_name(name)] = scale.contiguous()
        self._pending_bytes += size
        self._total_bytes += size

    def _flush(self) -> None:
        file = self._directory / f"{len(self._shards)}.safetensors"
        save_file(self._pending, file, metadata={"format": "pt"})
        sync_path(file)
        self._shards.append(list(self._pending))
        self._pending, self._pending_bytes = {}, 0

    def finish(self) -> None:
        self._flush()
        weight_map: dict[str, str] = {}
        for number, names in enumerate(self._shards):
            file_name = f"model-{number + 1:05d}-of-{len(self._shards):05d}.safetensors"
            (self._directory / f"{number}.safetensors").rename(self._directory / file_name)
            weight_map.update(dict.fromkeys(names, file_name))
        index = {"metadata": {"total_size": self._total_bytes}, "weight_map": dict(sorted(weight_map.items()))}
        _write_synced(self._directory / INDEX_NAME, _json_bytes(index))


def _json_bytes(value: object) -> bytes:
    return (json.dumps(value, indent=2) + "\n").encode()


def _write_synced(file: Path, contents: bytes) -> None:
    file.write_bytes(contents)
    sync_path(file)


def sync_path(path: Path) -> None:
    """Make a file's bytes, or a folder's names, durable (fsync).

    Raises:
        OSError: the kernel's.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
