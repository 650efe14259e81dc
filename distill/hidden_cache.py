"""What teachers make of a step, on disk between scoring and learning: one Arrow file a micro-batch.

    teacher_hidden/step_000012/   0003-NAME.arrow   plan 3 of the step, whose teacher is NAME (hidden_shard.py)

    begin --which plans have no whole and right file--> scoring --write--> files --read, mapped--> learner --> free

A file is finished if it verifies, and nothing else says so: it gets its name only when it is whole, and carries what it
is of. Whatever is absent, damaged, stale or foreign is computed again, since the step's trajectories are still there.
Files have a bound, which is checked before the first of a step is written. Those of a step are freed when the student
has learned from them: should the run go back to a checkpoint before it, they are computed again.
"""

import shutil
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from pathlib import Path

from torch import Tensor

from rollforward.conf.errors import way_out
from rollforward.distill.errors import HiddenCacheError
from rollforward.distill.hidden_shard import (
    ABSENT,
    CachedShard,
    ShardKey,
    open_shard,
    remove_path,
    shard_bytes,
    write_shard,
)
from rollforward.model.checkpoint import sync_path

HIDDEN_NAME = "teacher_hidden"
"""Folder of a run directory that holds the hidden vectors of the step that is being learned."""

_GIB = 1 << 30
_WAY_OUT = "Start the run again with the same run_dir: it scores anew what is missing"
_SMALLER = "or lower prompts_per_step, samples_per_prompt or sampling.max_new_tokens"


