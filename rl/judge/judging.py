"""Asks judges about answers, in rounds, through the engines and their token log.

    asks --prompts of the judgements that are due--> engines --what was said--> read_verdict --> verdicts
              ^                                                                     |
              +---- one more judgement for each that gave none, `retries` at most --+

A judgement is a request like any other, with an identity of its own (`s12-p3-m0-j1`) and a seed that is a hash of it: a
run that was interrupted while it judged is answered from the log as far as that goes, and goes on to the same bits.
What is asked in a round is a function of the rounds before, so neither the number of engines nor the order in which
they finish changes a verdict. Here: which requests are made, and what came of them. Not here: what they are worth
(`scoring.py`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from rollforward.model.encoding import ChatEncoding
from rollforward.rl.errors import TaskError
from rollforward.rl.judge.config import Judge, located
from rollforward.rl.judge.prompt import criteria_order, judge_messages, quoting_key
from rollforward.rl.judge.types import Judgement, Verdict, VerdictFailure, VerdictProblem
from rollforward.rl.judge.verdict import read_verdict
from rollforward.rl.tasks.reward_config import RubricReward
from rollforward.rollout.types import Completion, Request, RequestId, SamplingParams, StopReason, request_seed

Generate = Callable[[Sequence[Request]], list[Completion]]
"""Samples requests to their end, in order: an engine, a replica or a pool of them."""

_OTHER_JUDGEMENTS_TOKENS = 64
"""What the prompt of another judgement of the same answer, with its own key and order, may be longer."""


class Seat(msgspec.Struct, frozen=True, kw_only=True):
    """Somebody who judges."""

    encoding: ChatEncoding
    """Of its model."""
    generate: Generate
    """Its engines."""
    max_tokens: int
    """Positions of its model."""
    policy_version: int | None = None
    """The weight version that its engines hold; None: the policy's own, which each round is told."""


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """One answer that is to be judged by one rubric."""

    id: RequestId
    """Of the answer."""
    task: str
    """Name of its task, for errors."""
    reward: RubricReward
    """By what, by whom, how often."""
    first: int
    """Number of its first judgement, from 1: another rubric may judge the same answer."""
    question: str
    """What was asked."""
    answer: str
    """What is judged, not empty."""


class Judged(msgspec.Struct, frozen=True, kw_only=True):
    """What came of an ask."""

    judgements: tuple[Judgement, ...] = ()
    """In order."""
    num_retries: int = 0
    """How many of them were asked for in place of others."""
    is_too_long: bool = False
    """Whether the answer is too long for the judge, who has not seen it."""


@dataclass
class _Case:
    """An ask on its way."""

    ask: Ask
    seat: Seat
    judgements: list[Judgement] = field(default_factory=list[Judgement])
    is_too_long: bool = False

    @property
    def num_due(self) -> int:
        """Judgements that its next round has."""
        if self.is_too_long:
            return 0
        reward = self.ask.reward
        num_valid = sum(isinstance(one.said, Verdict) for one in self.judgements)
        left = reward.judgements + reward.retries - len(self.judgements)
        return min(reward.judgements - num_valid, left)


