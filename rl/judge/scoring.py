"""From what verifiers and judges said of an answer to its score. Pure but for the judges that are asked.

| what happened to a judgement             | what follows                                                            |
|------------------------------------------|-------------------------------------------------------------------------|
| it gives no verdict, of whatever kind    | counted by kind; another one is drawn in its place, `retries` at most   |
| fewer than `min_valid` verdicts are left | no score, `infra`: that a judge fails says nothing about who answered   |
| the answer is empty, or its reasoning    | 0, and no judge is asked                                                |
| has no end                               |                                                                         |
| it is too long for a rubric or its judge | that part is 0, and its judge is not asked                              |
"""

import math
from collections.abc import Mapping, Sequence

import msgspec

from rollforward.rl.errors import RewardError
from rollforward.rl.judge.config import Panel
from rollforward.rl.judge.judging import Ask, Judged, Judging
from rollforward.rl.judge.types import Opinion, Verdict
from rollforward.rl.judge.verdict import worth
from rollforward.rl.tasks.reward_config import LengthReward, RewardPart, RubricReward
from rollforward.rl.tasks.types import PartScore, Pending, Score, ScoreReason, Task, Unscored
from rollforward.rollout.types import Completion, FailureType, RequestId


def settle_all(
    scores: Sequence[Score | Unscored | Pending],
    completions: Sequence[Completion],
    tasks_N: Sequence[Task],
    judging: Judging | None,
    *,
    policy_version: int,
) -> list[Score | Unscored]:
    """Make scores of what is pending; whatever has to be judged is judged together.

    Args:
        scores: of each completion, as its verifiers left it.
        completions: what was answered.
        tasks_N: the task of each completion.
        judging: asks the judges; None where there are none.
        policy_version: weights of the policy.

    Returns:
        The scores, in the order of the completions.

    Raises:
        RewardError: somebody must be asked, and nobody is there.
        TaskError: see `Judging.judge`.
    """
    asks = [
        ask
        for score, completion, task in zip(scores, completions, tasks_N, strict=True)
        if isinstance(score, Pending)
        for ask in _asks(score, completion, task)
    ]
    if asks and judging is None:
        raise RewardError(
            f"task {asks[0].task} has a reward of type rubric, and there are no judges here. Judge in a run of train,"
            " distill, sft or eval"
        )
    answers = [] if judging is None else judging.judge(asks, policy_version=policy_version)
    found = {(ask.id, ask.first): judged for ask, judged in zip(asks, answers, strict=True)}
    return [
        settle(score, task, found, completion) if isinstance(score, Pending) else score
        for score, completion, task in zip(scores, completions, tasks_N, strict=True)
    ]


def settle(
    pending: Pending, task: Task, found: Mapping[tuple[RequestId, int], Judged], completion: Completion
) -> Score | Unscored:
    """The score of an answer of which everybody has spoken.

    Args:
        pending: what verifiers said.
        task: whose reward it is.
        found: what judges said, by answer and number of the first judgement.
        completion: the answer.

    Returns:
        The weighted sum of the parts over the sum of their weights, punishments of length added; no score where a part
        has none.

    Example: 0.75 of a test suite with weight 0.8 and a verdict worth 1 with weight 0.2 give 0.8.
    """
    parts: list[PartScore] = []
    opinions: list[Opinion] = []
    reason = pending.empty
    firsts = _first_numbers(task.options.reward_parts)
    for part, said, truth in zip(task.options.reward_parts, pending.parts, pending.truths, strict=True):
        match part.reward:
            case LengthReward():
                value = length_value(completion.num_sampled_tokens, part.reward)
                parts.append(msgspec.structs.replace(said, value=value))
            case RubricReward() if pending.empty is not None or _is_failed(pending.parts):
                parts.append(said if pending.empty is None else msgspec.structs.replace(said, value=0.0))
            case RubricReward() as reward:
                judged = None if _is_beyond(pending, reward) else found[completion.id, firsts[part.name]]
                if judged is None or judged.is_too_long:
                    reason = ScoreReason.TOO_LONG
                    parts.append(msgspec.structs.replace(said, value=0.0))
                    continue
                opinion = _opinion(part.name, judged, reward, len(pending.answer), truth)
                opinions.append(opinion)
                parts.append(_judged_part(said, opinion, reward))
            case _:
                parts.append(said)
    failed = next((one for one in parts if one.failure is not None and one.failure.is_excluded), None)
    if failed is not None and failed.failure is not None:
        detail = failed.detail if len(parts) == 1 else f"{failed.name}: {failed.detail}"
        return Unscored(failure=failed.failure, detail=detail, parts=tuple(parts), opinions=tuple(opinions))
    total = _sum(parts, task.options.reward_parts)
    if reason is None or len(parts) > 1:
        reason = ScoreReason.PARTIAL if total > 0.0 else ScoreReason.WRONG
        reason = ScoreReason.CORRECT if total >= task.options.correct_from else reason
    return Score(value=total, reason=reason, parts=tuple(parts), opinions=tuple(opinions))


