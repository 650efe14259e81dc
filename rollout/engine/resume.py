"""What a log held when the engine was opened, request by request: to be answered from, gone on with, or begun again.

    finished   -> its completion, without a forward; an evaluation that the platform failed: as damaged
    unfinished -> its sequence so far, with the key-values that were saved of it or else by prefill; the next token is
                  drawn where the log ends
    damaged    -> the next attempt, with the same seed and so the same tokens; too many attempts: an infra failure

Not here: how a log becomes such requests (rollout/wal_recovery.py), files of key-values (kv_store.py).
"""

from collections.abc import Callable

import msgspec
import numpy as np

from rollforward.rollout.engine.kv_file import WeightsId
from rollforward.rollout.engine.kv_store import KvRejection, KvState, KvStore
from rollforward.rollout.engine.sequence import Sequence, failed_completion
from rollforward.rollout.errors import EngineInputError
from rollforward.rollout.types import Completion, FailureType, Request, RequestId, ResumeStats, StopReason
from rollforward.rollout.wal import WalWriter
from rollforward.rollout.wal_records import KvSavedRecord
from rollforward.rollout.wal_recovery import RecoveredLog, RecoveredRequest


class LoggedRequests:
    """Requests of earlier processes of a replica. A request is taken once."""

    def __init__(
        self, recovered: RecoveredLog, log: WalWriter, *, max_attempts: int, kv_store: KvStore | None = None
    ) -> None:
        """Keep what was recovered.

        Args:
            recovered: what the log held.
            log: where a request that is given up is closed.
            max_attempts: how often a request may be begun, the first time included.
            kv_store: where earlier processes saved key-values; None prefills every request that goes on.
        """
        self._held = dict(recovered.requests)
        self._failed = dict(recovered.failed)
        self._weights = recovered.weights
        self._log = log
        self._max_attempts = max_attempts
        self._kv_store = kv_store
        self._resumed: dict[RequestId, KvSavedRecord | None] = {}  # taken, but without a slot yet
        self._stats = ResumeStats()

    @property
    def stats(self) -> ResumeStats:
        """What was taken so far."""
        return self._stats

    def check_weights(self, weights: WeightsId) -> None:
        """Refuse weights where the log holds tokens of others under their number.

        Raises:
            EngineInputError: they are not those of the log.
        """
        logged = self._weights.get(weights.policy_version, weights.digest)
        if logged != weights.digest:
            raise EngineInputError(
                f"weights {weights.policy_version} are others than those of that number in the log; the model's"
                " directory changed, or the log belongs to another run. Use a fresh run_dir, or bring back the model"
            )

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
        """Return the state of a request, from which it goes on or, with a ``stop_reason``, in which it ended; the
        completion of one that is given up."""
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
            self._resumed[request.id] = held.kv
            return sequence
        self._forget(request.id)
        self._count(answered=1, tokens=sequence.num_sampled)
        sequence.stop_reason, sequence.failure = held.close.stop_reason, held.close.failure
        return sequence

    def restore(self, sequence: Sequence, weights: Callable[[], WeightsId]) -> KvState | None:
        """Return the saved key-values from which a sequence goes on, or None where it is to be prefilled.

        Asked once, when the sequence gets its place in the cache; the caller writes the planes there and then sets
        ``num_cached``. Of a sequence that no earlier process began nothing is saved.

        Args:
            sequence: that starts.
            weights: says which are in use; asked only where something is saved.

        Invariants: at least one token is left for the next forward, and the log has the routes of every position
        covered, where the request records them.
        """
        request = sequence.request
        if request.id not in self._resumed:
            return None
        saved = self._resumed.pop(request.id)
        found: KvState | KvRejection | None = None
        if saved is not None and self._kv_store is not None:
            found = self._load(self._kv_store, saved, sequence, weights)
        if isinstance(found, KvState):
            self._count(kv_restored=1, prefilled_tokens=len(sequence.token_ids) - 1 - found.num_cached)
            return found
        self._count(prefilled_tokens=len(sequence.token_ids) - 1)
        if found is not None:
            self._count(**{f"kv_{found.value}": 1})
        return None

    def _load(
        self, store: KvStore, saved: KvSavedRecord, sequence: Sequence, weights: Callable[[], WeightsId]
    ) -> KvState | KvRejection:
        if saved.fingerprint != store.fingerprint:
            return KvRejection.OTHER_LAYOUT
        num_known = len(sequence.token_ids) if sequence.routes is None else sequence.routes.num_known
        return store.load(
            saved.manifest,
            sequence.request.id,
            sequence.attempt,
            weights=weights(),
            token_ids=sequence.token_ids,
            max_cached=min(num_known, len(sequence.token_ids) - 1),
        )

    def _forget(self, request_id: RequestId) -> None:
        if self._kv_store is not None:
            self._kv_store.discard(request_id)

    def _is_worth_another_attempt(self, held: RecoveredRequest) -> bool:
        """Whether the platform failed an evaluation, which may be repeated when the platform works again. A training
        request may not: what was sampled after its step rests on what that step trained on."""
        has_failed = held.close is not None and held.close.failure is FailureType.INFRA
        return has_failed and held.request.id.is_eval and held.attempt + 1 < self._max_attempts

    def _begin_again(
        self, request: Request, held: RecoveredRequest | None, policy_version: int
    ) -> Completion | Sequence:
        self._forget(request.id)
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
