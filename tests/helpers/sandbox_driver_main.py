"""A driver with sandbox actors, which kills them and is killed: python sandbox_driver_main.py RUN_DIR LEASE_S.

Prints one line of JSON for each thing that it has done, and waits.
"""

import asyncio
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import ray

from rollforward.sandbox.client import SandboxClient
from rollforward.sandbox.config import ContainerConfig
from rollforward.sandbox.homes import supervisor_id
from rollforward.sandbox.launch import LocalTransport
from rollforward.sandbox.placement import ActorTransport, sandbox_actors
from rollforward.sandbox.types import ExecRequest, SandboxSpec


def say(**fact: Any) -> None:
    sys.stdout.write(json.dumps(fact) + "\n")
    sys.stdout.flush()


def kill(transport: ActorTransport) -> int:
    pid = ray.get(transport._actor.__ray_call__.remote(lambda _: os.getpid()))
    os.kill(pid, signal.SIGKILL)
    return pid


async def drive(run_dir: Path, lease_s: float) -> None:
    config = ContainerConfig(lease_s=60.0, warm=1)
    transports, missing = sandbox_actors(config, run_dir)
    client = SandboxClient(transports, config, owner="driver")
    sandbox = await client.create("a-0", SandboxSpec())
    script = ("sh", "-c", "sleep 1; echo x >> runs; cat runs")
    running = asyncio.create_task(sandbox.exec(ExecRequest(argv=script), key="t0c0"))
    await asyncio.sleep(0.4)
    killed = [await asyncio.to_thread(kill, transports[0])]
    result = await running
    say(stdout=result.stdout.decode(), missing=list(missing))
    killed.append(await asyncio.to_thread(kill, transports[0]))
    again = await sandbox.exec(ExecRequest(argv=script), key="t0c0")
    found = await client.adopt("a-0")
    say(is_same=again == result, instance=found.instance == sandbox.instance, killed=len(set(killed)))
    sent = ray.get(ray.remote(num_cpus=0)(count).remote(transports[0], config))
    say(held=sent)
    await sandbox.close()
    await client.close()
    # From here on with the lease that its death is waited for.
    config = ContainerConfig(lease_s=lease_s, warm=1)
    local = LocalTransport(supervisor_id(str(run_dir), 0, []), config)
    await local.start()
    client = SandboxClient(transports, config, owner="driver")
    sandbox = await client.create("b-0", SandboxSpec())
    running = asyncio.create_task(
        sandbox.exec(ExecRequest(argv=("sh", "-c", "setsid sleep 1000 & sleep 1000"), wall_s=3600.0))
    )
    await sandbox.exec(ExecRequest(argv=("true",)))
    say(held=len(await client.list()))
    await running


def count(transport: ActorTransport, config: ContainerConfig) -> int:
    """Asked by another process of the cluster."""

    async def ask() -> int:
        async with SandboxClient([transport], config, owner="worker") as client:
            return len(await client.list())

    return asyncio.run(ask())


if __name__ == "__main__":
    ray.init("local", num_cpus=2, include_dashboard=False, configure_logging=False, log_to_driver=False)
    asyncio.run(drive(Path(sys.argv[1]), float(sys.argv[2])))
