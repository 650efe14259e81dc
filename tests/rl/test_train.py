"""Proves: an error of a learner's start keeps its type, a process that dies is named in a line, every rank reports what
it quantises, and one that is lost ends the call that waits for it. On a real Ray."""

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

from rollforward.kernels.config import KernelBackends
from rollforward.model.checkpoint import write_checkpoint
from rollforward.model.errors import ConfigError, RankLostError
from rollforward.model.train_config import AdamW
from rollforward.rl.actors import LearnerActor, LearnerPool
from rollforward.rl.algorithms import GRPO
from rollforward.rl.errors import LostProcessError
from rollforward.rl.learner import TOKENIZER_NAME, LearnerSettings
from rollforward.rl.quantised import planned_quantised
from rollforward.rl.train import losses_named
from tests.helpers.tiny import random_params, tiny_config


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    ray.init(num_cpus=1, include_dashboard=False, configure_logging=False, log_to_driver=False)
    yield
    ray.shutdown()


@ray.remote(max_restarts=0, num_cpus=0)
class _Dying:
    def end(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.usefixtures("cluster")
@pytest.mark.timeout(120)
def test_a_process_that_dies_is_named() -> None:
    dying: Any = _Dying.remote()  # type: ignore[attr-defined]
    with pytest.raises(LostProcessError, match=r"^_Dying \(pid \d+\) died; .*goes on$"), losses_named():
        ray.get(dying.end.remote())


def _learners() -> list[psutil.Process]:
    family = psutil.Process().children(recursive=True)
    return [process for process in family if "LearnerActor" in " ".join(process.cmdline())]


def _settings(model_dir: Path) -> LearnerSettings:
    return LearnerSettings(
        model_dir=str(model_dir),
        algorithm=GRPO(),
        optim=AdamW(lr=1e-3),
        precision="native",
        temperature=1.0,
        threads=1,
        kernels=KernelBackends(),
    )


@pytest.mark.usefixtures("cluster")
@pytest.mark.timeout(120)
def test_an_error_of_a_learners_start_keeps_its_type(tmp_path: Path) -> None:
    actor = LearnerActor.options(num_cpus=0).remote(0, 1, tmp_path / "rendezvous")  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=r"absent cannot be read.*Give a config\.json or its folder"):
        LearnerPool([actor], _settings(tmp_path / "absent"))


@pytest.mark.usefixtures("cluster")
@pytest.mark.timeout(120)
def test_every_rank_reports_its_formats_and_a_lost_one_ends_the_call(tmp_path: Path) -> None:
    config, files = tiny_config(), {TOKENIZER_NAME: b"not read here"}
    write_checkpoint(tmp_path / "model", config, random_params(config), precision="fp32", extra_files=files)
    before = {process.pid for process in _learners()}
    actors: list[Any] = [
        LearnerActor.options(num_cpus=0).remote(rank, 2, tmp_path / "rendezvous")  # type: ignore[attr-defined]
        for rank in range(2)
    ]
    pool = LearnerPool(actors, _settings(tmp_path / "model"))
    assert pool.quantised() == [planned_quantised(config, "native")] * 2
    # One rank waits for the other, which is stopped and then killed: the call ends then, far below gloo's timeout.
    pid = max(process.pid for process in _learners() if process.pid not in before)
    os.kill(pid, signal.SIGSTOP)
    killer = threading.Timer(1.0, os.kill, (pid, signal.SIGKILL))
    killer.start()
    (tmp_path / "checkpoint").mkdir()
    with pytest.raises((LostProcessError, RankLostError)), losses_named():
        pool.save(tmp_path / "checkpoint")
    assert not killer.is_alive(), "it was waited for"
    for actor in actors:
        ray.kill(actor)
