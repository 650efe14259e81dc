"""Fingerprints of weights: a digest of the canonical packed bytes of each tensor, on both sides of a sync.

    publisher  value --pack--> canonical bytes --> file, fingerprint in the manifest
    engine     value that its forward reads --pack--> canonical bytes --> fingerprint in its acknowledgement

Canonical bytes are a function of the value: what packing it gives. An engine that holds values therefore shows the
fingerprint of a file without having the file, and a scale that was never written or a table that was cast shows
another. A large tensor is packed piece by piece, so that the bytes of no tensor are in memory beside its value.

What does not live here: packing (`precision.py`), manifests and what is done with them (rollout/weights.py).
"""

import hashlib
from collections.abc import Iterator
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor

from rollforward.kernels.errors import NonFiniteError
from rollforward.model.precision import PackedTensor, pack_published, unpack_published
from rollforward.model.shapes import TensorFormat, TensorSpec, unstacked

HASH_BYTES = 16
"""Fingerprints are BLAKE2b of 128 bits."""

INEXACT = "not a value of its format"
"""Stands for the fingerprint of a value that packing changes: nothing that was published unpacks to it."""

_PIECE_ELEMENTS = 2**22


class Fingerprint:
    """Digest over format, shape, and then data and scale of each official tensor of a canonical one, in order."""

    def __init__(self, tensor_format: TensorFormat, shape: tuple[int, ...]) -> None:
        """Begin with the canonical tensor's format and shape."""
        self._digest = hashlib.blake2b(f"{tensor_format} {list(shape)}".encode(), digest_size=HASH_BYTES)

    def add(self, packed: PackedTensor) -> None:
        """Add the next official tensor, or of a plain one the next run of elements."""
        for part in (packed.data,) if packed.scale is None else (packed.data, packed.scale):
            self._digest.update(part.contiguous().reshape(-1).view(torch.uint8).numpy().data)

    def hex(self) -> str:
        """Return the digest of what was added."""
        return self._digest.hexdigest()


class Piece(NamedTuple):
    """An official tensor, or a run of elements of a plain one."""

    name: str
    """The official tensor."""
    start_bytes: int
    """Where in its data the piece begins."""
    packed: PackedTensor
    """Canonical bytes."""
    is_exact: bool
    """Whether they unpack to the value, bit for bit."""


def packed_pieces(spec: TensorSpec, value: Tensor) -> Iterator[Piece]:
    """Yield the canonical bytes of a value, a piece at a time.

    Args:
        spec: an official tensor, with the format that it is to be packed in.
        value: float32 (int64 tables: int64) of its shape.

    Raises:
        NonFiniteError: the value holds NaN or infinity; names the tensor.
    """
    if spec.format in ("mxfp4", "fp8"):
        yield _piece(spec, 0, value)
        return
    start_bytes = 0
    for run in value.detach().reshape(-1).split(_PIECE_ELEMENTS):
        piece = _piece(spec, start_bytes, run)
        start_bytes += piece.packed.data.nbytes
        yield piece


def _piece(spec: TensorSpec, start_bytes: int, value: Tensor) -> Piece:
    packed = pack_published(spec, value)
    return Piece(spec.name, start_bytes, packed, is_same_value(unpack_published(packed), value))


def is_same_value(left: Tensor, right: Tensor) -> bool:
    """Whether two tensors are equal in type, shape and every bit: a zero's sign counts, and NaN is equal to itself."""
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    bits = torch.int64 if left.dtype == torch.int64 else torch.int32
    return torch.equal(left.detach().view(bits), right.detach().view(bits))


def value_fingerprint(spec: TensorSpec, value: Tensor) -> str:
    """Return the fingerprint of a value that a forward reads.

    Args:
        spec: the canonical tensor, with the format that it was published in.
        value: of that shape, experts stacked.

    Returns:
        What the manifest says of the bytes that the value was unpacked from; INEXACT where no bytes unpack to it.
    """
    expected = torch.int64 if spec.format == "int64" else torch.float32
    if value.dtype != expected or tuple(value.shape) != spec.shape:
        return INEXACT
    fingerprint = Fingerprint(spec.format, spec.shape)
    parts = unstacked(spec)
    for index, part in enumerate(parts):
        try:
            for piece in packed_pieces(part, value[index] if len(value.shape) > len(part.shape) else value):
                if not piece.is_exact:
                    return INEXACT
                fingerprint.add(piece.packed)
        except NonFiniteError:
            return INEXACT
    return fingerprint.hex()


def with_format(spec: TensorSpec, tensor_format: TensorFormat) -> TensorSpec:
    """Return the spec of a tensor that is published in another format than its own."""
    return spec if spec.format == tensor_format else msgspec.structs.replace(spec, format=tensor_format)
