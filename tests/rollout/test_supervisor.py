"""Proves: whatever order replicas die, hang, refuse, are told to leave or come back in, a call returns what it would
have returned without, nobody gets a request before it proved the current weights, nobody who was given up is asked or
heard again, and every call ends: after too many losses with an error that says why.

The world is scripted and its clock is virtual; no Ray, no process. Not here: real deaths (tests/faults).
"""

import itertools
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from rollforward.rollout.config import RolloutConfig
from rollforward.rollout.drain_file import DrainFile
from rollforward.rollout.engine.kv_store import KvStats
from rollforward.rollout.environment import CallTimes, ToolOutcomes
from rollforward.rollout.errors import (
    EngineError,
    EngineInputError,
    RolloutLostError,
    VersionRefusedError,
    WalFencedError,
    WalRefusedError,
    WalWriteError,
    WorkerLostError,
)
from rollforward.rollout.replica import Beat, EarlierStats, LogStats, with_life
from rollforward.rollout.supervisor import Supervisor
from rollforward.rollout.types import Completion, Request, ResumeStats, StopReason
from rollforward.rollout.wal_commit import WalStats
from rollforward.rollout.wal_retention import Retirement
from rollforward.rollout.weights import MANIFEST_NAME, WeightsAck, WeightsManifest
from rollforward.rollout.worker import Worker
from tests.helpers.replicas import make_requests

CONFIG = RolloutConfig(heartbeat_s=2, heartbeat_timeout_s=10, start_timeout_s=60, drain_s=25, max_restarts=3)
HASHES = {"w": "0123"}


@dataclass(eq=False)
class Call:
    """Something that was asked of a process."""

    worker: "Process"
    method: str
    ready_s: float
    answer: Any

    def is_ready(self) -> bool:
        worker = self.worker
        return worker.world.now_s >= min(self.ready_s, worker.dies_s) and not self._is_stopped()

    def _is_stopped(self) -> bool:
        """A stopped process answers nothing that it had not answered before."""
        worker = self.worker
        return worker.stops_s <= min(self.ready_s, worker.dies_s)

    def result(self) -> Any:
        self.worker.heard += 1
        assert not self.worker.is_killed, f"{self.method} of a process that was given up is looked at"
        if self.worker.dies_s < self.ready_s:
            raise WorkerLostError("its process died")
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@dataclass(eq=False)
class Process:
    """One process of a replica. Faults are absolute instants; `answers` replaces what a method answers."""

    world: "World"
    index: int
    life: int
    dies_s: float = float("inf")
    stops_s: float = float("inf")
    sigterm_s: float = float("inf")
    seconds: Mapping[str, float] = field(default_factory=dict[str, float])
    answers: dict[str, Any] = field(default_factory=dict[str, Any])
    version: int | None = None
    is_open: bool = False
    is_killed: bool = False
    is_leaving: bool = False
    heard: int = 0
    busy: Call | None = None

    def _ask(self, method: str, answer: Any, seconds: float) -> Call:
        assert not self.is_killed, f"{method} is asked of a process that was given up"
        call = Call(
            self,
            method,
            self.world.now_s + self.seconds.get(method, seconds),
            self.answers.get(method, answer),
        )
        if method not in ("beat", "drain"):
            assert self.busy is None or self.busy.is_ready(), f"{method} while {self.busy and self.busy.method} works"
            self.busy = call
        self.world.log.append((self.index, self.life, method))
        return call

    def beat(self) -> Call:
        left_s = self.sigterm_s + 25 - self.world.now_s if self.world.now_s >= self.sigterm_s else None
        first_s = 3.0 if self.life not in self.world.met.setdefault(self.index, set()) else 0.01
        self.world.met[self.index].add(self.life)
        return self._ask("beat", Beat(pid=self.life, node="n", leave_s=left_s), first_s)

    def open(self) -> Call:
        self.is_open = True
        return self._ask("open", None, 1.0)

    def log_problems(self) -> Call:
        return self._ask("log_problems", (), 0.01)

    def load_weights(self, directory: Path) -> Call:
        assert self.is_open
        version = int(directory.name)
        assert self.version is None or version > self.version, "weights only grow"
        if not isinstance(self.answers.get("load_weights"), VersionRefusedError):
            self.version = version
        ack = WeightsAck(replica=f"engine-{self.index}", policy_version=version, tensors=HASHES)
        return self._ask("load_weights", ack, 2.0)

    def acknowledge(self) -> Call:
        ack = WeightsAck(replica=f"engine-{self.index}", policy_version=self.version or 0, tensors=HASHES)
        return self._ask("acknowledge", ack, 0.1)

    def generate(self, requests: Sequence[Request]) -> Call:
        assert not self.is_leaving
        assert all(request.policy_version == self.version for request in requests), "traffic with other weights"
        finished = self.world.finished.setdefault(self.index, set())
        left = [request.id for request in requests if request.id not in finished]
        call = self._ask("generate", [_completion(request) for request in requests], 0.5 + 5.0 * len(left))
        # The log keeps what was finished before the end; what is in it costs no second time.
        start_s = self.world.now_s
        self.world.finishing += [(self, start_s + 5.0 * (n + 1), one) for n, one in enumerate(left)]
        return call

    def _stats(self) -> LogStats:
        """A frame for each thing that was asked, and a longest sync of its own."""
        written = WalStats(
            frames=self.world.asked(self.index, self.life),
            bytes_written=0,
            commits=0,
            sync_s=0,
            sync_max_s=1 / (1 + self.life),
            backpressure_s=0,
            segments=1,
        )
        return LogStats(
            replica=f"engine-{self.index}",
            position=0,
            written=written,
            resumed=ResumeStats(resumed=self.life),
            saved=KvStats(saved=2 * self.is_leaving),
        )

    def log_stats(self) -> Call:
        return self._ask("log_stats", self._stats(), 0.1)

    def retire(self, before_step: int) -> Call:
        return self._ask("retire", Retirement(num_segments=before_step), 0.1)

    def drain(self, deadline_s: float) -> Call:
        self.is_leaving = True
        self.world.drained.append((self.index, self.life, deadline_s))
        return self._ask("drain", self._stats(), min(3.0, deadline_s))

    def close(self) -> Call:
        return self._ask("close", None, 0.1)

    def met(self, beat: Beat) -> None:
        assert beat.pid == self.life

    def kill(self) -> None:
        self.is_killed = True


