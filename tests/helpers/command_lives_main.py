"""What tests/faults/test_command_kills.py starts: a process that forks lives of a trajectory, or a carrier of bytes.

command_lives_main.py lives             each line of JSON in forks a life, which tells of every step until it is done
                                        or killed; {"gone": code} follows
command_lives_main.py carry FROM TO     listens at one socket and carries all that comes to another and back
"""

import asyncio
import json
import os
import sys
import threading
import traceback
from pathlib import Path
from socket import AF_UNIX, SHUT_RDWR, socket
from typing import Any


def carry(listen_at: str, to: str) -> None:
    """Carries bytes until it is killed, and knows nothing about them."""
    server = socket(AF_UNIX)
    Path(listen_at).unlink(missing_ok=True)
    server.bind(listen_at)
    server.listen()
    say(step="carrying")
    while True:
        inward, _ = server.accept()
        outward = socket(AF_UNIX)
        try:
            outward.connect(to)
        except OSError:
            inward.close()
            continue
        for one, other in ((inward, outward), (outward, inward)):
            threading.Thread(target=_pump, args=(one, other), daemon=True).start()


def _pump(one: socket, other: socket) -> None:
    try:
        while data := one.recv(1 << 16):
            other.sendall(data)
    except OSError:
        pass
    for end in (one, other):
        try:
            end.shutdown(SHUT_RDWR)
        except OSError:
            continue


def say(**what: Any) -> None:
    """One line to whoever started this."""
    os.write(1, json.dumps(what).encode() + b"\n")


def lives() -> None:
    """Forks one life after another."""
    import msgspec

    from rollforward.sandbox.client import SandboxClient, SocketTransport
    from rollforward.sandbox.config import ContainerConfig
    from rollforward.sandbox.session import Session
    from rollforward.sandbox.types import Call, SandboxSpec

    async def live(order: dict[str, Any]) -> None:
        config = msgspec.convert(order["config"], ContainerConfig)
        async with SandboxClient([SocketTransport(Path(order["socket"]))], config, owner=order["id"]) as client:
            session = await Session.open(
                client,
                log_path=Path(order["log"]),
                sandbox_id=order["id"],
                spec=msgspec.convert(order["spec"], SandboxSpec),
                files={"given.txt": b"given"},
                config=config,
                sync=order["sync"],
            )
            for key, arguments in order["plan"]:
                say(step="asking", key=key)
                told = await session.call(key, Call(tool="mark", arguments=arguments))
                say(step="told", key=key, result=msgspec.to_builtins(told.result), replayed=told.is_replayed)
            say(step="collecting")
            collected = await session.collect(["effects", "given.txt"], max_bytes=1 << 20)
            files = {path: data.decode() for path, data in collected.files.items()}
            say(step="collected", files=files, failure=collected.failure, problem=collected.problem)
            await session.close()
            say(step="closed", asked_again=session.num_asked_again)

    say(step="ready")
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            code = 1
            try:
                say(step="born", pid=os.getpid())
                asyncio.run(live(json.loads(line)))
                code = 0
            except BaseException:  # noqa: BLE001, whoever started it reads what it was
                say(step="raised", error=traceback.format_exc())
            finally:
                os._exit(code)
        _, status = os.waitpid(child, 0)
        say(step="gone", code=os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    if sys.argv[1] == "carry":
        carry(sys.argv[2], sys.argv[3])
    else:
        lives()
