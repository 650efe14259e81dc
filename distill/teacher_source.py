"""Which teacher a directory holds, and whether its files are still the same.

Here: the record and its making, which reads everything once. Not here: where the directory comes from
(teacher_files.py), reading it for a forward (teacher_weights.py).

Letters: E width of the teacher.
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path

import msgspec

from rollforward.distill.errors import TeacherError, TeacherReadError
from rollforward.model.checkpoint_headers import check_entries, load_checkpoint_config, scan_checkpoint
from rollforward.model.config import config_json
from rollforward.model.errors import ModelError
from rollforward.rollout.errors import WeightsError
from rollforward.rollout.weights import MANIFEST_NAME, read_manifest, stored_fingerprints

FileStamps = Mapping[str, tuple[int, int]]
"""Size in bytes and time of the last change in nanoseconds of the tensor files of a directory, by name."""


class TeacherSource(msgspec.Struct, frozen=True, kw_only=True):
    """Where a teacher is, and which."""

    name: str
    """Of the configuration."""
    directory: Path
    """On this host."""
    version: str
    """Digest of its configuration and all its tensors."""
    width: int
    """E, of the vectors that its head reads."""
    files: dict[str, int] = {}
    """Sizes in bytes of its tensor files by name, where they are known."""


def describe_teacher(name: str, directory: Path) -> TeacherSource:
    """Read all of a teacher once, a tensor at a time, and check it.

    Args:
        name: of the configuration. directory: a local model directory in the official layout.

    Raises:
        TeacherError: the directory holds no whole model, a value or scale is not finite, or tensors are not those of
            its manifest, where it has one; names the teacher and what is wrong.

    Invariants: equal bytes and configurations give equal versions, on any host and however sharded into files.
    """
    try:
        config = load_checkpoint_config(directory)
        check_entries(scan_checkpoint(directory), config)
        fingerprints = stored_fingerprints(directory, config)
        if (directory / MANIFEST_NAME).exists() and read_manifest(directory).tensors != fingerprints:
            raise TeacherError(
                f"teacher {name}: tensors in {directory} changed since {MANIFEST_NAME} was written. Fetch the teacher"
                f" again; if you changed it yourself, remove {MANIFEST_NAME}"
            )
        files = {file: size for file, (size, _) in _stamps(directory).items()}
    except (ModelError, WeightsError, OSError) as error:
        raise TeacherError(f"teacher {name}: {error}") from error
    said = msgspec.json.encode([config_json(config), fingerprints], order="deterministic")
    version = hashlib.blake2b(said, digest_size=16).hexdigest()
    return TeacherSource(name=name, directory=directory, version=version, width=config.hidden_size, files=files)


def file_stamps(source: TeacherSource) -> FileStamps:
    """Return what tells later whether a teacher's files are still the same.

    Raises:
        TeacherReadError: they are gone.
    """
    try:
        return _stamps(source.directory)
    except OSError as error:
        raise TeacherReadError(f"teacher {source.name}: {error}. Put the directory back and resume") from error


def _stamps(directory: Path) -> dict[str, tuple[int, int]]:
    found = {path.name: path.stat() for path in sorted(directory.glob("*.safetensors"))}
    return {name: (one.st_size, one.st_mtime_ns) for name, one in found.items()}
