"""Proves: on a Ray cluster of several nodes, a node that dies with its replica, is drained, or takes an answer with it
costs no token and no bit; without a node for a replica the run ends soon and says what is missing; a learner's rank
that hangs or dies is named, in the time that is configured; what cannot be joined is said at once.

Real raylets, real SIGKILL; tokens are counted by the ledger. The whole command on such a cluster, with the code that it
sends along, and a killed driver, is among the slow part. Not here: faults on one node
(test_engine_crash.py), every order of events (tests/rollout/test_supervisor.py).
"""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import ray
from ray._private.state import state as cluster_state

from rollforward.kernels.config import KernelBackends
from rollforward.model.checkpoint import write_checkpoint
from rollforward.model.train_config import AdamW
from rollforward.rl.actors import LearnerActor, LearnerPool
from rollforward.rl.algorithms import GRPO
from rollforward.rl.drill_compare import held_tokens, logged_requests
from rollforward.rl.errors import LostProcessError
from rollforward.rl.learner import TOKENIZER_NAME, LearnerSettings
from rollforward.rl.placement import Patience
from rollforward.rollout.actors import RolloutActor
from rollforward.rollout.config import RolloutConfig
from rollforward.rollout.errors import RolloutLostError
from rollforward.rollout.ledger import LedgerClient, LedgerProcess
from rollforward.rollout.placement import RayHost, placement_options
from rollforward.rollout.replica import Beat, Replica
from rollforward.rollout.supervisor import Supervisor
from rollforward.rollout.types import Completion
from rollforward.rollout.wal_recovery import recover
from rollforward.rollout.weights import publish_weights, read_published, version_directory
from tests.helpers.commands import command
from tests.helpers.nodes import ROLLOUT, Nodes
from tests.helpers.replicas import PROCESS, make_requests, packed_params
from tests.helpers.runs import TASK, write_model
from tests.helpers.tiny import random_params, tiny_config

CONFIG = RolloutConfig(
    threads=1, wal=PROCESS, heartbeat_s=0.5, heartbeat_timeout_s=20, drain_s=20, start_timeout_s=60, max_restarts=3
)
NAMES = ["engine-0", "engine-1"]
REQUESTS = make_requests([5, 9, 3, 7], members=2, max_new_tokens=30)
SOON_S = 60.0
"""Long on a busy machine."""


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    with Nodes() as started:
        ray.init(started.address, configure_logging=False, log_to_driver=False)
        yield started


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Version 1."""
    root = tmp_path_factory.mktemp("weights")
    return publish_weights(root, 1, tiny_config(), packed_params(tiny_config())) and version_directory(root, 1)


@pytest.fixture(scope="module")
def undisturbed(weights: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Completion]:
    """Completions of one replica in this process."""
    replica = Replica("alone", tmp_path_factory.mktemp("alone"), tiny_config(), precision="native", config=CONFIG)
    replica.load_weights(weights)
    completions = replica.generate(REQUESTS)
    replica.close()
    assert sum(one.num_sampled_tokens for one in completions) > 100
    return completions


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with its tokenizer."""
    return write_model(tmp_path_factory.mktemp("start") / "model")


class Fleet:
    """Two engines, each on a node of its own that may host one, and who they are."""

    def __init__(self, root: Path, ledger: str | None = None, host: type[RayHost] = RayHost, **changes: Any) -> None:
        self.root = root
        self.said: list[str] = []
        self.actors: dict[int, list[Any]] = {0: [], 1: []}
        config = msgspec.structs.replace(CONFIG, ledger=ledger, **changes)

        def create(index: int) -> Any:
            actor = RolloutActor.options(**placement_options(ROLLOUT)).remote(  # type: ignore[attr-defined]
                NAMES[index], root / "wal" / NAMES[index], tiny_config(), "native", config, None, KernelBackends()
            )
            self.actors[index].append(actor)
            return actor

        (root / "wal").mkdir(parents=True, exist_ok=True)
        self.host = host(create, ROLLOUT)
        self.supervisor = Supervisor(self.host, NAMES, config, announce=self.said.append)

    def node(self, index: int) -> str:
        """Of the newest process."""
        beat: Any = ray.get(self.actors[index][-1].beat.remote())
        return beat.node

    def meanwhile(self, index: int, num_tokens: int, do: Callable[[], object]) -> threading.Thread:
        """Do something when an engine's log has so many tokens."""

        def wait() -> None:
            deadline_s = time.monotonic() + SOON_S
            while time.monotonic() < deadline_s and recover(self.root / "wal" / NAMES[index]).num_tokens < num_tokens:
                time.sleep(0.02)
            do()

        thread = threading.Thread(target=wait)
        thread.start()
        return thread

    def end(self) -> None:
        for actor in (actor for actors in self.actors.values() for actor in actors):
            ray.kill(actor)


