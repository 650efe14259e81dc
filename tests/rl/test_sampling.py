"""Proves: requests carry identities, seeds, prompts, budgets and tools of their tasks; what was sampled is what is
trained, over several turns too; failures have no score.
"""

import threading
from typing import Any

import msgspec
import numpy as np
import pytest

from rollforward.model.encoding import ChatEncoding
from rollforward.model.messages import Message
from rollforward.model.metrics import metric_values
from rollforward.model.tokenizer import DSML, TokenizerConfig, train_tokenizer
from rollforward.rl.errors import RewardError, TaskError
from rollforward.rl.metrics import turn_metrics
from rollforward.rl.sampling import (
    PromptEncoder,
    build_groups,
    describe_unscored,
    group_requests,
    length_penalty,
    read_turns,
    score_completions,
    shuffle_rewards,
)
from rollforward.rl.tasks.config import LengthPenalty, TaskOptions
from rollforward.rl.tasks.types import Example, Score, ScoreReason, Unscored
from rollforward.rollout.types import (
    Completion,
    FailureType,
    Group,
    KeptSets,
    RequestId,
    SamplingParams,
    StopReason,
    ToolUse,
    Trajectory,
    request_seed,
)
from rollforward.rollout.workspace import Submission
from rollforward.sandbox.config import ToolConfig
from rollforward.sandbox.toolset import load_tool


class _Echo:
    """Right is the question itself."""

    name = "echo"

    def __init__(self, **options: Any) -> None:
        self.options = TaskOptions(name="echo", **options)
        self.texts: list[str] = []

    def score(self, example: Example, text: str, submission: Submission | None = None) -> Score:
        self.texts.append(text)
        right = text == example.messages[-1].content
        return Score(value=float(right), reason=ScoreReason.CORRECT if right else ScoreReason.WRONG)


@pytest.fixture(scope="module")
def encoder() -> PromptEncoder:
    tokenizer = train_tokenizer(["one two three"] * 4, TokenizerConfig(vocab_size=320))
    return PromptEncoder(ChatEncoding(tokenizer), max_prompt_tokens=24)


def _example(text: str, index: int) -> Example:
    message = Message(role="user", content=text)
    return Example(task="echo", split="train", index=index, messages=(message,), answer=text)


EXAMPLES = [_example("one", 0), _example("two", 1)]


def _requests(encoder: PromptEncoder, task: Any = None, **changes: Any) -> Any:
    values: dict[str, Any] = {"step": 5, "group_size": 2, "run_seed": 11, "policy_version": 5} | changes
    tasks: Any = {"echo": task or _Echo()}
    return group_requests(EXAMPLES, encoder, tasks, sampling=SamplingParams(max_new_tokens=4), **values)


def test_requests_are_in_training_order_with_the_seeds_of_the_contract(encoder: PromptEncoder) -> None:
    requests = _requests(encoder)
    assert [str(request.id) for request in requests] == ["s5-p0-m0", "s5-p0-m1", "s5-p1-m0", "s5-p1-m1"]
    assert [request.seed for request in requests] == [request_seed(11, 5, p, m) for p in (0, 1) for m in (0, 1)]
    assert requests[0].prompt_ids.tolist() == requests[1].prompt_ids.tolist() != requests[2].prompt_ids.tolist()
    evaluations = _requests(encoder, is_eval=True)
    assert str(evaluations[0].id) == "eval5-p0-m0"
    assert not {request.id for request in requests} & {request.id for request in evaluations}
    assert [RequestId.parse(str(request.id)) for request in evaluations] == [request.id for request in evaluations]


def test_a_prompt_beyond_the_limit_is_refused_with_the_way_out(encoder: PromptEncoder) -> None:
    with pytest.raises(TaskError, match=r"task echo: train example 3 has \d+ prompt tokens; max_prompt_tokens is 24"):
        encoder.prompt_ids(_example("three " * 40, 3))


def test_a_prompt_beyond_the_limit_names_the_list_of_tools(encoder: PromptEncoder) -> None:
    listed = msgspec.structs.replace(_example("one", 3), tools=(load_tool(ToolConfig(name="calculator")),))
    told = (
        r"Raise it, or make the questions shorter, or set the task's list_tools=false: the list of its tools is \d+ tok"
    )
    with pytest.raises(TaskError, match=told):
        encoder.prompt_ids(listed)


