"""One request on its way through the engine: tokens so far, how many of them are in the cache, where they are kept."""

from dataclasses import dataclass, field

import numpy as np

from rollforward.rollout.types import (
    Completion,
    FailureType,
    Int16Array,
    Int32Array,
    KeptSets,
    Request,
    StopReason,
)
from rollforward.rollout.wal_recovery import RecoveredRequest


class RouteLog:
    """The experts that a sequence's tokens visited, from position 0 on, and how many of them the log has."""

    def __init__(self, logged: Int16Array | None = None) -> None:
        """Start with what the log holds of the sequence, or with nothing."""
        self._logged: list[Int16Array] = [] if logged is None else [logged]
        self._pending: list[Int16Array] = []
        self._num_known = 0 if logged is None else len(logged)

    @property
    def num_known(self) -> int:
        """Positions whose routes are known."""
        return self._num_known

    def record(self, start: int, routes_TLK: Int16Array) -> None:
        """Take the routes of consecutive positions from ``start`` on; those known before are left as they are."""
        assert start <= self._num_known, "a forward computes positions in order"
        new = routes_TLK[self._num_known - start :]
        if len(new):
            self._pending.append(new)
            self._num_known += len(new)

    def take_pending(self) -> list[Int16Array]:
        """Return, in order, what was recorded since the last call; it counts as logged from here on."""
        pending, self._pending = self._pending, []
        self._logged += pending
        return pending

    def known(self) -> list[Int16Array]:
        """Return all known routes in order, in pieces [n, L, K]."""
        return [*self._logged, *self._pending]

    def first(self, num_positions: int) -> Int16Array:
        """Return the routes of the first positions, all of them known, [n, L, K]."""
        return np.concatenate(self.known())[:num_positions]

    def padded(self, num_tokens: int) -> Int16Array | None:
        """Return int16 [num_tokens, L, K], -1 where unknown; None where nothing is known."""
        pieces = self.known()
        if not pieces:
            return None
        unknown = np.full((num_tokens - self._num_known, *pieces[0].shape[1:]), -1, np.int16)
        return np.concatenate([*pieces, unknown])


