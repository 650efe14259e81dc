"""Reward, length and failure metrics: values by hand and what each is a mean over. Merging is tested in
model/test_metrics.py."""

from typing import Any

import msgspec
import numpy as np
import pytest

from rollforward.model.dsml import AssistantTurn, Problem
from rollforward.model.messages import ToolCall
from rollforward.model.metrics import metric_values
from rollforward.rl.metrics import (
    advantage_metrics,
    describe_mute_tools,
    group_metrics,
    log_metrics,
    pool_metrics,
    turn_metrics,
)
from rollforward.rollout.engine.kv_store import KvStats
from rollforward.rollout.environment import CallTimes, SandboxCounts, ToolOutcomes
from rollforward.rollout.replica import LogStats, Restarts, with_life
from rollforward.rollout.types import FailureType, Group, RequestId, ResumeStats, StopReason, Trajectory
from rollforward.rollout.wal_commit import WalStats
from rollforward.sandbox.types import PoolStats


def _trajectory(prompt: int, member: int, reward: float | None, tokens: int, **changes: Any) -> Trajectory:
    fields = {
        "id": RequestId(0, prompt, member),
        "task": "sum",
        "token_ids_T": np.zeros(tokens + 1, dtype=np.int32),
        "trained_mask_T": np.array([False] + [True] * tokens),
        "behavior_logprobs_T": np.zeros(tokens + 1, dtype=np.float32),
        "policy_version": 0,
        "reward": reward,
        "stop_reason": StopReason.EOS,
        **changes,
    }
    return Trajectory(**fields)


def _group(prompt: int, *trajectories: Trajectory) -> Group:
    return Group(step=0, prompt=prompt, trajectories=trajectories)


MIXED = _group(
    0,
    _trajectory(0, 0, 1.0, 4, stop_reason=StopReason.TURNS, failure=FailureType.POLICY),
    _trajectory(0, 1, -0.5, 8, stop_reason=StopReason.LENGTH),
    _trajectory(0, 2, None, 100, stop_reason=StopReason.ABORTED, failure=FailureType.INFRA),
)
EQUAL = _group(1, _trajectory(1, 0, 0.0, 2), _trajectory(1, 1, 0.0, 2, failure=FailureType.TIMEOUT))
BROKEN = _group(2, _trajectory(2, 0, 1.0, 1), _trajectory(2, 1, None, 1, failure=FailureType.DATA))


def test_values_worked_by_hand() -> None:
    """Counting trajectories: rewards 1, -0.5, 0, 0, 1 and lengths 4, 8, 2, 2, 1, of which the first ran out of turns
    and the second of tokens; the infra and the data failure are left out."""
    assert metric_values(group_metrics([MIXED, EQUAL, BROKEN])) == {
        "critic/rewards/mean": 1.5 / 5,
        "critic/rewards/max": 1.0,
        "critic/rewards/min": -0.5,
        "response_length/mean": 17 / 5,
        "response_length/max": 8.0,
        "response_length/min": 1.0,
        "response_length/clip_ratio": 2 / 5,
        "training/groups_without_baseline": 1 / 3,
        "training/zero_variance_groups": 1 / 2,
        "failure/infra/rate": 1 / 7,
        "failure/policy/rate": 1 / 7,
        "failure/data/rate": 1 / 7,
        "failure/timeout/rate": 1 / 7,
    }


def test_parts_merge_to_the_values_of_the_whole() -> None:
    whole = metric_values(group_metrics([MIXED, EQUAL, BROKEN]))
    assert metric_values([*group_metrics([MIXED]), *group_metrics([EQUAL]), *group_metrics([BROKEN])]) == whole


def test_advantages() -> None:
    assert metric_values(advantage_metrics([0.5, -0.25, -0.25])) == {
        "critic/advantages/mean": 0.0,
        "critic/advantages/max": 0.5,
        "critic/advantages/min": -0.25,
    }
    assert metric_values(advantage_metrics([])) == {}


def test_each_metric_states_its_unit() -> None:
    units = {metric.name: metric.per for metric in group_metrics([MIXED])}
    assert units.pop("training/groups_without_baseline") == "group"
    assert units.pop("training/zero_variance_groups") == "group"
    assert set(units.values()) == {"trajectory"}


def test_a_step_that_lost_everything_reports_rates_and_no_rewards() -> None:
    lost = _group(
        0, _trajectory(0, 0, None, 1, failure=FailureType.INFRA), _trajectory(0, 1, None, 1, failure=FailureType.INFRA)
    )
    values = metric_values(group_metrics([lost]))
    assert values["failure/infra/rate"] == 1.0
    assert "critic/rewards/mean" not in values


def test_turns_and_calls_by_hand() -> None:
    """Two completions: two calls, one malformed call and an answer with a stray control token; an answer alone."""
    call = ToolCall(name="a", arguments="{}")
    said = AssistantTurn(reasoning="", content="3")
    stray = turn_with(problem_kind=Problem.CONTROL_TOKEN_IN_ANSWER)
    turns = [(turn_with(calls=(call, call)), turn_with(problem_kind=Problem.UNCLOSED), stray), (said,)]
    values = metric_values(turn_metrics(turns))
    assert values == {
        "num_turns/mean": 2.0,
        "num_turns/max": 3.0,
        "num_turns/min": 1.0,
        "tool_call_counts/mean": 1.0,
        "tool_call_counts/max": 2.0,
        "tool_call_counts/min": 0.0,
        "failure/parse/rate": 1 / 4,
    }


