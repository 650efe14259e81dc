"""Records of the token log and their payload bytes; the log's configuration.

Frame types of the stream and their payloads (little-endian):

    STEP   columns, see rollout/wal_step.py
    SEAL   empty: the writer closed the stream in order
    OPEN, OBSERVE, KV_SAVED, VERSION, CLOSE
           meta_bytes u32 | tokens u32 | meta msgpack, padded to 4 | token int32[tokens]

A slot binds the columns of STEP to a request: OPEN binds, CLOSE releases, a new epoch starts with none bound. A frame's
flag bits name the optional columns of a STEP; a reader that does not know a bit refuses the frame instead of guessing.

Here: frozen records, pure encode and decode. Not here: frames and checksums (sandbox/codec.py), files and threads
(rollout/wal.py), what a sequence of records means (rollout/wal_recovery.py).
"""

import struct
from enum import IntEnum
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from rollforward.rollout.errors import WalUsageError
from rollforward.rollout.types import ArrayRecord, FailureType, Request, RequestId, SamplingParams, StopReason, ToolUse
from rollforward.rollout.wal_step import StepRecord, check_column, check_version, decode_step, encode_step

WAL_KIND = "TOKN"
"""Kind of the token log in segment headers."""

NUM_SLOTS = 1 << 16
"""Slots of a stream: 0 .. NUM_SLOTS - 2 for requests."""

NO_SLOT = NUM_SLOTS - 1
"""Slot of a CLOSE for a request that is not open in this epoch."""

_COUNTS = struct.Struct("<II")
_NO_TOKENS = np.zeros(0, np.int32)


class WalConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the token log of each engine replica is written."""

    level: Literal["process", "node", "cluster"] = "node"
    """What a published token survives: `process` the death of any process, `node` also a power cut (fdatasync),
    `cluster` also the loss of the machine with its disk (a second copy in mirror_dir, synced like the first)."""
    mirror_dir: str | None = None
    """Directory of the second copies at level cluster: on another machine's disk or a shared file system, and of this
    run alone. A run directory that was lost is filled from it again."""
    mirror_same_device: bool = False
    """Accept a mirror_dir on the same device, where both copies can be lost together; for tests."""
    segment_bytes: Annotated[int, msgspec.Meta(ge=4096, le=1 << 32)] = 64 << 20
    """A commit that would make a segment larger than this starts a new one."""
    preallocate: bool = True
    """Fill segments with zeros before they are used: a sync then writes data alone. Only where syncs are made."""
    queue_bytes: Annotated[int, msgspec.Meta(ge=4096, le=1 << 32)] = 16 << 20
    """Records waiting for the writer thread; beyond it an append waits (back-pressure on decoding, never dropping)."""
    keep_bytes: Annotated[int, msgspec.Meta(ge=0)] | None = 1 << 30
    """What is covered by a checkpoint is removed from the log while the log is larger than this, oldest first and in
    whole segments; None keeps everything for analysis."""
    stall_timeout_s: Annotated[float, msgspec.Meta(gt=0.0, le=1e7)] = 60.0
    """How long an append or a wait may take before it is an error that names the disk."""

    def __post_init__(self) -> None:
        """Refuse a level without its directory, and a directory that no level uses."""
        if (self.level == "cluster") != (self.mirror_dir is not None):
            raise ValueError(
                f"wal.level={self.level} with wal.mirror_dir={self.mirror_dir or 'null'}: level cluster, and no other,"
                " keeps a second copy in a mirror_dir. Set both or neither."
            )


class RecordType(IntEnum):
    """Frame types of the token log. 0 is never used: zeros are not a frame."""

    OPEN = 1
    STEP = 2
    OBSERVE = 3
    KV_SAVED = 4
    VERSION = 5
    CLOSE = 6
    SEAL = 7


class OpenRecord(ArrayRecord, frozen=True, kw_only=True, eq=False):
    """A request starts, or goes on after a restart, in a slot."""

    slot: int
    """0 .. NUM_SLOTS - 2, free in this epoch."""
    request: Request
    """The request with its prompt, seed, sampling parameters (budget included) and policy version."""
    attempt: int = 0
    """Grows when a request starts over by decision (never by a restart); attempts are kept apart."""
    resumed_tokens: int = 0
    """Sampled tokens of this attempt that the log already holds: the number of the first token after this record."""
    resumed_observations: int = 0
    """Observations of this attempt that the log already holds."""


class ObserveRecord(ArrayRecord, frozen=True, kw_only=True, eq=False):
    """The environment answered: tokens that the policy did not draw enter the sequence."""

    slot: int
    """Slot of the request."""
    id: RequestId
    """The request."""
    ordinal: int
    """Number of the observation in the attempt, from 0."""
    after_tokens: int
    """Sampled tokens that come before it."""
    token_ids: npt.NDArray[np.int32]
    """[T] int32. What the environment said, rendered and tokenised."""
    command_position: int
    """Position in the sandbox's command log that it reflects; 0 when there is none."""


class KvSavedRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The KV state of a request was written out and can replace a prefill."""

    slot: int
    """Slot of the request."""
    id: RequestId
    """The request."""
    num_tokens: int
    """Sampled tokens that the saved state covers."""
    manifest: str
    """Where the state's manifest lies."""
    fingerprint: str
    """Hash over model, weight version and layout; the state is usable only where it matches."""


class VersionRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The replica holds these weights from here on."""

    policy_version: int
    """Weight version, u32."""
    weights: str = ""
    """Digest of them, by which others of the same number are told apart; empty where nobody computed it."""


class CloseRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A request ended; with this record durable it may be delivered."""

    slot: int
    """Slot that becomes free, or NO_SLOT."""
    id: RequestId
    """The request."""
    stop_reason: StopReason
    """Why it ended."""
    failure: FailureType | None = None
    """What went wrong, or None."""
    num_tokens: int
    """Sampled tokens of the attempt; recovery compares it with what it found."""


WalRecord = OpenRecord | StepRecord | ObserveRecord | KvSavedRecord | VersionRecord | CloseRecord


class _OpenMeta(msgspec.Struct, frozen=True, array_like=True):
    """OPEN without its prompt."""

    slot: int
    id: RequestId
    seed: int
    sampling: SamplingParams
    policy_version: int
    attempt: int
    resumed_tokens: int
    resumed_observations: int
    # Logs written before these existed end here.
    tools: ToolUse | None = None
    record_routes: bool = False


class _ObserveMeta(msgspec.Struct, frozen=True, array_like=True):
    """OBSERVE without its tokens."""

    slot: int
    id: RequestId
    ordinal: int
    after_tokens: int
    command_position: int


_MetaT = TypeVar("_MetaT")


class EncodedRecord(NamedTuple):
    """A record as a frame holds it."""

    frame_type: RecordType
    """Its type."""
    flags: int
    """Optional columns, u8."""
    payload: bytes
    """Its bytes."""


def encode_record(record: WalRecord) -> EncodedRecord:
    """Returns the frame type, flags and payload of a record.

    Raises:
        WalUsageError: columns of a STEP differ in length or a version does not fit 32 bits.

    Invariants: pure; the payload owns its bytes, so the caller may reuse its arrays at once.

    """
    match record:
        case StepRecord():
            return EncodedRecord(RecordType.STEP, record.flags, encode_step(record))
        case OpenRecord(request=request):
            check_version(request.policy_version)
            meta = _OpenMeta(
                record.slot,
                request.id,
                request.seed,
                request.sampling,
                request.policy_version,
                record.attempt,
                record.resumed_tokens,
                record.resumed_observations,
                request.tools,
                request.record_routes,
            )
            return EncodedRecord(RecordType.OPEN, 0, _pack(meta, request.prompt_ids))
        case ObserveRecord():
            observe = _ObserveMeta(record.slot, record.id, record.ordinal, record.after_tokens, record.command_position)
            return EncodedRecord(RecordType.OBSERVE, 0, _pack(observe, record.token_ids))
        case KvSavedRecord():
            return EncodedRecord(RecordType.KV_SAVED, 0, _pack(record, _NO_TOKENS))
        case VersionRecord():
            check_version(record.policy_version)
            return EncodedRecord(RecordType.VERSION, 0, _pack(record, _NO_TOKENS))
        case CloseRecord():
            return EncodedRecord(RecordType.CLOSE, 0, _pack(record, _NO_TOKENS))


