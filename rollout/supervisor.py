"""Keeps replicas alive: who is dead, hung or told to leave is replaced, takes the current weights, and goes on.

    absent --start--> coming --first sign of life--> open --weights, hashes checked--> ready --calls--> ready
       ^                                               |                                 |
       +---- killed; the successor fences it <---------+------- lost, hung, wrong -------+
       +---- handed over within its time <-------------+------- told to leave -----------+

A replica is the same over all its processes: one name, one log. What the log holds of a request is kept, the rest is
drawn again to the same bits, so whatever was in flight is simply asked again. An answer of a process that was given up
is never looked at, and its log has a newer epoch, so it can publish nothing.

Here: when what happens, without Ray and without a clock of its own. Not here: processes and messages
(rollout/placement.py), what a process does (rollout/replica.py), which replica has which request (rollout/router.py).
"""

import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from rollforward.conf.errors import first_line
from rollforward.rollout.config import RolloutConfig
from rollforward.rollout.drain_file import Notices
from rollforward.rollout.errors import (
    EngineError,
    RolloutError,
    RolloutLostError,
    VersionRefusedError,
    WalRefusedError,
    WalStalledError,
    WalWriteError,
    WeightsError,
    WorkerLostError,
)
from rollforward.rollout.replica import Beat, EarlierStats, EngineFailures, LogStats, Restarts, with_life
from rollforward.rollout.router import merge_completions, split_requests
from rollforward.rollout.types import Completion, Request
from rollforward.rollout.wal_retention import Retirement
from rollforward.rollout.wal_scan import Problem
from rollforward.rollout.weights import WeightsAck, WeightsManifest, check_acknowledgement, read_manifest
from rollforward.rollout.worker import Host, Worker

_HAND_OVER_GRACE_S = 5.0
"""What the answer that a replica has handed over may take beyond the replica's time."""


class _ToldToLeave(Exception):  # noqa: N818 - no error: thrown into a replica's steps to turn them
    """Thrown into the steps of a replica that must leave where it is."""

    def __init__(self, deadline_s: float) -> None:
        super().__init__(deadline_s)
        self.deadline_s = deadline_s


class _HungError(WorkerLostError):
    """The process gives no sign of life."""


@dataclass(frozen=True)
class _Awaited:
    """What a replica's steps wait for."""

    call: object
    limit_s: float | None = None
    """Seconds that the answer may take; None where signs of life alone decide."""
    overdue: Callable[[], RolloutError] | None = None
    """Says what is thrown into the steps after the limit; None is for a process that hangs."""


_Steps = Generator[_Awaited, None, Any]


@dataclass
class _Replica:
    """One replica over all its processes."""

    index: int
    name: str
    worker: Worker | None = None
    is_met: bool = False
    is_open: bool = False
    is_leaving: bool = False
    ack: WeightsAck | None = None
    """What the process holds, once it was checked."""
    problems: list[Problem] = field(default_factory=list[Problem])
    beat: object | None = None
    """Sign of life that was asked for and has not come."""
    silent_s: float = 0.0
    """Time since the last sign of life, as far as somebody was there to see one."""
    num_restarts: int = 0
    """Under the current weight version."""
    gone_s: float | None = None
    """Since when it serves nobody; None while it does."""
    restarts: Restarts = field(default_factory=Restarts)
    failures: EngineFailures = field(default_factory=EngineFailures)
    told: LogStats | None = None
    """Counters that the process told last."""
    earlier: EarlierStats | None = None
    """Counters of those before it."""

    def forget(self) -> None:
        """Its process is no more."""
        if self.told is not None:
            self.earlier, self.told = with_life(self.earlier, self.told), None
        self.worker = self.ack = self.beat = None
        self.is_met = self.is_open = self.is_leaving = False
        self.silent_s = 0.0


@dataclass
class _Task:
    """The steps of one replica towards one answer."""

    replica: _Replica
    steps: _Steps
    awaited: _Awaited | None = None
    """None where the answer is there."""
    waited_s: float = 0.0
    answer: Any = None

    def go(self, turn: Exception | None = None) -> None:
        """Go on to the next wait or to the end, turned by an exception if there is one."""
        self.waited_s = 0.0
        try:
            self.awaited = next(self.steps) if turn is None else self.steps.throw(turn)
        except StopIteration as over:
            self.awaited, self.answer = None, over.value


