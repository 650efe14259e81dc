"""Which teacher a directory holds, and whether its files are still the same.

    the run's process   describe_teacher --reads all of it--> TeacherSource, with the version
    each rank           local_teacher: the very files that were described, or read on this host: the same version?

What was read is recorded beside fetched teachers with the stamps of the files, so that of the processes of a host one
reads, and a later run only where a file changed. Here: the record and its making. Not here: where the directory comes
from (teacher_files.py), reading it for a forward (teacher_weights.py).

Letters: E width of the teacher.
"""

import functools
import hashlib
import socket
from collections.abc import Mapping
from pathlib import Path

import msgspec

from rollforward.distill.errors import TeacherError, TeacherReadError
from rollforward.distill.teacher_files import CONFIG_NAME, FileStamp, check_regular, locked, read_regular
from rollforward.model.checkpoint_headers import INDEX_NAME, check_entries, load_checkpoint_config, scan_checkpoint
from rollforward.model.config import ModelConfig
from rollforward.model.errors import ModelError
from rollforward.rl.kept_versions import model_version
from rollforward.rollout.errors import WeightsError
from rollforward.rollout.wal_files import replace_file
from rollforward.rollout.weights import MANIFEST_NAME, read_manifest, stored_fingerprints

__all__ = ["CONFIG_NAME", "FileStamp", "TeacherSource", "changed_file", "describe_teacher", "local_teacher"]


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
    stamps: dict[str, FileStamp] = {}
    """Of configuration and tensor files by name, as they were when the version was found; empty where nobody did."""


class _Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What was read of a directory, as JSON."""

    stamps: dict[str, FileStamp]
    tensors: dict[str, str]
    """Fingerprints."""


def describe_teacher(name: str, directory: Path, records: Path | None = None) -> TeacherSource:
    """Read all of a teacher once, a tensor at a time, and check it.

    Args:
        name: of the configuration. directory: a local model directory in the official layout.
        records: folder, made if absent, in which is noted what was read. A directory whose files have not changed since
            is not read again; of several processes one reads, the others wait. None: it is read.

    Raises:
        TeacherError: the directory holds no whole model, a value or scale is not finite, or tensors are not those of
            its manifest, where it has one; names the teacher and what is wrong.
        TeacherReadError: it changed while it was read.

    Invariants: equal bytes and configurations give equal versions, on any host and however sharded into files.
    """
    try:
        check_regular(directory)
        stamps = _stamps(directory)
        config = load_checkpoint_config(directory)
        check_entries(scan_checkpoint(directory), config)
        if records is None:
            fingerprints = stored_fingerprints(directory, config)
        else:
            fingerprints = _recorded_fingerprints(directory, config, stamps, records)
        if _stamps(directory) != stamps:
            raise TeacherReadError(f"teacher {name}: {directory} changed while it was read. Start when it is finished")
        if MANIFEST_NAME in stamps and read_manifest(directory).tensors != fingerprints:
            raise TeacherError(
                f"teacher {name}: tensors in {directory} changed since {MANIFEST_NAME} was written. Fetch the teacher"
                f" again; if you changed it yourself, remove {MANIFEST_NAME}"
            )
    except (ModelError, WeightsError) as error:
        raise TeacherError(f"teacher {name}: {error}") from error
    except OSError as error:
        raise TeacherError(
            f"teacher {name}: {error}. Put the file right; if it is below teacher_cache.directory, another can be set"
        ) from error
    version = model_version(config, fingerprints)
    return TeacherSource(name=name, directory=directory, version=version, width=config.hidden_size, stamps=stamps)


def local_teacher(source: TeacherSource, directory: Path, records: Path) -> TeacherSource:
    """Return a teacher as it lies on this host, once it is proved to be the one that was described.

    Ranks gather its layers from each other, so a rank with other bytes would make a teacher that nobody has. Files with
    the very stamps that were described need no other proof; others are read.

    Args:
        source: from the process that began the run. directory: on this host. records: see ``describe_teacher``.

    Raises:
        TeacherReadError: it is another; names both versions.
        TeacherError: as ``describe_teacher``.
    """
    if source.stamps and _stamps(directory) == source.stamps:
        return msgspec.structs.replace(source, directory=directory)
    found = describe_teacher(source.name, directory, records)
    if found.version != source.version:
        raise TeacherReadError(
            f"teacher {source.name}: {directory} on {socket.gethostname()} holds version {found.version[:12]}, and the"
            f" run began with version {source.version[:12]}; every node must have the same. Put the teacher back"
            " there as it was and resume; if its URL changed, begin anew with another run_dir"
        )
    return found


def changed_file(source: TeacherSource, stamps: Mapping[str, FileStamp]) -> str | None:
    """Return the name of a file that is not the one that was described, or None.

    A size and a time of writing can be those of other bytes: copying tools set the time. So a file of which the system
    says more than that is another, or was touched, is proved by reading the teacher again, once.

    Args:
        source: as described; if nobody did, nothing is known to have changed.
        stamps: of the files as they are now, by name.

    Raises:
        TeacherError, TeacherReadError: as ``describe_teacher``, where it reads.
    """
    if not source.stamps:
        return None
    for name, now in stamps.items():
        if not now.is_content_of(source.stamps.get(name)):
            return name
    touched = [name for name, now in stamps.items() if now != source.stamps[name]]
    if touched:
        found = _description(source.name, source.directory, tuple(sorted(stamps.items())))
        if found.version != source.version or any(found.stamps.get(name) != now for name, now in stamps.items()):
            return touched[0]
    return None


@functools.lru_cache(maxsize=64)
def _description(name: str, directory: Path, _stamps_now: tuple[tuple[str, FileStamp], ...]) -> TeacherSource:
    """What is read once for files of these stamps; a teacher may be loaded many times after its owner changed."""
    return describe_teacher(name, directory)


def _recorded_fingerprints(
    directory: Path, config: ModelConfig, stamps: dict[str, FileStamp], records: Path
) -> dict[str, str]:
    """Fingerprints from the record, if it is of these very files; else read, and recorded if they did not change."""
    key = hashlib.blake2b(str(directory.resolve()).encode(), digest_size=16).hexdigest()
    record = records / f"{key}.fingerprints"
    records.mkdir(parents=True, exist_ok=True)
    with locked(record.with_suffix(".fingerprints.lock")):
        try:
            known = msgspec.json.decode(read_regular(record), type=_Record)
        except (FileNotFoundError, msgspec.MsgspecError, UnicodeError):
            known = None  # what is not recorded is read
        if known is not None and known.stamps == stamps:
            return known.tensors
        fingerprints = stored_fingerprints(directory, config)
        if _stamps(directory) == stamps:
            replace_file(record, msgspec.json.encode(_Record(stamps=stamps, tensors=fingerprints)))
        return fingerprints


def _stamps(directory: Path) -> dict[str, FileStamp]:
    said = [directory / name for name in (CONFIG_NAME, INDEX_NAME, MANIFEST_NAME)]
    files = [*(file for file in said if file.exists()), *sorted(directory.glob("*.safetensors"))]
    return {file.name: FileStamp.of(file.stat()) for file in files}
