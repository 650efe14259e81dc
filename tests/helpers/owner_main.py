"""An owner of sandboxes, to be killed: makes them a few at a time in the home of a supervisor, and closes few.

    python owner_main.py NAME OWNER KINDS LEASE_S MARK

KINDS are names of substrates with commas between them; those of the function substrate are its own children. Prints a
line with kind and identity of each when it is made and busy, and `done` after the last. MARK is in the command line of
every process inside.
"""

import asyncio
import random
import sys
from collections.abc import Sequence
from typing import Final

import msgspec

from rollforward.sandbox.client import SandboxClient
from rollforward.sandbox.config import ContainerConfig, Limits, SandboxConfig, ToolConfig
from rollforward.sandbox.errors import SandboxError
from rollforward.sandbox.function import FunctionSandbox
from rollforward.sandbox.launch import LocalTransport
from rollforward.sandbox.types import Call, CallStatus, ExecRequest, SandboxSpec

LIMITS: Final = Limits(memory_bytes=64 << 20, disk_bytes=4 << 20)
MAX_SANDBOXES: Final = 64
"""Further ones wait until somebody was killed; so many machines fit this one's memory."""
_AT_ONCE: Final = 4
_BUSY: Final = (
    "setsid sleep {mark} & echo x > file; mkdir -p a/b; trap '' TERM; sleep {mark}",
    "python3 -c 'import os, time; os.fork(); os.setsid(); time.sleep(1e6)' {mark}",
    "exec sleep {mark}",
    "head -c 100000 /dev/zero > file; (sleep {mark} & sleep {mark} & wait)",
)
_CALL: Final = "import subprocess; subprocess.Popen(['sleep', '{mark}']); subprocess.run(['sleep', '{mark}'])"


def spec(kind: str) -> SandboxSpec:
    """What all sandboxes of a substrate are made of."""
    return msgspec.structs.replace(msgspec.convert({"substrate": kind}, SandboxSpec), limits=LIMITS)


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def make_function(mark: str) -> FunctionSandbox:
    """One that has answered a call and is busy with the next."""
    tool = ToolConfig(name="python", timeout_s=3600.0)
    made = FunctionSandbox(SandboxConfig(workers=1), [tool])
    assert made.submit(Call(tool="python", arguments={"code": "6 * 7"})).result().status == CallStatus.OK
    made.submit(Call(tool="python", arguments={"code": _CALL.format(mark=mark)}))
    return made


async def own(name: str, owner: str, kinds: Sequence[str], lease_s: float, mark: str) -> None:
    chance = random.Random(owner)
    config = ContainerConfig(lease_s=lease_s, max_sandboxes=MAX_SANDBOXES, warm=2, create_timeout_s=300.0)
    client = SandboxClient([LocalTransport(name, config)], config, owner=owner)
    kept: list[object] = []

    async def one(n: int, kind: str) -> None:
        sandbox_id, is_closed = f"{owner}-{n}", chance.random() < 0.2
        try:
            if kind == "function":
                made = await asyncio.to_thread(make_function, mark)
                kept.append(made)
            else:
                made = await client.create(sandbox_id, spec(kind))
                request = ExecRequest(argv=("sh", "-c", chance.choice(_BUSY).format(mark=mark)), wall_s=3600.0)
                kept.append(asyncio.create_task(made.exec(request, key="t0c0")))
                await made.exec(ExecRequest(argv=("true",)))
            say(f"{kind} {sandbox_id}")
            if is_closed:
                await made.close()
        except SandboxError as error:
            say(f"lost {type(error).__name__} {kind} {error}")

    for first in range(0, len(kinds), _AT_ONCE):
        await asyncio.gather(*(one(first + n, kind) for n, kind in enumerate(kinds[first : first + _AT_ONCE])))
    say("done")
    await asyncio.sleep(3600)


if __name__ == "__main__":
    asyncio.run(own(sys.argv[1], sys.argv[2], sys.argv[3].split(","), float(sys.argv[4]), sys.argv[5]))
