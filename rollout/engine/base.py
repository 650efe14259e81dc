"""The engine protocol: what a rollout replica asks of whatever samples tokens.

``local.py`` is our own engine. Another one (a server at scale) implements the same protocol in a file beside it.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from torch import Tensor

from rollforward.model.precision import PackedTensor
from rollforward.rollout.engine.kv_store import KvStore
from rollforward.rollout.types import Completion, Request, ResumeStats


class Engine(Protocol):
    """Samples completions under one weight version at a time."""

    @property
    def policy_version(self) -> int | None:
        """Version of the weights in use; None before the first ``load_weights``."""
        ...

    def load_weights(self, policy_version: int, tensors: Mapping[str, PackedTensor]) -> None:
        """Take new weights; nothing may be in flight.

        Args:
            policy_version: greater than the version in use.
            tensors: canonical names -> published bytes, all of the model.

        Raises:
            EngineError: requests are in flight or the version does not grow.
        """
        ...

    def held_tensors(self) -> Mapping[str, Tensor]:
        """Return the very tensors that the engine's forward reads, by canonical name, for hashing."""
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
