"""The command `rollforward sandbox list|replay`: what the command logs of a run hold, and whether it can be repeated.
`sandbox layers` is in layers_verb.py.

`list` reads only and may look at a run that is working; `replay` does a trajectory's commands again in a sandbox of its
own. Here: words, tables and JSON. Not here: reading a log (sandbox/command_log.py), doing it again (sandbox/replay.py).
"""

import asyncio
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from rollforward.conf import console
from rollforward.conf.errors import UsageError
from rollforward.rollout import layers_verb
from rollforward.sandbox.blobs import BlobStore
from rollforward.sandbox.client import SandboxClient
from rollforward.sandbox.command_log import (
    BLOBS_NAME,
    COMMANDS_NAME,
    LOG_SUFFIX,
    PREPARED_NAME,
    SNAPSHOTS_NAME,
    LogView,
    is_trajectory,
    log_path,
    read_log,
)
from rollforward.sandbox.config import ContainerConfig
from rollforward.sandbox.errors import CommandLogDamagedError, SandboxError
from rollforward.sandbox.homes import supervisor_id
from rollforward.sandbox.launch import LocalTransport
from rollforward.sandbox.replay import Masks, Replayed, Verdict, one_line, replay

_USAGE = (
    "it takes: sandbox list DIR, or sandbox replay TRAJECTORY run_dir=DIR and then mask=REGEX for what may differ,"
    " trusted_code=true for a machine that cannot enforce every limit; both take json=true to print JSON alone. Or"
    " sandbox layers list, make or gc."
)

_LEASE_S: Final = 10.0


class LogSummary(msgspec.Struct, frozen=True, kw_only=True):
    """What one command log holds."""

    trajectory: str
    """Whose log it is."""
    path: str
    """Where it lies."""
    commands: int
    """Commands that were sent."""
    answered: int
    """Those of them that have a result."""
    epochs: int
    """How often a process got hold of the sandbox."""
    sandboxes: int
    """Sandboxes that it had; all but the last were lost before a command reached them, or restored in the next."""
    files: int
    """Files that were collected at the end."""
    torn_bytes: int
    """Bytes of a write that was cut short; nobody had been told of it."""
    outcome: str
    """open, closed, oom (the policy's doing), unknown, infra, or damaged."""
    detail: str
    """Why, where it is one of the last three."""


def main(words: Sequence[str]) -> int:
    """Does what the words after `sandbox` ask for.

    Returns:
        0; `replay` 1 where a result differs.

    Raises:
        UsageError: other words, no log where they say, or one that cannot be replayed.

    """
    action, *rest = words or [""]
    if action == "layers":
        return layers_verb.main(rest)
    masks = [word.partition("=")[2] for word in rest if word.startswith("mask=")]
    settings = dict(word.split("=", 1) for word in rest if "=" in word and not word.startswith("mask="))
    names = [word for word in rest if "=" not in word]
    wants_json = settings.pop("json", "false")
    if action == "list":
        names += [settings.pop("run_dir")] if "run_dir" in settings else []
        if len(names) == 1 and not settings and not masks and wants_json in ("true", "false"):
            return _list(names[0], wants_json == "true")
    if action == "replay":
        run_dir, trusted = settings.pop("run_dir", None), settings.pop("trusted_code", None)
        flags = wants_json in ("true", "false") and trusted in (None, "true", "false")
        if len(names) == 1 and run_dir is not None and not settings and flags:
            return _replay(names[0], run_dir, masks, trusted=trusted, wants_json=wants_json == "true")
    raise UsageError(f"sandbox is followed by {' '.join(words) or 'nothing'}; {_USAGE}")


def summarise(view: LogView, path: Path) -> LogSummary:
    """Returns what a log holds."""
    history = view.history
    if view.damage:
        outcome = "damaged"
    elif history.failure:
        outcome = "unknown" if history.is_unknown else "infra"
    elif history.gone is not None:
        outcome = "oom"
    else:
        outcome = "closed" if history.is_closed else "open"
    return LogSummary(
        trajectory=view.trajectory,
        path=str(path),
        commands=len(history.commands),
        answered=sum(command.end is not None for command in history.commands.values()),
        epochs=0 if history.opened is None else history.opened.epoch,
        sandboxes=0 if history.opened is None else history.opened.attempt + 1,
        files=0 if history.collected is None else len(history.collected.files),
        torn_bytes=view.torn_bytes,
        outcome=outcome,
        detail=view.damage or history.failure,
    )


def _list(word: str, wants_json: bool) -> int:
    root = _directory(word)
    paths = sorted(path for path in root.rglob(f"*{LOG_SUFFIX}") if _is_command_log(path, root))
    if not paths:
        raise UsageError(f"{root} holds no command log; name a run directory whose tasks keep a sandbox.")
    logs = [summarise(read_log(path), path) for path in paths]
    if not wants_json:
        console.result(_log_table(logs, root))
    totals: dict[str, object] = {name: sum(getattr(log, name) for log in logs) for name in ("commands", "answered")}
    outcomes = ("open", "closed", "oom", "unknown", "infra", "damaged")
    totals |= {name: sum(log.outcome == name for log in logs) for name in outcomes}
    console.result(
        json.dumps({"trajectories": len(logs), **totals, "logs": [msgspec.to_builtins(log) for log in logs]})
    )
    return 0


