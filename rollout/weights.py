"""Publishing weights: what the learner writes, what an engine must prove before it gets a request (docs/design.md,
P4).

    weights/v000003/   config.json + *.safetensors in the official layout, tokenizer, and manifest.json: version, one
                       fingerprint a tensor and a file, and what a fixed prompt gives

    publisher  value --packed, proven, hashed, written, once each--> .v000003.partial --synced, renamed--> v000003
    engine     v000003 --every tensor read and compared--> its own tensors, in place --packed, hashed--> acknowledgement

A directory appears under its name only when it is whole. The gate opens only where every fingerprint of what an engine
samples with equals the manifest's, no tensor was left unwritten, and the fixed prompt gives the same bits: same weights
and same arithmetic. The version before stays until the next one is being written, for whoever must load it again.

Here: the manifest, writing, checking. Not here: fingerprints (model/fingerprint.py), the layout (model/checkpoint.py),
an engine's tensors (engine/forward.py), when to publish (rl/).
"""

import hashlib
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
from torch import Tensor

from rollforward.conf.errors import way_out
from rollforward.model.checkpoint import iter_stored, read_packed
from rollforward.model.checkpoint_headers import FORMAT_OF_DTYPE, check_entries, scan_checkpoint
from rollforward.model.checkpoint_writer import MAX_SHARD_BYTES, CheckpointWriter, json_bytes
from rollforward.model.config import ModelConfig, config_json, load_model_config
from rollforward.model.errors import CheckpointError, ModelError
from rollforward.model.fingerprint import HASH_BYTES, Fingerprint, packed_pieces, with_format
from rollforward.model.precision import PackedTensor, unpack_published
from rollforward.model.shapes import TensorFormat, TensorSpec, param_specs, scale_name, stored_form, unstacked
from rollforward.rollout.errors import VersionRefusedError, WeightsError

WEIGHTS_NAME = "weights"
"""Folder of a run directory in which its versions are published."""

MANIFEST_NAME = "manifest.json"
"""Name of the manifest inside a published directory."""

_CONFIG_NAME = "config.json"

_SCHEME = "canonical bytes, 1"
"""What the fingerprints of a manifest are over. Manifests before had none of this field, and hashed values."""


class Canary(msgspec.Struct, frozen=True, kw_only=True):
    """A fixed prompt and what the publisher's own forward makes of it."""

    token_ids: tuple[int, ...]
    """The prompt."""
    logprobs: tuple[str, ...]
    """Log-prob of each token but the first, the bits of a float32 in hexadecimal."""


class WeightsManifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a published directory holds."""

    policy_version: int
    """Weight version, from 0; grows by one a publish."""
    tensors: dict[str, str]
    """Canonical name -> fingerprint of its bytes."""
    files: dict[str, str] = {}
    """Name of another file of the directory -> 128-bit BLAKE2b hex digest of it (of config.json: of what it says)."""
    canary: Canary | None = None
    """None where the publisher has no forward."""
    num_bytes: int = 0
    """Of all tensors, as stored."""
    scheme: str = _SCHEME
    """What fingerprints are over."""


class WeightsAck(msgspec.Struct, frozen=True, kw_only=True):
    """What a replica says it samples with."""

    replica: str
    """Name of the replica."""
    policy_version: int
    """Version that it took."""
    tensors: dict[str, str]
    """Canonical name -> fingerprint of the value that its forward reads, computed from memory."""
    canary: tuple[str, ...] = ()
    """What its own decoding makes of the manifest's prompt, as in ``Canary``."""
    never_written: int = 0
    """Tensors that the last load did not write."""
    load_s: float = 0.0
    """Seconds that the last load took, checks included."""


class WeightSource(NamedTuple):
    """Weights that are to be published, one official tensor at a time."""

    formats: Mapping[str, TensorFormat]
    """Canonical name -> format to be stored in."""
    values: Iterable[tuple[str, Tensor]]
    """Official name -> exact value, float32 (int64 for tables), in the order of `tensor_specs`; read once."""


def canonical_source(
    config: ModelConfig, formats: Mapping[str, TensorFormat], values: Iterable[tuple[str, Tensor]]
) -> WeightSource:
    """Return a source of canonical tensors in the order of `param_specs`: experts are taken off their stacks."""
    return WeightSource(formats, _official(config, values))