class Judging:
    """Judges of a run. Holds no state between two calls."""

    def __init__(self, seats: Mapping[Judge, Seat], *, run_seed: int) -> None:
        """Bind the judges.

        Args:
            seats: who judges, by its configuration; every judge of the run's tasks.
            run_seed: keys every draw.
        """
        self._seats = {located(judge): seat for judge, seat in seats.items()}
        self._run_seed = run_seed

    def judge(self, asks: Sequence[Ask], *, policy_version: int) -> list[Judged]:
        """Judge answers.

        Args:
            asks: in any order; no judgement of an answer is in two of them.
            policy_version: weights of the policy, where it judges.

        Returns:
            One for each ask, in order.

        Raises:
            TaskError: a question alone is too long for its judge.

        Invariants: a function of asks, weights and seed; a judgement that fails is not asked again under its number.
        """
        cases = [_Case(ask, self._seats[located(ask.reward.judge)]) for ask in asks]
        while due := [case for case in cases if case.num_due > 0]:
            self._round(due, policy_version)
        return [
            Judged(
                judgements=tuple(case.judgements),
                num_retries=max(0, len(case.judgements) - case.ask.reward.judgements),
                is_too_long=case.is_too_long,
            )
            for case in cases
        ]

    def _round(self, cases: Sequence[_Case], policy_version: int) -> None:
        """Make the judgements that are due; the requests of one seat together."""
        asked: dict[int, tuple[Seat, list[Request], list[tuple[_Case, str, tuple[int, ...]]]]] = {}
        for case in cases:
            _, requests, notes = asked.setdefault(id(case.seat), (case.seat, [], []))
            number = case.ask.first + len(case.judgements)
            for due in range(number, number + case.num_due):
                request, key, order = self._request(case, due, policy_version)
                if request is None:
                    break
                requests.append(request)
                notes.append((case, key, order))
        for seat, requests, notes in asked.values():
            completions = seat.generate(requests) if requests else []
            for completion, (case, key, order) in zip(completions, notes, strict=True):
                said = _said(completion, case, key)
                case.judgements.append(Judgement(number=completion.id.judgement, order=order, said=said))

    def _request(self, case: _Case, number: int, policy_version: int) -> tuple[Request | None, str, tuple[int, ...]]:
        """The request of a judgement with its key and order; None, and the case says so, where the answer is too
        long."""
        ask, seat = case.ask, case.seat
        answered = ask.id
        seed = request_seed(self._run_seed, answered.step, answered.prompt, answered.member, number)
        key, order = quoting_key(seed, ask.question, ask.answer), criteria_order(ask.reward, seed)
        ids = self._prompt_ids(case, ask.answer, key, order)
        limit = _limit(ask.reward, seat.max_tokens)
        # Decided once, or an answer of which a judge has spoken already would have been too long.
        if number == ask.first and len(ids) > limit:
            if (least := len(self._prompt_ids(case, "", key, order))) > limit:
                raise TaskError(
                    f"task {ask.task}: rubric and question of {answered} alone have {least} tokens; with"
                    f" max_verdict_tokens = {ask.reward.max_verdict_tokens} and {_OTHER_JUDGEMENTS_TOKENS} to spare the"
                    f" judge's model takes {limit}. Shorten them, or name a judge with more positions"
                )
            case.is_too_long = True
            return None, key, order
        request = Request(
            id=msgspec.structs.replace(answered, judgement=number),
            prompt_ids=np.array(ids, dtype=np.int32),
            seed=seed,
            sampling=SamplingParams(max_new_tokens=ask.reward.max_verdict_tokens, temperature=ask.reward.temperature),
            policy_version=policy_version if seat.policy_version is None else seat.policy_version,
        )
        return request, key, order

    def _prompt_ids(self, case: _Case, answer: str, key: str, order: tuple[int, ...]) -> list[int]:
        ask = case.ask
        messages = judge_messages(ask.reward, ask.question, answer, key=key, order=order)
        return case.seat.encoding.encode_prompt(messages, ask.reward.effort)


def check_room(task: str, reward: RubricReward, encoding: ChatEncoding, max_tokens: int) -> None:
    """Refuse a rubric that leaves no room for a question.

    Args:
        task: its name.
        reward: the rubric and the length of its verdicts.
        encoding, max_tokens: of the judge's model.

    Raises:
        TaskError: it is too long.
    """
    order = criteria_order(reward, 0)
    messages = judge_messages(reward, "", "", key=quoting_key(0), order=order)
    num_tokens, limit = len(encoding.encode_prompt(messages, reward.effort)), _limit(reward, max_tokens)
    if num_tokens >= limit:
        raise TaskError(
            f"task {task}: the rubric alone has {num_tokens} tokens; with max_verdict_tokens ="
            f" {reward.max_verdict_tokens} and {_OTHER_JUDGEMENTS_TOKENS} to spare the judge's model takes {limit} and"
            " an answer besides. Shorten the criteria, lower max_verdict_tokens, or name a judge with more positions"
        )


def _limit(reward: RubricReward, max_tokens: int) -> int:
    """Tokens that the prompt of a first judgement may have."""
    return max_tokens - reward.max_verdict_tokens - _OTHER_JUDGEMENTS_TOKENS


def _said(completion: Completion, case: _Case, key: str) -> Verdict | VerdictFailure:
    """What a judge's completion says."""
    reward = case.ask.reward
    if completion.failure is not None:
        detail = completion.detail or f"the sampling of {completion.id} failed"
        return VerdictFailure(kind=VerdictProblem.LOST, detail=detail)
    if completion.stop_reason is not StopReason.EOS:
        return VerdictFailure(kind=VerdictProblem.CUT_SHORT, detail=f"{completion.num_sampled_tokens} tokens")
    turn = case.seat.encoding.read_turn(completion.turns[-1].tolist(), reward.effort)
    if turn.problem is not None:
        return VerdictFailure(kind=VerdictProblem.CONTROL_TOKEN, detail=turn.problem)
    if turn.calls:
        return VerdictFailure(kind=VerdictProblem.CONTROL_TOKEN, detail=f"it calls {turn.calls[0].name}")
    if reward.effort != "non-think" and not turn.content.strip():
        return VerdictFailure(kind=VerdictProblem.UNCLOSED_THINKING)
    return read_verdict(turn.content, reward, key)
