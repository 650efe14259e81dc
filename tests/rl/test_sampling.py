"""Proves: requests carry identities, seeds and prompts of the contract; what was sampled is what is trained; failures
have
no score."""

from typing import Any

import numpy as np
import pytest

from rollforward.model.encoding import ChatEncoding
from rollforward.model.messages import Message
from rollforward.model.tokenizer import TokenizerConfig, train_tokenizer
from rollforward.rl.errors import TaskError
from rollforward.rl.sampling import PromptEncoder, build_groups, describe_unscored, group_requests, score_completions
from rollforward.rl.tasks.types import Example, Score, ScoreReason, Unscored
from rollforward.rollout.types import (
    Completion,
    FailureType,
    RequestId,
    SamplingParams,
    StopReason,
    request_seed,
)


class _Echo:
    """Right is the question itself."""

    name = "echo"

    def score(self, example: Example, text: str) -> Score:
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


def _requests(encoder: PromptEncoder, **changes: Any) -> Any:
    values: dict[str, Any] = {"step": 5, "group_size": 2, "run_seed": 11, "policy_version": 5} | changes
    return group_requests(EXAMPLES, encoder, sampling=SamplingParams(max_new_tokens=4), **values)


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
    groups = build_groups(EXAMPLES, requests, completions, scores)
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

    def __init__(self, *results: Score | Unscored) -> None:
        self._results = iter(results)

    def score(self, example: Example, text: str) -> Score | Unscored:
        return next(self._results)


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
    trajectories = [
        one for group in build_groups(EXAMPLES, requests, completions, scores) for one in group.trajectories
    ]
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
