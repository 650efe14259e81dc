"""Requests as recovery finds them: runs of one epoch each, joined by token position.

    runs (one per OPEN: a request in one epoch) --merge--> one record for each attempt, and what contradicts itself

Here: records and pure functions. Not here: from frames to runs (rollout/wal_recovery.py).
"""

from collections.abc import Sequence

import msgspec
import numpy as np

from rollforward.rollout.types import (
    ArrayRecord,
    BoolArray,
    Float32Array,
    Int16Array,
    Int32Array,
    KeptSets,
    Request,
    RequestId,
)
from rollforward.rollout.wal_columns import Ragged
from rollforward.rollout.wal_records import CloseRecord, KvSavedRecord, ObserveRecord, OpenRecord
from rollforward.rollout.wal_scan import Problem, ProblemKind
from rollforward.rollout.wal_step import KEPT_FLAG, ROUTES_FLAG


class VersionSpan(msgspec.Struct, frozen=True, kw_only=True):
    """Which weights sampled the tokens of a request from one position on."""

    first_token: int
    """Number of the first sampled token of the span."""
    policy_version: int
    """Weight version, until the next span."""


class RecoveredRequest(ArrayRecord, frozen=True, kw_only=True, eq=False):
    """One attempt at a request, as far as the log holds it."""

    request: Request
    """The request as it was first opened."""
    attempt: int
    """Number of the attempt."""
    token_ids: Int32Array
    """[T] int32. Sampled tokens in order."""
    behavior_logprobs: Float32Array
    """[T] float32. Their log-probs as logged, bit for bit."""
    routes: Int16Array | None = None
    """[P, L, K] int16. Experts of the first P positions of `sequence()`: all those before the newest sampled token.
    None where the request did not ask, or no token is logged."""
    kept: KeptSets | None = None
    """[T] sets that the sampled tokens were drawn from; None where the request cuts no vocabulary."""
    observations: tuple[ObserveRecord, ...]
    """What the environment said, in order; each names the number of sampled tokens before it."""
    version_spans: tuple[VersionSpan, ...]
    """Weight versions by token position; never empty."""
    kv: KvSavedRecord | None
    """The last saved KV state, if any."""
    close: CloseRecord | None
    """How it ended, if it did."""
    num_openings: int
    """How often it was opened: 1 + the restarts that it survived."""
    damage: str | None
    """Why it must fail with FailureType.INFRA, or None. Its tokens are then at most a prefix of what was sampled."""

    @property
    def is_finished(self) -> bool:
        """Whether it ended and nothing of it was damaged."""
        return self.close is not None and self.damage is None

    @property
    def is_unfinished(self) -> bool:
        """Whether it is to go on from its last token."""
        return self.close is None and self.damage is None

    def sequence(self) -> tuple[Int32Array, BoolArray]:
        """Returns prompt, sampled tokens and observations in order, and a mask that is True where the policy drew.

        Example: prompt [1], tokens [5, 6], observation [9] after 1 token -> ([1, 5, 9, 6], [F, T, F, T]).
        """
        return _sequence(self.request, self.token_ids, self.observations)


class Run:
    """A request in one epoch: from its OPEN to its CLOSE or the epoch's end."""

    def __init__(self, index: int, epoch: int, opened: OpenRecord) -> None:
        """Starts with the OPEN record alone."""
        self.index = index
        self.epoch = epoch
        self.opened = opened
        self.identity = opened.request.id
        self.observations: list[ObserveRecord] = []
        self.spans: list[tuple[int, int]] = []
        self.kv: KvSavedRecord | None = None
        self.close: CloseRecord | None = None
        self.damage: str | None = None
        self.token_ids: Int32Array = np.zeros(0, np.int32)
        self.logprobs: Float32Array = np.zeros(0, np.float32)
        self.routes: Ragged | None = None
        self.kept: Ragged | None = None


def asked_columns(request: Request) -> int:
    """Returns the flag bits of the STEP columns that every token of a request must come with."""
    return (ROUTES_FLAG if request.record_routes else 0) | (KEPT_FLAG if request.sampling.cuts_vocabulary else 0)


