"""Proves: an error of a learner's start keeps its type, and a process that dies is named in a line. On a real Ray."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from rollforward.model.errors import ConfigError
from rollforward.model.train_config import AdamW
from rollforward.rl.actors import LearnerActor, LearnerPool
from rollforward.rl.algorithms import GRPO
from rollforward.rl.errors import LostProcessError
from rollforward.rl.learner import LearnerSettings
from rollforward.rl.train import losses_named


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


@pytest.mark.usefixtures("cluster")
@pytest.mark.timeout(120)
def test_an_error_of_a_learners_start_keeps_its_type(tmp_path: Path) -> None:
    settings = LearnerSettings(
        model_dir=str(tmp_path / "absent"),
        algorithm=GRPO(),
        optim=AdamW(lr=1e-3),
        precision="native",
        temperature=1.0,
        threads=1,
    )
    actor = LearnerActor.options(num_cpus=0).remote(0, 1, tmp_path / "rendezvous")  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=r"config\.json cannot be read"):
        LearnerPool([actor], settings)
