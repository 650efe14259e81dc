"""Puts the judges of a run in place: the policy, and models with engines of their own.

    a task's reward --judges--> load_judges (checked before anything is allocated) --> publish_judge --> engines
                                                                                                          |
                                                           Judging <-- seats <-- generate, encoding ------+

A judge's weights are published once, as version 0, in a directory of their own, and its engines prove by hashes that
they hold them, like the policy's; their logs are named after it. Which model it was is written down at the run's first
start (`judges.json`), and another one refused later. Not here: processes (`rl/train.py`), what is asked
(`judging.py`).
"""

from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Protocol

import msgspec

from rollforward.model.checkpoint_headers import check_entries, load_checkpoint_config, scan_checkpoint
from rollforward.model.config import ModelConfig
from rollforward.model.encoding import ChatEncoding
from rollforward.rl.errors import ModelDirectoryError
from rollforward.rl.judge.config import ActorJudge, Judge, ModelJudge, located
from rollforward.rl.judge.judging import Generate, Judging, Seat, check_room
from rollforward.rl.kept_versions import keep_versions, model_version
from rollforward.rl.tasks.config import TaskConfig
from rollforward.rl.tasks.reward_config import RubricReward
from rollforward.rollout.config import RolloutConfig
from rollforward.rollout.replica import LogStats, Replica
from rollforward.rollout.types import Completion, Request
from rollforward.rollout.wal_retention import Retirement
from rollforward.rollout.wal_scan import Problem
from rollforward.rollout.weights import (
    WeightsAck,
    WeightsManifest,
    check_acknowledgement,
    check_manifest,
    checkpoint_source,
    publish_weights,
    version_directory,
)

JUDGES_NAME = "judges"
"""Folder in a run directory with the published weights of its judges."""
VERSIONS_NAME = "judges.json"
"""File of a run directory with the version of each model that judges, as the run began with them."""
_VERSION = 0


class JudgeModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model that judges, beside the policy."""

    name: str
    """In this run: `judge-0`, in the order in which tasks name them."""
    judge: ModelJudge
    """As the first task configures it that names it."""
    model_config: ModelConfig
    """Its hyper-parameters."""
    encoding: ChatEncoding
    """Of its own tokenizer."""

    @property
    def engine_names(self) -> list[str]:
        """Names of its engines, which are those of their logs."""
        return [f"{self.name}-{index}" for index in range(self.judge.engines)]


class JudgeEngines(Protocol):
    """The engines of one judge."""

    def load_weights(self, directory: Path) -> list[WeightsAck]:
        """Load a published version on every replica and return what each one holds."""
        ...

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Sample requests to their end, in order; every token is durable."""
        ...

    def log_problems(self) -> list[Problem]:
        """Return what was wrong with the replicas' logs when they were opened."""
        ...

    def log_stats(self) -> list[LogStats]:
        """Return every replica's log counters."""
        ...

    def retire(self, before_step: int) -> list[Retirement]:
        """Let every replica's log forget requests of earlier steps, as far as it is larger than it may be."""
        ...

    def close(self) -> None:
        """Close every replica's log in order."""
        ...


def load_judges(
    task_configs: Sequence[TaskConfig], encoding: ChatEncoding, model_config: ModelConfig
) -> tuple[JudgeModel, ...]:
    """Load what the judges of tasks need besides weights, and see that they can be asked as configured.

    Args:
        task_configs: of the run.
        encoding, model_config: of the policy, which may judge too.

    Raises:
        ModelDirectoryError: a judge's tokenizer and model do not belong together.
        ConfigError, TokenizerError, CheckpointError: a file of its directory is absent, unusable or changed.
        EncodingError: a judge's encoding does not know the effort that it is asked with.
        TaskError: a rubric and its verdicts alone are longer than the judge's model takes.
    """
    named: dict[Judge, ModelJudge] = {}
    for judge in (judge for task in task_configs for judge in task.judges):
        named.setdefault(located(judge), judge)
    models = {key: _load(f"judge-{index}", judge) for index, (key, judge) in enumerate(named.items())}
    for task in task_configs:
        for reward in (part.reward for part in task.reward_parts if isinstance(part.reward, RubricReward)):
            model = None if isinstance(reward.judge, ActorJudge) else models[located(reward.judge)]
            asked = encoding if model is None else model.encoding
            asked.check_effort(reward.effort)
            positions = (model_config if model is None else model.model_config).max_position_embeddings
            check_room(task.name, reward, asked, positions)
    return tuple(models.values())


def publish_judge(model: JudgeModel, run_dir: Path) -> tuple[Path, WeightsManifest]:
    """Write a judge's weights where its engines take them from; what an earlier process wrote is written again.

    Returns:
        The directory of the version, and what it holds.
    """
    root = run_dir / JUDGES_NAME / model.name
    source = checkpoint_source(Path(model.judge.model_dir).resolve(), model.model_config)
    # Without a canary: the judge has no learner whose arithmetic could be another one.
    manifest = publish_weights(root, _VERSION, model.model_config, source)
    return version_directory(root, _VERSION), manifest


def local_engines(model: JudgeModel, run_dir: Path, rollout: RolloutConfig) -> "LocalJudge":
    """One engine of a judge in this process."""
    replica = Replica(
        model.engine_names[0],
        run_dir / "wal" / model.engine_names[0],
        model.model_config,
        precision=model.judge.precision,
        config=msgspec.structs.replace(rollout, engines=1),
    )
    return LocalJudge(replica)


