"""Proves: a replica that is killed at any event, at every token index and at random instants, over and over, delivers
the undisturbed bits: no token that left it is lost, none is drawn again, as a ledger in another process counts. Builds
that publish too early, restart from the prompt or draw the tail with another key fail the same drill.

Real processes, real SIGKILL, the product's engine and log (fdatasync) on the tiny model; one request with tools, routes
and kept sets. Not here: Ray (test_drill.py), power cuts.
"""

import itertools
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollforward.rollout.types import Completion
from tests.helpers.lives import Drilled, Kill, Lives

EVENTS = ("append", "appended", "sync", "synced", "token", "publish", "published")
SEEDS = (1, 3, 5, 8, 10)
"""Of requests that take all their turns."""
LIFE_S = 0.5
"""An undisturbed life takes less on a quiet machine."""


@pytest.fixture(scope="module")
def lives() -> Iterator[Lives]:
    with Lives() as started:
        yield started


class Undisturbed:
    """What nobody disturbed, by seed; made when it is asked for."""

    def __init__(self, lives: Lives, root: Path) -> None:
        self._lives, self._root = lives, root
        self._made: dict[int, list[Completion]] = {}

    def __getitem__(self, seed: int) -> list[Completion]:
        if seed not in self._made:
            one = self._lives.drill(self._root / str(seed), [], seed=seed)
            assert (one.kills, one.counts.lost, one.counts.duplicated) == (0, 0, 0)
            assert one.counts.published == sum(completion.num_sampled_tokens for completion in one.completions)
            assert len(one.completions[0].turns) > 1, "a turn leaves before its completion"
            assert one.completions[0].routes is not None
            assert one.completions[0].kept is not None
            self._made[seed] = one.completions
        return self._made[seed]


@pytest.fixture(scope="module")
def undisturbed(lives: Lives, tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    return Undisturbed(lives, tmp_path_factory.mktemp("undisturbed"))


def _faults(drilled: Drilled, undisturbed: list[Completion]) -> dict[str, int]:
    """What is not as it should be, by name; empty for a build that keeps its promises."""
    counts = drilled.counts
    found = {
        "lost at a kill": drilled.lost_at_kills,
        "other tokens logged": drilled.foreign_at_kills,
        "lost": counts.lost,
        "duplicated": counts.duplicated,
        "unequal": counts.unequal,
        "begun again": counts.attempts,
        "other bits": sum(a != b for a, b in zip(drilled.completions, undisturbed, strict=True)),
    }
    return {name: number for name, number in found.items() if number}


def test_killed_at_every_token_index(lives: Lives, undisturbed: Undisturbed, tmp_path: Path) -> None:
    """Each life draws one step and is killed when it is durable."""
    seed = SEEDS[0]
    expected = undisturbed[seed]
    drilled = lives.drill(tmp_path, [Kill("token")] * 100, undisturbed=expected, seed=seed)
    assert _faults(drilled, expected) == {}
    first, *others = (completion.num_sampled_tokens for completion in expected)
    assert drilled.kills >= first + max(others), "the first is asked alone, the others two at a time"


@pytest.mark.parametrize("event", sorted(set(EVENTS) - {"token"}))
def test_killed_at_an_event(lives: Lives, undisturbed: Undisturbed, tmp_path: Path, event: str) -> None:
    """The same event of life after life, ever later; the last one is of what the log answers."""
    seed = SEEDS[0]
    numbers = (0, 1, 1, 2, 3) if event.startswith("publish") else (0, 2, 4, 7, 13)
    drilled = lives.drill(tmp_path, [Kill(event, n) for n in numbers], undisturbed=undisturbed[seed], seed=seed)
    assert _faults(drilled, undisturbed[seed]) == {}
    assert drilled.kills >= 3


def test_killed_at_random_instants(lives: Lives, undisturbed: Undisturbed, tmp_path: Path, seed: int) -> None:
    draws = random.Random(seed)
    kills = [Kill(after_s=draws.random() * LIFE_S) for _ in range(10)]
    drilled = lives.drill(tmp_path, kills, undisturbed=undisturbed[SEEDS[0]], seed=SEEDS[0], sync_s=0.003)
    assert _faults(drilled, undisturbed[SEEDS[0]]) == {}
    assert drilled.kills > 0


def test_a_build_that_publishes_before_it_is_durable_fails(
    lives: Lives, undisturbed: Undisturbed, tmp_path: Path
) -> None:
    """Killed when a turn has left while the log still syncs what came before. Draws are keyed, so the bits are the same
    in the end: only the ledger knows that what had left was gone and was drawn again."""
    expected = undisturbed[SEEDS[0]]
    plan = [Kill("published", number, hangs=True) for number in (0, 1)]
    drilled = lives.drill(tmp_path, plan, undisturbed=expected, build="early", seed=SEEDS[0])
    assert drilled.kills == len(plan)
    assert _faults(drilled, expected).keys() == {"lost at a kill", "duplicated"}


@pytest.mark.parametrize("build", ["prompt", "tail"])
def test_a_build_that_draws_anew_fails(lives: Lives, undisturbed: Undisturbed, tmp_path: Path, build: str) -> None:
    """Killed after the first turn of the first request has left, and some tokens later."""
    expected = undisturbed[SEEDS[0]]
    plan = [Kill("published"), Kill("token", 3), Kill("token", 3)]
    drilled = lives.drill(tmp_path, plan, undisturbed=expected, build=build, seed=SEEDS[0])
    found = _faults(drilled, expected)
    assert drilled.kills == len(plan)
    assert found.keys() >= {"other tokens logged", "other bits"}
    if build == "prompt":
        assert found.keys() >= {"lost", "begun again"}, "what was said to the tool is not what the request says now"


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_killed_nine_hundred_times(lives: Lives, undisturbed: Undisturbed, tmp_path: Path, seed: int) -> None:
    """Every token index of every request as the first death and as one of many; then any event and any instant."""
    draws = random.Random(seed)
    plans: list[tuple[int, list[Kill]]] = [(asked, [Kill("token")] * 100) for asked in SEEDS]
    plans += [(SEEDS[0], [Kill("token", number)]) for number in range(60)]
    kills = runs = 0
    for asked, plan in itertools.chain(plans, _random_plans(draws)):
        directory = tmp_path / str(runs)
        drilled = lives.drill(
            directory, plan, undisturbed=undisturbed[asked], seed=asked, sync_s=draws.choice((0.0, 0.0, 0.004))
        )
        assert _faults(drilled, undisturbed[asked]) == {}, (directory, plan)
        kills, runs = kills + drilled.kills, runs + 1
        if kills >= 900 and runs > len(plans):
            break


def _random_plans(draws: random.Random) -> Iterator[tuple[int, list[Kill]]]:
    while True:
        plan = [
            Kill(after_s=draws.random() * LIFE_S)
            if draws.random() < 0.4
            else Kill(event := draws.choice(EVENTS), draws.randrange(3 if event.startswith("publish") else 12))
            for _ in range(25)
        ]
        yield draws.choice(SEEDS), plan