def _official(config: ModelConfig, values: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    for spec, (name, value) in zip(param_specs(config), values, strict=True):
        assert name == spec.name, f"{name} was given for {spec.name}"
        parts = unstacked(spec)
        yield from zip((part.name for part in parts), (value,) if spec.name == parts[0].name else value, strict=True)


def packed_source(config: ModelConfig, tensors: Mapping[str, PackedTensor]) -> WeightSource:
    """Return a source of packed bytes by canonical names."""
    formats: dict[str, TensorFormat] = {name: packed.format for name, packed in tensors.items()}
    values = ((spec.name, _exact(tensors[spec.name])) for spec in param_specs(config))
    return canonical_source(config, formats, values)


def checkpoint_source(directory: Path, config: ModelConfig) -> WeightSource:
    """Return a source of a checkpoint on disk, which is read once, a tensor at a time.

    Raises:
        CheckpointError: its headers are damaged; while it is read, as ``iter_stored``.
    """
    entries = scan_checkpoint(directory)
    check_entries(entries, config)
    formats: dict[str, TensorFormat] = {
        spec.name: FORMAT_OF_DTYPE[entries[unstacked(spec)[0].name].dtype] for spec in param_specs(config)
    }
    return WeightSource(formats, ((spec.name, _exact(packed)) for spec, packed in iter_stored(directory, config)))


def _exact(packed: PackedTensor) -> Tensor:
    """The value of bytes of whatever origin: canonical bytes of quantised formats have one zero."""
    value = unpack_published(packed)
    return value.add_(0.0) if packed.scale is not None else value


def canary_ids(config: ModelConfig) -> tuple[int, ...]:
    """Return a prompt that reaches every kind of attention: longer than the window by the largest compressed entry."""
    length = min(config.sliding_window + max(2, *config.compress_ratios), config.max_position_embeddings)
    # Steps of an odd number that grow: neighbours differ, and no pattern repeats within the prompt.
    return tuple((7 + 31 * index + index * index) % config.vocab_size for index in range(length))


def logprob_bits(logprobs: Tensor | npt.NDArray[np.float32]) -> tuple[str, ...]:
    """Return the bits of float32 log-probs as a manifest has them."""
    values = np.ascontiguousarray(logprobs, dtype=np.float32)
    return tuple(f"{bits:08x}" for bits in values.view(np.uint32).tolist())


def version_directory(root: Path, policy_version: int) -> Path:
    """Return where a version is published: ``root/v000003``."""
    return root / f"v{policy_version:06d}"


def publish_weights(
    root: Path,
    policy_version: int,
    config: ModelConfig,
    tensors: Mapping[str, PackedTensor] | WeightSource,
    *,
    extra_files: Mapping[str, bytes] | None = None,
    canary: Canary | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> WeightsManifest:
    """Write a version, whole or not at all. Of those before it one stays: it is loadable while this one is written.

    Args:
        root: directory of all versions; made if absent.
        policy_version: new version. A directory of that version is replaced: it is what an interrupted step left.
        config: the model.
        tensors: what to write; bytes by canonical names may be given as they are.
        extra_files: what must travel with the weights (tokenizer).
        canary: what the publisher's forward makes of ``canary_ids``; None where it has none.
        max_shard_bytes: a shard is closed before its data would exceed this.

    Returns:
        The manifest, which is also in the directory.

    Raises:
        WeightsError: a value cannot be stored in its format without changing; names the tensor. Nothing was published.
        CheckpointError: the disk refuses.

    Invariants: beside the source, one piece of one tensor is in memory; each is packed, proven and hashed once.
    """
    source = tensors if isinstance(tensors, WeightSource) else packed_source(config, tensors)
    target = version_directory(root, policy_version)
    try:
        root.mkdir(parents=True, exist_ok=True)
        _remove(list(root.glob(".v*.removed")))
        # Before anything is written, so that there are never three.
        _remove(sorted(path for path in root.glob("v*") if path.name < target.name)[:-1])
        _remove([target] if target.exists() else [])
    except OSError as error:
        raise CheckpointError(
            f"{target} cannot be written: {error}. {way_out(error)}; nothing was published"
        ) from error
    specs = [with_format(spec, source.formats[spec.name]) for spec in param_specs(config)]
    groups = [stored_form(part) for spec in specs for part in unstacked(spec)]
    with CheckpointWriter(target, groups, max_shard_bytes=max_shard_bytes) as writer:
        files = dict(extra_files or {})
        manifest = WeightsManifest(
            policy_version=policy_version,
            tensors=_write_tensors(writer, specs, source.values),
            files={_CONFIG_NAME: _config_hash(config)} | {name: _hash(content) for name, content in files.items()},
            canary=canary,
            num_bytes=sum(stored.num_bytes for group in groups for stored in group),
        )
        files |= {_CONFIG_NAME: json_bytes(config_json(config)), MANIFEST_NAME: msgspec.json.encode(manifest)}
        writer.publish(files)
    return manifest


def _write_tensors(
    writer: CheckpointWriter, specs: Sequence[TensorSpec], values: Iterable[tuple[str, Tensor]]
) -> dict[str, str]:
    """Write everything and return the fingerprints."""
    fingerprints: dict[str, str] = {}
    given = iter(values)
    for spec in specs:
        fingerprint = Fingerprint(spec.format, spec.shape)
        for part in unstacked(spec):
            name, value = next(given)
            assert name == part.name, f"{name} was given for {part.name}"
            for piece in packed_pieces(part, value):
                if not piece.is_exact:
                    raise WeightsError(
                        f"{part.name} cannot be stored as {part.format} without changing its values; nothing was"
                        " published. Its scales lie too far apart, or something wrote to it: convert the checkpoint to"
                        " BF16, or resume from the last checkpoint"
                    )
                fingerprint.add(piece.packed)
                writer.write(part.name, piece.packed.data, piece.start_bytes)
                if piece.packed.scale is not None:
                    writer.write(scale_name(part.name), piece.packed.scale)
        fingerprints[spec.name] = fingerprint.hex()
    return fingerprints


def _remove(directories: Sequence[Path]) -> None:
    """Remove versions, each from one moment to the next: a half one never has a version's name."""
    for directory in directories:
        gone = directory if directory.name.startswith(".") else directory.with_name(f".{directory.name}.removed")
        if gone != directory:
            with suppress(FileNotFoundError):
                shutil.rmtree(gone)
            directory.rename(gone)
        shutil.rmtree(gone)


def stored_fingerprints(directory: Path, config: ModelConfig) -> dict[str, str]:
    """Read every tensor of a directory, one in memory at a time, and return the fingerprints of the bytes.

    Raises:
        CheckpointError: as ``iter_stored``.
    """
    stored = iter_stored(directory, config)
    found: dict[str, str] = {}
    for spec in param_specs(config):
        fingerprint: Fingerprint | None = None
        for _ in unstacked(spec):
            _, packed = next(stored)
            if fingerprint is None:
                fingerprint = Fingerprint(packed.format, spec.shape)
            fingerprint.add(packed)
        assert fingerprint is not None, "a tensor has at least one part"
        found[spec.name] = fingerprint.hex()
    return found


def check_manifest(directory: Path, config: ModelConfig) -> None:
    """Compare a model directory with its manifest; one without a manifest (not published here) passes.

    Args:
        directory: the model. config: as read from it.

    Raises:
        CheckpointError: the manifest is unreadable, or tensors or files are not the bytes that it lists; names them.
    """
    path = directory / MANIFEST_NAME
    try:
        manifest = _decoded(path.read_bytes())
    except FileNotFoundError:
        return
    except (OSError, ValueError) as error:  # msgspec's errors are ValueErrors
        raise CheckpointError(
            f"{path} cannot be read: {error}. Fetch the model again, or remove the file to use the model unchecked"
        ) from error
    wrong = _differing(manifest.tensors, stored_fingerprints(directory, config))
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


def check_version(directory: Path, config: ModelConfig) -> WeightsManifest:
    """Read all of a published version and compare it with its manifest, before an engine touches what it has.

    Args:
        directory: the version. config: the engine's model.

    Returns:
        The manifest.

    Raises:
        VersionRefusedError: it is absent, half, damaged or of another model; names what is.
    """
    manifest = read_manifest(directory)
    name = f"weights {manifest.policy_version} in {directory} are refused, what was loaded before stays in use"
    try:
        if load_model_config(directory / _CONFIG_NAME) != config:
            raise VersionRefusedError(f"{name}: {_CONFIG_NAME} is another model's. Publish this engine's model")
        wrong = _differing(manifest.tensors, stored_fingerprints(directory, config))
    except ModelError as error:
        raise VersionRefusedError(f"{name}: {error}") from error
    if wrong:
        raise VersionRefusedError(
            f"{name}: {_some(wrong)} are not what {MANIFEST_NAME} says. Publish the version again"
        )
    return manifest


def _differing(published: Mapping[str, str], held: Mapping[str, str]) -> list[str]:
    """Names whose hashes differ or which only one side has, in order."""
    return sorted(name for name in published.keys() | held.keys() if published.get(name) != held.get(name))


def _some(names: list[str]) -> str:
    """The first five names, and how many more there are."""
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _hash(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=HASH_BYTES).hexdigest()


def _config_hash(config: ModelConfig) -> str:
    return _hash(msgspec.json.encode(config_json(config), order="deterministic"))


class _Scheme(msgspec.Struct):
    scheme: str = ""


def _decoded(content: bytes) -> WeightsManifest:
    """A manifest of this version of the format.

    Raises:
        ValueError: it is damaged, or of another.
    """
    scheme = msgspec.json.decode(content, type=_Scheme).scheme
    if scheme != _SCHEME:
        raise ValueError(
            f"its fingerprints are of scheme {scheme or 'none, as older versions of rollforward wrote'!r}; this one"
            f" reads {_SCHEME!r}"
        )
    return msgspec.json.decode(content, type=WeightsManifest)


def read_manifest(directory: Path) -> WeightsManifest:
    """Read what a published version holds.

    Raises:
        VersionRefusedError: the directory or its manifest is absent or unreadable.
    """
    try:
        return _decoded((directory / MANIFEST_NAME).read_bytes())
    except (OSError, ValueError) as error:
        raise VersionRefusedError(
            f"{directory} holds no readable {MANIFEST_NAME}: {error}. Publish the version again"
        ) from error


def read_published(directory: Path) -> tuple[WeightsManifest, ModelConfig, dict[str, PackedTensor]]:
    """Read a published version into memory.

    Raises:
        VersionRefusedError: the directory or its manifest is absent or unreadable.
        CheckpointError: a tensor file is damaged.
    """
    manifest = read_manifest(directory)
    config = load_model_config(directory / _CONFIG_NAME)
    return manifest, config, read_packed(directory, config)


def check_acknowledgement(manifest: WeightsManifest, ack: WeightsAck) -> None:
    """Refuse a replica that does not hold exactly the published weights, or does not compute with them as is due.

    Raises:
        WeightsError: naming replica and tensors; the replica must get no request.
    """
    if ack.policy_version != manifest.policy_version:
        raise WeightsError(
            f"replica {ack.replica} holds version {ack.policy_version}, published is"
            f" {manifest.policy_version}; it gets no request"
        )
    wrong = _differing(manifest.tensors, ack.tensors)
    if wrong or ack.never_written:
        what = f"the published {_some(wrong)}" if wrong else f"{ack.never_written} tensors that were never written"
        raise WeightsError(
            f"replica {ack.replica} does not hold {what} (version"
            f" {ack.policy_version}); it gets no request."
            " Restart the replica; if it happens again, check the machine's memory and disk"
        )
    if manifest.canary is not None and ack.canary != manifest.canary.logprobs:
        pairs = zip(manifest.canary.logprobs, ack.canary, strict=False)
        first = next((index for index, (due, found) in enumerate(pairs) if due != found), len(ack.canary))
        raise WeightsError(
            f"replica {ack.replica}: the weights are the same, arithmetic is not: the log-prob of token {first + 1} of"
            f" the fixed prompt has other bits than at the publisher (version {ack.policy_version}); it gets no"
            " request. Engines and learner must run one build on one type of machine"
        )
