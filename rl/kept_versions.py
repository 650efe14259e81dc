"""Which models beside the policy a run began with: written down at its first start, compared at every later one.

run_dir/judges.json, run_dir/teachers.json   name -> version
"""

import hashlib
import operator
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from rollforward.model.checkpoint import sync_path
from rollforward.model.config import ModelConfig, config_json
from rollforward.rollout.wal_files import replace_file


def model_version(config: ModelConfig, fingerprints: Mapping[str, str], *more: str) -> str:
    """Return the digest of a model: equal for equal configurations and bytes, however they are sharded into files.

    Args:
        config: hyper-parameters.
        fingerprints: of its tensors, by name.
        more: what else makes it say what it says.

    Returns:
        32 hex digits.
    """
    said = msgspec.json.encode([config_json(config), fingerprints, *more], order="deterministic")
    return hashlib.blake2b(said, digest_size=16).hexdigest()


def keep_versions(
    file: Path,
    versions: Mapping[str, str],
    *,
    what: str,
    error: type[ValueError],
    is_same: Callable[[str, str], bool] = operator.eq,
) -> None:
    """Write down which models a run has, or see that they are those that it began with.

    Args:
        file: of the run directory; made durable, with its directory, if it is not there.
        versions: of each model, by its name.
        what: they are, such as `teacher`.
        error: raised of what the user can put right.
        is_same: whether two names mean one model; a name that is there as it is goes before others.

    Raises:
        ValueError: as `error`: one is another, or nobody can read which they were.
    """
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        replace_file(file, msgspec.json.format(msgspec.json.encode(versions)))
        sync_path(file.parent)
        return
    try:
        began_with = msgspec.json.decode(file.read_bytes(), type=dict[str, str])
    except (OSError, msgspec.MsgspecError) as fault:
        raise error(f"{file} cannot be read: {fault}. Put it back, or choose another run_dir") from fault
    for name, version in versions.items():
        known = began_with.get(name) or next((began_with[other] for other in began_with if is_same(name, other)), None)
        if known != version:
            raise error(
                f"{what} {name}: its version is {version}; the run in {file.parent} began with"
                f" {known or f'another set of {what}s'} ({file}). Put the {what} back as it was, or choose"
                " another run_dir to begin anew with this one"
            )
