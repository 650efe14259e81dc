"""Records of rollouts: identities, seeds, consistency checks, equality bit for bit, pickling.

Does not prove anything about the bytes of the log (tests/rollout/test_wal.py).
"""

import itertools
import operator
import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest

from rollforward.rollout.types import (
    Completion,
    FailureType,
    Group,
    Request,
    RequestId,
    SamplingParams,
    Segment,
    StopReason,
    Trajectory,
    request_seed,
)

IDENTITY = RequestId(step=12, prompt=3, member=0)


def _arrays(tokens: int = 4) -> dict[str, Any]:
    return {
        "token_ids_T": np.arange(tokens, dtype=np.int32),
        "trained_mask_T": np.array([False] * (tokens - 2) + [True] * 2),
        "behavior_logprobs_T": np.array([0.0] * (tokens - 2) + [-0.7, -0.1], dtype=np.float32),
    }


def _trajectory(**changes: Any) -> Trajectory:
    fields = {
        "id": IDENTITY,
        "task": "sum",
        "policy_version": 2,
        "reward": 0.0,
        "stop_reason": StopReason.EOS,
        **_arrays(),
        **changes,
    }
    return Trajectory(**fields)


def _request(**changes: Any) -> Request:
    fields = {
        "id": IDENTITY,
        "prompt_ids": np.array([7, 8], dtype=np.int32),
        "seed": 5,
        "sampling": SamplingParams(max_new_tokens=9),
        "policy_version": 2,
        **changes,
    }
    return Request(**fields)


def _completion(**changes: Any) -> Completion:
    fields = {
        "id": IDENTITY,
        "token_ids": np.array([5, 2], dtype=np.int32),
        "sampled_mask": np.array([True, True]),
        "behavior_logprobs": np.array([-0.7, -0.1], dtype=np.float32),
        "policy_version": 2,
        "stop_reason": StopReason.EOS,
        **changes,
    }
    return Completion(**fields)


def test_identity_renders_and_parses() -> None:
    assert str(IDENTITY) == "s12-p3-m0"
    assert RequestId.parse("s12-p3-m0") == IDENTITY


@pytest.mark.parametrize("text", ["", "s1-p2", "s1-p2-m3 ", "s-1-p2-m3", "s01-p2-m3", "x1-p2-m3", "s1-p2-m3-"])
def test_a_text_that_is_no_identity_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="request id"):
        RequestId.parse(text)


def test_identities_order_as_training_does() -> None:
    ordered = [RequestId(0, 0, 1), RequestId(0, 0, 10), RequestId(0, 2, 0), RequestId(0, 10, 0), RequestId(1, 0, 0)]
    assert all(left < right for left, right in itertools.pairwise(ordered))


def test_negative_identity_is_refused() -> None:
    with pytest.raises(ValueError, match="negative"):
        RequestId(0, -1, 0)


def test_seed_has_known_values_and_64_bits() -> None:
    """The constants pin the function: a change of it would break every resumed run."""
    assert request_seed(0, 0, 0, 0) == 8712101511200649828
    assert request_seed(7, 12, 3, 1) == 7201348486879591527
    assert 0 <= request_seed(-1, 0, 0, 0) < 2**64


def test_seed_is_the_same_in_another_process() -> None:
    script = (
        "import sys; from rollforward.rollout.types import request_seed; "
        "sys.stdout.write(str(request_seed(7, 12, 3, 1)))"
    )
    output = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True, text=True).stdout
    assert int(output) == request_seed(7, 12, 3, 1)


def test_seeds_differ_in_every_part_and_do_not_run_together() -> None:
    seeds = {request_seed(r, s, p, m) for r in range(4) for s in range(12) for p in range(12) for m in range(12)}
    assert len(seeds) == 4 * 12**3
    bits = np.unpackbits(np.array(sorted(seeds), dtype="<u8").view(np.uint8).reshape(-1, 8), axis=1)
    assert np.all(np.abs(bits.mean(axis=0) - 0.5) < 0.04), "each of the 64 bits is set in half of the seeds"


