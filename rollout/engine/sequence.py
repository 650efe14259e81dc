"""One request on its way through the engine: tokens so far, how many of them are in the cache, where they are kept."""

from dataclasses import dataclass, field

import numpy as np

from rollforward.rollout.types import Completion, FailureType, Request, StopReason


@dataclass(eq=False)
class Sequence:
    """State of a request in flight. The engine moves it: waiting -> prefilling -> decoding -> closed.

    Waiting: no slot. Prefilling: more than one token is not in the cache yet (or a leader with the same tokens computes
    them). Decoding: exactly the last token is missing. Closed: ``stop_reason`` is set and slot and blocks are given
    back.
    """

    request: Request
    """What was asked."""
    token_ids: list[int]
    """Prompt and sampled tokens."""
    behavior_logprobs: list[float]
    """Log-prob of every sampled token, float32 values."""
    slot: int = -1
    """State slot; -1 while waiting."""
    blocks: tuple[int, ...] = ()
    """Cache blocks."""
    num_cached: int = 0
    """Tokens whose key-values are in the cache."""
    followers: list["Sequence"] = field(default_factory=list["Sequence"])
    """Sequences with the same tokens that take this one's cache when its prefill is done."""
    is_following: bool = False
    """Whether a leader computes the prefill."""
    stop_reason: StopReason | None = None
    """Why it ended, or None."""
    close_seq: int = -1
    """Log sequence number of the CLOSE record; the completion may leave when it is durable."""

    @property
    def num_missing(self) -> int:
        """Tokens that are not in the cache."""
        return len(self.token_ids) - self.num_cached

    @property
    def num_sampled(self) -> int:
        """Tokens that the policy drew."""
        return len(self.behavior_logprobs)

    @property
    def max_tokens(self) -> int:
        """Tokens that the sequence may reach: prompt and budget."""
        return self.request.prompt_ids.size + self.request.sampling.max_new_tokens

    def accept(self, token_id: int, logprob: float, eos_token_id: int) -> None:
        """Append a sampled token; sets ``stop_reason`` when it is the last one."""
        self.token_ids.append(token_id)
        self.behavior_logprobs.append(logprob)
        self.stop_reason = stop_after(self.request, token_id, self.num_sampled, eos_token_id)

    def completion(self, policy_version: int) -> Completion:
        """Return the finished request's record."""
        assert self.stop_reason is not None, "only a closed sequence is delivered"
        sampled = self.token_ids[self.request.prompt_ids.size :]
        return Completion(
            id=self.request.id,
            token_ids=np.array(sampled, dtype=np.int32),
            sampled_mask=np.ones(len(sampled), dtype=np.bool_),
            behavior_logprobs=np.array(self.behavior_logprobs, dtype=np.float32),
            policy_version=policy_version,
            stop_reason=self.stop_reason,
        )


def stop_after(request: Request, token_id: int, num_sampled: int, eos_token_id: int) -> StopReason | None:
    """Return why a request ends with this token, or None when it goes on."""
    if token_id == eos_token_id:
        return StopReason.EOS
    return StopReason.LENGTH if num_sampled >= request.sampling.max_new_tokens else None


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
    )