def _completion(request: Any, ids: list[int], failure: FailureType | None = None) -> Completion:
    return Completion(
        id=request.id,
        token_ids=np.array(ids, np.int32),
        sampled_mask=np.ones(len(ids), np.bool_),
        behavior_logprobs=np.full(len(ids), -0.5, np.float32),
        policy_version=5,
        stop_reason=StopReason.EOS if failure is None else StopReason.ABORTED,
        failure=failure,
    )


def test_what_was_sampled_is_what_is_trained(encoder: PromptEncoder) -> None:
    requests = _requests(encoder)
    tokenizer = encoder._encoding.tokenizer
    answers = [[*tokenizer.encode("one"), tokenizer.eos_id], [tokenizer.eos_id], [], [*tokenizer.encode("two"), 1]]
    failures = [None, None, FailureType.INFRA, None]
    completions = [_completion(*parts) for parts in zip(requests, answers, failures, strict=True)]
    scores = score_completions(EXAMPLES, completions, encoder, {"echo": _Echo()})  # type: ignore[dict-item]
    assert [getattr(score, "value", None) for score in scores] == [1.0, 0.0, None, 1.0]
    groups = build_groups(EXAMPLES, requests, completions, scores, {"echo": _Echo()}, {})  # type: ignore[dict-item]
    assert [(group.step, group.prompt, len(group.trajectories)) for group in groups] == [(5, 0, 2), (5, 1, 2)]
    first = groups[0].trajectories[0]
    prompt = requests[0].prompt_ids.tolist()
    assert first.token_ids_T.tolist() == prompt + answers[0]
    assert first.trained_mask_T.tolist() == [False] * len(prompt) + [True] * len(answers[0])
    assert first.behavior_logprobs_T.tolist() == [0.0] * len(prompt) + [-0.5] * len(answers[0])
    lost = groups[1].trajectories[0]
    assert lost.reward is None
    assert lost.is_excluded
    assert lost.num_trained_tokens == 0


class _Failing:
    """Gives, in order, what a verifier may give."""

    name = "echo"

    options = TaskOptions(name="echo")

    def __init__(self, *results: Score | Unscored) -> None:
        self._results = iter(results)

    def score(self, example: Example, text: str, submission: Submission | None = None) -> Score | Unscored:
        return next(self._results)


class _Waiting:
    """A verifier that waits until as many others wait as may be judged at one time."""

    name = "echo"

    def __init__(self, at_once: int, *, fails_at: tuple[str, ...] = ()) -> None:
        self._barrier = threading.Barrier(at_once)
        self._fails_at = fails_at
        self.options = _AtOnce(name="echo", at_once=at_once)

    def score(self, example: Example, text: str, submission: Submission | None = None) -> Score:
        self._barrier.wait(timeout=30)
        if text in self._fails_at:
            raise RewardError(text)
        return Score(value=int(text) / 8, reason=ScoreReason.PARTIAL)


class _AtOnce(TaskOptions, frozen=True, kw_only=True):
    at_once: int

    @property
    def scored_at_once(self) -> int:
        return self.at_once


def test_several_are_judged_at_one_time_and_stay_in_order(encoder: PromptEncoder) -> None:
    requests = [request for request in _requests(encoder) for _ in range(2)]
    completions = [
        _completion(request, [*encoder._encoding.tokenizer.encode(str(number)), encoder._encoding.tokenizer.eos_id])
        for number, request in enumerate(requests)
    ]
    lost = msgspec.structs.replace(completions[2], failure=FailureType.INFRA, stop_reason=StopReason.ABORTED)
    for given, at_once in ((completions, 4), (completions, 8), ([*completions, lost], 2)):
        scores = score_completions(EXAMPLES, given, encoder, {"echo": _Waiting(at_once)})  # type: ignore[dict-item]
        assert [getattr(score, "value", None) for score in scores][:8] == [number / 8 for number in range(8)]
        assert [isinstance(score, Unscored) for score in scores] == [False] * 8 + [True] * (len(given) - 8)
    tasks = {"echo": _Waiting(2, fails_at=("5", "6"))}
    with pytest.raises(RewardError, match=r"^5$"):
        score_completions(EXAMPLES, completions, encoder, tasks)  # type: ignore[arg-type]


