"""Sandbox actors on a cluster's nodes, and how whoever holds one asks it, however often it dies.

What Ray says about an actor that is gone becomes ``SandboxConnectionError``. Not here: what an actor does
(`actors.py`), and what is safe to ask again (`client.py`).
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rollforward.sandbox import wire
from rollforward.sandbox.actors import SandboxActor
from rollforward.sandbox.config import ContainerConfig
from rollforward.sandbox.errors import SandboxConnectionError, SandboxError, SandboxUnavailableError
from rollforward.sandbox.homes import supervisor_id

_BACK_S: Final = 60.0
"""An actor that died is up again so long after."""
_LOOK_S: Final = 0.2


class _Node(NamedTuple):
    """Where an actor may be."""

    address: str
    node_id: str


class ActorTransport:
    """A `Transport` over a ``SandboxActor``. It can be sent to any process of the cluster.

    A question that was on its way when the actor died is answered by ``SandboxConnectionError`` as soon as the actor is
    up again, so that asking again meets somebody.
    """

    def __init__(self, actor: Any) -> None:
        """Keep the actor's handle."""
        self._actor = actor

    async def ask(self, operation: str, payload: wire.Data) -> wire.Data:
        """See `Transport`."""
        try:
            return await self._actor.ask.remote(operation, payload)
        except SandboxError:
            raise
        except RayError as error:
            if isinstance(error, RayTaskError):
                raise SandboxConnectionError(f"a sandbox actor failed: {error.cause!r}") from error
            await self._wait_for_it(error)
            raise SandboxConnectionError(
                f"a sandbox actor went away before it answered {operation} ({type(error).__name__}); what was asked may"
                " have happened"
            ) from error

    async def close(self) -> None:
        """See `Transport`. There is nothing to let go of."""

    async def _wait_for_it(self, error: RayError) -> None:
        """Wait until the actor answers again.

        Raises:
            SandboxConnectionError: it does not.
        """
        end_s = time.monotonic() + _BACK_S
        while time.monotonic() < end_s:
            try:
                async with asyncio.timeout(max(end_s - time.monotonic(), 0.0)):
                    await self._actor.start.remote()
            except (RayError, TimeoutError):
                await asyncio.sleep(_LOOK_S)
            except SandboxError:
                return
            else:
                return
        raise SandboxConnectionError(
            f"a sandbox actor died and did not come back within {_BACK_S:g} s ({type(error).__name__}): its node is"
            " gone, or has no room"
        ) from error


def sandbox_actors(config: ContainerConfig, run_dir: Path) -> tuple[Sequence[ActorTransport], Sequence[str]]:
    """Start the run's sandbox actors, spread over the nodes that have what they need, with their supervisors.

    They live as long as the driver that called this. The same run finds its supervisors on the same machines again.

    Args:
        config: how many, and what a node must have.
        run_dir: of the run; names the supervisors.

    Returns:
        One transport an actor, for `SandboxClient`; and sentences about what the machines cannot enforce, of which
        there are none unless `trusted_code` is set.

    Raises:
        SandboxUnavailableError: no node has what they need, or a machine lacks what untrusted code needs.
    """
    nodes = _nodes(config)
    actors = [_start(index, nodes, config, run_dir) for index in range(config.actors)]
    started = [actor.start.remote() for actor in actors]
    ready, waiting = ray.wait(started, num_returns=len(started), timeout=config.create_timeout_s)
    if waiting:
        raise SandboxUnavailableError(
            f"{len(waiting)} of {config.actors} sandbox actors did not come up within {config.create_timeout_s:g} s"
            " (sandbox.container.create_timeout_s): their nodes have no room for sandbox.container.resources, or hang"
        )
    missing = sorted({sentence for sentences in ray.get(ready) for sentence in sentences})
    return [ActorTransport(actor) for actor in actors], missing


def resource_options(resources: Mapping[str, float]) -> dict[str, Any]:
    """Return options of an actor that needs these resources of its node, CPU and GPU among them, and no others."""
    custom = {name: amount for name, amount in resources.items() if name not in ("CPU", "GPU")}
    return {"num_cpus": resources.get("CPU", 0), "num_gpus": resources.get("GPU", 0), "resources": custom}


def _start(index: int, nodes: Sequence[_Node], config: ContainerConfig, run_dir: Path) -> Any:
    node = nodes[index % len(nodes)]
    # A supervisor belongs to a machine, whatever Ray calls it in this life of the cluster; several there are numbered.
    number = sum(nodes[before % len(nodes)].address == node.address for before in range(index))
    actor: Any = SandboxActor
    return actor.options(
        **resource_options(config.resources),
        # Where its supervisor is, it is started again, as long as the node is there.
        scheduling_strategy=NodeAffinitySchedulingStrategy(node.node_id, soft=True),
    ).remote(supervisor_id(str(run_dir), number, sorted(config.images.items())), config)


def _nodes(config: ContainerConfig) -> list[_Node]:
    """The nodes that have what an actor needs, used or not, in an order that stays.

    Raises:
        SandboxUnavailableError: there is none.
    """
    nodes = [
        _Node(node["NodeManagerAddress"], node["NodeID"])
        for node in ray.nodes()
        if node["Alive"] and all(node["Resources"].get(name, 0) >= need for name, need in config.resources.items())
    ]
    if not nodes:
        needed = ", ".join(f"{name}: {amount:g}" for name, amount in config.resources.items())
        raise SandboxUnavailableError(
            f"no node of the cluster has {{{needed}}}, which sandbox.container.resources asks for a sandbox actor. Add"
            " a node that has it, or set sandbox.container.resources"
        )
    return sorted(nodes)
