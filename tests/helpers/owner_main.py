"""An owner of sandboxes, to be killed: makes them one after another in the home of a supervisor, and closes few.

    python owner_main.py NAME OWNER COUNT LEASE_S MARK [MACHINES]

Prints the identity of each when it is made and busy. MARK is in the command line of every process inside. MACHINES is
the share of virtual machines.
"""

import asyncio
import random
import sys

import msgspec

from rollforward.sandbox.client import SandboxClient
from rollforward.sandbox.config import ContainerConfig, Limits
from rollforward.sandbox.errors import SandboxError
from rollforward.sandbox.launch import LocalTransport
from rollforward.sandbox.types import ExecRequest, SandboxSpec

_BUSY = (
    "setsid sleep {mark} & echo x > file; mkdir -p a/b; trap '' TERM; sleep {mark}",
    "python3 -c 'import os, time; os.fork(); os.setsid(); time.sleep(1e6)' {mark}",
    "exec sleep {mark}",
    "head -c 100000 /dev/zero > file; (sleep {mark} & sleep {mark} & wait)",
)


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


async def own(name: str, owner: str, count: int, lease_s: float, mark: str, machines: float = 0.0) -> None:
    shares = {"container": 1.0 - machines, "microvm": 0.8 * machines, "fullvm": 0.2 * machines}
    chance = random.Random(owner)
    config = ContainerConfig(lease_s=lease_s, max_sandboxes=256, warm=2, create_timeout_s=300.0 if machines else 60.0)
    client = SandboxClient([LocalTransport(name, config)], config, owner=owner)
    busy: set[asyncio.Task[object]] = set()

    async def one(n: int) -> None:
        try:
            (substrate,) = chance.choices(list(shares), list(shares.values()))
            limits = Limits(memory_bytes=64 << 20, disk_bytes=4 << 20) if machines else Limits()
            spec = msgspec.convert({"substrate": substrate}, SandboxSpec)
            sandbox = await client.create(f"{owner}-{n}", msgspec.structs.replace(spec, limits=limits))
            request = ExecRequest(argv=("sh", "-c", chance.choice(_BUSY).format(mark=mark)), wall_s=3600.0)
            busy.add(asyncio.create_task(sandbox.exec(request, key="t0c0")))
            await sandbox.exec(ExecRequest(argv=("true",)))
            say(sandbox.id)
            if chance.random() < 0.2:
                await sandbox.close()
        except SandboxError as error:
            say(f"lost {type(error).__name__} {error}")

    for first in range(0, count, 4):
        await asyncio.gather(*(one(n) for n in range(first, min(first + 4, count))))
    await asyncio.sleep(3600)


if __name__ == "__main__":
    share = float(sys.argv[6]) if len(sys.argv) > 6 else 0.0
    asyncio.run(own(sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4]), sys.argv[5], share))
