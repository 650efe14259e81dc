"""Checkpoints of a run: a directory that is whole or absent, and the choice of the one to go on from.

checkpoints/step_000040/   state.json (where the loop stands, its hash and that of every other file), and what the
                           learner wrote

    .step_000040.partial written --> durable --> read back, hashes as written --renamed--> step_000040 --> old ones go

Until the rename the checkpoint before is the newest, and no old one goes before it.
"""

import hashlib
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from rollforward.conf.console import say
from rollforward.conf.errors import way_out
from rollforward.model.checkpoint import sync_path
from rollforward.rl.errors import CheckpointWriteError
from rollforward.rl.prompts import DataCursor
from rollforward.rl.tracker import TrackerState
from rollforward.rollout.bias import BiasTotals
from rollforward.rollout.replica import LogStats

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
    length_bias: BiasTotals = BiasTotals()
    """Lengths trained on so far against those of all attempts (RL)."""
    log_positions: dict[str, int] = {}
    """Replica -> sequence number of the last durable record of its token log (RL). Nothing is in flight when a
    checkpoint is taken, so the groups of the next step begin behind it."""


class _Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What state.json holds."""

    state: msgspec.Raw
    """Where the loop stands: a `LoopState`."""
    state_hash: str
    """128-bit BLAKE2b hex digest of the bytes of `state`: another digit in it is valid JSON too."""
    files: dict[str, str]
    """Path inside the checkpoint -> hash, alike, of the file."""


def save_checkpoint(root: Path, state: LoopState, write: Callable[[Path], None], *, keep: int) -> Path:
    """Write a checkpoint, whole or not at all, and remove the oldest beyond ``keep``.

    Args:
        root: directory of all checkpoints; made if absent.
        state: where the loop stands.
        write: puts everything else into the directory that it is given.
        keep: how many to keep, >= 1.

    Returns:
        The checkpoint's directory.

    Raises:
        CheckpointWriteError: the disk refuses, or it does not read back as it was written. The ones before are
            untouched.
    """
    target = root / f"step_{state.step:06d}"
    try:
        _save(root, target, state, write, keep)
    except OSError as error:
        remedy = way_out(error, room="Make room or set keep_checkpoints lower")
        raise CheckpointWriteError(
            f"{target} cannot be written: {error}. {remedy}; the checkpoint before it is kept: `rollforward resume`"
            " with the run's directory goes on from it"
        ) from error
    return target


def _save(root: Path, target: Path, state: LoopState, write: Callable[[Path], None], keep: int) -> None:
    root.mkdir(parents=True, exist_ok=True)
    partial = root / f".{target.name}.partial"
    for leftover in root.glob(".step_*.partial"):
        shutil.rmtree(leftover)
    partial.mkdir()
    write(partial)
    encoded = msgspec.Raw(msgspec.json.encode(state))
    record = _Record(state=encoded, state_hash=_hash(encoded), files=_file_hashes(partial))
    (partial / STATE_NAME).write_bytes(msgspec.json.encode(record))
    _sync_tree(partial)
    _validate(partial, state)
    if target.exists():  # damaged, or the run would have gone on from it
        shutil.rmtree(target)
    partial.rename(target)
    sync_path(root)
    # Newer ones are damaged too: kept, they would count, and be named at every restart.
    written = sorted(root.glob("step_*"))
    older = written.index(target) + 1
    for old in (*written[: max(older - keep, 0)], *written[older:]):
        shutil.rmtree(old)


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
            state, wrong = _read_back(directory)
        except (OSError, msgspec.MsgspecError) as error:
            say(f"checkpoint {directory} is damaged: {error}")
            has_damage = True
            continue
        if wrong:
            say(f"checkpoint {directory} is damaged: {', '.join(wrong)}")
            has_damage = True
            continue
        if has_damage:
            say(f"going on from {directory}")
        return directory, state
    if has_damage:
        say("no checkpoint is whole; going on from the start of the run")
    return None


def oldest_step(root: Path) -> int:
    """Return the step of the oldest checkpoint that is kept, from which the run would go on were all others damaged."""
    return min((int(directory.name.removeprefix("step_")) for directory in root.glob("step_*")), default=0)


def log_positions(stats: Sequence[LogStats]) -> dict[str, int]:
    """Return where the replicas' token logs end, by replica: `LoopState.log_positions`."""
    return {one.replica: one.position for one in stats}


def name_lost_logs(state: LoopState, stats: Sequence[LogStats]) -> None:
    """Say of every token log that it ends before the checkpoint that the run goes on from, and by how much.

    The run goes on: the checkpoint covers the steps whose tokens are lost, and later ones are drawn again to the same
    bits on the same kind of machine. But somebody should know that a disk lost what was promised to be kept.
    """
    ends = log_positions(stats)
    for replica, position in state.log_positions.items():
        if (end := ends.get(replica, -1)) < position:
            say(
                f"WARNING: the token log of {replica} ends at record {end}, but the checkpoint of step {state.step} was"
                f" taken at record {position}: {position - end} durable records are lost. The checkpoint has what was"
                " learned from them, and what it does not cover is drawn again. Look at the disk of the run directory"
                " (with rollout.wal.level=process a power cut is enough)"
            )


def _validate(directory: Path, state: LoopState) -> None:
    """Read everything back, from the device where the kernel lets go of its copy.

    Raises:
        CheckpointWriteError: something differs from what was written.
    """
    for path in directory.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    try:
        found, wrong = _read_back(directory)
    except (OSError, msgspec.MsgspecError) as error:
        raise CheckpointWriteError(f"{directory} cannot be read back: {error}. {_FAULTY}") from error
    if wrong or found != state:
        raise CheckpointWriteError(
            f"{directory}: {', '.join(wrong) or STATE_NAME} reads back differently from what was written. {_FAULTY}"
        )


_FAULTY = (
    "The disk or the memory is faulty; the checkpoint before it is kept. `rollforward resume` with the run's directory"
    " goes on from it, on a machine that can be trusted"
)


def _read_back(directory: Path) -> tuple[LoopState, list[str]]:
    """Where state.json says that the loop stands, and the files that are not as they were written, or were not.

    Raises:
        OSError, msgspec.MsgspecError: it cannot be read.
    """
    record = msgspec.json.decode((directory / STATE_NAME).read_bytes(), type=_Record)
    written = {STATE_NAME: record.state_hash, **record.files}
    found = {STATE_NAME: _hash(record.state), **_file_hashes(directory)}
    wrong = sorted(name for name in written.keys() | found.keys() if written.get(name) != found.get(name))
    return msgspec.json.decode(record.state, type=LoopState), wrong


def _hash(encoded: msgspec.Raw) -> str:
    return hashlib.blake2b(bytes(encoded), digest_size=16).hexdigest()


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
