"""Proves: every trajectory is taught by exactly those whom the routing names, whatever the order and the other rows;
every share is in exactly one plan, and each teacher's plans lie together.

What a plan's rows stand for, and that scoring and learning follow the plans, is tested elsewhere.
"""

import itertools
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollforward.distill.config import Routing, TeacherConfig, check_routing
from rollforward.distill.errors import ScheduleError
from rollforward.distill.schedule import TeacherPlan, TeacherShare, plan_teachers, route
from rollforward.rl.batch import TrajectoryRow
from rollforward.rl.errors import BatchError
from rollforward.rl.packing import MicroBatchPlan, plan_micro_batches
from rollforward.rollout.types import RequestId, StopReason

TASKS = ("add", "sort", "prove")
NAMES = ("zoe", "Ada", "ada", "b.2")
MAX_TOKENS = 30


def row(prompt: int, member: int = 0, *, task: str = "add", num_tokens: int = 5, step: int = 3) -> TrajectoryRow:
    return TrajectoryRow(
        id=RequestId(step, prompt, member),
        task=task,
        reward=0.0,
        advantage=0.0,
        token_weight=0.1,
        segment_lengths=(num_tokens,),
        num_trained_tokens=1,
        num_turns=1,
        stop_reason=StopReason.EOS,
        failure=None,
        policy_version=3,
    )


def teacher(weight: float = 1.0, *tasks: str) -> TeacherConfig:
    return TeacherConfig(weight=weight, tasks=tasks)


@st.composite
def steps(draw: st.DrawFn) -> list[TrajectoryRow]:
    """Rows of a step, in training order; members that failed are missing."""
    rows: list[TrajectoryRow] = []
    for prompt in range(draw(st.integers(1, 8))):
        task = draw(st.sampled_from(TASKS))
        members = sorted(draw(st.sets(st.integers(0, 3), min_size=1)))
        rows.extend(row(prompt, member, task=task, num_tokens=draw(st.integers(1, MAX_TOKENS))) for member in members)
    return rows


@st.composite
def teachers_of(draw: st.DrawFn, routing: Routing) -> dict[str, TeacherConfig]:
    """Teachers that `check_routing` lets through, in any order."""
    names = draw(st.lists(st.sampled_from(NAMES), unique=True, min_size=1))
    tasks: dict[str, list[str]] = {name: [] for name in names}
    if routing == "task":
        for task in TASKS:
            for name in draw(st.sets(st.sampled_from(names), min_size=1)):
                tasks[name].append(task)
        for name in names:
            tasks[name] = tasks[name] or ["add"]
    weights = {name: draw(st.sampled_from([0.25, 1.0, 3.0])) for name in names}
    found = {name: teacher(weights[name], *tasks[name]) for name in names}
    check_routing(found, routing, TASKS)
    return found


routings = st.sampled_from(["task", "weights", "all"])
cases = routings.flatmap(lambda routing: st.tuples(st.just(routing), teachers_of(routing), steps()))


@given(teachers_of("task"), steps())
def test_a_task_is_taught_by_exactly_those_who_name_it(
    teachers: dict[str, TeacherConfig], rows: list[TrajectoryRow]
) -> None:
    routes = route(teachers, "task", rows, seed=1)
    assert len(routes) == len(rows)
    for one, shares in zip(rows, routes, strict=True):
        assert [share.teacher for share in shares] == sorted(
            name for name in teachers if one.task in teachers[name].tasks
        )
        assert all(share.weight == teachers[share.teacher].weight for share in shares)
        assert shares


@given(teachers_of("all"), steps())
def test_all_teach_every_row_once_with_their_weight(
    teachers: dict[str, TeacherConfig], rows: list[TrajectoryRow]
) -> None:
    for shares in route(teachers, "all", rows, seed=1):
        assert shares == tuple(TeacherShare(teacher=name, weight=teachers[name].weight) for name in sorted(teachers))


