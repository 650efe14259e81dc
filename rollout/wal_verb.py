"""The command `rollforward wal inspect|verify DIR`: what the token logs of a run hold, and whether anything is damaged.

Reads only, so it may look at a log that is being written. Here: finding logs, counting, the table and the JSON. Not
here: reading a log (rollout/wal_recovery.py).
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from rollforward.conf import console
from rollforward.conf.errors import UsageError
from rollforward.rollout.wal_files import EPOCH_NAME, SEGMENT_SUFFIX, parse_segment_name, read_epoch_file
from rollforward.rollout.wal_mirror import mirror_directory
from rollforward.rollout.wal_records import WalConfig
from rollforward.rollout.wal_recovery import RecoveredLog, recover
from rollforward.rollout.wal_scan import FIRST_SEQ, ProblemKind

# Files beside the log that no writer of it made: worth a line, but nothing of the log is bad.
_HARMLESS = (ProblemKind.FOREIGN_FILE, ProblemKind.FOREIGN_STREAM)


class StreamSummary(msgspec.Struct, frozen=True, kw_only=True):
    """What one log holds."""

    stream: str
    """Whose log it is."""
    directory: str
    """Where it lies."""
    epochs: int
    """How often it was opened."""
    segments: int
    """Files."""
    records: int
    """Records that count."""
    retired: int
    """Records before them that were removed, because a checkpoint covers them."""
    requests: int
    """Requests whose opening is intact."""
    finished: int
    """Requests that ended, undamaged."""
    unfinished: int
    """Requests that would go on."""
    failed: int
    """Requests that damage touched."""
    tokens: int
    """Sampled tokens, of the newest attempt of every request."""
    is_sealed: bool
    """Whether its last writer closed it in order."""
    torn_bytes: int
    """Bytes of a write that was cut short; nobody had been told of it, so this is no damage."""
    lost_records: int
    """Records that were durable once and are gone."""
    damaged: int
    """Findings that are damage; what a second copy has healed among them."""
    problems: tuple[str, ...]
    """Every finding in words."""


def main(words: Sequence[str]) -> int:
    """Does what the words after `wal` ask for.

    Returns:
        0; with `verify` 1 where something is damaged.

    Raises:
        UsageError: other words, or no log where they say.

    """
    settings = dict(word.split("=", 1) for word in words if "=" in word)
    rest = [word for word in words if "=" not in word]
    rest += [settings.pop("run_dir")] if "run_dir" in settings else []
    wants_json = settings.pop("json", "false")
    mirror_dir = settings.pop("mirror_dir", None)
    if len(rest) != 2 or rest[0] not in ("inspect", "verify") or settings or wants_json not in ("true", "false"):
        raise UsageError(
            f"wal is followed by {' '.join(words) or 'nothing'}; it takes: wal inspect DIR or wal verify DIR, and then"
            " json=true to print JSON alone, mirror_dir=DIR where second copies lie."
        )
    action, root = rest[0], _root(rest[1])
    streams = [summarise(directory, mirror_dir=mirror_dir) for directory in find_logs(root)]
    if not streams:
        raise UsageError(f"{root} holds no token log; name a run directory, or a log's (run_dir/wal/engine-0).")
    if wants_json == "false":
        console.result(_table(streams))
    totals: dict[str, object] = {
        name: sum(getattr(stream, name) for stream in streams)
        for name in ("records", "requests", "finished", "unfinished", "failed", "tokens", "torn_bytes", "damaged")
    }
    totals["lost_records"] = sum(stream.lost_records for stream in streams)
    console.result(json.dumps(totals | {"streams": [msgspec.to_builtins(stream) for stream in streams]}))
    return 1 if action == "verify" and totals["damaged"] else 0


def _root(word: str) -> Path:
    try:
        root = Path(word).resolve()
        root.exists()
    except (OSError, ValueError) as error:
        raise UsageError(f"{word[:100]!r} cannot be a directory: {error}. Name a run directory, or a log's.") from None
    return root


def find_logs(root: Path) -> list[Path]:
    """Returns the log directories at or below `root`, sorted."""
    named = {path.parent for path in root.rglob(f"*{SEGMENT_SUFFIX}") if parse_segment_name(path.name)}
    return sorted(named | {path.parent for path in root.rglob(EPOCH_NAME) if read_epoch_file(path.parent)})


def summarise(directory: Path, *, mirror_dir: str | None = None) -> StreamSummary:
    """Returns what a log holds.

    Args:
        directory: of one log.
        mirror_dir: as in `wal.mirror_dir`; None for what the settings of its run say, if they lie there.

    """
    mirror = _mirror(directory, mirror_dir)
    log = recover(directory, mirror=mirror)
    epoch = read_epoch_file(directory) or (None if mirror is None else read_epoch_file(mirror))
    harm = [problem for problem in log.problems if problem.kind not in _HARMLESS]
    requests = log.requests.values()
    return StreamSummary(
        stream=directory.name if epoch is None else epoch.stream,
        directory=str(directory),
        epochs=0 if epoch is None else epoch.epoch,
        segments=log.scan.num_segments,
        records=log.scan.num_frames,
        retired=0 if log.scan.mark is None else log.scan.mark.first_seq - FIRST_SEQ,
        requests=len(requests),
        finished=sum(held.is_finished for held in requests),
        unfinished=sum(held.is_unfinished for held in requests),
        failed=len(log.failed),
        tokens=log.num_tokens,
        is_sealed=log.was_sealed,
        torn_bytes=log.scan.torn_bytes,
        lost_records=log.scan.lost_frames,
        damaged=len(harm),
        problems=_problems(log),
    )


def _mirror(directory: Path, mirror_dir: str | None) -> Path | None:
    if mirror_dir is None:
        try:
            config: Any = json.loads((directory.parents[1] / "config.json").read_text(encoding="utf-8"))
            mirror_dir = config["rollout"]["wal"]["mirror_dir"]
        except (OSError, ValueError, LookupError, TypeError, RecursionError):
            mirror_dir = None
    # Settings of a run that anybody may have written.
    if not isinstance(mirror_dir, str) or "\0" in mirror_dir:
        return None
    return mirror_directory(
        WalConfig(level="cluster", mirror_dir=mirror_dir, mirror_same_device=True), directory, makes=False
    )


def _problems(log: RecoveredLog) -> tuple[str, ...]:
    lines: list[str] = []
    for problem in log.problems:
        failed = f"; fails {', '.join(map(str, problem.requests))}" if problem.requests else ""
        lines.append(f"{problem.where}: {problem.kind.value}: {problem.detail}{failed}")
    return tuple(lines)


def _table(streams: Sequence[StreamSummary]) -> str:
    heads = ("stream", "records", "requests", "finished", "unfinished", "failed", "tokens", "torn_bytes", "damaged")
    rows = [heads, *(tuple(str(getattr(stream, head)) for head in heads) for stream in streams)]
    if len({stream.stream for stream in streams}) < len(streams):
        # A recipe's directory: several runs have an engine-0.
        rows = [heads, *((one.directory, *row[1:]) for one, row in zip(streams, rows[1:], strict=True))]
    widths = [max(len(row[column]) for row in rows) for column in range(len(heads))]
    lines = [
        "  ".join(cell.ljust(width) if column == 0 else cell.rjust(width) for column, (cell, width) in enumerate(pairs))
        for pairs in (list(zip(row, widths, strict=True)) for row in rows)
    ]
    for stream in streams:
        lines += [f"{stream.directory}: {problem}" for problem in stream.problems]
    return "\n".join(lines)
