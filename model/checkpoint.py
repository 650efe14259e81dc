"""Checkpoints in the official layout: reading (files -> canonical tensors) and atomic writing.

A checkpoint is a folder with `config.json` and either one `*.safetensors` file or shards with
`model.safetensors.index.json`. One stored tensor is in memory at a time; plain BF16 or FP32 is accepted wherever the
official file has another float format.

What does not live here: header checks (`checkpoint_headers.py`), files (`safetensors_stream.py`), folders
(`checkpoint_writer.py`), names and shapes (`shapes.py`), packing (`precision.py`), other layouts (`convert.py`),
building a model (`weights.py`).
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal

import msgspec
import torch

from rollforward.kernels.quant.formats import E2M1, E4M3, SCALE_NAN
from rollforward.model.checkpoint_headers import (
    ACCEPTED_DTYPES,
    FORMAT_OF_DTYPE,
    check_entries,
    load_checkpoint_config,
    name_some,
    naming,
    scan_checkpoint,
)
from rollforward.model.checkpoint_writer import MAX_SHARD_BYTES, CheckpointWriter, check_target, json_bytes
from rollforward.model.config import ModelConfig, config_json
from rollforward.model.errors import CheckpointError
from rollforward.model.precision import PackedTensor, pack_published, unpack_published
from rollforward.model.safetensors_stream import StoredEntry, TensorReader, sync_path
from rollforward.model.shapes import (
    TensorFormat,
    TensorSpec,
    is_stacked_expert,
    param_specs,
    scale_name,
    stored_form,
    unstacked,
)

__all__ = [
    "iter_checkpoint",
    "iter_stored",
    "read_checkpoint",
    "read_packed",
    "read_stored",
    "sync_path",
    "write_checkpoint",
    "write_stored",
]

_DTYPE_OF_FORMAT = {tensor_format: dtype for dtype, tensor_format in FORMAT_OF_DTYPE.items()}

_CHECKED_ELEMENTS = 2**20
"""How many elements are looked at together, since looking needs memory of its own."""


def iter_stored(directory: Path, config: ModelConfig) -> Iterator[tuple[TensorSpec, PackedTensor]]:
    """Yield every tensor in its stored form, an expert's matrix by itself, one in memory at a time.

    Args:
        directory: the checkpoint's folder.
        config: its model.

    Yields:
        (spec, packed) in the order of `tensor_specs`: packed.format is the format found in the file, which may be plain
        where spec.format is not.

    Raises:
        CheckpointError: as `scan_checkpoint` and `check_entries`; non-finite values or scales; token-to-expert tables
            with ids out of range or repeated; experts of one layer in different formats; scales that are no powers of
            two.
    """
    entries = scan_checkpoint(directory)
    check_entries(entries, config)
    with TensorReader() as reader:
        for param in param_specs(config):
            for spec in unstacked(param):
                yield spec, read_stored(reader, entries, spec, config)


def read_stored(
    reader: TensorReader, entries: Mapping[str, StoredEntry], spec: TensorSpec, config: ModelConfig
) -> PackedTensor:
    """Read and check one tensor of a checkpoint whose headers were checked.

    Args:
        reader: open files. entries: from `scan_checkpoint`. spec: of `tensor_specs`. config: the model.

    Raises:
        CheckpointError: as `iter_stored`.
    """
    with naming(entries):
        return _read_stored(reader, entries, spec, config)


def _read_stored(
    reader: TensorReader, entries: Mapping[str, StoredEntry], spec: TensorSpec, config: ModelConfig
) -> PackedTensor:
    tensor_format = FORMAT_OF_DTYPE[entries[spec.name].dtype]
    scale = None
    if tensor_format in ("mxfp4", "fp8"):
        scale_entry = entries[scale_name(spec.name)]
        scale = reader.read(scale_entry)
        if scale_entry.dtype == "F32":
            scale = _scale_bytes(scale_name(spec.name), scale)
    packed = PackedTensor(format=tensor_format, data=reader.read(entries[spec.name]), scale=scale)
    _check_values(spec, packed, config)
    return packed


def _scale_bytes(name: str, scale: torch.Tensor) -> torch.Tensor:
    """The bytes of scales that are stored as numbers: their exponents, if they have nothing else."""
    bits = scale.view(torch.int32)
    exponent = bits >> 23  # a negative one stays negative
    wrong = (bits & 0x007FFFFF != 0) | (exponent <= 0) | (exponent >= SCALE_NAN)
    if bool(wrong.any()):
        raise CheckpointError(
            f"{name} holds {float(scale[wrong][0])!r}; scales that are stored as numbers must be powers of two, since"
            " the official layout has only their exponents. A checkpoint with other scales cannot be read without"
            " changing its weights; store it as BF16, or quantise it anew with power-of-two scales."
        )
    return exponent.to(torch.uint8)


def iter_checkpoint(directory: Path, config: ModelConfig) -> Iterator[tuple[TensorSpec, PackedTensor]]:
    """Yield every canonical tensor in its stored form, in the order of `param_specs`, one in memory at a time.

    Args:
        directory: the checkpoint's folder.
        config: its model.

    Yields:
        (spec, packed): as `iter_stored`, with a layer's experts stacked.

    Raises:
        CheckpointError: as `iter_stored`.
    """
    stored = iter_stored(directory, config)
    for param in param_specs(config):
        if not is_stacked_expert(param.name):
            yield param, next(stored)[1]
            continue
        # Filled as they are read, so that beside the stack there is one expert.
        first = next(stored)[1]
        stack = PackedTensor(
            format=first.format,
            data=first.data.new_empty((param.shape[0], *first.data.shape)),
            scale=None if first.scale is None else first.scale.new_empty((param.shape[0], *first.scale.shape)),
        )
        for expert in range(param.shape[0]):
            packed = first if expert == 0 else next(stored)[1]
            stack.data[expert] = packed.data
            if stack.scale is not None and packed.scale is not None:
                stack.scale[expert] = packed.scale
        yield param, stack


def _check_values(param: TensorSpec, packed: PackedTensor, config: ModelConfig) -> None:
    data, scale = packed.data, packed.scale
    if scale is not None:
        largest, allowed = int(scale.max()), (E2M1 if packed.format == "mxfp4" else E4M3).max_scale_byte
        if largest > allowed:
            what = "NaN" if largest == SCALE_NAN else "an overflow of float32"
            raise CheckpointError(
                f"{scale_name(param.name)} holds byte {largest}, {what}; scales are 0..{allowed}. Fetch it again."
            )
    if not all(_is_finite(part) for part in data.view(-1).split(_CHECKED_ELEMENTS)):
        raise CheckpointError(f"{param.name} holds a value that is not finite. Fetch it again.")
    if param.format == "int64":
        _check_expert_ids(param.name, data, config.n_routed_experts)


def _is_finite(data: torch.Tensor) -> bool:
    if data.dtype == torch.float8_e4m3fn:
        return bool(((data.view(torch.uint8) & 0x7F) != 0x7F).all())
    return not data.is_floating_point() or bool(torch.isfinite(data).all())


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
        Canonical name -> published bytes in memory of their own, experts stacked.

    Raises:
        CheckpointError: as `iter_checkpoint`. ConfigError: the config.json is refused.
    """
    config = load_checkpoint_config(directory) if config is None else config
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
    config = load_checkpoint_config(directory) if config is None else config
    values: dict[str, torch.Tensor] = {}
    for spec, packed in iter_checkpoint(directory, config):
        values[spec.name] = unpack_published(packed)
    return values