def test_a_failed_verifier_leaves_no_score_and_a_deadline_is_a_counted_0(encoder: PromptEncoder) -> None:
    requests = _requests(encoder)
    completions = [_completion(request, [7]) for request in requests]
    results = (
        Unscored(failure=FailureType.INFRA, detail="the judge is away"),
        Score(value=0.0, reason=ScoreReason.TIMEOUT),
        Score(value=0.0, reason=ScoreReason.WRONG),
        Unscored(failure=FailureType.DATA, detail="no number"),
    )
    scores = score_completions(EXAMPLES, completions, encoder, {"echo": _Failing(*results)})  # type: ignore[dict-item]
    groups = build_groups(EXAMPLES, requests, completions, scores, {"echo": _Echo()}, {})  # type: ignore[dict-item]
    trajectories = [one for group in groups for one in group.trajectories]
    assert [one.reward for one in trajectories] == [None, 0.0, 0.0, None]
    assert [one.failure for one in trajectories] == [FailureType.INFRA, FailureType.TIMEOUT, None, FailureType.DATA]
    assert [one.is_excluded for one in trajectories] == [True, False, False, True]
    assert describe_unscored(scores) == (
        "2 of 4 answers have no score and are left out; one (infra): the judge is away"
    )
    assert describe_unscored(scores[1:3]) is None


def test_a_failure_that_is_scored_is_no_reason_to_have_no_score() -> None:
    with pytest.raises(ValueError, match="only infra and data have none"):
        Unscored(failure=FailureType.TIMEOUT, detail="late")


def test_a_task_gives_its_own_budget_and_tools(encoder: PromptEncoder) -> None:
    plain = _requests(encoder)[0]
    assert (plain.sampling.max_new_tokens, plain.tools, plain.record_routes) == (4, None, False)
    task = _Echo(max_new_tokens=9, tools=(ToolConfig(name="calculator"),), max_turns=3, max_observation_tokens=40)
    request = _requests(encoder, task, record_routes=True)[0]
    assert request.sampling.max_new_tokens == 9
    assert request.tools == ToolUse(task="echo", max_turns=3, max_observation_tokens=40)
    assert request.record_routes
    assert request.max_tokens == request.prompt_ids.size + 9 + 2 * 40


def test_the_effort_of_an_example_opens_its_prompt(encoder: PromptEncoder) -> None:
    example = msgspec.structs.replace(EXAMPLES[0], effort="low")
    tokenizer = encoder._encoding.tokenizer
    assert encoder.prompt_ids(example)[-1] == tokenizer.control_id("<think>")
    assert encoder.prompt_ids(EXAMPLES[0])[-1] == tokenizer.control_id("</think>")


CALL = '<｜DSML｜tool_calls><｜DSML｜invoke name="calculator"></｜DSML｜invoke></｜DSML｜tool_calls>'


def _two_turns(encoder: PromptEncoder, request: Any) -> Completion:
    """A call, what the tool says, the answer "one"."""
    encoding = encoder._encoding
    eos = encoding.tokenizer.eos_id
    first, *others = CALL.split(DSML)
    call = encoding.tokenizer.encode(first)
    for part in others:
        call += [encoding.tokenizer.control_id(DSML), *encoding.tokenizer.encode(part)]
    call.append(eos)
    observation = encoding.encode_observation(["1"])
    answer = [*encoding.tokenizer.encode("one"), eos]
    sampled = np.array([True] * len(call) + [False] * len(observation) + [True] * len(answer))
    ids = np.array([*call, *observation, *answer], np.int32)
    num_tokens = request.prompt_ids.size + ids.size
    return Completion(
        id=request.id,
        token_ids=ids,
        sampled_mask=sampled,
        behavior_logprobs=np.where(sampled, np.float32(-0.5), np.float32(0.0)),
        routes=np.arange(num_tokens * 2, dtype=np.int16).reshape(num_tokens, 1, 2),
        kept=KeptSets(counts_T=sampled.astype(np.int32), token_ids=ids[sampled]),
        policy_version=5,
        stop_reason=StopReason.EOS,
    )