def _require_nothing_lost(root: Path, ledger: LedgerProcess, completions: list[Completion]) -> None:
    """By the witness, and by the logs: no attempt but the first, no damage, every token once."""
    counts = LedgerClient(ledger.path).counts(held_tokens(root, logged_requests(root)))
    assert (counts.lost, counts.duplicated, counts.unequal, counts.attempts) == (0, 0, 0, 0)
    assert counts.published >= sum(one.num_sampled_tokens for one in completions)
    for index, name in enumerate(NAMES):
        log = recover(root / "wal" / name)
        assert (log.failed, log.earlier_attempts, log.problems) == ({}, (), ()), index
        for one in (one for one in completions if one.id.prompt % 2 == index):
            assert log.requests[one.id].token_ids.tolist() == one.token_ids.tolist()


@pytest.mark.timeout(240)
def test_a_node_dies_with_its_replica(
    nodes: Nodes, weights: Path, tmp_path: Path, undisturbed: list[Completion]
) -> None:
    nodes.have(3)
    with LedgerProcess() as ledger:
        fleet = Fleet(tmp_path, str(ledger.path))
        fleet.supervisor.load_weights(weights)
        before = [fleet.node(0), fleet.node(1)]
        assert before[0] != before[1]
        thread = fleet.meanwhile(0, 17, lambda: nodes.kill(before[0]))
        completions = fleet.supervisor.generate(REQUESTS)
        thread.join()
        assert completions == undisturbed
        stats = fleet.supervisor.log_stats()
        assert [one.restarts.restarts for one in stats] == [1, 0], fleet.said
        assert (stats[0].failures.engine_lost, stats[0].resumed.tokens >= 17) == (1, True), fleet.said
        assert fleet.node(0) not in before
        assert fleet.node(1) == before[1]
        _require_nothing_lost(tmp_path, ledger, completions)
        fleet.supervisor.close()
        fleet.end()


@pytest.mark.timeout(240)
def test_a_node_is_drained(nodes: Nodes, weights: Path, tmp_path: Path, undisturbed: list[Completion]) -> None:
    """With a deadline, at which it is taken away: by then its replica is elsewhere, with its key-values."""
    nodes.have(3)
    with LedgerProcess() as ledger:
        fleet = Fleet(tmp_path, str(ledger.path))
        fleet.supervisor.load_weights(weights)
        before = fleet.node(0)
        thread = fleet.meanwhile(0, 9, lambda: nodes.drain(before, 30))
        start_s = time.monotonic()
        completions = fleet.supervisor.generate(REQUESTS)
        thread.join()
        assert completions == undisturbed
        stats = fleet.supervisor.log_stats()[0]
        assert (stats.failures.engine_drained, stats.failures.engine_lost, stats.restarts.restarts) == (1, 0, 1)
        assert stats.restarts.recovery_s < 30, "the successor served before the deadline"
        assert time.monotonic() - start_s < 2 * SOON_S
        assert stats.resumed.kv_restored > 0, fleet.said
        assert any("engine-0 leaves where it is within" in text for text in fleet.said), fleet.said
        assert fleet.node(0) != before
        _require_nothing_lost(tmp_path, ledger, completions)
        fleet.supervisor.close()
        fleet.end()
        nodes.forget(before)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_no_node_is_left_for_a_replica(
    nodes: Nodes, weights: Path, tmp_path: Path, undisturbed: list[Completion]
) -> None:
    """The error names what is missing; once it is there, whoever comes next goes on from the logs."""
    nodes.have(2)
    fleet = Fleet(tmp_path, start_timeout_s=12)
    fleet.supervisor.load_weights(weights)
    both = [fleet.node(0), fleet.node(1)]
    thread = fleet.meanwhile(0, 11, lambda: [nodes.kill(node) for node in both])
    start_s = time.monotonic()
    with pytest.raises(
        RolloutLostError,
        match=r"no process came up within 12 s .*no node of the cluster has \{rollout: 1\}, which"
        r" cluster.replica_resources asks for a replica.*CPU: 1.*`ray start.*resume",
    ):
        fleet.supervisor.generate(REQUESTS)
    assert time.monotonic() - start_s < 2 * SOON_S
    thread.join()
    fleet.end()
    logged = recover(tmp_path / "wal" / NAMES[0]).num_tokens
    assert logged >= 11
    nodes.have(2)
    again = Fleet(tmp_path)
    again.supervisor.load_weights(weights)
    assert again.supervisor.generate(REQUESTS) == undisturbed
    assert again.supervisor.log_stats()[0].resumed.tokens == logged
    again.supervisor.close()
    again.end()