def write_checkpoint(
    directory: Path,
    config: ModelConfig,
    named: Mapping[str, PackedTensor | torch.Tensor],
    *,
    precision: Literal["published", "fp32"] = "published",
    max_shard_bytes: int = MAX_SHARD_BYTES,
    extra_files: Mapping[str, bytes] | None = None,
) -> None:
    """Write a checkpoint in the official layout, whole or not at all.

    Everything is written into `.NAME.partial` beside the target, synced, and renamed; a leftover of a killed writer is
    replaced. No half-written folder ever has the target's name.

    Args:
        directory: the target; must not exist, its parent must.
        config: the model; becomes config.json.
        named: canonical name -> FP32 master (int64 for tid2eid) or published bytes, which are copied as they are. An
            entry is looked up for its format, later for its contents, so a lazy mapping keeps memory small.
        precision: published quantises masters to the published formats; fp32 writes every float tensor plain.
        max_shard_bytes: a shard is closed before its data would exceed this.
        extra_files: file name -> contents, for what must arrive together with the weights (tokenizer, encoding).

    Raises:
        CheckpointError: the target exists; names are missing, unknown or mis-shaped; the disk refuses.
        NonFiniteError: a master holds NaN or infinity; names the tensor.

    Invariants: the bytes depend on the arguments only. Beside what `named` holds, one stored tensor is in memory.
    """
    check_target(directory)
    specs = param_specs(config)
    _check_named(specs, named)
    stored = {spec.name: _stored_spec(spec, named[spec.name], precision) for spec in specs}
    groups = [stored_form(part) for spec in specs for part in unstacked(stored[spec.name])]
    with CheckpointWriter(directory, groups, max_shard_bytes=max_shard_bytes) as writer:
        for spec in specs:
            value = named[spec.name]
            _check_given(spec, value, stored[spec.name].format)
            parts = unstacked(stored[spec.name])
            for index, part in enumerate(parts):
                given = value if len(parts) == 1 and part.name == spec.name else _expert_of(value, index)
                write_stored(writer, part, _packed_as(part, given))
        writer.publish({"config.json": json_bytes(config_json(config)), **(extra_files or {})})


