"""Execution of the runs that a command line asks for, one after another, each with its run directory for itself."""

import contextlib
import importlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast

import msgspec

from rollforward.conf import console
from rollforward.conf.errors import ConfigError, told, user_error
from rollforward.conf.jobs import VERBS, Job, addressed_keys
from rollforward.conf.load import write_resolved
from rollforward.conf.resume import record_jobs
from rollforward.conf.run_dir import CONFIG_NAME, check_settings, finish, forget_mistake, held, is_finished

__all__ = ["execute"]


def execute(jobs: Sequence[Job]) -> int:
    """Runs the jobs in order. One that finished earlier in its run_dir is kept; the first that fails ends the rest.

    Raises:
        RunDirError: a run_dir holds a run with other settings, is in use by another process, or cannot be written.
        ConfigError: in place of a mistake that one of several runs raises; names the run.
    """
    for job in jobs:
        if job.run_dir is not None and (moved := check_settings(job.run_dir, job.config)) is not None:
            console.say(moved)
    for index, job in enumerate(jobs):
        place = f"{index + 1} of {len(jobs)}: {job.name}"
        with contextlib.nullcontext() if job.run_dir is None else held(job.run_dir):
            if index == 0:  # held: what a command at work has recorded is not replaced by one that is refused
                _check_ahead(jobs)
                record_jobs(jobs)
            try:
                code = _execute(job, place)
            except Exception as error:
                if len(jobs) == 1 or (mistake := user_error(error)) is None:
                    raise
                raise ConfigError(f"run {job.name}: {_addressed(mistake, job)}") from error
        if code != 0:
            return code
    if jobs and (then := jobs[-1].then):
        console.say(f"next in this recipe: {then}")
    return 0


def _check_ahead(jobs: Sequence[Job]) -> None:
    """Refuses what a later run cannot do here; the first that has work to do asks for itself.

    Raises:
        ConfigError: names the run.
    """
    left = [job for job in jobs if job.run_dir is None or not is_finished(job.run_dir)]
    for index, job in enumerate(left[1:], 1):
        if (name := VERBS[job.verb].ahead) is None:
            continue
        unmade = [one.run_dir for one in left[:index] if one.run_dir is not None]
        check = cast("Callable[[msgspec.Struct, Sequence[Path]], None]", importlib.import_module(name).check)
        try:
            with contextlib.chdir(job.directory or "."):
                check(job.config, unmade)
        except Exception as error:
            if (mistake := user_error(error)) is None:
                raise
            raise ConfigError(
                f"{job.name}, a later run of this recipe, could not begin: {_addressed(mistake, job)}"
            ) from error


def _addressed(mistake: BaseException, job: Job) -> str:
    return addressed_keys(told(mistake), type(job.config), job.name)


def _execute(job: Job, place: str) -> int:
    """Runs one job, which has its run_dir for itself."""
    if job.run_dir is not None:
        if is_finished(job.run_dir):
            console.say(f"run {place} was finished earlier, kept: {job.run_dir}")
            return 0
        console.say(f"run {place} in {job.run_dir}")
        write_resolved(job.config, job.run_dir / CONFIG_NAME)
    start_s = time.monotonic()
    work = cast("Callable[[msgspec.Struct], int | None]", importlib.import_module(VERBS[job.verb].module).main)
    try:
        with contextlib.chdir(job.directory or "."):
            code = work(job.config) or 0
    except BaseException as error:
        if job.run_dir is not None and user_error(error) is not None:
            forget_mistake(job.run_dir)
        elif job.base is not None:
            console.say(f"{job.name} has not finished; it goes on with: rollforward resume {job.base}")
        raise
    if code == 0 and job.run_dir is not None:
        finish(job.run_dir, name=job.name, verb=job.verb, seconds=time.monotonic() - start_s)
    return code
