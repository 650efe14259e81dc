"""Metrics of rewards, lengths, advantages and failures of a step, and of the token logs, under verl's names
where verl has one.

Loss metrics come out of `rl/losses`; the record and its merging are in `model/metrics.py`. Rewards, lengths and
zero-variance groups are taken over what counts: infra and data failures appear only under `failure/*`.
"""

from collections.abc import Sequence

import msgspec

from rollforward.model.dsml import AssistantTurn
from rollforward.model.metrics import Metric
from rollforward.rollout.environment import CallTimes, ToolOutcomes
from rollforward.rollout.replica import EarlierStats, LogStats
from rollforward.rollout.types import FailureType, Group, Trajectory
from rollforward.rollout.weights import WeightsAck, WeightsManifest
from rollforward.sandbox.types import CallStatus, PoolStats


def group_metrics(groups: Sequence[Group]) -> tuple[Metric, ...]:
    """Return rewards, response lengths, zero-variance groups and failure rates of the groups of a step.

    `response_length/clip_ratio` is the share of completions that ran out of budget, of tokens or of turns.
    """
    members = [trajectory for group in groups for trajectory in group.trajectories]
    included = [trajectory for trajectory in members if not trajectory.is_excluded]
    rewards = [trajectory.reward for trajectory in included if trajectory.reward is not None]
    lengths = [trajectory.num_trained_tokens for trajectory in included]
    return (
        *distribution("critic/rewards", rewards, per="trajectory"),
        *distribution("response_length", lengths, per="trajectory"),
        _share("response_length/clip_ratio", [t.stop_reason.is_truncation for t in included], per="trajectory"),
        *_baseline_metrics(groups),
        *(
            _share(f"failure/{failure.value}/rate", [t.failure == failure for t in members], per="trajectory")
            for failure in FailureType
        ),
    )


def sync_metrics(
    before: WeightsManifest | None, published: WeightsManifest, acks: Sequence[WeightsAck], *, publish_s: float
) -> tuple[Metric, ...]:
    """Return what one weight sync moved and took, under `weights/`.

    Args:
        before: the version before; None where this process published none, and what changed is not known.
        published: the new one. acks: of all replicas.
        publish_s: seconds until it was durable.
    """

    def one(name: str, value: float) -> Metric:
        return Metric(name=f"weights/{name}", numerator=value, denominator=1, per="sync")

    metrics = [
        one("bytes", published.num_bytes),
        one("publish_s", publish_s),
        one("load_s", max((ack.load_s for ack in acks), default=0.0)),
        one("never_written", sum(ack.never_written for ack in acks)),
    ]
    if before is not None:
        changed = sum(before.tensors.get(name) != digest for name, digest in published.tensors.items())
        metrics.append(one("changed_tensors", changed))
    return tuple(metrics)


def pool_metrics(pool: PoolStats) -> tuple[Metric, ...]:
    """Return what the supervisors of sandboxes counted since they started, and what they have now, under
    `sandbox/pool_`."""
    counters = [(name, value) for name, value in msgspec.structs.asdict(pool).items() if isinstance(value, int | float)]
    return tuple(
        Metric(name=f"sandbox/pool_{name}", numerator=float(value), denominator=1.0, per="run", reduction="sum")
        for name, value in counters
    )


def log_metrics(stats: Sequence[LogStats]) -> tuple[Metric, ...]:
    """Return the counters of the replicas' token logs since the run's processes began: what was written, under `wal/`,
    what was taken from an earlier process, which key-values were saved for a later one, and how often a process was
    replaced, under `resume/`, and why, under `failure/`; what completions did in sandboxes, under `sandbox/`; and how
    calls of tools ended, under `tools/`, where some did. Sums over replicas and over all processes that each had; of
    `*_max_s` the largest, and `sandbox/call_p50_s` is the median of all calls."""
    lives = _lives(stats)
    records = [
        *(("wal/", life.written) for life in lives),
        *(("resume/", life.resumed) for life in lives),
        *(("resume/kv_", life.saved) for life in lives),
        *(("sandbox/", life.sandbox) for life in lives),
        *(("resume/", one.restarts) for one in stats),
        *(("failure/", one.failures) for one in stats),
    ]
    counters = [
        (prefix + name, float(value))
        for prefix, record in records
        for name, value in msgspec.structs.asdict(record).items()
        if isinstance(value, int | float)
    ]
    counters += [
        (f"tools/{name}", float(value)) for life in lives for name, value in life.sandbox.outcomes.calls.items()
    ]
    times = sum((life.sandbox.call_times for life in lives), CallTimes())
    return (
        *(
            Metric(
                name=name,
                numerator=value,
                denominator=1.0,
                per="replica",
                reduction="max" if name.endswith("_max_s") else "sum",
            )
            for name, value in counters
        ),
        Metric(
            name="sandbox/call_p50_s", numerator=times.median_s, denominator=times.count, per="call", reduction="max"
        ),
    )