def _is_command_log(path: Path, root: Path) -> bool:
    """Whether it lies where a run puts one, or is named like one in the directory that the user named."""
    is_named = path.parent == root and is_trajectory(path.name.removesuffix(LOG_SUFFIX))
    return is_named or path.parent.parent.name == COMMANDS_NAME


def _replay(name: str, run_dir: str, masks: Sequence[str], *, trusted: str | None, wants_json: bool) -> int:
    root = _directory(run_dir)
    try:
        path = log_path(root, name)
        compiled = Masks(masks)
    except ValueError as error:
        raise UsageError(f"{error}.") from None
    if not path.exists():
        raise UsageError(
            f"{path} is not there; rollforward sandbox list {root} names the trajectories that have a command log."
        )
    config = _config(root)
    if trusted is not None:
        config = msgspec.structs.replace(config, trusted_code=trusted == "true")
    try:
        replayed = asyncio.run(_replayed(path, config, compiled))
    except CommandLogDamagedError as error:
        raise UsageError(f"{error} It cannot be replayed.") from None
    except SandboxError as error:
        raise UsageError(f"{name} cannot be replayed: {error}") from None
    if not wants_json:
        console.result(_replay_table(replayed))
    counts = {verdict.value: sum(step.verdict is verdict for step in replayed.steps) for verdict in Verdict}
    console.result(json.dumps({**counts, **msgspec.to_builtins(replayed)}))
    return 1 if replayed.diverged else 0


async def _replayed(path: Path, config: ContainerConfig, masks: Masks) -> Replayed:
    # A supervisor of its own, which ends soon after the last replay.
    config = msgspec.structs.replace(config, lease_s=min(config.lease_s, _LEASE_S), warm=0)
    transport = LocalTransport(supervisor_id("replay", os.getuid(), path.parents[2]), config)
    await transport.start()
    view, blobs = read_log(path), BlobStore(path.parent / BLOBS_NAME, sync=False)
    async with SandboxClient([transport], config, owner=f"replay of {view.trajectory}") as client:
        return await replay(client, view, blobs, config=config, masks=masks, begin=_beginning(view, path))


def _beginning(view: LogView, path: Path) -> bytes:
    """The state that a trajectory began with; nothing where it began with its files alone."""
    record = view.history.begin
    if record is None:
        return b""
    place = path.parent / (PREPARED_NAME if record.is_shared else f"{SNAPSHOTS_NAME}/{view.trajectory}")
    if record.data.data is None and not place.is_dir():
        raise UsageError(
            f"{view.trajectory} began with a state that was let go after a checkpoint, so that its commands cannot be"
            " done again. In a run to come keep more of them with sandbox.container.keep_log_bytes."
        )
    return BlobStore(place, sync=False).get(record.data)


def _config(run_dir: Path) -> ContainerConfig:
    """The run's own settings of its sandboxes, and defaults where they are not to be had."""
    path = run_dir / "config.json"
    try:
        settings: Any = json.loads(path.read_text(encoding="utf-8"))
        return msgspec.convert(settings["sandbox"]["container"], ContainerConfig)
    except FileNotFoundError:
        return ContainerConfig()
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise UsageError(
            f"{path} does not say how the run's sandboxes were made ({type(error).__name__}: {error}). Put it right, or"
            " move it away to replay with the defaults."
        ) from None


def _directory(word: str) -> Path:
    try:
        root = Path(word).resolve()
        is_there = root.is_dir()
    except (OSError, ValueError) as error:
        raise UsageError(f"{word[:100]!r} cannot be a directory: {error}. Name a run directory.") from None
    if not is_there:
        raise UsageError(f"{root} is no directory; name a run directory.")
    return root


def _log_table(logs: Sequence[LogSummary], root: Path) -> str:
    heads = ("trajectory", "commands", "answered", "epochs", "sandboxes", "files", "outcome")
    rows = [tuple(str(getattr(log, head)) for head in heads) for log in logs]
    if len({log.trajectory for log in logs}) < len(logs):
        # A recipe's directory: several runs have a step 0.
        rows = [(str(Path(log.path).relative_to(root)), *row[1:]) for log, row in zip(logs, rows, strict=True)]
    return "\n".join(
        [*_columns([heads, *rows]), *(one_line(f"{log.path}: {log.detail}") for log in logs if log.detail)]
    )


def _replay_table(replayed: Replayed) -> str:
    rows = [("key", "call", "status", "verdict")]
    rows += [(step.key, step.what, step.status, step.verdict.value) for step in replayed.steps]
    lines = _columns(rows) if replayed.steps else [f"{replayed.trajectory} has no commands"]
    lines += [f"note: {note}" for note in replayed.notes]
    lines += [f"{step.key}: {step.difference}" for step in replayed.steps if step.difference]
    return "\n".join(map(one_line, lines))


def _columns(rows: Sequence[tuple[str, ...]]) -> list[str]:
    rows = [tuple(map(one_line, row)) for row in rows]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
