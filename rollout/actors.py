"""Ray wrappers of the rollout side. No logic: a method is one call.

Ray repeats no call (``max_task_retries=0``): a call that may have happened is made idempotent by the log. A replica
that is lost is replaced by rollout/supervisor.py through rollout/placement.py; an ``AgentActor`` has no state of its
own and is started again by Ray.
"""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import ray

from rollforward.kernels.config import KernelBackends
from rollforward.model.backends import check_programs, choose_kernels
from rollforward.model.config import ModelConfig
from rollforward.model.train_config import Precision
from rollforward.rollout.agent_sessions import AgentSessions, AgentSettings, AgentTurn, TurnAnswer
from rollforward.rollout.config import RolloutConfig
from rollforward.rollout.environment import Ending, EnvironmentConfig
from rollforward.rollout.replica import Beat, LogStats, Pulse, Replica
from rollforward.rollout.types import Completion, Request
from rollforward.rollout.wal_retention import Retirement
from rollforward.rollout.wal_scan import Problem
from rollforward.rollout.weights import WeightsAck

# Ray's types do not know concurrency groups, and options() refuses them.
_OPTIONS: dict[str, Any] = {"max_restarts": 0, "max_task_retries": 0, "concurrency_groups": {"beat": 1, "drain": 1}}


# Ray starts it again where it died; what it held is on disk and in the sandboxes, so it may be asked again.
_AGENT_OPTIONS: dict[str, Any] = {"max_restarts": -1, "max_task_retries": 0, "max_concurrency": 1 << 16}


@ray.remote(**_AGENT_OPTIONS)
class AgentActor:
    """Sandboxes of completions, held outside of replicas."""

    def __init__(self, settings: AgentSettings, owner: str) -> None:
        """See ``AgentSessions``."""
        self._sessions = AgentSessions(settings, owner=owner)

    async def resume(self, turn: AgentTurn) -> None:
        """See ``AgentSessions.resume``."""
        await self._sessions.resume(turn)

    async def answer(self, turn: AgentTurn) -> TurnAnswer:
        """See ``AgentSessions.answer``."""
        return await self._sessions.answer(turn)

    async def finish(self, turn: AgentTurn) -> Ending:
        """See ``AgentSessions.finish``."""
        return await self._sessions.finish(turn)

    async def keep(self, within_s: float) -> int:
        """See ``AgentSessions.keep``."""
        return await self._sessions.keep(within_s)


def _built(name: str, kernels: KernelBackends, model_config: ModelConfig, build: Callable[[], Replica]) -> Replica:
    choose_kernels(kernels, name)
    check_programs(kernels, model_config, f"the model of {name}")
    return build()


@ray.remote(**_OPTIONS)
class RolloutActor:
    """One replica in its own process; `beat` and `drain` have threads of their own."""

    def __init__(
        self,
        name: str,
        log_directory: Path,
        model_config: ModelConfig,
        precision: Precision,
        config: RolloutConfig,
        environment: EnvironmentConfig | None,
        kernels: KernelBackends,
    ) -> None:
        """Give signs of life from here on; the replica is built by ``open``, whose errors keep their type."""
        self._pulse = Pulse(ray.get_runtime_context().get_node_id(), leave_s=config.drain_s)
        build = partial(
            Replica, name, log_directory, model_config, precision=precision, config=config, environment=environment
        )
        self._build = partial(_built, name, kernels, model_config, build)

    @ray.method(concurrency_group="beat")
    def beat(self) -> Beat:
        """See ``Pulse.beat``."""
        return self._pulse.beat()

    def open(self) -> None:
        """Take the forms of ops and build the replica; see ``Replica``."""
        self._replica = self._build()

    def log_problems(self) -> tuple[Problem, ...]:
        """See ``Replica.log_problems``."""
        return self._replica.log_problems()

    def load_weights(self, directory: Path) -> WeightsAck:
        """See ``Replica.load_weights``."""
        return self._replica.load_weights(directory)

    def acknowledge(self) -> WeightsAck:
        """See ``Replica.acknowledge``."""
        return self._replica.acknowledge()

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """See ``Replica.generate``."""
        return self._replica.generate(requests)

    def log_stats(self) -> LogStats:
        """See ``Replica.log_stats``."""
        return self._replica.log_stats()

    def retire(self, before_step: int) -> Retirement:
        """See ``Replica.retire``."""
        return self._replica.retire(before_step)

    @ray.method(concurrency_group="drain")
    def drain(self, deadline_s: float) -> LogStats:
        """See ``Replica.drain``."""
        return self._replica.drain(deadline_s)

    def close(self) -> None:
        """See ``Replica.close``."""
        self._replica.close()