def merge_runs(
    runs: list[Run], orphans: dict[RequestId, str]
) -> tuple[dict[RequestId, RecoveredRequest], list[RecoveredRequest], list[Problem]]:
    """Joins the runs of each request by token position; returns (newest attempts, earlier attempts, findings)."""
    by_attempt: dict[tuple[RequestId, int], list[Run]] = {}
    first_opened: dict[RequestId, list[int]] = {}
    for run in runs:
        attempt = run.opened.attempt
        by_attempt.setdefault((run.identity, attempt), []).append(run)
        attempts = first_opened.setdefault(run.identity, [])
        if attempt not in attempts:
            attempts.append(attempt)
    newest: dict[RequestId, RecoveredRequest] = {}
    earlier: list[RecoveredRequest] = []
    problems: list[Problem] = []
    for identity, attempts in first_opened.items():
        for attempt in sorted(attempts):
            merged, conflict = _merge_attempt(by_attempt[identity, attempt])
            if conflict is not None:
                problems.append(
                    Problem(kind=ProblemKind.CONFLICT, where=str(identity), detail=conflict, requests=(identity,))
                )
            if identity in orphans and merged.damage is None:
                merged = msgspec.structs.replace(merged, damage=orphans[identity])
            if identity in newest:
                earlier.append(newest[identity])
            newest[identity] = merged
    return newest, earlier, problems


def _merge_attempt(runs: list[Run]) -> tuple[RecoveredRequest, str | None]:
    """Returns one attempt joined from its runs, and what contradicts itself in it, if anything."""
    first = runs[0]
    token_ids, logprobs = first.token_ids, first.logprobs
    observations = list(first.observations)
    spans = list(first.spans)
    routes, kept = first.routes, first.kept
    conflict: str | None = None
    if first.opened.resumed_tokens or first.opened.resumed_observations:
        conflict = f"resumed at token {first.opened.resumed_tokens}, but the log before that is gone"
    for run in runs[1:]:
        found = _contradiction(first.opened, run, token_ids, logprobs, observations) or _changed_column(
            run, len(token_ids), routes, kept
        )
        if found is not None:
            conflict = conflict or found
            continue
        start = run.opened.resumed_tokens
        num_repeated = max(0, len(token_ids) - start)
        spans += [(max(start + position, len(token_ids)), version) for position, version in run.spans]
        token_ids = np.concatenate([token_ids, run.token_ids[num_repeated:]])
        logprobs = np.concatenate([logprobs, run.logprobs[num_repeated:]])
        routes = _continued(routes, run.routes, num_repeated)
        kept = _continued(kept, run.kept, num_repeated)
        observations += run.observations[max(0, len(observations) - run.opened.resumed_observations) :]
    closes = [run.close for run in runs if run.close is not None]
    if closes and conflict is None and closes[0].num_tokens != len(token_ids):
        conflict = f"closed with {closes[0].num_tokens} tokens, but {len(token_ids)} are logged"
    request = first.opened.request
    conflict = conflict or _missing_routes(request, token_ids, observations, routes)
    damages = [run.damage for run in runs if run.damage is not None]
    if damages:
        # Found and reported already; that the rest does not fit then only follows from it.
        conflict = None
    merged = RecoveredRequest(
        request=request,
        attempt=first.opened.attempt,
        token_ids=token_ids,
        behavior_logprobs=logprobs,
        routes=routes.values if routes is not None and request.record_routes else None,
        kept=_kept_sets(kept, len(token_ids)) if asked_columns(request) & KEPT_FLAG else None,
        observations=tuple(observations),
        version_spans=_tidy(spans, len(token_ids)),
        kv=next((run.kv for run in reversed(runs) if run.kv is not None), None),
        close=closes[0] if closes else None,
        num_openings=len(runs),
        damage=damages[0] if damages else conflict,
    )
    return merged, conflict


