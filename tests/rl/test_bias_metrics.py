"""`bias/*` of a step: what counts as an attempt, a request interrupted, a response dropped; by hand, and from a real
log that processes left. The estimates are tested in rollout/test_bias.py."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollforward.model.metrics import metric_values
from rollforward.rl.bias_metrics import bias_of_step
from rollforward.rollout.bias import BiasTotals
from rollforward.rollout.interruptions import (
    CameBack,
    Interruption,
    ReplacedAttempt,
    find_interruptions,
    tokens_digest,
)
from rollforward.rollout.replica import LogStats
from rollforward.rollout.types import (
    FailureType,
    Group,
    Request,
    RequestId,
    ResumeStats,
    SamplingParams,
    StopReason,
    Trajectory,
)
from rollforward.rollout.wal import WalWriter, open_log
from rollforward.rollout.wal_commit import WalStats
from rollforward.rollout.wal_records import WalConfig
from rollforward.rollout.wal_recovery import RecoveredLog, recover
from rollforward.sandbox.codec import SEGMENT_HEADER_BYTES, frame_seed, scan_frames


def _trajectory(member: int, tokens: int, **changes: Any) -> Trajectory:
    """Samples 10 * member, 10 * member + 1, ..."""
    sampled = np.arange(10 * member, 10 * member + tokens, dtype=np.int32)
    fields: dict[str, Any] = {
        "id": RequestId(4, 0, member),
        "task": "sum",
        "token_ids_T": np.concatenate((np.array([1], np.int32), sampled)),
        "trained_mask_T": np.array([False] + [True] * tokens),
        "behavior_logprobs_T": np.zeros(tokens + 1, dtype=np.float32),
        "policy_version": 4,
        "reward": 0.0,
        "stop_reason": StopReason.EOS,
        **changes,
    }
    return Trajectory(**fields)


def _lost(member: int, tokens: int, **changes: Any) -> Trajectory:
    return _trajectory(
        member, tokens, **{"reward": None, "stop_reason": StopReason.ABORTED, "failure": FailureType.INFRA} | changes
    )


def _groups(*trajectories: Trajectory) -> list[Group]:
    return [Group(step=4, prompt=0, trajectories=trajectories)]


def _stats(*interruptions: Interruption, kv_restored: int = 0) -> LogStats:
    return LogStats(
        replica="engine-0",
        position=0,
        written=WalStats(
            frames=0, bytes_written=0, commits=0, sync_s=0.0, sync_max_s=0.0, backpressure_s=0.0, segments=0
        ),
        resumed=ResumeStats(kv_restored=kv_restored),
        interruptions=interruptions,
    )


def _interruption(member: int, came_back: CameBack, times: int = 1, **changes: Any) -> Interruption:
    return Interruption(id=RequestId(4, 0, member), times=times, came_back=came_back, **changes)


def _replaced(*token_ids: int) -> ReplacedAttempt:
    ids = np.array(token_ids, np.int32)
    return ReplacedAttempt(num_tokens=len(ids), digest=tokens_digest(ids))


def _values(groups: list[Group], *stats: LogStats, before: BiasTotals | None = None) -> dict[str, float]:
    return metric_values(bias_of_step(groups, stats, before or BiasTotals(), alarm_z=4.0).metrics)


def test_a_step_that_nothing_disturbed() -> None:
    """A truncated response, a malformed one and a timeout are delivered; a broken prompt is no attempt."""
    groups = _groups(
        _trajectory(0, 4),
        _trajectory(1, 8, stop_reason=StopReason.LENGTH),
        _trajectory(2, 3, failure=FailureType.POLICY),
        _trajectory(3, 5, stop_reason=StopReason.ABORTED, failure=FailureType.TIMEOUT),
        _trajectory(4, 100, reward=None, failure=FailureType.DATA),
    )
    assert _values(groups, _stats()) == {
        "bias/attempts": 4.0,
        "bias/natural_length_mean": 5.0,
        "bias/delivered_length_mean": 5.0,
        "bias/interrupted/rate": 0.0,
        "bias/interrupted/log": 0.0,
        "bias/interrupted/kv": 0.0,
        "bias/interrupted/begun_again": 0.0,
        "bias/interrupted/given_up": 0.0,
        "bias/interrupted/answered": 0.0,
        "bias/interruptions": 0.0,
        "bias/dropped": 0.0,
        "bias/length_z": 0.0,
        "bias/alarm": 0.0,
    }


def test_what_the_platform_ended_is_censored_and_dropped_with_its_length() -> None:
    """Lengths 2, 6 and a 4 that would have gone on: natural 2 + (6 - 2) * 2/3, delivered (2 + 6) / 2."""
    values = _values(_groups(_trajectory(0, 2), _trajectory(1, 6), _lost(2, 4)), _stats())
    assert values["bias/natural_length_mean"] == pytest.approx(14 / 3)
    assert values["bias/delivered_length_mean"] == 4.0
    assert values["bias/attempts"] == 3
    assert values["bias/dropped"] == 1
    assert values["bias/dropped_length/mean"] == values["bias/dropped_length/max"] == 4
    assert values["bias/length_z"] < 0


def test_what_could_not_be_scored_is_dropped_at_its_full_length() -> None:
    values = _values(_groups(_trajectory(0, 2), _lost(1, 9, stop_reason=StopReason.EOS), _trajectory(2, 10)), _stats())
    assert values["bias/natural_length_mean"] == 7.0
    assert values["bias/delivered_length_mean"] == 6.0
    assert values["bias/dropped_length/mean"] == 9


def test_what_was_given_up_counts_with_the_longest_of_its_attempts() -> None:
    history = _interruption(1, CameBack.GIVEN_UP, 3, replaced=(_replaced(10, 11, 12), _replaced(10)))
    values = _values(_groups(_trajectory(0, 2), _lost(1, 0)), _stats(history))
    assert values["bias/natural_length_mean"] == 2.5  # 2 * 1 + (3 - 2) * 1/2
    assert values["bias/dropped_length/mean"] == 3
    assert values["bias/attempts"] == 2
    assert (values["bias/interrupted/given_up"], values["bias/interruptions"]) == (0.5, 1.5)


def test_an_attempt_drawn_again_alike_is_one_and_drawn_differently_is_two() -> None:
    groups = _groups(_trajectory(0, 2), _trajectory(1, 4))
    alike = _interruption(1, CameBack.BEGUN_AGAIN, replaced=(_replaced(10, 11, 12),))
    found = bias_of_step(groups, [_stats(alike)], BiasTotals(), alarm_z=4.0)
    assert (found.totals.num_attempts, found.totals.num_drawn_differently, found.totals.z) == (2, 0, 0.0)
    different = _interruption(1, CameBack.BEGUN_AGAIN, replaced=(_replaced(10, 11, 99), _replaced()))
    found = bias_of_step(groups, [_stats(different)], BiasTotals(), alarm_z=4.0)
    assert (found.totals.num_attempts, found.totals.num_drawn_differently) == (3, 1)
    assert metric_values(found.metrics)["bias/natural_length_mean"] == pytest.approx(2 + 2 * 2 / 3)


def test_how_requests_came_back() -> None:
    """Of two that went on one had saved key-values; requests of another step are not counted."""
    other = Interruption(id=RequestId(3, 0, 0), times=7, came_back=CameBack.RESUMED)
    first = _stats(_interruption(0, CameBack.RESUMED, 2), _interruption(1, CameBack.RESUMED), other, kv_restored=1)
    second = _stats(_interruption(2, CameBack.BEGUN_AGAIN), _interruption(3, CameBack.ANSWERED), kv_restored=5)
    values = _values(_groups(*(_trajectory(member, 2) for member in range(8))), first, second)
    assert {name: value * 8 for name, value in values.items() if name.startswith("bias/interr")} == {
        "bias/interrupted/rate": 4,
        "bias/interrupted/log": 1,
        "bias/interrupted/kv": 1,
        "bias/interrupted/begun_again": 1,
        "bias/interrupted/given_up": 0,
        "bias/interrupted/answered": 1,
        "bias/interruptions": 5,
    }


def test_the_alarm_rings_once_over_many_steps_and_stays_on() -> None:
    """Each step loses its longest response: no step is evidence, twenty-odd together are."""
    totals, alarms, on = BiasTotals(), [], []
    for step in range(40):
        lengths = np.random.default_rng(step).integers(1, 40, 16)
        longest = int(np.argmax(lengths))
        members = [
            (_lost if member == longest else _trajectory)(member, int(length) - (member == longest))
            for member, length in enumerate(lengths)
        ]
        found = bias_of_step(_groups(*members), [_stats()], totals, alarm_z=4.0)
        totals = found.totals
        alarms.append(found.alarm)
        on.append(metric_values(found.metrics)["bias/alarm"])
    (told,) = [alarm for alarm in alarms if alarm is not None]
    first = alarms.index(told)
    assert 5 < first < 39
    assert on == [0.0] * first + [1.0] * (40 - first)
    assert "shorter" in told


def test_each_metric_states_its_unit() -> None:
    found = bias_of_step(_groups(_trajectory(0, 2), _lost(1, 1)), [_stats()], BiasTotals(), alarm_z=4.0)
    units = {metric.name: (metric.per, metric.denominator) for metric in found.metrics}
    assert units["bias/attempts"] == units["bias/dropped"] == units["bias/interrupted/log"] == ("request", 2.0)
    assert units["bias/natural_length_mean"] == ("attempt", 2.0)
    assert units["bias/delivered_length_mean"] == ("trajectory", 1.0)
    assert units["bias/dropped_length/mean"] == ("response", 1.0)
    assert units["bias/length_z"] == units["bias/alarm"] == ("run", 1.0)


def test_a_step_of_broken_prompts_has_no_lengths() -> None:
    values = _values(_groups(_trajectory(0, 3, reward=None, failure=FailureType.DATA)), _stats())
    assert values == {"bias/length_z": 0.0, "bias/alarm": 0.0}


def _open(directory: Path) -> tuple[WalWriter, RecoveredLog]:
    return open_log(directory, stream="engine-0", config=WalConfig(level="process"))


def _request(member: int) -> Request:
    return Request(
        id=RequestId(4, 0, member),
        prompt_ids=np.array([1], np.int32),
        seed=member,
        sampling=SamplingParams(max_new_tokens=50),
        policy_version=4,
    )


def _step(writer: WalWriter, slots: list[int], tokens: list[int]) -> int:
    return writer.append_step(
        np.array(slots, np.uint16), np.array(tokens, np.int32), np.zeros(len(slots), np.float32), policy_version=4
    )


def test_a_log_tells_what_its_processes_left(tmp_path: Path) -> None:
    """Three processes. Member 0 is over in the first, 1 in the second, 2 is in flight in both; 3 lives only in the last
    and begins a second attempt there."""
    writer, _ = _open(tmp_path)
    for member in range(3):
        writer.append_open(_request(member), slot=member)
    _step(writer, [0, 1, 2], [5, 6, 7])
    writer.wait_durable(writer.append_close(0, StopReason.EOS))
    writer.abandon()
    writer, _ = _open(tmp_path)
    for member in (1, 2):
        writer.append_open(_request(member), slot=member, resumed_tokens=1)
    _step(writer, [1, 2], [8, 9])
    writer.wait_durable(writer.append_close(1, StopReason.EOS))
    writer.abandon()
    writer, _ = _open(tmp_path)
    writer.append_open(_request(3), slot=0)
    _step(writer, [0], [30])
    writer.append_close(0, StopReason.ABORTED, failure=FailureType.INFRA)
    writer.append_open(_request(3), slot=0, attempt=1)
    writer.wait_durable(_step(writer, [0], [31]))
    writer.abandon()
    found = {one.id.member: one for one in find_interruptions(recover(tmp_path), max_attempts=3)}
    assert found == {
        1: _interruption(1, CameBack.ANSWERED, 1),
        2: _interruption(2, CameBack.RESUMED, 2),
        3: _interruption(3, CameBack.RESUMED, 2, replaced=(_replaced(30),)),
    }


@pytest.mark.parametrize(("max_attempts", "came_back"), [(2, CameBack.BEGUN_AGAIN), (1, CameBack.GIVEN_UP)])
def test_a_damaged_record_replaces_its_attempt(tmp_path: Path, max_attempts: int, came_back: CameBack) -> None:
    writer, _ = _open(tmp_path)
    writer.append_open(_request(0), slot=0)
    for token in (5, 6, 7, 8):
        writer.wait_durable(_step(writer, [0], [token]))  # one commit each: a frame in the last would count as torn
    writer.abandon()
    (segment,) = tmp_path.glob("*.wal")
    data = bytearray(segment.read_bytes())
    frames = scan_frames(bytes(data), offset=SEGMENT_HEADER_BYTES, seed=frame_seed("engine-0", 1)).frames
    data[frames[3].end - 1] ^= 1
    segment.write_bytes(data)
    recovered = recover(tmp_path)
    assert RequestId(4, 0, 0) in recovered.failed
    (found,) = find_interruptions(recovered, max_attempts=max_attempts)
    assert found == _interruption(0, came_back, 1, replaced=(_replaced(5, 6),))
