"""The engine protocol: what a rollout replica asks of whatever samples tokens.

``local.py`` is our own engine. Another one (a server at scale) implements the same protocol in a file beside it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

from torch import Tensor

from rollforward.model.precision import PackedTensor
from rollforward.rollout.engine.kv_store import KvStore
from rollforward.rollout.types import Completion, Float32Array, Request, ResumeStats


class Engine(Protocol):
    """Samples completions under one weight version at a time."""

    @property
    def policy_version(self) -> int | None:
        """Version of the weights in use; None before the first ``load_weights``."""
        ...

    def load_weights(
        self, policy_version: int, tensors: Mapping[str, PackedTensor] | Iterator[tuple[str, PackedTensor]]
    ) -> None:
        """Take new weights into the tensors that are there, one at a time; nothing may be in flight.

        Args:
            policy_version: greater than the version in use.
            tensors: canonical names and published bytes, all of the model, as they were checked.

        Raises:
            EngineError: requests are in flight or the version does not grow; nothing was touched.
            WeightsError: a tensor was left unwritten, is not of the model, or an earlier load failed: the engine is
                poisoned, and serves nothing any more. Whatever else is raised while tensors are written poisons too.
        """
        ...

    @property
    def never_written(self) -> tuple[str, ...]:
        """Tensors that the last load did not write, by canonical name."""
        ...

    def fingerprints(self) -> dict[str, str]:
        """Return the fingerprint of every tensor, by canonical name, computed from what the forward reads. The first
        call after a load writes the version and the weights' digest into the log.

        Raises:
            EngineInputError: the log holds tokens of other weights under their number.
        """
        ...

    def score(self, token_ids: Sequence[int]) -> Float32Array:
        """Return the log-probs of all tokens but the first, [T - 1], computed as they would be when sampled: the
        first ones in chunks, the last ones one by one. Nothing may be in flight.

        Raises:
            WeightsError: the engine is poisoned. EngineError: it has no weights.
        """
        ...

    def held_tensors(self) -> Mapping[str, Tensor]:
        """Return the very tensors that the engine's forward reads, by canonical name."""
        ...

    def resume_stats(self) -> ResumeStats:
        """Return what was taken from the log of an earlier process so far."""
        ...

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Sample every request to its end and return completions in the order of the requests.

        A request that the log already holds is answered from it or goes on from its last durable token; every token of
        a returned completion is durable.

        Raises:
            EngineInputError: a request that can never be served, that was asked for before in this life, or that the
                log holds with another prompt, seed or sampling; nothing was started.
            EngineError: no weights are loaded, or an earlier call raised after it had started.
            WeightsError: a load of weights failed half-way.
            WalWriteError, WalFencedError: the log failed; nothing more may be published by this replica.
            PausedError: ``pause`` was called.
        """
        ...

    def pause(self) -> None:
        """Stop for good at the next boundary of a step, or at once while all that is in flight waits for tools: no
        request is admitted any more, and ``generate``, a running one or the next, raises PausedError when everything
        drawn is durable. From any thread; returns at once.
        """
        ...

    def save_kv(self, store: KvStore, *, has_time: Callable[[], bool] = lambda: True) -> int:
        """Save the key-values of unfinished requests, so that whoever goes on with them need not prefill.

        Args:
            store: of this replica.
            has_time: asked before each request; False ends it. The log is enough without.

        Returns:
            How many were saved; each is named in the log, durably once that is closed.

        Raises:
            EngineError: the engine is not paused.
            WalWriteError, WalFencedError, WalStalledError: the log failed.
        """
        ...
