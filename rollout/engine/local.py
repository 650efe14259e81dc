"""Our own engine: continuous batching over the model's explicit cache, keyed sampling, every token through the log.

One step of the loop:

    waiting --open--> prefilling, decoding --forward--> logits --draw--> tokens --log.append_step--> next step
                            ^                                                |
                            |                  end of a turn that calls a tool, once durable: environment.begin
                            +-- log.append_observe <-- environment.collect --+
                                                                             |
                                       finished --log.append_close--> once durable: environment.end, delivered

A step computes the next token of all that decode and chunks of those that prefill. A sequence keeps its cache while a
tool works for it unless others need the memory, and only when no sequence can run does the engine wait for a tool. Who
has a cache, who shares one and who computes what in a step is the scheduler's; no choice made there changes a bit of
any completion: rows do not depend on the batch and draws are keyed by seed and position.

Not here: who has a cache (scheduler.py), the forward (forward.py), a request's state (sequence.py), what an earlier
process logged (resume.py), drawing (draw.py), the log (rollout/wal.py), tools (rollout/tool_environment.py).
"""

import threading
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as SequenceOf

import numpy as np
import torch
from torch import Tensor

from rollforward.model.cache import block_tokens
from rollforward.model.config import ModelConfig
from rollforward.model.precision import PackedTensor
from rollforward.model.train_config import Precision
from rollforward.rollout.config import RolloutConfig
from rollforward.rollout.engine.draw import Drawn, draw_next, step_routes
from rollforward.rollout.engine.forward import ForwardRunner
from rollforward.rollout.engine.kv_file import WeightsId, weights_digest
from rollforward.rollout.engine.kv_store import KvState, KvStore
from rollforward.rollout.engine.preempt import save_sequences
from rollforward.rollout.engine.resume import LoggedRequests
from rollforward.rollout.engine.scheduler import CacheStats, Scheduler
from rollforward.rollout.engine.sequence import Sequence, split_sets
from rollforward.rollout.environment import Environment, Observation
from rollforward.rollout.errors import EngineError, EngineInputError, PausedError, WeightsError
from rollforward.rollout.types import Completion, Float32Array, Request, RequestId, ResumeStats, StopReason
from rollforward.rollout.wal import WalWriter
from rollforward.rollout.wal_recovery import RecoveredLog


