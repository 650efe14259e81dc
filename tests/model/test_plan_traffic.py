"""Proves what plan says of traffic: against frames that the token log really writes, and by hand."""

from typing import Any

import msgspec
import numpy as np
import pytest

from rollforward.model.config import PresetName, preset
from rollforward.model.plan_config import EngineShape, LogOptions, PlanRun, SyncPath
from rollforward.model.plan_traffic import (
    make_hidden_plan,
    make_log_plan,
    make_sync_plan,
    shard_sizes,
    step_bytes,
)
from rollforward.model.precision import pack_published
from rollforward.model.shapes import StoredTensor, param_specs
from rollforward.rollout.types import KeptSets
from rollforward.rollout.wal_step import StepRecord, StepRoutes, encode_step
from rollforward.sandbox.codec import encode_frame, frame_seed
from tests.helpers.tiny import random_params


def _frame_bytes(num_rows: int, **columns: Any) -> int:
    record = StepRecord(
        slots=np.arange(num_rows, dtype=np.uint16),
        token_ids=np.full(num_rows, 7, np.int32),
        logprobs=np.full(num_rows, -1, np.float32),
        policy_version=3,
        **columns,
    )
    frame, _ = encode_frame(
        frame_type=2, flags=record.flags, seq=1, batch_seq=1, payload=encode_step(record), seed=frame_seed("e", 1)
    )
    return len(frame)


@pytest.mark.parametrize("num_rows", [1, 2, 3, 7, 256, 2048])
def test_a_step_takes_what_its_frame_takes(num_rows: int) -> None:
    assert step_bytes(num_rows) == _frame_bytes(num_rows)


def test_2048_sequences_take_ten_bytes_a_token() -> None:
    run = PlanRun(model="flash", engine=EngineShape(sequences=2048))
    log = make_log_plan(preset("flash"), run)
    assert round(log.total_per_token, 2) == 10.02
    assert (log.route_bytes_per_token, log.kept_bytes_per_token) == (0, 0)
    assert log.tokens_per_s == 102_400
    assert log.bytes_per_s == pytest.approx(50 * 20_520)
    assert log.sequence_bytes == round(8192 * 20_520 / 2048)


@pytest.mark.parametrize("name", ["tiny", "flash", "pro"])
def test_routes_and_kept_sets_take_what_their_columns_take(name: PresetName) -> None:
    """A step of 64 sequences in which each brings one position and was drawn from five tokens."""
    config, rows = preset(name), 64
    routes = np.full((rows, config.num_hidden_layers, config.num_experts_per_tok), config.n_routed_experts - 1)
    columns = {
        "routes": StepRoutes(counts_N=np.ones(rows, np.int32), routes_PLK=routes.astype(np.int16)),
        "kept": KeptSets(counts_T=np.full(rows, 5, np.int32), token_ids=np.tile(np.arange(5, dtype=np.int32), rows)),
    }
    run = PlanRun(
        model=name, engine=EngineShape(sequences=rows, context=64), wal=LogOptions(routes=True, kept_tokens=5.0)
    )
    assert make_log_plan(config, run).total_per_token * rows == pytest.approx(_frame_bytes(rows, **columns))


def test_a_publish_by_hand() -> None:
    """Two replicas of two GPUs each read 159.6 GB, at 4 GB/s each and 6 GB/s together."""
    path = SyncPath(write_bytes_per_s=1e9, read_bytes_per_s=4e9)
    run = PlanRun(model="flash", nodes=1, gpus_per_node=4, engine=EngineShape(gpus=2), sync=path)
    sync = make_sync_plan(preset("flash"), run)
    assert (sync.num_bytes, sync.num_replicas) == (159_609_485_896, 2)
    assert sync.write_s == pytest.approx(159.609485896)
    assert sync.read_s == pytest.approx(159.609485896 / 4)
    assert sync.total_s == sync.write_s + sync.read_s
    assert sync.shard_s == pytest.approx(sync.largest_shard / 4e9)
    both = msgspec.structs.replace(run, sync=msgspec.structs.replace(path, shared_bytes_per_s=6e9))
    assert make_sync_plan(preset("flash"), both).read_s == pytest.approx(159.609485896 / 3)


def test_trained_bytes_are_those_of_the_tensors() -> None:
    config = preset("tiny")
    masters = random_params(config)
    trained = [pack_published(spec, masters[spec.name]).num_bytes for spec in param_specs(config) if spec.trained]
    assert make_sync_plan(config, PlanRun(model="tiny")).num_trained_bytes == sum(trained)


def test_shards_by_hand() -> None:
    """Sizes 3+1, 2, 9, 1 with 6 bytes a file: a tensor stays with its scale, and one that is too large is alone."""
    sizes = ((3, 1), (2,), (9,), (1,))
    tensors = [tuple(StoredTensor(name="x", shape=(size,), dtype="I8") for size in each) for each in sizes]
    assert shard_sizes(tensors, 6) == [6, 9, 1]
    assert shard_sizes(tensors, 100) == [16]


def test_hidden_states_by_hand() -> None:
    """1,024 trajectories of 16,384 tokens in BF16 are 137 GB for Flash; a head is V x D of them."""
    run = PlanRun(model="flash", engine=EngineShape(sequences=1024, context=16384, steps_per_s=10.0))
    hidden = make_hidden_plan(preset("flash"), run)
    assert hidden.bytes_per_token == 8192
    assert round(1024 * hidden.sequence_bytes / 1e9) == 137
    assert hidden.bytes_per_s == 8192 * 10_240
    assert hidden.head_bytes == 2 * 129280 * 4096
    assert make_hidden_plan(preset("flash"), msgspec.structs.replace(run, teachers=12)).bytes_per_token == 12 * 8192
