"""A teacher's weights as mapped files: a rank reads the rows that it owns, and a layer's values exist while it is used.

    rows of each tensor    rank 0 | rank 1 | ...      whole experts; blocks of 128 rows where scales go with them
    map --read and check own share--> packed bytes --one all_gather a layer--> of all ranks --unpack--> values

Values are those of `Model`: in native precision they pass through the published formats, whatever the files hold. A
pass unpacks one layer after another into the same memory. With one rank nothing is gathered.

A map of a file that somebody shortens would end the process, so its size is looked at before each read, and what is
read is a copy. Here: reading, sharing, unpacking. Not here: which teacher a directory holds (teacher_source.py), which
one is loaded when (teachers.py).

Letters: V vocabulary, E width of the teacher.
"""

import mmap
import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, cast, overload

import msgspec
import numpy as np
import torch
from torch import Tensor

from rollforward.distill.errors import TeacherError, TeacherReadError
from rollforward.distill.teacher_source import CONFIG_NAME, FileStamp, TeacherSource, changed_file, describe_teacher
from rollforward.kernels.quant.formats import FP8_BLOCK
from rollforward.model.checkpoint import read_stored
from rollforward.model.checkpoint_headers import FORMAT_OF_DTYPE, check_entries, load_checkpoint_config, scan_checkpoint
from rollforward.model.collectives import RankGroups
from rollforward.model.config import ModelConfig
from rollforward.model.errors import CheckpointError, ModelError
from rollforward.model.fingerprint import with_format
from rollforward.model.precision import PackedTensor, published_value, unpack_published
from rollforward.model.safetensors_stream import TORCH_DTYPE, StoredEntry, TensorReader
from rollforward.model.shapes import TensorSpec, is_stacked_expert, param_specs, scale_name, stored_form, unstacked
from rollforward.model.train_config import Precision
from rollforward.model.weights import BlockWeights, MixWeights, ModelWeights, build_block

__all__ = ["ShardedTeacher", "TeacherSource", "describe_teacher", "read_head"]

_PIECE_ELEMENTS = 2**24
"""Elements that are read and unpacked at a time, beside what is gathered."""

_ALIGNED_BYTES = 64
"""Tensors begin at a multiple, as torch's own do: products may take another path elsewhere."""


class _Piece(NamedTuple):
    """Rows of one official tensor, packed as they are stored."""

    param: TensorSpec
    """The canonical tensor that they are of."""
    index: int | slice
    """Where in its value: an expert, or rows."""
    spec: TensorSpec
    """The official tensor, with the shape of these rows and the format of the file."""
    start_row: int

    @property
    def num_bytes(self) -> int:
        """Of data and scales, each aligned."""
        return sum(_aligned(stored.num_bytes) for stored in stored_form(self.spec))


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNED_BYTES) * _ALIGNED_BYTES


class _MappedReader(TensorReader):
    """Reads tensors from files that were mapped once. One thread at a time, but for ``close``, which comes last."""

    def __init__(self, files: Iterable[Path]) -> None:
        """Map files, which are not empty.

        Raises:
            OSError, ValueError: a file cannot be mapped.
        """
        super().__init__()
        self._maps: dict[Path, mmap.mmap] = {}
        try:
            for file in files:
                self._descriptors[file] = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
                self._maps[file] = mmap.mmap(self._descriptors[file], 0, mmap.MAP_SHARED, mmap.PROT_READ)
        except (OSError, ValueError):
            self.close()
            raise

    def stamps(self) -> dict[str, FileStamp]:
        """Return the stamps of what is mapped, which a name may have ceased to stand for."""
        return {file.name: FileStamp.of(os.fstat(descriptor)) for file, descriptor in self._descriptors.items()}

    def read(self, entry: StoredEntry) -> Tensor:
        """See `TensorReader`."""
        end, size = entry.offset + entry.num_bytes, os.fstat(self._descriptors[entry.file]).st_size
        if size < end:  # to touch the map there would end the process
            raise CheckpointError(
                f"{entry.spelling} ends at byte {end} of {entry.file}, which has only {size} by now. Fetch it again"
            )
        raw = torch.empty(entry.num_bytes, dtype=torch.uint8)
        raw.numpy()[...] = np.frombuffer(self._maps[entry.file], np.uint8, entry.num_bytes, entry.offset)
        return raw.view(TORCH_DTYPE[entry.dtype]).view(entry.shape)

    def close(self) -> None:
        """Unmap and close all files."""
        for mapped in self._maps.values():
            mapped.close()
        self._maps.clear()
        self.__exit__()