class LocalEngine:
    """Samples with the model's own forward on this machine. One thread; one ``generate`` at a time.

    States: without weights -> idle (``load_weights``) <-> generating (``generate``) -> failed, when ``generate`` raised
    after it had started: every later ``generate`` and ``load_weights`` is refused. The log's next opening goes on.
    Idle -> poisoned, when ``load_weights`` failed half-way: nothing is served any more. Any
    state -> paused (``pause``, from any thread): the same, and ``save_kv`` may be called.
    """

    def __init__(
        self,
        model_config: ModelConfig,
        *,
        precision: Precision,
        config: RolloutConfig,
        log: WalWriter,
        recovered: RecoveredLog,
        environment: Environment | None = None,
        kv_store: KvStore | None = None,
        checks_integrity: bool = False,
    ) -> None:
        """Allocate nothing yet; the cache is sized by the first requests.

        Args:
            model_config: the model.
            precision: number formats of the forward.
            config: batching limits.
            log: this replica's open log.
            recovered: what the log held when it was opened; finished requests are answered from it.
            environment: answers the turns of requests with tools; the caller closes it. None refuses such requests.
            kv_store: where earlier processes saved key-values; None computes them again.
            checks_integrity: count slots, blocks and owners again after every step, for tests and when hunting a bug.
        """
        self._model_config = model_config
        self._config = config
        self._log = log
        self._logged = LoggedRequests(recovered, log, max_attempts=config.max_attempts, kv_store=kv_store)
        self._kv_store = kv_store
        self._environment = environment
        self._forward = ForwardRunner(model_config, precision)
        self._policy_version: int | None = None
        # None from a load until somebody asks which they are: that reads all of them and logs the version.
        self._weights: WeightsId | None = None
        self._poison: str | None = None
        self._scheduler = Scheduler(
            config, self._forward, block_tokens=block_tokens(model_config), restore=self._restore
        )
        self._checks_integrity = checks_integrity
        self._paused = threading.Event()
        self._is_generating = False  # stays true where generate raised
        self._taken: set[RequestId] = set()  # asked for before, of the steps that are still asked for
        self._last_seq = -1  # of the newest record appended
        self._closed: list[Sequence] = []
        self._calling: list[tuple[int, Sequence]] = []  # seq that ends the turn in the log, whose turn calls
        self._ending: list[Sequence] = []  # closed, but the environment was not told

    @property
    def policy_version(self) -> int | None:
        """Version of the weights in use; None before the first ``load_weights``."""
        return self._policy_version

    def load_weights(
        self, policy_version: int, tensors: Mapping[str, PackedTensor] | Iterator[tuple[str, PackedTensor]]
    ) -> None:
        """Take new weights: unpack the published bytes in place. See ``Engine``; the version is logged with the first
        ``fingerprints``."""
        self._require_unpoisoned()
        if self._is_generating:
            raise EngineError(
                f"weights {policy_version} came while requests are in flight; wait until generate returns, or replace"
                " the replica if it raised"
            )
        if self._policy_version is not None and policy_version <= self._policy_version:
            raise EngineError(f"weights {policy_version} came after {self._policy_version}; versions only grow")
        self._poison = f"loading weights {policy_version} failed half-way"
        self._forward.load(tensors if isinstance(tensors, Iterator) else tensors.items())
        unwritten = self._forward.never_written
        self._poison = (
            f"weights {policy_version} left {len(unwritten)} tensors unwritten ({', '.join(unwritten[:5])})"
            if unwritten
            else None
        )
        self._require_unpoisoned()
        self._policy_version, self._weights = policy_version, None
        self._scheduler.use_version(policy_version)
        if self._kv_store is not None:
            self._kv_store.discard_older(policy_version)

    @property
    def never_written(self) -> tuple[str, ...]:
        """Tensors that the last load did not write."""
        return self._forward.never_written

    def fingerprints(self) -> dict[str, str]:
        """Return the fingerprint of what the forward reads, by canonical name.

        Raises:
            EngineInputError: the log holds tokens of other weights under their number.
        """
        found = self._forward.fingerprints()
        if self._policy_version is not None:
            weights = WeightsId(self._policy_version, weights_digest(found))
            if self._weights is None:
                self._logged.check_weights(weights)
                self._log.append_version(weights.policy_version, weights=weights.digest)
            self._weights = weights
        return found

    @torch.no_grad()
    def score(self, token_ids: SequenceOf[int]) -> Float32Array:
        """Return the log-probs of all tokens but the first; see ``Engine``."""
        self._require_unpoisoned()
        if self._policy_version is None:
            raise EngineError("score was called before load_weights")
        return self._forward.score(token_ids)

    def held_tensors(self) -> Mapping[str, Tensor]:
        """Return the very tensors that the forward reads, by canonical name."""
        return self._forward.values

    def resume_stats(self) -> ResumeStats:
        """Return what was taken from the log of an earlier process so far."""
        return self._logged.stats

    def cache_stats(self) -> CacheStats:
        """Return how often caches were shared and taken back so far."""
        return self._scheduler.stats

    def check_integrity(self) -> None:
        """Count slots, blocks and owners again; see ``Scheduler.check_integrity``."""
        self._scheduler.check_integrity()

    def pause(self) -> None:
        """Stop for good at the next boundary of a step; see ``Engine``."""
        self._paused.set()
        if self._environment is not None:
            self._environment.wake()

    @torch.no_grad()
    def save_kv(self, store: KvStore, *, has_time: Callable[[], bool] = lambda: True) -> int:
        """Save the key-values of unfinished requests after ``pause``; see ``Engine``."""
        if not self._paused.is_set():
            raise EngineError("save_kv was called on an engine that is not paused; call pause and wait for generate")
        if self._policy_version is None:
            return 0
        return save_sequences(
            store,
            self._scheduler.opened,
            self._forward.storage,
            self._model_config,
            log=self._log,
            weights=self._weights_in_use(),
            has_time=has_time,
        )

    @torch.no_grad()
    def generate(self, requests: SequenceOf[Request]) -> list[Completion]:
        """Sample every request to its end; see ``Engine``."""
        if self._is_generating:
            raise EngineError("an earlier generate raised with requests in flight; open a new replica on its log")
        self._require_unpoisoned()
        version = self._policy_version
        if version is None:
            raise EngineError(
                "generate was called before load_weights; a replica gets traffic after its acknowledgement"
            )
        self._weights_in_use()  # so the version is in the log before a token of it
        self._check(requests, version)
        self._stop_if_paused()
        self._scheduler.reserve(max((request.max_tokens for request in requests), default=0))
        self._is_generating = True
        oldest = min((request.id.step for request in requests), default=0)
        self._taken = {one for one in self._taken if one.step >= oldest} | {request.id for request in requests}
        done: dict[RequestId, Completion] = {}
        for request in requests:
            taken = self._logged.take(request, version)
            if isinstance(taken, Completion):
                done[request.id] = taken
            elif taken.stop_reason is not None:
                done[request.id] = taken.completion()
                self._end(taken)
            else:
                self._resume(taken)
                self._scheduler.enqueue(taken)
        self._closed = []
        while self._scheduler.has_work:
            self._stop_if_paused()
            self._admit()
            self._begin_calls()
            self._tell_ends()
            self._observe()
            self._step(version)
            if self._checks_integrity:
                self.check_integrity()
        if self._closed:
            self._log.wait_durable(max(sequence.close_seq for sequence in self._closed))
        self._tell_ends()
        done |= {sequence.request.id: sequence.completion() for sequence in self._closed}
        self._is_generating = False
        return [done[request.id] for request in requests]

    def _require_unpoisoned(self) -> None:
        if self._poison is not None:
            raise WeightsError(
                f"{self._poison}: the engine holds a mixture of weights and serves nothing any more. Open a new replica"
                " on its log"
            )

    def _stop_if_paused(self) -> None:
        if not self._paused.is_set():
            return
        if self._last_seq >= 0:
            self._log.wait_durable(self._last_seq)
        raise PausedError("the engine was paused; what was drawn is durable and the log's next opening goes on with it")

    def _check(self, requests: SequenceOf[Request], version: int) -> None:
        seen: set[RequestId] = set()
        for request in requests:
            if request.policy_version != version:
                raise EngineInputError(
                    f"request {request.id} asks for weights {request.policy_version}, the engine"
                    f" holds {version}; publish them first"
                )
            if request.max_tokens > self._model_config.max_position_embeddings:
                raise EngineInputError(
                    f"request {request.id} may reach {request.max_tokens} tokens; the model has max_position_embeddings"
                    f" = {self._model_config.max_position_embeddings}. Lower sampling.max_new_tokens, let tools say"
                    " less, or shorten the prompt"
                )
            if request.tools is not None and self._environment is None:
                raise EngineInputError(
                    f"request {request.id} uses the tools of task {request.tools.task}, but this engine has none."
                    " Give the replica an environment"
                )
            if request.id in seen or request.id in self._taken:
                raise EngineInputError(
                    f"request {request.id} was given twice; an identity is sampled once. What became of it is in the"
                    " log: a new replica answers from there"
                )
            seen.add(request.id)
            self._scheduler.check(request)
            self._logged.check(request)

    def _restore(self, sequence: Sequence) -> KvState | None:
        return self._logged.restore(sequence, self._weights_in_use)

    def _weights_in_use(self) -> WeightsId:
        if self._weights is None:
            self.fingerprints()
        assert self._weights is not None, "generate checks that weights are loaded"
        return self._weights

    def _admit(self) -> None:
        """Open waiting sequences while there is room; those that were preempted come first."""
        self._scheduler.resume_preempted()
        while (sequence := self._scheduler.next_fresh()) is not None:
            self._last_seq = self._log.append_open(
                sequence.request,
                slot=sequence.log_slot,
                attempt=sequence.attempt,
                resumed_tokens=sequence.num_sampled,
                resumed_observations=len(sequence.observed),
            )
            if sequence.turn_ids.size:
                # The last token in the log may have ended its turn; what followed was lost.
                self._after_draw(sequence, self._last_seq)
            if sequence.stop_reason is None:
                self._scheduler.enter(sequence)

    def _observe(self) -> None:
        """Append the answers that came; wait for one, or for a pause, only where nothing else can be done."""
        observing = {sequence.request.id: sequence for sequence in self._scheduler.observing()}
        if not observing:
            return
        assert self._environment is not None, "_check refuses tools without it"
        for observation in self._environment.collect(block=not self._scheduler.can_run):
            sequence = observing.pop(observation.id, None)
            if sequence is None:
                raise EngineError(f"the environment answered {observation.id}, which does not wait for an answer")
            if observation.failure is not None:
                sequence.is_observing = False
                sequence.failure, sequence.detail = observation.failure, observation.detail
                self._close(sequence, StopReason.ABORTED)
                continue
            _check_observation(sequence.request, observation)
            self._last_seq = self._log.append_observe(
                sequence.log_slot, observation.token_ids, command_position=observation.command_position
            )
            sequence.observe(observation.token_ids, command_position=observation.command_position)
            self._scheduler.observed(sequence)

    def _step(self, version: int) -> None:
        """Compute what is due, draw where a chunk reaches the end of its sequence, and log the draws."""
        chunks = self._scheduler.plan()
        if not chunks:
            return
        streams_BMD = self._forward.run(chunks)
        self._scheduler.computed(chunks)
        drawing: list[Sequence] = []
        rows: list[int] = []
        for row, (sequence, _) in enumerate(chunks):
            if sequence.num_missing == 0:
                group = [sequence, *self._scheduler.release_followers(sequence)]
                drawing += group
                rows += [row] * len(group)
        if drawing:
            distinct = sorted(set(rows))
            hidden_ND = self._forward.hidden(streams_BMD[distinct])
            logits_NV = self._forward.logits(hidden_ND)
            compact = {row: index for index, row in enumerate(distinct)}
            row_B = [compact[row] for row in rows]
            self._log_step(drawing, draw_next(drawing, logits_NV[row_B], hidden_ND[row_B], self._forward.head), version)

    def _log_step(self, sequences: list[Sequence], drawn: Drawn, version: int) -> None:
        """Log the next token of every sequence, and see who goes on."""
        slots = np.array([sequence.log_slot for sequence in sequences], dtype=np.uint16)
        self._last_seq = self._log.append_step(
            slots,
            drawn.token_ids,
            drawn.logprobs,
            policy_version=version,
            routes=step_routes(sequences),
            kept=drawn.kept,
        )
        seq = self._last_seq
        sets = [None] * len(sequences) if drawn.kept is None else split_sets(drawn.kept)
        tokens, logprobs = drawn.token_ids.tolist(), drawn.logprobs.tolist()
        for sequence, token, logprob, kept_ids in zip(sequences, tokens, logprobs, sets, strict=True):
            sequence.accept(token, logprob, kept_ids)
            # Not _last_seq: a CLOSE of the sequence before may have come after the tokens.
            self._after_draw(sequence, seq)

    def _after_draw(self, sequence: Sequence, seq: int) -> None:
        """Close a sequence whose last sampled token was its end, or note that its turn calls; `seq` has the token."""
        request = sequence.request
        if sequence.token_ids[-1] != self._model_config.eos_token_id:
            if not sequence.has_budget:
                self._close(sequence, StopReason.LENGTH)
            return
        turn_ids = sequence.turn_ids
        if self._environment is None or request.tools is None or not self._environment.is_call(request, turn_ids):
            self._close(sequence, StopReason.EOS)
        elif not sequence.has_budget:
            self._close(sequence, StopReason.LENGTH)
        elif sequence.turn >= request.tools.max_turns:
            self._close(sequence, StopReason.TURNS)
        else:
            sequence.is_observing = True
            self._calling.append((seq, sequence))

    def _begin_calls(self) -> None:
        """Let the environment answer the turns that call. A call is a publication, so their ends are durable first."""
        if not self._calling:
            return
        assert self._environment is not None, "_after_draw asks it what calls"
        self._log.wait_durable(max(seq for seq, _ in self._calling))
        for _, sequence in self._calling:
            self._environment.begin(sequence.request, sequence.turn_ids, **_place(sequence))
        self._calling = []

    def _tell_ends(self) -> None:
        """Let the environment end what has ended and is durable by now; like a call it is a publication. Nobody waits
        for it."""
        durable_seq = self._log.durable_seq if self._ending else -1
        for sequence in self._ending:
            if sequence.close_seq <= durable_seq:
                self._end(sequence)
        self._ending = [sequence for sequence in self._ending if sequence.close_seq > durable_seq]

    def _end(self, sequence: Sequence) -> None:
        if self._environment is not None and sequence.request.tools is not None:
            self._environment.end(sequence.request, sequence.turn_ids, **_place(sequence))

    def _resume(self, sequence: Sequence) -> None:
        """What an earlier process left for a request that goes on may not wait until its next call."""
        if self._environment is not None and sequence.observed:
            self._environment.resume(sequence.request, **_place(sequence))

    def _close(self, sequence: Sequence, stop_reason: StopReason) -> None:
        sequence.stop_reason = stop_reason
        self._last_seq = sequence.close_seq = self._log.append_close(
            sequence.log_slot, stop_reason, failure=sequence.failure
        )
        self._scheduler.close(sequence)
        self._closed.append(sequence)
        if sequence.request.tools is not None:
            self._ending.append(sequence)
        if self._kv_store is not None:
            self._kv_store.discard(sequence.request.id)


def _place(sequence: Sequence) -> dict[str, int]:
    """Where a sequence is, as the environment is told."""
    return {"turn": sequence.turn, "attempt": sequence.attempt, "position": sequence.command_position}


def _check_observation(request: Request, observation: Observation) -> None:
    assert request.tools is not None, "only a request with tools waits for an answer"
    if not 0 < observation.token_ids.size <= request.tools.max_observation_tokens:
        raise EngineError(
            f"the environment answered {request.id} with {observation.token_ids.size} tokens; an answer has between 1"
            f" and tools.max_observation_tokens = {request.tools.max_observation_tokens}"
        )
