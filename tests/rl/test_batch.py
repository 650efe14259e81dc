"""Step batches: the shift to predicting positions, weights by hand, exclusions, packing that depends on nothing but
the step.

That losses built on these weights are invariant is proved in test_loss_invariance.py.
"""

import itertools
import math
import random
from typing import Any

import numpy as np
import pytest

from rollforward.model.metrics import metric_values
from rollforward.rl.batch import (
    PackedBatch,
    StepBatch,
    TrajectoryRow,
    build_step_batch,
)
from rollforward.rl.errors import BatchError, NoTrainableTrajectoriesError
from rollforward.rl.packing import plan_micro_batches
from rollforward.rollout.types import FailureType, Group, KeptSets, RequestId, Segment, StopReason, Trajectory
from tests.helpers.packing import micro_batches


def _sequence(prompt: list[int], answer: list[int]) -> dict[str, Any]:
    """Arrays of one turn; the log-prob of answer token i is -(i + 1) / 8."""
    logprobs = [0.0] * len(prompt) + [-(i + 1) / 8 for i in range(len(answer))]
    return {
        "token_ids_T": np.array(prompt + answer, dtype=np.int32),
        "trained_mask_T": np.array([False] * len(prompt) + [True] * len(answer)),
        "behavior_logprobs_T": np.array(logprobs, dtype=np.float32),
    }


def _trajectory(prompt: int, member: int, reward: float | None, answer_tokens: int = 2, **changes: Any) -> Trajectory:
    fields = {
        "id": RequestId(4, prompt, member),
        "task": "sum",
        "policy_version": 1,
        "reward": reward,
        "stop_reason": StopReason.EOS,
        **_sequence([90 + prompt, 91], list(range(10 * member, 10 * member + answer_tokens))),
        **changes,
    }
    return Trajectory(**fields)


def _group(prompt: int, *trajectories: Trajectory) -> Group:
    return Group(step=4, prompt=prompt, trajectories=trajectories)


def _step(prompts: int = 6, members: int = 4, seed: int = 0) -> list[Group]:
    generator = random.Random(seed)
    return [
        _group(
            p, *(_trajectory(p, m, float(generator.random() < 0.5), generator.randint(1, 9)) for m in range(members))
        )
        for p in range(prompts)
    ]


def _build(groups: list[Group], **options: Any) -> StepBatch:
    return build_step_batch(groups, **{"normalisation": "trajectory_mean", **options})


def _ids(batch: StepBatch) -> list[str]:
    return [str(trajectory.ids[0]) for trajectory in batch.trajectories]


def _total_weight(batches: tuple[PackedBatch, ...]) -> float:
    return math.fsum(float(weight) for batch in batches for weight in batch.token_weight_T)


def test_the_shift_worked_by_hand() -> None:
    """Sequence 90 91 | 5 6 7: the log-prob of 5 is predicted at position 1 (token 91), that of 7 at position 3 (token
    6).

    Rewards 1 and 0: advantages +-1/2. Two trajectories, three tokens each: weight 1/6.
    """
    arrays = _sequence([90, 91], [5, 6, 7])
    batch = _build([_group(0, _trajectory(0, 0, 1.0, **arrays), _trajectory(0, 1, 0.0, **arrays))])
    first = batch.trajectories[0]
    weight = np.float32(1 / 6)
    assert first.token_ids_T.tolist() == [90, 91, 5, 6, 7]
    assert first.target_ids_T.tolist() == [91, 5, 6, 7, 0]
    assert first.trained_mask_T.tolist() == [False, True, True, True, False]
    assert first.behavior_logprobs_T.tolist() == [0.0, -0.125, -0.25, -0.375, 0.0]
    assert first.advantages_T.tolist() == [0.0, 0.5, 0.5, 0.5, 0.0]
    assert first.token_weight_T.tolist() == [0.0, weight, weight, weight, 0.0]
    assert first.trajectory_tokens_N.tolist() == [3]
    assert first.sequence_lengths_B.tolist() == [5]
    assert batch.trajectories[1].advantages_T.tolist() == [0.0, -0.5, -0.5, -0.5, 0.0]


