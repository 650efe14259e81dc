"""Proves: what a learner reads of a step is what was written, bit for bit and without a copy; what is torn, damaged or
foreign is named.

That the loop uses the files, and when they go, is in test_controller.py.
"""

import errno
import os
import random
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pytest

from rollforward.rl import samples as samples_module
from rollforward.rl.batch import PackedBatch, StepBatch, build_step_batch
from rollforward.rl.errors import SampleFileError
from rollforward.rl.packing import MicroBatchPlan, plan_micro_batches
from rollforward.rl.samples import TOKENS_NAME, TRAJECTORIES_NAME, open_step, remove_steps, write_step
from rollforward.rollout.types import FailureType, Group, KeptSets, RequestId, Segment, StopReason, Trajectory
from tests.helpers.packing import gather


def _sequence(generator: np.random.Generator, *, is_recorded: bool) -> dict[str, Any]:
    """A ragged sequence; where recorded, with routes and kept sets, some of which are the whole vocabulary."""
    length = int(generator.integers(2, 12))
    trained = np.arange(length) >= generator.integers(1, length)
    token_ids = generator.integers(0, 100, length).astype(np.int32)
    fields: dict[str, Any] = {
        "token_ids_T": token_ids,
        "trained_mask_T": trained,
        "behavior_logprobs_T": np.where(trained, -generator.random(length), 0).astype(np.float32),
    }
    if is_recorded:
        sets = [
            np.union1d(token, generator.integers(0, 100, 3)) if is_cut else np.zeros(0, np.int32)
            for token, is_cut in zip(token_ids, trained & (generator.random(length) < 0.7), strict=True)
        ]
        fields["routes_TLK"] = generator.integers(-1, 300, (length, 3, 2)).astype(np.int16)
        fields["kept"] = KeptSets(
            counts_T=np.array([one.size for one in sets], np.int32), token_ids=np.concatenate(sets).astype(np.int32)
        )
    return fields


def _groups(*, is_recorded: bool = True) -> list[Group]:
    """3 groups of 3; every member 1 has two segments, every member 2 timed out and has no records."""
    generator = np.random.default_rng(3)
    groups = []
    for prompt in range(3):
        members = [
            Trajectory(
                id=RequestId(7, prompt, member),
                task="süm",
                policy_version=7,
                reward=float(generator.random()),
                stop_reason=StopReason.LENGTH if member == 2 else StopReason.EOS,
                failure=FailureType.TIMEOUT if member == 2 else None,
                earlier_segments=(Segment(**_sequence(generator, is_recorded=is_recorded)),) if member == 1 else (),
                **_sequence(generator, is_recorded=is_recorded and member != 2),
            )
            for member in range(3)
        ]
        groups.append(Group(step=7, prompt=prompt, trajectories=tuple(members)))
    return groups


def _batch(**options: Any) -> StepBatch:
    return build_step_batch(_groups(**options), normalisation="trajectory_mean")


def _plans(batch: StepBatch) -> tuple[MicroBatchPlan, ...]:
    plans = plan_micro_batches(batch.rows, 40)
    assert len(plans) > 2
    return plans


@pytest.mark.parametrize("is_recorded", [True, False])
def test_what_is_read_is_what_was_written(tmp_path: Path, is_recorded: bool) -> None:
    batch = _batch(is_recorded=is_recorded)
    step = open_step(write_step(tmp_path, 7, batch))
    assert step.rows == batch.rows
    plans = _plans(batch)
    read = tuple(step.micro_batch(plan) for plan in plans)
    expected = gather(batch, plans)
    assert read == (tuple(_with_records(packed) for packed in expected) if is_recorded else expected)
    assert any(packed.kept_ids is not None and packed.kept_ids.size for packed in read) == is_recorded
    assert all((packed.routes_TLK is None) == (not is_recorded) for packed in read)


