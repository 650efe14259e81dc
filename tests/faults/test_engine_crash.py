"""Proves: engines on a real Ray that are killed, stopped, told to leave or lost while they load weights cost no token
and no bit, and the run does not end; one that is lost again and again ends it soon, with an error that says why.

Real processes and signals, the product's actors, logs and published weights; every order of events is in
tests/rollout/test_supervisor.py. The whole command, with the trained weights at its end, is the slow part here. Not
here: learner ranks (test_learner_crash.py) and the driver (tests/e2e/test_on_ray.py).
"""

import contextlib
import json
import os
import random
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import ray

from rollforward.kernels.config import KernelBackends
from rollforward.rollout.actors import RolloutActor
from rollforward.rollout.config import RolloutConfig
from rollforward.rollout.drain_file import DrainFile
from rollforward.rollout.errors import RolloutLostError, WalFencedError
from rollforward.rollout.placement import RayHost
from rollforward.rollout.replica import LogStats, Replica
from rollforward.rollout.supervisor import Supervisor
from rollforward.rollout.types import Completion, Request
from rollforward.rollout.wal_recovery import recover
from rollforward.rollout.weights import publish_weights, read_published, version_directory
from tests.helpers.commands import command
from tests.helpers.replicas import PROCESS, make_requests, packed_params
from tests.helpers.runs import TASK, write_model
from tests.helpers.tiny import tiny_config

CONFIG = RolloutConfig(threads=1, wal=PROCESS, heartbeat_s=0.5, heartbeat_timeout_s=6, drain_s=20)
NAMES = ["engine-0", "engine-1"]
REQUESTS = make_requests([5, 9, 3, 7], members=2, max_new_tokens=30)
SOON_S = 60.0
"""Long on a busy machine."""


def _again(requests: list[Request], version: int) -> list[Request]:
    """The same prompts for another version, under other identities."""
    return [
        msgspec.structs.replace(request, id=msgspec.structs.replace(request.id, step=version), policy_version=version)
        for request in requests
    ]


def _pid(actor: Any) -> int:
    beat: Any = ray.get(actor.beat.remote())
    return beat.pid


