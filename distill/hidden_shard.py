"""One file of a teacher's hidden vectors: what it is of, its bytes, and how it is told from any other.

    hidden           [R, E] fixed_size_list   what the teacher's head reads at each trained position: in precision
                                              "native" BF16, as uint16, which is every bit of it; in "fp32" float32
    teacher_logprob  [R] float32              log-prob of the token that was sampled there
    metadata         the manifest: what the vectors are of, and CRC-32C of both columns; and CRC-32C of the manifest

Uncompressed Arrow IPC, one record batch, so that columns are views of the map. Arrow has no checksums; these cover all
that is read, and damage elsewhere either stops Arrow or changes nothing that is read. CRC-32C as in the token log and
not zlib's as in `rl/samples.py`: a step has gigabytes of these, and it is twice as fast.

Here: a file. Not here: which files there are, and the room that they have (hidden_cache.py).

Letters: T packed tokens of a micro-batch, R its trained rows in packed order, E the teacher's width.
"""

import mmap
import os
import shutil
import stat
from contextlib import suppress
from pathlib import Path
from typing import Any

import google_crc32c
import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
from torch import Tensor

from rollforward.distill.errors import HiddenCacheError
from rollforward.model.checkpoint import sync_path
from rollforward.model.train_config import Precision
from rollforward.rl.batch import PackedBatch
from rollforward.rl.samples import SpokenTokens
from rollforward.rollout.types import RequestId

ABSENT = "absent"
"""What `open_shard` says of a file that is not there; everything else that it says is of a file that is."""

_FORMAT = b"rollforward-hidden-1"
_FRAME_BYTES = 2048
"""More than a file takes beside its values and its key, which stands in it twice."""
_KEY_BYTES = 1024
"""More than the key of one trajectory takes, whatever its numbers, its teacher's name and a digest."""
_DTYPES: dict[Precision, tuple[torch.dtype, type[np.generic]]] = {
    "native": (torch.bfloat16, np.uint16),
    "fp32": (torch.float32, np.float32),
}
"""What a vector's values are in memory, and in the file."""


