"""Records that cross between sampling and training: requests, completions, trajectories, groups.

Frozen data with checks of its own consistency. What lives elsewhere: the bytes of the log (`rollout/wal.py`), masks and
weights of a training step (`rl/batch.py`), scores (`rl/tasks`). Arrays are numpy, so that the records pickle, cross Ray
and are written to Arrow without torch.

Letters: T tokens of one sequence.
"""

import hashlib
import re
from enum import StrEnum
from typing import Annotated, Any, Self, cast

import msgspec
import numpy as np
import numpy.typing as npt

from rollforward.rollout.workspace import Submission, Workspace

Int16Array = npt.NDArray[np.int16]
Int32Array = npt.NDArray[np.int32]
Float32Array = npt.NDArray[np.float32]
BoolArray = npt.NDArray[np.bool_]

_SEED_DOMAIN = b"rollforward-seed"
_REQUEST_ID = re.compile(r"(s|eval)(0|[1-9]\d*)-p(0|[1-9]\d*)-m(0|[1-9]\d*)(?:-j([1-9]\d*))?")


class StopReason(StrEnum):
    """Why a completion ended."""

    EOS = "eos"
    """The policy drew its end-of-sequence token."""
    LENGTH = "length"
    """The token budget was used up."""
    TURNS = "turns"
    """The policy called a tool in the last turn that it had."""
    ABORTED = "aborted"
    """The system ended it; always comes with a failure type."""

    @property
    def is_truncation(self) -> bool:
        """Whether the policy would have gone on, but had used up its tokens or turns."""
        return self in (StopReason.LENGTH, StopReason.TURNS)


class FailureType(StrEnum):
    """Whose fault a failed trajectory is, which decides what training does with it."""

    INFRA = "infra"
    """The platform: lost node, damaged log record, failed sandbox reset. Neither in the baseline nor in the loss."""
    POLICY = "policy"
    """The model: a malformed call in at least one of its turns. Scored and trained."""
    DATA = "data"
    """The prompt or its ground truth. Neither in the baseline nor in the loss."""
    TIMEOUT = "timeout"
    """The agent used up its own time. Scored and trained."""

    @property
    def is_excluded(self) -> bool:
        """Whether the trajectory says nothing about the policy and so is left out of baseline and loss."""
        return self in (FailureType.INFRA, FailureType.DATA)


