"""A rollout replica: one engine, one log, one weight version at a time.

    opened (log recovered, new epoch) -> serving (weights loaded and acknowledged) -> leaving (`drain`) -> closed

Here: the machine that an actor wraps. Not here: Ray (actors.py), sampling (engine/), the log (wal.py).
"""

import os
import signal
import threading
import time
from collections.abc import Sequence
from concurrent import futures
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import TypeVar

import msgspec
import torch

from rollforward.model.checkpoint import iter_checkpoint
from rollforward.model.config import ModelConfig
from rollforward.model.errors import ModelError
from rollforward.model.train_config import Precision
from rollforward.rollout.config import RolloutConfig
from rollforward.rollout.engine.base import Engine
from rollforward.rollout.engine.kv_store import KvStats, KvStore
from rollforward.rollout.engine.local import LocalEngine
from rollforward.rollout.environment import Ending, EnvironmentConfig, SandboxCounts
from rollforward.rollout.errors import EngineError, WeightsError
from rollforward.rollout.interruptions import Interruption, find_interruptions
from rollforward.rollout.publication import Publication
from rollforward.rollout.tool_environment import build_environment
from rollforward.rollout.types import Completion, FailureType, Request, ResumeStats
from rollforward.rollout.wal import open_log
from rollforward.rollout.wal_commit import WalStats
from rollforward.rollout.wal_retention import Retirement
from rollforward.rollout.wal_scan import Problem
from rollforward.rollout.weights import Canary, WeightsAck, check_version, logprob_bits

_KV_SUFFIX = ".kv"
_SAVING_SHARE = 0.8
"""Of the time to hand over, what saving key-values may take: the log comes first, and they can be computed again."""

_Record = TypeVar("_Record", bound=msgspec.Struct)


class Restarts(msgspec.Struct, frozen=True, kw_only=True):
    """How often a replica's process was replaced within a run, and how long that took; under `resume/` in the log."""

    restarts: int = 0
    """Successors that served."""
    recovery_s: float = 0.0
    """Seconds from noticing a loss to serving again with the current weights, summed."""
    recovery_max_s: float = 0.0
    """The longest of them."""


class EngineFailures(msgspec.Struct, frozen=True, kw_only=True):
    """Why processes of a replica were replaced; under `failure/` in the log."""

    engine_lost: int = 0
    """They died, became unreachable, or their log could not be written."""
    engine_hung: int = 0
    """They gave no sign of life and were killed."""
    engine_refused: int = 0
    """They did not hold the published weights."""
    engine_drained: int = 0
    """They were told to leave where they were. No failure of theirs, and not counted against max_restarts."""


class Beat(msgspec.Struct, frozen=True, kw_only=True):
    """A sign of life of a replica's process."""

    pid: int
    """Of the process, on its node."""
    node: str
    """Where it is."""
    leave_s: float | None
    """Seconds until the process ends by itself because it got SIGTERM; None where it did not."""


class EarlierStats(msgspec.Struct, frozen=True, kw_only=True):
    """What the processes that a replica had before counted, as far as they told: sums, of `*_max_s` the largest."""

    written: WalStats
    """Of their writers."""
    resumed: ResumeStats
    """Of what they took from the log."""
    saved: KvStats
    """Of the key-values that they saved."""
    sandbox: SandboxCounts = SandboxCounts()
    """Of what completions did in sandboxes."""


class LogStats(msgspec.Struct, frozen=True, kw_only=True):
    """What a replica wrote to its log, what it took from it, and where the log ends."""

    replica: str
    """Its name."""
    position: int
    """Sequence number of the last durable record; it grows over restarts, and only a lost or damaged log has a smaller
    one."""
    written: WalStats
    """Counters of the writer."""
    resumed: ResumeStats
    """Counters of what an earlier process had logged."""
    saved: KvStats = KvStats()
    """Counters of the key-values that it saved."""
    sandbox: SandboxCounts = SandboxCounts()
    """Counters of what its completions did in sandboxes of their own."""
    earlier: EarlierStats | None = None
    """The same counters of the processes before this one in the run; None where it is the first. Whoever supervises
    them knows."""
    restarts: Restarts = Restarts()
    """Of its process; whoever supervises it knows them."""
    failures: EngineFailures = EngineFailures()
    """Why; from the same."""
    interruptions: tuple[Interruption, ...] = ()
    """Requests of the step asked for last, and of later ones, that earlier processes left in flight."""


