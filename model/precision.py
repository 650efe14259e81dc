"""Which number a weight has on its way from the FP32 master to forward, engine and checkpoint.

What lives here: `PackedTensor` (published bytes), packing and unpacking, and the straight-through value that the
learner's forward uses. One law ties them: `unpack_published(pack_published(spec, m))` equals
`published_value(spec.format, m)` bit for bit, so the weights trained are the weights sampled.
What does not: the formats' arithmetic (`kernels/quant`), which tensor has which format (`shapes.py`).
"""

from typing import NoReturn

import msgspec
import torch

from rollforward.kernels.errors import NonFiniteError
from rollforward.kernels.quant.bf16 import fake_quant_bf16
from rollforward.kernels.quant.fp8 import fake_quant_fp8_block, fp8_block_dequantise, fp8_block_quantise
from rollforward.kernels.quant.mxfp4 import fake_quant_mxfp4, mxfp4_dequantise, mxfp4_quantise_counted
from rollforward.model.errors import WeightShapeError
from rollforward.model.shapes import TensorFormat, TensorSpec


class PackedTensor(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A tensor as it is published: the bytes that engines load and checkpoints store."""

    format: TensorFormat
    """How `data` and `scale` are to be read."""
    data: torch.Tensor
    """mxfp4: int8 [..., K/2]; fp8: float8_e4m3fn; bf16, fp32, int64: that dtype."""
    scale: torch.Tensor | None = None
    """mxfp4: uint8 [..., K/32]; fp8: uint8 [..., R/128, K/128] rounded up; otherwise None."""

    @property
    def num_bytes(self) -> int:
        """Bytes of data and scale."""
        return self.data.nbytes + (0 if self.scale is None else self.scale.nbytes)


def pack_published(spec: TensorSpec, master: torch.Tensor) -> PackedTensor:
    """Quantise an FP32 master to its published format; `pack_counted` without the count."""
    return pack_counted(spec, master)[0]


def pack_counted(spec: TensorSpec, master: torch.Tensor) -> tuple[PackedTensor, int]:
    """Quantise an FP32 master to its published format.

    Args:
        spec: name, shape and format of the tensor.
        master: float32 of spec.shape; for format int64 an int64 tensor, which is never cast.

    Returns:
        The published bytes, detached and contiguous, and how many FP4 groups the clamped-group policy raised. fp32 and
        int64 share storage with `master` if it is contiguous.

    Raises:
        NonFiniteError: the master holds NaN or infinity, or overflows BF16; names the tensor.

    Invariants: deterministic; `unpack_published` of it is bit-equal to `published_value(spec.format, master)`.
    """
    tensor = master.detach()
    if spec.format == "int64":
        return PackedTensor(format="int64", data=tensor.contiguous()), 0
    scale, num_clamped = None, 0
    try:
        if spec.format == "mxfp4":
            data, scale, num_clamped = mxfp4_quantise_counted(tensor)
        elif spec.format == "fp8":
            data, scale = fp8_block_quantise(tensor)
        else:
            data = tensor.to(torch.bfloat16) if spec.format == "bf16" else tensor
            if not bool(torch.isfinite(data).all()):
                _raise_non_finite(data)
    except NonFiniteError as error:
        raise NonFiniteError(f"{spec.name}: {error}") from error
    return PackedTensor(format=spec.format, data=data.contiguous(), scale=scale), num_clamped


def unpack_published(packed: PackedTensor) -> torch.Tensor:
    """Return the exact value of published bytes: float32 (int64 stays int64)."""
    if packed.format == "mxfp4":
        return mxfp4_dequantise(packed.data, _scale_of(packed))
    if packed.format == "fp8":
        return fp8_block_dequantise(packed.data, _scale_of(packed))
    if packed.format == "int64":
        return packed.data
    return packed.data.to(torch.float32)


def unpack_into(target: torch.Tensor, packed: PackedTensor) -> None:
    """Write the exact value of published bytes into a tensor that exists, one matrix of a stack at a time.

    Args:
        target: float32 (int64 for tables), of the value's shape; keeps its memory.
        packed: the bytes.

    Raises:
        WeightShapeError: the value has another shape or type; nothing is cast or broadcast.
    """
    columns = packed.data.shape[-1] * (2 if packed.format == "mxfp4" else 1)
    expected = torch.int64 if packed.format == "int64" else torch.float32
    if target.dtype != expected or tuple(target.shape) != (*packed.data.shape[:-1], columns):
        raise WeightShapeError(
            f"a {packed.format} value of {[*packed.data.shape[:-1], columns]} was given for a {target.dtype} tensor of"
            f" {list(target.shape)}; it is never cast. Publish this model's weights"
        )
    if packed.scale is None:
        target.copy_(packed.data)  # BF16 becomes float32 on the way, exactly
    elif packed.data.dim() == 2:
        target.copy_(unpack_published(packed))
    else:
        for row, data, scale in zip(target, packed.data, packed.scale, strict=True):
            unpack_into(row, PackedTensor(format=packed.format, data=data, scale=scale))


def published_value(tensor_format: TensorFormat, master: torch.Tensor) -> torch.Tensor:
    """Return dequantise(quantise(master)) as float32, with the gradient of the identity.

    Args:
        tensor_format: the tensor's published format.
        master: float32 of any shape that the format takes; int64 comes back as it is.

    Returns:
        Same shape. fp32 and int64 are returned uncopied.

    Raises:
        NonFiniteError: a master to be quantised to mxfp4 or fp8 holds NaN or infinity.

    Invariants: bits equal those of the packed form, with or without a recorded gradient; saves no tensor.
    """
    if tensor_format == "mxfp4":
        return fake_quant_mxfp4(master)
    if tensor_format == "fp8":
        return fake_quant_fp8_block(master)
    if tensor_format == "bf16":
        return fake_quant_bf16(master)
    return master


def _scale_of(packed: PackedTensor) -> torch.Tensor:
    assert packed.scale is not None, f"a {packed.format} tensor without scales"
    return packed.scale


def _raise_non_finite(data: torch.Tensor) -> NoReturn:
    bad = torch.nonzero(~torch.isfinite(data))[0].tolist()
    raise NonFiniteError(
        f"the master holds {data[tuple(bad)].item()} at {bad} once in {str(data.dtype).removeprefix('torch.')}; "
        "weights must be finite. Stop before publishing and look at the step that wrote it."
    )
