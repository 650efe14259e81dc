"""Who teaches which trajectory, and which trajectories share a forward pass of their teacher.

    rows of the step --route--> shares of each row --plan_teachers--> micro-batches, each of one teacher, by its name

Pure functions of a step's light rows: what they decide depends neither on the order in which completions ended nor on
ranks. Plans of one teacher lie together, so that a pass over them loads every teacher, and every head, once.
"""

import bisect
import itertools
from collections.abc import Mapping, Sequence

import msgspec

from rollforward.distill.config import Routing, TeacherConfig
from rollforward.distill.errors import ScheduleError
from rollforward.rl.batch import TrajectoryRow
from rollforward.rl.packing import MicroBatchPlan, plan_micro_batches
from rollforward.rl.shuffle import derive_key
from rollforward.rollout.types import RequestId


class TeacherShare(msgspec.Struct, frozen=True, kw_only=True):
    """What one trajectory learns from one teacher."""

    teacher: str
    """Its name."""
    weight: float
    """Multiplies the weight of each of the trajectory's tokens; above 0."""


class TeacherPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The trajectories of one forward pass of one teacher, and of the student's pass that learns from it."""

    teacher: str
    """Its name."""
    rows: tuple[int, ...]
    """Their positions among the rows of the step, at least one, in training order."""
    weights: tuple[float, ...]
    """Weight of the teacher in each of them."""

    @property
    def micro_batch(self) -> MicroBatchPlan:
        """The same trajectories as the step's samples are read by."""
        return MicroBatchPlan(rows=self.rows)


def route(
    teachers: Mapping[str, TeacherConfig], routing: Routing, rows: Sequence[TrajectoryRow], *, seed: int
) -> tuple[tuple[TeacherShare, ...], ...]:
    """Return what each trajectory learns from whom.

    Args:
        teachers: by name, such as `check_routing` lets through.
        routing: "task" gives a trajectory every teacher that names its task, with the teacher's weight; "all" gives it
            every teacher, with its weight; "weights" gives it one, with weight 1, drawn with a probability proportional
            to the teacher's weight and keyed by (seed, step, prompt): all samples of a prompt have the same teacher.
        rows: of the whole step.
        seed: of the run.

    Returns:
        For each row its shares, at least one, by the teacher's name and of each teacher one at most.

    Raises:
        ScheduleError: nobody teaches the task of a row.

    Invariants: a pure function; what a row gets depends on no other row and not on the order of `teachers`.
    """
    names = sorted(teachers)
    shares = {name: TeacherShare(teacher=name, weight=teachers[name].weight) for name in names}
    if routing == "all":
        return tuple(tuple(shares.values()) for _ in rows)
    if routing == "task":
        by_task = {
            task: tuple(shares[name] for name in names if task in teachers[name].tasks)
            for task in {row.task for row in rows}
        }
        for row in rows:
            if not by_task[row.task]:
                raise ScheduleError(
                    f"trajectory {row.id} is of task {row.task}, which nobody teaches; under routing=task every task"
                    " needs a teacher. Name it in teachers.NAME.tasks"
                )
        return tuple(by_task[row.task] for row in rows)
    ends = list(itertools.accumulate(teachers[name].weight for name in names))
    return tuple((TeacherShare(teacher=names[_draw(ends, row.id, seed)], weight=1.0),) for row in rows)


def _draw(ends: Sequence[float], identity: RequestId, seed: int) -> int:
    """Which of the intervals that end there a point falls into that is uniform and the prompt's own."""
    point = derive_key("teacher", seed, identity.step, identity.prompt) / 2**64 * ends[-1]
    # The largest keys round to the very end.
    return min(bisect.bisect_right(ends, point), len(ends) - 1)


def plan_teachers(
    rows: Sequence[TrajectoryRow], routes: Sequence[Sequence[TeacherShare]], *, max_tokens: int
) -> tuple[TeacherPlan, ...]:
    """Pack trajectories into micro-batches of at most `max_tokens` tokens and of one teacher each.

    Args:
        rows: of the whole step, in training order.
        routes: from `route`, one entry a row.
        max_tokens: tokens of a micro-batch, prompts included.

    Returns:
        Plans by (teacher's name, row), packed for each teacher as `plan_micro_batches` does: every share of every row
        is in exactly one. A teacher whom no row has got has none.

    Raises:
        BatchError: a trajectory alone is larger than `max_tokens`.
    """
    taught: dict[str, list[tuple[int, TrajectoryRow, float]]] = {}
    for index, (row, shares) in enumerate(zip(rows, routes, strict=True)):
        for share in shares:
            taught.setdefault(share.teacher, []).append((index, row, share.weight))
    plans: list[TeacherPlan] = []
    for teacher in sorted(taught):
        indices, own_rows, weights = zip(*taught[teacher], strict=True)
        plans.extend(
            TeacherPlan(
                teacher=teacher,
                rows=tuple(indices[position] for position in pack.rows),
                weights=tuple(weights[position] for position in pack.rows),
            )
            for pack in plan_micro_batches(own_rows, max_tokens)
        )
    return tuple(plans)
