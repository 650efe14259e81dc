"""`rollforward submit`: the same command line as a job on a Ray cluster, with this source as a wheel.

    command --validated here--> wheel --> job (python -m rollforward.conf.cli VERB ...) --> its log, its exit code

The job's driver finds the cluster by itself (rl/train.py). Not here: starting clusters, and what their machines have
installed.
"""

import asyncio
import contextlib
import logging
import shlex
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import aiohttp
import msgspec
from ray.exceptions import AuthenticationError
from ray.job_submission import JobStatus, JobSubmissionClient

from rollforward.conf import console
from rollforward.conf.errors import SubmitError, UsageError, first_line
from rollforward.conf.jobs import VERBS, last_value, plan_jobs
from rollforward.conf.load import LIBRARY_ENVIRONMENT, decode, library_environment, set_api_address
from rollforward.conf.wheel import build_wheel, source_root

__all__ = ["Submission", "follow", "parse", "runtime_environment", "submit"]


class Submission(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What `submit` was asked for. The settings of the submission itself are those of its help."""

    words: Annotated[tuple[str, ...], msgspec.Meta(min_length=1)]
    """The command that the job runs: a verb and its arguments."""
    address: Annotated[str, msgspec.Meta(pattern="^https?://")]
    """Dashboard of the cluster."""
    working_dir: str | None = None
    """Directory that is uploaded, and in which the job works."""
    submission_id: Annotated[str, msgspec.Meta(pattern=r"^[\w.-]+$")] | None = None
    """Name of the job."""
    wait: bool = True
    """Whether to follow the job to its end."""

    @property
    def entrypoint(self) -> str:
        """The shell command of the job."""
        return shlex.join(["python", "-m", "rollforward.conf.cli", *self.words])


_SUBMITTED = (*(verb for verb in VERBS if verb != "drill"), "resume")
"""Commands that make sense as a job."""
_PAUSE_S = 2.0
"""Before a connection that broke is made again, or a job sent again."""
_NOT_YET = "try again later"
"""In Ray's words where no agent of the cluster can take a job yet."""
_START_S = 180.0
"""How long a head may take from its first answer until it takes jobs."""
_MAX_SILENT = 30
"""Questions without an answer after which nobody is asked any more, about a minute."""
_NETWORK_WORDS = "Is the cluster up, and is this the address of its dashboard (http://HEAD:8265)?"
_TOKEN_WORDS = (
    "Copy ~/.ray/auth_token of the machine that started the cluster to the same place here, or set RAY_AUTH_TOKEN to"
    " what it holds. If the cluster was started with RAY_AUTH_MODE=disabled, set the same here"
)


def submit(arguments: Sequence[str]) -> int:
    """Submits a job and, unless told not to wait, prints its log to standard output.

    Returns:
        The job's exit code; 0 where it is not waited for; 130 where it was stopped.

    Raises:
        UsageError, ConfigError: a mistake in the command line, found before anything is built or sent.
        SubmitError: nothing could be sent.
    """
    asked = parse(arguments)
    _check_command(asked)
    set_api_address(asked.address)
    client = _client(asked.address)
    with tempfile.TemporaryDirectory(prefix="rollforward-wheel-") as directory:
        wheel = build_wheel(source_root(), Path(directory))
        environment = runtime_environment(wheel, working_dir=asked.working_dir)
        job = _send(client, asked, environment)
    console.say(f"job {job} on {asked.address}: {asked.entrypoint}")
    mode = library_environment().get("RAY_AUTH_MODE", "token")
    console.say(f"stop it: RAY_AUTH_MODE={mode} ray job stop --address {asked.address} {job}")
    if (run_dir := _run_dir(asked.words)) is not None:
        files = "" if asked.working_dir is None else f" working_dir={shlex.quote(asked.working_dir)}"
        then = f"rollforward submit resume {shlex.quote(run_dir)} address={asked.address}{files}"
        console.say(f"go on with it later: {then}")
    if not asked.wait:
        return 0
    try:
        asyncio.run(follow(client, job))
    except KeyboardInterrupt:
        console.say(f"job {job} goes on; only the watching has ended")
        raise
    return _exit_code(client, job)


def _send(client: JobSubmissionClient, asked: Submission, environment: Mapping[str, Any]) -> str:
    """Hands the job over and returns its id. A head that has just started answers before it can take one."""
    until_s = time.monotonic() + _START_S
    while True:
        try:
            return client.submit_job(
                entrypoint=asked.entrypoint, runtime_env=dict(environment), submission_id=asked.submission_id
            )
        except (RuntimeError, ValueError) as error:
            if _NOT_YET not in str(error) or time.monotonic() > until_s:
                raise SubmitError(f"{asked.address} refuses the job: {_told(error)}") from error
            time.sleep(_PAUSE_S)
        except OSError as error:  # requests' own errors are of this kind
            raise SubmitError(
                f"{asked.address} answered and then no longer: {_told(error)}. See whether the head still runs, and"
                " submit again: what had arrived is kept under its name"
            ) from error


def parse(arguments: Sequence[str]) -> Submission:
    """Tells the settings of the submission from the command that the job runs.

    Raises:
        UsageError, ConfigError: no verb, no address, or a value that is none.
    """
    own: dict[str, Any] = {}
    words: list[str] = []
    for text in arguments:
        key, sign, value = text.partition("=")
        if sign and key in ("address", "working_dir", "submission_id", "wait"):
            own[key] = {"true": True, "false": False}.get(value, value) if key == "wait" else value
        else:
            words.append(text)
    if words[:1] == ["drill"]:
        raise UsageError(
            "submit takes no drill: a drill kills processes of a cluster of its own, on its machine, while a job's runs"
            " join the job's cluster, whose processes may be on other machines and other people's. To drill such a"
            " machine, log in on a machine of the kind and call rollforward drill there."
        )
    if not words or words[0] not in _SUBMITTED:
        given = words[0] if words else "nothing"
        verbs = f"{', '.join(_SUBMITTED[:-1])} or {_SUBMITTED[-1]}"
        raise UsageError(f"submit is followed by {given}; it takes a command and its arguments: {verbs}.")
    if options := [word for word in words if word.startswith("-")]:
        raise UsageError(f"{options[0]} is not an option of submit. Try the command without submit first.")
    if "address" not in own:
        raise UsageError("submit needs the cluster's dashboard: address=http://HEAD:8265.")
    return decode(Submission, {**own, "words": words})


def runtime_environment(wheel: Path, *, working_dir: str | None = None) -> dict[str, Any]:
    """What Ray sets up for the job's driver and its actors on every machine.

    RAY_AUTH_MODE is not among the variables: the machines of a cluster have theirs.
    """
    variables = {name: value for name, value in LIBRARY_ENVIRONMENT.items() if name != "RAY_AUTH_MODE"}
    environment: dict[str, Any] = {"py_modules": [str(wheel)], "env_vars": variables}
    if working_dir is not None:
        environment["working_dir"] = str(Path(working_dir).resolve())
    return environment


def _check_command(asked: Submission) -> None:
    """Finds here what would end the job there: a wrong setting, a path that no other machine has."""
    if asked.working_dir is not None and not Path(asked.working_dir).is_dir():
        raise SubmitError(f"working_dir={asked.working_dir} is no directory. Name one that is to be uploaded.")
    run_dir = _run_dir(asked.words)
    if run_dir is not None and not Path(run_dir).is_absolute():
        raise SubmitError(
            f"run_dir is {run_dir}; a job has no directory of yours to be relative to, and what it wrote into its own"
            " would go with it. Name an absolute path that all machines of the cluster see."
        )
    verb, *overrides = asked.words
    if verb == "resume":
        if run_dir is None or any("=" not in word for word in overrides[1:]):
            raise UsageError(
                "submit resume takes one directory, what run_dir named, and settings of where it works:"
                " cluster.learner_ranks=2."
            )
        return
    recipe = last_value(overrides, "recipe") or ""
    if recipe.endswith((".yaml", ".yml")) and not Path(recipe).is_absolute() and asked.working_dir is None:
        raise SubmitError(
            f"recipe={recipe} lies here and not where the job works. Set working_dir=DIR, which is uploaded, and name"
            " the recipe relative to it."
        )
    with contextlib.chdir(asked.working_dir or "."):
        jobs = plan_jobs(verb, overrides)
    if run_dir is None and any(job.run_dir is not None for job in jobs):
        raise SubmitError(f"{verb} needs run_dir=DIR here: an absolute path that all machines of the cluster see.")


def _run_dir(words: Sequence[str]) -> str | None:
    if words[0] == "resume":
        return words[1].removeprefix("run_dir=") if len(words) > 1 else None
    return last_value(words[1:], "run_dir")


def _client(address: str) -> JobSubmissionClient:
    for name in ("ray.dashboard.modules.dashboard_sdk", "ray.dashboard.modules.job.sdk"):
        logging.getLogger(name).setLevel(logging.WARNING)
    try:
        return JobSubmissionClient(address)
    except AuthenticationError as error:
        raise SubmitError(f"{address} does not accept the token sent: {_told(error)}. {_TOKEN_WORDS}.") from error
    except (ConnectionError, RuntimeError, OSError) as error:
        raise SubmitError(f"{address} does not answer as a Ray cluster: {_told(error)}. {_NETWORK_WORDS}") from error


def _told(error: Exception) -> str:
    """The first sentence of what Ray says."""
    return first_line(error).partition(". ")[0].rstrip(".")


async def follow(client: JobSubmissionClient, job: str) -> None:
    """Prints the job's log until it has ended; a connection that breaks is taken up where it broke.

    Raises:
        SubmitError: the cluster has stopped answering. The job may go on.
    """
    shown = num_silent = 0
    while True:
        seen = 0
        try:
            async for text in client.tail_job_logs(job):
                console.pass_on(text[max(0, shown - seen) :])
                seen += len(text)
                shown = max(shown, seen)
        except (aiohttp.ClientError, OSError, RuntimeError):
            await asyncio.sleep(_PAUSE_S)
        try:
            if JobStatus(client.get_job_status(job)).is_terminal():
                return
            num_silent = 0
        except (OSError, RuntimeError) as error:
            num_silent += 1
            if num_silent == _MAX_SILENT:
                raise SubmitError(
                    f"the cluster has stopped answering: {_told(error)}. Job {job} goes on if its cluster does; ask for"
                    f" it with: ray job status {job}"
                ) from error
        await asyncio.sleep(_PAUSE_S / 10)


def _exit_code(client: JobSubmissionClient, job: str) -> int:
    info = client.get_job_info(job)
    if info.status == JobStatus.SUCCEEDED:
        return 0
    if info.status == JobStatus.STOPPED:
        console.fail(f"job {job} was stopped")
        return 130
    console.fail(f"job {job} failed: {info.message or 'its log says why'}")
    if info.driver_exit_code is None:
        console.fail(
            "the job's environment could not be made or its driver was lost. Machines of the cluster need python and"
            " pip on the PATH of the process that started Ray, and this project's dependencies in that Python"
        )
    return info.driver_exit_code or 1
