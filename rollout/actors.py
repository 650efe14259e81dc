"""Ray wrappers of the rollout side. No logic: a method is one call.

Actors are restarted by nobody and their calls are repeated by nobody (``max_task_retries=0``): a call that may have
happened is made idempotent by the log, not by Ray.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray

from rollforward.model.config import ModelConfig
from rollforward.model.train_config import Precision
from rollforward.rollout.config import RolloutConfig
from rollforward.rollout.environment import EnvironmentConfig
from rollforward.rollout.replica import LogStats, Replica
from rollforward.rollout.router import merge_completions, split_requests
from rollforward.rollout.types import Completion, Request
from rollforward.rollout.wal_scan import Problem
from rollforward.rollout.weights import WeightsAck


@ray.remote(max_restarts=0, max_task_retries=0)
class RolloutActor:
    """One replica in its own process."""

    def __init__(
        self,
        name: str,
        log_directory: Path,
        model_config: ModelConfig,
        precision: Precision,
        config: RolloutConfig,
        environment: EnvironmentConfig | None,
    ) -> None:
        """Open the replica; see ``Replica``."""
        self._replica = Replica(
            name, log_directory, model_config, precision=precision, config=config, environment=environment
        )

    def load_weights(self, directory: Path) -> WeightsAck:
        """See ``Replica.load_weights``."""
        return self._replica.load_weights(directory)

    def acknowledge(self) -> WeightsAck:
        """See ``Replica.acknowledge``."""
        return self._replica.acknowledge()

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """See ``Replica.generate``."""
        return self._replica.generate(requests)

    def log_problems(self) -> tuple[Problem, ...]:
        """See ``Replica.log_problems``."""
        return self._replica.log_problems()

    def log_stats(self) -> LogStats:
        """See ``Replica.log_stats``."""
        return self._replica.log_stats()

    def close(self) -> None:
        """See ``Replica.close``."""
        self._replica.close()


class RolloutPool:
    """Handles of all replicas, as the controller sees them: plain calls that wait for their answer."""

    def __init__(self, actors: Sequence[Any]) -> None:
        """Keep the handles; the order decides which replica serves which request."""
        self._actors = list(actors)

    def load_weights(self, directory: Path) -> list[WeightsAck]:
        """Load a published version on every replica."""
        return ray.get([actor.load_weights.remote(directory) for actor in self._actors])

    def acknowledge(self) -> list[WeightsAck]:
        """Let every replica hash what it holds now."""
        return ray.get([actor.acknowledge.remote() for actor in self._actors])

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Sample on all replicas; answers in the order of the requests."""
        shares = split_requests(requests, len(self._actors))
        calls = [actor.generate.remote(share) for actor, share in zip(self._actors, shares, strict=True)]
        return merge_completions(requests, ray.get(calls))

    def log_problems(self) -> list[Problem]:
        """Return what was wrong with the replicas' logs when they were opened."""
        return [
            problem
            for problems in ray.get([actor.log_problems.remote() for actor in self._actors])
            for problem in problems
        ]

    def log_stats(self) -> list[LogStats]:
        """Return every replica's log counters."""
        return ray.get([actor.log_stats.remote() for actor in self._actors])

    def close(self) -> None:
        """Close every replica's log in order."""
        ray.get([actor.close.remote() for actor in self._actors])