def write_stored(writer: CheckpointWriter, spec: TensorSpec, packed: PackedTensor) -> None:
    """Write an official tensor, and its scales, under official names.

    Args:
        writer: made with `stored_form(spec)`. spec: of packed.format. packed: its bytes.

    Raises:
        CheckpointError: the disk refuses.
    """
    writer.write(spec.name, packed.data)
    if packed.scale is not None:
        writer.write(scale_name(spec.name), packed.scale)


def _check_named(specs: tuple[TensorSpec, ...], named: Mapping[str, PackedTensor | torch.Tensor]) -> None:
    names = {spec.name for spec in specs}
    missing, unknown = [name for name in names if name not in named], [name for name in named if name not in names]
    if missing or unknown:
        raise CheckpointError(
            f"missing: {name_some(sorted(missing))}; unknown: {name_some(sorted(unknown))}. "
            "Give exactly the tensors of param_specs(config)."
        )


def _stored_spec(
    spec: TensorSpec, value: PackedTensor | torch.Tensor, precision: Literal["published", "fp32"]
) -> TensorSpec:
    """The spec of what is written for a value."""
    tensor_format: TensorFormat = value.format if isinstance(value, PackedTensor) else spec.format
    if precision == "fp32" and tensor_format != "int64":
        tensor_format = "fp32"
    if _DTYPE_OF_FORMAT[tensor_format] not in ACCEPTED_DTYPES[spec.format]:
        raise CheckpointError(f"{spec.name} is given as {tensor_format}; a {spec.format} tensor cannot be stored so.")
    return msgspec.structs.replace(spec, format=tensor_format)


def _check_given(spec: TensorSpec, value: PackedTensor | torch.Tensor, tensor_format: TensorFormat) -> None:
    data, is_packed = (value.data, True) if isinstance(value, PackedTensor) else (value, False)
    expected = torch.int64 if tensor_format == "int64" else torch.float32
    if not is_packed and data.dtype != expected:
        raise CheckpointError(f"{spec.name} is {data.dtype}; it must be {expected}, and is never cast here.")
    columns = data.shape[-1] * (2 if isinstance(value, PackedTensor) and value.format == "mxfp4" else 1)
    if (*data.shape[:-1], columns) != spec.shape:
        raise CheckpointError(f"{spec.name} is {list(data.shape)}; the configuration gives {list(spec.shape)}.")


def _expert_of(value: PackedTensor | torch.Tensor, expert: int) -> PackedTensor | torch.Tensor:
    if not isinstance(value, PackedTensor):
        return value[expert]
    scale = None if value.scale is None else value.scale[expert]
    return PackedTensor(format=value.format, data=value.data[expert], scale=scale)


def _packed_as(spec: TensorSpec, value: PackedTensor | torch.Tensor) -> PackedTensor:
    """A value as it is stored; bytes of another format, which is FP32 then, are unpacked."""
    if not isinstance(value, PackedTensor):
        return pack_published(spec, value)
    return value if value.format == spec.format else PackedTensor(format="fp32", data=unpack_published(value))
