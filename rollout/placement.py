"""Replicas as Ray actors: starting their processes, sending calls, waiting for answers, ending who was given up.

What Ray says about a process, its node or an answer that is gone becomes ``WorkerLostError``; errors that the replica
itself raised stay what they are. Not here: what follows from a loss (rollout/supervisor.py).
"""

import asyncio
import contextlib
import os
import signal
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Final

import ray
from ray._private.state import state as cluster_state  # listing draining nodes has no public form
from ray.exceptions import (
    ActorPlacementGroupRemoved,
    ActorUnschedulableError,
    LocalRayletDiedError,
    NodeDiedError,
    ObjectLostError,
    OutOfMemoryError,
    RayActorError,
    RayError,
    RayTaskError,
    WorkerCrashedError,
)

from rollforward.conf.errors import first_line
from rollforward.rollout.agent_sessions import AgentTurn, TurnAnswer
from rollforward.rollout.agents import LoopThread
from rollforward.rollout.drain_file import Notices
from rollforward.rollout.environment import Ending
from rollforward.rollout.errors import RolloutLostError, WorkerLostError
from rollforward.rollout.replica import Beat
from rollforward.rollout.types import FailureType, Request
from rollforward.rollout.worker import Worker
from rollforward.sandbox.placement import resource_options
from rollforward.sandbox.types import CallResult, CallStatus

_AGENT_BACK_S: Final = 120.0
"""An ``AgentActor`` that died answers again so long after; then what it was asked is an infra failure."""
_AGENT_PAUSE_S: Final = 0.2

_GONE = (RayActorError, ObjectLostError, NodeDiedError, WorkerCrashedError, OutOfMemoryError)
_NO_PLACE = (ActorUnschedulableError, ActorPlacementGroupRemoved, LocalRayletDiedError)


class ActorProcess:
    """An actor's process. States: starting -> met (`met`: it is known) -> ended (`kill`)."""

    def __init__(self, actor: Any) -> None:
        """Keep the handle of an actor that is being created."""
        self._actor = actor
        self._descriptor: int | None = None
        self.pid: int | None = None
        self.node: str | None = None

    def met(self, beat: Beat) -> None:
        """Hold on to the process where it is of this machine: a descriptor names it even when its number is reused."""
        self.node, self.pid = beat.node, beat.pid
        if beat.node == ray.get_runtime_context().get_node_id():
            try:
                self._descriptor = os.pidfd_open(beat.pid)
            except ProcessLookupError:
                self._descriptor = None

    def kill(self) -> None:
        """End the process: by SIGKILL from here where it can be, which a stopped process cannot outlast, and by Ray,
        whose node sends the SIGKILL after 5 s."""
        if self._descriptor is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._descriptor, signal.SIGKILL)
            os.close(self._descriptor)
            self._descriptor = None
        ray.kill(self._actor, no_restart=True)


class RayWorker:
    """One replica's actor."""

    def __init__(self, actor: Any) -> None:
        """Keep the handle of a ``RolloutActor`` that is being created."""
        self._actor = actor
        self._process = ActorProcess(actor)

    @property
    def node(self) -> str | None:
        """Where it is, once it was met."""
        return self._process.node

    def beat(self) -> object:
        """See ``Worker``."""
        return self._actor.beat.remote()

    def open(self) -> object:
        """See ``Worker``."""
        return self._actor.open.remote()

    def log_problems(self) -> object:
        """See ``Worker``."""
        return self._actor.log_problems.remote()

    def load_weights(self, directory: Path) -> object:
        """See ``Worker``."""
        return self._actor.load_weights.remote(directory)

    def acknowledge(self) -> object:
        """See ``Worker``."""
        return self._actor.acknowledge.remote()

    def generate(self, requests: Sequence[Request]) -> object:
        """See ``Worker``."""
        return self._actor.generate.remote(requests)

    def log_stats(self) -> object:
        """See ``Worker``."""
        return self._actor.log_stats.remote()

    def retire(self, before_step: int) -> object:
        """See ``Worker``."""
        return self._actor.retire.remote(before_step)

    def drain(self, deadline_s: float) -> object:
        """See ``Worker``."""
        return self._actor.drain.remote(deadline_s)

    def close(self) -> object:
        """See ``Worker``."""
        return self._actor.close.remote()

    def met(self, beat: Beat) -> None:
        """See ``Worker``."""
        self._process.met(beat)

    def kill(self) -> None:
        """See ``Worker``."""
        self._process.kill()