class ArrayRecord(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Base of records that hold arrays: equal when every field is equal, arrays bit for bit (dtype and shape too)."""

    def __eq__(self, other: object) -> bool:
        """Compare field by field; NaN equals NaN of the same bits."""
        if type(other) is not type(self):
            return NotImplemented
        return all(_same(getattr(self, name), getattr(other, name)) for name in self.__struct_fields__)

    def __ne__(self, other: object) -> bool:
        """The opposite of equality; msgspec's own would compare identity."""
        return not self == other

    __hash__ = None  # type: ignore[assignment]


_MIN_TEMPERATURE = 1e-3


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How tokens are drawn; also the schema of `sampling` in a configuration."""

    max_new_tokens: Annotated[int, msgspec.Meta(ge=1)]
    """Tokens that a completion may have, its end-of-sequence token included."""
    temperature: Annotated[float, msgspec.Meta(ge=0.0)] = 1.0
    """Divides the logits; 0, or at least 0.001. 0 means greedy: the largest logit, the smaller id on a tie."""
    top_p: Annotated[float, msgspec.Meta(gt=0.0, le=1.0)] = 1.0
    """Keep the smallest set of tokens with at least this mass. 1 keeps all."""
    top_k: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Keep this many most likely tokens. 0 keeps all."""

    def __post_init__(self) -> None:
        """Refuse a temperature by which logits overflow."""
        if 0 < self.temperature < _MIN_TEMPERATURE:
            raise ValueError(
                f"temperature is {self.temperature}; logits divided by it overflow, and log-probs would be NaN. Set 0,"
                f" which is greedy, or at least {_MIN_TEMPERATURE}"
            )

    @property
    def cuts_vocabulary(self) -> bool:
        """Whether tokens are drawn from less than the whole vocabulary, so that their kept sets are recorded."""
        return self.top_p < 1 or self.top_k > 0


class RequestId(msgspec.Struct, frozen=True, order=True):
    """Identity of one trajectory; orders as training does and renders to `s12-p3-m0`, or `eval12-p3-m0`. What is said
    about it by a judge has an identity too: `s12-p3-m0-j1`."""

    step: int
    """Training step that asked for it, from 0."""
    prompt: int
    """Position of its prompt in the step, from 0."""
    member: int
    """Position in the prompt's group, from 0."""
    is_eval: bool = False
    """Whether it measures instead of training; evaluations have identities of their own."""
    judgement: int = 0
    """Which judgement of that trajectory, from 1; 0 is the trajectory itself. Judgements are never trained."""

    def __post_init__(self) -> None:
        """Refuse negative parts."""
        if min(self.step, self.prompt, self.member, self.judgement) < 0:
            raise ValueError(f"request id {self} has a negative part; step, prompt, member and judgement count from 0")

    def __str__(self) -> str:
        """Render, for example `s12-p3-m0`."""
        about = f"-j{self.judgement}" if self.judgement else ""
        return f"{'eval' if self.is_eval else 's'}{self.step}-p{self.prompt}-m{self.member}{about}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the identity that renders to `text`.

        Raises:
            ValueError: `text` is not a rendered identity.
        """
        match = _REQUEST_ID.fullmatch(text)
        if match is None:
            raise ValueError(f"request id is {text!r}; it must read s<step>-p<prompt>-m<member>, such as s12-p3-m0")
        purpose, step, prompt, member, judgement = match.groups()
        return cls(int(step), int(prompt), int(member), purpose == "eval", int(judgement or 0))


class ToolUse(msgspec.Struct, frozen=True, kw_only=True):
    """That a request's turns may be answered by tools, and how far."""

    task: str
    """Name of the task whose tools answer."""
    max_turns: Annotated[int, msgspec.Meta(ge=2)]
    """Turns that the policy may take, the last one included."""
    max_observation_tokens: Annotated[int, msgspec.Meta(ge=1)]
    """Tokens that the answer to one turn may have; a longer one is cut."""
    workspace: str = ""
    """Digest of the workspace that its sandbox begins with; empty where it keeps none."""

    @property
    def max_observed_tokens(self) -> int:
        """Tokens that all answers together may have."""
        return (self.max_turns - 1) * self.max_observation_tokens


class Request(ArrayRecord, frozen=True, kw_only=True, eq=False):
    """One completion to sample."""

    id: RequestId
    """Identity; the engine never has two of the same in flight."""
    prompt_ids: Int32Array
    """[T] int32, T >= 1. The exact tokens before the first sampled one."""
    seed: int
    """64 bits from `request_seed`; with the position it keys every draw."""
    sampling: SamplingParams
    """How to draw and how many tokens at most."""
    policy_version: int
    """Weight version that must sample it."""
    tools: ToolUse | None = None
    """Who answers its turns; None where the first turn is the only one."""
    workspace: Workspace | None = None
    """What its sandbox begins with; None where its tools keep none. Not in the log, which has its digest."""
    record_routes: bool = False
    """Whether the completion carries the experts that every token visited."""

    @property
    def max_tokens(self) -> int:
        """Tokens that its sequence may reach: prompt, budget and observations."""
        observed = 0 if self.tools is None else self.tools.max_observed_tokens
        return self.prompt_ids.size + self.sampling.max_new_tokens + observed

    def __post_init__(self) -> None:
        """Refuse arrays of another dtype or rank, an empty prompt, and a seed beyond 64 bits."""
        _check_arrays(str(self.id), prompt_ids=(self.prompt_ids, np.int32))
        if self.prompt_ids.size == 0:
            raise ValueError(f"request {self.id}: prompt_ids is empty; the first token needs one to be predicted from")
        if not 0 <= self.seed < 2**64:
            raise ValueError(f"request {self.id}: seed is {self.seed}; it must be in [0, 2**64): use request_seed()")


class KeptSets(ArrayRecord, frozen=True, kw_only=True, eq=False):
    """For each token of a sequence the set that it was drawn from, where top-p or top-k cut the vocabulary.

    Example: counts_T [0, 2], token_ids [3, 7]: the first token was drawn from all, the second from {3, 7}.
    """

    counts_T: Int32Array
    """[T] int32. Size of each token's set; 0 means the whole vocabulary (or a token that nobody drew)."""
    token_ids: Int32Array
    """[sum of counts] int32. The sets one after another, each in ascending order."""

    def __post_init__(self) -> None:
        """Refuse sets that do not add up."""
        if int(self.counts_T.sum()) != self.token_ids.size:
            raise ValueError(
                f"kept sets: counts add up to {int(self.counts_T.sum())}, but there are {self.token_ids.size} ids; the"
                " ids are the sets one after another"
            )


class Completion(ArrayRecord, frozen=True, kw_only=True, eq=False):
    """What followed a request's prompt, every token durable: turns that an engine sampled, and between them what tools
    observed."""

    id: RequestId
    """Identity of the request."""
    token_ids: Int32Array
    """[T] int32. All tokens after the prompt in order; a turn ends with the end-of-sequence token if it has one."""
    sampled_mask: BoolArray
    """[T] bool. True where the policy drew the token, False where a tool said it."""
    behavior_logprobs: Float32Array
    """[T] float32. Log-prob of each sampled token under the distribution that it was drawn from; 0 elsewhere."""
    routes: Int16Array | None = None
    """[prompt + T, L, K] int16. Experts that each token of the whole sequence visited, by layer, hash layers too; -1
    where unknown, as for the last token, which nothing followed. None unless asked for."""
    kept: KeptSets | None = None
    """[T] sets that the tokens were drawn from; None where all were drawn from the whole vocabulary."""
    policy_version: int
    """Weight version that sampled it; the oldest one if several did."""
    stop_reason: StopReason
    """Why it ended."""
    failure: FailureType | None = None
    """What went wrong, or None."""
    detail: str = ""
    """How it failed, for a person. Not in the log, so empty where the completion is answered from it."""
    submission: Submission | None = None
    """What its sandbox held at the end; None where it kept none, or the platform failed."""

    def __post_init__(self) -> None:
        """Refuse arrays that do not fit each other and an abort without a failure type."""
        _check_arrays(
            str(self.id),
            token_ids=(self.token_ids, np.int32),
            sampled_mask=(self.sampled_mask, np.bool_),
            behavior_logprobs=(self.behavior_logprobs, np.float32),
        )
        _check_abort(self.id, self.stop_reason, self.failure)

    @property
    def num_sampled_tokens(self) -> int:
        """Tokens that the policy drew."""
        return int(self.sampled_mask.sum())

    @property
    def turns(self) -> tuple[Int32Array, ...]:
        """The tokens of each turn that the policy took, in order."""
        starts = np.flatnonzero(np.diff(self.sampled_mask.astype(np.int8), prepend=0) == 1)
        ends = np.flatnonzero(np.diff(self.sampled_mask.astype(np.int8), append=0) == -1) + 1
        return tuple(self.token_ids[start:end] for start, end in zip(starts, ends, strict=True))


class ResumeStats(msgspec.Struct, frozen=True, kw_only=True):
    """What a replica took from the log of an earlier process; the source of the `resume/*` metrics."""

    answered: int = 0
    """Requests that were over: answered from the log without a forward."""
    resumed: int = 0
    """Requests that went on from their last durable token."""
    tokens: int = 0
    """Sampled tokens of both, which were not drawn again."""
    begun_again: int = 0
    """Requests that damage made useless, and evaluations that the platform failed: sampled again under the next
    attempt."""
    given_up: int = 0
    """Damaged requests without an attempt left; they fail as infra."""
    prefilled_tokens: int = 0
    """Tokens of resumed requests that no saved key-values covered, the last one of each left out: computed again."""
    kv_restored: int = 0
    """Resumed requests whose key-values came from a file."""
    kv_missing: int = 0
    """Saved key-values that the log names and the directory has not."""
    kv_damaged: int = 0
    """Saved key-values with a wrong checksum or length."""
    kv_foreign: int = 0
    """Saved key-values of another request, attempt or other tokens."""
    kv_other_weights: int = 0
    """Saved key-values of another weight version."""
    kv_other_layout: int = 0
    """Saved key-values of another model, cache layout or precision."""
    kv_beyond_log: int = 0
    """Saved key-values of tokens or routes that the log has not."""


class Segment(ArrayRecord, frozen=True, kw_only=True, eq=False):
    """One sequence of a trajectory, as the model saw it: prompt, sampled tokens and observations in order.

    Example: prompt [7, 8], sampled [5, 2] gives token_ids_T [7, 8, 5, 2], trained_mask_T [F, F, T, T] and
    behavior_logprobs_T [0, 0, -0.7, -0.1].
    """

    token_ids_T: Int32Array
    """[T] int32, T >= 1. Every token in order."""
    trained_mask_T: BoolArray
    """[T] bool. True where the policy drew the token; never at position 0."""
    behavior_logprobs_T: Float32Array
    """[T] float32. Log-prob under the sampling distribution of the token at the same position; 0 where not trained."""
    routes_TLK: Int16Array | None = None
    """[T, L, K] int16. Experts that each token visited, by layer; -1 where unknown. None where not recorded."""
    kept: KeptSets | None = None
    """[T] sets that the tokens were drawn from; None where all were drawn from the whole vocabulary."""

    def __post_init__(self) -> None:
        """Refuse arrays that do not fit each other."""
        _check_sequence("segment", self)


class Trajectory(ArrayRecord, frozen=True, kw_only=True, eq=False):
    """One finished attempt at a prompt: what was sampled is what is trained (token-in-token-out, several turns too).

    The fields named like those of `Segment` are the last (usually the only) sequence. Where the context was rewritten
    on the way, the sequences before it are in `earlier_segments`; together they count as one trajectory everywhere.
    """

    id: RequestId
    """Identity; (step, prompt, member) is the training order."""
    task: str
    """Name of the task that scored it."""
    token_ids_T: Int32Array
    """[T] int32, T >= 1. Every token of the last sequence in order."""
    trained_mask_T: BoolArray
    """[T] bool. True where the policy drew the token; never at position 0."""
    behavior_logprobs_T: Float32Array
    """[T] float32. Log-prob under the sampling distribution of the token at the same position; 0 where not trained."""
    policy_version: int
    """Weight version that sampled it; the oldest one if several did."""
    reward: float | None
    """Score from the task; 0.0 is a score. None means that there is none, allowed only with an excluded failure."""
    stop_reason: StopReason
    """Why the last completion ended."""
    failure: FailureType | None = None
    """What went wrong, or None."""
    routes_TLK: Int16Array | None = None
    """[T, L, K] int16. Experts that each token visited, by layer; -1 where unknown. None where not recorded."""
    kept: KeptSets | None = None
    """[T] sets that the tokens were drawn from; None where all were drawn from the whole vocabulary."""
    earlier_segments: tuple[Segment, ...] = ()
    """Sequences before the last rewriting of the context, oldest first."""

    def __post_init__(self) -> None:
        """Refuse arrays that do not fit each other, an abort without a failure type, and a missing or needless
        score."""
        _check_sequence(f"trajectory {self.id}", self)
        _check_abort(self.id, self.stop_reason, self.failure)
        if self.reward is None and not self.is_excluded:
            raise ValueError(
                f"trajectory {self.id}: reward is None with failure {self.failure}; only infra and data failures have"
                " no score. Score it, or name the failure that prevented it"
            )

    @property
    def is_excluded(self) -> bool:
        """Whether neither baseline nor loss may see it."""
        return self.failure is not None and self.failure.is_excluded

    @property
    def segments(self) -> tuple[Segment, ...]:
        """All sequences, oldest first; the last is the trajectory's own."""
        own = Segment(
            token_ids_T=self.token_ids_T,
            trained_mask_T=self.trained_mask_T,
            behavior_logprobs_T=self.behavior_logprobs_T,
            routes_TLK=self.routes_TLK,
            kept=self.kept,
        )
        return (*self.earlier_segments, own)

    @property
    def num_trained_tokens(self) -> int:
        """Tokens that the policy drew, over all segments."""
        return sum(int(segment.trained_mask_T.sum()) for segment in self.segments)


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """All attempts at one prompt of one step, which share a baseline."""

    step: int
    """Training step."""
    prompt: int
    """Position of the prompt in the step."""
    trajectories: tuple[Trajectory, ...]
    """In any order; `rl/batch.py` sorts by member."""

    def __post_init__(self) -> None:
        """Refuse members of another prompt and members that occur twice."""
        seen: set[int] = set()
        for trajectory in self.trajectories:
            identity = trajectory.id
            if (identity.step, identity.prompt) != (self.step, self.prompt):
                raise ValueError(
                    f"group s{self.step}-p{self.prompt} holds {identity}; a group is one prompt of one step"
                )
            if identity.member in seen:
                raise ValueError(f"group s{self.step}-p{self.prompt} holds {identity} twice; a member is trained once")
            seen.add(identity.member)


def request_seed(run_seed: int, step: int, prompt: int, member: int, judgement: int = 0) -> int:
    """Return the seed of one request: 64 bits of BLAKE2b over the decimal numbers, joined by slashes.

    Args:
        run_seed: Seed of the run; any integer.
        step: Training step.
        prompt: Position of the prompt in the step.
        member: Position in the group.
        judgement: Which judgement of that member, from 1; 0 is the member's own, and left out of the text.

    Returns:
        An integer in [0, 2**64), the same in every process and on every machine.
    """
    text = f"{run_seed}/{step}/{prompt}/{member}{f'/{judgement}' if judgement else ''}".encode("ascii")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8, person=_SEED_DOMAIN).digest(), "little")