class _Late(RayHost):
    """Sees an answer before it has come here, and `before` happens in between."""

    before: Callable[[], None] | None = None

    def wait(self, calls: Any, timeout_s: float) -> Any:
        if self.before is not None and calls:
            there = ray.wait([calls[0]], timeout=timeout_s, fetch_local=False)[0]
            if not there:
                return []
            happens, self.before = self.before, None
            happens()
        return super().wait(calls, timeout_s)


def _ranks(nodes: Nodes, root: Path, **patience: float) -> tuple[LearnerPool, list[Any], list[Beat]]:
    """Two ranks of a learner on two nodes, and where they are."""
    nodes.have(2)
    config, files = tiny_config(), {TOKENIZER_NAME: b"not read here"}
    write_checkpoint(root / "model", config, random_params(config), precision="fp32", extra_files=files)
    actors: list[Any] = [
        LearnerActor.options(**placement_options(ROLLOUT)).remote(  # type: ignore[attr-defined]
            rank, 2, root / "rendezvous", patience.pop("rank_timeout_s", 600.0)
        )
        for rank in range(2)
    ]
    settings = LearnerSettings(
        model_dir=str(root / "model"),
        algorithm=GRPO(),
        optim=AdamW(lr=1e-3),
        precision="native",
        temperature=1.0,
        threads=1,
        kernels=KernelBackends(),
    )
    pool = LearnerPool(actors, settings, Patience(**patience), ROLLOUT)
    beats: list[Any] = ray.get([actor.beat.remote() for actor in actors])
    assert beats[0].node != beats[1].node
    return pool, actors, beats


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_rank_that_hangs_is_named_and_ended(nodes: Nodes, tmp_path: Path) -> None:
    """On another node than the loop, and far below what its peer would wait in the collective operation."""
    pool, actors, beats = _ranks(nodes, tmp_path, silent_s=8.0)
    os.kill(beats[1].pid, signal.SIGSTOP)
    (tmp_path / "checkpoint").mkdir()
    start_s = time.monotonic()
    with pytest.raises(
        LostProcessError,
        match=rf"^rank 1 of the learner \(pid {beats[1].pid} on node {beats[1].node}\) has given no sign of life for"
        r" \d+ s \(cluster.learner_heartbeat_timeout_s\).*resume",
    ):
        pool.save(tmp_path / "checkpoint")
    assert 8 <= time.monotonic() - start_s < SOON_S
    _require_gone(beats[1].pid)
    for actor in actors:
        ray.kill(actor)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_peer_that_gives_up_first_names_whom_it_waited_for(nodes: Nodes, tmp_path: Path) -> None:
    pool, actors, beats = _ranks(nodes, tmp_path, silent_s=15.0, rank_timeout_s=5.0)
    os.kill(beats[0].pid, signal.SIGSTOP)
    (tmp_path / "checkpoint").mkdir()
    with pytest.raises(LostProcessError, match=r"^rank 0 of the learner .*(a peer says|no sign of life)"):
        pool.save(tmp_path / "checkpoint")
    _require_gone(beats[0].pid)
    for actor in actors:
        ray.kill(actor)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_rank_that_dies_with_its_node_is_named(nodes: Nodes, tmp_path: Path) -> None:
    pool, actors, beats = _ranks(nodes, tmp_path)
    nodes.kill(beats[1].node)
    (tmp_path / "checkpoint").mkdir()
    start_s = time.monotonic()
    with pytest.raises(LostProcessError, match=r"^rank 1 of the learner .* died .*resume"):
        pool.save(tmp_path / "checkpoint")
    assert time.monotonic() - start_s < SOON_S
    for actor in actors:
        ray.kill(actor)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_no_node_for_a_rank(nodes: Nodes, tmp_path: Path) -> None:
    nodes.have(2)
    asked = {"absent": 2.0}
    actor: Any = LearnerActor.options(**placement_options(asked)).remote(0, 1, tmp_path / "r")  # type: ignore[attr-defined]
    settings = LearnerSettings(
        model_dir="/nowhere",
        algorithm=GRPO(),
        optim=AdamW(lr=1e-3),
        precision="native",
        temperature=1.0,
        threads=1,
        kernels=KernelBackends(),
    )
    with pytest.raises(LostProcessError, match=r"rank 0 .* no node .* has \{absent: 2\}, which cluster.learner_r"):
        LearnerPool([actor], settings, Patience(start_s=3), asked)
    ray.kill(actor)


