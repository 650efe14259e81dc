"""Our own engine: continuous batching over the model's explicit cache, keyed sampling, every token through the log.

One step of the loop:

    waiting --admit--> prefilling, decoding --forward--> logits --draw--> tokens --log.append_step--> next step
                            ^                                                |
                            |                  end of a turn that calls a tool, once durable: environment.begin
                            +-- log.append_observe <-- environment.collect --+
                                                                             |
                                                     finished --log.append_close--> delivered once durable

A step computes the next token of all that decode and chunks of those that prefill. A sequence keeps its cache while a
tool works for it, and only when no sequence can run does the engine wait for a tool. Members of a group have the same
prompt: one of them (the leader) computes its prefill, the others copy its cache. No choice made here changes a bit of
any completion: rows do not depend on the batch and draws are keyed by seed and position.

Not here: the forward (forward.py), memory ownership (pool.py), a request's state (sequence.py), what an earlier process
logged (resume.py), drawing (draw.py), the log (rollout/wal.py), tools (rollout/tool_environment.py).
"""

from collections import deque
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf

import numpy as np
import torch
from torch import Tensor

from rollforward.model.cache import block_tokens
from rollforward.model.config import ModelConfig
from rollforward.model.precision import PackedTensor
from rollforward.model.train_config import Precision
from rollforward.rollout.config import RolloutConfig
from rollforward.rollout.engine.draw import draw_next, step_routes
from rollforward.rollout.engine.forward import Chunk, ForwardRunner
from rollforward.rollout.engine.pool import CachePool
from rollforward.rollout.engine.resume import LoggedRequests
from rollforward.rollout.engine.sequence import Sequence, split_sets
from rollforward.rollout.environment import Environment, Observation
from rollforward.rollout.errors import EngineError, EngineInputError
from rollforward.rollout.types import Completion, Request, RequestId, ResumeStats, StopReason
from rollforward.rollout.wal import WalWriter
from rollforward.rollout.wal_recovery import RecoveredLog


