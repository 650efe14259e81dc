"""The STEP record: a decode step's columns and their bytes (little-endian).

    n u32 | policy_version u32 | slot u16[n], padded to 4 | token int32[n] | logprob float32[n]
    flag 0x1, ROUTES: layers u16 | experts per token u16 | bytes per expert u32 (1 or 2) | positions u32[n]
                      | expert u8 or u16 [sum of positions, layers, experts per token], padded to 4
    flag 0x2, KEPT:   set size u32[n] | token int32[sum of sizes]

Here: frozen records, pure encode and decode; the hot path of writer and recovery. Not here: the other records
(rollout/wal_records.py).

Letters: N rows, P positions of all rows, L layers, K experts per token.
"""

import math
import struct
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from rollforward.rollout.errors import WalUsageError
from rollforward.rollout.types import ArrayRecord, Int16Array, Int32Array, KeptSets

ROUTES_FLAG = 0x1
"""Flag bit of a STEP with routes."""

KEPT_FLAG = 0x2
"""Flag bit of a STEP with kept sets."""

_SLOT, _TOKEN, _LOGPROB = np.dtype(np.uint16), np.dtype(np.int32), np.dtype(np.float32)
_COUNTS = struct.Struct("<II")
_ROUTES_HEAD = struct.Struct("<HHI")


class StepRoutes(ArrayRecord, frozen=True, kw_only=True, eq=False):
    """Experts of the positions that became known with each row of a STEP.

    A row brings the positions since the slot's token before it: the first token of a request those of the whole prompt,
    a later one that of the token before it and of the observation between, if there is one. So the positions logged
    for a sequence are always as many as come before its newest token.
    """

    counts_N: Int32Array
    """[N] int32. Positions that each row brings; 0 for a request that did not ask."""
    routes_PLK: Int16Array
    """[P, L, K] int16, >= 0. Row after row, position after position; experts in slot order."""