def _life(frames: int, sync_max_s: float, kv_restored: int, saved: int) -> LogStats:
    written = WalStats(
        frames=frames, bytes_written=0, commits=0, sync_s=0, sync_max_s=sync_max_s, backpressure_s=0, segments=1
    )
    return LogStats(
        replica="engine-0",
        position=0,
        written=written,
        resumed=ResumeStats(kv_restored=kv_restored),
        saved=KvStats(saved=saved, saved_bytes=10 * saved),
        sandbox=SandboxCounts(calls=frames, call_max_s=sync_max_s),
        restarts=Restarts(restarts=2, recovery_s=3.0, recovery_max_s=2.5),
    )


def test_counters_of_logs_are_summed_over_replicas_and_their_processes() -> None:
    """A replica in its third process beside one that was never replaced."""
    earlier = with_life(with_life(None, _life(10, 0.5, 1, 2)), _life(20, 0.1, 0, 1))
    stats = [msgspec.structs.replace(_life(5, 0.2, 4, 0), earlier=earlier), _life(100, 0.3, 0, 0)]
    values = metric_values(log_metrics(stats))
    assert (values["wal/frames"], values["wal/sync_max_s"], values["wal/segments"]) == (135, 0.5, 4)
    assert (values["resume/kv_restored"], values["resume/kv_saved"], values["resume/kv_saved_bytes"]) == (5, 3, 30)
    assert (values["resume/kv_damaged"], values["resume/kv_missing"], values["resume/kv_refused_budget"]) == (0, 0, 0)
    assert (values["sandbox/calls"], values["sandbox/call_max_s"], values["sandbox/unknown"]) == (135, 0.5, 0)
    assert (values["resume/restarts"], values["resume/recovery_max_s"], values["failure/engine_lost"]) == (4, 2.5, 0)


def test_the_median_of_calls_is_that_of_all_processes() -> None:
    """One of two processes had the many short calls; a median of their medians would be another."""
    short, long = (_life(1, 0.0, 0, 0) for _ in range(2))
    for seconds, number in ((0.001, 60), (0.004, 31)):
        times = sum((CallTimes.of(seconds) for _ in range(number)), CallTimes())
        short = msgspec.structs.replace(short, sandbox=short.sandbox + SandboxCounts(call_times=times))
    slow = SandboxCounts(call_times=sum((CallTimes.of(30.0) for _ in range(30)), CallTimes()))
    long = msgspec.structs.replace(long, sandbox=slow, earlier=with_life(None, short))
    values = metric_values(log_metrics([long]))
    assert values["sandbox/call_p50_s"] == pytest.approx(0.004, rel=0.045)  # the 61st of 121
    assert metric_values(log_metrics([short]))["sandbox/call_p50_s"] == pytest.approx(0.001, rel=0.045)
    assert "sandbox/call_p50_s" not in metric_values(log_metrics([_life(1, 0.0, 0, 0)])), "there were none"


def test_outcomes_of_calls_are_those_of_all_processes_and_a_tool_that_never_returned_is_named() -> None:
    """An earlier process and its successor, beside a replica that has seen one tool return."""

    def counted(**calls: int) -> LogStats:
        outcomes = ToolOutcomes(calls={name.replace("__", "/"): number for name, number in calls.items()})
        return msgspec.structs.replace(_life(1, 0.0, 0, 0), sandbox=SandboxCounts(outcomes=outcomes))

    earlier = with_life(with_life(None, counted(slow__timeout=2, bash__error=4)), counted(slow__timeout=1))
    later = counted(slow__timeout=5, slow__oom=1, slow__refused=9, never__refused=3, unknown=7)
    stats = [msgspec.structs.replace(later, earlier=earlier), counted(bash__ok=2)]
    values = {name: value for name, value in metric_values(log_metrics(stats)).items() if name.startswith("tools/")}
    assert values == {
        "tools/slow/timeout": 8,
        "tools/slow/oom": 1,
        "tools/slow/refused": 9,
        "tools/never/refused": 3,
        "tools/bash/error": 4,
        "tools/bash/ok": 2,
        "tools/unknown": 7,
    }
    assert describe_mute_tools(stats) == ["tool slow has not returned once in 9 calls: 1 oom, 8 timeout"]
    assert describe_mute_tools([_life(1, 0.0, 0, 0)]) == []


@pytest.mark.parametrize("seconds", [0.0, 1e-9, 3e-6, 0.0021, 0.7, 3600.0])
def test_a_time_is_told_within_its_class(seconds: float) -> None:
    times = CallTimes.of(seconds)
    assert times.count == 1
    assert times.median_s == pytest.approx(max(seconds, 1e-6), rel=2 ** (1 / 16) - 1 + 1e-9)


def turn_with(**parts: Any) -> AssistantTurn:
    return AssistantTurn(reasoning="", content="", **parts)


def test_counters_of_supervisors() -> None:
    pool = PoolStats(created=7, warm_hits=5, waiting=1) + PoolStats(created=3, lost=2)
    values = metric_values(pool_metrics(pool))
    assert (values["sandbox/pool_created"], values["sandbox/pool_warm_hits"], values["sandbox/pool_lost"]) == (10, 5, 2)
    assert "sandbox/pool_create_s" not in values, "classes are no number"