def _require_gone(pid: int) -> None:
    """A stopped process takes no signal but SIGKILL."""
    deadline_s = time.monotonic() + SOON_S
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline_s
        time.sleep(0.1)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_an_answer_that_is_lost_with_its_node_is_made_again(
    nodes: Nodes, weights: Path, tmp_path: Path, undisturbed: list[Completion]
) -> None:
    """It is an object of the node, complete and not yet read, when the node dies: the log answers."""
    nodes.have(3)
    with LedgerProcess() as ledger:
        fleet = Fleet(tmp_path, str(ledger.path), host=_Late)
        fleet.supervisor.load_weights(weights)
        before = fleet.node(0)
        assert isinstance(fleet.host, _Late)
        fleet.host.before = lambda: nodes.kill(before)
        completions = fleet.supervisor.generate(REQUESTS)
        assert completions == undisturbed
        stats = fleet.supervisor.log_stats()[0]
        assert (stats.failures.engine_lost, stats.restarts.restarts) == (1, 1), fleet.said
        num_first = sum(one.id.prompt % 2 == 0 for one in completions)
        assert stats.resumed.answered == num_first, "all was complete in the log, nothing is drawn again"
        _require_nothing_lost(tmp_path, ledger, completions)
        fleet.supervisor.close()
        fleet.end()


SETTINGS = (
    f"tasks=[{json.dumps(TASK)}]".replace('"', ""),
    "optim={type: adamw, lr: 1e-3, weight_decay: 0.5}",
    "sampling.max_new_tokens=16",
    "steps=2",
    "prompts_per_step=4",
    "micro_batch_tokens=256",
    "max_prompt_tokens=40",
    "eval={prompts: 4, every_steps: 2}",
    "checkpoint_every_steps=1",
    "tracker.mode=disabled",
    "rollout.engines=2",
    "rollout.threads=1",
    "rollout.heartbeat_s=0.5",
    "rollout.heartbeat_timeout_s=20",
    "cluster.learner_threads=1",
    "algo.group_size=2",
)


def _start(log: Path, *words: str) -> subprocess.Popen[bytes]:
    with log.open("w") as file:
        return subprocess.Popen(command(*words), stdout=file, stderr=file)


def _wait_for_line(path: Path, driver: subprocess.Popen[bytes], log: Path) -> None:
    """Until a step is logged."""
    deadline_s = time.monotonic() + 300
    while not path.exists() or not path.read_text():
        assert driver.poll() is None, log.read_text()[-3000:]
        assert time.monotonic() < deadline_s, log.read_text()[-3000:]
        time.sleep(0.05)