def _contradiction(
    opened: OpenRecord, run: Run, token_ids: Int32Array, logprobs: Float32Array, observations: list[ObserveRecord]
) -> str | None:
    """Returns how a later run contradicts what the log holds before it, or None. Equal repetitions are fine."""
    before, now = opened.request, run.opened.request
    is_same = before == msgspec.structs.replace(now, policy_version=before.policy_version)
    if not is_same:
        return f"opened again with another prompt, seed or sampling (seed {before.seed}, then {now.seed})"
    start, first_observation = run.opened.resumed_tokens, run.opened.resumed_observations
    if start > len(token_ids) or first_observation > len(observations):
        held = f"{len(token_ids)} tokens, {len(observations)} observations"
        return f"resumed at token {start}, observation {first_observation}; the log holds {held}"
    num_again = min(len(token_ids) - start, len(run.token_ids))
    again = slice(start, start + num_again)
    same_tokens = np.array_equal(token_ids[again], run.token_ids[:num_again])
    if not same_tokens or logprobs[again].tobytes() != run.logprobs[:num_again].tobytes():
        different = (token_ids[again] != run.token_ids[:num_again]) | (
            logprobs[again].view(np.uint32) != run.logprobs[:num_again].view(np.uint32)
        )
        return f"token {start + int(np.argmax(different))} was logged twice with different values"
    pairs = zip(observations[first_observation:], run.observations, strict=False)
    if not all(old == msgspec.structs.replace(new, slot=old.slot) for old, new in pairs):
        return "an observation was logged twice with different values"
    return None


def _sequence(
    request: Request, token_ids: Int32Array, observations: Sequence[ObserveRecord]
) -> tuple[Int32Array, BoolArray]:
    parts = [(request.prompt_ids, False)]
    done = 0
    for observation in observations:
        parts.append((token_ids[done : observation.after_tokens], True))
        parts.append((observation.token_ids, False))
        done = max(done, observation.after_tokens)
    parts.append((token_ids[done:], True))
    ids = np.concatenate([tokens for tokens, _ in parts]).astype(np.int32, copy=False)
    return ids, np.concatenate([np.full(len(tokens), is_sampled) for tokens, is_sampled in parts])


def _changed_column(run: Run, num_tokens: int, routes: Ragged | None, kept: Ragged | None) -> str | None:
    """Returns which column of a token that was logged before has other values now, or None."""
    start = run.opened.resumed_tokens
    num_again = min(num_tokens - start, len(run.token_ids))
    for name, held, now in (("routes", routes, run.routes), ("a kept set", kept, run.kept)):
        if held is None or now is None or num_again <= 0:
            continue
        if not held.part(start, start + num_again).is_same(now.part(0, num_again)):
            return f"{name} of tokens {start}..{start + num_again - 1} was logged twice with different values"
    return None


def _continued(held: Ragged | None, run: Ragged | None, num_repeated: int) -> Ragged | None:
    """Returns a column with what a later run adds to it."""
    if held is None or run is None:
        return held if run is None else run
    num_tokens = len(run.counts_T)
    return held.then(run.part(min(num_repeated, num_tokens), num_tokens))


def _missing_routes(
    request: Request, token_ids: Int32Array, observations: Sequence[ObserveRecord], routes: Ragged | None
) -> str | None:
    """Returns where the logged routes are not those of every position before a token, or None."""
    if not request.record_routes or not len(token_ids):
        return None
    mask = _sequence(request, token_ids, observations)[1]
    expected_T = np.diff(np.flatnonzero(mask), prepend=0)
    got_T = np.zeros(0, np.int32) if routes is None else routes.counts_T
    if np.array_equal(got_T, expected_T):
        return None
    if len(got_T) != len(expected_T):
        return f"{len(got_T)} tokens have routes, {len(expected_T)} are logged"
    token = int(np.argmax(got_T != expected_T))
    return f"token {token} brought routes of {got_T[token]} positions; {expected_T[token]} became known with it"


def _kept_sets(kept: Ragged | None, num_tokens: int) -> KeptSets:
    if kept is None:
        return KeptSets(counts_T=np.zeros(num_tokens, np.int32), token_ids=np.zeros(0, np.int32))
    return KeptSets(counts_T=kept.counts_T, token_ids=kept.values)


def _tidy(spans: list[tuple[int, int]], num_tokens: int) -> tuple[VersionSpan, ...]:
    """Returns spans without empty and repeated ones; the last keeps its place when no token follows it."""
    tidy: list[VersionSpan] = []
    for index, (position, version) in enumerate(spans):
        end = spans[index + 1][0] if index + 1 < len(spans) else num_tokens + 1
        if end > position and (not tidy or tidy[-1].policy_version != version):
            tidy.append(VersionSpan(first_token=position, policy_version=version))
    return tuple(tidy)
