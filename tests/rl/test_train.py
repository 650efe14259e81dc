"""Proves: an error of a learner's start keeps its type, one of a constructor or of a node without the code is told like
any other, a process that dies is named in a line, every rank reports what it quantises, and one that is lost ends the
call that waits for it. On a real Ray."""

import importlib
import os
import re
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from ray.exceptions import RayActorError

from rollforward.conf.errors import told, user_error, world_error
from rollforward.kernels.config import KernelBackends
from rollforward.model.checkpoint import write_checkpoint
from rollforward.model.errors import ConfigError, RankLostError, TrainerError
from rollforward.model.train_config import AdamW
from rollforward.rl.actors import LearnerActor, LearnerPool
from rollforward.rl.algorithms import GRPO
from rollforward.rl.errors import ClusterError, LostProcessError, ModelDirectoryError, RewardError
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


@ray.remote(max_restarts=0, num_cpus=0)
class _Refusing:
    """Its constructor raises."""

    def __init__(self, first: Exception, then: Exception) -> None:
        try:
            raise first
        except type(first):
            raise then  # noqa: B904 - so that both are in what Ray says

    def answer(self) -> None:
        pass


_MISTAKE = RewardError("file: the value, the rule.\nThe way out")


@pytest.mark.usefixtures("cluster")
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("first", "then", "is_mistake", "is_ours"),
    [
        pytest.param(KeyError("a reason"), _MISTAKE, True, True, id="a mistake"),
        pytest.param(_MISTAKE, LostProcessError("what to do"), False, True, id="the world's"),
        pytest.param(_MISTAKE, KeyError("a bug"), False, False, id="a bug"),
    ],
)
def test_what_a_constructor_raised_is_told_like_what_a_call_raises(
    first: Exception, then: Exception, is_mistake: bool, is_ours: bool
) -> None:
    refusing: Any = _Refusing.remote(first, then)  # type: ignore[attr-defined]
    with pytest.raises(RayActorError, match="creation task") as caught, losses_named():
        ray.get(refusing.answer.remote())
    for found, is_told in ((user_error(caught.value), is_mistake), (world_error(caught.value), is_ours)):
        assert (type(found), str(found)) == ((type(then), str(then)) if is_told else (type(None), "None"))


@pytest.mark.usefixtures("cluster")
@pytest.mark.timeout(120)
def test_a_node_that_lacks_the_code_is_told_what_it_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here_alone.py").write_text("class Here:\n    def answer(self): pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    here: Any = ray.remote(importlib.import_module("here_alone").Here)
    (tmp_path / "here_alone.py").unlink()
    said = (
        r"^the Python of node [\d.]+ cannot make a Here: ModuleNotFoundError: No module named 'here_alone'\. Every node"
    )
    with pytest.raises(ClusterError, match=said), losses_named():
        ray.get(here.remote().answer.remote())


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
    (tmp_path / TOKENIZER_NAME).write_bytes(b"not read here")
    with pytest.raises(ConfigError, match=r"config\.json cannot be read.*Give a config\.json or its folder"):
        LearnerPool([actor], _settings(tmp_path))


@pytest.mark.usefixtures("cluster")
@pytest.mark.timeout(120)
@pytest.mark.parametrize("has_directory", [True, False])
def test_a_node_that_does_not_see_all_of_the_model_is_named(tmp_path: Path, has_directory: bool) -> None:
    model_dir = tmp_path / "model"
    if has_directory:
        model_dir.mkdir()
    actor = LearnerActor.options(num_cpus=0).remote(0, 1, tmp_path / "rendezvous")  # type: ignore[attr-defined]
    said = rf"^rank 0 of the learner finds no {model_dir}/tokenizer\.json on .+; every node must see all of model_dir"
    with pytest.raises(ModelDirectoryError) as caught:
        LearnerPool([actor], _settings(model_dir))
    assert re.match(said, told(user_error(caught.value) or caught.value))


@pytest.mark.usefixtures("cluster")
@pytest.mark.timeout(120)
def test_a_node_that_does_not_see_the_runs_directory_is_named(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "model", tiny_config(), random_params(tiny_config()), precision="fp32")
    (tmp_path / "model" / TOKENIZER_NAME).write_bytes(b"not read here")
    actor = LearnerActor.options(num_cpus=0).remote(0, 1, tmp_path / "absent" / "rendezvous")  # type: ignore[attr-defined]
    said = (
        rf"rank 0 of the learner cannot write into {tmp_path}/absent on .+, where there is no such folder; every rank"
    )
    with pytest.raises(TrainerError, match=said):
        LearnerPool([actor], _settings(tmp_path / "model"))


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
