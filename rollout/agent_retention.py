"""Lets command logs go that a checkpoint covers, as the token log does: whole steps, the oldest first. States that
completions began with are counted for themselves: one may be larger than the logs of all steps. The loop does it once
for all replicas (rl/controller.py)."""

import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from rollforward.sandbox.command_log import COMMANDS_NAME, PREPARED_NAME

_STEP: Final = re.compile(r"(?:step|eval)_(\d+)")


def retire_commands(run_dir: Path, before_step: int, *, keep_bytes: int) -> int:
    """Remove directories of steps before one until the logs that are left have at most so many bytes; then states that
    completions of such steps began with, until those have.

    Args:
        run_dir: of the run.
        before_step: the oldest step that a checkpoint still needs.
        keep_bytes: what the logs of all steps may have, and as much again the states.

    Returns:
        Bytes that were removed.
    """
    try:
        found = sorted(
            (int(match[1]), path)
            for path in (run_dir / COMMANDS_NAME).iterdir()
            if (match := _STEP.fullmatch(path.name))
        )
    except FileNotFoundError:
        return 0
    sizes = {path: _size(path) for _, path in found}
    states = {path: _size(path / PREPARED_NAME) for _, path in found}
    covered = [path for step, path in found if step < before_step]
    gone = _too_many(covered, {path: sizes[path] - states[path] for path in sizes}, keep_bytes)
    for path in gone:
        shutil.rmtree(path, ignore_errors=True)
    left = {path: size for path, size in states.items() if path not in gone}
    without_state = _too_many([path for path in covered if path in left], left, keep_bytes)
    for path in without_state:
        shutil.rmtree(path / PREPARED_NAME, ignore_errors=True)
    return sum(sizes[path] for path in gone) + sum(states[path] for path in without_state)


def _too_many(covered: Sequence[Path], sizes: dict[Path, int], keep_bytes: int) -> list[Path]:
    """The oldest of what may go, until all that is left has at most so many bytes."""
    total = sum(sizes.values())
    gone: list[Path] = []
    for path in covered:
        if total <= keep_bytes:
            break
        gone.append(path)
        total -= sizes[path]
    return gone


def _size(directory: Path) -> int:
    total = 0
    for path in directory.rglob("*"):
        try:
            total += path.lstat().st_size
        except FileNotFoundError:  # renamed meanwhile, by who writes it
            continue
    return total