@dataclass(eq=False)
class Sequence:
    """State of a request in flight. The engine moves it.

        waiting --cache--> prefilling --> decoding --end of sequence--> closed
           ^                   ^            |  tool is called
           |                   +-- tool works: is_observing
           +-- preempted: tokens stay, slot and blocks go

    Waiting: no slot. Prefilling: more than one token is not in the cache yet (or a leader with the same tokens computes
    them). Decoding: exactly the last token is missing. Observing: until the answer is appended; it keeps its cache
    unless it is preempted. Closed: ``stop_reason`` is set and slot and blocks are given back.
    """

    request: Request
    """What was asked."""
    policy_version: int
    """Weights that drew its first token, or will."""
    token_ids: list[int]
    """Prompt, sampled tokens and observations in order."""
    behavior_logprobs: list[float] = field(default_factory=list[float])
    """Log-prob of every sampled token, float32 values."""
    observed: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    """Position of the first token and the one after the last of every observation."""
    command_position: int = 0
    """The furthest position in the sandbox's command log that an observation reflects."""
    kept: list[Int32Array] = field(default_factory=list[Int32Array])
    """Ids that each sampled token was drawn from; stays empty where the request draws from the whole vocabulary."""
    routes: RouteLog | None = None
    """Experts that the tokens visited, where the request asks for them."""
    attempt: int = 0
    """Number of the attempt: grows when damage made an earlier one useless."""
    age: int = -1
    """Number of its opening in the log: smaller is older; -1 before."""
    log_slot: int = -1
    """Slot in the log, from its opening to its end."""
    slot: int = -1
    """State slot; -1 without a cache."""
    blocks: tuple[int, ...] = ()
    """Cache blocks: those of its tokens; of a follower only what it will not share with its leader."""
    num_cached: int = 0
    """Tokens whose key-values are in the cache."""
    followers: list["Sequence"] = field(default_factory=list["Sequence"])
    """Sequences with the same tokens that take this one's cache when its prefill is done."""
    is_following: bool = False
    """Whether a leader computes the prefill."""
    is_observing: bool = False
    """Whether the environment works on the last turn."""
    stop_reason: StopReason | None = None
    """Why it ended, or None."""
    failure: FailureType | None = None
    """What went wrong, or None."""
    detail: str = ""
    """How it failed, for a person."""
    close_seq: int = -1
    """Log sequence number of the CLOSE record; the completion may leave when it is durable."""

    @classmethod
    def fresh(cls, request: Request, *, attempt: int = 0) -> "Sequence":
        """Return the state of a request of which nothing is sampled."""
        routes = RouteLog() if request.record_routes else None
        return cls(request, request.policy_version, request.prompt_ids.tolist(), routes=routes, attempt=attempt)

    @classmethod
    def resumed(cls, request: Request, held: RecoveredRequest) -> "Sequence":
        """Return the state that the log holds of a request."""
        observed: list[tuple[int, int]] = []
        end, num_sampled = request.prompt_ids.size, 0
        for observation in held.observations:
            start = end + observation.after_tokens - num_sampled
            end, num_sampled = start + observation.token_ids.size, observation.after_tokens
            observed.append((start, end))
        return cls(
            request,
            held.version_spans[0].policy_version if len(held.token_ids) else request.policy_version,
            held.sequence()[0].tolist(),
            held.behavior_logprobs.tolist(),
            observed=observed,
            command_position=max((observation.command_position for observation in held.observations), default=0),
            kept=[] if held.kept is None else split_sets(held.kept),
            routes=RouteLog(held.routes) if request.record_routes else None,
            attempt=held.attempt,
        )

    @property
    def can_run(self) -> bool:
        """Whether the next forward may compute tokens of it."""
        return not (self.is_following or self.is_observing or self.stop_reason is not None)

    @property
    def num_missing(self) -> int:
        """Tokens that are not in the cache."""
        return len(self.token_ids) - self.num_cached

    @property
    def num_sampled(self) -> int:
        """Tokens that the policy drew."""
        return len(self.behavior_logprobs)

    @property
    def has_budget(self) -> bool:
        """Whether the policy may draw another token."""
        return self.num_sampled < self.request.sampling.max_new_tokens

    @property
    def turn(self) -> int:
        """Number of the turn that the policy is in, from 1."""
        return len(self.observed) + 1

    @property
    def turn_ids(self) -> Int32Array:
        """Tokens of that turn so far, int32 [T]."""
        start = self.observed[-1][1] if self.observed else self.request.prompt_ids.size
        return np.array(self.token_ids[start:], dtype=np.int32)

    def accept(self, token_id: int, logprob: float, kept_ids: Int32Array | None = None) -> None:
        """Append a sampled token; what it was drawn from is kept where the request cuts the vocabulary."""
        self.token_ids.append(token_id)
        self.behavior_logprobs.append(logprob)
        if kept_ids is not None and self.request.sampling.cuts_vocabulary:
            self.kept.append(kept_ids)

    def observe(self, token_ids: Int32Array, *, command_position: int = 0) -> None:
        """Append what the environment answered; the next turn begins."""
        self.command_position = max(self.command_position, command_position)
        start = len(self.token_ids)
        self.token_ids += token_ids.tolist()
        self.observed.append((start, len(self.token_ids)))
        self.is_observing = False

    def completion(self) -> Completion:
        """Return the finished request's record."""
        assert self.stop_reason is not None, "only a closed sequence is delivered"
        num_prompt = self.request.prompt_ids.size
        token_ids = np.array(self.token_ids[num_prompt:], dtype=np.int32)
        sampled_mask = np.ones(token_ids.size, dtype=np.bool_)
        for start, end in self.observed:
            sampled_mask[start - num_prompt : end - num_prompt] = False
        logprobs = np.zeros(token_ids.size, dtype=np.float32)
        logprobs[sampled_mask] = self.behavior_logprobs
        return Completion(
            id=self.request.id,
            token_ids=token_ids,
            sampled_mask=sampled_mask,
            behavior_logprobs=logprobs,
            routes=None if self.routes is None else self.routes.padded(len(self.token_ids)),
            kept=self._kept_sets(sampled_mask) if self.request.sampling.cuts_vocabulary else None,
            policy_version=self.policy_version,
            stop_reason=self.stop_reason,
            failure=self.failure,
            detail=self.detail,
        )

    def _kept_sets(self, sampled_mask: np.ndarray) -> KeptSets:
        counts_T = np.zeros(sampled_mask.size, dtype=np.int32)
        counts_T[sampled_mask] = [ids.size for ids in self.kept]
        return KeptSets(counts_T=counts_T, token_ids=np.concatenate([np.zeros(0, np.int32), *self.kept]))


def split_sets(kept: KeptSets) -> list[Int32Array]:
    """Return the ids of each set in order, none for the whole vocabulary."""
    return np.split(kept.token_ids, np.cumsum(kept.counts_T))[:-1]


def failed_completion(request: Request, policy_version: int) -> Completion:
    """Return the record of a request whose log is damaged: nothing sampled, an infra failure (P1, P7)."""
    return Completion(
        id=request.id,
        token_ids=np.zeros(0, np.int32),
        sampled_mask=np.zeros(0, np.bool_),
        behavior_logprobs=np.zeros(0, np.float32),
        policy_version=policy_version,
        stop_reason=StopReason.ABORTED,
        failure=FailureType.INFRA,
        detail="the token log is damaged, and no attempt is left (rollout.max_attempts)",
    )