class StepRecord(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """One decode step: for each running slot its next token. Columns of equal length n; a slot occurs at most once."""

    slots: npt.NDArray[np.uint16]
    """[n] uint16."""
    token_ids: npt.NDArray[np.int32]
    """[n] int32. The sampled tokens."""
    logprobs: npt.NDArray[np.float32]
    """[n] float32. Log-prob of each under the distribution that it was drawn from."""
    policy_version: int
    """Weight version that sampled them, u32."""
    routes: StepRoutes | None = None
    """Experts visited, where a request of the step asks for them."""
    kept: KeptSets | None = None
    """[n] sets that the tokens were drawn from, where a request of the step cuts the vocabulary."""

    @property
    def flags(self) -> int:
        """Flag bits of its frame."""
        return (ROUTES_FLAG if self.routes is not None else 0) | (KEPT_FLAG if self.kept is not None else 0)


def encode_step(record: StepRecord) -> bytes:
    """Returns the payload of a STEP; its flags are `record.flags`.

    Raises:
        WalUsageError: columns differ in length or have another dtype, or a value does not fit its field.

    """
    num_rows = len(record.slots)
    check_version(record.policy_version)
    if not num_rows == len(record.token_ids) == len(record.logprobs):
        raise WalUsageError(
            f"STEP columns have lengths {num_rows} (slots), {len(record.token_ids)} (token_ids),"
            f" {len(record.logprobs)} (logprobs);"
            " they must be equal, one row for each running slot."
        )
    check_column("slots", record.slots, _SLOT)
    check_column("token_ids", record.token_ids, _TOKEN)
    check_column("logprobs", record.logprobs, _LOGPROB)
    # Arrays as they are: the join is the only copy that the decode thread makes of them.
    parts: list[bytes | memoryview] = [
        _COUNTS.pack(num_rows, record.policy_version),
        np.ascontiguousarray(record.slots).data,
        bytes(2 * (num_rows % 2)),
        np.ascontiguousarray(record.token_ids).data,
        np.ascontiguousarray(record.logprobs).data,
    ]
    if record.routes is not None:
        parts += _encode_routes(record.routes, num_rows)
    if record.kept is not None:
        _check_counts("kept", record.kept.counts_T, num_rows, len(record.kept.token_ids))
        check_column("kept.token_ids", record.kept.token_ids, _TOKEN)
        parts += [record.kept.counts_T.tobytes(), record.kept.token_ids.tobytes()]
    return b"".join(parts)


def decode_step(flags: int, payload: bytes) -> StepRecord:
    """Returns the STEP record of a payload; the fast path of recovery (no msgpack).

    Raises:
        WalUsageError: unknown flags, or lengths that do not add up.

    """
    if flags & ~(ROUTES_FLAG | KEPT_FLAG) or len(payload) < _COUNTS.size:
        raise WalUsageError(
            f"STEP of {len(payload)} bytes with flags {flags:#x}; this version knows flags"
            f" {ROUTES_FLAG | KEPT_FLAG:#x} and needs 8 bytes."
        )
    num_rows, policy_version = _COUNTS.unpack_from(payload)
    token_start = _COUNTS.size + 2 * (num_rows + num_rows % 2)
    end = token_start + 8 * num_rows
    routes: StepRoutes | None = None
    kept: KeptSets | None = None
    if flags & ROUTES_FLAG:
        routes, end = _decode_routes(payload, num_rows, end)
    if flags & KEPT_FLAG:
        kept, end = _decode_kept(payload, num_rows, end)
    if len(payload) != end:
        raise WalUsageError(f"STEP of {num_rows} rows has {len(payload)} bytes; it must have {end}.")
    return StepRecord(
        slots=np.frombuffer(payload, "<u2", num_rows, _COUNTS.size),
        token_ids=np.frombuffer(payload, "<i4", num_rows, token_start),
        logprobs=np.frombuffer(payload, "<f4", num_rows, token_start + 4 * num_rows),
        policy_version=policy_version,
        routes=routes,
        kept=kept,
    )


def check_column(name: str, column: npt.NDArray[Any], dtype: np.dtype[Any]) -> None:
    """Raises WalUsageError unless a column is one-dimensional and of the dtype."""
    if column.dtype != dtype or column.ndim != 1:
        raise WalUsageError(
            f"{name} is {column.dtype}{list(column.shape)}; it must be {dtype.name}[n]. Convert it before logging."
        )


def check_version(policy_version: int) -> None:
    """Raises WalUsageError unless a weight version fits its field."""
    if not 0 <= policy_version < 1 << 32:
        raise WalUsageError(f"policy_version is {policy_version}; the log holds versions in [0, 2**32).")


def _encode_routes(routes: StepRoutes, num_rows: int) -> list[bytes]:
    experts = routes.routes_PLK
    if experts.ndim != 3 or experts.dtype != np.int16:
        raise WalUsageError(
            f"routes_PLK is {experts.dtype}{list(experts.shape)}; it must be int16[P, L, K]. Convert it before logging."
        )
    _check_counts("routes", routes.counts_N, num_rows, len(experts))
    if experts.size and experts.min() < 0:
        raise WalUsageError("routes_PLK holds -1; the log takes only experts that a token visited.")
    is_narrow = not experts.size or experts.max() < 256
    data = experts.astype("u1" if is_narrow else "<u2").tobytes()
    head = _ROUTES_HEAD.pack(experts.shape[1], experts.shape[2], 1 if is_narrow else 2)
    return [head, routes.counts_N.tobytes(), data, bytes(-len(data) % 4)]


def _check_counts(name: str, counts: Int32Array, num_rows: int, num_values: int) -> None:
    check_column(f"{name} counts", counts, _TOKEN)
    if len(counts) != num_rows or (num_rows and counts.min() < 0) or int(counts.sum()) != num_values:
        raise WalUsageError(
            f"STEP of {num_rows} rows has {len(counts)} {name} counts that add up to {int(counts.sum())} for"
            f" {num_values} values; give one count >= 0 for each row and as many values."
        )


def _decode_routes(payload: bytes, num_rows: int, start: int) -> tuple[StepRoutes, int]:
    if len(payload) < start + _ROUTES_HEAD.size:
        raise WalUsageError(f"STEP of {num_rows} rows has {len(payload)} bytes; its routes need more.")
    num_layers, num_slots, width = _ROUTES_HEAD.unpack_from(payload, start)
    if width not in (1, 2):
        raise WalUsageError(f"STEP has routes of {width} bytes for an expert; known are 1 and 2.")
    counts_N, num_positions, start = _decode_counts(payload, num_rows, start + _ROUTES_HEAD.size)
    num_bytes = width * num_positions * num_layers * num_slots
    if len(payload) < start + num_bytes:
        raise WalUsageError(f"STEP has {len(payload) - start} bytes of routes; its counts need {num_bytes}.")
    experts = np.frombuffer(payload, "u1" if width == 1 else "<u2", num_bytes // width, start)
    if width == 2 and experts.size and int(experts.max()) > np.iinfo(np.int16).max:
        raise WalUsageError(f"STEP names expert {int(experts.max())}; experts are below {1 << 15}.")
    routes_PLK = experts.astype(np.int16).reshape(num_positions, num_layers, num_slots)
    return StepRoutes(counts_N=counts_N, routes_PLK=routes_PLK), start + math.ceil(num_bytes / 4) * 4


def _decode_kept(payload: bytes, num_rows: int, start: int) -> tuple[KeptSets, int]:
    counts_N, num_ids, start = _decode_counts(payload, num_rows, start)
    if len(payload) < start + 4 * num_ids:
        raise WalUsageError(f"STEP has {len(payload) - start} bytes of kept sets; its counts need {4 * num_ids}.")
    token_ids: Int32Array = np.frombuffer(payload, "<i4", num_ids, start)
    return KeptSets(counts_T=counts_N, token_ids=token_ids), start + 4 * num_ids


def _decode_counts(payload: bytes, num_rows: int, start: int) -> tuple[Int32Array, int, int]:
    """Returns the counts of a column, their sum, and where its values start."""
    end = start + 4 * num_rows
    if len(payload) < end:
        raise WalUsageError(f"STEP of {num_rows} rows has {len(payload)} bytes; its counts need {end}.")
    counts_N: Int32Array = np.frombuffer(payload, "<i4", num_rows, start)
    if num_rows and counts_N.min() < 0:
        raise WalUsageError("STEP has a negative count; its columns cannot be read.")
    return counts_N, int(counts_N.sum(dtype=np.int64)), end
