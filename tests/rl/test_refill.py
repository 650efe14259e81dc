"""Proves: which groups teach, worked by hand; a step draws as many further prompts as are missing, within its bound,
from one cursor and under numbers that go on.

Scripted draws. That the loop does so with real engines, and again after a kill, is in test_refilled_runs.py.
"""

from collections.abc import Sequence

import numpy as np
import pytest

from rollforward.model.metrics import metric_values
from rollforward.rl.algorithms import DynamicSampling
from rollforward.rl.errors import InfraFailureError
from rollforward.rl.prompts import DataCursor
from rollforward.rl.refill import DrawMore, Sampled, StepGroups, check_infra, sample_groups, teaching_groups
from rollforward.rl.tasks.types import Unscored
from rollforward.rollout.types import Completion, FailureType, Group, RequestId, StopReason, Trajectory

Reward = float | None
"""None is an infra failure."""


def _group(prompt: int, rewards: Sequence[Reward], *, stop: StopReason = StopReason.EOS, trained: bool = True) -> Group:
    members = tuple(
        Trajectory(
            id=RequestId(3, prompt, member),
            task="t",
            token_ids_T=np.array([7, 8], np.int32),
            trained_mask_T=np.array([False, trained]),
            behavior_logprobs_T=np.zeros(2, np.float32),
            policy_version=3,
            reward=reward,
            stop_reason=stop if reward is not None else StopReason.ABORTED,
            failure=FailureType.INFRA if reward is None else None,
        )
        for member, reward in enumerate(rewards)
    )
    return Group(step=3, prompt=prompt, trajectories=members)


@pytest.mark.parametrize(
    ("rewards", "teaches"),
    [
        ([0.0, 0.0, 1.0], True),
        ([0.0, 1e-9], True),
        ([1.0, 1.0, 1.0], False),
        ([0.0, -0.0], False),
        ([0.5, None, 0.5], False),
        ([0.5, None, 0.25], True),
        ([0.0, None], False),
        ([None, None], False),
    ],
)
def test_a_group_teaches_where_counted_rewards_differ(rewards: list[Reward], teaches: bool) -> None:
    groups = (_group(0, rewards), _group(1, [0.0, 1.0]))
    assert teaching_groups(groups, "keep") == (groups if teaches else groups[1:])


@pytest.mark.parametrize("stop", [StopReason.LENGTH, StopReason.TURNS])
def test_a_group_whose_every_answer_is_masked_as_truncated_teaches_nothing(stop: StopReason) -> None:
    group = _group(0, [0.0, 1.0], stop=stop)
    assert teaching_groups([group], "keep") == (group,)
    assert teaching_groups([group], "mask") == ()
    mixed = Group(step=3, prompt=0, trajectories=(group.trajectories[0], _group(0, [0.0, 1.0]).trajectories[1]))
    assert teaching_groups([mixed], "mask") == (mixed,)


def test_a_group_without_a_token_to_train_teaches_nothing() -> None:
    assert teaching_groups([_group(0, [0.0, 1.0], trained=False)], "keep") == ()


class _Script:
    """Draws that score as scripted: one list of rewards a prompt, in the order of the stream."""

    def __init__(self, *rewards: list[Reward]) -> None:
        self._rewards = rewards
        self.asked: list[tuple[int, int]] = []

    def __call__(self, sampled: Sampled, num_prompts: int) -> Sampled:
        first = len(sampled.groups)
        assert sampled.cursor.position == 100 + first
        self.asked.append((first, num_prompts))
        new = [_group(first + index, self._rewards[first + index]) for index in range(num_prompts)]
        return Sampled(
            cursor=DataCursor(source="s", epoch=0, position=100 + first + num_prompts),
            num_draws=sampled.num_draws + 1,
            groups=(*sampled.groups, *new),
        )


def _sample(draw_more: DrawMore, num_prompts: int, max_rounds: int | None) -> StepGroups:
    return sample_groups(
        draw_more,
        DataCursor(source="s", epoch=0, position=100),
        num_prompts=num_prompts,
        dynamic=None if max_rounds is None else DynamicSampling(max_rounds=max_rounds),
        truncation="keep",
    )