class RayHost:
    """The cluster that the driver is connected to."""

    def __init__(self, create: Callable[[int], Any], resources: Mapping[str, float] | None = None) -> None:
        """Keep how a replica's actor is created, given its index, and which resources that asks of a node."""
        self._create, self._resources = create, dict(resources or {})

    def start(self, index: int) -> Worker:
        """See ``Host``."""
        return RayWorker(self._create(index))

    def wait(self, calls: Sequence[Any], timeout_s: float) -> Sequence[object]:
        """See ``Host``."""
        first, others = ray.wait(list(calls), num_returns=1, timeout=timeout_s)
        return [*first, *(ray.wait(others, num_returns=len(others), timeout=0)[0] if first and others else ())]

    def result(self, call: Any) -> Any:
        """See ``Host``. An error that the replica raised is raised here as it is."""
        try:
            return ray.get(call)
        except _GONE as error:
            if isinstance(error, RayActorError) and error.actor_init_failed:
                raise
            raise WorkerLostError(_describe(error)) from error
        except RayTaskError as error:
            if not isinstance(error.cause, Exception):
                raise
            raise error.cause from error
        except _NO_PLACE as error:
            raise RolloutLostError(
                f"there is no place for a replica: {first_line(error)}. What is durable is kept: `rollforward resume`"
                " with the run's directory goes on where there is one"
            ) from error

    def notices(self, workers: Mapping[str, Worker]) -> Notices:
        """Return whose node Ray is draining, with the seconds until its deadline."""
        deadlines_ms: Mapping[str, int] = cluster_state.get_draining_nodes()
        now_s = time.time()
        return {
            name: None if deadlines_ms[worker.node] == 0 else max(deadlines_ms[worker.node] / 1000 - now_s, 0.0)
            for name, worker in workers.items()
            if isinstance(worker, RayWorker) and worker.node is not None and worker.node in deadlines_ms
        }

    def lacking(self) -> str | None:
        """See ``Host``."""
        return lacking(self._resources, what="a replica", key="cluster.replica_resources")


