"""Ray wrappers of the learner of distillation. No logic: a method is one call."""

from collections.abc import Sequence
from pathlib import Path

import ray

from rollforward.distill.learner import Canary, DistillLearner, check_distill
from rollforward.distill.schedule import TeacherPlan
from rollforward.model.metrics import Metric, merge_metrics
from rollforward.rl.actors import RANK_OPTIONS, PolicyPool, PolicyRank


@ray.remote(**RANK_OPTIONS)
class DistillActor(PolicyRank):
    """One rank of the learner of distillation."""

    build_learner = DistillLearner
    check = staticmethod(check_distill)

    def canary(self, weights_dir: Path) -> Canary:
        """See ``DistillLearner.canary``."""
        return self.learner.canary(weights_dir)

    def score(
        self, step: int, step_dir: Path, plans: Sequence[TeacherPlan], missing: Sequence[int]
    ) -> tuple[Metric, ...]:
        """See ``DistillLearner.score``."""
        return self.learner.score(step, step_dir, plans, missing)

    def update(self, step: int, step_dir: Path, plans: Sequence[TeacherPlan]) -> tuple[Metric, ...]:
        """See ``DistillLearner.update``."""
        return self.learner.update(step, step_dir, plans)


class DistillPool(PolicyPool):
    """All ranks of the learner of distillation."""

    def canary(self, weights_dir: Path) -> list[Canary]:
        """Return what every rank found; see ``DistillLearner.canary``."""
        return self._ranks.wait([actor.canary.remote(weights_dir) for actor in self._actors])

    def score(
        self, step: int, step_dir: Path, plans: Sequence[TeacherPlan], missing: Sequence[int]
    ) -> tuple[Metric, ...]:
        """Have the teachers score what is missing, every rank its share; see ``DistillLearner.score``."""
        calls = [actor.score.remote(step, step_dir, plans, missing) for actor in self._actors]
        return merge_metrics(metric for metrics in self._ranks.wait(calls) for metric in metrics)

    def update(self, step: int, step_dir: Path, plans: Sequence[TeacherPlan]) -> tuple[Metric, ...]:
        """Take one optimizer step, every rank on its share; see ``DistillLearner.update``."""
        calls = [actor.update.remote(step, step_dir, plans) for actor in self._actors]
        return merge_metrics(metric for metrics in self._ranks.wait(calls) for metric in metrics)
