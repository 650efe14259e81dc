"""Ray wrappers of the learner side. No logic: a method is one call."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray

from rollforward.model.distributed import join_group
from rollforward.model.metrics import Metric
from rollforward.rl.batch import PackedBatch
from rollforward.rl.learner import Learner, LearnerSettings
from rollforward.rollout.weights import WeightsManifest


@ray.remote(max_restarts=0, max_task_retries=0)
class LearnerActor:
    """One rank of the learner in its own process."""

    def __init__(self, settings: LearnerSettings, rank: int, num_ranks: int, rendezvous: Path) -> None:
        """Join the process group and build the learner; see ``Learner``."""
        join_group(rendezvous, rank=rank, num_ranks=num_ranks)
        self._learner = Learner(settings)

    def update(self, micro_batches: Sequence[PackedBatch]) -> tuple[Metric, ...]:
        """See ``Learner.update``."""
        return self._learner.update(micro_batches)

    def publish(self, root: Path, policy_version: int) -> WeightsManifest:
        """See ``Learner.publish``."""
        return self._learner.publish(root, policy_version)

    def save(self, directory: Path) -> None:
        """See ``Learner.save``."""
        self._learner.save(directory)

    def load(self, directory: Path) -> None:
        """See ``Learner.load``."""
        self._learner.load(directory)


class LearnerHandle:
    """The learner as the controller sees it: plain calls that wait for their answer."""

    def __init__(self, actor: Any) -> None:
        """Keep the handle."""
        self._actor = actor

    def update(self, micro_batches: Sequence[PackedBatch]) -> tuple[Metric, ...]:
        """See ``Learner.update``."""
        return ray.get(self._actor.update.remote(micro_batches))

    def publish(self, root: Path, policy_version: int) -> WeightsManifest:
        """See ``Learner.publish``."""
        return ray.get(self._actor.publish.remote(root, policy_version))

    def save(self, directory: Path) -> None:
        """See ``Learner.save``."""
        ray.get(self._actor.save.remote(directory))

    def load(self, directory: Path) -> None:
        """See ``Learner.load``."""
        ray.get(self._actor.load.remote(directory))
