"""Proves: a hidden vector read is the one written, bit for bit and without a copy; a file that is torn, damaged, of
another teacher or of other tokens is named and never read.

Which files a step has, and the room that they have, is in test_hidden_cache.py.
"""

import os
import random
import re
import socket
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pytest
import torch
from torch import Tensor

from rollforward.distill.errors import HiddenCacheError
from rollforward.distill.hidden_shard import (
    CachedShard,
    ShardKey,
    open_shard,
    shard_bytes,
    shard_key,
    worst_case_bytes,
    write_shard,
)
from rollforward.model.train_config import Precision
from rollforward.rl.batch import PackedBatch
from rollforward.rollout.types import RequestId
from tests.helpers.leaks import own_descriptors

KEY = ShardKey(
    teacher="math",
    teacher_version="v-one",
    policy_version=3,
    precision="native",
    trajectories=(RequestId(7, 0, 1), RequestId(7, 2, 0)),
    tokens_checksum=123,
    num_rows=5,
    width=6,
)


def key_of(**changes: Any) -> ShardKey:
    return msgspec.structs.replace(KEY, **changes)


def values_of(key: ShardKey, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Hidden vectors and log-probs of a key's form."""
    generator = torch.Generator().manual_seed(seed)
    hidden_RE = torch.randn(key.num_rows, key.width, generator=generator)
    logprobs_R = -torch.rand(key.num_rows, generator=generator)
    return hidden_RE.bfloat16() if key.precision == "native" else hidden_RE, logprobs_R


def opened(file: Path, key: ShardKey) -> CachedShard:
    found = open_shard(file, key)
    assert isinstance(found, CachedShard), found
    return found


def same(left: Tensor, right: Tensor) -> bool:
    """Equal to the last bit, the sign of zero too."""
    assert left.dtype == right.dtype
    kind = torch.int16 if left.dtype == torch.bfloat16 else torch.int32
    return torch.equal(left.contiguous().view(kind), right.contiguous().view(kind))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A shard of `KEY`."""
    write_shard(tmp_path / "shard.arrow", KEY, *values_of(KEY))
    return tmp_path / "shard.arrow"


# Values


@pytest.mark.parametrize("is_float32", [False, True])
def test_every_finite_bf16_value_is_read_as_it_was_written(tmp_path: Path, is_float32: bool) -> None:
    bits = torch.arange(2**16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)
    hidden_RE = bits[torch.isfinite(bits)].view(255, 256)
    assert hidden_RE.view(torch.int16).unique().numel() == 65280  # both zeros, all subnormals
    key = key_of(num_rows=255, width=256)
    logprobs_R = values_of(key)[1]
    given_RE = torch.from_numpy(hidden_RE.view(torch.uint16).numpy().astype(np.uint32) << 16).view(torch.float32)
    num_bytes = write_shard(tmp_path / "a", key, given_RE if is_float32 else hidden_RE, logprobs_R)
    shard = opened(tmp_path / "a", key)
    assert same(shard.hidden_RE, hidden_RE)
    assert same(shard.teacher_logprobs_R, logprobs_R)
    assert (shard.key, shard.num_bytes) == (key, num_bytes)
    assert num_bytes == (tmp_path / "a").stat().st_size


def test_float32_keeps_every_bit(tmp_path: Path) -> None:
    key = key_of(num_rows=64, width=33, precision="fp32")
    generator = np.random.default_rng(0)
    bits = generator.integers(0, 2**32, (64, 33), np.uint32)
    bits[0, :4] = (0x8000_0000, 1, 0x807F_FFFF, 0x7F7F_FFFF)
    bits[(bits & 0x7F80_0000) == 0x7F80_0000] &= 0xFF0F_FFFF
    hidden_RE = torch.from_numpy(bits).view(torch.float32)
    logprobs_R = torch.linspace(-1e-44, -3e38, 64)
    write_shard(tmp_path / "a", key, hidden_RE, logprobs_R)
    shard = opened(tmp_path / "a", key)
    assert same(shard.hidden_RE, hidden_RE)
    assert same(shard.teacher_logprobs_R, logprobs_R)


@pytest.mark.parametrize("precision", ["native", "fp32"])
@pytest.mark.parametrize(("num_rows", "width"), [(1, 1), (1, 7), (9, 1), (3, 64), (65, 31)])
def test_any_shape_is_read_and_its_size_is_bounded(
    tmp_path: Path, num_rows: int, width: int, precision: Precision
) -> None:
    key = key_of(num_rows=num_rows, width=width, precision=precision)
    hidden_RE, logprobs_R = values_of(key)
    num_bytes = write_shard(tmp_path / "a", key, hidden_RE, logprobs_R)
    assert same(opened(tmp_path / "a", key).hidden_RE, hidden_RE)
    assert num_bytes <= shard_bytes(key) <= num_bytes + 2048


def test_the_size_of_a_shard_of_many_trajectories_is_bounded(tmp_path: Path) -> None:
    key = key_of(trajectories=tuple(RequestId(1000, prompt, 0) for prompt in range(500)))
    num_bytes = write_shard(tmp_path / "a", key, *values_of(key))
    assert num_bytes <= shard_bytes(key) <= num_bytes + 2048


def test_views_of_a_larger_tensor_are_written_as_they_are_read(tmp_path: Path) -> None:
    hidden_RE, logprobs_R = values_of(key_of(num_rows=10, width=12))
    write_shard(tmp_path / "a", KEY, hidden_RE[::2, ::2].requires_grad_(), logprobs_R[::2])
    shard = opened(tmp_path / "a", KEY)
    assert same(shard.hidden_RE, hidden_RE[::2, ::2])
    assert same(shard.teacher_logprobs_R, logprobs_R[::2])


def test_the_same_values_give_the_same_bytes(file: Path) -> None:
    other = file.with_name("other")
    write_shard(other, KEY, *values_of(KEY))
    assert other.read_bytes() == file.read_bytes()


@pytest.mark.parametrize("precision", ["native", "fp32"])
@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_what_is_not_finite_is_refused_by_the_teachers_name(tmp_path: Path, value: float, precision: Precision) -> None:
    key = key_of(precision=precision)
    for is_hidden in (True, False):
        hidden_RE, logprobs_R = values_of(key)
        if is_hidden:
            hidden_RE[3, 5] = value
        else:
            logprobs_R[3] = value
        what = "hidden vector" if is_hidden else "log-prob of the sampled token"
        with pytest.raises(
            HiddenCacheError, match=rf"teacher math: the {what} at trained position 3 of 5, .*not finite"
        ):
            write_shard(tmp_path / "a", key, hidden_RE, logprobs_R)
    assert list(tmp_path.iterdir()) == []


def test_values_that_bf16_would_round_are_refused(tmp_path: Path) -> None:
    hidden_RE, logprobs_R = values_of(KEY)
    bits = hidden_RE.float().view(torch.int32)
    bits[4, 5] += 1
    with pytest.raises(ValueError, match=r"teacher math: .* values that BF16 does not hold"):
        write_shard(tmp_path / "a", KEY, bits.view(torch.float32), logprobs_R)
    assert list(tmp_path.iterdir()) == []


def test_other_shapes_and_types_are_refused(tmp_path: Path) -> None:
    hidden_RE, logprobs_R = values_of(KEY)
    for wrong in (
        (hidden_RE[:4], logprobs_R),
        (hidden_RE[:, :5], logprobs_R),
        (hidden_RE.T, logprobs_R),
        (hidden_RE, logprobs_R[:4]),
        (hidden_RE.view(-1), logprobs_R),
        (hidden_RE.half(), logprobs_R),
        (hidden_RE, logprobs_R.double()),
    ):
        with pytest.raises(ValueError, match="teacher math: "):
            write_shard(tmp_path / "a", KEY, *wrong)
    with pytest.raises(ValueError, match=r"bfloat16.* in precision fp32"):
        write_shard(tmp_path / "a", key_of(precision="fp32"), hidden_RE, logprobs_R)
    assert list(tmp_path.iterdir()) == []


# The map


def _mapped(file: Path) -> list[tuple[int, int]]:
    """Address ranges at which this process maps a file."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    ranges = [line.split()[0].split("-") for line in lines if line.endswith(str(file))]
    return [(int(start, 16), int(end, 16)) for start, end in ranges]


def test_what_is_read_is_the_map_and_goes_with_the_last_view(file: Path) -> None:
    before = own_descriptors()
    shard = opened(file, KEY)
    for tensor in (shard.hidden_RE, shard.teacher_logprobs_R):
        assert any(start <= tensor.data_ptr() < end for start, end in _mapped(file))
    part = shard.hidden_RE[1:3]
    del shard, tensor
    assert _mapped(file)
    del part
    assert not _mapped(file)
    assert not isinstance(open_shard(file, key_of(policy_version=4)), CachedShard)
    file.write_bytes(b"torn")
    assert not isinstance(open_shard(file, KEY), CachedShard)
    assert not _mapped(file)
    assert own_descriptors() - before == Counter()


def test_what_was_read_outlives_its_file(file: Path) -> None:
    shard = opened(file, KEY)
    write_shard(file, KEY, *values_of(KEY, seed=1))
    file.write_bytes(b"")
    assert same(shard.hidden_RE, values_of(KEY)[0])


def test_what_is_written_to_a_view_does_not_reach_the_file(file: Path) -> None:
    content = file.read_bytes()
    opened(file, KEY).hidden_RE.zero_()
    assert file.read_bytes() == content
    assert same(opened(file, KEY).hidden_RE, values_of(KEY)[0])


# Damage


def test_a_flipped_bit_of_any_byte_is_found_or_changes_nothing(file: Path) -> None:
    """Arrow's padding, and the copy of the schema in front, say nothing to anyone; all that is read is covered."""
    whole = file.read_bytes()
    hidden_RE, logprobs_R = values_of(KEY)
    covered: set[int] = set()
    for content in (hidden_RE.view(torch.uint8).numpy().tobytes(), logprobs_R.numpy().tobytes()):
        assert whole.count(content) == 1
        covered |= set(range(whole.index(content), whole.index(content) + len(content)))
    manifest = whole.rindex(b'{"key"')
    covered |= set(range(manifest, whole.index(b"}", whole.index(b"logprobs_checksum", manifest)) + 1))
    generator, found = random.Random(0), 0
    for offset in range(len(whole)):
        for bit in generator.sample(range(8), 2):
            flipped = bytearray(whole)
            flipped[offset] ^= 1 << bit
            file.write_bytes(flipped)
            shard = open_shard(file, KEY)
            if isinstance(shard, CachedShard):
                assert offset not in covered, (offset, bit)
                assert same(shard.hidden_RE, hidden_RE), (offset, bit)
                assert same(shard.teacher_logprobs_R, logprobs_R), (offset, bit)
            else:
                assert shard.startswith("damaged: "), (offset, bit, shard)
                found += 1
    assert found > 2 * len(covered)


def test_many_flipped_bits_of_a_larger_file(tmp_path: Path) -> None:
    key = key_of(num_rows=40, width=256)
    file = tmp_path / "a"
    write_shard(file, key, *values_of(key))
    whole, generator = file.read_bytes(), random.Random(1)
    for _ in range(300):
        flipped = bytearray(whole)
        for _ in range(generator.choice((1, 2, 20))):
            flipped[generator.randrange(len(whole))] ^= 1 << generator.randrange(8)
        file.write_bytes(flipped)
        shard = open_shard(file, key)
        if isinstance(shard, CachedShard):
            assert same(shard.hidden_RE, values_of(key)[0])
            assert same(shard.teacher_logprobs_R, values_of(key)[1])


def test_a_torn_file_is_damaged_at_every_length(file: Path) -> None:
    whole = file.read_bytes()
    for size in (*range(0, len(whole), 64), *range(len(whole) - 12, len(whole))):
        file.write_bytes(whole[:size])
        found = open_shard(file, KEY)
        assert isinstance(found, str), size
        assert found.startswith("damaged: "), size
    for other in (whole + b"\0", b"\0" * len(whole), whole[64:] + whole[:64], whole[8:]):
        file.write_bytes(other)
        found = open_shard(file, KEY)
        assert isinstance(found, str)
        assert found.startswith("damaged: ")


def test_zeros_where_values_were_are_found(file: Path) -> None:
    """What a file system may leave of a file whose size became durable before its bytes."""
    whole = bytearray(file.read_bytes())
    content = values_of(KEY)[0].view(torch.uint8).numpy().tobytes()
    start = whole.index(content)
    whole[start : start + len(content)] = bytes(len(content))
    file.write_bytes(whole)
    assert open_shard(file, KEY) == "damaged: the checksum of its values does not fit"


def test_what_is_no_regular_file_is_named_and_nobody_waits_for_it(file: Path) -> None:
    real = file.rename(file.with_name("real"))
    assert open_shard(file, KEY) == "absent"
    assert open_shard(file.parent / "nowhere" / "a", KEY) == "absent"
    file.mkdir()
    assert open_shard(file, KEY) == "damaged: it is no regular file"
    file.rmdir()
    os.mkfifo(file)
    assert open_shard(file, KEY) == "damaged: it is no regular file"
    file.unlink()
    for target in (real, file.parent, Path("/dev/zero"), Path("nowhere")):
        file.symlink_to(target)
        found = open_shard(file, KEY)
        assert isinstance(found, str)
        assert found.startswith("damaged: "), target
        file.unlink()
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(file))
        found = open_shard(file, KEY)
    assert isinstance(found, str)
    assert found.startswith("damaged: ")
    assert isinstance(open_shard(real / "below", KEY), str)


