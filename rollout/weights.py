"""Publishing weights: what the learner writes, what an engine must prove before it gets a request (docs/design.md,
P4).

    weights/v000003/   config.json + *.safetensors in the official layout, tokenizer, and manifest.json: version and
                       one hash a tensor and a file

A directory appears under its name only when it is whole (written beside it, synced, renamed). A replica reads it,
hashes what it will sample with, and answers with those hashes; the gate opens only where every hash equals the
manifest's.

Here: hashes, the manifest, writing and reading. Not here: the layout (model/checkpoint.py), when to publish (rl/).
"""

import hashlib
import shutil
from collections.abc import Mapping
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from rollforward.model.checkpoint import iter_checkpoint, read_packed, write_checkpoint
from rollforward.model.config import ModelConfig, config_json, load_model_config
from rollforward.model.errors import CheckpointError
from rollforward.model.precision import PackedTensor, unpack_published
from rollforward.rollout.errors import WeightsError

WEIGHTS_NAME = "weights"
"""Folder of a run directory in which its versions are published."""

MANIFEST_NAME = "manifest.json"
"""Name of the manifest inside a published directory."""

_CONFIG_NAME = "config.json"
_HASH_BYTES = 16


class WeightsManifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a published directory holds."""

    policy_version: int
    """Weight version, from 0; grows by one a publish."""
    tensors: dict[str, str]
    """Canonical name -> ``tensor_hash`` of the published value."""
    files: dict[str, str] = {}
    """Name of another file of the directory -> 128-bit BLAKE2b hex digest of it (of config.json: of what it says)."""


class WeightsAck(msgspec.Struct, frozen=True, kw_only=True):
    """What a replica says it samples with."""

    replica: str
    """Name of the replica."""
    policy_version: int
    """Version that it took."""
    tensors: dict[str, str]
    """Canonical name -> ``tensor_hash`` of the value that its forward reads, computed from memory after loading."""


def tensor_hash(value: Tensor) -> str:
    """Return a 128-bit BLAKE2b hex digest over dtype, shape and bytes of the value that a forward reads."""
    digest = hashlib.blake2b(f"{value.dtype} {tuple(value.shape)}".encode(), digest_size=_HASH_BYTES)
    digest.update(value.detach().contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def tensor_hashes(values: Mapping[str, Tensor]) -> dict[str, str]:
    """Return the hash of every value, by canonical name."""
    return {name: tensor_hash(value) for name, value in values.items()}


def published_hashes(tensors: Mapping[str, PackedTensor]) -> dict[str, str]:
    """Return the hashes that an engine must show which unpacked these published bytes."""
    return {name: tensor_hash(unpack_published(packed)) for name, packed in tensors.items()}


def version_directory(root: Path, policy_version: int) -> Path:
    """Return where a version is published: ``root/v000003``."""
    return root / f"v{policy_version:06d}"


def publish_weights(
    root: Path,
    policy_version: int,
    config: ModelConfig,
    tensors: Mapping[str, PackedTensor],
    *,
    extra_files: Mapping[str, bytes] | None = None,
) -> WeightsManifest:
    """Write a version, whole or not at all, and remove those before it.

    Args:
        root: directory of all versions; made if absent.
        policy_version: new version. A directory of that version is replaced: it is what an interrupted step left.
        config: the model. tensors: canonical names -> published bytes.
        extra_files: what must travel with the weights (tokenizer).

    Returns:
        The manifest, which is also in the directory.
    """
    root.mkdir(parents=True, exist_ok=True)
    extra_files = dict(extra_files or {})
    manifest = WeightsManifest(
        policy_version=policy_version,
        tensors=published_hashes(tensors),
        files={_CONFIG_NAME: _config_hash(config)} | {name: _hash(content) for name, content in extra_files.items()},
    )
    target = version_directory(root, policy_version)
    if target.exists():
        shutil.rmtree(target)
    extra_files[MANIFEST_NAME] = msgspec.json.encode(manifest)
    write_checkpoint(target, config, tensors, extra_files=extra_files)
    for other in root.glob("v*"):
        if other != target and other.name < target.name:
            shutil.rmtree(other)
    return manifest


def check_manifest(directory: Path, config: ModelConfig) -> None:
    """Compare a model directory with its manifest; one without a manifest (not published here) passes.

    Args:
        directory: the model. config: as read from it.

    Raises:
        CheckpointError: the manifest is unreadable, or tensors or files are not the bytes that it lists; names them.
    """
    path = directory / MANIFEST_NAME
    try:
        manifest = msgspec.json.decode(path.read_bytes(), type=WeightsManifest)
    except FileNotFoundError:
        return
    except (OSError, msgspec.MsgspecError) as error:
        raise CheckpointError(
            f"{path} cannot be read: {error}. Fetch the model again, or remove the file to use the model unchecked"
        ) from error
    found = {spec.name: tensor_hash(unpack_published(packed)) for spec, packed in iter_checkpoint(directory, config)}
    wrong = _differing(manifest.tensors, found)
    for name, digest in manifest.files.items():
        file = directory / name
        is_there = file.is_file()
        if not is_there or digest != (_config_hash(config) if name == _CONFIG_NAME else _hash(file.read_bytes())):
            wrong.append(name)
    if wrong:
        raise CheckpointError(
            f"{directory}: {_some(wrong)} changed since {MANIFEST_NAME} was written. Fetch or train the model again; if"
            f" you changed it yourself, remove {MANIFEST_NAME}"
        )


def _differing(published: Mapping[str, str], held: Mapping[str, str]) -> list[str]:
    """Names whose hashes differ or which only one side has, in order."""
    return sorted(name for name in published.keys() | held.keys() if published.get(name) != held.get(name))


def _some(names: list[str]) -> str:
    """The first five names, and how many more there are."""
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _hash(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=_HASH_BYTES).hexdigest()


def _config_hash(config: ModelConfig) -> str:
    return _hash(msgspec.json.encode(config_json(config), order="deterministic"))


def read_manifest(directory: Path) -> WeightsManifest:
    """Read what a published version holds.

    Raises:
        WeightsError: the directory or its manifest is absent or unreadable.
    """
    try:
        return msgspec.json.decode((directory / MANIFEST_NAME).read_bytes(), type=WeightsManifest)
    except (OSError, msgspec.MsgspecError) as error:
        raise WeightsError(
            f"{directory} holds no readable {MANIFEST_NAME}: {error}. Publish the version again"
        ) from error


def read_published(directory: Path) -> tuple[WeightsManifest, ModelConfig, dict[str, PackedTensor]]:
    """Read a published version.

    Raises:
        WeightsError: the directory or its manifest is absent or unreadable.
        CheckpointError: a tensor file is damaged.
    """
    manifest = read_manifest(directory)
    config = load_model_config(directory / "config.json")
    return manifest, config, read_packed(directory, config)


def check_acknowledgement(manifest: WeightsManifest, ack: WeightsAck) -> None:
    """Refuse a replica that does not hold exactly the published weights.

    Raises:
        WeightsError: naming replica and tensors; the replica must get no request.
    """
    if ack.policy_version != manifest.policy_version:
        raise WeightsError(
            f"replica {ack.replica} holds version {ack.policy_version}, published is"
            f" {manifest.policy_version}; it gets no request"
        )
    wrong = _differing(manifest.tensors, ack.tensors)
    if wrong:
        raise WeightsError(
            f"replica {ack.replica} does not hold the published {_some(wrong)} (version"
            f" {ack.policy_version}); it gets no request."
            " Restart the replica; if it happens again, check the machine's memory and disk"
        )