@given(teachers_of("weights"), steps(), st.integers(0, 2**40), st.randoms(use_true_random=False))
def test_a_prompt_has_one_teacher_whatever_else_is_in_the_step(
    teachers: dict[str, TeacherConfig], rows: list[TrajectoryRow], seed: int, random: Any
) -> None:
    together = dict(zip([one.id for one in rows], route(teachers, "weights", rows, seed=seed), strict=True))
    by_prompt: dict[int, set[str]] = {}
    for identity, shares in together.items():
        (share,) = shares
        assert share.weight == 1.0
        by_prompt.setdefault(identity.prompt, set()).add(share.teacher)
    assert all(len(found) == 1 for found in by_prompt.values())
    shuffled = random.sample(rows, len(rows))
    reordered = {name: teachers[name] for name in random.sample(sorted(teachers), len(teachers))}
    assert route(reordered, "weights", shuffled, seed=seed) == tuple(together[one.id] for one in shuffled)
    assert all(route(teachers, "weights", [one], seed=seed) == (together[one.id],) for one in rows)


@pytest.mark.parametrize("weights", [(1.0, 1.0), (1.0, 3.0), (7.0, 2.0, 1.0), (1e-9, 1e-9), (1e300, 1e-300)])
def test_teachers_are_drawn_as_often_as_their_weights_say(weights: tuple[float, ...]) -> None:
    teachers = {f"t{index}": teacher(weight) for index, weight in enumerate(weights)}
    num = 20_000
    rows = [row(prompt % 200, step=prompt // 200) for prompt in range(num)]
    counts = Counter(shares[0].teacher for shares in route(teachers, "weights", rows, seed=5))
    for name, config in teachers.items():
        share = config.weight / sum(weights)
        # Five standard deviations of a binomial.
        assert abs(counts[name] - num * share) <= 5 * (num * share * (1 - share)) ** 0.5, (name, counts)


def test_seed_step_and_prompt_each_change_the_draw() -> None:
    teachers = {"a": teacher(), "b": teacher()}

    def drawn(seed: int = 0, step: int = 0, first: int = 0) -> tuple[str, ...]:
        rows = [row(first + prompt, step=step) for prompt in range(64)]
        return tuple(shares[0].teacher for shares in route(teachers, "weights", rows, seed=seed))

    # The last ones would agree if seed, step and prompt were only added.
    assert len({drawn(), drawn(seed=1), drawn(step=1), drawn(first=1)}) == 4


def test_draws_are_the_same_on_every_machine() -> None:
    """Recorded once: a run that goes on must ask the same teachers."""
    rows = [row(prompt, step=2) for prompt in range(12)]
    routes = route({"a": teacher(), "b": teacher(2.0)}, "weights", rows, seed=7)
    assert "".join(shares[0].teacher for shares in routes) == "bbabbbbababa"


def test_a_row_whose_task_nobody_teaches_is_an_error() -> None:
    with pytest.raises(ScheduleError, match="s3-p1-m0 is of task sort, which nobody teaches"):
        route({"a": teacher(1.0, "add")}, "task", [row(0), row(1, task="sort")], seed=1)


def test_plans_worked_by_hand() -> None:
    rows = [row(0, num_tokens=6), row(1, num_tokens=4), row(2, num_tokens=1), row(3, num_tokens=10)]
    a, b, half = (TeacherShare(teacher=name, weight=weight) for name, weight in (("a", 1.0), ("b", 2.0), ("b", 0.5)))
    plans = plan_teachers(rows, [(b,), (a, half), (a,), (a, b)], max_tokens=10)
    assert plans == (
        TeacherPlan(teacher="a", rows=(1, 2), weights=(1.0, 1.0)),
        TeacherPlan(teacher="a", rows=(3,), weights=(1.0,)),
        TeacherPlan(teacher="b", rows=(0, 1), weights=(2.0, 0.5)),
        TeacherPlan(teacher="b", rows=(3,), weights=(2.0,)),
    )
    assert plans[0].micro_batch == MicroBatchPlan(rows=(1, 2))


@given(cases)
def test_every_share_is_in_exactly_one_plan(
    case: tuple[Routing, dict[str, TeacherConfig], list[TrajectoryRow]],
) -> None:
    routing, teachers, rows = case
    routes = route(teachers, routing, rows, seed=1)
    plans = plan_teachers(rows, routes, max_tokens=MAX_TOKENS)
    planned = [
        (plan.teacher, index, weight) for plan in plans for index, weight in zip(plan.rows, plan.weights, strict=True)
    ]
    shared = [(share.teacher, index, share.weight) for index, shares in enumerate(routes) for share in shares]
    assert planned == sorted(shared)
    assert all(plan.rows and sum(rows[index].num_tokens for index in plan.rows) <= MAX_TOKENS for plan in plans)
    loads = [name for name, _ in itertools.groupby(plan.teacher for plan in plans)]
    assert loads == sorted({share.teacher for shares in routes for share in shares})


@given(steps())
def test_one_teacher_of_all_is_packed_as_training_without_teachers(rows: list[TrajectoryRow]) -> None:
    plans = plan_teachers(rows, route({"a": teacher()}, "all", rows, seed=1), max_tokens=MAX_TOKENS)
    assert tuple(plan.micro_batch for plan in plans) == plan_micro_batches(rows, MAX_TOKENS)


def test_a_trajectory_larger_than_a_micro_batch_is_refused() -> None:
    rows = [row(0), row(1, num_tokens=31)]
    with pytest.raises(BatchError, match=r"s3-p1-m0 has 31 tokens; a micro-batch holds 30"):
        plan_teachers(rows, route({"a": teacher()}, "all", rows, seed=1), max_tokens=MAX_TOKENS)


def test_routes_and_rows_of_two_steps_do_not_pass() -> None:
    rows = [row(0), row(1)]
    routes = route({"a": teacher()}, "all", rows, seed=1)
    for given_rows, given_routes in ((rows[:1], routes), (rows, routes[:1])):
        with pytest.raises(ValueError, match="argument"):
            plan_teachers(given_rows, given_routes, max_tokens=MAX_TOKENS)


@pytest.mark.parametrize(
    ("routing", "teachers", "message"),
    [
        ("task", {"a": teacher(1.0, "add")}, "nobody teaches prove, sort; .*teachers.NAME.tasks"),
        ("task", {"a": teacher(1.0, *TASKS), "b": teacher()}, r"teachers.b.tasks is empty; .*routing=weights"),
        (
            "task",
            {"a": teacher(1.0, *TASKS, "adds")},
            "teachers.a.tasks names adds; the tasks of this run are add, sort, prove",
        ),
        ("task", {"a": teacher(1.0, *TASKS, "add")}, "a task stands there once"),
        (
            "weights",
            {"a": teacher(), "b": teacher(1.0, "add")},
            r"teachers.b.tasks is \['add'\] and routing is 'weights'",
        ),
        ("all", {"a": teacher(1.0, "add")}, r"teachers.a.tasks is \['add'\] and routing is 'all', .*set routing=task"),
        ("all", {"a": teacher(float("inf"))}, "must be a finite number"),
        ("weights", {"a": teacher(1e308), "b": teacher(1e308)}, "and their sum, must be a finite number"),
    ],
)
def test_teachers_that_do_not_fit_the_run_are_refused(
    routing: Routing, teachers: dict[str, TeacherConfig], message: str
) -> None:
    with pytest.raises(ScheduleError, match=message):
        check_routing(teachers, routing, TASKS)


def test_teachers_that_fit_pass() -> None:
    check_routing({"a": teacher(1.0, "add", "sort"), "b": teacher(2.0, "prove", "add")}, "task", TASKS)
    check_routing({"a": teacher(), "b": teacher(0.5)}, "weights", TASKS)
    check_routing({"a": teacher()}, "all", TASKS)
