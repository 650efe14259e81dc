"""What tells one kind of run apart from another in the same loop (`controller.py`): how its groups are sampled, which
batch they make, and what is learned from it. `PolicyGradientStages` are those of `train`; distillation has its own.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

import msgspec

from rollforward.model.metrics import Metric
from rollforward.rl.algorithms import DynamicSampling, Truncation
from rollforward.rl.batch import StepBatch, build_step_batch
from rollforward.rl.config import RLRun
from rollforward.rl.packing import MicroBatchPlan, plan_micro_batches
from rollforward.rollout.types import Group

Timed = Callable[[str], AbstractContextManager[None]]
"""Stage -> a context whose seconds are logged as `timing_s/STAGE`."""


class GroupRules(msgspec.Struct, frozen=True, kw_only=True):
    """How the groups of a step are sampled."""

    group_size: int
    """Completions of each prompt."""
    record_routes: bool
    """Record the experts that every sampled token visits."""
    truncation: Truncation = "keep"
    """What completions do that ran out of budget."""
    dynamic_sampling: DynamicSampling | None = None
    """Further prompts in place of groups that teach nothing."""
    shuffle_rewards: bool = False
    """The negative control."""


class Stages(Protocol):
    """What the loop asks of a kind of run."""

    @property
    def rules(self) -> GroupRules:
        """How groups are sampled."""
        ...

    def begin(self, weights_dir: Path) -> None:
        """Make sure of what needs the published weights, once in a process, before its first step."""
        ...

    def batch(self, groups: Sequence[Group]) -> StepBatch:
        """Return what a step trains on; a pure function."""
        ...

    def learn(self, step_dir: Path, batch: StepBatch, timed: Timed) -> tuple[Metric, ...]:
        """Take one optimizer step on the samples in ``step_dir``, which are those of ``batch``."""
        ...


class PolicyLearner(Protocol):
    """The learner's side of `PolicyGradientStages`."""

    def update(self, step_dir: Path, plans: Sequence[MicroBatchPlan]) -> tuple[Metric, ...]:
        """Take one optimizer step on the samples in ``step_dir``, packed as planned, over all ranks."""
        ...


class PolicyGradientStages:
    """The stages of `train`: groups to advantages to a policy gradient."""

    def __init__(self, run: RLRun, learner: PolicyLearner) -> None:
        """Bind configuration and learner."""
        self._run, self._learner = run, learner

    @property
    def rules(self) -> GroupRules:
        """See `Stages`."""
        algo = self._run.algo
        return GroupRules(
            group_size=algo.group_size,
            record_routes=algo.keep_routing,
            truncation=algo.truncation,
            dynamic_sampling=algo.dynamic_sampling,
            shuffle_rewards=self._run.shuffle_rewards,
        )

    def begin(self, weights_dir: Path) -> None:
        """See `Stages`; there is nothing to make sure of."""

    def batch(self, groups: Sequence[Group]) -> StepBatch:
        """See `Stages`."""
        algo = self._run.algo
        return build_step_batch(
            groups,
            normalisation=algo.normalisation,
            divide_by_std=algo.advantage_std,
            truncation=algo.truncation,
            max_new_tokens=self._run.sampling.max_new_tokens,
        )

    def learn(self, step_dir: Path, batch: StepBatch, timed: Timed) -> tuple[Metric, ...]:
        """See `Stages`."""
        with timed("update_actor"):
            return self._learner.update(step_dir, plan_micro_batches(batch.rows, self._run.micro_batch_tokens))