def _same(left: Any, right: Any) -> bool:
    if type(left) is not type(right):
        return False
    if not isinstance(left, np.ndarray):
        return bool(left == right)
    return _same_bits(cast("npt.NDArray[Any]", left), right)


def _same_bits(left: npt.NDArray[Any], right: npt.NDArray[Any]) -> bool:
    return left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes()


def _check_arrays(owner: str, **arrays: tuple[npt.NDArray[Any], type[np.generic]]) -> None:
    lengths = {name: array.shape for name, (array, _) in arrays.items()}
    for name, (array, dtype) in arrays.items():
        if array.ndim != 1 or array.dtype != dtype:
            raise ValueError(
                f"{owner}: {name} is {array.dtype}{list(array.shape)}; it must be {np.dtype(dtype).name}[T]."
                f" Convert it with numpy.asarray(..., dtype=numpy.{np.dtype(dtype).name})"
            )
    if len(set(lengths.values())) > 1:
        raise ValueError(f"{owner}: lengths differ: {lengths}; the arrays are aligned token by token")


def _check_sequence(owner: str, sequence: Segment | Trajectory) -> None:
    _check_arrays(
        owner,
        token_ids_T=(sequence.token_ids_T, np.int32),
        trained_mask_T=(sequence.trained_mask_T, np.bool_),
        behavior_logprobs_T=(sequence.behavior_logprobs_T, np.float32),
    )
    if sequence.token_ids_T.size == 0:
        raise ValueError(f"{owner}: token_ids_T is empty; a sequence begins with its prompt")
    routes_TLK, kept = sequence.routes_TLK, sequence.kept
    if routes_TLK is not None and (routes_TLK.ndim != 3 or len(routes_TLK) != sequence.token_ids_T.size):
        raise ValueError(f"{owner}: routes_TLK is {list(routes_TLK.shape)}; it has one row [L, K] for each token")
    if kept is not None and kept.counts_T.size != sequence.token_ids_T.size:
        raise ValueError(f"{owner}: {kept.counts_T.size} kept sets for {sequence.token_ids_T.size} tokens; one each")
    if sequence.trained_mask_T[0]:
        raise ValueError(f"{owner}: trained_mask_T[0] is True; the first token has no predictor and is never trained")


def _check_abort(identity: RequestId, stop_reason: StopReason, failure: FailureType | None) -> None:
    if stop_reason == StopReason.ABORTED and failure is None:
        raise ValueError(f"{identity}: stop_reason is aborted without a failure; name its type (P7)")