class Supervisor:
    """All replicas as the controller sees them: plain calls that wait for their answer and survive whom they ask.

    States of a replica: see the module. One thread. Between calls nobody looks; what died meanwhile is found by the
    next call. Every call ends: with answers, or with an error in bounded time.
    """

    def __init__(
        self,
        host: Host,
        names: Sequence[str],
        config: RolloutConfig,
        *,
        notices: Callable[[], Notices] = dict,
        announce: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin every replica's process; nothing is waited for yet.

        Args:
            host: where processes come from.
            names: of the replicas; the order decides which one serves which request.
            config: patience and bounds.
            notices: who else was told to leave, asked again and again; each is told once.
            announce: tells a person what happened.
            clock: seconds that only grow.
        """
        self._host, self._config, self._announce, self._clock = host, config, announce, clock
        self._more_notices = notices
        self._leave_by_s: dict[str, float] = {}
        self._manifest: WeightsManifest | None = None
        self._directory = Path()
        self._looked_s = self._beat_due_s = 0.0
        self._replicas = [
            _Replica(index=index, name=name, worker=host.start(index)) for index, name in enumerate(names)
        ]

    def load_weights(self, directory: Path) -> list[WeightsAck]:
        """Load a published version on every replica; each has proved by hashes that it holds it.

        Raises:
            EngineError: the version does not grow.
            VersionRefusedError: the directory is absent, half, damaged or another model's. The version before stays in
                service: a replica that had taken the new one before another refused it is started again.
            RolloutLostError: a replica was lost too often, or holds something else again and again.
        """
        manifest = read_manifest(directory)
        if self._manifest is not None and manifest.policy_version <= self._manifest.policy_version:
            raise EngineError(
                f"weights {manifest.policy_version} came after {self._manifest.policy_version}; versions only grow"
            )
        before = self._manifest, self._directory
        self._manifest, self._directory = manifest, directory
        try:
            acks = self._run(lambda _: None)
        except VersionRefusedError:
            self._manifest, self._directory = before
            for replica in self._replicas:
                if replica.ack is not None and replica.ack.policy_version == manifest.policy_version:
                    self._end(replica)
            raise
        for replica in self._replicas:
            replica.num_restarts = 0
        return acks

    def acknowledge(self) -> list[WeightsAck]:
        """Let every replica hash what it holds now."""
        return self._run(lambda replica: _worker(replica).acknowledge())

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Sample on all replicas; answers in the order of the requests.

        Raises:
            RolloutLostError: a replica was lost too often, or there is no place for it.
            EngineInputError, EngineError, WalFencedError: see ``Engine.generate``; nothing is asked again.
        """
        shares = split_requests(requests, len(self._replicas))
        answers = self._run(lambda replica: _worker(replica).generate(shares[replica.index]))
        return merge_completions(requests, answers)

    def log_problems(self) -> list[Problem]:
        """Return what was wrong with the replicas' logs when they were opened."""
        if self._manifest is None:
            self._run(lambda _: None)
        return [problem for replica in self._replicas for problem in replica.problems]

    def log_stats(self) -> list[LogStats]:
        """Return every replica's log counters, those of its earlier processes as they told them last, and how often it
        was started again."""
        stats: list[LogStats] = self._run(lambda replica: _worker(replica).log_stats())
        for one, replica in zip(stats, self._replicas, strict=True):
            replica.told = one
        return [
            msgspec.structs.replace(one, earlier=replica.earlier, restarts=replica.restarts, failures=replica.failures)
            for one, replica in zip(stats, self._replicas, strict=True)
        ]

    def retire(self, before_step: int) -> list[Retirement]:
        """Let every replica's log forget what a durable checkpoint covers."""
        return self._run(lambda replica: _worker(replica).retire(before_step))

    def close(self) -> None:
        """Close every replica's log in order. A process that is lost now has nothing durable to lose; it is told."""
        self._drive([_Task(replica, self._close(replica)) for replica in self._replicas if replica.is_open])

    def _run(self, ask: Callable[[_Replica], object | None]) -> list[Any]:
        """Bring every replica to readiness, ask it, and return the answers; without a question what it holds."""
        tasks = [_Task(replica, self._serve(replica, ask)) for replica in self._replicas]
        self._drive(tasks)
        for task in tasks:
            if isinstance(task.answer, VersionRefusedError):
                raise task.answer
        return [task.answer for task in tasks]

    def _serve(self, replica: _Replica, ask: Callable[[_Replica], object | None]) -> _Steps:
        """The steps to one answer, however many processes it takes."""
        while True:
            try:
                yield from self._make_ready(replica)
                call = ask(replica)
                return replica.ack if call is None else (yield from self._answer(call))
            except _ToldToLeave as told:
                yield from self._hand_over(replica, told.deadline_s)
            except VersionRefusedError as error:
                return error  # another process would refuse it too; raised when nobody is half-way any more
            except (WorkerLostError, WalWriteError, WalStalledError, WeightsError) as error:
                self._give_up(replica, error)

    def _make_ready(self, replica: _Replica) -> _Steps:
        """The steps from whatever state to one with the current weights."""
        if replica.worker is None:
            replica.worker = self._host.start(replica.index)
        worker = replica.worker
        if not replica.is_met:
            worker.met((yield from self._answer(worker.beat(), self._config.start_timeout_s, self._absence)))
            replica.is_met = True
        if not replica.is_open:
            yield from self._answer(worker.open())
            problems: Sequence[Problem] = yield from self._answer(worker.log_problems())
            replica.is_open = True
            replica.problems += problems
            if replica.gone_s is not None:
                for problem in problems:
                    self._announce(f"token log, {problem.where}: {problem.kind}: {problem.detail}")
        if self._manifest is not None and not _holds(replica, self._manifest):
            ack: WeightsAck = yield from self._answer(worker.load_weights(self._directory))
            check_acknowledgement(self._manifest, ack)
            replica.ack = ack
        if replica.gone_s is not None:
            away_s = self._clock() - replica.gone_s
            before = replica.restarts
            replica.restarts = Restarts(
                restarts=before.restarts + 1,
                recovery_s=before.recovery_s + away_s,
                recovery_max_s=max(before.recovery_max_s, away_s),
            )
            replica.gone_s = None
            version = "" if replica.ack is None else f" with weights {replica.ack.policy_version}"
            self._announce(f"{replica.name} serves again{version} after {away_s:.1f} s")

    def _hand_over(self, replica: _Replica, deadline_s: float) -> _Steps:
        """The steps of a replica that must leave; its successor is placed by whoever asks next."""
        replica.is_leaving = True
        self._announce(f"{replica.name} leaves where it is within {deadline_s:.0f} s and goes on elsewhere")
        if replica.worker is not None and replica.is_open:
            try:
                drain = replica.worker.drain(deadline_s)
                replica.told = last = yield from self._answer(drain, deadline_s + _HAND_OVER_GRACE_S)
                self._announce(f"{replica.name} handed over; key-values of {last.saved.saved} requests are saved")
            except (RolloutError, OSError) as error:
                self._announce(f"{replica.name} did not hand over ({first_line(error)}); its log is what it leaves")
        self._end(replica)
        replica.failures = _counted(replica.failures, "engine_drained")

    def _absence(self) -> RolloutError:
        """Why no process came up in time; where none can, asking again is of no use."""
        late = f"no process came up within {self._config.start_timeout_s:g} s (rollout.start_timeout_s): "
        if (lacking := self._host.lacking()) is None:
            return WorkerLostError(late + "there is no room, or it hangs")
        return RolloutLostError(
            f"{late}{lacking}. What is durable is kept: `rollforward resume` with the run's directory goes on then"
        )

    def _answer(
        self, call: object, limit_s: float | None = None, overdue: Callable[[], RolloutError] | None = None
    ) -> _Steps:
        """The steps to the answer of one call."""
        yield _Awaited(call, limit_s, overdue)
        return self._host.result(call)

    def _give_up(self, replica: _Replica, error: Exception) -> None:
        """End what is left of a process, unless its replica was lost too often, or no successor could open its log.

        Raises:
            RolloutLostError: so it is.
        """
        is_of_no_use = isinstance(error, WalRefusedError) and not replica.is_open
        kind = "engine_hung" if isinstance(error, _HungError) else "engine_lost"
        kind = "engine_refused" if isinstance(error, WeightsError) else kind
        replica.failures = _counted(replica.failures, kind)
        self._end(replica)
        if is_of_no_use:
            raise RolloutLostError(f"{replica.name}: {first_line(error)}") from error
        allowed = self._config.max_restarts
        if replica.num_restarts >= allowed:
            raise RolloutLostError(
                f"{replica.name} was lost {replica.num_restarts + 1} times within a step, the last time because"
                f" {first_line(error).rstrip('.')}. rollout.max_restarts allows {allowed}. What is durable is kept:"
                " look at the cause (dmesg says whom the kernel ended for memory; rollout.max_batch_requests lowers"
                " what is needed), then `rollforward resume` with the run's directory goes on"
            ) from error
        replica.num_restarts += 1
        self._announce(
            f"{replica.name}: {first_line(error)}; started again from its log ({replica.num_restarts} of {allowed})"
        )

    def _end(self, replica: _Replica) -> None:
        if replica.worker is not None:
            replica.worker.kill()
        replica.forget()
        self._leave_by_s.pop(replica.name, None)
        if replica.gone_s is None:
            replica.gone_s = self._clock()

    def _close(self, replica: _Replica) -> _Steps:
        try:
            yield from self._answer(_worker(replica).close())
        except (_ToldToLeave, WorkerLostError) as error:
            self._announce(
                f"{replica.name} did not close its log in order ({first_line(error)}); what is there is kept"
            )
        finally:
            replica.forget()

    def _drive(self, tasks: Sequence[_Task]) -> None:
        """Take all steps to their ends, whichever can go on first."""
        self._looked_s = self._beat_due_s = self._clock()
        for task in tasks:
            task.go()
        while waiting := [task for task in tasks if task.awaited is not None]:
            self._look(waiting)

    def _look(self, waiting: Sequence[_Task]) -> None:
        """Wait a moment for answers and signs of life, and turn the steps of whoever has one or lacks one."""
        period_s = self._config.heartbeat_s
        if self._clock() >= self._beat_due_s:
            self._beat_due_s = self._clock() + period_s
            self._ask_around(waiting)
        tasks = {task.awaited.call: task for task in waiting if task.awaited is not None}
        beats = {task.replica.beat: task for task in waiting if task.replica.beat is not None}
        answered = self._host.wait([*tasks, *beats], min(max(self._beat_due_s - self._clock(), 0.0), period_s))
        now_s = self._clock()
        # While this process itself was stopped, nobody could be heard.
        elapsed_s = min(now_s - self._looked_s, period_s)
        self._looked_s = now_s
        for call in answered:
            if call in tasks:
                tasks[call].replica.silent_s = 0.0
                tasks[call].go()
        for call in answered:
            if call in beats:
                self._take_beat(beats[call], call)
        for task in waiting:
            self._count_silence(task, elapsed_s)
        for task in waiting:
            if task.awaited is not None and not task.replica.is_leaving:
                leave_by_s = self._leave_by_s.pop(task.replica.name, None)
                if leave_by_s is not None:
                    task.go(_ToldToLeave(max(leave_by_s - now_s, 0.0)))

    def _ask_around(self, waiting: Sequence[_Task]) -> None:
        """Ask for signs of life, and whether somebody must leave."""
        met = [task.replica for task in waiting if task.replica.is_met]
        for replica in met:
            if replica.beat is None:
                replica.beat = _worker(replica).beat()
        placed = {replica.name: _worker(replica) for replica in met}
        for notices in (self._host.notices(placed), self._more_notices()):
            for name, seconds in notices.items():
                self._must_leave(name, seconds)

    def _must_leave(self, name: str, seconds: float | None) -> None:
        within_s = self._config.drain_s if seconds is None else seconds
        self._leave_by_s.setdefault(name, self._clock() + within_s)

    def _take_beat(self, task: _Task, call: object) -> None:
        """A sign of life, or that there will be none."""
        replica = task.replica
        if replica.beat is not call:
            return
        replica.beat = None
        try:
            beat: Beat = self._host.result(call)
        except WorkerLostError as error:
            if task.awaited is not None:
                task.go(error)
            return
        replica.silent_s = 0.0
        if beat.leave_s is not None:
            self._must_leave(replica.name, beat.leave_s)

    def _count_silence(self, task: _Task, elapsed_s: float) -> None:
        """Turn the steps of who took too long."""
        if task.awaited is None:
            return
        replica = task.replica
        task.waited_s += elapsed_s
        limit_s = task.awaited.limit_s
        if limit_s is not None and task.waited_s > limit_s:
            overdue = task.awaited.overdue
            task.go(_HungError(f"no answer within {limit_s:.0f} s") if overdue is None else overdue())
        elif replica.is_met:
            replica.silent_s += elapsed_s
            if replica.silent_s > self._config.heartbeat_timeout_s:
                task.go(_HungError(f"no sign of life for {replica.silent_s:.0f} s; its process is killed"))


def _worker(replica: _Replica) -> Worker:
    assert replica.worker is not None, "a replica is asked when it is ready"
    return replica.worker


def _holds(replica: _Replica, manifest: WeightsManifest) -> bool:
    return replica.ack is not None and replica.ack.policy_version == manifest.policy_version


def _counted(failures: EngineFailures, kind: str) -> EngineFailures:
    return msgspec.structs.replace(failures, **{kind: getattr(failures, kind) + 1})
