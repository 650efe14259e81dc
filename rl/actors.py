"""Ray wrappers of the learner side. No logic: a method is one call."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray

from rollforward.model.distributed import join_group
from rollforward.model.metrics import Metric, merge_metrics
from rollforward.rl.learner import Learner, LearnerSettings
from rollforward.rl.packing import MicroBatchPlan
from rollforward.rollout.weights import WeightsManifest


@ray.remote(max_restarts=0, max_task_retries=0)
class LearnerActor:
    """One rank of the learner in its own process."""

    def __init__(self, rank: int, num_ranks: int, rendezvous: Path) -> None:
        """Join the process group."""
        join_group(rendezvous, rank=rank, num_ranks=num_ranks)

    def start(self, settings: LearnerSettings) -> None:
        """Build the learner; see ``Learner``. Not in the constructor, whose errors lose their type on the way."""
        self._learner = Learner(settings)

    def update(self, step_dir: Path, plans: Sequence[MicroBatchPlan]) -> tuple[Metric, ...]:
        """See ``Learner.update``."""
        return self._learner.update(step_dir, plans)

    def quantised(self) -> dict[str, int]:
        """See ``Learner.quantised``."""
        return self._learner.quantised()

    def publish(self, root: Path, policy_version: int) -> WeightsManifest:
        """See ``Learner.publish``."""
        return self._learner.publish(root, policy_version)

    def save(self, directory: Path) -> None:
        """See ``Learner.save``."""
        self._learner.save(directory)

    def load(self, directory: Path) -> None:
        """See ``Learner.load``."""
        self._learner.load(directory)


class LearnerPool:
    """All ranks of the learner as the controller sees them: plain calls that wait for their answer."""

    def __init__(self, actors: Sequence[Any], settings: LearnerSettings) -> None:
        """Build the learner on every rank and wait for all; rank 0 first."""
        self._actors = list(actors)
        ray.get([actor.start.remote(settings) for actor in self._actors])

    def update(self, step_dir: Path, plans: Sequence[MicroBatchPlan]) -> tuple[Metric, ...]:
        """Take one optimizer step, every rank on its share; see ``Learner.update``."""
        calls = [actor.update.remote(step_dir, plans) for actor in self._actors]
        return merge_metrics(metric for metrics in ray.get(calls) for metric in metrics)

    def quantised(self) -> list[dict[str, int]]:
        """Return every rank's report; see ``Learner.quantised``."""
        return ray.get([actor.quantised.remote() for actor in self._actors])

    def publish(self, root: Path, policy_version: int) -> WeightsManifest:
        """Publish from rank 0, whose masters are everyone's; see ``Learner.publish``."""
        return ray.get(self._actors[0].publish.remote(root, policy_version))

    def save(self, directory: Path) -> None:
        """See ``Learner.save``."""
        ray.get([actor.save.remote(directory) for actor in self._actors])

    def load(self, directory: Path) -> None:
        """See ``Learner.load``."""
        ray.get([actor.load.remote(directory) for actor in self._actors])
