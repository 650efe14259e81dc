"""A saved state as bytes: a safetensors file of one sequence's planes, and the manifest that vouches for it.

A manifest carries its own digest, a CRC-32C of the header and of every plane (together each byte of the file of
planes), a digest of the very tokens that the state stands for, and a fingerprint of what else must be the same.

Here: pure functions, between planes and bytes. Not here: cache storage and the directory (kv_store.py).
"""

import hashlib
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

import google_crc32c
import msgspec
import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from rollforward.model.cache import Plane, allocate_cache, block_tokens, cache_planes
from rollforward.model.config import ModelConfig
from rollforward.model.train_config import Precision
from rollforward.rollout.types import RequestId

_FORMAT = 2
_DIGEST_BYTES = 16
_HEADER_LENGTH_BYTES = 8


class WeightsId(NamedTuple):
    """Which weights computed something."""

    policy_version: int
    """Their number."""
    digest: str
    """`weights_digest` of them: others may come under the same number, from another model directory."""


class KvManifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a file of planes is, and the checksums that it must have."""

    format: int
    """Version of this record."""
    request: str
    """Identity of the request."""
    attempt: int
    """Its attempt."""
    weights: WeightsId
    """Weights that computed the planes."""
    num_cached: int
    """Tokens that they stand for."""
    tokens: str
    """BLAKE2b of those tokens."""
    fingerprint: str
    """`KvStore.fingerprint` of the store that wrote it."""
    file_bytes: int
    """Size of the file of planes."""
    header_crc: int
    """CRC-32C of the file up to the first plane."""
    plane_crc: dict[str, int]
    """CRC-32C of every plane's bytes."""


class KvLayout(NamedTuple):
    """What the planes of a sequence must look like."""

    planes: tuple[tuple[Plane, torch.dtype], ...]
    """Every plane with the format that the cache holds it in."""
    block_tokens: int
    """Tokens of a cache block."""

    def shapes(self, num_cached: int) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Return format and shape of every plane of a sequence with that many tokens in the cache."""
        return {
            plane.name: (
                dtype,
                (plane.rows if plane.kind == "state" else num_cached * plane.rows // self.block_tokens, plane.width),
            )
            for plane, dtype in self.planes
        }


def layout_of(config: ModelConfig) -> KvLayout:
    """Return the layout of a model's cache."""
    with torch.device("meta"):
        storage = allocate_cache(config, num_slots=1, num_blocks=1)
    planes = tuple((plane, storage[plane.name].dtype) for plane in cache_planes(config))
    return KvLayout(planes, block_tokens(config))


def fingerprint_of(config: ModelConfig, precision: Precision, layout: KvLayout) -> str:
    """Return the BLAKE2b of all but weights and tokens that a state's numbers depend on: model, layout, precision, and
    the version of the arithmetic."""
    planes = [(plane.name, plane.kind, plane.rows, plane.width, str(dtype)) for plane, dtype in layout.planes]
    everything = (_FORMAT, config, precision, planes, layout.block_tokens, str(torch.__version__))
    return hashlib.blake2b(msgspec.json.encode(everything, order="sorted"), digest_size=_DIGEST_BYTES).hexdigest()


def weights_digest(fingerprints: Mapping[str, str]) -> str:
    """Return the BLAKE2b of all weights from the fingerprint of each, by canonical name."""
    return hashlib.blake2b(msgspec.json.encode(fingerprints, order="sorted"), digest_size=_DIGEST_BYTES).hexdigest()


def tokens_digest(token_ids: SequenceOf[int]) -> str:
    """Return BLAKE2b of token ids as int32, little-endian."""
    return hashlib.blake2b(np.asarray(token_ids, dtype="<i4").tobytes(), digest_size=_DIGEST_BYTES).hexdigest()


def encode_state(
    planes: Mapping[str, Tensor],
    *,
    request_id: RequestId,
    attempt: int,
    weights: WeightsId,
    num_cached: int,
    token_ids: SequenceOf[int],
    fingerprint: str,
) -> tuple[bytes, KvManifest]:
    """Return the file of planes and its manifest. Arguments as of ``KvStore.save``."""
    data = save({name: plane.contiguous() for name, plane in planes.items()})
    manifest = KvManifest(
        format=_FORMAT,
        request=str(request_id),
        attempt=attempt,
        weights=weights,
        num_cached=num_cached,
        tokens=tokens_digest(token_ids[:num_cached]),
        fingerprint=fingerprint,
        file_bytes=len(data),
        header_crc=google_crc32c.value(_header(data)),
        plane_crc={name: _crc(plane) for name, plane in planes.items()},
    )
    return data, manifest


def decode_planes(data: bytes, manifest: KvManifest, layout: KvLayout) -> dict[str, Tensor] | None:
    """Return the planes of a file whose every byte is as it was written and which fit the layout; None for another."""
    if len(data) != manifest.file_bytes or google_crc32c.value(_header(data)) != manifest.header_crc:
        return None
    try:
        planes = load(data)
    except (SafetensorError, ValueError, KeyError, RuntimeError):
        return None
    found = {name: (plane.dtype, tuple(plane.shape)) for name, plane in planes.items()}
    if found != layout.shapes(manifest.num_cached):
        return None
    return planes if {name: _crc(plane) for name, plane in planes.items()} == manifest.plane_crc else None


def _header(data: bytes) -> bytes:
    """Return what stands before the first plane: the header's length and the header."""
    return data[: _HEADER_LENGTH_BYTES + int.from_bytes(data[:_HEADER_LENGTH_BYTES], "little")]


def _crc(plane: Tensor) -> int:
    return google_crc32c.value(plane.contiguous().view(torch.uint8).numpy().tobytes())


def encode_manifest(manifest: KvManifest) -> bytes:
    """Return the bytes of a manifest: a line of JSON, a line with its digest."""
    body = msgspec.json.encode(manifest)
    return body + b"\n" + _body_digest(body) + b"\n"


def decode_manifest(content: bytes) -> KvManifest | None:
    """Return the record, or None where its checksum does not hold, or where it is of another version."""
    body, _, digest = content.partition(b"\n")
    if digest != _body_digest(body) + b"\n":
        return None
    try:
        manifest = msgspec.json.decode(body, type=KvManifest)
    except msgspec.MsgspecError:
        return None
    return manifest if manifest.format == _FORMAT else None


def _body_digest(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=_DIGEST_BYTES).hexdigest().encode()