def _with_records(packed: PackedBatch) -> PackedBatch:
    """A micro-batch without any record says in words, where its step has some, what it says by their absence."""
    if packed.routes_TLK is not None:
        return packed
    size = packed.token_ids_T.size
    routes_TLK, counts_T = np.full((size, 3, 2), -1, np.int16), np.zeros(size, np.int32)
    return msgspec.structs.replace(
        packed, routes_TLK=routes_TLK, kept_counts_T=counts_T, kept_ids=np.zeros(0, np.int32)
    )


def test_rows_in_any_order_are_read(tmp_path: Path) -> None:
    batch = _batch()
    step = open_step(write_step(tmp_path, 7, batch))
    for seed in range(5):
        plan = MicroBatchPlan(rows=tuple(random.Random(seed).sample(range(len(batch.rows)), 5)))
        assert step.micro_batch(plan) == gather(batch, [plan])[0]


def test_completion_order_changes_no_byte(tmp_path: Path) -> None:
    first = write_step(tmp_path / "a", 7, _batch())
    shuffled = [
        Group(step=7, prompt=group.prompt, trajectories=group.trajectories[::-1]) for group in reversed(_groups())
    ]
    second = write_step(tmp_path / "b", 7, build_step_batch(shuffled, normalisation="trajectory_mean"))
    for name in (TRAJECTORIES_NAME, TOKENS_NAME):
        assert (first / name).read_bytes() == (second / name).read_bytes()