def _arrow(file: Path, batch: pa.RecordBatch, num_batches: int = 1) -> None:
    with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_file(sink, batch.schema) as writer:
        for _ in range(num_batches):
            writer.write_batch(batch)


def test_a_right_manifest_over_other_columns_is_found(file: Path) -> None:
    batch = pa.ipc.open_file(file.read_bytes()).get_batch(0)
    metadata = batch.schema.metadata
    flat = batch.column("hidden").values
    narrow = pa.FixedSizeListArray.from_arrays(flat, 3)
    for other, message in (
        (batch.slice(0, 4), "4 rows instead of 5"),
        (batch.select(["teacher_logprob", "hidden"]), "columns"),
        (batch.select(["hidden"]), "columns"),
        (pa.record_batch({"hidden": narrow, "teacher_logprob": pa.array(np.zeros(10, np.float32))}), "columns"),
        (pa.record_batch({"hidden": batch.column("hidden").cast(pa.list_(pa.int32(), 6))}), "columns"),
    ):
        _arrow(file, other.replace_schema_metadata(metadata))
        found = open_shard(file, KEY)
        assert isinstance(found, str)
        assert found.startswith("damaged: "), found
        assert message in found
    _arrow(file, batch, num_batches=2)
    assert open_shard(file, KEY) == "damaged: its columns are not those of its manifest"


