"""From examples to requests, and from completions to scored groups: the two ends of the rollout stage.

Here: pure functions of records. Not here: engines (rollout/), masks and weights (batch.py).
"""

from collections.abc import Mapping, Sequence

import numpy as np

from rollforward.model.encoding import ChatEncoding
from rollforward.rl.errors import TaskError
from rollforward.rl.tasks.types import Example, Score, Task, Unscored
from rollforward.rollout.types import (
    Completion,
    Group,
    Request,
    RequestId,
    SamplingParams,
    Trajectory,
    request_seed,
)


class PromptEncoder:
    """Encodes examples' prompts with a length limit. Immutable."""

    def __init__(self, encoding: ChatEncoding, *, max_prompt_tokens: int) -> None:
        """Keep the encoding; a prompt may have at most ``max_prompt_tokens`` tokens."""
        self._encoding = encoding
        self._max_prompt_tokens = max_prompt_tokens

    def prompt_ids(self, example: Example) -> np.ndarray:
        """Return the tokens that the engine continues, int32 [T].

        Raises:
            TaskError: the prompt is longer than the limit.
        """
        ids = self._encoding.encode_prompt(example.messages)
        if len(ids) > self._max_prompt_tokens:
            raise TaskError(
                f"task {example.task}: {example.split} example {example.index} has {len(ids)} prompt"
                " tokens; max_prompt_tokens is"
                f" {self._max_prompt_tokens}. Raise it, or make the questions shorter."
            )
        return np.array(ids, dtype=np.int32)

    def text(self, completion: Completion) -> str:
        """Return the text of a completion, without its end of sequence."""
        return self._encoding.decode_turn(completion.token_ids.tolist())


def group_requests(
    examples: Sequence[Example],
    encoder: PromptEncoder,
    *,
    step: int,
    group_size: int,
    run_seed: int,
    sampling: SamplingParams,
    policy_version: int,
    is_eval: bool = False,
) -> list[Request]:
    """Return every member's request, in training order (prompt, member).

    Args:
        examples: prompt p of the step is examples[p].
        encoder: gives the tokens.
        step, group_size, run_seed: identities and seeds; seed = hash(run seed, step, prompt, member).
        sampling, policy_version: as in ``Request``.
        is_eval: requests of an evaluation, which have identities of their own.
    """
    requests: list[Request] = []
    for prompt, example in enumerate(examples):
        prompt_ids = encoder.prompt_ids(example)
        for member in range(group_size):
            identity = RequestId(step, prompt, member, is_eval)
            requests.append(
                Request(
                    id=identity,
                    prompt_ids=prompt_ids,
                    seed=request_seed(run_seed, step, prompt, member),
                    sampling=sampling,
                    policy_version=policy_version,
                )
            )
    return requests


def score_completions(
    examples: Sequence[Example],
    completions: Sequence[Completion],
    encoder: PromptEncoder,
    tasks: Mapping[str, Task],
) -> list[Score | Unscored]:
    """Judge every completion by its example's task; one that an infra or data failure ended has no score."""
    scores: list[Score | Unscored] = []
    for completion in completions:
        example = examples[completion.id.prompt]
        if completion.failure is not None and completion.failure.is_excluded:
            scores.append(Unscored(failure=completion.failure, detail=f"the sampling of {completion.id} failed"))
        else:
            scores.append(tasks[example.task].score(example, encoder.text(completion)))
    return scores


def describe_unscored(scores: Sequence[Score | Unscored]) -> str | None:
    """How many answers have no score and why the first has none, for a person; None where all have one."""
    unscored = [score for score in scores if isinstance(score, Unscored)]
    if not unscored:
        return None
    first = unscored[0]
    count = f"{len(unscored)} of {len(scores)} answers have no score and are left out"
    return f"{count}; one ({first.failure}): {first.detail}"


def build_groups(
    examples: Sequence[Example],
    requests: Sequence[Request],
    completions: Sequence[Completion],
    scores: Sequence[Score | Unscored],
) -> list[Group]:
    """Join prompts, sampled tokens and scores into groups: what was sampled is what is trained."""
    members: dict[int, list[Trajectory]] = {}
    for request, completion, score in zip(requests, completions, scores, strict=True):
        num_prompt = request.prompt_ids.size
        trajectory = Trajectory(
            id=completion.id,
            task=examples[completion.id.prompt].task,
            token_ids_T=np.concatenate((request.prompt_ids, completion.token_ids)),
            trained_mask_T=np.concatenate((np.zeros(num_prompt, np.bool_), completion.sampled_mask)),
            behavior_logprobs_T=np.concatenate((np.zeros(num_prompt, np.float32), completion.behavior_logprobs)),
            policy_version=completion.policy_version,
            reward=None if isinstance(score, Unscored) else score.value,
            stop_reason=completion.stop_reason,
            failure=score.failure or completion.failure,
        )
        members.setdefault(completion.id.prompt, []).append(trajectory)
    return [
        Group(step=trajectories[0].id.step, prompt=prompt, trajectories=tuple(trajectories))
        for prompt, trajectories in sorted(members.items())
    ]
