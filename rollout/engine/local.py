"""Our own engine: continuous batching over the model's explicit cache, keyed sampling, every token through the log.

One step of the loop:

    waiting --admit--> prefilling / decoding --forward--> logits --draw--> tokens --log.append_step--> next step
                                                                             |
                                                     finished --log.append_close--> delivered once durable

Members of a group have the same prompt: one of them (the leader) computes its prefill, the others copy its cache. No
choice made here changes a bit of any completion: rows do not depend on the batch and draws are keyed by seed and
position.

Not here: memory ownership (pool.py), a request's state (sequence.py), drawing (sampler.py), the log (rollout/wal.py).
"""

from collections import deque
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf

import numpy as np
import torch
from torch import Tensor

from rollforward.kernels.loss.logprob import token_logprob
from rollforward.model.cache import allocate_cache, block_tokens, copy_sequence
from rollforward.model.config import ModelConfig
from rollforward.model.precision import PackedTensor, unpack_published
from rollforward.model.segments import Segment, SegmentBatch
from rollforward.model.train_config import Precision
from rollforward.model.transformer import Transformer
from rollforward.model.weights import ModelWeights, build_weights
from rollforward.rollout.config import RolloutConfig
from rollforward.rollout.engine.pool import CachePool
from rollforward.rollout.engine.sampler import draw_tokens, scaled_logits, signed_seed
from rollforward.rollout.engine.sequence import Sequence, failed_completion, stop_after
from rollforward.rollout.errors import EngineError, EngineInputError
from rollforward.rollout.types import Completion, FailureType, Request, RequestId, StopReason
from rollforward.rollout.wal import WalWriter
from rollforward.rollout.wal_recovery import RecoveredLog, RecoveredRequest