class LocalJudge:
    """A judge's only engine, in this process, behind the interface of several."""

    def __init__(self, replica: Replica) -> None:
        """Take over the replica."""
        self._replica = replica

    def load_weights(self, directory: Path) -> list[WeightsAck]:
        """See `JudgeEngines`."""
        return [self._replica.load_weights(directory)]

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """See `JudgeEngines`."""
        return self._replica.generate(requests)

    def log_problems(self) -> list[Problem]:
        """See `JudgeEngines`."""
        return list(self._replica.log_problems())

    def log_stats(self) -> list[LogStats]:
        """See `JudgeEngines`."""
        return [self._replica.log_stats()]

    def retire(self, before_step: int) -> list[Retirement]:
        """See `JudgeEngines`."""
        return [self._replica.retire(before_step)]

    def close(self) -> None:
        """See `JudgeEngines`."""
        self._replica.close()


class Judges:
    """The judges of a run, each with its engines; the policy's engines are handed in and not owned.

    States: made, then, once `open` has loaded the weights, asked; `close` closes the judges' logs.
    """

    def __init__(
        self, models: Sequence[JudgeModel], engines: Sequence[JudgeEngines], *, run_dir: Path, run_seed: int
    ) -> None:
        """Bind models and engines; nothing is loaded yet.

        Args:
            models: from `load_judges`.
            engines: of each.
            run_dir: where weights are published.
            run_seed: keys every draw.
        """
        self._served = list(zip(models, engines, strict=True))
        self._run_dir, self._run_seed = run_dir, run_seed

    def open(self) -> None:
        """Publish the judges' weights, see that they are those that the run began with, and let their engines take and
        prove them.

        Raises:
            ModelDirectoryError: a judge is another than at the run's first start.
            WeightsError: an engine does not hold what was published.
        """
        published = [(engines, *publish_judge(model, self._run_dir)) for model, engines in self._served]
        versions = {
            model.judge.model_dir: _model_version(model, manifest)
            for (model, _), (_, _, manifest) in zip(self._served, published, strict=True)
        }
        if versions:
            file = self._run_dir / VERSIONS_NAME
            keep_versions(file, versions, what="judge", error=ModelDirectoryError, is_same=_are_one_place)
        for engines, directory, manifest in published:
            for ack in engines.load_weights(directory):
                check_acknowledgement(manifest, ack)

    def judging(self, generate: Generate, encoding: ChatEncoding, model_config: ModelConfig) -> Judging:
        """Return who asks them, and the policy.

        Args:
            generate, encoding, model_config: of the policy.
        """
        seats: dict[Judge, Seat] = {
            model.judge: Seat(
                encoding=model.encoding,
                generate=engines.generate,
                max_tokens=model.model_config.max_position_embeddings,
                policy_version=_VERSION,
            )
            for model, engines in self._served
        }
        actor = Seat(encoding=encoding, generate=generate, max_tokens=model_config.max_position_embeddings)
        return Judging({**seats, ActorJudge(): actor}, run_seed=self._run_seed)

    def retire(self, before_step: int) -> list[Retirement]:
        """Let the judges' logs forget what a durable checkpoint covers."""
        return [one for _, engines in self._served for one in engines.retire(before_step)]

    def log_problems(self) -> list[Problem]:
        """Return what was wrong with the judges' logs when they were opened."""
        return [one for _, engines in self._served for one in engines.log_problems()]

    def log_stats(self) -> list[LogStats]:
        """Return the counters of the judges' logs."""
        return [one for _, engines in self._served for one in engines.log_stats()]

    def close(self) -> None:
        """Close the judges' logs."""
        for _, engines in self._served:
            engines.close()


@contextmanager
def local_judging(
    models: Sequence[JudgeModel],
    actor: Replica,
    *,
    encoding: ChatEncoding,
    model_config: ModelConfig,
    run_dir: Path,
    rollout: RolloutConfig,
    run_seed: int,
) -> Generator[Judging]:
    """Judges in this process, for as long as the context lasts: one engine for each model, and the policy's replica.

    Args:
        models: from `load_judges`.
        actor, encoding, model_config: of the policy.
        run_dir, rollout, run_seed: of the run.

    Raises:
        WeightsError: an engine does not hold what was published.
    """
    with ExitStack() as stack:
        engines: list[JudgeEngines] = []
        for model in models:
            engines.append(local_engines(model, run_dir, rollout))
            stack.callback(engines[-1].close)
        judges = Judges(models, engines, run_dir=run_dir, run_seed=run_seed)
        judges.open()
        yield judges.judging(actor.generate, encoding, model_config)


def _are_one_place(one: str, other: str) -> bool:
    return Path(one).resolve() == Path(other).resolve()


def _model_version(model: JudgeModel, manifest: WeightsManifest) -> str:
    """Of weights, tokenizer and form of its conversations: what makes it judge as it does."""
    encoding = model.encoding
    return model_version(model.model_config, manifest.tensors, encoding.tokenizer.serialized, encoding.version.name)


def _load(name: str, judge: ModelJudge) -> JudgeModel:
    model_dir = Path(judge.model_dir).resolve()
    config = load_checkpoint_config(model_dir)
    encoding = ChatEncoding.load(model_dir)
    tokenizer = encoding.tokenizer
    if tokenizer.vocab_size > config.vocab_size or tokenizer.eos_id != config.eos_token_id:
        raise ModelDirectoryError(
            f"{model_dir}: the judge's tokenizer has {tokenizer.vocab_size} entries and ends with id"
            f" {tokenizer.eos_id}, its model has vocab_size {config.vocab_size} and eos_token_id"
            f" {config.eos_token_id}; they must belong together. Take both from one checkpoint"
        )
    check_entries(scan_checkpoint(model_dir), config)
    check_manifest(model_dir, config)
    return JudgeModel(name=name, judge=judge, model_config=config, encoding=encoding)