def test_compressed_columns_are_not_taken(file: Path) -> None:
    """Their values would lie beside the map."""
    key = key_of(num_rows=64, width=64)
    write_shard(file, key, torch.zeros(64, 64).bfloat16(), torch.zeros(64))
    batch = pa.ipc.open_file(file.read_bytes()).get_batch(0)
    options = pa.ipc.IpcWriteOptions(compression="lz4")
    with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_file(sink, batch.schema, options=options) as writer:
        writer.write_batch(batch)
    assert open_shard(file, key) == "damaged: its values lie outside it"


def test_a_foreign_arrow_file_and_another_format_are_refused(file: Path) -> None:
    batch = pa.ipc.open_file(file.read_bytes()).get_batch(0)
    metadata = batch.schema.metadata
    _arrow(file, batch.replace_schema_metadata(None))
    assert open_shard(file, KEY) == "damaged: its form is none, this version reads rollforward-hidden-1"
    _arrow(file, batch.replace_schema_metadata(metadata | {b"format": b"rollforward-hidden-2"}))
    assert open_shard(file, KEY) == "damaged: its form is rollforward-hidden-2, this version reads rollforward-hidden-1"
    _arrow(file, batch.replace_schema_metadata({b"format": metadata[b"format"]}))
    assert open_shard(file, KEY) == "damaged: the checksum of its manifest does not fit"