def with_life(earlier: EarlierStats | None, life: LogStats) -> EarlierStats:
    """Return what a replica's processes counted, one more of them included: the last that it told."""
    if earlier is None:
        return EarlierStats(written=life.written, resumed=life.resumed, saved=life.saved, sandbox=life.sandbox)
    return EarlierStats(
        written=_added(earlier.written, life.written),
        resumed=_added(earlier.resumed, life.resumed),
        saved=_added(earlier.saved, life.saved),
        sandbox=_added(earlier.sandbox, life.sandbox),
    )


def _added(one: _Record, other: _Record) -> _Record:
    return msgspec.structs.replace(
        one,
        **{
            name: max(value, getattr(other, name)) if name.endswith("_max_s") else value + getattr(other, name)
            for name, value in msgspec.structs.asdict(one).items()
        },
    )


def _ended(completion: Completion, ending: Ending | None, *, keeps_sandbox: bool) -> Completion:
    """The completion with what it submits. A sandbox that the platform lost at the end makes it one that says nothing
    about the policy, like one that was lost on the way; so does an end that nobody told, which is not an empty
    submission."""
    if completion.failure is not None and completion.failure.is_excluded:
        return completion
    if ending is None:
        if not keeps_sandbox:
            return completion
        return msgspec.structs.replace(
            completion, failure=FailureType.INFRA, detail="nobody told what it left in its sandbox"
        )
    return msgspec.structs.replace(
        completion,
        submission=ending.submission,
        failure=ending.failure or completion.failure,
        detail=ending.detail or completion.detail,
    )


class Pulse:
    """Signs of life of a process, and what it does on SIGTERM: it says so, and ends when nobody came for what it has.

    States: alive -> leaving (SIGTERM) -> the process ends. Made in the main thread; ``beat`` from any.
    """

    def __init__(self, node: str, *, leave_s: float) -> None:
        """Take over SIGTERM.

        Args:
            node: where the process is.
            leave_s: seconds from SIGTERM to the end.
        """
        self._node, self._leave_s = node, leave_s
        self._end_s: float | None = None
        signal.signal(signal.SIGTERM, self._on_sigterm)

    def beat(self) -> Beat:
        """Return a sign of life."""
        left_s = None if self._end_s is None else max(self._end_s - time.monotonic(), 0.0)
        return Beat(pid=os.getpid(), node=self._node, leave_s=left_s)

    def _on_sigterm(self, number: int, frame: FrameType | None) -> None:
        if self._end_s is None:
            self._end_s = time.monotonic() + self._leave_s
            end = threading.Timer(self._leave_s, os._exit, (128 + number,))
            end.daemon = True
            end.start()


