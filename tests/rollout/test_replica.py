"""Proves: how many bytes of key-values a replica saves when it hands over is the configuration's, what is saved, used
and refused is counted under the names that the run logs, and none of it changes a bit.

What a state holds and when it is refused is proved in engine/test_kv_store.py and engine/test_kv_resume.py.
"""

from collections.abc import Callable
from pathlib import Path

import pytest

from rollforward.conf.errors import ConfigError
from rollforward.conf.load import decode
from rollforward.model.metrics import metric_values
from rollforward.rl.metrics import log_metrics
from rollforward.rollout.config import RolloutConfig
from rollforward.rollout.errors import PausedError
from rollforward.rollout.replica import LogStats, Replica
from rollforward.rollout.types import Completion
from rollforward.rollout.weights import publish_weights, version_directory
from tests.helpers.preemption import pause_after
from tests.helpers.replicas import PROCESS, make_requests, packed_params
from tests.helpers.tiny import tiny_config

REQUESTS = make_requests([3, 9, 30], max_new_tokens=20)


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("weights")
    publish_weights(root, 1, tiny_config(), packed_params(tiny_config()))
    return version_directory(root, 1)


def _replica(directory: Path, weights: Path, max_bytes: int) -> Replica:
    config = RolloutConfig(threads=1, wal=PROCESS, kv_save_bytes=max_bytes)
    replica = Replica("engine-0", directory, tiny_config(), precision="native", config=config)
    replica.load_weights(weights)
    return replica


@pytest.fixture(scope="module")
def undisturbed(weights: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Completion]:
    replica = _replica(tmp_path_factory.mktemp("log"), weights, 0)
    completions = replica.generate(REQUESTS)
    replica.close()
    return completions


def _handed_over(directory: Path, weights: Path, max_bytes: int) -> LogStats:
    """A replica that leaves after four tokens of each request."""
    replica = _replica(directory, weights, max_bytes)
    pause_after(replica._engine, replica._log, steps=4)  # type: ignore[arg-type]
    with pytest.raises(PausedError):
        replica.generate(REQUESTS)
    return replica.drain(60)


def _kv(stats: LogStats) -> dict[str, float]:
    values = metric_values(log_metrics([stats]))
    return {
        name.removeprefix("resume/kv_"): value
        for name, value in values.items()
        if name.startswith("resume/kv_") and value
    }


@pytest.fixture(scope="module")
def state_bytes(weights: Path, tmp_path_factory: pytest.TempPathFactory) -> int:
    """Of the longest request, the only one where there is room for no more."""
    directory = tmp_path_factory.mktemp("wal") / "engine-0"
    _handed_over(directory, weights, 1 << 30)
    return max(path.stat().st_size for path in Path(f"{directory}.kv").glob("*.safetensors"))


def test_the_configuration_bounds_what_is_saved(
    weights: Path, undisturbed: list[Completion], state_bytes: int, tmp_path: Path
) -> None:
    for name, max_bytes, saved in (("all", 1 << 30, 3), ("one", state_bytes, 1), ("none", 0, 0)):
        found = _kv(_handed_over(tmp_path / name, weights, max_bytes))
        files = [path.stat().st_size for path in Path(f"{tmp_path / name}.kv").glob("*.safetensors")]
        assert (len(files), sum(files)) == (saved, found.get("saved_bytes", 0))
        assert found.get("saved", 0) == saved
        assert found.get("refused_budget", 0) == 3 - saved
        assert sum(files) <= max_bytes
        successor = _replica(tmp_path / name, weights, max_bytes)
        assert successor.generate(REQUESTS) == undisturbed
        assert _kv(successor.log_stats()) == ({"restored": saved} if saved else {})
        successor.close()


@pytest.mark.parametrize(
    ("reason", "harm"),
    [
        ("missing", Path.unlink),
        ("damaged", lambda path: path.write_bytes(path.read_bytes()[:-1] + bytes([path.read_bytes()[-1] ^ 1]))),
    ],
)
def test_what_cannot_be_used_is_counted_and_computed_again(
    weights: Path, undisturbed: list[Completion], tmp_path: Path, reason: str, harm: Callable[[Path], object]
) -> None:
    _handed_over(tmp_path / "a", weights, 1 << 30)
    harm(max((tmp_path / "a.kv").glob("*.safetensors")))
    successor = _replica(tmp_path / "a", weights, 1 << 30)
    assert successor.generate(REQUESTS) == undisturbed
    assert _kv(successor.log_stats()) == {"restored": 2, reason: 1}
    successor.close()


def test_a_budget_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="kv_save_bytes"):
        decode(RolloutConfig, {"kv_save_bytes": -1})
    assert decode(RolloutConfig, {"kv_save_bytes": 0}).kv_save_bytes == 0