@pytest.mark.parametrize("make", [_trajectory, _request, _completion, lambda: Segment(**_arrays())])
def test_records_pickle_to_equal_records(make: Callable[[], Any]) -> None:
    record = make()
    assert pickle.loads(pickle.dumps(record)) == record


@pytest.mark.parametrize(
    "change",
    [
        {"token_ids_T": np.array([0, 1, 2, 4], dtype=np.int32)},
        {"trained_mask_T": np.array([False, True, True, True])},
        {"behavior_logprobs_T": np.array([-0.0, 0.0, -0.7, -0.1], dtype=np.float32)},
        {"reward": 1.0},
        {"failure": FailureType.POLICY},
        {"earlier_segments": (Segment(**_arrays(5)),)},
        {"id": RequestId(12, 3, 1)},
    ],
)
def test_any_changed_bit_makes_a_record_another(change: dict[str, Any]) -> None:
    assert _trajectory() == _trajectory()
    assert operator.ne(_trajectory(), _trajectory()) is False
    assert _trajectory(**change) != _trajectory()
    assert operator.eq(_trajectory(**change), _trajectory()) is False


@pytest.mark.parametrize(
    "change",
    [
        {"token_ids_T": np.arange(4)},
        {"token_ids_T": np.arange(3, dtype=np.int32)},
        {"trained_mask_T": np.array([0, 0, 1, 1], dtype=np.uint8)},
        {"behavior_logprobs_T": np.zeros(4)},
        {"behavior_logprobs_T": np.zeros((4, 1), dtype=np.float32)},
        {"trained_mask_T": np.array([True, False, False, False])},
        {
            "token_ids_T": np.zeros(0, np.int32),
            "trained_mask_T": np.zeros(0, bool),
            "behavior_logprobs_T": np.zeros(0, np.float32),
        },
    ],
)
def test_sequences_that_do_not_fit_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="s12-p3-m0"):
        _trajectory(**change)
    with pytest.raises(ValueError, match="segment"):
        Segment(**{**_arrays(), **change})


def test_score_of_zero_is_a_score_and_a_missing_one_needs_an_excluded_failure() -> None:
    assert _trajectory(reward=0.0).reward == 0.0
    for failure in (FailureType.INFRA, FailureType.DATA):
        assert _trajectory(reward=None, failure=failure).is_excluded
    for failure in (None, FailureType.POLICY, FailureType.TIMEOUT):
        assert not _trajectory(failure=failure).is_excluded
        with pytest.raises(ValueError, match="reward is None"):
            _trajectory(reward=None, failure=failure)


def test_an_abort_names_its_failure() -> None:
    for make in (_trajectory, _completion):
        with pytest.raises(ValueError, match="aborted"):
            make(stop_reason=StopReason.ABORTED)
        assert make(stop_reason=StopReason.ABORTED, failure=FailureType.INFRA).failure is FailureType.INFRA


def test_segments_are_in_order_and_count_together() -> None:
    earlier = Segment(**_arrays(6))
    trajectory = _trajectory(earlier_segments=(earlier,))
    assert trajectory.segments == (earlier, Segment(**_arrays()))
    assert trajectory.num_trained_tokens == 4


@pytest.mark.parametrize("change", [{"seed": 2**64}, {"seed": -1}, {"prompt_ids": np.zeros(0, np.int32)}])
def test_requests_that_cannot_be_sampled_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="request s12-p3-m0"):
        _request(**change)


def test_a_group_is_one_prompt_of_different_members() -> None:
    Group(step=12, prompt=3, trajectories=(_trajectory(), _trajectory(id=RequestId(12, 3, 1))))
    with pytest.raises(ValueError, match="twice"):
        Group(step=12, prompt=3, trajectories=(_trajectory(), _trajectory()))
    with pytest.raises(ValueError, match="one prompt"):
        Group(step=12, prompt=4, trajectories=(_trajectory(),))


@pytest.mark.parametrize(
    "override",
    [
        {"temperature": -0.1},
        {"temperature": 1e-300},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_k": -1},
        {"max_new_tokens": 0},
        {"topk": 1},
    ],
)
def test_sampling_out_of_range_is_refused(override: dict[str, float]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"max_new_tokens": 4, **override}, SamplingParams)