# Whose it is


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"teacher": "code"}, "foreign: it is of teacher math in version v-one, not of teacher code in version v-one"),
        (
            {"teacher_version": "v-two", "policy_version": 4},
            "foreign: it is of teacher math in version v-one, not of teacher math in version v-two",
        ),
        ({"width": 7}, "foreign: it is of vectors of width 6 in precision native, not of .* 7 in precision native"),
        ({"precision": "fp32"}, "foreign: it is of .* precision native, not of vectors of width 6 in precision fp32"),
        ({"policy_version": 4}, "stale: it is of policy version 3, not of policy version 4"),
        (
            {"trajectories": (RequestId(8, 0, 1), RequestId(8, 2, 0))},
            "stale: it is of 5 trained positions of 2 trajectories, s7-p0-m1 to s7-p2-m0, not of .* s8-p0-m1 to",
        ),
        ({"trajectories": (RequestId(7, 0, 1),)}, "stale: .* 2 trajectories"),
        ({"num_rows": 4}, "stale: it is of 5 trained positions of .*, not of 4 trained"),
        ({"tokens_checksum": 124}, "stale: it is of other trajectories or other tokens of the same"),
    ],
)
def test_a_whole_file_of_something_else_is_named(file: Path, changes: dict[str, Any], reason: str) -> None:
    found = open_shard(file, key_of(**changes))
    assert isinstance(found, str)
    assert re.match(reason, found), found
    assert isinstance(open_shard(file, KEY), CachedShard)


def test_trajectories_that_differ_in_the_middle_are_told_apart(tmp_path: Path) -> None:
    first, last = RequestId(7, 0, 0), RequestId(7, 3, 0)
    key = key_of(trajectories=(first, RequestId(7, 1, 0), last))
    write_shard(tmp_path / "a", key, *values_of(key))
    found = open_shard(tmp_path / "a", key_of(trajectories=(first, RequestId(7, 2, 0), last)))
    assert found == "stale: it is of other trajectories or other tokens of the same trajectories"