def test_several_turns_train_only_what_the_policy_drew() -> None:
    """Tokens: prompt 1 | drawn 2 3 | observed 4 5 | drawn 6. Targets 2, 3 and 6 are trained, at positions 0, 1 and
    4."""
    arrays = {
        "token_ids_T": np.array([1, 2, 3, 4, 5, 6], dtype=np.int32),
        "trained_mask_T": np.array([False, True, True, False, False, True]),
        "behavior_logprobs_T": np.array([9.0, -0.5, -0.25, math.nan, math.inf, -1.0], dtype=np.float32),
    }
    packed = _build([_group(0, _trajectory(0, 0, 1.0, **arrays), _trajectory(0, 1, 0.0))]).trajectories[0]
    assert packed.trained_mask_T.tolist() == [True, True, False, False, True, False]
    assert packed.target_ids_T[packed.trained_mask_T].tolist() == [2, 3, 6]
    assert packed.behavior_logprobs_T.tolist() == [-0.5, -0.25, 0.0, 0.0, -1.0, 0.0]


def test_weights_of_every_normalisation_worked_by_hand() -> None:
    """Trajectories of 1 and 3 tokens. trajectory_mean: 1/(1 x 2) and 1/(3 x 2). token_mean: 1/4 each. constant, of 8
    tokens that were allowed: 1/(2 x 8) each, although 4 of 16 were drawn."""
    groups = [_group(0, _trajectory(0, 0, 1.0, 1), _trajectory(0, 1, 0.0, 3))]
    expected = {"trajectory_mean": (1 / 2, 1 / 6), "token_mean": (1 / 4, 1 / 4), "constant": (1 / 16, 1 / 16)}
    for normalisation, weights in expected.items():
        batch = _build(groups, normalisation=normalisation, max_new_tokens=8)
        assert [row.token_weight for row in batch.rows] == list(weights)
        for packed, weight in zip(batch.trajectories, weights, strict=True):
            assert set(packed.token_weight_T[packed.trained_mask_T].tolist()) == {np.float32(weight)}


@pytest.mark.parametrize("normalisation", ["trajectory_mean", "token_mean"])
def test_weights_of_a_step_sum_to_one(normalisation: str) -> None:
    batch = _build(_step(), normalisation=normalisation)
    assert _total_weight(batch.trajectories) == pytest.approx(1.0, abs=1e-6)
    for budget in (12, 40, 10_000):
        assert _total_weight(micro_batches(batch, budget)) == pytest.approx(1.0, abs=1e-6)


def test_constant_weights_sum_to_the_share_of_the_budget_that_was_used() -> None:
    batch = _build(_step(), normalisation="constant", max_new_tokens=10)
    share = batch.num_trained_tokens / (len(batch.rows) * 10)
    assert 0 < share < 1
    for batches in (batch.trajectories, micro_batches(batch, 12), micro_batches(batch, 10_000)):
        assert _total_weight(batches) == pytest.approx(share, abs=1e-6)


def test_constant_weights_know_no_length() -> None:
    """Another trajectory becomes three times as long: no weight moves, where both means change those of its
    neighbours or its own."""
    short = [_group(0, _trajectory(0, 0, 1.0, 3), _trajectory(0, 1, 0.0, 3))]
    long = [_group(0, _trajectory(0, 0, 1.0, 3), _trajectory(0, 1, 0.0, 9))]
    for normalisation, is_equal in (("constant", True), ("trajectory_mean", False), ("token_mean", False)):
        options = {"normalisation": normalisation, "max_new_tokens": 16}
        weights = [[row.token_weight for row in _build(groups, **options).rows] for groups in (short, long)]
        assert (weights[0] == weights[1]) is is_equal