def _completion(request: Request) -> Completion:
    token = np.array([request.seed % 97], np.int32)
    return Completion(
        id=request.id,
        token_ids=token,
        sampled_mask=np.ones(1, np.bool_),
        behavior_logprobs=np.zeros(1, np.float32),
        policy_version=request.policy_version,
        stop_reason=StopReason.EOS,
    )


def _never_less(now: EarlierStats, before: EarlierStats) -> bool:
    pairs = zip(msgspec.structs.astuple(now), msgspec.structs.astuple(before), strict=True)
    return all(_numbers(one).get(name, 0) >= number for one, other in pairs for name, number in _numbers(other).items())


def _numbers(counts: msgspec.Struct) -> dict[str, float]:
    numbers: dict[str, float] = {}
    for name, one in msgspec.structs.asdict(counts).items():
        if isinstance(one, ToolOutcomes):
            numbers |= one.calls
        else:
            numbers[name] = one.count if isinstance(one, CallTimes) else one
    return numbers


class World:
    """Processes of two replicas, their logs, and the time."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.faults: dict[tuple[int, int], dict[str, Any]] = {}
        self.processes: list[Process] = []
        self.log: list[tuple[int, int, str]] = []
        self.met: dict[int, set[int]] = {}
        self.finished: dict[int, set[Any]] = {}
        self.finishing: list[tuple[Process, float, Any]] = []
        self.drained: list[tuple[int, int, float]] = []
        self.said: list[str] = []
        self.node_leaves: dict[tuple[int, int], float | None] = {}
        self.lacks: str | None = None

    def start(self, index: int) -> Worker:
        life = sum(process.index == index for process in self.processes)
        assert all(process.is_killed for process in self.processes if process.index == index), "two at once"
        fault = dict(self.faults.get((index, life), {}))
        for name in ("dies", "stops", "sigterm"):
            if (after_s := fault.pop(f"{name}_after_s", None)) is not None:
                fault[f"{name}_s"] = self.now_s + after_s
        process = Process(self, index, life, **fault)
        self.processes.append(process)
        return process

    def wait(self, calls: Sequence[Any], timeout_s: float) -> Sequence[object]:
        assert calls
        assert 0 <= timeout_s <= CONFIG.heartbeat_s
        end_s = self.now_s + timeout_s
        while not (ready := [call for call in calls if call.is_ready()]) and self.now_s < end_s:
            self.now_s = min(self.now_s + 0.05, end_s)
        for process, at_s, identity in self.finishing:
            if at_s <= min(self.now_s, process.dies_s, process.stops_s) and not process.is_killed:
                self.finished[process.index].add(identity)
        return ready

    def result(self, call: Any) -> Any:
        return call.result()

    def lacking(self) -> str | None:
        return self.lacks

    def notices(self, workers: Mapping[str, Worker]) -> dict[str, float | None]:
        lives = {name: (int(name[-1]), worker.life) for name, worker in workers.items() if isinstance(worker, Process)}
        return {name: self.node_leaves[life] for name, life in lives.items() if life in self.node_leaves}

    def current(self, index: int) -> Process:
        return [process for process in self.processes if process.index == index][-1]

    def asked(self, index: int, life: int) -> int:
        return sum(asked[:2] == (index, life) for asked in self.log)

    def lives(self, index: int) -> int:
        return sum(process.index == index for process in self.processes)


def publish(root: Path, version: int) -> Path:
    directory = root / f"{version}"
    directory.mkdir(exist_ok=True)
    manifest = WeightsManifest(policy_version=version, tensors=HASHES)
    (directory / MANIFEST_NAME).write_bytes(msgspec.json.encode(manifest))
    return directory


def supervise(world: World, root: Path, **changes: Any) -> Supervisor:
    supervisor = Supervisor(
        world,
        ["engine-0", "engine-1"],
        msgspec.structs.replace(CONFIG, **changes),
        notices=DrainFile(root / "drain", ["engine-0", "engine-1"], announce=world.said.append).read,
        announce=world.said.append,
        clock=lambda: world.now_s,
    )
    assert supervisor.log_problems() == []
    return supervisor


REQUESTS = make_requests([3, 4, 5, 6], members=2)
EXPECTED = [_completion(request) for request in REQUESTS]


def step(supervisor: Supervisor, root: Path) -> None:
    """Weights 1, then the requests; equal to what nobody disturbed."""
    acks = supervisor.load_weights(publish(root, 1))
    assert [(ack.replica, ack.policy_version) for ack in acks] == [("engine-0", 1), ("engine-1", 1)]
    assert supervisor.generate(REQUESTS) == EXPECTED


def test_undisturbed_nobody_is_started_twice(tmp_path: Path) -> None:
    world = World()
    supervisor = supervise(world, tmp_path)
    step(supervisor, tmp_path)
    assert [one.restarts.restarts for one in supervisor.log_stats()] == [0, 0]
    supervisor.close()
    assert (world.lives(0), world.lives(1), world.said) == (1, 1, [])


@pytest.mark.parametrize("after_s", [0.5, 3.5, 4.5, 6.0, 6.6, 12.0, 20.0])
@pytest.mark.parametrize("both", [False, True])
def test_a_death_at_any_stage(tmp_path: Path, after_s: float, both: bool) -> None:
    """In start, opening, loading, and in the middle of sampling."""
    world = World()
    for index in range(1 + both):
        world.faults[index, 0] = {"dies_after_s": after_s}
    supervisor = supervise(world, tmp_path)
    step(supervisor, tmp_path)
    assert (world.lives(0), world.lives(1)) == (2, 1 + both)
    stats = supervisor.log_stats()
    assert [one.restarts.restarts for one in stats] == [1, int(both)]
    assert [one.failures.engine_lost for one in stats] == [1, int(both)]
    assert 3 < stats[0].restarts.recovery_s == stats[0].restarts.recovery_max_s < 10
    successor = [method for index, life, method in world.log if (index, life) == (0, 1) and method != "beat"]
    assert successor[:3] == ["open", "log_problems", "load_weights"] or after_s < 6
    assert any("started again from its log (1 of 3)" in text for text in world.said)


def test_counters_of_a_replica_are_those_of_all_its_processes(tmp_path: Path) -> None:
    """The first is told to leave and tells its last counters; the second dies after it told some."""
    world = World()
    supervisor = supervise(world, tmp_path)
    supervisor.load_weights(publish(tmp_path, 1))
    assert supervisor.log_stats()[0].earlier is None
    (tmp_path / "drain").write_text("engine-0 20")
    supervisor.generate(REQUESTS)
    first = world.asked(0, 0)
    (stats, other) = supervisor.log_stats()
    assert other.earlier is None
    assert stats.earlier is not None
    assert (stats.earlier.saved.saved, stats.saved.saved, stats.written.segments) == (2, 0, 1)
    # What it was asked after `drain`, if anything, it did not tell.
    assert 0 < stats.earlier.written.frames <= first
    told = stats.written.frames
    world.processes[-1].dies_s = world.now_s + 1
    world.finished.clear()
    supervisor.generate(REQUESTS)
    (again, _) = supervisor.log_stats()
    assert again.earlier is not None
    assert again.earlier.written.frames == stats.earlier.written.frames + told
    assert (again.earlier.written.sync_max_s, again.earlier.written.segments) == (1.0, 2)
    assert (again.earlier.resumed.resumed, again.resumed.resumed) == (1, 2)


def test_finished_requests_are_not_drawn_again(tmp_path: Path) -> None:
    """Dies 11 s into its 20 s of work: the successor has two requests of four left."""
    world = World()
    supervisor = supervise(world, tmp_path)
    supervisor.load_weights(publish(tmp_path, 1))
    world.processes[0].dies_s = world.now_s + 11
    start_s = world.now_s
    assert supervisor.generate(REQUESTS) == EXPECTED
    assert world.now_s - start_s == pytest.approx(11 + 3 + 1 + 2 + 0.5 + 2 * 5, abs=1)


def test_a_hung_process_is_given_up_after_the_timeout_and_never_heard_again(tmp_path: Path) -> None:
    world = World()
    supervisor = supervise(world, tmp_path)
    supervisor.load_weights(publish(tmp_path, 1))
    zombie = world.processes[0]
    zombie.stops_s = world.now_s + 1
    start_s = world.now_s
    assert supervisor.generate(REQUESTS) == EXPECTED
    assert zombie.is_killed
    assert 10 <= world.now_s - start_s < 10 + 2 + 2 + 30
    stats = supervisor.log_stats()[0]
    assert (stats.failures.engine_hung, stats.failures.engine_lost) == (1, 0)
    zombie.stops_s = float("inf")  # it wakes up; Call.result fails the test if somebody looks at it
    assert supervisor.generate(REQUESTS) == EXPECTED


def test_time_in_which_the_driver_itself_was_stopped_is_held_against_nobody(tmp_path: Path) -> None:
    world = World()
    supervisor = supervise(world, tmp_path)
    supervisor.load_weights(publish(tmp_path, 1))
    wait = world.wait
    jumps = iter([False] * 3 + [True] + [False] * 100_000)

    def stopped(calls: Sequence[Any], timeout_s: float) -> Sequence[object]:
        if next(jumps):
            world.now_s += 3600
            return []
        return wait(calls, timeout_s)

    world.wait = stopped  # type: ignore[method-assign]
    assert supervisor.generate(REQUESTS) == EXPECTED
    assert (world.lives(0), world.lives(1)) == (1, 1)


def test_wrong_hashes_get_no_request(tmp_path: Path) -> None:
    world = World()
    wrong = WeightsAck(replica="engine-1", policy_version=1, tensors={"w": "4567"})
    world.faults[1, 0] = {"answers": {"load_weights": wrong}}
    supervisor = supervise(world, tmp_path)
    step(supervisor, tmp_path)
    assert (1, 0, "generate") not in world.log
    assert supervisor.log_stats()[1].failures.engine_refused == 1
    for life in range(4):
        world.faults[1, 2 + life] = {"answers": {"load_weights": wrong}}
    world.current(1).dies_s = world.now_s
    with pytest.raises(RolloutLostError, match=r"engine-1 was lost 4 times .* holds version 1, published is 2"):
        supervisor.load_weights(publish(tmp_path, 2))


def test_a_version_that_one_replica_refuses_leaves_the_one_before_in_service(tmp_path: Path) -> None:
    """The other one had taken it, so it is started again; nobody is lost and nobody is asked with mixed weights."""
    world = World()
    supervisor = supervise(world, tmp_path)
    step(supervisor, tmp_path)
    world.current(1).answers["load_weights"] = VersionRefusedError("weights 2 are refused: w")
    with pytest.raises(VersionRefusedError, match="weights 2 are refused: w"):
        supervisor.load_weights(publish(tmp_path, 2))
    assert supervisor.generate(REQUESTS) == EXPECTED
    assert (world.lives(0), world.lives(1)) == (2, 1)
    world.current(1).answers.clear()
    assert [ack.policy_version for ack in supervisor.load_weights(publish(tmp_path, 3))] == [3, 3]


def test_a_failed_log_is_taken_over_by_a_successor(tmp_path: Path) -> None:
    world = World()
    world.faults[0, 0] = {"answers": {"generate": WalWriteError("no space left")}}
    supervisor = supervise(world, tmp_path)
    step(supervisor, tmp_path)
    assert world.lives(0) == 2


def test_a_log_that_no_successor_could_open_ends_the_run_at_once_with_the_way_out(tmp_path: Path) -> None:
    """Waiting makes no room. In the middle of a call a successor is tried, whose opening decides."""
    refused = WalRefusedError("log engine-1/EPOCH: no space left. Make room, then go on")
    world = World()
    world.faults[1, 0] = {"answers": {"generate": refused}}
    world.faults[1, 1] = {"answers": {"open": refused}}
    supervisor = supervise(world, tmp_path)
    supervisor.load_weights(publish(tmp_path, 1))
    with pytest.raises(RolloutLostError, match=r"^engine-1: log engine-1/EPOCH: no space left. Make room, then go on$"):
        supervisor.generate(REQUESTS)
    assert world.lives(1) == 2
    assert world.current(1).is_killed
    for life in range(2):  # what may be gone the next time is tried again
        world.faults[1, 2 + life] = {"answers": {"open": WalWriteError("an error of the device")}}
    assert supervisor.generate(REQUESTS) == EXPECTED


@pytest.mark.parametrize("error", [EngineError("bug"), EngineInputError("too long"), WalFencedError("another one")])
def test_errors_that_no_successor_helps_are_raised_at_once(tmp_path: Path, error: Exception) -> None:
    world = World()
    world.faults[0, 0] = {"answers": {"generate": error}}
    supervisor = supervise(world, tmp_path)
    supervisor.load_weights(publish(tmp_path, 1))
    with pytest.raises(type(error)):
        supervisor.generate(REQUESTS)
    assert world.lives(0) == 1


@pytest.mark.parametrize("kind", ["dies_after_s", "stops_after_s"])
@pytest.mark.parametrize("after_s", [3.5, 8.0])
def test_losses_without_end_end_the_run_in_bounded_time(tmp_path: Path, kind: str, after_s: float) -> None:
    world = World()
    for life in range(100):
        world.faults[1, life] = {kind: after_s}
    with pytest.raises(
        RolloutLostError, match=r"engine-1 was lost 4 times within a step.*max_restarts allows 3.*resume"
    ):
        step(supervise(world, tmp_path), tmp_path)
    assert world.lives(1) == 4
    assert world.now_s - 100 < 4 * (60 + 10 + 10)


def test_without_a_place_the_run_ends(tmp_path: Path) -> None:
    world = World()
    for life in range(1, 9):
        world.faults[0, life] = {"seconds": {"beat": 1e9}}
    supervisor = supervise(world, tmp_path)
    supervisor.load_weights(publish(tmp_path, 1))
    world.processes[0].dies_s = world.now_s + 7
    start_s = world.now_s
    with pytest.raises(RolloutLostError, match=r"engine-0 was lost 4 times.*no process came up within 60 s.*no room"):
        supervisor.generate(REQUESTS)
    assert 7 + 3 * 60 <= world.now_s - start_s < 7 + 3 * 60 + 4 * 3


def test_where_nothing_left_could_host_a_replica_nobody_asks_twice(tmp_path: Path) -> None:
    world = World()
    for life in range(1, 9):
        world.faults[0, life] = {"seconds": {"beat": 1e9}}
    supervisor = supervise(world, tmp_path)
    supervisor.load_weights(publish(tmp_path, 1))
    world.processes[0].dies_s = world.now_s + 7
    world.lacks = "no node has {rollout: 1}. Add one"
    start_s = world.now_s
    with pytest.raises(RolloutLostError, match=r"within 60 s .*no node has \{rollout: 1\}. Add one. .*resume"):
        supervisor.generate(REQUESTS)
    assert (world.lives(0), world.lives(1)) == (2, 1)
    assert 7 + 60 <= world.now_s - start_s < 7 + 60 + 4 * 3


def test_a_process_that_hangs_before_it_is_up_is_replaced(tmp_path: Path) -> None:
    world = World()
    world.faults[0, 0] = {"stops_after_s": 1}
    step(supervise(world, tmp_path), tmp_path)
    assert (world.lives(0), world.lives(1)) == (2, 1)


def test_restarts_are_counted_within_a_weight_version(tmp_path: Path) -> None:
    """Three losses under each of four versions are survived; the fourth under one is not."""
    world = World()
    supervisor = supervise(world, tmp_path)
    for version in range(1, 5):
        supervisor.load_weights(publish(tmp_path, version))
        requests = [msgspec.structs.replace(request, policy_version=version) for request in REQUESTS]
        world.finished.clear()
        world.finishing.clear()
        for life in range(world.lives(0), world.lives(0) + 2):
            world.faults[0, life] = {"dies_after_s": 8}
        world.current(0).dies_s = world.now_s + 7
        assert [one.id for one in supervisor.generate(requests)] == [one.id for one in requests]
    assert supervisor.log_stats()[0].restarts.restarts == 12


def test_versions_only_grow(tmp_path: Path) -> None:
    world = World()
    supervisor = supervise(world, tmp_path)
    supervisor.load_weights(publish(tmp_path, 2))
    for version in (1, 2):
        with pytest.raises(EngineError, match=f"weights {version} came after 2"):
            supervisor.load_weights(publish(tmp_path, version))


@pytest.mark.parametrize("text", ["engine-0 20\n", "", "all\n", "engine-0\n"])
def test_the_drain_file(tmp_path: Path, text: str) -> None:
    world = World()
    supervisor = supervise(world, tmp_path)
    supervisor.load_weights(publish(tmp_path, 1))
    (tmp_path / "drain").write_text(text)
    assert supervisor.generate(REQUESTS) == EXPECTED
    both = "engine-0" not in text
    assert not (tmp_path / "drain").exists()
    assert [(index, life) for index, life, _ in world.drained] == [(0, 0), (1, 0)][: 1 + both]
    assert world.drained[0][2] == pytest.approx(20 if "20" in text else 25, abs=3)
    assert (world.lives(0), world.lives(1)) == (2, 1 + both)
    stats = supervisor.log_stats()[0]
    assert (stats.failures.engine_drained, stats.failures.engine_lost, stats.restarts.restarts) == (1, 0, 1)


@pytest.mark.parametrize("text", ["engine-7\n", "engine-0 soon\n", "engine-0 -3\n", "engine-0 nan\n", "\x00\xff\n"])
def test_a_drain_file_that_says_nothing_is_told_and_changes_nothing(tmp_path: Path, text: str) -> None:
    world = World()
    supervisor = supervise(world, tmp_path)
    (tmp_path / "drain").write_text(text)
    step(supervisor, tmp_path)
    assert world.drained == []
    assert len(world.said) == 1
    assert "tells nobody to leave" in world.said[0]


def test_sigterm_and_a_node_that_leaves(tmp_path: Path) -> None:
    """SIGTERM to one, the other's node is drained without a deadline; each hands over once."""
    world = World()
    world.faults[0, 0] = {"sigterm_after_s": 12}
    supervisor = supervise(world, tmp_path)
    supervisor.load_weights(publish(tmp_path, 1))
    world.node_leaves[1, 0] = None
    assert supervisor.generate(REQUESTS) == EXPECTED
    assert sorted((index, life) for index, life, _ in world.drained) == [(0, 0), (1, 0)]
    assert (world.lives(0), world.lives(1)) == (2, 2)