class ActorAgents:
    """Agents in actors of their own. Implements ``Agents``: what an actor was asked when it died is asked again when it
    is back, which finds in the command logs what had run."""

    def __init__(self, actors: Sequence[Any]) -> None:
        """Keep the handles of ``AgentActor``s; which one has a completion is a function of its id."""
        self._actors = tuple(actors)
        self._loop = LoopThread("agents")
        self._asked: set[Future[Any]] = set()

    def resume(self, turn: AgentTurn) -> None:
        """See ``Agents``."""
        self._of(turn).resume.remote(turn)

    def answer(self, turn: AgentTurn) -> Future[TurnAnswer]:
        """See ``Agents``."""
        return self._kept(self._loop.run(self._answer, turn))

    def finish(self, turn: AgentTurn) -> Future[Ending]:
        """See ``Agents``."""
        return self._kept(self._loop.run(self._finish, turn))

    def keep(self, within_s: float) -> Future[int]:
        """See ``Agents``. Of all that the actors hold, whichever replica uses it."""
        return self._kept(self._loop.run(self._keep, within_s))

    def close(self) -> None:
        """See ``Agents``. The actors go on with what they were asked."""
        if not self._loop.is_closed:
            for asked in list(self._asked):
                asked.cancel()
            self._loop.close()

    def _of(self, turn: AgentTurn) -> Any:
        return self._actors[zlib.crc32(str(turn.id).encode()) % len(self._actors)]

    def _kept(self, asked: Future[Any]) -> Future[Any]:
        self._asked.add(asked)
        asked.add_done_callback(self._asked.discard)
        return asked

    async def _answer(self, turn: AgentTurn) -> TurnAnswer:
        answer = await self._ask(lambda: self._of(turn).answer.remote(turn))
        if isinstance(answer, str):
            return TurnAnswer(results=(CallResult(status=CallStatus.INFRA, text="", detail=answer),), position=0)
        return answer

    async def _finish(self, turn: AgentTurn) -> Ending:
        ending = await self._ask(lambda: self._of(turn).finish.remote(turn))
        if isinstance(ending, str):
            return Ending(id=turn.id, failure=FailureType.INFRA, detail=ending)
        return ending

    async def _keep(self, within_s: float) -> int:
        kept = 0
        asked = [asyncio.ensure_future(_answer_of(actor.keep.remote(within_s))) for actor in self._actors]
        done, late = await asyncio.wait(asked, timeout=within_s)
        for task in late:
            task.cancel()
        for task in done:
            with contextlib.suppress(RayError):  # who is gone keeps nothing
                kept += task.result()
        return kept

    async def _ask(self, ask: Callable[[], Any]) -> Any:
        """The answer, or a sentence that says why there is none."""
        end_s = time.monotonic() + _AGENT_BACK_S
        while True:
            try:
                return await ask()
            except RayTaskError:
                raise
            except RayError as error:
                if time.monotonic() > end_s:
                    return f"the actor that runs its tools is gone and did not come back ({first_line(error)})"
            await asyncio.sleep(_AGENT_PAUSE_S)


class ActorAccess:
    """How a replica comes to agents in actors. Implements ``AgentsAccess``."""

    def __init__(self, actors: Sequence[Any], *, kept: object = None) -> None:
        """Keep the actors' handles.

        Args:
            actors: ``AgentActor``s.
            kept: a reference that must not go while they may be started again.
        """
        self._actors = tuple(actors)
        self._kept = kept

    def connect(self, owner: str) -> ActorAgents:
        """See ``AgentsAccess``. The sandboxes are held in the actors' names."""
        return ActorAgents(self._actors)


async def _answer_of(reference: Any) -> Any:
    return await reference


def placement_options(resources: Mapping[str, float]) -> dict[str, Any]:
    """Return options of an actor that needs these resources of its node, and is put where there are few."""
    return {**resource_options(resources), "scheduling_strategy": "SPREAD"}


def lacking(resources: Mapping[str, float], *, what: str, key: str) -> str | None:
    """Return what no node of the cluster has, used or not, and the way out; None where one has all of it.

    A node that is being drained takes nobody any more and is not counted.
    """
    draining = cluster_state.get_draining_nodes()
    nodes = [node for node in ray.nodes() if node["Alive"] and node["NodeID"] not in draining]
    if any(all(node["Resources"].get(name, 0) >= amount for name, amount in resources.items()) for node in nodes):
        return None
    needed = ", ".join(f"{name}: {amount:g}" for name, amount in resources.items())
    here = "; ".join(f"{node['NodeManagerAddress']} ({_own(node['Resources'])})" for node in nodes)
    return (
        f"no node of the cluster has {{{needed}}}, which {key} asks for {what}. Nodes that are up and not drained:"
        f" {here or 'none'}. Add a node that has it (`ray start --address=HEAD:6379 --resources=...`), or set {key}"
    )


def _own(resources: Mapping[str, float]) -> str:
    """What a person gave a node."""
    shown = {name: amount for name, amount in resources.items() if ":" not in name and "memory" not in name}
    return ", ".join(f"{name}: {amount:g}" for name, amount in shown.items()) or "no resources"


def _describe(error: Exception) -> str:
    """What became of a process, in a line."""
    preempted = " with its node, which was preempted" if getattr(error, "preempted", False) else ""
    return f"its process died or cannot be reached{preempted} ({type(error).__name__})"
