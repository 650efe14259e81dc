"""A checkpoint's folder, written whole or not at all, tensor by tensor.

    .NAME.partial/ made --> shards, each with its header first --> index, other files --> synced --renamed--> NAME

No half-written folder ever has the target's name. What a killed writer left is replaced by the next one.

What does not live here: the format of a file (`safetensors_stream.py`), which tensors there are (`checkpoint.py`,
`convert.py`).
"""

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import torch

from rollforward.conf.errors import way_out
from rollforward.model.checkpoint_headers import INDEX_NAME
from rollforward.model.errors import CheckpointError
from rollforward.model.safetensors_stream import ShardFile, sync_path
from rollforward.model.shapes import StoredTensor

MAX_SHARD_BYTES = 2 * 2**30
"""A shard is closed before its data would exceed this."""


class CheckpointWriter:
    """Writes the tensors that it was made with, in any order, then `publish`. Use as a context manager.

    States: entered -> `write` for every byte of every tensor -> `publish`, after which the folder has its name. Left
    without it, or by an error, nothing is published and what was written is removed. A process that is killed leaves
    `.NAME.partial`, which the next writer of NAME replaces.
    """

    def __init__(
        self, directory: Path, groups: Sequence[Sequence[StoredTensor]], *, max_shard_bytes: int = MAX_SHARD_BYTES
    ) -> None:
        """Plan the shards.

        Args:
            directory: the target; must not exist, its parent must.
            groups: all tensors; those of a group (data and scale) lie in one shard.
            max_shard_bytes: a group that is larger has a shard of its own.

        Raises:
            CheckpointError: the target exists.
        """
        check_target(directory)
        self._directory = directory
        self._partial = directory.with_name(f".{directory.name}.partial")
        # Held open, or its number could be given to a folder that another process puts in its place.
        self._folder = -1
        self._shards = _planned_shards(groups, max_shard_bytes)
        self._shard_of = {one.name: number for number, shard in enumerate(self._shards) for one in shard}
        self._open: dict[int, ShardFile] = {}
        self._num_closed = 0

    def __enter__(self) -> "CheckpointWriter":
        """Make the folder beside the target.

        Raises:
            CheckpointError: the disk refuses.
        """
        try:
            if self._partial.exists():
                shutil.rmtree(self._partial)
            self._partial.mkdir()
            self._folder = os.open(self._partial, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise self._refused(error) from error
        return self

    def __exit__(self, *_error: object) -> None:
        for shard in self._open.values():
            shard.abandon()
        self._open.clear()
        with suppress(OSError):
            if self._is_ours():  # not published, where it has another name
                shutil.rmtree(self._partial)
        if self._folder >= 0:
            os.close(self._folder)
            self._folder = -1

    def write(self, name: str, data: torch.Tensor, start_bytes: int = 0) -> None:
        """Write a tensor, or a contiguous run of its elements; see `ShardFile.write`.

        Raises:
            CheckpointError: the disk refuses.
        """
        number = self._shard_of[name]
        try:
            if number not in self._open:
                self._open[number] = ShardFile(self._partial / self._file_name(number), self._shards[number])
            shard = self._open[number]
            shard.write(name, data, start_bytes)
            if shard.is_full:
                shard.close()
                del self._open[number]
                self._num_closed += 1
        except OSError as error:
            raise self._refused(error) from error

    def publish(self, files: Mapping[str, bytes]) -> None:
        """Write the index and other files, make everything durable and give the folder its name.

        Args:
            files: name -> contents of what must arrive together with the weights.

        Raises:
            CheckpointError: the disk refuses; the target has come to exist, or another process writes it too.
        """
        assert self._num_closed == len(self._shards), f"{self._num_closed} of {len(self._shards)} shards were written"
        weight_map = {name: self._file_name(number) for name, number in self._shard_of.items()}
        total_bytes = sum(one.num_bytes for shard in self._shards for one in shard)
        index = {"metadata": {"total_size": total_bytes}, "weight_map": dict(sorted(weight_map.items()))}
        try:
            for name, contents in {INDEX_NAME: json_bytes(index), **files}.items():
                assert name == Path(name).name, f"{name} is no file name"
                _write_synced(self._partial / name, contents)
            sync_path(self._partial)
            check_target(self._directory)
            if not self._is_ours():
                raise CheckpointError(
                    f"{self._partial} was replaced by another process, which writes {self._directory} too. Nothing was"
                    " published by this one; let one of them do it."
                )
            self._partial.rename(self._directory)
            sync_path(self._directory.parent)
        except OSError as error:
            raise self._refused(error) from error

    def _is_ours(self) -> bool:
        return self._folder >= 0 and os.path.samestat(os.fstat(self._folder), os.lstat(self._partial))

    def _file_name(self, number: int) -> str:
        return f"model-{number + 1:05d}-of-{len(self._shards):05d}.safetensors"

    def _refused(self, error: OSError) -> CheckpointError:
        return CheckpointError(f"{self._directory} cannot be written: {error}. {way_out(error)}; nothing was published")


def check_target(directory: Path) -> None:
    """Refuse to write over anything, a link that leads nowhere included, and into a folder that is not there.

    Raises:
        CheckpointError: there is something by that name, or no folder for it.
    """
    if directory.exists() or directory.is_symlink():
        raise CheckpointError(
            f"{directory} exists; a checkpoint is never overwritten. Choose another name or remove it."
        )
    if not directory.parent.is_dir():
        raise CheckpointError(f"{directory.parent}, in which to write, is no folder. Make it, or choose another place.")


def _planned_shards(groups: Sequence[Sequence[StoredTensor]], max_shard_bytes: int) -> list[list[StoredTensor]]:
    shards: list[list[StoredTensor]] = []
    free = 0
    for group in groups:
        size = sum(one.num_bytes for one in group)
        if not shards or size > free:
            shards.append([])
            free = max_shard_bytes
        shards[-1].extend(group)
        free -= size
    return shards


def json_bytes(value: object) -> bytes:
    """Return the contents of a JSON file for people to read."""
    return (json.dumps(value, indent=2) + "\n").encode()


def _write_synced(file: Path, contents: bytes) -> None:
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    with os.fdopen(descriptor, "wb") as opened:
        opened.write(contents)
        opened.flush()
        os.fsync(descriptor)
