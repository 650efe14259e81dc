"""Proves: 1, 2 and 4 ranks that share the scoring of three teachers and the learning from them take the same steps to
the bit, with shares of unequal size, ranks that have nothing to score or to learn, and shards that were there already;
the student is at distance 0 from itself on every rank.

Real processes and collectives, Muon with stochastic rounding; the samples are those of a run.
"""

import hashlib
import json
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from rollforward.distill.config import DistillRun
from rollforward.distill.hidden_cache import HIDDEN_NAME
from rollforward.distill.learner import DistillLearner
from rollforward.distill.schedule import TeacherPlan, plan_teachers, route
from rollforward.distill.teacher_weights import ShardedTeacher
from rollforward.model.metrics import metric_values
from rollforward.rl.samples import open_step
from rollforward.rollout.weights import version_directory
from tests.helpers.distill_runs import build_distill, learner_settings, small_distill, write_models
from tests.helpers.ranks import join_alone, run_on_ranks

TEACHERS = {"a": ["chain_sum"], "b": ["other"], "c": ["chain_sum", "other"]}
MAX_TOKENS = (18, 1024)
"""Of a micro-batch, by step: one trajectory each, twelve in all; and one micro-batch for each teacher, so that one of
four ranks learns nothing and only one has anything to score."""
KEPT = (1, 7, 8)
"""Plans of the first step that are not scored the second time."""


def _run(root: Path, run_dir: Path) -> DistillRun:
    named = {name: {"model_dir": str(root / "models" / name), "tasks": tasks} for name, tasks in TEACHERS.items()}
    return small_distill(
        run_dir,
        root / "models" / "student",
        named,
        steps=2,
        max_prompt_tokens=12,
        keep_samples=True,
        eval={"prompts": 1, "every_steps": 9},
        optim={"type": "hybrid_muon", "lr": 3e-3, "max_grad_norm": 0.5},
    )


def _plans(run: DistillRun, step_dir: Path, max_tokens: int) -> tuple[TeacherPlan, ...]:
    rows = open_step(step_dir).rows
    return plan_teachers(rows, route(run.teachers, run.routing, rows, seed=run.seed), max_tokens=max_tokens)


def _inodes(run: DistillRun) -> dict[str, int]:
    return {path.name: path.stat().st_ino for path in (Path(run.run_dir) / HIDDEN_NAME / "step_000000").iterdir()}


def steps_on_a_rank(rank: int, num_ranks: int, directory: str) -> None:
    """Take both steps on this rank's share, of the first with some scores twice; write what came of it."""
    root = Path(directory)
    run = _run(root, root / f"on {num_ranks}")
    if rank == 0:  # what the run's own process does before there are ranks
        learner_settings(run)
    torch.distributed.barrier()
    learner = DistillLearner(learner_settings(run))
    own = root / f"weights of {num_ranks}"
    if rank == 0:
        learner.publish(own, 0)
    torch.distributed.barrier()
    to_itself = learner.canary(version_directory(own, 0))
    assert (to_itself.kl_max, to_itself.gradient_max, to_itself.num_rows > 40) == (0.0, 0.0, True)
    to_another = learner.canary(version_directory(root / "run" / "weights", 2))
    assert min(to_another.kl_max, to_another.gradient_max) > 0
    skipped: Counter[str] = Counter()
    skip_pass = ShardedTeacher.skip_pass

    def counted(teacher: ShardedTeacher) -> None:
        skipped["passes"] += 1
        skip_pass(teacher)

    ShardedTeacher.skip_pass = counted  # type: ignore[method-assign]
    found: dict[str, Any] = {}
    for step, max_tokens in enumerate(MAX_TOKENS):
        step_dir = root / "run" / "samples" / f"step_{step:06d}"
        plans = _plans(run, step_dir, max_tokens)
        skipped.clear()
        scored = metric_values(learner.score(step, step_dir, plans, range(len(plans))))
        found[f"passes {step}"] = scored["opd/scored_tokens"], skipped["passes"]
        torch.distributed.barrier()
        if step == 0:
            before = _inodes(run)
            learner.score(step, step_dir, plans, [index for index in range(len(plans)) if index not in KEPT])
            torch.distributed.barrier()
            after = _inodes(run)
            assert sorted(int(name[:4]) for name in before if before[name] == after[name]) == list(KEPT)
        learned = metric_values(learner.update(step, step_dir, plans))
        found[f"heads {step}"] = learned["opd/head_loads"]
        found[f"norm {step}"] = learned["actor/grad_norm"].hex()
    masters = learner.trainer.masters()
    found["masters"] = {name: hashlib.sha256(one.numpy().tobytes()).hexdigest()[:16] for name, one in masters.items()}
    (root / f"{num_ranks}-{rank}.json").write_text(json.dumps(found))


def test_steps_have_the_same_bits_on_any_number_of_ranks(tmp_path: Path) -> None:
    write_models(tmp_path / "models", "student", *TEACHERS)
    run = _run(tmp_path, tmp_path / "run")
    controller, _, rollout = build_distill(run)
    controller.run()
    rollout.close()
    plans = [
        _plans(run, tmp_path / "run" / "samples" / f"step_{step:06d}", max_tokens)
        for step, max_tokens in enumerate(MAX_TOKENS)
    ]
    by_teacher = [Counter(plan.teacher for plan in step) for step in plans]
    assert (by_teacher[0].total(), dict(by_teacher[1])) == (12, {"a": 1, "b": 1, "c": 1})
    join_alone(tmp_path)
    torch.set_num_threads(1)
    steps_on_a_rank(0, 1, str(tmp_path))
    alone = json.loads((tmp_path / "1-0.json").read_text())
    for num_ranks in (2, 4):
        run_on_ranks(steps_on_a_rank, num_ranks, tmp_path, num_ranks, str(tmp_path))
        found = [json.loads((tmp_path / f"{num_ranks}-{rank}.json").read_text()) for rank in range(num_ranks)]
        for one in found:
            assert one["masters"] == alone["masters"]
            assert [one[f"norm {step}"] for step in (0, 1)] == [alone[f"norm {step}"] for step in (0, 1)]
        for step, counts in enumerate(by_teacher):
            scored, skipped = zip(*(one[f"passes {step}"] for one in found), strict=True)
            assert sum(scored) == alone[f"passes {step}"][0]
            assert sum(skipped) == sum(-count % num_ranks for count in counts.values())
            heads = [one[f"heads {step}"] for one in found]
            assert sum(heads) <= num_ranks - 1 + len(counts), "each head once on each rank that needs it"
        assert [one["passes 1"][1] for one in found] == [0, *[3] * (num_ranks - 1)]
        assert [one["heads 1"] for one in found] == ([2, 1] if num_ranks == 2 else [1, 1, 1, 0])