class _TeacherFiles:
    """The mapped files of a teacher."""

    def __init__(self, source: TeacherSource, precision: Precision) -> None:
        """Read headers and map the files.

        Raises:
            TeacherReadError: they are absent, damaged, or not those that were described.
        """
        self._source, self._precision = source, precision
        try:
            self.config = load_checkpoint_config(source.directory, is_announced=False)
            self._entries = scan_checkpoint(source.directory)
            check_entries(self._entries, self.config)
            self._reader = _MappedReader(sorted({entry.file for entry in self._entries.values()}))
            config_stamp = FileStamp.of((source.directory / CONFIG_NAME).stat())
        except (ModelError, OSError, ValueError) as error:
            raise self._failed(error) from error
        self.params = {spec.name: spec for spec in param_specs(self.config)}
        try:
            self._check_files({CONFIG_NAME: config_stamp, **self._reader.stamps()})
        except TeacherReadError:
            self.close()
            raise

    def _check_files(self, stamps: Mapping[str, FileStamp]) -> None:
        try:
            name = changed_file(self._source, stamps)
        except TeacherError as error:
            raise self._failed(error) from error
        if name is not None:
            raise self._failed(f"{name} was written to, or replaced, during the run")

    def _failed(self, what: object) -> TeacherReadError:
        return TeacherReadError(
            f"teacher {self._source.name}: {str(what).rstrip('.')}. Its directory {self._source.directory} must stay"
            " as it was; put it back and resume"
        )

    def share(self, param: TensorSpec, rank: int, num_ranks: int) -> Iterator[_Piece]:
        """Yield the pieces of a canonical tensor that a rank owns; all ranks' together are the tensor, each row once.

        What is quantised together is never cut, so a piece's value is that of its rows in the whole tensor.
        """
        stored = with_format(param, FORMAT_OF_DTYPE[self._entries[unstacked(param)[0].name].dtype])
        if is_stacked_expert(param.name):
            start, stop = _bounds(param.shape[0], rank, num_ranks)
            for expert, spec in list(enumerate(unstacked(stored)))[start:stop]:
                yield _Piece(param, expert, spec, 0)
            return
        rows, block = param.shape[0], FP8_BLOCK if param.format == "fp8" else 1
        start, stop = (min(edge * block, rows) for edge in _bounds(-(-rows // block), rank, num_ranks))
        step = max(_PIECE_ELEMENTS // (param.num_elements // rows) // block, 1) * block
        for first in range(start, stop, step):
            last = min(first + step, stop)
            spec = msgspec.structs.replace(stored, shape=(last - first, *param.shape[1:]))
            yield _Piece(param, slice(first, last), spec, first)

    def read(self, piece: _Piece) -> PackedTensor:
        """Read and check a piece.

        Raises:
            TeacherReadError: as `read_stored`, or a file has become shorter.
        """
        name, forms = piece.spec.name, stored_form(piece.spec)
        entries = {name: _rows(self._entries[name], piece.start_row, forms[0].shape)}
        if len(forms) > 1:
            scale, first = scale_name(name), piece.start_row // FP8_BLOCK
            entries[scale] = _rows(self._entries[scale], first, forms[1].shape)
        try:
            return read_stored(self._reader, entries, piece.spec, self.config)
        except ModelError as error:
            raise self._failed(error) from error

    @torch.no_grad()
    def unpack(self, piece: _Piece, packed: PackedTensor, value: Tensor) -> None:
        """Write the value that a forward reads into that of the whole tensor."""
        rows = unpack_published(packed)
        value[piece.index] = rows if self._precision == "fp32" else published_value(piece.param.format, rows)

    def read_value(self, name: str, until: threading.Event | None = None) -> Tensor:
        """Return the value of a whole tensor, a piece in memory beside it; unfinished once ``until`` is set."""
        value = torch.empty(self.params[name].shape)
        for piece in self.share(self.params[name], 0, 1):
            if until is not None and until.is_set():
                break
            self.unpack(piece, self.read(piece), value)
        return value

    def close(self) -> None:
        """Unmap the files."""
        self._reader.close()


def _bounds(num_parts: int, rank: int, num_ranks: int) -> tuple[int, int]:
    return num_parts * rank // num_ranks, num_parts * (rank + 1) // num_ranks


def _rows(entry: StoredEntry, first: int, shape: tuple[int, ...]) -> StoredEntry:
    """The entry of some rows, with the shape that they have."""
    row_bytes = entry.num_bytes // entry.shape[0]
    return msgspec.structs.replace(entry, offset=entry.offset + first * row_bytes, shape=shape)


def read_head(
    source: TeacherSource,
    *,
    precision: Precision,
    until: threading.Event | None = None,
) -> Tensor:
    """Return the value of a teacher's head, [V, E] float32; files are mapped while it is read.

    Args:
        source: the teacher, whose files must not have changed since they were stamped. precision: of the forward.
        until: once it is set nothing more is read, and what is returned means nothing.

    Raises:
        TeacherReadError: a file is absent, damaged or another, or a value is not finite.
    """
    files = _TeacherFiles(source, precision)
    try:
        return files.read_value("head.weight", until)
    finally:
        files.close()


class ShardedTeacher:
    """The trunk of a teacher, of which this rank reads its share of rows, mapped from construction to ``close``.

    States: mapped -> (``prefetch``) -> passes, of ``weights`` or ``skip_pass`` -> ``close``. ``prefetch`` may run in
    another thread, which has ended before anything else is called; passes are collective.
    """

    def __init__(self, source: TeacherSource, groups: RankGroups, *, precision: Precision) -> None:
        """Map the files. Not collective.

        Args:
            source: the teacher, whose files must not have changed since they were stamped; every rank has the same
                bytes in its directory (`local_teacher`).
            groups: all ranks, each of which owns a share.
            precision: native values pass through the published formats, fp32 ones are as stored.

        Raises:
            TeacherReadError: a file is absent, damaged, or another.
        """
        self._groups = groups
        self._files = _TeacherFiles(source, precision)
        layers = range(self.config.num_hidden_layers)
        # What is gathered at once, in the order of a pass: the embedding, then layer after layer.
        self._bundles = [
            tuple(spec for name, spec in self._files.params.items() if name.startswith(prefix))
            for prefix in ("embed.", *(f"layers.{layer}." for layer in layers))
        ]
        try:
            read = self._files.read_value
            self._head_mix = MixWeights(fn=read("hc_head_fn"), base=read("hc_head_base"), scale=read("hc_head_scale"))
            self._norm = read("norm.weight")
        except TeacherReadError:
            self.close()
            raise

    @property
    def config(self) -> ModelConfig:
        """The teacher's hyper-parameters."""
        return self._files.config

    def prefetch(self, until: threading.Event | None = None) -> None:
        """Read and check this rank's share, so that passes find it in memory, where the system keeps it. Not
        collective.

        Args:
            until: once it is set nothing more is read.

        Raises:
            TeacherReadError: a value or scale is not finite, or a file has become shorter.
        """
        for bundle in self._bundles:
            for piece in self._share(bundle, self._groups.rank):
                if until is not None and until.is_set():
                    return
                self._files.read(piece)

    def weights(self) -> ModelWeights:
        """Return what `Transformer.streams` and `hidden` read, for any number of passes. Not collective.

        ``embed`` and each item of ``blocks`` are gathered when they are asked for, by all ranks in the same order, and
        are overwritten when the next is. There is no head and no MTP module.
        """
        # A record holds tensors; these come and go, which the type of ModelWeights cannot say.
        return cast("ModelWeights", _PassingWeights(self, self._head_mix, self._norm))

    def skip_pass(self) -> None:
        """Take part in the gathers of a pass in which this rank has nothing to compute; collective."""
        if self._groups.num_ranks > 1:
            for bundle in self._bundles:
                self._gather(bundle)

    def close(self) -> None:
        """Unmap the files."""
        self._files.close()

    @property
    def num_value_bytes(self) -> int:
        """Memory of the largest layer's values."""
        return max(sum(map(_value_bytes, bundle)) for bundle in self._bundles)

    def fill(self, index: int, workspace: Tensor) -> dict[str, Tensor]:
        """Gather and unpack the values of a bundle; collective.

        Args:
            index: 0 is the embedding, 1 the first layer.
            workspace: uint8 [num_value_bytes], whose content is replaced.

        Returns:
            Values by canonical name, as views of the workspace.

        Raises:
            TeacherReadError: as `prefetch`. RankLostError: another rank died.
        """
        bundle, values, start = self._bundles[index], dict[str, Tensor](), 0
        for spec in bundle:
            dtype = torch.int64 if spec.format == "int64" else torch.float32
            num_bytes = spec.num_elements * dtype.itemsize
            values[spec.name] = workspace[start : start + num_bytes].view(dtype).view(spec.shape)
            start += _value_bytes(spec)
        if self._groups.num_ranks == 1:
            pieces = ((piece, self._files.read(piece)) for piece in self._share(bundle, 0))
        else:
            pieces = self._gathered_pieces(bundle, self._gather(bundle))
        for piece, packed in pieces:
            self._files.unpack(piece, packed, values[piece.param.name])
        return values

    def _share(self, bundle: Sequence[TensorSpec], rank: int) -> Iterator[_Piece]:
        for spec in bundle:
            yield from self._files.share(spec, rank, self._groups.num_ranks)

    def _gather(self, bundle: Sequence[TensorSpec]) -> Tensor:
        """Return the packed shares of all ranks, uint8 [ranks, S]."""
        num_ranks = self._groups.num_ranks
        longest = max(sum(piece.num_bytes for piece in self._share(bundle, rank)) for rank in range(num_ranks))
        mine, start = torch.zeros(longest, dtype=torch.uint8), 0
        for piece in self._share(bundle, self._groups.rank):
            packed = self._files.read(piece)
            for part in (packed.data,) if packed.scale is None else (packed.data, packed.scale):
                mine[start : start + part.nbytes] = part.view(torch.uint8).view(-1)
                start += _aligned(part.nbytes)
        return self._groups.all_gather(mine, over="all")

    def _gathered_pieces(self, bundle: Sequence[TensorSpec], gathered: Tensor) -> Iterator[tuple[_Piece, PackedTensor]]:
        for rank, raw in enumerate(gathered):
            start = 0
            for piece in self._share(bundle, rank):
                parts: list[Tensor] = []
                for form in stored_form(piece.spec):
                    part = raw[start : start + form.num_bytes]
                    parts.append(part.view(TORCH_DTYPE[form.dtype]).view(form.shape))
                    start += _aligned(form.num_bytes)
                scale = parts[1] if len(parts) > 1 else None
                yield piece, PackedTensor(format=piece.spec.format, data=parts[0], scale=scale)


def _value_bytes(spec: TensorSpec) -> int:
    return _aligned(spec.num_elements * (8 if spec.format == "int64" else 4))


class _PassingWeights:
    """Weights of which the embedding or one layer exists at a time."""

    def __init__(self, teacher: ShardedTeacher, head_mix: MixWeights, norm: Tensor) -> None:
        self.head_mix, self.norm, self.mtp = head_mix, norm, None
        self._teacher = teacher
        self._workspace = torch.empty(teacher.num_value_bytes, dtype=torch.uint8)
        self.blocks = _PassingBlocks(teacher, self._workspace)

    @property
    def embed(self) -> Tensor:
        """[V, E]."""
        return self._teacher.fill(0, self._workspace)["embed.weight"]


class _PassingBlocks(Sequence[BlockWeights]):
    """A layer when it is asked for; it is gone when the next one is."""

    def __init__(self, teacher: ShardedTeacher, workspace: Tensor) -> None:
        self._teacher, self._workspace = teacher, workspace

    def __len__(self) -> int:
        return self._teacher.config.num_hidden_layers

    @overload
    def __getitem__(self, index: int) -> BlockWeights: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[BlockWeights]: ...
    def __getitem__(self, index: int | slice) -> BlockWeights | Sequence[BlockWeights]:
        if isinstance(index, slice) or not 0 <= index < len(self):
            raise IndexError(f"layer {index} of {len(self)}; one is asked for at a time, by its number")
        return build_block(self._teacher.config, self._teacher.fill(index + 1, self._workspace), index)