class LocalEngine:
    """Samples with the model's own forward on this machine. One thread; one ``generate`` at a time.

    States: without weights -> idle (``load_weights``) <-> generating (``generate``) -> failed, when ``generate`` raised
    after it had started: every later ``generate`` and ``load_weights`` is refused. The log's next opening goes on.
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
    ) -> None:
        """Allocate nothing yet; the cache is sized by the first requests.

        Args:
            model_config: the model.
            precision: number formats of the forward.
            config: batching limits.
            log: this replica's open log.
            recovered: what the log held when it was opened; finished requests are answered from it.
            environment: answers the turns of requests with tools; the caller closes it. None refuses such requests.
        """
        self._model_config = model_config
        self._config = config
        self._log = log
        self._logged = LoggedRequests(recovered, log, max_attempts=config.max_attempts)
        self._environment = environment
        self._forward = ForwardRunner(model_config, precision)
        self._policy_version: int | None = None
        self._pool = CachePool(num_slots=0, num_blocks=1, block_tokens=block_tokens(model_config))
        self._cache_tokens = 0
        self._is_generating = False  # stays true where generate raised
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        self._calling: list[tuple[int, Sequence]] = []  # seq that ends the turn in the log, whose turn calls

    @property
    def policy_version(self) -> int | None:
        """Version of the weights in use; None before the first ``load_weights``."""
        return self._policy_version

    def load_weights(self, policy_version: int, tensors: Mapping[str, PackedTensor]) -> None:
        """Take new weights: unpack the published bytes and log the version. See ``Engine``."""
        if self._is_generating:
            raise EngineError(
                f"weights {policy_version} came while requests are in flight; wait until generate returns, or replace"
                " the replica if it raised"
            )
        if self._policy_version is not None and policy_version <= self._policy_version:
            raise EngineError(f"weights {policy_version} came after {self._policy_version}; versions only grow")
        self._forward.load(tensors)
        self._policy_version = policy_version
        self._log.append_version(policy_version)

    def held_tensors(self) -> Mapping[str, Tensor]:
        """Return the very tensors that the forward reads, by canonical name."""
        return self._forward.values

    def resume_stats(self) -> ResumeStats:
        """Return what was taken from the log of an earlier process so far."""
        return self._logged.stats

    @torch.no_grad()
    def generate(self, requests: SequenceOf[Request]) -> list[Completion]:
        """Sample every request to its end; see ``Engine``."""
        if self._is_generating:
            raise EngineError("an earlier generate raised with requests in flight; open a new replica on its log")
        version = self._policy_version
        if version is None:
            raise EngineError(
                "generate was called before load_weights; a replica gets traffic after its acknowledgement"
            )
        self._check(requests, version)
        self._reserve(requests)
        self._is_generating = True
        done: dict[RequestId, Completion] = {}
        for request in requests:
            taken = self._logged.take(request, version)
            if isinstance(taken, Sequence):
                self._waiting.append(taken)
            else:
                done[request.id] = taken
        closed: list[Sequence] = []
        while self._waiting or self._running:
            self._admit()
            self._begin_calls()
            self._observe()
            self._step(version)
            closed += [sequence for sequence in self._running if sequence.stop_reason is not None]
            self._running = [sequence for sequence in self._running if sequence.stop_reason is None]
        if closed:
            self._log.wait_durable(max(sequence.close_seq for sequence in closed))
        done |= {sequence.request.id: sequence.completion(version) for sequence in closed}
        self._is_generating = False
        return [done[request.id] for request in requests]

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
            if request.id in seen:
                raise EngineInputError(f"request {request.id} was given twice; an identity is sampled once")
            seen.add(request.id)
            self._logged.check(request)

    def _reserve(self, requests: SequenceOf[Request]) -> None:
        """Make the cache large enough for a full batch of the longest request; only while nothing is in flight."""
        longest = max((request.max_tokens for request in requests), default=0)
        if longest <= self._cache_tokens:
            return
        num_slots = self._config.max_batch_requests
        num_blocks = 1 + num_slots * self._pool.blocks_for(longest)
        self._pool = CachePool(
            num_slots=num_slots, num_blocks=num_blocks, block_tokens=block_tokens(self._model_config)
        )
        self._forward.allocate(num_slots=num_slots, num_blocks=num_blocks)
        self._cache_tokens = longest

    def _admit(self) -> None:
        """Move waiting sequences to slots while there is room; equal tokens follow one leader."""
        leaders = {
            _leader_key(sequence): sequence
            for sequence in self._running
            if sequence.can_run and sequence.num_cached == 0
        }
        while self._waiting and self._pool.can_acquire(self._waiting[0].request.max_tokens):
            sequence = self._waiting.popleft()
            sequence.slot, sequence.blocks = self._pool.acquire(sequence.request.max_tokens)
            seq = self._log.append_open(
                sequence.request,
                slot=sequence.slot,
                attempt=sequence.attempt,
                resumed_tokens=sequence.num_sampled,
                resumed_observations=len(sequence.observed),
            )
            self._running.append(sequence)
            if sequence.turn_ids.size:
                # The last token in the log may have ended its turn; what followed was lost.
                self._after_draw(sequence, seq)
            if sequence.can_run:
                leader = leaders.setdefault(_leader_key(sequence), sequence)
                if leader is not sequence:
                    sequence.is_following = True
                    leader.followers.append(sequence)

    def _observe(self) -> None:
        """Append the answers that came; wait for one only where nothing else can be done."""
        observing = {sequence.request.id: sequence for sequence in self._running if sequence.is_observing}
        if not observing:
            return
        assert self._environment is not None, "_check refuses tools without it"
        must_wait = not any(sequence.can_run or sequence.stop_reason is not None for sequence in self._running)
        for observation in self._environment.collect(block=must_wait):
            sequence = observing.pop(observation.id, None)
            if sequence is None:
                raise EngineError(f"the environment answered {observation.id}, which does not wait for an answer")
            if observation.failure is not None:
                sequence.is_observing = False
                sequence.failure, sequence.detail = observation.failure, observation.detail
                self._close(sequence, StopReason.ABORTED)
                continue
            _check_observation(sequence.request, observation)
            self._log.append_observe(
                sequence.slot, observation.token_ids, command_position=observation.command_position
            )
            sequence.observe(observation.token_ids)

    def _step(self, version: int) -> None:
        """Compute what is due, draw where a chunk reaches the end of its sequence, and log the draws."""
        chunks = self._next_chunks()
        if not chunks:
            return
        streams_BMD = self._forward.run(chunks)
        drawing: list[Sequence] = []
        rows: list[int] = []
        for row, (sequence, _) in enumerate(chunks):
            if sequence.num_missing == 0:
                group = [sequence, *self._release_followers(sequence)]
                drawing += group
                rows += [row] * len(group)
        if drawing:
            distinct = sorted(set(rows))
            logits_BV = self._forward.logits(streams_BMD[distinct])
            compact = {row: index for index, row in enumerate(distinct)}
            self._draw(drawing, logits_BV[[compact[row] for row in rows]], version)

    def _next_chunks(self) -> list[Chunk]:
        """Return what the next step computes: every sequence that decodes, then at most prefill_chunk_tokens."""
        running = [sequence for sequence in self._running if sequence.can_run]
        chunks = [Chunk(sequence, 1) for sequence in running if sequence.num_missing == 1]
        budget = self._config.prefill_chunk_tokens
        for sequence in running:
            if sequence.num_missing > 1 and budget > 0:
                length = min(sequence.num_missing, budget)
                chunks.append(Chunk(sequence, length))
                budget -= length
        return chunks

    def _release_followers(self, leader: Sequence) -> list[Sequence]:
        followers, leader.followers = leader.followers, []
        if followers:
            self._forward.copy(leader, followers)
        for follower in followers:
            follower.is_following = False
        return followers

    def _draw(self, sequences: list[Sequence], logits_BV: Tensor, version: int) -> None:
        """Draw the next token of every sequence, log the step, and see who goes on."""
        drawn = draw_next(sequences, logits_BV)
        slots = np.array([sequence.slot for sequence in sequences], dtype=np.uint16)
        seq = self._log.append_step(
            slots,
            drawn.token_ids,
            drawn.logprobs,
            policy_version=version,
            routes=step_routes(sequences),
            kept=drawn.kept,
        )
        sets = [None] * len(sequences) if drawn.kept is None else split_sets(drawn.kept)
        tokens, logprobs = drawn.token_ids.tolist(), drawn.logprobs.tolist()
        for sequence, token, logprob, kept_ids in zip(sequences, tokens, logprobs, sets, strict=True):
            sequence.accept(token, logprob, kept_ids)
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
            self._environment.begin(sequence.request, sequence.turn_ids, turn=sequence.turn)
        self._calling = []

    def _close(self, sequence: Sequence, stop_reason: StopReason) -> None:
        sequence.stop_reason = stop_reason
        sequence.close_seq = self._log.append_close(sequence.slot, stop_reason, failure=sequence.failure)
        self._pool.release(sequence.slot, sequence.blocks)


def _leader_key(sequence: Sequence) -> tuple[bool, tuple[int, ...]]:
    return sequence.request.record_routes, tuple(sequence.token_ids)


def _check_observation(request: Request, observation: Observation) -> None:
    assert request.tools is not None, "only a request with tools waits for an answer"
    if not 0 < observation.token_ids.size <= request.tools.max_observation_tokens:
        raise EngineError(
            f"the environment answered {request.id} with {observation.token_ids.size} tokens; an answer has between 1"
            f" and tools.max_observation_tokens = {request.tools.max_observation_tokens}"
        )