def aggregate(verdicts: Sequence[Verdict], panel: Panel) -> float:
    """Return what several verdicts are worth together.

    Args:
        verdicts: at least one, of the same answer.
        panel: its rubric, and how verdicts become one.

    Returns:
        0 to 1; the order of the verdicts has no say.

    Example: two of three verdicts `pass` are worth 2/3 by mean, and 1 by majority; one of two is worth 0 by majority.
    """
    if panel.aggregate == "mean":
        return min(1.0, math.fsum(worth(one.values, panel) for one in verdicts) / len(verdicts))
    met = [2 * math.fsum(values) > len(verdicts) for values in zip(*(one.values for one in verdicts), strict=True)]
    return worth([float(one) for one in met], panel)


def length_value(num_tokens: int, reward: LengthReward) -> float:
    """Return the punishment of a completion's length, -1 to 0.

    Example: free 10, at most 20: 10 tokens give 0, 15 give -0.5, 30 give -1.
    """
    beyond = max(0, num_tokens - reward.free_tokens)
    return -min(1.0, beyond / (reward.max_tokens - reward.free_tokens)) if beyond else 0.0


def _asks(pending: Pending, completion: Completion, task: Task) -> list[Ask]:
    """What judges are asked of an answer; nothing where there is nothing to see, too much of it for a rubric, or
    its score is lost anyway."""
    if pending.empty is not None or _is_failed(pending.parts):
        return []
    firsts = _first_numbers(task.options.reward_parts)
    return [
        Ask(
            id=completion.id,
            task=task.name,
            reward=part.reward,
            first=firsts[part.name],
            question=pending.question,
            answer=pending.answer,
        )
        for part in task.options.reward_parts
        if isinstance(part.reward, RubricReward) and not _is_beyond(pending, part.reward)
    ]


def _is_beyond(pending: Pending, reward: RubricReward) -> bool:
    return len(pending.answer) > reward.max_answer_chars


def _first_numbers(parts: Sequence[RewardPart]) -> dict[str, int]:
    """The number of the first judgement of each rubric: each has as many as it may ask for."""
    firsts: dict[str, int] = {}
    number = 1
    for part in parts:
        if isinstance(part.reward, RubricReward):
            firsts[part.name] = number
            number += part.reward.judgements + part.reward.retries
    return firsts


def _opinion(name: str, judged: Judged, panel: Panel, answer_chars: int, truth: float | None) -> Opinion:
    verdicts = [one.said for one in judged.judgements if isinstance(one.said, Verdict)]
    return Opinion(
        part=name,
        judgements=judged.judgements,
        worth=tuple(worth(one.values, panel) for one in verdicts),
        answer_chars=answer_chars,
        truth=truth,
        num_retries=judged.num_retries,
    )


def _judged_part(said: PartScore, opinion: Opinion, panel: Panel) -> PartScore:
    verdicts = opinion.verdicts
    if len(verdicts) >= panel.min_valid:
        return msgspec.structs.replace(said, value=aggregate(verdicts, panel))
    last = opinion.failures[-1]
    detail = (
        f"{len(verdicts)} of {len(opinion.judgements)} judgements gave a verdict, min_valid is {panel.min_valid}; the"
        f" last did not: {last.kind} {last.detail}".rstrip()
    )
    return msgspec.structs.replace(said, failure=FailureType.INFRA, detail=detail)


def _is_failed(parts: Sequence[PartScore]) -> bool:
    return any(part.failure is not None and part.failure.is_excluded for part in parts)


def _sum(scores: Sequence[PartScore], parts: Sequence[RewardPart]) -> float:
    terms: list[float] = []
    for score, part in zip(scores, parts, strict=True):
        assert score.value is not None, "a part without a value has failed"
        terms.append(part.weight * score.value)
    weights = [part.weight for part in parts if not isinstance(part.reward, LengthReward)]
    return math.fsum(terms) / math.fsum(weights)
