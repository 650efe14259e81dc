"""The samples of a step as Arrow files, written once by the loop and mapped into memory by every learner rank.

samples/step_000012/   trajectories.arrow   a row a trajectory: identity, scores, lengths, where its tokens lie
                       tokens.arrow         a row a token: what a loss needs of each position

Uncompressed Arrow IPC, one record batch a file, so that a micro-batch is a slice of the map and no copy of it. Arrow
has no checksums, so each trajectory's row carries two: of the row, verified on opening, and of its tokens, verified
when they are read.
The files only carry a step from sampling to learning: they are made anew from the token log where they are lost, and
go once a checkpoint covers the step. Here: the bytes. What stands in them is decided in `batch.py`, who reads what in
`packing.py`.

Letters: T tokens of the step, L layers, K experts of a token.
"""

import itertools
import shutil
import zlib
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rollforward.conf.errors import way_out
from rollforward.model.checkpoint import sync_path
from rollforward.rl.batch import PackedBatch, StepBatch, TrajectoryRow, concatenate
from rollforward.rl.errors import SampleFileError
from rollforward.rl.packing import MicroBatchPlan
from rollforward.rollout.types import RequestId

SAMPLES_NAME = "samples"
"""Folder of a run directory that holds the samples of its steps."""

TRAJECTORIES_NAME = "trajectories.arrow"
"""File of a step with a row a trajectory."""

TOKENS_NAME = "tokens.arrow"
"""File of a step with a row a token."""

_FORMAT = {b"format": b"rollforward-samples-1"}
_WAY_OUT = "Start the run again with the same run_dir: it writes the step anew from its token log"

_TRAJECTORY_SCHEMA = pa.schema(
    [
        pa.field("step", pa.int64(), nullable=False),
        pa.field("prompt", pa.int64(), nullable=False),
        pa.field("member", pa.int64(), nullable=False),
        pa.field("task", pa.utf8(), nullable=False),
        pa.field("reward", pa.float64(), nullable=False),
        pa.field("advantage", pa.float64(), nullable=False),
        pa.field("token_weight", pa.float64(), nullable=False),
        pa.field("segment_lengths", pa.list_(pa.int64()), nullable=False),
        pa.field("num_tokens", pa.int64(), nullable=False),
        pa.field("num_trained_tokens", pa.int64(), nullable=False),
        pa.field("num_turns", pa.int64(), nullable=False),
        pa.field("stop_reason", pa.utf8(), nullable=False),
        pa.field("failure", pa.utf8()),
        pa.field("policy_version", pa.int64(), nullable=False),
        pa.field("first_token", pa.int64(), nullable=False),
        pa.field("token_checksum", pa.uint32(), nullable=False),
        pa.field("row_checksum", pa.uint32(), nullable=False),
    ],
    metadata=_FORMAT,
)
_TOKEN_COLUMNS: dict[str, type[np.generic]] = {
    "token_ids": np.int32,
    "target_ids": np.int32,
    "trained_mask": np.uint8,
    "behavior_logprobs": np.float32,
    "advantages": np.float32,
    "token_weight": np.float32,
}


