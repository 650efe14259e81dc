"""Checkpoints of a run: a directory that is whole or absent, and the choice of the one to go on from.

checkpoints/step_000040/   state.json (where the loop stands) and what the learner wrote
"""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec

from rollforward.conf.console import say
from rollforward.rl.prompts import DataCursor

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
    (partial / STATE_NAME).write_bytes(msgspec.json.encode(state))
    _sync_tree(partial)
    partial.rename(target)
    _sync(root)
    for old in sorted(root.glob("step_*"))[:-keep]:
        shutil.rmtree(old)
    return target


def latest_checkpoint(root: Path) -> tuple[Path, LoopState] | None:
    """Return the newest whole checkpoint, or None; a damaged one is named and the one before it is taken."""
    for directory in sorted(root.glob("step_*"), reverse=True):
        try:
            return directory, msgspec.json.decode((directory / STATE_NAME).read_bytes(), type=LoopState)
        except (OSError, msgspec.MsgspecError) as error:
            say(f"checkpoint {directory} is damaged ({error}); trying the one before it")
    return None


def _sync_tree(directory: Path) -> None:
    for path in directory.rglob("*"):
        _sync(path)
    _sync(directory)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
