"""What a command asked for, written into its run_dir, so that `rollforward resume RUN_DIR` needs no other word. Where
the work is done may be said anew: `cluster.learner_ranks=2`.

    runs.json   where the command was typed, and every run of it: name, verb, folder, all settings; written before the
                first begins

It lies in the directory that `run_dir=` named: the run's own, or the one above it that the runs of a recipe share.
"""

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from rollforward.conf.errors import ConfigError, RunDirError, UsageError
from rollforward.conf.jobs import VERBS, Job, schema_of
from rollforward.conf.load import decode, is_ray_job_with_files, plain_settings, write_resolved
from rollforward.conf.schema import movable_keys

__all__ = ["RUNS_NAME", "moved", "record_jobs", "recorded_jobs"]

RUNS_NAME = "runs.json"
"""The file."""


class _Run(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One run of the command."""

    name: str
    verb: str
    folder: str
    """Its run_dir, relative to the file's directory."""
    config: dict[str, Any]
    """Every setting, defaults included."""


class _Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the file holds."""

    runs: tuple[_Run, ...]
    """In the order of execution."""
    directory: str | None = None
    """`Job.directory`: what relative paths in the settings are relative to."""
    then: str | None = None
    """`Job.then` of the last one."""


def record_jobs(jobs: Sequence[Job]) -> None:
    """Writes the runs into the directory that they share; jobs without a run_dir are left out.

    A record of which they are only the beginning, but for where they work, keeps its other runs: it is of a longer
    command in the same run_dir.

    Raises:
        RunDirError: the directory cannot be made or written.
    """
    kept = [(job, job.base, job.run_dir) for job in jobs if job.base is not None and job.run_dir is not None]
    if not kept:
        return
    base = kept[0][1]
    runs = tuple(
        _Run(
            name=job.name,
            verb=job.verb,
            folder=run_dir.relative_to(base).as_posix(),
            config=msgspec.json.decode(msgspec.json.encode(job.config)),
        )
        for job, _, run_dir in kept
    )
    path = base / RUNS_NAME
    directory = None if kept[0][0].directory is None else str(kept[0][0].directory)
    record = _Record(runs=runs, directory=directory, then=jobs[-1].then)
    with contextlib.suppress(RunDirError):  # damaged, and written anew
        if path.exists() and _is_beginning([job for job, _, _ in kept], runs, (before := _read(path)).runs):
            record = msgspec.structs.replace(
                before, runs=runs + before.runs[len(runs) :], directory=directory or before.directory
            )
            if record == before:
                return
    try:
        write_resolved(record, path)
    except OSError as error:
        raise RunDirError(f"run_dir={base} cannot be written: {error}. Choose another run_dir.") from error


def _is_beginning(jobs: Sequence[Job], runs: tuple[_Run, ...], before: tuple[_Run, ...]) -> bool:
    """Whether recorded runs begin with these, wherever they work."""
    return len(runs) <= len(before) and all(
        _placeless(job, run) == _placeless(job, old) for job, run, old in zip(jobs, runs, before, strict=False)
    )


def _placeless(job: Job, run: _Run) -> _Run:
    """The run without the settings that say where it works."""
    config = run.config
    for key in movable_keys(job.config):
        config = _with(config, key.split("."), None)
    return msgspec.structs.replace(run, config=config)


def _with(config: Any, path: Sequence[str], value: object) -> Any:
    """A copy of nested mappings with another value at the path; what is no mapping there is left."""
    if not isinstance(config, dict):
        return config
    inner = value if len(path) == 1 else _with(config.get(path[0]), path[1:], value)
    return {**config, path[0]: inner}


def moved(jobs: Sequence[Job], overrides: Sequence[str]) -> list[Job]:
    """The jobs with other settings of where they work.

    Args:
        jobs: recorded ones.
        overrides: `cluster.learner_ranks=2` for every run that has the key, `NAME.cluster.learner_ranks=2` for one.

    Raises:
        UsageError: the setting says what a run computes, or no run has it.
        ConfigError: the value is none.
    """
    configs = {job.name: job.config for job in jobs}
    changed: dict[str, Any] = {}
    for key, value in plain_settings(overrides):
        head, _, rest = key.partition(".")
        names = [head] if head in configs else list(configs)
        path = rest if head in (*configs, "all") else key
        having = [name for name in names if path in movable_keys(configs[name])]
        if not having:
            keys = dict.fromkeys(path for name in names for path in movable_keys(configs[name]))
            raise UsageError(
                f"{key}={value}: a run goes on with the settings that it was begun with, and only where it works may"
                f" change: {', '.join(keys) or 'nothing of these runs'}. Leave it out, or begin another run with"
                " another run_dir."
            )
        for name in having:
            data = changed.get(name) or msgspec.to_builtins(configs[name])
            changed[name] = _with(data, path.split("."), value)
    # Decoded when all are in: fewer ranks and a smaller optim.zero_size are valid only together.
    configs |= {name: decode(type(configs[name]), data) for name, data in changed.items()}
    return [job._replace(config=configs[job.name]) for job in jobs]


def recorded_jobs(run_dir: Path) -> list[Job]:
    """The runs that were begun in a directory, to be executed again.

    Args:
        run_dir: what `run_dir=` named, or the directory of one run of a recipe: then the runs up to that one.

    Raises:
        RunDirError: no command has begun there, what it left is damaged or was moved, or the directory is gone in which
            it was typed.
        ConfigError: this version no longer knows a setting of the run.
    """
    if not run_dir.is_dir():
        raise RunDirError(f"{run_dir} is no directory. Name what run_dir= named, or what the run printed.")
    for base in (run_dir, run_dir.parent):
        if (base / RUNS_NAME).is_file():
            record = _read(base / RUNS_NAME)
            places = [(base / run.folder).resolve() for run in record.runs]
            if base == run_dir:
                return _jobs(base, record)
            if run_dir in places:
                runs = record.runs[: places.index(run_dir) + 1]
                then = record.then if len(runs) == len(record.runs) else f"rollforward resume {base}"
                return _jobs(base, msgspec.structs.replace(record, runs=runs, then=then))
    raise RunDirError(
        f"{run_dir} holds no {RUNS_NAME}, which a command writes before its work. Name the directory that run_dir="
        " named, or repeat the command with it."
    )


def _jobs(base: Path, record: _Record) -> list[Job]:
    directory = _directory(base, record)
    jobs: list[Job] = []
    for run in record.runs:
        where = f"{base / RUNS_NAME}, run {run.name}"
        if run.verb not in VERBS:
            raise RunDirError(f"{where}: {run.verb} is no verb of this version; verbs are {', '.join(VERBS)}.")
        place = (base / run.folder).resolve()
        if run.config.get("run_dir") != str(place):
            raise RunDirError(
                f"{where}: the run was begun in {run.config.get('run_dir')} and lies in {place} now; its settings name"
                " the old place. Move it back."
            )
        try:
            config = decode(schema_of(run.verb), run.config)
        except ConfigError as error:
            raise ConfigError(f"{where}, which was begun with another version: {error}") from error
        jobs.append(Job(run.name, run.verb, config, place, base, directory=directory))
    jobs[-1] = jobs[-1]._replace(then=record.then)
    return jobs


def _directory(base: Path, record: _Record) -> Path | None:
    """Where the runs go on: where the command was typed, unless files came along with the job that this process is."""
    if record.directory is None or is_ray_job_with_files():
        return None
    directory = Path(record.directory)
    if not directory.is_dir():
        raise RunDirError(
            f"{base / RUNS_NAME}: the command was typed in {directory}, which relative paths in its settings are"
            f" relative to, and which is no directory now. Put it back, or repeat the command with run_dir={base} where"
            " these files are now; a job takes them with working_dir=DIR."
        )
    return directory


def _read(path: Path) -> _Record:
    try:
        record = msgspec.json.decode(path.read_bytes(), type=_Record)
    except (OSError, msgspec.MsgspecError) as error:
        raise RunDirError(
            f"{path} cannot be read: {error}. Repeat the command that began the run, with run_dir={path.parent}: it"
            " writes the file anew."
        ) from error
    if not record.runs:
        raise RunDirError(f"{path} names no run. Repeat the command with run_dir={path.parent}.")
    return record
