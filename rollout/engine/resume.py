"""What a log held when the engine was opened, request by request: to be answered from, gone on with, or begun again.

    finished   -> its completion, without a forward; an evaluation that the platform failed: as damaged
    unfinished -> its sequence so far: the cache is computed again, the next token is drawn where the log ends
    damaged    -> the next attempt, with the same seed and so the same tokens; too many attempts: an infra failure

Not here: how a log becomes such requests (rollout/wal_recovery.py).
"""

import msgspec
import numpy as np

from rollforward.rollout.engine.sequence import Sequence, failed_completion
from rollforward.rollout.errors import EngineInputError
from rollforward.rollout.types import Completion, FailureType, Request, ResumeStats, StopReason
from rollforward.rollout.wal import WalWriter
from rollforward.rollout.wal_recovery import RecoveredLog, RecoveredRequest


class LoggedRequests:
    """Requests of earlier processes of a replica. A request is taken once."""

    def __init__(self, recovered: RecoveredLog, log: WalWriter, *, max_attempts: int) -> None:
        """Keep what was recovered.

        Args:
            recovered: what the log held.
            log: where a request that is given up is closed.
            max_attempts: how often a request may be begun, the first time included.
        """
        self._held = dict(recovered.requests)
        self._failed = dict(recovered.failed)
        self._log = log
        self._max_attempts = max_attempts
        self._stats = ResumeStats()

    @property
    def stats(self) -> ResumeStats:
        """What was taken so far."""
        return self._stats

    def check(self, request: Request) -> None:
        """Refuse a request whose identity the log holds with other contents.

        Raises:
            EngineInputError: prompt, seed, sampling, tools or the recording of routes differ.
        """
        held = self._held.get(request.id)
        if held is None or request.id in self._failed:
            return
        logged = held.request
        same = (
            np.array_equal(request.prompt_ids, logged.prompt_ids)
            and request.seed == logged.seed
            and request.sampling == logged.sampling
            and request.tools == logged.tools
            and request.record_routes == logged.record_routes
        )
        if not same:
            raise EngineInputError(
                f"request {request.id} is in the log with another prompt, seed, sampling or tools; it belongs to"
                " another run. Use a fresh run_dir, or resume with the configuration that wrote the log"
            )

    def take(self, request: Request, policy_version: int) -> Completion | Sequence:
        """Return the completion of a request that is over, or the state from which it goes on."""
        held = self._held.pop(request.id, None)
        if self._failed.pop(request.id, None) is not None:
            return self._begin_again(request, held, policy_version)
        if held is None:
            return Sequence.fresh(request)
        if self._is_worth_another_attempt(held):
            return self._begin_again(request, held, policy_version)
        sequence = Sequence.resumed(request, held)
        if held.close is None:
            self._count(resumed=1, tokens=sequence.num_sampled)
            return sequence
        self._count(answered=1, tokens=sequence.num_sampled)
        sequence.stop_reason, sequence.failure = held.close.stop_reason, held.close.failure
        return sequence.completion(held.version_spans[0].policy_version)

    def _is_worth_another_attempt(self, held: RecoveredRequest) -> bool:
        """Whether the platform failed an evaluation, which may be repeated when the platform works again. A training
        request may not: what was sampled after its step rests on what that step trained on."""
        has_failed = held.close is not None and held.close.failure is FailureType.INFRA
        return has_failed and held.request.id.is_eval and held.attempt + 1 < self._max_attempts

    def _begin_again(
        self, request: Request, held: RecoveredRequest | None, policy_version: int
    ) -> Completion | Sequence:
        attempt = 1 + (0 if held is None else held.attempt)
        if attempt < self._max_attempts:
            self._count(begun_again=1)
            return Sequence.fresh(request, attempt=attempt)
        self._count(given_up=1)
        seq = self._log.append_close_recovered(
            request.id,
            StopReason.ABORTED,
            num_tokens=0 if held is None else len(held.token_ids),
            failure=FailureType.INFRA,
        )
        self._log.wait_durable(seq)
        return failed_completion(request, policy_version)

    def _count(self, **more: int) -> None:
        stats = self._stats
        self._stats = msgspec.structs.replace(stats, **{name: getattr(stats, name) + n for name, n in more.items()})