@pytest.mark.parametrize("fault", [{"dies_s": 0.5}, {"stops_s": 0.5}, {"seconds": {"drain": 1e9}}])
def test_a_replica_that_is_lost_while_it_leaves(tmp_path: Path, fault: dict[str, Any]) -> None:
    world = World()
    supervisor = supervise(world, tmp_path)
    supervisor.load_weights(publish(tmp_path, 1))
    leaving = world.processes[0]
    for name, value in fault.items():
        setattr(leaving, name, value if name == "seconds" else world.now_s + value)
    (tmp_path / "drain").write_text("engine-0 4")
    start_s = world.now_s
    assert supervisor.generate(REQUESTS) == EXPECTED
    assert world.now_s - start_s < 60
    assert world.lives(0) == 2


def test_who_hangs_at_the_end_keeps_nobody(tmp_path: Path) -> None:
    world = World()
    supervisor = supervise(world, tmp_path)
    step(supervisor, tmp_path)
    world.processes[0].stops_s = world.now_s
    world.processes[1].dies_s = world.now_s
    start_s = world.now_s
    supervisor.close()
    assert world.now_s - start_s <= 10 + 2 + 2
    assert sum("did not close its log in order" in text for text in world.said) == 2


@pytest.mark.parametrize("number", range(300))
def test_random_worlds(tmp_path: Path, number: int, seed: int) -> None:
    """Three steps in which anything may happen at any time, up to three times a replica and step."""
    draws = random.Random(f"{seed}/{number}")
    world = World()
    wrong = WeightsAck(replica="engine", policy_version=0, tensors=HASHES)
    for index, life in itertools.product(range(2), range(3)):
        kind = draws.choice(["dies", "stops", "sigterm", "wrong", "node", "none", "slow"])
        after_s = draws.uniform(0, 30)
        if kind in ("dies", "stops", "sigterm"):
            world.faults[index, life] = {f"{kind}_after_s": after_s}
        elif kind == "wrong":
            world.faults[index, life] = {"answers": {"load_weights": wrong}}
        elif kind == "node":
            world.node_leaves[index, life] = draws.choice([None, 0.0, 3.0])
        elif kind == "slow":
            world.faults[index, life] = {"seconds": {"load_weights": 40.0}, "dies_after_s": 3 + after_s}
    supervisor = supervise(world, tmp_path)
    before: dict[int, EarlierStats] = {}
    for version in (1, 2, 3):
        supervisor.load_weights(publish(tmp_path, version))
        world.finished.clear()
        world.finishing.clear()
        requests = [msgspec.structs.replace(request, policy_version=version) for request in REQUESTS]
        if draws.random() < 0.3:
            (tmp_path / "drain").write_text(draws.choice(["", "engine-1 2\n"]))
        assert supervisor.generate(requests) == [_completion(request) for request in requests]
        for index, one in enumerate(supervisor.log_stats()):
            total = with_life(one.earlier, one)
            assert index not in before or _never_less(total, before[index])
            before[index] = total
    stats = supervisor.log_stats()
    for index, one in enumerate(stats):
        failures = sum(msgspec.structs.astuple(one.failures))
        assert failures == world.lives(index) - 1
        assert 0 <= one.restarts.restarts <= failures
    supervisor.close()
    assert world.now_s < 100 + 3 * 3 * 150
