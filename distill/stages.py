"""The stages of `distill` in the loop of `rl/controller.py`: teachers score a step's trajectories, the student learns.

write_step --> route, plan_teachers --> cache: what is missing --> score --> update --> free
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from rollforward.conf.console import say
from rollforward.distill.batch import build_distill_batch
from rollforward.distill.config import DistillRun
from rollforward.distill.errors import CanaryError
from rollforward.distill.hidden_cache import HIDDEN_NAME, HiddenCache
from rollforward.distill.hidden_shard import remove_path
from rollforward.distill.learner import CANARY_NAME, Canary, teacher_key
from rollforward.distill.schedule import TeacherPlan, plan_teachers, route
from rollforward.distill.teacher_source import TeacherSource
from rollforward.model.metrics import Metric
from rollforward.rl.batch import StepBatch
from rollforward.rl.samples import open_step
from rollforward.rl.stages import GroupRules, Timed
from rollforward.rollout.types import Group


class DistillGroup(Protocol):
    """The learner's side of `DistillStages`: all ranks."""

    def canary(self, weights_dir: Path) -> list[Canary]:
        """Compare the student with itself on every rank."""
        ...

    def score(
        self, step: int, step_dir: Path, plans: Sequence[TeacherPlan], missing: Sequence[int]
    ) -> tuple[Metric, ...]:
        """Have the teachers score what is missing."""
        ...

    def update(self, step: int, step_dir: Path, plans: Sequence[TeacherPlan]) -> tuple[Metric, ...]:
        """Take one optimizer step."""
        ...


class DistillStages:
    """See `rl.stages.Stages`."""

    def __init__(self, run: DistillRun, learner: DistillGroup, teachers: Mapping[str, TeacherSource]) -> None:
        """Bind configuration, learner and what is known of the teachers."""
        self._run, self._learner, self._teachers = run, learner, teachers
        self._root = Path(run.run_dir).resolve() / HIDDEN_NAME
        self._cache = HiddenCache(self._root, max_bytes=max_hidden_bytes(run))

    @property
    def rules(self) -> GroupRules:
        """See `Stages`."""
        return GroupRules(group_size=self._run.samples_per_prompt, record_routes=self._run.keep_routing)

    def begin(self, weights_dir: Path) -> None:
        """Have the published student teach itself.

        Raises:
            CanaryError: it is not at distance 0 from itself.
        """
        for left in self._root.glob(f"{CANARY_NAME}-*"):  # of a process that was killed, with more ranks perhaps
            remove_path(left)
        for rank, found in enumerate(self._learner.canary(weights_dir)):
            if found.kl_max != 0 or found.gradient_max != 0:
                raise CanaryError(
                    f"rank {rank}: with the student as its own teacher the largest KL of {found.num_rows} positions is"
                    f" {found.kl_max} and the largest gradient {found.gradient_max}; both must be exactly 0. Teachers"
                    " do not compute what the student computes here, so that every KL would be wrong: is this machine's"
                    " arithmetic reproducible? Nothing was trained"
                )
        say("canary: the student as its own teacher has KL 0 and gradient 0")

    def batch(self, groups: Sequence[Group]) -> StepBatch:
        """See `Stages`."""
        return build_distill_batch(
            groups, normalisation=self._run.normalisation, max_new_tokens=self._run.sampling.max_new_tokens
        )

    def learn(self, step_dir: Path, batch: StepBatch, timed: Timed) -> tuple[Metric, ...]:
        """Score, then learn; see `Stages`."""
        run, step = self._run, batch.rows[0].id.step
        routes = route(run.teachers, run.routing, batch.rows, seed=run.seed)
        plans = plan_teachers(batch.rows, routes, max_tokens=run.micro_batch_tokens)
        samples = open_step(step_dir)
        keys = [
            teacher_key(
                samples.spoken(plan.micro_batch), self._teachers[plan.teacher], step=step, precision=run.precision
            )
            for plan in plans
        ]
        missing, found = self._cache.begin(step, keys)
        for sentence in found:
            say(f"step {step + 1}: scored again: {sentence}")
        with timed("score_teachers"):
            scored = self._learner.score(step, step_dir, plans, missing) if missing else ()
        with timed("update_actor"):
            learned = self._learner.update(step, step_dir, plans)
        self._cache.free(step)
        return (*scored, *learned, *_cache_metrics(plans, missing))


def max_hidden_bytes(run: DistillRun) -> int:
    """Return the room for hidden vectors in bytes."""
    return int(run.teacher_cache.max_hidden_gib * 2**30)


def _cache_metrics(plans: Sequence[TeacherPlan], missing: Sequence[int]) -> tuple[Metric, ...]:
    values = {
        "opd/teachers": len({plan.teacher for plan in plans}),
        "opd/cache_hits": len(plans) - len(missing),
        "opd/cache_misses": len(missing),
    }
    return tuple(Metric(name=name, numerator=value, denominator=1, per="step") for name, value in values.items())
