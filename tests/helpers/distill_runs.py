"""A small run of distillation without Ray: real tasks, teachers, student, replicas, log and cache, in one process."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from rollforward.distill import train
from rollforward.distill.config import DistillRun
from rollforward.distill.learner import Canary, DistillLearner, DistillSettings
from rollforward.distill.schedule import TeacherPlan
from rollforward.distill.stages import DistillStages
from rollforward.model.metrics import Metric
from rollforward.rl.controller import Controller, RunOutcome
from rollforward.rl.setup import load_parts
from rollforward.rl.tracker import Tracker
from rollforward.rollout.replica import Replica
from rollforward.rollout.weights import read_published, version_directory
from tests.helpers.ranks import join_alone
from tests.helpers.runs import TASK, LocalRollout, write_model

OTHER_TASK = TASK | {"name": "other", "seed": 7}


def small_distill(run_dir: Path, model_dir: Path, teachers: dict[str, Any], **changes: Any) -> DistillRun:
    """A run of 3 steps with 6 prompts of two tasks."""
    values: dict[str, Any] = {
        "run_dir": str(run_dir),
        "model_dir": str(model_dir),
        "teachers": teachers,
        "tasks": [TASK, OTHER_TASK],
        "optim": {"type": "adamw", "lr": 1e-3},
        "sampling": {"max_new_tokens": 6},
        "steps": 3,
        "prompts_per_step": 6,
        "micro_batch_tokens": 64,
        "max_prompt_tokens": 40,
        "eval": {"prompts": 4, "every_steps": 3},
        "checkpoint_every_steps": 1,
        "tracker": {"mode": "disabled"},
        "teacher_cache": {"directory": str(run_dir / "teachers")},
        "rollout": {"threads": 1, "wal": {"level": "process"}},
        "cluster": {"learner_threads": 1},
    }
    return msgspec.convert(values | changes, DistillRun)


def write_models(root: Path, *names: str) -> None:
    """Models of one tokenizer and shape, with different weights: the student and teachers."""
    root.mkdir(exist_ok=True)
    for seed, name in enumerate(names):
        write_model(root / name, seed=seed)


def finish_distill(run: DistillRun) -> tuple[RunOutcome, dict[str, str]]:
    """Run to the end; the outcome and the hashes of the final weights."""
    controller, _, rollout = build_distill(run)
    try:
        outcome = controller.run()
    finally:
        rollout.close()
    return outcome, published(run, run.steps)


def published(run: DistillRun, version: int) -> dict[str, str]:
    """Hashes of the weights after so many steps."""
    return read_published(version_directory(Path(run.run_dir) / "weights", version))[0].tensors


def metrics(run: DistillRun) -> list[dict[str, float]]:
    """The lines of metrics.jsonl."""
    lines = (Path(run.run_dir) / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


class LocalPool:
    """One learner of distillation behind the interface of the pool."""

    def __init__(self, learner: DistillLearner) -> None:
        self.learner = learner

    def canary(self, weights_dir: Path) -> list[Canary]:
        return [self.learner.canary(weights_dir)]

    def score(
        self, step: int, step_dir: Path, plans: Sequence[TeacherPlan], missing: Sequence[int]
    ) -> tuple[Metric, ...]:
        return self.learner.score(step, step_dir, plans, missing)

    def update(self, step: int, step_dir: Path, plans: Sequence[TeacherPlan]) -> tuple[Metric, ...]:
        return self.learner.update(step, step_dir, plans)


def learner_settings(run: DistillRun) -> DistillSettings:
    """What a rank of the run is told."""
    urls = train.teacher_urls(run)
    return train.learner_settings(run, urls, train.find_teachers(run, urls))


def build_distill(run: DistillRun) -> tuple[Controller, LocalPool, LocalRollout]:
    """Everything of one process of the run, as distill/train.py places it on Ray."""
    run_dir = Path(run.run_dir)
    run_dir.mkdir(parents=True, exist_ok=True)
    join_alone(run_dir)
    parts = load_parts(
        Path(run.model_dir),
        run.tasks,
        max_prompt_tokens=run.max_prompt_tokens,
        max_new_tokens=run.sampling.max_new_tokens,
        sandbox=run.sandbox,
    )
    settings = learner_settings(run)
    pool = LocalPool(DistillLearner(settings))
    replica = Replica(
        "engine-0",
        run_dir / "wal" / "engine-0",
        parts.model_config,
        precision=run.precision,
        config=run.rollout,
        environment=parts.environment,
    )
    rollout = LocalRollout([replica])
    controller = Controller(
        run,
        stages=DistillStages(run, pool, settings.teachers),
        tasks=parts.tasks,
        encoder=parts.encoder,
        rollout=rollout,
        learner=pool.learner,
        tracker=Tracker(run_dir, run.tracker, run_config={}),
    )
    return controller, pool, rollout