def test_the_last_turn_is_judged_and_every_turn_trained(encoder: PromptEncoder) -> None:
    task = _Echo(tools=(ToolConfig(name="calculator"),))
    tasks: Any = {"echo": task}
    request = _requests(encoder, task)[0]
    completion = _two_turns(encoder, request)
    scores = score_completions(EXAMPLES, [completion], encoder, tasks)
    assert (task.texts, scores[0].value) == (["one"], 1.0)  # type: ignore[union-attr]
    said = read_turns(EXAMPLES, [completion], encoder)
    trajectory = build_groups(EXAMPLES, [request], [completion], scores, tasks, said)[0].trajectories[0]
    assert trajectory.failure is None
    num_prompt = request.prompt_ids.size
    assert trajectory.trained_mask_T.tolist() == [False] * num_prompt + completion.sampled_mask.tolist()
    assert trajectory.routes_TLK is completion.routes
    assert trajectory.kept is not None
    assert trajectory.kept.counts_T.tolist() == [0] * num_prompt + completion.sampled_mask.astype(int).tolist()
    assert encoder.transcript(completion).endswith("<tool_result>1</tool_result><｜Assistant｜></think>one")
    turns = said[completion.id]
    assert [[call.name for call in turn.calls] for turn in turns] == [["calculator"], []]
    values = metric_values(turn_metrics([turns, turns[1:]]))
    assert (values["num_turns/mean"], values["tool_call_counts/mean"], values["failure/parse/rate"]) == (1.5, 0.5, 0.0)


def test_a_call_that_is_only_spelled_counts_as_none(encoder: PromptEncoder) -> None:
    request = _requests(encoder, _Echo())[0]
    tokenizer = encoder._encoding.tokenizer
    for text in (CALL, CALL[:-1]):
        completion = _completion(request, [*tokenizer.encode(text), tokenizer.eos_id])
        ((turn,),) = read_turns(EXAMPLES, [completion], encoder).values()
        assert (turn.content, turn.is_call, turn.problem) == (text, False, None)


@pytest.mark.parametrize(
    ("score", "failure"),
    [
        (Score(value=1.0, reason=ScoreReason.CORRECT), FailureType.POLICY),
        (Score(value=0.0, reason=ScoreReason.TIMEOUT), FailureType.TIMEOUT),
        (Unscored(failure=FailureType.INFRA, detail="the judge is away"), FailureType.INFRA),
    ],
)
def test_a_malformed_call_is_a_failure_of_the_policy_also_where_a_later_turn_is_right(
    encoder: PromptEncoder, score: Score | Unscored, failure: FailureType
) -> None:
    task = _Echo(tools=(ToolConfig(name="calculator"),))
    request = _requests(encoder, task)[0]
    whole = _two_turns(encoder, request)
    ids = whole.token_ids.copy()
    ids[len(whole.turns[0]) - 2] = encoder._encoding.tokenizer.encode("x")[0]  # in place of the call's last ">"
    completion = msgspec.structs.replace(whole, token_ids=ids)
    turns = read_turns(EXAMPLES, [completion], encoder)
    groups = build_groups(EXAMPLES, [request], [completion], [score], {"echo": task}, turns)  # type: ignore[dict-item]
    assert groups[0].trajectories[0].failure is failure
    assert metric_values(turn_metrics(list(turns.values())))["failure/parse/rate"] == 0.5


def test_reasoning_without_an_end_is_judged_as_reasoning(encoder: PromptEncoder) -> None:
    task = _Echo()
    examples = [msgspec.structs.replace(example, effort="low") for example in EXAMPLES]
    request = _requests(encoder)[0]
    completion = _completion(request, encoder._encoding.tokenizer.encode("one"))
    score_completions(examples, [completion], encoder, {"echo": task})  # type: ignore[dict-item]
    assert task.texts == ["<think>one"]


@pytest.mark.parametrize(("num_tokens", "expected"), [(0, 0.0), (6, 0.0), (7, -0.25), (8, -0.5), (10, -1.0)])
def test_the_punishment_of_length_by_hand(num_tokens: int, expected: float) -> None:
    assert length_penalty(num_tokens, 10, 4) == expected


