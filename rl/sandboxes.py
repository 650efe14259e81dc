"""Brings a run's sandboxes to those who use them: replicas, whose completions keep one, and hidden tests.

    supervisors <--transports-- replicas' agents (`EnvironmentConfig.agents`), the grader
         checked once: a sandbox of every set of tools and image is made, so that a tool that cannot be imported, or an
         image that is not there, costs seconds

Not here: starting actors (rl/train.py), supervisors (sandbox/).
"""

import asyncio
import copy
from collections.abc import Sequence
from pathlib import Path

import msgspec

from rollforward.conf import console
from rollforward.rl.setup import Parts
from rollforward.rollout.agent_sessions import AgentSettings
from rollforward.rollout.agents import AgentsAccess, LocalAccess
from rollforward.rollout.config import RolloutConfig
from rollforward.rollout.environment import EnvironmentConfig, TaskTools
from rollforward.sandbox.client import SandboxClient, Transport
from rollforward.sandbox.config import SandboxConfig
from rollforward.sandbox.homes import supervisor_id
from rollforward.sandbox.launch import LocalTransport
from rollforward.sandbox.types import PoolStats, SandboxSpec


def agent_settings(
    parts: Parts, transports: Sequence[Transport], *, run_dir: Path, rollout: RolloutConfig, sandbox: SandboxConfig
) -> AgentSettings:
    """Return what whoever holds sandboxes of a run's completions needs.

    Args:
        parts: of the run; its grader is told the transports too.
        transports: to the supervisors.
        run_dir: of the run.
        rollout: says what command logs survive.
        sandbox: limits and patience.

    Raises:
        ToolError: a tool cannot be imported in a sandbox.
        SandboxUnavailableError: an image is not there, or a machine cannot make sandboxes.
        SandboxError: no supervisor could make one in time.
    """
    parts.grader.connect([copy.copy(transport) for transport in transports])
    environment = parts.environment
    tasks = {} if environment is None else {name: task for name, task in environment.tasks.items() if task.sandbox}
    settings = AgentSettings(
        run_dir=str(run_dir),
        tasks=tasks,
        container=sandbox.container,
        transports=tuple(transports),
        sync=rollout.wal.level != "process",
    )
    asyncio.run(_check(settings, {task.options.image for task in parts.tasks if task.options.keeps_sandbox}))
    return settings


def with_agents(environment: EnvironmentConfig | None, access: AgentsAccess) -> EnvironmentConfig | None:
    """Return what replicas need, who holds their completions' sandboxes included."""
    return None if environment is None else msgspec.structs.replace(environment, agents=access)


def local_environment(
    parts: Parts, *, run_dir: Path, rollout: RolloutConfig, sandbox: SandboxConfig
) -> EnvironmentConfig | None:
    """Return what a replica in this process needs; where a task keeps sandboxes a supervisor of them is started on this
    machine, which ends when nobody has used it for a while. See ``agent_settings``."""
    if not parts.needs_sandboxes:
        return parts.environment
    config = sandbox.container
    transport = LocalTransport(supervisor_id(str(run_dir), 0, sorted(config.images.items())), config)
    for sentence in asyncio.run(_start(copy.copy(transport))):
        console.say(f"sandboxes: {sentence}")
    settings = agent_settings(parts, [transport], run_dir=run_dir, rollout=rollout, sandbox=sandbox)
    return with_agents(parts.environment, LocalAccess(settings=settings))


def pool_stats(parts: Parts) -> PoolStats:
    """Return the counters of the run's supervisors."""
    return parts.grader.run(lambda client, _: client.stats())


async def _start(transport: LocalTransport) -> tuple[str, ...]:
    try:
        return await transport.start()
    finally:
        await transport.close()


async def _check(settings: AgentSettings, images: set[str]) -> None:
    transports = [copy.copy(transport) for transport in settings.transports]
    async with SandboxClient(transports, settings.container, owner="check") as client:
        specs = [_spec(settings, task, image) for task in settings.tasks.values() for image in sorted(images)]
        for spec in dict.fromkeys(map(msgspec.json.encode, specs)):
            # An identity names one spec: a run that was stopped in its check may come again with other limits.
            name = supervisor_id(settings.run_dir, spec)
            sandbox = await client.create(f"check-{name}", msgspec.json.decode(spec, type=SandboxSpec))
            await sandbox.close()


def _spec(settings: AgentSettings, task: TaskTools, image: str) -> SandboxSpec:
    substrate = "container" if task.sandbox is None else task.sandbox.substrate
    return SandboxSpec(substrate=substrate, image=image, limits=settings.container.limits, tools=task.tools)