YES: list[Reward] = [0.0, 1.0]
NO: list[Reward] = [1.0, 1.0]
LOST: list[Reward] = [1.0, None]


def _prompts(found: StepGroups) -> list[int]:
    return [group.prompt for group in found.trained]


def test_what_is_missing_is_drawn_until_the_step_is_full() -> None:
    script = _Script(NO, YES, LOST, NO, YES, NO, YES, YES)
    found = _sample(script, 4, 4)
    assert script.asked == [(0, 4), (4, 3), (7, 1)]
    assert _prompts(found) == [1, 4, 6, 7]
    assert found.sampled.cursor.position == 108
    assert len(found.sampled.groups) == 8
    assert found.warning is None
    assert metric_values(found.metrics) == {
        "train/num_gen_batches": 3,
        "training/dropped_groups": 4,
        "training/no_group_teaches": 0,
    }


def test_a_full_first_draw_is_the_only_one() -> None:
    script = _Script(YES, YES, NO)
    assert _prompts(_sample(script, 2, 4)) == [0, 1]
    assert script.asked == [(0, 2)]


def test_the_bound_ends_the_draws_and_what_teaches_is_trained() -> None:
    script = _Script(NO, YES, NO, NO, YES)
    found = _sample(script, 3, 2)
    assert script.asked == [(0, 3), (3, 2)]
    assert _prompts(found) == [1, 4]
    assert metric_values(found.metrics)["training/dropped_groups"] == 3


def test_where_none_teaches_the_first_groups_with_a_baseline_are_kept_and_it_is_said() -> None:
    script = _Script(NO, LOST, NO, NO)
    found = _sample(script, 2, 2)
    assert _prompts(found) == [0, 2]
    assert found.warning is not None
    assert "not one of 4 groups from 2 draws teaches" in found.warning
    assert metric_values(found.metrics) == {
        "train/num_gen_batches": 2,
        "training/dropped_groups": 2,
        "training/no_group_teaches": 1,
    }
    everything_lost = _sample(_Script(LOST, LOST, LOST, LOST), 2, 2)
    assert _prompts(everything_lost) == [0, 1, 2, 3], "the batch refuses them and says what was lost"


def test_without_dynamic_sampling_one_draw_is_taken_as_it_is() -> None:
    script = _Script(NO, YES, LOST)
    found = _sample(script, 3, None)
    assert script.asked == [(0, 3)]
    assert _prompts(found) == [0, 1, 2]
    assert (found.metrics, found.warning) == ((), None)


@pytest.mark.parametrize(
    ("failed", "max_share", "stops"), [(2, 0.5, False), (3, 0.5, True), (4, 1.0, False), (1, 0.2, True)]
)
def test_a_step_that_the_platform_failed_too_much_of_stops_the_run(failed: int, max_share: float, stops: bool) -> None:
    """Of four completions."""
    completion = Completion(
        id=RequestId(3, 0, 0),
        token_ids=np.zeros(0, np.int32),
        sampled_mask=np.zeros(0, np.bool_),
        behavior_logprobs=np.zeros(0, np.float32),
        policy_version=3,
        stop_reason=StopReason.EOS,
    )
    infra = [Unscored(failure=FailureType.INFRA, detail=f"sandbox {n} is gone") for n in range(failed)]
    sampled = Sampled(
        cursor=DataCursor(source="x", epoch=0, position=0), completions=(completion,) * 4, scores=tuple(infra)
    )
    if not stops:
        check_infra(sampled, step=3, max_share=max_share)
        return
    with pytest.raises(InfraFailureError) as error:
        check_infra(sampled, step=3, max_share=max_share)
    assert str(error.value).startswith(
        f"step 4: the platform failed {failed} of 4 completions, more than rollout.max_infra_share ="
        f" {max_share:g} allows; the first because sandbox 0 is gone. What is durable is kept"
    )