def describe_mute_tools(stats: Sequence[LogStats]) -> list[str]:
    """Say of each tool that was called and never returned, in the run so far, how its calls ended, for a person: it is
    broken, too slow for its `timeout_s`, or the policy has not found out what it takes."""
    outcomes = sum((life.sandbox.outcomes for life in _lives(stats)), ToolOutcomes())
    ended: dict[str, dict[str, int]] = {}
    for name, number in outcomes.calls.items():
        tool, _, outcome = name.partition("/")
        if outcome not in ("", "refused"):
            ended.setdefault(tool, {})[outcome] = number
    return [
        f"tool {tool} has not returned once in {sum(numbers.values())} calls:"
        f" {', '.join(f'{number} {outcome}' for outcome, number in numbers.items())}"
        for tool, numbers in ended.items()
        if CallStatus.OK.value not in numbers
    ]


def _lives(stats: Sequence[LogStats]) -> list[EarlierStats | LogStats]:
    return [life for one in stats for life in (one.earlier, one) if life is not None]


def turn_metrics(turns_N: Sequence[Sequence[AssistantTurn]]) -> tuple[Metric, ...]:
    """Return turns and tool calls of completions that count, and the share of turns whose call was malformed (that of
    trajectories with such a turn is `failure/policy/rate`).

    Args:
        turns_N: the turns of each completion.
    """
    calls = [sum(len(turn.calls) for turn in turns) for turns in turns_N]
    malformed = [turn.is_malformed_call for turns in turns_N for turn in turns]
    return (
        *distribution("num_turns", [len(turns) for turns in turns_N], per="trajectory"),
        *distribution("tool_call_counts", calls, per="trajectory"),
        _share("failure/parse/rate", malformed, per="turn"),
    )


def advantage_metrics(advantages: Sequence[float]) -> tuple[Metric, ...]:
    """Return mean, maximum and minimum of the advantages of the trajectories that count."""
    return distribution("critic/advantages", advantages, per="trajectory")


def _baseline_metrics(groups: Sequence[Group]) -> tuple[Metric, ...]:
    """Shares of groups without a baseline, and of groups whose equal rewards teach nothing among the rest."""
    rewards = [_included_rewards(group.trajectories) for group in groups]
    with_baseline = [group for group in rewards if len(group) >= 2]
    return (
        _share("training/groups_without_baseline", [len(group) < 2 for group in rewards], per="group"),
        _share("training/zero_variance_groups", [len(set(group)) == 1 for group in with_baseline], per="group"),
    )


def _included_rewards(trajectories: Sequence[Trajectory]) -> list[float]:
    return [t.reward for t in trajectories if not t.is_excluded and t.reward is not None]


def _share(name: str, hits: Sequence[bool], *, per: str) -> Metric:
    return Metric(name=name, numerator=float(sum(hits)), denominator=float(len(hits)), per=per)


def distribution(name: str, values: Sequence[float], *, per: str) -> tuple[Metric, ...]:
    """Mean, maximum and minimum; merged parts give those of all values."""
    count = float(len(values))
    return (
        Metric(name=f"{name}/mean", numerator=float(sum(values)), denominator=count, per=per),
        Metric(
            name=f"{name}/max", numerator=float(max(values, default=0)), denominator=count, per=per, reduction="max"
        ),
        Metric(
            name=f"{name}/min", numerator=float(min(values, default=0)), denominator=count, per=per, reduction="min"
        ),
    )
