"""OCI image layouts on disk: which blobs an image is stacked of, and each of them checked and unpacked.

    DIR/oci-layout, DIR/index.json --> index ... --> manifest --> layers      DIR/blobs/sha256/9f86d0...

Of several images in a layout the one for this machine's processor is taken, and of several of these the one that is
named: `DIR#NAME`, after its annotation `org.opencontainers.image.ref.name`. Every blob's size and digest is compared
with what leads to it, and an unpacked layer's with the image's configuration, before anything of it counts. What the
image says of users, environment and entry point is not used.
"""

import hashlib
import platform
import re
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

import msgspec

from rollforward.sandbox.errors import LayerError
from rollforward.sandbox.files import read_regular
from rollforward.sandbox.layers_archive import Hashed, decompressed, open_archive, unpack
from rollforward.sandbox.layers_tree import Bounds, TreeWriter

MARK: Final = "oci-layout"
"""A directory with this file is a layout."""

_MAX_JSON_BYTES: Final = 4 << 20
_MAX_DEPTH: Final = 4
_DIGEST: Final = re.compile(r"(sha256):([0-9a-f]{64})|(sha512):([0-9a-f]{128})")
_NAME: Final = "org.opencontainers.image.ref.name"
_MACHINES: Final = {"x86_64": "amd64", "aarch64": "arm64"}

_T = TypeVar("_T")


class _Platform(msgspec.Struct, frozen=True):
    architecture: str = ""
    os: str = ""


class _Descriptor(msgspec.Struct, frozen=True, rename="camel"):
    digest: str
    size: int
    media_type: str = ""
    platform: _Platform | None = None
    annotations: dict[str, str] | None = None


class _Index(msgspec.Struct, frozen=True):
    manifests: list[_Descriptor]


class _Manifest(msgspec.Struct, frozen=True):
    config: _Descriptor
    layers: list[_Descriptor]


class _Root(msgspec.Struct, frozen=True):
    diff_ids: list[str]


class _Config(msgspec.Struct, frozen=True):
    rootfs: _Root


class OciLayer(NamedTuple):
    """A layer of an image."""

    blob: Path
    """Its archive."""
    digest: str
    """Of that, such as `sha256:9f86d0...`."""
    size_bytes: int
    """Of that."""
    diff_id: str
    """Digest of the archive without its compression."""


def oci_layers(layout: Path, name: str) -> list[OciLayer]:
    """The layers of an image, the lowest first.

    Args:
        layout: the directory.
        name: of the image; empty: the only one for this machine.

    Raises:
        LayerError: there is none, or a blob that leads to it is damaged.
    """
    found = list(dict.fromkeys(_manifests(layout, _read(layout / "index.json", _Index).manifests, name, 0)))
    if len(found) != 1:
        which = f" named {name!r}" if name else ""
        raise LayerError(
            f"there are {len(found)} images{which} for this machine ({_machine()}) in it. Name one of them: DIR#NAME,"
            f" after {_NAME}"
        )
    manifest = _blob_json(layout, found[0], _Manifest)
    diff_ids = _blob_json(layout, manifest.config, _Config).rootfs.diff_ids
    if len(diff_ids) != len(manifest.layers) or not diff_ids:
        raise LayerError(f"its manifest has {len(manifest.layers)} layers and its configuration {len(diff_ids)}")
    return [
        OciLayer(_blob(layout, layer.digest), layer.digest, layer.size, _checked(diff_id))
        for layer, diff_id in zip(manifest.layers, diff_ids, strict=True)
    ]


def unpack_oci(layer: OciLayer, writer: TreeWriter, bounds: Bounds) -> None:
    """Write an image's layer.

    Raises:
        LayerError: the blob is not what leads to it, or holds what a layer may not.
        OSError: the tree cannot be written.
    """
    with open_archive(layer.blob) as file:
        raw = Hashed(file, layer.digest.partition(":")[0], max(bounds.max_bytes, layer.size_bytes))
        unpacked = unpack(decompressed(file, raw), writer, bounds)
        raw.drain()
    _check(layer.digest, f"{layer.digest.partition(':')[0]}:{raw.hexdigest()}", layer.size_bytes, raw.total)
    if layer.diff_id != f"sha256:{unpacked}":
        raise LayerError(f"layer {layer.digest} unpacks to sha256:{unpacked}, and the image says {layer.diff_id}")


def _manifests(layout: Path, descriptors: list[_Descriptor], name: str, depth: int) -> list[_Descriptor]:
    """Manifests for this machine below some descriptors."""
    found: list[_Descriptor] = []
    for descriptor in descriptors:
        if name and (descriptor.annotations or {}).get(_NAME) != name:
            continue
        at = descriptor.platform
        if at is not None and (at.os, at.architecture) != ("linux", _machine()):
            continue
        if "index" in descriptor.media_type or "manifest.list" in descriptor.media_type:
            if depth >= _MAX_DEPTH:
                raise LayerError("its indexes lead to each other")
            below = _blob_json(layout, descriptor, _Index).manifests
            found += _manifests(layout, below, "", depth + 1)
        else:
            found.append(_plain(descriptor))
    return found


def _plain(descriptor: _Descriptor) -> _Descriptor:
    """Without what two entries of one image may differ in."""
    return msgspec.structs.replace(descriptor, platform=None, annotations=None)


def _blob_json(layout: Path, descriptor: _Descriptor, kind: type[_T]) -> _T:
    path = _blob(layout, descriptor.digest)
    data = _bytes(path)
    algorithm = descriptor.digest.partition(":")[0]
    _check(descriptor.digest, f"{algorithm}:{hashlib.new(algorithm, data).hexdigest()}", descriptor.size, len(data))
    return _decoded(data, path, kind)


def _check(digest: str, found: str, size: int, found_size: int) -> None:
    if (digest, size) != (found, found_size):
        raise LayerError(f"blob {digest} of {size} bytes is {found} of {found_size} bytes: it is damaged. Get it again")


def _read(path: Path, kind: type[_T]) -> _T:
    return _decoded(_bytes(path), path, kind)


def _bytes(path: Path) -> bytes:
    try:
        return read_regular(path, max_bytes=_MAX_JSON_BYTES)
    except OSError as error:
        raise LayerError(f"{path} cannot be read: {error.strerror or error}") from None


def _decoded(data: bytes, path: Path, kind: type[_T]) -> _T:
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise LayerError(f"{path} is not what a layout has there: {error}") from None


def _blob(layout: Path, digest: str) -> Path:
    algorithm, _, name = _checked(digest).partition(":")
    return layout / "blobs" / algorithm / name


def _checked(digest: Any) -> str:
    if _DIGEST.fullmatch(digest) is None:
        raise LayerError(f"{digest[:100]!r} is no digest; one reads sha256: and 64 hexadecimal digits")
    return digest


def _machine() -> str:
    return _MACHINES.get(platform.machine(), platform.machine())