class HiddenCache:
    """The hidden vectors of the step that is being learned; every process has its own object over the same folder.

    One process calls `begin` and `free`, before and after all others `write` and `read`; a shard has one writer.

    Args:
        root: folder of all steps; made when the first one begins.
        max_bytes: what the files of one step may take.
    """

    def __init__(self, root: Path, *, max_bytes: int) -> None:
        """Touch nothing."""
        self._root, self._max_bytes = root, max_bytes

    def path(self, step: int, index: int, teacher: str) -> Path:
        """Return where the shard of a plan lies.

        Args:
            step: number of the step.
            index: position of the plan among those of the step, from 0.
            teacher: name of its teacher.
        """
        return self._directory(step) / f"{index:04d}-{teacher}.arrow"

    def begin(self, step: int, keys: Sequence[ShardKey]) -> tuple[list[int], list[str]]:
        """Make ready for the shards of a step, of which an earlier process may have left some.

        Everything of earlier steps goes, and of this one all that is not one of its shards, whole and right. A later
        step, which a run had reached before it went back to a checkpoint, stays as long as there is room.

        Args:
            step: number of the step.
            keys: of all its plans, in order.

        Returns:
            The plans that must be computed, and a sentence on each file that was found and could not be used.

        Raises:
            HiddenCacheError: the step's shards exceed `max_bytes` (nothing was touched then), those to be computed
                exceed what the disk has free, or the disk refuses. Nothing was written.
        """
        all_bytes = expected_bytes(keys)
        if all_bytes > self._max_bytes:
            raise HiddenCacheError(
                f"step {step}: hidden vectors of teachers take {all_bytes / _GIB:.3g} GiB;"
                f" teacher_cache.max_hidden_gib allows {self._max_bytes / _GIB:.3g}. Raise it, {_SMALLER}"
            )
        directory = self._directory(step)
        files = [self.path(step, index, key.teacher) for index, key in enumerate(keys)]
        with self._naming(directory, "cannot be made ready"):
            for path in self._root.glob("step_*"):
                if _step_of(path) < step or path.is_symlink() or not path.is_dir():
                    remove_path(path)
            self._make_room(step, all_bytes)
            for path in directory.iterdir() if directory.is_dir() else ():
                if path not in files:
                    remove_path(path)
            # The reasons alone: a shard would hold its map.
            found = [_reason(open_shard(file, key)) for file, key in zip(files, keys, strict=True)]
            missing = [index for index, reason in enumerate(found) if reason is not None]
            unusable = [index for index in missing if found[index] != ABSENT]
            for index in unusable:
                remove_path(files[index])
            self._check_room(step, [keys[index] for index in missing])
            self._make(directory)
        return missing, [f"{files[index]} is {found[index]}" for index in unusable]

    def write(self, step: int, index: int, key: ShardKey, hidden_RE: Tensor, teacher_logprobs_R: Tensor) -> int:
        """Write a shard durably, whole or not at all; what has its place is replaced.

        Args:
            step: number of the step.
            index: position of the plan among those of the step.
            key: what the vectors are of.
            hidden_RE: [R, E] as `write_shard` takes it; stored without losing a bit.
            teacher_logprobs_R: [R] float32.

        Returns:
            Size of its file in bytes.

        Raises:
            ValueError: the values are not of the key's form.
            HiddenCacheError: a value is not finite, which names the teacher; or the disk refuses.
        """
        file = self.path(step, index, key.teacher)
        with self._naming(file, "cannot be written"):
            self._make(file.parent)
            return write_shard(file, key, hidden_RE, teacher_logprobs_R)

    def read(self, step: int, index: int, key: ShardKey) -> CachedShard:
        """Return a shard, mapped and verified.

        Raises:
            HiddenCacheError: names the file, and whether it is absent, damaged, stale or foreign.
        """
        file = self.path(step, index, key.teacher)
        found = open_shard(file, key)
        if isinstance(found, str):
            raise HiddenCacheError(f"{file} is {found}. {_WAY_OUT}")
        return found

    def finding(self, step: int, index: int, key: ShardKey) -> str | None:
        """Return None for a shard that `read` would return, and what `read` would say of another."""
        file = self.path(step, index, key.teacher)
        reason = _reason(open_shard(file, key))
        return None if reason is None else f"{file} is {reason}"

    def free(self, step: int) -> None:
        """Remove the shards of a step; whoever has one mapped keeps it.

        Raises:
            HiddenCacheError: the disk refuses.
        """
        with self._naming(self._directory(step), "cannot be removed"):
            remove_path(self._directory(step))

    def _directory(self, step: int) -> Path:
        return self._root / f"step_{step:06d}"

    def _make(self, directory: Path) -> None:
        """Make a step's directory durably."""
        if not directory.is_dir():
            directory.mkdir(parents=True, exist_ok=True)
            sync_path(self._root)

    def _make_room(self, step: int, all_bytes: int) -> None:
        """Let later steps go if they leave no room for the shards of this one."""
        later = [path for path in self._root.glob("step_*") if _step_of(path) > step]
        held_bytes = sum(file.stat().st_size for path in later for file in path.iterdir())
        if held_bytes + all_bytes > self._max_bytes or all_bytes > self._free_bytes():
            for path in later:
                remove_path(path)

    def _free_bytes(self) -> int:
        return shutil.disk_usage(self._place()).free

    def _place(self) -> Path:
        """The folder of all steps, or where it is going to be made."""
        return next(path for path in (self._root, *self._root.absolute().parents) if path.exists())

    def _check_room(self, step: int, keys: Sequence[ShardKey]) -> None:
        needed_bytes, free_bytes = expected_bytes(keys), self._free_bytes()
        if needed_bytes > free_bytes:
            raise HiddenCacheError(
                f"step {step}: hidden vectors of teachers take {needed_bytes / _GIB:.3g} GiB; the disk of"
                f" {self._place()} has {free_bytes / _GIB:.3g} free. Make room, {_SMALLER}; the same command with the"
                " same run_dir goes on"
            )

    @contextmanager
    def _naming(self, path: Path, what: str) -> Generator[None]:
        """Turns what the disk says into one error with the way out."""
        try:
            yield
        except OSError as error:
            raise HiddenCacheError(
                f"{path} {what}: {error}. {way_out(error, room=f'Make room on its disk, {_SMALLER}')}; the same command"
                " with the same run_dir goes on"
            ) from error


def expected_bytes(keys: Iterable[ShardKey]) -> int:
    """Return a bound on what the files of these shards take together, a few KiB above it for each."""
    return sum(shard_bytes(key) for key in keys)


def _step_of(path: Path) -> int:
    """The step whose directory that is; -1 where it is none's."""
    number = path.name.removeprefix("step_")
    return int(number) if number.isdecimal() else -1


def _reason(found: CachedShard | str) -> str | None:
    return found if isinstance(found, str) else None