def test_constant_weights_count_what_is_trained() -> None:
    """Of three trajectories one is masked and one was lost: 1/(1 x 8)."""
    members = [
        _trajectory(0, 0, 1.0),
        _trajectory(0, 1, 0.0, stop_reason=StopReason.LENGTH),
        _trajectory(0, 2, None, failure=FailureType.INFRA),
    ]
    batch = _build([_group(0, *members)], normalisation="constant", max_new_tokens=8, truncation="mask")
    assert [row.token_weight for row in batch.rows] == [1 / 8]


@pytest.mark.parametrize("budget", [None, 0, -1])
def test_constant_weights_need_the_budget(budget: int | None) -> None:
    with pytest.raises(BatchError, match=rf"max_new_tokens is {budget}; .*'constant'.*sampling\.max_new_tokens"):
        _build(_step(), normalisation="constant", max_new_tokens=budget)


def test_completion_order_changes_nothing() -> None:
    groups = _step()
    expected = micro_batches(_build(groups), 40)
    for seed in range(5):
        generator = random.Random(seed)
        shuffled = [
            _group(group.prompt, *generator.sample(group.trajectories, len(group.trajectories))) for group in groups
        ]
        generator.shuffle(shuffled)
        batch = _build(shuffled)
        assert micro_batches(batch, 40) == expected
        assert metric_values(batch.metrics) == metric_values(_build(groups).metrics)


def test_a_row_says_of_its_trajectory_what_its_tokens_say() -> None:
    """Prompt 1 2 | drawn 3 in an earlier segment, then prompt 1 | drawn 2 3 | observed 4 | drawn 5: three turns."""
    earlier = Segment(**_sequence([1, 2], [3]))
    last = {
        "token_ids_T": np.array([1, 2, 3, 4, 5], dtype=np.int32),
        "trained_mask_T": np.array([False, True, True, False, True]),
        "behavior_logprobs_T": np.zeros(5, np.float32),
    }
    changes = {"earlier_segments": (earlier,), "failure": FailureType.TIMEOUT, "stop_reason": StopReason.TURNS}
    batch = _build([_group(0, _trajectory(0, 0, 1.0), _trajectory(0, 1, 0.0, **last, **changes))])
    assert batch.rows[1] == TrajectoryRow(
        id=RequestId(4, 0, 1),
        task="sum",
        reward=0.0,
        advantage=-0.5,
        token_weight=1 / 8,
        segment_lengths=(3, 5),
        num_trained_tokens=4,
        num_turns=3,
        stop_reason=StopReason.TURNS,
        failure=FailureType.TIMEOUT,
        policy_version=1,
    )
    assert batch.rows[1].num_tokens == 8
    for row, packed in zip(batch.rows, batch.trajectories, strict=True):
        assert packed.ids == (row.id,)
        assert packed.token_ids_T.size == row.num_tokens
        assert packed.trajectory_tokens_N.tolist() == [row.num_trained_tokens]
        assert set(packed.advantages_T[packed.trained_mask_T].tolist()) == {np.float32(row.advantage)}


def test_training_order_is_step_prompt_member() -> None:
    groups = [_group(p, *(_trajectory(p, m, float(m)) for m in (10, 2))) for p in (10, 2)]
    assert _ids(_build(groups)) == ["s4-p2-m2", "s4-p2-m10", "s4-p10-m2", "s4-p10-m10"]


@pytest.mark.parametrize("failure", [FailureType.INFRA, FailureType.DATA])
def test_infra_and_data_failures_are_in_neither_baseline_nor_loss_nor_counts(failure: FailureType) -> None:
    """Rewards 1, 0 and one lost: the baseline is 1/2 and the weights are those of two trajectories."""
    lost = _trajectory(0, 1, None, stop_reason=StopReason.ABORTED, failure=failure)
    with_lost = _build([_group(0, _trajectory(0, 0, 1.0), lost, _trajectory(0, 2, 0.0))])
    without = _build([_group(0, _trajectory(0, 0, 1.0), _trajectory(0, 2, 0.0))])
    assert with_lost.trajectories == without.trajectories
    values = metric_values(with_lost.metrics)
    assert values[f"failure/{failure.value}/rate"] == 1 / 3
    assert values["critic/rewards/mean"] == 0.5


