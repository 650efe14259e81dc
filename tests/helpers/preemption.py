"""Replicas that are preempted at a chosen record of their log, with their key-values saved."""

from collections.abc import Callable
from pathlib import Path

from rollforward.model.config import ModelConfig
from rollforward.model.precision import PackedTensor
from rollforward.rollout.engine.kv_store import KvStore
from rollforward.rollout.engine.local import LocalEngine
from rollforward.rollout.environment import Environment
from rollforward.rollout.errors import PausedError
from rollforward.rollout.types import Completion, Request, ResumeStats
from rollforward.rollout.wal import WalWriter
from tests.helpers.replicas import open_engine


def store_of(directory: Path, config: ModelConfig) -> KvStore:
    """Where a replica with this log directory saves its key-values."""
    return KvStore(directory.with_name(directory.name + ".kv"), config, "native", max_bytes=1 << 30)


def pause_after(engine: LocalEngine, log: WalWriter, *, steps: int) -> None:
    """Pause the engine when its log has taken so many decode steps."""
    append, left = log.append_step, [steps]

    def counted(*args: object, **kwargs: object) -> int:
        left[0] -= 1
        if left[0] == 0:
            engine.pause()
        return append(*args, **kwargs)  # type: ignore[arg-type]

    if steps == 0:
        engine.pause()
    log.append_step = counted  # type: ignore[method-assign]


def preempt(
    directory: Path,
    packed: dict[str, PackedTensor],
    requests: list[Request],
    *,
    steps: int,
    config: ModelConfig,
    environment: Callable[[], Environment] | None = None,
    **limits: int,
) -> tuple[list[Completion] | None, int, ResumeStats]:
    """Sample until a preemption; return the completions if there was none, how many states were saved, and what was
    resumed."""
    store = store_of(directory, config)
    engine, log = open_engine(
        directory,
        packed,
        model_config=config,
        environment=None if environment is None else environment(),
        kv_store=store,
        **limits,
    )
    with log:
        pause_after(engine, log, steps=steps)
        try:
            return engine.generate(requests), 0, engine.resume_stats()
        except PausedError:
            return None, engine.save_kv(store), engine.resume_stats()
