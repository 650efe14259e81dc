"""What earlier processes of a replica had begun of each request, as its log tells: how often it was interrupted, how it
comes back, and which attempts are replaced.

Here: records and one pure function. Not here: what is done about it (rollout/engine/resume.py), what it says about
lengths (rollout/bias.py).
"""

import hashlib
from collections.abc import Sequence
from enum import StrEnum

import msgspec
import numpy as np

from rollforward.rollout.types import Int32Array, RequestId
from rollforward.rollout.wal_recovery import RecoveredLog
from rollforward.rollout.wal_runs import RecoveredRequest


class CameBack(StrEnum):
    """How a request that earlier processes had begun comes back."""

    RESUMED = "resumed"
    """It goes on after its logged tokens, with saved key-values or by prefill."""
    BEGUN_AGAIN = "begun_again"
    """Damage made what was logged useless; the next attempt begins at the prompt."""
    GIVEN_UP = "given_up"
    """Damage, and no attempt is left; it fails as infra."""
    ANSWERED = "answered"
    """It was over, after interruptions that an earlier process came back from."""


class ReplacedAttempt(msgspec.Struct, frozen=True, kw_only=True):
    """An attempt that a later one takes the place of."""

    num_tokens: int
    """Sampled tokens that the log has of it."""
    digest: str
    """`tokens_digest` of them: tells whether the later attempt draws the same."""


class Interruption(msgspec.Struct, frozen=True, kw_only=True):
    """What happened to one request before the process that delivers it."""

    id: RequestId
    """The request."""
    times: int
    """Processes that ended while it was in flight, or whose record of it is damaged; >= 1."""
    came_back: CameBack
    """How it comes back this time."""
    replaced: tuple[ReplacedAttempt, ...] = ()
    """Its attempts before the newest, in order."""


def tokens_digest(token_ids: Int32Array) -> str:
    """Return 64 bits of BLAKE2b over int32 token ids, as hex digits."""
    return hashlib.blake2b(np.ascontiguousarray(token_ids, "<i4").tobytes(), digest_size=8).hexdigest()


def find_interruptions(recovered: RecoveredLog, *, max_attempts: int) -> tuple[Interruption, ...]:
    """Return the requests of a log that a process left in flight or in doubt.

    Args:
        recovered: what the log held when it was opened.
        max_attempts: how often a request may be begun, the first time included.
    """
    older: dict[RequestId, list[RecoveredRequest]] = {}
    for attempt in recovered.earlier_attempts:
        older.setdefault(attempt.request.id, []).append(attempt)
    found = [
        _interruption(older.get(identity, []), newest, identity in recovered.failed, max_attempts)
        for identity, newest in recovered.requests.items()
    ]
    lost = CameBack.BEGUN_AGAIN if max_attempts > 1 else CameBack.GIVEN_UP
    nameless = [identity for identity in recovered.failed if identity not in recovered.requests]
    return (
        *(one for one in found if one.times > 0),
        *(Interruption(id=identity, times=1, came_back=lost) for identity in nameless),
    )


def _interruption(
    older: Sequence[RecoveredRequest], newest: RecoveredRequest, has_failed: bool, max_attempts: int
) -> Interruption:
    times, replaced = sum(attempt.num_openings for attempt in (*older, newest)), older
    if has_failed:
        replaced = [*older, newest]
        came_back = CameBack.BEGUN_AGAIN if newest.attempt + 1 < max_attempts else CameBack.GIVEN_UP
    elif newest.close is None:
        came_back = CameBack.RESUMED
    else:
        # Its last process saw its end.
        times, came_back = times - 1, CameBack.ANSWERED
    return Interruption(
        id=newest.request.id,
        times=times,
        came_back=came_back,
        replaced=tuple(
            ReplacedAttempt(num_tokens=len(attempt.token_ids), digest=tokens_digest(attempt.token_ids))
            for attempt in replaced
        ),
    )
