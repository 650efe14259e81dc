"""Tells a ledger (rollout/ledger.py) which tokens leave a replica, at the moment they do. Where `rollout.ledger` is not
set nothing of this is made.

Tokens leave in two places: a turn that is handed to the environment, and a completion that is returned.
"""

from collections.abc import Sequence
from concurrent.futures import Future

from rollforward.rollout.environment import Ending, Environment, Observation, SandboxCounts
from rollforward.rollout.ledger import LedgerClient, Report
from rollforward.rollout.types import Completion, Int32Array, Request, RequestId
from rollforward.rollout.wal_recovery import RecoveredLog


class Publication:
    """Reports of one replica, from one opening of its log to the next. One thread, the engine's."""

    def __init__(self, ledger: str, *, scope: str, life: str, recovered: RecoveredLog) -> None:
        """Connect to the ledger.

        Args:
            ledger: its socket.
            scope: names the run, in which request ids are unique.
            life: names this opening of the log.
            recovered: what the log held.

        Raises:
            LedgerError: no ledger listens there.
        """
        self._client = LedgerClient(ledger)
        self._scope, self._life = scope, life
        self._recovered = recovered
        self._turn_ends: dict[tuple[RequestId, int], int] = {}

    def watch(self, environment: Environment | None) -> Environment | None:
        """Return the environment with a report before every turn that it is given."""
        return None if environment is None else _Watched(environment, self)

    def completions(self, completions: list[Completion]) -> list[Completion]:
        """Report completions that leave, and return them."""
        for completion in completions:
            mask = completion.sampled_mask
            self._report(
                completion.id, 0, completion.token_ids[mask].tobytes(), completion.behavior_logprobs[mask].tobytes()
            )
        return completions

    def turn(self, request: Request, turn_ids: Int32Array, turn: int) -> None:
        """Report a turn that is handed to the environment."""
        start = self._start_of(request.id, turn)
        self._turn_ends[request.id, turn] = start + turn_ids.size
        self._report(request.id, start, turn_ids.tobytes(), None)

    def last_turn(self, request: Request, turn_ids: Int32Array, turn: int) -> None:
        """Report the turn with which a request ended, unless it was handed over to be answered before."""
        if turn_ids.size and (request.id, turn) not in self._turn_ends:
            self.turn(request, turn_ids, turn)

    def close(self) -> None:
        """End the connection."""
        self._client.close()

    def _start_of(self, identity: RequestId, turn: int) -> int:
        """Sampled tokens before a turn: the log says it of the turns that were answered in an earlier life."""
        if (identity, turn - 1) in self._turn_ends:
            return self._turn_ends[identity, turn - 1]
        known = self._recovered.requests.get(identity)
        return 0 if turn == 1 or known is None else known.observations[turn - 2].after_tokens

    def _report(self, identity: RequestId, start: int, tokens: bytes, logprobs: bytes | None) -> None:
        known = self._recovered.requests.get(identity)
        is_failed = identity in self._recovered.failed
        self._client.report(
            Report(
                scope=self._scope,
                life=self._life,
                request=str(identity),
                attempt=(0 if known is None else known.attempt) + is_failed,
                start=start,
                tokens=tokens,
                logprobs=logprobs,
                num_logged=0 if known is None or is_failed else len(known.token_ids),
            )
        )


class _Watched:
    """An environment whose turns are reported."""

    def __init__(self, environment: Environment, publication: Publication) -> None:
        self._environment, self._publication = environment, publication

    def is_call(self, request: Request, turn_ids: Int32Array) -> bool:
        return self._environment.is_call(request, turn_ids)

    def resume(self, request: Request, *, turn: int, attempt: int = 0, position: int = 0) -> None:
        self._environment.resume(request, turn=turn, attempt=attempt, position=position)

    def begin(self, request: Request, turn_ids: Int32Array, *, turn: int, attempt: int = 0, position: int = 0) -> None:
        self._publication.turn(request, turn_ids, turn)
        self._environment.begin(request, turn_ids, turn=turn, attempt=attempt, position=position)

    def end(self, request: Request, turn_ids: Int32Array, *, turn: int, attempt: int = 0, position: int = 0) -> None:
        self._publication.last_turn(request, turn_ids, turn)
        self._environment.end(request, turn_ids, turn=turn, attempt=attempt, position=position)

    def results(self, identities: Sequence[RequestId]) -> dict[RequestId, Ending]:
        return self._environment.results(identities)

    def counts(self) -> SandboxCounts:
        return self._environment.counts()

    def collect(self, *, block: bool) -> list[Observation]:
        return self._environment.collect(block=block)

    def wake(self) -> None:
        self._environment.wake()

    def keep(self, within_s: float) -> Future[int]:
        return self._environment.keep(within_s)

    def close(self) -> None:
        self._environment.close()
