"""Ray wrappers of the learner side. No logic: a method is one call."""

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import ray

from rollforward.model.backends import choose_kernels
from rollforward.model.distributed import OPERATION_TIMEOUT_S, join_group
from rollforward.model.metrics import Metric, merge_metrics
from rollforward.rl.learner import Learner, PolicySettings, TrainedPolicy, check_model_dir, check_policy
from rollforward.rl.packing import MicroBatchPlan
from rollforward.rl.placement import Patience, Ranks
from rollforward.rollout.replica import Beat
from rollforward.rollout.weights import WeightsManifest

# Ray's types do not know concurrency groups, and options() refuses them.
RANK_OPTIONS: dict[str, Any] = {"max_restarts": 0, "max_task_retries": 0, "concurrency_groups": {"beat": 1}}


class PolicyRank:
    """One rank of a policy that is trained, in its own process; `beat` has a thread of its own."""

    build_learner: Callable[[Any], TrainedPolicy]
    """Makes the rank's learner from its settings, in a process group that it has joined."""

    check: Callable[[Any, str], None] = staticmethod(check_policy)
    """Refuses settings that this machine has no programs for, before that; is told what the rank is called."""

    learner: Any

    def __init__(
        self, rank: int, num_ranks: int, rendezvous: Path, rank_timeout_s: float = OPERATION_TIMEOUT_S
    ) -> None:
        """Give signs of life from here on; see ``join_group`` for what ``start`` joins."""
        join = partial(join_group, rendezvous, rank=rank, num_ranks=num_ranks, timeout_s=rank_timeout_s)
        self.build = partial(_joined, f"rank {rank} of the learner", join, self.check, self.build_learner)

    @ray.method(concurrency_group="beat")
    def beat(self) -> Beat:
        """Return a sign of life."""
        return Beat(pid=os.getpid(), node=ray.get_runtime_context().get_node_id(), leave_s=None)

    def start(self, settings: PolicySettings) -> None:
        """Take the forms of ops, join the process group and build the learner. Not in the constructor, whose errors
        lose their type on the way."""
        self.learner = self.build(settings)

    def quantised(self) -> dict[str, int]:
        """See ``TrainedPolicy.quantised``."""
        return self.learner.quantised()

    def publish(self, root: Path, policy_version: int) -> WeightsManifest:
        """See ``TrainedPolicy.publish``."""
        return self.learner.publish(root, policy_version)

    def save(self, directory: Path) -> None:
        """See ``TrainedPolicy.save``."""
        self.learner.save(directory)

    def load(self, directory: Path) -> None:
        """See ``TrainedPolicy.load``."""
        self.learner.load(directory)


def _joined(
    name: str,
    join: Callable[[], None],
    check: Callable[[Any, str], None],
    build_learner: Callable[[Any], TrainedPolicy],
    settings: PolicySettings,
) -> TrainedPolicy:
    choose_kernels(settings.kernels, name)
    check_model_dir(settings.model_dir, name)
    check(settings, name)
    join()
    return build_learner(settings)


@ray.remote(**RANK_OPTIONS)
class LearnerActor(PolicyRank):
    """One rank of the learner of reinforcement learning."""

    build_learner = Learner

    def update(self, step_dir: Path, plans: Sequence[MicroBatchPlan]) -> tuple[Metric, ...]:
        """See ``Learner.update``."""
        return self.learner.update(step_dir, plans)


class PolicyPool:
    """All ranks of a policy that is trained, as the controller sees them: plain calls that wait for their answer."""

    def __init__(
        self,
        actors: Sequence[Any],
        settings: PolicySettings,
        patience: Patience = Patience(),  # noqa: B008 - frozen
        resources: Mapping[str, float] | None = None,
    ) -> None:
        """Build the learner on every rank and wait for all; rank 0 first. See ``Ranks`` for the last two."""
        self._actors = list(actors)
        self._ranks = Ranks(self._actors, patience, resources or {})
        self._ranks.wait([actor.start.remote(settings) for actor in self._actors])

    def quantised(self) -> list[dict[str, int]]:
        """Return every rank's report; see ``TrainedPolicy.quantised``."""
        return self._ranks.wait([actor.quantised.remote() for actor in self._actors])

    def publish(self, root: Path, policy_version: int) -> WeightsManifest:
        """Publish from rank 0, whose masters are everyone's; see ``TrainedPolicy.publish``."""
        return self._ranks.wait([self._actors[0].publish.remote(root, policy_version)])[0]

    def save(self, directory: Path) -> None:
        """See ``TrainedPolicy.save``."""
        self._ranks.wait([actor.save.remote(directory) for actor in self._actors])

    def load(self, directory: Path) -> None:
        """See ``TrainedPolicy.load``."""
        self._ranks.wait([actor.load.remote(directory) for actor in self._actors])


class LearnerPool(PolicyPool):
    """All ranks of the learner of reinforcement learning."""

    def update(self, step_dir: Path, plans: Sequence[MicroBatchPlan]) -> tuple[Metric, ...]:
        """Take one optimizer step, every rank on its share; see ``Learner.update``."""
        calls = [actor.update.remote(step_dir, plans) for actor in self._actors]
        return merge_metrics(metric for metrics in self._ranks.wait(calls) for metric in metrics)
