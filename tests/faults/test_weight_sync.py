"""Proves: a publisher killed (SIGKILL) at any of its writes leaves no half version that can be loaded, and the version
before can be; an engine killed while it loads comes back with the current one, whole, before it gets a request.

The processes are forks of this one that kill themselves at a chosen system call, so that every kind of moment is met.
Engines under supervision on Ray are killed in test_engine_crash.py.
"""

import os
import shutil
import signal
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from rollforward.rollout.config import RolloutConfig
from rollforward.rollout.engine import forward
from rollforward.rollout.errors import VersionRefusedError
from rollforward.rollout.replica import Replica
from rollforward.rollout.weights import (
    check_acknowledgement,
    check_version,
    publish_weights,
    read_manifest,
    version_directory,
)
from tests.helpers.replicas import PROCESS, make_requests, packed_params
from tests.helpers.tiny import tiny_config

CONFIG = tiny_config()
WEIGHTS = {version: packed_params(CONFIG, seed=version) for version in (1, 2, 3)}
CALLS = ("mkdir", "open", "pwrite", "fsync", "rename", "unlink", "rmdir")
SHARD_BYTES = 400_000


@contextmanager
def _counted(kill_at: int) -> Generator[list[str]]:
    """System calls of this process, which ends before the one of this number; -1 never."""
    made: list[str] = []
    kept = {name: getattr(os, name) for name in CALLS}

    def counted(name: str, call: Callable[..., object]) -> Callable[..., object]:
        def wrapped(*args: object, **kwargs: object) -> object:
            if len(made) == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            made.append(name)
            return call(*args, **kwargs)

        return wrapped

    for name, call in kept.items():
        setattr(os, name, counted(name, call))
    try:
        yield made
    finally:
        for name, call in kept.items():
            setattr(os, name, call)


def _killed(work: Callable[[], object]) -> None:
    """Do the work in a fork, which must end by SIGKILL."""
    child = os.fork()
    if child == 0:
        try:
            torch.set_num_threads(1)
            work()
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status)
    assert os.WTERMSIG(status) == signal.SIGKILL


def _publish(root: Path, version: int, seed: int) -> None:
    publish_weights(root, version, CONFIG, WEIGHTS[seed], max_shard_bytes=SHARD_BYTES)


def _killed_publish(root: Path, version: int, seed: int, at: int) -> None:
    with _counted(at):
        _publish(root, version, seed)


def _moments(made: list[str]) -> list[int]:
    """The first call, some writes, and every call but a write that has a neighbour of another kind."""
    turns = [n for n, name in enumerate(made) if name != "pwrite" and (n == 0 or made[n - 1] != name)]
    writes = [n for n, name in enumerate(made) if name == "pwrite"]
    return sorted({0, len(made) - 1, *turns[:: max(1, len(turns) // 8)], writes[0], writes[-1]})


@pytest.mark.parametrize(("version", "loadable"), [(3, 2), (2, 1)])
def test_a_publisher_killed_at_any_write_leaves_whole_versions(tmp_path: Path, version: int, loadable: int) -> None:
    """A new version, and one that an interrupted step had published before."""
    start = tmp_path / "start"
    for earlier in (1, 2):
        _publish(start, earlier, earlier)
    shutil.copytree(start, tmp_path / "counting")
    with _counted(-1) as made:
        _publish(tmp_path / "counting", version, 3)
    assert made.count("fsync") > 3
    for at in _moments(made):
        root = tmp_path / f"killed_{at}"
        shutil.copytree(start, root)
        _killed(lambda root=root, at=at: _killed_publish(root, version, 3, at))
        assert check_version(version_directory(root, loadable), CONFIG).policy_version == loadable
        for directory in root.glob("v*"):
            check_version(directory, CONFIG)
        with pytest.raises(VersionRefusedError, match=r"holds no readable manifest\.json"):
            read_manifest(version_directory(root, 9))
        shutil.rmtree(root)
    # The next publish clears away what the last one left.
    root = tmp_path / "again"
    shutil.copytree(start, root)
    _killed(lambda: _killed_publish(root, version, 3, len(made) // 2))
    _publish(root, version, 3)
    assert sorted(path.name for path in root.iterdir()) == [f"v{one:06d}" for one in (version - 1, version)]


@pytest.mark.parametrize("num_written", [0, 30])
def test_an_engine_killed_in_a_load_comes_back_with_the_current_version(
    tmp_path: Path, num_written: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = RolloutConfig(threads=1, wal=PROCESS)
    for version in (1, 2):
        _publish(tmp_path / "weights", version, version)
    current = version_directory(tmp_path / "weights", 2)

    def load_and_die() -> None:
        replica = Replica("engine-0", tmp_path / "engine-0", CONFIG, precision="native", config=config)
        replica.load_weights(version_directory(tmp_path / "weights", 1))
        write, written = forward.unpack_into, []

        def dying(target: torch.Tensor, packed: object) -> None:
            if len(written) == num_written:
                os.kill(os.getpid(), signal.SIGKILL)
            written.append(target)
            write(target, packed)  # type: ignore[arg-type]

        monkeypatch.setattr(forward, "unpack_into", dying)
        replica.load_weights(current)

    _killed(load_and_die)
    replica = Replica("engine-0", tmp_path / "engine-0", CONFIG, precision="native", config=config)
    check_acknowledgement(read_manifest(current), replica.load_weights(current))
    other = Replica("other", tmp_path / "other", CONFIG, precision="native", config=config)
    other.load_weights(current)
    requests = make_requests([4, 18], max_new_tokens=5, version=2)
    for found, expected in zip(replica.generate(requests), other.generate(requests), strict=True):
        assert found.token_ids.tobytes() == expected.token_ids.tobytes()
        assert found.behavior_logprobs.tobytes() == expected.behavior_logprobs.tobytes()
    replica.close()
    other.close()