class Replica:
    """Owns the log of its name in the run directory; what is durable there survives the process."""

    def __init__(
        self,
        name: str,
        log_directory: Path,
        model_config: ModelConfig,
        *,
        precision: Precision,
        config: RolloutConfig,
        environment: EnvironmentConfig | None = None,
    ) -> None:
        """Open the log (fencing an older process of the same name) and recover what it holds.

        Args:
            name: identity of the replica, the same over restarts.
            log_directory: of this replica alone.
            model_config: the model. precision: number formats.
            config: batching, threads and durability.
            environment: what answers turns; None where no request has tools.

        Raises:
            EnvironmentConfigError, ToolError, SandboxUnavailableError: the environment cannot be built.
            WalLockedError, WalUsageError, WalFencedError, WalWriteError: see ``open_log``.
        """
        torch.set_num_threads(config.threads)
        self.name = name
        self._model_config = model_config
        self._canary: Canary | None = None
        self._load_s = 0.0
        self._generating = threading.Lock()
        with ExitStack() as opened:
            answering = None if environment is None else build_environment(environment, owner=name)
            if answering is not None:
                opened.callback(answering.close)
            self._log, recovered = open_log(log_directory, stream=name, config=config.wal, takeover=True)
            opened.callback(self._log.close)
            self._problems = recovered.problems
            self._interruptions = find_interruptions(recovered, max_attempts=config.max_attempts)
            self._step = 0
            self._publication: Publication | None = None
            if config.ledger is not None:
                scope, life = str(log_directory.parent), f"{name}/{self._log.epoch}"
                self._publication = Publication(config.ledger, scope=scope, life=life, recovered=recovered)
                opened.callback(self._publication.close)
                answering = self._publication.watch(answering)
            self._environment = answering
            tasks = {} if environment is None else environment.tasks
            self._keeping = frozenset(name for name, task in tasks.items() if task.sandbox is not None)
            self._kv_store = KvStore(
                log_directory.with_name(log_directory.name + _KV_SUFFIX),
                model_config,
                precision,
                max_bytes=config.kv_save_bytes,
            )
            self._engine: Engine = LocalEngine(
                model_config,
                precision=precision,
                config=config,
                log=self._log,
                recovered=recovered,
                environment=answering,
                kv_store=self._kv_store,
            )
            self._opened = opened.pop_all()

    def load_weights(self, directory: Path) -> WeightsAck:
        """Take a published version and prove what is held; see ``acknowledge``.

        Raises:
            VersionRefusedError: it is not whole or not this model's. Nothing was touched, the version before serves on.
            WeightsError: the engine failed half-way and serves nothing any more; replace the replica.
            EngineError: requests are in flight or the version does not grow.
        """
        start_s = time.monotonic()
        manifest = check_version(directory, self._model_config)
        stored = iter_checkpoint(directory, self._model_config)
        try:
            self._engine.load_weights(manifest.policy_version, ((spec.name, packed) for spec, packed in stored))
        except ModelError as error:
            raise WeightsError(f"{directory} changed while it was loaded: {error}") from error
        self._canary = manifest.canary
        ack = self.acknowledge()
        self._load_s = time.monotonic() - start_s
        return msgspec.structs.replace(ack, load_s=self._load_s)

    def acknowledge(self) -> WeightsAck:
        """Say what the engine holds now: fingerprints of its own tensors, and what it makes of the fixed prompt."""
        version = self._engine.policy_version
        return WeightsAck(
            replica=self.name,
            policy_version=-1 if version is None else version,
            tensors=self._engine.fingerprints(),
            canary=() if self._canary is None else logprob_bits(self._engine.score(self._canary.token_ids)),
            never_written=len(self._engine.never_written),
            load_s=self._load_s,
        )

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Sample requests to their end; every token returned is durable. See ``Engine.generate``."""
        self._step = max((request.id.step for request in requests), default=self._step)
        with self._generating:
            completions = self._engine.generate(requests)
        if self._environment is not None:
            endings = self._environment.results([completion.id for completion in completions])
            keeping = {request.id for request in requests if request.tools and request.tools.task in self._keeping}
            completions = [_ended(one, endings.get(one.id), keeps_sandbox=one.id in keeping) for one in completions]
        return completions if self._publication is None else self._publication.completions(completions)

    def log_problems(self) -> tuple[Problem, ...]:
        """Return what was wrong with the log when it was opened, with the requests that fail because of it."""
        return self._problems

    def log_stats(self) -> LogStats:
        """Return the log's counters since the replica was opened, and where it ends."""
        return LogStats(
            replica=self.name,
            position=self._log.durable_seq,
            written=self._log.stats(),
            resumed=self._engine.resume_stats(),
            saved=self._kv_store.stats,
            sandbox=SandboxCounts() if self._environment is None else self._environment.counts(),
            interruptions=tuple(one for one in self._interruptions if one.id.step >= self._step),
        )

    def retire(self, before_step: int) -> Retirement:
        """Let the log forget what a durable checkpoint covers. See ``WalWriter.retire``."""
        return self._log.retire(before_step)

    def drain(self, deadline_s: float) -> LogStats:
        """Hand over to a successor that is yet to come: stop at the next step, save key-values and the states of
        completions' sandboxes while there is time, and close the log in order. From any thread; a ``generate`` in
        another one raises PausedError.

        Args:
            deadline_s: seconds until the process may be ended from outside.

        Returns:
            The last counters; requests whose key-values were not saved are prefilled from the log.

        Raises:
            EngineError: a step took longer than the deadline; the log has what was drawn but was not closed.
            WalWriteError, WalFencedError, WalStalledError: the log failed.
        """
        save_until_s = time.monotonic() + _SAVING_SHARE * deadline_s
        self._engine.pause()
        if not self._generating.acquire(timeout=deadline_s):
            raise EngineError(
                f"replica {self.name} is still in a step after {deadline_s:g} s; its log goes on from there"
            )
        try:
            keeping = None if self._environment is None else self._environment.keep(save_until_s - time.monotonic())
            self._engine.save_kv(self._kv_store, has_time=lambda: time.monotonic() < save_until_s)
            if keeping is not None:
                futures.wait([keeping], timeout=max(save_until_s - time.monotonic(), 0.0))
            self.close()
        finally:
            self._generating.release()
        return self.log_stats()

    def close(self) -> None:
        """Make everything durable, give the log back, and end the environment."""
        self._opened.close()