def test_the_punishment_counts_sampled_tokens_against_the_tasks_budget(encoder: PromptEncoder) -> None:
    task = _Echo(max_new_tokens=10, length_penalty=LengthPenalty(buffer_tokens=4))
    requests = _requests(encoder, task)[:2]
    sampled = np.array([True] * 7 + [False] * 9)
    completions = [
        Completion(
            id=request.id,
            token_ids=np.full(16, 20, np.int32),
            sampled_mask=sampled,
            behavior_logprobs=np.where(sampled, np.float32(-0.5), np.float32(0.0)),
            policy_version=5,
            stop_reason=StopReason.EOS,
        )
        for request in requests
    ]
    scores = [
        Score(value=1.0, reason=ScoreReason.CORRECT),
        Unscored(failure=FailureType.INFRA, detail="the judge is away"),
    ]
    tasks: Any = {"echo": task}
    groups = build_groups(EXAMPLES, requests, completions, scores, tasks, {})
    assert [one.reward for one in groups[0].trajectories] == [0.75, None]


def _group(prompt: int, rewards: list[float | None], step: int = 3) -> Group:
    return Group(
        step=step,
        prompt=prompt,
        trajectories=tuple(
            Trajectory(
                id=RequestId(step, prompt, member),
                task="echo",
                token_ids_T=np.array([7, 8], np.int32),
                trained_mask_T=np.array([False, True]),
                behavior_logprobs_T=np.zeros(2, np.float32),
                policy_version=step,
                reward=reward,
                stop_reason=StopReason.EOS,
                failure=FailureType.INFRA if reward is None else None,
            )
            for member, reward in enumerate(rewards)
        ),
    )


def _rewards(groups: list[Group]) -> list[float | None]:
    ordered = sorted((one for group in groups for one in group.trajectories), key=lambda one: one.id)
    return [one.reward for one in ordered]


def test_shuffled_rewards_are_those_of_the_step_by_seed_and_step() -> None:
    rewards: list[float | None] = [float(index) for index in range(40)]
    rewards[5] = None
    groups = [_group(0, rewards[:20]), _group(1, rewards[20:])]
    shuffled = shuffle_rewards(groups, run_seed=1)
    assert _rewards(groups) == rewards
    assert _rewards(shuffled) != rewards
    assert sorted(filter(None, _rewards(shuffled))) == sorted(filter(None, rewards))
    assert _rewards(shuffled)[5] is None
    backwards = [msgspec.structs.replace(one, trajectories=one.trajectories[::-1]) for one in groups[::-1]]
    assert _rewards(shuffle_rewards(backwards, run_seed=1)) == _rewards(shuffled)
    assert _rewards(shuffle_rewards(groups, run_seed=2)) != _rewards(shuffled)
    later = [_group(0, rewards[:20], 4), _group(1, rewards[20:], 4)]
    assert _rewards(shuffle_rewards(later, run_seed=1)) != _rewards(shuffled)


def test_a_later_draw_of_a_step_is_shuffled_on_its_own() -> None:
    rewards: list[float | None] = [float(index) for index in range(40)]
    first, later = ([_group(prompt, rewards[:20]), _group(prompt + 1, rewards[20:])] for prompt in (0, 4))
    assert _rewards(shuffle_rewards(later, run_seed=1)) != _rewards(shuffle_rewards(first, run_seed=1))
    assert sorted(filter(None, _rewards(shuffle_rewards(later, run_seed=1)))) == rewards[1:]


def test_further_prompts_of_a_step_go_on_with_its_numbers(encoder: PromptEncoder) -> None:
    whole = _requests(encoder)
    later = _requests(encoder, first_prompt=2)
    assert [str(one.id) for one in later] == ["s5-p2-m0", "s5-p2-m1", "s5-p3-m0", "s5-p3-m1"]
    assert [one.seed for one in later] == [request_seed(11, 5, one.id.prompt, one.id.member) for one in later]
    assert [one.prompt_ids.tolist() for one in later] == [one.prompt_ids.tolist() for one in whole]


def test_a_step_without_a_reward_has_nothing_to_shuffle() -> None:
    groups = [_group(0, [None, None])]
    assert shuffle_rewards(groups, run_seed=1) == groups