class Fleet:
    """Two engines on Ray under supervision, and who they are."""

    def __init__(self, root: Path, weights: Path, **changes: Any) -> None:
        self.root, self.weights = root, weights
        self.said: list[str] = []
        self.actors: dict[int, list[Any]] = {0: [], 1: []}
        config = msgspec.structs.replace(CONFIG, **changes)

        def create(index: int) -> Any:
            actor = RolloutActor.options(num_cpus=0).remote(  # type: ignore[attr-defined]
                NAMES[index], root / NAMES[index], tiny_config(), "native", config, None, KernelBackends()
            )
            self.actors[index].append(actor)
            return actor

        drain = DrainFile(root / "drain", NAMES, announce=self.said.append)
        root.mkdir(parents=True, exist_ok=True)
        self.supervisor = Supervisor(RayHost(create), NAMES, config, notices=drain.read, announce=self.said.append)

    def pid(self, index: int) -> int:
        """Of the newest process."""
        return _pid(self.actors[index][-1])

    def load(self, version: int = 1) -> None:
        self.supervisor.load_weights(version_directory(self.weights, version))

    def num_tokens(self, index: int) -> int:
        """In its log."""
        return recover(self.root / NAMES[index]).num_tokens

    def meanwhile(self, index: int, num_tokens: int, do: Callable[[], object]) -> threading.Thread:
        """Do something when an engine's log has so many tokens."""

        def wait() -> None:
            deadline_s = time.monotonic() + SOON_S
            while self.num_tokens(index) < num_tokens and time.monotonic() < deadline_s:
                time.sleep(0.02)
            do()

        thread = threading.Thread(target=wait)
        thread.start()
        return thread

    def end(self) -> None:
        self.supervisor.close()
        for actor in (actor for actors in self.actors.values() for actor in actors):
            ray.kill(actor)


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    ray.init(num_cpus=1, include_dashboard=False, configure_logging=False, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Versions 1 and 2."""
    root = tmp_path_factory.mktemp("weights")
    for version in (2, 1):
        publish_weights(root, version, tiny_config(), packed_params(tiny_config(), seed=version))
    return root


@pytest.fixture(scope="module")
def undisturbed(weights: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[Completion]]:
    """Completions under both versions, from one replica in this process."""
    directory = tmp_path_factory.mktemp("undisturbed")
    replica = Replica("alone", directory, tiny_config(), precision="native", config=CONFIG)
    found: dict[int, list[Completion]] = {}
    for version in (1, 2):
        replica.load_weights(version_directory(weights, version))
        found[version] = replica.generate(REQUESTS if version == 1 else _again(REQUESTS, 2))
    replica.close()
    assert sum(one.num_sampled_tokens for one in found[1]) > 100
    return found


@pytest.fixture
def fleet(cluster: None, weights: Path, tmp_path: Path) -> Iterator[Fleet]:
    fleet = Fleet(tmp_path / "wal", weights)
    yield fleet
    fleet.end()


def _require_logged_once(fleet: Fleet, completions: list[Completion]) -> None:
    """The logs hold exactly what was published: no attempt but the first, no damage."""
    for index, name in enumerate(NAMES):
        log = recover(fleet.root / name)
        assert (log.failed, log.earlier_attempts, log.problems) == ({}, (), ()), index
        for one in (one for one in completions if one.id.prompt % 2 == index):
            assert log.requests[one.id].token_ids.tolist() == one.token_ids.tolist()


def _stats(fleet: Fleet) -> list[LogStats]:
    return fleet.supervisor.log_stats()


@pytest.mark.timeout(240)
def test_killed_and_stopped_in_the_middle_of_sampling(fleet: Fleet, undisturbed: dict[int, list[Completion]]) -> None:
    """SIGKILL to one; the other is stopped and would never answer again: the first sign is that it gives none."""
    fleet.load()
    pids = [fleet.pid(0), fleet.pid(1)]
    threads = [
        fleet.meanwhile(0, 17, lambda: os.kill(pids[0], signal.SIGKILL)),
        fleet.meanwhile(1, 21, lambda: os.kill(pids[1], signal.SIGSTOP)),
    ]
    completions = fleet.supervisor.generate(REQUESTS)
    for thread in threads:
        thread.join()
    assert completions == undisturbed[1]
    stats = _stats(fleet)
    assert [one.restarts.restarts for one in stats] == [1, 1], fleet.said
    assert (stats[0].failures.engine_lost, stats[1].failures.engine_hung) == (1, 1)
    assert all(one.resumed.tokens >= 17 for one in stats), "the log's tokens are not drawn again"
    assert not any(psutil.pid_exists(pid) for pid in pids), "who was given up is ended"
    _require_logged_once(fleet, completions)
    fleet.load(2)
    assert fleet.supervisor.generate(_again(REQUESTS, 2)) == undisturbed[2]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_both_killed_at_once_and_while_they_load(
    fleet: Fleet, undisturbed: dict[int, list[Completion]], seed: int
) -> None:
    draws = random.Random(seed)
    fleet.load()
    pids = [fleet.pid(0), fleet.pid(1)]
    thread = fleet.meanwhile(0, 11, lambda: [os.kill(pid, signal.SIGKILL) for pid in pids])
    assert fleet.supervisor.generate(REQUESTS) == undisturbed[1]
    thread.join()
    pid = fleet.pid(1)
    timer = threading.Timer(draws.random() * 0.2, os.kill, (pid, signal.SIGKILL))
    timer.start()
    fleet.load(2)
    timer.join()
    assert fleet.supervisor.generate(_again(REQUESTS, 2)) == undisturbed[2]
    assert [ack.policy_version for ack in fleet.supervisor.acknowledge()] == [2, 2]
    assert [one.failures.engine_lost for one in _stats(fleet)] == [1, 2]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("how", ["sigterm", "file"])
def test_told_to_leave(fleet: Fleet, undisturbed: dict[int, list[Completion]], how: str) -> None:
    """It hands over in order: its part of the log ends sealed, and nobody counts a loss."""
    fleet.load()
    pid = fleet.pid(0)
    tell = (
        (lambda: os.kill(pid, signal.SIGTERM))
        if how == "sigterm"
        else (lambda: (fleet.root / "drain").write_text("engine-0 15"))
    )
    thread = fleet.meanwhile(0, 9, tell)
    assert fleet.supervisor.generate(REQUESTS) == undisturbed[1]
    thread.join()
    fleet.load(2)
    assert fleet.supervisor.generate(_again(REQUESTS, 2)) == undisturbed[2]
    stats = _stats(fleet)[0]
    assert (stats.failures.engine_drained, stats.failures.engine_lost, stats.restarts.restarts) == (1, 0, 1)
    assert not psutil.pid_exists(pid)
    assert any(re.search("engine-0 handed over; key-values of [1-4] requests", text) for text in fleet.said), fleet.said
    assert stats.resumed.kv_restored > 0, "what was saved is used"


@pytest.mark.timeout(120)
def test_a_log_that_may_not_be_written_ends_the_run_at_once_and_says_what_to_do(
    cluster: None, weights: Path, tmp_path: Path
) -> None:
    """Another process may not write it either. Nobody may make a file in sysfs, root included."""
    fleet = Fleet(tmp_path / "wal", weights, max_restarts=3)
    (fleet.root / "engine-1").symlink_to("/sys/kernel")
    with pytest.raises(RolloutLostError, match=r"^engine-1: log .*denied.*Let this user write.*`rollforward resume"):
        fleet.load()
    assert len(fleet.actors[1]) == 1
    ray.kill(fleet.actors[0][-1])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_lost_again_and_again(cluster: None, weights: Path, tmp_path: Path) -> None:
    fleet = Fleet(tmp_path / "wal", weights, max_restarts=1)
    fleet.load()
    is_over = threading.Event()

    def kill() -> None:
        while not is_over.is_set():
            with contextlib.suppress(Exception):  # it dies while it is asked for its pid
                os.kill(fleet.pid(1), signal.SIGKILL)
            time.sleep(0.05)

    thread = threading.Thread(target=kill)
    thread.start()
    start_s = time.monotonic()
    try:
        with pytest.raises(RolloutLostError, match=r"engine-1 was lost 2 times.*max_restarts allows 1.*resume"):
            fleet.supervisor.generate(REQUESTS)
    finally:
        is_over.set()
        thread.join()
    assert time.monotonic() - start_s < 2 * SOON_S
    ray.kill(fleet.actors[0][-1])
    # Whoever comes next goes on.
    again = Fleet(tmp_path / "wal", weights)
    again.load()
    assert len(again.supervisor.generate(REQUESTS)) == len(REQUESTS)
    again.end()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_zombie_that_wakes_up_publishes_nothing(
    cluster: None, weights: Path, tmp_path: Path, undisturbed: dict[int, list[Completion]]
) -> None:
    """Nobody could kill it, as on a machine that cannot be reached; its successor has a newer epoch."""

    def start() -> Any:
        actor: Any = RolloutActor.options(num_cpus=0).remote(  # type: ignore[attr-defined]
            "engine-0", tmp_path / "engine-0", tiny_config(), "native", CONFIG, None, KernelBackends()
        )
        ray.get(actor.open.remote())
        ray.get(actor.load_weights.remote(version_directory(weights, 1)))
        return actor

    zombie = start()
    pid = _pid(zombie)
    call = zombie.generate.remote(REQUESTS)
    while recover(tmp_path / "engine-0").num_tokens < 20:
        time.sleep(0.02)
    os.kill(pid, signal.SIGSTOP)
    successor = start()
    assert ray.get(successor.generate.remote(REQUESTS)) == undisturbed[1]
    os.kill(pid, signal.SIGCONT)
    with pytest.raises(WalFencedError, match="Another replica took over"):
        ray.get(call, timeout=SOON_S)
    ray.get(successor.close.remote())
    log = recover(tmp_path / "engine-0")
    assert (log.failed, log.earlier_attempts) == ({}, ())
    expected = {one.id: one.token_ids.tolist() for one in undisturbed[1]}
    assert {identity: request.token_ids.tolist() for identity, request in log.requests.items()} == expected
    for actor in (zombie, successor):
        ray.kill(actor)


SETTINGS = (
    f"tasks=[{json.dumps(TASK)}]".replace('"', ""),
    "optim={type: adamw, lr: 1e-3, weight_decay: 0.5}",
    "sampling.max_new_tokens=24",
    "steps=3",
    "prompts_per_step=4",
    "micro_batch_tokens=256",
    "max_prompt_tokens=40",
    "eval={prompts: 4, every_steps: 3}",
    "checkpoint_every_steps=1",
    "tracker.mode=disabled",
    "rollout.engines=2",
    "rollout.threads=1",
    "rollout.heartbeat_s=0.5",
    "rollout.heartbeat_timeout_s=6",
    "cluster.learner_threads=1",
    "algo.group_size=2",
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """The model that runs start from, and the weights of one that nobody disturbed."""
    root = tmp_path_factory.mktemp("trained")
    model_dir = write_model(root / "model")
    words = command("train", f"run_dir={root / 'run'}", f"model_dir={model_dir}", *SETTINGS)
    done = subprocess.run(words, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    weights = read_published(root / "run" / "model")[0].tensors
    before = read_published(root / "run" / "model")[0].policy_version
    assert before == 3
    return model_dir, weights


def _engines(driver: subprocess.Popen[bytes]) -> list[psutil.Process]:
    found: list[psutil.Process] = []
    with contextlib.suppress(psutil.NoSuchProcess):
        for process in psutil.Process(driver.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if "RolloutActor" in " ".join(process.cmdline()):
                    found.append(process)
    return found


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_whole_run_with_dying_engines_ends_as_it_would_have(
    trained: tuple[Path, dict[str, str]], tmp_path: Path, seed: int
) -> None:
    """At random times, a SIGKILL or a SIGSTOP to one engine or both; the command itself never ends early."""
    model_dir, expected = trained
    draws = random.Random(seed)
    run_dir = tmp_path / "run"
    words = command("train", f"run_dir={run_dir}", f"model_dir={model_dir}", *SETTINGS, "rollout.max_restarts=20")
    with (tmp_path / "log.txt").open("w") as log:
        driver = subprocess.Popen(words, stdout=log, stderr=log)
    num_faults = 0
    while driver.poll() is None:
        time.sleep(draws.uniform(3, 12))
        engines = _engines(driver)
        if len(engines) == 2 and num_faults < 8:
            for victim in draws.choice((engines, engines[:1], engines[1:])):
                with contextlib.suppress(psutil.NoSuchProcess):
                    victim.send_signal(draws.choice((signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP)))
                    num_faults += 1
    text = (tmp_path / "log.txt").read_text()
    assert driver.returncode == 0, text[-3000:]
    assert num_faults > 0
    assert read_published(run_dir / "model")[0].tensors == expected
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert sum(lines[-1][f"failure/engine_{kind}"] for kind in ("lost", "hung")) > 0, text
    assert lines[-1]["resume/restarts"] > 0
    assert lines[-1]["resume/recovery_s"] >= lines[-1]["resume/recovery_max_s"] > 0
    assert [line["training/rollout_probs_diff_max"] for line in lines] == [0.0] * 3


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_run_whose_engine_is_lost_too_often_says_so_and_resume_goes_on(
    trained: tuple[Path, dict[str, str]], tmp_path: Path
) -> None:
    model_dir, expected = trained
    run_dir = tmp_path / "run"
    words = command("train", f"run_dir={run_dir}", f"model_dir={model_dir}", *SETTINGS, "rollout.max_restarts=0")
    with (tmp_path / "log.txt").open("w") as log:
        driver = subprocess.Popen(words, stdout=log, stderr=log)
    metrics = run_dir / "metrics.jsonl"
    deadline_s = time.monotonic() + 300
    while not metrics.exists() or not metrics.read_text():
        assert driver.poll() is None, (tmp_path / "log.txt").read_text()[-3000:]
        assert time.monotonic() < deadline_s
        time.sleep(0.02)
    _engines(driver)[0].kill()
    assert driver.wait(timeout=SOON_S) == 1
    text = (tmp_path / "log.txt").read_text()
    assert "\nerror: engine-" in text
    assert "Traceback" not in text
    assert "was lost 1 times within a step" in text
    assert not (run_dir / "model").exists(), "it does not look like the end"
    done = subprocess.run(command("resume", str(run_dir)), capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert read_published(run_dir / "model")[0].tensors == expected