def decode_record(frame_type: int, flags: int, payload: bytes) -> WalRecord:
    """Returns the record of a verified frame; arrays are read-only views of `payload`.

    Raises:
        WalUsageError: unknown type or flags (a newer writer), or a payload that does not fit its type.

    Invariants: pure; decode_record(*encode_record(r)) equals r bit for bit.

    """
    if flags and frame_type != RecordType.STEP:
        raise WalUsageError(
            f"record of type {frame_type} has flags {flags:#x}; this version knows none of that type."
            " Read it with the version that wrote it."
        )
    try:
        match frame_type:
            case RecordType.STEP:
                return decode_step(flags, payload)
            case RecordType.OPEN:
                meta, prompt_ids = _unpack(payload, _OpenMeta)
                request = Request(
                    id=meta.id,
                    prompt_ids=prompt_ids,
                    seed=meta.seed,
                    sampling=meta.sampling,
                    policy_version=meta.policy_version,
                    tools=meta.tools,
                    record_routes=meta.record_routes,
                )
                return OpenRecord(
                    slot=meta.slot,
                    request=request,
                    attempt=meta.attempt,
                    resumed_tokens=meta.resumed_tokens,
                    resumed_observations=meta.resumed_observations,
                )
            case RecordType.OBSERVE:
                observe, token_ids = _unpack(payload, _ObserveMeta)
                return ObserveRecord(
                    slot=observe.slot,
                    id=observe.id,
                    ordinal=observe.ordinal,
                    after_tokens=observe.after_tokens,
                    token_ids=token_ids,
                    command_position=observe.command_position,
                )
            case RecordType.KV_SAVED:
                return _unpack(payload, KvSavedRecord)[0]
            case RecordType.VERSION:
                return _unpack(payload, VersionRecord)[0]
            case RecordType.CLOSE:
                return _unpack(payload, CloseRecord)[0]
            case _:
                pass
    except (ValueError, struct.error, msgspec.MsgspecError) as error:
        raise WalUsageError(f"payload of {len(payload)} bytes is no record of type {frame_type}: {error}") from None
    raise WalUsageError(
        f"record type is {frame_type}; known are {[kind.value for kind in RecordType]}."
        " Read it with the version that wrote it."
    )


def _pack(meta: object, token_ids: npt.NDArray[np.int32]) -> bytes:
    check_column("token_ids", token_ids, np.dtype(np.int32))
    packed = msgspec.msgpack.encode(meta)
    return b"".join((_COUNTS.pack(len(packed), token_ids.size), packed, bytes(-len(packed) % 4), token_ids.tobytes()))


def _unpack(payload: bytes, meta_type: type[_MetaT]) -> tuple[_MetaT, npt.NDArray[np.int32]]:
    meta_bytes, num_tokens = _COUNTS.unpack_from(payload)
    token_start = _COUNTS.size + meta_bytes + -meta_bytes % 4
    if len(payload) != token_start + 4 * num_tokens:
        raise WalUsageError(
            f"{meta_bytes} bytes of fields and {num_tokens} tokens need {token_start + 4 * num_tokens} bytes."
        )
    meta = msgspec.msgpack.decode(payload[_COUNTS.size : _COUNTS.size + meta_bytes], type=meta_type)
    tokens: npt.NDArray[Any] = np.frombuffer(payload, "<i4", num_tokens, token_start)
    return meta, tokens
