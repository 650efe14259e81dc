"""A run directory as the command line sees it: who works in it, which settings it was begun with, whether it is done.

    config.json      every setting that it works with now; written before the work
    finished.json    name, verb and seconds; written after it
    lock             held with flock by the process that works here; the kernel frees it, whatever ends that process

What the work itself writes beside them is in rl/ and rollout/.
"""

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Generator
from pathlib import Path
from typing import cast

import msgspec

from rollforward.conf.errors import RunDirError
from rollforward.conf.schema import movable_keys

__all__ = [
    "CONFIG_NAME",
    "FINISHED_NAME",
    "LOCK_NAME",
    "check_settings",
    "finish",
    "forget_mistake",
    "held",
    "is_finished",
]

CONFIG_NAME = "config.json"
"""The settings of the run."""

FINISHED_NAME = "finished.json"
"""Present when the run is done."""

LOCK_NAME = "lock"
"""The locked file; its presence alone means nothing."""

_TRACES = (FINISHED_NAME, "metrics.jsonl", "checkpoints", "weights", "wal", "model", "init")
"""What a run leaves behind that has begun its work; from then on its settings are fixed, but for where it works."""


@contextlib.contextmanager
def held(run_dir: Path) -> Generator[None]:
    """Makes the directory and keeps every other process out of it while the body runs.

    Raises:
        RunDirError: another process works in it, or it cannot be made or written.
    """
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(run_dir / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise RunDirError(f"run_dir={run_dir} cannot be written: {error}. Choose another run_dir.") from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise RunDirError(
                f"{run_dir} is in use by another process; two would overwrite each other's checkpoints. Wait for its"
                " end, or choose another run_dir."
            ) from error
        yield
    finally:
        os.close(descriptor)


def check_settings(run_dir: Path, config: msgspec.Struct) -> str | None:
    """Refuses a directory that holds another run, or one whose settings are lost.

    An absent directory is fine, and so is one of a run that ended at a mistake before its work began: the mistake is
    to be corrected. Where a run works may change (`movable_keys`): a cluster comes back with another size.

    Returns:
        That in a line, unless the run is finished; None where nothing changed.

    Raises:
        RunDirError: it does, with the keys that differ.
    """
    traces = _traces(run_dir)
    if not traces:
        return None
    path = run_dir / CONFIG_NAME
    try:
        before = _flat(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise RunDirError(
            f"{run_dir} holds {', '.join(traces)} of a run but not its {CONFIG_NAME}, so that nobody knows with "
            f"which settings it was begun. Put {CONFIG_NAME} back, or choose another run_dir."
        ) from None
    except (OSError, ValueError) as error:
        raise RunDirError(f"{path} cannot be read: {error}. Put it back, or choose another run_dir.") from error
    now = _flat(msgspec.to_builtins(config))
    changed = sorted(key for key in before.keys() | now.keys() if before.get(key) != now.get(key))
    texts = {key: f"{key} (was {before.get(key, 'absent')}, now {now.get(key, 'absent')})" for key in changed}
    movable = set(movable_keys(config))
    if fixed := [texts[key] for key in changed if key not in movable]:
        raise RunDirError(
            f"{run_dir} holds a run with other settings: {', '.join(fixed[:5])}. A run goes on only as it was begun: "
            "choose another run_dir, or repeat its settings."
        )
    return f"{run_dir} goes on elsewhere: {', '.join(texts.values())}" if texts and not is_finished(run_dir) else None


def forget_mistake(run_dir: Path) -> None:
    """Removes what a run left that ended at a mistake before its first step, an untrained model and metrics without a
    line: with corrected settings they may be others."""
    init, metrics = run_dir / "init", run_dir / "metrics.jsonl"
    is_empty = not metrics.exists() or metrics.stat().st_size == 0
    if is_empty and {*_traces(run_dir)} <= {init.name, metrics.name}:
        metrics.unlink(missing_ok=True)
        shutil.rmtree(init, ignore_errors=True)


def _traces(run_dir: Path) -> list[str]:
    return [name for name in _TRACES if (run_dir / name).exists()]


def is_finished(run_dir: Path) -> bool:
    """Whether the run is done; a mark that a crash or damage left unreadable counts as none."""
    try:
        mark = json.loads((run_dir / FINISHED_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(mark, dict) and "seconds" in mark


def finish(run_dir: Path, *, name: str, verb: str, seconds: float) -> None:
    """Marks the run as done, wholly or not at all."""
    partial = run_dir / f"{FINISHED_NAME}.partial"
    mark = {"name": name, "verb": verb, "seconds": round(seconds, 3)}
    partial.write_text(json.dumps(mark) + "\n", encoding="utf-8")
    partial.replace(run_dir / FINISHED_NAME)


def _flat(data: object, prefix: str = "") -> dict[str, str]:
    """Dotted key, with the place in a list of settings -> JSON of the value."""
    if isinstance(data, dict) and data:
        items = cast("dict[str, object]", data).items()
        inside = [(f"{prefix}.{key}" if prefix else key, value) for key, value in items]
    elif isinstance(data, list | tuple) and data and all(isinstance(one, dict) for one in cast("list[object]", data)):
        inside = [(f"{prefix}[{at}]", value) for at, value in enumerate(cast("list[object]", data))]
    else:
        return {prefix: json.dumps(data)}
    return {path: text for key, value in inside for path, text in _flat(value, key).items()}