@pytest.mark.parametrize("failure", [FailureType.POLICY, FailureType.TIMEOUT])
def test_failures_of_the_policy_are_scored_and_trained(failure: FailureType) -> None:
    """Three scores 1, 0, 0: mean 1/3, so the failed one has -1/3."""
    groups = [_group(0, _trajectory(0, 0, 1.0), _trajectory(0, 1, 0.0, failure=failure), _trajectory(0, 2, 0.0))]
    batch = _build(groups)
    assert _ids(batch) == ["s4-p0-m0", "s4-p0-m1", "s4-p0-m2"]
    assert batch.trajectories[1].advantages_T[1] == np.float32(-1 / 3)


def test_a_group_with_one_survivor_has_no_baseline_and_is_left_out() -> None:
    broken = _group(0, _trajectory(0, 0, 1.0), _trajectory(0, 1, None, failure=FailureType.INFRA))
    whole = _group(1, _trajectory(1, 0, 1.0), _trajectory(1, 1, 0.0))
    batch = _build([broken, whole])
    assert batch.trajectories == _build([whole]).trajectories
    assert metric_values(batch.metrics)["training/groups_without_baseline"] == 0.5


def test_a_zero_score_is_trained() -> None:
    batch = _build([_group(0, _trajectory(0, 0, 0.0), _trajectory(0, 1, 1.0))])
    assert batch.trajectories[0].advantages_T[1] == -0.5


def test_equal_rewards_train_with_an_advantage_of_exactly_zero() -> None:
    batch = _build([_group(0, *(_trajectory(0, m, 0.1) for m in range(3)))], divide_by_std=True)
    assert all(not packed.advantages_T.any() for packed in batch.trajectories)
    assert metric_values(batch.metrics)["training/zero_variance_groups"] == 1.0


def test_division_by_std_reaches_the_tokens() -> None:
    """Rewards 1, 0: std (n - 1) is sqrt(1/2), so the advantage is 1/2 / sqrt(1/2) = sqrt(1/2)."""
    batch = _build([_group(0, _trajectory(0, 0, 1.0), _trajectory(0, 1, 0.0))], divide_by_std=True)
    assert batch.trajectories[0].advantages_T[1] == pytest.approx(math.sqrt(0.5), rel=1e-5)


def test_a_trajectory_without_a_trained_token_is_scored_and_not_counted() -> None:
    """Scores 1, 0, 0 with nothing drawn in the last: it makes the baseline 1/3, and two share the weight."""
    members = [_trajectory(0, 0, 1.0), _trajectory(0, 1, 0.0), _trajectory(0, 2, 0.0, 0, failure=FailureType.TIMEOUT)]
    batch = _build([_group(0, *members)])
    assert _ids(batch) == ["s4-p0-m0", "s4-p0-m1"]
    assert batch.trajectories[0].advantages_T[1] == np.float32(2 / 3)
    assert batch.trajectories[0].token_weight_T[1] == np.float32(1 / 4)


@pytest.mark.parametrize("stop_reason", [StopReason.LENGTH, StopReason.TURNS])
def test_truncated_completions_are_kept_or_masked(stop_reason: StopReason) -> None:
    """Scores 1, 0, 0 (the last truncated): masked, it still makes the baseline 1/3, but two trajectories share the
    weight."""
    truncated = _trajectory(0, 2, 0.0, stop_reason=stop_reason)
    groups = [_group(0, _trajectory(0, 0, 1.0), _trajectory(0, 1, 0.0), truncated)]
    kept, masked = _build(groups), _build(groups, truncation="mask")
    assert _ids(kept) == ["s4-p0-m0", "s4-p0-m1", "s4-p0-m2"]
    assert _ids(masked) == ["s4-p0-m0", "s4-p0-m1"]
    assert masked.trajectories[0].advantages_T[1] == np.float32(2 / 3)
    assert masked.trajectories[0].token_weight_T[1] == np.float32(1 / 4)
    assert _total_weight(masked.trajectories) == pytest.approx(1.0, abs=1e-6)


