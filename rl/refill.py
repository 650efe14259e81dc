"""What a step is sampled from: one draw of prompts, or, with DAPO's dynamic sampling, as many as it takes until enough
groups teach.

    draw of prompts --sample, score--> groups --teaching_groups--> enough? --> the step trains on them
         ^                                                          | no
         +-- as many further prompts as groups are missing ---------+

Prompts of a step are numbered through all its draws, so identities and seeds of requests stay unique and a restarted
run asks for the same ones in the same order, which the log answers. Here: which groups teach, and the loop. What a draw
does is the controller's.

Source: DAPO (arXiv 2503.14476), section 3.2.
"""

from collections.abc import Callable, Sequence

import msgspec

from rollforward.model.dsml import AssistantTurn
from rollforward.model.metrics import Metric
from rollforward.rl.algorithms import DynamicSampling, Truncation
from rollforward.rl.errors import InfraFailureError
from rollforward.rl.prompts import DataCursor
from rollforward.rl.tasks.types import Example, Score, Unscored
from rollforward.rollout.types import Completion, FailureType, Group, RequestId, Trajectory


class Sampled(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """All that a step has sampled so far, over its draws."""

    cursor: DataCursor
    """Behind the last prompt drawn."""
    num_draws: int = 0
    """Draws of prompts."""
    examples: tuple[Example, ...] = ()
    """Prompt p of the step is examples[p]."""
    completions: tuple[Completion, ...] = ()
    """Of every member of every prompt, in the order of prompts."""
    turns: dict[RequestId, tuple[AssistantTurn, ...]] = {}
    """What the turns of completions that count say."""
    groups: tuple[Group, ...] = ()
    """Scored, in the order of prompts."""
    metrics: tuple[Metric, ...] = ()
    """What the parts of rewards and their judges said, by draw."""
    scores: tuple[Score | Unscored, ...] = ()
    """Of every completion; an infra failure is the platform's, in sampling or judging."""


class StepGroups(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """What a step sampled, and what of it is trained."""

    sampled: Sampled
    """All draws together."""
    trained: tuple[Group, ...]
    """Groups to train on, in the order of prompts."""
    metrics: tuple[Metric, ...] = ()
    """What dynamic sampling did; empty without it."""
    warning: str | None = None
    """What a person should know of it, or None."""


DrawMore = Callable[[Sampled, int], Sampled]
"""(so far, number of prompts) -> with as many further prompts sampled and scored."""


def sample_groups(
    draw_more: DrawMore,
    cursor: DataCursor,
    *,
    num_prompts: int,
    dynamic: DynamicSampling | None,
    truncation: Truncation,
) -> StepGroups:
    """Sample the groups of one step.

    Args:
        draw_more: draws prompts, samples and scores them.
        cursor: first prompt of the step.
        num_prompts: groups that the step is to train on.
        dynamic: None takes what one draw gives.
        truncation: as in ``build_step_batch``; a masked completion teaches nothing.

    Returns:
        With dynamic sampling, the groups that teach, at most `num_prompts`; where none does after the last draw, the
        first `num_prompts` groups of equal rewards.

    Invariants: the same draws in the same order in any process, if `draw_more` gives the same scores.
    Example: 4 prompts of which 1 teaches, then 3 of which 2 do, then 1 which does: 4 groups from 8 prompts.
    """
    sampled = draw_more(Sampled(cursor=cursor), num_prompts)
    if dynamic is None:
        return StepGroups(sampled=sampled, trained=sampled.groups)
    teaching = teaching_groups(sampled.groups, truncation)
    while len(teaching) < num_prompts and sampled.num_draws < dynamic.max_rounds:
        sampled = draw_more(sampled, num_prompts - len(teaching))
        teaching = teaching_groups(sampled.groups, truncation)
    trained, warning = teaching, None
    if not teaching:
        # The baseline of a group of one is no score; without any group of two, build_step_batch says what was lost.
        with_baseline = tuple(group for group in sampled.groups if len(_included(group)) >= 2)
        trained = with_baseline[:num_prompts] or sampled.groups
        warning = (
            f"not one of {len(sampled.groups)} groups from {sampled.num_draws} draws teaches: their rewards are all"
            " equal. The step has no policy gradient; choose harder or easier prompts, or a larger algo.group_size"
        )
    dropped = len(sampled.groups) - len(trained)
    metrics = (
        _of_step("train/num_gen_batches", sampled.num_draws),
        _of_step("training/dropped_groups", dropped),
        _of_step("training/no_group_teaches", int(not teaching)),
    )
    return StepGroups(sampled=sampled, trained=trained, metrics=metrics, warning=warning)


def teaching_groups(groups: Sequence[Group], truncation: Truncation) -> tuple[Group, ...]:
    """Return the groups that give a policy gradient, in their order.

    Such a group has two members at least whose scores count, not all with the same reward, and a token to train.

    Args:
        groups: scored; infra and data failures among the members do not count.
        truncation: "mask" trains no token of a completion that ran out of budget.

    Example: rewards 0, 0, 1 teach; 1, 1, 1 do not; 0 and an infra failure do not.
    """
    return tuple(group for group in groups if _teaches(group, truncation))


def check_infra(sampled: Sampled, *, step: int, max_share: float) -> None:
    """Refuse a step of which the platform failed too much to say something about the policy.

    Args:
        sampled: all draws of the step.
        step: its number, from 0.
        max_share: of its completions; `rollout.max_infra_share`.

    Raises:
        InfraFailureError: more of them failed.
    """
    infra = [one for one in sampled.scores if isinstance(one, Unscored) and one.failure is FailureType.INFRA]
    failed, total = len(infra), len(sampled.completions)
    if failed > max_share * total:
        raise InfraFailureError(
            f"step {step + 1}: the platform failed {failed} of {total} completions, more than"
            f" rollout.max_infra_share = {max_share:g} allows; the first because {infra[0].detail}. What is"
            " durable is kept: mend that, then `rollforward resume` with the run's directory goes on"
        )


def _teaches(group: Group, truncation: Truncation) -> bool:
    included = _included(group)
    if len({one.reward for one in included}) < 2:
        return False
    return any(
        one.num_trained_tokens > 0 and not (truncation == "mask" and one.stop_reason.is_truncation) for one in included
    )


def _included(group: Group) -> list[Trajectory]:
    return [one for one in group.trajectories if not one.is_excluded]


def _of_step(name: str, value: int) -> Metric:
    return Metric(name=name, numerator=float(value), denominator=1, per="step")