def _actors_of_runs() -> dict[int, tuple[str, str]]:
    """Process id -> class and node, of every actor of the cluster that works for another driver than this process."""
    listed: Any = cluster_state.actor_table(None)
    mine = ray.get_runtime_context().get_job_id()
    return {
        one["Pid"]: (one["ActorClassName"], one["Address"]["NodeID"])
        for one in listed.values()
        if one["State"] == "ALIVE" and one["JobID"] != mine
    }


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_whole_runs_on_the_cluster(nodes: Nodes, model_dir: Path, tmp_path: Path) -> None:
    """Joined by its address: a node with a replica dies, then the driver; `resume` there ends with the bits of a run of
    this machine alone, and what worked for the dead driver has ended."""
    alone = subprocess.run(
        command("train", f"run_dir={tmp_path / 'alone'}", f"model_dir={model_dir}", *SETTINGS),
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert alone.returncode == 0, alone.stderr[-3000:]
    expected = read_published(tmp_path / "alone" / "model")[0].tensors
    nodes.have(3)
    run_dir, log = tmp_path / "run", tmp_path / "log.txt"
    where = (f"cluster.address={nodes.address}", "cluster.replica_resources={rollout: 1}")
    driver = _start(log, "train", f"run_dir={run_dir}", f"model_dir={model_dir}", *SETTINGS, *where)
    wal = run_dir / "wal" / "engine-0"
    deadline_s = time.monotonic() + 300
    while not wal.exists() or recover(wal).num_tokens < 5:
        assert driver.poll() is None, log.read_text()[-3000:]
        assert time.monotonic() < deadline_s, log.read_text()[-3000:]
        time.sleep(0.05)
    nodes.kill(next(node for name, node in _actors_of_runs().values() if name == "RolloutActor"))
    _wait_for_line(run_dir / "metrics.jsonl", driver, log)
    assert "serves again" in log.read_text(), log.read_text()[-3000:]
    working = _actors_of_runs()
    assert sorted(name for name, _ in working.values()) == ["LearnerActor", "RolloutActor", "RolloutActor"]
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    for pid in working:
        _require_gone(pid)
    nodes.have(2)
    done = subprocess.run(command("resume", str(run_dir)), capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert read_published(run_dir / "model")[0].tensors == expected
    assert _actors_of_runs() == {}, "nothing is left on the cluster"


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("cluster.address=127.0.0.1:9", r"cluster.address is 127.0.0.1:9, where no Ray cluster answers"),
        ("cluster.address=ray://head:10001", r"cluster.address is ray://head:10001; .*no proxy"),
        ("cluster.replica_resources={rollout: 1}", r"starts a cluster of its own.*set cluster.address"),
        ("cluster.replica_resources={rollout: 0}", r"replica_resources"),
    ],
)
def test_what_cannot_be_joined_is_said_at_once(model_dir: Path, tmp_path: Path, settings: str, message: str) -> None:
    words = command("train", f"run_dir={tmp_path / 'run'}", f"model_dir={model_dir}", *SETTINGS, settings)
    done = subprocess.run(words, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 2, done.stderr[-3000:]
    assert re.search(message, done.stderr), done.stderr[-3000:]
    assert "Traceback" not in done.stderr


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("before", "environment", "message"),
    [
        pytest.param("import ray; ray.__version__ = '1.2.3'", {}, r"Version mismatch: .*Ray: 1\.2\.3", id="version"),
        # Ray looks for half a minute whether somebody takes it.
        pytest.param("", {"RAY_AUTH_TOKEN": "0" * 64}, "Authentication token is", id="token", marks=pytest.mark.slow),
    ],
)
def test_a_cluster_that_does_not_take_this_process_says_why_in_a_line(
    nodes: Nodes, model_dir: Path, tmp_path: Path, before: str, environment: dict[str, str], message: str
) -> None:
    settings = (f"run_dir={tmp_path / 'run'}", f"model_dir={model_dir}", f"cluster.address={nodes.address}", *SETTINGS)
    code = f"{before}\nimport sys; from rollforward.conf import cli; sys.exit(cli.main(['train', *sys.argv[1:]]))"
    words = [sys.executable, "-c", code, *settings]
    done = subprocess.run(words, capture_output=True, text=True, timeout=200, check=False, env=os.environ | environment)
    assert done.returncode == 2, done.stderr[-3000:]
    said = (
        rf"^error: cluster\.address is {nodes.address}, where .* cannot be joined: .*{message}.* same versions of Ray"
    )
    assert re.search(said, done.stderr, flags=re.MULTILINE), done.stderr[-3000:]
    assert "Traceback" not in done.stderr
