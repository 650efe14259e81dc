"""Payloads of the token log: what goes in comes out bit for bit, and a payload that is none is a typed error."""

from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from rollforward.rollout.errors import WalUsageError
from rollforward.rollout.types import ArrayRecord, FailureType, Request, RequestId, SamplingParams, StopReason
from rollforward.rollout.wal_records import (
    CloseRecord,
    KvSavedRecord,
    ObserveRecord,
    OpenRecord,
    RecordType,
    StepRecord,
    VersionRecord,
    WalRecord,
    decode_record,
    encode_record,
)

counts = st.integers(0, 2**31)
slots = st.integers(0, 65_534)
ids = st.builds(RequestId, counts, counts, counts)
tokens = hnp.arrays(np.int32, st.integers(0, 20))
requests = st.builds(
    Request,
    id=ids,
    prompt_ids=hnp.arrays(np.int32, st.integers(1, 20)),
    seed=st.integers(0, 2**64 - 1),
    sampling=st.builds(
        SamplingParams,
        max_new_tokens=st.integers(1, 2**40),
        temperature=st.just(0.0) | st.floats(0.001, 10),
        top_k=counts,
    ),
    policy_version=counts,
)
step_rows = hnp.arrays(np.dtype([("slot", np.uint16), ("token", np.int32), ("logprob", np.uint32)]), st.integers(0, 9))
records = st.one_of(
    st.builds(
        OpenRecord, slot=slots, request=requests, attempt=counts, resumed_tokens=counts, resumed_observations=counts
    ),
    st.builds(
        ObserveRecord,
        slot=slots,
        id=ids,
        ordinal=counts,
        after_tokens=counts,
        token_ids=tokens,
        command_position=counts,
    ),
    st.builds(KvSavedRecord, slot=slots, id=ids, num_tokens=counts, manifest=st.text(), fingerprint=st.text()),
    st.builds(VersionRecord, policy_version=counts),
    st.builds(
        CloseRecord,
        slot=slots,
        id=ids,
        stop_reason=st.sampled_from(StopReason),
        failure=st.none() | st.sampled_from(FailureType),
        num_tokens=counts,
    ),
)


@settings(max_examples=60)
@given(records)
def test_records_round_trip(record: WalRecord) -> None:
    encoded = encode_record(record)
    assert len(encoded.payload) % 4 == 0
    assert encoded.flags == 0
    decoded = decode_record(*encoded)
    assert type(decoded) is type(record)
    assert isinstance(record, ArrayRecord | KvSavedRecord | VersionRecord | CloseRecord)
    assert decoded == record


@given(step_rows, st.integers(0, 2**32 - 1))
def test_steps_round_trip_bit_for_bit(rows: Any, version: int) -> None:
    record = StepRecord(
        slots=rows["slot"].copy(),
        token_ids=rows["token"].copy(),
        logprobs=rows["logprob"].copy().view(np.float32),
        policy_version=version,
    )
    decoded = decode_record(*encode_record(record))
    assert isinstance(decoded, StepRecord)
    assert decoded.policy_version == version
    for name in ("slots", "token_ids", "logprobs"):
        assert getattr(decoded, name).tobytes() == getattr(record, name).tobytes()


def test_step_layout_is_ten_bytes_a_row() -> None:
    rows = np.arange(3, dtype=np.uint16)
    record = StepRecord(
        slots=rows, token_ids=np.array([7, 8, -1], np.int32), logprobs=np.zeros(3, np.float32), policy_version=5
    )
    assert encode_record(record).payload == bytes.fromhex(
        "03000000 05000000 0000 0100 0200 0000 07000000 08000000 ffffffff 00000000 00000000 00000000"
    )


@given(st.integers(0, 255), st.integers(0, 255), st.binary(max_size=60))
def test_arbitrary_payloads_give_a_record_or_a_typed_error(frame_type: int, flags: int, payload: bytes) -> None:
    with suppress(WalUsageError):
        decode_record(frame_type, flags, payload)


@given(records, st.data())
def test_damaged_payloads_give_a_record_or_a_typed_error(record: WalRecord, data: st.DataObject) -> None:
    frame_type, flags, payload = encode_record(record)
    position = data.draw(st.integers(0, len(payload) - 1))
    changed = payload[:position] + data.draw(st.binary(max_size=3)) + payload[position + 1 :]
    with suppress(WalUsageError):
        decode_record(frame_type, flags, changed)


def test_unknown_types_and_flags_are_refused() -> None:
    payload = encode_record(VersionRecord(policy_version=1)).payload
    with pytest.raises(WalUsageError, match="version that wrote it"):
        decode_record(99, 0, payload)
    with pytest.raises(WalUsageError, match="flags 0x1"):
        decode_record(RecordType.VERSION, 1, payload)


@pytest.mark.parametrize(
    "changed",
    [
        {"token_ids": np.zeros(2, np.int32)},
        {"token_ids": np.zeros(3, np.int64)},
        {"logprobs": np.zeros(3, np.float64)},
        {"slots": np.zeros(3, np.int64)},
        {"policy_version": 2**32},
        {"policy_version": -1},
    ],
)
def test_steps_that_do_not_fit_are_refused(changed: dict[str, Any]) -> None:
    good = {
        "slots": np.zeros(3, np.uint16),
        "token_ids": np.zeros(3, np.int32),
        "logprobs": np.zeros(3, np.float32),
        "policy_version": 1,
    }
    with pytest.raises(WalUsageError):
        encode_record(StepRecord(**{**good, **changed}))
