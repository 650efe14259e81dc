"""Where a run's processes work: joining a cluster or starting one, and waiting for the ranks of the learner there.

Not here: replicas (rollout/placement.py), which are replaced, and what an actor does (actors.py).
"""

import os
import re
import socket
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray._private.services import canonicalize_bootstrap_address  # what `ray.init` makes of an address, "auto" too
from ray.exceptions import RayActorError

from rollforward.conf import console
from rollforward.conf.errors import SubmitError, first_line
from rollforward.conf.load import is_ray_job
from rollforward.conf.wheel import build_wheel, source_root
from rollforward.model.errors import ModelError
from rollforward.rl.config import ClusterConfig
from rollforward.rl.errors import ClusterError, LostProcessError
from rollforward.rollout.placement import ActorProcess, lacking

_ANSWER_S = 10.0
"""That a cluster's head may take to accept a connection."""

_GO_ON = "what was durable is kept; `rollforward resume` with the run's directory goes on from the last checkpoint"


def join_cluster(cluster: ClusterConfig) -> None:
    """Connect to the cluster that the configuration or a Ray job names, or start a local one.

    Raises:
        ClusterError: it cannot be joined, or a local one is asked for resources.
    """
    quiet: dict[str, Any] = {"configure_logging": False, "log_to_driver": False}
    if is_ray_job():  # it brings its code along
        ray.init(cluster.address, **quiet)
    elif cluster.address is not None:
        _join(cluster.address, quiet)
    else:
        check_cluster(cluster)
        _start(cluster.num_cpus, quiet)


def check_cluster(cluster: ClusterConfig) -> None:
    """Refuse a cluster that does not answer, and resources of a local one; nothing is joined or started.

    Raises:
        ClusterError: names the setting.
    """
    if is_ray_job():  # its cluster has answered
        return
    if cluster.address is not None:
        _head(cluster.address)
    elif cluster.replica_resources or cluster.learner_resources:
        raise ClusterError(
            "cluster.replica_resources or learner_resources is set, but the run starts a cluster of its own, whose one"
            " node has none. Leave them out, or set cluster.address"
        )


def _head(address: str) -> str | None:
    """What ``ray.init`` makes of an address, once somebody has accepted a connection there."""
    try:
        found = canonicalize_bootstrap_address(address)
        host, _, port = (found or address).rpartition(":")
        socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWER_S).close()
    except (OSError, ValueError) as error:
        raise ClusterError(
            f"cluster.address is {address}, where no Ray cluster answers: {first_line(error)}. Start one (`ray start"
            " --head`), or set the address that its head tells (HEAD:6379)"
        ) from error
    return found


def _start(num_cpus: int | None, quiet: Mapping[str, Any]) -> None:
    """Start a cluster of this machine alone."""
    try:  # "local": not one that somebody started on this machine, nor that of RAY_ADDRESS
        ray.init("local", num_cpus=num_cpus, include_dashboard=False, **quiet)
    except Exception as error:  # Ray has no class for it
        if "timed out during startup" not in str(error):
            raise
        raise ClusterError(
            f"Ray's processes did not come up in the 30 s that Ray gives them, on a machine with a load of"
            f" {os.getloadavg()[0]:.0f}. Let what else works on it end, then `rollforward resume` with the run's"
            " directory goes on"
        ) from error


def _join(address: str, quiet: Mapping[str, Any]) -> None:
    """Connect to a running cluster; its nodes get this source tree, so that they run what runs here."""
    found = _head(address)
    with tempfile.TemporaryDirectory(prefix="rollforward-wheel-") as directory:
        environment: dict[str, list[str]] = {}
        try:
            environment["py_modules"] = [str(build_wheel(source_root(), Path(directory)))]
        except SubmitError as error:
            console.say(f"the nodes of {address} work with the code that is installed there: {first_line(error)}")
        try:
            ray.init(found, runtime_env=environment, **quiet)
        except (ConnectionError, RuntimeError) as error:  # Ray has no class for what keeps versions or tokens apart
            raise ClusterError(
                f"cluster.address is {address}, where a Ray cluster answers that cannot be joined: {_reason(error)}. It"
                " takes the same versions of Ray and Python here and there, and the token of the machine that started"
                " it (~/.ray/auth_token)"
            ) from error


def _reason(error: BaseException) -> str:
    """What Ray says last, in a line; a traceback may be part of its text."""
    text = str(error.__cause__ or error)
    said = _last_line(text) if "Traceback" in text else " ".join(text.split())
    return said.partition(" Ensure that")[0].rstrip(".")


def lacking_code(error: RayActorError) -> ClusterError | None:
    """Return what to say of an actor whose class a node could not import; None where it was something else."""
    text = str(error)
    found = re.search(r"actor with name (\w+) failed to import", text)
    if found is None:
        return None
    where = re.search(r"\bip=([\w.:]+)", text)
    return ClusterError(
        f"the Python of node {where[1] if where else 'of unknown address'} cannot make a {found[1]}:"
        f" {_last_line(text)}. Every node needs the packages that rollforward depends on, in the versions of this"
        " machine: install them there"
    )


def _last_line(text: str) -> str:
    return text.strip().splitlines()[-1]


@dataclass(frozen=True)
class Patience:
    """How long the ranks are waited for, seconds."""

    start_s: float = 180.0
    """For a process to come up."""
    silent_s: float = 60.0
    """Without a sign of life."""
    period_s: float = 2.0
    """Between questions for one."""


