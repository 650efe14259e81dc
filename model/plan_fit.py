"""What fits on the given GPUs, and what would where it does not.

What lives here: pure functions of plans. What does not: the sizes themselves (`plan_learner.py`, `plan_engine.py`).
This module imports neither torch nor ray.
"""

import itertools
from collections.abc import Callable
from typing import Literal

import msgspec

from rollforward.model.config import ModelConfig, preset
from rollforward.model.errors import ConfigError
from rollforward.model.plan_config import PlanRun
from rollforward.model.plan_engine import EnginePlan, fewest_gpus
from rollforward.model.plan_learner import (
    Division,
    LearnerElements,
    LearnerPlan,
    layer_input_bytes,
    learner_elements,
    make_learner_plan,
    undivided_bytes,
)

Part = Literal["learner", "engine", "learner and engine"]
"""What has to fit."""

_SMALL_MODEL = "mini"

_SMALL_RANKS = 64


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that has to fit on a GPU."""

    part: Part
    """What."""
    need: int
    """Bytes of the fullest GPU."""
    have: int
    """What tensors may take there."""
    way_out: str
    """What would fit, in whole sentences; empty where it fits."""

    @property
    def fits(self) -> bool:
        """Whether it does."""
        return self.need <= self.have


def make_checks(config: ModelConfig, run: PlanRun, learner: LearnerPlan, engine: EnginePlan) -> tuple[Check, ...]:
    """Compare what learner and engine need with the GPUs of the run; none without machines."""
    have = run.usable_bytes
    if run.num_gpus is None:
        return ()
    checks = [
        _check("learner", learner.total, have, lambda: _learner_ways(config, run, learner, have)),
        _check("engine", engine.total, have, lambda: _engine_ways(config, run, engine, have)),
    ]
    if run.shared and all(check.fits for check in checks):
        left = have - learner.total
        both = learner.total + engine.total
        checks.append(_check("learner and engine", both, have, lambda: _engine_ways(config, run, engine, left)))
    return tuple(checks)


def _check(part: Part, need: int, have: int, ways: Callable[[], str]) -> Check:
    return Check(part=part, need=need, have=have, way_out="" if need <= have else ways())


def refusal(checks: tuple[Check, ...]) -> str | None:
    """Return why the plan is refused and what would fit, a paragraph for each part that does not; None: all fit."""
    told = [
        f"{check.part}: the fullest GPU needs {check.need:,} bytes and has {check.have:,} usable. {check.way_out}"
        for check in checks
        if not check.fits
    ]
    return "\n".join(told) or None


def _learner_ways(config: ModelConfig, run: PlanRun, learner: LearnerPlan, have: int) -> str:
    settings: list[str] = []
    if tokens := max(0, have - learner.memory.total) // layer_input_bytes(config, 1):
        settings.append(f"micro_batch_tokens={tokens}")
    if (ranks := _enough_ranks(config, run, learner, have)) is not None:
        settings.append(f"learner_ranks={ranks} nodes={_nodes_for(run, ranks)}")
    if settings:
        return f"Set {', or '.join(settings)}."
    least = undivided_bytes(learner)
    ways = [
        f"No number of ranks fits: {least:,} bytes are on every rank whatever their number (published bytes, values,"
        " gradients and their sums of the whole model)."
    ]
    divisions: tuple[tuple[Division, str], ...] = (
        ("experts", "values, gradients and bytes of routed experts divided over the ranks"),
        ("everything", "those of every tensor divided"),
    )
    elements, inputs = learner_elements(config, run.split), layer_input_bytes(config, run.micro_batch_tokens)
    would = [(what, _enough_divided(elements, have - inputs, division)) for division, what in divisions]
    ways += [
        f"With {what} it would fit on {ranks:,} such GPUs, nodes={_nodes_for(run, ranks)}; rollforward cannot do that"
        " yet."
        for what, ranks in would
        if ranks is not None
    ]
    ways.append(f"As it is, a GPU must have {round(learner.total / run.usable):,} bytes.")
    ranks = min(run.num_ranks, _SMALL_RANKS)
    small = make_learner_plan(preset(_SMALL_MODEL), msgspec.structs.replace(run, zero_size=None, learner_ranks=ranks))
    if small.total <= have:
        ways.append(f"model={_SMALL_MODEL} fits here, with {small.total:,} bytes on learner_ranks={ranks}.")
    return " ".join(ways)


def _nodes_for(run: PlanRun, ranks: int) -> int:
    """Machines for so many learner ranks, and a replica beside them where GPUs are not shared."""
    return -(-(ranks + (0 if run.shared else run.engine.gpus)) // run.gpus_per_node)


def _enough_ranks(config: ModelConfig, run: PlanRun, learner: LearnerPlan, have: int) -> int | None:
    """The least number of ranks above the given one on which the learner fits as it is."""
    if undivided_bytes(learner) > have:
        return None
    num_matrices, ranks = learner.experts.num_matrices, 2 * run.num_ranks
    while ranks <= num_matrices:
        larger = msgspec.structs.replace(run, learner_ranks=ranks, nodes=_nodes_for(run, ranks))
        try:
            plan = make_learner_plan(config, larger)
        except ConfigError:  # too much padding with so many
            ranks *= 2
            continue
        if plan.total <= have:
            return ranks
        ranks *= 2
    return None


def _enough_divided(elements: LearnerElements, have: int, division: Division) -> int | None:
    ranks = 1
    while ranks <= elements.num_expert_matrices:
        if elements.divided(ranks, division) <= have:
            return ranks
        ranks *= 2
    return None


def _engine_ways(config: ModelConfig, run: PlanRun, engine: EnginePlan, have: int) -> str:
    """What would make the engine fit into so many bytes of each GPU."""
    ways: list[str] = []
    if (gpus := fewest_gpus(config, run.engine, have)) is not None:
        nodes = "" if gpus <= run.num_engine_gpus else f" nodes={_nodes_with_engine(run, gpus)}"
        ways.append(f"engine.gpus={gpus}{nodes}")
    if context := engine.longest_context(have):
        ways.append(f"engine.context={context}")
    if sequences := engine.most_sequences(have):
        ways.append(f"engine.sequences={sequences}")
    if not ways:
        return "Nothing smaller fits beside the weights. Choose another form of weights, or a smaller model."
    return f"Set {', or '.join(ways)}."


def _nodes_with_engine(run: PlanRun, gpus: int) -> int:
    """The least number of machines that leave a replica so many GPUs."""
    return next(
        nodes
        for nodes in itertools.count(run.nodes or 1)
        if msgspec.structs.replace(run, nodes=nodes).num_engine_gpus >= gpus
    )