class LocalEngine:
    """Samples with the model's own forward on this machine. One thread; one ``generate`` at a time.

    States: without weights -> idle (``load_weights``) <-> generating (``generate``) -> failed, when ``generate`` raised
    after it had started: requests stay in flight and every later call is refused. The log's next opening goes on.
    """

    def __init__(
        self,
        model_config: ModelConfig,
        *,
        precision: Precision,
        config: RolloutConfig,
        log: WalWriter,
        recovered: RecoveredLog,
    ) -> None:
        """Allocate nothing yet; the cache is sized by the first requests.

        Args:
            model_config: the model.
            precision: number formats of the forward.
            config: batching limits.
            log: this replica's open log.
            recovered: what the log held when it was opened; finished requests are answered from it.
        """
        self._model_config = model_config
        self._transformer = Transformer(model_config, precision)
        self._config = config
        self._log = log
        self._recovered = dict(recovered.requests)
        self._failed = dict(recovered.failed)
        self._values: dict[str, Tensor] = {}
        self._weights: ModelWeights | None = None
        self._policy_version: int | None = None
        self._pool = CachePool(num_slots=0, num_blocks=1, block_tokens=block_tokens(model_config))
        self._storage: dict[str, Tensor] = {}
        self._cache_tokens = 0
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []

    @property
    def policy_version(self) -> int | None:
        """Version of the weights in use; None before the first ``load_weights``."""
        return self._policy_version

    def load_weights(self, policy_version: int, tensors: Mapping[str, PackedTensor]) -> None:
        """Take new weights: unpack the published bytes and log the version. See ``Engine``."""
        if self._running or self._waiting:
            raise EngineError(
                f"weights {policy_version} came while requests are in flight; wait until generate returns, or replace"
                " the replica if it raised"
            )
        if self._policy_version is not None and policy_version <= self._policy_version:
            raise EngineError(f"weights {policy_version} came after {self._policy_version}; versions only grow")
        # Own memory, and the very tensors that the forward reads: what is hashed is what is sampled with.
        self._values = {name: unpack_published(packed).clone() for name, packed in tensors.items()}
        self._weights = build_weights(self._model_config, self._values)
        self._policy_version = policy_version
        self._log.append_version(policy_version)

    def held_tensors(self) -> Mapping[str, Tensor]:
        """Return the very tensors that the forward reads, by canonical name."""
        return self._values

    @torch.no_grad()
    def generate(self, requests: SequenceOf[Request]) -> list[Completion]:
        """Sample every request to its end; see ``Engine``."""
        if self._running or self._waiting:
            raise EngineError("an earlier generate raised with requests in flight; open a new replica on its log")
        version = self._policy_version
        if version is None:
            raise EngineError(
                "generate was called before load_weights; a replica gets traffic after its acknowledgement"
            )
        self._check(requests, version)
        done: dict[RequestId, Completion] = {}
        self._reserve(requests)
        for request in requests:
            self._enqueue(request, version, done)
        closed: list[Sequence] = []
        while self._waiting or self._running:
            self._admit()
            self._step(version)
            closed += [sequence for sequence in self._running if sequence.stop_reason is not None]
            self._running = [sequence for sequence in self._running if sequence.stop_reason is None]
        if closed:
            self._log.wait_durable(max(sequence.close_seq for sequence in closed))
        done |= {sequence.request.id: sequence.completion(version) for sequence in closed}
        return [done[request.id] for request in requests]

    def _check(self, requests: SequenceOf[Request], version: int) -> None:
        seen: set[RequestId] = set()
        for request in requests:
            if request.policy_version != version:
                raise EngineInputError(
                    f"request {request.id} asks for weights {request.policy_version}, the engine"
                    f" holds {version}; publish them first"
                )
            longest = request.prompt_ids.size + request.sampling.max_new_tokens
            if longest > self._model_config.max_position_embeddings:
                raise EngineInputError(
                    f"request {request.id} may reach {longest} tokens; the model has max_position_embeddings ="
                    f" {self._model_config.max_position_embeddings}. Lower sampling.max_new_tokens or"
                    " shorten the prompt"
                )
            if request.sampling.top_p != 1.0 or request.sampling.top_k != 0:
                raise EngineInputError(
                    f"request {request.id} has top_p={request.sampling.top_p} and"
                    f" top_k={request.sampling.top_k}; this engine samples"
                    " the whole distribution. Set top_p=1 top_k=0"
                )
            if request.id in seen:
                raise EngineInputError(f"request {request.id} was given twice; an identity is sampled once")
            seen.add(request.id)
            held = self._recovered.get(request.id)
            if held is not None and request.id not in self._failed:
                _check_same_request(request, held)

    def _reserve(self, requests: SequenceOf[Request]) -> None:
        """Make the cache large enough for a full batch of the longest request; only while nothing is in flight."""
        longest = max((request.prompt_ids.size + request.sampling.max_new_tokens for request in requests), default=0)
        if longest <= self._cache_tokens:
            return
        num_slots = self._config.max_batch_requests
        num_blocks = 1 + num_slots * self._pool.blocks_for(longest)
        self._pool = CachePool(
            num_slots=num_slots, num_blocks=num_blocks, block_tokens=block_tokens(self._model_config)
        )
        self._storage = allocate_cache(self._model_config, num_slots=num_slots, num_blocks=num_blocks)
        self._cache_tokens = longest

    def _enqueue(self, request: Request, version: int, done: dict[RequestId, Completion]) -> None:
        """Queue a request, or answer it from the log."""
        held = self._recovered.pop(request.id, None)
        if request.id in self._failed:
            num_tokens = 0 if held is None else len(held.token_ids)
            seq = self._log.append_close_recovered(
                request.id, StopReason.ABORTED, num_tokens=num_tokens, failure=FailureType.INFRA
            )
            self._log.wait_durable(seq)
            done[request.id] = failed_completion(request, version)
            return
        if held is None:
            self._waiting.append(Sequence(request, request.prompt_ids.tolist(), []))
            return
        if held.close is not None:
            done[request.id] = Completion(
                id=request.id,
                token_ids=held.token_ids,
                sampled_mask=np.ones(held.token_ids.size, dtype=np.bool_),
                behavior_logprobs=held.behavior_logprobs,
                policy_version=held.version_spans[0].policy_version,
                stop_reason=held.close.stop_reason,
                failure=held.close.failure,
            )
            return
        sequence = Sequence(request, held.sequence()[0].tolist(), held.behavior_logprobs.tolist())
        if held.token_ids.size:
            # The last token may have been its end; only the CLOSE record was lost.
            last = int(held.token_ids[-1])
            sequence.stop_reason = stop_after(request, last, sequence.num_sampled, self._model_config.eos_token_id)
        self._waiting.append(sequence)

    def _admit(self) -> None:
        """Move waiting sequences to slots while there is room; equal tokens follow one leader."""
        leaders = {
            tuple(sequence.token_ids): sequence
            for sequence in self._running
            if not sequence.is_following and sequence.num_cached == 0
        }
        while self._waiting and self._pool.can_acquire(self._waiting[0].max_tokens):
            sequence = self._waiting.popleft()
            sequence.slot, sequence.blocks = self._pool.acquire(sequence.max_tokens)
            self._log.append_open(sequence.request, slot=sequence.slot, resumed_tokens=sequence.num_sampled)
            self._running.append(sequence)
            if sequence.stop_reason is not None:
                self._close(sequence)
                continue
            leader = leaders.setdefault(tuple(sequence.token_ids), sequence)
            if leader is not sequence:
                sequence.is_following = True
                leader.followers.append(sequence)

    def _step(self, version: int) -> None:
        """Run one forward over chunks of prefill if any is due, else over all decoding sequences; draw and log."""
        chunks = self._next_chunks()
        if not chunks:
            return
        segments = [
            Segment(start=sequence.num_cached, length=length, slot=sequence.slot, blocks=sequence.blocks)
            for sequence, length in chunks
        ]
        batch = SegmentBatch(segments, window=self._model_config.sliding_window)
        token_T = torch.tensor(
            [
                token
                for sequence, length in chunks
                for token in sequence.token_ids[sequence.num_cached : sequence.num_cached + length]
            ]
        )
        assert self._weights is not None, "generate checks that weights are loaded"
        streams = self._transformer.streams(self._weights, token_T, batch, self._storage)
        drawing: list[Sequence] = []
        rows: list[int] = []
        for row, (sequence, length) in enumerate(chunks):
            sequence.num_cached += length
            if sequence.num_missing == 0:
                group = [sequence, *self._release_followers(sequence)]
                drawing += group
                rows += [row] * len(group)
        if drawing:
            last = streams[batch.last_token_B[sorted(set(rows))]]
            hidden_BD = self._transformer.hidden(self._weights, last)
            logits_BV = self._transformer.logits(self._weights, hidden_BD)
            compact = {row: index for index, row in enumerate(sorted(set(rows)))}
            self._draw(drawing, logits_BV[[compact[row] for row in rows]], version)

    def _next_chunks(self) -> list[tuple[Sequence, int]]:
        """Return (sequence, tokens to compute): prefill first, at most prefill_chunk_tokens in all; else decode."""
        active = [sequence for sequence in self._running if not sequence.is_following and sequence.stop_reason is None]
        budget = self._config.prefill_chunk_tokens
        chunks: list[tuple[Sequence, int]] = []
        for sequence in active:
            if sequence.num_missing > 1 and budget > 0:
                length = min(sequence.num_missing, budget)
                chunks.append((sequence, length))
                budget -= length
        return chunks or [(sequence, 1) for sequence in active]

    def _release_followers(self, leader: Sequence) -> list[Sequence]:
        followers, leader.followers = leader.followers, []
        if followers:
            targets = [(follower.slot, follower.blocks) for follower in followers]
            copy_sequence(self._storage, (leader.slot, leader.blocks), targets)
        for follower in followers:
            follower.is_following = False
            follower.num_cached = leader.num_cached
        return followers

    def _draw(self, sequences: list[Sequence], logits_BV: Tensor, version: int) -> None:
        """Draw the next token of every sequence, log the step, close those that end."""
        seed_B = torch.tensor([signed_seed(sequence.request.seed) for sequence in sequences])
        position_B = torch.tensor([len(sequence.token_ids) for sequence in sequences])
        temperature_B = torch.tensor([sequence.request.sampling.temperature for sequence in sequences])
        token_B = draw_tokens(logits_BV, seed_B, position_B, temperature_B)
        logprob_B, _ = token_logprob(scaled_logits(logits_BV, temperature_B), token_B, temperature=1.0)
        tokens, logprobs = token_B.numpy().astype(np.int32), logprob_B.numpy()
        slots = np.array([sequence.slot for sequence in sequences], dtype=np.uint16)
        self._log.append_step(slots, tokens, logprobs, policy_version=version)
        for sequence, token, logprob in zip(sequences, tokens.tolist(), logprobs.tolist(), strict=True):
            sequence.accept(token, logprob, self._model_config.eos_token_id)
            if sequence.stop_reason is not None:
                self._close(sequence)

    def _close(self, sequence: Sequence) -> None:
        assert sequence.stop_reason is not None, "a sequence is closed with its reason"
        sequence.close_seq = self._log.append_close(sequence.slot, sequence.stop_reason)
        self._pool.release(sequence.slot, sequence.blocks)


def _check_same_request(request: Request, held: RecoveredRequest) -> None:
    logged = held.request
    same = (
        np.array_equal(request.prompt_ids, logged.prompt_ids)
        and request.seed == logged.seed
        and request.sampling == logged.sampling
    )
    if not same:
        raise EngineInputError(
            f"request {request.id} is in the log with another prompt, seed or sampling; it belongs to another run."
            " Use a fresh run_dir, or resume with the configuration that wrote the log"
        )
