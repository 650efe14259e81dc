"""Checkpoints of a run: a directory that is whole or absent, and the choice of the one to go on from.

checkpoints/step_000040/   state.json (where the loop stands, and a hash of every other file) and what the learner wrote
"""

import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec

from rollforward.conf.console import say
from rollforward.model.checkpoint import sync_path
from rollforward.rl.prompts import DataCursor
from rollforward.rl.tracker import TrackerState

CHECKPOINTS_NAME = "checkpoints"
"""Folder of a run directory that holds its checkpoints."""

STATE_NAME = "state.json"
"""Name of the loop's state inside a checkpoint; written last."""


class LoopState(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where a loop stands between two steps."""

    step: int
    """Steps done; the next one has this number."""
    cursor: DataCursor
    """Next prompt or conversation to draw."""
    trained_tokens: int = 0
    """Sampled tokens trained on so far (RL)."""
    probs_diff_max: float = 0.0
    """Largest difference so far between a token's probability in the engine and in training (RL)."""
    tracker: TrackerState | None = None
    """Where the tracker stands; None before the first checkpoint."""


class _Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What state.json holds."""

    state: LoopState
    files: dict[str, str]
    """Path inside the checkpoint -> 128-bit BLAKE2b hex digest of the file."""


def save_checkpoint(root: Path, state: LoopState, write: Callable[[Path], None], *, keep: int) -> Path:
    """Write a checkpoint, whole or not at all, and remove the oldest beyond ``keep``.

    Args:
        root: directory of all checkpoints; made if absent.
        state: where the loop stands.
        write: puts everything else into the directory that it is given.
        keep: how many to keep, >= 1.

    Returns:
        The checkpoint's directory.
    """
    root.mkdir(parents=True, exist_ok=True)
    target = root / f"step_{state.step:06d}"
    partial = root / f".{target.name}.partial"
    for leftover in (partial, target):
        if leftover.exists():
            shutil.rmtree(leftover)
    partial.mkdir()
    write(partial)
    record = _Record(state=state, files=_file_hashes(partial))
    (partial / STATE_NAME).write_bytes(msgspec.json.encode(record))
    _sync_tree(partial)
    partial.rename(target)
    sync_path(root)
    for old in sorted(root.glob("step_*"))[:-keep]:
        shutil.rmtree(old)
    return target


def is_due(step: int, every_steps: int, total_steps: int) -> bool:
    """Return whether what happens every so many steps, and after the last, happens after ``step`` steps."""
    return step % every_steps == 0 or step == total_steps


def restore(root: Path, load: Callable[[Path], None], start: LoopState) -> LoopState:
    """Load the newest whole checkpoint, if there is one, and return where the loop stands then; otherwise ``start``."""
    found = latest_checkpoint(root)
    if found is None:
        return start
    directory, state = found
    load(directory)
    return state


def latest_checkpoint(root: Path) -> tuple[Path, LoopState] | None:
    """Return the newest checkpoint in which every byte is as it was written, or None; damaged ones are named."""
    has_damage = False
    for directory in sorted(root.glob("step_*"), reverse=True):
        try:
            record = msgspec.json.decode((directory / STATE_NAME).read_bytes(), type=_Record)
            found = _file_hashes(directory)
        except (OSError, msgspec.MsgspecError) as error:
            say(f"checkpoint {directory} is damaged: {error}")
            has_damage = True
            continue
        if wrong := sorted(name for name, digest in record.files.items() if found.get(name) != digest):
            say(f"checkpoint {directory} is damaged: {', '.join(wrong)}")
            has_damage = True
            continue
        if has_damage:
            say(f"going on from {directory}")
        return directory, record.state
    if has_damage:
        say("no checkpoint is whole; going on from the start of the run")
    return None


def _file_hashes(directory: Path) -> dict[str, str]:
    """Path inside the directory -> hash, of every file but the state."""
    hashes: dict[str, str] = {}
    for path in sorted(directory.rglob("*")):
        if path.is_file() and path.name != STATE_NAME:
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16))
            hashes[str(path.relative_to(directory))] = digest.hexdigest()
    return hashes


def _sync_tree(directory: Path) -> None:
    for path in directory.rglob("*"):
        sync_path(path)
    sync_path(directory)
