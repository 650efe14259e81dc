"""What runs in the guest of a power cut: look at the log, open it, go on with the plan, and say what is durable.

A line of JSON says what the log held: as `rollforward wal verify` counts it before anything was written, and as
`open_log` gave it back. Then `a N` for every acknowledgement: events below N are durable, by the writer's own word.

Builds: "product"; broken on purpose: "no_sync" syncs nothing, "no_flush" hands its pages to the drive and does not wait
for the drive's cache, "no_names" never syncs a directory, "early" acknowledges what it has only queued.
"""

import ctypes
import json
import os
import random
import sys
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from rollforward.rollout import wal_files, wal_segments
from rollforward.rollout.types import Request, RequestId, SamplingParams, StopReason
from rollforward.rollout.wal import WalWriter, open_log
from rollforward.rollout.wal_records import WalConfig
from rollforward.rollout.wal_recovery import RecoveredLog
from rollforward.rollout.wal_verb import summarise
from tests.helpers import power_plan

_SYNC_RANGE_ALL = 1 | 2 | 4

Say = Callable[[str], None]


def run(command: dict[str, Any], say: Say) -> None:
    """Live until the power goes, or until `num_events` more are durable and the log is closed.

    Args:
        command: seed, build, directory and config of the log, num_events (None: for ever).
        say: sends a line to the host.

    """
    directory = Path(command["directory"])
    config = msgspec.convert(command["config"], WalConfig)
    if command["build"] == "no_names":
        # The process is this build's own.
        wal_files.sync_directory = wal_segments.sync_directory = lambda directory: None
    told = summarise(directory, mirror_dir=config.mirror_dir)
    writer, recovered = open_log(directory, stream="engine-0", config=config, sync=_SYNCS[command["build"]])
    held = {identity.step: held for identity, held in recovered.requests.items()}
    report = {
        "verify": msgspec.to_builtins(told),
        "torn_bytes": recovered.scan.torn_bytes,
        "problems": [str(problem) for problem in recovered.problems],
        "failed": [str(identity) for identity in recovered.failed],
        "was_sealed": recovered.was_sealed,
        "epoch": writer.epoch,
        "requests": {
            number: [
                len(one.token_ids),
                one.is_finished,
                power_plan.digest(one.token_ids, one.behavior_logprobs),
                one.num_openings,
            ]
            for number, one in held.items()
        },
    }
    say(json.dumps(report))
    start = power_plan.find_state({number: (len(one.token_ids), one.is_finished) for number, one in held.items()})
    if start is None or recovered.failed:
        # The host says what is wrong with it.
        writer.abandon()
        return
    _reopen(writer, recovered, start)
    _go_on(writer, start, command, say)
    writer.close()
    say(json.dumps({"closed": True}))


def _reopen(writer: WalWriter, recovered: RecoveredLog, start: int) -> None:
    """Bind what was unfinished to its slots again."""
    slots = {}
    for event in power_plan.events():
        if start == 0:
            break
        start -= 1
        if event.kind == "open":
            slots[event.rows[0][1]] = event.rows[0][0]
    for identity, one in recovered.requests.items():
        if one.is_unfinished:
            writer.append_open(one.request, slot=slots[identity.step], resumed_tokens=len(one.token_ids))


def _go_on(writer: WalWriter, start: int, command: dict[str, Any], say: Say) -> None:
    """Append the plan's events and tell which are durable; a group commit takes from one to some dozens."""
    draw = random.Random(command["seed"])
    limit = command["num_events"]
    waiting: deque[tuple[int, int]] = deque()
    until_wait = 1
    for number, event in enumerate(power_plan.events(start), start):
        if limit is not None and number == start + limit:
            break
        seq = _append(writer, event)
        waiting.append((seq, number + 1))
        until_wait -= 1
        if until_wait == 0:
            writer.wait_durable(seq)
            until_wait = draw.choice((1, 2, 5, 30))
        durable_seq = seq if command["build"] == "early" else writer.durable_seq
        acked = 0
        while waiting and waiting[0][0] <= durable_seq:
            acked = waiting.popleft()[1]
        if acked:
            say(f"a {acked}")
    if waiting:
        writer.wait_durable(waiting[-1][0])
        say(f"a {waiting[-1][1]}")


def _append(writer: WalWriter, event: power_plan.Event) -> int:
    match event.kind:
        case "open":
            ((slot, number, _),) = event.rows
            return writer.append_open(_request(number), slot=slot)
        case "close":
            return writer.append_close(event.rows[0][0], StopReason.LENGTH)
        case _:
            slots, numbers, positions = zip(*event.rows, strict=True)
            at = list(zip(numbers, positions, strict=True))
            return writer.append_step(
                np.array(slots, np.uint16),
                np.array([power_plan.token(*one) for one in at], np.int32),
                np.array([power_plan.logprob(*one) for one in at], np.float32),
                policy_version=1,
            )


def _request(number: int) -> Request:
    return Request(
        id=RequestId(number, 0, 0),
        prompt_ids=np.array(power_plan.PROMPT_IDS, np.int32),
        seed=number,
        sampling=SamplingParams(max_new_tokens=power_plan.length(number)),
        policy_version=1,
    )


def _to_the_drive(descriptor: int) -> None:
    """Write a file's pages out and wait for it, without asking the drive to empty its cache."""
    if ctypes.CDLL(None, use_errno=True).sync_file_range(
        descriptor, ctypes.c_int64(0), ctypes.c_int64(0), _SYNC_RANGE_ALL
    ):
        raise OSError(ctypes.get_errno(), "sync_file_range")


_SYNCS: dict[str, Callable[[int], None]] = {
    "product": os.fdatasync,
    "no_names": os.fdatasync,
    "early": os.fdatasync,
    "no_sync": lambda descriptor: None,
    "no_flush": _to_the_drive,
}


def _rehearse(directory: Path) -> None:
    """A short life on this machine, then the modules and libraries that it needed: what the guest's image must hold."""
    settings = {
        "level": "cluster",
        "mirror_dir": str(directory / "mirror"),
        "mirror_same_device": True,
        "segment_bytes": 4096,
    }
    command = {"seed": 0, "build": "product", "config": settings, "num_events": 200}
    for _ in range(2):
        run(command | {"directory": str(directory / "home/wal/engine-0")}, lambda line: None)
    modules = {name: getattr(module, "__file__", None) for name, module in sys.modules.items()}
    maps = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    mapped = {line.split(maxsplit=5)[5] for line in maps if line.count(" /") and ".so" in line}
    sys.stdout.write(json.dumps({"modules": modules, "libraries": sorted(mapped), "path": sys.path}))


if __name__ == "__main__":
    _rehearse(Path(sys.argv[1]))