def test_segments_of_one_trajectory_weigh_one_and_are_one_member() -> None:
    """3 tokens in segments of 1 and 2 weigh like 3 tokens in one sequence, and the group still has two members."""
    earlier = Segment(**_sequence([1, 2, 3], [4]))
    segmented = _trajectory(0, 0, 1.0, **_sequence([1], [5, 6]), earlier_segments=(earlier,))
    whole = _trajectory(0, 0, 1.0, **_sequence([1], [4, 5, 6]))
    other = _trajectory(0, 1, 0.0)
    in_parts, in_one = _build([_group(0, segmented, other)]), _build([_group(0, whole, other)])
    first = in_parts.trajectories[0]
    assert first.sequence_lengths_B.tolist() == [4, 3]
    assert first.target_ids_T.tolist() == [2, 3, 4, 0, 5, 6, 0]
    assert first.trained_mask_T.tolist() == [False, False, True, False, True, True, False]
    assert first.trajectory_tokens_N.tolist() == [3]
    assert first.token_weight_T[first.trained_mask_T].tolist() == [np.float32(1 / 6)] * 3
    assert _total_weight((first,)) == _total_weight(in_one.trajectories[:1])
    assert first.advantages_T[2] == 0.5
    assert in_parts.trajectories[1] == in_one.trajectories[1]


def test_micro_batches_hold_whole_trajectories_within_the_budget_in_order() -> None:
    batch = _build(_step())
    for budget in (11, 12, 25, 40, 100):
        packs = micro_batches(batch, budget)
        assert [identity for pack in packs for identity in pack.ids] == [t.ids[0] for t in batch.trajectories]
        assert all(pack.token_ids_T.size <= budget for pack in packs)
        for pack, following in itertools.pairwise(packs):
            next_size = int((following.trajectory_T == 0).sum())
            assert pack.token_ids_T.size + next_size > budget, "a micro-batch ends only where the next one doesn't fit"


def test_packing_concatenates_every_field() -> None:
    batch = _build(_step(prompts=2, members=3))
    (pack,) = micro_batches(batch, 10_000)
    parts = batch.trajectories
    for name in PackedBatch.__struct_fields__:
        if name not in ("ids", "trajectory_T", "routes_TLK", "kept_counts_T", "kept_ids"):
            assert getattr(pack, name).tolist() == [value for part in parts for value in getattr(part, name).tolist()]
            assert getattr(pack, name).dtype == getattr(parts[0], name).dtype
    sizes = [part.token_ids_T.size for part in parts]
    assert pack.trajectory_T.tolist() == np.repeat(np.arange(6), sizes).tolist()
    assert pack.trajectory_T.dtype == np.int32


def _recorded(member: int, **changes: Any) -> Trajectory:
    """Prompt 90 91 | drawn 5 6 7 with routes [position, layer, slot] = 10 position + 2 layer + slot; 6 drawn from 1 6
    9."""
    routes_TLK = np.arange(5, dtype=np.int16).reshape(5, 1, 1) * 10 + np.arange(4, dtype=np.int16).reshape(2, 2)
    kept = KeptSets(counts_T=np.array([0, 0, 0, 3, 1], np.int32), token_ids=np.array([1, 6, 9, 7], np.int32))
    fields = {**_sequence([90, 91], [5, 6, 7]), "routes_TLK": routes_TLK, "kept": kept, **changes}
    return _trajectory(0, member, float(member), **fields)