class _Tokens(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The token columns of a step, [T] each, as views of the map or of memory."""

    columns: dict[str, npt.NDArray[Any]]
    """By the names of `_TOKEN_COLUMNS`."""
    routes_TLK: npt.NDArray[np.int16] | None
    kept_offsets: npt.NDArray[np.int64] | None
    """[T + 1]. Where each position's kept set begins in `kept_ids`, and where the last one ends."""
    kept_ids: npt.NDArray[np.int32] | None


class _Place(msgspec.Struct, frozen=True, kw_only=True):
    """Where the tokens of a row lie, and what they add up to."""

    first_token: int
    token_checksum: int


class SpokenTokens(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """What was said in some trajectories, end to end, and which of it is trained; the fields of `PackedBatch`."""

    token_ids_T: npt.NDArray[np.int32]
    """[T]."""
    sequence_lengths_B: npt.NDArray[np.int32]
    """[B]."""
    trained_mask_T: npt.NDArray[np.bool_]
    """[T]."""
    ids: tuple[RequestId, ...]
    """Of the trajectories."""


class StepSamples:
    """The samples of one step, mapped into memory; nothing is read before it is asked for.

    Arrays that it gives out are read-only views of the map and outlive both this object and the file.
    """

    def __init__(
        self,
        directory: Path,
        rows: Sequence[TrajectoryRow],
        places: Sequence[_Place],
        tokens: _Tokens,
    ) -> None:
        """Hold what `open_step` found."""
        self.rows = tuple(rows)
        self._directory, self._places, self._tokens = directory, places, tokens

    def micro_batch(self, plan: MicroBatchPlan) -> PackedBatch:
        """Return the trajectories of a plan end to end.

        Consecutive rows, which is what `plan_micro_batches` makes, are slices of the map; others are copied together.

        Raises:
            SampleFileError: a trajectory is not what was written.
        """
        for index in plan.rows:
            if _token_checksum(self._tokens, self._span(index, index)) != self._places[index].token_checksum:
                raise SampleFileError(
                    f"{self._directory / TOKENS_NAME}: the checksum of trajectory {self.rows[index].id} does not fit;"
                    f" the file is damaged or of another step. {_WAY_OUT}"
                )
        runs = itertools.groupby(enumerate(plan.rows), key=lambda item: item[1] - item[0])
        parts = [self._consecutive([index for _, index in run]) for _, run in runs]
        return parts[0] if len(parts) == 1 else concatenate(parts)

    def spoken(self, plan: MicroBatchPlan) -> SpokenTokens:
        """Return the tokens of a plan's trajectories alone. Unlike ``micro_batch`` it reads no other column, and so
        cannot verify them: for names and checksums, not to learn from."""
        spans = [self._span(index, index) for index in plan.rows]
        rows = [self.rows[index] for index in plan.rows]
        columns = self._tokens.columns
        return SpokenTokens(
            token_ids_T=np.concatenate([columns["token_ids"][span] for span in spans]),
            sequence_lengths_B=np.array([length for row in rows for length in row.segment_lengths], dtype=np.int32),
            trained_mask_T=np.concatenate([columns["trained_mask"][span] for span in spans]).view(np.bool_),
            ids=tuple(row.id for row in rows),
        )

    def _span(self, first: int, last: int) -> slice:
        """Tokens of consecutive rows."""
        return slice(self._places[first].first_token, self._places[last].first_token + self.rows[last].num_tokens)

    def _consecutive(self, indices: Sequence[int]) -> PackedBatch:
        rows = [self.rows[index] for index in indices]
        span = self._span(indices[0], indices[-1])
        kept_counts_T, kept_ids = _kept(self._tokens, span)
        columns = {f"{name}_T": column[span] for name, column in self._tokens.columns.items()}
        columns["trained_mask_T"] = columns["trained_mask_T"].view(np.bool_)
        routes_TLK = self._tokens.routes_TLK
        return PackedBatch(
            sequence_lengths_B=np.array([length for row in rows for length in row.segment_lengths], dtype=np.int32),
            trajectory_T=np.repeat(np.arange(len(rows), dtype=np.int32), [row.num_tokens for row in rows]),
            trajectory_tokens_N=np.array([row.num_trained_tokens for row in rows], dtype=np.int32),
            ids=tuple(row.id for row in rows),
            routes_TLK=None if routes_TLK is None else routes_TLK[span],
            kept_counts_T=kept_counts_T,
            kept_ids=kept_ids,
            **columns,
        )


def step_directory(root: Path, step: int) -> Path:
    """Return where the samples of a step lie under the folder of all samples."""
    return root / f"step_{step:06d}"


def write_step(root: Path, step: int, batch: StepBatch) -> Path:
    """Write the samples of a step durably, whole or not at all; what an earlier process left of it is replaced.

    Args:
        root: folder of all samples; made if absent.
        step: number of the step.
        batch: what it trains on.

    Returns:
        The step's directory, for `open_step`.

    Raises:
        SampleFileError: the disk refuses.
    """
    target = step_directory(root, step)
    partial = root / f".{target.name}.partial"
    try:
        root.mkdir(parents=True, exist_ok=True)
        for leftover in (partial, target):
            if leftover.exists():
                shutil.rmtree(leftover)
        partial.mkdir()
        tokens = _columns(concatenate(batch.trajectories))
        _write_file(partial / TRAJECTORIES_NAME, _trajectory_batch(batch.rows, tokens))
        _write_file(partial / TOKENS_NAME, _token_batch(tokens))
        sync_path(partial)
        partial.rename(target)
        sync_path(root)
    except OSError as error:
        remedy = way_out(error, room="Make room, or set checkpoint_every_steps lower")
        raise SampleFileError(
            f"{target} cannot be written: {error}. {remedy}; samples are kept until a checkpoint covers their step. The"
            " same command with the same run_dir goes on"
        ) from error
    return target


def open_step(directory: Path) -> StepSamples:
    """Map the samples of a step into memory.

    Args:
        directory: from `write_step`.

    Raises:
        SampleFileError: a file is absent, torn, or no such file; names it and the way out.
    """
    with _naming(directory / TRAJECTORIES_NAME):
        light = _map_file(directory / TRAJECTORIES_NAME, lambda _: _TRAJECTORY_SCHEMA)
        light.validate(full=True)
        found = [_row(values) for values in light.to_pylist()]
    with _naming(directory / TOKENS_NAME):
        heavy = _map_file(directory / TOKENS_NAME, _token_schema)
        tokens = _mapped_columns(heavy)
    rows, places = [row for row, _ in found], [place for _, place in found]
    num_tokens = sum(row.num_tokens for row in rows)
    if num_tokens != heavy.num_rows:
        raise SampleFileError(
            f"{directory}: {TRAJECTORIES_NAME} describes {num_tokens} tokens, {TOKENS_NAME} holds {heavy.num_rows};"
            f" they are of two steps. {_WAY_OUT}"
        )
    return StepSamples(directory, rows, places, tokens)


def remove_steps(root: Path, *, before: int) -> None:
    """Unlink the samples of all steps below ``before``, and what killed processes left half written.

    A rank that still maps one keeps what it mapped.
    """
    for directory in sorted(root.glob(".step_*.partial")):
        shutil.rmtree(directory)
    for directory in sorted(root.glob("step_*")):
        step = directory.name.removeprefix("step_")
        if step.isdecimal() and int(step) < before:
            shutil.rmtree(directory)


def _columns(packed: PackedBatch) -> _Tokens:
    """The heavy columns of a step that lies end to end."""
    columns = {name: getattr(packed, f"{name}_T") for name in _TOKEN_COLUMNS}
    columns["trained_mask"] = columns["trained_mask"].view(np.uint8)
    offsets = None
    if packed.kept_counts_T is not None:
        offsets = np.concatenate((np.zeros(1, np.int64), np.cumsum(packed.kept_counts_T, dtype=np.int64)))
    return _Tokens(columns=columns, routes_TLK=packed.routes_TLK, kept_offsets=offsets, kept_ids=packed.kept_ids)


def _kept(tokens: _Tokens, span: slice) -> tuple[npt.NDArray[np.int32] | None, npt.NDArray[np.int32] | None]:
    """Counts and ids of the kept sets of a span of positions."""
    if tokens.kept_offsets is None or tokens.kept_ids is None:
        return None, None
    offsets = tokens.kept_offsets[span.start : span.stop + 1]
    return np.diff(offsets).astype(np.int32), tokens.kept_ids[offsets[0] : offsets[-1]]


def _token_checksum(tokens: _Tokens, span: slice) -> int:
    """CRC-32 over every byte of a span of tokens, and over the shape of their routes."""
    shape = None if tokens.routes_TLK is None else tokens.routes_TLK.shape[1:]
    value = zlib.crc32(repr(shape).encode())
    parts = [tokens.columns[name][span] for name in _TOKEN_COLUMNS]
    if tokens.routes_TLK is not None:
        parts.append(tokens.routes_TLK[span])
    parts.extend(part for part in _kept(tokens, span) if part is not None)
    for part in parts:
        value = zlib.crc32(np.ascontiguousarray(part).data, value)
    return value


def _row_checksum(row: TrajectoryRow, place: _Place) -> int:
    return zlib.crc32(msgspec.json.encode((row, place)))


def _trajectory_batch(rows: Sequence[TrajectoryRow], tokens: _Tokens) -> pa.RecordBatch:
    lines: list[dict[str, Any]] = []
    first_token = 0
    for row in rows:
        span = slice(first_token, first_token + row.num_tokens)
        place = _Place(first_token=first_token, token_checksum=_token_checksum(tokens, span))
        values: dict[str, Any] = msgspec.structs.asdict(row)
        del values["id"]
        lines.append(
            {
                **values,
                "step": row.id.step,
                "prompt": row.id.prompt,
                "member": row.id.member,
                "stop_reason": row.stop_reason.value,
                "failure": None if row.failure is None else row.failure.value,
                "num_tokens": row.num_tokens,
                **msgspec.structs.asdict(place),
                "row_checksum": _row_checksum(row, place),
            }
        )
        first_token = span.stop
    return pa.RecordBatch.from_pylist(lines, schema=_TRAJECTORY_SCHEMA)


def _row(values: dict[str, Any]) -> tuple[TrajectoryRow, _Place]:
    """A line of trajectories.arrow as it was written, or a ValueError."""
    identity = {name: values[name] for name in ("step", "prompt", "member")}
    row, place = msgspec.convert({**values, "id": identity}, TrajectoryRow), msgspec.convert(values, _Place)
    if _row_checksum(row, place) != values["row_checksum"] or row.num_tokens != values["num_tokens"]:
        raise ValueError(f"the checksum of the row of {row.id} does not fit")
    return row, place


def _token_batch(tokens: _Tokens) -> pa.RecordBatch:
    """A record batch over the memory of the columns."""
    arrays = [pa.array(tokens.columns[name]) for name in _TOKEN_COLUMNS]
    names = list(_TOKEN_COLUMNS)
    if tokens.routes_TLK is not None:
        _, layers, experts = tokens.routes_TLK.shape
        flat = pa.array(np.ascontiguousarray(tokens.routes_TLK).reshape(-1))
        by_layer = pa.FixedSizeListArray.from_arrays(flat, experts)
        arrays.append(pa.FixedSizeListArray.from_arrays(by_layer, layers))
        names.append("routes")
    if tokens.kept_offsets is not None:
        arrays.append(pa.LargeListArray.from_arrays(tokens.kept_offsets, tokens.kept_ids))
        names.append("kept")
    found = pa.schema([pa.field(name, array.type) for name, array in zip(names, arrays, strict=True)])
    return pa.RecordBatch.from_arrays(arrays, schema=_token_schema(found))


def _token_schema(like: pa.Schema) -> pa.Schema:
    """The schema of tokens.arrow, with those of the optional columns that `like` has in a form that can be read."""
    fields = [pa.field(name, pa.from_numpy_dtype(dtype), nullable=False) for name, dtype in _TOKEN_COLUMNS.items()]
    if "routes" in like.names:
        kind = like.field("routes").type
        shape = (0, 0)
        if pa.types.is_fixed_size_list(kind) and pa.types.is_fixed_size_list(kind.value_type):
            shape = (kind.list_size, kind.value_type.list_size)
        fields.append(pa.field("routes", pa.list_(pa.list_(pa.int16(), shape[1]), shape[0]), nullable=False))
    if "kept" in like.names:
        fields.append(pa.field("kept", pa.large_list(pa.int32()), nullable=False))
    return pa.schema(fields, metadata=_FORMAT)


def _mapped_columns(batch: pa.RecordBatch) -> _Tokens:
    """The columns of tokens.arrow as views of the map."""
    routes_TLK = kept_offsets = kept_ids = None
    if "routes" in batch.schema.names:
        routes = batch.column("routes")
        flat = routes.values.values.to_numpy(zero_copy_only=True)
        routes_TLK = flat.reshape(batch.num_rows, routes.type.list_size, routes.type.value_type.list_size)
    if "kept" in batch.schema.names:
        kept = batch.column("kept")
        kept_offsets, kept_ids = kept.offsets.to_numpy(zero_copy_only=True), kept.values.to_numpy(zero_copy_only=True)
    return _Tokens(
        columns={name: batch.column(name).to_numpy(zero_copy_only=True) for name in _TOKEN_COLUMNS},
        routes_TLK=routes_TLK,
        kept_offsets=kept_offsets,
        kept_ids=kept_ids,
    )


def _write_file(file: Path, batch: pa.RecordBatch) -> None:
    with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_file(sink, batch.schema) as writer:
        writer.write_batch(batch)
    sync_path(file)


@contextmanager
def _naming(file: Path) -> Generator[None]:
    """Turns whatever damage makes of a file into one error that names it."""
    try:
        yield
    except (pa.ArrowException, OSError, ValueError) as error:
        raise SampleFileError(f"{file} cannot be read: {error}. {_WAY_OUT}") from error


def _map_file(file: Path, schema_like: Callable[[pa.Schema], pa.Schema]) -> pa.RecordBatch:
    reader = pa.ipc.open_file(pa.memory_map(str(file), "r"))
    found, expected = reader.schema, schema_like(reader.schema)
    if not found.equals(expected, check_metadata=True):
        absent = [f"{field.name} {field.type}" for field in expected if field not in list(found)]
        metadata = (found.metadata or {}).get(b"format", b"none").decode(errors="replace")
        raise ValueError(
            f"its form is {metadata}, this version reads {_FORMAT[b'format'].decode()}; columns that are absent or"
            f" differ: {', '.join(absent) or 'none'}"
        )
    if reader.num_record_batches != 1:
        raise ValueError(f"it holds {reader.num_record_batches} record batches instead of 1")
    batch = reader.get_batch(0)
    batch.validate(full=False)
    return batch
