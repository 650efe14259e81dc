"""What `lives.Lives` starts: a process that has imported everything, and forks a life of a replica when told to.

A life opens the log in a directory, takes up what earlier lives left, samples what is left of the requests with the
product's engine, and tells a ledger of every token that leaves, until it is done or killed. One line of JSON in starts
one; out comes {"code": ..., "seconds": ...}.

Where it kills itself (`kill`: an event and how many of its kind come before):

    append, appended      before and after a record goes to the log's queue
    sync, synced          the log's thread has written a group: before and after its sync, neither durable yet
    token                 after a step, once it is durable
    publish, published    before and after tokens leave: a turn to the environment, a completion to the caller

Builds that are broken on purpose: "early" publishes what is not durable; "prompt" begins unfinished requests again with
a fresh seed; "tail" keeps what is logged and draws the rest with another key.
"""

import json
import os
import pickle
import signal
import sys
import threading
import time
import traceback
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rollforward.conf.load import set_library_environment

set_library_environment()

import msgspec  # noqa: E402 - the environment comes first
import torch  # noqa: E402

from rollforward.rollout.config import RolloutConfig  # noqa: E402
from rollforward.rollout.engine import draw, local, resume  # noqa: E402
from rollforward.rollout.engine.local import LocalEngine  # noqa: E402
from rollforward.rollout.publication import Publication  # noqa: E402
from rollforward.rollout.types import Completion, Int32Array, Request, ToolUse  # noqa: E402
from rollforward.rollout.wal import WalWriter, open_log  # noqa: E402
from rollforward.rollout.wal_records import WalConfig  # noqa: E402

VOCAB_SIZE = 12
"""So few that turns end."""

SCOPE = "run"
"""Of all reports."""

VERSION = 1


class _Faults:
    """SIGKILL of this process at the n-th event of a kind."""

    def __init__(self, kill: dict[str, Any] | None) -> None:
        self.event = None if kill is None else kill["event"]
        self._left = 0 if kill is None else kill["number"]

    def at(self, event: str) -> None:
        """An event takes place."""
        if event != self.event:
            return
        if self._left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        self._left -= 1


class _Publication(Publication):
    """Faults around what leaves."""

    faults: _Faults

    def completions(self, completions: list[Completion]) -> list[Completion]:
        self.faults.at("publish")
        super().completions(completions)
        self.faults.at("published")
        return completions

    def turn(self, request: Request, turn_ids: Int32Array, turn: int) -> None:
        self.faults.at("publish")
        super().turn(request, turn_ids, turn)
        self.faults.at("published")


def _watch_log(log: WalWriter, faults: _Faults) -> None:
    def watched(append: Callable[..., int], *, is_step: bool) -> Callable[..., int]:
        def call(*args: Any, **kwargs: Any) -> int:
            faults.at("append")
            seq = append(*args, **kwargs)
            faults.at("appended")
            if is_step and faults.event == "token":
                log.wait_durable(seq)
                faults.at("token")
            return seq

        return call

    for name in ("append_open", "append_step", "append_observe", "append_close"):
        setattr(log, name, watched(getattr(log, name), is_step=name == "append_step"))


def _break(build: str, life: int, log: WalWriter) -> None:
    """Make this life one of a broken build; the process is its own."""
    signed_seed = draw.signed_seed
    if build == "early":
        log.wait_durable = lambda seq, *, timeout_s=None: None
    if build in ("prompt", "tail"):
        draw.signed_seed = lambda seed: signed_seed((seed + 7919 * life) % 2**64)
    if build == "prompt":
        take = resume.LoggedRequests.take

        def again(self: Any, request: Request, *arguments: Any, **named: Any) -> Any:
            taken = take(self, request, *arguments, **named)
            if isinstance(taken, Completion) or taken.num_sampled == 0:
                return taken
            return local.Sequence.fresh(request, attempt=taken.attempt + 1)

        resume.LoggedRequests.take = again


def make_calls(seed: int) -> list[list[Request]]:
    """What is asked, call by call: a request with tools alone, then three more; some with routes and kept sets."""
    from tests.helpers.replicas import make_requests

    tools = ToolUse(task="scripted", max_turns=3, max_observation_tokens=5)
    plain = make_requests([1, 17, 66], members=4, max_new_tokens=16, vocab_size=VOCAB_SIZE, version=VERSION)
    changed = [
        msgspec.structs.replace(
            request,
            seed=(request.seed + seed) % 2**64,
            record_routes=index % 2 == 0,
            sampling=msgspec.structs.replace(request.sampling, top_p=0.9 if index % 3 == 0 else 1.0),
        )
        for index, request in enumerate(plain)
    ]
    longer = msgspec.structs.replace(changed[0].sampling, max_new_tokens=28)
    turns = msgspec.structs.replace(changed[0], tools=tools, sampling=longer)
    return [[turns], [changed[1], changed[4], changed[6]]]


def _life(order: dict[str, Any], packed: dict[str, Any], config: Any) -> None:
    from tests.helpers.environments import ScriptedEnvironment

    faults = _Faults(order["kill"])

    def sync(descriptor: int) -> None:
        faults.at("sync")
        hangs = order["hang"] and threading.current_thread() is not threading.main_thread()
        time.sleep(3600 if hangs else order["sync_s"])
        os.fdatasync(descriptor)
        faults.at("synced")

    log, recovered = open_log(
        Path(order["directory"]), stream="engine-0", config=WalConfig(level="node"), takeover=True, sync=sync
    )
    publication = _Publication(order["ledger"], scope=SCOPE, life=str(log.epoch), recovered=recovered)
    publication.faults = faults
    _watch_log(log, faults)
    _break(order["build"], order["life"], log)
    engine = LocalEngine(
        config,
        precision="native",
        config=RolloutConfig(max_batch_requests=2, prefill_chunk_tokens=32),
        log=log,
        recovered=recovered,
        environment=publication.watch(ScriptedEnvironment(VOCAB_SIZE)),
    )
    engine.load_weights(VERSION, packed)
    completions: list[Completion] = []
    for requests in make_calls(order["seed"]):
        completions += publication.completions(engine.generate(requests))
    Path(order["result"]).write_bytes(pickle.dumps(completions))
    log.close()


def _run(order: dict[str, Any], packed: dict[str, Any], config: Any) -> dict[str, object]:
    start_s = time.monotonic()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            _life(order, packed, config)
            code = 0
        except BaseException:  # noqa: BLE001 - whatever it was, the process ends here
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    if order["after_s"] is not None:
        time.sleep(order["after_s"])
        os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    return {"code": os.waitstatus_to_exitcode(status), "seconds": time.monotonic() - start_s}


def main() -> None:
    """Runs the lives of each order on standard input until it ends."""
    tests = sys.modules.setdefault("tests", types.ModuleType("tests"))
    tests.__path__ = [str(Path(__file__).parents[1])]
    from tests.helpers.replicas import packed_params
    from tests.helpers.tiny import tiny_config

    torch.set_num_threads(1)
    config = msgspec.structs.replace(tiny_config(), vocab_size=VOCAB_SIZE)
    packed = packed_params(config)
    for text in sys.stdin:
        sys.stdout.write(json.dumps(_run(json.loads(text), packed, config)) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
