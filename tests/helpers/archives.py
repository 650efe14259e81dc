"""Archives and OCI layouts for tests of layers, honest and hostile."""

import gzip
import hashlib
import io
import json
import platform
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow

MACHINE = {"x86_64": "amd64", "aarch64": "arm64"}[platform.machine()]
NAME = "org.opencontainers.image.ref.name"


def member(name: str, data: bytes = b"", **fields: Any) -> tuple[tarfile.TarInfo, bytes]:
    """A member of an archive; a regular file if nothing else is said."""
    info = tarfile.TarInfo(name)
    info.size, info.mode, info.mtime = len(data), 0o644, 1_700_000_000
    for key, value in fields.items():
        setattr(info, key, value)
    return info, data


def folder(name: str, mode: int = 0o755) -> tuple[tarfile.TarInfo, bytes]:
    return member(name, type=tarfile.DIRTYPE, mode=mode)


def link(name: str, target: str, *, is_hard: bool = False) -> tuple[tarfile.TarInfo, bytes]:
    return member(name, type=tarfile.LNKTYPE if is_hard else tarfile.SYMTYPE, linkname=target)


def tar(*members: tuple[tarfile.TarInfo, bytes], form: int = tarfile.PAX_FORMAT) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=form) as archive:
        for info, data in members:
            archive.addfile(info, io.BytesIO(data) if info.isreg() else None)
    return buffer.getvalue()


def zstd(data: bytes) -> bytes:
    return pyarrow.compress(data, codec="zstd", asbytes=True)


class Layout:
    """An OCI layout that is being written."""

    def __init__(self, path: Path) -> None:
        self.path = path
        (path / "blobs" / "sha256").mkdir(parents=True)
        (path / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
        self.manifests: list[dict[str, Any]] = []

    def blob(self, data: bytes, kind: str = "application/octet-stream", **more: Any) -> dict[str, Any]:
        digest = hashlib.sha256(data).hexdigest()
        (self.path / "blobs" / "sha256" / digest).write_bytes(data)
        return {"mediaType": kind, "digest": f"sha256:{digest}", "size": len(data), **more}

    def json(self, value: Any, kind: str, **more: Any) -> dict[str, Any]:
        return self.blob(json.dumps(value).encode(), kind, **more)

    def image(self, layers: Sequence[bytes], *, name: str = "", machine: str = MACHINE, compress: bool = True) -> None:
        """Add an image; layers are uncompressed archives, the lowest first."""
        diffs = [f"sha256:{hashlib.sha256(layer).hexdigest()}" for layer in layers]
        config = self.json(
            {"rootfs": {"type": "layers", "diff_ids": diffs}}, "application/vnd.oci.image.config.v1+json"
        )
        blobs = [self.blob(gzip.compress(layer, mtime=0) if compress else layer) for layer in layers]
        manifest = {"schemaVersion": 2, "config": config, "layers": blobs}
        more: dict[str, Any] = {"platform": {"os": "linux", "architecture": machine}}
        if name:
            more["annotations"] = {NAME: name}
        self.manifests.append(self.json(manifest, "application/vnd.oci.image.manifest.v1+json", **more))
        self.write(self.manifests)

    def write(self, manifests: Sequence[Mapping[str, Any]]) -> None:
        (self.path / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": manifests}))