def _mapped(directory: Path) -> list[tuple[int, int]]:
    """Address ranges at which this process maps the step's tokens."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    ranges = [line.split()[0].split("-") for line in lines if line.endswith(str(directory / TOKENS_NAME))]
    return [(int(start, 16), int(end, 16)) for start, end in ranges]


def test_consecutive_rows_are_slices_of_the_map(tmp_path: Path) -> None:
    batch = _batch()
    directory = write_step(tmp_path, 7, batch)
    packed = open_step(directory).micro_batch(_plans(batch)[1])
    ranges = _mapped(directory)
    for name in (
        "token_ids_T",
        "target_ids_T",
        "trained_mask_T",
        "behavior_logprobs_T",
        "advantages_T",
        "token_weight_T",
        "routes_TLK",
        "kept_ids",
    ):
        array = getattr(packed, name)
        assert any(start <= array.ctypes.data < end for start, end in ranges), name
        assert not array.flags.writeable, name


def test_what_was_read_outlives_its_files(tmp_path: Path) -> None:
    batch = _batch()
    plan = _plans(batch)[0]
    packed = open_step(write_step(tmp_path, 7, batch)).micro_batch(plan)
    remove_steps(tmp_path, before=8)
    assert packed == gather(batch, [plan])[0]


def test_a_rewritten_step_replaces_what_was_there(tmp_path: Path) -> None:
    write_step(tmp_path, 7, _batch(is_recorded=False))
    (tmp_path / ".step_000007.partial").mkdir()
    (tmp_path / ".step_000007.partial" / "half").write_text("x")
    batch = _batch()
    directory = write_step(tmp_path, 7, batch)
    assert open_step(directory).rows == batch.rows
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["step_000007", TOKENS_NAME, TRAJECTORIES_NAME]


def test_only_steps_below_are_removed_and_nothing_of_others(tmp_path: Path) -> None:
    for step in (0, 6, 7, 12):
        write_step(tmp_path, step, _batch(is_recorded=False))
    for name in (".step_000003.partial", "step_of_mine", "notes"):
        (tmp_path / name).mkdir()
    remove_steps(tmp_path, before=7)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes", "step_000007", "step_000012", "step_of_mine"]
    remove_steps(tmp_path / "absent", before=7)


def _read_all(directory: Path) -> list[PackedBatch]:
    step = open_step(directory)
    return [step.micro_batch(MicroBatchPlan(rows=(index,))) for index in range(len(step.rows))]


@pytest.mark.parametrize("name", [TRAJECTORIES_NAME, TOKENS_NAME])
def test_a_torn_file_is_named_with_the_way_out(tmp_path: Path, name: str) -> None:
    directory = write_step(tmp_path, 7, _batch())
    whole = (directory / name).read_bytes()
    for size in (0, 5, len(whole) // 2, len(whole) - 1):
        (directory / name).write_bytes(whole[:size])
        with pytest.raises(SampleFileError, match=rf"{name} cannot be read: .*same run_dir"):
            open_step(directory)
    (directory / name).unlink()
    with pytest.raises(SampleFileError, match=rf"{name} cannot be read"):
        open_step(directory)


@pytest.mark.parametrize("name", [TRAJECTORIES_NAME, TOKENS_NAME])
def test_a_flipped_bit_is_found_or_changes_nothing(tmp_path: Path, name: str) -> None:
    """Arrow itself reads most flips without a word; a few lie in its padding and say nothing to anyone."""
    batch = _batch()
    directory = write_step(tmp_path, 7, batch)
    file = directory / name
    expected = _read_all(directory)
    whole = file.read_bytes()
    generator = random.Random(0)
    found = 0
    for _ in range(300):
        flipped = bytearray(whole)
        flipped[generator.randrange(len(whole))] ^= 1 << generator.randrange(8)
        # A new file each time: an old one is still mapped by arrays of the round before.
        file.unlink()
        file.write_bytes(flipped)
        try:
            assert open_step(directory).rows == batch.rows
            assert _read_all(directory) == expected
        except SampleFileError:
            found += 1
    assert found > 100


def test_files_of_two_steps_are_told_apart(tmp_path: Path) -> None:
    first = write_step(tmp_path / "a", 7, _batch())
    other = build_step_batch(_groups(), normalisation="token_mean")
    shorter = build_step_batch(_groups()[:1], normalisation="trajectory_mean")
    for batch, message in ((other, "checksum of trajectory s7-p0-m0 does not fit"), (shorter, "are of two steps")):
        second = write_step(tmp_path / "b", 7, batch)
        (first / TOKENS_NAME).unlink()
        (first / TOKENS_NAME).write_bytes((second / TOKENS_NAME).read_bytes())
        with pytest.raises(SampleFileError, match=message):
            _read_all(first)


def test_a_foreign_arrow_file_and_another_format_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = write_step(tmp_path, 7, _batch())
    foreign = pa.record_batch({"token_ids": pa.array([1, 2], pa.int64())})
    with pa.OSFile(str(directory / TOKENS_NAME), "wb") as sink, pa.ipc.new_file(sink, foreign.schema) as writer:
        writer.write_batch(foreign)
    with pytest.raises(SampleFileError, match=r"tokens\.arrow cannot be read: its form is none, .*token_ids int32"):
        open_step(directory)
    directory = write_step(tmp_path, 7, _batch())
    monkeypatch.setattr(samples_module, "_FORMAT", {b"format": b"rollforward-samples-2"})
    with pytest.raises(SampleFileError, match=r"arrow cannot be read: its form is rollforward-samples-1"):
        open_step(directory)


def test_a_disk_that_refuses_is_named_with_the_way_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "samples").write_text("a file where the folder should be")
    with pytest.raises(
        SampleFileError, match=r"step_000007 cannot be written: .*Move away what stands there"
    ) as caught:
        write_step(tmp_path / "samples", 7, _batch())
    assert "Make room" not in str(caught.value)

    def full(directory: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(samples_module, "sync_path", full)
    with pytest.raises(SampleFileError, match=r"cannot be written: .*No space left.*Make room"):
        write_step(tmp_path / "other", 7, _batch())


def test_tokens_alone_are_those_of_the_micro_batch(tmp_path: Path) -> None:
    samples = open_step(write_step(tmp_path, 7, _batch()))
    for rows in ((0,), (0, 1, 2), (1, 4, 5), (8, 0)):
        spoken, packed = samples.spoken(MicroBatchPlan(rows=rows)), samples.micro_batch(MicroBatchPlan(rows=rows))
        assert spoken.ids == packed.ids
        for name in ("token_ids_T", "sequence_lengths_B", "trained_mask_T"):
            one, other = getattr(spoken, name), getattr(packed, name)
            assert one.dtype == other.dtype, name
            assert np.array_equal(one, other), name
