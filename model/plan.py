"""`rollforward plan`: what a model weighs, what learner and engines take of a GPU, what moves between them, and whether
that fits, from the shape table and given speeds alone, before anything is allocated.

What lives here: putting the parts together. What does not: sizes of the model (`plan_model.py`), of the learner
(`plan_learner.py`) and of an engine (`plan_engine.py`), traffic (`plan_traffic.py`), verdicts (`plan_fit.py`), words
(`plan_text.py`). docs/plan.md has the formulas. This module imports neither torch nor ray.
"""

from typing import Any

import msgspec

from rollforward.conf import console
from rollforward.model.assignment import Assignment
from rollforward.model.config import resolve_model
from rollforward.model.errors import ConfigError
from rollforward.model.plan_config import PlanRun
from rollforward.model.plan_engine import EnginePlan, make_engine_plan
from rollforward.model.plan_fit import Check, make_checks, refusal
from rollforward.model.plan_learner import LearnerPlan, make_learner_plan
from rollforward.model.plan_model import Plan, make_plan
from rollforward.model.plan_text import (
    not_yet,
    render_checks,
    render_engine_plan,
    render_learner_plan,
    render_plan,
    render_traffic,
)
from rollforward.model.plan_traffic import (
    HiddenPlan,
    LogPlan,
    SyncPlan,
    make_hidden_plan,
    make_log_plan,
    make_sync_plan,
)

__all__ = ["FullPlan", "PlanRun", "main", "make_full_plan", "plan_json"]


class FullPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that `rollforward plan` says."""

    model: Plan
    """Sizes of the model."""
    learner: LearnerPlan
    """Of a learner's fullest rank, and who updates what."""
    engine: EnginePlan
    """Of a replica's fullest GPU."""
    sync: SyncPlan
    """A publish."""
    log: LogPlan
    """The token log."""
    hidden: HiddenPlan
    """Teachers' hidden states."""
    checks: tuple[Check, ...]
    """What fits; empty where no machines are given."""


def make_full_plan(run: PlanRun) -> FullPlan:
    """Compute a plan.

    Raises:
        ConfigError: the model is unknown, its config.json is refused, or ranks, GPUs or context are impossible.
    """
    config = resolve_model(run.model)
    learner, engine = make_learner_plan(config, run), make_engine_plan(config, run.engine)
    return FullPlan(
        model=make_plan(config),
        learner=learner,
        engine=engine,
        sync=make_sync_plan(config, run),
        log=make_log_plan(config, run),
        hidden=make_hidden_plan(config, run),
        checks=make_checks(config, run, learner, engine),
    )


def plan_json(run: PlanRun, plan: FullPlan) -> dict[str, Any]:
    """Return a plan as what JSON can hold: settings and every number, those computed from others too. Of Muon's
    assignment the sums, not each matrix."""
    parts = {name: _plain(getattr(plan, name)) for name in plan.__struct_fields__}
    verdict = {"fits": all(check.fits for check in plan.checks), "not_yet": not_yet(run)}
    return {"settings": msgspec.to_builtins(run), **parts, **verdict}


def _plain(value: Any) -> Any:
    """A record with its properties, and its parts likewise."""
    if isinstance(value, tuple):
        return [_plain(one) for one in value]
    if not isinstance(value, msgspec.Struct):
        return value
    names = [name for name in value.__struct_fields__ if not (isinstance(value, Assignment) and name == "shares")]
    computed = [name for name, member in vars(type(value)).items() if isinstance(member, property)]
    return {name: _plain(getattr(value, name)) for name in (*names, *computed)}


def main(config: PlanRun) -> int:
    """Write the plan to standard output and return the exit status 0.

    Raises:
        ConfigError: as `make_full_plan`; or, after the plan is written, something does not fit on the given GPUs. The
            message says what would.
    """
    plan = make_full_plan(config)
    if config.json:
        console.result(msgspec.json.encode(plan_json(config, plan)).decode())
    else:
        sections = [
            render_plan(config.model, plan.model),
            render_learner_plan(plan.learner),
            render_engine_plan(plan.engine, config),
            render_traffic(plan.sync, plan.log, plan.hidden, config),
        ]
        if plan.checks:
            sections.append(render_checks(plan.checks, config))
        console.result("\n".join(sections))
    if (told := refusal(plan.checks)) is not None:
        raise ConfigError(told)
    return 0