class ShardKey(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the hidden vectors of one micro-batch are of; whoever asks for another key gets none of them."""

    teacher: str
    """Name of the teacher."""
    teacher_version: str
    """Digest of its weights and configuration."""
    policy_version: int
    """Weight version of the student in whose step the trajectories are."""
    precision: Precision
    """Number formats of the teacher's forward pass, and so of the vectors."""
    trajectories: tuple[RequestId, ...]
    """The micro-batch's trajectories, in packed order; at least one."""
    tokens_checksum: int
    """CRC-32C of its token ids, the lengths of its sequences and which of its positions are trained."""
    num_rows: int
    """R, trained positions; at least one."""
    width: int
    """E, values of a vector; at least one."""

    def __post_init__(self) -> None:
        """Refuse a shard of nothing."""
        if min(self.num_rows, self.width, len(self.trajectories)) < 1:
            raise ValueError(
                f"a shard of teacher {self.teacher} has {self.num_rows} rows of width {self.width} from"
                f" {len(self.trajectories)} trajectories; each must be at least 1. Only trajectories with trained"
                " tokens are scheduled"
            )


class CachedShard(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The hidden vectors of one micro-batch, whole and verified. Views of a private map of the file, which they
    outlive: nothing is copied, and what is written to them never reaches it."""

    hidden_RE: Tensor
    """[R, E] bfloat16 in precision "native", float32 in "fp32". What the teacher's head reads."""
    teacher_logprobs_R: Tensor
    """[R] float32. Log-prob of the sampled token."""
    key: ShardKey
    """What they are of."""
    num_bytes: int
    """Size of the file."""


class _Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a file says of itself."""

    key: ShardKey
    hidden_checksum: int
    logprobs_checksum: int


def shard_key(
    packed: PackedBatch | SpokenTokens,
    *,
    teacher: str,
    teacher_version: str,
    policy_version: int,
    precision: Precision,
    width: int,
) -> ShardKey:
    """Return the key of a micro-batch's vectors; arguments as the fields of `ShardKey`.

    Raises:
        ValueError: no position of the micro-batch is trained.
    """
    lengths_B = packed.sequence_lengths_B
    checksum = google_crc32c.value(repr((packed.token_ids_T.size, lengths_B.size)).encode())
    for column in (packed.token_ids_T, lengths_B, packed.trained_mask_T.view(np.uint8)):
        checksum = google_crc32c.extend(checksum, np.ascontiguousarray(column))
    return ShardKey(
        teacher=teacher,
        teacher_version=teacher_version,
        policy_version=policy_version,
        precision=precision,
        trajectories=packed.ids,
        tokens_checksum=checksum,
        num_rows=int(packed.trained_mask_T.sum()),
        width=width,
    )


def shard_bytes(key: ShardKey) -> int:
    """Return a bound on the size of a shard's file, above it by no more than 2 KiB."""
    return _file_bytes(key.num_rows, key.width, key.precision, len(msgspec.json.encode(key)))


def worst_case_bytes(*, num_sequences: int, max_new_tokens: int, width: int, precision: Precision, passes: int) -> int:
    """Return what the shards of one step can take at most, if each trajectory has a shard of its own.

    Args:
        num_sequences: trajectories of a step.
        max_new_tokens: trained tokens of each at most.
        width: of the widest teacher.
        precision: of the run.
        passes: teachers of each trajectory at most.
    """
    return passes * num_sequences * _file_bytes(max_new_tokens, width, precision, _KEY_BYTES)


def _file_bytes(num_rows: int, width: int, precision: Precision, key_bytes: int) -> int:
    row_bytes = width * np.dtype(_DTYPES[precision][1]).itemsize + np.dtype(np.float32).itemsize
    # The manifest is part of the schema, which Arrow writes in front and again in the footer.
    return num_rows * row_bytes + 2 * key_bytes + _FRAME_BYTES


def write_shard(file: Path, key: ShardKey, hidden_RE: Tensor, teacher_logprobs_R: Tensor) -> int:
    """Write a shard durably, whole or not at all, in place of whatever has its name.

    Args:
        file: its path; the directory is there.
        key: what the vectors are of.
        hidden_RE: [R, E] on any device. In precision "fp32" float32; in "native" bfloat16, or float32 with values that
            bfloat16 holds.
        teacher_logprobs_R: [R] float32, finite.

    Returns:
        Size of the file in bytes.

    Raises:
        ValueError: shapes or dtypes are not those of the key, or BF16 does not hold a value.
        HiddenCacheError: a vector or log-prob is not finite; names the teacher.
        OSError: the disk refuses. Nothing is left of the attempt.

    Invariants: the same arguments give the same bytes; a vector read is the vector written, bit for bit.
    """
    _check_form(key, hidden_RE, teacher_logprobs_R)
    hidden_RE, teacher_logprobs_R = hidden_RE.detach().cpu(), teacher_logprobs_R.detach().cpu()
    _check_finite(key, "the hidden vector", hidden_RE)
    _check_finite(key, "the log-prob of the sampled token", teacher_logprobs_R.view(-1, 1))
    stored_RE, logprobs_R = _stored(key, hidden_RE), teacher_logprobs_R.contiguous().numpy()
    manifest = _Manifest(key=key, hidden_checksum=_checksum(stored_RE), logprobs_checksum=_checksum(logprobs_R))
    columns = [pa.FixedSizeListArray.from_arrays(pa.array(stored_RE.reshape(-1)), key.width), pa.array(logprobs_R)]
    batch = pa.RecordBatch.from_arrays(columns, schema=_schema(key, _metadata(manifest)))
    # Of this process alone: a rank that outlived its run may still be writing the same shard.
    partial = file.with_name(f".{file.name}.{os.getpid()}.partial")
    try:
        remove_path(partial)
        with pa.OSFile(str(partial), "wb") as sink, pa.ipc.new_file(sink, batch.schema) as writer:
            writer.write_batch(batch)
        sync_path(partial)
        num_bytes = partial.stat().st_size
        if file.is_dir():
            remove_path(file)
        partial.replace(file)
        sync_path(file.parent)
    except OSError:
        with suppress(OSError):
            remove_path(partial)
        raise
    return num_bytes


def open_shard(file: Path, key: ShardKey) -> CachedShard | str:
    """Return the shard that a file holds, mapped, or what is wrong with the file, to follow "FILE is ".

    "absent"; "damaged": torn, no regular file, or with any byte that is read other than it was written; "foreign": of
    another teacher, other weights of it, or another arithmetic; "stale": of another version of the student, other
    trajectories or other tokens.

    Args:
        file: its path.
        key: what it must be of.
    """
    try:
        mapped = _map_file(file)
        data = pa.py_buffer(mapped)
        reader = pa.ipc.open_file(data)
        manifest = _read_manifest(reader.schema.metadata or {})
        difference = _difference(manifest.key, key)
        if difference is not None:
            return difference
        if not reader.schema.equals(_schema(key, None)) or reader.num_record_batches != 1:
            raise ValueError("its columns are not those of its manifest")
        batch = reader.get_batch(0)
        if batch.num_rows != key.num_rows:
            raise ValueError(f"it has {batch.num_rows} rows instead of {key.num_rows}")
        dtype, _ = _DTYPES[key.precision]
        hidden, logprobs = batch.column("hidden").values, batch.column("teacher_logprob")
        shard = CachedShard(
            hidden_RE=_view(mapped, data, hidden, dtype, key.num_rows * key.width).view(key.num_rows, key.width),
            teacher_logprobs_R=_view(mapped, data, logprobs, torch.float32, key.num_rows),
            key=key,
            num_bytes=len(mapped),
        )
        found = (_checksum(_bits(shard.hidden_RE)), _checksum(_bits(shard.teacher_logprobs_R)))
        if found != (manifest.hidden_checksum, manifest.logprobs_checksum):
            raise ValueError("the checksum of its values does not fit")
    except FileNotFoundError:
        return ABSENT
    except (pa.ArrowException, msgspec.MsgspecError, OSError, ValueError) as error:
        return f"damaged: {error}"
    return shard


def remove_path(path: Path) -> None:
    """Remove whatever has that name, if anything has; of a link the link alone.

    Raises:
        OSError: the kernel's.
    """
    with suppress(FileNotFoundError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def _check_form(key: ShardKey, hidden_RE: Tensor, teacher_logprobs_R: Tensor) -> None:
    """Refuse shapes and dtypes that are not the key's."""
    dtypes = {torch.float32, _DTYPES[key.precision][0]}
    shapes = (tuple(hidden_RE.shape), tuple(teacher_logprobs_R.shape))
    if shapes != ((key.num_rows, key.width), (key.num_rows,)) or hidden_RE.dtype not in dtypes:
        raise ValueError(
            f"teacher {key.teacher}: hidden vectors are {hidden_RE.dtype} {list(shapes[0])}, log-probs"
            f" {list(shapes[1])}; the shard has {key.num_rows} rows of width {key.width} in precision {key.precision}."
            " Hand in the trained rows of its micro-batch"
        )
    if teacher_logprobs_R.dtype != torch.float32:
        raise ValueError(f"teacher {key.teacher}: log-probs are {teacher_logprobs_R.dtype}; hand them in as float32")


def _check_finite(key: ShardKey, what: str, values_RE: Tensor) -> None:
    bits_RE = _bits(values_RE)
    # By the bits, since numpy has no BF16 and torch's own test is ten times slower than the checksum.
    exponent = 0x7F80 if bits_RE.itemsize == 2 else 0x7F80_0000
    is_finite_R = (bits_RE & bits_RE.dtype.type(exponent)).max(axis=1) != exponent
    if not is_finite_R.all():
        raise HiddenCacheError(
            f"teacher {key.teacher}: {what} at trained position {is_finite_R.argmin()} of {key.num_rows}, trajectories"
            f" {key.trajectories[0]} to {key.trajectories[-1]}, is not finite; nothing can be learned from it. Its"
            " weights are damaged or its number formats overflow: set precision=fp32, or take it out of `teachers`"
        )


def _stored(key: ShardKey, hidden_RE: Tensor) -> npt.NDArray[Any]:
    """Values as the file has them; what BF16 does not hold is a ValueError."""
    if key.precision == "fp32":
        return hidden_RE.contiguous().numpy()
    bits_RE = _bits(hidden_RE)
    if hidden_RE.dtype == torch.bfloat16:
        return bits_RE
    if np.bitwise_or.reduce(bits_RE, axis=None) & 0xFFFF:
        raise ValueError(
            f"teacher {key.teacher}: hidden vectors of precision native have values that BF16 does not hold; the head"
            " would read others than the teacher's did. Hand in what the final norm gives, after its rounding"
        )
    # The upper halves, by which BF16 is defined: a conversion may lose a subnormal number.
    return np.ascontiguousarray(bits_RE.view("<u2")[:, 1::2])


def _bits(values: Tensor) -> npt.NDArray[Any]:
    """The bits of BF16 or float32 values, uint16 or uint32."""
    return values.contiguous().view(torch.uint16 if values.dtype == torch.bfloat16 else torch.uint32).numpy()


def _checksum(values: npt.NDArray[Any]) -> int:
    return google_crc32c.value(values)


def _metadata(manifest: _Manifest) -> dict[bytes, bytes]:
    content = msgspec.json.encode(manifest)
    return {b"format": _FORMAT, b"manifest": content, b"checksum": b"%08x" % google_crc32c.value(content)}


def _read_manifest(metadata: dict[bytes, bytes]) -> _Manifest:
    """The manifest as it was written, or a ValueError."""
    found = metadata.get(b"format", b"none")
    if found != _FORMAT:
        raise ValueError(f"its form is {found.decode(errors='replace')}, this version reads {_FORMAT.decode()}")
    content = metadata.get(b"manifest", b"")
    if metadata.get(b"checksum") != b"%08x" % google_crc32c.value(content):
        raise ValueError("the checksum of its manifest does not fit")
    return msgspec.json.decode(content, type=_Manifest)


def _schema(key: ShardKey, metadata: dict[bytes, bytes] | None) -> pa.Schema:
    kind = pa.from_numpy_dtype(_DTYPES[key.precision][1])
    return pa.schema(
        [
            pa.field("hidden", pa.list_(kind, key.width), nullable=False),
            pa.field("teacher_logprob", pa.float32(), nullable=False),
        ],
        metadata=metadata,
    )


def _difference(found: ShardKey, wanted: ShardKey) -> str | None:
    """What a whole file is of instead, or None."""
    teachers = [f"teacher {key.teacher} in version {key.teacher_version}" for key in (found, wanted)]
    forms = [f"vectors of width {key.width} in precision {key.precision}" for key in (found, wanted)]
    versions = [f"policy version {key.policy_version}" for key in (found, wanted)]
    spans = [
        f"{key.num_rows} trained positions of {len(key.trajectories)} trajectories, {key.trajectories[0]} to"
        f" {key.trajectories[-1]}"
        for key in (found, wanted)
    ]
    for kind, (is_of, instead_of) in (("foreign", teachers), ("foreign", forms), ("stale", versions), ("stale", spans)):
        if is_of != instead_of:
            return f"{kind}: it is of {is_of}, not of {instead_of}"
    return None if found == wanted else "stale: it is of other trajectories or other tokens of the same trajectories"


def _map_file(file: Path) -> mmap.mmap:
    """A private map of a regular file. A pipe by its name would keep a reader waiting for ever."""
    descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError("it is no regular file")
        # Private and writable, since torch has no read-only tensors: a write would take a page's copy, not kill.
        return mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY)
    finally:
        os.close(descriptor)


def _view(mapped: mmap.mmap, data: pa.Buffer, column: pa.Array, dtype: torch.dtype, count: int) -> Tensor:
    """The values of a column as a tensor over the map, or a ValueError where they lie elsewhere."""
    buffer = column.buffers()[1]
    offset = -1 if buffer is None else buffer.address - data.address
    if offset < 0 or offset + count * dtype.itemsize > len(mapped):
        raise ValueError("its values lie outside it")
    return torch.frombuffer(mapped, dtype=dtype, count=count, offset=offset)