def test_kept_sets_move_to_the_predicting_position_and_routes_stay_with_their_token() -> None:
    first = _build([_group(0, _recorded(0), _recorded(1))]).trajectories[0]
    assert first.kept_counts_T is not None
    assert first.kept_ids is not None
    assert first.routes_TLK is not None
    assert first.target_ids_T.tolist() == [91, 5, 6, 7, 0]
    assert first.kept_counts_T.tolist() == [0, 0, 3, 1, 0]
    assert first.kept_ids.tolist() == [1, 6, 9, 7]
    assert first.routes_TLK[3].tolist() == [[30, 31], [32, 33]]
    assert (first.routes_TLK.dtype, first.kept_counts_T.dtype, first.kept_ids.dtype) == (np.int16, np.int32, np.int32)


def test_segments_and_trajectories_without_records_get_unknown_routes_and_whole_vocabularies() -> None:
    plain = Segment(**_sequence([1, 2], [4]))
    mixed = _recorded(0, earlier_segments=(plain,))
    (pack,) = micro_batches(_build([_group(0, mixed, _recorded(1), _trajectory(0, 2, 0.0))]), 10_000)
    assert pack.routes_TLK is not None
    assert pack.kept_counts_T is not None
    assert pack.kept_ids is not None
    assert pack.routes_TLK[:, 1, 1].tolist() == [-1] * 3 + [3, 13, 23, 33, 43] * 2 + [-1] * 4
    assert pack.kept_counts_T.tolist() == [0] * 3 + [0, 0, 3, 1, 0] * 2 + [0] * 4
    assert pack.kept_ids.tolist() == [1, 6, 9, 7] * 2
    assert pack.routes_TLK.dtype == np.int16


def test_a_token_outside_its_kept_set_is_refused() -> None:
    kept = KeptSets(counts_T=np.array([0, 0, 0, 2, 0], np.int32), token_ids=np.array([1, 9], np.int32))
    with pytest.raises(BatchError, match=r"s4-p0-m1: token 6 at position 3 is not in the kept set"):
        _build([_group(0, _recorded(0), _recorded(1, kept=kept))])


def test_a_trajectory_beyond_the_budget_is_refused() -> None:
    batch = _build([_group(0, _trajectory(0, 0, 1.0, 9), _trajectory(0, 1, 0.0))])
    with pytest.raises(BatchError, match=r"s4-p0-m0 has 11 tokens; a micro-batch holds 10"):
        plan_micro_batches(batch.rows, 10)
    assert [plan.rows for plan in plan_micro_batches(batch.rows, 11)] == [(0,), (1,)]


@pytest.mark.parametrize("logprob", [math.nan, math.inf, -math.inf, 0.01])
def test_impossible_behavior_logprobs_are_refused(logprob: float) -> None:
    arrays = _sequence([1], [2, 3])
    arrays["behavior_logprobs_T"][2] = logprob
    with pytest.raises(BatchError, match=r"s4-p0-m0 has a behavior log-prob.*lower optim\.lr"):
        _build([_group(0, _trajectory(0, 0, 1.0, **arrays), _trajectory(0, 1, 0.0))])


def test_the_same_prompt_twice_is_refused() -> None:
    group = _group(0, _trajectory(0, 0, 1.0), _trajectory(0, 1, 0.0))
    with pytest.raises(BatchError, match="same step and prompt"):
        _build([group, group])


def test_a_group_of_one_is_refused() -> None:
    with pytest.raises(BatchError, match="at least 2"):
        _build([_group(0, _trajectory(0, 0, 1.0))])


def test_a_step_in_which_everything_was_lost_says_so() -> None:
    lost = [_trajectory(0, m, None, failure=FailureType.INFRA) for m in range(2)]
    with pytest.raises(NoTrainableTrajectoriesError, match=r"none of the 2 .*; 2 failed as infra, 0 failed as data"):
        _build([_group(0, *lost)])
    truncated = [_trajectory(0, m, 0.0, stop_reason=StopReason.LENGTH) for m in range(2)]
    with pytest.raises(NoTrainableTrajectoriesError):
        _build([_group(0, *truncated)], truncation="mask")