def packed_of(token_ids: list[int], lengths: list[int], trained: list[int]) -> PackedBatch:
    size = len(token_ids)
    mask_T = np.isin(np.arange(size), trained)
    return PackedBatch(
        token_ids_T=np.array(token_ids, np.int32),
        sequence_lengths_B=np.array(lengths, np.int32),
        target_ids_T=np.array([*token_ids[1:], 0], np.int32),
        trained_mask_T=mask_T,
        behavior_logprobs_T=np.zeros(size, np.float32),
        advantages_T=np.zeros(size, np.float32),
        token_weight_T=mask_T.astype(np.float32),
        trajectory_T=np.zeros(size, np.int32),
        trajectory_tokens_N=np.array([len(trained)], np.int32),
        ids=(RequestId(7, 0, 0),),
    )


def _key(packed: PackedBatch, **changes: Any) -> ShardKey:
    given: dict[str, Any] = {"teacher": "math", "teacher_version": "v", "policy_version": 3, "precision": "native"}
    return shard_key(packed, **(given | {"width": 4} | changes))


def test_a_key_is_of_the_very_tokens() -> None:
    packed = packed_of([5, 6, 7, 8], [2, 2], [0, 2])
    key = _key(packed)
    assert (key.num_rows, key.width, key.trajectories, key.teacher) == (2, 4, (RequestId(7, 0, 0),), "math")
    assert _key(packed_of([5, 6, 7, 8], [2, 2], [0, 2])) == key
    others = [
        packed_of([5, 6, 7, 9], [2, 2], [0, 2]),
        packed_of([5, 6, 8, 7], [2, 2], [0, 2]),
        packed_of([5, 6, 7, 8], [3, 1], [0, 2]),
        packed_of([5, 6, 7, 8], [4], [0, 2]),
        packed_of([5, 6, 7, 8], [2, 2], [0, 1]),
        packed_of([5, 6, 7, 8, 2, 2], [2, 2, 2], [0, 2]),
    ]
    checksums = {one.tokens_checksum for one in map(_key, [packed, *others])}
    assert len(checksums) == len(others) + 1
    # What does not reach the teacher is not in its key.
    reweighted = msgspec.structs.replace(packed, token_weight_T=packed.token_weight_T * 2)
    assert _key(reweighted) == key


def test_one_trained_token_is_a_shard_and_none_is_not(tmp_path: Path) -> None:
    key = _key(packed_of([5], [1], [0]), width=3)
    write_shard(tmp_path / "a", key, *values_of(key))
    assert opened(tmp_path / "a", key).hidden_RE.shape == (1, 3)
    with pytest.raises(
        ValueError, match="teacher math has 0 rows of width 4 from 1 trajectories; each must be at least"
    ):
        _key(packed_of([5], [1], []))
    for changes in ({"width": 0}, {"num_rows": -1}):
        with pytest.raises(ValueError, match="each must be at least 1"):
            key_of(**changes).__post_init__()


# Room


def test_the_worst_case_is_never_below_what_is_written(tmp_path: Path) -> None:
    """Names as long and numbers as large as they get; each trajectory in a shard of its own, all tokens trained."""
    largest = 2**63 - 1
    for precision in ("native", "fp32"):
        keys = [
            key_of(
                teacher="t" * 64,
                teacher_version="f" * 64,
                policy_version=largest,
                trajectories=(RequestId(largest, largest, largest),),
                tokens_checksum=2**32 - 1,
                num_rows=3,
                width=width,
                precision=precision,
            )
            for width in (8, 5)
        ]
        sizes = [write_shard(tmp_path / "a", key, *values_of(key)) for key in keys]
        worst = worst_case_bytes(num_sequences=2, max_new_tokens=3, width=8, precision=precision, passes=2)
        assert 2 * sum(sizes) <= 2 * sum(shard_bytes(key) for key in keys) <= worst <= 2 * sum(sizes) + 4 * 4096
    # DeepSeek-V4-Flash: 1024 completions of 16384 tokens, BF16 vectors of 4096 values, and a log-prob each.
    flash = worst_case_bytes(num_sequences=1024, max_new_tokens=16384, width=4096, precision="native", passes=1)
    assert flash == pytest.approx(1024 * 16384 * (4096 * 2 + 4), rel=1e-3)
    both = worst_case_bytes(num_sequences=1024, max_new_tokens=16384, width=4096, precision="native", passes=2)
    assert both == 2 * flash
