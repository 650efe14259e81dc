"""From examples to requests, and from completions to scored groups: the two ends of the rollout stage.

Here: pure functions of records. Not here: engines (rollout/), masks and weights (batch.py).
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack

import msgspec
import numpy as np

from rollforward.model.dsml import AssistantTurn
from rollforward.model.encoding import ChatEncoding
from rollforward.model.messages import ReasoningEffort
from rollforward.model.tokenizer import EOS, THINK
from rollforward.rl.errors import TaskError
from rollforward.rl.judge.judging import Judging
from rollforward.rl.judge.scoring import settle_all
from rollforward.rl.shuffle import Permutation, derive_key
from rollforward.rl.tasks.config import TaskOptions
from rollforward.rl.tasks.types import Example, Pending, Score, Task, Unscored, workspace_of
from rollforward.rollout.types import (
    Completion,
    FailureType,
    Group,
    KeptSets,
    Request,
    RequestId,
    SamplingParams,
    ToolUse,
    Trajectory,
    request_seed,
)
from rollforward.rollout.workspace import Workspace


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
        ids = self._encoding.encode_prompt(example.messages, example.effort, example.tools)
        if len(ids) > self._max_prompt_tokens:
            way_out = "make the questions shorter"
            if example.tools:
                bare = self._encoding.encode_prompt(example.messages, example.effort, ())
                way_out += (
                    f", or set the task's list_tools=false: the list of its tools is {len(ids) - len(bare)} tokens of"
                    " every prompt"
                )
            raise TaskError(
                f"task {example.task}: {example.split} example {example.index} has {len(ids)} prompt"
                " tokens; max_prompt_tokens is"
                f" {self._max_prompt_tokens}. Raise it, or {way_out}."
            )
        return np.array(ids, dtype=np.int32)

    def text(self, completion: Completion, effort: ReasoningEffort) -> str:
        """Return what is judged: the text of the last turn, without its end of sequence, and with the opener of the
        reasoning in front where the prompt ends with it, so that reasoning without an end is seen as such.
        """
        turns = completion.turns
        said = self._encoding.decode_turn(turns[-1].tolist()) if turns else ""
        return said if effort == "non-think" else THINK + said

    def transcript(self, completion: Completion) -> str:
        """Return all that followed the prompt, for a person: turns and what tools said, control tokens by their
        spelling, without the last end of sequence.
        """
        return self._encoding.tokenizer.decode(completion.token_ids.tolist()).removesuffix(EOS)

    def turns(self, completion: Completion, effort: ReasoningEffort) -> tuple[AssistantTurn, ...]:
        """Return what each turn of the policy says."""
        return tuple(self._encoding.read_turn(turn.tolist(), effort) for turn in completion.turns)


def group_requests(
    examples: Sequence[Example],
    encoder: PromptEncoder,
    tasks: Mapping[str, Task],
    *,
    step: int,
    group_size: int,
    run_seed: int,
    sampling: SamplingParams,
    policy_version: int,
    first_prompt: int = 0,
    is_eval: bool = False,
    record_routes: bool = False,
) -> list[Request]:
    """Return every member's request, in training order (prompt, member).

    Args:
        examples: prompt first_prompt + i of the step is examples[i].
        encoder: gives the tokens.
        tasks: by name; each has its own budget and tools.
        step, group_size, run_seed: identities and seeds; seed = hash(run seed, step, prompt, member).
        sampling, policy_version: as in ``Request``; a task's own budget goes before that of ``sampling``.
        first_prompt: prompts that the step has drawn before these.
        is_eval: requests of an evaluation, which have identities of their own.
        record_routes: whether completions carry the experts that their tokens visited.
    """
    requests: list[Request] = []
    for prompt, example in enumerate(examples, first_prompt):
        prompt_ids = encoder.prompt_ids(example)
        options = tasks[example.task].options
        budget = options.budget(sampling.max_new_tokens)
        workspace = workspace_of(example, options) if options.keeps_sandbox else None
        requests += [
            Request(
                id=RequestId(step, prompt, member, is_eval),
                prompt_ids=prompt_ids,
                seed=request_seed(run_seed, step, prompt, member),
                sampling=msgspec.structs.replace(sampling, max_new_tokens=budget),
                policy_version=policy_version,
                tools=tool_use(options, workspace),
                workspace=workspace,
                record_routes=record_routes,
            )
            for member in range(group_size)
        ]
    return requests


def tool_use(options: TaskOptions, workspace: Workspace | None = None) -> ToolUse | None:
    """Return how far a task's completions may call tools; None where it has none.

    Args:
        options: of the task.
        workspace: what the completion's sandbox begins with, where it keeps one.
    """
    if not options.tools:
        return None
    return ToolUse(
        task=options.name,
        max_turns=options.max_turns,
        max_observation_tokens=options.max_observation_tokens,
        workspace="" if workspace is None else workspace.digest,
    )


def score_completions(
    examples: Sequence[Example],
    completions: Sequence[Completion],
    encoder: PromptEncoder,
    tasks: Mapping[str, Task],
    *,
    judging: Judging | None = None,
    policy_version: int = 0,
) -> list[Score | Unscored]:
    """Judge every completion by its example's task; one that an infra or data failure ended has no score.

    Scores are in the order of the completions. Where a task waits for other processes, several are judged at one time;
    what models judge, they judge together.

    Args:
        examples, completions: what was asked and answered.
        encoder: gives the text.
        tasks: by name.
        judging: asks models for rewards of type rubric; None where no task has one.
        policy_version: weights of the policy, where it judges itself.

    Raises:
        RewardError: what the first completion raised whose verifier breaks its contract, in that order.
    """
    names = [examples[completion.id.prompt].task for completion in completions]

    def judged(index: int) -> Score | Unscored | Pending:
        completion, task = completions[index], tasks[names[index]]
        example = examples[completion.id.prompt]
        return task.score(example, encoder.text(completion, example.effort), completion.submission)

    scores: list[Score | Unscored | Pending | Future[Score | Unscored | Pending]] = []
    with ExitStack() as stack:
        pools: dict[str, ThreadPoolExecutor] = {}
        for name in dict.fromkeys(names):
            if (at_once := tasks[name].options.scored_at_once) > 1:
                pools[name] = ThreadPoolExecutor(at_once, "score")
                stack.callback(pools[name].shutdown, cancel_futures=True)  # of use where one has raised
        for index, completion in enumerate(completions):
            if completion.failure is not None and completion.failure.is_excluded:
                how = f": {completion.detail}" if completion.detail else ""
                detail = f"the sampling of {completion.id} failed{how}"
                scores.append(Unscored(failure=completion.failure, detail=detail))
            elif (pool := pools.get(names[index])) is not None:
                scores.append(pool.submit(judged, index))
            else:
                scores.append(judged(index))
        spoken = [score.result() if isinstance(score, Future) else score for score in scores]
    return settle_all(spoken, completions, [tasks[name] for name in names], judging, policy_version=policy_version)


def read_turns(
    examples: Sequence[Example], completions: Sequence[Completion], encoder: PromptEncoder
) -> dict[RequestId, tuple[AssistantTurn, ...]]:
    """The turns of every completion that no infra or data failure ended."""
    return {
        completion.id: encoder.turns(completion, examples[completion.id.prompt].effort)
        for completion in completions
        if completion.failure is None or not completion.failure.is_excluded
    }


def describe_unscored(scores: Sequence[Score | Unscored]) -> str | None:
    """How many answers have no score and why the first has none, for a person; None where all have one."""
    unscored = [score for score in scores if isinstance(score, Unscored)]
    if not unscored:
        return None
    first = unscored[0]
    count = f"{len(unscored)} of {len(scores)} answers have no score and are left out"
    return f"{count}; one ({first.failure}): {first.detail}"


def length_penalty(num_tokens: int, budget: int, buffer_tokens: int) -> float:
    """Return DAPO's soft punishment of a long completion.

        0                                     where num_tokens <= budget - buffer
        (budget - buffer - num_tokens) / buffer   up to the budget, where it is -1

    Args:
        num_tokens: sampled tokens, all turns together.
        budget: tokens that it could have, >= buffer_tokens.
        buffer_tokens: >= 1.

    Source: DAPO (arXiv 2503.14476), equation 13.
    Example: budget 10, buffer 4: 6 tokens give 0, 7 give -0.25, 10 give -1.
    """
    return min(0.0, (budget - buffer_tokens - num_tokens) / buffer_tokens)


def build_groups(
    examples: Sequence[Example],
    requests: Sequence[Request],
    completions: Sequence[Completion],
    scores: Sequence[Score | Unscored],
    tasks: Mapping[str, Task],
    turns: Mapping[RequestId, Sequence[AssistantTurn]],
) -> list[Group]:
    """Join prompts, turns, observations and scores into groups: what was sampled is what is trained.

    The reward is the score and, where the task has one, the punishment of length. A malformed call in one of the turns
    is a `policy` failure of its trajectory, unless that has another.
    """
    members: dict[int, list[Trajectory]] = {}
    for request, completion, score in zip(requests, completions, scores, strict=True):
        num_prompt = request.prompt_ids.size
        task = examples[completion.id.prompt].task
        kept = completion.kept
        trajectory = Trajectory(
            id=completion.id,
            task=task,
            token_ids_T=np.concatenate((request.prompt_ids, completion.token_ids)),
            trained_mask_T=np.concatenate((np.zeros(num_prompt, np.bool_), completion.sampled_mask)),
            behavior_logprobs_T=np.concatenate((np.zeros(num_prompt, np.float32), completion.behavior_logprobs)),
            routes_TLK=completion.routes,
            kept=None
            if kept is None
            else KeptSets(
                counts_T=np.concatenate((np.zeros(num_prompt, np.int32), kept.counts_T)), token_ids=kept.token_ids
            ),
            policy_version=completion.policy_version,
            reward=None if isinstance(score, Unscored) else score.value + _punishment(request, completion, tasks[task]),
            stop_reason=completion.stop_reason,
            failure=score.failure or completion.failure or _policy_failure(turns.get(completion.id, ())),
        )
        members.setdefault(completion.id.prompt, []).append(trajectory)
    return [
        Group(step=trajectories[0].id.step, prompt=prompt, trajectories=tuple(trajectories))
        for prompt, trajectories in sorted(members.items())
    ]


def shuffle_rewards(groups: Sequence[Group], *, run_seed: int) -> list[Group]:
    """Permute the rewards of one draw of a step among its trajectories that have one: the negative control of a run,
    whose policy must then learn nothing.

    Invariants: keyed by seed, step and first prompt; the order of groups and members has no say.
    """
    scored = sorted(
        (one for group in groups for one in group.trajectories if one.reward is not None and not one.is_excluded),
        key=lambda one: one.id,
    )
    if not scored:
        return list(groups)
    first_prompt = min(group.prompt for group in groups)
    later_draw = (first_prompt,) if first_prompt > 0 else ()
    order = Permutation(len(scored), derive_key("shuffled rewards", run_seed, scored[0].id.step, *later_draw))
    rewards = {one.id: scored[order(index)].reward for index, one in enumerate(scored)}
    return [
        msgspec.structs.replace(
            group,
            trajectories=tuple(
                msgspec.structs.replace(one, reward=rewards.get(one.id, one.reward)) for one in group.trajectories
            ),
        )
        for group in groups
    ]


def _policy_failure(turns: Sequence[AssistantTurn]) -> FailureType | None:
    return FailureType.POLICY if any(turn.is_malformed_call for turn in turns) else None


def _punishment(request: Request, completion: Completion, task: Task) -> float:
    penalty = task.options.length_penalty
    if penalty is None:
        return 0.0
    return length_penalty(completion.num_sampled_tokens, request.sampling.max_new_tokens, penalty.buffer_tokens)
