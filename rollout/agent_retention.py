"""Lets command logs go that a checkpoint covers, as the token log does: whole steps, the oldest first. The loop does it
once for all replicas (rl/controller.py)."""

import re
import shutil
from pathlib import Path
from typing import Final

from rollforward.sandbox.command_log import COMMANDS_NAME

_STEP: Final = re.compile(r"(?:step|eval)_(\d+)")


def retire_commands(run_dir: Path, before_step: int, *, keep_bytes: int) -> int:
    """Remove directories of steps before one until what is left has at most so many bytes.

    Args:
        run_dir: of the run.
        before_step: the oldest step that a checkpoint still needs.
        keep_bytes: what the logs of all steps may have.

    Returns:
        Bytes that were removed.
    """
    try:
        found = [
            (int(match[1]), path)
            for path in (run_dir / COMMANDS_NAME).iterdir()
            if (match := _STEP.fullmatch(path.name))
        ]
    except FileNotFoundError:
        return 0
    sizes = {path: _size(path) for _, path in found}
    total = sum(sizes.values())
    removed = 0
    for step, path in sorted(found):
        if step >= before_step or total - removed <= keep_bytes:
            break
        shutil.rmtree(path, ignore_errors=True)
        removed += sizes[path]
    return removed


def _size(directory: Path) -> int:
    total = 0
    for path in directory.rglob("*"):
        try:
            total += path.lstat().st_size
        except FileNotFoundError:  # renamed meanwhile, by who writes it
            continue
    return total