@dataclass
class _Rank:
    """One rank as it is waited for."""

    name: str
    actor: Any
    process: ActorProcess
    beat: Any = None
    """Sign of life that was asked for and has not come."""
    silent_s: float = 0.0
    """Time since the last one, as far as somebody was there to see it."""


class Ranks:
    """Waits for the answers of all ranks, while they give signs of life. One thread.

    A rank is not replaced: its peers hold nothing without it. One that dies, hangs or finds no place ends the call that
    waits for it, in bounded time and by its name; the run goes on from its checkpoint.
    """

    def __init__(self, actors: Sequence[Any], patience: Patience, resources: Mapping[str, float]) -> None:
        """Wait for every process to come up.

        Args:
            actors: of ``LearnerActor``; rank 0 first.
            patience: bounds.
            resources: that an actor asks of its node; told where there is no place.

        Raises:
            LostProcessError: one does not.
        """
        self._patience, self._resources = patience, resources
        self._ranks = [
            _Rank(f"rank {rank} of the learner", actor, ActorProcess(actor)) for rank, actor in enumerate(actors)
        ]
        self._meet()

    def _meet(self) -> None:
        """Wait for every process to come up."""
        beats = [rank.actor.beat.remote() for rank in self._ranks]
        ray.wait(beats, num_returns=len(beats), timeout=self._patience.start_s)
        for rank, beat in zip(self._ranks, beats, strict=True):
            if not ray.wait([beat], timeout=0)[0]:
                why = lacking(self._resources, what="a rank of the learner", key="cluster.learner_resources")
                raise LostProcessError(
                    f"no process of {rank.name} came up within {self._patience.start_s:g} s (rollout.start_timeout_s):"
                    f" {why or 'there is no room, or it hangs'}. Nothing is lost; `rollforward resume` with the run's"
                    " directory goes on then"
                )
            rank.process.met(ray.get(beat))

    def wait(self, calls: Sequence[Any]) -> list[Any]:
        """Return all answers, while every rank gives signs of life."""
        waiting, looked_s = list(calls), time.monotonic()
        for rank in self._ranks:
            rank.silent_s = 0.0
        while waiting:
            self._ask_for_life()
            answered, waiting = ray.wait(waiting, num_returns=len(waiting), timeout=self._patience.period_s)
            try:
                self._raise_errors(calls, answered)
            except (ModelError, RuntimeError) as error:  # of a peer perhaps, and whom it waited for is the one to name
                self._name_the_lost(error)
                raise
            now_s = time.monotonic()
            # While this process itself was stopped, nobody could be heard.
            self._hear(min(now_s - looked_s, 2 * self._patience.period_s))
            looked_s = now_s
        return ray.get(list(calls))

    def _ask_for_life(self) -> None:
        for rank in self._ranks:
            if rank.beat is None:
                rank.beat = rank.actor.beat.remote()

    def _hear(self, elapsed_s: float) -> None:
        """Take what signs of life there are, and end the wait for a rank that gives none."""
        for rank in self._ranks:
            if rank.beat is not None and ray.wait([rank.beat], timeout=0)[0]:
                self._take(rank)
                continue
            rank.silent_s += elapsed_s
            if rank.silent_s > self._patience.silent_s:
                self._give_up(rank, f"has given no sign of life for {rank.silent_s:.0f} s")

    def _name_the_lost(self, error: Exception) -> None:
        """Ask who is still there, for as long as a rank may be silent.

        Raises:
            LostProcessError: a rank is not.
        """
        self._ask_for_life()
        beats = [rank.beat for rank in self._ranks]
        ray.wait(beats, num_returns=len(beats), timeout=self._patience.silent_s)
        for rank in self._ranks:
            if not ray.wait([rank.beat], timeout=0)[0]:
                self._give_up(rank, f"gives no sign of life; a peer says: {first_line(error)}")
            self._take(rank)

    def _raise_errors(self, calls: Sequence[Any], answered: Sequence[Any]) -> None:
        """Raise what a rank answered in place of an answer; that one is gone, before what its peers say of it."""
        for call, rank in zip(calls, self._ranks, strict=False):  # rank 0 may be asked alone
            if call in answered:
                try:
                    ray.get(call)
                except RayActorError as error:
                    self._lost(rank, error)
                except (ModelError, RuntimeError):
                    continue
        ray.get(list(answered))

    def _take(self, rank: _Rank) -> None:
        """Take a sign of life that has come, or that there will be none."""
        beat, rank.beat, rank.silent_s = rank.beat, None, 0.0
        try:
            ray.get(beat)
        except RayActorError as error:
            self._lost(rank, error)

    def _lost(self, rank: _Rank, error: RayActorError) -> None:
        """Say whose process is gone.

        Raises:
            LostProcessError: always.
        """
        where = "with its node" if "node has died" in str(error) else "or cannot be reached"
        raise LostProcessError(
            f"{rank.name} (pid {rank.process.pid} on node {rank.process.node}) died {where} ({type(error).__name__});"
            f" {_GO_ON}. The kernel ends a process when memory runs out (see dmesg): then lower micro_batch_tokens"
        ) from error

    def _give_up(self, rank: _Rank, what: str) -> None:
        """End what is left of a rank.

        Raises:
            LostProcessError: always.
        """
        rank.process.kill()
        raise LostProcessError(
            f"{rank.name} (pid {rank.process.pid} on node {rank.process.node}) {what}"
            f" (cluster.learner_heartbeat_timeout_s) and is killed; {_GO_ON}"
        )
